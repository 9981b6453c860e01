"""The tokens of one sequence in one step, and what the device needs to know about that sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from penstock.types import (
    NOTHING_KEPT,
    Admission,
    KeptState,
    PageUpdate,
    PooledChunk,
    PromptTargets,
    Sequence,
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence's part of a step, before and after it becomes a RowPlan."""

    sequence: Sequence
    row: int
    start: int
    num_tokens: int
    samples: bool
    is_decode: bool
    num_new_pages: int  # at the end of the sequence's page table, not yet in the row's table
    draft_ids: tuple[int, ...] = ()  # proposed by the host
    keep: KeptState = NOTHING_KEPT

    @property
    def max_new_tokens(self) -> int:
        """Upper bound of tokens that its sequence gains: a decode's next one, and its drafts."""
        return self.num_tokens if self.is_decode else int(self.samples)

    @property
    def num_drafts(self) -> int:
        return self.num_tokens - 1 if self.is_decode else 0

    @property
    def new_pages(self) -> PageUpdate:
        pages = self.sequence.pages
        first_new = len(pages) - self.num_new_pages
        return PageUpdate(self.row, first_new, tuple(pages[first_new:]))

    @property
    def prompt_targets(self) -> PromptTargets | None:
        """The next token at each position of the chunk, if the prompt is scored."""
        sequence, start = self.sequence, self.start + 1
        if self.is_decode or not sequence.is_scored:
            return None
        end = min(start + self.num_tokens, sequence.num_prompt_tokens)
        num_top = sequence.request.sampling.prompt_logprobs
        assert num_top is not None
        return PromptTargets(tuple(sequence.tokens[start:end]), num_top)

    @property
    def next_token(self) -> int:
        """The token after the chunk, if the host knows it."""
        tokens, end = self.sequence.tokens, self.start + self.num_tokens
        return tokens[end] if end < len(tokens) else 0

    @property
    def pooled(self) -> PooledChunk | None:
        pooling = self.sequence.request.pooling
        if pooling is None:
            return None
        is_last = self.start + self.num_tokens == len(self.sequence.tokens)
        return PooledChunk(pooling, is_last) if is_last or pooling.kind == "mean" else None

    @property
    def admission(self) -> Admission:
        """For a sequence's first chunk in its row."""
        sequence, sampling = self.sequence, self.sequence.request.sampling
        is_too_short = sequence.num_generated < sampling.min_tokens
        seed = sampling.seed
        if seed is None:
            name = str(sequence.arrival).encode()
            seed = int.from_bytes(blake2b(name, digest_size=8).digest(), "little") >> 1
        return Admission(
            row=self.row,
            sampling=sampling,
            seed=seed,
            num_prompt_tokens=sequence.num_prompt_tokens,
            history=tuple(sequence.tokens) if sampling.has_penalties else (),
            end_token_ids=sequence.request.end_token_ids if is_too_short else (),
        )


def num_tokens_of(chunks: Iterable[Chunk]) -> int:
    return sum(chunk.num_tokens for chunk in chunks)
