"""Banned words never occur in a reply, in any mode of the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.engine.banned_words import BannedWords
from penstock.errors import RequestError
from penstock.text.prompt import build_requests
from penstock.text.tokenizer import Tokenizer
from penstock.types import Request, SamplingParams
from small_models import LLAMA, SHALLOW_FAMILIES, make_engine, prompt, request, run, tokens_of
from test_grammar_masks import ENDS, PERSON_GRAMMAR, engine_of
from test_laws import tight_budget


def contains(tokens: list[int], word: tuple[int, ...]) -> bool:
    return any(tuple(tokens[i : i + len(word)]) == word for i in range(len(tokens)))


def test_only_the_token_that_would_complete_a_word_is_forbidden() -> None:
    words = BannedWords([(7,), (1, 2, 3), (5, 3), (2, 9)])
    assert words.next_ids([1, 1], 2) == [7]  # the prompt does not count
    assert words.next_ids([0, 1, 2], 1) == [7, 3, 9]
    assert words.next_ids([0, 1, 2], 2) == [7, 9]
    assert words.next_ids([0, 5], 0) == [7, 3]
    assert not BannedWords([])


@pytest.mark.thinned
@pytest.mark.parametrize("settings", [{}, {"overlap": True, "deterministic": False}])
@pytest.mark.parametrize("family", SHALLOW_FAMILIES)
def test_a_reply_goes_another_way_where_a_banned_word_would_come(
    family: str, settings: dict[str, Any]
) -> None:
    """Greedy, so the reply without the ban is known; an unrestricted request runs beside it."""
    engine = make_engine(SHALLOW_FAMILIES[family], **settings)
    free = request("free", prompt(70), max_tokens=30)
    said = tokens_of(run(engine, free)["free"])
    words = ((said[0],), tuple(said[10:13]), tuple(said[20:22]))
    deltas = run(engine, replace(free, id="held", banned=words), replace(free, id="beside"))
    held = tokens_of(deltas["held"])
    assert tokens_of(deltas["beside"]) == said
    assert len(held) == 30
    assert not any(contains(held, word) for word in words)
    only_late = tokens_of(run(engine, replace(free, id="late", banned=words[1:2]))["late"])
    num_same = next(i for i in range(len(said)) if tuple(said[i : i + 3]) == words[1]) + 2
    assert only_late[:num_same] == said[:num_same]
    assert not contains(only_late, words[1])


def test_a_preempted_reply_stays_without_its_banned_words() -> None:
    plain = [request(f"r{n}", prompt(60 + n, n), max_tokens=100) for n in range(4)]
    said = run(make_engine(LLAMA), *plain)
    words = {one.id: (tuple(tokens_of(said[one.id])[40:42]),) for one in plain}
    held = [replace(one, banned=words[one.id]) for one in plain]
    calm = run(make_engine(LLAMA), *held)
    tight = make_engine(LLAMA, max_model_len=192, memory_gb=tight_budget(LLAMA), overlap=True)
    crowded = run(tight, *held)
    assert tight.stats().num_preemptions > 0
    for one in held:
        assert tokens_of(crowded[one.id]) == tokens_of(calm[one.id])
        assert not contains(tokens_of(calm[one.id]), words[one.id][0])


def test_a_grammar_and_banned_words_hold_together() -> None:
    engine = engine_of()
    tokenizer = Tokenizer.load(None)
    given = {"grammar": PERSON_GRAMMAR, "max_tokens": 400, "temperature": 1.0, "seed": 1}
    brace = tuple(tokenizer.encode("{"))
    held = replace(request("held", prompt(20), end_token_ids=ENDS, **given), banned=(brace,))
    last = run(engine, held)["held"][-1]
    opens = [id for id in range(tokenizer.vocab_size) if tokenizer.token_bytes(id).startswith(b"{")]
    nothing_left = replace(held, id="none", banned=tuple((id,) for id in opens))
    assert last.finish in ("stop", "error", "length")
    assert not contains(tokens_of(run(engine, replace(held, id="again"))["again"]), brace)
    failed = run(engine, nothing_left)["none"][-1]
    assert failed.finish == "error"
    assert "bad_words" in (failed.error or "")


def test_words_are_banned_at_the_start_of_a_text_and_behind_a_space() -> None:
    tokenizer = Tokenizer.load(None)
    (one,) = requests_of("river", "river ", "riv" + "er")
    assert tuple(tokenizer.encode("river")) in one.banned
    assert tuple(tokenizer.encode(" river")) in one.banned
    assert len(set(one.banned)) == len(one.banned)
    with pytest.raises(RequestError, match="bad_words"):
        requests_of("")


def requests_of(*words: str) -> list[Request]:
    sampling = SamplingParams(bad_words=words)
    return build_requests("r", [1, 2], sampling, Tokenizer.load(None), 64)
