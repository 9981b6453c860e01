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
        elif isinstance(part, list) and name in map(str, range(len(part))):
            part = part[int(name)]
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
    names: dict[str, str] = {}  # of definitions, by reference
    unseen: list[str] = []

    def copy(part: Any) -> Any:
        if isinstance(part, list):
            return [copy(item) for item in part]
        if not isinstance(part, dict):
            return part
        new = {k: v if k in ("enum", "const") else copy(v) for k, v in part.items()}
        if isinstance(part.get("$id"), str):  # references would be about this part only
            del new["$id"]
        reference = part.get("$ref")
        if isinstance(reference, str) and target_of(reference, root) is not None:
            if reference not in names:
                names[reference] = str(len(names))
                unseen.append(reference)
            new["$ref"] = f"#/$defs/{names[reference]}"
        return new

    alone: Schema = copy(schema)
    definitions: Schema = {}
    while unseen:
        reference = unseen.pop()
        definitions[names[reference]] = copy(target_of(reference, root))
    return {**alone, "$defs": definitions} if definitions else alone
