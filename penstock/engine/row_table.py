"""The device state of each running sequence, and how a plan becomes the inputs of one step.

A sequence keeps its *row* from admission to its end: page table, last sampled token, number of
tokens and sampling parameters are stored here, by row number. A step's own integers are uploaded in
one copy from one host array; the device derives everything else, so nothing synchronizes.

A decode starts where its row ends: only the device knows how many tokens the row has. A prefill
chunk sets that number, sampling adds to it (`ops.advance_rows`, or `ops.accept_drafts` where
requests may draft), and graphs read it in place.
"""

from __future__ import annotations

import dataclasses
import importlib.util
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
from penstock.engine.step_inputs import PADDING_LEN, DraftPlaces, pack_step, span_of
from penstock.layers.inputs import AttentionRows, RowSpan, StepInputs
from penstock.ops import cut_blocks
from penstock.parallel.ranks import ALONE, Ranks
from penstock.types import Admission, PageUpdate, RowPlan, SamplingParams, StepPlan

_HAS_TRITON = importlib.util.find_spec("triton") is not None

# How far a step goes: to the logits, or to tokens that are greedy, sampled, or sampled after top_k,
# top_p and min_p.
SamplingMode = Literal["logits", "greedy", "drawn", "filtered"]


@dataclass(frozen=True, slots=True)
class SamplingNeeds:
    """What the sampling rows of a step need, known on the host: anything that no row needs is
    skipped.
    """

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
        """The maximum over rows; None: no row asks for logprobs."""
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
    num_new: Tensor  # [L] int64  tokens to sample per row
    biases: Entries | None
    forbidden_ends: Entries | None  # for rows that may not end yet
    drafts: DraftedSamples | None = None


@dataclass(frozen=True, slots=True)
class DraftedSamples:
    """A row with drafts samples at several positions, each as if the drafts before it were
    accepted.
    """

    rows: Tensor  # [R] int64
    num_tokens: Tensor  # [R] int64  to sample per row
    ahead: Tensor  # [L] int64  drafts of its row before each position
    owner: Tensor  # [L] int64  index of its row among the R
    seen: tuple[Tensor, Tensor, Tensor]  # positions, table rows, columns of the drafts before


class RowTable:
    def __init__(
        self,
        *,
        max_rows: int,
        max_pages: int,
        page_size: int,
        vocab_size: int,
        device: torch.device,
        num_drafts: int = 0,  # per row and step, at most
        ranks: Ranks = ALONE,
    ) -> None:
        self.ranks = ranks
        self.max_rows = max_rows
        self.padding_row = max_rows  # belongs to no sequence; pads steps of a fixed size
        self.page_size = page_size
        self.vocab_size = vocab_size
        self.device = device
        num_rows = max_rows + 1
        self.page_table = torch.zeros(num_rows, max(max_pages, 1), dtype=torch.int32, device=device)
        # Captured steps read and write these two, so they never move.
        self.last_token = torch.zeros(num_rows, dtype=torch.int64, device=device)
        # Tokens of the row, including its last one: the position of its next sample.
        self.context_len = torch.full_like(self.last_token, PADDING_LEN)
        self.num_drafts = num_drafts
        self.drafts = self.last_token.new_zeros(num_rows, num_drafts)
        # Accepted drafts of the last step: the journal entries that the next step replays.
        self.num_accepted = torch.zeros_like(self.last_token)
        # For measurements: how many drafts to accept, correct or not; negative: only correct ones.
        self.forced = torch.full_like(self.last_token, -1)
        self._replaying: set[int] = set()  # rows whose last step had drafts
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
        # The first position where a row may sample an end token.
        self._may_end_at = torch.zeros_like(self.last_token)
        # Row -> upper bound of steps until then: each adds a token or more.
        self._steps_to_end: dict[int, int] = {}
        self._params = [SamplingParams()] * num_rows

    @classmethod
    def for_pools(
        cls, pools: PoolSizes, model: Any, page_size: int, num_drafts: int = 0
    ) -> RowTable:
        return cls(
            max_rows=pools.max_rows,
            max_pages=-(-pools.max_model_len // page_size),
            page_size=page_size,
            vocab_size=model.vocab_size,
            device=model.device,
            num_drafts=num_drafts,
            ranks=model.ranks,
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

    def set_last_tokens(
        self, rows: Sequence[int], token_ids: Sequence[int], context_lens: Sequence[int]
    ) -> None:
        """For rows that continue from a token given by the host instead of their last sample; it is
        the last one of their context.
        """
        on_device, tokens, lengths = self.upload([rows, token_ids, context_lens])
        self.last_token.index_copy_(0, on_device, tokens)
        self.context_len.index_copy_(0, on_device, lengths)

    def sampling_needs(self, plan: StepPlan) -> SamplingNeeds:
        params = tuple([self._params[row.row] for row in plan.rows if row.samples])
        may_be_short = bool(self._steps_to_end) and any(
            row.row in self._steps_to_end for row in plan.rows if row.samples
        )
        return SamplingNeeds(params, may_be_short)

    def set_drafts(self, rows: Sequence[RowPlan]) -> None:
        """Uploads drafts made on the host."""
        drafting = [row for row in rows if row.draft_ids]
        if drafting:
            numbers = [[row.row] * row.num_drafts for row in drafting]
            columns = [range(row.num_drafts) for row in drafting]
            token_ids = [row.draft_ids for row in drafting]
            parts = [list(chain.from_iterable(part)) for part in (numbers, columns, token_ids)]
            on_device, places, tokens = self.upload(parts)
            self.drafts[on_device, places] = tokens

    def draw(
        self, logits: Tensor, rows: Tensor, mode: SamplingMode, ahead: Tensor | int = 0
    ) -> Tensor:  # [L] int64
        """Samples the next tokens of `rows`, with each row's own parameters, `ahead` positions
        ahead. Rank 0 samples; the others receive the tokens.
        """
        token_ids = (
            self._draw(logits, rows, mode, ahead) if self.ranks.decides else torch.empty_like(rows)
        )
        return self.ranks.of_rank_0(token_ids)

    def _draw(
        self, logits: Tensor, rows: Tensor, mode: SamplingMode, ahead: Tensor | int
    ) -> Tensor:
        if mode == "greedy":
            return ops.likeliest(logits)
        return ops.sample(
            logits,
            self.sampling_param("temperature", rows),
            self.top_k[rows],
            self.sampling_param("top_p", rows),
            self.sampling_param("min_p", rows),
            self.seed[rows],
            self.context_len[rows] + ahead if torch.is_tensor(ahead) else self.context_len[rows],
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
            self._steps_to_end.pop(admission.row, None)
            self._replaying.discard(admission.row)
            if admission.end_token_ids:
                self._steps_to_end[admission.row] = admission.sampling.min_tokens
        numbers = [
            (one.row, one.seed, one.sampling.top_k, one.num_prompt_tokens + one.sampling.min_tokens)
            for one in admissions
        ]
        rows, seeds, top_k, may_end_at = self.upload(list(zip(*numbers)))
        self.seed[rows] = seeds
        self.num_accepted.index_fill_(0, rows, 0)  # an assignment would wait for the device
        self.top_k[rows] = top_k
        self._may_end_at[rows] = may_end_at
        params = [[getattr(one.sampling, name) for name in _SAMPLING_PARAMS] for one in admissions]
        self.sampling_params[rows] = self.upload(params, torch.float32)
        for admission in admissions:
            if admission.sampling.has_penalties and self.ranks.decides:
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
        packed = pack_step(rows, self.padding_row)
        spans = self.spans_of(rows)
        num_pages = self.page_table.shape[1]  # fixed width: kernels were compiled for this stride
        if self.device.type == "cpu":
            num_pages = -(-max(span.context_len for span in spans) // self.page_size)
        numbers = self.upload(packed.numbers)
        inputs = self.derive_inputs(numbers, packed.lengths, spans, num_pages, deterministic)
        has_drafts = any(row.num_drafts for row in rows)
        return self._with_drafts(inputs, rows) if has_drafts else inputs

    def _with_drafts(self, inputs: StepInputs, rows: tuple[RowPlan, ...]) -> StepInputs:
        numbers, num_drafts = self.upload(
            [[row.row for row in rows], [row.num_drafts for row in rows]]
        )
        self.context_len.index_add_(0, numbers, -num_drafts)  # drafts are not part of it yet
        found = DraftPlaces.of(rows, inputs.spans)
        places, owners, columns = self.upload([found.places, found.rows, found.columns])
        queries = self.upload(found.queries)
        blocks, block_rows = cut_blocks(found.spans)
        return dataclasses.replace(
            inputs,
            token_ids=inputs.token_ids.index_copy(0, places, self.drafts[owners, columns]),
            with_drafts=AttentionRows(
                context_lens=inputs.positions[queries[1:] - 1] + 1,
                page_table=inputs.page_table[self.upload(found.row_of_query)],
                query_start=queries,
                spans=found.spans,
                blocks=ops.TokenBlocks(
                    self.upload(blocks, torch.int32).view(-1, 4),
                    self.upload(block_rows, torch.int32).view(-1, 2),
                ),
            ),
        )

    def spans_of(self, rows: Sequence[RowPlan]) -> tuple[RowSpan, ...]:
        """With a decode's context length only for the reference ops: on a GPU that would
        synchronize.
        """
        on_gpu = self.device.type != "cpu"
        if on_gpu and (_HAS_TRITON or torch.cuda.is_current_stream_capturing()):
            return tuple([span_of(row) for row in rows])
        lengths = self.context_len.tolist()
        return tuple([span_of(row, lengths[row.row]) for row in rows])

    def derive_inputs(
        self,
        numbers: Tensor,  # from a PackedStep
        lengths: dict[str, int],
        spans: tuple[RowSpan, ...],
        num_pages: int,
        deterministic: bool,
    ) -> StepInputs:
        inputs = dict(zip(lengths, numbers.split_with_sizes(list(lengths.values()))))
        owner, rows, bases = (inputs.pop(name) for name in ("row_of_token", "rows", "bases"))
        places = inputs.pop("places") + self.context_len[bases]
        positions, context_lens = places.split_with_sizes((len(owner), len(rows)))
        self.context_len.index_copy_(0, rows, context_lens)  # for a decode, unchanged
        replay = None
        if self.num_drafts:
            kept = inputs["keep_at"], inputs["keep_slots"]
            replay = ops.Replay(rows, self.num_accepted[rows], *kept)
        page = self.page_table[owner, positions // self.page_size].long()
        return StepInputs(
            token_ids=inputs.pop("token_ids") + self.last_token[bases[: len(owner)]],
            positions=positions,
            context_lens=context_lens,
            kv_index=page * self.page_size + positions % self.page_size,
            page_table=self.page_table[rows, :num_pages],
            spans=spans,
            blocks=ops.TokenBlocks(
                table=inputs.pop("blocks").int().view(-1, 4),
                rows=inputs.pop("block_rows").int().view(-1, 2),
            ),
            deterministic=deterministic,
            query_start=inputs["query_start"],
            state_slots=inputs["state_slots"],
            initial_slots=inputs["initial_slots"],
            replay=replay,
        )

    def sample_inputs(self, plan: StepPlan) -> SampleInputs:
        """For a step whose logits are already launched."""
        sampling = [row for row in plan.rows if row.samples]
        numbers = [row.row for row in sampling for _ in range(row.max_tokens)]
        rows, num_new = self.upload([numbers, [1] * len(numbers)])
        drafts = self._drafted_samples(sampling) if plan.has_drafts else None
        return SampleInputs(
            rows=rows,
            num_new=num_new,
            biases=self._biases.entries(numbers),
            forbidden_ends=self._take_forbidden_ends(numbers, rows, drafts),
            drafts=drafts,
        )

    def _drafted_samples(self, sampling: list[RowPlan]) -> DraftedSamples:
        ahead = [place for row in sampling for place in range(row.max_tokens)]
        owner = [index for index, row in enumerate(sampling) for _ in range(row.max_tokens)]
        seen = [
            (place, sampling[owner[place]].row, column)
            for place, num_ahead in enumerate(ahead)
            for column in range(num_ahead)
        ]
        rows, num_tokens = self.upload(
            [[row.row for row in sampling], [row.max_tokens for row in sampling]]
        )
        places, numbers, columns = self.upload(seen).view(-1, 3).unbind(1)
        ahead_on_device, owner_on_device = self.upload([ahead, owner])
        return DraftedSamples(
            rows, num_tokens, ahead_on_device, owner_on_device, (places, numbers, columns)
        )

    def advance(self, rows: Tensor, num_new: Tensor, token_ids: Tensor) -> None:
        """Advances rows without drafts by one token."""
        ops.advance_rows(rows, num_new, token_ids, self.last_token, self.context_len)
        if self.num_drafts:
            self.num_accepted.index_fill_(0, rows, 0)

    def accept(self, samples: DraftedSamples, token_ids: Tensor) -> Tensor:  # [R] int64
        """Advances the rows by their accepted drafts plus one token."""
        return self.accept_places(samples.rows, samples.num_tokens, token_ids).num_new

    def accept_places(
        self,
        rows: Tensor,
        num_tokens: Tensor,
        token_ids: Tensor,
        width: int = 0,  # positions per row, of which it uses some; 0: those that it samples
    ) -> ops.AcceptedDrafts:
        return ops.accept_drafts(
            rows,
            num_tokens,
            token_ids,
            self.drafts,
            self.last_token,
            self.context_len,
            self.num_accepted,
            self.forced,
            width,
        )

    def must_replay(self, rows: Sequence[RowPlan]) -> bool:
        """Whether these rows may have journal entries to replay, or a state to keep."""
        return any(row.keep.slot or row.row in self._replaying for row in rows)

    def note_launched(self, rows: Sequence[RowPlan]) -> None:
        """Records which rows had drafts, for the next step."""
        if self.num_drafts:
            self._replaying.difference_update(row.row for row in rows if not row.num_drafts)
            self._replaying.update(row.row for row in rows if row.num_drafts)

    def count_generated(self, sampling: SampleInputs) -> Tensor:  # [L, vocab] int32
        """How often each token was generated before each position."""
        assert self.generated is not None
        counts = self.generated[sampling.rows]
        if sampling.drafts is not None:
            places, numbers, columns = sampling.drafts.seen
            ones = torch.ones_like(places, dtype=counts.dtype)
            counts.index_put_((places, self.drafts[numbers, columns]), ones, accumulate=True)
        return counts

    def _take_forbidden_ends(
        self, numbers: list[int], rows: Tensor, drafts: DraftedSamples | None
    ) -> Entries | None:
        """For rows that may be too short to end; only the device knows whether they are."""
        short = [number if number in self._steps_to_end else None for number in numbers]
        entries = self._forbidden_ends.entries(short)
        if entries is None:
            return None
        for number in self._steps_to_end.keys() & set(short):
            self._steps_to_end[number] -= 1
            if not self._steps_to_end[number]:
                del self._steps_to_end[number]
        places, token_ids, biases = entries
        lengths = self.context_len[rows] + (0 if drafts is None else drafts.ahead)
        is_short = lengths < self._may_end_at[rows]
        return places, token_ids, torch.where(is_short[places], biases, 0.0)

    def host_buffer(self, shape: tuple[int, int]) -> np.ndarray:
        """int32 memory on the host, from which an asynchronous copy to the device can read."""
        is_pinned = self.device.type == "cuda"
        return torch.empty(shape, dtype=torch.int32, pin_memory=is_pinned).numpy()

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
