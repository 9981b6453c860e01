"""Writes a converted checkpoint: each layer's experts in one aligned file, everything else in
another.

A layer is read and repacked into the kernels' layout, exactly as an engine does when it loads the
model; quantized weights stay quantized, and others keep their dtype. In memory are the experts of
one layer, and at the end everything else. Written layers are recorded, so a run that was stopped
resumes after them.
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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import CapacityError, CheckpointError, ConfigError
from penstock.file_kinds import UNFINISHED_CONVERSION as UNFINISHED
from penstock.file_kinds import check_readable
from penstock.gguf.folder import FILES, read_text
from penstock.gguf.header import is_gguf
from penstock.layers.mlp import SparseMLP
from penstock.models import build_model
from penstock.models.placement import Placement
from penstock.models.source import (
    CONVERTED,
    WEIGHT_SUFFIXES,
    ModelSource,
    files_digest,
    is_converted,
)
from penstock.offload.files import DENSE, FOLDER, Index, LayerRecords, RecordFile
from penstock.offload.layout import ExpertLayout, StoredMatrix, stack_tensors
from penstock.ops import Weight
from penstock.ops.quantized import QuantizedRows
from penstock.ops.tiles import can_tile, tile
from penstock.progress import OnPhase, Phase, timed
from penstock.weights.folder_lock import only_writer
from penstock.weights.load import (
    check_equal,
    match_tensors,
    targets_of,
    weights_of,
    without_idle_biases,
)
from penstock.weights.packing import WeightParts
from penstock.weights.quantized import find_format, open_weights
from penstock.weights.safetensors_reader import open_safetensors
from penstock.weights.safetensors_writer import save_atomically
from penstock.weights.storage_report import describe_storage
from penstock.weights.stored import StoredTensor

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a conversion will write."""

    modules: tuple[str, ...]  # of layers with experts
    num_experts: int
    expert_bytes: int
    dense_bytes: int  # in the checkpoint's files

    @property
    def num_bytes(self) -> int:
        return self.expert_bytes + self.dense_bytes


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
        """Reads one expert of each layer: records may be larger than what the checkpoint stores,
        such as FP4 in the tiles of a GPU.
        """
        counts = {name: mlp.router.shape[0] for name, mlp in self.modules.items()}
        sizes = {name: self.read_expert(name, 0)[0].record_bytes for name in counts}
        stacks = {name for module in counts for name in _stacks(module)}
        dense = [one for one in self.wanted if self.placements[one.name].parameter not in stacks]
        return Plan(
            tuple(counts),
            next(iter(counts.values())),
            sum(counts[name] * sizes[name] for name in counts),
            sum(tensor.num_bytes for tensor in dense),
        )

    def write(self, output: Path, on_phase: OnPhase) -> Index:
        self.check_output(output)
        with _report_write_errors(output):
            output.mkdir(parents=True, exist_ok=True)
        with only_writer(output, "penstock convert"):
            self.check_output(output)  # another run may have ended since
            return self._write(output, on_phase)

    def _write(self, output: Path, on_phase: OnPhase) -> Index:
        with _report_write_errors(output):
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

    def check_output(self, output: Path) -> None:
        """Whether a conversion may write there: to a new folder, or one that it began."""
        folder = self.path if self.path.is_dir() else self.path.parent
        with _report_write_errors(output):
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
            is_begun = (output / UNFINISHED).is_file()
            if not is_begun and output.exists() and any(output.iterdir()):
                raise ConfigError(
                    f"{output} is not empty",
                    "Its files are not those of an unfinished conversion.",
                    "Give another folder with -o, or remove this one.",
                )

    def verify(self, index: Index, on_phase: OnPhase) -> None:
        """Reads the checkpoint again and compares everything with the files."""
        counts = {name: mlp.router.shape[0] for name, mlp in self.modules.items()}
        dense = self.targets.keys() - {name for module in counts for name in _stacks(module)}
        found = {layer.module: layer.num_experts for layer in index.layers}
        if found != counts or index.dense.keys() != dense:
            raise CheckpointError(
                f"{index.folder} is not a conversion of {self.source.name}",
                f"It has {_count(found)}; {self.source.name} has {_count(counts)}.",
                "Give the model that was converted.",
            )
        with timed("verify", on_phase) as report:
            for number, layer in enumerate(index.layers):
                report(Phase("verify", layer.file, number / (len(found) + 1)))
                self._verify_layer(layer, index)
            report(Phase("verify", DENSE, len(found) / (len(found) + 1)))
            path = index.folder / DENSE
            stored = {tensor.name: tensor for tensor in open_safetensors(path)}
            for name in dense:
                for key, expected in _numbered(name, self.read(name)):
                    if key not in stored or _raw(stored[key].load()) != _raw(expected):
                        raise self._differs(f"{name} in {path}")

    def _verify_layer(self, layer: LayerRecords, index: Index) -> None:
        path, size = index.folder / layer.file, index.layouts[layer.layout].record_bytes
        file, written = RecordFile(path, layer.num_experts, size), bytearray(size)
        for expert, record in enumerate(self._records(layer.module)[1]):
            file.read(expert, memoryview(written))
            if written != record or zlib.crc32(written) != layer.checksums[expert]:
                raise self._differs(f"Expert {expert} in {path}")

    def _differs(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{what} differs from {self.source.name}",
            "Either it was converted from another model, or the disk changed it.",
            "Give the model that was converted, or remove the folder and convert again.",
        )

    def _identity(self) -> dict[str, Any]:
        """What must be unchanged for a run to resume."""
        digest = hashlib.sha256(json.dumps(self.source.config, sort_keys=True).encode())
        for tensor in self.wanted:
            digest.update(repr((tensor.name, tensor.shape, tensor.scheme)).encode())
        digest.update(files_digest(self.path).encode())
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
                tensors |= _numbered(name, weight)
        path = output / DENSE
        with _report_write_errors(path, path.with_name(f"{DENSE}.part")):
            save_atomically(tensors, path)
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


def _count(experts_of: Mapping[str, int]) -> str:
    return f"{sum(experts_of.values()):,} experts in {len(experts_of)} layers"


def _numbered(name: str, weight: Weight) -> list[tuple[str, Tensor]]:
    """The tensors of a weight, under their names in the file of dense weights."""
    return [(f"{name}:{i}", one) for i, one in enumerate(stack_tensors([weight]))]


def _raw(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


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
            self._resume(output)
        self._record()

    def _resume(self, output: Path) -> None:
        """Keeps the layers up to the first whose file is no longer whole."""
        try:
            begun = json.loads(self._path.read_text())
            identity, self.layouts = begun["identity"], begun["layouts"]
            layouts = [ExpertLayout.from_json(one) for one in self.layouts]
            layers = [LayerRecords(**one) for one in begun["layers"]]
            sizes = [one.num_experts * layouts[one.layout].record_bytes for one in layers]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{self._path} is damaged",
                f"{type(error).__name__}: {error}.",
                "Remove the folder and convert again.",
            ) from error
        if identity != self._identity:
            raise ConfigError(
                f"{output} was started with another model, or for another device",
                "The checkpoint's files or the flags have changed since.",
                "Give another folder with -o, or remove this one.",
            )
        for layer, size in zip(layers, sizes, strict=True):
            file = output / layer.file
            if not file.is_file() or file.stat().st_size != size:
                break
            self.layers.append(dataclasses.asdict(layer))

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
    with _report_write_errors(path, part), part.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
        part.replace(path)


@contextmanager
def _report_write_errors(path: Path, part: Path | None = None) -> Iterator[None]:
    """Also removes what was written of the file."""
    try:
        yield
    except OSError as error:
        if part is not None:
            with suppress(OSError):
                part.unlink()
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise CheckpointError(
            f"{path} cannot be written",
            "The disk is full." if is_full else f"{error.strerror or error}.",
            f"{'Free some space' if is_full else 'Check the folder and its permissions'} and run "
            "the same command again: written layers are kept.",
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
                check_readable(entry)
                shutil.copyfile(entry, output / entry.name)
    write_text(json.dumps(source.config, indent=1), output / "config.json")
