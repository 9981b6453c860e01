"""A runner on the host that executes StepPlans on memory made of token ids, and a driver for
random histories.

Every page keeps the tokens "written" to it, every slot the prefix that its state has consumed. The
runner checks that each row reads exactly its sequence's tokens through its page table and from its
initial slot, and that rows of one step do not touch each other's memory, because a device runs them
in any order. The sampled token is a hash of everything that the row has read, so wrong paging or a
wrong state gives a wrong token. A decode of up to n tokens adds one to n of them, at random, and
leaves garbage where drafts were rejected. Its slot gets the state after its first token only:
accepted drafts stay in a journal, which the next step replays.
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from penstock.cache import Cache, SessionLimits
from penstock.engine.fairness import BACKGROUND_S
from penstock.engine.scheduler import Scheduler
from penstock.types import (
    ON_DEVICE,
    Admission,
    PromptScores,
    Request,
    RowPlan,
    Sequence,
    StepOutput,
    StepPlan,
    TokenDelta,
    TokenLogprob,
)

VOCAB_SIZE = 12
GARBAGE = -1  # content of rejected drafts


def sample_token(
    context: tuple[int, ...], biases: Mapping[int, float], forbidden: Collection[int]
) -> int:
    """The token with the highest score, a number that depends only on the context and the token."""
    state = zlib.crc32(bytes(context))
    scores = [zlib.crc32(bytes([token]), state) % 100 for token in range(VOCAB_SIZE)]
    allowed = [token for token in range(VOCAB_SIZE) if token not in forbidden]
    return max(allowed, key=lambda token: (scores[token] + biases.get(token, 0.0), token))


def reply_alone(
    request: Request, max_model_len: int, closes_thought: bool = False
) -> tuple[list[int], str]:
    """The request's correct reply, which must not depend on other requests: its tokens and why it
    ends."""
    tokens, sampling, limit = list(request.token_ids), request.sampling, request.thought_limit
    num_known, num_prompt = len(tokens), request.num_prompt_tokens
    longest = min(max_model_len, num_prompt + (sampling.max_tokens or max_model_len))
    closes_at = 0 if limit is None or not closes_thought else num_prompt + limit.num_tokens
    while True:
        is_too_short = len(tokens) - num_prompt < sampling.min_tokens
        forbidden = request.end_token_ids if is_too_short else ()
        tokens.append(sample_token(tuple(tokens), sampling.logit_bias, forbidden))
        if tokens[-1] in request.end_token_ids:
            return tokens[num_known:], "stop"
        if len(tokens) == longest:
            return tokens[num_known:], "length"
        if limit is None or len(tokens) != closes_at or limit.end_id in tokens[num_prompt:]:
            continue
        if closes_at + len(limit.closing_ids) < longest:
            tokens += limit.closing_ids


@dataclass(slots=True)
class _Row:
    """The device's state of a row; `tokens` is the ground truth its memory is compared with."""

    admission: Admission
    page_table: dict[int, int] = field(default_factory=dict)
    tokens: list[int] | None = None
    start: int = 0  # position of the running step
    accepted: tuple[int, ...] = ()  # drafts of that step that were right
    journal: tuple[int, ...] = ()  # right drafts of the previous step
    last_sample: int | None = None

    def next_token(self, context: tuple[int, ...]) -> int:
        admission = self.admission
        is_too_short = len(context) - admission.num_prompt_tokens < admission.sampling.min_tokens
        forbidden = admission.end_token_ids if is_too_short else ()
        return sample_token(context, admission.sampling.logit_bias, forbidden)

    summed: list[int] = field(default_factory=list)  # tokens over which the mean is computed


class FakeRunner:
    def __init__(
        self,
        *,
        page_size: int,
        has_pages: bool,
        has_slots: bool,
        known_tokens: Callable[[int], list[int]],  # row -> tokens of its sequence on the host
    ) -> None:
        self.page_size = page_size
        self.has_pages = has_pages
        self.has_slots = has_slots
        self._known_tokens = known_tokens
        self._pages: dict[int, list[int | None]] = {}
        self._slots: dict[int, tuple[int, ...]] = {}
        self._rows: dict[int, _Row] = {}

    def launch(self, plan: StepPlan) -> StepOutput:
        assert len({row.row for row in plan.rows}) == len(plan.rows), "a row stands twice in a plan"
        for admission in plan.admissions:
            self._rows[admission.row] = _Row(admission)
        self._update_pages(plan)
        tokens = {row.row: self._tokens_of(row) for row in plan.rows}
        self._require_separate_memory(plan)
        states = {row.row: self._initial_state(row) for row in plan.rows} if self.has_slots else {}
        for row in plan.rows:
            self._write(row, tokens[row.row], states.get(row.row, ()))
        return StepOutput(plan.step, *self._sample(plan), self._score(plan), self._pool(plan))

    def _pool(self, plan: StepPlan) -> dict[int, bytes]:
        """A vector contains the tokens it was computed from."""
        vectors = {}
        for row in plan.rows:
            if row.pooled is None:
                continue
            tokens = self._rows[row.row].summed
            if row.pooled.pooling.kind == "mean":
                tokens[:] = [*([] if row.start == 0 else tokens), *row.token_ids]
            else:
                tokens[:] = self._read_context(row)
            if row.pooled.is_last:
                vectors[row.row] = bytes(tokens)
        return vectors

    def _score(self, plan: StepPlan) -> dict[int, PromptScores]:
        """A token's score is its position."""
        scores = {}
        for row in plan.rows:
            if row.prompt_targets is not None and row.prompt_targets.token_ids:
                num_scored, num_top = len(row.prompt_targets.token_ids), row.prompt_targets.num_top
                places = array("f", range(row.start + 1, row.start + 1 + num_scored)).tobytes()
                top = bytes(4 * num_scored * num_top)
                token_ids = array("i", row.prompt_targets.token_ids).tobytes()
                scores[row.row] = PromptScores(token_ids, places, top, top, num_top)
        return scores

    def _update_pages(self, plan: StepPlan) -> None:
        written = [
            (u.row, i, page) for u in plan.page_updates for i, page in enumerate(u.pages, u.start)
        ]
        places = [(row, index) for row, index, _ in written]
        assert len(set(places)) == len(places), (
            "one entry of a page table is written twice in a step"
        )
        for row, index, page in written:
            assert page != 0, "page 0 belongs to no sequence"
            self._rows[row].page_table[index] = page

    def _tokens_of(self, plan: RowPlan) -> tuple[int, ...]:
        """The row's tokens of this step, after comparing them with the host's; advances the
        truth.
        """
        row = self._rows[plan.row]
        if row.tokens is None:
            row.tokens = self._known_tokens(plan.row)[: plan.start]
            assert plan.token_ids, "a row that has not sampled has no last sample"
            if row.admission.sampling.has_penalties:
                assert row.admission.history == tuple(self._known_tokens(plan.row))
            else:
                assert row.admission.history == ()
        row.start, row.journal, row.accepted = len(row.tokens), row.accepted, ()
        if plan.token_ids:
            assert plan.start == row.start, "a row skips tokens or repeats some"
            assert not row.journal, "only a decode replays drafts"
            is_appended = row.last_sample is not None  # to what was sampled before
            assert len(plan.token_ids) == 1 or plan.start % self.page_size == 0 or is_appended
            new = plan.token_ids
            end = plan.start + len(new)
            assert list(new) == self._known_tokens(plan.row)[plan.start : end]
            is_end = end == len(self._known_tokens(plan.row))
            assert (plan.samples or (plan.pooled is not None and plan.pooled.is_last)) == is_end
            assert is_end or end % self.page_size == 0, "a chunk ends inside a page"
        else:
            assert row.last_sample is not None
            assert plan.samples
            assert plan.start == ON_DEVICE, "the host cannot know where a decode starts"
            new = (row.last_sample,)
            num_new = 1 + zlib.crc32(bytes(row.tokens)) % plan.max_tokens
            while len(new) < num_new:
                new += (row.next_token((*row.tokens, *new)),)
            row.accepted = new[1:]
        row.tokens += new
        return new

    def _context_pages(self, plan: RowPlan) -> list[int]:
        if not self.has_pages:
            return []
        row = self._rows[plan.row]
        num_pages = -(-(row.start + plan.num_tokens) // self.page_size)
        return [row.page_table[i] for i in range(num_pages)]

    def _require_separate_memory(self, plan: StepPlan) -> None:
        """Rows of a step run in any order: no row writes what another row reads or writes."""
        page_writers: dict[int, int] = {}
        for row in plan.rows:
            start = self._rows[row.row].start
            for page in self._context_pages(row)[start // self.page_size :]:
                assert page not in page_writers, f"two rows write page {page}"
                page_writers[page] = row.row
        for row in plan.rows:
            for page in self._context_pages(row):
                assert page_writers.get(page, row.row) == row.row, (
                    f"page {page} is written and read"
                )
        if not self.has_slots:
            assert all(row.slot == 0 and not row.checkpoints for row in plan.rows)
            return
        written = [
            slot for row in plan.rows for slot in (row.slot, *(slot for _, slot in row.checkpoints))
        ]
        written += [row.keep.slot for row in plan.rows if row.keep.slot]
        assert 0 not in written, "slot 0 belongs to no sequence"
        assert len(set(written)) == len(written), "a slot is written twice in a step"
        for row in plan.rows:
            if self._rows[row.row].start > 0 and row.initial_slot != row.slot:
                assert row.initial_slot not in written, (
                    "a checkpoint is overwritten while it is read"
                )

    def _initial_state(self, plan: RowPlan) -> tuple[int, ...]:
        start, tokens = self._rows[plan.row].start, self._rows[plan.row].tokens
        if start == 0:
            return ()
        assert tokens is not None
        state = self._slots[plan.initial_slot] + self._rows[plan.row].journal
        assert state == tuple(tokens[:start]), "the state is not that of the sequence's tokens"
        return state

    def _write(self, plan: RowPlan, new: tuple[int, ...], state: tuple[int, ...]) -> None:
        row, table = self._rows[plan.row], self._rows[plan.row].page_table
        rejected = [GARBAGE] * (plan.num_tokens - len(new))
        for position, token in enumerate([*new, *rejected], row.start):
            if self.has_pages:
                page = self._pages.setdefault(
                    table[position // self.page_size], [None] * self.page_size
                )
                page[position % self.page_size] = token
        if self.has_slots:
            num_replayed = len(row.journal) if plan.is_decode else 0
            if plan.keep.slot and row.start - num_replayed <= plan.keep.num_tokens <= row.start:
                assert plan.keep.num_tokens % self.page_size == 0
                self._slots[plan.keep.slot] = state[: plan.keep.num_tokens]
            self._slots[plan.slot] = state + (new[:1] if plan.is_decode else new)
            for num_tokens, slot in plan.checkpoints:
                assert 0 < num_tokens <= len(new)
                assert (plan.start + num_tokens) % self.page_size == 0
                self._slots[slot] = state + new[:num_tokens]

    def _read_context(self, plan: RowPlan) -> tuple[int, ...]:
        row = self._rows[plan.row]
        assert row.tokens is not None
        if self.has_pages:
            places = (
                (row.page_table[i // self.page_size], i % self.page_size)
                for i in range(len(row.tokens))
            )
            context = [self._pages[page][offset] for page, offset in places]
            assert context == row.tokens, "the pages do not hold the sequence's tokens"
        return tuple(row.tokens)

    def _sample(
        self, plan: StepPlan
    ) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[TokenLogprob, ...]]]:
        token_ids, logprobs = {}, {}
        for one in plan.rows:
            context, row = self._read_context(one), self._rows[one.row]
            if one.samples:
                row.last_sample = row.next_token(context)
                new = token_ids[one.row] = (*row.accepted, row.last_sample)
                if row.admission.sampling.logprobs is not None:
                    first = len(context) - len(row.accepted)
                    logprobs[one.row] = tuple(
                        TokenLogprob(token, -float(place)) for place, token in enumerate(new, first)
                    )
        return token_ids, logprobs


@dataclass(frozen=True, slots=True)
class Setup:
    """Sizes of one engine; `num_pages` and `num_slots` include the reserved ones, 0 means none."""

    num_pages: int = 33
    num_slots: int = 0
    page_size: int = 4
    max_rows: int = 4
    max_step_tokens: int = 16
    shared_step_tokens: int | None = None
    mixed_step_tokens: int | None = None
    bulk_share: float = 1.0
    max_model_len: int = 64
    max_checkpoints: int | None = None
    prefix_cache: bool = True
    session_bytes: int = 0  # budget of sessions; a page counts 1, a slot 2
    session_s: int = 1000  # lifetime of an unused session
    decode_tokens: int = 1  # most tokens that a decode adds
    depth: int = 0  # steps planned ahead of the last output seen


class World:
    """Scheduler, cache and fake runner together, checked after every step, which takes a second."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.now_s = 0.0
        self.cache = Cache(
            page_size=setup.page_size,
            num_pages=setup.num_pages,
            num_slots=setup.num_slots,
            max_checkpoints=setup.max_checkpoints,
            prefix_cache=setup.prefix_cache,
            session_limits=SessionLimits(
                max_bytes=setup.session_bytes,
                max_idle_s=setup.session_s,
                page_bytes=1,
                slot_bytes=2,
                max_checkpoints=setup.num_slots,
            ),
            clock=lambda: self.now_s,
        )
        self.scheduler = Scheduler(
            self.cache,
            max_rows=setup.max_rows,
            max_step_tokens=setup.max_step_tokens,
            shared_step_tokens=setup.shared_step_tokens,
            mixed_step_tokens=setup.mixed_step_tokens,
            bulk_share=setup.bulk_share,
            decode_tokens=setup.decode_tokens,
            max_model_len=setup.max_model_len,
            clock=lambda: self.now_s,
        )
        self.runner = FakeRunner(
            page_size=setup.page_size,
            has_pages=setup.num_pages > 0,
            has_slots=setup.num_slots > 0,
            known_tokens=lambda row: self._in_row(row).tokens,
        )
        self.sequences: dict[str, Sequence] = {}
        self.replies: dict[str, list[int]] = {}
        self.finishes: dict[str, str] = {}
        self.scores: dict[str, list[int]] = {}  # positions in prompts
        self.vectors: dict[str, bytes] = {}
        self.deltas: list[TokenDelta] = []
        self.plans: list[StepPlan] = []
        self.num_sessions = 0  # at the end of the history
        self.num_closed = 0  # thoughts, by appended tokens
        self._pending: deque[StepOutput] = deque()
        self._sampled: list[Sequence] = []  # sequences that have sampled in their current row

    def submit(self, request: Request) -> Sequence:
        self.sequences[request.id] = self.scheduler.submit(request)
        self.replies[request.id] = []
        return self.sequences[request.id]

    def abort(self, request_id: str) -> None:
        delta = self.scheduler.abort(request_id)
        if delta is not None:
            self._take(delta)
        self.cache.check()

    def step(self) -> StepPlan | None:
        """Plans and launches a step, and commits the output that is due."""
        self.now_s += 0.5
        decoding = [sequence for sequence in self._sampled if self._must_run(sequence)]
        plan = self.scheduler.plan()
        if plan is not None:
            self._check(plan, decoding)
            self.plans.append(plan)
            self._pending.append(self.runner.launch(plan))
            self._sampled += [
                self._in_row(row.row) for row in plan.rows if row.samples and row.token_ids
            ]
        self.cache.check()
        self.now_s += 0.5
        if self._pending and (plan is None or len(self._pending) > self.setup.depth):
            for delta in self.scheduler.commit(self._pending.popleft()):
                self._take(delta)
            self.cache.check()
        return plan

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"requests {set(self.sequences) - set(self.finishes)} starve")

    def require_nothing_owned(self) -> None:
        """Checks that nothing runs and all memory is free, or idle in the prefix cache.

        Sessions return what they keep when they expire.
        """
        self.now_s += self.setup.session_s + 1
        assert self.cache.sessions.describe() == []
        self.cache.check()
        assert self.cache.num_free_pages == max(self.setup.num_pages - 1, 0)
        assert self.cache.num_free_slots == max(self.setup.num_slots - 1, 0)
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0

    def require_reply_alone(self, request: Request) -> None:
        found = self.replies[request.id], self.finishes[request.id]
        assert found in self._replies_alone(request)

    def require_part_of_reply(self, request: Request) -> None:
        found = self.replies[request.id]
        assert found in [tokens[: len(found)] for tokens, _ in self._replies_alone(request)]

    def _replies_alone(self, request: Request) -> list[tuple[list[int], str]]:
        """An engine that cannot close a thought leaves it open."""
        ways = (False, True) if request.thought_limit else (False,)
        return [reply_alone(request, self.setup.max_model_len, way) for way in ways]

    def _take(self, delta: TokenDelta) -> None:
        assert delta.request_id not in self.finishes, "news of a request that has ended"
        self.deltas.append(delta)
        sequence = self.sequences[delta.request_id]
        assert delta.num_cached_tokens == sequence.num_cached_tokens
        self._take_scores(sequence, delta)
        self.replies[delta.request_id] += delta.token_ids
        if self._closes_thought(delta):
            self.num_closed += 1
        elif sequence.request.sampling.logprobs is not None:
            assert [logprob.token_id for logprob in delta.logprobs] == list(delta.token_ids)
        if delta.vector is not None:
            self.vectors[delta.request_id] = delta.vector
        if delta.finish is not None:
            self.finishes[delta.request_id] = delta.finish

    def _closes_thought(self, delta: TokenDelta) -> bool:
        """Whether its tokens were appended; these have no log-probabilities."""
        request = self.sequences[delta.request_id].request
        num_said = len(self.replies[request.id]) - len(delta.token_ids) + request.num_resumed_tokens
        limit = request.thought_limit
        return (
            limit is not None
            and num_said == limit.num_tokens
            and delta.token_ids == limit.closing_ids
            and not delta.logprobs
        )

    def _take_scores(self, sequence: Sequence, delta: TokenDelta) -> None:
        """Checks that scores come in order, each once, before the first token, and that none comes
        again that another engine has sent.
        """
        request = sequence.request
        if request.sampling.prompt_logprobs is None:
            assert delta.prompt_scores is None
            return
        scores = self.scores.setdefault(request.id, [])
        for score in delta.prompt_scores.unpack() if delta.prompt_scores else ():
            place = request.num_scored_tokens + len(scores) + 1
            assert (score.token_id, score.logprob) == (request.token_ids[place], place)
            scores.append(place)
        if delta.token_ids:
            assert len(scores) == request.num_prompt_tokens - 1 - request.num_scored_tokens

    def _in_row(self, row: int) -> Sequence:
        (sequence,) = [s for s in self.sequences.values() if s.row == row and s.finish is None]
        return sequence

    def _must_run(self, sequence: Sequence) -> bool:
        """Background work need not run beside other requests."""
        latest_s = self.now_s + BACKGROUND_S
        if sequence.due_s > latest_s and any(
            one.row is not None and one.due_s <= latest_s for one in self.sequences.values()
        ):
            return False
        if sequence.request.thought_limit is not None and sequence not in self.scheduler.decoding:
            return False  # its closing tokens are computed like those of a prompt
        end = sequence.closes_at or self._longest(sequence)
        return sequence.row is not None and sequence.num_tokens < end

    def _may_pause(self, sequence: Sequence) -> bool:
        """Long prompts may pause for short requests."""
        mixed = self.setup.mixed_step_tokens or self.setup.max_step_tokens
        return self.setup.bulk_share < 1 and sequence.num_prompt_tokens > 2 * mixed

    def _longest(self, sequence: Sequence) -> int:
        max_tokens = sequence.request.sampling.max_tokens or self.setup.max_model_len
        return min(sequence.num_prompt_tokens + max_tokens, self.setup.max_model_len)

    def _check(self, plan: StepPlan, decoding: list[Sequence]) -> None:
        setup = self.setup
        self._sampled = [
            sequence for sequence in decoding if sequence.row is not None
        ]  # without preempted ones
        rows = {row.row for row in plan.rows}
        assert len(rows) <= setup.max_rows
        assert rows <= set(range(setup.max_rows))
        due = {sequence.row for sequence in self._sampled if not self._may_pause(sequence)}
        assert due <= rows, "a decoding row was left out of a step"
        num_decoded = sum(row.max_tokens for row in plan.rows if row.is_decode)
        assert plan.num_tokens <= max(setup.max_step_tokens, num_decoded + setup.page_size)
        for row in plan.rows:
            sequence = self._in_row(row.row)
            longest = self._longest(sequence) + (sequence.request.pooling is not None)
            assert row.start + row.num_tokens < longest or row.is_decode, "planned past the end"
            assert sequence.num_tokens <= longest, "a reply may become too long"
