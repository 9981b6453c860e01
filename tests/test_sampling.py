"""Sampling: reproducible by seed, independent of the batch, and correctly distributed."""

from __future__ import annotations

import pytest
import torch

from penstock import ops
from penstock.errors import RequestError
from penstock.ops.reference.sampling import gumbel_noise, keep_likely
from penstock.types import SamplingParams

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 3.0, 2.5])


def draw(num: int, logits: torch.Tensor = LOGITS, seed: int = 7, **params: float) -> torch.Tensor:
    """Relative frequencies of `num` draws with one seed at as many positions."""
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | params
    tokens = ops.sample(
        logits.repeat(num, 1),
        torch.full((num,), float(settings["temperature"])),
        torch.full((num,), int(settings["top_k"])),
        torch.full((num,), float(settings["top_p"])),
        torch.full((num,), float(settings["min_p"])),
        torch.full((num,), seed),
        torch.arange(num),
        filtered=any(name in params for name in ("top_k", "top_p", "min_p")),
    )
    return torch.bincount(tokens, minlength=len(logits)) / num


@pytest.mark.parametrize("seed", [0, 1, -5, 2**62 + 12345])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(seed: int, temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(-1)
    num = 40_000
    chi_square = (
        num * ((draw(num, seed=seed, temperature=temperature) - expected) ** 2 / expected).sum()
    )
    assert chi_square < 25  # 5 degrees of freedom: one correct run in 7,000 is above


def test_draws_of_neighbouring_seeds_are_independent() -> None:
    seeds = torch.arange(40_000)
    noise = gumbel_noise(seeds, torch.full_like(seeds, 3), 2)
    assert abs(torch.corrcoef(noise.T)[0, 1]) < 0.02
    assert abs(torch.corrcoef(torch.stack([noise[:-1, 0], noise[1:, 0]]))[0, 1]) < 0.02


def test_noise_is_finite_for_every_token_of_a_large_vocabulary() -> None:
    noise = gumbel_noise(torch.arange(8), torch.arange(8), 250_000)
    assert torch.isfinite(noise).all()


def test_a_row_draws_the_same_whatever_its_batch() -> None:
    torch.manual_seed(0)
    rows, vocab = 9, 300
    logits = torch.randn(rows, vocab)
    params = (
        torch.rand(rows) + 0.1,
        torch.randint(0, 50, (rows,)),
        torch.rand(rows) * 0.5 + 0.5,
        torch.rand(rows) * 0.1,
        torch.randint(-(2**60), 2**60, (rows,)),
        torch.randint(0, 5000, (rows,)),
    )
    together = ops.sample(logits, *params, filtered=True)
    for row in range(rows):
        alone = ops.sample(
            logits[row : row + 1], *(param[row : row + 1] for param in params), filtered=True
        )
        assert alone[0] == together[row]


def test_filters_that_keep_everything_change_no_draw() -> None:
    assert torch.equal(draw(500), draw(500, top_k=len(LOGITS), top_p=1.0, min_p=0.0))


def test_zero_temperature_is_greedy() -> None:
    assert draw(50, temperature=0.0)[LOGITS.argmax()] == 1.0


def test_top_k_one_is_greedy_even_on_ties() -> None:
    assert draw(50, logits=torch.tensor([1.0, 5.0, 5.0, 0.0]), top_k=1)[1] == 1.0


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, {4, 5}),
        ({"top_p": 0.5}, {4, 5}),  # probabilities 0.45, 0.27, 0.16, ...
        ({"top_p": 0.01}, {4}),
        ({"min_p": 0.3}, {4, 5, 0}),
        ({"top_k": 2, "top_p": 0.6}, {4}),  # after top_k the first has 0.62
    ],
)
def test_filters_keep_exactly_the_likely_tokens(params: dict[str, float], kept: set[int]) -> None:
    frequencies = draw(3000, **params)
    assert {token for token, share in enumerate(frequencies.tolist()) if share > 0} == kept


def test_the_likeliest_token_survives_every_filter() -> None:
    tight = torch.tensor([1e-9])
    kept, ids = keep_likely(LOGITS[None], torch.tensor([0]), tight, torch.tensor([1.0]))
    assert ids[0, 0] == LOGITS.argmax()
    assert torch.isfinite(kept[0, 0])


def test_penalties_match_their_definitions() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5, 3.0]])
    generated = torch.tensor([[0, 2, 1, 0]], dtype=torch.int32)
    in_prompt = torch.tensor([[True, False, False, False]])
    out = ops.penalize_repeats(
        logits.clone(),
        generated,
        in_prompt,
        torch.tensor([2.0]),
        torch.tensor([0.5]),
        torch.tensor([0.25]),
    )
    # prompt only: 2/2; generated twice: -1*2 - 2*0.25 - 0.5; once: 0.5/2 - 0.25 - 0.5; never:
    # unchanged
    assert torch.allclose(out, torch.tensor([[1.0, -3.0, -0.5, 3.0]]))


def test_biases_forbid_and_favour_single_tokens() -> None:
    logits = LOGITS.repeat(2, 1)
    rows, tokens = torch.tensor([0, 1]), torch.tensor([4, 3])
    out = ops.bias_logits(logits, rows, tokens, torch.tensor([-torch.inf, 100.0]))
    assert out[0].argmax() == 5
    assert out[1].argmax() == 3


def test_logprobs_are_of_the_whole_vocabulary() -> None:
    logprob, top, top_ids = ops.token_logprobs(LOGITS[None], torch.tensor([2]), 3)
    assert torch.allclose(logprob, LOGITS.log_softmax(-1)[2])
    assert top_ids[0].tolist() == [4, 5, 0]
    assert torch.allclose(top[0], LOGITS.log_softmax(-1)[top_ids[0]])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("min_p", 2.0),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 3.0),
        ("logprobs", 21),
        ("n", 0),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: float("inf")}),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(RequestError) as raised:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert raised.value.param == field
