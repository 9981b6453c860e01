"""Speculation is exact: an engine that drafts gives the tokens of a plain engine.

In deterministic mode also the same bits: log-probabilities are compared with ==. A scripted drafter
is right or wrong at every position; the quality of drafts never affects correctness.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from penstock.config import EngineConfig, Speculation
from penstock.engine.draft_pace import DraftPace
from penstock.engine.engine import Engine
from penstock.engine.runner import Runner
from penstock.errors import ConfigError
from penstock.eval import held_out
from penstock.models.source import ModelSource
from penstock.text.grammar import regex_grammar
from penstock.text.tokenizer import Tokenizer
from penstock.types import Request, SamplingParams, StepPlan, TokenDelta
from scripted_drafter import (
    ALWAYS_RIGHT,
    EVERY_PLACE,
    NO_DRAFT,
    NUM_DRAFTS,
    ScriptedDrafter,
    drafting_engine,
    run_both,
)
from small_models import (
    LLAMA,
    SHALLOW_DENSE,
    SHALLOW_FAMILIES,
    SHALLOW_MOE,
    drain,
    logprobs_of,
    make_engine,
    prompt,
    request,
    run,
    tokens_of,
)
from test_grammar_masks import TOO_COSTLY, constrained, engine_of, starting_with
from test_laws import tight_budget

WITH_HEAD = {**SHALLOW_MOE, "mtp_num_hidden_layers": 1}
CONFIGS = ["hybrid_moe", "llama"]
Replies = dict[str, list[TokenDelta]]


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return SHALLOW_FAMILIES[request.param]


def assert_same(plain: Replies, drafted: Replies, *, in_bits: bool = True) -> None:
    assert plain.keys() == drafted.keys()
    for id, deltas in plain.items():
        assert tokens_of(drafted[id]) == tokens_of(deltas)
        assert drafted[id][-1].finish == deltas[-1].finish
        if in_bits:
            assert logprobs_of(drafted[id]) == logprobs_of(deltas)


@pytest.mark.thinned
@pytest.mark.bitwise
@pytest.mark.parametrize("wrong", [0, 1, 2, ALWAYS_RIGHT])
@pytest.mark.parametrize("name", SHALLOW_FAMILIES)
def test_a_rejection_at_every_place(name: str, wrong: int) -> None:
    one = request("x", prompt(60), max_tokens=20)  # crosses a boundary of pages and blocks
    plain, drafted = run_both(SHALLOW_FAMILIES[name], one, script=[wrong])
    assert_same(plain, drafted)
    # The first token comes from prefill; every step adds one, plus the accepted drafts.
    assert len(drafted["x"]) == 1 + -(-19 // (1 + min(wrong, NUM_DRAFTS)))


@pytest.mark.bitwise
def test_any_mixture_of_rows_with_and_without_drafts(config: dict[str, Any]) -> None:
    """Prompts of every length near 1 + k tokens, a page and a block, greedy and sampled."""
    requests = [
        request(f"r{n}", prompt(n, n), max_tokens=30, temperature=0.9 * (n % 2), top_p=0.9, seed=n)
        for n in (1, 3, 4, 5, 60, 63, 64, 65, 200)
    ]
    plain, drafted = run_both(config, *requests, max_step_tokens=128)
    assert_same(plain, drafted)
    for one in requests[::3]:
        alone = run(drafting_engine(config, plain), one)
        assert logprobs_of(alone[one.id]) == logprobs_of(drafted[one.id])


@pytest.mark.thinned
@pytest.mark.bitwise
@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 1.3, "temperature": 0.8, "seed": 4},
        {"presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"logit_bias": {5: 4.0, 6: 3.9, 17: -100.0}, "frequency_penalty": 2.0},
        {"temperature": 1.2, "top_k": 7, "seed": 5},
        {"temperature": 1.0, "min_p": 0.05, "seed": 6},
        {"min_tokens": 9, "end_token_ids": tuple(range(11, 320, 2))},
        {"logprobs": None},
    ],
    ids=lambda sampling: next(iter(sampling)),
)
def test_every_option_of_sampling(config: dict[str, Any], sampling: dict[str, Any]) -> None:
    """Each place counts the drafts before it in its penalties."""
    requests = [request(f"r{n}", prompt(n, n), max_tokens=24, **sampling) for n in (7, 62)]
    assert_same(*run_both(config, *requests))


@pytest.mark.bitwise
def test_n_replies_of_one_prompt(config: dict[str, Any]) -> None:
    siblings = [request(f"s{i}", prompt(130), temperature=1.0, seed=i) for i in range(3)]
    assert_same(*run_both(config, *siblings))


@pytest.mark.thinned
@pytest.mark.bitwise
@pytest.mark.parametrize("script", [[ALWAYS_RIGHT], EVERY_PLACE], ids=["right", "mixed"])
def test_a_reply_ends_inside_a_draft(config: dict[str, Any], script: list[int]) -> None:
    """By an end token, by max_tokens, and by a full context."""
    free = tokens_of(run(make_engine(config), request("x", prompt(20), max_tokens=20))["x"])
    for place in range(2, 7):
        end = request("x", prompt(20), end_token_ids=(free[place],), max_tokens=20)
        assert_same(*run_both(config, end, script=script))
        short = request("x", prompt(20), max_tokens=place)
        assert_same(*run_both(config, short, script=script))
    full = request("x", prompt(58), max_tokens=None)
    plain, drafted = run_both(config, full, script=script, max_model_len=64)
    assert drafted["x"][-1].finish == "length"
    assert_same(plain, drafted)


@pytest.mark.bitwise
def test_a_restored_checkpoint_and_a_prompt_in_chunks(config: dict[str, Any]) -> None:
    first = request("first", prompt(200), boundaries=(0, 70, 150))
    second = request("second", (*prompt(200), *prompt(90, 1)), max_tokens=30)
    plain = make_engine(config, max_step_tokens=64)
    said = run(plain, first) | run(plain, second)
    engine = drafting_engine(config, said, max_step_tokens=64)
    drafted = run(engine, first) | run(engine, second)
    assert drafted["second"][0].num_cached_tokens == said["second"][0].num_cached_tokens > 0
    assert_same(said, drafted)


@pytest.mark.parametrize("config", [SHALLOW_MOE, LLAMA], ids=CONFIGS)
def test_a_state_is_kept_where_a_draft_passed_a_page(config: dict[str, Any]) -> None:
    """The next turn resumes from the reply, at a boundary where no step started."""
    one = request("one", prompt(60), max_tokens=90)
    plain = run(make_engine(config, deterministic=False), one)
    said = tuple(tokens_of(plain["one"]))
    two = request("two", (*prompt(60), *said, *prompt(9, 2)))
    fresh = run(make_engine(config, deterministic=False), two)["two"]
    for script in ([ALWAYS_RIGHT], [1], [NO_DRAFT], EVERY_PLACE):
        engine = drafting_engine(config, plain, script, deterministic=False)
        assert tokens_of(run(engine, one)["one"]) == list(said)
        engine.policy.cache.check()
        again = run(engine, two)["two"]
        assert again[0].num_cached_tokens == 128
        assert tokens_of(again) == tokens_of(fresh)
        assert [token.logprob for token in logprobs_of(again)] == pytest.approx(
            [token.logprob for token in logprobs_of(fresh)], abs=1e-4
        )


class NeverPays(DraftPace):
    def num_drafts(self, *_: object) -> int:
        return 0


@pytest.mark.parametrize("overlap", [False, True])
def test_rows_that_draft_nothing_keep_states_as_plain_ones_do(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their slots move on: keeping a state in a replay would need steps that replay, which take
    longer."""
    plans: list[StepPlan] = []
    launch = Runner.launch

    def note(self: Runner, plan: StepPlan, *given: Any) -> Any:
        plans.append(plan)
        return launch(self, plan, *given)

    monkeypatch.setattr(Runner, "launch", note)
    engine = make_engine(WITH_HEAD, deterministic=False, speculate="mtp:3", overlap=overlap)
    engine.policy.speculator.pace = NeverPays()
    one = request("one", prompt(60), max_tokens=90)
    said = tuple(tokens_of(run(engine, one)["one"]))
    assert len(plans) >= 90
    assert not any(row.keep.slot for plan in plans for row in plan.rows)
    engine.policy.cache.check()
    two = request("two", (*prompt(60), *said, *prompt(9, 2)))
    assert run(engine, two)["two"][0].num_cached_tokens == 128


@pytest.mark.parametrize("overlap", [False, True])
def test_a_state_is_kept_though_the_host_does_not_know_which_step_passes_it(overlap: bool) -> None:
    """With drafts of the device, planned ahead, a plan only names the place."""
    engine = make_engine(WITH_HEAD, deterministic=False, speculate="mtp:3", overlap=overlap)
    engine.policy.speculator.pace = None
    one = request("one", prompt(60), max_tokens=90)
    said = tuple(tokens_of(run(engine, one)["one"]))
    engine.policy.cache.check()
    two = request("two", (*prompt(60), *said, *prompt(9, 2)))
    again = run(engine, two)["two"]
    assert again[0].num_cached_tokens == 128
    fresh = run(make_engine(WITH_HEAD, deterministic=False), two)["two"]
    assert tokens_of(again) == tokens_of(fresh)


@pytest.mark.thinned
@pytest.mark.parametrize("overlap", [False, True])
def test_preempted_rows_come_back(config: dict[str, Any], overlap: bool) -> None:
    requests = [
        request(f"r{i}", prompt(60 + i, i), max_tokens=100, seed=i, temperature=0.7)
        for i in range(4)
    ]
    plain = run(make_engine(config), *requests)
    budget = 1.6 * tight_budget(config)  # journals and wider rings need memory
    tight = drafting_engine(config, plain, max_model_len=192, memory_gb=budget, overlap=overlap)
    drafted = run(tight, *requests)
    assert tight.stats().num_preemptions > 0
    assert_same(plain, drafted, in_bits=False)


@pytest.mark.bitwise
def test_a_reply_that_another_engine_began(config: dict[str, Any]) -> None:
    whole = request("x", prompt(50), max_tokens=30, temperature=0.8, seed=3)
    plain = run(drafting_engine(config, {"x": []}, [NO_DRAFT]), whole)
    reply = tokens_of(plain["x"])
    resumed = dataclasses.replace(
        whole, token_ids=(*whole.token_ids, *reply[:13]), num_resumed_tokens=13
    )
    engine = drafting_engine(config, plain)
    assert tokens_of(run(engine, resumed)["x"]) == reply[13:]


@pytest.mark.thinned
@pytest.mark.parametrize("overlap", [False, True])
def test_aborts_return_every_page_and_slot(config: dict[str, Any], overlap: bool) -> None:
    requests = [request(f"r{n}", prompt(n, n), max_tokens=50) for n in (3, 62, 130)]
    plain = run(make_engine(config), *requests)
    engine = drafting_engine(config, plain, overlap=overlap, max_step_tokens=128)
    before = engine.stats()
    for one in requests:
        engine.submit(one)
    for _ in range(6):
        engine.step()
    for one in requests:
        engine.abort(one.id)
    drain(engine)
    engine.policy.cache.check()
    after = engine.stats()
    assert (after.num_free_pages, after.num_free_slots) == (
        before.num_free_pages,
        before.num_free_slots,
    )


def test_states_in_float16_round_as_plain_steps_round_them() -> None:
    settings: dict[str, Any] = {"deterministic": False, "state_dtype": "float16"}
    one = request("x", prompt(60), max_tokens=40)
    plain, drafted = run_both(SHALLOW_MOE, one, **settings)
    assert tokens_of(plain["x"]) == tokens_of(drafted["x"])
    for seen, expected in zip(logprobs_of(drafted["x"]), logprobs_of(plain["x"]), strict=True):
        assert seen.logprob == pytest.approx(expected.logprob, abs=2e-3)


@pytest.mark.bitwise
@pytest.mark.parametrize("drafter", ["scripted", "forced by the grammar"])
def test_grammars_and_banned_words_mask_every_place(drafter: str) -> None:
    """A draft that the grammar forbids is never accepted, and the masks after accepted ones are
    right."""
    grammars = [None, regex_grammar("(name|nothing): [a-z]{3,12}; the end of it"), None]
    requests = [
        constrained("person", token_ids=prompt(9)),
        constrained("pattern", grammars[1] or "", token_ids=prompt(40, 2)),
        Request(
            id="banned",
            token_ids=prompt(30, 3),
            sampling=request("", (1,), max_tokens=40).sampling,
            banned=((5,), (11, 12), (300, 301)),
        ),
    ]
    plain = run(engine_of(), *requests)
    engine = engine_of(speculate=f"ngram:{NUM_DRAFTS}")
    said = {id: tokens_of(deltas) for id, deltas in plain.items()}
    script = EVERY_PLACE if drafter == "scripted" else [NO_DRAFT]
    engine.policy.speculator.drafter = ScriptedDrafter(said, script)
    engine.policy.speculator.pace = None
    drafted = run(engine, *requests)
    assert_same(plain, drafted)
    assert len(drafted["pattern"]) < len(plain["pattern"])


@pytest.mark.parametrize("case", ["too costly", "all banned"])
def test_a_reply_that_no_token_can_follow_ends_there_also_inside_a_draft(case: str) -> None:
    """With an error, before a token that its grammar forbids; not as if it were complete."""
    one = constrained("x", TOO_COSTLY, token_ids=prompt(20, 1))
    if case == "all banned":
        free = constrained("x", regex_grammar("the only possible answer"))
        forced = tokens_of(run(engine_of(), free)["x"])
        one = dataclasses.replace(free, banned=((forced[3],),))
    (plain,) = run(engine_of(), one).values()
    assert plain[-1].finish == "error"
    assert len(tokens_of(plain)) >= 3
    engine = engine_of(speculate="ngram:7")
    engine.policy.speculator.drafter = ScriptedDrafter({"x": tokens_of(plain)}, [ALWAYS_RIGHT])
    engine.policy.speculator.pace = None
    (drafted,) = run(engine, one).values()
    assert len(drafted) < len(plain)
    assert_same({"x": plain}, {"x": drafted})
    assert drafted[-1].error == plain[-1].error
    engine.policy.cache.check()


def test_drafts_that_exceed_a_grammars_limit_do_not_harm_other_requests() -> None:
    """The lexer that all share fails inside a draft, before or after the others got their masks."""
    cheap = [starting_with("?", f"cheap{n}", seed=n, token_ids=prompt(40, n)) for n in (1, 2)]
    requests = [cheap[0], starting_with("e", "costly"), cheap[1]]
    alone = {one.id: run(engine_of(), one)[one.id] for one in requests}
    replies = {id: tokens_of(deltas) for id, deltas in alone.items()}
    engine = engine_of(speculate="ngram:7")
    engine.policy.speculator.drafter = ScriptedDrafter(replies, EVERY_PLACE)
    engine.policy.speculator.pace = None
    together = run(engine, *requests)
    assert together["costly"][-1].finish == "error"
    assert len(replies["costly"]) < len(replies["cheap1"])
    assert_same(
        {one.id: alone[one.id] for one in cheap}, {one.id: together[one.id] for one in cheap}
    )
    engine.policy.cache.check()


@pytest.mark.bitwise
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_drafts", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_the_drafting_head(num_drafts: int, overlap: bool) -> None:
    """A random head is nearly always wrong, but exact: rows, chunks, hits and sampled tokens.

    With `overlap` the next step is planned before the host knows how many drafts were accepted.
    """
    requests = [
        request(f"r{n}", prompt(n, n), max_tokens=30, temperature=0.8 * (n % 2), seed=n)
        for n in (1, 4, 63, 64, 150, 151)
    ]
    requests += [request("hit", (*prompt(151, 151), *prompt(9)), max_tokens=30)]
    settings: dict[str, Any] = {"max_step_tokens": 128, "overlap": overlap, "max_rows": 4}
    plain = run(make_engine(WITH_HEAD, **settings), *requests)
    engine = make_engine(WITH_HEAD, speculate=f"mtp:{num_drafts}", **settings)
    assert_same(plain, run(engine, *requests))
    engine.policy.cache.check()


@pytest.mark.bitwise
def test_a_plan_with_drafts_gives_the_same_in_another_runner() -> None:
    """The device's drafts are not part of a plan: every rank makes the same ones."""
    first, second = (make_engine(WITH_HEAD, speculate="mtp:2") for _ in range(2))
    for one in (request("a", prompt(70), max_tokens=20), request("b", prompt(3), max_tokens=20)):
        first.submit(one)
    while first.has_work:
        plan = first.policy.plan()
        assert plan is not None
        here, there = (engine.runner.launch(plan).wait() for engine in (first, second))
        assert here == there
        first.policy.commit(here)
        first.policy.take_deltas()


def test_prompt_lookup_drafts_what_followed_before() -> None:
    """A biased model repeats itself: nearly all drafts are right, and steps are few."""
    one = request("x", prompt(20), max_tokens=60, logit_bias={5: 100.0})
    engine = make_engine(LLAMA, speculate="ngram:7")
    engine.policy.speculator.pace = None
    deltas = run(engine, one)["x"]
    assert tokens_of(deltas) == [5] * 60
    assert len(deltas) <= 12


def test_suffixes_draft_earlier_replies_of_the_tenant_and_of_no_other() -> None:
    """The same question again: each step adds a token and all drafts, except the first few."""
    engine = make_engine(LLAMA, speculate="suffix:7")
    engine.policy.speculator.pace = None
    asked = request("first", prompt(20), max_tokens=60, temperature=0.5, seed=1)
    plain = run(make_engine(LLAMA), asked)
    assert_same(plain, run(engine, asked))
    again = run(engine, dataclasses.replace(asked, id="again"))["again"]
    assert tokens_of(again) == tokens_of(plain["first"])
    assert len(again) <= 4 + 60 // 7
    other = run(engine, dataclasses.replace(asked, id="other", tenant="other"))["other"]
    assert tokens_of(other) == tokens_of(plain["first"])
    assert len(other) > 40


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("off", Speculation("off")),
        ("mtp", Speculation("mtp", 3)),
        ("ngram:5", Speculation("ngram", 5)),
    ],
)
def test_the_flag_names_the_drafter_and_the_number_of_drafts(
    text: str, expected: Speculation
) -> None:
    assert Speculation.parse(text) == expected


@pytest.mark.parametrize("text", ["mtp:0", "mtp:16", "mtp:x", "off:2", "magic"])
def test_a_flag_that_says_something_else_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        EngineConfig(speculate=text)


def test_a_checkpoint_without_a_head_is_refused_by_name_and_auto_does_without() -> None:
    with pytest.raises(ConfigError, match="no drafting head"):
        make_engine(SHALLOW_DENSE, speculate="mtp")
    source = ModelSource(name="small", path=None, config=SHALLOW_DENSE)
    given = EngineConfig(random_weights=True, device="cpu", speculate="auto")
    assert Engine.from_source(source, given).policy.speculator.decode_tokens == 1


def test_rows_come_and_go_and_leave_their_journals_as_others_read_them() -> None:
    """A single row uses other kernels than several rows, and each replays what the other wrote:
    the embedded model, whose drafts are mostly right, with others beside it now and then."""
    tokenizer = Tokenizer.load(None)
    settings: dict[str, Any] = {"device": "cpu", "memory_gb": 0.1}
    (question,) = held_out.take("word_problems", 1, seed=0)
    token_ids = tuple(tokenizer.encode(question.messages[-2]["content"] + "\n"))
    long, *short = (
        Request(id=str(number), token_ids=token_ids, sampling=SamplingParams(max_tokens=length))
        for number, length in enumerate([90] + [3] * 12)
    )
    plain = Engine.from_config(EngineConfig(**settings))
    engine = Engine.from_config(EngineConfig(speculate="mtp:2", **settings))
    engine.policy.speculator.pace = None
    expected = tokens_of(run(plain, long)[long.id])
    engine.submit(long)
    said: list[int] = []
    for number in range(200):
        if number % 4 == 2 and short:
            engine.submit(short.pop())
        said += tokens_of([delta for delta in engine.step() if delta.request_id == long.id])
    assert said == expected
    drafts = engine.stats().drafts
    assert drafts is not None
    assert drafts.counts[1].num_accepted > 0.3 * drafts.counts[1].num_drafted
