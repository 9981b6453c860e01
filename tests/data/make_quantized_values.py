"""Makes quantized_values.safetensors: small weights of every packed format, and what its own
library reads.

Run where compressed-tensors, mlx and auto-gptq are installed (its file of torch code is enough:
give its path). Each case is a weight's parts under "CASE/", the values under "CASE/expected", and
its quantization_config in the metadata.

    python tests/data/make_quantized_values.py PATH/TO/auto_gptq/nn_modules/qlinear/qlinear_cuda.py
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import save_file
from torch import Tensor

N, K = 16, 128
generator = torch.Generator().manual_seed(7)
tensors: dict[str, Tensor] = {}
configs: dict[str, dict[str, Any]] = {}


def add(case: str, config: dict[str, Any], parts: dict[str, Tensor], expected: Tensor) -> None:
    configs[case] = config
    for name, part in parts.items():
        tensors[f"{case}/x.{name}"] = part.clone().contiguous()
    tensors[f"{case}/expected"] = expected.float().clone().contiguous()


def scales(*shape: int) -> Tensor:
    return (torch.rand(shape, generator=generator) * 0.02 + 0.001).bfloat16()


def add_compressed(
    case: str, format: str, weights: dict[str, Any], shape: tuple[int, int] = (N, K)
) -> None:
    """A random weight, compressed and read back by the library, with its scales as float32."""
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = BaseCompressor.get_value_from_registry(format)
    num_rows, num_columns = shape
    strategy, group = weights["strategy"], weights.get("group_size")
    sizes = {"tensor": (1,), "channel": (num_rows, 1)}.get(strategy)
    if strategy in ("group", "tensor_group"):
        sizes = (num_rows, -(-num_columns // group))
    if strategy == "block":
        height, width = weights["block_structure"]
        sizes = (-(-num_rows // height), -(-num_columns // width))
    state = {
        "weight": torch.randn(shape, generator=generator),
        "weight_scale": scales(*sizes).float(),
    }
    if format.startswith("mx"):
        state["weight_scale"] = 2.0 ** torch.randint(-9, -2, sizes, generator=generator).float()
    if format.startswith("nvfp4"):
        state["weight_global_scale"] = torch.tensor([1234.5])
        state["weight_scale"] = (torch.rand(sizes, generator=generator) * 400 + 1).to(
            torch.float8_e4m3fn
        )
        state["weight_scale"] = state["weight_scale"].float()
    if weights["type"] == "int" and not weights["symmetric"]:
        half = 2 ** (weights["num_bits"] - 1)
        zeros = torch.randint(-half, half, sizes, generator=generator)
        state["weight_zero_point"] = zeros.to(torch.int8)
    stored = compressor.compress(dict(state), scheme)
    if format.startswith(
        "nvfp4"
    ):  # the library reads these in bfloat16 unless it reads part by part
        codes = unpack_fp4_from_uint8(stored["weight_packed"], num_rows, num_columns, torch.float32)
        own = stored["weight_scale"].float()
        expected = dequantize(
            codes, own, args=scheme.weights, global_scale=stored["weight_global_scale"]
        )
    else:
        expected = compressor.decompress(dict(stored), scheme)["weight"]
    if format not in ("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"):
        stored["weight_scale"] = stored["weight_scale"].bfloat16()
    config = {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "format": None}},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }
    add(case, config, stored, expected)


def add_all_compressed() -> None:
    for bits, group, symmetric in (
        *(
            (4, 32, True),
            (4, 64, True),
            (4, 128, True),
            (4, 64, False),
            (4, None, True),
            (4, None, False),
        ),
        *(
            (8, 128, True),
            (8, None, True),
            (8, 32, False),
            (2, 64, True),
            (3, 64, False),
            (6, 64, True),
        ),
    ):
        strategy = "group" if group else "channel"
        weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy}
        weights["group_size"] = group
        case = f"packed int{bits} {group or 'channel'} {'symmetric' if symmetric else 'asymmetric'}"
        add_compressed(case, "pack-quantized", weights)
    for format, strategy in (
        *(("int-quantized", "channel"), ("int-quantized", "tensor"), ("naive-quantized", "group")),
        *(
            ("float-quantized", "tensor"),
            ("float-quantized", "channel"),
            ("float-quantized", "block"),
        ),
    ):
        kind = "float" if format.startswith("float") else "int"
        weights = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy}
        if strategy == "group":
            weights |= {"group_size": 64, "symmetric": False}
        if strategy == "block":
            weights["block_structure"] = [128, 128]
        shape = (130, 140) if strategy == "block" else (N, K)  # no multiple of the block
        add_compressed(f"{format} {strategy}", format, weights, shape)
    fp4 = {"num_bits": 4, "type": "float", "symmetric": True}
    add_compressed(
        "nvfp4", "nvfp4-pack-quantized", {**fp4, "strategy": "tensor_group", "group_size": 16}
    )
    add_compressed("mxfp4", "mxfp4-pack-quantized", {**fp4, "strategy": "group", "group_size": 32})
    mxfp8 = {
        **fp4,
        "num_bits": 8,
        "strategy": "group",
        "group_size": 32,
        "scale_dtype": "torch.uint8",
    }
    add_compressed("mxfp8", "mxfp8-quantized", mxfp8)


def random_words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, generator=generator).int()


def add_gptq(linear: Any, bits: int, group: int, desc_act: bool) -> None:
    """A product with the identity gives the weight itself, transposed."""
    num_groups = 1 if group == -1 else K // group
    parts = {
        "qweight": random_words(K * bits // 32, 32),
        "qzeros": random_words(num_groups, bits),
        "scales": scales(num_groups, 32).half(),
        "g_idx": torch.arange(K, dtype=torch.int32) // (K if group == -1 else group),
    }
    if desc_act:
        parts["g_idx"] = parts["g_idx"][torch.randperm(K, generator=generator)]
    module = linear(bits, group, K, 32, bias=False, weight_dtype=torch.float32)
    module.load_state_dict({**parts, "scales": parts["scales"].float()})
    expected = module(torch.eye(K)).t()
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": desc_act,
        "sym": False,
    }
    add(f"gptq int{bits} {group}{' desc_act' if desc_act else ''}", config, parts, expected)


def add_awq(group: int) -> None:
    parts = {
        "qweight": random_words(K, 4),
        "qzeros": random_words(K // group, 4),
        "scales": scales(K // group, 32).half(),
    }
    converter = AutoAWQConverter(group_size=group, ignore=())
    state = {
        f"x.{name}": part for name, part in {**parts, "scales": parts["scales"].float()}.items()
    }
    stored = {name.removeprefix("x."): part for name, part in converter.process(state).items()}
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": False,
        "strategy": "group",
        "group_size": group,
    }
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    expected = BaseCompressor.get_value_from_registry("pack-quantized").decompress(stored, scheme)[
        "weight"
    ]
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
    }
    add(f"awq int4 {group}", config, parts, expected)


def to_torch(array: mx.array) -> Tensor:
    if array.dtype == mx.bfloat16:
        return torch.from_numpy(np.array(array.astype(mx.float32))).bfloat16()
    return torch.from_numpy(np.array(array))


def add_mlx(bits: int, group: int, mode: str = "affine") -> None:
    weight = mx.array(torch.randn((N, K), generator=generator).numpy()).astype(mx.bfloat16)
    stored = mx.quantize(weight, group, bits, mode=mode)
    config: dict[str, Any] = {"group_size": group, "bits": bits}
    if mode == "affine":
        floats = [part.astype(mx.float32) for part in stored[1:]]
        expected = mx.dequantize(stored[0], *floats, group, bits)
    else:
        config["mode"] = mode
        expected = mx.dequantize(*stored, group_size=group, bits=bits, mode=mode, dtype=mx.float32)
    parts = dict(zip(("weight", "scales", "biases"), map(to_torch, stored)))
    add(f"mlx {mode} {bits} {group}", config, parts, to_torch(expected))


def main() -> None:
    add_all_compressed()
    spec = importlib.util.spec_from_file_location("qlinear_cuda", sys.argv[1])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for bits, group, desc_act in ((4, 64, False), (4, 32, True), (4, -1, False), (8, 32, False)):
        add_gptq(module.QuantLinear, bits, group, desc_act)
    for bits in (2, 3):
        add_gptq(module.QuantLinear, bits, 64, True)
    for group in (32, 64):
        add_awq(group)
    for bits, group in ((2, 64), (3, 64), (4, 32), (4, 64), (4, 128), (5, 64), (6, 64), (8, 64)):
        add_mlx(bits, group)
    for mode, bits, group in (("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)):
        add_mlx(bits, group, mode)
    path = Path(__file__).with_name("quantized_values.safetensors")
    save_file(tensors, path, {"configs": json.dumps(configs)})
    print(f"{len(configs)} cases, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
