"""The engine's invariants on a CUDA device: no synchronization inside a step, steps can be
captured, and the results are those of the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from penstock.engine.engine import Engine
from penstock.types import PageUpdate, Pooling, Request, RowPlan, StepPlan
from small_models import (
    FAMILIES,
    HYBRID_MOE,
    logprobs_of,
    make_engine,
    prompt,
    request,
    run,
    tokens_of,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.fixture(params=FAMILIES)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return FAMILIES[request.param]


@contextmanager
def synchronising_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def requests(**sampling: Any) -> list[Any]:
    return [request(f"r{n}", prompt(n, seed=n), **sampling) for n in (1, 63, 64, 65, 200)]


@pytest.mark.parametrize("overlap", [False, True])
def test_gpu_says_what_the_cpu_says(config: dict[str, Any], overlap: bool) -> None:
    settings: dict[str, Any] = {"dtype": "float32", "memory_gb": 0.2, "deterministic": False}
    on_cpu = make_engine(config, device="cpu", **settings)
    on_gpu = make_engine(config, device="cuda", overlap=overlap, max_step_tokens=128, **settings)
    # Random weights differ between devices' generators, so the GPU takes the CPU's.
    on_gpu.runner.model.load_state_dict(on_cpu.runner.model.state_dict())  # type: ignore[attr-defined]
    expected, seen = run(on_cpu, *requests()), run(on_gpu, *requests())
    for id in expected:
        assert tokens_of(seen[id]) == tokens_of(expected[id])
        for mine, theirs in zip(logprobs_of(seen[id]), logprobs_of(expected[id])):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)


@pytest.mark.parametrize("overlap", [False, True])
def test_gpu_gives_the_vectors_of_the_cpu(config: dict[str, Any], overlap: bool) -> None:
    """Runs beside replies, in chunks: last token's vectors, means, and logits of chosen tokens."""
    settings: dict[str, Any] = {"dtype": "float32", "memory_gb": 0.2, "deterministic": False}
    on_cpu = make_engine(config, device="cpu", **settings)
    on_gpu = make_engine(config, device="cuda", overlap=overlap, max_step_tokens=128, **settings)
    on_gpu.runner.model.load_state_dict(on_cpu.runner.model.state_dict())  # type: ignore[attr-defined]
    wanted = (Pooling(), Pooling(kind="mean"), Pooling(normalize=False, logit_ids=(11, 12)))
    pools = [
        Request(id=f"{number}-{n}", token_ids=prompt(n, seed=n), pooling=pooling)
        for number, pooling in enumerate(wanted)
        for n in (1, 64, 200)
    ]
    expected, seen = (run(engine, *requests(), *pools) for engine in (on_cpu, on_gpu))
    for one in pools:
        theirs, mine = (
            torch.frombuffer(bytearray(found[one.id][-1].vector or b""), dtype=torch.float32)
            for found in (expected, seen)
        )
        torch.testing.assert_close(mine, theirs, atol=2e-3, rtol=2e-3)


def test_restored_prefix_equals_fresh_prefill_on_a_gpu(config: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"device": "cuda", "dtype": "float32", "memory_gb": 0.2}
    engine = make_engine(config, **settings)
    head = prompt(200)
    run(engine, request("first", head))
    one = request("second", head + prompt(50, 1))
    restored = run(engine, one)["second"]
    fresh = run(make_engine(config, prefix_cache=False, **settings), one)["second"]
    assert restored[0].num_cached_tokens == 192
    assert tokens_of(restored) == tokens_of(fresh)


@pytest.mark.parametrize("speculate", ["off", "ngram:3"])
def test_second_turns_read_states_that_were_not_written_at_every_token(speculate: str) -> None:
    """Replies of all lengths across a page, then turns that resume from them: the tokens equal
    those of a CPU, which writes every state.
    """
    settings: dict[str, Any] = {"dtype": "float32", "memory_gb": 0.2, "deterministic": False}
    settings["speculate"] = speculate
    engines = [make_engine(HYBRID_MOE, device=device, **settings) for device in ("cpu", "cuda")]
    engines[1].runner.model.load_state_dict(engines[0].runner.model.state_dict())  # type: ignore[attr-defined]
    first = {f"r{n}": prompt(40 + n, seed=n) for n in range(8)}
    lengths = {id: 30 + 3 * n for n, id in enumerate(first)}
    turns = [request(id, tokens, max_tokens=lengths[id]) for id, tokens in first.items()]
    expected, seen = (run(engine, *turns) for engine in engines)
    assert {id: tokens_of(own) for id, own in seen.items()} == {
        id: tokens_of(own) for id, own in expected.items()
    }
    again = [
        request(f"{id} again", (*tokens, *tokens_of(expected[id]), *prompt(5, seed=99)))
        for id, tokens in first.items()
    ]
    expected, seen = (run(engine, *again) for engine in engines)
    for id, own in seen.items():
        assert tokens_of(own) == tokens_of(expected[id])
        assert own[0].num_cached_tokens >= 64, "its prefix is a reply's, not only a prompt's"


def prefill_rows(engine: Engine, num_rows: int, length: int) -> list[RowPlan]:
    """Prefills rows by hand and returns the plans of their first decode."""
    page_size = engine.info.page_size
    pages_per_row = -(-(length + 8) // page_size)
    updates = tuple(
        PageUpdate(row, 0, tuple(range(1 + row * pages_per_row, 1 + (row + 1) * pages_per_row)))
        for row in range(num_rows)
    )
    slots = [row + 1 if engine.info.num_slots else 0 for row in range(num_rows)]
    rows = tuple(
        RowPlan(row, 0, prompt(length, row), True, slot=slots[row], initial_slot=slots[row])
        for row in range(num_rows)
    )
    engine.runner.launch(StepPlan(0, rows, page_updates=updates)).wait()
    return [
        RowPlan.decode(row, slot=slots[row], initial_slot=slots[row]) for row in range(num_rows)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_step_synchronises(config: dict[str, Any], dtype: str) -> None:
    """A decode, a prefill chunk and a mixed step, sampled with every option."""
    engine = make_engine(config, device="cuda", dtype=dtype, memory_gb=0.2, deterministic=False)
    sampling: dict[str, Any] = {
        "temperature": 0.8,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "logit_bias": {3: 1.0},
    }
    first, second = request("a", prompt(100), **sampling), request("b", prompt(300), **sampling)
    run(engine, request("warm", prompt(80), **sampling))
    engine.submit(first)
    for _ in range(3):
        with synchronising_is_an_error():
            plan = engine.policy.scheduler.plan()
            assert plan is not None
            pending = engine.runner.launch(plan)
        engine.policy.scheduler.commit(pending.wait())
    engine.submit(second)
    with synchronising_is_an_error():
        plan = engine.policy.scheduler.plan()
        assert plan is not None
        assert len(plan.rows) == 2
        pending = engine.runner.launch(plan)
    engine.policy.scheduler.commit(pending.wait())


def test_decodes_advance_on_the_device_while_the_host_sends_the_same_plan(
    config: dict[str, Any],
) -> None:
    """Replayed as graphs across a page boundary, while the host reads nothing."""
    settings: dict[str, Any] = {"device": "cuda", "dtype": "float32", "memory_gb": 0.2}
    settings |= {"graphs": True, "prefix_cache": False}
    asked = [request(f"r{row}", prompt(60, row), max_tokens=11, logprobs=None) for row in range(3)]
    expected = run(make_engine(config, **settings), *asked)
    engine = make_engine(config, **settings)
    table = engine.runner.rows
    plan = StepPlan(1, tuple(prefill_rows(engine, num_rows=3, length=60)))
    with synchronising_is_an_error():
        pending = [engine.runner.launch(plan) for _ in range(10)]
    seen = [one.wait().token_ids for one in pending]
    for row in range(3):
        tokens = [token_id for step in seen for token_id in step[row]]
        assert tokens == tokens_of(expected[f"r{row}"])[1:]
    assert table.context_len[:3].tolist() == [71] * 3
    assert (int(table.context_len[-1]), int(table.last_token[-1])) == (1, 0), "padding"


def test_a_decode_step_can_be_captured_and_replayed() -> None:
    engine = make_engine(
        HYBRID_MOE, device="cuda", dtype="bfloat16", memory_gb=0.2, deterministic=False
    )
    runner = engine.runner
    decodes = tuple(prefill_rows(engine, num_rows=3, length=70))
    plan = StepPlan(1, decodes)
    with torch.inference_mode():
        runner.rows.update(plan)
        inputs = runner.rows.step_inputs(plan.rows, False)
        caches = runner.caches
        stored = [getattr(cache, name) for cache in caches for name in cache.__slots__]
        tensors = [  # a backlog is several
            tensor
            for one in stored
            if one is not None
            for tensor in (one if isinstance(one, tuple) else (one,))
        ]
        saved = [tensor.clone() for tensor in tensors]

        def step() -> torch.Tensor:
            return runner.model.logits(runner.model(inputs, caches, only_last=True))

        def restore() -> None:
            for tensor, was in zip(tensors, saved):
                tensor.copy_(was)

        expected = step().clone()
        restore()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        restore()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        restore()
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(captured, expected)
