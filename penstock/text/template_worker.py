"""The process that compiles and renders chat templates, within limits that the kernel enforces.

Owns the Jinja dialect (minijinja with the filters and functions transformers gives templates) and
the limits of one process: its address space, and a timer of CPU seconds that kills it.
template_process.py starts it and sends it tasks. Knows nothing of checkpoints or of our errors, and
imports little, so that it starts in some 50 ms. Its standard input is a socket; when that closes,
it ends.

    frame = [length of the rest, 4 bytes big-endian | JSON]

A task is self-contained, so that a new process can replace a dead one; compiled templates are
cached. Its `context` is rendered; if it is null, the template is only compiled. The answer has one
of `text`, `variables` and `failure`.
"""

from __future__ import annotations

import functools
import json
import os
import re
import resource
import signal
import struct
import sys
from datetime import datetime
from typing import Any

import minijinja

LENGTH = struct.Struct(">I")
MAX_INDENT = 16
MAX_KEPT = 16  # compiled templates
MAX_DETAIL_CHARS = 2000  # per failure: a template can raise any text

# transformers marks the assistant's text with this tag for training; rendering ignores it.
_GENERATION_TAG = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


class Refusal(Exception):
    """The template itself called raise_exception."""


def main() -> None:
    """`python -m penstock.text.template_worker BYTES`: answers tasks until the socket on stdin
    closes."""
    limit_memory(int(sys.argv[1]))
    # The timer must kill this process, whatever handler the parent had.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    # Hides Rust's messages; the parent reports what happened.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    while header := _read(LENGTH.size):
        answer = _answer(_read(*LENGTH.unpack(header)))
        rest = memoryview(LENGTH.pack(len(answer)) + answer)
        while rest:
            rest = rest[os.write(0, rest) :]


def limit_memory(num_bytes: int) -> None:
    """Beyond the limit, Linux refuses memory and Rust aborts; macOS has no such limit, so only the
    time is limited there."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        if hard != resource.RLIM_INFINITY:
            num_bytes = min(num_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


def _read(num_bytes: int) -> bytearray:
    """Reads exactly `num_bytes`; empty when the parent is gone."""
    data = bytearray(num_bytes)
    rest = memoryview(data)
    while rest:
        num_read = os.readv(0, [rest])
        if num_read == 0:
            return bytearray()
        rest = rest[num_read:]
    return data


def _answer(frame: bytearray) -> bytes:
    try:
        return _encode(_run(json.loads(frame)))
    except Refusal as refusal:
        failure = _failure("Refused", str(refusal))
    except minijinja.TemplateError as error:
        failure = _failure(error.kind, error.detail or "", error.line or 0)
    except MemoryError:
        failure = _failure("OutOfMemory")
    except Exception as error:  # any error from a value or a filter's argument
        failure = _failure("BadValue", f"{type(error).__name__}: {error}")
    except BaseException as panic:  # of Rust; without memory, it finds null instead of an object
        failure = _failure("OutOfMemory" if "null" in str(panic) else "BadValue", f"{panic}")
    return _encode(failure)


def _encode(answer: dict[str, Any]) -> bytes:
    return json.dumps(answer, ensure_ascii=False).encode(errors="replace")


def _failure(kind: str, detail: str = "", line: int = 0) -> dict[str, Any]:
    return {"failure": {"kind": kind, "detail": detail[:MAX_DETAIL_CHARS], "line": line}}


def _run(task: dict[str, Any]) -> dict[str, Any]:
    signal.setitimer(signal.ITIMER_PROF, task["cpu_seconds"])  # SIGPROF then kills it
    try:
        return _render(task)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _render(task: dict[str, Any]) -> dict[str, Any]:
    environment = _compiled(task["source"], tuple(task["special_tokens"].items()))
    if task["context"] is None:
        names = set(environment.undeclared_variables_in_template("chat"))
        return {"variables": sorted(names - environment.globals.keys())}
    environment.fuel = task["fuel"]
    text = environment.render_template("chat", **task["context"])
    if len(text) > task["max_chars"]:
        return _failure("TooLong", f"{len(text):,} characters")
    return {"text": text}


@functools.lru_cache(MAX_KEPT)
def _compiled(source: str, special_tokens: tuple[tuple[str, str], ...]) -> minijinja.Environment:
    environment = minijinja.Environment(
        filters={"tojson": _to_json, "indent": _indent, "trim": _trim},
        globals={
            **dict(special_tokens),
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        },
        trim_blocks=True,
        lstrip_blocks=True,
        pycompat=True,
    )
    for amplifier in ("batch", "slice"):  # a single argument makes them allocate gigabytes
        environment.remove_filter(amplifier)
    plain = _GENERATION_TAG.sub(
        lambda tag: f"{{%{tag[1]} {'endif' if tag[2] else 'if true'} {tag[3]}%}}", source
    )
    environment.add_template("chat", plain)
    return environment


def _raise_exception(message: str) -> None:
    raise Refusal(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """transformers' tojson: key order kept, nothing escaped for HTML, ", " and ": " between."""
    if indent is not None:
        _check_indent(indent)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _indent(value: str, width: int = 4, first: bool = False, blank: bool = False) -> str:
    _check_indent(width)
    margin = " " * width
    lines = [line if not line and not blank else margin + line for line in value.split("\n")]
    return "\n".join(lines) if first else "\n".join(lines).removeprefix(margin)


def _check_indent(width: object) -> None:
    """Built-in filters would allocate any width."""
    if not isinstance(width, int) or width > MAX_INDENT:
        raise ValueError(
            f"the template uses an indent of {str(width)[:20]!r}; at most {MAX_INDENT} is allowed"
        )


def _trim(value: Any, characters: str | None = None) -> str:
    """Python's definition of white space, which differs from Rust's in a few control characters."""
    return "" if value is None else str(value).strip(characters)


if __name__ == "__main__":
    main()
