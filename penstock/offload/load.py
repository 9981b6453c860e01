"""Loads a model for an engine, and decides where its experts live: all on the device, or some in
slots over RAM and files.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.config import EngineConfig
from penstock.errors import CapacityError, CheckpointError, ConfigError
from penstock.layers.mlp import SparseMLP
from penstock.models import build_model
from penstock.models.source import ModelSource, is_converted
from penstock.offload.convert import Conversion
from penstock.offload.dense_layers import offloaded_names, use_lanes
from penstock.offload.device_slots import DeviceSlots
from penstock.offload.expert_log import ExpertLog
from penstock.offload.files import DENSE, Index, LayerRecords, read_index
from penstock.offload.host import (
    FiledExperts,
    HostExperts,
    LayerReader,
    StackedExperts,
    least_ram_bytes,
)
from penstock.offload.in_place import CheckpointLayer
from penstock.offload.in_ram import fits_ram, give_device_slots, pin_weight, read_into_ram
from penstock.offload.layout import ExpertLayout, StoredMatrix, stack_tensors
from penstock.offload.spill import spill
from penstock.offload.store import ExpertStore, attach, least_slots
from penstock.ops import Weight
from penstock.ops.weight import deferred_weights, map_part
from penstock.parallel.ranks import ALONE, Ranks
from penstock.progress import OnPhase, Phase
from penstock.weights.checkpoint import list_some
from penstock.weights.load import load_model, resolve_dtype, targets_of, weights_of
from penstock.weights.packing import for_device
from penstock.weights.safetensors_reader import open_safetensors
from penstock.weights.storage_report import Storage, StorageGroup, describe_storage
from penstock.weights.stored import StoredTensor

# Of what is free after the dense weights: the rest is for caches and steps.
DEVICE_SHARE = {"cuda": 0.7, "cpu": 0.5}


def load_with_experts(
    source: ModelSource,
    config: EngineConfig,
    device: str,
    on_phase: OnPhase,
    with_drafting_head: bool = False,
    ranks: Ranks = ALONE,
) -> nn.Module:
    """The model of a source on a device, or a rank's part of it, ready to run."""
    _refuse_ranks(source, config, ranks)
    check_offload_layers(source, config, torch.device(device))
    files: _Files | None = None
    if is_converted(source.path) and not config.random_weights:
        files = _open_converted(source, config, torch.device(device))
    elif config.expert_ram is not None and not config.random_weights:
        files = _open_in_place(source, config, torch.device(device))
    if files is not None:
        model = _load_from(files, source, config, on_phase, device, with_drafting_head)
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
        elif config.expert_cache is None:
            model = load()
        elif config.expert_ram is not None:
            model = load(find_host_weights=_stack_names, keep_on_host=_move_to_ram)
            _use_spilled(model, config)
        elif torch.device(device).type == "cuda":
            model = load(find_host_weights=_stack_names, keep_on_host=pin_weight)
            mlps = _sparse_layers_of(model, config)
            give_device_slots(model, mlps, config, config.expert_cache_bytes or 0)
        else:
            model = load(find_host_weights=_stack_names)
            _move_to_slots(model, config)
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
                f"offload_layers is {config.offload_layers}, and {reason}", todo="Omit it."
            )


def _load_with_lanes(load: Callable[..., nn.Module], config: EngineConfig) -> nn.Module:
    """Dense weights of some layers are in RAM, and experts as --expert-cache says."""
    count = config.offload_layers or 0
    has_slots = config.expert_cache is not None

    def on_host(model: nn.Module) -> list[str]:
        stacks = _stack_names(model)
        return offloaded_names(model, count, but=stacks) + (stacks if has_slots else [])

    model: Any = load(find_host_weights=on_host, keep_on_host=pin_weight)
    model.dense_lanes = use_lanes(model, offloaded_names(model, count, but=_stack_names(model)))
    if has_slots:
        mlps = _sparse_layers_of(model, config)
        give_device_slots(model, mlps, config, config.expert_cache_bytes or 0)
    loaded: nn.Module = model
    return loaded


def _open_log(model: nn.Module, config: EngineConfig) -> None:
    if config.expert_log is None:
        return
    store = getattr(model, "expert_store", None)
    if store is None:
        raise ConfigError(
            f"expert_log is {config.expert_log}, and all experts are on the device",
            "They are chosen there, and the host does not learn which.",
            "Give --expert-cache less than they take, or omit --expert-log.",
        )
    num_experts = max(mlp.router.shape[0] for mlp in sparse_layers(model).values())
    store.log = ExpertLog(Path(config.expert_log).expanduser(), store.num_layers, num_experts)


def describe_experts(model: Any, config: EngineConfig) -> str:
    """What is unusual about its experts, for the start of an engine; "": nothing."""
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
    """A graph cannot wait for a file, nor tell a log what it has fetched."""
    if isinstance(store, DeviceSlots) and store.log is None:
        return config
    if config.graphs:
        raise ConfigError(
            "graphs is on, and experts are in files, or logged",
            "A captured step can neither read a file nor write a log.",
            "Omit --graphs, or --expert-ram and --expert-log.",
        )
    return dataclasses.replace(config, graphs=False)


def _refuse_ranks(source: ModelSource, config: EngineConfig, ranks: Ranks) -> None:
    is_asked = config.expert_cache is not None or config.expert_ram is not None
    is_kept_elsewhere = is_asked or is_converted(source.path)
    if is_kept_elsewhere and not ranks.is_alone:
        raise ConfigError(
            f"tp is {ranks.size}, and experts are not all on the device",
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


def sparse_layers(model: nn.Module) -> dict[str, SparseMLP]:
    return {name: one for name, one in model.named_modules() if isinstance(one, SparseMLP)}


def _stack_names(model: nn.Module) -> list[str]:
    return [f"{name}.{stack}" for name in sparse_layers(model) for stack in ("gate_up", "down")]


def _move_to_ram(weight: Weight) -> None:
    if weight.parts:
        weight.parts = tuple(map_part(part, Tensor.cpu) for part in weight.parts)
    else:
        weight.values = nn.Parameter(weight.values.data.cpu(), requires_grad=False)


def _use_spilled(model: Any, config: EngineConfig) -> None:
    """Random experts, over files that exist as long as the engine does."""
    mlps = _sparse_layers_of(model, config)
    index = spill(mlps, model.device.type, model.dtype)
    host = FiledExperts(index, _checked_ram(index, config), pin_memory=model.device.type == "cuda")
    _use_slots(model, mlps, host, config.expert_cache_bytes or 0)


def _sparse_layers_of(model: nn.Module, config: EngineConfig) -> list[SparseMLP]:
    mlps = list(sparse_layers(model).values())
    if not mlps:
        raise ConfigError(
            f"expert_cache is {config.expert_cache}, and the model has no experts",
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
    _use_slots(model, mlps, StackedExperts(layouts, stacks), config.expert_cache_bytes or 0)


def _use_slots(model: Any, mlps: list[SparseMLP], host: HostExperts, slot_bytes: int) -> None:
    layouts = {(layout := host.layout_of(layer)).key: layout for layer in range(len(mlps))}
    widest = max(layout.slot_bytes(model.dtype) for layout in layouts.values())
    least = len(layouts) * widest * least_slots(mlps, range(len(mlps)), model.device)
    if slot_bytes < least:
        kind = "all experts of a layer" if model.device.type == "cuda" else "the experts of a token"
        raise CapacityError(
            f"{slot_bytes / 1e9:.3g} GB of expert cache are too little",
            f"It must hold {kind}: {least / 1e9:.3g} GB.",
            f"Set --expert-cache {-(-least // 10**6)}MB or more.",
        )
    store = ExpertStore(host, model.device)
    try:
        attach(mlps, store, slot_bytes, model.dtype)
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"{slot_bytes / 1e9:.1f} GB of expert cache do not fit on {model.device}",
            "Other weights are there already.",
            "Set a smaller --expert-cache.",
        ) from error
    model.expert_store = store
    for mlp in mlps:
        assert mlp.offloaded is not None


@dataclass(frozen=True, slots=True)
class _Files:
    """A checkpoint whose experts stay in its files, converted or not."""

    index: Index
    dense: Collection[str]  # names of what every token needs
    read_dense: Callable[[str], tuple[StoredMatrix, list[Tensor]]]
    open_layer: Callable[[LayerRecords], LayerReader] | None = None


def _open_in_place(source: ModelSource, config: EngineConfig, device: torch.device) -> _Files:
    if config.quantization != "none":
        raise ConfigError(
            f"expert_ram is {config.expert_ram}, and quantization is set",
            "Experts are read from files as they are needed, and would be quantised each time.",
            "Omit one of the two, or quantise the model first (penstock quantize).",
        )
    conversion = Conversion(source, device.type)
    layouts: dict[str, ExpertLayout] = {}
    layers = []
    for module, mlp in conversion.modules.items():
        layout, _ = conversion.read_expert(module, 0)
        layouts.setdefault(layout.key, layout)
        number = list(layouts).index(layout.key)
        layers.append(LayerRecords(module, "", mlp.router.shape[0], number, ()))
    storage = [dataclasses.asdict(group) for group in describe_storage(conversion.wanted).groups]
    index = Index(
        conversion.path, device.type, tuple(layouts.values()), tuple(layers), {}, tuple(storage)
    )

    def read_dense(name: str) -> tuple[StoredMatrix, list[Tensor]]:
        weight = conversion.read(name)
        return StoredMatrix.of(weight, is_stack=False), stack_tensors([weight])

    return _Files(
        index,
        list(conversion.targets),
        read_dense,
        lambda layer: CheckpointLayer(conversion, layer.module, index.layouts[layer.layout]),
    )


def _open_converted(source: ModelSource, config: EngineConfig, device: torch.device) -> _Files:
    assert source.path is not None
    if config.quantization != "none":
        raise ConfigError(
            f"quantization is {config.quantization}, and {source.name} is a converted model",
            "Its weights are stored as they will be multiplied.",
            "Quantise the model first (penstock quantize), then convert that.",
        )
    index = read_index(source.path)
    _check_made_for(index, device)
    path = index.folder / DENSE
    stored = {tensor.name: tensor for tensor in open_safetensors(path)}

    def read_dense(name: str) -> tuple[StoredMatrix, list[Tensor]]:
        return index.dense[name], _tensors_of(path, stored, name, index.dense[name])

    return _Files(index, list(index.dense), read_dense)


def _load_from(
    files: _Files,
    source: ModelSource,
    config: EngineConfig,
    on_phase: OnPhase,
    device_name: str,
    with_drafting_head: bool,
) -> nn.Module:
    index, device = files.index, torch.device(device_name)
    dtype = resolve_dtype(config.dtype, source.config, device_name)
    with deferred_weights():
        model: Any = build_model(
            source.config, dtype, device, with_drafting_head=with_drafting_head
        )
    model.placements(files.dense)  # drops a drafting head that the files do not have
    _fill_dense(model, files, device, on_phase)
    model.storage = Storage(tuple(StorageGroup(**group) for group in index.storage))
    by_module = sparse_layers(model)
    layers = tuple(layer for layer in index.layers if layer.module in by_module)
    if len(layers) < len(by_module):
        missing = sorted(by_module.keys() - {layer.module for layer in layers})
        raise CheckpointError(f"{source.path} has no experts for {list_some(missing)}")
    index = dataclasses.replace(index, layers=layers)
    mlps = [by_module[layer.module] for layer in layers]
    total = sum(
        layer.num_experts * index.layouts[layer.layout].slot_bytes(dtype) for layer in layers
    )
    given = config.expert_cache_bytes
    slot_bytes = _free_bytes(device) if given is None else given
    ram_bytes = _checked_ram(index, config)
    goes_to_ram = slot_bytes < total and is_for_ram(index, ram_bytes, device)
    host = FiledExperts(
        index,
        None if goes_to_ram else ram_bytes,
        pin_memory=device.type == "cuda",
        open_layer=files.open_layer,
    )
    if slot_bytes >= total:
        _fill_stacks(mlps, index, host, dtype, device, on_phase)
        host.close()
    elif goes_to_ram:
        tell = partial(_tell, on_phase)
        read_into_ram(mlps, index, host, dtype, tell)
        host.close()
        give_device_slots(model, mlps, config, slot_bytes)
    else:
        _use_slots(model, mlps, host, slot_bytes)
    loaded: nn.Module = model.requires_grad_(False).eval()
    return loaded


def is_for_ram(index: Index, ram_bytes: int | None, device: torch.device) -> bool:
    """A GPU reads pinned RAM by itself; on a CPU, the page cache is as good."""
    return device.type == "cuda" and fits_ram(index, ram_bytes)


def _tell(on_phase: OnPhase, name: str, share: float) -> None:
    on_phase(Phase("weights", name, share))


def _check_made_for(index: Index, device: torch.device) -> None:
    is_quantized = any(
        matrix.is_quantized for layout in index.layouts for matrix in (layout.gate_up, layout.down)
    )
    if is_quantized and index.made_for != device.type:
        raise ConfigError(
            f"{index.folder} was converted for {index.made_for}, and the engine runs on {device}",
            "The kernels of a GPU and of a CPU take codes in different orders.",
            f"Convert the model again with --for {device.type}, or run it with --device "
            f"{index.made_for}.",
        )


def _checked_ram(index: Index, config: EngineConfig) -> int | None:
    given = config.expert_ram_bytes
    least = least_ram_bytes(index)
    if given is not None and given < least:
        raise CapacityError(
            f"{given / 1e9:.3g} GB of RAM for experts are too little",
            f"Reading from files takes {least / 1e9:.3g} GB.",
            f"Set --expert-ram {-(-least // 10**6)}MB or more, or omit it.",
        )
    return given


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(DEVICE_SHARE[device.type] * free)


def _fill_dense(model: Any, files: _Files, device: torch.device, on_phase: OnPhase) -> None:
    targets, weights = targets_of(model), weights_of(model)
    stacks = set(_stack_names(model))
    wanted = [name for name in targets if name not in stacks]
    missing = [name for name in wanted if name not in files.dense]
    if missing:
        raise CheckpointError(
            f"{files.index.folder} is not of this config.json",
            f"It lacks {list_some(missing)}.",
            "Convert the model again: penstock convert MODEL -o OUT.",
        )
    for number, name in enumerate(wanted):
        on_phase(Phase("weights", name, number / len(wanted)))
        matrix, tensors = files.read_dense(name)
        if name in weights and matrix.is_quantized:
            matrix.fill(weights[name], iter([tensor.to(device) for tensor in tensors]))
            weights[name].parts = tuple(
                for_device(part, weights[name])
                if not isinstance(part, Tensor)
                else part.to(model.dtype)
                for part in weights[name].parts
            )
        elif name in weights:
            weights[name].allocate(device)
            weights[name].values.data.copy_(tensors[0])
        else:
            targets[name].copy_(tensors[0])


def _tensors_of(
    path: Path, stored: Mapping[str, StoredTensor], name: str, matrix: StoredMatrix
) -> list[Tensor]:
    found = []
    for number, expected in enumerate(matrix.tensors):
        tensor = stored.get(f"{name}:{number}")
        if tensor is None or tensor.shape != expected.shape or tensor.dtype != expected.dtype:
            raise CheckpointError(
                f"{path} does not fit its index",
                f"{name} should be {list(expected.shape)} of {expected.dtype}.",
                "Copy both again, or convert the model again: penstock convert MODEL -o OUT.",
            )
        found.append(tensor.load())
    return found


def _fill_stacks(
    mlps: list[SparseMLP],
    index: Index,
    host: FiledExperts,
    dtype: torch.dtype,
    device: torch.device,
    on_phase: OnPhase,
) -> None:
    """All experts fit on the device: it is a resident model."""
    for layer, mlp in enumerate(mlps):
        on_phase(Phase("weights", index.layers[layer].module, layer / len(mlps)))
        num_experts = index.layers[layer].num_experts
        mlp.gate_up, mlp.down, stacks = host.layout_of(layer).new_slots(num_experts, dtype, device)
        for (_, expert), tensors in host.read(layer, range(num_experts), lambda: None):
            for stack, tensor in zip(stacks, tensors, strict=True):
                stack[expert].copy_(tensor)
