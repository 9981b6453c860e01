"""Replies constrained by a grammar or by banned words: computes which tokens may come next, as
bitmaps for the device.

Every constrained request has a matcher, which follows the tokens of its sequence as they reach the
host, so a preempted request needs nothing when it returns. Grammars are compiled in a thread, so
that an expensive one delays only its own request, and llguidance's threads fill the masks while the
device computes the logits. The cost of a grammar is limited; one that exceeds the limit ends its
request. Requests with the same grammar share the states of its lexer, which is faster, but all of
them count towards the limit, drafts included, and fail together. So after a failure the grammar is
compiled anew for later requests, and a request that was not alone continues with a lexer of its
own. The engine decides when masks are due and what happens to a failed request.

A row with drafts needs a mask for each of its positions: a copy of its matcher consumes the drafts.
Tokens that a grammar forces are appended to the reply at once, or become drafts.

llguidance is imported by the first constrained request.
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock.engine.banned_words import BannedWords
from penstock.errors import CheckpointError, ConfigError, PenstockError, RequestError
from penstock.gguf.folder import has_file, read_text
from penstock.types import GRAMMAR_LIMITS, Request, Sequence, StepPlan

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

NUM_KEPT_GRAMMARS = 32
ALL_ALLOWED = 0xFFFFFFFF  # 32 tokens per word
NOTHING_LEFT = "bad_words forbid every token that it allows."

# int32 memory of that shape, from which the device can copy without waiting.
NewBuffer = Callable[[tuple[int, int]], np.ndarray]


@dataclass(frozen=True, slots=True)
class StepMasks:
    """The allowed tokens of the constrained rows of one step; valid until the next step's masks are
    filled.
    """

    places: list[int]  # [N] their rows of logits
    allowed: np.ndarray  # [N, words] int32
    failures: list[Failure]
    dead_ends: list[DeadEnd]


@dataclass(frozen=True, slots=True)
class Failure:
    """A sequence that has no next token, at least with this matcher."""

    sequence: Sequence
    problem: str
    is_shared: bool = False  # other requests contributed: it may go on with a lexer of its own


@dataclass(frozen=True, slots=True)
class DeadEnd:
    """A draft that no token can follow: a reply that reaches it fails there."""

    failure: Failure
    num_tokens: int  # of the sequence, including the draft
    draft_id: int

    @property
    def is_reached(self) -> bool:
        tokens = self.failure.sequence.tokens
        is_here = len(tokens) == self.num_tokens and tokens[-1] == self.draft_id
        return is_here and self.failure.sequence.finish is None


class CompiledGrammar:
    """A matcher in its initial state. Its copies share a lexer, and fail together."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._initial = matcher
        self.num_users = 0

    def new_matcher(self) -> LLMatcher:
        self.num_users += 1
        return self._initial.deep_copy()


@dataclass(frozen=True, slots=True)
class Preparation:
    """A request whose grammar is being compiled."""

    request: Request
    future: Future[CompiledGrammar]
    withdrawn: Sequence | None  # it ran before, with a lexer that failed


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request whose grammar is compiled, or the error."""

    request: Request
    grammar: CompiledGrammar | None
    withdrawn: Sequence | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ConstrainedRow:
    """A row of a step, and the index of its first row of logits: it has one, and one more per
    draft.
    """

    place: int
    constraint: Constraint
    draft_ids: tuple[int, ...] = ()


class Constraint:
    """One sequence, its banned words, and how far its matcher, if any, has followed it."""

    def __init__(self, sequence: Sequence, grammar: CompiledGrammar | None) -> None:
        self.sequence = sequence
        self.grammar = grammar
        self.matcher = None if grammar is None else grammar.new_matcher()
        self.banned = BannedWords(sequence.request.banned)
        self._starts_after = frozenset(sequence.request.sampling.grammar_starts_after)
        self.has_started = not self._starts_after
        self._num_followed = sequence.num_prompt_tokens

    def follow(self) -> None:
        """Consumes new tokens; a token that the grammar forbids leaves the matcher in error."""
        if self.matcher is None:
            return
        tokens = self.sequence.tokens
        for token_id in tokens[self._num_followed :]:
            if self.has_started:
                self.matcher.consume_token(token_id)
            else:
                self.has_started = token_id in self._starts_after
        self._num_followed = len(tokens)

    def forced(self, most: int) -> tuple[int, ...]:
        self.follow()
        if self.matcher is None or not self.has_started or self.matcher.is_error():
            return ()
        return tuple(self.matcher.compute_ff_tokens()[:most])

    def starts_with(self, token_id: int) -> bool:
        return token_id in self._starts_after

    def failure_of(self, matcher: LLMatcher) -> Failure:
        is_shared = self.grammar is not None and self.grammar.num_users > 1
        return Failure(self.sequence, problem_of(matcher), is_shared)


class GrammarCompiler:
    """A checkpoint's vocabulary for llguidance, and the grammars that were compiled for it."""

    def __init__(self, tokenizer_file: Path | None, vocab_size: int) -> None:
        self._tokenizer_file = tokenizer_file
        self._vocab_size = vocab_size
        self._vocabulary: LLTokenizer | None = None
        self._failure: PenstockError | None = None
        self._compiled: OrderedDict[str, CompiledGrammar] = OrderedDict()  # oldest use first

    def require(self) -> None:
        """Raises an error if this engine cannot support grammars."""
        if self._failure is None and importlib.util.find_spec("llguidance") is None:
            self._failure = ConfigError(
                "This installation cannot enforce grammars",
                "The package llguidance is not installed.",
                "Install penstock with its dependencies.",
            )
        if self._failure is None and (
            self._tokenizer_file is None or not has_file(self._tokenizer_file)
        ):
            self._failure = CheckpointError(
                "Grammars cannot be enforced for this model",
                f"{self._tokenizer_file or 'tokenizer.json'}, which has the text of its tokens, "
                "does not exist.",
                "Serve a checkpoint with its tokenizer.",
            )
        if self._failure is not None:
            raise self._failure

    def load_vocabulary(self) -> LLTokenizer:
        """The first call takes seconds for a large vocabulary, and blocks all other threads."""
        if self._vocabulary is None:
            self.require()
            self._vocabulary = self._read_vocabulary()
        return self._vocabulary

    def _read_vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        assert self._tokenizer_file is not None
        try:
            return LLTokenizer(read_text(self._tokenizer_file), n_vocab=self._vocab_size)
        except (OSError, ValueError) as error:
            self._failure = CheckpointError(
                f"{self._tokenizer_file} does not match the model",
                f"{error}; the model has {self._vocab_size} token ids.",
                "Fetch the checkpoint again.",
            )
            raise self._failure from error

    def compile(self, grammar: str) -> CompiledGrammar:
        compiled = self._compiled.pop(grammar, None) or self.compile_anew(grammar)
        self._compiled[grammar] = compiled
        if len(self._compiled) > NUM_KEPT_GRAMMARS:
            self._compiled.popitem(last=False)
        return compiled

    def compile_anew(self, grammar: str) -> CompiledGrammar:
        """With a lexer that no other request uses."""
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False, **GRAMMAR_LIMITS)
        matcher = LLMatcher(self.load_vocabulary(), grammar, log_level=0, limits=limits)
        # The first mask is the most expensive, and fails if nothing matches the grammar.
        matcher.compute_bitmask()
        if matcher.is_error():
            raise RequestError(
                "The grammar cannot be enforced", problem_of(matcher), param="grammar"
            )
        return CompiledGrammar(matcher)

    def forget(self, constraint: Constraint) -> None:
        """Its grammar has failed: later requests would fail as well."""
        grammar = constraint.sequence.request.sampling.grammar
        if grammar is not None and self._compiled.get(grammar) is constraint.grammar:
            self._compiled.pop(grammar, None)


@dataclass(slots=True)
class Constraints:
    compiler: GrammarCompiler
    vocab_size: int
    max_masks: int  # per step
    new_buffer: NewBuffer
    _preparing: dict[str, Preparation] = field(default_factory=dict)
    _live: list[Constraint] = field(default_factory=list)
    # One thread, so the compiler's cache needs no lock.
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "grammar"))
    _executor: LLExecutor | None = None
    _allowed: np.ndarray | None = None  # [max_masks, words] int32

    @property
    def num_preparing(self) -> int:
        return len(self._preparing)

    def is_preparing(self, request_id: str) -> bool:
        return request_id in self._preparing

    def prepare(self, request: Request, withdrawn: Sequence | None = None) -> None:
        """Starts to compile the request's grammar; `take_prepared` returns the request. One that
        was withdrawn gets a lexer of its own.
        """
        self.compiler.require()
        assert request.sampling.grammar is not None
        compile = self.compiler.compile if withdrawn is None else self.compiler.compile_anew
        future = self._thread.submit(compile, request.sampling.grammar)
        self._preparing[request.id] = Preparation(request, future, withdrawn)

    def drop(self, request_id: str) -> bool:
        """Forgets a request whose grammar is being compiled; returns whether there was one."""
        entry = self._preparing.pop(request_id, None)
        if entry is not None:
            entry.future.cancel()
        return entry is not None

    def wait(self, timeout_s: float) -> None:
        """Waits until a grammar is compiled, for when there is nothing else to do."""
        futures = [entry.future for entry in self._preparing.values()]
        concurrent.futures.wait(futures, timeout_s, concurrent.futures.FIRST_COMPLETED)

    def take_prepared(self) -> list[Prepared]:
        done = [entry for entry in self._preparing.values() if entry.future.done()]
        prepared = []
        for entry in done:
            del self._preparing[entry.request.id]
            # Any exception: it concerns only this request, and the engine continues.
            error = entry.future.exception()
            grammar = entry.future.result() if error is None else None
            prepared.append(Prepared(entry.request, grammar, entry.withdrawn, str(error or "")))
        return prepared

    def add(self, sequence: Sequence, grammar: CompiledGrammar | None = None) -> None:
        """Without a grammar, only banned words apply."""
        self._live.append(Constraint(sequence, grammar))

    def rows_of(self, plan: StepPlan) -> list[ConstrainedRow]:
        """The constrained rows that sample in this step."""
        if not self._live:
            return []
        self._live = [constraint for constraint in self._live if constraint.sequence.finish is None]
        places, first = {}, 0
        for row in plan.rows:
            if row.samples:
                places[row.row] = first, row.draft_ids
                first += row.max_tokens
        return [
            ConstrainedRow(place, constraint, draft_ids)
            for constraint in self._live
            if (number := constraint.sequence.row) is not None and number in places
            for place, draft_ids in [places[number]]
        ]

    def forced(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """The next tokens of a sequence whose tokens the host knows, as far as its grammar leaves
        no choice. Each is the only one that its mask allows: llguidance tokenizes forced text.
        """
        constraint = next((one for one in self._live if one.sequence is sequence), None)
        return () if constraint is None else constraint.forced(most)

    def sequences(self) -> Iterator[Sequence]:
        """Sequences with a grammar and no banned words, which might leave no token at all."""
        for constraint in self._live:
            if constraint.matcher is not None and not constraint.banned:
                yield constraint.sequence

    def may_force(self, rows: list[ConstrainedRow], least: int) -> bool:
        """Whether at least this many tokens are forced after one that is about to be sampled."""
        return any(len(row.constraint.forced(1 + least)) > least for row in rows)

    def fill(self, rows: list[ConstrainedRow]) -> StepMasks:
        """The masks of rows whose latest tokens the host knows. Finished rows get none."""
        rows = [row for row in rows if row.constraint.sequence.finish is None]
        num_ahead = sum(len(row.draft_ids) for row in rows)
        allowed = self._buffer()[: len(rows) + num_ahead]
        words = allowed.view(np.uint32)
        jobs = []
        for index, row in enumerate(rows):
            constraint = row.constraint
            constraint.follow()
            if constraint.matcher is None:
                words[index].fill(ALL_ALLOWED)
            elif constraint.has_started:
                jobs.append((constraint.matcher, index))
            else:
                self._allow_all_but_ends(words[index], constraint)
        self._run(jobs, allowed[: len(rows)])
        failures = []
        for matcher, index in jobs:
            constraint = rows[index].constraint
            if matcher.is_error():
                failures.append(constraint.failure_of(matcher))
                self.compiler.forget(constraint)
            else:
                self._translate_end(words[index], constraint)
        for index, row in enumerate(rows):
            if row.constraint.banned and not _forbid_words(words[index], row.constraint):
                failures.append(Failure(row.constraint.sequence, NOTHING_LEFT))
        places, first, dead_ends = [row.place for row in rows], len(rows), []
        for index, row in enumerate(rows):
            end = first + len(row.draft_ids)
            dead_end = self._fill_ahead(row, words[index], words[first:end])
            dead_ends += [] if dead_end is None else [dead_end]
            places += range(row.place + 1, row.place + 1 + len(row.draft_ids))
            first = end
        return StepMasks(places, allowed, failures, dead_ends)

    def _fill_ahead(
        self, row: ConstrainedRow, before: np.ndarray, words: np.ndarray
    ) -> DeadEnd | None:
        """The masks after each draft, given the mask before them. After a draft that is forbidden
        or ends the reply, or that no token can follow, everything is allowed: what is sampled there
        is never said.
        """
        constraint, sequence = row.constraint, row.constraint.sequence
        words.fill(ALL_ALLOWED)
        # A copy: one that fails after a wrong draft could not be rolled back.
        matcher = None if constraint.matcher is None else constraint.matcher.deep_copy()
        has_started = constraint.has_started
        for place, draft in enumerate(row.draft_ids):
            own = words[place]
            if draft in sequence.request.end_token_ids:
                break
            if matcher is not None and has_started:
                # The mask knows, not the matcher: one whose lexer has failed refuses every draft.
                if matcher.is_error() or not _allows(before, draft):
                    break
                matcher.consume_token(draft)
            elif matcher is not None:
                has_started = constraint.starts_with(draft)
            failure = None
            if matcher is not None and has_started:
                if not matcher.is_error():
                    matcher.unsafe_compute_mask_ptr(own.ctypes.data, own.nbytes)
                if matcher.is_error():
                    failure = constraint.failure_of(matcher)
                    self.compiler.forget(constraint)
                self._translate_end(own, constraint)
            elif matcher is not None:
                self._allow_all_but_ends(own, constraint)
            if constraint.banned and not _forbid_words(own, constraint, row.draft_ids[: place + 1]):
                failure = failure or Failure(sequence, NOTHING_LEFT)
            if failure is not None:
                own.fill(ALL_ALLOWED)
                return DeadEnd(failure, len(sequence.tokens) + place + 1, draft)
            before = own
        return None

    def _run(self, jobs: list[tuple[LLMatcher, int]], allowed: np.ndarray) -> None:
        num_bytes = allowed.shape[1] * 4
        if len(jobs) == 1:
            ((matcher, index),) = jobs
            matcher.unsafe_compute_mask_ptr(allowed[index].ctypes.data, num_bytes)
        elif jobs:
            if self._executor is None:
                from llguidance import LLExecutor

                self._executor = LLExecutor()
            self._executor.unsafe_compute_mask_ptr(
                jobs, allowed.ctypes.data, num_bytes, len(allowed)
            )

    def _buffer(self) -> np.ndarray:
        """The same buffer in every step: the step that copied from it has ended when the next one
        is filled.
        """
        if self._allowed is None:
            self._allowed = self.new_buffer((self.max_masks, -(-self.vocab_size // 32)))
        return self._allowed

    def _allow_all_but_ends(self, words: np.ndarray, constraint: Constraint) -> None:
        """For thinking before the grammar starts: a reply that ended there would never reach the
        grammar.
        """
        words.fill(ALL_ALLOWED)
        is_control_token = self.compiler.load_vocabulary().is_special_token
        for token_id in constraint.sequence.request.end_token_ids:
            if is_control_token(
                token_id
            ):  # a client's own stop may be any token; then it stops thinking too
                words[token_id // 32] &= ~np.uint32(1 << token_id % 32)

    def _translate_end(self, words: np.ndarray, constraint: Constraint) -> None:
        """llguidance marks the end with one token; the request defines which tokens end its
        reply.
        """
        eos = self.compiler.load_vocabulary().eos_token
        bit = np.uint32(1 << eos % 32)
        if words[eos // 32] & bit:
            words[eos // 32] &= ~bit
            for token_id in constraint.sequence.request.end_token_ids:
                words[token_id // 32] |= np.uint32(1 << token_id % 32)


def _allows(words: np.ndarray, token_id: int) -> bool:
    return bool(words[token_id // 32] & np.uint32(1 << token_id % 32))


def _forbid_words(
    words: np.ndarray, constraint: Constraint, draft_ids: tuple[int, ...] = ()
) -> bool:
    """Returns whether any token is still allowed."""
    sequence = constraint.sequence
    tokens = [*sequence.tokens, *draft_ids] if draft_ids else sequence.tokens
    for token_id in constraint.banned.next_ids(tokens, sequence.num_prompt_tokens):
        words[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    return bool(words.any())


def problem_of(matcher: LLMatcher) -> str:
    """A matcher's error in one line."""
    return matcher.get_error().partition("\n")[0].rstrip(".") + "."
