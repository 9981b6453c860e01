"""Decode: two batched products for all rows; the queries of a key head are a matrix's rows."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.forge.fragments.forward_torch import Model, compute_logits, on_device, run_layers
from penstock.forge.fragments.rope_pairs import rotate


def run_tokens(model: Model, tokens: Tensor, slots: list[int], positions: list[int]) -> Tensor:
    """One token for each row: tokens [R] -> logits [R, V]

    The queries that share a key head are the rows of one matrix: no key is read twice. Adjacent
    slots are read in place, others are gathered.
    """
    shape, cache, device = model.shape, model.cache, tokens.device
    longest = max(positions) + 1
    rows, places = on_device(slots, device), on_device(positions, device)
    is_run = slots == list(range(slots[0], slots[0] + len(slots)))
    looked_at = slice(slots[0], slots[0] + len(slots)) if is_run else rows
    angles = model.rope[places]
    unseen = None  # rows as long as each other see every key
    if min(positions) + 1 < longest:
        unseen = torch.zeros(len(slots), 1, 1, longest, device=device, dtype=cache.keys.dtype)
        unseen.masked_fill_(
            torch.arange(longest, device=device) > places[:, None, None, None], -torch.inf
        )
    scale = shape.head_dim**-0.5

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key = rotate(query, angles), rotate(key, angles)
        cache.keys[layer, rows, :, places] = key
        cache.values[layer, rows, :, places] = value
        keys = cache.keys[layer, looked_at, :, :longest]  # [R, Hkv, longest, D]
        values = cache.values[layer, looked_at, :, :longest]
        groups = query.unflatten(1, (shape.num_kv_heads, -1)) * scale  # [R, Hkv, G, D]
        scores = torch.matmul(groups, keys.transpose(2, 3))
        if unseen is not None:
            scores += unseen
        return torch.matmul(scores.softmax(-1), values).flatten(1)

    return compute_logits(model, run_layers(model, tokens, attend))
