"""Marks a client's text before a chat template mixes it with its own.

A control token is genuine if the template wrote all of it. So the characters that control tokens
begin and end with, `<` and `>` in most vocabularies, are replaced with stand-ins wherever a client
wrote them: in contents, names, arguments, tool definitions and template variables. Every control
token in the rendered text was then written by the template, even where a client's text ends with
half of one. A stand-in replaces one character with one, so templates trim and cut as before; but
they find none of their markup in a client's text.

Stand-ins are noncharacters, which Unicode reserves for a program's own use; those that the request
contains are not used. Works on the template's JSON input. Knows nothing of token ids.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import RequestError
from penstock.text.dialects import Thinking
from penstock.text.template import encode_context

STAND_INS = tuple(map(chr, range(0xFDD0, 0xFDF0)))

_JSON_SYNTAX = frozenset("[]{}:,")
_JSON_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
# Never replaced: field names that templates look up contain them, or JSON escapes them.
_UNMARKED = frozenset("_-./ \t\r\n\"'\\")
# Words that templates compare with: they stay even if a template builds control tokens from words.
_STRUCTURE = {
    *("system", "developer", "user", "assistant", "tool", "function", "messages", "role"),
    *("content", "name", "reasoning_content", "tool_call_id", "tool_calls", "id", "tools", "type"),
    *("text", "description", "parameters", "arguments", "properties", "required", "object"),
    *("array", "string", "number", "integer", "boolean", "items", "enum"),
}
# Where the text of a template ends and an expression begins, and the reverse.
_TEXT_END = re.compile(r"(?=[\"'{%])")
_TEXT_START = re.compile(r"(?<=[\"'}%])|(?<=%s)")


@dataclass(frozen=True, slots=True)
class Marks:
    """The stand-ins of one request, by the characters they replace."""

    of_characters: Mapping[str, str] = field(default_factory=dict)  # wherever a client wrote them
    of_letters: Mapping[str, str] = field(default_factory=dict)  # in a few whole words
    may_be_escaped: bool = False  # by tojson(ensure_ascii=true)

    def put(self, text: str) -> str:
        for character, stand_in in self.of_characters.items():
            text = text.replace(character, stand_in)
        return text

    def remove(self, text: str) -> str:
        for character, stand_in in itertools.chain(
            self.of_characters.items(), self.of_letters.items()
        ):
            text = text.replace(stand_in, character)
        return text

    def unescape(self, text: str) -> str:
        """Turns escaped stand-ins back into one character."""
        if self.may_be_escaped:
            for stand_in in itertools.chain(self.of_characters.values(), self.of_letters.values()):
                text = text.replace(_escape(stand_in), stand_in)
        return text


class ContentMarker:
    """Marks contexts of one chat template, for the control tokens of its model."""

    def __init__(
        self, control_tokens: Iterable[str], template: str, thinking: Thinking | None
    ) -> None:
        tokens = list(control_tokens)
        markable = {
            token: [c for c in token if not (c.isalnum() or c in _UNMARKED)] for token in tokens
        }
        self.unprotected = [token for token in tokens if not markable[token]]
        ends = {end for found in markable.values() for end in (*found[:1], *found[-1:])}
        self._characters = sorted(ends)
        words = _completed_words(tokens, template) - _STRUCTURE
        self._letter_of = _choose_letters({word for word in words if ends.isdisjoint(word)})
        self._escapes = "ensure_ascii" in template
        self._thinking = thinking

    def mark(self, context: dict[str, Any], reply_start: str = "") -> tuple[bytes, Marks]:
        """The context as JSON, with the client's text marked. Changes the context's messages."""
        payload = encode_context(context)
        if not self._letter_of and not any(
            c.encode() in payload or c in reply_start for c in self._characters
        ):
            return payload, Marks()
        letters = sorted(set(self._letter_of.values()))
        num_needed = len(self._characters) + len(letters) + 2
        free = list(
            itertools.islice(_unused_stand_ins(payload, reply_start, self._escapes), num_needed)
        )
        if len(free) < num_needed:
            raise _no_stand_ins()
        start, end, *free = free
        of_characters = dict(zip(self._characters, free))
        of_letters = dict(zip(letters, free[len(of_characters) :]))
        marks = Marks(of_characters, of_letters, self._escapes)
        if self._thinking is not None and _keep_thoughts(
            context["messages"], self._thinking, start, end
        ):
            payload = encode_context(context)
        payload = _replace_in_strings(payload, marks.of_characters)
        for word, letter in self._letter_of.items():
            marked = word.replace(letter, of_letters[letter], 1)
            payload = payload.replace(_quoted(word), _quoted(marked))
        if self._thinking is not None:
            payload = payload.replace(start.encode(), self._thinking.start.encode())
            payload = payload.replace(end.encode(), self._thinking.end.encode())
        return payload, marks


def _keep_thoughts(messages: Any, thinking: Thinking, start: str, end: str) -> bool:
    """Replaces thinking tags in assistant messages with their own stand-ins; returns whether there
    are any.

    Clients send whole replies back, and templates cut off the reasoning of earlier turns at these
    tags: at the first end of thinking and the last start before it. Further tags are text.
    """
    has_kept = False
    for message in messages:
        if not isinstance(message, dict) or message.get("role") != "assistant":
            continue
        if isinstance(message.get("reasoning_content"), str):
            continue
        content = message.get("content")
        parts = (
            [message] if isinstance(content, str) else content if isinstance(content, list) else ()
        )
        key = "content" if isinstance(content, str) else "text"
        for part in parts:
            text = part.get(key) if isinstance(part, dict) else None
            if isinstance(text, str) and thinking.end in text:
                thought, _, rest = text.partition(thinking.end)
                before, tag, thought = thought.rpartition(thinking.start)
                part[key] = before + (start if tag else "") + thought + end + rest
                has_kept = True
                break
    return has_kept


def _replace_in_strings(payload: bytes, stand_ins: Mapping[str, str]) -> bytes:
    in_syntax = []
    for character, stand_in in stand_ins.items():
        if character in _JSON_SYNTAX:
            in_syntax.append((character.encode(), stand_in.encode()))
        else:  # JSON has it only in strings
            payload = payload.replace(character.encode(), stand_in.encode())
    if not in_syntax:
        return payload

    def replace(string: re.Match[bytes]) -> bytes:
        text = string[0]
        for character, stand_in in in_syntax:
            text = text.replace(character, stand_in)
        return text

    return _JSON_STRING.sub(replace, payload)


def _completed_words(tokens: list[str], template: str) -> set[str]:
    """Words that the template's own text completes to control tokens: for `'<' ~ key ~ '>'`,
    "think" and others.

    Prefixes and suffixes may be anywhere in the template: an unneeded word only costs a stand-in.
    """
    longest = max(map(len, tokens), default=0)
    text_ends = [place.start() for place in _TEXT_END.finditer(template)]
    text_starts = [place.start() for place in _TEXT_START.finditer(template)]
    beginnings = {template[max(0, end - n) : end] for end in text_ends for n in range(1, longest)}
    endings = {template[start : start + n] for start in text_starts for n in range(1, longest)}
    words: set[str] = set()
    for token in tokens:
        starts = [i for i in range(1, len(token)) if token[:i] in beginnings]
        ends = [i for i in range(1, len(token)) if token[i:] in endings] if starts else ()
        words |= {token[start:end] for start in starts for end in ends if start < end}
    return words


def _choose_letters(words: set[str]) -> dict[str, str]:
    """One letter of each word. Greedily chooses few distinct letters: each needs a stand-in."""
    letter_of: dict[str, str] = {}
    rest = words
    while rest:
        counts = Counter(letter for word in sorted(rest) for letter in sorted(set(word)))
        letter = counts.most_common(1)[0][0]
        letter_of |= {word: letter for word in sorted(rest) if letter in word}
        rest = rest - letter_of.keys()
    return letter_of


def _unused_stand_ins(payload: bytes, reply_start: str, may_be_escaped: bool) -> Iterator[str]:
    text = payload + reply_start.encode(errors="replace")
    has_some = b"\xef\xb7" in text  # the prefix of all of them: one search if there are none
    for stand_in in STAND_INS:
        is_escaped = may_be_escaped and _escape(stand_in)[1:].encode() in text
        if not is_escaped and not (has_some and stand_in.encode() in text):
            yield stand_in


def _escape(character: str) -> str:
    return f"\\u{ord(character):04x}"


def _quoted(word: str) -> bytes:
    return json.dumps(word, ensure_ascii=False).encode()


def _no_stand_ins() -> RequestError:
    return RequestError(
        "The messages contain too many different noncharacters",
        "The server needs a few of U+FDD0 to U+FDEF, which Unicode reserves for a program's own "
        "use.",
        "Remove them; no text needs them.",
        param="messages",
    )
