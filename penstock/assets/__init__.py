"""The model that comes with Penstock: a small trained Qwen3.5-MoE, so that everything runs at once.

How it was made is in training/, what it can do in its model card, penstock-tiny/README.md.
"""

from __future__ import annotations

from pathlib import Path

MODEL_NAME = "penstock-tiny"
NO_THINK_TEMPLATE = Path(__file__).parent / "no_think.jinja"  # of the Qwen3.5 family
DOCS_PAGE = Path(__file__).parent / "docs.html"  # which shows the API to people


def default_model() -> Path:
    """The folder of the embedded model."""
    return Path(__file__).parent / MODEL_NAME
