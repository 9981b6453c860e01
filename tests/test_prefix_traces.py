"""On recorded traces of block ids, the prefix cache reuses most of what is possible.

Uses scheduler and cache alone, with the sizes of a large hybrid on one GPU: one of its states takes
as much memory as keys and values of 3,000 tokens.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from penstock.cache import Cache
from penstock.engine.scheduler import Scheduler
from penstock.eval.traces import BLOCK_TOKENS, Arrival, possible_reuse, read_trace
from penstock.types import Request, SamplingParams, StepOutput

PAGE = 64


def prompt_of(arrival: Arrival) -> tuple[int, ...]:
    blocks = itertools.chain.from_iterable([block] * BLOCK_TOKENS for block in arrival.block_ids)
    return tuple(itertools.islice(blocks, arrival.input_len))


def replay(
    arrivals: list[Arrival], *, num_pages: int, max_checkpoints: int, at_a_time: int
) -> Cache:
    max_rows = 16
    cache = Cache(
        page_size=PAGE,
        num_pages=1 + num_pages,
        num_slots=1 + max_rows + max_checkpoints,
        max_checkpoints=max_checkpoints,
    )
    scheduler = Scheduler(cache, max_rows=max_rows, max_step_tokens=16_384, max_model_len=131_072)
    for number, arrival in enumerate(arrivals):
        sampling = SamplingParams(max_tokens=1)
        scheduler.submit(Request(id=str(number), token_ids=prompt_of(arrival), sampling=sampling))
        if (number + 1) % at_a_time and number + 1 < len(arrivals):
            continue
        while (plan := scheduler.plan()) is not None:
            scheduler.commit(
                StepOutput(plan.step, {row.row: (0,) for row in plan.rows if row.samples})
            )
    cache.check()
    return cache


def conversations(num_requests: int, seed: int) -> list[Arrival]:
    """Turns of conversations that grow by a few blocks, most behind one of few system prompts, some
    repeated with another last message; also documents with questions, and prompts that occur once.
    """
    rng = random.Random(seed)
    new = itertools.count(100)
    systems = [[next(new) for _ in range(rng.randrange(1, 6))] for _ in range(4)]
    documents = [[next(new) for _ in range(rng.randrange(8, 60))] for _ in range(6)]
    open_ones: list[list[int]] = []
    arrivals = []
    for number in range(num_requests):
        kind = rng.random()
        if kind < 0.45 and open_ones:
            blocks = open_ones.pop(rng.randrange(len(open_ones)))
        elif kind < 0.6:
            blocks = list(rng.choice(documents))
        else:
            blocks = list(rng.choice(systems)) if rng.random() < 0.7 else []
        blocks = blocks + [next(new) for _ in range(rng.choice([1, 2, 4, 8, 20]))]
        if rng.random() < 0.7:
            open_ones.append(blocks)
            open_ones = open_ones[-30:]
        # A partial last block has an id of its own, which no other prompt has.
        length = len(blocks) * BLOCK_TOKENS + rng.randrange(1, BLOCK_TOKENS)
        arrivals.append(Arrival(float(number), length, 1, (*blocks, next(new))))
    return arrivals


def share_reused(
    arrivals: list[Arrival], num_pages: int, max_checkpoints: int, at_a_time: int
) -> float:
    possible = sum(possible_reuse(arrivals, max_tokens=num_pages * PAGE))
    cache = replay(
        arrivals, num_pages=num_pages, max_checkpoints=max_checkpoints, at_a_time=at_a_time
    )
    total = sum(arrival.input_len for arrival in arrivals)
    counted = [
        n for name, n in cache.counters.items() if name.startswith(("missed_tokens", "tokens_"))
    ]
    assert sum(counted) == total
    assert possible > 0.04 * total, "hardly anything is shared: the trace says nothing"
    return cache.counters["tokens_reused"] / possible


@pytest.mark.thinned
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    ("num_pages", "max_checkpoints"), [(7000, 64), (14_000, 128), (28_000, 256)]
)
def test_most_of_what_pages_allow_is_reused(
    seed: int, num_pages: int, max_checkpoints: int
) -> None:
    share = share_reused(conversations(400, seed), num_pages, max_checkpoints, at_a_time=1)
    assert share >= 0.85


def test_most_of_it_is_reused_when_several_come_at_once() -> None:
    assert share_reused(conversations(400, seed=4), 14_000, 128, at_a_time=8) >= 0.85


def test_most_of_a_recorded_trace_is_reused(shared_data: Path) -> None:
    arrivals = read_trace(shared_data / "traces" / "mooncake_conversation.jsonl", limit=415)
    assert share_reused(arrivals, 28_000, 256, at_a_time=1) >= 0.85


def test_what_is_possible_is_counted_in_whole_pages_that_were_not_forgotten() -> None:
    first, second = Arrival(0, 1100, 0, (1, 2, 3)), Arrival(1, 1300, 0, (1, 2, 4))
    other = Arrival(2, 1300, 0, (5, 6, 7))
    assert possible_reuse([first, second, first]) == [0, 1024, 1088]
    assert possible_reuse([Arrival(0, 512, 0, (1,))] * 2) == [
        0,
        448,
    ]  # at least one token is computed
    assert possible_reuse([first, other, first], max_tokens=1600) == [0, 0, 256]
    assert possible_reuse([Arrival(0, 100, 0), Arrival(0, 100, 0)]) == [0, 0]
    assert possible_reuse([first, Arrival(1, 1100, 0, (9, 2, 3))]) == [0, 0]
