"""The operator's system prompt: read from a file, given to chats that have none, and computed at start.

What all prompts that begin with it have in common is found by asking: two chats that differ in the user's
first character are rendered and compared, so that no template needs to be understood. The engines prefill it
before they are ready, and the first chat finds it in the prefix cache, as do chats that bring the same system
prompt themselves. One with tools begins otherwise in most templates; it is computed when it first comes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.text.chat_prompt import ChatEncoder

Message = dict[str, Any]


def read_system_prompt(file: str | None) -> str | None:
    if file is None:
        return None
    path = Path(file).expanduser()
    try:
        prompt = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"Cannot read the system prompt from {path}", f"{error}.", "Name a text file in UTF-8."
        ) from error
    if not prompt:
        raise ConfigError(f"The system prompt in {path} is empty", "", "Leave --system-prompt-file out.")
    return prompt


def with_system_prompt(messages: list[Message], prompt: str | None) -> list[Message]:
    """A chat that has a system message keeps its own."""
    if prompt is None or any(message["role"] == "system" for message in messages):
        return messages
    return [{"role": "system", "content": prompt}, *messages]


def shared_prompt(
    prompt: str, chat_encoder: ChatEncoder, enable_thinking: bool | None = None
) -> tuple[int, ...]:
    """The token ids that chats with this system prompt begin with, and the one after."""
    arguments = {} if enable_thinking is None else {"enable_thinking": enable_thinking}

    def token_ids(text: str) -> list[int]:
        messages = with_system_prompt([{"role": "user", "content": text}], prompt)
        return chat_encoder.encode(chat_encoder.render(messages, variables=arguments))

    one, other = token_ids("a"), token_ids("b")
    num_shared = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), len(one) - 1)
    return tuple(one[: num_shared + 1])
