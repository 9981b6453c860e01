"""The storage format of weights, by part and scheme, in `inspect`, /v1/models and /health."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from gguf_files import CONFIGS, random_state, write_embedded, write_folder, write_gguf
from packed_checkpoints import FORMATS, in_mlx_form, pack_state, plain_state, write
from penstock.cli import main
from penstock.models.source import find_model
from penstock.weights import checkpoint
from penstock.weights.gguf_reader import open_gguf
from penstock.weights.quantized import find_format, open_weights
from penstock.weights.storage_report import describe_storage
from penstock.weights.stored import StoredTensor
from serving import start_server
from small_models import HYBRID_MOE, LLAMA


def test_every_weight_is_counted_once_by_part_and_scheme(tmp_path: Path) -> None:
    config = CONFIGS["qwen35moe"]
    state = random_state(config)
    stored = open_gguf(
        write_gguf(tmp_path / "model.gguf", "qwen35moe", config, state, matrices="Q8_0")
    )
    storage = describe_storage(stored)
    numbers = {(group.part, group.scheme): group.num_weights for group in storage.groups}
    assert sum(numbers.values()) == sum(tensor.numel() for tensor in state.values())
    experts = (
        4 * config["num_experts"] * 3 * config["hidden_size"] * config["moe_intermediate_size"]
    )
    assert numbers["experts", "Q8_0"] == experts
    assert numbers["embedding", "Q8_0"] == config["vocab_size"] * config["hidden_size"]
    assert {part for part, _ in numbers} == {
        *("drafting head", "norms", "embedding", "head", "router", "experts", "shared expert"),
        *("DeltaNet", "attention"),
    }
    assert storage.schemes[0] == "Q8_0"
    assert storage.num_bytes == sum(tensor.num_bytes for tensor in stored)
    assert 8.5 <= storage.bits_per_weight < 9.5


def test_plain_numbers_are_called_by_their_dtype() -> None:
    def nothing(rows: slice | None) -> torch.Tensor:
        raise AssertionError("no weight is read")

    storage = describe_storage([StoredTensor("lm_head.weight", (4, 8), torch.bfloat16, nothing)])
    (group,) = storage.groups
    assert (group.part, group.scheme, group.num_bytes, group.bits_per_weight) == (
        "head",
        "bfloat16",
        64,
        16,
    )


def test_inspect_says_how_a_gguf_file_stores_its_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = CONFIGS["llama"]
    file = write_gguf(
        tmp_path / "small.gguf", "llama", config, random_state(config), matrices="Q4_0"
    )
    assert main(["inspect", str(file), "--json"]) == 0
    stored = json.loads(capsys.readouterr().out)["stored"]
    attention = [group for group in stored["groups"] if group["part"] == "attention"]
    assert [(group["scheme"], group["bits_per_weight"]) for group in attention] == [("Q4_0", 4.5)]
    assert main(["inspect", str(file)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"attention +Q4_0 +\S+ \S+ +4.50", said)
    assert "bits per weight" in said


@pytest.mark.parametrize("format", ["gguf", "int4"])
def test_inspect_counts_quantized_weights_as_they_are_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], format: str
) -> None:
    path = write_embedded(tmp_path / "tiny.gguf", "Q4_0")
    if format == "int4":
        path = write_packed(tmp_path / "packed")
    assert main(["inspect", str(path), "--json", "--gpus", "2xL40S"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["is_quantized"]
    in_files = report["stored"]["num_bytes"]
    assert 0.7 * in_files < report["weight_bytes"] < 1.1 * in_files
    here = report["machine"]["weight_bytes"]
    assert report["memory"]["uses"][0][:2] == ["weights", here]
    assert report["weight_bytes"] <= here < 1.1 * in_files
    alone, both = (layout["weight_bytes"] for layout in report["layouts"])
    assert alone == report["weight_bytes"]
    assert 0.5 * alone <= both < 0.8 * alone
    assert main(["inspect", str(path)]) == 0
    assert "weights, quantized" in capsys.readouterr().out


def test_a_command_reads_the_headers_of_a_checkpoint_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write_packed(tmp_path / "packed"))
    opened: list[Path] = []

    def open_checkpoint(path: Path) -> list[StoredTensor]:
        opened.append(path)
        return checkpoint.open_checkpoint(path)

    monkeypatch.setattr("penstock.weights.quantized.open_checkpoint", open_checkpoint)
    assert main(["inspect", path, "--gpus", "2xL40S", "--json"]) == 0
    assert opened == [Path(path)]
    opened.clear()
    assert main(["plan", path, "--gpus", "2xL40S", "--rate", "1", "--requests", "2"]) == 0
    assert opened == [Path(path)]


def test_inspect_of_a_folder_without_weights_says_what_its_model_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "small", CONFIGS["qwen2"], random_state(CONFIGS["qwen2"]))
    assert main(["inspect", str(folder), "--json"]) == 0
    (group, *_) = json.loads(capsys.readouterr().out)["stored"]["groups"]
    assert group["scheme"] == "float32"
    (folder / "model.safetensors").unlink()
    assert main(["inspect", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stored"] is None


def test_a_server_of_a_gguf_file_answers_and_says_how_its_weights_are_stored(
    tmp_path: Path,
) -> None:
    file = write_embedded(tmp_path / "tiny-Q8_0.gguf", "Q8_0")
    with start_server(engine={"model": str(file)}) as server:
        (card,) = server.http.get(f"{server.url}/v1/models").json()["data"]
        assert card["id"] == "tiny-Q8_0"
        assert card["weights"]["dtype"] == "float32"
        assert card["weights"]["stored_as"][0] == "Q8_0"
        assert 8.5 <= card["weights"]["bits_per_weight"] < 9.5
        health = server.health().json()
        assert health["weights"] == card["weights"]
        (listed,) = server.http.get(f"{server.url}/api/tags").json()["models"]
        assert listed["details"]["quantization_level"] == "Q8_0"
        assert health["sampling"]["temperature"] == 0.7
        body = {
            "model": "tiny-Q8_0",
            "messages": [{"role": "user", "content": "What is 2 plus 3?"}],
            "max_tokens": 60,
            "temperature": 0,
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "sum",
                    "schema": {
                        "type": "object",
                        "properties": {"sum": {"enum": [5]}},
                        "required": ["sum"],
                    },
                },
            },
        }
        reply = server.http.post(f"{server.url}/v1/chat/completions", json=body).json()
        assert json.loads(reply["choices"][0]["message"]["content"]) == {"sum": 5}


def test_a_server_that_quantizes_at_load_says_so() -> None:
    with start_server(engine={"quantization": "int4"}) as server:
        (card,) = server.http.get(f"{server.url}/v1/models").json()["data"]
        assert card["weights"]["stored_as"][0] == "bfloat16"
        assert card["weights"]["quantized_at_load"] == "int4"
        assert server.health().json()["weights"] == card["weights"]
        (listed,) = server.http.get(f"{server.url}/api/tags").json()["models"]
        assert listed["details"]["quantization_level"] == "INT4"


def write_packed(folder: Path) -> Path:
    format = FORMATS["int4"]
    packed, _ = pack_state(plain_state(LLAMA), format)
    return write(folder, packed, {**LLAMA, "quantization_config": format.quantization})


def test_bits_are_those_of_codes_and_scales_together(tmp_path: Path) -> None:
    source = find_model(str(write_packed(tmp_path)))
    storage = describe_storage(open_weights(source, find_format(source)))
    assert storage.schemes[0] == "int4 g32"
    groups = {group.part: group for group in storage.groups}
    assert groups["embedding"].scheme == "float32"
    mlp = groups["MLP"]
    assert mlp.num_weights == 2 * 3 * 64 * 96
    # Scales are bfloat16, and each of the six matrices stores its shape as two numbers of 8 bytes.
    assert mlp.num_bytes == mlp.num_weights * (4 + 16 / 32) / 8 + 6 * 16


def test_experts_that_were_stacked_are_counted_once(tmp_path: Path) -> None:
    packed, _ = pack_state(plain_state(HYBRID_MOE), FORMATS["mlx"])
    state = in_mlx_form(packed, "language_model.")
    folder = write(tmp_path, state, {**HYBRID_MOE, "quantization": FORMATS["mlx"].quantization})
    source = find_model(str(folder))
    storage = describe_storage(open_weights(source, find_format(source)))
    assert storage.num_bytes == sum(part.nbytes for part in state.values())
    experts = {
        group.scheme: group.bits_per_weight for group in storage.groups if group.part == "experts"
    }
    # 4 bits, and a 16-bit scale and bias per 32; a row of down_proj is one group.
    assert experts == {"int4 g32": 5.0, "int4 per channel": 5.0}


def test_inspect_needs_no_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stored"] is None
