"""Expert slots managed by the device: the same bits as a resident model, through slots and lanes.

A CPU runs the same steps as a GPU, with references instead of kernels.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from packed_checkpoints import FORMATS, pack_state, plain_state, write
from penstock.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.errors import CapacityError
from penstock.models.source import find_model
from penstock.offload import load, load_files
from penstock.offload.convert import Conversion
from penstock.offload.device_slots import Chunk, DeviceSlots, token_chunks
from penstock.offload.layout import ExpertLayout
from small_models import HYBRID_MOE, logprobs_of, make_engine, prompt, request, run

# More experts than a short prompt needs: a token uses 2 of 24, so up to 12 tokens use slots.
MODEL = {**HYBRID_MOE, "num_experts": 24, "num_experts_per_tok": 2}
EXPERT_BYTES = {"none": 24_576, "int4": 8_576}
FEW, SOME, MOST = 3, 7, 10  # slots per layer, including one of zeros
NUM_LAYERS = 4


def room(slots: int, quantization: str = "none") -> str:
    """Bytes for two lanes and this many slots per layer."""
    return f"{(2 * 24 + NUM_LAYERS * (slots + 1.2)) * EXPERT_BYTES[quantization] / 1e3:.3f}kB"


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def give(model: Any, config: EngineConfig) -> None:
        mlps = list(load.sparse_layers(model).values())
        load.give_device_slots(model, mlps, config, config.expert_cache_bytes or 0)

    def is_for_ram(index: Any, ram_bytes: int | None, device: Any) -> bool:
        return load_files.fits_ram(index, ram_bytes)

    monkeypatch.setattr(load, "_move_to_slots", give)
    monkeypatch.setattr(load_files, "is_for_ram", is_for_ram)


def store_of(engine: Any) -> DeviceSlots:
    store = engine.expert_store
    assert isinstance(store, DeviceSlots)
    return store


def said(engine: Any) -> dict[str, Any]:
    """Runs prompts of one, a few and many tokens, alone and together, and again from the cache."""
    found = {}
    for time in ("first", "again"):
        for own in ((1,), (6,), (70,), (1, 2, 3, 5, 90)):
            given = [request(f"r{n}", prompt(n, seed=n), max_tokens=6) for n in own]
            deltas = run(engine, *given)
            found |= {f"{time} {own} {one.id}": logprobs_of(deltas[one.id]) for one in given}
    return found


@cache
def said_by_a_resident_model(quantization: str = "none") -> dict[str, Any]:
    return said(make_engine(MODEL, quantization=quantization))


@pytest.mark.thinned
@pytest.mark.bitwise
@pytest.mark.parametrize("quantization", ["none", "int4"])
@pytest.mark.parametrize("size", [FEW, SOME, MOST])
def test_the_same_bits_as_a_resident_model(quantization: str, size: int) -> None:
    resident = said_by_a_resident_model(quantization)
    engine = make_engine(MODEL, quantization=quantization, expert_cache=room(size, quantization))
    assert said(engine) == resident
    assert [layer.num_slots for layer in store_of(engine).layers] == [size] * NUM_LAYERS
    stats = store_of(engine).stats()
    assert stats["hits"] > 0
    assert stats["misses"] > 0
    assert stats["fetched_bytes"] > stats["misses"] * store_of(engine).layers[0].expert_bytes


def test_every_slot_holds_what_the_table_says() -> None:
    engine = make_engine(MODEL, expert_cache=room(SOME))
    said(engine)
    for layer in store_of(engine).layers:
        held = [expert for expert, slot in enumerate(layer.slot_of.tolist()) if slot >= 0]
        assert len(held) == layer.num_slots
        slots = layer.slot_of[held].tolist()
        assert sorted(slots) == list(range(layer.num_slots))
        for source, target in zip(layer.sources, layer.targets, strict=True):
            assert torch.equal(target[slots], source[held])
            assert not target[-1].any()


def test_the_heat_of_experts_is_their_scores_and_whether_they_have_slots() -> None:
    engine = make_engine(MODEL, expert_cache=room(SOME))
    said(engine)
    rows = engine.stats().expert_heat
    for layer, row in zip(store_of(engine).layers, rows, strict=True):
        assert [byte >= 128 for byte in row] == [slot >= 0 for slot in layer.slot_of.tolist()]
        assert [byte & 127 for byte in row] == [round(127 * one) for one in layer.scores.tolist()]
        assert max(byte & 127 for byte in row) > 12


def test_room_for_all_is_a_resident_model() -> None:
    engine = make_engine(MODEL, expert_cache="10MB")
    assert engine.expert_store is None
    assert said(engine) == said_by_a_resident_model()


def test_too_little_room_is_reported() -> None:
    with pytest.raises(CapacityError, match="Set --expert-cache 2MB or more"):
        make_engine(MODEL, expert_cache="1MB")


def test_a_full_gpu_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ExpertLayout, "new_slots", is_full)
    with pytest.raises(CapacityError, match="does not fit on cpu\nThe other weights"):
        make_engine(MODEL, expert_cache=room(SOME))


def test_alike_experts_are_alike_and_apart() -> None:
    given: dict[str, Any] = {"alike_experts": True, "quantization": "int4"}
    engine = make_engine(MODEL, expert_cache=room(SOME, "int4"), **given)
    first, *others = store_of(engine).layers
    for layer in others:
        for own, source in zip(first.sources, layer.sources, strict=True):
            assert torch.equal(own, source)
            assert own.data_ptr() != source.data_ptr()
    assert said(engine) == said(make_engine(MODEL, **given))


@pytest.mark.parametrize(("num_tokens", "at_once", "size"), [(3, 2, 2), (8, 3, 5), (12, 6, 6)])
def test_chunks_of_a_long_step_are_as_long_as_such_a_step(
    num_tokens: int, at_once: int, size: int
) -> None:
    """Products of few tokens use another kernel, which rounds differently."""
    numbers = torch.arange(num_tokens, dtype=torch.float32)[:, None].repeat(1, 2)
    seen = []
    for own in token_chunks(num_tokens, at_once):
        chunk = Chunk.of(own, num_tokens, numbers, numbers + 1, numbers, numbers, None)
        count = own.stop - own.start
        assert len(chunk.x) == len(chunk.ids) == (size if num_tokens > 4 else count)
        assert not chunk.weights[count:].any()
        assert chunk.ids.unique().tolist() == numbers[own, 0].tolist()
        seen += chunk.x[:count, 0].tolist()
    assert seen == list(range(num_tokens))


@pytest.mark.bitwise
@pytest.mark.parametrize(
    "name", ["int4", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp8", "gptq"))]
)
def test_converted_files_that_fit_ram_go_there(name: str, tmp_path: Path) -> None:
    format = FORMATS[name]
    packed, _ = pack_state(plain_state(MODEL), format)
    model = write(tmp_path / "packed", packed, {**MODEL, format.key: format.quantization})
    output = tmp_path / "converted"
    Conversion(find_model(str(model)), "cpu").write(output, lambda _: None)
    given: dict[str, Any] = {"device": "cpu", "deterministic": True, "max_model_len": 1024}

    def open_engine(path: Path, **settings: Any) -> Engine:
        return Engine.from_source(find_model(str(path)), EngineConfig(**given, **settings))

    whole = open_engine(output, expert_cache="100MB")
    assert whole.expert_store is None
    index = load_files.read_index(output)
    each = index.layouts[0].slot_bytes(torch.float32)
    room = f"{0.9 * NUM_LAYERS * 24 * each / 1e3:.1f}kB"
    engine = open_engine(output, expert_cache=room)
    assert isinstance(engine.expert_store, DeviceSlots)
    expected = said(whole)
    assert said(engine) == expected
    tight = open_engine(output, expert_cache=room, expert_ram="800kB")
    assert not isinstance(tight.expert_store, DeviceSlots)
    assert said(tight) == expected
