"""The operator's system prompt: read from a file, added to chats that have none, and computed at
start.

Two chats that differ in the user's first character are rendered and compared, to find the tokens
that all prompts with this system prompt share, whatever the template does. The engines
prefill these tokens before they are ready, so the first chat finds them in the prefix cache, as do
chats that send the same system prompt themselves. In most templates a chat with tools begins
differently; its prefix is computed with the first such chat.
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
            f"Cannot read the system prompt from {path}", f"{error}.", "Use a text file in UTF-8."
        ) from error
    if not prompt:
        raise ConfigError(f"The system prompt in {path} is empty", "", "Omit --system-prompt-file.")
    return prompt


def with_system_prompt(messages: list[Message], prompt: str | None) -> list[Message]:
    """A chat that has a system message keeps it."""
    if prompt is None or any(message["role"] == "system" for message in messages):
        return messages
    return [{"role": "system", "content": prompt}, *messages]


def shared_prompt(
    prompt: str, chat_encoder: ChatEncoder, enable_thinking: bool | None = None
) -> tuple[int, ...]:
    """The token ids that chats with this system prompt share, plus one more."""
    arguments = {} if enable_thinking is None else {"enable_thinking": enable_thinking}

    def token_ids(text: str) -> list[int]:
        messages = with_system_prompt([{"role": "user", "content": text}], prompt)
        return chat_encoder.encode(chat_encoder.render(messages, variables=arguments))

    one, other = token_ids("a"), token_ids("b")
    num_shared = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), len(one) - 1)
    return tuple(one[: num_shared + 1])
