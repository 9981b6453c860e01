"""Decodes the body of a POST into a struct, for every API: size limits, and errors by field.

Decoding a body blocks the server. So its values are counted first, and a body with too many is
refused with the name of its largest field. A body that does not match its struct because of a
number such as 16.0, or an unknown field that is null or empty, is repaired and decoded again. Knows
no API's fields: each API brings its structs, and a table of the fields that they do not declare
(fields.py).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from penstock.errors import RequestError
from penstock.serve.fields import FieldTable, asks_for_nothing, strict_struct
from penstock.text.json_values import MAX_VALUES, has_more_values, most_values

Body = TypeVar("Body", bound=msgspec.Struct)
_FIELD_PATH = re.compile(r" - at `(?:key in )?\$\.?(.*?)`$")
_MISSING_FIELD = re.compile(r"missing required field `(\w+)`")
_UNKNOWN_FIELD = re.compile(
    r"Object contains unknown field `(.*?)`(?: - at `\$\.?(.*?)`)?$", re.DOTALL
)
_FLOAT_FOR_INT = re.compile(r"Expected `[^`]*\bint\b[^`]*`, got `float` - at `\$\.(\w+)")
_STEP = re.compile(r"(\w+)|\[(\d+)\]")
MAX_REPAIRS = 8
MAX_EXACT = 2**53  # above it, floats cannot represent every integer


def decode_body(
    body: bytes, kind: type[Body], max_values: int = MAX_VALUES, table: FieldTable | None = None
) -> Body:
    """`table` says which undeclared fields are ignored; without one, all of them are."""
    if has_more_values([body], max_values):
        name = _large_field(body, kind, max_values)
        raise RequestError(
            f"{name or 'The body'} has too many values",
            f"The limit is {max_values:,}, counting lists, objects and everything inside them.",
            "Split the request.",
            param=name,
        )
    with _gc_paused():
        return _decode(body, kind, table)


def _decode(body: bytes, kind: type[Body], table: FieldTable | None = None) -> Body:
    strict = kind if table is None else strict_struct(kind, table)
    problem = ""
    try:
        for _ in range(MAX_REPAIRS):
            try:
                return msgspec.json.decode(body, type=strict)
            except msgspec.ValidationError as error:
                if str(error) == problem:
                    raise
                problem, body = str(error), _repaired(body, error, strict, table)
        return msgspec.json.decode(body, type=strict)
    except msgspec.ValidationError as error:
        raise wrong_field(error) from error
    except RecursionError as error:
        raise RequestError(
            "The body is nested too deeply", "Reading it would take too much memory."
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(
            "The body is not JSON", f"{error}.", "Send a JSON object in UTF-8."
        ) from error


def _repaired(
    body: bytes,
    error: msgspec.ValidationError,
    kind: type[msgspec.Struct],
    table: FieldTable | None,
) -> bytes:
    """The body without the fields that may be ignored; raises an error for any other."""
    number, unknown = _FLOAT_FOR_INT.search(str(error)), _UNKNOWN_FIELD.search(str(error))
    if number is None and unknown is None:
        raise error
    fields = msgspec.json.decode(body)
    if number is not None:
        fields = {name: _with_integers(fields[name], name == number.group(1)) for name in fields}
    elif unknown is not None and unknown.group(2):
        _remove_unknown(fields, unknown.group(2), unknown.group(1), error)
    elif table is not None:
        known = kind.__struct_encode_fields__
        for name in [name for name in fields if name not in known]:
            if not table.is_harmless(name, fields.pop(name)):
                raise table.refusal(name, known)
    try:
        return msgspec.json.encode(fields)
    except OverflowError:  # an integer of more than 64 bits
        raise error from None


def _with_integers(value: Any, is_deep: bool) -> Any:
    """Turns 16.0 into 16; `is_deep`: also inside lists and objects."""
    if isinstance(value, float) and value.is_integer() and abs(value) < MAX_EXACT:
        return int(value)
    if is_deep and isinstance(value, list):
        return [_with_integers(item, True) for item in value]
    if is_deep and isinstance(value, dict):
        return {name: _with_integers(item, True) for name, item in value.items()}
    return value


def _remove_unknown(fields: Any, path: str, name: str, error: msgspec.ValidationError) -> None:
    """Removes a field of an object inside the body if it is null or empty; else raises an error."""
    for key, index in _STEP.findall(path):
        fields = fields[key] if key else fields[int(index)]
    if not (isinstance(fields, dict) and name in fields and asks_for_nothing(fields.pop(name))):
        raise RequestError(
            f"{path}.{name[:64]} is not supported",
            "It could change the answer, so it is not ignored.",
            "Omit it.",
            param=f"{path}.{name[:64]}",
        ) from error


def wrong_field(error: msgspec.ValidationError, where: str = "") -> RequestError:
    """An error that names the missing or wrong field; `where`: the part of the body that was
    read."""
    message = str(error)
    matches = (_FIELD_PATH.search(message), _MISSING_FIELD.search(message))
    names = [where, *(match.group(1) for match in matches if match is not None)]
    param = ".".join(name for name in names if name).removesuffix("[...]") or None
    return RequestError(f"{param or 'body'}: {_FIELD_PATH.sub('', message)}", param=param)


def wrong_choice(where: str, value: str, allowed: Iterable[str]) -> RequestError:
    """The error for a field that must be one of a few strings."""
    return RequestError(
        f"{where} is {value[:128]!r}", f"It must be one of {', '.join(allowed)}.", param=where
    )


@contextlib.contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Errors name the fields that the client sent: `names` maps ours to theirs."""
    try:
        yield
    except RequestError as error:
        rename(error, names)
        raise


def rename(error: RequestError, names: Mapping[str, str]) -> None:
    if error.param is not None and error.param in names:
        theirs = names[error.param]
        error.what = error.what.replace(error.param, theirs, 1)
        error.param = theirs


def _large_field(body: bytes, kind: type[msgspec.Struct], max_values: int) -> str | None:
    """The field that has most of the values; None: no declared field has that many."""
    undecoded = _decode(body, _undecoded(kind))
    num_values = {
        name: most_values(bytes(getattr(undecoded, name))) for name in undecoded.__struct_fields__
    }
    largest = max(num_values, key=lambda name: num_values[name])
    return largest if num_values[largest] > max_values // 2 else None


@functools.cache
def _undecoded(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """A struct with the same fields, which keeps their JSON undecoded."""
    names = [field.encode_name for field in msgspec.structs.fields(kind)]
    return msgspec.defstruct(
        f"Undecoded{kind.__name__}", [(n, msgspec.Raw, msgspec.Raw()) for n in names]
    )


@contextlib.contextmanager
def _gc_paused() -> Iterator[None]:
    """Decoding creates many objects, none of them garbage: they would trigger useless
    collections."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
