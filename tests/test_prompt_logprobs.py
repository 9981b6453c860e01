"""The log-probabilities of a prompt are those that decoding it gives, however it was computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.engine.direct import DirectEngine
from small_models import FAMILIES, make_engine, prompt, request, run
from test_laws import tight_budget

NUM_TOP = 3


@pytest.fixture(scope="module", params=FAMILIES)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return FAMILIES[request.param]


def decoded_logprobs(config: dict[str, Any], tokens: tuple[int, ...]) -> torch.Tensor:  # [T - 1, vocab]
    """Of every token that could follow each but the last."""
    engine = DirectEngine(make_engine(config))
    logits = [engine.prefill(["a"], [torch.tensor(tokens[:1])])]
    logits += [engine.decode(["a"], torch.tensor([token])) for token in tokens[1:-1]]
    return torch.cat(logits).log_softmax(-1)


@pytest.mark.parametrize("settings", [{"max_step_tokens": 64}, {"overlap": True, "deterministic": False}])
def test_scores_are_those_of_decoding(config: dict[str, Any], settings: dict[str, Any]) -> None:
    """Beside another request, in chunks, and although all of the prompt is cached."""
    tokens = prompt(150, 1)
    engine = make_engine(config, **settings)
    run(engine, request("before", tokens, max_tokens=2))
    scored = request("scored", tokens, max_tokens=3, logprobs=None, prompt_logprobs=NUM_TOP)
    deltas = run(engine, scored, request("beside", prompt(40, 2), max_tokens=9))["scored"]
    expected = decoded_logprobs(config, tokens)

    assert deltas[0].num_cached_tokens == 0
    assert all(not delta.prompt_logprobs for delta in deltas[1:])
    scores = deltas[0].prompt_logprobs
    assert [score.token_id for score in scores] == list(tokens[1:])
    own = expected.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor([score.logprob for score in scores]), own, atol=1e-4, rtol=1e-4)
    top = expected.topk(NUM_TOP).values
    seen = torch.tensor([[logprob for _, logprob in score.top] for score in scores])
    torch.testing.assert_close(seen, top, atol=1e-4, rtol=1e-4)


def test_a_preempted_prompt_is_scored_once(config: dict[str, Any]) -> None:
    requests = [
        request(f"r{n}", prompt(60 + n, n), max_tokens=100, logprobs=None, prompt_logprobs=0)
        for n in range(4)
    ]
    calm = run(make_engine(config), *requests)
    tight = make_engine(config, max_model_len=192, memory_gb=tight_budget(config), overlap=True)
    crowded = run(tight, *requests)
    assert tight.stats().num_preemptions > 0
    for one in requests:
        scores = [delta.prompt_logprobs for delta in crowded[one.id] if delta.prompt_logprobs]
        assert scores == [calm[one.id][0].prompt_logprobs]
