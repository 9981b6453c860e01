"""GPU memory plans: a plan fits into the free memory, or an error says what to change."""

from __future__ import annotations

import dataclasses
import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock import LLM
from penstock.cli import main
from penstock.commands import inspect
from penstock.commands.inspect import Machine, inspect_model
from penstock.config import EngineConfig
from penstock.engine import memory
from penstock.engine.dry_run import EVERY_OPTION, LEAST_STEP_TOKENS, DryRun, StepBytes
from penstock.engine.engine import Engine
from penstock.engine.graph_sizes import DraftSize
from penstock.engine.graphs import is_out_of_memory
from penstock.engine.memory import MemoryPlan, estimate_memory, plan_memory
from penstock.engine.pools import GB, PoolSizes
from penstock.errors import CapacityError
from penstock.layers.rope import Rope, inverse_frequencies
from penstock.parallel.ranks import ALONE
from penstock.types import CacheSpec, KVSpec, Request, StateSpec
from small_models import FAMILIES, make_engine

QWEN3_5_35B: list[CacheSpec] = [KVSpec(2, 256)] * 10 + [StateSpec(32, 128, 128, 8192, 4)] * 30
LLAMA_8B: list[CacheSpec] = [KVSpec(8, 128)] * 32
LIBRARY_BYTES = int(1.0 * GB)
GRAPH_BYTES = int(0.5 * GB)
WEIGHT = SimpleNamespace(is_meta=False, numel=lambda: 500_000_000, element_size=lambda: 2)


class FakeDryRun:
    """A fake dry run: a step takes 80 KB per token, like Qwen3.5-35B-A3B, and loaded kernels keep
    memory.
    """

    def __init__(self, model: Any, config: EngineConfig, pools: PoolSizes) -> None:
        self.device = model.device
        self.device.free -= LIBRARY_BYTES

    def largest_step(self, max_tokens: int, limit: int) -> StepBytes | None:
        num_tokens = max_tokens
        while num_tokens * 80_000 > limit and num_tokens > LEAST_STEP_TOKENS:
            num_tokens //= 2
        return StepBytes(num_tokens, num_tokens * 80_000) if self.device.free > 0 else None

    def graph_bytes(self, max_step_tokens: int) -> int:
        return GRAPH_BYTES


def plan_for(
    free_gb: float,
    monkeypatch: pytest.MonkeyPatch,
    specs: list[CacheSpec] = QWEN3_5_35B,
    **settings: Any,
) -> MemoryPlan:
    device = SimpleNamespace(type="cuda", free=int(free_gb * GB))
    model = SimpleNamespace(
        device=device,
        dtype=torch.bfloat16,
        max_position=262_144,
        ranks=ALONE,
        cache_specs=lambda: specs,
        modules=tuple,
        parameters=lambda: [WEIGHT],
    )
    monkeypatch.setattr(memory, "DryRun", FakeDryRun)
    monkeypatch.setattr(memory, "free_bytes", lambda device: device.free)
    properties = SimpleNamespace(total_memory=85e9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return plan_memory(model, EngineConfig(**settings), "a model", lambda _: None)[0]


@pytest.mark.parametrize("specs", [QWEN3_5_35B, LLAMA_8B])
@pytest.mark.parametrize("free_gb", [2.7, 4, 6, 9.2, 14, 30, 80])
def test_a_plan_keeps_to_what_is_free(
    free_gb: float, specs: list[CacheSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_for(free_gb, monkeypatch, specs)
    uses = (
        plan.pools.num_bytes
        + plan.step_bytes
        + plan.graph_bytes
        + plan.reserve_bytes
        + LIBRARY_BYTES
    )
    assert 0.9 * free_gb * GB <= uses <= free_gb * GB
    assert plan.step_bytes <= free_gb * GB / memory.STEP_SHARE
    assert plan.shared_step_tokens <= plan.max_step_tokens


@pytest.mark.parametrize(("free_gb", "share", "usable_gb"), [(80, 0.5, 32.5), (20, 0.9, 20)])
def test_a_share_of_the_memory_counts_the_weights_and_not_other_processes(
    free_gb: float, share: float, usable_gb: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 85 GB, this process has reserved 10 for the weights."""
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10 * GB)
    plan = plan_for(free_gb, monkeypatch, memory_share=share)
    uses = plan.pools.num_bytes + plan.step_bytes + plan.graph_bytes + plan.reserve_bytes
    assert 0.9 * usable_gb * GB <= uses <= usable_gb * GB


@pytest.mark.parametrize("free_gb", [0.01, 0.5, 1, 1.5])
def test_too_little_memory_to_run_is_said_in_a_sentence(
    free_gb: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CapacityError, match="leaves too little memory to run it") as raised:
        plan_for(free_gb, monkeypatch)
    assert f"{free_gb:.2f} GB are left" in raised.value.why
    assert "--max-rows" in raised.value.todo


def test_steps_shrink_with_memory_and_are_as_large_as_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert plan_for(80, monkeypatch).max_step_tokens == 32768
    assert plan_for(9.2, monkeypatch).max_step_tokens == 8192
    assert plan_for(2.7, monkeypatch).max_step_tokens == 4096
    assert plan_for(9.2, monkeypatch, max_step_tokens=32768).max_step_tokens == 32768


def test_scarce_memory_still_has_rows_and_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = plan_for(9.2, monkeypatch).pools
    assert pools.max_rows >= 16
    assert pools.max_rows // 3 <= pools.max_checkpoints <= pools.max_rows


def test_what_was_asked_for_and_does_not_fit_is_refused_with_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(CapacityError, match="--memory-gb 8 is more than") as given:
        plan_for(9.2, monkeypatch, memory_gb=8)
    assert "GB are left" in given.value.why
    with pytest.raises(CapacityError, match="262,144 tokens does not fit") as length:
        plan_for(4, monkeypatch, max_model_len=262_144)
    assert "--max-model-len" in length.value.todo


def test_a_plan_prints_every_use_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_for(9.2, monkeypatch)
    headline, *lines = str(plan).splitlines()
    pools = plan.pools
    assert headline == f"{pools.max_rows} requests of up to {pools.max_model_len:,} tokens"
    assert [line.split("  ")[0] for line in lines] == [
        "weights",
        "state slots",
        "KV pages",
        "largest step",
        "graphs",
        "reserve",
    ]
    assert lines[0].endswith("1.00 GB")
    assert lines[3].endswith("0.66 GB  8,192 tokens")
    assert sum(num_bytes for _, num_bytes, _ in plan.uses) <= 10.2 * GB - LIBRARY_BYTES
    assert "state slots" not in str(plan_for(9.2, monkeypatch, LLAMA_8B))


def test_a_plan_says_when_memory_is_too_small_for_the_rows_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    headline = str(plan_for(9.2, monkeypatch, max_rows=4000)).splitlines()[0]
    assert headline.endswith("tokens (memory is too small for --max-rows 4000)")
    assert str(plan_for(9.2, monkeypatch, max_rows=4)).startswith("4 requests of up to")


def test_inspect_estimates_the_same_plan_for_a_model_that_is_not_loaded() -> None:
    memory = inspect_model(EngineConfig(model="Qwen3.5-0.8B"))["memory"]
    names = [name for name, _, _ in memory["uses"]]
    assert names[:3] == ["weights", "state slots", "KV pages"]
    assert memory["max_rows"] > 0


def test_inspect_on_a_cpu_plans_in_the_dtype_that_an_engine_computes_in(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights are bfloat16, and take twice as much in float32."""
    machine = Machine("RAM", 32 * GB, 30 * GB, is_gpu=False)
    monkeypatch.setattr(inspect, "find_machine", lambda: machine)
    report = inspect_model(EngineConfig(model="Qwen3.5-9B"))
    assert report["dtype"] == "bfloat16"
    assert report["machine"]["dtype"] == "float32"
    assert report["machine"]["weight_bytes"] == pytest.approx(2 * report["weight_bytes"], rel=1e-3)
    assert report["memory"] is None
    assert not any(report["fits"].values())
    assert inspect_model(EngineConfig(model="Qwen3.5-9B", dtype="bfloat16"))["memory"]
    assert main(["inspect", "Qwen3.5-9B"]) == 0
    assert "in float32 by default: weights take 36.8 GB" in capsys.readouterr().out


def test_inspect_plans_what_an_engine_on_a_cpu_then_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    planned = inspect_model(EngineConfig())["memory"]
    info = LLM(device="cpu").engine.info
    assert planned["max_rows"] == info.max_rows
    assert planned["max_model_len"] == info.max_model_len
    bytes_of = {name: num_bytes for name, num_bytes, _ in planned["uses"]}
    assert bytes_of.pop("weights") == pytest.approx(info.weight_bytes, rel=0.01)
    assert sum(bytes_of.values()) == pytest.approx(info.cache_bytes, rel=0.01)


def test_a_slot_on_a_gpu_has_room_for_a_backlog(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether loaded or only estimated; deterministic engines need none."""
    backlog = 30 * 4 * 32 * (1 + 3 * (128 + 128 + 1))  # layers, bytes, heads, tokens
    whole = plan_for(80, monkeypatch, deterministic=True).pools.slot_bytes
    assert plan_for(80, monkeypatch).pools.slot_bytes == whole + backlog
    model = SimpleNamespace(
        device=torch.device("meta"),
        dtype=torch.bfloat16,
        max_position=4096,
        cache_specs=lambda: QWEN3_5_35B,
    )
    for is_gpu in (True, False):
        plan = estimate_memory(model, EngineConfig(), 0, 80 * GB, is_gpu=is_gpu)
        assert plan.pools.slot_bytes == whole + backlog * is_gpu


@pytest.fixture(params=FAMILIES)
def dry_run(request: pytest.FixtureRequest) -> DryRun:
    model = make_engine(FAMILIES[request.param]).runner.model
    pools = PoolSizes(4, 100, 2, 2, 0, 1, 1)
    return DryRun(model, EngineConfig(page_size=64), pools)


@torch.inference_mode()
def test_dry_run_launches_the_largest_steps(
    dry_run: DryRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = []
    launch = type(dry_run.runner).launch

    def watch(runner: Any, plan: Any) -> Any:
        launched.append(plan)
        return launch(runner, plan)

    monkeypatch.setattr(type(dry_run.runner), "launch", watch)
    for size in dry_run._decode_sizes():
        dry_run._launch_decodes(size)
    dry_run._launch_prompts(250)
    dry_run._launch_prompts(1000)
    assert [plan.num_tokens for plan in launched] == [4, 250, 400]
    assert all(row.prompt_targets is not None for row in launched[1].rows)


@pytest.mark.parametrize(
    ("max_rows", "captures", "expected"),
    [
        (4, True, [(4, 0), (4, 3)]),
        (100, True, [(100, 0), (64, 1)]),  # more rows have no graph with drafts
        (100, False, [(100, 3)]),
    ],
)
def test_a_dry_run_knows_which_drafts_may_run(
    max_rows: int, captures: bool, expected: list[tuple[int, int]]
) -> None:
    model = make_engine(FAMILIES["llama"]).runner.model
    config = EngineConfig(speculate="ngram:3", graphs=None if captures else False)
    run = DryRun(model, config, PoolSizes(max_rows, 100, 2, 2, 0, 1, 1))
    assert run._decode_sizes() == [DraftSize(*size) for size in expected]


def test_steps_are_halved_until_they_fit(dry_run: DryRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def largest(fits: int, free: int = 10**9) -> int | None:
        def peak(launch: Any) -> int | None:
            (given,) = launch.args
            num_bytes = 1000 if isinstance(given, DraftSize) else given
            return num_bytes if num_bytes <= free else None

        monkeypatch.setattr(dry_run, "_peak", peak)
        step = dry_run.largest_step(32768, fits)
        return None if step is None else step.num_tokens

    dry_run.captures = False
    assert largest(40_000) == 32768
    assert largest(20_000) == 16384
    assert largest(20_000, free=5_000) == 4096
    assert largest(100) == LEAST_STEP_TOKENS
    assert largest(20_000, free=1_000) == LEAST_STEP_TOKENS
    assert largest(20_000, free=900) is None


def test_libraries_that_find_no_memory_say_it_in_their_own_words() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")
    )
    assert is_out_of_memory(RuntimeError("Triton Error [CUDA]: out of memory"))
    assert not is_out_of_memory(
        RuntimeError("CUDA error: an illegal memory access was encountered")
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("left_gb", [6.0, 4.0, 3.5])
def test_an_engine_beside_a_hog_runs_its_largest_requests(left_gb: float) -> None:
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(int(free - left_gb * GB), dtype=torch.uint8, device="cuda")
    engine = Engine.from_config(EngineConfig(model="Qwen3.5-0.8B", random_weights=True))
    every = dataclasses.replace(EVERY_OPTION, max_tokens=4)
    num_long = min(32768, engine.info.max_model_len - 8)
    long = Request(id="long", token_ids=tuple(i % 999 for i in range(num_long)), sampling=every)
    for request in [
        *(Request(id=f"{i}", token_ids=(1, 2, i), sampling=every) for i in range(300)),
        long,
    ]:
        engine.submit(request)
    finished = []
    while engine.has_work:
        finished += [delta.finish for delta in engine.step() if delta.finish is not None]
    assert finished == ["length"] * 301
    del engine, hog
    gc.collect()
    torch.cuda.empty_cache()


def test_angles_are_there_for_positions_that_are_used() -> None:
    rope = Rope(inverse_frequencies(1e4, 4), 2**24, "cpu")
    assert len(rope.table) < 2**20, "a model may name any context"
    rope.reach(5)
    rope.reach(2**20)
    assert torch.equal(rope.table, rope.rows(2**20))
