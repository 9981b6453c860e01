"""Converts a parameter that was written as bare text to JSON, by the tool's JSON schema.

Returns JSON text, not values: a number keeps its digits. Nothing is ever evaluated. A text that
fits no allowed type is a string, which the tool can then refuse. If several types are allowed, the
narrowest that fits wins, and string comes last. Schemas come from requests: whatever they contain,
the result is a type or "anything".
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring
from typing import Any

import msgspec

from penstock.text.parameter_lists import parameter_lists
from penstock.text.references import target_of, top_of

TYPES = frozenset({"null", "boolean", "integer", "number", "array", "object", "string"})
TEXT_ONLY = frozenset({"string"})
NULLS = ("null", "none")  # as in JSON and in Python, in any case

_INTEGER = re.compile(r"(-?(?:0|[1-9]\d*))(?:\.0+)?", re.ASCII)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_TYPE_OF = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    str: "string",
}


def tools_by_name(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Parameters]:
    """OpenAI's list of tools, as the parameters of each."""
    functions = [tool["function"] for tool in tools or ()]
    return {function["name"]: Parameters(function.get("parameters")) for function in functions}


def quote(text: str) -> str:
    """The inside of a JSON string. Works character by character, so parts of a text may be quoted
    separately."""
    return encode_basestring(text)[1:-1]


class Parameters:
    """The parameters of one tool."""

    def __init__(self, schema: Any) -> None:
        self._root: Mapping[str, Any] = schema if isinstance(schema, dict) else {}
        top = top_of(self._root)
        self._top: Mapping[str, Any] = top if isinstance(top, dict) else {}
        self._schemas: dict[str, list[Any]] = {}  # of each parameter, one for each alternative
        for one in parameter_lists(self._root):
            for name, child in (one.schemas or {}).items():
                self._schemas.setdefault(name, []).append(child)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._schemas)

    def types_of(self, name: str) -> frozenset[str]:
        """The types that a parameter may have. An undeclared one is text."""
        if name in self._schemas:
            return self.types_in(*self._schemas[name])
        others = self._top.get("additionalProperties")
        return self.types_in(others) if isinstance(others, dict) else TEXT_ONLY

    def choices_of(self, name: str) -> frozenset[str]:
        """The strings among the values that a schema lists: they stay strings even if they look
        like numbers."""
        values = [value for schema in self._schemas.get(name, ()) for value in _listed(schema)]
        return frozenset(value for value in values if isinstance(value, str))

    def types_in(self, *schemas: Any) -> frozenset[str]:
        """The types of all alternatives. Visits each part once: references may be circular."""
        types: set[str] = set()
        seen: set[int] = set()
        waiting = [(schema, True) for schema in schemas]
        while waiting:
            part, is_alternative = waiting.pop()
            if not isinstance(part, dict) or id(part) in seen:
                continue
            seen.add(id(part))
            if part.get("nullable") is True:
                types.add("null")
            if named := _named_types(part):
                types |= named
                continue
            alternatives = [*_options(part, "anyOf"), *_options(part, "oneOf")]
            if isinstance(reference := part.get("$ref"), str):
                alternatives.append(target_of(reference, self._root))
            restrictions = _options(part, "allOf")
            waiting += [(option, True) for option in alternatives]
            waiting += [(option, False) for option in restrictions]
            if is_alternative and not alternatives and not restrictions:
                types |= TYPES  # it names no type, so anything is allowed
        return frozenset(types) if types and types <= TYPES else TYPES


def _named_types(schema: Mapping[str, Any]) -> set[str]:
    """The types that the schema names or, if it names none, those of its listed values."""
    declared = schema.get("type")
    types = {
        t for t in (declared if isinstance(declared, list) else [declared]) if isinstance(t, str)
    }
    return types or {_TYPE_OF.get(type(value), "string") for value in _listed(schema)}


def _options(schema: Mapping[str, Any], key: str) -> list[Any]:
    options = schema.get(key)
    return options if isinstance(options, list) else []


def _listed(schema: Any) -> list[Any]:
    if not isinstance(schema, dict):
        return []
    values = schema.get("enum")
    return [
        *(values if isinstance(values, list) else []),
        *([schema["const"]] if "const" in schema else []),
    ]


def to_json(text: str, types: frozenset[str], choices: frozenset[str] = frozenset()) -> str:
    """The JSON of a parameter's text."""
    bare = text.strip()
    if text not in choices:
        if "null" in types and bare.lower() in NULLS:
            return "null"
        if "boolean" in types and bare.lower() in ("true", "false"):
            return bare.lower()
        if (
            "integer" in types
            and (match := _INTEGER.fullmatch(bare))
            and math.isfinite(float(bare))
        ):
            return match[1]
        if "number" in types and _NUMBER.fullmatch(bare) and math.isfinite(float(bare)):
            return bare
        for type_name, bracket in (("array", "["), ("object", "{")):
            if type_name in types and bare.startswith(bracket) and is_json(bare):
                return bare
    return f'"{quote(text)}"'


def is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return False
    return True
