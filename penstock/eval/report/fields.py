"""Reads JSON that somebody else wrote: what is absent is None, what has the wrong type is an error.

Knows paths inside a file and how to say what is wrong there; never what a field means.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object, and where it stands: `serving.json`, `rows[3]`."""

    values: Mapping[str, Any]
    file: str
    place: str = ""

    @classmethod
    def read(cls, path: Path) -> Fields:
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise PenstockError(
                f"{path} cannot be read",
                f"{type(error).__name__}: {error}.",
                "Measure it again, or move it out of the folder.",
            ) from error
        if not isinstance(values, dict):
            raise PenstockError(
                f"{path} holds no results",
                f"It is a JSON {type(values).__name__}, not an object.",
                "Measure it again, or move it out of the folder.",
            )
        return cls(values, str(path))

    def number(self, name: str) -> float | None:
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._wrong(name, "a finite number")
        return float(value)

    def positive(self, name: str) -> float | None:
        """For what is drawn on a logarithmic axis or divided by."""
        value = self.number(name)
        if value is not None and value <= 0:
            raise self._wrong(name, "more than 0")
        return value

    def count(self, name: str) -> int | None:
        value = self.number(name)
        if value is not None and (value < 0 or value != int(value)):
            raise self._wrong(name, "a whole number, 0 or more")
        return None if value is None else int(value)

    def text(self, name: str) -> str | None:
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise self._wrong(name, "a text")
        return value

    def claim(self, name: str) -> bool | None:
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def fields(self, name: str) -> Fields | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(name, "an object")
        return Fields(value, self.file, self._path(name))

    def rows(self, name: str) -> list[Fields]:
        value = self.values.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
            raise self._wrong(name, "a list of objects")
        return [Fields(row, self.file, f"{self._path(name)}[{index}]") for index, row in enumerate(value)]

    def named(self) -> Iterator[tuple[str, Fields]]:
        """The objects that this one holds, by name."""
        for name in self.values:
            inner = self.fields(name)
            if inner is not None:
                yield name, inner

    def _path(self, name: str) -> str:
        return f"{self.place}.{name}" if self.place else name

    def _wrong(self, name: str, wanted: str) -> PenstockError:
        return PenstockError(
            f"{self.file} is not what a measurement writes",
            f"{self._path(name)} is {json.dumps(self.values[name])[:80]}; it must be {wanted}.",
            "Measure it again, or move it out of the folder.",
        )
