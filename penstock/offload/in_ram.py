"""Gives a GPU slots over experts that are all in pinned RAM: those of a loaded model, or those of
files, if they fit in RAM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.layers.mlp import SparseMLP
from penstock.offload.device_slots import use_device_slots
from penstock.offload.files import Index
from penstock.offload.host import FiledExperts
from penstock.offload.host_products import can_ask, can_multiply
from penstock.offload.layout import ExpertLayout, stack_tensors
from penstock.offload.pinned import large_addresses, new_pinned, pinned_copy, unpin
from penstock.ops import Weight
from penstock.ops.cpu.memory import ram_sizes
from penstock.ops.weight import map_part

RAM_SHARE = 0.8  # of free RAM, for experts from files


def pin_weight(weight: Weight) -> None:
    """Moves it to pinned RAM."""
    if weight.parts:
        weight.parts = tuple(map_part(part, pinned_copy) for part in weight.parts)
    else:
        weight.values = nn.Parameter(pinned_copy(weight.values.data), requires_grad=False)


def give_device_slots(
    model: Any, mlps: Sequence[SparseMLP], config: EngineConfig, slot_bytes: int
) -> None:
    """The pinned stacks of layers stay in RAM; a GPU gets slots that it manages itself, or all
    experts, if they fit.
    """
    layouts = [ExpertLayout.of(mlp.gate_up, mlp.down) for mlp in mlps]
    stacks = [stack_tensors([mlp.gate_up, mlp.down]) for mlp in mlps]
    total = sum(tensor.nbytes for stack in stacks for tensor in stack)
    if slot_bytes >= total:
        for mlp, layout, stack in zip(mlps, layouts, stacks, strict=True):
            mlp.gate_up, mlp.down, own = layout.new_slots(len(stack[0]), model.dtype, model.device)
            for target, source in zip(own, stack, strict=True):
                target.copy_(source, non_blocking=True)
        unpin(large_addresses(tensor for stack in stacks for tensor in stack))
        return
    can_compute = can_ask(model.device) and all(
        can_multiply(mlp.gate_up, mlp.down, model.dtype) for mlp in mlps
    )
    if config.expert_misses == "cpu" and not can_compute:
        raise ConfigError(
            "expert_misses is cpu, but the CPU has no kernel for these experts",
            "It supports 4-bit weights with a group size of 128 columns or more and no "
            "zero points, and needs a C++ compiler and NVRTC.",
            "Use --expert-misses fetch, or --quantization int4.",
        )
    store = use_device_slots(model, mlps, layouts, stacks, slot_bytes)
    if config.expert_misses != "fetch" and can_compute:
        store.use_cpu(config.expert_misses)
    model.expert_store = store


def fits_ram(index: Index, budget: int | None) -> bool:
    """Whether all experts from files should be in RAM: within the budget, or what is free."""
    if budget is None:
        budget = int(RAM_SHARE * ram_sizes()[1])
    return index.num_bytes <= budget


def read_into_ram(
    mlps: Sequence[SparseMLP],
    index: Index,
    host: FiledExperts,
    dtype: torch.dtype,
    tell: Callable[[str, float], None],
) -> None:
    """The layers' stacks, in pinned RAM, with unquantized values in the model's dtype."""
    for layer, mlp in enumerate(mlps):
        records, layout = index.layers[layer], host.layout_of(layer)
        tell(records.module, layer / len(mlps))
        stacks = [
            new_pinned(
                (records.num_experts, *field.shape), dtype if field.is_plain else field.dtype
            )
            for field in layout.fields
        ]
        for (_, expert), tensors in host.read(layer, range(records.num_experts), lambda: None):
            for stack, tensor in zip(stacks, tensors, strict=True):
                stack[expert].copy_(tensor)
        mlp.gate_up, mlp.down = layout.stacks_of(stacks, dtype)
