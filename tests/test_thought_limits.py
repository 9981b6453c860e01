"""An engine ends thinking at its limit: the row goes on, and nothing is computed again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.engine import Engine
from penstock.errors import RequestError
from penstock.serve.fleet import resumed
from penstock.types import Request, ThoughtLimit, TokenDelta
from rank_models import FAMILIES
from scripted_drafter import ALWAYS_RIGHT, ScriptedDrafter, drafting_engine
from small_models import (
    HYBRID_MOE,
    LLAMA,
    SHALLOW_MOE,
    logprobs_of,
    make_engine,
    prompt,
    request,
    run,
    tokens_of,
)
from test_grammar_masks import VOCAB_SIZE
from test_grammar_masks import engine_of as grammar_engine_of
from test_laws import tight_budget
from test_model_drafter import folder_of
from thread_ranks import ranked_engine

END_ID = 319
CLOSING_IDS = (17, END_ID, 18)
WITH_HEAD = {**SHALLOW_MOE, "mtp_num_hidden_layers": 1}
CONFIGS = pytest.mark.parametrize("config", [LLAMA, SHALLOW_MOE], ids=["llama", "hybrid"])
OVERLAP = pytest.mark.parametrize("overlap", [False, True])


def thinking(id: str, num_tokens: int, length: int = 30, **sampling: Any) -> Request:
    """It never ends its thinking by itself."""
    given = {"max_tokens": 48, "temperature": 0.9, "seed": 3, "logprobs": None, **sampling}
    one = request(id, prompt(length, length), **{"logit_bias": {END_ID: -100.0}, **given})
    return with_limit(one, num_tokens)


def with_limit(one: Request, num_tokens: int, end_id: int = END_ID) -> Request:
    limit = ThoughtLimit(num_tokens=num_tokens, end_id=end_id, closing_ids=CLOSING_IDS)
    return replace(one, thought_limit=limit)


def engine_of(config: dict[str, Any], **settings: Any) -> Engine:
    return make_engine(config, **{"deterministic": False, "page_size": 16, **settings})


def said(engine: Engine, *requests: Request) -> dict[str, list[int]]:
    deltas = run(engine, *requests)
    engine.policy.cache.check()
    return {id: tokens_of(some) for id, some in deltas.items()}


def without_limit(engine: Engine, one: Request) -> list[int]:
    return said(engine, replace(one, thought_limit=None))[one.id]


def closed_by_another_request(engine: Engine, one: Request) -> list[int]:
    """Closes thinking with another request, as a server does."""
    assert one.thought_limit is not None
    thought = without_limit(engine, one)[: one.thought_limit.num_tokens]
    start = [*thought, *CLOSING_IDS]
    free = replace(one, thought_limit=None)
    return start + said(engine, resumed(free, start))[one.id]


@pytest.mark.thinned
@CONFIGS
@OVERLAP
def test_a_thought_is_closed_as_by_another_request_but_in_its_row(
    config: dict[str, Any], overlap: bool
) -> None:
    """The limit and the closing tokens lie before, at, and across page boundaries."""
    lengths = [(2, 30), (15, 16), (16, 16), (17, 31), (18, 16), (20, 9), (33, 40)]
    requests = [thinking(f"{n}-{length}", n, length) for n, length in lengths]
    engine = engine_of(config, overlap=overlap, prefix_cache=False)
    together = said(engine, *requests)
    assert engine.policy.cache.counters["miss_disabled"] == len(requests), "a row was given up"
    plain = engine_of(config, prefix_cache=False)
    for one in requests:
        assert together[one.id] == closed_by_another_request(plain, one)
        assert len(together[one.id]) == 48


@CONFIGS
def test_a_thought_that_ends_in_time_is_left_alone(config: dict[str, Any]) -> None:
    engine = engine_of(config)
    one = thinking("x", 20)
    free = without_limit(engine, one)
    ended = with_limit(one, 20, end_id=free[19])
    assert free.index(free[19]) == 19, "choose another seed"
    assert said(engine, ended)["x"] == free, "it ends with the last token of its limit"
    late = with_limit(one, 19, end_id=free[19])
    assert said(engine, late)["x"][19:22] == [*CLOSING_IDS]


@pytest.mark.thinned
@OVERLAP
@pytest.mark.parametrize("speculate", ["mtp:2", "ngram:3"])
def test_drafts_do_not_pass_the_limit(speculate: str, overlap: bool) -> None:
    """Accepted drafts are in a journal until the next decode, so the last token of a thought is
    sampled alone.
    """
    requests = [thinking(f"{n}", n, temperature=0.0) for n in range(10, 20)]
    plain = engine_of(WITH_HEAD)
    engine = engine_of(WITH_HEAD, speculate=speculate, overlap=overlap)
    engine.policy.speculator.pace = None
    together = said(engine, *requests)
    for one in requests:
        assert together[one.id] == closed_by_another_request(plain, one)


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param({"presence_penalty": 0.5}, id="penalties count every token that is sampled"),
        pytest.param({"max_tokens": 23}, id="no room for an answer"),
    ],
)
def test_a_limit_that_the_engine_cannot_keep_is_left_to_the_server(
    sampling: dict[str, Any],
) -> None:
    engine = engine_of(LLAMA)
    one = thinking("x", 20, **sampling)
    assert said(engine, one)["x"] == without_limit(engine, one)


def test_a_deterministic_engine_leaves_limits_to_the_server() -> None:
    """A decode and a prefill round differently."""
    engine = engine_of(LLAMA, deterministic=True, page_size=64)
    one = thinking("x", 20)
    assert said(engine, one)["x"] == without_limit(engine, one)


@CONFIGS
@OVERLAP
def test_a_reply_that_moves_to_another_engine_keeps_its_limit(
    config: dict[str, Any], overlap: bool
) -> None:
    engine, one = engine_of(config, overlap=overlap, prefix_cache=False), thinking("x", 20)
    whole = said(engine, one)["x"]
    for cut in (1, 19, 23, 30):
        assert said(engine, resumed(one, whole[:cut]))["x"] == whole[cut:]
    rest = said(engine, resumed(one, whole[:20]))["x"]
    assert rest[:3] != [*CLOSING_IDS], "there is no token to continue from: the server closes it"


@CONFIGS
@OVERLAP
def test_no_request_is_stuck_at_its_limit_when_memory_is_short(
    config: dict[str, Any], overlap: bool
) -> None:
    """A preempted request may leave its limit to the server."""
    settings = {"memory_gb": tight_budget(config), "page_size": 64, "max_model_len": 192}
    engine = engine_of(config, overlap=overlap, **settings)
    plain = engine_of(config)
    requests = [thinking(f"{n}", n, 50 + n, max_tokens=70) for n in (4, 5, 30, 64, 66)]
    together = said(engine, *requests)
    assert engine.policy.scheduler.num_preemptions
    for one in requests:
        may_be = closed_by_another_request(plain, one), without_limit(plain, one)
        assert together[one.id] in may_be


def test_closing_tokens_outside_the_vocabulary_are_refused() -> None:
    one = thinking("x", 20)
    limit = ThoughtLimit(num_tokens=20, end_id=END_ID, closing_ids=(320,))
    with pytest.raises(RequestError, match="thought_limit has the token id 320"):
        engine_of(LLAMA).submit(replace(one, thought_limit=limit))


def whole(deltas: list[TokenDelta]) -> tuple[Any, ...]:
    """All that a server gets."""
    logprobs = [
        (one.token_id, pytest.approx(one.logprob, abs=1e-4), [id for id, _ in one.top])
        for one in logprobs_of(deltas)
    ]
    return tokens_of(deltas), logprobs, deltas[-1].finish, deltas[0].num_cached_tokens


def whole_by_another_request(engine: Engine, one: Request) -> tuple[Any, ...]:
    """What a server sends that closes thinking itself."""
    limit, free = one.thought_limit, replace(one, thought_limit=None)
    assert limit is not None
    tokens, logprobs, finish, num_cached = whole(run(engine, free)[one.id])
    if limit.end_id in tokens[: limit.num_tokens] or len(tokens) <= limit.num_tokens:
        return tokens, logprobs, finish, num_cached
    said = [*tokens[: limit.num_tokens], *limit.closing_ids]
    answer, more, finish, _ = whole(run(engine, resumed(free, said))[one.id])
    return [*said, *answer], [*logprobs[: limit.num_tokens], *more], finish, num_cached


@CONFIGS
@OVERLAP
def test_whatever_else_is_asked_for_is_as_by_another_request(
    config: dict[str, Any], overlap: bool
) -> None:
    """Closing tokens have no log-probabilities. Minima and biases hold across them, and what ends
    a reply does so before the limit, at it and after it.
    """
    plain = engine_of(config, prefix_cache=False)
    free = without_limit(plain, thinking("free", 20))
    answer = closed_by_another_request(plain, thinking("x", 20))[23:]
    ends = [free[8], free[19], free[20], answer[0], answer[5], END_ID, CLOSING_IDS[0]]
    requests = [
        *(with_end(thinking(f"end {end}", 20, logprobs=2), end) for end in ends),
        *(
            with_end(thinking(f"late {end}", 20, min_tokens=n), end)
            for n, end in enumerate(ends, 19)
        ),
        thinking("biases", 7, logit_bias={END_ID: -100.0, 40: 3.0, 41: -5.0}, logprobs=0),
        thinking("filtered", 15, top_k=7, top_p=0.9, min_p=0.01, logprobs=5),
        thinking("scored", 5, prompt_logprobs=1, logprobs=1),
        thinking("greedy", 16, temperature=0.0, logprobs=20),
        thinking("nearly full", 20, max_tokens=24),
        with_limit(thinking("own end", 20), 20, end_id=free[11]),
    ]
    together = run(engine_of(config, overlap=overlap, prefix_cache=False), *requests)
    for one in requests:
        assert whole(together[one.id]) == whole_by_another_request(plain, one), one.id


def with_end(one: Request, end_id: int) -> Request:
    return replace(one, end_token_ids=(end_id,))


@CONFIGS
@pytest.mark.parametrize("end", [None, "in", "at", "behind"])
def test_right_drafts_stop_at_the_limit(config: dict[str, Any], end: str | None) -> None:
    """Also with the token that ends thinking among them, at the limit, or right behind it."""
    plain = engine_of(config, page_size=64)
    requests = []
    for num_tokens in range(2, 12):
        one = thinking(str(num_tokens), num_tokens, logprobs=1)
        free = without_limit(plain, one)
        place = {None: None, "in": num_tokens - 2, "at": num_tokens - 1, "behind": num_tokens}[end]
        end_id = END_ID if place is None else free[place]
        requests.append(with_limit(one, num_tokens, end_id))
    expected = {one.id: whole_by_another_request(plain, one) for one in requests}
    engine = drafting_engine(config, {}, script=(ALWAYS_RIGHT,), deterministic=False)
    drafter = engine.policy.speculator.drafter
    assert isinstance(drafter, ScriptedDrafter)
    drafter.replies = {id: tokens for id, (tokens, *_) in expected.items()}
    found = run(engine, *requests)
    engine.policy.cache.check()
    for one in requests:
        # The prompt's last step may say the whole budget: there is no page for the closing tokens.
        assert whole(found[one.id])[:3] == expected[one.id][:3], one.id
        assert len(found[one.id]) < len(expected[one.id][0]) / 2


@pytest.mark.parametrize("drafter", ["suffix:3", "model"])
def test_drafters_of_the_host_know_the_closing_tokens(drafter: str, tmp_path: Path) -> None:
    """They propose from all tokens so far, also from those that no step has sampled."""
    config = {**SHALLOW_MOE, "vocab_size": VOCAB_SIZE}
    requests = [thinking(f"{n}", n, temperature=0.0, max_tokens=60) for n in range(10, 16)]
    repeating = [replace(one, token_ids=prompt(7, 1) * 9) for one in requests[:3]]
    requests = [*repeating, *requests[3:]]
    plain = grammar_engine_of(config, deterministic=False)
    if drafter == "model":
        drafter = f"model:{folder_of(tmp_path / 'draft', LLAMA)}:3"
    engine = grammar_engine_of(config, deterministic=False, speculate=drafter)
    engine.policy.speculator.pace = None
    together = said(engine, *requests)
    for one in requests:
        assert together[one.id] == closed_by_another_request(plain, one)


@pytest.mark.parametrize("speculate", ["off", "mtp:2"])
def test_ranks_close_a_thought_together(speculate: str) -> None:
    config = {**FAMILIES["hybrid moe"], "mtp_num_hidden_layers": 1}
    requests = [thinking(f"{n}", n, temperature=0.0) for n in (5, 33, 34, 35)]
    settings: dict[str, Any] = {"deterministic": False, "page_size": 64, "prefix_cache": False}
    with ranked_engine(config, 2, speculate="off", **settings) as plain:
        expected = {one.id: closed_by_another_request(plain, one) for one in requests}
    with ranked_engine(config, 2, speculate=speculate, **settings) as engine:
        engine.policy.speculator.pace = None
        assert said(engine, *requests) == expected
        assert engine.policy.cache.counters["miss_disabled"] == len(requests)


def test_experts_of_closing_tokens_are_fetched() -> None:
    requests = [thinking(f"{n}", n, temperature=0.0) for n in (5, 33, 34, 35)]
    plain = engine_of(HYBRID_MOE, prefix_cache=False)
    engine = engine_of(HYBRID_MOE, prefix_cache=False, expert_cache="300kB")
    together = said(engine, *requests)
    for one in requests:
        assert together[one.id] == closed_by_another_request(plain, one)
