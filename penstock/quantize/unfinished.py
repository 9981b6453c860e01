"""A run that may be killed: finished stages are complete on disk, and a later run resumes.

OUT/unfinished/progress.json   settings, and a row of the report for every finished stage
OUT/unfinished/stream-N.safetensors   the input activations of stage N
OUT/model-0000N-of-0000M.safetensors  the tensors of a stage
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from penstock.errors import CheckpointError, ConfigError
from penstock.file_kinds import UNFINISHED_QUANTIZATION
from penstock.models.source import read_json_object
from penstock.weights.folder_lock import only_writer
from penstock.weights.safetensors_reader import open_safetensors
from penstock.weights.safetensors_writer import save_atomically

FOLDER, RECORD = UNFINISHED_QUANTIZATION.split("/")


class Unfinished:
    """A context: inside, the folder exists, and no other process writes to it."""

    def __init__(self, output: Path, settings: Mapping[str, Any]) -> None:
        """Resumes what is there; refuses a folder with other content by name."""
        self.output, self.folder = output, output / FOLDER
        self.settings = dict(settings)
        self.rows = self._find_rows()
        self._locked = ExitStack()

    def __enter__(self) -> Unfinished:
        self.output.mkdir(parents=True, exist_ok=True)
        self._locked.enter_context(only_writer(self.output, "penstock quantize"))
        self.rows = self._find_rows()  # another run may have ended since
        self.folder.mkdir(exist_ok=True)
        if not self.rows:
            self._record()
        return self

    def __exit__(self, *_: object) -> None:
        self._locked.close()

    def _find_rows(self) -> list[dict[str, Any]]:
        record = self.folder / RECORD
        if record.is_file():
            begun = read_json_object(record)
            rows = begun.get("rows")
            if not isinstance(begun.get("settings"), dict) or not isinstance(rows, list):
                raise ConfigError(
                    f"{record} is damaged",
                    "It holds no settings and rows of an unfinished run.",
                    "Give another folder with -o, or remove this one.",
                )
            _check_same(self.output, begun["settings"], self.settings)
            return rows
        if self.output.exists() and any(entry.name != FOLDER for entry in self.output.iterdir()):
            raise ConfigError(
                f"{self.output} is not empty",
                "Its files are not those of an unfinished `penstock quantize`.",
                "Give another folder with -o, or remove this one.",
            )
        return []

    def check_written(self, shards: Sequence[str], *, has_stream: bool) -> None:
        """Refuses a run that cannot be completed: a stage that is gone cannot be repeated, because
        the activations before it are gone too.
        """
        files = [self.output / shard for shard in shards]
        if self.rows and has_stream:
            files.append(self._stream(len(self.rows)))
        for file in files:
            try:
                open_safetensors(file)
            except CheckpointError as error:
                raise ConfigError(
                    f"{self.output} cannot be completed: {file.name} is missing or damaged",
                    "An earlier run wrote it, and only a run from the start can write it again.",
                    "Remove the folder and run the same command again.",
                ) from error

    def read_stream(self) -> dict[str, Tensor]:
        """The input activations of the next stage."""
        return load_file(self._stream(len(self.rows)))

    def finish_stage(
        self, shard: str, tensors: dict[str, Tensor], stream: dict[str, Tensor], row: dict[str, Any]
    ) -> None:
        """In this order: whatever is killed in between is repeated."""
        stage = len(self.rows)
        save_atomically(tensors, self.output / shard)
        save_atomically(stream, self._stream(stage + 1))
        self.rows.append(row)
        self._record()
        self._stream(stage).unlink(missing_ok=True)

    def remove(self) -> None:
        (self.folder / RECORD).unlink()  # first: a partial folder must not be resumed
        shutil.rmtree(self.folder)

    def _stream(self, stage: int) -> Path:
        return self.folder / f"stream-{stage}.safetensors"

    def _record(self) -> None:
        state = {"settings": self.settings, "rows": self.rows}
        write_atomically(json.dumps(state), self.folder / RECORD)


def _check_same(output: Path, begun: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    changed = [
        f"{key} was {json.dumps(begun.get(key))} and is {json.dumps(asked.get(key))}"
        for key in {**begun, **asked}
        if begun.get(key) != asked.get(key)
    ]
    if changed:
        raise ConfigError(
            f"{output} was begun with other settings or another model",
            f"{'; '.join(changed)}.",
            "Go on with the same settings and files, or give another folder with -o.",
        )


def write_atomically(text: str, path: Path) -> None:
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
