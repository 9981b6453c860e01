"""Log-probabilities of a prompt equal those of decoding it, however it was computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.engine import scheduler
from penstock.engine.logits_engine import LogitsEngine
from penstock.serve.fleet import resumed
from penstock.types import TokenDelta, TokenLogprob
from small_models import SHALLOW_FAMILIES, make_engine, prompt, request, run, tokens_of
from test_laws import tight_budget

NUM_TOP = 3


@pytest.fixture(scope="module", params=SHALLOW_FAMILIES)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return SHALLOW_FAMILIES[request.param]


def decoded_logprobs(
    config: dict[str, Any], tokens: tuple[int, ...]
) -> torch.Tensor:  # [T - 1, vocab]
    """Log-probabilities of every token that could follow each token but the last."""
    engine = LogitsEngine(make_engine(config))
    logits = [engine.prefill(["a"], [torch.tensor(tokens[:1])])]
    logits += [engine.decode(["a"], torch.tensor([token])) for token in tokens[1:-1]]
    return torch.cat(logits).log_softmax(-1)


@pytest.mark.thinned
@pytest.mark.parametrize(
    "settings", [{"max_step_tokens": 64}, {"overlap": True, "deterministic": False}]
)
def test_scores_are_those_of_decoding(config: dict[str, Any], settings: dict[str, Any]) -> None:
    """Beside another request, in chunks, and with all of the prompt cached."""
    tokens = prompt(150, 1)
    engine = make_engine(config, **settings)
    run(engine, request("before", tokens, max_tokens=2))
    scored = request("scored", tokens, max_tokens=3, logprobs=None, prompt_logprobs=NUM_TOP)
    deltas = run(engine, scored, request("beside", prompt(40, 2), max_tokens=9))["scored"]
    expected = decoded_logprobs(config, tokens)

    assert deltas[0].num_cached_tokens == 0
    assert all(bool(delta.token_ids) != bool(delta.prompt_scores) for delta in deltas)
    scores = scores_of(deltas)
    assert [score.token_id for score in scores] == list(tokens[1:])
    own = expected.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    torch.testing.assert_close(
        torch.tensor([score.logprob for score in scores]), own, atol=1e-4, rtol=1e-4
    )
    top = expected.topk(NUM_TOP).values
    seen = torch.tensor([[logprob for _, logprob in score.top] for score in scores])
    torch.testing.assert_close(seen, top, atol=1e-4, rtol=1e-4)


def scores_of(deltas: list[TokenDelta]) -> list[TokenLogprob]:
    return [
        score for delta in deltas if delta.prompt_scores for score in delta.prompt_scores.unpack()
    ]


def test_scores_come_with_each_chunk_in_small_parts(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores leave the engine with the step that computed them: it keeps none of long prompts."""
    monkeypatch.setattr(scheduler, "DELTA_SCORES", 40)
    engine = make_engine(config, max_step_tokens=64)
    engine.submit(
        request("scored", prompt(150), max_tokens=1, logprobs=None, prompt_logprobs=NUM_TOP)
    )
    steps = [engine.step() for _ in range(3)]
    assert [sum(len(delta.prompt_scores or ()) for delta in step) for step in steps] == [64, 64, 21]
    for step in steps:
        parts = [delta.prompt_scores for delta in step if delta.prompt_scores]
        assert all(len(part) == 10 for part in parts[:-1])
    assert steps[-1][-1].finish == "length"


@pytest.mark.thinned
@pytest.mark.parametrize("num_scored", [1, 63, 64, 100, 149])
def test_an_engine_that_takes_over_sends_only_the_scores_that_have_not_come(
    config: dict[str, Any], num_scored: int
) -> None:
    one = request("r", prompt(150), max_tokens=2, logprobs=None, prompt_logprobs=NUM_TOP)
    engine = make_engine(config, max_step_tokens=64)
    whole = run(engine, one)["r"]
    rest = run(engine, resumed(one, (), num_scored))["r"]
    assert scores_of(rest) == scores_of(whole)[num_scored:]
    assert tokens_of(rest) == tokens_of(whole)
    assert not scores_of(run(engine, resumed(one, tokens_of(whole)[:1], 149))["r"])


@pytest.mark.parametrize(
    "name", ["hybrid_moe", "llama", pytest.param("hybrid_dense", marks=pytest.mark.slow)]
)
def test_a_preempted_prompt_is_scored_once(name: str) -> None:
    config = SHALLOW_FAMILIES[name]
    requests = [
        request(f"r{n}", prompt(60 + n, n), max_tokens=100, logprobs=None, prompt_logprobs=0)
        for n in range(4)
    ]
    calm = run(make_engine(config), *requests)
    tight = make_engine(config, max_model_len=192, memory_gb=tight_budget(config), overlap=True)
    crowded = run(tight, *requests)
    assert tight.stats().num_preemptions > 0
    for one in requests:
        assert scores_of(crowded[one.id]) == scores_of(calm[one.id])
        assert len(scores_of(crowded[one.id])) == one.num_prompt_tokens - 1
