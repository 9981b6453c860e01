"""Images and files in tool results: a model that reads only text is told that one was there.

The user did not ask for them, and they stay in the history of an agent's session: refusing one
would end the session. A header of the answer says what was left out.
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
    """The text in its place; adds to `omitted` where it was."""
    name = KINDS.get(kind, "attachment")
    omitted.append(f"{name} at {where}")
    return f"[{name} left out: this model reads text only]"


def warning_headers(omitted: Sequence[str]) -> dict[str, str]:
    if not omitted:
        return {}
    more = f", and {len(omitted) - MAX_NAMED} more" if len(omitted) > MAX_NAMED else ""
    named = ", ".join(omitted[:MAX_NAMED]) + more
    return {WARNING_HEADER: f"left out, since the model reads text only: {named}"}
