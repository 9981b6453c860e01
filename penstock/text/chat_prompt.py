"""Conversations as prompts: rendered with the chat template and tokenised so that content stays
content.

`<|im_end|>` in a message, a tool result, a name or a schema becomes ordinary tokens, so it cannot
end its turn. Only what the template writes becomes control tokens. An operator may turn this off,
so that a text means the same wherever it comes from.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from penstock.errors import ContextLengthError, RequestError
from penstock.text.content_marks import ContentMarker, Marks
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
    num_reply_chars: int = 0  # at its end: what the reply continues

    def opens(self, thinking: Thinking | None) -> bool:
        """Whether the template has opened thinking, so that the reply is inside it."""
        rendered = self.marked[: len(self.marked) - self.num_reply_chars]
        return thinking is not None and thinking.is_open_after(rendered)


class ChatEncoder:
    """A chat template and a tokenizer."""

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        allow_special_tokens_in_content: bool = False,
    ) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._control: ControlTokens | None = None
        self._thinking = dialect_of(template.source).thinking
        if template.source is not None and not allow_special_tokens_in_content:
            self._control = ControlTokens(tokenizer, template.source)
            self._marker = ContentMarker(self._control.texts, template.source, self._thinking)
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
        reply_start: str = "",  # what the reply continues
        # Before that; None: thinking that the template opens stays open.
        reply_thought: str | None = None,
    ) -> RenderedChat:
        if self._control is None:
            text = self._template.render(messages, tools, add_generation_prompt, **variables)
            text, reply_start = self._after_thought(text, reply_thought, reply_start, Marks())
            return RenderedChat(text + reply_start, text + reply_start, len(reply_start))
        context = self._template.context(messages, tools, add_generation_prompt, variables)
        payload, marks = self._marker.mark(context, f"{reply_thought or ''}{reply_start}")
        try:
            rendered = self._template.render_json(payload, len(messages) + len(tools or ()))
        except RequestError as error:  # which may quote the messages
            error.what, error.why = marks.remove(error.what), marks.remove(error.why)
            raise
        prompt, reply_start = self._after_thought(
            marks.unescape(rendered), reply_thought, reply_start, marks
        )
        marked = prompt + marks.put(reply_start)
        return RenderedChat(marks.remove(marked), marked, len(reply_start))

    def _after_thought(
        self, prompt: str, thought: str | None, reply_start: str, marks: Marks
    ) -> tuple[str, str]:
        """The prompt and what the reply continues, if the template has opened thinking: an answer
        comes after the end of thinking, and without an answer thinking continues."""
        if thought is None or self._thinking is None or not self._thinking.is_open_after(prompt):
            return prompt, reply_start
        if not thought:  # clients send whole replies back, reasoning included
            thought, reply_start = self._thinking.split(reply_start)
        if not reply_start:
            return prompt, thought
        return prompt + marks.put(thought) + self._thinking.forced_end, reply_start

    def encode(self, chat: RenderedChat, tenant: str = "") -> list[int]:
        if self._control is None:
            return self._tokenizer.encode(chat.text, False, tenant)
        return self._control.encode(chat.text, chat.marked, tenant)


def without_oldest(
    messages: list[dict[str, Any]], require_fit: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """A conversation truncated to the context: system messages at the start stay, and it is cut
    before a user message, so that no call loses its result and no result its call.

    As many of the last messages as fit, but not all; `require_fit` raises `ContextLengthError`
    for too many. If even the last turn does not fit, it raises that error."""
    num_system = len(
        list(itertools.takewhile(lambda message: message["role"] == "system", messages))
    )
    places = range(num_system, len(messages))
    starts = [place for place in places if messages[place]["role"] == "user"] or [num_system]

    def cut_at(start: int) -> list[dict[str, Any]]:
        return [*messages[:num_system], *messages[start:]]

    first, last = min(1, len(starts) - 1), len(starts) - 1
    while first < last:
        middle = (first + last) // 2
        try:
            require_fit(cut_at(starts[middle]))
            last = middle
        except ContextLengthError:
            first = middle + 1
    require_fit(cut_at(starts[last]))
    return cut_at(starts[last])
