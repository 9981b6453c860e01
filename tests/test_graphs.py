"""Decode steps of fixed sizes: padding, static buffers and graph capture change nothing."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from eager_prompts import EagerPrompts
from penstock import ops
from penstock.config import EngineConfig
from penstock.engine import runner as runner_module
from penstock.engine.device_part import check_page_size
from penstock.engine.engine import Engine
from penstock.engine.graph_sizes import graph_sizes
from penstock.engine.graphs import (
    DecodeGraphs,
    DecodeStep,
    Warmup,
    launch_in_threads,
    num_compile_threads,
    run_for_last_tokens,
    warm_up,
    warmup_layers,
)
from penstock.engine.prefill_graphs import PrefillGraphs, PrefillStep, prefill_sizes
from penstock.engine.row_table import SamplingNeeds
from penstock.engine.runner import WAYS
from penstock.engine.step_inputs import StepSize
from penstock.errors import ConfigError
from penstock.types import (
    PooledChunk,
    Pooling,
    PromptTargets,
    RowPlan,
    SamplingParams,
    StepPlan,
)
from small_models import SHALLOW_FAMILIES, make_engine, prompt, request, run, tokens_of


@pytest.fixture(params=SHALLOW_FAMILIES)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return SHALLOW_FAMILIES[request.param]


@pytest.mark.parametrize("max_rows", [1, 2, 3, 7, 8, 9, 64, 100, 256])
def test_every_number_of_rows_has_a_size_that_pads_little(max_rows: int) -> None:
    sizes = graph_sizes(max_rows)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_rows
    for num_rows in range(1, max_rows + 1):
        size = min(size for size in sizes if size >= num_rows)
        assert size - num_rows <= max(7, num_rows // 4)


def test_launching_ahead_writes_to_no_sequences_memory_and_keeps_none(
    config: dict[str, Any],
) -> None:
    """Before any capture, all kinds of steps run at the same time, to compile their kernels."""
    engine = make_engine(config, max_rows=20, memory_gb=0.05)
    runner = engine.runner
    stored = [getattr(cache, name) for cache in runner.caches for name in cache.__slots__]
    tensors = [tensor for tensor in stored if tensor is not None]
    for tensor in tensors:
        tensor.normal_()
    before = [tensor.clone() for tensor in tensors]
    given = (runner.model, runner.caches, runner.rows, True)
    launches = [DecodeGraphs(*given).warmup, PrefillGraphs(*given, max_step_tokens=128).warmup]
    num_prompts, num_beside = len({64, 128}), len({0, 1, 4, 16})
    assert [len(kind.ahead) for kind in launches] == [
        len({1, 2, 4, 8, 16, 20}),
        num_prompts * num_beside,
    ]
    assert [len(kind.after) for kind in launches] == [len(graph_sizes(20)) - 6 + 1, 1]
    warm_up(launches)
    for tensor, was in zip(tensors, before):
        assert torch.equal(tensor[1:], was[1:])
    for cache in runner.caches:
        cache.zero_padding()
    assert not any(tensor[0].any() for tensor in tensors)


def test_what_finds_no_memory_among_others_is_launched_later() -> None:
    launched = []

    def launch(number: int) -> None:
        if threading.current_thread() is not threading.main_thread() and number % 2:
            raise torch.OutOfMemoryError
        launched.append(number)

    launches = [partial(launch, number) for number in range(6)]
    assert launch_in_threads(launches) == launches[1::2]
    warm_up([Warmup(ahead=launches[:4], after=launches[4:])])
    assert sorted(launched) == sorted([0, 2, 4, *range(6)])
    with pytest.raises(ZeroDivisionError):
        launch_in_threads([lambda: 1 / 0])


@pytest.mark.parametrize(("free_gb", "num_threads"), [(0.4, 1), (2.7, 2), (9.7, 9), (80, 16)])
def test_scarce_memory_has_few_threads_that_compile(
    free_gb: float, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread keeps a handle of a library, whose memory is never returned."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(free_gb * 1e9), 0))
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert num_compile_threads() == num_threads


def test_pages_that_kernels_cannot_read_are_refused_on_a_gpu() -> None:
    """A captured prompt would read no keys."""
    check_page_size(EngineConfig(page_size=24), torch.device("cpu"))
    check_page_size(EngineConfig(page_size=48), torch.device("cuda"))
    with pytest.raises(ConfigError, match="page_size is 24") as error:
        check_page_size(EngineConfig(page_size=24), torch.device("cuda"))
    assert "multiple of 16" in error.value.todo


def test_steps_may_be_too_short_for_any_captured_prompt() -> None:
    runner = make_engine(SHALLOW_FAMILIES["llama"], max_rows=2).runner
    launches = PrefillGraphs(
        runner.model, runner.caches, runner.rows, True, max_step_tokens=32
    ).warmup
    assert not launches.ahead
    assert not launches.after


@torch.inference_mode()
def test_where_nothing_may_depend_on_others_all_tokens_are_computed_alike(
    config: dict[str, Any],
) -> None:
    """A request for the scores of a prompt makes a step compute all of its tokens."""
    runner = make_engine(config, max_rows=2, prefix_cache=False).runner
    runner.rows.page_table[:2, :2] = torch.tensor([[1, 2], [3, 4]])
    asked = []

    def forward(*given: Any, only_last: bool = False) -> torch.Tensor:
        asked.append(only_last)
        return type(runner.model).forward(runner.model, *given, only_last=only_last)

    runner.model.forward = forward
    rows = [RowPlan(0, 0, tuple(prompt(5, 1)), True, slot=1)]
    for deterministic in (False, True):
        inputs = runner.rows.step_inputs(rows, deterministic)
        assert run_for_last_tokens(runner.model, inputs, runner.caches).shape[0] == 1
    assert asked == [True, False]


def ops_of(run: Callable[[], object]) -> set[str]:
    """The ops that run, with their shapes and numbers."""
    seen = set()

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in op_code:
            found = frame.f_locals
            given = tree_map(_shape_or_number, (found["args"], found["kwargs"]))
            seen.add(f"{found['reference'].__name__} {given}")

    op_code = {ops.rms_norm.__code__}  # the same function decorates all ops
    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
    return seen


def _shape_or_number(given: object) -> object:
    if isinstance(given, torch.Tensor):
        return tuple(given.shape)
    return given if isinstance(given, int | float | bool | None) else type(given).__name__


@torch.inference_mode()
def test_an_excerpt_launches_whatever_the_model_launches(config: dict[str, Any]) -> None:
    """It runs before the capture of all layers, when nothing can be compiled any more."""
    config = {**config, "num_hidden_layers": 2 * config["num_hidden_layers"]}
    if "layer_types" in config:
        config["layer_types"] = 2 * config["layer_types"]
    runner = make_engine(config, max_rows=8).runner
    warmup_caches = warmup_layers(runner.model, runner.caches)
    assert sum(cache is not None for cache in warmup_caches) <= 3
    for new_step in (
        lambda caches: DecodeStep(runner.model, caches, runner.rows, 3, False).logits,
        lambda caches: (
            PrefillStep(runner.model, caches, runner.rows, StepSize(1, 2, 64), False).run
        ),
    ):
        whole = ops_of(new_step(runner.caches))
        assert len(whole) > 4
        assert ops_of(new_step(warmup_caches)) == whole


def test_layers_that_differ_in_a_number_are_of_two_kinds() -> None:
    """As in models where only some layers have a sliding window."""
    config = SHALLOW_FAMILIES["llama"] | {
        "num_hidden_layers": 8,
        "use_sliding_window": True,
        "sliding_window": 32,
    }
    config |= {"model_type": "qwen2", "max_window_layers": 5}
    runner = make_engine(config).runner
    warmup_caches = warmup_layers(runner.model, runner.caches)
    assert [cache is not None for cache in warmup_caches] == [
        index in (0, 5, 7) for index in range(8)
    ]


@torch.inference_mode()
def test_last_tokens_alone_are_what_they_are_among_all(config: dict[str, Any]) -> None:
    """Prompts and decodes, after others or not; the caches end up the same."""
    engines = [make_engine(config, max_rows=4, prefix_cache=False) for _ in range(2)]
    plans = (
        [
            RowPlan(0, 0, tuple(prompt(5, 1)), True, slot=1),
            RowPlan(1, 0, tuple(prompt(70, 2)), False, slot=2),
        ],
        [RowPlan(0, 5, (7,), True, slot=1), RowPlan(1, 70, tuple(prompt(3, 4)), True, slot=2)],
    )
    for rows in plans:
        results = []
        for engine, only_last in zip(engines, (False, True)):
            runner = engine.runner
            runner.rows.page_table[:2, :2] = torch.tensor([[1, 2], [3, 4]])
            inputs = runner.rows.step_inputs(rows, deterministic=True)
            hidden = runner.model(inputs, runner.caches, only_last)
            results.append(hidden if only_last else hidden[inputs.last_tokens])
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
        for ours, theirs in zip(*(engine.runner.caches for engine in engines)):
            for name in ours.__slots__:
                if getattr(ours, name) is not None:
                    assert torch.equal(getattr(ours, name), getattr(theirs, name))


class Sizes:
    """Graphs with a single size, which takes every step of its kind."""

    def __init__(self, wants_decodes: bool) -> None:
        self.wants_decodes = wants_decodes

    def size_for(self, rows: Any) -> int | None:
        return 1 if all(row.is_decode for row in rows) == self.wants_decodes else None


DECODE, CHUNK, LAST_CHUNK = (
    RowPlan.decode(0),
    RowPlan(1, 0, (1, 2), True),
    RowPlan(1, 64, (1,), True),
)


@pytest.mark.parametrize(
    ("rows", "masked", "sampling", "with_graphs", "without"),
    [
        ((DECODE,), False, {}, "sampled graph", "eager"),
        ((DECODE,), True, {}, "decode graph", "eager"),
        ((DECODE,), False, {"logprobs": 1}, "decode graph", "eager"),
        ((DECODE, CHUNK), False, {}, "prefill graph", "eager"),
        ((DECODE, LAST_CHUNK), True, {"logprobs": 1}, "prefill graph", "eager"),
        (
            (DECODE, replace(CHUNK, pooled=PooledChunk(Pooling(), True))),
            False,
            {},
            "eager",
            "eager",
        ),
        (
            (DECODE, replace(CHUNK, pooled=PooledChunk(Pooling(kind="mean"), False))),
            False,
            {},
            "eager, all states",
            "eager, all states",
        ),
        (
            (replace(CHUNK, prompt_targets=PromptTargets((2, 3), 0)),),
            True,
            {},
            "eager, all states",
            "eager, all states",
        ),
    ],
)
def test_one_table_says_how_a_step_is_launched(
    rows: tuple[RowPlan, ...],
    masked: bool,
    sampling: dict[str, Any],
    with_graphs: str,
    without: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = make_engine(SHALLOW_FAMILIES["llama"], max_rows=2).runner
    needs = SamplingNeeds((SamplingParams(**sampling),), has_forbidden_ends=False)
    plan, launched = StepPlan(0, rows), []
    watched = [replace(way, launch=lambda *_, name=way.name: launched.append(name)) for way in WAYS]
    monkeypatch.setattr(runner_module, "WAYS", watched)
    captured = replace(runner, graphs=Sizes(True), prefill_graphs=Sizes(False))  # type: ignore[arg-type]
    for one in (captured, runner):
        one._launch(plan, runner_module._wanted(plan, needs, masked), needs)
    assert launched == [with_graphs, without]


@pytest.mark.parametrize("size", [3, 5])
@torch.inference_mode()
def test_a_padded_step_draws_what_the_plain_step_draws(config: dict[str, Any], size: int) -> None:
    """Three rows in a step of fixed size: greedy, sampled and filtered, step after step."""
    lengths = (1, 63, 64)
    sampling = ({}, {"temperature": 0.9, "seed": 3}, {"temperature": 0.8, "top_k": 5, "seed": 4})
    requests = [
        request(f"r{n}", prompt(n, n), max_tokens=6, logprobs=None, **params)
        for n, params in zip(lengths, sampling)
    ]
    settings: dict[str, Any] = {"max_rows": 6, "deterministic": True, "prefix_cache": False}
    expected = run(make_engine(config, **settings), *requests)

    engine = make_engine(config, **settings)
    runner = engine.runner
    step = DecodeStep(runner.model, runner.caches, runner.rows, size, deterministic=True)

    class Eager:
        """Replaces `DecodeGraphs` without the graph."""

        size_for = DecodeGraphs.size_for
        _steps = (size,)

        def replay(self, rows: Any, size: int, mode: Any) -> torch.Tensor:
            step.load(rows)
            return step.run(mode)[: len(rows)]

    runner.graphs = Eager()  # type: ignore[assignment]
    seen = run(engine, *requests)
    for id in expected:
        assert tokens_of(seen[id]) == tokens_of(expected[id])


def test_a_step_uploads_its_rows_only_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two alternating sizes: each one compares with its own last input."""
    runner = make_engine(SHALLOW_FAMILIES["hybrid_moe"], max_rows=6).runner
    table, staged = runner.rows, list[Any]()
    small, large = (
        DecodeStep(runner.model, runner.caches, table, size, deterministic=True) for size in (2, 3)
    )
    stage = table.stage

    def count(values: Any) -> torch.Tensor:
        staged.append(values)
        return stage(values)

    monkeypatch.setattr(table, "stage", count)
    one, other = RowPlan.decode(4, 1, 1), RowPlan.decode(2, 3, 3)
    for step, plans, is_new in (
        (small, (one,), True),
        (small, (one,), False),
        (small, (replace(one),), False),  # equal, but not the same object
        (large, (one,), True),
        (small, (one,), False),
        (small, (one, other), True),
        (large, (one,), False),
        (small, (other, one), True),
        (small, (other, replace(one, slot=5)), True),  # its state goes to another slot
        (small, (other, replace(one, slot=5)), False),
        (small, (other,), True),  # a padding row where the other one was
        (large, (one,), False),
    ):
        staged.clear()
        step.load(plans)
        assert len(staged) == is_new
        columns = [[plan.row, 1, plan.slot, plan.initial_slot] for plan in plans]
        columns += [[table.padding_row, 0, 0, 0]] * (step.size - len(plans))
        assert step.packed.T.tolist() == columns


@torch.inference_mode()
def test_steps_that_keep_their_rows_say_what_steps_with_new_rows_say(
    config: dict[str, Any],
) -> None:
    """Two alternating sizes, while replies end, another prompt gets a used row, and states move to
    other slots at page ends.
    """
    lengths = ((1, 9), (63, 30), (64, 70), (5, 20))
    requests = [
        request(f"r{n}", prompt(n, n), max_tokens=most, logprobs=None) for n, most in lengths
    ]

    class Alternating:
        """Graphs of two sizes, without the graphs: steps alternate between them."""

        size_for = DecodeGraphs.size_for
        _steps = (3,)

        def __init__(self, engine: Engine, keeps_rows: bool) -> None:
            runner = engine.runner
            self.new_step = partial(
                DecodeStep, runner.model, runner.caches, runner.rows, deterministic=False
            )
            self.keeps_rows = keeps_rows
            self.steps = [self.new_step(size=size) for size in (3, 5)]

        def replay(self, rows: Any, size: int, mode: Any) -> torch.Tensor:
            self.steps.reverse()
            step = self.steps[0] if self.keeps_rows else self.new_step(size=self.steps[0].size)
            step.load(rows)
            return step.run(mode)[: len(rows)]

    replies = []
    for keeps_rows in (False, True):
        engine = make_engine(config, max_rows=3, deterministic=False)
        engine.runner.graphs = Alternating(engine, keeps_rows)  # type: ignore[assignment]
        replies.append(run(engine, *requests))
    for id in replies[0]:
        assert tokens_of(replies[1][id]) == tokens_of(replies[0][id])


@pytest.mark.thinned
@pytest.mark.parametrize("num_decodes", [2, 4])
@torch.inference_mode()
def test_prompts_in_steps_of_a_fixed_size_give_what_plain_steps_give(
    config: dict[str, Any], num_decodes: int
) -> None:
    """Chunks of prompts beside decodes, with prefixes restored and saved on the way."""
    shared = prompt(150, 1)
    requests = [
        request("a", shared, max_tokens=6),
        request("b", (*shared, *prompt(30, 2)), max_tokens=6),
        request("c", prompt(70, 3), max_tokens=6),
        request("d", prompt(1, 4), max_tokens=6),
        request("e", shared, max_tokens=6),
    ]
    settings: dict[str, Any] = {"max_rows": 4, "deterministic": True, "max_step_tokens": 128}
    expected = run(make_engine(config, **settings), *requests)

    engine = make_engine(config, **settings)
    size = StepSize(num_decodes, 2, 128)
    engine.runner.prefill_graphs = eager = EagerPrompts(engine, 128, [size])
    seen = run(engine, *requests)
    assert len(eager.replayed) > 3
    for id in expected:
        assert tokens_of(seen[id]) == tokens_of(expected[id])


@pytest.mark.parametrize(
    ("lengths", "num_decodes", "found"),
    [
        ([1024], 0, 1024),
        ([1025], 0, None),  # a graph of 2,048 would take twice as long
        ([1792], 0, 2048),
        ([1791], 0, None),
        ([1024] * 8, 0, 8192),
        ([1024] * 7, 0, 8192),
        ([1024] * 6 + [1023], 0, None),
        ([900] * 8, 0, 8192),
        ([910] * 9, 0, None),  # more prompts than any graph has
        ([8193], 0, None),
        ([1024] * 8, 1, None),  # decodes are in short prefills only
    ],
)
def test_a_long_prefill_is_captured_if_it_fills_a_size(
    lengths: list[int], num_decodes: int, found: int | None
) -> None:
    runner = make_engine(SHALLOW_FAMILIES["llama"], max_rows=20).runner
    graphs = PrefillGraphs(runner.model, runner.caches, runner.rows, True, max_step_tokens=32768)
    rows = [RowPlan(row, 0, (1,) * length, True) for row, length in enumerate(lengths)]
    rows += [RowPlan.decode(len(rows) + row) for row in range(num_decodes)]
    size = graphs.size_for(rows)
    assert (None if size is None else size.num_prompt_tokens) == found


LONG_SETTINGS: dict[str, Any] = {
    "max_rows": 4,
    "deterministic": True,
    "max_step_tokens": 8192,
    "max_model_len": 2304,
    "memory_gb": 0.2,
}


def long_replies(engine: Any) -> list[list[int]]:
    """A prompt that nearly fills 2,048 tokens, two that do so together, and the first with an
    extension, which begins with cached pages.
    """
    first = request("first", prompt(1900, 1), max_tokens=6)
    two = [request(f"two {n}", prompt(n, n), max_tokens=6) for n in (950, 1001)]
    later = request("later", (*first.token_ids, *prompt(250, 2)), max_tokens=6)
    replies = [run(engine, first), run(engine, *two), run(engine, later)]
    return [tokens_of(reply[id]) for reply in replies for id in sorted(reply)]


def long_sizes(replayed: list[StepSize]) -> list[int]:
    return [size.num_prompt_tokens for size in replayed if size.num_prompt_tokens > 1024]


@pytest.mark.bitwise
def test_long_prompts_in_steps_of_a_fixed_size_give_what_plain_steps_give() -> None:
    config = SHALLOW_FAMILIES["hybrid_moe"]
    engine = make_engine(config, **LONG_SETTINGS)
    engine.runner.prefill_graphs = eager = EagerPrompts(engine, LONG_SETTINGS["max_step_tokens"])
    assert long_replies(engine) == long_replies(make_engine(config, **LONG_SETTINGS))
    assert long_sizes(eager.replayed) == [2048, 2048]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_long_prompts_with_graphs_on_and_off_give_the_same_tokens(
    config: dict[str, Any], dtype: str
) -> None:
    settings = {**LONG_SETTINGS, "device": "cuda", "dtype": dtype}
    expected = long_replies(make_engine(config, graphs=False, **settings))
    engine = make_engine(config, graphs=True, **settings)
    graphs = engine.runner.prefill_graphs
    assert graphs is not None
    replay, replayed = graphs.replay, list[StepSize]()

    def count(rows: Any, size: StepSize) -> torch.Tensor:
        replayed.append(size)
        return replay(rows, size)

    graphs.replay = count  # type: ignore[method-assign]
    assert long_replies(engine) == expected
    assert long_sizes(replayed) == [2048, 2048]


def test_small_steps_have_no_long_graphs() -> None:
    """On a small GPU, they would take memory from the cache."""
    longest = {most: prefill_sizes(64, most)[-1].num_tokens for most in (4096, 16384, 32768)}
    assert longest == {4096: 1024 + 32, 16384: 4096, 32768: 8192}
    runner = make_engine(SHALLOW_FAMILIES["llama"], max_rows=2).runner
    graphs = PrefillGraphs(runner.model, runner.caches, runner.rows, True, max_step_tokens=32768)
    last = graphs.warmup.after[-1]
    assert last.args[0].size.num_tokens == 8192  # type: ignore[attr-defined]


def test_sizes_are_tried_from_the_cheapest_on() -> None:
    sizes = prefill_sizes(max_rows=64, max_step_tokens=512)
    assert sizes == sorted(sizes, key=lambda size: (size.num_prompt_tokens, size.num_decodes))
    assert max(size.num_prompt_tokens for size in sizes) == 512
    assert all(size.num_decodes < 64 for size in sizes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_on_and_off_give_the_same_tokens(config: dict[str, Any], dtype: str) -> None:
    requests = [request(f"r{n}", prompt(n, n), max_tokens=40) for n in (1, 63, 64, 65, 200)]
    settings: dict[str, Any] = {
        "device": "cuda",
        "dtype": dtype,
        "memory_gb": 0.2,
        "deterministic": True,
    }
    expected = run(make_engine(config, graphs=False, **settings), *requests)
    engine = make_engine(config, graphs=True, **settings)
    seen = run(engine, *requests)
    alone = run(engine, requests[3])["r65"]
    for id in expected:
        assert tokens_of(seen[id]) == tokens_of(expected[id])
    assert tokens_of(alone) == tokens_of(expected["r65"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_prompt_goes_on_from_the_state_that_a_captured_reply_left(config: dict[str, Any]) -> None:
    """Another reply is decoded beside it: at the end of a page, a row starts to write to another
    slot.
    """
    settings: dict[str, Any] = {
        "device": "cuda",
        "dtype": "float32",
        "memory_gb": 0.2,
        "deterministic": False,
        "graphs": True,
    }
    engine = make_engine(config, **settings)
    first = request("first", prompt(70, 1), max_tokens=150, logprobs=None)
    beside = request("beside", prompt(40, 2), max_tokens=170, logprobs=None)
    replies = run(engine, first, beside)
    tokens = (*first.token_ids, *tokens_of(replies["first"]))
    second = request("second", (*tokens, *prompt(9, 3)), max_tokens=30, logprobs=None)
    warm = run(engine, second)["second"]
    cold = run(make_engine(config, prefix_cache=False, **settings), second)["second"]
    assert warm[0].num_cached_tokens is not None
    assert warm[0].num_cached_tokens >= 192, "the reply's own pages are not computed again"
    assert tokens_of(warm) == tokens_of(cold)
