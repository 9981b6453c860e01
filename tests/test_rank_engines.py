"""An engine on several ranks gives the replies of a single rank, for any request."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.assets import default_model
from penstock.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.logits_engine import LogitsEngine
from penstock.types import Pooling, Request, TokenDelta
from rank_models import FAMILIES
from small_models import LLAMA, logprobs_of, prompt, request, run, tokens_of
from test_grammar_masks import VOCAB_SIZE, some_of_each
from thread_ranks import random_model, ranked_engine

MOE = FAMILIES["hybrid moe"]


def alone(config: dict[str, Any], **settings: Any) -> Engine:
    given = {"device": "cpu", "deterministic": True, "max_model_len": 1024, **settings}
    tokenizer_file = given.pop("tokenizer_file", None)
    engine_config = EngineConfig(**given)
    return Engine(random_model(config), engine_config, "small", tokenizer_file=tokenizer_file)


def everything() -> list[Request]:
    """One request for each sampling option, and for features that need more than the last state."""
    shared = prompt(130, 5)
    return [
        request("greedy", prompt(70)),
        request("drawn", prompt(9, 1), temperature=0.8, seed=4),
        request("filtered", prompt(64, 2), temperature=1.1, top_k=9, top_p=0.9, min_p=0.01, seed=5),
        request("penalties", prompt(20, 3), repetition_penalty=1.3, presence_penalty=0.4),
        request("biases", prompt(5, 4), logit_bias={11: 3.0, 17: -9.0}),
        request("late end", prompt(6, 6), min_tokens=5, end_token_ids=tuple(range(10, 200))),
        request("scored", prompt(40, 7), prompt_logprobs=2, max_tokens=3),
        request("prefix", (*shared, 20)),
        request("same prefix", (*shared, 21, 22)),
        Request(id="vector", token_ids=prompt(30, 8), pooling=Pooling(kind="mean")),
    ]


def assert_same(found: dict[str, list[TokenDelta]], expected: dict[str, list[TokenDelta]]) -> None:
    assert found.keys() == expected.keys()
    for id, deltas in expected.items():
        assert tokens_of(found[id]) == tokens_of(deltas), id
        assert found[id][-1].finish == deltas[-1].finish
        assert [one.logprob for one in logprobs_of(found[id])] == pytest.approx(
            [one.logprob for one in logprobs_of(deltas)], abs=1e-4
        )
        vectors = [bytes_of(one) for one in (found[id][-1], deltas[-1])]
        assert vectors[0] == pytest.approx(vectors[1], abs=1e-5)


def bytes_of(delta: TokenDelta) -> list[float]:
    if delta.vector is None:
        return []
    return torch.frombuffer(bytearray(delta.vector), dtype=torch.float32).tolist()


@pytest.mark.thinned
@pytest.mark.parametrize("name", ["llama", "hybrid moe"])
@pytest.mark.parametrize("speculate", ["off", "ngram:3"])
def test_every_option_gives_what_one_rank_gives(name: str, speculate: str) -> None:
    config = FAMILIES[name]
    expected = run(alone(config, speculate=speculate), *everything())
    with ranked_engine(config, 2, speculate=speculate) as engine:
        assert_same(run(engine, *everything()), expected)
        again = run(engine, request("again", (*prompt(130, 5), 20)))
        assert tokens_of(again["again"]) == tokens_of(expected["prefix"])
        assert again["again"][0].num_cached_tokens >= 64


def test_the_drafting_head_drafts_the_same_on_ranks() -> None:
    requests = [request("greedy", prompt(70)), request("drawn", prompt(9), temperature=0.7, seed=3)]
    plain = run(alone(MOE), *requests)
    drafting = alone(MOE, speculate="mtp:2")
    drafting.policy.speculator.pace = None  # even if it does not pay off
    own = run(drafting, *requests)
    with ranked_engine(MOE, 2, speculate="mtp:2") as engine:
        engine.policy.speculator.pace = None
        found = run(engine, *requests)
    assert_same(found, plain)
    for id, deltas in own.items():
        assert [len(one.token_ids) for one in found[id]] == [len(one.token_ids) for one in deltas]


@pytest.mark.parametrize("overlap", [False, True])
def test_grammars_hold_although_only_rank_0_has_masks(overlap: bool) -> None:
    config = {**LLAMA, "vocab_size": VOCAB_SIZE}
    settings = {"tokenizer_file": default_model() / "tokenizer.json", "overlap": overlap}
    expected = run(alone(config, **settings), *some_of_each())
    with ranked_engine(config, 2, **settings) as engine:
        assert_same(run(engine, *some_of_each()), expected)


def test_the_logits_of_calls_are_those_of_one_rank() -> None:
    with ranked_engine(MOE, 2, prefix_cache=False) as engine:
        results = []
        for one in (LogitsEngine(engine), LogitsEngine(alone(MOE, prefix_cache=False))):
            logits = [one.prefill(["a", "b"], [torch.tensor(prompt(40)), torch.tensor(prompt(9))])]
            logits.append(one.decode(["b", "a"], torch.tensor([11, 12])))
            one.remove(["a"])
            logits.append(one.decode(["b"], torch.tensor([13])))
            results.append(torch.cat(logits))
    found, expected = results
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("name", ["llama", "hybrid moe", "qwen3_next"])
def test_more_ranks_answer_as_one(name: str, size: int) -> None:
    wide = {
        "num_attention_heads": 8,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 48,
    }
    config = {**FAMILIES[name], **wide}
    expected = run(alone(config), *everything())
    with ranked_engine(config, size) as engine:
        assert_same(run(engine, *everything()), expected)
