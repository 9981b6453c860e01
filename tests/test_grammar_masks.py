"""Constrained decoding on small random models, which never write JSON by themselves."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch

from grammar_walks import PERSON, is_valid
from penstock.assets import default_model
from penstock.config import EngineConfig
from penstock.engine import grammar_masks
from penstock.engine.engine import Engine
from penstock.engine.graphs import DecodeGraphs, DecodeStep
from penstock.errors import CheckpointError, ConfigError, RequestError
from penstock.models.source import ModelSource
from penstock.text.grammar import (
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)
from penstock.text.tokenizer import Tokenizer
from penstock.types import Request, SamplingParams, TokenDelta
from penstock.wire import Submit, encode_frame
from small_models import LLAMA, SHALLOW_MOE, drain, logprobs_of, prompt, request, run, tokens_of
from test_laws import tight_budget

TOKENIZER = Tokenizer.load(None)
VOCAB_SIZE = 2560
ENDS = TOKENIZER.eos_token_ids
THINK_END = TOKENIZER.id_of("</think>")
assert THINK_END is not None

PERSON_GRAMMAR = json_schema_grammar(PERSON)

# Compiles, and exceeds what one mask may cost after a few characters.
TOO_COSTLY = json_schema_grammar({"type": "string", "pattern": "(.*[aeiou].{50}){20}"})
# The same for replies that start with e, and cheap for those that start with a question mark.
COSTLY_AFTER_E = regex_grammar(r"\?[a-z ]{400,450}\.|e(.*[aeiou].{50}){20}")


def engine_of(config: dict[str, Any] = LLAMA, **settings: Any) -> Engine:
    """A small model with the embedded model's vocabulary."""
    given = {"random_weights": True, "device": "cpu", "deterministic": True, "max_model_len": 1024}
    source = ModelSource("small", default_model(), {**config, "vocab_size": VOCAB_SIZE})
    return Engine.from_source(source, EngineConfig(**{**given, **settings}))


def constrained(id: str, grammar: str = PERSON_GRAMMAR, **sampling: Any) -> Request:
    given = {"max_tokens": 400, "temperature": 1.0, "seed": 1, "end_token_ids": ENDS, "logprobs": 0}
    return request(
        id, sampling.pop("token_ids", prompt(20)), grammar=grammar, **{**given, **sampling}
    )


def some_of_each() -> list[Request]:
    people = [
        constrained(f"c{seed}", seed=seed, token_ids=prompt(30 * seed, seed)) for seed in (1, 2, 3)
    ]
    plain = [
        request(f"p{n}", prompt(n, n), max_tokens=15, temperature=0.8, seed=n) for n in (1, 70)
    ]
    return [people[0], plain[0], people[1], plain[1], people[2]]


def text_of(deltas: list[TokenDelta]) -> str:
    assert deltas[-1].finish == "stop", deltas[-1]
    return TOKENIZER.decode(tokens_of(deltas)[:-1], skip_special_tokens=False)


def assert_person(deltas: list[TokenDelta]) -> None:
    value = json.loads(text_of(deltas))
    assert is_valid(value, PERSON, PERSON), value


@pytest.mark.parametrize(
    ("config", "params"),
    [
        (LLAMA, {}),
        (SHALLOW_MOE, {}),
        (LLAMA, {"temperature": 0.0}),
        pytest.param(LLAMA, {"temperature": 3.0}, marks=pytest.mark.slow),
        (LLAMA, {"top_k": 5, "top_p": 0.9}),
        (LLAMA, {"repetition_penalty": 1.3}),
    ],
    ids=lambda given: given.get("model_type", str(given)),
)
def test_every_reply_under_a_schema_is_valid_against_it(
    config: dict[str, Any], params: dict[str, Any]
) -> None:
    requests = [
        constrained(f"r{i}", token_ids=prompt(9, i), **{"seed": i, **params}) for i in range(3)
    ]
    for deltas in run(engine_of(config), *requests).values():
        assert_person(deltas)


def test_rows_beside_constrained_ones_draw_what_they_draw_alone() -> None:
    together = run(engine_of(overlap=True), *some_of_each())
    for one in some_of_each():
        alone = run(engine_of(), one)[one.id]
        assert logprobs_of(together[one.id]) == logprobs_of(alone)
        assert tokens_of(together[one.id]) == tokens_of(alone)


@pytest.mark.parametrize("config", [LLAMA, SHALLOW_MOE], ids=["llama", "hybrid"])
def test_overlapped_steps_change_nothing(config: dict[str, Any]) -> None:
    requests = some_of_each()[: 5 if config is LLAMA else 2]
    plain = run(engine_of(config, overlap=False), *requests)
    overlapped = run(engine_of(config, overlap=True), *requests)
    for id in plain:
        assert logprobs_of(overlapped[id]) == logprobs_of(plain[id])
        assert overlapped[id][-1].finish == plain[id][-1].finish


def test_chunked_prefill_changes_nothing() -> None:
    one = constrained("r", token_ids=prompt(150))
    whole = run(engine_of(), one)["r"]
    chunked = run(engine_of(max_step_tokens=64, overlap=True), one)["r"]
    assert tokens_of(chunked) == tokens_of(whole)


@pytest.mark.parametrize(
    ("overlap", "starts_after"),
    [(False, ()), pytest.param(True, (), marks=pytest.mark.slow), (True, (THINK_END,))],
)
def test_preempted_equals_undisturbed(overlap: bool, starts_after: tuple[int, ...]) -> None:
    numbers = {
        "type": "array",
        "items": {"type": "integer", "minimum": 100},
        "minItems": 12,
        "maxItems": 12,
    }
    requests = [
        constrained(
            f"r{i}",
            json_schema_grammar(numbers),
            token_ids=prompt(60 + i, i),
            seed=i,
            max_tokens=70,
            grammar_starts_after=starts_after,
            logit_bias={THINK_END: 6.0},
        )
        for i in range(4)
    ]
    calm = run(engine_of(), *requests)
    tight = engine_of(max_model_len=192, memory_gb=tight_budget(LLAMA), overlap=overlap)
    crowded = run(tight, *requests)
    assert tight.stats().num_preemptions > 0
    for one in requests:
        assert tokens_of(crowded[one.id]) == tokens_of(calm[one.id])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_what_comes_before_the_start_token_is_free_but_cannot_end(overlap: bool, seed: int) -> None:
    """The start and end tokens are made likely: the first comes soon, and the others would."""
    bias = {THINK_END: 5.0} | dict.fromkeys(ENDS, 9.0)
    one = constrained("r", seed=seed, grammar_starts_after=(THINK_END,), logit_bias=bias)
    deltas = run(engine_of(overlap=overlap), one)["r"]
    tokens = tokens_of(deltas)
    start = tokens.index(THINK_END)
    assert not set(tokens[:start]) & set(ENDS)
    value = json.loads(TOKENIZER.decode(tokens[start + 1 : -1]))
    assert is_valid(value, PERSON, PERSON)


def test_thinking_is_as_without_a_grammar() -> None:
    free = run(engine_of(), constrained("r", None, max_tokens=40))["r"]  # type: ignore[arg-type]
    thinking = run(engine_of(), constrained("r", max_tokens=40, grammar_starts_after=(THINK_END,)))[
        "r"
    ]
    assert not set(tokens_of(free)) & {*ENDS, THINK_END}, "choose another seed"
    assert logprobs_of(thinking) == logprobs_of(free)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_reply_ends_when_its_grammar_does_and_no_earlier(temperature: float) -> None:
    eager_to_end = {"logit_bias": dict.fromkeys(ENDS, 100.0), "temperature": temperature}
    deltas = run(engine_of(), constrained("r", regex_grammar("[a-z]{5,9}!"), **eager_to_end))["r"]
    assert TOKENIZER.decode(tokens_of(deltas)[:-1])[-1] == "!"
    assert tokens_of(deltas)[-1] in ENDS
    assert deltas[-1].finish == "stop"


def test_the_requests_own_end_tokens_end_a_reply() -> None:
    im_end, own = TOKENIZER.id_of("<|im_end|>"), TOKENIZER.encode("!")[0]
    for ends in ((im_end,), (own,), (own, im_end)):
        deltas = run(engine_of(), constrained("r", regex_grammar("yes|no"), end_token_ids=ends))[
            "r"
        ]
        assert TOKENIZER.decode(tokens_of(deltas)[:-1]) in ("yes", "no")
        assert tokens_of(deltas)[-1] in ends


def test_a_reply_cut_by_its_length_keeps_to_the_grammar_so_far() -> None:
    whole = run(engine_of(), constrained("r"))["r"]
    cut = run(engine_of(), constrained("r", max_tokens=7))["r"]
    assert tokens_of(cut) == tokens_of(whole)[:7]
    assert cut[-1].finish == "length"


def test_logprobs_are_those_of_the_model_and_not_of_the_mask() -> None:
    first = run(engine_of(), constrained("r", max_tokens=1, logprobs=3))["r"][0].logprobs[0]
    free = run(engine_of(), request("r", prompt(20), max_tokens=1))["r"][0].logprobs[0]
    assert first.top == free.top
    assert first.logprob < first.top[-1][1]


@pytest.mark.parametrize(
    "grammar", [PERSON_GRAMMAR, json_object_grammar(), regex_grammar("(yes|no|[0-9]+)!?")]
)
def test_a_mask_allows_exactly_what_the_matcher_accepts(grammar: str) -> None:
    """Every token of the vocabulary is tried alone along a reply; where several token sequences
    spell forced text, only the tokenizer's own is allowed. Two rows take another path into
    llguidance than one.
    """
    tokens = tokens_of(run(engine_of(), constrained("r", grammar, max_tokens=25))["r"])
    engine = engine_of()
    compiled = engine.policy.constraints.compiler.compile(grammar)
    matcher = compiled.new_matcher()
    sequences = [engine.policy.scheduler.submit(constrained(id, grammar)) for id in ("a", "b")]
    followers = [grammar_masks.Constraint(sequence, compiled) for sequence in sequences]
    for token_id in tokens:
        pair, single = (
            engine.policy.constraints.fill(
                [grammar_masks.ConstrainedRow(place, one) for place, one in enumerate(chosen)]
            )
            for chosen in (followers, followers[:1])
        )
        expected = {t for t in range(VOCAB_SIZE) if matcher.validate_tokens([t])} - set(ENDS)
        expected |= set(ENDS) if matcher.is_accepting() else set()
        expected = set(matcher.compute_ff_tokens()[:1]) & expected or expected
        for masks in (pair, single):
            words = masks.allowed.view(np.uint8)
            for row in np.unpackbits(words, axis=1, bitorder="little"):
                assert set(row.nonzero()[0].tolist()) == expected
        assert token_id in expected
        matcher.consume_token(token_id)
        for sequence in sequences:
            sequence.tokens.append(token_id)


def test_captured_steps_draw_what_plain_steps_draw() -> None:
    engine = engine_of(max_rows=6)
    runner = engine.runner
    step = DecodeStep(runner.model, runner.caches, runner.rows, 6, deterministic=True)
    modes = set()

    class Eager:
        """Replaces `DecodeGraphs` without the graph."""

        size_for = DecodeGraphs.size_for
        _steps = (6,)

        def replay(self, rows: Any, size: int, mode: Any) -> torch.Tensor:
            modes.add(mode)
            with torch.inference_mode():
                step.load(rows)
                return step.run(mode)[: len(rows)]

    runner.graphs = Eager()  # type: ignore[assignment]
    seen = run(engine, *some_of_each())
    assert "logits" in modes
    for id, deltas in run(engine_of(max_rows=6), *some_of_each()).items():
        assert tokens_of(seen[id]) == tokens_of(deltas)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_grammar_that_becomes_too_costly_ends_its_own_request_only(overlap: bool) -> None:
    engine = engine_of(overlap=overlap)
    before = engine.stats()
    together = run(engine, constrained("bad", TOO_COSTLY, token_ids=prompt(40)), *some_of_each())
    assert together["bad"][-1].finish == "error"
    assert "grammar" in (together["bad"][-1].error or "")
    assert len(tokens_of(together["bad"])) > 1, "it failed before it began"
    calm = run(engine_of(), *some_of_each())
    for id in calm:
        assert tokens_of(together[id]) == tokens_of(calm[id])
        assert together[id][-1].finish == calm[id][-1].finish
    after = engine.stats()
    assert (after.num_running, after.num_waiting) == (0, 0)
    assert after.num_free_pages == before.num_free_pages


def test_a_grammar_that_became_too_costly_is_compiled_anew() -> None:
    """Its copies share a lexer, which stays in error: the next request would fail at its start."""
    engine = engine_of()
    first, second = (
        run(engine, constrained(id, TOO_COSTLY, token_ids=prompt(40)))[id] for id in ("a", "b")
    )
    assert first[-1].finish == second[-1].finish == "error"
    assert tokens_of(first) == tokens_of(second)


def starting_with(char: str, id: str, **sampling: Any) -> Request:
    (token_id,) = TOKENIZER.encode(char)
    given = {"logit_bias": {token_id: 50.0}, "token_ids": prompt(40), "max_tokens": 400}
    return constrained(id, COSTLY_AFTER_E, **{**given, **sampling})


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_that_exceeds_the_limit_does_not_harm_others_of_the_same_grammar(
    overlap: bool,
) -> None:
    """They share a lexer, which fails for all of them at once."""
    cheap = [starting_with("?", f"cheap{n}", seed=n, token_ids=prompt(40, n)) for n in (1, 2)]
    engine = engine_of(overlap=overlap)
    together = run(engine, cheap[0], starting_with("e", "costly"), cheap[1])
    assert together["costly"][-1].finish == "error"
    assert "grammar" in (together["costly"][-1].error or "")
    num_before = len(tokens_of(together["costly"]))
    for one in cheap:
        (alone,) = run(engine_of(), one).values()
        assert len(tokens_of(alone)) > num_before, "it ended before the other failed"
        assert tokens_of(together[one.id]) == tokens_of(alone)
        assert logprobs_of(together[one.id]) == logprobs_of(alone)
        assert together[one.id][-1].finish == "stop"
        assert {delta.num_cached_tokens for delta in together[one.id]} == {0}
    later = run(engine, starting_with("?", "later", seed=1, token_ids=prompt(40, 1)))
    assert tokens_of(later["later"]) == tokens_of(together["cheap1"])
    engine.policy.cache.check()
    assert engine.policy.constraints.num_preparing == 0


def test_a_request_gets_a_lexer_of_its_own_once_and_repeats_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It keeps the number of its cached tokens, and the scores of its prompt are sent once."""
    cached = starting_with("?", "cached", token_ids=prompt(70))
    scored = starting_with("?", "scored", token_ids=prompt(40, 1), prompt_logprobs=0)
    engine = engine_of()
    run(engine, request("before", cached.token_ids, max_tokens=1))
    compiler, compiled = engine.policy.constraints.compiler, list[str]()
    compile_anew = compiler.compile_anew

    def count(grammar: str) -> Any:
        compiled.append(grammar)
        return compile_anew(grammar)

    monkeypatch.setattr(compiler, "compile_anew", count)
    together = run(engine, cached, starting_with("e", "costly"), scored)
    assert {delta.num_cached_tokens for delta in together["cached"]} == {64}
    num_scored = sum(len(delta.prompt_scores or ()) for delta in together["scored"])
    assert num_scored == len(scored.token_ids) - 1
    assert len(compiled) == 1 + len(together), "once for all of them, then once for each"


def test_a_request_can_be_aborted_while_its_grammar_is_compiled_for_it_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_of()
    compiler, may_go_on = engine.policy.constraints.compiler, threading.Event()
    compile_anew = compiler.compile_anew
    cheap, costly = starting_with("?", "cheap"), starting_with("e", "costly")
    engine.submit(cheap)
    engine.submit(costly)
    while engine.stats().num_running < 2:
        engine.step()

    def slow(grammar: str) -> Any:
        assert may_go_on.wait(60)
        return compile_anew(grammar)

    monkeypatch.setattr(compiler, "compile_anew", slow)
    while engine.policy.constraints.num_preparing < 2:
        engine.step()
    assert (engine.stats().num_running, engine.stats().num_waiting) == (0, 2)
    engine.abort("cheap")
    may_go_on.set()
    rest = drain(engine)
    assert [delta.finish for delta in rest["cheap"]] == ["abort"]
    assert rest["costly"][-1].finish == "error"


def test_a_grammar_that_does_not_compile_for_the_vocabulary_ends_its_request_with_the_reason() -> (
    None
):
    engine = engine_of()
    unknown = lark_grammar("start: <no_such_token>")
    deltas = run(
        engine,
        constrained("bad", unknown),
        constrained("worse", "nothing like a grammar"),
        *some_of_each(),
    )
    assert deltas["bad"][-1].finish == deltas["worse"][-1].finish == "error"
    assert "no_such_token" in (deltas["bad"][-1].error or "")
    assert_person(deltas["c1"])


def test_a_control_token_is_written_where_the_grammar_has_it() -> None:
    call = lark_grammar('start: <tool_call> "\\n" /[a-z]{3,9}/ "\\n" </tool_call>')
    assert text_of(run(engine_of(), constrained("r", call))["r"])[:12] == "<tool_call>\n"


@pytest.mark.parametrize("overlap", [False, True])
def test_aborted_requests_leave_nothing_behind(overlap: bool) -> None:
    engine = engine_of(overlap=overlap)
    for one in some_of_each():
        engine.submit(one)
    engine.abort("c1")  # while its grammar is being compiled
    for _ in range(200):
        engine.step()
        if engine.stats().num_running == 4:
            break
    engine.abort("c2")
    engine.abort("p1")
    rest = drain(engine)
    assert "c1" not in rest or rest["c1"][-1].finish == "abort"
    assert rest["c2"][-1].finish == rest["p1"][-1].finish == "abort"
    run(engine, request("next", prompt(5)))
    assert engine.policy.constraints.num_preparing == 0
    assert engine.policy.constraints._live == []
    assert (engine.stats().num_running, engine.stats().num_waiting) == (0, 0)


def test_an_expensive_grammar_keeps_only_its_own_request_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_of()
    compile, may_go_on = engine.policy.constraints.compiler.compile, threading.Event()

    def slow(grammar: str) -> Any:
        assert may_go_on.wait(60)
        return compile(grammar)

    monkeypatch.setattr(engine.policy.constraints.compiler, "compile", slow)
    engine.submit(constrained("slow"))
    engine.submit(request("quick", prompt(9)))
    news: list[TokenDelta] = []
    while not any(delta.finish for delta in news):
        news += engine.step()
    assert {delta.request_id for delta in news} == {"quick"}
    assert engine.has_work
    assert engine.stats().num_waiting == 1
    with pytest.raises(RequestError):
        engine.submit(request("slow", prompt(9)))
    may_go_on.set()
    assert_person(drain(engine)["slow"])


def test_requests_that_cannot_work_are_refused() -> None:
    engine = engine_of()
    with pytest.raises(RequestError) as no_end:
        engine.submit(constrained("r", end_token_ids=()))
    assert no_end.value.param == "ignore_eos"
    with pytest.raises(RequestError) as unknown:
        engine.submit(constrained("r", grammar_starts_after=(VOCAB_SIZE,)))
    assert unknown.value.param == "grammar_starts_after"
    with pytest.raises(RequestError) as too_long:
        engine.submit(constrained("r", token_ids=prompt(2000)))
    assert too_long.value.param == "prompt"
    with pytest.raises(RequestError) as shortest:
        SamplingParams(grammar=PERSON_GRAMMAR, min_tokens=3)
    assert shortest.value.param == "min_tokens"
    assert not engine.has_work


def test_an_engine_without_a_vocabulary_serves_all_other_requests() -> None:
    source = ModelSource("small", None, {**LLAMA, "vocab_size": VOCAB_SIZE})
    engine = Engine.from_source(
        source, EngineConfig(random_weights=True, device="cpu", max_model_len=256)
    )
    engine.warm_up_grammars()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        engine.submit(constrained("r", max_tokens=20))
    assert len(tokens_of(run(engine, request("plain", prompt(9)))["plain"])) == 12


def test_llguidance_is_needed_by_constrained_requests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)  # importing it fails from here on
    engine = engine_of()
    engine.warm_up_grammars()
    with pytest.raises(ConfigError, match="llguidance"):
        engine.submit(constrained("r"))
    assert len(tokens_of(run(engine, request("plain", prompt(9)))["plain"])) == 12


def test_a_vocabulary_larger_than_the_models_is_refused_and_asked_for_once() -> None:
    source = ModelSource("small", default_model(), {**LLAMA, "vocab_size": 320})
    engine = Engine.from_source(
        source, EngineConfig(random_weights=True, device="cpu", max_model_len=256)
    )
    one = constrained("r", max_tokens=20, end_token_ids=(3,))
    (last,) = run(engine, one)["r"]
    assert last.finish == "error"
    assert "320" in (last.error or "")
    with pytest.raises(CheckpointError):
        engine.submit(one)


def test_a_warmed_up_engine_has_its_vocabulary() -> None:
    engine = engine_of()
    engine.warm_up_grammars()
    assert engine.policy.constraints.compiler._vocabulary is not None


def test_a_grammar_survives_the_wire() -> None:
    import msgspec

    one = constrained("r", grammar_starts_after=(5, 6))
    assert msgspec.msgpack.decode(encode_frame(Submit(one))[4:], type=Submit).request == one
