"""A reply that continues in another engine is identical, wherever it is cut."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.engine.engine import Engine
from penstock.serve.fleet import resumed
from penstock.text.dialects.dialect import Thinking
from penstock.text.grammar import json_schema_grammar, with_blank_start
from penstock.types import Request, TokenDelta
from small_models import LLAMA, SHALLOW_MOE, make_engine, prompt, request, run, tokens_of
from test_grammar_masks import (
    PERSON_GRAMMAR,
    THINK_END,
    TOKENIZER,
    assert_person,
    constrained,
    engine_of,
)

ENDS = tuple(range(0, 320, 9))
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4}
KNOBS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": (SHALLOW_MOE, {"logprobs": 2}),
    "drawn, with penalties": (
        SHALLOW_MOE,
        {"temperature": 1.0, "top_p": 0.9, "seed": 3, **PENALTIES},
    ),
    "with end tokens": (LLAMA, {"temperature": 1.5, "seed": 5, "end_token_ids": ENDS}),
    "with a minimum": (
        LLAMA,
        {"temperature": 1.5, "seed": 5, "end_token_ids": ENDS, "min_tokens": 15},
    ),
    "biased": (LLAMA, {"logit_bias": {7: 3.0, 9: -100.0}, "frequency_penalty": 2.0}),
}


def assert_same_wherever_it_is_cut(engine: Engine, one: Request) -> None:
    whole = run(engine, one)[one.id]
    said = tokens_of(whole)
    assert len(said) > 2
    for cut in {1, len(said) // 2, len(said) - 1}:
        rest = run(engine, resumed(one, said[:cut]))[one.id]
        assert tokens_of(rest) == said[cut:], f"cut after {cut}"
        assert rest[-1].finish == whole[-1].finish
        num_scored = sum(len(delta.logprobs) for delta in rest)
        assert num_scored == (0 if one.sampling.logprobs is None else len(said) - cut)


@pytest.mark.parametrize(("config", "knobs"), KNOBS.values(), ids=KNOBS)
def test_any_kind_of_drawing_goes_on_as_if_nothing_had_happened(
    config: dict[str, Any], knobs: dict[str, Any]
) -> None:
    one = request("r", prompt(40), **{"max_tokens": 24, **knobs})
    assert_same_wherever_it_is_cut(make_engine(config, prefix_cache=False), one)


@pytest.mark.parametrize("starts_after", [(), (THINK_END,)], ids=["at once", "after a thought"])
def test_a_grammar_goes_on_where_it_was(starts_after: tuple[int, ...]) -> None:
    numbers = {
        "type": "array",
        "items": {"type": "integer", "minimum": 100},
        "minItems": 3,
        "maxItems": 3,
    }
    one = constrained(
        "r",
        json_schema_grammar(numbers),
        token_ids=prompt(30),
        max_tokens=90,
        grammar_starts_after=starts_after,
        logit_bias={THINK_END: 6.0},
        logprobs=None,
    )
    assert_same_wherever_it_is_cut(engine_of(), one)


def test_a_grammar_begins_behind_a_thought_that_was_closed_for_the_model() -> None:
    """In the dialect's words, whose line ends the grammar counts as its own."""
    one = constrained("r", with_blank_start(PERSON_GRAMMAR), grammar_starts_after=(THINK_END,))
    closing = TOKENIZER.encode(Thinking().forced_end)
    assert closing[-1] != THINK_END
    assert_person(run(engine_of(), resumed(one, [*prompt(5, 3), *closing]))["r"])


def test_a_reply_may_be_cut_as_often_as_it_has_tokens() -> None:
    engine = make_engine(LLAMA)
    one = request("r", prompt(50), max_tokens=8, seed=1, temperature=1.0)
    said: list[int] = []
    for _ in range(7):
        engine.submit(resumed(one, said))
        deltas: list[TokenDelta] = []
        while not deltas:
            deltas = engine.step()
        said += deltas[0].token_ids
        engine.abort("r")
        engine.step()
    assert said == tokens_of(run(make_engine(LLAMA), one)["r"])[:7]
