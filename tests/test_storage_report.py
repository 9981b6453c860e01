"""How weights are stored is said the same by `penstock inspect`, by the engine and by the file itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from packed_checkpoints import FORMATS, in_mlx_form, pack_state, plain_state, write
from penstock.cli import main
from penstock.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.models.source import find_model
from penstock.weights.quantized import find_format, open_weights
from penstock.weights.storage_report import describe_storage
from small_models import HYBRID_MOE, LLAMA


def write_packed(folder: Path) -> Path:
    format = FORMATS["int4"]
    packed, _ = pack_state(plain_state(LLAMA), format)
    return write(folder, packed, {**LLAMA, "quantization_config": format.quantization})


def test_bits_are_those_of_codes_and_scales_together(tmp_path: Path) -> None:
    source = find_model(str(write_packed(tmp_path)))
    storage = describe_storage(open_weights(source, find_format(source)))
    assert storage["scheme"] == "int4 g32"
    groups = {row["group"]: row for row in storage["groups"]}
    assert list(groups) == ["embedding", "head", "attention", "MLP", "norms, gates and the rest"]
    assert groups["embedding"]["scheme"] == "float32"
    assert groups["embedding"]["bits_per_weight"] == 32.0
    mlp = groups["MLP"]
    assert mlp["weights"] == 2 * 3 * 64 * 96
    # Scales are bfloat16, and each of the six matrices stores its shape as two numbers of 8 bytes.
    assert mlp["bytes"] == mlp["weights"] * (4 + 16 / 32) / 8 + 6 * 16
    assert storage["bytes"] == sum(row["bytes"] for row in storage["groups"])


def test_experts_that_were_stacked_are_counted_once(tmp_path: Path) -> None:
    packed, _ = pack_state(plain_state(HYBRID_MOE), FORMATS["mlx"])
    state = in_mlx_form(packed, "language_model.")
    folder = write(tmp_path, state, {**HYBRID_MOE, "quantization": FORMATS["mlx"].quantization})
    source = find_model(str(folder))
    storage = describe_storage(open_weights(source, find_format(source)))
    assert storage["bytes"] == sum(part.nbytes for part in state.values())
    experts = {
        row["scheme"]: row["bits_per_weight"] for row in storage["groups"] if row["group"] == "experts"
    }
    # 4, and a scale and a bias of 16 bits for each 32; a row of down_proj is as long as a group.
    assert experts == {"int4 g32": 5.0, "int4 per channel": 5.0}


def test_inspect_shows_the_scheme_of_each_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write_packed(tmp_path))
    assert main(["inspect", folder]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["MLP", "int4", "g32", "4.52", "20.8", "kB"] in rows
    assert main(["inspect", folder, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["storage"]["scheme"] == "int4 g32"


def test_inspect_needs_no_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["storage"] is None


def test_an_engine_knows_how_its_weights_are_stored(tmp_path: Path) -> None:
    config = EngineConfig(model=str(write_packed(tmp_path)), device="cpu", memory_gb=0.01)
    weights = Engine.from_config(config).info.weights
    assert weights["scheme"] == "int4 g32"
    assert 4.5 < weights["bits_per_weight"] < 32.0
    assert weights["dtype"] == "float32"
