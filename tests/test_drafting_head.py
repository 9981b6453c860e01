"""`--speculate auto`: a drafting head is used where it can pay off and memory allows."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.assets import default_model
from penstock.commands.inspect import inspect_model
from penstock.config import EngineConfig
from penstock.engine import device_part, drafting_head, memory
from penstock.engine.engine import Engine
from penstock.engine.logits_engine import create_engine
from penstock.engine.pools import GB
from penstock.errors import CapacityError, CheckpointError
from penstock.models.source import find_model
from penstock.ops import Weight
from penstock.ops.quantized import QuantizedRows
from penstock.ops.tiles import tile
from penstock.parallel.ranks import ALONE
from penstock.progress import Phase
from penstock.types import KVSpec
from penstock.weights.on_the_fly import round_to
from penstock.weights.packing import pack
from small_models import prompt, request, run, tokens_of
from test_memory import QWEN3_5_35B

TIGHT = {"memory_gb": 0.06, "max_model_len": 8192}  # room for the context, but not for a head's KV


def embedded(**settings: Any) -> tuple[Engine, dict[str, str]]:
    """An engine with the embedded model, which has a head, and the last detail of each startup
    phase.
    """
    said: dict[str, str] = {}

    def note(phase: Phase) -> None:
        said[phase.name] = phase.detail

    given = {"device": "cpu", "memory_gb": 0.2, **settings}
    return Engine.from_config(EngineConfig(**given), note), said


def head_of(engine: Engine) -> Any:
    model: Any = engine.runner.model
    return model.mtp


def test_the_head_of_a_checkpoint_drafts_unless_told_otherwise() -> None:
    engine, said = embedded()
    assert engine.info.speculate == "mtp:3"
    assert "drafting head (--speculate mtp:3)" in said["drafts"]
    plain, said = embedded(speculate="off")
    assert plain.info.speculate == "off"
    assert head_of(plain) is None
    assert "drafts" not in said


@pytest.mark.parametrize("settings", [{"random_weights": True}, {"expert_cache": "12MB"}])
def test_a_head_that_cannot_pay_is_not_loaded(settings: dict[str, Any]) -> None:
    engine, _ = embedded(**settings)
    assert engine.info.speculate == "off"
    assert head_of(engine) is None
    asked, _ = embedded(speculate="mtp:2", **settings)
    assert asked.info.speculate == "mtp:2"


def test_a_context_that_was_asked_for_goes_before_the_head() -> None:
    engine, said = embedded(**TIGHT)
    assert engine.info.speculate == "off"
    assert engine.info.max_model_len == 8192
    assert head_of(engine) is None
    assert "There is too little memory for it (0.01 GB)" in said["drafts"]
    assert "8,192 tokens does not fit" in said["drafts"]
    with pytest.raises(CapacityError, match="8,192 tokens does not fit") as raised:
        embedded(**TIGHT, speculate="mtp")
    assert "--speculate off" in raised.value.todo


def test_the_head_computes_only_what_the_next_draft_starts_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For other tokens it stores keys and values only; its drafts equal those of a full
    computation.
    """
    engine, _ = embedded(speculate="mtp:2")
    engine.policy.speculator.pace = None  # even if it does not pay off
    model: Any = engine.runner.model
    draft, computed = model.draft, list[tuple[int, int]]()

    def watch(*given: Any) -> torch.Tensor:
        said: torch.Tensor = draft(*given)
        if len(given) == 5:
            *rest, chosen = given
            torch.testing.assert_close(said, draft(*rest)[chosen.tokens], rtol=1e-4, atol=1e-4)
            computed.append((len(rest[1]), len(said)))
        return said

    monkeypatch.setattr(model, "draft", watch)
    asked = [request(str(number), prompt(20 + 9 * number, number)) for number in range(3)]
    said = run(engine, *asked)
    assert all(len(tokens_of(said[one.id])) == 12 for one in asked)
    assert computed[0] == (20 + 29 + 38, 3)
    assert all(num_said == 3 for _, num_said in computed[:3])
    assert (9, 3) in computed  # three rows with two drafts each


def gpu_model(free_gb: float, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Qwen3.5-35B-A3B in bfloat16, on a device with this much memory beside weights and head."""
    device = SimpleNamespace(type="cuda", free=int(free_gb * GB))
    weight = SimpleNamespace(is_meta=False, numel=lambda: 845_000_000, element_size=lambda: 2)
    head = SimpleNamespace(cache_spec=KVSpec(2, 256), modules=tuple, parameters=lambda: [weight])
    monkeypatch.setattr(memory, "free_bytes", lambda device: device.free)
    return SimpleNamespace(
        device=device,
        dtype=torch.bfloat16,
        max_position=262_144,
        ranks=ALONE,
        cache_specs=lambda: QWEN3_5_35B,
        mtp=head,
    )


@pytest.mark.parametrize(
    ("free_gb", "settings", "expected"),
    [
        (65.0, {}, "mtp"),
        (65.0, {"max_model_len": 262_144}, "mtp"),
        (7.0, {}, "off"),  # 1.7 of 8.7 GB would reduce rows and tokens
        (7.0, {"memory_gb": 4.0}, "mtp"),  # a cache of this size holds as much with it
        (0.1, {}, "off"),  # with it, nothing fits
    ],
)
def test_on_a_gpu_the_head_must_leave_room(
    free_gb: float, settings: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, said = gpu_model(free_gb, monkeypatch), list[Phase]()
    config = drafting_head.settle(EngineConfig(**settings), model, "a model", said.append)
    assert config.speculate == expected
    assert (model.mtp is None) == (expected == "off")
    assert [("1.69 GB" in phase.detail) for phase in said] == [True] * (expected == "off")


def test_drafts_are_chosen_by_rows_in_int4_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting_head, "is_available", lambda _: True)
    own = torch.randn(512, 256).bfloat16()

    def vocabulary_of(weight: Weight, **settings: Any) -> Weight | None:
        model = SimpleNamespace(
            head=SimpleNamespace(weight=weight),
            mtp=SimpleNamespace(vocabulary=None),
            ranks=settings.pop("ranks", ALONE),
            device=torch.device("cpu"),
            dtype=settings.pop("dtype", torch.bfloat16),
        )
        given = {"speculate": "mtp", "draft_vocabulary": 256, **settings}
        drafting_head.round_vocabulary(EngineConfig(**given), model)
        found: Weight | None = model.mtp.vocabulary
        return found

    copy = vocabulary_of(Weight(own))
    assert copy is not None
    assert copy.shape == (256, 256)
    assert copy.num_bytes < 0.6 * 256 * 256
    assert torch.equal(copy.dequantize(), pack(round_to(own[:256], "int4")).dequantize())
    for settings in ({"draft_vocabulary": 0}, {"deterministic": True}, {"speculate": "off"}):
        assert vocabulary_of(Weight(own), **settings) is None
    few_bits = Weight(own.clone())
    few_bits.quantize((tile(pack(round_to(own, "int4"))),))
    assert vocabulary_of(few_bits) is None  # it is read in place
    parts = (tile(pack(round_to(own, "int8"))), own[:16])
    several, whole = Weight(torch.empty(528, 256)), Weight(own.clone())
    several.quantize(parts)
    assert vocabulary_of(several, draft_vocabulary=600) is None
    whole.quantize((pack(round_to(own, "int8")),))
    assert vocabulary_of(whole) is None  # its first rows cannot be separated
    assert vocabulary_of(Weight(own), dtype=torch.float32) is None
    assert vocabulary_of(Weight(own), ranks=SimpleNamespace(is_alone=False)) is None
    monkeypatch.setattr(drafting_head, "is_available", lambda _: False)
    assert vocabulary_of(Weight(own)) is None


@pytest.mark.parametrize(("num_tokens", "is_copied"), [(256, False), (256, True), (0, True)])
def test_drafts_are_among_the_first_tokens_and_change_no_reply(
    num_tokens: int, is_copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request("one", prompt(40), max_tokens=24)
    plain = tokens_of(run(embedded(speculate="off")[0], asked)["one"])
    if is_copied:  # as on a GPU
        monkeypatch.setattr(drafting_head, "is_available", lambda _: True)
        monkeypatch.setattr(drafting_head.quantized, "DTYPES", (torch.bfloat16, torch.float32))
    engine, _ = embedded(speculate="mtp:3", draft_vocabulary=num_tokens)
    drafter = engine.runner.drafter
    assert drafter is not None
    assert drafter.vocabulary is not None
    assert drafter.vocabulary.shape[0] == (num_tokens or engine.runner.model.vocab_size)
    has_copy = is_copied and num_tokens > 0
    assert (head_of(engine).vocabulary is drafter.vocabulary) == has_copy
    if has_copy:
        (part,) = drafter.vocabulary.parts
        assert isinstance(part, QuantizedRows)
        assert part.bits == 4
    assert tokens_of(run(engine, asked)["one"]) == plain
    drafts = engine.stats().drafts
    assert drafts is not None
    assert drafts.counts[0].num_drafted > 0


def test_a_plan_that_fails_with_the_head_is_made_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where only measured steps show how much memory is left."""
    build = device_part.build_runner

    def short(model: Any, config: EngineConfig, name: str, on_phase: Any) -> Any:
        if model.mtp is not None:
            raise CapacityError("Too little is left", "By 1 GB.", "Free some.")
        return build(model, config, name, on_phase)

    monkeypatch.setattr(device_part, "build_runner", short)
    engine, said = embedded()
    assert (engine.info.speculate, head_of(engine)) == ("off", None)
    assert said["drafts"].endswith("Too little is left.")
    with pytest.raises(CapacityError, match="Too little is left") as raised:
        embedded(speculate="mtp:1")
    assert raised.value.todo.startswith("Free some. Or use --speculate off")


def test_weights_that_fit_only_without_the_head_are_loaded_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = device_part.load_with_experts

    def short(*given: Any, **more: Any) -> Any:
        if more["with_drafting_head"]:
            raise CapacityError("It does not fit")
        return load(*given, **more)

    monkeypatch.setattr(device_part, "load_with_experts", short)
    engine, said = embedded()
    assert engine.info.speculate == "off"
    assert said["drafts"] == "none, the drafting head is not used. It does not fit."
    with pytest.raises(CapacityError, match="does not fit"):
        embedded(speculate="mtp")


def test_a_head_that_is_not_whole_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(default_model(), folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["mtp.fc.weight"]
    save_file(tensors, folder / "model.safetensors")
    engine, said = embedded(model=str(folder))
    assert engine.info.speculate == "off"
    assert "mtp.fc.weight" in said["drafts"]
    with pytest.raises(CheckpointError, match="do not match its config"):
        embedded(model=str(folder), speculate="mtp")
    del tensors["model.language_model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="do not match its config"):
        embedded(model=str(folder))


def test_an_engine_that_is_given_its_tokens_needs_no_drafts() -> None:
    folder = default_model()
    source = find_model(str(folder))
    engine = create_engine(dict(source.config), str(folder), device="cpu", memory_gb=0.2)
    assert engine.engine.info.speculate == "off"


def test_inspect_names_the_drafter() -> None:
    assert inspect_model(EngineConfig(model=str(default_model())))["speculate"] == "mtp:3"
    assert inspect_model(EngineConfig(model="Qwen3.5-4B"))["speculate"] == "mtp:3"
