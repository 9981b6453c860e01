"""System messages as chat templates accept them, for every API: one, at the start.

Agents send several, and some later, for example when a permission or a mode has changed. Those at
the start are joined. One inside a conversation becomes part of the adjacent user turn, marked as
Claude Code marks its own insertions into user messages, which models know.

Images and files in tool results are replaced by a note: they stay in the history of an agent's
session, so an error would end the session. A header of the answer lists what was left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PARAGRAPH = "\n\n"
PlainMessage = dict[str, Any]  # as chat templates expect it


def reminder(text: str) -> str:
    """An instruction inside a conversation."""
    return f"<system-reminder>\n{text}\n</system-reminder>"


def plain_call(id: str | None, name: str, arguments: Any) -> dict[str, Any]:
    """A call of a tool, as chat templates expect it."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def place_instructions(messages: list[PlainMessage]) -> list[PlainMessage]:
    """The same conversation with at most one system message, at the start."""
    num_leading = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    placed: list[PlainMessage] = []
    if num_leading:
        texts = [m["content"] for m in messages[:num_leading] if m["content"]]
        placed.append({**messages[0], "content": PARAGRAPH.join(texts)})
    is_open = False  # the last message is a reminder, which the next user message joins
    for message in messages[num_leading:]:
        is_reminder = message["role"] == "system"
        if is_reminder:
            message = {"role": "user", "content": reminder(message["content"])}
        is_users = message["role"] == "user"
        if is_users and placed and placed[-1]["role"] == "user" and (is_reminder or is_open):
            last = placed.pop()
            message = {**last, "content": PARAGRAPH.join([last["content"], message["content"]])}
        placed.append(message)
        is_open = is_reminder
    return placed


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
    """The text in place of an image or file in a tool's result; adds to `omitted` where it was."""
    name = KINDS.get(kind, "attachment")
    omitted.append(f"{name} at {where}")
    return f"[{name} left out: this model reads text only]"


def warning_headers(omitted: Sequence[str]) -> dict[str, str]:
    if not omitted:
        return {}
    more = f", and {len(omitted) - MAX_NAMED} more" if len(omitted) > MAX_NAMED else ""
    named = ", ".join(omitted[:MAX_NAMED]) + more
    return {WARNING_HEADER: f"left out, since the model reads text only: {named}"}
