"""Requests for the tests of Ollama's and llama-server's APIs."""

from __future__ import annotations

from typing import Any

QUESTION = "What is 17 + 26? Reply with just the number."
SUM: dict[str, Any] = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "maximum": 99}},
    "required": ["sum"],
    "additionalProperties": False,
}
