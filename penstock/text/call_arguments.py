"""The arguments of a tool call in a history: from the API's JSON text to the object that templates write out.

A call that `max_tokens` cut off, or that a model spelled wrongly, comes back with every later request of its
conversation. It is not refused: the model is shown the members that are whole.
"""

from __future__ import annotations

import json
from typing import Any

from penstock.text.dialects.json_calls import JsonText


def read_arguments(text: str) -> dict[str, Any]:
    """What the text says, as far as it is JSON; a value that is no object stands under a name of ours."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = json.loads(whole_part(text) or "null")
    if isinstance(value, dict):
        return value
    return {"arguments": text}


def whole_part(text: str) -> str:
    """JSON text up to its last whole value, closed there; empty where it does not begin as JSON."""
    value = JsonText()
    value.take(text.lstrip())
    return value.whole_part()
