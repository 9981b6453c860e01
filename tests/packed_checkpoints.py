"""Small checkpoints with weights packed in each format, and the same weights unpacked.

The packing here is as simple as possible and independent of the product's unpacking.
data/quantized_values.safetensors shows that both match the formats' libraries.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock.models import build_model

GROUP = 32
BLOCK = (32, 48)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
HIGH_PRECISION = (
    r"norm|conv1d|A_log|dt_bias|in_proj_[ab]\.|mlp\.gate\.|shared_expert_gate|mtp\.fc|bias"
)

Packed = tuple[
    dict[str, Tensor], Tensor
]  # parts by the end of their names, and the values they encode
generator = torch.Generator()


@dataclass(frozen=True)
class Format:
    """How a checkpoint of a format is written, and what its config.json contains."""

    quantization: dict[str, Any]
    pack: Callable[[int, int], Packed]
    scheme: str
    key: str = "quantization_config"
    quantizes_vocabulary: bool = False


def _codes(num_values: int, *shape: int) -> Tensor:
    return torch.randint(num_values, shape, generator=generator, dtype=torch.int32)


def _scales(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.rand(shape, generator=generator) * 0.02 + 0.001).to(dtype)


def _words(
    codes: Tensor, order: tuple[int, ...] = tuple(range(8))
) -> Tensor:  # [..., 8 n] -> [..., n]
    """Packs the codes so that nibble i of a word is code `order[i]` of its eight."""
    eights = codes.long().unflatten(-1, (-1, 8))
    words = sum(eights[..., code] << (4 * place) for place, code in enumerate(order))
    return torch.as_tensor(words).to(torch.uint32).view(torch.int32)


def _pairs(codes: Tensor) -> Tensor:
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)


def _of_column(per_group: Tensor, num_columns: int, group: int = GROUP) -> Tensor:
    return per_group.float()[:, torch.arange(num_columns) // group]


def pack_fp8_blocks(num_rows: int, num_columns: int) -> Packed:
    codes = torch.randn(num_rows, num_columns, generator=generator).to(torch.float8_e4m3fn)
    scale = _scales(-(-num_rows // BLOCK[0]), -(-num_columns // BLOCK[1]))
    rows, columns = torch.arange(num_rows) // BLOCK[0], torch.arange(num_columns) // BLOCK[1]
    return {".weight": codes, ".weight_scale_inv": scale}, codes.float() * scale.float()[rows][
        :, columns
    ]


def pack_fp8_rows(num_rows: int, num_columns: int) -> Packed:
    codes = torch.randn(num_rows, num_columns, generator=generator).to(torch.float8_e4m3fn)
    scale = _scales(num_rows, 1)
    return {".weight": codes, ".weight_scale": scale}, codes.float() * scale.float()


def pack_fp8_tensor(num_rows: int, num_columns: int) -> Packed:
    codes = torch.randn(num_rows, num_columns, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.tensor(0.0123)
    parts = {".weight": codes, ".weight_scale": scale, ".input_scale": torch.tensor(0.5)}
    return parts, codes.float() * scale


def pack_int4(num_rows: int, num_columns: int) -> Packed:
    codes, scale = _codes(16, num_rows, num_columns), _scales(num_rows, num_columns // GROUP)
    parts = {
        ".weight_packed": _words(codes),
        ".weight_scale": scale,
        ".weight_shape": torch.tensor([num_rows, num_columns]),
    }
    return parts, (codes - 8).float() * _of_column(scale, num_columns)


def pack_int4_in_order_of_activations(num_rows: int, num_columns: int) -> Packed:
    """An asymmetric format too, with the zeros packed along the rows."""
    codes, scale = _codes(16, num_rows, num_columns), _scales(num_rows, num_columns // GROUP)
    zeros = _codes(16, num_rows, num_columns // GROUP)
    group_of = torch.arange(num_columns)[torch.randperm(num_columns, generator=generator)] // GROUP
    parts = {
        ".weight_packed": _words(codes),
        ".weight_scale": scale,
        ".weight_zero_point": _words(zeros.t()).t(),
        ".weight_shape": torch.tensor([num_rows, num_columns]),
        ".weight_g_idx": group_of.int(),
    }
    return parts, (codes - zeros[:, group_of]).float() * scale.float()[:, group_of]


def pack_int8(num_rows: int, num_columns: int) -> Packed:
    codes = _codes(256, num_rows, num_columns) - 128
    scale = _scales(num_rows, 1)
    return {".weight": codes.to(torch.int8), ".weight_scale": scale}, codes.float() * scale.float()


def pack_gptq(num_rows: int, num_columns: int) -> Packed:
    codes, scale = _codes(16, num_rows, num_columns), _scales(num_rows, num_columns // GROUP).half()
    zeros = _codes(16, num_rows, num_columns // GROUP)  # stored minus one
    group_of = torch.arange(num_columns)[torch.randperm(num_columns, generator=generator)] // GROUP
    parts = {
        ".qweight": _words(codes).t(),
        ".qzeros": _words(zeros.t()),
        ".scales": scale.t(),
        ".g_idx": group_of.int(),
    }
    return parts, (codes - zeros[:, group_of] - 1).float() * scale.float()[:, group_of]


def pack_awq(num_rows: int, num_columns: int) -> Packed:
    codes, scale = _codes(16, num_rows, num_columns), _scales(num_rows, num_columns // GROUP).half()
    zeros = _codes(16, num_rows, num_columns // GROUP)
    parts = {
        ".qweight": _words(codes.t(), AWQ_ORDER),
        ".qzeros": _words(zeros.t(), AWQ_ORDER),
        ".scales": scale.t(),
    }
    return parts, (codes - _of_column(zeros, num_columns)).float() * _of_column(scale, num_columns)


def pack_mlx(num_rows: int, num_columns: int) -> Packed:
    codes = _codes(16, num_rows, num_columns)
    scale, bias = _scales(num_rows, num_columns // GROUP), -_scales(num_rows, num_columns // GROUP)
    parts = {".weight": _words(codes).view(torch.uint32), ".scales": scale, ".biases": bias}
    return parts, codes.float() * _of_column(scale, num_columns) + _of_column(bias, num_columns)


def pack_nvfp4(num_rows: int, num_columns: int) -> Packed:
    codes = _codes(16, num_rows, num_columns)
    scale = torch.rand(num_rows, num_columns // 16, generator=generator) * 400
    scale, whole = scale.to(torch.float8_e4m3fn), torch.tensor(1.3e-4)
    parts = {".weight": _pairs(codes), ".weight_scale": scale, ".weight_scale_2": whole}
    parts[".input_scale"] = torch.tensor(0.5)
    return parts, E2M1[codes] * _of_column(scale.float() * whole, num_columns, 16)


def pack_nvfp4_divided(num_rows: int, num_columns: int) -> Packed:
    parts, _ = pack_nvfp4(num_rows, num_columns)
    scale, whole = parts[".weight_scale"], torch.tensor([7654.3])
    codes = torch.stack((parts[".weight"] & 15, parts[".weight"] >> 4), -1).flatten(-2).long()
    divided = {
        ".weight_packed": parts[".weight"],
        ".weight_scale": scale,
        ".weight_global_scale": whole,
    }
    return divided, E2M1[codes] * _of_column(scale.float() / whole, num_columns, 16)


def pack_mxfp4(num_rows: int, num_columns: int) -> Packed:
    codes, exponents = (
        _codes(16, num_rows, num_columns),
        120 + _codes(5, num_rows, num_columns // 32),
    )
    parts = {".weight_packed": _pairs(codes), ".weight_scale": exponents.to(torch.uint8)}
    return parts, E2M1[codes] * _of_column(2.0 ** (exponents - 127), num_columns, 32)


def _groups(format: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*norm"],
        "kv_cache_scheme": None,
        "sparsity_config": {"format": "dense", "global_sparsity": 0.1},
        "quantization_status": "compressed",
    }


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
_FP4 = {"num_bits": 4, "type": "float", "strategy": "group"}
_MLX = {"group_size": GROUP, "bits": 4}
FORMATS = {
    "fp8": Format(
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [*BLOCK],
        },
        pack_fp8_blocks,
        "fp8 32x48",
    ),
    "fp8 rows": Format(
        _groups("float-quantized", type="float", strategy="channel"),
        pack_fp8_rows,
        "fp8 per channel",
    ),
    "fp8 tensor": Format(
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        pack_fp8_tensor,
        "fp8 per tensor",
    ),
    "int4": Format(_groups("pack-quantized", **_INT4), pack_int4, "int4 g32"),
    "int4 in order of activations": Format(
        _groups("pack-quantized", **{**_INT4, "symmetric": False, "actorder": "group"}),
        pack_int4_in_order_of_activations,
        "int4 g32",
    ),
    "int8": Format(
        _groups("int-quantized", type="int", strategy="channel"), pack_int8, "int8 per channel"
    ),
    "gptq": Format(
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False},
        pack_gptq,
        "int4 g32",
    ),
    "awq": Format(
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "version": "gemm",
        },
        pack_awq,
        "int4 g32",
    ),
    "nvfp4": Format(
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "group_size": 16,
        },
        pack_nvfp4,
        "nvfp4",
    ),
    "nvfp4 divided": Format(
        _groups("nvfp4-pack-quantized", **{**_FP4, "strategy": "tensor_group", "group_size": 16}),
        pack_nvfp4_divided,
        "nvfp4",
    ),
    "mxfp4": Format(_groups("mxfp4-pack-quantized", **_FP4, group_size=32), pack_mxfp4, "mxfp4"),
    "mlx": Format(_MLX, pack_mlx, "int4 g32", key="quantization", quantizes_vocabulary=True),
}


def some_formats(*everyday: str) -> list[Any]:
    """Parameters of a test for all formats; most are slow."""
    assert FORMATS.keys() >= set(everyday)
    slow = pytest.mark.slow
    return [name if name in everyday else pytest.param(name, marks=slow) for name in FORMATS]


def plain_state(config: dict[str, Any]) -> dict[str, Tensor]:
    """Random tensors under the published names, experts one by one."""
    model: Any = build_model(config, torch.float32, torch.device("meta"), with_drafting_head=True)
    layers = range(config["num_hidden_layers"])
    prefixes = [*(f"model.layers.{layer}." for layer in layers), "mtp.layers.0."]
    names = [f"{prefix}mlp.experts.0.gate_proj.weight" for prefix in prefixes]
    if not config.get("mtp_num_hidden_layers"):
        names.pop()
    own = torch.Generator().manual_seed(5)
    return {
        name: 0.1 * torch.randn(place.shape, generator=own)
        for name, place in model.placements(names).items()
    }


def is_quantized(name: str, values: Tensor, format: Format) -> bool:
    if values.dim() != 2 or re.search(HIGH_PRECISION, name):
        return False
    if "embed_tokens" in name or "lm_head" in name:
        return format.quantizes_vocabulary
    return values.shape[1] % GROUP == 0 or format.scheme.startswith("fp8")


def pack_state(
    state: dict[str, Tensor], format: Format
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The state with packed matrices, and with the values that these encode."""
    generator.manual_seed(9)
    packed, expanded = {}, {}
    for name, values in state.items():
        expanded[name] = values
        if is_quantized(name, values, format):
            parts, expanded[name] = format.pack(*values.shape)
            packed |= {name.removesuffix(".weight") + end: part for end, part in parts.items()}
        else:
            packed[name] = values
    return packed, expanded


def in_mlx_form(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Stacks experts, moves taps and adds one to norms, as mlx-lm stores a hybrid."""
    stacks: dict[str, dict[int, Tensor]] = {}
    changed = {}
    is_hybrid = any("conv1d" in name for name in state)
    for name, values in state.items():
        if expert := re.fullmatch(r"(.*)experts\.(\d+)(\..*)", name):
            stacks.setdefault(f"{expert[1]}switch_mlp{expert[3]}", {})[int(expert[2])] = values
        elif "conv1d" in name:
            changed[name] = values.transpose(1, 2)
        elif is_hybrid and "norm" in name and "linear_attn.norm" not in name:
            changed[name] = values + 1.0
        else:
            changed[name] = values
    for name, values_of in stacks.items():
        changed[name] = torch.stack([values_of[expert] for expert in sorted(values_of)])
    return {
        prefix + name: values for name, values in changed.items() if not name.startswith("mtp.")
    }


def write(folder: Path, state: dict[str, Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: part.contiguous() for name, part in state.items()}, folder / "model.safetensors"
    )
    return folder
