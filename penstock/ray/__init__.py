"""Penstock on Ray Serve: many machines behind one address. `serve run penstock.ray:app model=...`

A *door* (the ingress) accepts HTTP and sends a request to an *engine*: a replica that Ray places,
scales, checks and replaces, with a complete `penstock serve` inside. The router between them is
prefix-aware.
"""

from __future__ import annotations

from typing import Any

__all__ = ["app"]


def app(settings: dict[str, Any]) -> Any:
    """A Ray Serve application of the settings of `RaySettings`."""
    from penstock.ray.application import build

    return build(settings)
