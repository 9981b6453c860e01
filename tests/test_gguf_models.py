"""Every architecture as a GGUF file gives the same model as the original checkpoint."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gguf_files import CONFIGS, random_state, write_embedded, write_folder, write_gguf
from penstock import LLM, SamplingParams
from penstock.errors import CheckpointError, PenstockError
from penstock.models.source import find_model
from penstock.weights.gguf_reader import open_gguf
from penstock.weights.load import weights_of
from small_models import LLAMA, load_weights

ONE_LAYER = {**LLAMA, "num_hidden_layers": 1}


def parameters_of(path: Path) -> dict[str, Tensor]:
    return {name: parameter.data for name, parameter in load_weights(path).named_parameters()}


def error_of(act: Callable[[], object]) -> str:
    with pytest.raises(PenstockError) as caught:
        act()
    error = caught.value
    assert error.what
    assert error.why
    assert error.todo
    return f"{error.what} {error.why} {error.todo}"


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_gguf_file_gives_the_model_of_its_checkpoint(architecture: str, tmp_path: Path) -> None:
    config = CONFIGS[architecture]
    state = random_state(config)
    folder = write_folder(tmp_path / "original", config, state)
    file = write_gguf(tmp_path / "model.gguf", architecture, config, state)
    expected, found = load_weights(folder), load_weights(file)
    values = dict(found.named_parameters())
    for name, parameter in expected.named_parameters():
        if name.endswith("a_log"):  # the file stores -exp of it
            torch.testing.assert_close(values[name], parameter, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(values[name], parameter), name
    assert torch.equal(found.rope.table, expected.rope.table)  # type: ignore[union-attr]
    assert _numbers(found) == _numbers(expected)


def _numbers(model: nn.Module) -> dict[str, Any]:
    """The fields of a config, except how the checkpoint's files are laid out."""
    config = model.config
    return {
        name: getattr(config, name) for name in config.__dataclass_fields__ if name != "is_nested"
    }


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("qwen35moe", "Q8_0"),
        *(("llama", kind) for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")),
    ],
)
def test_packed_matrices_expand_to_what_the_gguf_package_says(
    architecture: str, kind: str, tmp_path: Path
) -> None:
    """Also if rows and columns are reordered, experts are cut out, or only some rows are read."""
    config = CONFIGS[architecture]
    state = random_state(config)
    file = write_gguf(tmp_path / "model.gguf", architecture, config, state, matrices=kind)
    plain = write_gguf(
        tmp_path / "plain.gguf", architecture, config, state, matrices=kind, is_expanded=True
    )
    expanded = {tensor.name: tensor.load() for tensor in open_gguf(plain)}
    num_packed = 0
    for tensor in open_gguf(file):
        whole = tensor.load()
        assert whole.shape == tensor.shape
        assert torch.equal(whole, expanded[tensor.name])
        assert torch.equal(tensor.load(slice(1, 3)), whole[1:3])
        if tensor.scheme:
            assert tensor.scheme == kind
            assert tensor.read_codes is not None
            assert torch.equal(tensor.read_codes(None).dequantize(), whole)
            assert torch.equal(tensor.read_codes(slice(1, 3)).dequantize(), whole[1:3])
            block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
            assert tensor.num_bytes * block_size == whole.numel() * block_bytes
            num_packed += 1
    assert num_packed > 10


@pytest.mark.parametrize("architecture", ["qwen35moe", "qwen3moe", "llama"])
def test_weights_that_stay_packed_are_those_of_the_file(architecture: str, tmp_path: Path) -> None:
    """Rows of many experts are decoded in groups, and in the model's order."""
    config = {**CONFIGS[architecture], "vocab_size": 17_000}
    arguments: tuple[Any, ...] = (architecture, config, random_state(config))
    file = write_gguf(tmp_path / "packed.gguf", *arguments, matrices="Q8_0")
    plain = write_gguf(tmp_path / "plain.gguf", *arguments, matrices="Q8_0", is_expanded=True)
    found, expected = (weights_of(load_weights(path)) for path in (file, plain))
    for name, weight in found.items():
        assert torch.equal(weight.dequantize(), expected[name].values), name
    stacks = [part for weight in found.values() for part in weight.parts if len(part.shape) == 3]
    assert any(weight.parts for weight in found.values())
    assert bool(stacks) == ("moe" in architecture)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ3_S"])
def test_heads_come_back_in_order_though_a_block_holds_parts_of_two(
    kind: str, tmp_path: Path
) -> None:
    """DeltaNet's output: columns of four value heads of 128, tiled in the file in blocks of 256."""
    block_type = gguf.GGMLQuantizationType[kind]
    block_bytes = gguf.GGML_QUANT_SIZES[block_type][1]
    data = np.random.default_rng(0).integers(
        0, 60, (64, 2 * block_bytes), dtype=np.uint8
    )  # no infinities
    tiled = torch.from_numpy(gguf.quants.dequantize(data, block_type))
    config = {**CONFIGS["qwen35"], "linear_value_head_dim": 128}
    state = {"model.embed_tokens.weight": torch.zeros(320, 64)}
    extra = {"blk.0.ssm_a": (-np.ones(4, np.float32), "F32"), "blk.0.ssm_out.weight": (data, kind)}
    file = write_gguf(tmp_path / "model.gguf", "qwen35", config, state, extra=extra)
    (found,) = [tensor for tensor in open_gguf(file) if tensor.name.endswith("out_proj.weight")]
    assert torch.equal(found.load(), tiled.view(64, 2, 2, 128).transpose(1, 2).reshape(64, 512))
    if found.read_codes is not None:
        assert torch.equal(found.read_codes(slice(3, 9)).dequantize(), found.load()[3:9])


@pytest.mark.parametrize(("kind", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_halves_are_read_as_they_are(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config = CONFIGS["qwen35"]
    state = random_state(config)
    file = write_gguf(tmp_path / "model.gguf", "qwen35", config, state, matrices=kind)
    stored = {tensor.name: tensor for tensor in open_gguf(file)}
    for name in (
        "model.layers.0.linear_attn.out_proj.weight",
        "model.layers.3.self_attn.q_proj.weight",
    ):
        assert stored[name].dtype == dtype
        assert not stored[name].scheme
        assert torch.equal(stored[name].load(), state[name].to(dtype))


@pytest.mark.parametrize("settings", [{"split_max_tensors": 9}, {"fuses_experts": True}], ids=str)
def test_split_files_and_fused_experts_are_the_same_model(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    config = CONFIGS["qwen35moe"]
    state = random_state(config)
    whole = parameters_of(write_gguf(tmp_path / "whole.gguf", "qwen35moe", config, state))
    write_gguf(tmp_path / "other.gguf", "qwen35moe", config, state, **settings)
    other = parameters_of(min(tmp_path.glob("other*.gguf")))
    assert all(torch.equal(other[name], parameter) for name, parameter in whole.items())


@pytest.mark.parametrize("matrices", ["F32", "Q8_0"])
def test_the_embedded_model_as_a_gguf_file_says_the_same(matrices: str, tmp_path: Path) -> None:
    question = [{"role": "user", "content": "What is 17 plus 25?"}]
    greedy = SamplingParams(temperature=0, max_tokens=24)
    original = LLM(memory_gb=0.2, dtype="float32")
    llm = LLM(str(write_embedded(tmp_path / "tiny.gguf", matrices)), memory_gb=0.2, dtype="float32")
    assert llm.chat(question, greedy).text == original.chat(question, greedy).text
    assert llm.sampling_defaults == {"temperature": 0.7, "top_k": 20}
    assert llm.tokenizer.eos_token_ids == original.tokenizer.eos_token_ids[:1]
    assert llm.engine.info.stored_as[0] == {"F32": "float32", "Q8_0": "Q8_0"}[matrices]


def test_types_without_codes_are_expanded_by_the_gguf_package_and_their_cost_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, expected = _with_one_tensor(tmp_path / "model.gguf", "IQ3_S")
    with caplog.at_level(logging.WARNING):
        (tensor,) = [tensor for tensor in open_gguf(file) if tensor.scheme]
    assert torch.equal(tensor.load(), expected)
    assert torch.equal(tensor.load(slice(2, 5)), expected[2:5])
    assert tensor.read_codes is None
    assert "1 tensors of type IQ3_S" in caplog.text
    assert "0.00 GB in the file" in caplog.text


def test_a_type_nothing_can_expand_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, _ = _with_one_tensor(tmp_path / "refused.gguf", "Q8_1")
    assert "as Q8_1, which cannot be read" in error_of(lambda: open_gguf(refused))
    file, _ = _with_one_tensor(tmp_path / "model.gguf", "IQ3_S")
    monkeypatch.setitem(sys.modules, "gguf", None)  # as if it were not installed
    text = error_of(lambda: open_gguf(file))
    assert "as IQ3_S, which cannot be read" in text
    assert "pip install 'penstock[gguf]'" in text


def _with_one_tensor(path: Path, kind: str) -> tuple[Path, Tensor]:
    block_type = gguf.GGMLQuantizationType[kind]
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[block_type]
    data = np.random.default_rng(0).integers(
        0, 256, (8, 256 // block_size * block_bytes), dtype=np.uint8
    )
    data[:, 0:2] = np.array([0.5], np.float16).view(np.uint8)
    state = {"model.embed_tokens.weight": torch.zeros(320, 64)}
    write_gguf(path, "llama", ONE_LAYER, state, extra={"blk.0.ffn_up.weight": (data, kind)})
    if kind == "Q8_1":
        return path, torch.empty(0)
    return path, torch.from_numpy(gguf.quants.dequantize(data, block_type))


def test_a_packed_vector_is_refused(tmp_path: Path) -> None:
    extra = {"blk.0.attn_norm.weight": (np.zeros(68, np.uint8), "Q8_0")}
    state = {"model.embed_tokens.weight": torch.zeros(320, 64)}
    path = write_gguf(tmp_path / "model.gguf", "llama", ONE_LAYER, state, extra=extra)
    assert "blk.0.attn_norm.weight is a vector" in error_of(lambda: open_gguf(path))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            {"general.architecture": "gemma3"},
            "of the architecture 'gemma3' Supported are llama, qwen2",
        ),
        ({"general.architecture": "clip"}, "give the file of its text model"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type in model.gguf is yarn"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count in model.gguf is 8"),
        ({"llama.expert_count": 8}, "Mixtral"),
        ({"llama.attention.value_length": 8}, "attention.value_length"),
        ({"llama.attention.causal": False}, "llama.attention.causal in model.gguf is False"),
        ({"llama.attention.scale": 0.5}, "llama.attention.scale in model.gguf is 0.5"),
        ({"llama.pooling_type": 1}, "llama.pooling_type in model.gguf is 1"),
        (
            {"llama.attention.sliding_window": 1024},
            "llama.attention.sliding_window in model.gguf is 1024",
        ),
        (
            {"llama.final_logit_softcapping": 30.0},
            "llama.final_logit_softcapping in model.gguf is 30.0",
        ),
        ({"llama.embedding_scale": [1.0]}, "llama.embedding_scale in model.gguf is [1.0]"),
        (
            {"llama.feed_forward_length": [96, 48]},
            "llama.feed_forward_length in model.gguf is [96, 48]",
        ),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count"),
        ({"llama.embedding_length": "many"}, "one whole number"),
    ],
)
def test_what_no_model_here_computes_is_refused_by_name(
    change: dict[str, Any], what: str, tmp_path: Path
) -> None:
    architecture = change.get("general.architecture", "llama")
    metadata = {key: value for key, value in change.items() if key != "general.architecture"}
    path = tmp_path / "model.gguf"
    write_gguf(path, architecture, ONE_LAYER, random_state(ONE_LAYER), metadata=metadata)
    assert what in error_of(lambda: find_model(str(path)))


@pytest.mark.parametrize("factors", [np.linspace(1, 3, 8), np.ones(3), np.full(8, np.nan)])
def test_other_factors_of_frequencies_than_llama_3s_are_refused(
    factors: np.ndarray, tmp_path: Path
) -> None:
    extra = {"rope_freqs.weight": (factors.astype(np.float32), "F32")}
    path = write_gguf(
        tmp_path / "model.gguf", "llama", ONE_LAYER, random_state(ONE_LAYER), extra=extra
    )
    assert "is not the scaling of Llama 3.1" in error_of(lambda: find_model(str(path)))


def test_what_changes_nothing_is_taken(tmp_path: Path) -> None:
    metadata = {
        "llama.attention.scale": 0.25,  # 1 / sqrt of a head of 16
        "llama.attention.sliding_window": 4096,
        "llama.attention.causal": True,
        "llama.logit_scale": 1.0,
        "llama.attention.head_count_kv": [2, 2],
    }
    path = write_gguf(
        tmp_path / "model.gguf", "llama", ONE_LAYER, random_state(ONE_LAYER), metadata=metadata
    )
    assert find_model(str(path)).config["num_key_value_heads"] == 2


def test_a_folder_with_one_gguf_model_is_that_model(tmp_path: Path) -> None:
    write_gguf(tmp_path / "small-Q8_0.gguf", "llama", ONE_LAYER, random_state(ONE_LAYER))
    (tmp_path / "mmproj-small.gguf").write_bytes(b"GGUF")
    source = find_model(str(tmp_path))
    assert source.name == "small-Q8_0"
    assert source.path == tmp_path / "small-Q8_0.gguf"
    write_gguf(tmp_path / "small-Q4_0.gguf", "llama", ONE_LAYER, random_state(ONE_LAYER))
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF models"):
        find_model(str(tmp_path))


def test_a_gguf_file_needs_no_name_of_its_own(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "sha256-0123abcd", "llama", ONE_LAYER, random_state(ONE_LAYER))
    assert find_model(str(file)).config["model_type"] == "llama"
    assert len(parameters_of(file)) > 5
