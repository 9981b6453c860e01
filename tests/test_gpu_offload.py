"""Experts in RAM and in files on a GPU: the same tokens as the resident model, with and without
graphs.
"""

from __future__ import annotations

from typing import Any

import pytest

from kernel_checks import ON_GPU, TOLERANCES
from penstock.engine.engine import Engine
from penstock.offload.device_slots import DeviceSlots
from penstock.offload.host_products import largest_difference
from penstock.offload.load import sparse_layers
from small_models import HYBRID_MOE, make_engine, prompt, request, run, tokens_of

pytestmark = ON_GPU

# Widths that 4-bit tiles have; 40 experts of 51 kB in each of 4 layers.
MODEL: dict[str, Any] = {
    **HYBRID_MOE,
    "hidden_size": 256,
    "num_experts": 40,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "dtype": "bfloat16",
}
GIVEN: dict[str, Any] = {
    "device": "cuda",
    "quantization": "int4",
    "deterministic": False,
    "max_rows": 8,
    "max_step_tokens": 512,
    "memory_gb": 0.2,
}
LANES, SLOTS = 2 * 40, 4 * 18  # experts
EXPERT_BYTES = 3 * 256 * 128 * (128 / 2 + 2) / 128
ROOM = f"{(LANES + SLOTS) * EXPERT_BYTES / 1e3:.1f}kB"


def said(engine: Engine) -> dict[str, list[int]]:
    """Runs alone, together and with long prompts; greedy and sampled, twice."""
    found = {}
    for time in range(2):
        for own in ((1,), (7,), (300,), (1, 2, 3, 5, 90), tuple(range(2, 10))):
            for heat in (0.0, 1.0):
                given = [
                    request(f"{n}", prompt(n, seed=n), max_tokens=12, logprobs=None,
                            temperature=heat, seed=n)
                    for n in own
                ]  # fmt: skip
                deltas = run(engine, *given)
                for one in given:
                    found[f"{time} {own} {heat} {one.id}"] = tokens_of(deltas[one.id])
    return found


@pytest.fixture(scope="module")
def resident() -> dict[str, list[int]]:
    """Without graphs: these pad short prompts, which then use kernels that round differently."""
    return said(make_engine(MODEL, graphs=False, **GIVEN))


@pytest.mark.parametrize("graphs", [True, False])
def test_fetched_experts_give_the_resident_tokens(
    resident: dict[str, list[int]], graphs: bool
) -> None:
    engine = make_engine(MODEL, expert_cache=ROOM, graphs=graphs, **GIVEN)
    store = engine.expert_store
    assert isinstance(store, DeviceSlots)
    assert (engine.runner.graphs is not None) == graphs
    assert said(engine) == resident
    stats = store.stats_now()
    assert stats["hits"] > 0
    assert stats["misses"] > 0
    for layer in store.layers:
        slots, held = layer.slot_of.tolist(), layer.held()[1:].view(-1, 2).tolist()
        assert sorted(slot for slot in slots if slot >= 0) == list(range(layer.num_slots))
        for expert, slot in held:
            for source, target in zip(layer.sources, layer.targets, strict=True):
                assert (source[expert] == target[slot].cpu()).all()


@pytest.mark.parametrize("misses", ["cpu", "auto"])
def test_the_cpu_is_as_near_as_a_kernel(misses: str) -> None:
    engine = make_engine(MODEL, expert_cache=ROOM, expert_misses=misses, **GIVEN)
    store = engine.expert_store
    assert isinstance(store, DeviceSlots)
    if misses == "cpu":
        assert store.products is not None
    if store.products is None:
        pytest.skip("the CPU is too slow here to take part")
    mlps = list(sparse_layers(engine.runner.model).values())  # type: ignore[arg-type]
    difference = largest_difference(store, mlps)
    assert 0 < difference < TOLERANCES[engine.runner.model.dtype]  # type: ignore[attr-defined]
    before = store.stats_now()["computed_bytes"]
    assert len(said(engine)) > 0
    assert store.stats_now()["computed_bytes"] > before


def test_files_give_the_resident_tokens(resident: dict[str, list[int]]) -> None:
    engine = make_engine(MODEL, expert_cache=ROOM, expert_ram="4MB", **GIVEN)
    assert said(engine) == resident
    assert engine.stats().experts["disk_reads"] > 0
