"""Loads a model whose experts stay in files, converted or a checkpoint's own: its dense weights on
the device, its experts in slots over RAM and files, or all in RAM, or all on the device.
"""

from __future__ import annotations

import dataclasses
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
from penstock.models.source import ModelSource
from penstock.offload.convert import Conversion
from penstock.offload.files import DENSE, Index, LayerRecords, read_index
from penstock.offload.host import (
    FiledExperts,
    LayerReader,
    least_ram_bytes,
)
from penstock.offload.in_place import CheckpointLayer
from penstock.offload.in_ram import fits_ram, give_device_slots, read_into_ram
from penstock.offload.layout import ExpertLayout, StoredMatrix, stack_tensors
from penstock.offload.store import sparse_layers, stack_names, use_slots
from penstock.ops.cpu.memory import ram_sizes
from penstock.ops.weight import deferred_weights
from penstock.progress import OnPhase, Phase
from penstock.weights.checkpoint import list_some
from penstock.weights.load import resolve_dtype, targets_of, weights_of
from penstock.weights.packing import for_device
from penstock.weights.safetensors_reader import open_safetensors
from penstock.weights.storage_report import Storage, StorageGroup, describe_storage
from penstock.weights.stored import StoredTensor

# Of the memory left by the dense weights: the rest is for caches and steps.
DEVICE_SHARE = {"cuda": 0.7, "cpu": 0.5}


@dataclass(frozen=True, slots=True)
class Files:
    """A checkpoint whose experts stay in its files, converted or not."""

    index: Index
    dense: Collection[str]  # names of weights that every token needs
    read_dense: Callable[[str], tuple[StoredMatrix, list[Tensor]]]
    open_layer: Callable[[LayerRecords], LayerReader] | None = None


def open_in_place(source: ModelSource, config: EngineConfig, device: torch.device) -> Files:
    if config.quantization != "none":
        raise ConfigError(
            f"expert_ram is {config.expert_ram}, and quantization is set",
            "Experts are read from files as they are needed, and would be quantized each time.",
            "Omit one of the two, or quantize the model first (penstock quantize).",
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

    return Files(
        index,
        list(conversion.targets),
        read_dense,
        lambda layer: CheckpointLayer(conversion, layer.module, index.layouts[layer.layout]),
    )


def open_converted(source: ModelSource, config: EngineConfig, device: torch.device) -> Files:
    assert source.path is not None
    if config.quantization != "none":
        raise ConfigError(
            f"quantization is {config.quantization}, and {source.name} is a converted model",
            "Its weights are stored in their final format.",
            "Quantize the model first (penstock quantize), then convert that.",
        )
    index = read_index(source.path)
    _check_made_for(index, device)
    path = index.folder / DENSE
    stored = {tensor.name: tensor for tensor in open_safetensors(path)}

    def read_dense(name: str) -> tuple[StoredMatrix, list[Tensor]]:
        return index.dense[name], _tensors_of(path, stored, name, index.dense[name])

    return Files(index, list(index.dense), read_dense)


def load_from(
    files: Files,
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
    given, ram_bytes = config.expert_cache_bytes, checked_ram(index, config)
    slot_bytes = _free_bytes(device) if given is None else given
    if given is None and ram_bytes is not None and device.type == "cpu":
        slot_bytes = min(slot_bytes, ram_bytes)  # slots are in RAM, too
        if slot_bytes < total:
            slot_bytes //= 2
            ram_bytes = max(ram_bytes - slot_bytes, least_ram_bytes(index))
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
        use_slots(model, mlps, host, slot_bytes)
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
            f"{index.folder} was converted for {index.made_for}, but the engine runs on {device}",
            "The kernels of a GPU and of a CPU need different layouts.",
            f"Convert the model again with --for {device.type}, or run it with --device "
            f"{index.made_for}.",
        )


def checked_ram(index: Index, config: EngineConfig) -> int | None:
    given = config.expert_ram_bytes
    least = least_ram_bytes(index)
    if given is not None and given < least:
        raise CapacityError(
            f"{given / 1e9:.3g} GB of RAM for experts is too little",
            f"Reading from files takes {least / 1e9:.3g} GB.",
            f"Set --expert-ram {-(-least // 10**6)}MB or more, or omit it.",
        )
    return given


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        _, free = ram_sizes()
    return int(DEVICE_SHARE[device.type] * free)


def _fill_dense(model: Any, files: Files, device: torch.device, on_phase: OnPhase) -> None:
    targets, weights = targets_of(model), weights_of(model)
    stacks = set(stack_names(model))
    wanted = [name for name in targets if name not in stacks]
    missing = [name for name in wanted if name not in files.dense]
    if missing:
        raise CheckpointError(
            f"{files.index.folder} does not match this config.json",
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
    """All experts fit on the device: loads them like a resident model."""
    for layer, mlp in enumerate(mlps):
        on_phase(Phase("weights", index.layers[layer].module, layer / len(mlps)))
        num_experts = index.layers[layer].num_experts
        mlp.gate_up, mlp.down, stacks = host.layout_of(layer).new_slots(num_experts, dtype, device)
        for (_, expert), tensors in host.read(layer, range(num_experts), lambda: None):
            for stack, tensor in zip(stacks, tensors, strict=True):
                stack[expert].copy_(tensor)
