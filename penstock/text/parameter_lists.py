"""The parameters of a tool, as its JSON schema lists them: behind references, in `allOf`, and as
alternatives in `anyOf` and `oneOf`. Schemas come from requests: whatever they contain, the work is
bounded. Knows nothing of grammars.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.text.references import target_of

MAX_LISTS = 32
MAX_STEPS, MAX_DEPTH = 2_000, 8  # parts and references: they may be circular


@dataclass(frozen=True, slots=True)
class ParameterList:
    """One alternative: the schema of each parameter, in order, and which of them are required."""

    schemas: Mapping[str, Any] | None  # None: they are unknown
    required: frozenset[str]

    def joined(self, other: ParameterList) -> ParameterList:
        """What both say about the same object."""
        required = self.required | other.required
        if self.schemas is None or other.schemas is None:
            known = other.schemas if self.schemas is None else self.schemas
            return ParameterList(known, required)
        schemas = dict(self.schemas)
        for name, schema in other.schemas.items():
            schemas[name] = _both(schemas[name], schema) if name in schemas else schema
        return ParameterList(schemas, required)


def parameter_lists(root: Any) -> list[ParameterList]:
    """The alternatives, of which the arguments match one. Too many of them count as unknown."""
    return _Reader(root).lists_of(root, 0)


def listed_values(schema: Any) -> list[Any]:
    """The values of `const` or `enum`."""
    if not isinstance(schema, dict):
        return []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else []


class _Reader:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._num_steps = 0

    def lists_of(self, schema: Any, depth: int) -> list[ParameterList]:
        self._num_steps += 1
        if not isinstance(schema, dict) or depth > MAX_DEPTH or self._num_steps > MAX_STEPS:
            return [ParameterList(None, frozenset())]
        schemas = schema.get("properties")
        required = frozenset(name for name in _list(schema, "required") if isinstance(name, str))
        found = [ParameterList(schemas if isinstance(schemas, dict) else None, required)]
        for options in self._groups(schema):
            others = [one for part in options for one in self.lists_of(part, depth + 1)]
            if others and len(found) * len(others) <= MAX_LISTS:
                found = [one.joined(other) for one in found for other in others]
        return found

    def _groups(self, schema: Mapping[str, Any]) -> list[list[Any]]:
        """Lists of schemas: of each list, the arguments match at least one."""
        target = target_of(schema.get("$ref"), self._root)
        groups = [[part] for part in ([] if target is None else [target])]
        groups += [[part] for part in _list(schema, "allOf")]
        for keyword in ("anyOf", "oneOf"):
            groups.append([part for part in _list(schema, keyword) if _may_be_object(part)])
        return groups


def _both(first: Any, second: Any) -> Any:
    """A schema for a value that matches two. Listed values stay a list."""
    if first is True or first == {} or first == second:
        return second
    if second is True or second == {}:
        return first
    values, others = listed_values(first), listed_values(second)
    if values and others:
        return {"enum": [value for value in values if value in others] or values}
    if values or others:
        return first if values else second
    return {"allOf": [first, second]}


def _may_be_object(schema: Any) -> bool:
    named = schema.get("type") if isinstance(schema, dict) else None
    types = named if isinstance(named, list) else [named]
    return schema is not False and (named is None or "object" in types)


def _list(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []
