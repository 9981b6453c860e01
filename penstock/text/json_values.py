"""Counts the values of JSON text without decoding it.

Decoding blocks all threads, and its cost depends on the number of values: ten million empty lists
fit 30 MB. Counting reads the text a few times, at a gigabyte a second. Knows what separates values,
not whether the text is JSON.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import RequestError

# Decoding this many takes about 30 ms, a tolerable pause. Conversations have far fewer.
MAX_VALUES = 2**18
MAX_STRINGS = 2 * MAX_VALUES + 1  # a member of an object is two of them

_NOT_STRUCTURE = bytes(set(range(256)) - set(b'",[{'))


def has_more_values(texts: Sequence[bytes], limit: int = MAX_VALUES) -> bool:
    """Whether the texts together have more than `limit` values. If a text is not valid JSON, the
    values before the error are counted correctly: a decoder gets no further."""
    if sum(map(most_values, texts)) <= limit:  # true for nearly all, and the cheapest check
        return False
    return sum(_num_values(text, limit) for text in texts) > limit


def refuse_many_arguments(texts: Sequence[bytes], param: str) -> None:
    """`texts`: the arguments of all tool calls in a conversation, as JSON."""
    if has_more_values(texts):
        raise RequestError(
            "The arguments of the tool calls have too many values",
            f"The limit is {MAX_VALUES:,} in a conversation.",
            "Omit calls that no longer matter.",
            param=param,
        )


def most_values(text: bytes) -> int:
    """An upper bound: a comma or an opening bracket comes before each value except the first. Empty
    brackets, and such characters in strings, are counted too."""
    return sum(text.count(separator) for separator in (b",", b"[", b"{"))


def _num_values(text: bytes, limit: int) -> int:
    """The same without the contents of strings. Too many strings count as more than `limit`."""
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Now every quotation mark begins or ends a string.
    text = text.translate(None, _NOT_STRUCTURE)
    if text.count(b'"') // 2 > MAX_STRINGS:
        return limit + 1
    text = text.replace(b'""', b"")  # strings without such characters
    return len(b"".join(text.split(b'"')[::2]))
