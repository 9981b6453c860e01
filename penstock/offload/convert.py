"""Writes a converted checkpoint: each layer's experts in one aligned file, everything else in
another.

A layer is read and repacked into the kernels' layout, exactly as an engine does when it loads the
model; quantized weights stay quantized, and others keep their dtype. Only one layer is in memory at
a time. Written layers are recorded, so a run that was stopped resumes after them.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from penstock.errors import CapacityError, CheckpointError, ConfigError
from penstock.gguf.folder import FILES, read_text
from penstock.gguf.header import is_gguf
from penstock.layers.mlp import SparseMLP
from penstock.models import build_model
from penstock.models.placement import Placement
from penstock.models.source import (
    CONVERTED,
    WEIGHT_SUFFIXES,
    ModelSource,
    is_converted,
    read_json_object,
)
from penstock.offload.files import DENSE, FOLDER, Index, LayerRecords
from penstock.offload.layout import RECORD_ALIGNMENT, ExpertLayout, StoredMatrix, stack_tensors
from penstock.ops import Weight
from penstock.ops.quantized import QuantizedRows
from penstock.ops.tiles import can_tile, tile
from penstock.progress import OnPhase, Phase, timed
from penstock.weights.load import (
    check_equal,
    match_tensors,
    targets_of,
    weights_of,
    without_idle_biases,
)
from penstock.weights.packing import WeightParts
from penstock.weights.quantized import find_format, open_weights
from penstock.weights.storage_report import describe_storage
from penstock.weights.stored import StoredTensor

UNFINISHED = "unfinished.json"
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a conversion will write, as far as that is known before anything is read."""

    modules: tuple[str, ...]  # of layers with experts
    num_experts: int
    expert_bytes: int  # in the checkpoint's files; records add at most 4 KB each
    dense_bytes: int

    @property
    def num_bytes(self) -> int:
        padding = len(self.modules) * self.num_experts * RECORD_ALIGNMENT
        return self.expert_bytes + padding + self.dense_bytes


class Conversion:
    def __init__(self, source: ModelSource, made_for: str) -> None:
        """Opens the checkpoint and checks it against its config.json; reads no weights."""
        assert made_for in DEVICES
        if source.path is None or is_converted(source.path):
            raise CheckpointError(
                f"{source.name} is {'a preset' if source.path is None else 'already converted'}",
                todo="Give the folder of a checkpoint, or a GGUF file.",
            )
        self.source, self.path, self.made_for = source, source.path, made_for
        stored = open_weights(source, find_format(source))
        meta = torch.device("meta")
        model = build_model(source.config, torch.float32, meta, with_drafting_head=True)
        self.placements: Mapping[str, Placement] = model.placements([one.name for one in stored])  # type: ignore[operator]
        stored = without_idle_biases(stored, self.placements)
        self.wanted = match_tensors(source.path, stored, self.placements, model.ignored)  # type: ignore[arg-type]
        self.weights, self.targets = weights_of(model), targets_of(model)
        self.by_target: dict[str, list[StoredTensor]] = defaultdict(list)
        for tensor in self.wanted:
            self.by_target[self.placements[tensor.name].parameter].append(tensor)
        self.modules = {
            name: one for name, one in model.named_modules() if isinstance(one, SparseMLP)
        }
        if not self.modules:
            raise ConfigError(
                f"{source.name} has no experts",
                "Its layers are dense: every token needs all weights.",
                "Serve it as it is; --quantization makes it smaller.",
            )

    @property
    def plan(self) -> Plan:
        of_experts = {
            tensor.name
            for module in self.modules
            for name in _stacks(module)
            for tensor in self.by_target[name]
        }
        sizes = {tensor.name: tensor.num_bytes for tensor in self.wanted}
        expert_bytes = sum(sizes[name] for name in of_experts)
        first = next(iter(self.modules.values()))
        return Plan(
            tuple(self.modules),
            first.router.shape[0],
            expert_bytes,
            sum(sizes.values()) - expert_bytes,
        )

    def write(self, output: Path, on_phase: OnPhase) -> Index:
        _check_output(self.path, output)
        work = _Unfinished(output, self._identity())
        _check_room(output, self.plan, len(work.layers) / len(self.modules))
        (output / FOLDER).mkdir(exist_ok=True)
        _copy_files(self.source, output)
        with timed("convert", on_phase) as report:
            for number, module in enumerate(self.modules):
                if number < len(work.layers):
                    continue
                report(Phase("convert", module, number / (len(self.modules) + 1)))
                work.add(*self._write_layer(module, number, output))
            report(Phase("convert", DENSE, len(self.modules) / (len(self.modules) + 1)))
            dense = self._write_dense(output)
            storage = [dataclasses.asdict(one) for one in describe_storage(self.wanted).groups]
            index = Index(
                output,
                self.made_for,
                tuple(ExpertLayout.from_json(one) for one in work.layouts),
                tuple(LayerRecords(**layer) for layer in work.layers),
                dense,
                tuple(storage),
            )
            write_text(json.dumps(index.to_json()), output / CONVERTED)
        work.remove()
        return index

    def verify(self, index: Index, on_phase: OnPhase) -> None:
        """Reads the checkpoint again and compares every record with its file."""
        with timed("verify", on_phase) as report:
            for number, layer in enumerate(index.layers):
                report(Phase("verify", layer.file, number / len(index.layers)))
                layout = index.layouts[layer.layout]
                path = index.folder / layer.file
                try:
                    file = path.open("rb")
                except OSError as error:
                    raise CheckpointError(f"{path} cannot be read", f"{error.strerror}.") from error
                with file:
                    for expert, record in enumerate(self._records(layer.module)[1]):
                        written = file.read(layout.record_bytes)
                        if written != record or zlib.crc32(written) != layer.checksums[expert]:
                            raise CheckpointError(
                                f"Expert {expert} in {path} differs from {self.source.name}",
                                f"Its {len(written):,} bytes differ from those that the checkpoint "
                                "gives.",
                                "Remove the folder and convert again; the disk may be faulty.",
                            )

    def _identity(self) -> dict[str, Any]:
        """What must be unchanged for a run to resume."""
        digest = hashlib.sha256(json.dumps(self.source.config, sort_keys=True).encode())
        for tensor in self.wanted:
            digest.update(repr((tensor.name, tensor.shape, tensor.scheme)).encode())
        files = [self.path] if self.path.is_file() else sorted(self.path.iterdir())
        for file in files:
            if file.suffix in (*WEIGHT_SUFFIXES, ".gguf"):
                found = file.stat()
                digest.update(f"{file.name} {found.st_size} {found.st_mtime_ns}".encode())
        return {"model": digest.hexdigest(), "made_for": self.made_for}

    def _write_layer(
        self, module: str, number: int, output: Path
    ) -> tuple[ExpertLayout, LayerRecords]:
        layout, records = self._records(module)
        name = f"{FOLDER}/layer-{number:03}.bin"
        checksums = []
        with written_whole(output / name) as file:
            for record in records:
                checksums.append(zlib.crc32(record))
                file.write(record)
        return layout, LayerRecords(module, name, len(checksums), 0, tuple(checksums))

    def _records(self, module: str) -> tuple[ExpertLayout, Iterator[bytes]]:
        layout, stacks = self._ordered([self.read(name) for name in _stacks(module)])
        return layout, _cut_records(layout, stacks)

    def read_expert(self, module: str, expert: int) -> tuple[ExpertLayout, list[Tensor]]:
        """The tensors of one expert, as stacks of one."""
        return self._ordered([self.read(name, expert) for name in _stacks(module)])

    def _ordered(self, stacks: list[Weight]) -> tuple[ExpertLayout, list[Tensor]]:
        if self.made_for == "cuda":
            for stack in stacks:
                order_for_gpu(stack)
        return ExpertLayout.of(*stacks), stack_tensors(stacks)

    def read(self, name: str, expert: int | None = None) -> Weight:
        """A weight as an engine loads it, except that unquantized values keep their dtype; or one
        expert of a stack.
        """
        target = self.weights.get(name)
        shape = self.targets[name].shape
        placed = [(one, self.placements[one.name]) for one in self._one_for_each_place(name)]
        if expert is not None:
            shape, placed = torch.Size([1, *shape[1:]]), _of_expert(placed, expert)
        weight = Weight(torch.empty(shape, device="meta"))
        can_quantize = target is not None and target.can_quantize
        if can_quantize and any(tensor.read_codes is not None for tensor, _ in placed):
            parts = WeightParts(weight, torch.device("cpu"))
            for tensor, placement in placed:
                parts.add(tensor, placement)
            parts.finish()
            return weight
        values: Tensor | None = None
        for tensor, placement in placed:
            own = placement.converted(tensor.load_part(placement.source))
            if values is None:
                values = torch.empty(shape, dtype=own.dtype)
            elif torch.promote_types(values.dtype, own.dtype) != values.dtype:
                values = values.to(torch.promote_types(values.dtype, own.dtype))
            values[placement.index].copy_(own)
        assert values is not None
        weight.values = nn.Parameter(values, requires_grad=False)
        return weight

    def _one_for_each_place(self, name: str) -> list[StoredTensor]:
        """Some checkpoints store a tied head twice; both must be equal."""
        first: dict[str, StoredTensor] = {}
        for tensor in self.by_target[name]:
            placement = self.placements[tensor.name]
            other = first.setdefault(repr(placement.index), tensor)
            if other is not tensor:
                check_equal(self.path, other, tensor, placement, torch.float32)
        return list(first.values())

    def _write_dense(self, output: Path) -> dict[str, StoredMatrix]:
        stacks = {name for module in self.modules for name in _stacks(module)}
        matrices: dict[str, StoredMatrix] = {}
        tensors: dict[str, Tensor] = {}
        for name in self.targets:
            if name not in stacks:
                weight = self.read(name)
                matrices[name] = StoredMatrix.of(weight, is_stack=False)
                own = stack_tensors([weight])
                tensors |= {f"{name}:{i}": one.contiguous() for i, one in enumerate(own)}
        part = output / f"{DENSE}.part"
        with _report_write_errors(part):
            save_file(tensors, part)
            part.replace(output / DENSE)
        return matrices


def _of_expert(
    placed: list[tuple[StoredTensor, Placement]], expert: int
) -> list[tuple[StoredTensor, Placement]]:
    """Where the tensors of one expert go in a stack of one: its own, or its part of a stack."""
    found = []
    for tensor, place in placed:
        if not place.index:
            assert not place.source
            own = (slice(expert, expert + 1),)
            found.append((tensor, dataclasses.replace(place, source=own)))
        elif place.index[0] == expert:
            index = (0, *place.index[1:])
            found.append((tensor, dataclasses.replace(place, index=index)))
    return found


def order_for_gpu(stack: Weight) -> None:
    """Repacks into the tiles of the GPU kernels; formats without tiles are dequantized."""
    if not stack.parts:
        return
    stack.parts = tuple(
        (tile(part) if can_tile(part) else part.dequantize())
        if isinstance(part, QuantizedRows)
        else part
        for part in stack.parts
    )


def _stacks(module: str) -> tuple[str, str]:
    return f"{module}.gate_up", f"{module}.down"


def _cut_records(layout: ExpertLayout, stacks: list[Tensor]) -> Iterator[bytes]:
    record = torch.zeros(layout.record_bytes, dtype=torch.uint8)
    views = layout.views(record)
    for expert in range(len(stacks[0])):
        for view, stack in zip(views, stacks, strict=True):
            view.copy_(stack[expert])
        yield record.numpy().tobytes()


class _Unfinished:
    """The layers that are written; the next run resumes after them."""

    def __init__(self, output: Path, identity: Mapping[str, Any]) -> None:
        self._path, self._identity = output / UNFINISHED, dict(identity)
        self.layouts: list[dict[str, Any]] = []
        self.layers: list[dict[str, Any]] = []
        if self._path.is_file():
            begun = read_json_object(self._path)
            if begun["identity"] != self._identity:
                raise ConfigError(
                    f"{output} was started with another model, or for another device",
                    "The checkpoint's files or the flags have changed since.",
                    "Give another folder with -o, or remove this one.",
                )
            self.layouts, self.layers = begun["layouts"], begun["layers"]
        elif output.exists() and any(output.iterdir()):
            raise ConfigError(
                f"{output} is not empty",
                "Its files are not those of an unfinished conversion.",
                "Give another folder with -o, or remove this one.",
            )
        output.mkdir(parents=True, exist_ok=True)
        self._record()

    def add(self, layout: ExpertLayout, layer: LayerRecords) -> None:
        given = json.loads(json.dumps(layout.to_json()))
        if given not in self.layouts:
            self.layouts.append(given)
        number = self.layouts.index(given)
        self.layers.append(dataclasses.asdict(dataclasses.replace(layer, layout=number)))
        self._record()

    def remove(self) -> None:
        self._path.unlink()

    def _record(self) -> None:
        state = {"identity": self._identity, "layouts": self.layouts, "layers": self.layers}
        write_text(json.dumps(state), self._path)


def _check_output(source: Path, output: Path) -> None:
    folder = source if source.is_dir() else source.parent
    if output.resolve() == folder.resolve() or (output.exists() and not output.is_dir()):
        raise ConfigError(
            f"-o is {output}",
            "It must be a new folder, not that of the model.",
            "Give another one.",
        )
    if is_converted(output):
        raise ConfigError(
            f"{output} already holds a converted model",
            todo="Add --verify to check it, or give another folder with -o.",
        )


def _check_room(output: Path, plan: Plan, share_done: float) -> None:
    needed = int(plan.num_bytes - share_done * plan.expert_bytes)
    free = shutil.disk_usage(output).free
    if needed > free:
        raise CapacityError(
            f"{output} has too little space",
            f"The conversion writes about {needed / 1e9:.1f} GB; {free / 1e9:.1f} GB are free.",
            "Free some, or give a folder on another disk with -o.",
        )


def write_text(text: str, path: Path) -> None:
    with written_whole(path) as file:
        file.write(text.encode())


@contextmanager
def written_whole(path: Path) -> Iterator[Any]:
    """A file that appears under its name once all of it is on the disk."""
    part = path.with_name(path.name + ".part")
    with _report_write_errors(part):
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)


@contextmanager
def _report_write_errors(part: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        part.unlink(missing_ok=True)
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise CheckpointError(
            f"{part.with_suffix('')} cannot be written",
            "The disk is full." if is_full else f"{error.strerror or error}.",
            "Free some space and run the same command again: written layers are kept.",
        ) from error


def _copy_files(source: ModelSource, output: Path) -> None:
    """config.json, tokenizer, template, and all other files next to the weights."""
    assert source.path is not None
    if is_gguf(source.path):
        for name in FILES.keys() - {"config.json"}:
            write_text(read_text(source.path / name), output / name)
    else:
        folder = source.path if source.path.is_dir() else source.path.parent
        for entry in sorted(folder.iterdir()):
            is_weights = entry.suffix in (*WEIGHT_SUFFIXES, ".gguf") or "index" in entry.name
            if entry.is_file() and not is_weights:
                shutil.copyfile(entry, output / entry.name)
    write_text(json.dumps(source.config, indent=1), output / "config.json")
