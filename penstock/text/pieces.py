"""Encodes long texts once: caches the ids of the pieces between control tokens.

A tokenizer cuts control tokens out of a text before it does anything else, and normalises, splits
and merges the text between two of them on its own. So when a conversation comes again with one more
message, only that message is encoded. `PieceEncoder.of` returns None for a tokenizer that might
work differently. Knows nothing of templates or messages.

    <|im_start|>system\nYou are ...<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n
                [long: cached      ]          [short: encoded with its neighbours]
"""

from __future__ import annotations

import json
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import tokenizers

MIN_PIECE_CHARS = 256  # encoding fewer takes about as long as finding them
MAX_CACHE_BYTES = 64 * 1024 * 1024

# Steps that work on each piece alone. Metaspace does not: it depends on whether a piece begins the
# text.
PIECEWISE_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD"}
PIECEWISE_PRE_TOKENIZERS = {"Split", "Digits", "ByteLevel"}

EncodePieces = Callable[[list[str]], list[list[int]]]
Piece = tuple[str, str]  # a tenant and its text


class PieceEncoder:
    """Returns the same ids as the tokenizer; safe to use from several threads."""

    def __init__(
        self,
        encode_pieces: EncodePieces,
        control_tokens: list[str],
        max_bytes: int = MAX_CACHE_BYTES,
    ) -> None:
        self._encode_pieces = encode_pieces
        self._max_bytes = max_bytes
        # Longest first: if several begin at one position, tokenizers also takes the longest.
        longest_first = sorted(control_tokens, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)))
        self._lock = threading.Lock()
        self._known: OrderedDict[Piece, array[int]] = OrderedDict()  # least recently used first
        self.num_bytes = 0

    @classmethod
    def of(cls, model: tokenizers.Tokenizer, encode_pieces: EncodePieces) -> PieceEncoder | None:
        """None if pieces might have different ids than in the whole text."""
        control_tokens = [token.content for token in model.get_added_tokens_decoder().values()]
        if not control_tokens or not _is_piecewise(model):
            return None
        return cls(encode_pieces, control_tokens)

    def encode(self, text: str, tenant: str = "") -> list[int]:
        pieces = [(tenant, piece) for piece in self._cut(text)]
        found = [self._look_up(piece) for piece in pieces]
        missing = [piece for (_, piece), ids in zip(pieces, found) if ids is None]
        encoded = iter(self._encode_pieces(missing) if missing else ())
        token_ids: list[int] = []
        for piece, ids in zip(pieces, found):
            if ids is None:
                ids = array("i", next(encoded))
                self._remember(piece, ids)
            token_ids.extend(ids)
        return token_ids

    def _cut(self, text: str) -> Iterator[str]:
        """Cuts at control tokens. Long pieces stay alone; short ones are joined from the left, so
        that a growing text keeps its cuts."""
        piece_start = gap_start = 0
        for control in self._control.finditer(text):
            end = control.start()
            is_long = end - gap_start >= MIN_PIECE_CHARS
            if is_long and piece_start < gap_start:
                yield text[piece_start:gap_start]
                piece_start = gap_start
            if is_long or end - piece_start >= MIN_PIECE_CHARS:
                yield text[piece_start:end]
                piece_start = end
            gap_start = control.end()
        if len(text) - gap_start >= MIN_PIECE_CHARS and piece_start < gap_start:
            yield text[piece_start:gap_start]
            piece_start = gap_start
        if piece_start < len(text):
            yield text[piece_start:]

    def _look_up(self, piece: Piece) -> array[int] | None:
        if len(piece[1]) < MIN_PIECE_CHARS:
            return None
        with self._lock:
            ids = self._known.get(piece)
            if ids is not None:
                self._known.move_to_end(piece)
            return ids

    def _remember(self, piece: Piece, ids: array[int]) -> None:
        size = _num_bytes(piece, ids)
        if len(piece[1]) < MIN_PIECE_CHARS or size > self._max_bytes:
            return
        with self._lock:
            if piece in self._known:  # two threads encoded it
                return
            self._known[piece] = ids
            self.num_bytes += size
            while self.num_bytes > self._max_bytes:
                self.num_bytes -= _num_bytes(*self._known.popitem(last=False))


def _num_bytes(piece: Piece, ids: array[int]) -> int:
    """An upper bound: Python stores up to four bytes per character."""
    return 4 * len(piece[1]) + ids.itemsize * len(ids)


def _is_piecewise(model: tokenizers.Tokenizer) -> bool:
    added = model.get_added_tokens_decoder().values()
    if any(
        token.lstrip or token.rstrip or token.single_word or token.normalized for token in added
    ):
        return False
    if model.encode_special_tokens or model.truncation is not None or model.padding is not None:
        return False
    normalizers = component_steps(model.normalizer, "normalizers")
    pre_tokenizers = component_steps(model.pre_tokenizer, "pretokenizers")
    return (
        all(step["type"] in PIECEWISE_NORMALIZERS for step in normalizers)
        and all(step["type"] in PIECEWISE_PRE_TOKENIZERS for step in pre_tokenizers)
        and any(step["type"] == "ByteLevel" for step in pre_tokenizers)
        and not any(step.get("add_prefix_space") for step in pre_tokenizers)
        and isinstance(model.model, tokenizers.models.BPE)
        and not model.model.dropout
    )


def component_steps(component: Any, name: str) -> list[dict[str, Any]]:
    """The settings of a normaliser or pre-tokeniser, or of its parts."""

    def flatten(part: dict[str, Any]) -> list[dict[str, Any]]:
        if part["type"] != "Sequence":
            return [part]
        return [step for inner in part[name] for step in flatten(inner)]

    return [] if component is None else flatten(json.loads(component.__getstate__()))
