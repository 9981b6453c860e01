"""A run that may be killed: finished stages are complete on disk, and a later run resumes.

OUT/unfinished/progress.json   settings, and a row of the report for every finished stage
OUT/unfinished/stream-N.safetensors   the input activations of stage N
OUT/model-0000N-of-0000M.safetensors  the tensors of a stage
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from penstock.errors import ConfigError
from penstock.file_kinds import UNFINISHED_QUANTIZATION
from penstock.models.source import read_json_object
from penstock.weights.safetensors_writer import save_atomically

FOLDER, RECORD = UNFINISHED_QUANTIZATION.split("/")


class Unfinished:
    def __init__(self, output: Path, settings: Mapping[str, Any]) -> None:
        """Resumes what is there; refuses a folder with other content by name."""
        self.output, self.folder = output, output / FOLDER
        self.settings = dict(settings)
        self.rows: list[dict[str, Any]] = []
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
            _check_same(output, begun["settings"], self.settings)
            self.rows = rows
        elif output.exists() and any(entry.name != FOLDER for entry in output.iterdir()):
            raise ConfigError(
                f"{output} is not empty",
                "Its files are not those of an unfinished `penstock quantize`.",
                "Give another folder with -o, or remove this one.",
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.rows:
            self._record()

    def read_stream(self) -> dict[str, Tensor]:
        """The input activations of the next stage."""
        return load_file(self.folder / f"stream-{len(self.rows)}.safetensors")

    def finish_stage(
        self, shard: str, tensors: dict[str, Tensor], stream: dict[str, Tensor], row: dict[str, Any]
    ) -> None:
        """In this order: whatever is killed in between is repeated."""
        stage = len(self.rows)
        save_atomically(tensors, self.output / shard)
        save_atomically(stream, self.folder / f"stream-{stage + 1}.safetensors")
        self.rows.append(row)
        self._record()
        (self.folder / f"stream-{stage}.safetensors").unlink(missing_ok=True)

    def remove(self) -> None:
        (self.folder / RECORD).unlink()  # first: a partial folder must not be resumed
        shutil.rmtree(self.folder)

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
