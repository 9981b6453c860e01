"""The search loop: from a first correct version, change one decision, try it, keep what is faster.

The profile of the best engine decides what to try next: an alternative promises to save a share of
the time of some parts. A writing model may propose edits, judged by the same trial. The best engine
is always on disk.
"""

from __future__ import annotations

import contextlib
import signal
import statistics
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path

from penstock.errors import PenstockError
from penstock.forge import decisions
from penstock.forge.decisions import Alternative, Design
from penstock.forge.emit import WIDTH, emit
from penstock.forge.initial_design import first_design, opening
from penstock.forge.ledger import Ledger, Row, Story, count_changes, write_report
from penstock.forge.machine import Machine
from penstock.forge.measure import FAMILIES, Timing, gains, score
from penstock.forge.plot import draw_progress
from penstock.forge.run_log import replace_file
from penstock.forge.sandbox import Sandbox
from penstock.forge.target import Target
from penstock.forge.trial import Bar, Exam, Outcome, profile_engine, run_trial
from penstock.forge.writer import Proposal, Writer, describe_choices

LEAST_PROMISE = 0.003  # of all time: below it, an alternative is not worth a trial
FADED = 0.25  # factor for the promise of a failed alternative, once another one was kept
LEAST_GAIN = 1.02  # a smaller gain is noise, or not worth the lines
CLEAR_GAIN = 1.10  # on a GPU; a smaller gain is confirmed by timing the best engine again
DOUBTFUL_GAIN = 0.8  # on a CPU, which others use too; everything better is confirmed
LEAST_TRIAL_S = 5.0  # compiling a kernel takes longer than that
REPORT_S = 1.0  # for the report, and for ending a candidate
RECENT_TRIALS = 5  # used to estimate how long the next one takes
SEARCH_SHARE = 0.6  # of the time, if a writing model gets the rest
PLAN_SHARE = 0.2  # of the time left, to wait for a plan
MEMORY_IS_SHORT = 0.7
OUTCOME_OF_A_ROW = ("gate", "fault", "seconds", "worst", "peak_bytes", "build_s", "phases")
NUM_KINDS = 4  # of work: projections, attention, small operations, launching


class ForgeError(PenstockError):
    """The run produced no engine."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A candidate that passed."""

    source: str
    design: Design
    outcome: Outcome
    idea: str
    total: Mapping[str, float]  # speed-up over the first version, by family

    @property
    def timings(self) -> Mapping[str, Timing]:
        return self.outcome.timings


@dataclass(slots=True)
class Search:
    target: Target
    machine: Machine
    exam: Exam
    sandbox: Sandbox
    ledger: Ledger
    out: Path
    _: KW_ONLY
    budget_s: float
    writer: Writer | None = None
    max_trials: int = 1000
    say: Callable[[str], None] = lambda line: None
    judged_s: list[float] = field(default_factory=list)  # per trial, second timings included
    reasons: dict[str, str] = field(default_factory=dict)
    tried: set[str] = field(default_factory=set)
    disappointing: list[Alternative] = field(default_factory=list)
    first: Engine | None = None
    best: Engine | None = None

    def run(self) -> Engine:
        """Ends with the best engine on disk, also when it is interrupted."""
        ending = "The time was used up."
        try:
            self.start()
            if self._best().outcome.is_cut_short:
                ending = (
                    "The time was used up before the first version could be timed; it is correct."
                )
            elif self._improve():
                ending = "No alternative promised a gain any more."
        except KeyboardInterrupt:
            ending = "The run was interrupted; this is the best engine so far."
            if self.best is None:
                raise
        with _undisturbed():
            self._report(ending)
        return self._best()

    def _improve(self) -> bool:
        """Whether nothing was left to try before the time was over."""
        self._try_opening()
        if self.writer:
            self._follow_plan(self.writer)
        is_exhausted = self._improve_by_decisions()
        if self.writer:
            self.improve_by_writing(self.writer)
        self._hold_closing_match()
        return is_exhausted

    def start(self) -> None:
        design = first_design(self.machine)
        source = self._write(design)
        # With an opening, the next design does not need a profile.
        is_profiled = opening(self.target, self.machine) is None
        outcome = run_trial(
            self.sandbox,
            source,
            self.exam,
            seconds=self._left_s,
            is_profiled=is_profiled,
            when_right=lambda: replace_file(self.out, source),
        )
        self.judged_s.append(outcome.seconds)
        if not outcome.is_passed and not outcome.is_cut_short:
            if outcome.gate == "measure":  # correct until it was timed
                self.out.unlink(missing_ok=True)
            raise ForgeError(
                f"The first version stopped at {outcome.gate}",
                outcome.fault,
                "If time is short, use a larger --budget. If memory is short, use a smaller "
                "max_position_embeddings: every request reserves keys and values for that many "
                "tokens.",
            )
        alike = dict.fromkeys(FAMILIES, 1.0)
        self.first = self.best = Engine(source, design, outcome, "plain torch with a cache", alike)
        self.tried.add(_key(design))
        self._record(
            "search", self.first.idea, "a correct start", "", source, outcome, "kept", alike
        )

    def _try_opening(self) -> None:
        """Tries in one step, without a profile, what profiles would lead to in several.

        Runs if any time is left, however long the first version took: nothing else gains as much,
        and it removes what makes that version slow.
        """
        guess = opening(self.target, self.machine)
        if guess is None or not self._has_time(1.0, LEAST_TRIAL_S):
            return
        first = self._best()
        self._try(*guess)
        if self._best() is not first:
            # Trials of engines like the first tell nothing about the time of later ones.
            del self.judged_s[:-1]

    def _follow_plan(self, writer: Writer) -> None:
        """Tries the decisions that a writing model planned; after that, the profile chooses."""
        self._know_where_time_goes()
        device, best = self.target.device, self._best()
        choices = describe_choices(best.design, device)
        steps = writer.plan(self._brief(best), choices, device, PLAN_SHARE * self._left_s)
        if isinstance(steps, str):
            self._tell(f"no plan from {writer.name}: {steps}")
            return
        self._tell(f"plan from {writer.name}: {'; '.join(step.line() for step in steps)}")
        for step in steps:
            design = step.follow(self._best().design)
            if _key(design) not in self.tried and self._has_time(SEARCH_SHARE):
                self._try(design, f"planned by {writer.name}: {step.why}")

    def _tell(self, line: str) -> None:
        self.ledger.log(line)
        self.say(line)

    def _improve_by_decisions(self) -> bool:
        """True if nothing is left to try, False if time is up."""
        share = SEARCH_SHARE if self.writer else 1.0
        while self._has_time(share):
            idea = self._most_promising()
            if idea is None:
                return True
            alternative, design, promise = idea
            saves, before = alternative.saves, self._best().design
            part = max(saves, key=lambda part: self._share(part) * saves[part])
            self._try(
                design, f"{part} is {self._share(part):.0%} of the time; promises {promise:.1%}"
            )
            if self._best().design == before:
                self.disappointing.append(alternative)
        return False

    def _try(self, design: Design, why: str) -> None:
        self.tried.add(_key(design))
        changed = decisions.differences(self._best().design, design)
        self._judge("search", "; ".join(changed), why, self._write(design), design)

    def improve_by_writing(self, writer: Writer) -> None:
        while self._has_time(1.0) and not writer.is_exhausted:
            best = self._best()
            reply_s = self._left_s - self._expected_s(1)  # leaves time for its trial
            proposal = writer.propose(best.source, self._brief(best), reply_s)
            if isinstance(proposal, Proposal):
                why = "the writing model's idea"
                self._judge(writer.name, proposal.idea, why, proposal.source, best.design)
            else:
                outcome = Outcome(proposal, "reply", 0.0)
                self._record(writer.name, "no usable edit", "", "", "", outcome, "discarded", {})
            writer.hear(self.ledger.rows[-1])

    def _judge(self, author: str, idea: str, why: str, source: str, design: Design) -> None:
        before, began = self._best(), self.ledger.age_s
        # The least gain is lower on a CPU, where the best engine is timed again.
        bar = Bar(before.timings, LEAST_GAIN if self.target.is_cuda else DOUBTFUL_GAIN)
        outcome = run_trial(self.sandbox, source, self.exam, seconds=self._left_s, bar=bar)
        is_kept = outcome.is_passed and self._is_better(outcome)
        total: dict[str, float] = {}
        if outcome.is_passed:
            gained = gains(outcome.timings, self._best().timings)
            total = {family: gain * before.total[family] for family, gain in gained.items()}
        if is_kept:
            said = ", ".join(f"{family} {gain:.2f}x" for family, gain in gained.items())
            changed = [name for name in design if design[name] != before.design[name]]
            self.reasons |= dict.fromkeys(changed, said)
            text = self._write(design) if author == "search" else source  # with its reasons
            replace_file(self.out, text)
            self.best = Engine(text, design, outcome, idea, total)
        verdict = "kept" if is_kept else "discarded"
        self.judged_s.append(self.ledger.age_s - began)
        self._record(author, idea, why, before.source, source, outcome, verdict, total)

    def _is_better(self, outcome: Outcome) -> bool:
        """Times the best engine again, right after, if other processes may disturb timings."""
        best = self._best()
        gain = score(outcome.timings, best.timings)
        is_clear = (
            not LEAST_GAIN <= gain < CLEAR_GAIN if self.target.is_cuda else gain < DOUBTFUL_GAIN
        )
        if is_clear:
            return gain >= LEAST_GAIN
        self.best = self._time_again(best) or best
        return score(outcome.timings, self.best.timings) >= LEAST_GAIN

    def _time_again(self, engine: Engine) -> Engine | None:
        brief = replace(self.exam, cases=self.exam.cases[:1])
        again = run_trial(
            self.sandbox, engine.source, brief, seconds=self._left_s, is_profiled=False
        )
        timed = replace(engine, outcome=replace(engine.outcome, timings=again.timings))
        return timed if again.is_passed else None

    def _hold_closing_match(self) -> None:
        """The first version and the best, one after the other: what the report compares."""
        first, best = self.first, self._best()
        assert first is not None
        if first is best or self.target.is_cuda or not self._has_time(1.0, self._expected_s(2)):
            return
        timed = [self._time_again(engine) for engine in (first, best)]
        if timed[0] and timed[1]:
            self.first, self.best = timed

    def _most_promising(self) -> tuple[Alternative, dict[str, str], float] | None:
        self._know_where_time_goes()
        promises = [
            (alternative, design, self._promise(alternative, design))
            for alternative, design in decisions.moves(self._best().design, self.target.device)
            if _key(design) not in self.tried
        ]
        best = max(promises, key=lambda one: one[2], default=None)
        return best if best and best[2] >= LEAST_PROMISE else None

    def _promise(self, alternative: Alternative, design: Design) -> float:
        """The share of all time that it may save, minus the savings that it replaces."""
        lost = decisions.forgone(self._best().design, design)
        saved = sum(self._share(part) * save for part, save in alternative.saves.items())
        promise = saved - sum(self._share(part) * save for part, save in lost.items())
        return FADED * promise if alternative in self.disappointing else promise

    def _know_where_time_goes(self) -> None:
        """Profiles the best engine if it has no profile, as when the first version follows a bad
        opening.
        """
        best = self._best()
        if not best.outcome.profile:
            profile = profile_engine(self.sandbox, best.source, self.exam, seconds=self._left_s)
            self.best = replace(best, outcome=replace(best.outcome, profile=profile))

    def _share(self, part: str) -> float:
        """The part's share of all time; prefill and decode weigh the same; unseen time is split
        evenly."""
        outcome = self._best().outcome
        if part == "memory":
            total = self.machine.memory_bytes
            return float(bool(total) and outcome.peak_bytes > MEMORY_IS_SHORT * total)
        family = part.partition(".")[0]
        seconds = outcome.profile
        whole = sum(seconds[name] for name in seconds if name.startswith(family + "."))
        own = seconds.get(part, 0.0) + seconds.get(family + ".unseen", 0.0) / NUM_KINDS
        return own / whole / 2 if whole else 0.0

    def _has_time(self, share: float, seconds: float | None = None) -> bool:
        """Whether work of this length (by default a trial) and the report would end in time. A
        trial that takes longer is stopped.
        """
        seconds = self._expected_s(1) if seconds is None else seconds
        is_in_time = self.ledger.age_s + seconds < share * self.budget_s
        return is_in_time and len(self.ledger.rows) < self.max_trials

    def _expected_s(self, num_trials: int) -> float:
        """The time that further trials need, judged by the last few."""
        return 1.2 * num_trials * statistics.median(self.judged_s[-RECENT_TRIALS:])

    @property
    def _left_s(self) -> float:
        """The time left, which limits a candidate that never ends."""
        return max(1.0, self.budget_s - REPORT_S - self.ledger.age_s)

    def _record(
        self,
        author: str,
        idea: str,
        why: str,
        before: str,
        after: str,
        outcome: Outcome,
        verdict: str,
        total: Mapping[str, float],
    ) -> None:
        added, removed = count_changes(before, after)
        row = Row(
            trial=len(self.ledger.rows),
            author=author,
            idea=idea,
            why=why,
            lines_added=added,
            lines_removed=removed,
            verdict=verdict,
            at_s=self.ledger.age_s,
            call_ms={name: timing.call_ms for name, timing in outcome.timings.items()},
            **{name: getattr(outcome, name) for name in OUTCOME_OF_A_ROW},
            held_to=() if outcome.gate in ("reply", "screen") else tuple(self.sandbox.enforced),
        )
        if outcome.is_passed:
            row = replace(row, score=statistics.geometric_mean(total.values()), gains=total)
        self.ledger.add(row)
        self.say(row.line())

    def _best(self) -> Engine:
        assert self.best is not None, "there is a best engine once there is a first"
        return self.best

    def _write(self, design: Design) -> str:
        return emit(design, self._says(design))

    def _says(self, design: Design) -> str:
        """The engine's docstring."""
        lines = [
            "An engine for one model, written by `penstock forge` for the machine it was timed on.",
            "",
            f"Model: {self.target.describe()}.",
            f"Machine: {self.machine.describe()}.",
            "",
            "Decisions:",
        ]
        for question, choice, why in self._decided(design):
            said = f"- {question} {choice}." + (f" ({why})" if why else "")
            lines += textwrap.wrap(said, WIDTH, initial_indent="  ", subsequent_indent="    ")
        return "\n".join(lines)

    def _decided(self, design: Design) -> list[tuple[str, str, str]]:
        return [
            (one.question, chosen.says[0].upper() + chosen.says[1:], self.reasons.get(one.name, ""))
            for one, chosen in decisions.active(design)
        ]

    def _brief(self, best: Engine) -> str:
        """What a writing model gets besides the source."""
        times = "\n".join(
            f"  {name}: {timing.call_ms:.3f} ms per call" for name, timing in best.timings.items()
        )
        ranked = sorted(best.outcome.profile.items(), key=lambda item: -item[1])[:6]
        parts = "\n".join(f"  {part}: {self._share(part):.0%}" for part, _ in ranked)
        tried = "\n".join(
            f"  {row.idea}: {row.verdict} {row.fault}".rstrip() for row in self.ledger.rows[-8:]
        )
        model = f"Model: {self.target.describe()}\nMachine: {self.machine.describe()}"
        return f"{model}\nMeasured now:\n{times}\nWhere time goes:\n{parts}\nTried so far:\n{tried}"

    def _report(self, ending: str) -> None:
        first, best = self.first, self._best()
        assert first is not None
        story = Story(
            model=self.target.describe(),
            machine=self.machine.describe(),
            device=self.target.device,
            decisions=self._decided(best.design),
            first=first.timings,
            best=best.timings,
            floors_ms=self._floors_ms(),
            gains=gains(best.timings, first.timings),
            enforced=self.sandbox.enforced,
            given_up=self.sandbox.given_up,
            profile=best.outcome.profile,
            ending=f"{len(self.ledger.rows)} trials in {self.ledger.age_s:.0f} s. {ending}",
        )
        write_report(self.ledger.folder / "report.md", story, self.ledger.rows)
        replace_file(
            self.ledger.folder / "progress.svg", draw_progress(self.ledger.rows, story.model)
        )
        self.ledger.log(story.ending)
        for name, timing in best.timings.items():
            self.ledger.log(
                f"{name}: {timing.call_ms:.3f} ms per call, {timing.tokens_per_second:.0f} tokens/s"
            )

    def _floors_ms(self) -> dict[str, float]:
        floors = {}
        for bench in self.exam.benches:
            if bench.family == "decode":
                batch = len(bench.case.calls[bench.timed[0]].ids)
                prompts = bench.case.calls[0].num_tokens
                context_len = (prompts + batch * (bench.timed[1] - bench.timed[0]) / 2) / batch
                floors[bench.name] = 1e3 * self.machine.decode_floor_s(
                    self.target, batch, context_len
                )
            elif bench.family == "prefill":
                floors[bench.name] = 1e3 * self.machine.prefill_floor_s(
                    self.target, bench.num_tokens
                )
        return floors


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Writes the report despite repeated interrupts; it takes a moment."""
    if threading.current_thread() is not threading.main_thread():  # only that is interrupted
        yield
        return
    endings = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(ending, signal.SIG_IGN) for ending in endings]
    try:
        yield
    finally:
        for ending, handler in zip(endings, before):
            signal.signal(ending, handler)


def _key(design: Design) -> str:
    """Two designs with the same key are the same engine."""
    return " ".join(f"{one.name}={chosen.name}" for one, chosen in decisions.active(design))
