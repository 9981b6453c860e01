"""The default number of GPUs of an engine: as many as its weights need."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import penstock.commands.serve as command
from penstock.config import EngineConfig, ServeConfig
from penstock.models.source import ModelSource, find_model
from penstock.serve.devices import choose_tp, least_gpu_bytes, weight_bytes

GB = 10**9


def folder(tmp_path: Path, num_bytes: int, **config: object) -> ModelSource:
    """A model in one sparse file of this size."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    with (tmp_path / "model.safetensors").open("wb") as file:
        os.truncate(file.fileno(), num_bytes)
    return find_model(str(tmp_path))


@pytest.mark.parametrize(
    ("gb", "num_gpus", "tp"),
    [(70, 8, 1), (110, 8, 1), (120, 8, 2), (250, 8, 4), (800, 8, 8), (250, 6, 1), (210, 6, 2)],
)
def test_the_fewest_gpus_that_hold_the_weights_are_taken(
    tmp_path: Path, gb: int, num_gpus: int, tp: int
) -> None:
    source = folder(tmp_path, gb * GB)
    assert choose_tp(source, EngineConfig(), num_gpus, 141 * GB) == tp


def test_weights_that_will_be_rounded_count_less(tmp_path: Path) -> None:
    source = folder(tmp_path, 200 * GB)
    assert choose_tp(source, EngineConfig(quantization="fp8"), 8, 141 * GB) == 1
    packed = folder(tmp_path, 200 * GB, quantization_config={"quant_method": "fp8"})
    assert choose_tp(packed, EngineConfig(quantization="fp8"), 8, 141 * GB) == 2


def test_all_files_of_a_split_model_count_and_no_others(tmp_path: Path) -> None:
    for name in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "other-Q4.gguf"):
        with (tmp_path / name).open("wb") as file:
            os.truncate(file.fileno(), 3 * GB)
    source = ModelSource("m", tmp_path / "m-00001-of-00002.gguf", {})
    assert weight_bytes(source, EngineConfig()) == 6 * GB
    assert weight_bytes(ModelSource("o", tmp_path / "other-Q4.gguf", {}), EngineConfig()) == 3 * GB


@pytest.mark.parametrize(
    "settings",
    [{"device": "cpu"}, {"expert_cache": "6GB"}, {"expert_ram": "40GB"}, {"offload_layers": 4}],
)
def test_other_ways_to_run_are_left_alone(tmp_path: Path, settings: dict[str, Any]) -> None:
    source = folder(tmp_path, 800 * GB)
    assert choose_tp(source, EngineConfig(**settings), 8, 141 * GB) == 1
    assert choose_tp(source, EngineConfig(), 8, None) == 1
    assert choose_tp(find_model("Qwen3.5-397B-A17B"), EngineConfig(), 8, 141 * GB) == 1


@pytest.mark.parametrize(
    ("serve", "tp"), [({"gpus": (0, 1, 2, 3)}, 2), ({"replicas": 2}, 2), ({"replicas": 8}, 1)]
)
def test_the_server_spreads_a_model_over_the_gpus_it_may_use(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    serve: dict[str, object],
    tp: int,
) -> None:
    folder(tmp_path, 200 * GB)
    monkeypatch.setattr(command, "count_gpus", lambda: 8)
    monkeypatch.setattr(command, "least_gpu_bytes", lambda: 141 * GB)
    config = command.spread(EngineConfig(model=str(tmp_path)), ServeConfig(**serve))  # type: ignore[arg-type]
    assert config.tp == tp
    assert (f"(--tp {tp})" in capsys.readouterr().err) == (tp > 1)


def test_the_drivers_tool_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 143771\necho 81559\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert least_gpu_bytes() == 81559 * 1024**2
    tool.write_text("#!/bin/sh\necho none\n")
    assert least_gpu_bytes() is None
    monkeypatch.setenv("PATH", "/nowhere")
    assert least_gpu_bytes() is None
