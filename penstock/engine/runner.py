"""Everything that runs on the device: model, caches, row table and graphs. Takes a plan of
integers, launches one step, and does not wait.

A runner sees only the plan, so the same plans give the same results in any process. `WAYS` decides
how a step is launched. The only place where the host waits for the device is `PendingStep.wait`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from penstock import ops
from penstock.config import EngineConfig
from penstock.engine.device import on_device
from penstock.engine.device_cache import allocate_caches, cache_specs, find_kv_dtype
from penstock.engine.draft_graphs import DraftGraphs
from penstock.engine.grammar_masks import StepMasks
from penstock.engine.graph_sizes import DraftSize
from penstock.engine.graphs import DecodeGraphs, Model, run_for_last_tokens, warm_up
from penstock.engine.mtp_drafter import MTPDrafter
from penstock.engine.pending_step import PendingStep, Scores, StepResults
from penstock.engine.pooling import PooledRows, pool_rows
from penstock.engine.pools import PoolSizes
from penstock.engine.prefill_graphs import PrefillGraphs
from penstock.engine.rank_wire import ComputeLogits, LaunchStep, SetLastTokens, ToRank
from penstock.engine.row_table import RowTable, SampleInputs, SamplingNeeds
from penstock.engine.step_inputs import StepSize
from penstock.engine.step_times import StepSeconds, measure_steps
from penstock.engine.timing import StepTimer
from penstock.layers.inputs import KVCache, LayerCache, StepInputs
from penstock.progress import OnPhase
from penstock.types import PromptTargets, StepPlan

TARGET_ROWS = 64  # rows of logits at a time: each has hundreds of thousands of entries

Given = ParamSpec("Given")
Result = TypeVar("Result")
FillMasks = Callable[[], StepMasks]

# What a step must compute, in increasing order: tokens from unchanged logits; logits; hidden states
# of the last tokens, to pool; hidden states of all tokens, to score, average, verify or draft.
Wanted = Literal["tokens", "logits", "last states", "all states"]


@dataclass(frozen=True, slots=True)
class Launched:
    """A step up to its logits, or up to its tokens. Valid until the next launch: graphs write to
    the same memory.
    """

    logits: Tensor | None = None  # [L, vocab] float32
    token_ids: Tensor | None = None  # [L] int64
    scores: dict[int, Scores] = field(default_factory=dict)  # of prompt targets, by row
    pooled: list[PooledRows] = field(default_factory=list)
    states: StepStates | None = None  # if all were computed


@dataclass(frozen=True, slots=True)
class StepStates:
    inputs: StepInputs
    hidden: Tensor  # [T, H]


def _on_its_device(method: Callable[Given, Result]) -> Callable[Given, Result]:
    """For launching methods of `Runner`: another engine's device may be the current one."""

    @functools.wraps(method)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        runner = args[0]
        assert isinstance(runner, Runner)
        with on_device(runner.rows.last_token.device), torch.inference_mode():
            return method(*args, **kwargs)

    return call


@dataclass(slots=True)
class Runner:
    model: Model
    caches: list[LayerCache]
    rows: RowTable
    deterministic: bool = False
    graphs: DecodeGraphs | None = None
    prefill_graphs: PrefillGraphs | None = None
    draft_graphs: DraftGraphs | None = None
    drafter: MTPDrafter | None = None
    step_seconds: StepSeconds = field(default_factory=dict)  # of graphs, if steps may draft
    timer: StepTimer | None = None
    # Sends an action to the other ranks before it is performed here.
    tell_others: Callable[[ToRank], None] | None = None

    @classmethod
    def for_pools(cls, model: Any, config: EngineConfig, pools: PoolSizes) -> Runner:
        """Allocates the caches for these pools; captures no graphs."""
        model.rope.reach(pools.max_model_len)
        num_drafts = config.speculation.num_drafts
        rows = RowTable.for_pools(pools, model, config.page_size, num_drafts)
        caches = allocate_caches(
            cache_specs(model, config),
            num_pages=pools.num_pages,
            page_size=config.page_size,
            num_slots=pools.num_slots,
            dtype=model.dtype,
            kv_dtype=find_kv_dtype(config.kv_dtype, model.dtype),
            state_dtype=getattr(torch, config.state_dtype),
            device=model.device,
            num_rows=rows.max_rows + 1,
            num_drafts=num_drafts,
        )
        runner = cls(model, caches, rows, config.deterministic)
        if config.speculation.kind == "mtp":
            own = caches.pop()
            assert isinstance(own, KVCache)
            runner.drafter = MTPDrafter.of(
                model, own, rows, config.deterministic, config.draft_vocabulary
            )
        return runner

    def graphs_to_capture(
        self, max_step_tokens: int
    ) -> tuple[PrefillGraphs, DecodeGraphs, DraftGraphs]:
        """The last has no shapes if nothing drafts."""
        given = (self.model, self.caches, self.rows)
        slots = getattr(self.model, "expert_store", None)
        # For more tokens, the host copies experts, which a graph cannot do.
        most = None if slots is None else getattr(slots, "most_captured", 0)
        return (
            PrefillGraphs(*given, self.deterministic, max_step_tokens, slots is None, self.drafter),
            DecodeGraphs(*given, self.deterministic, max_rows=most),
            DraftGraphs(*given, self.drafter, self.deterministic, max_tokens=most),
        )

    @_on_its_device
    def warm_up(self, max_step_tokens: int) -> None:
        """Launches every kernel once, if its step fits in memory: a capture cannot compile
        kernels.
        """
        given = [graphs.warmup for graphs in self.graphs_to_capture(max_step_tokens)]
        warm_up(given, self.model.ranks)
        self.zero_padding()  # warm-up steps wrote to it
        torch._C._cuda_clearCublasWorkspaces()  # each warm-up thread allocated one

    def zero_padding(self) -> None:
        """Page 0 and slot 0, which belong to no sequence."""
        own = [] if self.drafter is None else [self.drafter.cache]
        for cache in [*self.caches, *own]:
            cache.zero_padding()

    @_on_its_device
    def capture(self, max_step_tokens: int, on_phase: OnPhase) -> None:
        """From here on, decode steps and short prefills are graph replays."""
        prompts, decodes, drafts = self.graphs_to_capture(max_step_tokens)
        torch.cuda.empty_cache()  # a graph cannot use memory cached by the allocator
        pool = torch.cuda.graph_pool_handle()  # one pool for all: only one graph runs at a time
        for graphs in (prompts, decodes, drafts):
            graphs.capture(pool, on_phase)
        self.prefill_graphs, self.graphs = prompts, decodes
        self.draft_graphs = drafts if drafts.sizes else None
        self.step_seconds = measure_steps(self)

    @_on_its_device
    def launch(self, plan: StepPlan, fill_masks: FillMasks | None = None) -> PendingStep:
        """`fill_masks` is called while the device computes the logits to mask."""
        if self.tell_others is not None:
            self.tell_others(LaunchStep(plan, fill_masks is not None))
        with nullcontext() if self.timer is None else self.timer.step():
            return PendingStep(plan, self._step(plan, fill_masks is not None, fill_masks))

    @_on_its_device
    def follow(self, plan: StepPlan, is_masked: bool) -> None:
        """The same step on a rank other than 0; its results are not read."""
        self._step(plan, is_masked, None)

    def _step(self, plan: StepPlan, is_masked: bool, fill_masks: FillMasks | None) -> StepResults:
        self.rows.update(plan)
        if (slots := getattr(self.model, "expert_store", None)) is not None:
            slots.adapt()
        needs = self.rows.sampling_needs(plan)
        size = self._draft_size(plan)
        results = (
            self._replay_drafts(plan, size, needs, is_masked, fill_masks)
            if size is not None
            else self._any_step(plan, needs, is_masked, fill_masks)
        )
        self.rows.note_launched(plan.rows)
        return results

    def _draft_size(self, plan: StepPlan) -> DraftSize | None:
        """The captured shape that drafts for the plan, verifies its drafts, or replays those of the
        last step; None if there is none, or no drafts are involved.
        """
        if self.draft_graphs is None or not plan.is_decode:
            return None
        has_to = plan.has_drafts or self.rows.must_replay(plan.rows)
        return self.draft_graphs.size_for(plan.rows) if has_to else None

    def _replay_drafts(
        self,
        plan: StepPlan,
        size: DraftSize,
        needs: SamplingNeeds,
        is_masked: bool,
        fill_masks: FillMasks | None,
    ) -> StepResults:
        assert self.draft_graphs is not None
        if needs.are_plain and not is_masked:
            return StepResults(needs, self.draft_graphs.replay(plan.rows, size, needs.mode))
        logits = self.draft_graphs.replay_logits(plan.rows, size)
        masks = None if fill_masks is None else fill_masks()
        results = self._sample(logits, self.rows.sample_inputs(plan), needs, masks)
        self.draft_graphs.follow(plan.rows, size, results.token_ids, results.num_new)
        return results

    def _any_step(
        self,
        plan: StepPlan,
        needs: SamplingNeeds,
        is_masked: bool,
        fill_masks: FillMasks | None,
    ) -> StepResults:
        # A plain decode without drafts does not involve the drafter.
        follows = self.drafter is not None and (plan.has_drafts or not plan.is_decode)
        wanted = _wanted(plan, needs, is_masked)
        if plan.has_drafts:
            self.rows.set_drafts(plan.rows)
            if self.drafter is not None:
                self.drafter.draft(plan.rows)
        # A captured prefill keeps the head's inputs in its graph.
        size = self._prefill_size(plan) if follows and wanted in ("tokens", "logits") else None
        if size is not None:
            launched = self._replay_prefill(plan, size, needs)
        else:
            launched = self._launch(plan, "all states" if follows else wanted, needs)
        masks = None if fill_masks is None else fill_masks()
        if launched.token_ids is not None:
            return StepResults(needs, launched.token_ids)
        assert launched.logits is not None
        sampling = self.rows.sample_inputs(plan)
        results = self._sample(launched.logits, sampling, needs, masks)
        if size is not None:
            assert self.prefill_graphs is not None
            self.prefill_graphs.follow(plan.rows, size, results.token_ids)
        elif follows:
            assert self.drafter is not None
            assert launched.states is not None
            inputs, hidden = launched.states.inputs, launched.states.hidden
            self.drafter.follow(plan.rows, inputs, hidden, results.token_ids, results.num_new)
        return replace(results, scores=launched.scores, pooled=launched.pooled)

    @_on_its_device
    def logits(self, plan: StepPlan) -> Tensor:  # [L, vocab] float32
        """One step whose tokens the caller chooses."""
        if self.tell_others is not None:
            self.tell_others(ComputeLogits(plan))
        self.rows.update(plan)
        logits = self._launch(plan, "logits", self.rows.sampling_needs(plan)).logits
        assert logits is not None
        return logits if self.graphs is None else logits.clone()  # the next replay overwrites them

    def set_last_tokens(
        self, rows: Sequence[int], token_ids: Sequence[int], context_lens: Sequence[int]
    ) -> None:
        if self.tell_others is not None:
            self.tell_others(SetLastTokens(tuple(rows), tuple(token_ids), tuple(context_lens)))
        self.rows.set_last_tokens(rows, token_ids, context_lens)

    def _launch(self, plan: StepPlan, wanted: Wanted, needs: SamplingNeeds) -> Launched:
        for way in WAYS:
            if wanted in way.gives and (size := way.size_for(self, plan)) is not None:
                return way.launch(self, plan, size, needs)
        raise AssertionError("the last way accepts every step")

    def _decode_size(self, plan: StepPlan) -> int | None:
        if self.graphs is None or self.rows.must_replay(plan.rows):
            return None
        return self.graphs.size_for(plan.rows)

    def _prefill_size(self, plan: StepPlan) -> StepSize | None:
        return None if self.prefill_graphs is None else self.prefill_graphs.size_for(plan.rows)

    def _any_size(self, plan: StepPlan) -> int:
        return len(plan.rows)

    def _replay_tokens(self, plan: StepPlan, size: int, needs: SamplingNeeds) -> Launched:
        assert self.graphs is not None
        return Launched(token_ids=self.graphs.replay(plan.rows, size, needs.mode))

    def _replay_decodes(self, plan: StepPlan, size: int, _: SamplingNeeds) -> Launched:
        assert self.graphs is not None
        return Launched(self.graphs.replay(plan.rows, size, "logits"))

    def _replay_prefill(self, plan: StepPlan, size: StepSize, _: SamplingNeeds) -> Launched:
        assert self.prefill_graphs is not None
        return Launched(self.prefill_graphs.replay(plan.rows, size))

    def _run_last(self, plan: StepPlan, *_: object) -> Launched:
        inputs = self.rows.step_inputs(plan.rows, self.deterministic)
        last = run_for_last_tokens(self.model, inputs, self.caches)
        pooled = pool_rows(self.model, self.rows, plan, None, last, self.deterministic)
        return Launched(self._logits_of_sampling(last, plan), pooled=pooled)

    def _run_all(self, plan: StepPlan, *_: object) -> Launched:
        inputs = self.rows.step_inputs(plan.rows, self.deterministic)
        hidden = self.model(inputs, self.caches)
        last = hidden[inputs.last_tokens]
        sampling = hidden[self.rows.upload(_sampling_tokens(plan))]
        logits = self.model.logits(sampling, deterministic=self.deterministic)
        scores = self._scores_of(hidden, plan)
        pooled = pool_rows(self.model, self.rows, plan, hidden, last, self.deterministic)
        return Launched(logits, None, scores, pooled, StepStates(inputs, hidden))

    def _scores_of(self, hidden: Tensor, plan: StepPlan) -> dict[int, Scores]:  # hidden: [T, H]
        scores, first = {}, 0
        for row in plan.rows:
            if row.prompt_targets is not None and row.prompt_targets.token_ids:
                scores[row.row] = self._score(
                    hidden[first : first + row.num_tokens], row.prompt_targets
                )
            first += row.num_tokens
        return scores

    def _score(self, hidden: Tensor, targets: PromptTargets) -> Scores:  # hidden: [T, H]
        token_ids = self.rows.upload(list(targets.token_ids))
        parts = []
        for first in range(0, len(token_ids), TARGET_ROWS):
            some = slice(first, first + TARGET_ROWS)
            logits = self.model.logits(
                hidden[: len(token_ids)][some], deterministic=self.deterministic
            )
            parts.append(ops.token_logprobs(logits, token_ids[some], targets.num_top))
        logprobs, top, top_ids = (torch.cat(part) for part in zip(*parts))
        return logprobs, top, top_ids

    def _logits_of_sampling(
        self, hidden: Tensor, plan: StepPlan
    ) -> Tensor:  # [R, H] -> [L, vocab] float32
        sampling = [place for place, row in enumerate(plan.rows) if row.samples]
        if len(sampling) < len(plan.rows):
            hidden = hidden[self.rows.upload(sampling)]
        return self.model.logits(hidden, deterministic=self.deterministic)

    def _sample(
        self, logits: Tensor, sampling: SampleInputs, needs: SamplingNeeds, masks: StepMasks | None
    ) -> StepResults:
        """Samples the next tokens and stores them in the row table for the next step."""
        rows, table, drafts = sampling.rows, self.rows, sampling.drafts
        decides = table.ranks.decides  # the others receive its samples
        num_top = needs.num_top_logprobs if decides else None
        # The steps below edit logits in place.
        raw = logits.clone() if num_top is not None else logits
        if needs.has_penalties and decides:
            assert table.in_prompt is not None
            logits = ops.penalize_repeats(
                logits,
                table.count_generated(sampling),
                table.in_prompt[rows],
                table.sampling_param("repetition_penalty", rows),
                table.sampling_param("presence_penalty", rows),
                table.sampling_param("frequency_penalty", rows),
            )
        for entries in (sampling.biases, sampling.forbidden_ends):
            if entries is not None:
                logits = ops.bias_logits(logits, *entries)
        if masks is not None and masks.places:
            allowed = torch.from_numpy(masks.allowed).to(logits.device, non_blocking=True)
            logits = ops.mask_logits(logits, table.upload(masks.places), allowed)
        token_ids = table.draw(logits, rows, needs.mode, drafts.ahead if drafts else 0)
        num_new = None
        if drafts is None:
            table.advance(rows, sampling.num_new, token_ids)
        else:
            num_new = table.accept(drafts, token_ids)
        if table.generated is not None:
            if drafts is None:
                table.generated[rows, token_ids] += 1
            else:
                assert num_new is not None
                is_new = (drafts.ahead < num_new[drafts.owner]).int()
                table.generated.index_put_((rows, token_ids), is_new, accumulate=True)
        logprobs = None if num_top is None else ops.token_logprobs(raw, token_ids, num_top)
        return StepResults(needs, token_ids, num_new, logprobs)


def _sampling_tokens(plan: StepPlan) -> list[int]:
    """Indices among the step's tokens: the last one of a prompt chunk, and all of a decode."""
    places: list[int] = []
    first = 0
    for row in plan.rows:
        if row.samples:
            places += range(first + row.num_tokens - row.max_tokens, first + row.num_tokens)
        first += row.num_tokens
    return places


def _wanted(plan: StepPlan, needs: SamplingNeeds, is_masked: bool) -> Wanted:
    prompts = () if plan.is_decode else plan.rows
    if plan.has_drafts or any(row.needs_all_states for row in prompts):
        return "all states"
    if any(row.pooled is not None for row in prompts):
        return "last states"
    return "tokens" if needs.are_plain and not is_masked else "logits"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to launch a step."""

    name: str
    gives: tuple[Wanted, ...]
    # The size of the captured step for the plan's rows; None if there is none.
    size_for: Callable[[Runner, StepPlan], Any]
    launch: Callable[[Runner, StepPlan, Any, SamplingNeeds], Launched]


# Tried from the top: the first that accepts a step launches it.
WAYS = (
    Way("sampled graph", ("tokens",), Runner._decode_size, Runner._replay_tokens),
    Way("decode graph", ("logits",), Runner._decode_size, Runner._replay_decodes),
    Way("prefill graph", ("tokens", "logits"), Runner._prefill_size, Runner._replay_prefill),
    Way("eager", ("tokens", "logits", "last states"), Runner._any_size, Runner._run_last),
    Way("eager, all states", ("all states",), Runner._any_size, Runner._run_all),
)
