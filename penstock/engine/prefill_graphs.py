"""Prefills as CUDA graphs of a few sizes: short ones with decodes or alone, longer ones alone.

A layer of a prefill is a dozen launches. In a very long prefill each of them keeps the device busy
for longer than the host needs for the next launch. In a short one, as after a cached prefix, the
host would be the bottleneck; a slow host is one for thousands of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.engine.graphs import (
    Caches,
    Model,
    Warmup,
    borrow,
    capture,
    run_for_last_tokens,
    warmup_layers,
)
from penstock.engine.mtp_drafter import MTPDrafter
from penstock.engine.row_table import RowTable
from penstock.engine.step_inputs import RowCounts, StepSize, pack_padded
from penstock.layers.inputs import LayerCache, StepInputs
from penstock.ops import BLOCK_TOKENS
from penstock.progress import OnPhase, Phase
from penstock.types import RowPlan

PROMPT_TOKENS = (64, 128, 256, 512, 1024)
DECODES = (0, 1, 4, 16, 32, 64)
MAX_PROMPTS = 8
# Without decodes, for steps that leave at most an eighth of a size empty: more padding would take
# longer than the launches. Graphs take memory: none has more than a quarter of the largest step.
LONG_PROMPT_TOKENS = (2048, 3072, 4096, 6144, 8192)
PADDING_SHARE, LONG_SHARE = 8, 4
# Tokens of long prefills that a warmup launches, captured or not; together they use every kernel.
LONG_TOKENS = (2048, 4096, 8192, 16384, 32768)
THREAD_TOKENS = 8192  # longest prefill that several threads may launch concurrently


class PrefillStep:
    """A step of a fixed size. Runs eagerly on any device; `PrefillGraphs` captures it.

    Once its tokens are sampled, a drafting head follows it (`follow`): it reads the hidden states
    of all tokens, each with the next token.
    """

    def __init__(
        self,
        model: Model,
        caches: Caches,
        rows: RowTable,
        size: StepSize,
        deterministic: bool,
        drafter: MTPDrafter | None = None,
    ) -> None:
        self.model = model
        self.caches = caches
        self.rows = rows
        self.size = size
        self.deterministic = deterministic
        empty = pack_padded((), size, rows.padding_row)
        self._lengths = empty.lengths
        self._numbers = rows.upload(empty.numbers)
        self._loaded: Sequence[RowPlan] = ()
        self.drafter = drafter
        # The token after the last one of each row.
        self.next_ids = torch.zeros(size.num_rows, dtype=torch.int64, device=rows.device)

    def load(self, plans: Sequence[RowPlan]) -> None:
        packed = pack_padded(plans, self.size, self.rows.padding_row)
        self._numbers.copy_(self.rows.stage(packed.numbers), non_blocking=True)
        self._loaded = plans

    def run(self) -> Tensor:  # [size.num_rows, vocab] float32
        logits, _ = self.compute()
        return logits

    def compute(self) -> tuple[Tensor, Followed | None]:
        """The logits, and the input of `follow`."""
        inputs = self.rows.derive_inputs(
            self._numbers,
            self._lengths,
            self.size.spans(self.rows.spans_of(self._loaded)),
            self.rows.page_table.shape[1],
            self.deterministic,
        )
        if self.drafter is None:
            last = run_for_last_tokens(self.model, inputs, self.caches)
            return self.model.logits(last, deterministic=self.deterministic), None
        hidden = self.model(inputs, self.caches)
        last = hidden[inputs.last_tokens]
        return self.model.logits(last, deterministic=self.deterministic), (inputs, hidden)

    def set_next_ids(self, plans: Sequence[RowPlan], sampled: Tensor) -> None:
        """What was sampled for rows of the plan, or the host's token after a chunk."""
        index_of = {place: index for index, place in enumerate(self.size.place_of(plans))}
        # A row without tokens ends where the last one with tokens does, and must have the same
        # value.
        last = index_of[max(index_of)]
        sources = [index_of.get(place, last) for place in range(self.size.num_rows)]
        known = self.rows.upload([0 if row.samples else row.next_token for row in plans])
        sampling = [index for index, row in enumerate(plans) if row.samples]
        if sampling:
            known = known.index_copy(0, self.rows.upload(sampling), sampled)
        self.next_ids.copy_(known[self.rows.upload(sources)])

    def follow(self, followed: Followed) -> Tensor:
        assert self.drafter is not None
        inputs, hidden = followed
        parts = self._numbers.split_with_sizes(list(self._lengths.values()))
        rows = dict(zip(self._lengths, parts))["rows"]
        self.drafter.follow_prompts(rows, inputs, hidden, self.next_ids)
        return self.next_ids


Followed = tuple[StepInputs, Tensor]  # a step's inputs and hidden states [T, H]


class PrefillGraphs:
    """The captured steps of an engine. Results are valid until the next replay."""

    def __init__(
        self,
        model: Model,
        caches: list[LayerCache],
        rows: RowTable,
        deterministic: bool,
        max_step_tokens: int,
        captures: bool = True,  # False: only warm up every kernel
        drafter: MTPDrafter | None = None,
    ) -> None:
        self._captures = captures
        given: dict[str, Any] = {"deterministic": deterministic, "drafter": drafter}
        self._new_step = partial(PrefillStep, model, caches, rows, **given)
        warmup_caches = warmup_layers(model, caches)
        self._new_warmup_step = partial(PrefillStep, model, warmup_caches, rows, **given)
        self._sizes = prefill_sizes(rows.max_rows, max_step_tokens)
        if not captures:  # decodes in mixed steps need no other kernels
            self._sizes = [size for size in self._sizes if not size.num_decodes]
        self._long_sizes = [
            _size_of(num_tokens, rows.max_rows)
            for num_tokens in LONG_TOKENS
            if num_tokens <= max_step_tokens
        ]
        self._steps: dict[StepSize, tuple[PrefillStep, torch.cuda.CUDAGraph, Tensor]] = {}
        self._follow: dict[StepSize, torch.cuda.CUDAGraph] = {}

    @property
    def num_captures(self) -> int:
        return len(self._sizes) if self._captures else 0

    @property
    def warmup(self) -> Warmup:
        """Launches every kernel, see `DecodeGraphs`; memory suffices for one of the longest
        prefills at a time.
        """
        eager = [size for size in self._long_sizes if size not in self._sizes]
        sizes = [*eager, *self._sizes]  # the largest one that is captured is the last
        by_bucket = {
            ((size.num_tokens - 1).bit_length(), size.num_decodes.bit_length()): size
            for size in sizes
            if size.num_tokens <= THREAD_TOKENS
        }
        launches = {size: partial(_launch_all, self._new_warmup_step(size=size)) for size in sizes}
        return Warmup.split(launches, ahead=by_bucket.values())

    def capture(self, pool: Any, on_phase: OnPhase) -> None:
        # The largest first, the others fit into its memory.
        sizes = list(reversed(self._sizes)) if self._captures else []
        for done, size in enumerate(sizes):
            on_phase(Phase("graphs", f"{size.num_tokens} tokens", done / len(sizes)))
            step = self._new_step(size=size)
            graph, (logits, followed) = capture(step.compute, pool)
            if followed is not None:
                self._follow[size], _ = capture(partial(step.follow, followed), pool)
            self._steps[size] = step, graph, borrow(logits)

    def size_for(self, rows: Sequence[RowPlan]) -> StepSize | None:
        if any(row.num_drafts for row in rows):
            return None
        counts = RowCounts.of(rows)
        sizes = self._sizes if self._captures else ()
        return next(
            (size for size in sizes if size.holds(counts) and _is_worth(size, counts)), None
        )

    def replay(self, rows: Sequence[RowPlan], size: StepSize) -> Tensor:  # [L, vocab] float32
        """The logits of the sampling rows, in the order of the plan."""
        step, graph, logits = self._steps[size]
        step.load(rows)
        graph.replay()
        wanted = [place for place, row in zip(size.place_of(rows), rows) if row.samples]
        return logits[step.rows.upload(wanted)]

    def follow(self, rows: Sequence[RowPlan], size: StepSize, sampled: Tensor) -> None:
        """Runs after `replay`, when the tokens of the sampling rows are known."""
        step, _, _ = self._steps[size]
        step.set_next_ids(rows, sampled)
        self._follow[size].replay()


def _launch_all(step: PrefillStep) -> None:
    """Launches everything that the graphs will contain."""
    _, followed = step.compute()
    if followed is not None:
        step.follow(followed)


def prefill_sizes(max_rows: int, max_step_tokens: int) -> list[StepSize]:
    """In the order to try them: the least work first."""
    short = [
        _size_of(num_tokens, max_rows, num_decodes)
        for num_tokens in PROMPT_TOKENS
        if num_tokens <= max_step_tokens
        for num_decodes in DECODES
        if num_decodes < max_rows
    ]
    long = [
        _size_of(num_tokens, max_rows)
        for num_tokens in LONG_PROMPT_TOKENS
        if num_tokens * LONG_SHARE <= max_step_tokens
    ]
    return short + long


def _is_worth(size: StepSize, counts: RowCounts) -> bool:
    """Whether replaying it, with its padding, takes no longer than an eager launch."""
    num_padding = size.num_prompt_tokens - counts.num_prompt_tokens
    is_long = size.num_prompt_tokens > PROMPT_TOKENS[-1]
    return not is_long or num_padding * PADDING_SHARE <= size.num_prompt_tokens


def _size_of(num_tokens: int, max_rows: int, num_decodes: int = 0) -> StepSize:
    """Steps with many prompts shorter than a block are rare, so they are launched eagerly."""
    num_prompts = min(num_tokens // BLOCK_TOKENS, MAX_PROMPTS, max_rows)
    return StepSize(num_decodes, num_prompts, num_tokens)
