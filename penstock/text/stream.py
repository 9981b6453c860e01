"""Turns a stream of token ids into text that can be shown at once and is never revised.

Holds back incomplete UTF-8 characters and anything that may be the start of a stop string. Knows
nothing of requests or of HTTP.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from penstock.errors import RequestError
from penstock.text.tokenizer import Tokenizer
from penstock.types import SamplingParams

# The first bytes of U+D800 to U+DFFF, which are never valid UTF-8.
SURROGATE_START, SURROGATE_END = b"\xed\xa0", b"\xed\xbf"


class StreamDecoder:
    """The text of one reply. The results of `push` and `finish`, joined, are the decoded reply up
    to a stop."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        continues_text: bool = False,  # then a space at its start is kept: it separates the texts
        keeps_stop: bool = False,  # the stop that ended the reply is part of its text
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._strips_space = tokenizer.strips_first_space and not continues_text
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_split = False  # inside a character: the decoder above holds its first bytes
        self._matcher = StopMatcher(stop) if stop else None
        self._held = ""  # decoded, but possibly the start of a stop string
        self._min_tokens = min_tokens
        self._keeps_stop = keeps_stop
        self._is_quiet = False  # in thinking, where stop strings do not apply
        self._is_before_answer = False  # after thinking, with only white space since
        self.num_tokens = 0
        self.stopped = False
        self.stop_string: str | None = None  # the one that ended the reply

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, sampling: SamplingParams, continues_text: bool
    ) -> StreamDecoder:
        return cls(
            tokenizer,
            sampling.stop,
            sampling.min_tokens,
            sampling.skip_special_tokens,
            continues_text,
            sampling.include_stop_str_in_output,
        )

    def shows_end(self, token_id: int) -> bool:
        """Whether the token that ended the reply is part of its text."""
        return self._keeps_stop and token_id not in self._skipped

    def push_thought(self, token_ids: Iterable[int]) -> str:
        """Takes tokens of thinking: stop strings apply only after it, and after the white space
        that follows it."""
        self._is_quiet = True
        text = self.push(token_ids)
        self._is_quiet, self._is_before_answer = False, True
        return text

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes tokens; returns the text that is now certain. Ignores tokens after a stop."""
        pieces = []
        for token_id in token_ids:
            if self.stopped:
                break
            self.num_tokens += 1
            if token_id in self._skipped:
                continue
            data = self._tokenizer.token_bytes(token_id)
            if self._strips_space and data:
                data = data.removeprefix(b" ")
                self._strips_space = False
            pieces.append(self._release(self._decode(data)))
        return "".join(pieces)

    def finish(self) -> str:
        """The rest, after the last token."""
        if self.stopped:
            return ""
        text = self._release(self._characters.decode(b"", final=True))
        held, self._held = self._held, ""
        return text + held

    def _decode(self, data: bytes) -> str:
        """The characters that these bytes complete; nearly every token consists of whole ones."""
        if not self._is_split:
            try:
                return data.decode()
            except UnicodeDecodeError:
                pass
        text = self._characters.decode(data)
        pending = self._characters.getstate()[0]
        if SURROGATE_START <= pending[:2] <= SURROGATE_END:  # no third byte makes these valid
            text += self._characters.decode(b"", final=True)
            pending = b""
        self._is_split = bool(pending)
        return text

    def _release(self, text: str) -> str:
        if self._matcher is None:
            return text
        if self._is_quiet:
            held, self._held = self._held, ""
            self._matcher.restart()
            return held + text
        if self._is_before_answer:
            answer = text.lstrip()
            self._is_before_answer = not answer
            return text[: len(text) - len(answer)] + self._match(answer)
        return self._match(text)

    def _match(self, text: str) -> str:
        """The text up to a stop string, or to what may become one."""
        assert self._matcher is not None
        if self._matcher.can_skip(text):
            return text
        window = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            num_matched = self._matcher.step(character)
            if num_matched and self.num_tokens >= self._min_tokens:
                self.stopped = True
                self.stop_string = window[end - num_matched : end]
                self._held = ""
                return window[: end if self._keeps_stop else end - num_matched]
        num_safe = len(window) - self._matcher.depth
        self._held = window[num_safe:]
        return window[:num_safe]


class StopMatcher:
    """Looks for several strings at once, one character at a time (Aho-Corasick), in constant time
    each.

    Its state is a node of the trie of all stop strings: the longest suffix of the text that could
    still grow into one. The stop that is complete first wins; of two complete at once, the longer.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._depths = [0]
        self._num_matched = [0]  # length of the longest stop that ends at this node
        for string in stop:
            if not string:
                raise RequestError(
                    "stop has an empty string", "It would match everywhere.", param="stop"
                )
            self._insert(string)
        self._shorter = self._link()
        self._node = 0

    @property
    def depth(self) -> int:
        """How many of the last characters may be the start of a stop string."""
        return self._depths[self._node]

    def restart(self) -> None:
        self._node = 0

    def can_skip(self, text: str) -> bool:
        """Whether no stop string has begun, nor begins in this text: `step` would change
        nothing."""
        return self._node == 0 and self._children[0].keys().isdisjoint(text)

    def step(self, character: str) -> int:
        """Length of the stop string that this character completes, or 0."""
        node = self._node
        while node and character not in self._children[node]:
            node = self._shorter[node]
        self._node = self._children[node].get(character, 0)
        return self._num_matched[self._node]

    def _insert(self, string: str) -> None:
        node = 0
        for character in string:
            if character not in self._children[node]:
                self._children[node][character] = len(self._children)
                self._children.append({})
                self._depths.append(self._depths[node] + 1)
                self._num_matched.append(0)
            node = self._children[node][character]
        self._num_matched[node] = len(string)

    def _link(self) -> list[int]:
        """For each node, the node of its longest proper suffix; breadth first, so shorter ones are
        ready.
        """
        shorter = [0] * len(self._children)
        queue = list(self._children[0].values())
        for node in queue:
            for character, child in self._children[node].items():
                suffix = shorter[node]
                while suffix and character not in self._children[suffix]:
                    suffix = shorter[suffix]
                shorter[child] = self._children[suffix].get(character, 0)
                self._num_matched[child] = (
                    self._num_matched[child] or self._num_matched[shorter[child]]
                )
                queue.append(child)
        return shorter
