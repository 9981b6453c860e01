"""Logit biases and min_tokens: uploaded when a row is admitted; its next owner has its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock import ops
from penstock.engine.biases import LogitBiases
from small_models import LLAMA, logprobs_of, make_engine, prompt, request, run, tokens_of
from test_laws import tight_budget

MANY = {token: (-1.0) ** token * (token % 7) for token in range(0, 320, 2)}


def biases_on_host() -> LogitBiases:
    return LogitBiases(lambda values, dtype: torch.tensor(values, dtype=dtype))


def test_entries_are_those_of_the_rows_that_sample_at_their_places() -> None:
    biases = biases_on_host()
    biases.set(3, {7: 1.0, 8: 2.0})
    biases.set(5, {7: -4.0})
    biases.set(6, {})
    expected = {
        (5, 6, 3): [(0, 7, -4.0), (2, 7, 1.0), (2, 8, 2.0)],
        (3,): [(0, 7, 1.0), (0, 8, 2.0)],
        (6, 0): None,
    }
    for rows, wanted in expected.items():
        entries = biases.entries(rows)
        assert (
            None if entries is None else list(zip(*(part.tolist() for part in entries)))
        ) == wanted
    biases.set(3, {})
    assert biases.entries([3]) is None


def test_a_row_taken_over_has_its_new_owners_biases() -> None:
    biases = biases_on_host()
    for bias in (1.0, 2.0):
        biases.set(0, {4: bias})
        entries = biases.entries([0])
        assert entries is not None
        assert entries[2].tolist() == [bias]


def test_a_bias_is_added_where_it_belongs_and_nowhere_else() -> None:
    torch.manual_seed(0)
    logits, tokens = torch.randn(3, 50), torch.randperm(50)[:20]
    rows, bias = torch.arange(20) % 3, torch.randn(20)
    expected = logits.clone()
    for row, token, value in zip(rows, tokens, bias):
        expected[row, token] += value
    assert torch.equal(ops.bias_logits(logits.clone(), rows, tokens, bias), expected)


def test_a_biased_reply_is_the_same_alone_and_among_others() -> None:
    requests = [
        request("a", prompt(20), logit_bias=MANY, temperature=0.8, seed=1),
        request("b", prompt(90, 1), max_tokens=30),
        request(
            "c", prompt(33, 2), logit_bias={5: 20.0, 9: 20.5}, frequency_penalty=1.0, max_tokens=20
        ),
        request(
            "d",
            prompt(7, 3),
            logit_bias={11: 100.0},
            end_token_ids=(11,),
            min_tokens=4,
            max_tokens=9,
        ),
    ]
    engine = make_engine(LLAMA, max_rows=2)
    together = run(engine, *requests)
    again = run(engine, *reversed(requests))
    for one in requests:
        alone = logprobs_of(run(make_engine(LLAMA), one)[one.id])
        assert logprobs_of(together[one.id]) == logprobs_of(again[one.id]) == alone
    assert set(tokens_of(together["c"])) == {5, 9}
    assert tokens_of(together["d"]).index(11) == 4  # min_tokens forbids what the bias asks for


@pytest.mark.parametrize("overlap", [False, True])
def test_a_preempted_row_comes_back_with_its_biases(overlap: bool) -> None:
    requests = [
        request(f"r{i}", prompt(60 + i, i), max_tokens=100, logit_bias=MANY) for i in range(4)
    ]
    calm = run(make_engine(LLAMA), *requests)
    tight = make_engine(LLAMA, max_model_len=192, memory_gb=tight_budget(LLAMA), overlap=overlap)
    crowded = run(tight, *requests)
    assert tight.stats().num_preemptions > 0
    for one in requests:
        assert tokens_of(crowded[one.id]) == tokens_of(calm[one.id])


def test_a_steady_decode_uploads_neither_biases_nor_forbidden_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(LLAMA)
    ends = tuple(range(1, 320, 2))
    for i in range(4):
        limits: dict[str, Any] = {"end_token_ids": ends, "min_tokens": 19, "max_tokens": 20}
        engine.submit(request(f"r{i}", prompt(20, i), logit_bias=MANY, **limits))
    for _ in range(3):
        engine.step()
    rows, sizes = engine.runner.rows, []

    def stage(values: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        sizes.append(np.asarray(values).size)
        return torch.as_tensor(np.asarray(values), dtype=dtype)

    monkeypatch.setattr(rows, "stage", stage)
    for _ in range(5):
        assert len(engine.step()) == 4
    assert sizes
    assert max(sizes) < len(MANY)
