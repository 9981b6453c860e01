"""Finds the files of a checkpoint and lists their tensors, or reports everything that is wrong.

One file or many: an index maps tensors to files, whatever the files are called; without one, files
whose names count them (1 of 3) are a checkpoint. Suffixes determine the formats. Does not know what
the tensors are for.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from pathlib import Path

from penstock.errors import CheckpointError
from penstock.file_kinds import impostor, other_kind
from penstock.gguf.folder import find_gguf
from penstock.gguf.header import is_gguf
from penstock.models.source import WEIGHT_SUFFIXES, read_json_object
from penstock.weights.gguf_reader import open_gguf
from penstock.weights.safetensors_reader import open_safetensors
from penstock.weights.stored import StoredTensor
from penstock.weights.torch_pt import open_torch_file

MAX_LISTED = 20
MAX_NAME = 255  # characters of a file's name

INDEX_NAMES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE_NAMES = ("model.safetensors", "model.pt", "pytorch_model.bin")
OTHER_STEMS = ("adapter_model", "training_args", "optimizer", "scheduler")  # beside weights
_SHARD = re.compile(
    r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.\w+)", re.DOTALL
)


def open_checkpoint(path: Path) -> list[StoredTensor]:
    """Every tensor of a weights file, or of the folder that holds a whole checkpoint."""
    if path.is_dir():
        for index_name in INDEX_NAMES:
            if (path / index_name).is_file():
                return _open_indexed(path, path / index_name)
        path = _find_file(path)
    if is_gguf(path):
        return open_gguf(path)
    if shards := _shards_of(path):
        return _open_shards(path, shards)
    try:
        return _open_file(path)
    except CheckpointError as error:
        raise damaged(path, [error]) from error


def list_some(names: list[str]) -> str:
    """The first names of a list that may be thousands long, and how many more there are."""
    more = len(names) - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def _shards_of(path: Path) -> list[Path]:
    """All files of a checkpoint, if the name of one counts them."""
    match = _SHARD.fullmatch(path.name)
    count = int(match["count"]) if match else 0
    if match is None or not 1 <= int(match["number"]) <= count:
        return []
    numbers = range(1, count + 1)
    names = (f"{match['stem']}-{n:05}-of-{count:05}{match['suffix']}" for n in numbers)
    return [path.with_name(name) for name in names]


def _find_file(folder: Path) -> Path:
    """The only weights file of a folder without an index, or the first of its shards."""
    for name in SINGLE_NAMES:
        if (folder / name).is_file():
            return folder / name
    files = sorted(
        entry
        for entry in folder.iterdir()
        if entry.suffix in WEIGHT_SUFFIXES and entry.stem not in OTHER_STEMS
    )
    if len(files) == 1 or (files and set(files) <= set(_shards_of(files[0]))):
        return files[0]
    if files:
        raise CheckpointError(
            f"{folder} has no {INDEX_NAMES[0]}",
            f"It holds {len(files)} weights files: {list_some([file.name for file in files])}.",
            "Add the index of the checkpoint, or give the file with the whole model.",
        )
    if model := find_gguf(folder):
        return model
    if error := other_kind(folder):
        raise error
    raise CheckpointError(
        f"{folder} has no weights",
        f"There is no {', '.join(SINGLE_NAMES)} and no {INDEX_NAMES[0]} in it.",
        "Download the weights too, or run with --random-weights.",
    )


def _open_file(path: Path) -> list[StoredTensor]:
    if not os.path.isfile(path):  # unlike Path.is_file, accepts impossible names
        raise CheckpointError(f"{path.name[:MAX_NAME]} is missing")
    if error := impostor(path):
        raise error
    if path.suffix == ".safetensors":
        return open_safetensors(path)
    return open_torch_file(path)


def _open_shards(path: Path, shards: list[Path]) -> list[StoredTensor]:
    """Without an index: every tensor of every shard, each of which must be there."""
    missing = [shard.name for shard in shards if not os.path.isfile(shard)]
    if missing:
        raise CheckpointError(
            f"{path} is one of {len(shards)} files, of which {len(missing)} are missing",
            f"Missing beside it: {list_some(missing)}.",
            "Download all files of the checkpoint into one folder.",
        )
    tensors: dict[str, StoredTensor] = {}
    problems: list[CheckpointError] = []
    for shard in shards:
        try:
            found = {tensor.name: tensor for tensor in _open_file(shard)}
        except CheckpointError as error:
            problems.append(error)
            continue
        if repeated := sorted(tensors.keys() & found.keys()):
            again = f"{shard.name} repeats {list_some(repeated)}, which an earlier file has"
            problems.append(CheckpointError(again))
        tensors |= found
    if problems:
        raise damaged(path.parent, problems)
    return list(tensors.values())


def _open_indexed(folder: Path, index_path: Path) -> list[StoredTensor]:
    weight_map = read_json_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index_path} has no weight_map",
            "An index names the file of every tensor under that key.",
            "Download or copy the index again.",
        )
    names_of_shard: dict[str, set[str]] = defaultdict(set)
    problems: list[CheckpointError] = []
    for name, shard in weight_map.items():
        if isinstance(shard, str) and Path(shard).name == shard:
            names_of_shard[shard].add(name)
        else:  # a checkpoint never refers to a file outside its folder
            problem = f"{index_path.name} puts {name} in {shard!r}, which is not a file name"
            problems.append(CheckpointError(problem))
    tensors: list[StoredTensor] = []
    for shard, names in names_of_shard.items():
        try:
            in_shard = [tensor for tensor in _open_file(folder / shard) if tensor.name in names]
        except CheckpointError as error:
            problems.append(error)
            continue
        absent = sorted(names - {tensor.name for tensor in in_shard})
        if absent:
            problem = f"{shard} lacks {list_some(absent)}, which {index_path.name} puts there"
            problems.append(CheckpointError(problem))
        tensors += in_shard
    if problems:
        raise damaged(folder, problems)
    return tensors


def damaged(path: Path, problems: list[CheckpointError]) -> CheckpointError:
    """All problems in one error; their advice comes first, without repeats."""
    listed = [error.what for error in problems[:MAX_LISTED]]
    if len(problems) > MAX_LISTED:
        listed.append(f"and {len(problems) - MAX_LISTED} more problems")
    reasons = dict.fromkeys(error.why for error in problems if error.why)
    todos = dict.fromkeys(error.todo for error in problems if error.todo)
    return CheckpointError(
        f"The weights at {path} cannot be read",
        "\n".join([*(f"  {problem}." for problem in listed), *reasons]),
        " ".join(todos) or "Download or copy these files again.",
    )
