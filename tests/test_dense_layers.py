"""`--offload-layers`: layers in RAM give the same bits as a resident model."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.offload import load
from small_models import FAMILIES, HYBRID_MOE, logprobs_of, make_engine, prompt, request, run


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "check_offload_layers", lambda *_: None)


def said(engine: Any) -> list[Any]:
    given = [request("a", prompt(40)), request("b", prompt(3))]
    return [logprobs_of(run(engine, one)[one.id]) for one in given]


@pytest.mark.thinned
@pytest.mark.bitwise
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_layers_in_ram_change_no_bit(family: str, count: int, quantization: str) -> None:
    config = FAMILIES[family]
    count = min(count, config["num_hidden_layers"])
    given = {"quantization": quantization, "deterministic": True}
    engine = make_engine(config, offload_layers=count, **given)
    lanes = engine.runner.model.dense_lanes  # type: ignore[attr-defined]
    assert lanes.host_bytes > 0
    assert said(engine) == said(make_engine(config, **given))


@pytest.mark.bitwise
@pytest.mark.usefixtures("as_on_a_gpu")
def test_experts_may_be_in_slots_as_well() -> None:
    model = {**HYBRID_MOE, "num_experts": 24, "num_experts_per_tok": 2}
    engine = make_engine(model, offload_layers=3, expert_cache="1800kB")
    assert engine.expert_store is not None
    assert said(engine) == said(make_engine(model))


def test_impossible_settings_are_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="where all layers are in RAM"):
        make_engine(HYBRID_MOE, offload_layers=1)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_more_layers_than_there_are() -> None:
    with pytest.raises(ConfigError, match="the model has 4 layers"):
        make_engine(HYBRID_MOE, offload_layers=5)
