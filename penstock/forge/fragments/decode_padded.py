"""Decode: one attention for all rows, over as many keys as the longest has."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.forge.fragments.forward_torch import Model, compute_logits, on_device, run_layers
from penstock.forge.fragments.rope_pairs import rotate


def run_tokens(model: Model, tokens: Tensor, slots: list[int], positions: list[int]) -> Tensor:
    """One token for each row: tokens [R] -> logits [R, V]"""
    cache, device, longest = model.cache, tokens.device, max(positions) + 1
    rows, places = on_device(slots, device), on_device(positions, device)
    angles = model.rope[places]
    keys = torch.arange(longest, device=device)
    is_seen = (keys <= places[:, None])[:, None, None]  # [R, 1, 1, longest]
    is_grouped = model.shape.num_heads != model.shape.num_kv_heads

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key = rotate(query, angles), rotate(key, angles)
        cache.keys[layer, rows, :, places] = key
        cache.values[layer, rows, :, places] = value
        keys = cache.keys[layer, rows, :, :longest]  # [R, Hkv, longest, D]
        values = cache.values[layer, rows, :, :longest]
        mixed = F.scaled_dot_product_attention(
            query[:, :, None], keys, values, attn_mask=is_seen, enable_gqa=is_grouped
        )
        return mixed.flatten(1)

    return compute_logits(model, run_layers(model, tokens, attend))
