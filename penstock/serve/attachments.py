"""Images and files in the results of tools: a model that reads text is told that one was there.

They are no wish of the user's, and stay in the history of an agent's session: to refuse one would end the
session. What was left out, a header of the answer says.
"""

from __future__ import annotations

from collections.abc import Sequence

WARNING_HEADER = "x-penstock-warning"
MAX_NAMED = 8
KINDS = {  # as the APIs call them
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "document": "document",
    "file": "document",
    "input_file": "document",
    "input_audio": "audio",
}


def replace_attachment(kind: str, where: str, omitted: list[str]) -> str:
    """The text in its place; notes in `omitted` where it stood."""
    name = KINDS.get(kind, "attachment")
    omitted.append(f"{name} at {where}")
    return f"[{name} left out: this model reads text only]"


def warning_headers(omitted: Sequence[str]) -> dict[str, str]:
    if not omitted:
        return {}
    more = f", and {len(omitted) - MAX_NAMED} more" if len(omitted) > MAX_NAMED else ""
    named = ", ".join(omitted[:MAX_NAMED]) + more
    return {WARNING_HEADER: f"left out, since the model reads text only: {named}"}
