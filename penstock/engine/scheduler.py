"""Decides which sequences run in the next step and with how many tokens. Never touches a tensor.

A request waits, takes a row, is prefilled in chunks, decodes, and leaves. `plan` may be called
before the previous output is committed: a decode names neither its token nor its position, because
the device has them. It adds one token or, with drafts, up to `decode_tokens`; the host knows an
upper bound of what is in flight, and reserves pages for that. Every plan must be committed, in
order. The scheduler records each plan by step and row, so an output never reaches a sequence that
took over the row later.
"""

from __future__ import annotations

import dataclasses
import heapq
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain, islice

from penstock.cache import Cache
from penstock.engine.bulk_turns import BulkTurns
from penstock.engine.chunks import Chunk, num_tokens_of
from penstock.engine.fairness import Background, Holdings, WaitingLine, by_rank, due_order
from penstock.engine.leaders import Leaders
from penstock.engine.limits import RequestLimits, closing_place
from penstock.engine.speculate import Speculator
from penstock.errors import RequestError
from penstock.types import (
    FinishReason,
    PageUpdate,
    PrefixHit,
    PromptScores,
    Request,
    RowPlan,
    Sequence,
    StepOutput,
    StepPlan,
    TokenDelta,
    TokenLogprob,
)

# Admissions leave one page for every running sequence, but at most this share of the pool.
WATERMARK_SHARE = 8

# One step of priority makes a request due this many seconds earlier or later. So only requests that
# arrive soon after it can overtake it, and no request waits forever.
PRIORITY_STEP_S = 10.0

# Pages that one plan may look up for admissions in turn, and as many for those out of turn:
# milliseconds of work. All decodes wait for the plan, so later plans admit the rest.
MAX_PAGES_LOOKED_UP = 8192

# A step that also decodes takes this share of the remaining prompt tokens.
BACKLOG_SHARE = 8

# Log-probabilities of a prompt in one delta, alternatives included: a few milliseconds of server
# time.
DELTA_SCORES = 4096

# A prompt that one step can compute is short. This share of each step's prompt tokens is reserved
# for short prompts behind long ones, within these limits of candidates and cache look-ups per plan.
SHORT_SHARE = 4
MAX_SCANNED = 1024
MAX_LOOKUPS = 8

# How long a tenant below its share waits before a tenant above its share is preempted for it, and
# how long other tenants may overtake a sequence that waits for memory.
PATIENCE_S = 1.0
PASSED_S = 30.0


class Scheduler:
    def __init__(
        self,
        cache: Cache,
        max_rows: int,
        max_step_tokens: int,
        max_model_len: int,
        shared_step_tokens: int | None = None,  # in a step with more than one request
        mixed_step_tokens: int | None = None,  # prefill tokens per step while others decode
        bulk_share: float = 1.0,  # minimum share of time for long prompts next to short requests
        decode_tokens: int = 1,  # most tokens that a decode adds: 1 plus drafts
        speculator: Speculator | None = None,  # the drafter; None: the device always drafts
        closes_thoughts: bool = True,  # at the limits of requests; False: servers close them
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cache = cache
        self.max_rows = max_rows
        self.max_step_tokens = max_step_tokens
        self.shared_step_tokens = min(shared_step_tokens or max_step_tokens, max_step_tokens)
        self.mixed_step_tokens = mixed_step_tokens or max_step_tokens
        self.page_size = cache.page_size
        self.max_model_len = max_model_len
        self.decode_tokens = decode_tokens
        self._speculator = speculator
        self._closes_thoughts = closes_thoughts
        self._clock = clock
        self.num_preemptions = 0
        self.admitted_ids: list[str] = []  # by the last plan
        self._num_arrivals = 0
        self._num_steps = 0
        self._sequences: dict[str, Sequence] = {}
        self._limits: dict[Sequence, RequestLimits] = {}
        self._waiting = WaitingLine()
        # Was next, but the last plan had no row or memory for it.
        self._refused: Sequence | None = None
        self._running: list[Sequence] = []  # ordered by due time
        # The running sequences that continue from their last sample.
        self._decoding: set[Sequence] = set()
        self._free_rows = list(range(max_rows))
        self._in_flight: dict[int, list[Chunk]] = {}  # planned, not committed
        self._replaced_pages: list[PageUpdate] = []  # for the next plan
        self._leaders = Leaders(cache)
        self._turns = BulkTurns(bulk_share, 2 * self.mixed_step_tokens, clock)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_decoding(self) -> int:
        """Running sequences whose prompt is computed."""
        return len(self._decoding)

    @property
    def decoding(self) -> Collection[Sequence]:
        """The same, as sequences."""
        return self._decoding

    @property
    def expects_prompts(self) -> bool:
        """Whether the next plan is likely to have prompts in it."""
        may_admit = bool(self._free_rows) and self._refused is None and len(self._waiting) > 0
        return may_admit or len(self._running) > len(self._decoding)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._in_flight)

    @property
    def is_contended(self) -> bool:
        """Whether short requests and long prompts competed when the last step was planned."""
        return self._turns.is_contended

    @property
    def holds_planning(self) -> bool:
        """Whether the next plan should wait until the step in flight ends."""
        return self._turns.holds_planning

    def submit(self, request: Request, withdrawn: Sequence | None = None) -> Sequence:
        """If its sequence was withdrawn, the new one takes over what was counted for it."""
        if request.id in self._sequences:
            raise RequestError(
                f"A request with id {request.id!r} is already running or queued",
                "Answers are assigned to requests by id.",
                "Use another id.",
            )
        limits = RequestLimits.of(request, self.cache, self.max_model_len)
        due_s = self._clock() - request.age_s + request.priority * PRIORITY_STEP_S
        sequence = Sequence.start(request, self._num_arrivals, due_s)
        if withdrawn is not None:
            sequence.num_preemptions = withdrawn.num_preemptions + 1
            sequence.num_cached_tokens = withdrawn.num_cached_tokens
        sequence.targets = limits.targets
        if self._closes_thoughts:
            sequence.closes_at = closing_place(request, limits)
        self.cache.take_digests(sequence)
        self._num_arrivals += 1
        self._sequences[request.id] = sequence
        self._limits[sequence] = limits
        self._waiting.enter(sequence)
        return sequence

    def abort(self, request_id: str) -> TokenDelta | None:
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        self._end(sequence, "abort")
        return TokenDelta(request_id, finish="abort", num_cached_tokens=sequence.num_cached_tokens)

    def withdraw(self, sequence: Sequence) -> Request:
        """Ends a sequence that will be submitted again. Its request then continues after the tokens
        so far, and is due when it was.
        """
        self._end(sequence, "abort")
        request = sequence.request
        return dataclasses.replace(
            request,
            token_ids=tuple(sequence.tokens),
            num_resumed_tokens=len(sequence.tokens) - sequence.num_prompt_tokens,
            num_scored_tokens=sequence.num_scored,
            age_s=self._clock() - sequence.due_s + request.priority * PRIORITY_STEP_S,
        )

    def plan(self) -> StepPlan | None:
        """The next step. None: nothing can run, now or before an outstanding output is
        committed.
        """
        self._make_room()
        self._turns.look(chain(self._running, islice(self._waiting, self.max_rows)))
        chunks, admitted = self._plan_short() if self._turns.must_wait else ([], [])
        has_turn = not chunks
        if has_turn:
            chunks, admitted = self._plan_all()
        self.admitted_ids = [chunk.sequence.id for chunk in admitted]
        assert chunks or self._in_flight or not self._sequences, (
            "requests wait, but nothing can run"
        )
        plan = self._build_plan(chunks, admitted, has_turn) if chunks else None
        self.cache.end_plan()
        return plan

    # Returns all chunks, and the newly admitted ones among them.
    def _plan_all(self) -> tuple[list[Chunk], list[Chunk]]:
        chunks = self._plan_decodes()
        budget = self._prompt_budget(num_tokens_of(chunks))
        if self._turns.is_contended and not self._turns.is_overdue:
            budget = min(budget, max(self.page_size, self.mixed_step_tokens // 2))
        prompts = [sequence for sequence in self._in_rank() if sequence not in self._decoding]
        overtaking, admitted = self._plan_overtakers(prompts, budget)
        budget -= num_tokens_of(overtaking) + num_tokens_of(admitted)
        planned = {chunk.sequence for chunk in overtaking}
        prefills = self._plan_prefills([one for one in prompts if one not in planned], budget)
        admitted += self._admit_waiting(budget - num_tokens_of(prefills))
        return chunks + overtaking + prefills + admitted, admitted

    def _plan_short(self) -> tuple[list[Chunk], list[Chunk]]:
        """A step in which bulk only decodes, in a few rows: its turn was an earlier step."""
        chunks = self._plan_decodes(max_bulk=self._turns.max_riders(self._decoding))
        budget = self._prompt_budget(num_tokens_of(chunks))
        prompts = [sequence for sequence in self._in_rank() if sequence not in self._decoding]
        chunks += self._plan_prefills(
            [one for one in prompts if not self._turns.is_bulk(one)], budget
        )
        share = budget - num_tokens_of(chunk for chunk in chunks if not chunk.is_decode)
        admitted = []
        if self._refused is None and self._free_rows and share > 0:
            admitted = self._admit_overtakers(budget, share, is_behind=True)
        return chunks + admitted, admitted

    def commit(
        self,
        output: StepOutput,
        limits: Mapping[str, int] | None = None,  # by request id: tokens that it may have
    ) -> list[TokenDelta]:
        """Takes the sampled tokens of a step; sequences that have ended since its plan are
        skipped.
        """
        self._turns.note_done(output.step)
        deltas: list[TokenDelta] = []
        scores, vectors = output.prompt_scores, output.vectors
        for chunk in self._in_flight.pop(output.step):
            sequence = chunk.sequence
            if sequence.finish is not None:
                continue
            if chunk.row in scores:
                deltas += self._report_scores(sequence, chunk.start, scores[chunk.row])
            if chunk.row in vectors:
                deltas.append(self._finish_pooling(sequence, vectors[chunk.row]))
            elif chunk.samples:
                token_ids, logprobs = output.token_ids[chunk.row], output.logprobs.get(chunk.row)
                limit = (limits or {}).get(sequence.id)
                deltas.append(self._append(chunk, token_ids, logprobs or (), limit))
                if sequence.closes_at is not None:
                    deltas += self._close_thought(sequence, deltas[-1].token_ids)
                if not chunk.is_decode:
                    self._leaders.remove(sequence)  # its prompt is registered
            elif sequence.row is not None:
                self._register(sequence)
        return deltas

    def _in_rank(self) -> list[Sequence]:
        """The running sequences; the last one is preempted first."""
        return by_rank(self._running) if self._waiting.num_tenants > 1 else list(self._running)

    def _make_room(self) -> None:
        """Preempts background work for other requests. If the next tenant is below its share of
        rows and pages, preempts a sequence of a tenant above its share.
        """
        sequence = self._refused
        if sequence is None or sequence.steps_in_flight:
            return
        background = self._background()
        if background.num_running and not background.includes(sequence):
            self._preempt(self._running[-1])
        elif self._waiting.num_tenants > 1:
            self._make_room_for_share(sequence)

    def _background(self) -> Background:
        return Background(self._running, self._clock(), self.max_rows)

    def _make_room_for_share(self, sequence: Sequence) -> None:
        if self._clock() - sequence.due_s >= PATIENCE_S:
            victim = self._holdings().victim_for(
                sequence, self.cache.pages_for(len(sequence.tokens))
            )
            if victim is not None:
                self._preempt(victim)

    def _holdings(self) -> Holdings:
        return Holdings(
            self._running, self._waiting.num_tenants, self.max_rows, self.cache.num_pages
        )

    def _plan_decodes(self, max_bulk: int | None = None) -> list[Chunk]:
        chunks = []
        in_rank = self._in_rank()
        background = self._background()
        num_background = 0
        for sequence in [sequence for sequence in in_rank if sequence in self._decoding]:
            if max_bulk is not None and self._turns.is_bulk(sequence):
                if max_bulk == 0:
                    continue
                max_bulk -= 1
            # A victim has not been planned yet: planned ones come before `sequence` in this order.
            end = sequence.closes_at or self._limits[sequence].max_num_tokens
            num_left = end - sequence.num_tokens
            if sequence.row is None or num_left <= 0:
                continue
            num_background += background.includes(sequence)
            if num_background > background.max_rows and background.includes(sequence):
                continue  # it keeps its row and continues later
            # The last token of a thought is sampled without drafts: those that are accepted could
            # not be followed by a prompt's chunk at once.
            max_drafts = num_left - (1 if sequence.closes_at is None else 2)
            num_drafts, draft_ids = self._draft(sequence, max_drafts)
            num_closing = self._num_closing(sequence) if num_left == 1 else 0
            while (new_pages := self.cache.reserve(sequence, 1 + num_drafts + num_closing)) is None:
                if num_drafts or num_closing:  # no sequence is preempted for these
                    num_drafts, draft_ids, num_closing = 0, (), 0
                    continue
                victim = next(one for one in reversed(in_rank) if one.row is not None)
                self._preempt(victim)
                if victim is sequence:
                    break
            if new_pages is not None:
                chunk = self._chunk(sequence, 1 + num_drafts, len(new_pages))
                if draft_ids:
                    chunk = dataclasses.replace(chunk, draft_ids=draft_ids)
                chunks.append(chunk)
        return chunks

    def _draft(self, sequence: Sequence, num_left: int) -> tuple[int, tuple[int, ...]]:
        """How many drafts to verify, and their ids if the host has them."""
        most = min(self.decode_tokens - 1, num_left)
        if most <= 0 or self._speculator is None:
            return max(most, 0), ()
        return self._speculator.drafts(sequence, most)

    def _prompt_budget(self, num_decoded: int) -> int:
        """Prompt tokens in this step. Decoding rows wait for them: briefly while few prompt tokens
        are left, longer when a large backlog would otherwise never shrink.
        """
        is_alone = len(self._sequences) == 1
        budget = (self.max_step_tokens if is_alone else self.shared_step_tokens) - num_decoded
        if self._turns.is_interactive_near:
            budget = min(budget, self.mixed_step_tokens)
        elif num_decoded and self.mixed_step_tokens < budget:
            budget = min(budget, max(self.mixed_step_tokens, self._backlog() // BACKLOG_SHARE))
        return max(budget, self.page_size)

    def _backlog(self) -> int:
        """Remaining prompt tokens of the running sequences and of as many waiting ones as may
        run.
        """
        prompts = [sequence for sequence in self._running if sequence not in self._decoding]
        prompts += islice(self._waiting, self.max_rows)
        return sum(len(sequence.tokens) - sequence.num_computed for sequence in prompts)

    def _plan_overtakers(
        self, prompts: list[Sequence], budget: int
    ) -> tuple[list[Chunk], list[Chunk]]:  # for running sequences, and for newly admitted ones
        """The part of a step that is reserved for short prompts behind long ones.

        A long prompt gets at least the rest of every step: others overtake it but never stop it.
        """
        lengths = [len(sequence.tokens) - sequence.num_computed for sequence in prompts]
        place = next(
            (place for place, length in enumerate(lengths) if length > budget), len(prompts)
        )
        share = max(min(budget // SHORT_SHARE, budget - sum(lengths[:place])), 0)
        short = [prompts[i] for i in range(place + 1, len(prompts)) if lengths[i] <= budget]
        chunks = self._plan_prefills(short, share)
        share -= num_tokens_of(chunks)
        if self._refused is not None or not self._free_rows or share <= 0:
            return chunks, []
        return chunks, self._admit_overtakers(budget, share, is_behind=place < len(prompts))

    def _admit_overtakers(self, budget: int, share: int, is_behind: bool) -> list[Chunk]:
        """`is_behind`: every waiting sequence is behind a running long prompt."""
        chunks: list[Chunk] = []
        first_long: Sequence | None = None
        num_lookups = num_pages = 0
        room = budget
        for sequence in islice(self._waiting.in_turn(self._clock()), MAX_SCANNED):
            # The first waiting long prompt must find a row and its pages when its turn comes.
            num_rows_kept = 0 if first_long is None else 1
            if sequence.steps_in_flight or share <= 0 or len(self._free_rows) <= num_rows_kept:
                break
            if self._leaders.is_awaited(sequence) or self._background().holds_back(sequence):
                continue
            if num_pages > MAX_PAGES_LOOKED_UP:
                break
            hit = None
            if len(sequence.tokens) > budget and num_lookups < MAX_LOOKUPS:
                hit = self.cache.match(sequence)
                num_lookups += 1
                num_pages += len(sequence.digests)
            if len(sequence.tokens) - (hit or PrefixHit()).num_tokens > budget:
                first_long = first_long or sequence
                continue
            if not is_behind and first_long is None:  # its turn comes without overtaking
                room -= len(sequence.tokens)
                share = min(share, room)
                continue
            if hit is None:
                hit = self.cache.match(sequence)
                num_pages += len(sequence.digests)
            if not self._is_being_computed(sequence, hit):
                spare_pages = (
                    0 if first_long is None else self.cache.pages_for(len(first_long.tokens))
                )
                chunk = self._admit(sequence, hit, share, spare_pages)
                if chunk is None:
                    break
                chunks.append(chunk)
                share -= chunk.num_tokens
        for chunk in chunks:
            self._waiting.remove(chunk.sequence)
        return chunks

    def _plan_prefills(self, sequences: list[Sequence], budget: int) -> list[Chunk]:
        chunks = []
        for sequence in sequences:
            room = self.cache.num_free_tokens(sequence)
            num_tokens = self._chunk_len(sequence, sequence.num_computed, min(budget, room))
            if num_tokens:
                new_pages = self.cache.reserve(sequence, num_tokens)
                assert new_pages is not None, "the room was checked"
                chunks.append(self._chunk(sequence, num_tokens, len(new_pages)))
                budget -= num_tokens
        return chunks

    def _admit_waiting(self, budget: int) -> list[Chunk]:
        """Strictly in order, so that no sequence is overtaken forever. Two exceptions: a sequence
        that waits for a leader is skipped, and for a limited time tenants below their share
        overtake one that waits for memory.
        """
        chunks: list[Chunk] = []
        num_passed = num_pages = 0
        self._refused, holdings = None, None
        for sequence in self._waiting.in_turn(self._clock()):
            if not self._free_rows:
                self._refused = self._refused or sequence
                break
            if num_passed == self.max_rows:
                break
            if sequence.steps_in_flight:  # preempted: the host has not read all of its tokens yet
                break
            is_out_of_turn = holdings is not None and not self._may_pass(sequence, holdings)
            is_out_of_turn = is_out_of_turn or self._background().holds_back(sequence)
            if is_out_of_turn or self._leaders.is_awaited(sequence):
                num_passed += 1
                continue
            if num_pages > MAX_PAGES_LOOKED_UP:
                break
            num_pages += len(sequence.digests)
            hit = self.cache.match(sequence)
            if self._is_being_computed(sequence, hit):
                num_passed += 1
                continue
            if self._chunk_len(sequence, hit.num_tokens, budget) == 0:
                break
            chunk = self._admit(sequence, hit, budget)
            if chunk is None:
                self._refused = self._refused or sequence
                if self._waiting.num_tenants == 1 or self._clock() - self._refused.due_s > PASSED_S:
                    break
                num_passed += 1
            else:
                chunks.append(chunk)
                budget -= chunk.num_tokens
            if self._refused is not None:
                holdings = self._holdings()
        for chunk in chunks:
            self._waiting.remove(chunk.sequence)
        return chunks

    def _may_pass(self, sequence: Sequence, holdings: Holdings) -> bool:
        """Whether it may take memory that another tenant's earlier sequence waits for."""
        assert self._refused is not None
        is_other = sequence.request.tenant != self._refused.request.tenant
        return is_other and holdings.are_within_share(
            sequence, self.cache.pages_for(len(sequence.tokens))
        )

    def _admit(
        self, sequence: Sequence, hit: PrefixHit, budget: int, spare_pages: int = 0
    ) -> Chunk | None:
        """Gives it a row, memory and a first chunk within the budget. None: impossible, and nothing
        changed.
        """
        num_tokens = self._chunk_len(sequence, hit.num_tokens, budget)
        is_alone = not (self._running or self._in_flight)
        spare_pages += self._num_reserved_pages()
        if num_tokens == 0 or not self.cache.admit(
            sequence, hit, spare_pages=spare_pages, ends_sessions=is_alone
        ):
            return None
        insort(self._running, sequence, key=due_order)
        sequence.row = heapq.heappop(self._free_rows)
        self._leaders.add(sequence)
        new_pages = self.cache.reserve(sequence, num_tokens)
        assert new_pages is not None, "admission has counted these pages"
        return self._chunk(sequence, num_tokens, len(sequence.pages))

    def _chunk_len(self, sequence: Sequence, start: int, budget: int) -> int:
        """All remaining tokens, or as many as the budget allows up to the end of a page."""
        num_left = len(sequence.tokens) - start
        if num_left <= budget:
            return num_left
        return max((start + budget) // self.page_size * self.page_size - start, 0)

    def _num_reserved_pages(self) -> int:
        """Pages that running sequences will need soon, to complete their prefills and to decode.

        Admissions leave these pages free, so prefills can always continue once the decoding
        sequences have left: running prefills cannot deadlock by holding all pages.
        """
        num_prefill = sum(
            self.cache.pages_for(len(sequence.tokens)) - len(sequence.pages)
            for sequence in self._running
            if sequence not in self._decoding
        )
        return num_prefill + min(len(self._running), self.cache.num_pages // WATERMARK_SHARE)

    def _is_being_computed(self, sequence: Sequence, hit: PrefixHit) -> bool:
        """Whether it waits for a running sequence that is about to register a longer prefix of
        it.
        """
        return self._leaders.follow(sequence, hit)

    def _chunk(self, sequence: Sequence, num_tokens: int, num_new_pages: int) -> Chunk:
        assert sequence.row is not None
        start = sequence.num_computed
        is_decode = sequence in self._decoding
        samples = is_decode or (
            start + num_tokens == len(sequence.tokens) and sequence.request.pooling is None
        )
        return Chunk(sequence, sequence.row, start, num_tokens, samples, is_decode, num_new_pages)

    def _build_plan(self, chunks: list[Chunk], admitted: list[Chunk], has_turn: bool) -> StepPlan:
        page_updates, self._replaced_pages = self._replaced_pages, []
        page_updates += [chunk.new_pages for chunk in chunks if chunk.num_new_pages]
        if self.decode_tokens > 1:
            chunks = [self._keep_passed_state(chunk) for chunk in chunks]
        plan = StepPlan(
            step=self._num_steps,
            rows=tuple([self._row_plan(chunk) for chunk in chunks]),
            admissions=tuple([chunk.admission for chunk in admitted]),
            page_updates=tuple(page_updates),
        )
        for chunk in chunks:
            chunk.sequence.num_computed += chunk.num_tokens
            # Read once; from now on the sequence's own slot is used.
            chunk.sequence.initial_slot = None
            self._waiting.charge(chunk.sequence, chunk.num_tokens, chunk.is_decode)
            if chunk.samples:
                chunk.sequence.steps_in_flight += 1
                chunk.sequence.max_in_flight += chunk.max_new_tokens
                self._decoding.add(chunk.sequence)
        self._in_flight[plan.step] = chunks
        self._turns.note_planned(plan.step, [chunk.sequence for chunk in chunks], has_turn)
        self._num_steps += 1
        return plan

    def _row_plan(self, chunk: Chunk) -> RowPlan:
        # After all admissions of the step: running sequences come before cached ones.
        sequence, end = chunk.sequence, chunk.start + chunk.num_tokens
        may_move = chunk.is_decode and not chunk.keep.slot and self._is_in_slot(sequence)
        if may_move and chunk.start % self.page_size == 0:
            self.cache.keep_reply_state(sequence)
        slot = sequence.slot or 0
        initial_slot = slot if sequence.initial_slot is None else sequence.initial_slot
        if chunk.is_decode:
            plan = RowPlan.decode(chunk.row, slot, initial_slot, chunk.num_tokens)
            if chunk.draft_ids or chunk.keep.slot:
                plan = dataclasses.replace(plan, draft_ids=chunk.draft_ids, keep=chunk.keep)
            return plan
        return RowPlan(
            row=chunk.row,
            start=chunk.start,
            token_ids=tuple(sequence.tokens[chunk.start : end]),
            samples=chunk.samples,
            slot=slot,
            initial_slot=initial_slot,
            checkpoints=tuple(self._plan_checkpoints(sequence, chunk.start, end)),
            prompt_targets=chunk.prompt_targets,
            pooled=chunk.pooled,
            next_token=chunk.next_token if self.decode_tokens > 1 else 0,
        )

    def _keep_passed_state(self, chunk: Chunk) -> Chunk:
        """With drafts, a decode may cross a page boundary anywhere in its replay."""
        sequence = chunk.sequence
        if not chunk.is_decode or (not sequence.keep.slot and self._is_in_slot(sequence)):
            return chunk
        keep = self.cache.keep_passed_state(sequence)
        return dataclasses.replace(chunk, keep=keep) if keep.slot else chunk

    def _is_in_slot(self, sequence: Sequence) -> bool:
        """Whether its slot will hold the state of all tokens before its next one: no drafts are in
        flight, and no accepted drafts are left in a journal.
        """
        if self.decode_tokens == 1:
            return True
        has_drafts = sequence.max_in_flight > sequence.steps_in_flight
        return not has_drafts and len(sequence.tokens) - sequence.num_in_slot <= 1

    def _plan_checkpoints(self, sequence: Sequence, start: int, end: int) -> list[tuple[int, int]]:
        planned = []
        for target in sorted(target for target in sequence.targets if start < target <= end):
            slot = self.cache.plan_checkpoint(sequence, target)
            if slot is not None:
                planned.append((target - start, slot))
        return planned

    def _append(
        self,
        chunk: Chunk,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...],
        limit: int | None = None,
    ) -> TokenDelta:
        """Tokens after the one that ends the reply, or beyond the limit, are dropped."""
        sequence = chunk.sequence
        assert 1 <= len(token_ids) <= chunk.max_new_tokens
        if self._speculator is not None and chunk.is_decode:
            self._speculator.note_tokens(sequence, chunk.num_drafts, token_ids)
        sequence.steps_in_flight -= 1
        sequence.max_in_flight -= chunk.max_new_tokens
        if sequence.row is not None:  # otherwise it was preempted, and nothing is computed
            sequence.num_computed -= chunk.max_new_tokens - len(token_ids)
            start = len(sequence.tokens) - chunk.is_decode  # tokens before this step's, or all
            if sequence.keep.slot:
                self.cache.note_passed_state(sequence, chunk.keep, start)
            sequence.num_in_slot = len(sequence.tokens)
        reason, num_taken = None, 0
        if limit is not None:
            token_ids = token_ids[: limit - len(sequence.tokens)]
        while reason is None and num_taken < len(token_ids):
            sequence.tokens.append(token_ids[num_taken])
            reason = self._finish_reason(sequence)
            num_taken += 1
        if reason is not None:
            self._end(sequence, reason)
        elif sequence.row is not None:
            self._register(sequence)
        return TokenDelta(
            sequence.id,
            token_ids=token_ids[:num_taken],
            logprobs=logprobs[:num_taken],
            finish=reason,
            num_cached_tokens=sequence.num_cached_tokens,
        )

    def _num_closing(self, sequence: Sequence) -> int:
        """How many tokens follow at once if its next token reaches the limit of its thinking."""
        limit = sequence.request.thought_limit
        return 0 if sequence.closes_at is None or limit is None else 1 + len(limit.closing_ids)

    def _close_thought(self, sequence: Sequence, new_ids: tuple[int, ...]) -> Iterator[TokenDelta]:
        """Ends thinking that has reached its limit, if the tokens for that can be appended."""
        limit = sequence.request.thought_limit
        assert limit is not None
        assert sequence.closes_at is not None
        if limit.end_id in new_ids or sequence.finish is not None:
            sequence.closes_at = None
        elif len(sequence.tokens) >= sequence.closes_at:
            sequence.closes_at = None
            if len(limit.closing_ids) <= self.num_certain(sequence):
                yield self.append_certain(sequence, limit.closing_ids)

    def num_certain(self, sequence: Sequence) -> int:
        """How many tokens `append_certain` may append: none while others of the sequence are in
        flight. At least one is left to sample. They must fit into its pages: otherwise two prompts
        could wait for each other's pages.
        """
        if sequence not in self._decoding or sequence.steps_in_flight or sequence.finish:
            return 0
        if len(sequence.tokens) - sequence.num_in_slot > 1:
            return 0  # accepted drafts are in a journal, which only a decode replays
        end = self._limits[sequence].max_num_tokens - 1
        if self.cache.has_pages:
            end = min(end, len(sequence.pages) * self.page_size)
        return max(end - len(sequence.tokens), 0)

    def append_certain(self, sequence: Sequence, token_ids: tuple[int, ...]) -> TokenDelta:
        """Appends tokens that need not be sampled: the next step computes them like a prompt's."""
        assert len(token_ids) <= self.num_certain(sequence)
        sequence.tokens += token_ids
        self._decoding.discard(sequence)
        num_cached = sequence.num_cached_tokens
        return TokenDelta(sequence.id, token_ids=token_ids, num_cached_tokens=num_cached)

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        if sequence.tokens[-1] in sequence.request.end_token_ids:
            return "stop"
        is_full = len(sequence.tokens) >= self._limits[sequence].max_num_tokens
        return "length" if is_full else None

    def _finish_pooling(self, sequence: Sequence, vector: bytes) -> TokenDelta:
        self._end(sequence, "stop")
        num_cached = sequence.num_cached_tokens
        return TokenDelta(sequence.id, finish="stop", num_cached_tokens=num_cached, vector=vector)

    def _report_scores(
        self, sequence: Sequence, start: int, scores: PromptScores
    ) -> Iterator[TokenDelta]:
        """The scores of a chunk that were not sent before the sequence was preempted, in parts
        small enough that a server can decode them without delaying others.
        """
        assert start <= sequence.num_scored, "scores of a prompt are missing"
        max_tokens = max(1, DELTA_SCORES // (scores.num_top + 1))
        for first in range(sequence.num_scored - start, len(scores), max_tokens):
            part = scores.part(first, first + max_tokens)
            sequence.num_scored += len(part)
            yield TokenDelta(
                sequence.id, num_cached_tokens=sequence.num_cached_tokens, prompt_scores=part
            )

    def _register(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        replaced = self.cache.commit(sequence)
        if replaced:
            pages = sequence.pages
            self._replaced_pages += [
                PageUpdate(sequence.row, i, tuple(pages[i:end])) for i, end in replaced
            ]

    def _preempt(self, sequence: Sequence) -> None:
        self._leave_row(sequence)
        sequence.num_preemptions += 1
        self._waiting.add(sequence)
        self.num_preemptions += 1

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish = reason
        if self._speculator is not None:
            self._speculator.note_end(sequence)
        if sequence.row is None:
            self._waiting.remove(sequence)
        else:
            self._leave_row(sequence)
        self._leaders.remove(sequence)
        self._waiting.leave(sequence)
        if self._refused is sequence:
            self._refused = None
        del self._sequences[sequence.id], self._limits[sequence]

    def _leave_row(self, sequence: Sequence) -> None:
        """Its computed prefix stays in the cache, for other sequences and for its own return."""
        assert sequence.row is not None
        self.cache.commit(sequence)
        if sequence.finish is not None:
            self.cache.keep_session(sequence)
        self.cache.release(sequence)
        self._leaders.remove(sequence)
        self._replaced_pages = [
            update for update in self._replaced_pages if update.row != sequence.row
        ]
        heapq.heappush(self._free_rows, sequence.row)
        sequence.row = None
        del self._running[bisect_left(self._running, due_order(sequence), key=due_order)]
        self._decoding.discard(sequence)
