"""Random GGUF files: other readers accept them, and a model from one runs."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from penstock.config import EngineConfig
from penstock.engine.engine import Engine
from small_models import HYBRID_MOE, LLAMA, logprobs_of, request, run

SCRIPT = Path(__file__).parents[1] / "scripts" / "make_random_gguf.py"
WIDE = {"hidden_size": 256, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen35moe": {**HYBRID_MOE, **WIDE, "mtp_num_hidden_layers": 1},
    "qwen2": {**LLAMA, "model_type": "qwen2", "hidden_size": 256, "intermediate_size": 512},
}


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_random_file_is_read_by_others_and_runs(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, file = CONFIGS[architecture], tmp_path / "random.gguf"
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = [str(SCRIPT), str(tmp_path), "-o", str(file), "--with-drafting-head"]
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_path(str(SCRIPT), run_name="__main__")
    reader = gguf.GGUFReader(file)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert tensors["output.weight"].tensor_type.name == "Q6_K"
    known = {name.format(bid=layer) for name in gguf.TENSOR_NAMES.values() for layer in range(5)}
    assert {name.removesuffix(".weight").removesuffix(".bias") for name in tensors} <= known
    for tensor in tensors.values():
        if tensor.tensor_type.name != "F32" and tensor.n_elements > 10_000:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            width = int(tensor.shape[0])
            assert 0.9 < values.std() * np.sqrt(width) < 1.1, tensor.name
            assert abs(values.mean()) * np.sqrt(width) < 0.1, tensor.name
    settings = {"max_model_len": 64, "memory_gb": 0.1}
    engine = Engine.from_config(EngineConfig(model=str(file), device="cpu", **settings))
    deltas = run(engine, request("a", (5, 300, 7), max_tokens=3, logprobs=1))
    assert all(-30.0 < one.logprob < 0.0 for one in logprobs_of(deltas["a"]))
