"""Allocates the device memory of pages and slots: two or three tensors per layer, allocated once
and never moved.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from penstock.config import EngineConfig
from penstock.layers.inputs import KVCache, LayerCache, StateCache
from penstock.ops import MOST_LATE, Backlog, Journal
from penstock.ops.cpu.memory import zeros_on_demand
from penstock.types import CacheSpec, KVSpec, StateSpec

_KV_DTYPES = {
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "int8": torch.int8,
}


def find_kv_dtype(name: str, model_dtype: torch.dtype) -> torch.dtype:
    """Resolves `--kv-dtype` for a model."""
    return model_dtype if name == "auto" else _KV_DTYPES[name]


def cache_specs(model: Any, config: EngineConfig, *, is_gpu: bool | None = None) -> list[CacheSpec]:
    """The caches of the model's layers, then of its drafting head if that drafts. Draft tokens need
    extra entries in the convolutions' ring buffers. On a GPU (None: where the model is) states lack
    up to a few tokens, unless their bits must not depend on when they are written.
    """
    speculation = config.speculation
    is_gpu = model.device.type == "cuda" if is_gpu is None else is_gpu
    num_late = MOST_LATE if is_gpu and not config.deterministic else 0
    specs = [
        dataclasses.replace(
            spec, conv_width=spec.conv_width + speculation.num_drafts, num_late=num_late
        )
        if isinstance(spec, StateSpec)
        else spec
        for spec in model.cache_specs()
    ]
    head = getattr(model, "mtp", None) if speculation.kind == "mtp" else None
    return specs if head is None else [*specs, head.cache_spec]


def journal_bytes(specs: list[CacheSpec], num_drafts: int) -> int:
    """Bytes per row."""
    sizes = [
        spec.num_value_heads * (spec.key_dim + spec.value_dim + 3)
        for spec in specs
        if isinstance(spec, StateSpec)
    ]
    return 4 * num_drafts * sum(sizes)


def allocate_caches(
    specs: list[CacheSpec],
    *,
    num_pages: int,
    page_size: int,
    num_slots: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    state_dtype: torch.dtype,
    device: torch.device,
    num_rows: int = 0,  # of journals
    num_drafts: int = 0,
) -> list[LayerCache]:
    zeros = functools.partial(zeros_on_demand, device=device)
    caches: list[LayerCache] = []
    has_scales = kv_dtype.itemsize == 1
    for spec in specs:
        if isinstance(spec, KVSpec):
            shape = (num_pages, page_size, spec.num_kv_heads, spec.head_dim)
            caches.append(
                KVCache(
                    keys=zeros(shape, dtype=kv_dtype),
                    values=zeros(shape, dtype=kv_dtype),
                    scales=zeros((2, *shape[:3]), dtype=torch.float32) if has_scales else None,
                )
            )
        else:
            state_shape = (num_slots, spec.num_value_heads, spec.key_dim, spec.value_dim)
            conv_shape = (num_slots, spec.conv_width, spec.conv_channels)
            backlog = Backlog.empty(*state_shape, spec.num_late, device) if spec.num_late else None
            caches.append(
                StateCache(
                    recurrent=zeros(state_shape, dtype=state_dtype),
                    conv=zeros(conv_shape, dtype=dtype),
                    journal=_new_journal(spec, num_rows, num_drafts, device),
                    backlog=backlog,
                )
            )
    return caches


def _new_journal(
    spec: StateSpec, num_rows: int, num_drafts: int, device: torch.device
) -> Journal | None:
    if not num_drafts:
        return None
    places = (num_rows, num_drafts)
    return Journal(
        keys=torch.zeros(*places, spec.num_value_heads, spec.key_dim, device=device),
        values=torch.zeros(*places, spec.num_value_heads, spec.value_dim, device=device),
        gates=torch.zeros(*places, 3, spec.num_value_heads, device=device),
    )
