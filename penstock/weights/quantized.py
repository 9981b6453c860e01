"""A quantized checkpoint as the models see it: each group of stored tensors becomes one weight.

The tensors present decide which weights are quantized; config.json says how, and the shapes of the
parts must agree with it. So a model's placements never see a packed format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.errors import CheckpointError
from penstock.file_kinds import LOADABLE
from penstock.models.source import ModelSource, is_converted, read_json_object
from penstock.weights.checkpoint import damaged, open_checkpoint
from penstock.weights.formats import auto_round, awq, compressed_tensors, fp8, gptq, mlx, modelopt
from penstock.weights.formats.parts import CODES, UNUSED, Format, Parts
from penstock.weights.mlx_names import as_published
from penstock.weights.stored import StoredTensor

METHODS: dict[str, Callable[[Mapping[str, Any]], Format]] = {
    "fp8": fp8.read_config,
    "compressed-tensors": compressed_tensors.read_config,
    "gptq": gptq.read_config,
    "awq": awq.read_config,
    "mlx": mlx.read_config,
    "modelopt": modelopt.read_config,
    "auto-round": auto_round.read_config,
}
CONFIG_KEYS = ("quantization_config", "quantization", "compression_config")
MODELOPT_CONFIG = "hf_quant_config.json"
MAX_METHOD_CHARS = 64


def open_weights(source: ModelSource, format: Format | None) -> list[StoredTensor]:
    """Every weight of a source's checkpoint; quantized ones have a scheme."""
    assert source.path is not None
    if is_converted(source.path):
        raise CheckpointError(
            f"{source.name} is a converted model",
            "Its weights are in the kernels' layout, not in a checkpoint's.",
            "Give the checkpoint that it was made from.",
        )
    stored = open_checkpoint(source.path)
    return as_published(stored if format is None else combine(source.path, stored, format))


def find_format(source: ModelSource) -> Format | None:
    """The quantization format of the checkpoint, or None. Refuses an unknown format by name."""
    quantization = _find_config(source)
    if quantization is None:
        return None
    method = _method(quantization)
    if method not in METHODS:
        raise CheckpointError(
            f"{source.name} is quantized ({method}), which cannot be loaded",
            f"Supported formats are {', '.join(METHODS)}. {LOADABLE}",
            "Use a checkpoint in one of these formats, or the one that it was made from.",
        )
    return METHODS[method](quantization)


def combine(path: Path, stored: list[StoredTensor], format: Format) -> list[StoredTensor]:
    """The stored tensors with each weight in place of its parts, or one error that lists all
    problems.
    """
    parts_of, plain = _sort_parts(stored, format)
    combined = [tensor for tensor in plain if tensor.name not in parts_of]
    problems = []
    for name, by_role in parts_of.items():
        try:
            combined.append(format.open(Parts(name, by_role)))
        except CheckpointError as error:
            problems.append(error)
    if problems:
        raise damaged(path, problems)
    return combined


def _sort_parts(
    stored: list[StoredTensor], format: Format
) -> tuple[dict[str, dict[str, StoredTensor]], list[StoredTensor]]:
    """The parts, grouped by weight, and the tensors that are not parts."""
    endings = sorted(format.endings.items(), key=lambda item: -len(item[0]))  # the longest match
    parts_of: dict[str, dict[str, StoredTensor]] = {}
    plain = []
    for tensor in stored:
        if tensor.name.rpartition(".")[2] in UNUSED or tensor.name.endswith("_activation_scale"):
            continue
        for ending, (of_weight, role) in endings:
            if tensor.name.endswith(ending):
                weight = tensor.name.removesuffix(ending) + of_weight
                parts_of.setdefault(weight, {})[role] = tensor
                break
        else:
            plain.append(tensor)
    for tensor in plain:
        if tensor.name in parts_of:
            parts_of[tensor.name].setdefault(CODES, tensor)
    return parts_of, plain


def _find_config(source: ModelSource) -> Mapping[str, Any] | None:
    text_config = source.config.get("text_config")
    for level in (source.config, text_config if isinstance(text_config, dict) else {}):
        for key in CONFIG_KEYS:
            if quantization := level.get(key):
                return (
                    quantization
                    if isinstance(quantization, dict)
                    else {"quant_method": quantization}
                )
    assert source.path is not None
    folder = source.path if source.path.is_dir() else source.path.parent
    beside = folder / MODELOPT_CONFIG
    return read_json_object(beside) if beside.is_file() else None


def _method(quantization: Mapping[str, Any]) -> str:
    """The name of the method; MLX gives a number of bits instead."""
    method = quantization.get("quant_method")
    if method:
        return str(method)[:MAX_METHOD_CHARS].lower()
    if "quant_algo" in quantization or "quantization" in quantization:
        return "modelopt"
    if "bits" in quantization and "group_size" in quantization:
        return "mlx"
    return "by a method that config.json does not name"
