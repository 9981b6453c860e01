"""The device memory behind pages and slots: two tensors per layer, allocated once and never
moved.
"""

from __future__ import annotations

import torch

from penstock.layers.inputs import KVCache, LayerCache, StateCache
from penstock.types import CacheSpec, KVSpec


def allocate_caches(
    specs: list[CacheSpec],
    *,
    num_pages: int,
    page_size: int,
    num_slots: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    device: torch.device,
) -> list[LayerCache]:
    caches: list[LayerCache] = []
    for spec in specs:
        if isinstance(spec, KVSpec):
            shape = (num_pages, page_size, spec.num_kv_heads, spec.head_dim)
            caches.append(
                KVCache(
                    keys=torch.zeros(shape, dtype=dtype, device=device),
                    values=torch.zeros(shape, dtype=dtype, device=device),
                )
            )
        else:
            state_shape = (num_slots, spec.num_value_heads, spec.key_dim, spec.value_dim)
            conv_shape = (num_slots, spec.conv_width, spec.conv_channels)
            caches.append(
                StateCache(
                    recurrent=torch.zeros(state_shape, dtype=state_dtype, device=device),
                    conv=torch.zeros(conv_shape, dtype=dtype, device=device),
                )
            )
    return caches
