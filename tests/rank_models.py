"""Models for several ranks, and helpers to compare their results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.ops.weight import Weight
from small_models import HYBRID_DENSE, HYBRID_MOE, LLAMA, prompt
from step_inputs import ByHand

LLAMA_4 = {**LLAMA, "num_attention_heads": 8, "num_key_value_heads": 2}
QWEN3_MOE = {
    **LLAMA_4,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
QWEN2 = {**LLAMA_4, "model_type": "qwen2", "vocab_size": 321}  # biases; a vocabulary of odd size
NEXT = {
    **{key: value for key, value in HYBRID_MOE.items() if key != "layer_types"},
    "model_type": "qwen3_next",
    "intermediate_size": 96,
    "mtp_num_hidden_layers": 0,
}
MTP = {**HYBRID_MOE, "mtp_num_hidden_layers": 1}
WIDE = {**HYBRID_DENSE, "num_key_value_heads": 1, "linear_num_key_heads": 1}
FAMILIES = {
    "llama": LLAMA_4,
    "qwen2": QWEN2,
    "qwen3_moe": QWEN3_MOE,
    "hybrid dense": HYBRID_DENSE,
    "hybrid moe": MTP,
    "qwen3_next": NEXT,
    "fewer KV and key heads than ranks": WIDE,
}


@torch.inference_mode()
def logits_of(model: Any) -> Tensor:
    """Logits of two prompts in one step, one of them in chunks, and of decodes of both."""
    by_hand = ByHand(model)
    first, second = list(prompt(70)), list(prompt(33, seed=1))
    found = by_hand.run(by_hand.row(0, first[:65]), by_hand.row(1, second))
    found += by_hand.run(by_hand.row(0, first[65:], 65), by_hand.row(1, [7], 33))
    found += by_hand.run(by_hand.row(0, [9], 70), by_hand.row(1, [8], 34))
    return torch.cat(found)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5


def values_of(model: Any) -> dict[str, Tensor]:
    weights = {
        name: module.dequantize().float()
        for name, module in model.named_modules()
        if isinstance(module, Weight)
    }
    plain = {
        name: values.float()
        for name, values in model.named_parameters()
        if not name.endswith(".values")
    }
    return {**weights, **plain}
