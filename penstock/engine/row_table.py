"""What the device stores for each running sequence, and how a plan becomes the inputs of one step.

A sequence keeps its *row* from admission to its end: page table, last sampled token and sampling
parameters are stored here, by row number. A step's own numbers travel in one host array and one
copy; the device derives everything else, so that nothing waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from penstock import ops
from penstock.engine.biases import Entries, LogitBiases
from penstock.engine.pools import PoolSizes
from penstock.engine.step_inputs import pack_step, span_of
from penstock.layers.inputs import RowSpan, StepInputs
from penstock.types import Admission, PageUpdate, RowPlan, SamplingParams, StepPlan

# How far a step goes: to the logits, or to tokens that are greedy, sampled, or sampled after top_k,
# top_p and min_p.
SamplingMode = Literal["logits", "greedy", "drawn", "filtered"]


@dataclass(frozen=True, slots=True)
class SamplingNeeds:
    """What the sampling rows of a step need, known on the host: what no row needs is skipped."""

    params: tuple[SamplingParams, ...]  # in row order
    has_forbidden_ends: bool

    @property
    def mode(self) -> SamplingMode:
        if all(params.temperature == 0 for params in self.params):
            return "greedy"
        if any(params.top_k > 0 or params.top_p < 1 or params.min_p > 0 for params in self.params):
            return "filtered"
        return "drawn"

    @property
    def has_penalties(self) -> bool:
        return any(params.has_penalties for params in self.params)

    @property
    def has_biases(self) -> bool:
        return any(params.logit_bias for params in self.params)

    @property
    def num_top_logprobs(self) -> int | None:
        """The most that any row asks for; None: no row asks for logprobs."""
        return max(
            (params.logprobs for params in self.params if params.logprobs is not None), default=None
        )

    @property
    def are_plain(self) -> bool:
        """Whether the step only needs next tokens from unchanged logits."""
        is_changed = self.has_forbidden_ends or self.has_biases or self.has_penalties
        return not (is_changed or self.num_top_logprobs is not None)


@dataclass(frozen=True, slots=True)
class SampleInputs:
    """What the sampler needs on the device for the L rows that sample in this step."""

    rows: Tensor  # [L] int64
    positions: Tensor  # [L] int64  of the sampled tokens
    biases: Entries | None
    forbidden_ends: Entries | None  # for rows that may not end yet


class RowTable:
    def __init__(
        self,
        *,
        max_rows: int,
        max_pages: int,
        page_size: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.max_rows = max_rows
        self.padding_row = max_rows  # belongs to no sequence: it pads a step of a fixed size
        self.page_size = page_size
        self.vocab_size = vocab_size
        self.device = device
        num_rows = max_rows + 1
        self.page_table = torch.zeros(num_rows, max(max_pages, 1), dtype=torch.int32, device=device)
        self.last_token = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.seed = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.top_k = torch.zeros(num_rows, dtype=torch.int64, device=device)
        # One column for each name in _SAMPLING_PARAMS.
        self.sampling_params = torch.zeros(num_rows, len(_SAMPLING_PARAMS), device=device)
        # [rows, vocab] int32, allocated for the first request with penalties.
        self.generated: Tensor | None = None
        self.in_prompt: Tensor | None = None  # [rows, vocab] bool
        # [rows, H] float64, allocated for the first request with mean pooling.
        self.sums: Tensor | None = None
        self._biases = LogitBiases(self.upload)
        self._forbidden_ends = LogitBiases(self.upload)
        self._may_end_at = [0] * num_rows  # the first position where a row may sample an end token
        self._params = [SamplingParams()] * num_rows

    @classmethod
    def for_pools(cls, pools: PoolSizes, model: Any, page_size: int) -> RowTable:
        return cls(
            max_rows=pools.max_rows,
            max_pages=-(-pools.max_model_len // page_size),
            page_size=page_size,
            vocab_size=model.vocab_size,
            device=model.device,
        )

    def sampling_param(self, name: str, rows: Tensor) -> Tensor:  # [L] float32
        return self.sampling_params[rows, _SAMPLING_PARAMS.index(name)]

    def sum_of(self, row: int, width: int, *, is_new: bool) -> Tensor:  # [H] float64
        """The running sum of the hidden states of a row's prompt; the caller adds to it."""
        if self.sums is None:
            self.sums = torch.zeros(
                len(self._params), width, dtype=torch.float64, device=self.device
            )
        return self.sums[row].zero_() if is_new else self.sums[row]

    def update(self, plan: StepPlan) -> None:
        """Applies what the plan says about its rows beyond this step."""
        self._admit(plan.admissions)
        self._update_pages(plan.page_updates)

    def set_last_tokens(self, rows: Sequence[int], token_ids: Sequence[int]) -> None:
        """For rows that continue from a token of the host instead of their last sample."""
        on_device, tokens = self.upload([rows, token_ids])
        self.last_token.index_copy_(0, on_device, tokens)

    def sampling_needs(self, plan: StepPlan) -> SamplingNeeds:
        params = tuple([self._params[row.row] for row in plan.rows if row.samples])
        return SamplingNeeds(params, any(self._must_go_on(row) for row in plan.rows if row.samples))

    def draw(
        self, logits: Tensor, rows: Tensor, positions: Tensor, mode: SamplingMode
    ) -> Tensor:  # [L] int64
        """Samples the next tokens of `rows`, at `positions`, with each row's own parameters."""
        if mode == "greedy":
            return logits.argmax(-1)
        return ops.sample(
            logits,
            self.sampling_param("temperature", rows),
            self.top_k[rows],
            self.sampling_param("top_p", rows),
            self.sampling_param("min_p", rows),
            self.seed[rows],
            positions,
            mode == "filtered",
        )

    def _admit(self, admissions: tuple[Admission, ...]) -> None:
        if not admissions:
            return
        for admission in admissions:
            self._params[admission.row] = admission.sampling
            self._biases.set(admission.row, admission.sampling.logit_bias)
            self._forbidden_ends.set(
                admission.row, dict.fromkeys(admission.end_token_ids, -math.inf)
            )
            self._may_end_at[admission.row] = (
                admission.num_prompt_tokens + admission.sampling.min_tokens
            )
        rows = self.upload([admission.row for admission in admissions])
        self.seed[rows] = self.upload([admission.seed for admission in admissions])
        self.top_k[rows] = self.upload([admission.sampling.top_k for admission in admissions])
        params = [[getattr(one.sampling, name) for name in _SAMPLING_PARAMS] for one in admissions]
        self.sampling_params[rows] = self.upload(params, torch.float32)
        for admission in admissions:
            if admission.sampling.has_penalties:
                self._remember_history(admission)

    def _remember_history(self, admission: Admission) -> None:
        if self.generated is None or self.in_prompt is None:
            shape = (len(self._params), self.vocab_size)
            self.generated = torch.zeros(shape, dtype=torch.int32, device=self.device)
            self.in_prompt = torch.zeros(shape, dtype=torch.bool, device=self.device)
        prompt = self.upload(admission.history[: admission.num_prompt_tokens])
        generated = self.upload(admission.history[admission.num_prompt_tokens :])
        self.in_prompt[admission.row].fill_(False).index_fill_(0, prompt, True)
        ones = torch.ones_like(generated, dtype=torch.int32)
        self.generated[admission.row].fill_(0).index_add_(0, generated, ones)

    def _update_pages(self, updates: tuple[PageUpdate, ...]) -> None:
        if updates:
            lengths = [len(update.pages) for update in updates]
            row_ids = np.repeat([update.row for update in updates], lengths)
            places = [
                np.arange(update.start, update.start + len(update.pages)) for update in updates
            ]
            pages = np.fromiter(chain.from_iterable(update.pages for update in updates), np.int64)
            rows, indices, values = self.upload(np.stack([row_ids, np.concatenate(places), pages]))
            self.page_table[rows, indices] = values.int()

    def step_inputs(self, rows: tuple[RowPlan, ...], deterministic: bool) -> StepInputs:
        packed = pack_step(rows)
        spans = tuple([span_of(row) for row in rows])
        num_pages = self.page_table.shape[1]  # fixed width: kernels were compiled for this stride
        if self.device.type == "cpu":
            num_pages = -(-max(span.context_len for span in spans) // self.page_size)
        numbers = self.upload(packed.numbers)
        return self.derive_inputs(numbers, packed.lengths, spans, num_pages, deterministic)

    def derive_inputs(
        self,
        numbers: Tensor,  # of a PackedStep
        lengths: dict[str, int],
        spans: tuple[RowSpan, ...],
        num_pages: int,
        deterministic: bool,
    ) -> StepInputs:
        inputs = dict(zip(lengths, numbers.split_with_sizes(list(lengths.values()))))
        owner, positions = inputs.pop("row_of_token"), inputs["positions"]
        token_ids = inputs.pop("token_ids")
        page = self.page_table[owner, positions // self.page_size].long()
        return StepInputs(
            token_ids=torch.where(token_ids < 0, self.last_token[owner], token_ids),
            kv_index=page * self.page_size + positions % self.page_size,
            page_table=self.page_table[inputs.pop("rows"), :num_pages],
            spans=spans,
            blocks=ops.TokenBlocks(
                table=inputs.pop("blocks").int().view(-1, 4),
                rows=inputs.pop("block_rows").int().view(-1, 2),
            ),
            deterministic=deterministic,
            **inputs,
        )

    def sample_inputs(self, plan: StepPlan) -> SampleInputs:
        sampling = [row for row in plan.rows if row.samples]
        packed = [[row.row for row in sampling], [row.start + row.num_tokens for row in sampling]]
        rows, positions = self.upload(packed)
        return SampleInputs(
            rows=rows,
            positions=positions,
            biases=self._biases.entries([row.row for row in sampling]),
            forbidden_ends=self._forbidden_ends.entries(
                [row.row if self._must_go_on(row) else None for row in sampling]
            ),
        )

    def _must_go_on(self, row: RowPlan) -> bool:
        return row.start + row.num_tokens < self._may_end_at[row.row]

    def upload(self, values: object, dtype: torch.dtype = torch.int64) -> Tensor:
        return self.stage(values, dtype).to(self.device, non_blocking=True)

    def stage(self, values: object, dtype: torch.dtype = torch.int64) -> Tensor:
        """The values on the host, where an asynchronous copy to the device can read them."""
        host = torch.as_tensor(np.asarray(values), dtype=dtype)
        # A fresh pinned tensor each time: the copy may still be reading the last one.
        return host.pin_memory() if self.device.type == "cuda" else host


_SAMPLING_PARAMS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
