"""Penstock: an LLM inference engine for hybrid Gated-DeltaNet models, written to be read.

The public names are imported when first used, so that `penstock --help` never waits for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.engine.engine import Engine
    from penstock.engine.logits_engine import create_engine
    from penstock.llm import LLM
    from penstock.types import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "Engine", "SamplingParams", "create_engine"]

_HOMES = {
    "Engine": "penstock.engine.engine",
    "LLM": "penstock.llm",
    "SamplingParams": "penstock.types",
    "create_engine": "penstock.engine.logits_engine",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
