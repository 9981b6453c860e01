"""Quantized safetensors: every format gives its own library's numbers, and models load from it."""

from __future__ import annotations

import json
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from packed_checkpoints import FORMATS, in_mlx_form, pack_state, plain_state, write
from penstock.errors import CheckpointError
from penstock.models.source import ModelSource
from penstock.ops.cpu import quantized as kernels
from penstock.ops.weight import Weight
from penstock.weights.codes import Codes
from penstock.weights.formats.parts import matches
from penstock.weights.quantized import find_format, open_weights
from penstock.weights.stored import StoredTensor
from small_models import HYBRID_DENSE, HYBRID_MOE, LLAMA, load_weights, prompt
from step_inputs import ByHand

REFUSED = ("bitsandbytes", "eetq", "aqlm", "quanto", "torchao", "fbgemm_fp8", "mxfp4", "quark")
VALUES = Path(__file__).parent / "data" / "quantized_values.safetensors"


def read_cases() -> dict[str, tuple[dict[str, Any], dict[str, Tensor], Tensor]]:
    """Config, parts and values by case, as data/make_quantized_values.py wrote them."""
    with VALUES.open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    configs = json.loads(header["__metadata__"]["configs"])
    tensors = load_file(VALUES)
    cases = {}
    for case, config in configs.items():
        parts = {
            name.removeprefix(f"{case}/"): part
            for name, part in tensors.items()
            if name.startswith(f"{case}/")
        }
        expected = parts.pop("expected")
        cases[case] = (config, parts, expected)
    return cases


CASES = read_cases()


def open_parts(
    folder: Path, quantization: dict[str, Any], parts: dict[str, Tensor]
) -> list[StoredTensor]:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: part.clone().contiguous() for name, part in parts.items()},
        folder / "model.safetensors",
    )
    source = ModelSource("small", folder, {"quantization_config": quantization})
    return open_weights(source, find_format(source))


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_the_formats_own_library(tmp_path: Path, case: str) -> None:
    config, parts, expected = CASES[case]
    [weight] = open_parts(tmp_path, config, parts)
    assert weight.name == "x.weight"
    assert weight.shape == tuple(expected.shape)
    assert torch.equal(
        weight.load().view(torch.int32), expected.view(torch.int32)
    )  # including the signs of zeros
    for rows in (slice(0, 3), slice(3, 8), slice(5, 6), slice(2, 2)):
        assert torch.equal(weight.load(rows), expected[rows])
    if len(expected) > 128:  # within a block of rows, and across its end
        for rows in (slice(100, 130), slice(128, 130), slice(0, 129)):
            assert torch.equal(weight.load(rows), expected[rows])
    assert weight.read_codes is not None
    assert weight.read_codes(None).values.shape == expected.shape
    assert weight.num_bytes == sum(part.nbytes for part in parts.values())


MTP = {"mtp_num_hidden_layers": 1}
FAMILIES = {"hybrid_moe": {**HYBRID_MOE, **MTP}, "hybrid_dense": HYBRID_DENSE, "llama": LLAMA}


def values_of(model: nn.Module) -> dict[str, Tensor]:
    plain = {name: value for name, value in model.named_parameters() if not value.is_meta}
    weights = {name: module for name, module in model.named_modules() if isinstance(module, Weight)}
    return plain | {f"{name}.values": weight.dequantize() for name, weight in weights.items()}


def assert_same(ours: nn.Module, expected: nn.Module) -> None:
    """Checks for the same values, bit for bit, and the same logits."""
    found, theirs = values_of(ours), values_of(expected)
    assert found.keys() == theirs.keys()
    for name, value in found.items():
        assert torch.equal(value, theirs[name]), name
    for length in (1, 5, 40):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "is_available", lambda rows: False)  # rows are dequantized then
            exact = logits_of(expected, length)
            assert exact.isfinite().all()
            assert (logits_of(ours, length) - exact).abs().max() <= 1e-5 * exact.abs().max()
        # Products with codes round their inputs to 16 bits. These small models amplify that, and a
        # token may choose the other of two nearly tied experts.
        errors = (logits_of(ours, length) - exact).abs().amax(-1)
        assert (errors <= 1e-2 * exact.abs().max()).float().mean() >= 0.9


def logits_of(model: nn.Module, length: int) -> Tensor:
    by_hand = ByHand(model)
    (logits,) = by_hand.run(by_hand.row(0, prompt(length)))
    return logits


@pytest.mark.thinned
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_packed_model_is_the_one_of_its_expanded_weights(
    tmp_path: Path, name: str, family: str
) -> None:
    """Every format and family, with experts and the drafting head; MLX in its own form."""
    config, format = FAMILIES[family], FORMATS[name]
    packed, expanded = pack_state(plain_state(config), format)
    if name == "mlx":
        expanded = {
            name: values for name, values in expanded.items() if not name.startswith("mtp.")
        }
        packed = in_mlx_form(packed, "" if family == "llama" else "language_model.")
    assert len(packed) > len(expanded) or name == "mlx"
    quantized = write(tmp_path / "packed", packed, {**config, format.key: format.quantization})
    assert_same(load_weights(quantized), load_weights(write(tmp_path / "plain", expanded, config)))


@pytest.mark.parametrize("name", ["fp8", "gptq", "mlx"])
def test_names_are_those_of_the_published_files(tmp_path: Path, name: str) -> None:
    """A text model inside a vision model, whose other tensors are skipped."""
    format, config = (
        FORMATS[name],
        {"model_type": "qwen3_5_moe", "text_config": FAMILIES["hybrid_moe"]},
    )
    packed, expanded = pack_state(plain_state(FAMILIES["hybrid_moe"]), format)
    seeing = {"model.visual.blocks.0.attn.qkv.weight": torch.ones(6, 2)}
    if name == "mlx":
        expanded = {
            name: values for name, values in expanded.items() if not name.startswith("mtp.")
        }
        published = in_mlx_form(packed, "language_model.")
        seeing = {"vision_tower.blocks.0.attn.qkv.weight": torch.ones(6, 2)}
    else:
        inside = ("model.", "model.language_model.")
        published = {
            inside[1] + name.removeprefix(inside[0]) if name.startswith(inside[0]) else name: part
            for name, part in packed.items()
        }
    quantized = {**config, format.key: format.quantization}
    folder = write(tmp_path / "packed", published | seeing, quantized)
    assert_same(load_weights(folder), load_weights(write(tmp_path / "plain", expanded, config)))


def test_fp8_blocks_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    codes, scale = torch.randn(256, 384).to(torch.float8_e4m3fn), torch.rand(2, 3).bfloat16()
    config = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }
    [weight] = open_parts(tmp_path, config, {"x.weight": codes, "x.weight_scale_inv": scale})
    assert weight.scheme == "fp8 128x128"
    expected = Fp8Dequantize(None)._dequantize_one(codes, scale, torch.float32)
    assert torch.equal(weight.load(), expected)


@pytest.mark.parametrize("block", [[2**24, 2**24], "128x128", [130, 1], [1, 140], [7, 11]])
def test_blocks_may_be_larger_than_the_weight_and_need_not_divide_it(
    tmp_path: Path, block: Any
) -> None:
    height, width = map(int, block.split("x")) if isinstance(block, str) else block
    codes = torch.randn(130, 140).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-130 // height), -(-140 // width))
    config = {"quant_method": "fp8", "weight_block_size": block}
    [weight] = open_parts(tmp_path, config, {"x.weight": codes, "x.weight_scale_inv": scale})
    expected = codes.float() * scale[torch.arange(130) // height][:, torch.arange(140) // width]
    assert torch.equal(weight.load(), expected)
    assert torch.equal(weight.load(slice(60, 129)), expected[60:129])


def test_fused_experts_of_fp8_are_read_by_expert(tmp_path: Path) -> None:
    codes, scale = torch.randn(3, 40, 50).to(torch.float8_e4m3fn), torch.rand(3, 2, 2)
    parts = {"mlp.experts.gate_up_proj": codes, "mlp.experts.gate_up_proj_scale_inv": scale}
    parts["mlp.experts.gate_up_proj_activation_scale"] = torch.ones(3)
    [weight] = open_parts(tmp_path, {"quant_method": "fp8", "weight_block_size": [32, 32]}, parts)
    assert weight.name == "mlp.experts.gate_up_proj"
    expected = codes.float() * scale.repeat_interleave(32, 1).repeat_interleave(32, 2)[:, :40, :50]
    assert torch.equal(weight.load(), expected)
    assert torch.equal(weight.load(slice(1, 2)), expected[1:2])


def test_the_cost_of_the_expansion_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If there are no kernels for packed weights, as on a GPU."""
    monkeypatch.setattr("penstock.weights.load._weights_that_stay_quantized", lambda *_: {})
    packed, _ = pack_state(plain_state(LLAMA), FORMATS["int8"])
    load_weights(
        write(tmp_path, packed, {**LLAMA, "quantization_config": FORMATS["int8"].quantization})
    )
    # In each of two layers, q, k, v and o have 6, 2, 2 and 6 heads of 16, and the MLP is 96 wide.
    weights = 2 * 64 * (16 * 16 + 3 * 96)
    assert weights == 69632
    assert (
        "14 quantized weights are dequantized to float32: 0.3 MB instead of 0.1 MB" in caplog.text
    )


def test_large_weights_are_expanded_some_rows_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, _ = pack_state(plain_state(LLAMA), FORMATS["gptq"])
    folder = write(tmp_path, packed, {**LLAMA, "quantization_config": FORMATS["gptq"].quantization})
    whole = load_weights(folder)
    sizes = []

    def dequantize(codes: Codes) -> Tensor:
        sizes.append(codes.values.numel())
        return expand(codes)

    expand = Codes.dequantize
    monkeypatch.setattr(Codes, "dequantize", dequantize)
    monkeypatch.setattr("penstock.weights.load.EXPANDED_ELEMENTS", 500)  # five rows of 96
    monkeypatch.setattr("penstock.weights.load._weights_that_stay_quantized", lambda *_: {})
    assert_same(load_weights(folder), whole)
    assert 480 in sizes
    assert max(sizes) <= 500


def test_groups_are_found_by_name_then_pattern_then_class(tmp_path: Path) -> None:
    """Three schemes in one file: the weights that a group's targets name are stored as that group
    says.
    """
    int4, int8, fp8 = FORMATS["int4"], FORMATS["int8"], FORMATS["fp8 rows"]
    groups = {
        "by_class": int4.quantization["config_groups"]["group_0"] | {"format": "pack-quantized"},
        "by_pattern": int8.quantization["config_groups"]["group_0"]
        | {"targets": [r"re:.*mlp\.down_proj$"], "format": "int-quantized"},
        "by_name": fp8.quantization["config_groups"]["group_0"]
        | {"targets": ["model.layers.1.mlp.down_proj"], "format": "float-quantized"},
        "only_activations": {"targets": ["Attention"], "weights": None},
    }
    state = plain_state(LLAMA)
    packed, expanded = pack_state(state, int4)
    for layer, format in ((0, int8), (1, fp8)):
        module = f"model.layers.{layer}.mlp.down_proj"
        packed = {name: part for name, part in packed.items() if not name.startswith(module)}
        parts, expanded[f"{module}.weight"] = format.pack(*state[f"{module}.weight"].shape)
        packed |= {module + end: part for end, part in parts.items()}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": groups,
    }
    mixed = write(tmp_path / "mixed", packed, {**LLAMA, "quantization_config": quantization})
    assert_same(load_weights(mixed), load_weights(write(tmp_path / "plain", expanded, LLAMA)))


def test_zeros_of_gptq_version_2_are_stored_as_they_are(tmp_path: Path) -> None:
    config, parts, expected = CASES["gptq int4 64"]
    [weight] = open_parts(tmp_path, {**config, "checkpoint_format": "gptq_v2"}, parts)
    assert weight.read_codes is not None
    codes = weight.read_codes(None)
    assert not torch.equal(weight.load(), expected)
    assert codes.zeros is not None
    assert codes.zeros.max() == 15
    first = open_parts(tmp_path, config, parts)[0].read_codes
    assert first is not None
    assert torch.equal(first(None).zeros, codes.zeros + 1)


def test_dynamic_of_gptq_changes_the_bits_of_some_modules(tmp_path: Path) -> None:
    base, eight, expected = CASES["gptq int8 32"]
    config = {
        **base,
        "bits": 4,
        "group_size": 64,
        "dynamic": {r"-:.*y": {}, r"+:.*x$": {"bits": 8, "group_size": 32}},
    }
    [weight] = open_parts(tmp_path, config, eight)
    assert torch.equal(weight.load(), expected)


AUTO_ROUND = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 64,
    "sym": False,
    "autoround_version": "1",
}


def test_auto_round_packs_as_gptq_or_awq(tmp_path: Path) -> None:
    _, parts, expected = CASES["gptq int4 64"]
    _, eight, expected_of_eight = CASES["gptq int8 32"]
    state = parts | {name.replace("x.", "model.y."): part for name, part in eight.items()}
    own = {"model.language_model.y": {"bits": 8, "group_size": 32}, "z": {"bits": 16}}
    config = {**AUTO_ROUND, "packing_format": "auto_round:auto_gptq", "extra_config": own}
    weights = {weight.name: weight for weight in open_parts(tmp_path, config, state)}
    assert torch.equal(weights["x.weight"].load(), expected)
    assert torch.equal(weights["model.y.weight"].load(), expected_of_eight)
    _, parts, expected = CASES["awq int4 64"]
    [weight] = open_parts(tmp_path, {**AUTO_ROUND, "packing_format": "auto_round:auto_awq"}, parts)
    assert torch.equal(weight.load(), expected)
    assert "packing_format in the model's config is 'auto_round'" in error_of(
        tmp_path, {**AUTO_ROUND, "packing_format": "auto_round"}, parts
    )


def test_modules_of_mlx_have_settings_of_their_own(tmp_path: Path) -> None:
    config, four, expected = CASES["mlx affine 4 64"]
    _, eight, expected_of_eight = CASES["mlx affine 8 64"]
    parts = four | {name.replace("x.", "mlp.gate."): part for name, part in eight.items()}
    quantization = {**config, "mlp.gate": {"group_size": 64, "bits": 8}, "norm": False}
    weights = {weight.name: weight for weight in open_parts(tmp_path, quantization, parts)}
    assert torch.equal(weights["x.weight"].load(), expected)
    assert torch.equal(weights["mlp.gate.weight"].load(), expected_of_eight)
    assert weights["mlp.gate.weight"].scheme == "int8 g64"


def test_an_older_release_of_modelopt_has_its_config_in_a_file_of_its_own(tmp_path: Path) -> None:
    packed, expanded = pack_state(plain_state(LLAMA), FORMATS["nvfp4"])
    folder = write(tmp_path / "packed", packed, LLAMA)
    quantization = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(
        json.dumps({"producer": {}, "quantization": quantization})
    )
    assert_same(load_weights(folder), load_weights(write(tmp_path / "plain", expanded, LLAMA)))


def test_a_bias_that_no_model_has_is_skipped_if_it_is_zero(tmp_path: Path) -> None:
    packed, _ = pack_state(plain_state(LLAMA), FORMATS["gptq"])
    config = {**LLAMA, "quantization_config": FORMATS["gptq"].quantization}
    without = load_weights(write(tmp_path / "without", packed, config))
    packed["model.layers.0.mlp.up_proj.bias"] = torch.zeros(96)
    assert_same(load_weights(write(tmp_path / "with", packed, config)), without)
    packed["model.layers.0.mlp.up_proj.bias"][3] = 1.0
    folder = write(tmp_path / "other", packed, config)
    with pytest.raises(
        CheckpointError, match=r"1 unexpected: model\.layers\.0\.mlp\.up_proj\.bias"
    ):
        load_weights(folder)


def test_scales_of_activations_and_of_the_kv_cache_are_not_weights(tmp_path: Path) -> None:
    """They stay in the model's dtype, so their scales have no effect."""
    packed, _ = pack_state(plain_state(LLAMA), FORMATS["fp8 rows"])
    config = {**LLAMA, "quantization_config": FORMATS["fp8 rows"].quantization}
    without = load_weights(write(tmp_path / "without", packed, config))
    for name in ("self_attn.k_scale", "self_attn.v_proj.v_scale", "mlp.up_proj.input_scale"):
        packed[f"model.layers.0.{name}"] = torch.ones(1)
    assert_same(load_weights(write(tmp_path / "with", packed, config)), without)


# Bad files


def error_of(folder: Path, quantization: dict[str, Any], parts: dict[str, Tensor]) -> str:
    with pytest.raises(CheckpointError) as caught:
        [weight.load() for weight in open_parts(folder, quantization, parts)]
    error = caught.value
    assert error.what
    assert error.why
    assert error.todo
    return str(error)


def without(parts: dict[str, Tensor], *endings: str) -> dict[str, Tensor]:
    return {name: part for name, part in parts.items() if not name.endswith(endings)}


GPTQ_CASE, AWQ_CASE, MLX_CASE = "gptq int4 64", "awq int4 64", "mlx affine 4 64"
PACKED_CASE, ASYMMETRIC_CASE = "packed int4 64 symmetric", "packed int4 64 asymmetric"
FP8_CASE, BLOCK_CASE, NVFP4_CASE = "float-quantized channel", "float-quantized block", "nvfp4"


@pytest.mark.parametrize(
    ("case", "lost", "message"),
    [
        (GPTQ_CASE, ".scales", "x.weight lacks its scales (there is x.g_idx, x.qweight, x.qzeros)"),
        (GPTQ_CASE, ".qzeros", "x.weight lacks its qzeros"),
        (GPTQ_CASE, ".qweight", "x.weight lacks its codes"),
        (AWQ_CASE, ".qzeros", "x.weight lacks its qzeros"),
        (MLX_CASE, ".biases", "x.weight lacks its biases"),
        (MLX_CASE, ".weight", "x.weight lacks its codes (there is x.biases, x.scales)"),
        (PACKED_CASE, ".weight_scale", "x.weight lacks its weight_scale"),
        (PACKED_CASE, ".weight_shape", "x.weight lacks its weight_shape"),
        (ASYMMETRIC_CASE, ".weight_zero_point", "x.weight lacks its weight_zero_point"),
        (FP8_CASE, ".weight", "x.weight lacks its codes (there is x.weight_scale)"),
        (NVFP4_CASE, ".weight_global_scale", "x.weight lacks its weight_global_scale"),
    ],
)
def test_a_part_that_is_missing_is_named(
    tmp_path: Path, case: str, lost: str, message: str
) -> None:
    config, parts, _ = CASES[case]
    assert message in error_of(tmp_path, config, without(parts, lost))


@pytest.mark.parametrize(
    ("case", "part", "change", "message"),
    [
        (GPTQ_CASE, "scales", lambda t: t[:1], "x.scales is [1, 32], expected [2, 32]"),
        (
            GPTQ_CASE,
            "scales",
            lambda t: t.int(),
            "x.scales is int32, expected float32 or bfloat16 or",
        ),
        (
            GPTQ_CASE,
            "qweight",
            lambda t: t.float(),
            "x.qweight is float32, expected int32 or uint32",
        ),
        (GPTQ_CASE, "qzeros", lambda t: t[:, :1], "x.qzeros is [2, 1], expected [2, 4]"),
        (GPTQ_CASE, "qweight", lambda t: t[:0], "x.qweight is [0, 32], which has no elements"),
        (GPTQ_CASE, "g_idx", lambda t: t[:5], "x.g_idx is [5], expected [128]"),
        (GPTQ_CASE, "g_idx", lambda t: t + 9, "x.g_idx does not put 64 columns into each group"),
        (GPTQ_CASE, "g_idx", lambda t: t - 9, "x.g_idx does not put 64 columns into each group"),
        (AWQ_CASE, "scales", lambda t: t[:, :8], "x.scales is [2, 8], expected [2, 32]"),
        (MLX_CASE, "scales", lambda t: t[:, :1], "x.weight is [16, 16], expected [16, 8]"),
        (MLX_CASE, "biases", lambda t: t[:1], "x.biases is [1, 2], expected [16, 2]"),
        (MLX_CASE, "scales", lambda t: t[0, 0], "expected [16, 0]"),
        (
            PACKED_CASE,
            "weight_scale",
            lambda t: t[:3],
            "x.weight_scale is [3, 2], expected [16, 2]",
        ),
        (
            PACKED_CASE,
            "weight_shape",
            lambda t: t * 2,
            "x.weight_shape is [32, 256], and x.weight_packed [16,",
        ),
        (PACKED_CASE, "weight_shape", lambda t: t - 2**40, "x.weight_shape is [-"),
        (
            ASYMMETRIC_CASE,
            "weight_zero_point",
            lambda t: t[:1],
            "x.weight_zero_point is [1, 2], expected [2,",
        ),
        (FP8_CASE, "weight", lambda t: t.float(), "x.weight is float32, expected float8_e4m3fn"),
        (BLOCK_CASE, "weight_scale", lambda t: t[:1], "x.weight_scale is [1, 2], expected [2, 2]"),
        (
            NVFP4_CASE,
            "weight_scale",
            lambda t: t[:, :1],
            "x.weight_scale is [16, 1], expected [16, 8]",
        ),
        (
            NVFP4_CASE,
            "weight_packed",
            lambda t: t[0],
            "x.weight_packed is [64], expected two dimensions or",
        ),
    ],
)
def test_a_part_that_does_not_fit_is_named_with_what_was_expected(
    tmp_path: Path, case: str, part: str, change: Callable[[Tensor], Tensor], message: str
) -> None:
    config, parts, _ = CASES[case]
    assert message in error_of(tmp_path, config, {**parts, f"x.{part}": change(parts[f"x.{part}"])})


def test_all_that_is_wrong_with_the_parts_is_one_error(tmp_path: Path) -> None:
    config, parts, _ = CASES[GPTQ_CASE]
    state = {
        name.replace("x.", f"layers.{i}."): part for i in range(30) for name, part in parts.items()
    }
    text = error_of(tmp_path, config, without(state, ".scales"))
    assert text.startswith(f"The weights at {tmp_path} cannot be read\n")
    assert "  layers.0.weight lacks its scales" in text
    assert "  and 10 more problems." in text


@pytest.mark.parametrize(
    ("case", "lie", "message"),
    [
        (GPTQ_CASE, {"bits": 8}, "x.scales is [2, 32], expected [1, 32]"),
        (GPTQ_CASE, {"bits": 3}, "x.qweight is [16, 32], expected"),
        (GPTQ_CASE, {"bits": 5}, "bits in the model's config is 5\nIt must be one of 2, 3, 4, 8."),
        (GPTQ_CASE, {"bits": "4"}, "bits in the model's config is '4'"),
        (GPTQ_CASE, {"bits": None}, "The model's config has no bits"),
        (GPTQ_CASE, {"group_size": 32}, "x.scales is [2, 32], expected [4, 32]"),
        (GPTQ_CASE, {"group_size": 0}, "group_size in the model's config is 0"),
        (GPTQ_CASE, {"group_size": True}, "group_size in the model's config is True"),
        (
            GPTQ_CASE,
            {"checkpoint_format": "marlin"},
            "checkpoint_format of gptq in the model's config is 'marlin'",
        ),
        (GPTQ_CASE, {"is_marlin_format": True}, "quantization_config of gptq has is_marlin_format"),
        (
            GPTQ_CASE,
            {"dynamic": {"+:(": {"bits": 8}}},
            "a pattern of modules in the model's config is '('",
        ),
        (GPTQ_CASE, {"dynamic": {"+:x": 8}}, "dynamic of +:x in the model's config is 8"),
        (
            AWQ_CASE,
            {"version": "gemv"},
            "version of awq in the model's config is 'gemv'\nIt must be 'gemm'",
        ),
        (AWQ_CASE, {"backend": "llm-awq"}, "backend of awq in the model's config is 'llm-awq'"),
        (AWQ_CASE, {"group_size": 128}, "x.scales is [2, 32], expected [1, 32]"),
        (MLX_CASE, {"bits": 8}, "x.weight is [16, 16], expected [16, 32]"),
        (MLX_CASE, {"group_size": 32}, "x.weight is [16, 16], expected [16, 8]"),
        (MLX_CASE, {"mode": "nf4"}, "mode of quantization in the model's config is 'nf4'"),
        (MLX_CASE, {"rotation": 3}, "quantization of rotation in the model's config is 3"),
        (
            PACKED_CASE,
            {"format": "marlin-24"},
            "format of compressed-tensors in the model's config is 'marlin-24'",
        ),
        (PACKED_CASE, {"transform_config": {"R1": {}}}, "compressed-tensors has transform_config"),
        (
            PACKED_CASE,
            {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "is 'sparse-24-bitmask'",
        ),
        (
            PACKED_CASE,
            {"config_groups": {"a": ["Linear"]}},
            "config_groups.a in the model's config is ['Linear']",
        ),
        (PACKED_CASE, {"config_groups": {}}, "no group of config_groups targets it"),
        (
            BLOCK_CASE,
            {"quant_method": "fp8", "weight_block_size": [128]},
            "weight_block_size in the model's config",
        ),
        (
            BLOCK_CASE,
            {"quant_method": "fp8", "weight_block_size": [2**40, 1]},
            "from 1 to 16,777,216",
        ),
        ("mxfp4", {"format": "mxfp6-pack-quantized"}, "'mxfp6-pack-quantized'"),
    ],
)
def test_a_config_that_contradicts_the_parts_is_refused(
    tmp_path: Path, case: str, lie: dict[str, Any], message: str
) -> None:
    config, parts, _ = CASES[case]
    changed = {**config, **lie}
    if "weight_block_size" in lie:
        changed = lie
    assert message in error_of(tmp_path, changed, parts)


@pytest.mark.parametrize(
    ("changes", "method"),
    [
        *(({"quantization_config": {"quant_method": name}}, name) for name in REFUSED),
        ({"text_config": {"quantization_config": {"quant_method": "hqq"}}}, "hqq"),
        ({"quantization": "exl2"}, "exl2"),
        ({"quantization_config": {"x": 1}}, "by a method that config.json does not name"),
    ],
)
def test_another_method_is_refused_by_name_with_those_that_are_read(
    tmp_path: Path, changes: dict[str, Any], method: str
) -> None:
    folder = write(tmp_path, plain_state(LLAMA), {**LLAMA, **changes})
    with pytest.raises(CheckpointError) as caught:
        load_weights(folder)
    assert f"is quantized ({method}), which cannot be loaded" in str(caught.value)
    assert "fp8, compressed-tensors, gptq, awq, mlx, modelopt" in str(caught.value)


def test_codes_without_their_scales_are_distinguished_from_plain_numbers(tmp_path: Path) -> None:
    packed, _ = pack_state(plain_state(LLAMA), FORMATS["fp8"])
    lost = "model.layers.0.mlp.up_proj.weight_scale_inv"
    del packed[lost]
    folder = write(tmp_path, packed, {**LLAMA, "quantization_config": FORMATS["fp8"].quantization})
    with pytest.raises(
        CheckpointError, match=r"model\.layers\.0\.mlp\.up_proj\.weight is float8_e4m3fn"
    ):
        load_weights(folder)


@pytest.mark.parametrize(
    "pattern",
    [
        ".*lm_head",
        r"^model\.layers\.\d+\.mlp\.experts\.[0-9]{1,3}\..*$",
        ".*model.layers.*mlp.*(gate|up)_proj.*",
        r"(?:model\.)?layers\.(0|1|27)\..*",
        r"^(?:model\.|language_model\.)*layers\.\d+\.mlp\.experts\.3\.up_proj$",
    ],
)
def test_patterns_as_tools_write_them_are_taken(pattern: str) -> None:
    assert matches(pattern, "model.layers.27.mlp.experts.3.up_proj") == bool(
        re.match(pattern, "model.layers.27.mlp.experts.3.up_proj")
    )


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(a|a)*b",
        "(?:ab|a)*c",
        "(.*)(.*)(.*)(.*)x",
        "(?:(?:x?){40}x?){40}",
        "(?=(a+)+)b",
        "[",
    ],
)
def test_a_pattern_that_could_take_exponential_time_is_refused(pattern: str) -> None:
    started = time.monotonic()
    with pytest.raises(CheckpointError, match="a pattern of modules"):
        matches(pattern, "a" * 200)
    assert time.monotonic() - started < 1
