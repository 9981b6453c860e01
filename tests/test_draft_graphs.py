"""Fixed-size steps with drafts: padding rows, empty places and graph capture change nothing. The
choice of shapes is tested without tensors.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch

from eager_prompts import EagerPrompts
from penstock.engine.draft_graphs import DraftGraphs, places_of
from penstock.engine.draft_step import DraftStep
from penstock.engine.engine import Engine
from penstock.engine.graph_sizes import DraftLimits, DraftSize, draft_sizes
from penstock.engine.graphs import DecodeStep, warm_up
from penstock.engine.step_times import measure_steps
from penstock.layers.inputs import StateCache
from penstock.types import KeptState, RowPlan, StepPlan
from scripted_drafter import EVERY_PLACE, drafting_engine
from small_models import LLAMA, SHALLOW_FAMILIES, make_engine, prompt, request, run, tokens_of
from test_gpu import prefill_rows, synchronising_is_an_error
from test_speculation import WITH_HEAD, assert_same


class EagerDrafts(DraftGraphs):
    """Replaces `DraftGraphs` without graphs: the same steps, launched op by op."""

    def __init__(self, engine: Engine) -> None:
        runner = engine.runner
        given = (runner.model, runner.caches, runner.rows, runner.drafter)
        super().__init__(*given, runner.deterministic)
        self.num_replayed = 0

    def _step(self, rows: tuple[RowPlan, ...], size: DraftSize) -> DraftStep:
        self.num_replayed += 1
        step = self._steps.setdefault(size, self._new_step(size, self._deterministic))
        step.load(rows)
        return step

    def replay(self, rows: Any, size: DraftSize, mode: Any) -> Any:
        return self._step(rows, size).run(mode)[: len(rows)]

    def replay_logits(self, rows: Any, size: DraftSize) -> torch.Tensor:
        self._verified = self._step(rows, size).verify()
        return self._verified.logits[torch.tensor(places_of(rows, size))]

    def follow(self, rows: Any, size: DraftSize, sampled: Any, num_new: Any) -> None:
        step = self._steps[size]
        step.sampled[torch.tensor(places_of(rows, size))] = sampled
        step.num_new.zero_()
        step.num_new[: len(rows)] = 1 if num_new is None else num_new
        step.follow_given(self._verified)


def with_fixed_steps(engine: Engine) -> EagerDrafts:
    engine.runner.draft_graphs = drafts = EagerDrafts(engine)
    return drafts


@pytest.mark.bitwise
@pytest.mark.parametrize("name", ["hybrid_moe", "llama"])
def test_fixed_steps_say_what_plain_steps_say(name: str) -> None:
    """Rows with all drafts, some and none, right or wrong, greedy and sampled, in padded steps."""
    requests = [
        request(f"r{n}", prompt(n, n), max_tokens=30, temperature=0.9 * (n % 2), seed=n)
        for n in (1, 4, 60, 63, 64)
    ]
    requests = [dataclasses.replace(one, sampling=_without_logprobs(one)) for one in requests]
    settings: dict[str, Any] = {"max_rows": 6}
    plain = run(make_engine(SHALLOW_FAMILIES[name], **settings), *requests)
    engine = drafting_engine(SHALLOW_FAMILIES[name], plain, EVERY_PLACE, **settings)
    drafts = with_fixed_steps(engine)
    assert_same(plain, run(engine, *requests), in_bits=False)
    assert drafts.num_replayed > 10
    engine.policy.cache.check()


def _without_logprobs(one: Any) -> Any:
    return dataclasses.replace(one.sampling, logprobs=None)


@pytest.mark.thinned
@pytest.mark.bitwise
@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 1.3, "temperature": 0.8, "seed": 4},
        {"logit_bias": {5: 4.0, 6: 3.9, 17: -100.0}, "frequency_penalty": 2.0},
        {"min_tokens": 9, "end_token_ids": tuple(range(11, 320, 2))},
        {"logprobs": 2},
    ],
    ids=lambda sampling: next(iter(sampling)),
)
@pytest.mark.parametrize("drafter", ["scripted", "head"])
def test_logits_of_fixed_steps_may_be_changed_by_any_option(
    drafter: str, sampling: dict[str, Any]
) -> None:
    requests = [request(f"r{n}", prompt(n, n), max_tokens=24, **sampling) for n in (7, 62, 3)]
    plain = run(make_engine(WITH_HEAD), *requests)
    if drafter == "scripted":
        engine = drafting_engine(WITH_HEAD, plain)
    else:
        engine = make_engine(WITH_HEAD, speculate="mtp:3")
        engine.policy.speculator.pace = None
    drafts = with_fixed_steps(engine)
    assert_same(plain, run(engine, *requests))
    assert drafts.num_replayed > 3


@pytest.mark.bitwise
@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("num_drafts", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_fixed_steps_draft_what_the_head_drafts(num_drafts: int, overlap: bool) -> None:
    """The drafts equal those of steps of any size, with chunks, cache hits and rows that come and
    go.
    """
    requests = [
        request(f"r{n}", prompt(n, n), max_tokens=20, logprobs=None) for n in (1, 4, 63, 64, 150)
    ]
    requests += [request("hit", (*prompt(150, 150), *prompt(9)), max_tokens=20, logprobs=None)]
    settings: dict[str, Any] = {"max_step_tokens": 128, "overlap": overlap, "max_rows": 4}
    plain = run(make_engine(WITH_HEAD, **settings), *requests)
    counts = []
    for is_fixed in (False, True):
        engine = make_engine(WITH_HEAD, speculate=f"mtp:{num_drafts}", **settings)
        engine.policy.speculator.pace = None
        if is_fixed:
            with_fixed_steps(engine)
        assert_same(plain, run(engine, *requests), in_bits=False)
        engine.policy.cache.check()
        stats = engine.stats().drafts
        assert stats is not None
        counts.append(stats.counts)
    assert counts[0] == counts[1]
    assert counts[0][0].num_drafted > 20


@pytest.mark.bitwise
@pytest.mark.parametrize("sampling", [{"logprobs": None}, {"logprobs": 1}], ids=["graph", "host"])
def test_the_head_goes_on_from_the_last_token_that_a_row_gained(sampling: dict[str, Any]) -> None:
    """With random weights no draft is accepted, so a number is forced: then a reply depends on all
    drafts. Rows have different lengths, pages and numbers of accepted drafts. Sampling is part of
    the graph, or the host's.
    """
    requests = [
        request(f"r{n}", prompt(length, n), max_tokens=40, **sampling)
        for n, length in enumerate((3, 62, 130, 70), start=1)
    ]
    said = []
    for is_fixed in (False, True):
        engine = make_engine(WITH_HEAD, speculate="mtp:3", max_rows=6)
        engine.policy.speculator.pace = None
        engine.runner.rows.forced.copy_(torch.tensor([3, 1, 2, 0, 1, 2, -1]))
        if is_fixed:
            drafts = with_fixed_steps(engine)
        said.append({name: tokens_of(deltas) for name, deltas in run(engine, *requests).items()})
        engine.policy.cache.check()
    assert drafts.num_replayed > 10
    assert said[0] == said[1]


@pytest.mark.bitwise
@pytest.mark.parametrize("speculate", ["mtp:2", "ngram:2"])
def test_prompts_of_fixed_steps_beside_rows_that_draft(speculate: str) -> None:
    """Chunks, cache hits, several prompts at once, and decodes that replay earlier drafts. The head
    drafts the same as after prompts of any size.
    """
    shared = prompt(130, 3)
    first = [request(f"r{n}", prompt(n, n), max_tokens=40, logprobs=None) for n in (5, 64, 90)]
    later = [request(f"s{n}", (*shared, *prompt(n, n)), max_tokens=20) for n in (3, 70)]
    settings: dict[str, Any] = {"max_step_tokens": 128, "max_rows": 5}

    def replies(engine: Engine) -> dict[str, Any]:
        for one in first:
            engine.submit(one)
        said: dict[str, Any] = {}
        for number in range(400):
            if number in (6, 9):  # while others draft
                engine.submit(later[number == 9])
            for delta in engine.step():
                said.setdefault(delta.request_id, []).append(delta)
        assert not engine.has_work
        return said

    plain = replies(make_engine(WITH_HEAD, **settings))
    counts = []
    for is_fixed in (False, True):
        engine = make_engine(WITH_HEAD, speculate=speculate, **settings)
        engine.policy.speculator.pace = None
        drafts = with_fixed_steps(engine)
        engine.policy.speculator.most_drafts = DraftLimits(drafts.sizes).most
        if is_fixed:
            engine.runner.prefill_graphs = prompts = EagerPrompts(engine, max_step_tokens=256)
        assert_same(plain, replies(engine))
        engine.policy.cache.check()
        stats = engine.stats().drafts
        assert stats is not None
        counts.append(stats.counts)
    assert len(prompts.replayed) > 3
    assert counts[0] == counts[1]


def test_a_state_is_kept_where_a_fixed_step_passed_a_page() -> None:
    one = request("one", prompt(60), max_tokens=90, logprobs=None)
    plain = run(make_engine(WITH_HEAD, deterministic=False), one)
    said = tuple(tokens_of(plain["one"]))
    engine = drafting_engine(WITH_HEAD, plain, [1, 3, 0, 2], deterministic=False)
    with_fixed_steps(engine)
    assert tokens_of(run(engine, one)["one"]) == list(said)
    engine.policy.cache.check()
    two = request("two", (*prompt(60), *said, *prompt(9, 2)))
    again = run(engine, two)["two"]
    assert again[0].num_cached_tokens == 128
    fresh = run(make_engine(WITH_HEAD, deterministic=False), two)["two"]
    assert tokens_of(again) == tokens_of(fresh)


@torch.inference_mode()
def test_warm_up_writes_to_no_sequences_memory() -> None:
    engine = make_engine(WITH_HEAD, max_rows=10, memory_gb=0.05, speculate="mtp:2")
    runner = engine.runner
    assert runner.drafter is not None
    caches = [*runner.caches, runner.drafter.cache]
    tensors = [getattr(cache, name) for cache in caches for name in cache.__slots__]
    tensors = [one for one in tensors if isinstance(one, torch.Tensor)]
    for tensor in tensors:
        tensor.normal_()
    before = [tensor.clone() for tensor in tensors]
    table = runner.rows
    kept = [table.context_len.clone(), table.last_token.clone(), table.num_accepted.clone()]
    warm_up([EagerDrafts(engine).warmup])
    for tensor, was in zip(tensors, before):
        assert torch.equal(tensor[1:], was[1:])
    seen = (table.context_len, table.last_token, table.num_accepted)
    assert all(torch.equal(now, was) for now, was in zip(seen, kept))


class HostEvent:
    """A CUDA event that reads the host's clock."""

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: HostEvent) -> float:
        return 1e3 * (end.at - self.at)


@torch.inference_mode()
def test_steps_are_timed_by_shape_and_leave_no_row_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(WITH_HEAD, max_rows=4, speculate="mtp:2")
    runner = engine.runner

    class Plain:
        def size_for(self, rows: Any) -> int:
            return len(rows)

        def replay(self, rows: Any, size: int, mode: Any) -> torch.Tensor:
            step = DecodeStep(runner.model, runner.caches, runner.rows, size, True)
            step.load(rows)
            return step.run(mode)

    runner.graphs = Plain()  # type: ignore[assignment]
    with_fixed_steps(engine)
    monkeypatch.setattr(torch.cuda, "Event", HostEvent)
    seconds = measure_steps(runner)
    assert seconds.keys() == {(rows, width) for rows in (1, 2, 4) for width in (1, 2, 3)}
    assert min(seconds.values()) > 0
    states = [cache.recurrent for cache in runner.caches if isinstance(cache, StateCache)]
    assert not any(bool(state[1:].any()) for state in states)
    table, drafter = runner.rows, runner.drafter
    assert table.context_len.tolist() == [1] * 5
    assert drafter is not None
    left = (table.last_token, table.num_accepted, table.drafts, drafter.hidden)
    assert not any(bool(one.any()) for one in left)
    plain = run(make_engine(WITH_HEAD, max_rows=4), request("x", prompt(70), max_tokens=9))
    runner.graphs = None
    assert_same(plain, run(engine, request("x", prompt(70), max_tokens=9)))


def plan(row: int, num_drafts: int = 0, **given: Any) -> RowPlan:
    return dataclasses.replace(RowPlan.decode(row, max_tokens=1 + num_drafts), **given)


def test_a_step_takes_the_shape_with_the_least_work() -> None:
    drafts = EagerDrafts(make_engine(LLAMA, max_rows=40, speculate="ngram:7"))
    for counts, expected in (
        ([1], (1, 1)),
        ([2], (1, 2)),
        ([5], (1, 7)),
        ([0, 0, 3], (4, 3)),
        ([1] * 9, (16, 1)),
        ([0] * 33, (40, 1)),  # replays the drafts of the previous step
    ):
        rows = [plan(row, count) for row, count in enumerate(counts)]
        assert drafts.size_for(rows) == DraftSize(*expected)
    assert drafts.size_for([plan(row, 2) for row in range(9)]) is None
    assert drafts.size_for([plan(0, 1), RowPlan(1, 0, (5, 6), True)]) is None


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 5, 15])
@pytest.mark.parametrize("max_rows", [1, 6, 100, 256])
def test_shapes_are_few_and_every_allowed_draft_has_one(max_rows: int, num_drafts: int) -> None:
    sizes = draft_sizes(max_rows, num_drafts)
    limits = DraftLimits(sizes)
    assert len(sizes) == len(set(sizes)) <= 30
    assert all(size.num_drafts <= num_drafts and size.num_places <= 128 for size in sizes)
    for num_rows in range(1, max_rows + 1):
        most = limits.most(num_rows)
        assert bool(most) == (num_rows <= 64 and num_drafts > 0)
        if most:
            assert any(one.num_rows >= num_rows and one.num_drafts == most for one in sizes)
    assert limits.most(1) == num_drafts


def test_plain_graphs_are_for_rows_without_drafts_behind_them() -> None:
    table = make_engine(LLAMA, max_rows=4, speculate="ngram:3").runner.rows
    rows = (plan(0), plan(1, 2), plan(2))
    assert not table.must_replay(rows)
    table.note_launched(rows)
    assert table.must_replay(rows)
    assert not table.must_replay(rows[:1])
    assert table.must_replay((plan(2, keep=KeptState(64, 3)),))
    table.note_launched((plan(1),))
    assert not table.must_replay(rows)


def test_a_step_with_drafts_uploads_its_rows_only_when_they_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The head's drafts are on the device: only the host's drafts change the inputs."""
    runner = make_engine(LLAMA, max_rows=4, speculate="ngram:2").runner
    table, size, staged = runner.rows, DraftSize(2, 2), list[Any]()
    given = (runner.model, runner.caches, table, None, size, True)
    step, stage = DraftStep(*given), table.stage

    def count(values: Any) -> torch.Tensor:
        staged.append(values)
        return stage(values)

    for plans, is_new in (
        ((plan(3, 2),), True),
        ((plan(3, 2),), False),
        ((plan(3, 2, draft_ids=(7, 8)),), True),
        ((plan(3, 2, draft_ids=(7, 8)),), False),
        ((plan(3, 2, draft_ids=(7, 9)),), True),
        ((plan(3, 1, draft_ids=(7,)), plan(1, 2)), True),
        ((plan(3, 1, draft_ids=(7,)), plan(1, 2)), False),
        ((plan(3, 1, draft_ids=(7,)), plan(1, 2, keep=KeptState(64, 3))), True),
        ((plan(1, 2),), True),
    ):
        fresh = DraftStep(*given)
        fresh.load(plans)
        with monkeypatch.context() as patched:
            patched.setattr(table, "stage", count)
            staged.clear()
            step.load(plans)
        assert len(staged) == is_new
        assert torch.equal(step.packed, fresh.packed)


ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
GPU_CASES = [pytest.param(dtype, marks=ON_GPU) for dtype in ("float32", "bfloat16")]
TIES = {"float32": 0.0, "bfloat16": 0.05}  # gap of log-probabilities that rounding may swap


def assert_same_up_to_ties(plain: Any, drafted: Any, dtype: str) -> int:
    """Counts equal tokens. Where a reply first differs, the plain one has a near tie."""
    num_same = 0
    for id, deltas in plain.items():
        expected = [one for delta in deltas for one in delta.logprobs]
        for one, token in zip(expected, tokens_of(drafted[id]), strict=True):
            if token != one.token_id:
                likely = dict(one.top)
                assert token in likely, f"{id} says {token}, the likeliest were {likely}"
                assert one.logprob - likely[token] < TIES[dtype]
                break
            num_same += 1
    return num_same


def gpu_settings(dtype: str, **more: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"device": "cuda", "dtype": dtype, "memory_gb": 0.3, "graphs": True}
    return given | {"deterministic": True, "max_rows": 6, **more}


def replies_without_pace(engine: Engine, requests: list[Any]) -> Any:
    engine.policy.speculator.pace = None
    return run(engine, *requests)


@pytest.mark.parametrize("dtype", GPU_CASES)
@pytest.mark.parametrize("speculate", ["mtp:1", "mtp:3", "ngram:3", "suffix:7"])
def test_captured_drafts_say_what_plain_graphs_say(speculate: str, dtype: str) -> None:
    """Greedy and sampled rows, prompts of all lengths, chunks, a prefix hit, and rows without
    drafts.
    """
    shared = prompt(150, 9)
    warmth = 0.7 if dtype == "float32" else 0.0  # in bf16, rounding could change any sampled token
    requests = [
        request(f"r{n}", prompt(n, n), max_tokens=40, temperature=warmth * (n % 2), seed=n)
        for n in (1, 4, 63, 64, 65, 200)
    ]
    requests += [request(f"hit{n}", (*shared, *prompt(n, n)), max_tokens=40) for n in (5, 9)]
    requests += [request("biased", prompt(30, 3), max_tokens=40, logit_bias={7: 1.0})]
    settings = gpu_settings(dtype, max_step_tokens=256)
    plain = run(make_engine(WITH_HEAD, **settings), *requests)
    engine = make_engine(WITH_HEAD, speculate=speculate, **settings)
    assert engine.runner.draft_graphs is not None
    quiet = [dataclasses.replace(one, sampling=_without_logprobs(one)) for one in requests]
    for asked in (requests, quiet):  # sampling outside the graph, and inside
        drafted = replies_without_pace(engine, asked)
        num_same = assert_same_up_to_ties(plain, drafted, dtype)
        assert num_same >= (9 * 40 if dtype == "float32" else 100)
        engine.policy.cache.check()


@pytest.mark.parametrize("dtype", GPU_CASES)
def test_captured_drafts_that_are_right_are_accepted_and_replayed(dtype: str) -> None:
    """Tests the journal in a graph: any number of drafts, right up to any place."""
    requests = [request(f"r{n}", prompt(n, n), max_tokens=60) for n in (3, 62, 64, 130)]
    settings = gpu_settings(dtype)
    plain = run(make_engine(WITH_HEAD, **settings), *requests)
    engine = drafting_engine(WITH_HEAD, plain, EVERY_PLACE, **settings)
    drafted = run(engine, *requests)
    num_same = assert_same_up_to_ties(plain, drafted, dtype)
    assert num_same >= (4 * 60 if dtype == "float32" else 60)
    stats = engine.stats().drafts
    assert stats is not None
    assert stats.num_tokens > 1.2 * stats.num_decodes


@pytest.mark.parametrize("dtype", GPU_CASES)
def test_preempted_rows_come_back_to_captured_drafts(dtype: str) -> None:
    requests = [request(f"r{i}", prompt(60 + i, i), max_tokens=100) for i in range(4)]
    plain = run(make_engine(LLAMA, **gpu_settings(dtype)), *requests)
    # 4 replies of 160 tokens in 9 pages of 64 force preemption.
    engine = drafting_engine(LLAMA, plain, EVERY_PLACE, **gpu_settings(dtype, max_model_len=192))
    cache = engine.policy.cache
    taken = [cache._pages.take() for _ in range(max(0, cache.num_free_pages - 9))]
    drafted = run(engine, *requests)
    assert taken
    assert engine.stats().num_preemptions > 0
    assert_same_up_to_ties(plain, drafted, dtype)


@pytest.mark.parametrize("dtype", GPU_CASES)
def test_no_step_with_drafts_synchronises(dtype: str) -> None:
    """The host launches ten steps with the head's drafts and reads nothing in between."""
    engine = make_engine(
        WITH_HEAD, speculate="mtp:3", **gpu_settings(dtype, prefix_cache=False, max_rows=3)
    )
    requests = [request(f"r{row}", prompt(60, row), max_tokens=45) for row in range(3)]
    plain_settings = gpu_settings(dtype, prefix_cache=False, max_rows=3)
    plain = run(make_engine(WITH_HEAD, **plain_settings), *requests)
    first = prefill_rows(engine, num_rows=3, length=60)
    rows = tuple(dataclasses.replace(one, max_tokens=4) for one in first)
    with synchronising_is_an_error():
        pending = [engine.runner.launch(StepPlan(1, rows)) for _ in range(10)]
    seen = [one.wait().token_ids for one in pending]
    for row in range(3):
        said = [token for step in seen for token in step[row]]
        assert len(said) >= 10
        expected = tokens_of(plain[f"r{row}"])[1 : 1 + len(said)]
        if dtype == "float32":
            assert said == expected
    table = engine.runner.rows
    assert (int(table.context_len[-1]), int(table.last_token[-1])) == (1, 0), "padding"


@pytest.mark.parametrize("dtype", GPU_CASES)
def test_prompts_beside_rows_that_draft_do_not_synchronise(dtype: str) -> None:
    """Planned and launched as an engine does: drafts, a prompt beside them, drafts of both."""
    engine = make_engine(WITH_HEAD, speculate="mtp:2", **gpu_settings(dtype, max_step_tokens=256))
    engine.policy.speculator.pace = None
    run(engine, request("warm", prompt(80), logprobs=None))
    num_drafted = num_prompts = 0
    for number in range(8):
        if number in (0, 4):
            engine.submit(request(f"r{number}", prompt(70, number), max_tokens=40, logprobs=None))
        with synchronising_is_an_error():
            plan = engine.policy.plan()
            assert plan is not None
            pending = engine.runner.launch(plan)
        num_drafted += plan.has_drafts
        num_prompts += not plan.is_decode
        engine.policy.commit(pending.wait())
    assert num_drafted >= 5
    assert num_prompts == 2
