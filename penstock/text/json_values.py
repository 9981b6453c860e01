"""How many values JSON text has, told without decoding it.

Decoding keeps all threads waiting, and what it costs goes by the number of values: ten million empty lists
fit 30 MB. Counting reads the text a few times, at a gigabyte a second. Knows what separates values, and not
whether the text is JSON.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import RequestError

# As many are decoded in some 30 ms, which is little for others who wait. Conversations have fewer by far.
MAX_VALUES = 2**18
MAX_STRINGS = 2 * MAX_VALUES + 1  # a member of an object is two of them

_NOT_STRUCTURE = bytes(set(range(256)) - set(b'",[{'))


def has_more_values(texts: Sequence[bytes], limit: int = MAX_VALUES) -> bool:
    """Whether these have more than `limit` values together. Where a text is not JSON, what stands before the
    fault is counted rightly: a decoder gets no further.
    """
    if sum(map(most_values, texts)) <= limit:  # so it is with nearly all, and costs least
        return False
    return sum(_num_values(text, limit) for text in texts) > limit


def refuse_many_arguments(texts: Sequence[bytes], param: str) -> None:
    """Of all tool calls in a conversation, whose arguments are JSON in strings."""
    if has_more_values(texts):
        raise RequestError(
            "the arguments of the tool calls consist of too many values",
            f"Those of a conversation may have {MAX_VALUES:,} together.",
            "Leave calls out that no longer matter.",
            param=param,
        )


def most_values(text: bytes) -> int:
    """No fewer than there are: before each but the first stands a comma, or what opens a list or an object.
    But some of these open nothing, or stand in strings.
    """
    return sum(text.count(separator) for separator in (b",", b"[", b"{"))


def _num_values(text: bytes, limit: int) -> int:
    """The same without what stands in strings. More of them than anybody means are above any limit."""
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Now every quotation mark begins or ends a string.
    text = text.translate(None, _NOT_STRUCTURE)
    if text.count(b'"') // 2 > MAX_STRINGS:
        return limit + 1
    text = text.replace(b'""', b"")  # nothing stands between these
    return len(b"".join(text.split(b'"')[::2]))
