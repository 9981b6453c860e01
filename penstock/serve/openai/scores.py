"""Log-probabilities in the format of OpenAI's endpoints, encoded while a reply is generated.

A reply may have a million of them: they are stored as JSON, which only has to be copied at its end.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

from penstock.serve.answer import Pieces
from penstock.serve.text_stream import ScoredToken

LOWEST_LOGPROB = -9999.0  # JSON has no -inf; OpenAI writes this instead
UTF_8 = codecs.getincrementaldecoder("utf-8")
COLUMN_HEADS = (
    b'{"tokens":[',
    b'],"token_logprobs":[',
    b'],"top_logprobs":[',
    b'],"text_offset":[',
)


class ScoredText(msgspec.Struct, gc=False):
    """A token of a chat, or an alternative at its position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(ScoredText, gc=False):
    top_logprobs: list[ScoredText]


def chat_token(token: ScoredToken) -> ChatToken:
    assert token.logprob is not None
    top = [
        ScoredText(_text_of(data), _finite(logprob), _bytes_of(data)) for data, logprob in token.top
    ]
    return ChatToken(_text_of(token.data), _finite(token.logprob), _bytes_of(token.data), top)


class ChatScores:
    """Scores of a chat: a list of tokens, each with the likeliest tokens at its position."""

    def __init__(self) -> None:
        self._content = bytearray()

    def add(self, tokens: Sequence[ScoredToken]) -> None:
        _append(self._content, [chat_token(token) for token in tokens if token.logprob is not None])

    def take(self) -> Pieces:
        content, self._content = self._content, bytearray()
        return [b'{"content":[', content, b'],"refusal":null}']


class CompletionScores:
    """Scores of a completion: four parallel lists."""

    def __init__(self) -> None:
        self._num_chars = 0  # whole ones, in all tokens so far
        self._decoder = UTF_8("replace")  # tokens may end inside a character
        self._clear()

    def add(self, tokens: Sequence[ScoredToken]) -> None:
        texts = [_text_of(token.data) for token in tokens]
        logprobs = [None if token.logprob is None else _finite(token.logprob) for token in tokens]
        tops = [
            None if logprob is None else {**_top_of(token), text: logprob}
            for text, logprob, token in zip(texts, logprobs, tokens)
        ]
        offsets = []
        for token in tokens:
            offsets.append(self._num_chars)
            self._num_chars += len(self._decoder.decode(token.data))
        _append(self._texts, texts)
        _append(self._logprobs, logprobs)
        _append(self._tops, tops)
        _append(self._offsets, offsets)

    def take(self) -> Pieces:
        pieces: Pieces = []
        for head, column in zip(
            COLUMN_HEADS, (self._texts, self._logprobs, self._tops, self._offsets)
        ):
            pieces += [head, column]
        self._clear()
        return [*pieces, b"]}"]

    def _clear(self) -> None:
        self._texts, self._logprobs, self._tops, self._offsets = (bytearray() for _ in range(4))


class PromptLogprobs:
    """Scores of a prompt, in vLLM's format: for each position, the token and the likeliest by id.

    The rank of a token that is not among the likeliest is unknown.
    """

    def __init__(self) -> None:
        self._places = bytearray()

    def add(self, tokens: Sequence[ScoredToken]) -> None:
        _append(self._places, [_ranked(token) for token in tokens])

    def take(self) -> Pieces:
        places, self._places = self._places, bytearray()
        return [b"[", places, b"]"]


def _ranked(token: ScoredToken) -> dict[str, dict[str, Any]] | None:
    if token.logprob is None:
        return None
    places = {str(token.token_id): _ranked_token(token.data, token.logprob, None)}
    for rank, (token_id, (data, logprob)) in enumerate(zip(token.top_ids, token.top), 1):
        places[str(token_id)] = _ranked_token(data, logprob, rank)
    return places


def _ranked_token(data: bytes, logprob: float, rank: int | None) -> dict[str, Any]:
    return {"logprob": _finite(logprob), "rank": rank, "decoded_token": _text_of(data)}


def _top_of(token: ScoredToken) -> dict[str, float]:
    return {_text_of(data): _finite(logprob) for data, logprob in token.top}


def _append(encoded: bytearray, values: list[Any]) -> None:
    """Appends values to a JSON list, which has no brackets yet."""
    if values:
        if encoded:
            encoded += b","
        encoded += msgspec.json.encode(values)[1:-1]


@lru_cache(maxsize=2**15)
def _text_of(data: bytes) -> str:
    """A token may end inside a character; then clients must read `bytes`."""
    return data.decode("utf-8", "replace")


@lru_cache(maxsize=2**15)
def _bytes_of(data: bytes) -> list[int]:
    return list(data)


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB
