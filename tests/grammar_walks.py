"""Random texts that a grammar allows, and a JSON schema validator for the keywords of the tests."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from penstock.types import GRAMMAR_LIMITS

llguidance = pytest.importorskip("llguidance")
BYTES = llguidance.LLTokenizer("byte")

TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "kind": {"enum": ["friend", "foe", 7]},
        "tags": {
            "type": "array",
            "items": {"type": "string", "pattern": "^[a-z]{1,5}$"},
            "maxItems": 3,
        },
        "boss": {"anyOf": [{"$ref": "#/$defs/boss"}, {"type": "null"}]},
    },
    "required": ["name", "age", "kind", "boss"],
    "additionalProperties": False,
    "$defs": {
        "boss": {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "required": ["ok"],
            "additionalProperties": False,
        }
    },
}


def matcher_of(grammar: str) -> Any:
    limits = llguidance.LLParserLimits(verbose_errors=False, **GRAMMAR_LIMITS)
    return llguidance.LLMatcher(BYTES, grammar, log_level=0, limits=limits)


def is_allowed(grammar: str, text: str) -> bool:
    """Whether the whole text fulfils the grammar."""
    matcher = matcher_of(grammar)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def random_text(grammar: str, seed: int, ending: str = '"', max_bytes: int = 4000) -> str:
    """A text that fulfils the grammar, byte by byte. Once it is long, `ending` is written where
    allowed, since random bytes rarely produce it, and the text ends as soon as it can.
    """
    chooser = random.Random(seed)
    matcher = matcher_of(grammar)
    data = bytearray()
    while len(data) < max_bytes:
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        assert not matcher.is_error(), matcher.get_error()
        is_long = len(data) > 60 or chooser.random() < 0.2
        if matcher.is_stopped() or (matcher.is_accepting() and is_long):
            return data.decode()
        choices = [bytes([byte]) for byte in range(128) if mask >> byte & 1]
        preferred = [choice for choice in choices if choice in (b"]", b"}", b"<")]
        if matcher.validate_tokens(list(ending.encode())) == len(ending):
            preferred = [ending.encode()]
        chosen = chooser.choice(preferred if preferred and is_long else choices)
        assert matcher.consume_tokens(list(chosen))
        data += chosen
    raise AssertionError(f"no end after {bytes(data[:200])!r}")


def is_valid(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """Validates the JSON Schema keywords that these tests use."""
    if "$ref" in schema:
        return is_valid(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        return any(is_valid(value, choice, root) for choice in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema.get("type")
    if kind is not None and not isinstance(value, TYPES[kind]):
        return False
    if isinstance(value, bool):
        return kind in (None, "boolean")
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        is_closed = schema.get("additionalProperties") is False
        return set(schema.get("required", ())) <= value.keys() and all(
            is_valid(child, properties[key], root) if key in properties else not is_closed
            for key, child in value.items()
        )
    if isinstance(value, list):
        is_short = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        return is_short and all(is_valid(item, schema.get("items", {}), root) for item in value)
    if isinstance(value, str):
        matches = re.search(schema["pattern"], value) if "pattern" in schema else True
        return bool(matches) and len(value) <= schema.get("maxLength", len(value))
    if isinstance(value, (int, float)):
        return bool(schema.get("minimum", value) <= value <= schema.get("maximum", value))
    return True
