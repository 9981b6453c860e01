"""Experts on a CPU from GPU tiles: close to the results of dequantized weights."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.offload import host_products
from penstock.offload.host_products import HostProducts, Split
from penstock.ops import Weight
from penstock.ops.cpu import tiled_experts
from penstock.ops.cpu.tiled_experts import HostWorker, Job, Spent, can_run
from penstock.ops.reference.expert_cache import take_slots
from penstock.ops.tiles import TiledRows, tile
from penstock.weights.on_the_fly import round_to
from penstock.weights.packing import pack


def tiles(num_experts: int, num_rows: int, num_columns: int, seed: int) -> TiledRows:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(num_experts, num_rows, num_columns, generator=generator)
    return tile(pack(round_to(values * num_columns**-0.5, "int4")))


def expected(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: TiledRows, down: TiledRows
) -> torch.Tensor:
    gates, downs = gate_up.dequantize().double(), down.dequantize().double()
    out = torch.zeros(len(x), down.num_rows, dtype=torch.float64)
    for token in range(len(x)):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist()):
            gate, up = (gates[expert] @ x[token].double()).chunk(2)
            inner = (torch.nn.functional.silu(gate) * up).to(x.dtype).double()
            out[token] += weight * (downs[expert] @ inner)
    return out


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_tokens", "width", "inner"), [(1, 256, 128), (5, 384, 256)])
def test_sums_are_those_of_the_expanded_weights(
    dtype: torch.dtype, num_tokens: int, width: int, inner: int
) -> None:
    num_experts, k = 6, 3
    gate_up, down = tiles(num_experts, 2 * inner, width, 1), tiles(num_experts, width, inner, 2)
    if not can_run(gate_up, down, dtype):
        pytest.skip("there is no compiler")
    x = torch.randn(num_tokens, width).to(dtype)
    ids = torch.stack([torch.randperm(num_experts)[:k] for _ in range(num_tokens)]).int()
    weights = torch.rand(num_tokens, k)
    weights[:, 1] = 0  # the GPU's
    out, spent = torch.full((num_tokens, width), torch.nan), Spent.nothing()
    job = Job(gate_up, down, x, ids, weights, out, spent)
    for call in range(1, 4):
        job.run()
        wanted = expected(x, ids, weights, gate_up, down)
        assert (out - wanted).abs().max() < 5e-3 * wanted.abs().max()
        assert spent.num_calls == call
    used = len(ids[:, [0, 2]].unique())
    each = (gate_up.num_bytes + down.num_bytes) // num_experts
    assert spent.num_bytes == 3 * used * each
    weights.zero_()
    job.run()
    assert not out.any()


def test_more_threads_than_cores_agree() -> None:
    """Some join a call late, and some are delayed within one."""
    gate_up, down = tiles(8, 256, 256, 1), tiles(8, 256, 128, 2)
    if not can_run(gate_up, down, torch.bfloat16):
        pytest.skip("there is no compiler")
    loaded = tiled_experts._library(torch.bfloat16, torch.bfloat16)
    assert loaded is not None
    assert loaded.hire_threads(6) >= 6
    for step in range(30):
        x = torch.randn(1 + step % 3, 256).bfloat16()
        ids = torch.stack([torch.randperm(8)[:3] for _ in x]).int()
        out, weights = torch.full((len(x), 256), torch.nan), torch.rand(len(x), 3)
        Job(gate_up, down, x, ids, weights, out, Spent.nothing()).run()
        wanted = expected(x, ids, weights, gate_up, down)
        assert (out - wanted).abs().max() < 5e-3 * wanted.abs().max()


def test_what_the_kernel_does_not_know_is_refused() -> None:
    gate_up, down = tiles(2, 64, 128, 1), tiles(2, 128, 128, 2)
    assert not can_run(gate_up, down, torch.float32)
    assert not can_run(gate_up, Weight(torch.zeros(2, 128, 32)).values, torch.bfloat16)
    eight = tile(pack(round_to(torch.randn(2, 128, 128), "int8")))
    assert not can_run(gate_up, eight, torch.bfloat16)


def test_the_cpu_adds_what_the_device_leaves_to_it() -> None:
    """Whatever the share, both parts together are all chosen experts."""
    num_experts, k, num_slots, width, inner = 12, 3, 6, 256, 128
    gate_up, down = tiles(num_experts, 2 * inner, width, 1), tiles(num_experts, width, inner, 2)
    if not can_run(gate_up, down, torch.bfloat16):
        pytest.skip("there is no compiler")
    layer: Any = SimpleNamespace(layer=0, host_rows=(gate_up, down))
    products = HostProducts(torch.device("cpu"), torch.bfloat16)
    slot_of = torch.arange(num_experts, dtype=torch.int32)
    slot_of[num_slots:] = -1
    scores, marks = torch.zeros(num_experts), torch.zeros(num_experts, dtype=torch.int32)
    counts = torch.zeros(3, dtype=torch.int64)
    for step, share in enumerate((0.0, 0.5, 1.0, 0.3)):
        x = torch.randn(2, width).bfloat16()
        ids = torch.stack([torch.randperm(num_experts)[:k] for _ in range(2)]).int()
        weights = torch.rand(2, k) + 0.1
        tables = (slot_of, scores, marks, counts, torch.tensor([share]))
        _, own, hosts, _ = take_slots(ids, weights, *tables, num_slots)
        assert torch.equal(own + hosts, weights)
        total = expected(x, ids, own, gate_up, down)
        products.launch(layer, x, ids, hosts)(total)
        whole = expected(x, ids, weights, gate_up, down)
        assert (total - whole).abs().max() < 5e-3 * whole.abs().max()
        assert products.spent.num_calls <= step + 1
    _, misses, fetched = counts.tolist()
    assert products.spent.num_bytes == (misses - fetched) * (
        (gate_up.num_bytes + down.num_bytes) // num_experts
    )


def test_a_host_worker_answers_calls_in_turn() -> None:
    """Works like a GPU's stream: it writes the inputs, then one word that announces the call and
    its job.
    """
    num_experts, k, width = 6, 3, 256
    gate_up, down = tiles(num_experts, 256, width, 1), tiles(num_experts, width, 128, 2)
    if not can_run(gate_up, down, torch.bfloat16):
        pytest.skip("there is no compiler")
    calls, answered = torch.zeros(4, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)
    worker, spent = HostWorker(calls, answered), Spent.nothing()
    jobs = []
    for num_tokens in (1, 3):
        inputs = (
            torch.empty(num_tokens, width, dtype=torch.bfloat16),
            torch.empty(num_tokens, k, dtype=torch.int32),
            torch.empty(num_tokens, k),
        )
        out = torch.full((num_tokens, width), torch.nan)
        number = worker.number_of(Job(gate_up, down, *inputs, out, spent))
        jobs.append((number, inputs, out))
    assert [number for number, _, _ in jobs] == [0, 1]
    for call in range(1, 12):  # more than there are places
        number, (x, ids, weights), out = jobs[call % 2]
        x.copy_(torch.randn(x.shape))
        ids.copy_(torch.stack([torch.randperm(num_experts)[:k] for _ in x]))
        weights.copy_(torch.rand(weights.shape))
        if call == 6:
            time.sleep(0.01)  # long enough for the worker to sleep
        calls[call % len(calls)] = call << 16 | number
        late = time.monotonic() + 20
        while int(answered[number]) != call:
            assert time.monotonic() < late
        wanted = expected(x, ids, weights, gate_up, down)
        assert (out - wanted).abs().max() < 5e-3 * wanted.abs().max()
        assert spent.num_calls == call
    worker.close()
    calls[12 % len(calls)] = 12 << 16
    time.sleep(0.005)
    assert spent.num_calls == 11, "it is closed"


def test_the_share_follows_what_calls_take(monkeypatch: pytest.MonkeyPatch) -> None:
    products = HostProducts(torch.device("cpu"), torch.bfloat16)
    assert products.adapt() is None
    products.split = Split(50e9, 50e9)
    assert products.split.host_share == 0.5
    assert products.adapt() is None
    products.spent.numbers[0], products.spent.numbers[1] = 10**9, 25 * 10**9
    products.spent.numbers[2] = 1000
    slower = products.adapt()
    assert slower is not None
    assert slower < 0.5
    assert products.adapt() is None
    monkeypatch.setattr(host_products, "TRY_AGAIN_S", 0.0)
    assert products.adapt() == 0.5  # not called since
    assert products.adapt() is None
