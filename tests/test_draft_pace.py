"""Drafts are made only while they pay off: tested with simulated step times and engine counters."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from penstock.config import Speculation
from penstock.engine.draft_pace import PLAIN_STEPS, PROBE_EVERY, Acceptance, DraftPace
from penstock.engine.graph_sizes import DraftLimits, draft_sizes
from penstock.engine.speculate import Speculator
from penstock.types import Request, RowPlan, Sequence, StepPlan
from scripted_drafter import ALWAYS_RIGHT, NUM_DRAFTS, drafting_engine
from small_models import LLAMA, make_engine, prompt, request, run

MOST = 4
Seconds = Callable[[int, int], float]  # step time by rows and tokens per row


def settle(pace: DraftPace, seconds: Seconds, rate: float, rows: int, steps: int = 60) -> list[int]:
    """The numbers of drafts chosen in this many steps, if every place has this acceptance rate."""
    chosen = []
    for _ in range(steps):
        step = pace.start_step(rows)
        chosen.append(pace.num_drafts(rows, [rate] * MOST, MOST, step))
        pace.note_step(rows, 1 + chosen[-1], seconds(rows, 1 + chosen[-1]))
    return chosen


def cheap(rows: int, tokens: int) -> float:
    return 1.0 + 0.02 * rows * tokens


def costly(rows: int, tokens: int) -> float:
    return 1.0 * rows * tokens


@pytest.mark.parametrize(
    ("seconds", "rate", "rows", "expected"),
    [
        (cheap, 0.9, 1, MOST),
        (cheap, 0.01, 1, 0),
        (cheap, 0.25, 1, 2),  # a third draft would add 0.016 tokens, and costs more
        (costly, 0.9, 1, 0),
        (cheap, 0.9, 4, MOST),
        (cheap, 0.5, 256, 0),  # with so many rows, step time is proportional to tokens
    ],
)
def test_the_number_that_gives_the_most_tokens_a_second(
    seconds: Seconds, rate: float, rows: int, expected: int
) -> None:
    chosen = settle(DraftPace(), seconds, rate, rows)
    assert chosen[:4] == [MOST, MOST, 0, 0]  # to measure both
    assert chosen[-1] == expected


def test_what_does_not_pay_is_tried_again_but_seldom() -> None:
    chosen = settle(DraftPace(), costly, 0.9, 1, steps=3 * PROBE_EVERY)
    assert 0 < sum(map(bool, chosen[4:])) <= 0.02 * len(chosen)
    assert chosen[PROBE_EVERY + PLAIN_STEPS] == MOST


def test_plain_steps_are_measured_while_drafts_pay() -> None:
    chosen = settle(DraftPace(), cheap, 0.9, 1, steps=1000)[4:]
    assert 0 < chosen.count(0) <= 0.01 * len(chosen)


def test_times_from_before_the_first_step_need_no_trial() -> None:
    pace = DraftPace()
    pace.prime({(4, 1 + drafts): cheap(4, 1 + drafts) for drafts in range(MOST + 1)})
    assert settle(pace, cheap, 0.9, 4)[:4] == [MOST] * 4
    costly_pace = DraftPace()
    costly_pace.prime({(4, 1 + drafts): costly(4, 1 + drafts) for drafts in range(MOST + 1)})
    assert settle(costly_pace, costly, 0.9, 4)[:60] == [0] * 60


@dataclass(frozen=True, slots=True)
class World:
    """The simulated conditions of an engine: no tensors, no clock."""

    seconds: Seconds
    chance: Callable[[int], float]  # by step: probability that a draft is right after right ones
    rows: Callable[[int], int]  # by step
    noise: float = 0.0  # of step times
    reply_steps: int = 200  # then the row gets another request
    is_primed: bool = True
    is_uniform: bool = True  # same number of drafts in all rows, as in a graph
    slowness: Callable[[int], float] = lambda _: 1.0  # of the machine, by step


def draft_in(world: World, num_steps: int, seed: int = 0) -> tuple[float, float]:
    """The time of this many steps, and that of plain steps that give the same number of tokens."""
    generator = random.Random(seed)
    limits = DraftLimits(draft_sizes(64, 3)).most if world.is_uniform else None
    speculator = Speculator(Speculation("mtp", 3), most_drafts=limits)
    assert speculator.pace is not None
    if world.is_primed:
        sizes = [(rows, width) for rows in (1, 2, 4, 8, 16, 32, 64) for width in range(1, 5)]
        speculator.pace.prime({size: world.seconds(*size) for size in sizes})
    made = itertools.count()

    def start() -> Sequence:
        return Sequence.start(Request(id=str(next(made)), token_ids=(1,)), arrival=0)

    running = [start() for _ in range(64)]
    spent = plain = 0.0
    replays = False
    for step in range(num_steps):
        if step % world.reply_steps == 0:
            running[step // world.reply_steps % 64] = start()
        decoding = running[: world.rows(step)]
        speculator.start_plan(decoding)
        drafted = [speculator.drafts(sequence, 3)[0] for sequence in decoding]
        width = 1 + max(drafted)
        # A plain step after drafts still replays them, in the graph of one draft.
        slowness = world.slowness(step)
        exact = slowness * world.seconds(len(decoding), max(width, 2) if replays else width)
        replays = width > 1
        seconds = exact * generator.uniform(1 - world.noise, 1 + world.noise)
        num_tokens = 0
        for sequence, num_drafts in zip(decoding, drafted):
            right = 0
            while right < num_drafts and generator.random() < world.chance(step):
                right += 1
            speculator.note_tokens(sequence, num_drafts, (0,) * (1 + right))
            num_tokens += 1 + right
        plans = [RowPlan.decode(row, max_tokens=1 + n) for row, n in enumerate(drafted)]
        speculator.note_step(StepPlan(step, tuple(plans)), seconds)
        spent += seconds
        plain += slowness * world.seconds(len(decoding), 1) * num_tokens / len(decoding)
    return spent, plain


def moe(rows: int, tokens: int) -> float:
    """Step time in ms of Qwen3.5-35B-A3B on an H200: twice the tokens read nearly twice the experts
    until all are read; each draft of the head adds its time.
    """
    known = [(1, 1.93), (2, 2.46), (4, 3.49), (8, 5.54), (16, 8.42), (32, 13.0), (64, 17.9)]
    known += [(128, 24.0), (256, 36.0)]
    count = rows * tokens
    (low, least), (high, most) = next(
        (a, b) for a, b in itertools.pairwise([(0, 1.4), *known]) if count <= b[0]
    )
    return least + (most - least) * (count - low) / (high - low) + 0.15 * (tokens - 1)


def heavy(rows: int, tokens: int) -> float:
    """Every token costs as much as the first."""
    return 1.0 + 1.0 * rows * tokens


def some_rows(step: int) -> int:
    return (1, 3, 8, 20, 40, 64)[step // 37 % 6]


WORLDS = {
    "nothing is right": World(moe, lambda _: 0.0, lambda _: 1),
    "nothing is right, many rows": World(moe, lambda _: 0.0, lambda _: 64),
    "drafts are costly": World(heavy, lambda _: 0.9, lambda _: 8),
    "half are right": World(moe, lambda _: 0.5, lambda _: 8),
    "rows come and go": World(moe, lambda _: 0.3, some_rows),
    "rightness comes and goes": World(moe, lambda step: 0.9 * (step // 300 % 2), lambda _: 4),
    "times are noisy": World(moe, lambda _: 0.2, some_rows, noise=0.2),
    "short replies": World(moe, lambda _: 0.1, lambda _: 2, reply_steps=15),
    "nothing was measured before": World(moe, lambda _: 0.1, some_rows, is_primed=False),
    "a slow start": World(
        moe, lambda _: 0.2, lambda _: 8, is_primed=False, slowness=lambda step: 1 + 2 * (step < 30)
    ),
    "times grow": World(moe, lambda _: 0.4, lambda _: 4, slowness=lambda step: 1 + step / 2000),
    "every row for itself": World(
        moe, lambda _: 0.1, lambda _: 4, is_primed=False, is_uniform=False
    ),
}


@pytest.mark.thinned
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", WORLDS)
def test_drafts_are_never_slower_than_plain_by_more_than_two_per_cent(name: str, seed: int) -> None:
    spent, plain = draft_in(WORLDS[name], num_steps=4000, seed=seed)
    assert spent <= 1.02 * plain


@pytest.mark.parametrize(("rows", "gain"), [(1, 1.3), (8, 1.05), (32, 1.2), (64, 1.3)])
def test_drafts_that_pay_are_made(rows: int, gain: float) -> None:
    spent, plain = draft_in(World(moe, lambda _: 0.85, lambda _: rows), num_steps=3000)
    assert plain >= gain * spent


def test_losses_have_a_limit_whatever_is_believed() -> None:
    """The given acceptance rates are wrong: the time lost to rejected drafts is still limited."""
    pace, num_drafted = DraftPace(), 0
    pace.prime({(1, 1 + drafts): cheap(1, 1 + drafts) for drafts in range(MOST + 1)})
    spent, num_steps = 0.0, 3000
    for _ in range(num_steps):
        drafts = pace.num_drafts(1, [0.9] * MOST, MOST, pace.start_step(1))
        seconds = 2 * cheap(1, 1) if drafts else cheap(1, 1)
        num_drafted += drafts > 0
        pace.note_step(1, 1 if not drafts else 99, seconds)
        if drafts:
            pace.note_gain(1, 99, 1, seconds)
        spent += seconds
    assert spent <= 1.02 * num_steps * cheap(1, 1)
    assert num_drafted > 20


def test_a_better_time_is_found_again() -> None:
    """After much work that accepts no draft, work that accepts drafts still gets faster."""
    turn = 4000
    late = World(moe, lambda step: 0.85 * (step >= turn), lambda _: 64)
    before, all_of_it = draft_in(late, turn), draft_in(late, 2 * turn)
    spent, plain = (after - first for after, first in zip(all_of_it, before))
    assert plain >= 1.15 * spent


def test_a_disturbed_step_does_not_end_drafts() -> None:
    """The first step is slow, as in a process that has just started, and so is one in eight."""
    steps = iter(range(10_000))

    def disturbed(rows: int, tokens: int) -> float:
        step = next(steps)
        return cheap(rows, tokens) * (20.0 if step % 8 == 0 else 1.0)

    chosen = settle(DraftPace(), disturbed, 0.9, 1, steps=200)
    assert chosen[10:].count(MOST) > 0.95 * len(chosen[10:])


def test_what_was_never_measured_is_tried() -> None:
    """A host's drafter may propose nothing in the first steps."""
    pace = DraftPace()
    for _ in range(10):
        pace.start_step(1)
        pace.note_step(1, 1, 1.0)
    assert pace.num_drafts(1, [0.9] * MOST, MOST, pace.start_step(1)) == MOST


class QuietPace(DraftPace):
    """Step times of a machine without other load."""

    def note_step(self, num_rows: int, tokens_a_row: int, seconds: float) -> None:
        super().note_step(num_rows, tokens_a_row, cheap(num_rows, tokens_a_row))

    def note_gain(self, num_rows: int, tokens_a_row: int, num_new: int, seconds: float) -> float:
        return super().note_gain(num_rows, tokens_a_row, num_new, cheap(num_rows, tokens_a_row))


def test_acceptance_of_a_host_s_drafts_is_known_while_none_are_made() -> None:
    """Its guesses are compared with the reply: drafts start as soon as they would be right."""
    one = request("x", prompt(20), max_tokens=200)
    plain = run(make_engine(LLAMA), one)
    engine = drafting_engine(LLAMA, plain, [ALWAYS_RIGHT])
    speculator = engine.policy.speculator
    speculator.pace = QuietPace()
    speculator._acceptance.rates[:] = [0.0] * NUM_DRAFTS  # of earlier requests
    deltas = run(engine, one)["x"]
    assert speculator._acceptance.rates[0] > 0.9
    assert len(deltas) < 0.7 * 200


def test_acceptance_is_of_a_place_whose_drafts_before_were_right() -> None:
    acceptance = Acceptance([0.5, 0.5, 0.5])
    for _ in range(100):
        acceptance.note(3, 1)
    first, second, third = acceptance.rates
    assert first > 0.99
    assert second < 0.01
    assert third == 0.5  # never seen


def test_an_engine_counts_drafts_by_place() -> None:
    one = request("x", prompt(20), max_tokens=1 + 4 * 6)
    plain = run(make_engine(LLAMA), one)
    engine = drafting_engine(LLAMA, plain, [ALWAYS_RIGHT, 1])
    run(engine, one)
    drafts = engine.stats().drafts
    assert drafts is not None
    assert drafts.num_tokens == 24
    assert [count.place for count in drafts.counts] == list(range(1, NUM_DRAFTS + 1))
    assert all(count.drafter == "ngram" for count in drafts.counts)
    first, second, _ = drafts.counts
    assert first.num_accepted == first.num_drafted == drafts.num_decodes
    assert 0 < second.num_accepted < second.num_drafted
    assert make_engine(LLAMA).stats().drafts is None


@pytest.mark.parametrize("num_appended", [0, 2])
def test_a_guess_is_not_judged_by_tokens_behind_others(num_appended: int) -> None:
    """Tokens that a grammar forced, or that a prefill sampled, are not compared with it."""
    speculator = Speculator(Speculation("ngram", 3))
    sequence = Sequence.start(Request(id="x", token_ids=(1, 2, 3, 4, 1, 2, 3)), 0)
    speculator.start_plan([sequence])
    assert speculator.drafts(sequence, 3) == (3, (4, 1, 2))
    sequence.tokens += [9] * num_appended
    before = list(speculator._acceptance_of(sequence).rates)
    speculator.note_tokens(sequence, 0, (5,))
    is_same = speculator._acceptance_of(sequence).rates == before
    assert is_same == (num_appended > 0)
