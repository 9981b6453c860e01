"""Decode: the rows share every product, and attend one by one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.forge.fragments.forward_torch import Model, compute_logits, on_device, run_layers
from penstock.forge.fragments.rope_pairs import rotate


def run_tokens(model: Model, tokens: Tensor, slots: list[int], positions: list[int]) -> Tensor:
    """One token for each row: tokens [R] -> logits [R, V]"""
    cache = model.cache
    angles = model.rope[on_device(positions, tokens.device)]
    is_grouped = model.shape.num_heads != model.shape.num_kv_heads

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key = rotate(query, angles), rotate(key, angles)
        mixed = torch.empty_like(query)  # [R, Hq, D]
        for row, (slot, position) in enumerate(zip(slots, positions)):
            cache.keys[layer, slot, :, position] = key[row]
            cache.values[layer, slot, :, position] = value[row]
            keys = cache.keys[layer, slot, :, : position + 1]  # [Hkv, L, D]
            values = cache.values[layer, slot, :, : position + 1]
            seen = F.scaled_dot_product_attention(
                query[row, :, None], keys, values, enable_gqa=is_grouped
            )
            mixed[row] = seen.squeeze(1)
        return mixed.flatten(-2)

    return compute_logits(model, run_layers(model, tokens, attend))
