"""How a measurement reaches its reader: bars while it runs, a table, one JSON line last, and the file of it.

Where bars are drawn and what is known of this machine is given by the command that runs a measurement.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, PenstockError
from penstock.progress import OnPhase

MAX_SEED = 1_000_000
Bars = Callable[[], AbstractContextManager[OnPhase]]


def no_bars() -> AbstractContextManager[OnPhase]:
    """For whoever measures in a program of their own, where nobody watches."""
    return nullcontext(lambda phase: None)


@dataclass(frozen=True, slots=True)
class Reporter:
    """Whom a measurement tells what: `bars` opens a place for phases, `origin` begins every JSON line."""

    bars: Bars
    origin: Mapping[str, Any]

    def deliver(self, fields: Mapping[str, Any], output: str | None) -> None:
        """Prints the JSON line and then, where a file was asked for, writes it there as well."""
        deliver_line(self._line(fields), output)

    def write(self, fields: Mapping[str, Any], output: str | None) -> None:
        """Only to the file, for a measurement that people read in lines of its own."""
        write_output(self._line(fields), output)

    def _line(self, fields: Mapping[str, Any]) -> str:
        return json.dumps({**fields, **self.origin})


def prepare_output(output: str | None, flag: str = "--output") -> None:
    """Finds out before a long measurement, not after it, that its file cannot be written."""
    if not output:
        return
    file = Path(output).expanduser()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists() and not file.is_file() and not file.is_dir():
            return  # a pipe would wait here for its reader
        is_new = not file.exists()
        file.open("a").close()  # permissions alone say yes to root, also where nobody can write
        if is_new:
            file.unlink()
    except OSError as error:
        raise _unwritable(flag, output, error) from error


def output_file(output: str | None, folder: str | None, name: str) -> str | None:
    """Where the result goes: --output names the file, --output-dir its folder, as the contest has it."""
    if output and folder:
        raise ConfigError(
            "--output and --output-dir are both given",
            f"One names a file, the other the folder of {name}.",
            "Leave one of them out.",
        )
    return str(Path(folder) / name) if folder else output


def write_output(line: str, output: str | None, flag: str = "--output") -> None:
    if not output:
        return
    try:
        Path(output).expanduser().write_text(line + "\n", encoding="utf-8")
    except OSError as error:
        raise _unwritable(flag, output, error) from error


def deliver_line(line: str, output: str | None, flag: str = "--output") -> None:
    """Printed before it is written: a disk that is full costs the file and not the measurement."""
    print(line, flush=True)
    write_output(line, output, flag)


def _unwritable(flag: str, output: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"{flag} {output} cannot be written",
        f"{error.strerror or error}.",
        f"Name a file in a folder of yours, or leave {flag} out.",
    )


def read_results(flag: str, path: str) -> dict[str, Any]:
    """A file that one of the measurements wrote, or one that looks like it."""
    try:
        fields = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PenstockError(f"{flag} {path} cannot be read", f"{type(error).__name__}: {error}.") from error
    if not isinstance(fields, dict):
        raise PenstockError(f"{flag} {path} holds no results", f"It is a JSON {type(fields).__name__}.")
    return fields


def read_fields(flag: str, text: str) -> dict[str, Any]:
    """A flag's JSON object, such as fields for every request."""
    try:
        fields = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"{flag} is {text!r}", f"It is not JSON: {error}.") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{flag} is {text!r}", "It must be a JSON object.")
    return fields


def draw_seed(seed: int | None) -> int:
    """The seed that was given, or one that nobody could have prepared for; either is reported."""
    return secrets.randbelow(MAX_SEED) if seed is None else seed


def require_at_least(least: int, **counts: int) -> None:
    for name, value in counts.items():
        if value < least:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}", f"It must be {least} or more.")


def require_limit(limit: float) -> None:
    """A count, or a fraction of what there is: lm-eval tells them apart at 1, too."""
    if not (0 < limit < 1 or (limit >= 1 and limit == int(limit))):
        raise ConfigError(
            f"--limit is {limit:g}",
            "It must be a whole number, 1 or more, or a fraction below 1: 200 or 0.1.",
        )


def format_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Plain text for people and logs alike: the first column left, the others right."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    lines = []
    for cells in (columns, ["-" * width for width in widths], *rows):
        first, *others = zip(cells, widths)
        aligned = [f"{cell:>{width}}" for cell, width in others]
        lines.append("  ".join([f"{first[0]:<{first[1]}}", *aligned]).rstrip())
    return "\n".join(lines)


def percent(part: float | None, whole: float | None) -> str:
    return f"{part / whole:.1%}" if part is not None and whole else "-"
