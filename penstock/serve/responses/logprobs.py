"""Which tokens a message's text was written with: their log-probabilities stand beside it.

The tokens of a reply are those of its thoughts, its calls and its messages, and the text of one may come
later than the token, in another piece. What brings them together again is the bytes: those of the tokens, in
their order, have every piece of text in them.
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
        self._data = b""  # theirs; of the first, what has no text yet

    def add(self, tokens: Sequence[ScoredToken]) -> None:
        self._tokens += tokens
        self._data += b"".join(token.data for token in tokens)

    def take(self, text: str) -> list[ChatToken]:
        """The tokens that this text, the next there is, begins in; those before it are of no text."""
        data = text.encode()
        start = 0 if self._data.startswith(data) else self._data.rfind(data)
        end = start + len(data) if start >= 0 else len(self._data)  # not found: a character was replaced
        taken: list[ChatToken] = []
        at = len(self._data) - sum(len(token.data) for token in self._tokens)  # below 0: text has come of it
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
