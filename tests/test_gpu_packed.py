"""Packed weights on a GPU: the same numbers with graphs and eager launches, in any dtype."""

from __future__ import annotations

from typing import Any

import pytest

from kernel_checks import ON_GPU
from small_models import logprobs_of, make_engine, prompt, request, run
from test_gpu_offload import GIVEN, MODEL

pytestmark = ON_GPU

LENGTHS = (1, 7, 40, 90, 200)  # of prompts: alone, padded in a graph or not


def first_scores(**settings: Any) -> list[dict[int, float]]:
    """The most likely first tokens of each prompt, and their log-probabilities."""
    engine = make_engine(MODEL, **{**GIVEN, **settings})
    found = []
    for length in LENGTHS:
        asked = request("x", prompt(length, seed=length), max_tokens=1, logprobs=20)
        found.append(dict(logprobs_of(run(engine, asked)["x"])[0].top))
    return found


def distance(ours: list[dict[int, float]], theirs: list[dict[int, float]]) -> float:
    """The mean over prompts of the largest difference."""
    far = [
        max(abs(score - other[token]) for token, score in one.items() if token in other)
        for one, other in zip(ours, theirs, strict=True)
    ]
    return sum(far) / len(far)


@pytest.mark.parametrize("scheme", ["int4", "int8", "fp8"])
def test_graphs_say_in_float32_what_launches_say(scheme: str) -> None:
    given = {"quantization": scheme, "dtype": "float32"}
    assert distance(first_scores(graphs=True, **given), first_scores(graphs=False, **given)) < 1e-3


# Not fp8, which rounds the tokens of larger steps too: with its padding, a graph has more of them.
@pytest.mark.parametrize("scheme", ["int4", "int8"])
def test_graphs_are_as_near_to_float32_as_launches(scheme: str) -> None:
    """A padded prompt uses other kernels, which round in another order."""
    exact = first_scores(quantization=scheme, dtype="float32", graphs=False)
    given = {"quantization": scheme, "dtype": "bfloat16"}
    as_graphs, launched = (
        distance(first_scores(graphs=graphs, **given), exact) for graphs in (True, False)
    )
    assert 0 < as_graphs < 2 * launched, f"{launched:.4f} launched"
