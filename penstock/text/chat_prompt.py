"""Conversations as prompts: rendered with the chat template and encoded so that content stays content.

`<|im_end|>` in a message, a tool's result, a name or a schema is spelled out in ordinary tokens, so it cannot
end the turn it stands in. Only what the template writes becomes control tokens. An operator may ask for the
old way, in which a text means the same whoever wrote it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from penstock.errors import RequestError
from penstock.text.content_marks import ContentMarker
from penstock.text.control_tokens import ControlTokens
from penstock.text.dialects import Thinking, dialect_of
from penstock.text.template import ChatTemplate
from penstock.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A prompt as text."""

    text: str
    marked: str  # the same, with stand-ins for characters that a client wrote
    num_reply_chars: int = 0  # at its end: what the reply goes on from

    def opens(self, thinking: Thinking | None) -> bool:
        """Whether the template has begun a thought, so that the reply is inside it."""
        rendered = self.marked[: len(self.marked) - self.num_reply_chars]
        return thinking is not None and thinking.is_open_after(rendered)


class ChatEncoder:
    """A chat template and a tokenizer."""

    def __init__(
        self, template: ChatTemplate, tokenizer: Tokenizer, allow_special_tokens_in_content: bool = False
    ) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._control: ControlTokens | None = None
        if template.source is not None and not allow_special_tokens_in_content:
            self._control = ControlTokens(tokenizer, template.source)
            thinking = dialect_of(template.source).thinking
            self._marker = ContentMarker(self._control.texts, template.source, thinking)
            if self._marker.unprotected:
                logger.warning(
                    "Control tokens that look like words stay control tokens in messages: %s",
                    ", ".join(map(repr, self._marker.unprotected)),
                )

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        *,
        variables: Mapping[str, Any] = MappingProxyType({}),  # of the template
        reply_start: str = "",  # what the reply goes on from
    ) -> RenderedChat:
        if self._control is None:
            text = self._template.render(messages, tools, add_generation_prompt, **variables) + reply_start
            return RenderedChat(text, text, len(reply_start))
        context = self._template.context(messages, tools, add_generation_prompt, variables)
        payload, marks = self._marker.mark(context, reply_start)
        try:
            rendered = self._template.render_json(payload, len(messages) + len(tools or ()))
        except RequestError as error:  # which may quote the messages
            error.what, error.why = marks.remove(error.what), marks.remove(error.why)
            raise
        marked = marks.unescape(rendered) + marks.put(reply_start)
        return RenderedChat(marks.remove(marked), marked, len(reply_start))

    def encode(self, chat: RenderedChat, tenant: str = "") -> list[int]:
        if self._control is None:
            return self._tokenizer.encode(chat.text, False, tenant)
        return self._control.encode(chat.text, chat.marked, tenant)
