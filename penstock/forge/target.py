"""The target of an engine: a config, the weights beside it, a device.

A config that forge does not support is refused: no key that changes what the model computes is
ignored. Knows the meaning of keys, not the content of model.pt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from penstock.errors import CheckpointError, ConfigError
from penstock.forge.fragments.shape import DTYPES, Shape, pick_dtype, read_shape

MODEL_TYPES = ("tiny_llama", None)
WRITTEN_FOR = (
    "forge writes engines for plain Llamas: model_type tiny_llama, interleaved rope, no biases."
)
SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"),
)
OPTIONAL_SIZES = ("num_key_value_heads", "head_dim")  # null: they follow from the others
# Keys that can change a Llama's computation, and the values with which they do not; null never
# does.
PLAIN_VALUES: Mapping[str, tuple[object, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "quantization_config": (),
}
# The keys that these may have, and their supported values; None for a number that is read.
ROPE_VALUES: Mapping[str, Mapping[str, object]] = {
    "rope_parameters": {
        "rope_type": "default",
        "type": "default",
        "partial_rotary_factor": 1,
        "rope_theta": None,
    },
    "rope_scaling": {"rope_type": "default", "type": "default"},
}


TARGETS = (Path("/target"), Path("target"))


def default_target() -> Path:
    """The folder with model_config.json and weights/: the first that exists."""
    return next(
        (folder for folder in TARGETS if (folder / "model_config.json").exists()), TARGETS[-1]
    )


@dataclass(frozen=True, slots=True)
class Target:
    config: dict[str, Any]
    shape: Shape
    weight_dir: Path
    device: str
    dtype: torch.dtype

    @classmethod
    def open(cls, config_path: Path, weight_dir: Path, device: str) -> Target:
        config = read_config(config_path)
        if not (weight_dir / "model.pt").exists():
            raise CheckpointError(
                f"There is no {weight_dir / 'model.pt'}",
                "Weights are one state dict in a file model.pt.",
                f"Give their folder with --weights, or run `python scripts/generate_toy_weights.py "
                f"--config {config_path} --output {weight_dir}`.",
            )
        target = cls.of(config, weight_dir, device)
        if target.is_cuda and not torch.cuda.is_available():
            raise ConfigError(
                "There is no CUDA device here",
                "torch finds none.",
                "Leave --device out, or use --device cpu.",
            )
        return target

    @classmethod
    def of(cls, config: dict[str, Any], weight_dir: Path, device: str) -> Target:
        _check_model(config)
        _check_numbers(config)
        shape = read_shape(config)
        if shape.num_heads % shape.num_kv_heads or shape.head_dim % 2:
            raise ConfigError(
                f"{shape.num_heads} heads of {shape.head_dim} over {shape.num_kv_heads} key heads "
                "are not supported",
                "Heads must be a multiple of key heads, and the width of a head must be even.",
            )
        place = read_device(device)
        return cls(
            config, shape, weight_dir.resolve(), place, pick_dtype(config, torch.device(place))
        )

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def weight_bytes(self) -> int:
        """The bytes that a decode step reads: everything except the embedding."""
        shape = self.shape
        heads = 2 * shape.num_query_rows + 2 * shape.num_key_rows
        layer = shape.hidden_size * (heads + 3 * shape.intermediate_size)
        return (
            shape.num_layers * layer + shape.vocab_size * shape.hidden_size
        ) * self.dtype.itemsize

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.shape.num_layers * self.shape.num_key_rows * self.dtype.itemsize

    def describe(self) -> str:
        """`12 layers x 768, 12 heads of 64 over 4 key heads, vocabulary 32000, bfloat16`"""
        shape = self.shape
        heads = f"{shape.num_heads} heads of {shape.head_dim} over {shape.num_kv_heads} key heads"
        numbers = str(self.dtype).removeprefix("torch.")
        layers = f"{shape.num_layers} layers x {shape.hidden_size}"
        return f"{layers}, {heads}, vocabulary {shape.vocab_size}, {numbers}"


def read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"There is no {path}", "", "Choose a config with --config.")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON", f"{error}.") from None
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{path} is not a config", f"It is a {type(config).__name__}, not an object."
        )
    return config


def read_device(name: str) -> str:
    """cpu or cuda; auto or nothing takes what is available. Clocks, graphs and kernels use the
    current device, which is the first one.
    """
    if name in ("", "auto"):
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name in ("cpu", "cuda", "cuda:0"):
        return name.partition(":")[0]
    index = name.removeprefix("cuda:")
    if index != name and index.isdecimal():
        raise ConfigError(
            f"The device {name!r} is not the first GPU",
            "An engine is written and timed on the one GPU that is current.",
            f"Make it the only one: CUDA_VISIBLE_DEVICES={index}, and --device cuda.",
        )
    raise ConfigError(
        f"There is no device {name!r}",
        "Engines run on cpu or cuda.",
        "Use --device cpu, cuda or auto.",
    )


def _check_model(config: dict[str, Any]) -> None:
    """Refuses settings that forge does not support."""
    if config.get("model_type") not in MODEL_TYPES:
        raise ConfigError(f"The config has model_type {config.get('model_type')!r}", WRITTEN_FOR)
    for key, plain in PLAIN_VALUES.items():
        if config.get(key) is not None and config[key] not in plain:
            _refuse(key, config[key], " or ".join(map(repr, plain)) or "null")
    for key in ROPE_VALUES:
        _check_rope(key, config.get(key))
    _check_said_alike(config, "rope_theta", (config.get("rope_parameters") or {}).get("rope_theta"))
    _check_said_alike(config, "torch_dtype", config.get("dtype"))
    for key in ("dtype", "torch_dtype"):
        if config.get(key) is not None and str(config[key]).removeprefix("torch.") not in DTYPES:
            _refuse(key, config[key], ", ".join(DTYPES))
    window, is_used = config.get("sliding_window"), config.get("use_sliding_window", True)
    if window is not None and is_used and window < config.get("max_position_embeddings", 0):
        _refuse("sliding_window", window, "null, or no less than max_position_embeddings")
    if others := set(config.get("layer_types") or ()) - {"full_attention"}:
        _refuse("layer_types", sorted(map(str, others)), "full_attention")


def _check_rope(key: str, rope: Any) -> None:
    """Only the default rope, over all dimensions, is supported."""
    if not isinstance(rope or {}, dict):
        _refuse(key, rope, "null, or an object")
    for name, value in (rope or {}).items():
        if name not in ROPE_VALUES[key]:
            _refuse(f"{key}.{name}", value, f"only {', '.join(ROPE_VALUES[key])}")
        plain = ROPE_VALUES[key][name]
        if plain is not None and value != plain:
            _refuse(f"{key}.{name}", value, repr(plain))


def _check_said_alike(config: dict[str, Any], key: str, again: Any) -> None:
    if again is not None and config.get(key) not in (None, again):
        raise ConfigError(
            f"The config has {key} twice: {config[key]!r} and {again!r}",
            "",
            "Remove one of them.",
        )


def _check_numbers(config: dict[str, Any]) -> None:
    for key in SIZES:
        size = config.get(key)
        if size is None and key in OPTIONAL_SIZES:
            continue
        if key not in config:
            raise ConfigError(
                f"The config has no {key!r}", "The shapes of the weights follow from it."
            )
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            _refuse(key, size, "a whole number, 1 or more")
    thetas = (config.get("rope_theta"), (config.get("rope_parameters") or {}).get("rope_theta"))
    numbers = [("rope_theta", theta) for theta in thetas if theta is not None]
    for key, number in [("rms_norm_eps", config.get("rms_norm_eps", 1e-6)), *numbers]:
        if not isinstance(number, int | float) or number <= 0:
            _refuse(key, number, "a positive number")


def _refuse(key: str, value: object, supported: str) -> NoReturn:
    raise ConfigError(f"The config has {key} = {value!r}", WRITTEN_FOR, f"Supported: {supported}.")
