"""Matches tokens to the text of a message, to put their log-probabilities beside it.

The tokens of a reply belong to its reasoning, its calls and its messages, and the text of a token
may come later, in another piece. They are matched by their bytes: the bytes of the tokens, in
order, contain every piece of text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from penstock.serve.openai.scores import ChatToken, chat_token
from penstock.serve.text_stream import ScoredToken


class ScoreQueue:
    """Tokens whose text has not come yet."""

    def __init__(self) -> None:
        self._tokens: deque[ScoredToken] = deque()
        self._data = b""  # their bytes; of the first one, those without text yet

    def add(self, tokens: Sequence[ScoredToken]) -> None:
        self._tokens += tokens
        self._data += b"".join(token.data for token in tokens)

    def take(self, text: str) -> list[ChatToken]:
        """The tokens in which this text, the next one, begins; the tokens before it belong to no
        text."""
        data = text.encode()
        start = 0 if self._data.startswith(data) else self._data.rfind(data)
        # Not found: a character was replaced.
        end = start + len(data) if start >= 0 else len(self._data)
        taken: list[ChatToken] = []
        # Below 0: part of its text has come.
        at = len(self._data) - sum(len(token.data) for token in self._tokens)
        while self._tokens and at < end:
            token = self._tokens[0]
            after = at + len(token.data)
            if at >= 0 and after > start and token.logprob is not None:
                taken.append(chat_token(token))
            if after > end:  # its rest comes with the next text
                break
            self._tokens.popleft()
            at = after
        self._data = self._data[end:]
        return taken
