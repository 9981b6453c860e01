"""Encodes a conversation into training tokens, exactly as the model sees it when served.

The prompt is what the chat template renders before the model's turn; the completion is what the
model must generate, with the end of turn. They are tokenized separately, as at inference.
"""

from __future__ import annotations

from typing import Protocol

from penstock.eval.conversation import Conversation
from penstock.text.template import ChatTemplate


class Encoder(Protocol):
    """The methods used of a tokenizer, such as penstock.text.tokenizer.Tokenizer."""

    def encode(self, text: str) -> list[int]: ...


def encode(
    conversation: Conversation, tokenizer: Encoder, template: ChatTemplate
) -> tuple[list[int], int]:
    """The tokens, and the index of the first token that the model generates."""
    prompt = tokenizer.encode(render_prompt(conversation, template))
    return prompt + tokenizer.encode(conversation.completion), len(prompt)


def render_prompt(conversation: Conversation, template: ChatTemplate) -> str:
    return template.render(
        conversation.prompt,
        tools=conversation.tools,
        add_generation_prompt=True,
        enable_thinking=conversation.enable_thinking,
    )
