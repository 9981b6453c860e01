"""From a conversation to the tokens a model is trained on, exactly as it will meet them when it is
served.

The prompt is what the chat template renders before the model's turn; the completion is what the
model must write after it, turn end included. Both are tokenised apart, as at inference.
"""

from __future__ import annotations

from typing import Protocol

from penstock.eval.conversation import Conversation
from penstock.text.template import ChatTemplate


class Encoder(Protocol):
    """What is needed of a tokenizer; penstock.text.tokenizer.Tokenizer has it."""

    def encode(self, text: str) -> list[int]: ...


def encode(
    conversation: Conversation, tokenizer: Encoder, template: ChatTemplate
) -> tuple[list[int], int]:
    """The tokens, and the place of the first one that is the model's own."""
    prompt = tokenizer.encode(render_prompt(conversation, template))
    return prompt + tokenizer.encode(conversation.completion), len(prompt)


def render_prompt(conversation: Conversation, template: ChatTemplate) -> str:
    return template.render(
        conversation.prompt,
        tools=conversation.tools,
        add_generation_prompt=True,
        enable_thinking=conversation.enable_thinking,
    )
