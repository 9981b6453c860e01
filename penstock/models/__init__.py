"""Finds the file that builds an architecture, by the model_type in config.json. One file per
family.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from penstock.parallel.ranks import Ranks

# model_type of config.json -> module with `build(config, dtype, device, with_drafting_head, ranks)`
ARCHITECTURES: Mapping[str, str] = {
    "llama": "penstock.models.llama",
    "mistral": "penstock.models.llama",
    "qwen2": "penstock.models.llama",
    "qwen3": "penstock.models.llama",
    "qwen3_moe": "penstock.models.llama",
    "tiny_llama": "penstock.models.llama",
    "qwen3_5": "penstock.models.qwen3_5",
    "qwen3_5_text": "penstock.models.qwen3_5",
    "qwen3_5_moe": "penstock.models.qwen3_5",
    "qwen3_5_moe_text": "penstock.models.qwen3_5",
    "qwen3_next": "penstock.models.qwen3_next",
}

TYPO = 0.9  # similarity of a misspelt name; mixtral and mistral have 0.86


def build_model(
    config: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    *,
    with_drafting_head: bool = True,
    ranks: Ranks | None = None,  # None: a single rank
) -> nn.Module:
    """The model that config.json describes, or a rank's shard of it, with uninitialized parameters
    on the device.
    """
    from penstock.parallel.ranks import ALONE
    from penstock.parallel.share import SplitError

    module = importlib.import_module(ARCHITECTURES[model_type_of(config)])
    build = partial(module.build, config, dtype, with_drafting_head=with_drafting_head)
    ranks = ranks or ALONE
    try:
        model: nn.Module = build(device=device, ranks=ranks)
    except SplitError as error:
        raise SplitError(error.what, error.why, _advice(build, ranks)) from error
    return model


def _advice(build: Callable[..., nn.Module], ranks: Ranks) -> str:
    """The largest numbers of ranks, below this one, that the model can be split over."""
    fitting: list[str] = []
    for size in range(ranks.size - 1, 0, -1):
        if len(fitting) < 2 and _can_build(build, size, ranks.whole_experts):
            fitting.insert(0, str(size))
    way_out = ", or omit --ep" if ranks.whole_experts and _can_build(build, ranks.size) else ""
    return f"Use --tp {' or '.join(fitting)}{way_out}."


def _can_build(build: Callable[..., nn.Module], size: int, whole_experts: bool = False) -> bool:
    import torch

    from penstock.parallel.ranks import Ranks
    from penstock.parallel.share import SplitError

    try:
        build(device=torch.device("meta"), ranks=Ranks(0, size, whole_experts=whole_experts))
    except SplitError:
        return False
    return True


def model_type_of(config: Mapping[str, Any]) -> str:
    """The key into ARCHITECTURES: model_type, or what the class in `architectures` implies."""
    names = [config.get("model_type"), *(config.get("architectures") or ())]
    for name in names:
        if isinstance(name, str):
            key = name if name in ARCHITECTURES else _CLASS_NAMES.get(name)
            if key is not None:
                return key
    seen = next((name for name in names if isinstance(name, str)), None)
    raise CheckpointError(
        f"The architecture {seen!r} is not supported" if seen else "config.json has no model_type",
        f"Supported are {', '.join(ARCHITECTURES)}.",
        (_suggestion(seen) or "Use a model of one of these architectures.")
        if seen
        else "Add the model_type of the architecture.",
    )


def _suggestion(name: str) -> str:
    """Suggests a name for a misspelt one; a different number or word is another architecture."""

    def spelling(name: str) -> str:
        return re.sub(r"[^a-z0-9]", "", name.lower())

    known = {spelling(key): key for key in ARCHITECTURES}
    digits = re.sub(r"\D", "", name)
    for match in difflib.get_close_matches(spelling(name), known, cutoff=TYPO):
        if re.sub(r"\D", "", match) == digits:
            return f"Did you mean {known[match]!r}?"
    return ""


_CLASS_NAMES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3ForSequenceClassification": "qwen3",
    "Qwen3Model": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
}
