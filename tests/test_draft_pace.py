"""Drafts are made while they pay: on made-up step times, and through an engine's own counters."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.engine.draft_pace import PROBE_EVERY, Acceptance, DraftPace
from scripted_drafter import ALWAYS_RIGHT, NUM_DRAFTS, drafting_engine
from small_models import LLAMA, make_engine, prompt, request, run

MOST = 4
Seconds = Callable[[int, int], float]  # of a step, by rows and tokens a row


def settle(pace: DraftPace, seconds: Seconds, rate: float, rows: int, steps: int = 60) -> list[int]:
    """The numbers of drafts that so many steps choose, if every place has that acceptance."""
    chosen = []
    for _ in range(steps):
        step = pace.start_step(rows)
        chosen.append(pace.num_drafts(rows, [rate] * MOST, MOST, step))
        pace.note_step(rows, 1 + chosen[-1], seconds(rows, 1 + chosen[-1]))
    return chosen


def cheap(rows: int, tokens: int) -> float:
    return 1.0 + 0.02 * rows * tokens


def dear(rows: int, tokens: int) -> float:
    return 1.0 * rows * tokens


@pytest.mark.parametrize(
    ("seconds", "rate", "rows", "expected"),
    [
        (cheap, 0.9, 1, MOST),
        (cheap, 0.01, 1, 0),
        (cheap, 0.25, 1, 2),  # the third would bring 0.016 tokens, and costs more
        (dear, 0.9, 1, 0),
        (cheap, 0.9, 4, MOST),
        (cheap, 0.5, 256, 0),  # there are so many rows that tokens are what a step costs
    ],
)
def test_the_number_that_gives_the_most_tokens_a_second(
    seconds: Seconds, rate: float, rows: int, expected: int
) -> None:
    chosen = settle(DraftPace(), seconds, rate, rows)
    assert chosen[:4] == [MOST, MOST, 0, 0]  # to know both
    assert chosen[-1] == expected


def test_what_does_not_pay_is_tried_again_but_seldom() -> None:
    chosen = settle(DraftPace(), dear, 0.9, 1, steps=3 * PROBE_EVERY)
    assert 0 < sum(map(bool, chosen[4:])) <= 0.02 * len(chosen)
    assert chosen[PROBE_EVERY + 1] == MOST


def test_plain_steps_are_measured_while_drafts_pay() -> None:
    chosen = settle(DraftPace(), cheap, 0.9, 1, steps=1000)[4:]
    assert 0 < chosen.count(0) <= 0.01 * len(chosen)


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
