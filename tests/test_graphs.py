"""Decode steps of fixed sizes: padding and static buffers change nothing, nor does capturing them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.engine.graphs import DecodeStep, graph_sizes, is_decode
from penstock.engine.packing import RowCounts, StepSize
from penstock.engine.prompt_graphs import PromptStep, prompt_sizes
from penstock.types import RowPlan, StepPlan
from small_models import FAMILIES, make_engine, prompt, request, run, tokens_of


@pytest.fixture(params=FAMILIES)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return FAMILIES[request.param]


@pytest.mark.parametrize("max_rows", [1, 2, 3, 7, 8, 9, 64, 100, 256])
def test_every_number_of_rows_has_a_size_that_pads_little(max_rows: int) -> None:
    sizes = graph_sizes(max_rows)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_rows
    for num_rows in range(1, max_rows + 1):
        size = min(size for size in sizes if size >= num_rows)
        assert size - num_rows <= max(7, num_rows // 4)


def test_only_plain_decodes_are_replayed() -> None:
    decode = RowPlan(0, 5, (), True)
    assert is_decode(StepPlan(0, (decode, RowPlan(1, 9, (), True))))
    for other in (RowPlan(1, 0, (1, 2), True), RowPlan(1, 64, (1,), True)):
        assert not is_decode(StepPlan(0, (decode, other)))


@pytest.mark.parametrize("size", [3, 5])
@torch.inference_mode()
def test_a_padded_step_draws_what_the_plain_step_draws(config: dict[str, Any], size: int) -> None:
    """Three rows in a step of a fixed size, greedy, drawn and filtered, step after step."""
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
        """What `DecodeGraphs` is on a GPU, without the graph."""

        def replay(self, plan: StepPlan, ending: Any) -> torch.Tensor:
            step.load(plan.rows)
            return step.run(ending)[: len(plan.rows)]

    runner.graphs = Eager()  # type: ignore[assignment]
    seen = run(engine, *requests)
    for id in expected:
        assert tokens_of(seen[id]) == tokens_of(expected[id])


@pytest.mark.parametrize("num_decodes", [2, 4])
@torch.inference_mode()
def test_prompts_in_steps_of_a_fixed_size_give_what_plain_steps_give(
    config: dict[str, Any], num_decodes: int
) -> None:
    """Chunks of prompts beside decodes, prefixes restored and saved on the way."""
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
    runner = engine.runner
    size = StepSize(num_decodes, 2, 128)
    step = PromptStep(runner.model, runner.caches, runner.rows, size, deterministic=True)
    num_replayed = 0

    class Eager:
        """What `PromptGraphs` is on a GPU, without the graphs."""

        def size_for(self, rows: Any) -> StepSize | None:
            return size if size.holds(RowCounts.of(rows)) else None

        def replay(self, rows: Any, size: StepSize) -> torch.Tensor:
            nonlocal num_replayed
            num_replayed += 1
            step.load(rows)
            wanted = [place for place, row in zip(size.place_of(rows), rows) if row.samples]
            return step.run()[wanted]

    runner.prompt_graphs = Eager()  # type: ignore[assignment]
    seen = run(engine, *requests)
    assert num_replayed > 3
    for id in expected:
        assert tokens_of(seen[id]) == tokens_of(expected[id])


def test_sizes_are_tried_from_the_cheapest_on() -> None:
    sizes = prompt_sizes(max_rows=64, max_step_tokens=512)
    assert sizes == sorted(sizes, key=lambda size: (size.num_prompt_tokens, size.num_decodes))
    assert max(size.num_prompt_tokens for size in sizes) == 512
    assert all(size.num_decodes < 64 for size in sizes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_on_and_off_give_the_same_tokens(config: dict[str, Any], dtype: str) -> None:
    requests = [request(f"r{n}", prompt(n, n), max_tokens=40) for n in (1, 63, 64, 65, 200)]
    settings: dict[str, Any] = {"device": "cuda", "dtype": dtype, "memory_gb": 0.2, "deterministic": True}
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
    """While another reply is decoded beside it: at a page's end a row begins to write to another slot."""
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
