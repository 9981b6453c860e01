"""References inside a JSON schema, such as `#/$defs/Color` and `#/properties/from/items`."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]


def target_of(reference: Any, root: Any) -> Any:
    """The part of the schema `root` that a reference names; None if it cannot be found."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    part = root
    for step in unquote(reference).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, dict):
            part = part.get(name)
        elif isinstance(part, list) and name.isascii() and name.isdigit() and len(name) < 10:
            part = part[int(name)] if int(name) < len(part) else None
        else:
            return None
    return part


def top_of(root: Any) -> Any:
    """What a root that is only a reference stands for, as generators write recursive schemas."""
    top = root
    for _ in range(8):  # references may be circular
        if not isinstance(top, dict) or "properties" in top:
            break
        target = target_of(top.get("$ref"), root)
        if target is None:
            break
        top = target
    return top


def standalone(schema: Schema, root: Schema) -> Schema:
    """A part of `root` as a schema of its own: its definitions are copies of what it refers to."""
    names: dict[int, str] = {}  # of definitions, by the identity of what they copy
    unseen: list[Any] = []

    def copy(part: Any) -> Any:
        if isinstance(part, list):
            return [copy(item) for item in part]
        if not isinstance(part, dict):
            return part
        new = {k: v if k in ("enum", "const") else copy(v) for k, v in part.items()}
        if isinstance(part.get("$id"), str):  # references would be about this part only
            del new["$id"]
        target = target_of(part.get("$ref"), root)
        if target is not None:
            if id(target) not in names:
                names[id(target)] = str(len(names))
                unseen.append(target)
            new["$ref"] = f"#/$defs/{names[id(target)]}"
        return new

    alone: Schema = copy(schema)
    definitions: Schema = {}
    while unseen:
        target = unseen.pop()
        definitions[names[id(target)]] = copy(target)
    return {**alone, "$defs": definitions} if definitions else alone
