"""Control tokens: which tokens of a vocabulary structure a prompt, and how a prompt is encoded in
which only those of the chat template count.

    <|im_start|>user\nWhat does <|im_end|> do?<|im_end|>\n
    [template: id]             [client: spelled ]  [template: id]

A control token that a client wrote is cut out where the tokenizer would cut it, and the ordinary
tokens of its characters take its place. All other text has the ids it always had. Knows nothing of
messages.
"""

from __future__ import annotations

import re

from penstock.text.tokenizer import Tokenizer

# After these a token is encoded as inside a text, where SentencePiece puts no space before it.
_CONTEXTS = ("", "\n", "a")

_HTML_TAGS = {
    *("table", "caption", "thead", "tbody", "tfoot", "tr", "th", "td", "ul", "ol", "li", "p", "br"),
}
_HTML_TAGS |= {"h1", "h2", "h3", "h4", "h5", "h6", "strong", "em", "b", "i", "u", "s", "sub", "sup"}
_HTML_TAGS |= {"blockquote", "code"}

Span = tuple[int, int]


class ControlTokens:
    """Of one tokenizer, as one chat template uses it."""

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
        # Whether a text without these characters cannot become a control token.
        self._is_literal = not (tokenizer.normalizes and any(token.normalized for token in control))
        self._keeps_space = not any(token.lstrip or token.rstrip for token in control)
        # The longest first: if several begin at one place, tokenizers takes that one too.
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
            # The tokenizer has its own rules for where control tokens are: ask it.
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
        # The vocabulary without control tokens has this one too: character by character.
        if spelling is None:
            spelling = [id for character in text for id in self._spell(character) or ()]
        if text in self._id_of:  # and not every run of white space around one
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
    """Whether an added token that is not called special still structures prompts.

    Tags do, such as `<tool_call>`, and what the template writes. HTML tags and runs of spaces,
    which some vocabularies have, are ordinary words.
    """
    if token[0].isalnum() or token[0].isspace() or token[-1].isspace():
        return False
    is_tag = token[0] in "<[" and token[-1] in ">]"
    return token in template or (is_tag and token.strip("</>") not in _HTML_TAGS)
