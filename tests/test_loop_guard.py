"""The loop guard detects every repetition soon after it starts, and nothing else."""

from __future__ import annotations

import json
import random
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.serve.answer import Choice
from penstock.serve.openai.replies import ChatReplyFormat, CompletionReplyFormat
from penstock.serve.text_stream import ReplyDelta, Usage
from penstock.text.dialects import ReplyEnd
from penstock.text.loop_guard import (
    CHECK_EVERY,
    MAX_PERIOD,
    MIN_REPEATS,
    MIN_TOKENS,
    LoopGuard,
    find_loop,
)


def is_loop(tokens: list[int]) -> bool:
    """The definition, literally."""
    for period in range(1, MAX_PERIOD + 1):
        num_tokens = max(MIN_TOKENS, MIN_REPEATS * period)
        end = tokens[-num_tokens:]
        if len(end) == num_tokens and all(
            end[i] == end[i - period] for i in range(period, num_tokens)
        ):
            return True
    return False


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    period=st.integers(1, MAX_PERIOD + 3),
    num_repeated=st.integers(0, MIN_REPEATS * (MAX_PERIOD + 3)),
    num_after=st.sampled_from([0, 0, 1]),
)
def test_a_loop_is_what_the_definition_says(
    seed: int, period: int, num_repeated: int, num_after: int
) -> None:
    rng = random.Random(seed)
    block = [rng.randrange(3) for _ in range(period)]
    tokens = [rng.randrange(9) for _ in range(rng.randrange(300))]
    tokens += (block * (num_repeated // period + 1))[:num_repeated] + [7] * num_after
    assert (find_loop(array("i", tokens)) is not None) == is_loop(tokens)


@pytest.mark.parametrize("period", [1, 7, MAX_PERIOD])
@pytest.mark.parametrize("step", [1, 3, 50])
def test_a_loop_ends_soon_after_it_is_one_however_its_tokens_come(period: int, step: int) -> None:
    rng = random.Random(period)
    tokens = [rng.randrange(1000) for _ in range(500)]
    num_needed = len(tokens) + max(MIN_TOKENS, MIN_REPEATS * period)
    tokens += list(range(period)) * (2 * MIN_TOKENS)
    guard = LoopGuard()
    for end in range(step, len(tokens), step):
        if guard.push(tokens[end - step : end]):
            break
    assert num_needed <= end <= num_needed + CHECK_EVERY + step


def test_text_that_repeats_a_lot_but_goes_on_is_no_loop() -> None:
    guard = LoopGuard()
    rows = [[1, 2, 3, 4, row, 5, 6] for row in range(500)]  # a table whose rows are numbered
    assert not any(guard.push(row) for row in rows)


@pytest.mark.parametrize(
    "style", [ChatReplyFormat("id", "model"), CompletionReplyFormat("id", "model")]
)
def test_an_answer_says_that_the_guard_ended_it_and_says_nothing_otherwise(
    style: ChatReplyFormat | CompletionReplyFormat,
) -> None:
    def ending(is_loop: bool) -> list[dict[str, Any]]:
        end = ReplyEnd("length", is_loop=is_loop)
        *_, chunk = style.encode_chunk(ReplyDelta(0, [end])).split(b"data: ")
        body = style.encode_body({0: Choice([end])}, Usage(1, 1, 0, 0))
        return [json.loads(data)["choices"][0] for data in (chunk, body)]

    for choice in ending(is_loop=True):
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "loop_guard")
    for choice in ending(is_loop=False):
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
