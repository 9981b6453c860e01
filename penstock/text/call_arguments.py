"""The arguments of a tool call in a history: from the API's JSON text to the object that templates
print.

A call that `max_tokens` cut off, or that a model wrote wrongly, comes back with every later request
of its conversation. It is not refused: the model sees the complete members.
"""

from __future__ import annotations

import json
from typing import Any

from penstock.text.dialects.json_calls import JsonText


def read_arguments(text: str) -> dict[str, Any]:
    """The value of the text, as far as it is JSON; a value that is not an object gets a name of
    ours."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = json.loads(whole_part(text) or "null")
    if isinstance(value, dict):
        return value
    return {"arguments": text}


def whole_part(text: str) -> str:
    """JSON text up to its last complete value, closed there; empty if it does not begin as JSON."""
    value = JsonText()
    value.take(text.lstrip())
    return value.whole_part()
