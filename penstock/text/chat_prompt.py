"""Turns conversations into prompts: renders the chat template, and tokenises so that a client's
text never becomes a control token.

`<|im_end|>` in a message, a tool result, a name or a schema becomes ordinary tokens, so it cannot
end its turn. Only text of the template becomes control tokens. An operator may turn this off; then
all text is tokenised alike.

    <|im_start|>user\\nWhat does <|im_end|> do?<|im_end|>\\n
    [template: id]             [client: spelled ]  [template: id]

A control token that a client wrote is cut out where the tokenizer would cut it, and replaced with
the ordinary tokens of its characters. All other text keeps its ids.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from penstock.errors import ContextLengthError, RequestError
from penstock.text.content_marks import ContentMarker, Marks
from penstock.text.dialects import Thinking, dialect_of
from penstock.text.template import ChatTemplate
from penstock.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A prompt as text."""

    text: str
    marked: str  # the same, with stand-ins for characters that a client wrote
    num_reply_chars: int = 0  # at its end: the text that the reply continues

    def opens(self, thinking: Thinking | None) -> bool:
        """Whether the template has opened thinking, so that the reply is inside it."""
        rendered = self.marked[: len(self.marked) - self.num_reply_chars]
        return thinking is not None and thinking.is_open_after(rendered)


class ChatEncoder:
    """Renders and tokenises conversations with one chat template and one tokenizer."""

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
        reply_start: str = "",  # text that the reply continues
        # Reasoning before it; None: thinking that the template opens stays open.
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
        """The prompt, and the text that the reply continues. If the template has opened thinking,
        it is closed before an answer; without an answer, the reply continues the thinking."""
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
    """Truncates a conversation to the context. Keeps system messages at the start, and cuts before
    a user message, so that no call loses its result and no result its call.

    Keeps as many of the last messages as fit, but not all; `require_fit` raises
    `ContextLengthError` for too many. If even the last turn does not fit, that error is raised."""
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


# After one of these, a token is encoded as inside a text, where SentencePiece adds no space.
_CONTEXTS = ("", "\n", "a")

_HTML_TAGS = {
    *("table", "caption", "thead", "tbody", "tfoot", "tr", "th", "td", "ul", "ol", "li", "p", "br"),
}
_HTML_TAGS |= {"h1", "h2", "h3", "h4", "h5", "h6", "strong", "em", "b", "i", "u", "s", "sub", "sup"}
_HTML_TAGS |= {"blockquote", "code"}

Span = tuple[int, int]


class ControlTokens:
    """The control tokens of one tokenizer, as one chat template uses them."""

    def __init__(self, tokenizer: Tokenizer, template: str | None) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens
        self._id_of = {
            token.content: id
            for id, token in added.items()
            if token.special or _is_markup(token.content, template or "")
        }
        self._ids = frozenset(self._id_of.values())
        control = [added[id] for id in self._ids]
        # Whether normalising cannot turn other text into a control token.
        self._is_literal = not (tokenizer.normalizes and any(token.normalized for token in control))
        self._keeps_space = not any(token.lstrip or token.rstrip for token in control)
        # Longest first: if several begin at one position, tokenizers also takes the longest.
        longest_first = sorted((token.content for token in added.values()), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._spellings: dict[str, list[int]] = {}

    @property
    def texts(self) -> list[str]:
        return list(self._id_of)

    def encode(self, text: str, marked: str, tenant: str = "") -> list[int]:
        """The ids of a text. `marked` is the same text with other characters where a client wrote
        what could be part of a control token; the control tokens that remain in it are the
        template's."""
        token_ids = self._tokenizer.encode(text, False, tenant)
        if self._is_literal and marked == text:
            return token_ids
        found, genuine = self._find(text), self._find(marked)
        if self._is_literal and found == genuine:
            return token_ids
        if not set(genuine) <= set(found):
            return self._encode_apart(text, marked, genuine, tenant)
        places = [place for place, id in enumerate(token_ids) if id in self._ids]
        spans = found
        if not self._keeps_space or [token_ids[place] for place in places] != self._ids_of(
            text, found
        ):
            # The tokenizer has its own rules for the spans of control tokens: use its offsets.
            token_ids, all_spans = self._tokenizer.encode_with_spans(text)
            places = [place for place, id in enumerate(token_ids) if id in self._ids]
            spans = [all_spans[place] for place in places]
        genuine_starts = {start for start, _ in genuine}
        forged = [
            (place, text[start:end])
            for place, (start, end) in zip(places, spans)
            if genuine_starts.isdisjoint(range(start, end))
        ]
        return self._spell_out(token_ids, forged)

    def _encode_apart(self, text: str, marked: str, genuine: list[Span], tenant: str) -> list[int]:
        """For a text in which a forged control token overlaps one of the template's."""
        token_ids: list[int] = []
        rest = 0
        for start, end in genuine:
            token_ids += self.encode(text[rest:start], marked[rest:start], tenant)
            token_ids += self._ids_of(text, [(start, end)])
            rest = end
        return token_ids + self.encode(text[rest:], marked[rest:], tenant)

    def _ids_of(self, text: str, spans: list[Span]) -> list[int]:
        return [self._id_of[text[start:end]] for start, end in spans]

    def _find(self, text: str) -> list[Span]:
        return [match.span() for match in self._pattern.finditer(text) if match[0] in self._id_of]

    def _spell_out(self, token_ids: list[int], forged: list[tuple[int, str]]) -> list[int]:
        spelled: list[int] = []
        rest = 0
        for place, text in forged:
            spelled += token_ids[rest:place]
            spelled += self._spelling(text)
            rest = place + 1
        return spelled + token_ids[rest:]

    def _spelling(self, text: str) -> list[int]:
        if (known := self._spellings.get(text)) is not None:
            return known
        spelling = self._spell(text)
        # The text is also an ordinary token: spell it character by character.
        if spelling is None:
            spelling = [id for character in text for id in self._spell(character) or ()]
        if text in self._id_of:  # not one with white space around it: there are too many
            self._spellings[text] = spelling
        return spelling

    def _spell(self, text: str) -> list[int] | None:
        """Ordinary tokens for exactly this text, if there are any."""
        for context in _CONTEXTS:
            before = self._tokenizer.encode_plain(context)
            token_ids = self._tokenizer.encode_plain(context + text)
            spelling = token_ids[len(before) :]
            data = b"".join(map(self._tokenizer.token_bytes, spelling))
            is_apart = token_ids[: len(before)] == before and data == text.encode()
            if is_apart and self._ids.isdisjoint(spelling):
                return spelling
        return None


def _is_markup(token: str, template: str) -> bool:
    """Whether an added token that is not marked special still structures prompts.

    Tags such as `<tool_call>` do, and text of the template. HTML tags and runs of spaces, which
    some vocabularies have, are ordinary words.
    """
    if token[0].isalnum() or token[0].isspace() or token[-1].isspace():
        return False
    is_tag = token[0] in "<[" and token[-1] in ">]"
    return token in template or (is_tag and token.strip("</>") not in _HTML_TAGS)
