"""Decides what runs next and processes the results: scheduler, cache and grammars. Integers and
bytes, no device.

`plan` returns the next step and `commit` takes its output; the runner is between them, in this
process or in others. A constrained row needs a mask, which `fill_masks` computes once all its
tokens are committed. Deltas for clients collect until `take_deltas`.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cache import Cache, SessionLimits
from penstock.config import EngineConfig
from penstock.engine.grammar_masks import (
    ConstrainedRow,
    Constraints,
    DeadEnd,
    Failure,
    GrammarCompiler,
    NewBuffer,
    StepMasks,
)
from penstock.engine.graph_sizes import DraftLimits, DraftSize
from penstock.engine.pools import GB, PoolSizes
from penstock.engine.scheduler import Scheduler
from penstock.engine.speculate import Speculator
from penstock.errors import RequestError
from penstock.types import (
    EngineInfo,
    EngineStats,
    Request,
    Sequence,
    StepOutput,
    StepPlan,
    TokenDelta,
)

if TYPE_CHECKING:
    from penstock.engine.memory import MemoryPlan

MIXED_GPU_TOKENS = 1024  # prefill tokens per GPU step while others decode
# The fewest forced tokens that are worth a step of their own.
LEAST_FORCED = 2
GRAMMAR_WAIT_S = 0.01  # wait for a grammar when nothing else runs; delays an abort by at most this


class Policy:
    def __init__(
        self,
        config: EngineConfig,
        memory: MemoryPlan,
        info: EngineInfo,
        tokenizer_file: Path | None,  # the tokenizer that grammars are compiled for
        new_buffer: NewBuffer,  # for masks
        draft_sizes: Collection[DraftSize] = (),  # sizes with graphs; empty: any number of drafts
    ) -> None:
        self.info = info
        self.cache = new_cache(config, memory.pools)
        most_drafts = DraftLimits(draft_sizes).most if draft_sizes else None
        self.speculator = Speculator(config.speculation, self._forced_ids, most_drafts)
        self.scheduler = Scheduler(
            self.cache,
            max_rows=info.max_rows,
            max_step_tokens=memory.max_step_tokens,
            shared_step_tokens=memory.shared_step_tokens,
            mixed_step_tokens=config.mixed_step_tokens
            or (MIXED_GPU_TOKENS if info.device.startswith("cuda") else None),
            bulk_share=config.bulk_share,
            decode_tokens=self.speculator.decode_tokens,
            speculator=self.speculator if self.speculator.decode_tokens > 1 else None,
            max_model_len=info.max_model_len,
            closes_thoughts=not config.deterministic,  # prefill bits differ from decode bits
        )
        self.constraints = Constraints(
            GrammarCompiler(tokenizer_file, info.vocab_size),
            vocab_size=info.vocab_size,
            max_masks=info.max_rows * self.speculator.decode_tokens,
            new_buffer=new_buffer,
        )
        self._deltas: list[TokenDelta] = []
        self.appends_forced = not config.deterministic  # prefill bits differ from decode bits
        self._expects_forced = False
        self._dead_ends: list[DeadEnd] = []  # of the next step to commit

    @property
    def needs_all_tokens(self) -> bool:
        """Whether to plan the next step only when the tokens of the last one are known."""
        return self.speculator.needs_all_tokens or self._expects_forced

    @property
    def has_work(self) -> bool:
        is_preparing = self.constraints.num_preparing > 0
        return self.scheduler.has_work or is_preparing or bool(self._deltas)

    def submit(self, request: Request) -> None:
        """Refuses requests that would crash the engine for all others: the device uses these ids as
        indices, unchecked.
        """
        check_token_ids("prompt", request.token_ids, self.info.vocab_size)
        check_token_ids("logit_bias", request.sampling.logit_bias, self.info.vocab_size)
        check_token_ids("stop_token_ids", request.end_token_ids, self.info.vocab_size)
        check_token_ids(
            "bad_words", {id for word in request.banned for id in word}, self.info.vocab_size
        )
        check_token_ids(
            "grammar_starts_after", request.sampling.grammar_starts_after, self.info.vocab_size
        )
        if request.thought_limit is not None:
            check_token_ids(
                "thought_limit", request.thought_limit.closing_ids, self.info.vocab_size
            )
        _require_task(request, self.info)
        if self.constraints.is_preparing(request.id):
            raise RequestError(
                f"A request with id {request.id!r} is already running or queued",
                "",
                "Use another id.",
            )
        if request.sampling.grammar is not None:
            _require_end(request)
        sequence = self.scheduler.submit(request)
        if request.sampling.grammar is not None:
            self.scheduler.abort(request.id)  # it fits; it is added when its grammar is compiled
            self.constraints.prepare(request)
        elif request.banned:
            self.constraints.add(sequence)

    def abort(self, request_id: str) -> None:
        delta = self.drop(request_id)
        if delta is not None:
            self._deltas.append(delta)

    def drop(self, request_id: str) -> TokenDelta | None:
        """Aborts without emitting a delta; returns the last delta if the request existed."""
        delta = self.scheduler.abort(request_id)
        if delta is None and self.constraints.drop(request_id):
            delta = TokenDelta(request_id, finish="abort")
        return delta

    def plan(self) -> StepPlan | None:
        for prepared in self.constraints.take_prepared():
            if prepared.grammar is None:
                delta = TokenDelta(prepared.request.id, finish="error", error=prepared.problem)
                self._deltas.append(delta)
            else:
                sequence = self.scheduler.submit(prepared.request, prepared.withdrawn)
                self.constraints.add(sequence, prepared.grammar)
        self.speculator.start_plan(self.scheduler.decoding, self.scheduler.expects_prompts)
        return self.scheduler.plan()

    def _forced_ids(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        return self.constraints.forced(sequence, most)

    def commit(self, output: StepOutput) -> None:
        self._expects_forced = False
        dead_ends, self._dead_ends = self._dead_ends, []
        limits = {one.failure.sequence.id: one.num_tokens for one in dead_ends}
        self._deltas += self.scheduler.commit(output, limits)
        for dead_end in dead_ends:
            if dead_end.is_reached:
                self._fail(dead_end.failure)
        if self.appends_forced:
            self._append_forced()

    def _append_forced(self) -> None:
        """Appends the tokens that grammars force, without sampling them. Requests with
        log-probabilities or penalties are excluded, because sampling computes both.
        """
        for sequence in self.constraints.sequences():
            sampling, most = sequence.request.sampling, self.scheduler.num_certain(sequence)
            if most < LEAST_FORCED or sampling.logprobs is not None or sampling.has_penalties:
                continue
            forced = _before_end(self.constraints.forced(sequence, most), sequence.request)
            if len(forced) >= LEAST_FORCED:
                self._deltas.append(self.scheduler.append_certain(sequence, forced))

    def fill_masks(self, rows: list[ConstrainedRow]) -> StepMasks:
        """For the rows of `constraints.rows_of(plan)`; everything before that plan is committed.
        Requests whose grammar failed leave their rows; a step in flight that still has them is not
        affected.
        """
        masks = self.constraints.fill(rows)
        if self.appends_forced or self.speculator.decode_tokens > 1:
            self._expects_forced = self.constraints.may_force(rows, LEAST_FORCED)
        for failure in masks.failures:
            self._fail(failure)
        self._dead_ends = masks.dead_ends
        return masks

    def _fail(self, failure: Failure) -> None:
        """Ends a request whose grammar failed; if others contributed, it returns to its row with
        the grammar compiled for it alone.
        """
        sequence = failure.sequence
        if sequence.finish is not None:
            return
        if failure.is_shared:
            self.constraints.prepare(self.scheduler.withdraw(sequence), sequence)
            return
        self.scheduler.abort(sequence.id)
        error = f"The reply can no longer follow its grammar: {failure.problem}"
        num_cached = sequence.num_cached_tokens
        self._deltas.append(
            TokenDelta(sequence.id, finish="error", num_cached_tokens=num_cached, error=error)
        )

    def take_deltas(self) -> list[TokenDelta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def wait_for_grammar(self) -> None:
        """Used when nothing runs and no grammar is ready."""
        if self.constraints.num_preparing:
            self.constraints.wait(GRAMMAR_WAIT_S)

    def stats(self) -> EngineStats:
        self.cache.sessions.expire()
        return EngineStats(
            num_waiting=self.scheduler.num_waiting + self.constraints.num_preparing,
            num_running=self.scheduler.num_running,
            num_free_pages=self.cache.num_free_pages,
            num_pages=self.info.num_pages,
            num_free_slots=self.cache.num_free_slots,
            num_slots=self.info.num_slots,
            num_preemptions=self.scheduler.num_preemptions,
            prefix=dict(self.cache.counters),
            num_sessions=len(self.cache.sessions),
            session_bytes=self.cache.sessions.num_bytes,
            num_kv_tokens=max(self.info.num_pages - 1, 0) * self.info.page_size,
            num_checkpoints=self.cache.num_checkpoints,
            drafts=self.speculator.stats() if self.speculator.decode_tokens > 1 else None,
        )


def _before_end(token_ids: tuple[int, ...], request: Request) -> tuple[int, ...]:
    return tuple(itertools.takewhile(lambda one: one not in request.end_token_ids, token_ids))


def new_cache(config: EngineConfig, pools: PoolSizes) -> Cache:
    return Cache(
        page_size=config.page_size,
        num_pages=pools.num_pages,
        num_slots=pools.num_slots,
        max_checkpoints=pools.max_checkpoints,
        prefix_cache=config.prefix_cache,
        # Single-token steps round differently from a prefill.
        reply_states=not config.deterministic,
        session_limits=_session_limits(config, pools),
    )


def _session_limits(config: EngineConfig, pools: PoolSizes) -> SessionLimits:
    """A quarter of the checkpoints is reserved for other prompts: states are large, and a few fill
    the pool.
    """
    num_bytes = pools.num_bytes // 2 if config.session_gb is None else int(config.session_gb * GB)
    return SessionLimits(
        max_bytes=num_bytes,
        max_idle_s=60 * config.session_minutes,
        page_bytes=pools.page_bytes,
        slot_bytes=pools.slot_bytes,
        max_checkpoints=-(-3 * pools.max_checkpoints // 4),
    )


def check_token_ids(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise RequestError(
            f"{name} has the token id {wrong}",
            f"The vocabulary has {vocab_size} tokens.",
            param=name,
        )


def _require_task(request: Request, info: EngineInfo) -> None:
    """Refuses a prompt that the model cannot read, and a task that it has no head for."""
    pooling = request.pooling
    if request.segments:
        raise RequestError(
            f"The prompt has {len(request.segments)} segments that are not token ids",
            f"{info.model_name} reads token ids only.",
            "Send text.",
            param="prompt",
        )
    if not info.has_head and (pooling is None or pooling.logit_ids):
        raise RequestError(
            f"{info.model_name} cannot generate text",
            "Its checkpoint has no language-model head (lm_head): it gives embeddings or scores.",
            "Use /v1/embeddings, /v1/rerank or /v1/score, or serve a model that generates.",
            param="model",
        )
    if pooling is None:
        return
    check_token_ids("logit_ids", pooling.logit_ids, info.vocab_size)
    if pooling.dimensions is not None and not 1 <= pooling.dimensions <= info.hidden_size:
        raise RequestError(
            f"dimensions is {pooling.dimensions}",
            f"The model's vectors have {info.hidden_size}.",
            f"Use 1 to {info.hidden_size}.",
            param="dimensions",
        )
    if pooling.is_classified and not info.num_labels:
        raise RequestError(
            f"{info.model_name} has no classifier",
            "Its checkpoint has no score.weight.",
            "Serve a model for sequence classification.",
            param="model",
        )


def _require_end(request: Request) -> None:
    if not request.end_token_ids:
        raise RequestError(
            "The reply has a grammar but no token that could end it",
            "When the grammar is complete, only an end token can follow.",
            "Omit ignore_eos.",
            param="ignore_eos",
        )
