"""Loads a model for an engine, and decides where its experts are: all on the device, or some in
slots over RAM and files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.layers.mlp import SparseMLP
from penstock.models.source import ModelSource, is_converted
from penstock.offload.dense_layers import offloaded_names, use_lanes
from penstock.offload.device_slots import DeviceSlots
from penstock.offload.expert_log import ExpertLog
from penstock.offload.host import (
    FiledExperts,
    StackedExperts,
)
from penstock.offload.in_ram import give_device_slots, pin_weight
from penstock.offload.layout import ExpertLayout, stack_tensors
from penstock.offload.load_files import Files, checked_ram, load_from, open_converted, open_in_place
from penstock.offload.spill import spilled
from penstock.offload.store import ExpertStore, sparse_layers, stack_names, use_slots
from penstock.ops import Weight
from penstock.ops.weight import map_part
from penstock.parallel.ranks import ALONE, Ranks
from penstock.progress import OnPhase, Phase
from penstock.weights.load import load_model


def load_with_experts(
    source: ModelSource,
    config: EngineConfig,
    device: str,
    on_phase: OnPhase,
    with_drafting_head: bool = False,
    ranks: Ranks = ALONE,
) -> nn.Module:
    """The model of a source on a device, or a rank's shard of it, ready to run."""
    refuse_ranks(source, config, ranks)
    check_offload_layers(source, config, torch.device(device))
    files: Files | None = None
    if is_converted(source.path) and not config.random_weights:
        files = open_converted(source, config, torch.device(device))
    elif config.expert_ram is not None and not config.random_weights:
        files = open_in_place(source, config, torch.device(device))
    if files is not None:
        model = load_from(files, source, config, on_phase, device, with_drafting_head)
    else:
        load = partial(
            load_model,
            source,
            device=device,
            dtype=config.dtype,
            random_weights=config.random_weights,
            seed=config.weights_seed,
            on_phase=on_phase,
            quantization=config.quantization,
            with_drafting_head=with_drafting_head,
            ranks=ranks,
            alike_experts=config.alike_experts,
        )
        if config.offload_layers is not None:
            model = _load_with_lanes(load, config)
        elif config.expert_cache is None and config.expert_ram is not None:
            raise ConfigError(
                f"expert_ram is {config.expert_ram}, and expert_cache is not set",
                "Random experts are in files only if the device has slots for some of them.",
                "Set --expert-cache, too.",
            )
        elif config.expert_cache is None:
            model = load()
        elif config.expert_ram is not None:
            model = load(find_host_weights=stack_names, keep_on_host=_move_to_ram)
            _use_spilled(model, config)
        elif torch.device(device).type == "cuda":
            model = load(find_host_weights=stack_names, keep_on_host=pin_weight)
            mlps = _sparse_layers_of(model, config)
            give_device_slots(model, mlps, config, config.expert_cache_bytes or 0)
        else:
            model = load(find_host_weights=stack_names)
            _move_to_slots(model, config)
    _check_misses(model, config)
    _limit_experts(model, config)
    _open_log(model, config)
    if experts := describe_experts(model, config):
        on_phase(Phase("weights", experts, 1.0))
    return model


def check_offload_layers(source: ModelSource, config: EngineConfig, device: torch.device) -> None:
    if config.offload_layers is None:
        return
    reasons = {
        "the engine runs on a CPU, where all layers are in RAM": device.type != "cuda",
        "tp is more than 1": config.tp > 1,
        "expert_ram is set": config.expert_ram is not None,
        "the model is a converted one": is_converted(source.path),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(
                f"offload_layers is {config.offload_layers}, but {reason}", todo="Omit it."
            )


def _load_with_lanes(load: Callable[..., nn.Module], config: EngineConfig) -> nn.Module:
    """Dense weights of some layers stay in RAM, and experts follow --expert-cache."""
    count = config.offload_layers or 0
    has_slots = config.expert_cache is not None

    def on_host(model: nn.Module) -> list[str]:
        stacks = stack_names(model)
        return offloaded_names(model, count, but=stacks) + (stacks if has_slots else [])

    model: Any = load(find_host_weights=on_host, keep_on_host=pin_weight)
    model.dense_lanes = use_lanes(model, offloaded_names(model, count, but=stack_names(model)))
    if has_slots:
        mlps = _sparse_layers_of(model, config)
        give_device_slots(model, mlps, config, config.expert_cache_bytes or 0)
    loaded: nn.Module = model
    return loaded


def _check_misses(model: nn.Module, config: EngineConfig) -> None:
    store = getattr(model, "expert_store", None)
    if config.expert_misses == "cpu" and isinstance(store, ExpertStore):
        reason = "experts are in files" if store.device.type == "cuda" else "there is no GPU"
        raise ConfigError(
            f"expert_misses is cpu, but {reason}",
            "The CPU computes experts that a GPU misses, if all of them are in RAM.",
            "Omit it.",
        )


def _open_log(model: nn.Module, config: EngineConfig) -> None:
    if config.expert_log is None:
        return
    store = getattr(model, "expert_store", None)
    if store is None:
        raise ConfigError(
            f"expert_log is {config.expert_log}, but all experts are on the device",
            "They are chosen there, and the host does not see which.",
            "Set --expert-cache smaller than their size, or omit --expert-log.",
        )
    num_experts = max(mlp.router.shape[0] for mlp in sparse_layers(model).values())
    store.log = ExpertLog(Path(config.expert_log).expanduser(), store.num_layers, num_experts)


def describe_experts(model: Any, config: EngineConfig) -> str:
    """What is unusual about its experts, for the start-up log; "": nothing."""
    said = []
    store: ExpertStore | DeviceSlots | None = getattr(model, "expert_store", None)
    if store is not None:
        size = f"{store.num_bytes / 1e9:.2f} GB"
        said.append(
            f"{store.num_slots:,} of {store.num_experts:,} experts in slots on {model.device} "
            f"({size}), the others in {store.host.place}"
        )
        if isinstance(store, DeviceSlots) and store.products is not None:
            said.append(store.products.describe())
    if config.offload_layers is not None:
        size = model.dense_lanes.host_bytes / 1e9
        said.append(
            f"{config.offload_layers} layers in RAM ({size:.2f} GB), which every step copies to "
            "the GPU: slow"
        )
    if config.experts_per_token is not None:
        said.append(f"{config.experts_per_token} experts per token, by --experts-per-token")
    return "\n".join(said)


def without_graphs(config: EngineConfig, store: ExpertStore | DeviceSlots) -> EngineConfig:
    """A graph can neither wait for a file nor log its experts."""
    if isinstance(store, DeviceSlots) and store.log is None:
        return config
    if config.graphs:
        raise ConfigError(
            "graphs is on, but experts are in files, or logged",
            "A captured step can neither read a file nor write a log.",
            "Omit --graphs, or --expert-ram and --expert-log.",
        )
    return dataclasses.replace(config, graphs=False)


def refuse_ranks(source: ModelSource, config: EngineConfig, ranks: Ranks) -> None:
    is_asked = config.expert_cache is not None or config.expert_ram is not None
    is_kept_elsewhere = is_asked or is_converted(source.path)
    if is_kept_elsewhere and not ranks.is_alone:
        raise ConfigError(
            f"tp is {ranks.size}, but not all experts are on the device",
            "A rank reads its part of every expert once, when it starts.",
            "Use --tp 1, or an unconverted model without --expert-cache and --expert-ram.",
        )


def _limit_experts(model: nn.Module, config: EngineConfig) -> None:
    count = config.experts_per_token
    if count is None:
        return
    mlps = list(sparse_layers(model).values())
    if not mlps or count > mlps[0].experts_per_token:
        trained = mlps[0].experts_per_token if mlps else 0
        raise ConfigError(
            f"experts_per_token is {count}",
            f"A token of this model uses {trained}." if mlps else "This model has no experts.",
            "Give less, or omit it.",
        )
    for mlp in mlps:
        mlp.experts_per_token = count


def _move_to_ram(weight: Weight) -> None:
    if weight.parts:
        weight.parts = tuple(map_part(part, Tensor.cpu) for part in weight.parts)
    else:
        weight.values = nn.Parameter(weight.values.data.cpu(), requires_grad=False)


def _use_spilled(model: Any, config: EngineConfig) -> None:
    """Random experts in temporary files that exist as long as the engine."""
    mlps, kind = _sparse_layers_of(model, config), model.device.type
    with spilled(mlps, kind, model.dtype) as index:
        host = FiledExperts(index, checked_ram(index, config), pin_memory=kind == "cuda")
    use_slots(model, mlps, host, config.expert_cache_bytes or 0)


def _sparse_layers_of(model: nn.Module, config: EngineConfig) -> list[SparseMLP]:
    mlps = list(sparse_layers(model).values())
    if not mlps:
        raise ConfigError(
            f"expert_cache is {config.expert_cache}, but the model has no experts",
            todo="Omit it.",
        )
    return mlps


def _move_to_slots(model: Any, config: EngineConfig) -> None:
    """The stacks of a loaded model stay where they are; a CPU gets slots for a few of them."""
    mlps = _sparse_layers_of(model, config)
    layouts, stacks = [], []
    for mlp in mlps:
        layouts.append(ExpertLayout.of(mlp.gate_up, mlp.down))
        stacks.append(stack_tensors([mlp.gate_up, mlp.down]))
        for name in ("gate_up", "down"):
            shape = getattr(mlp, name).shape
            setattr(mlp, name, Weight(torch.empty(shape, dtype=model.dtype, device="meta")))
    use_slots(model, mlps, StackedExperts(layouts, stacks), config.expert_cache_bytes or 0)
