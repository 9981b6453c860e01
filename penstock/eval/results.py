"""How a measurement reports: progress bars, a table, one JSON line last, and a file.

The command that runs a measurement provides the bars and the provenance.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config import setting
from penstock.errors import ConfigError, PenstockError
from penstock.progress import OnPhase

MAX_SEED = 1_000_000
Bars = Callable[[], AbstractContextManager[OnPhase]]


def no_bars() -> AbstractContextManager[OnPhase]:
    """For measurements in other programs, without a terminal."""
    return nullcontext(lambda phase: None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The settings of every measurement of a server."""

    base_url: str = setting("http://127.0.0.1:8000", "a running server")
    model: str = setting("", "model name to send (default: the server's first model)")
    output: str | None = setting(None, "also write the last line, or the verdicts, to this file")


@dataclass(frozen=True, slots=True)
class Reporter:
    """`bars` shows progress; `origin` is part of every JSON line."""

    bars: Bars
    origin: Mapping[str, Any]

    def deliver(self, fields: Mapping[str, Any], output: str | None) -> None:
        """Prints the JSON line and then, if there is a file, writes it there too."""
        deliver_line(self._line(fields), output)

    def write(self, fields: Mapping[str, Any], output: str | None) -> None:
        """Only to the file, for a measurement that prints lines of its own."""
        write_output(self._line(fields), output)

    def _line(self, fields: Mapping[str, Any]) -> str:
        return json.dumps({**fields, **self.origin})


def prepare_output(output: str | None, flag: str = "--output") -> None:
    """Checks before a long measurement, not after it, that its file can be written."""
    if not output:
        return
    file = Path(output).expanduser()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists() and not file.is_file() and not file.is_dir():
            return  # a pipe would wait here for its reader
        is_new = not file.exists()
        file.open("a").close()  # permissions alone allow root everything, even on a read-only disk
        if is_new:
            file.unlink()
    except OSError as error:
        raise _unwritable(flag, output, error) from error


def output_file(output: str | None, folder: str | None, name: str) -> str | None:
    """Where the result goes: --output is the file, --output-dir its folder, as in the contest."""
    if output and folder:
        raise ConfigError(
            "--output and --output-dir are both set",
            f"One is a file, the other is the folder of {name}.",
            "Omit one of them.",
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
    """Prints the line before writing it: a full disk loses the file but not the measurement."""
    print(line, flush=True)
    write_output(line, output, flag)


def _unwritable(flag: str, output: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"{flag} {output} cannot be written",
        f"{error.strerror or error}.",
        f"Use a writable file, or omit {flag}.",
    )


def read_results(flag: str, path: str) -> dict[str, Any]:
    """A JSON object that a measurement wrote."""
    try:
        fields = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PenstockError(
            f"{flag} {path} cannot be read", f"{type(error).__name__}: {error}."
        ) from error
    if not isinstance(fields, dict):
        raise PenstockError(
            f"{flag} {path} has no results", f"It is a JSON {type(fields).__name__}."
        )
    return fields


def read_fields(flag: str, text: str) -> dict[str, Any]:
    """A flag's JSON object, such as extra fields of every request."""
    try:
        fields = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"{flag} is {text!r}", f"It is not JSON: {error}.") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{flag} is {text!r}", "It must be a JSON object.")
    return fields


def draw_seed(seed: int | None) -> int:
    """The given seed, or a random one, so that no server can prepare for it; it is reported."""
    return secrets.randbelow(MAX_SEED) if seed is None else seed


def require_at_least(least: int, **counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and value < least:
            raise ConfigError(
                f"--{name.replace('_', '-')} is {value}", f"It must be {least} or more."
            )


def require_above_zero(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {value:g}", "It must be above 0.")


def require_limit(limit: float) -> None:
    """A count or a fraction: as in lm-eval, numbers below 1 are fractions."""
    if not (0 < limit < 1 or (limit >= 1 and limit == int(limit))):
        raise ConfigError(
            f"--limit is {limit:g}",
            "It must be a whole number, 1 or more, or a fraction below 1: 200 or 0.1.",
        )


def format_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Plain text for people and logs: the first column left, the others right."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    lines = []
    for cells in (columns, ["-" * width for width in widths], *rows):
        first, *others = zip(cells, widths)
        aligned = [f"{cell:>{width}}" for cell, width in others]
        lines.append("  ".join([f"{first[0]:<{first[1]}}", *aligned]).rstrip())
    return "\n".join(lines)


def percent(part: float | None, whole: float | None) -> str:
    return f"{part / whole:.1%}" if part is not None and whole else "-"
