"""JSON schemas whose objects have only the keys that they list, unless a schema says otherwise.

JSON Schema allows any other key if `additionalProperties` is missing, and weak models then write
keys until the limit. A key that is listed anywhere for the same object stays allowed: members of
`allOf` describe one object together, so they are closed as one; if its keys cannot be determined,
it stays open. Knows nothing of grammars.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from penstock.text.references import target_of

Schema = dict[str, Any]

_ABOUT_OTHER_KEYS = (
    "additionalProperties",
    "unevaluatedProperties",
    "patternProperties",
    "propertyNames",
)
_ALTERNATIVES = (
    *("anyOf", "oneOf", "if", "then", "else", "dependentSchemas", "$ref", "$dynamicRef", "not"),
)
_NAMED_SCHEMAS = ("properties", "$defs", "definitions")
_LISTED_SCHEMAS = ("anyOf", "oneOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "contains", "unevaluatedItems")
_LISTING = {"properties", "allOf"}
_ANNOTATIONS = ("description", "title", "default")
MAX_STEPS, MAX_DEPTH = 2_000, 100  # members of `allOf` and references: they may be circular


@dataclass(frozen=True, slots=True)
class _Keys:
    listed: dict[str, bool]  # in order; True is the schema that allows anything
    required: set[str]


def close_objects(schema: Schema) -> Schema:
    """A closed copy; the original is not changed."""
    return _Closing(schema).closed(schema)


class _Closing:
    def __init__(self, root: Schema) -> None:
        self._root = root
        self._num_steps = 0
        self._shared = {id(part) for part in _parts_by_reference(root, self._resolve)}

    def closed(self, schema: Any, is_part: bool = False) -> Any:
        """`is_part`: other schemas describe the same object."""
        if not isinstance(schema, dict):
            return schema
        new = dict(schema)
        for keyword in _NAMED_SCHEMAS:
            if isinstance(schema.get(keyword), dict):
                new[keyword] = {name: self.closed(child) for name, child in schema[keyword].items()}
        for keyword in _SCHEMAS:
            if keyword in schema:
                new[keyword] = self.closed(schema[keyword])
        is_split = is_part or "properties" in schema
        for keyword in _LISTED_SCHEMAS:
            if isinstance(schema.get(keyword), list):
                new[keyword] = [
                    self.closed(child, is_split and keyword != "prefixItems")
                    for child in schema[keyword]
                ]
        if isinstance(parts := schema.get("allOf"), list):
            is_split = is_split or len(parts) > 1
            new["allOf"] = [self.closed(part, is_split) for part in parts]
        if is_split and not is_part and id(schema) not in self._shared:
            self._close(schema, new)
        return new

    def _close(self, schema: Schema, new: Schema) -> None:
        keys = self._keys(schema)
        if keys is None or not keys.required <= keys.listed.keys():
            return
        if "allOf" in schema:  # whose members stay open
            new["properties"] = keys.listed | new.get("properties", {})
        new["additionalProperties"] = False

    def _keys(self, schema: Any, depth: int = 0) -> _Keys | None:
        """The keys of an object, its `allOf` included; None: unknown, or there may be others."""
        self._num_steps += 1
        if not isinstance(schema, dict) or self._num_steps > MAX_STEPS or depth > MAX_DEPTH:
            return None
        if "$ref" in schema and schema.keys() <= {"$ref", *_ANNOTATIONS}:
            return self._keys(self._resolve(schema["$ref"]), depth + 1)
        listed, parts = schema.get("properties", {}), schema.get("allOf", [])
        if (
            not isinstance(listed, dict)
            or not isinstance(parts, list)
            or not schema.keys() & _LISTING
        ):
            return None
        if not schema.keys().isdisjoint(_ABOUT_OTHER_KEYS):
            return None
        if any(_may_list(schema[word]) for word in _ALTERNATIVES if word in schema):
            return None
        keys = _Keys(dict.fromkeys(listed, True), set(_required(schema)))
        for part in parts:
            more = self._keys(part, depth + 1)
            if more is not None:
                keys = _Keys(keys.listed | more.listed, keys.required | more.required)
            elif _may_list(part):
                return None
        return keys

    def _resolve(self, reference: Any) -> Any:
        return target_of(reference, self._root)


def _may_list(schema: Any) -> bool:
    """Whether it may list keys of the same object."""
    if isinstance(schema, list):
        return any(map(_may_list, schema))
    if isinstance(schema, str):  # a reference
        return True
    return isinstance(schema, dict) and not schema.keys() <= {"required", "type", *_ANNOTATIONS}


def _required(schema: Schema) -> list[str]:
    required = schema.get("required")
    return (
        [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    )


def _parts_by_reference(schema: Any, resolve: Callable[[Any], Any]) -> Iterator[Schema]:
    """Definitions that are one of several parts of an object: closed, they would forbid the other
    parts."""
    unseen = [schema]
    while unseen:
        value = unseen.pop()
        if isinstance(value, dict):
            parts = value.get("allOf")
            members = list(parts) if isinstance(parts, list) else []
            if len(members) > 1 or "properties" in value:
                for word in ("anyOf", "oneOf"):
                    members += value[word] if isinstance(value.get(word), list) else []
                for member in (*members, value):
                    target = resolve(member.get("$ref")) if isinstance(member, dict) else None
                    if isinstance(target, dict):
                        yield target
        children = value.values() if isinstance(value, dict) else value
        unseen += [child for child in children if isinstance(child, dict | list)]
