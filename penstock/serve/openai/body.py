"""From the bytes of a POST to a struct, for every API: what a body may cost, and what is said of a wrong one.

While a body is decoded, nobody else is served. So its values are counted first: more than a request can use
are refused, with the name of the field that has them. Knows no API's fields; each brings its own structs.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import re
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from penstock.errors import RequestError
from penstock.text.json_values import MAX_VALUES, has_more_values, most_values

Body = TypeVar("Body", bound=msgspec.Struct)
_FIELD_PATH = re.compile(r" - at `(?:key in )?\$\.?(.*?)`$")
_MISSING_FIELD = re.compile(r"missing required field `(\w+)`")


def decode_body(body: bytes, kind: type[Body], max_values: int = MAX_VALUES) -> Body:
    if has_more_values([body], max_values):
        name = _large_field(body, kind, max_values)
        raise RequestError(
            f"{name or 'The body'} consists of too many values",
            f"A body may have {max_values:,} of them, lists and objects and all that is in them.",
            "Send less at once.",
            param=name,
        )
    with _gc_paused():
        return _decode(body, kind)


def _decode(body: bytes, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise wrong_field(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError("The body is not JSON", f"{error}.", "Send a JSON object in UTF-8.") from error


def wrong_field(error: msgspec.ValidationError, where: str = "") -> RequestError:
    """Names the field that is missing or of a wrong type; `where`: the part of the body that was read."""
    message = str(error)
    matches = (_FIELD_PATH.search(message), _MISSING_FIELD.search(message))
    names = [where, *(match.group(1) for match in matches if match is not None)]
    param = ".".join(name for name in names if name).removesuffix("[...]") or None
    return RequestError(f"{param or 'body'}: {_FIELD_PATH.sub('', message)}", param=param)


def _large_field(body: bytes, kind: type[msgspec.Struct], max_values: int) -> str | None:
    """The one that has most; None: it is several, or one that nobody knows."""
    undecoded = _decode(body, _undecoded(kind))
    num_values = {name: most_values(bytes(getattr(undecoded, name))) for name in undecoded.__struct_fields__}
    largest = max(num_values, key=lambda name: num_values[name])
    return largest if num_values[largest] > max_values // 2 else None


@functools.cache
def _undecoded(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """The fields of a body as they were sent."""
    names = [field.encode_name for field in msgspec.structs.fields(kind)]
    return msgspec.defstruct(f"Undecoded{kind.__name__}", [(n, msgspec.Raw, msgspec.Raw()) for n in names])


@contextlib.contextmanager
def _gc_paused() -> Iterator[None]:
    """New values are no garbage yet, but so many of them would make Python look, again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
