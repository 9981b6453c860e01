"""Tokens that a grammar forces are added without a step each: the same reply in fewer steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.engine.engine import Engine
from penstock.text.grammar import json_schema_grammar, regex_grammar
from penstock.types import Request, TokenDelta
from small_models import LLAMA, SHALLOW_MOE, drain, prompt, request, run, tokens_of
from test_grammar_masks import ENDS, PERSON_GRAMMAR, VOCAB_SIZE, constrained, engine_of
from test_laws import tight_budget

FORM = json_schema_grammar(
    {
        "type": "object",
        "properties": {
            "number_of_marbles": {"type": "integer", "maximum": 99},
            "kind_of_answer": {"enum": ["exact", "estimated"]},
            "is_the_question_clear": {"type": "boolean"},
        },
        "required": ["number_of_marbles", "kind_of_answer", "is_the_question_clear"],
        "additionalProperties": False,
    }
)
SENTENCE = regex_grammar("(yes|no), because the answer of the first person was right\\.")


def form(id: str, **sampling: Any) -> Request:
    return constrained(id, FORM, **{"logprobs": None, **sampling})


def both(
    config: dict[str, Any], *requests: Request, **settings: Any
) -> tuple[dict[str, list[TokenDelta]], dict[str, list[TokenDelta]]]:
    """The replies if every token is sampled, and if forced tokens are not."""
    given = {"deterministic": False, **settings}
    plain = engine_of(config, **given)
    plain.policy.appends_forced = False
    engine = engine_of(config, **given)
    assert engine.policy.appends_forced
    said = run(plain, *requests), run(engine, *requests)
    engine.policy.cache.check()
    return said


def assert_same(plain: dict[str, list[TokenDelta]], forced: dict[str, list[TokenDelta]]) -> None:
    assert plain.keys() == forced.keys()
    for id, deltas in plain.items():
        assert tokens_of(forced[id]) == tokens_of(deltas)
        assert forced[id][-1].finish == deltas[-1].finish


def num_sampled(engine: Engine, one: Request) -> int:
    engine.submit(one)
    num_steps = 0
    while engine.has_work:
        num_steps += any(delta.token_ids for delta in engine.step())
    return num_steps


WITH_HEAD = {**SHALLOW_MOE, "mtp_num_hidden_layers": 1}


@pytest.mark.thinned
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("speculate", ["mtp:2", "ngram:3"])
def test_drafts_and_what_is_forced_take_turns(speculate: str, overlap: bool) -> None:
    """Accepted drafts are in a journal until the next decode: nothing is appended before that."""
    requests = [
        form("greedy", temperature=0.0),
        form("drawn", seed=3, token_ids=prompt(50, 2)),
        constrained("sentence", SENTENCE, logprobs=None, token_ids=prompt(60, 3)),
        request("free", prompt(9), max_tokens=60, temperature=0.7, seed=5),
    ]
    plain = engine_of(WITH_HEAD, deterministic=False)
    plain.policy.appends_forced = False
    engine = engine_of(WITH_HEAD, deterministic=False, speculate=speculate, overlap=overlap)
    engine.policy.speculator.pace = None
    said = run(plain, *requests)
    assert_same(said, run(engine, *requests))
    engine.policy.cache.check()
    alone = [num_sampled(one, form("x", temperature=0.0)) for one in (plain, engine)]
    assert alone[1] < 0.8 * alone[0]


@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_that_are_forced_are_not_counted_as_the_heads(overlap: bool) -> None:
    """Also if the next step is planned before the host knows how many were accepted."""
    engine = engine_of(WITH_HEAD, speculate="mtp:3", overlap=overlap)
    engine.policy.speculator.pace = None
    run(engine, constrained("x", PERSON_GRAMMAR, seed=3))
    counts = engine.stats().drafts.counts  # type: ignore[union-attr]
    assert {count.drafter for count in counts} == {"grammar"}


@pytest.mark.thinned
@pytest.mark.parametrize("config", [LLAMA, SHALLOW_MOE], ids=["llama", "hybrid"])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_same_tokens_take_fewer_steps(config: dict[str, Any], overlap: bool) -> None:
    """Greedy and sampled, beside others without a grammar, across page boundaries."""
    requests = [
        form("greedy", temperature=0.0),
        form("drawn", seed=3, token_ids=prompt(50, 2)),
        constrained("sentence", SENTENCE, logprobs=None, token_ids=prompt(60, 3)),
        constrained("person", PERSON_GRAMMAR, logprobs=None),
        request("free", prompt(9), max_tokens=30, temperature=0.7, seed=5),
    ]
    plain, forced = both(config, *requests, overlap=overlap)
    assert_same(plain, forced)
    steps = {}
    for appends in (False, True):
        engine = engine_of(config, deterministic=False, overlap=overlap)
        engine.policy.appends_forced = appends
        steps[appends] = num_sampled(engine, form("x", temperature=0.0))
    assert steps[True] < 0.8 * steps[False]


@pytest.mark.slow
def test_a_reply_may_be_full_anywhere_in_what_is_forced() -> None:
    (deltas,) = both(LLAMA, form("x"))[0].values()
    for max_tokens in range(1, len(tokens_of(deltas)) + 1):
        plain, forced = both(LLAMA, form("x", max_tokens=max_tokens))
        assert_same(plain, forced)
        assert len(tokens_of(forced["x"])) == max_tokens


def test_every_token_that_is_appended_is_the_only_one_that_its_mask_allows() -> None:
    engine = engine_of(deterministic=False)
    compiler = engine.policy.constraints.compiler
    num_forced = 0
    for grammar in (FORM, SENTENCE, PERSON_GRAMMAR):
        matcher = compiler.compile(grammar).new_matcher()
        random = np.random.default_rng(0)
        for _ in range(200):
            if matcher.is_stopped():
                break
            forced = matcher.compute_ff_tokens()
            for token_id in forced:
                assert allowed(matcher) == [token_id]
                matcher.consume_token(token_id)
                num_forced += 1
            if not forced:
                matcher.consume_token(int(random.choice(allowed(matcher))))
    assert num_forced > 30


def allowed(matcher: Any) -> list[int]:
    words = np.zeros(-(-VOCAB_SIZE // 32), np.int32)
    matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    found: list[int] = np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0].tolist()
    return found


@pytest.mark.parametrize(
    "sampling",
    [{"logprobs": 2}, {"repetition_penalty": 1.2}, {"frequency_penalty": 0.5}],
    ids=lambda sampling: next(iter(sampling)),
)
def test_what_only_sampling_gives_is_given(sampling: dict[str, Any]) -> None:
    """Log-probabilities of all tokens, and penalties that count all of them."""
    plain, forced = both(LLAMA, form("x", temperature=0.0, **sampling))
    assert forced == plain


def test_deterministic_engines_sample_every_token() -> None:
    assert not engine_of().policy.appends_forced


def test_preempted_replies_and_aborted_ones_return_what_they_held() -> None:
    requests = [form(f"r{seed}", seed=seed, token_ids=prompt(60 + seed)) for seed in range(4)]
    config = {**SHALLOW_MOE, "vocab_size": VOCAB_SIZE}
    settings: dict[str, Any] = {"max_model_len": 192, "memory_gb": 1.2 * tight_budget(config)}
    plain, forced = both(SHALLOW_MOE, *requests, **settings)
    assert_same(plain, forced)
    engine = engine_of(SHALLOW_MOE, deterministic=False, **settings)
    before = engine.stats()
    for one in requests:
        engine.submit(one)
    for _ in range(25):
        engine.step()
    for one in requests:
        engine.abort(one.id)
    drain(engine)
    engine.policy.cache.check()
    assert engine.stats().num_free_pages == before.num_free_pages


def test_an_end_is_never_appended() -> None:
    """A complete grammar forces the end token, which is sampled like every end token."""
    grammar = regex_grammar("the only answer")
    plain, forced = both(LLAMA, constrained("x", grammar, logprobs=None))
    assert_same(plain, forced)
    assert forced["x"][-1].token_ids[-1] in ENDS
    assert len(forced["x"]) < len(plain["x"])
