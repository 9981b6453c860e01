"""The config.json of a GGUF file, from its metadata and the shapes of its tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.errors import CheckpointError
from penstock.gguf.header import MAX_SHOWN, Header, TensorInfo, damaged

_REQUIRED: Any = object()
# Keys of unsupported computations, with the values that disable them.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.temperature_scale": (0.0, 1.0),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "use_parallel_residual": (False,),
    "pooling_type": (0, 3),  # none, or the vector of the last token
    "leading_dense_block_count": (0,),
    "expert_gating_func": (0, 1),  # 1: softmax
    "expert_group_count": (0, 1),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
}


def config_of(model: Header) -> dict[str, Any]:
    """Refuses an unknown architecture, and settings that the models do not support."""
    return ARCHITECTURES[architecture_of(model)](_Metadata(model))


def architecture_of(model: Header) -> str:
    name = model.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(
            f"{model.path.name} is a GGUF file of the architecture {str(name)[:MAX_SHOWN]!r}",
            f"Supported are {', '.join(ARCHITECTURES)}.",
            "Use a model of one of these."
            if name != "clip"
            else "It is the vision part of a model: give the file of its text model.",
        )
    return name


def shortest_float(value: float) -> float:
    """A 32-bit float in short form: 0.7, not 0.699999988079071."""
    return float(str(np.float32(value)))


class _Metadata:
    """Typed reads of an architecture's keys."""

    def __init__(self, model: Header) -> None:
        self.model = model
        self.architecture = architecture_of(model)

    def has(self, tensor: str) -> bool:
        return tensor in self.model.tensors

    def shape(self, tensor: str) -> tuple[int, ...]:
        if tensor not in self.model.tensors:
            raise damaged(self.model.path, f"it has no {tensor}")
        return self.model.tensors[tensor].shape

    def whole(self, key: str, default: Any = _REQUIRED) -> Any:
        """A whole number; some files have a list with the same number for each layer."""
        value = self._value(key, default)
        if isinstance(value, list) and value and all(number == value[0] for number in value):
            value = value[0]
        if value is not default and type(value) is not int:
            raise self.unusable(key, value, "one whole number for all layers")
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        value = self._value(key, default)
        if value is default:
            return default
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.unusable(key, value, "a number")
        return shortest_float(value)

    def refuse_other_mathematics(self, head_dim: int) -> None:
        """Refuses settings that would run but give wrong results."""
        usual_scale = shortest_float(head_dim**-0.5)
        longest = self.whole("context_length")
        neutral = {**_NEUTRAL, "attention.scale": (0.0, usual_scale)}
        for key, values in neutral.items():
            value = self._value(key, values[0])
            if isinstance(value, float):
                value = shortest_float(value)
            if value not in values:
                raise self.unusable(key, value, " or ".join(map(str, values)))
        window = self.whole("attention.sliding_window", 0)
        if 0 < window < longest:
            raise self.unusable(
                "attention.sliding_window", window, f"0, or the whole context of {longest}"
            )

    def text(self, key: str, default: str) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.unusable(key, value, "text")
        return value

    def unusable(self, key: str, value: Any, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{self.architecture}.{key} in {self.model.path.name} is {str(value)[:MAX_SHOWN]}",
            f"It must be {expected}.",
            "Use a file of a model without that, or convert the model again.",
        )

    def _value(self, key: str, default: Any) -> Any:
        value = self.model.metadata.get(f"{self.architecture}.{key}", default)
        if value is _REQUIRED:
            raise damaged(self.model.path, f"its metadata has no {self.architecture}.{key}")
        return value


def _common(metadata: _Metadata) -> dict[str, Any]:
    hidden_size = metadata.whole("embedding_length")
    num_heads = metadata.whole("attention.head_count")
    if num_heads < 1:
        raise metadata.unusable("attention.head_count", num_heads, "at least 1")
    head_dim = metadata.whole("attention.key_length", hidden_size // num_heads)
    value_dim = metadata.whole("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise metadata.unusable("attention.value_length", value_dim, f"the key's, {head_dim}")
    metadata.refuse_other_mathematics(max(head_dim, 1))
    embedding = metadata.model.tensors.get("token_embd.weight")
    ids = ("bos_token_id", "eos_token_id", "padding_token_id")
    named = {key: metadata.model.metadata.get(f"tokenizer.ggml.{key}") for key in ids}
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": metadata.whole("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.whole("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "vocab_size": metadata.shape("token_embd.weight")[0],
        "max_position_embeddings": metadata.whole("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": not metadata.has("output.weight"),
        # Packed weights are expanded; float16 overflows in models that were trained in bfloat16.
        "dtype": "float32" if embedding and embedding.type.name == "F32" else "bfloat16",
        **{key.replace("padding", "pad"): id for key, id in named.items() if type(id) is int},
    }


def _dense(model_type: str) -> Callable[[_Metadata], dict[str, Any]]:
    def config(metadata: _Metadata) -> dict[str, Any]:
        if num_experts := metadata.whole("expert_count", 0):
            raise metadata.unusable(
                "expert_count",
                num_experts,
                "0: mixtures of experts such as Mixtral are not supported",
            )
        common = _common(metadata)
        return {
            "model_type": model_type,
            **common,
            **_rope(metadata, common["head_dim"]),
            "intermediate_size": metadata.whole("feed_forward_length"),
            "attention_bias": model_type == "llama" and metadata.has("blk.0.attn_q.bias"),
            "sliding_window": None,
        }

    return config


def _qwen3_moe(metadata: _Metadata) -> dict[str, Any]:
    common = _common(metadata)
    return {
        "model_type": "qwen3_moe",
        **common,
        **_rope(metadata, common["head_dim"]),
        **_experts(metadata),
        "intermediate_size": metadata.whole("feed_forward_length", 1) or 1,  # no layer has it
        "norm_topk_prob": True,
        "sliding_window": None,
    }


def _experts(metadata: _Metadata) -> dict[str, Any]:
    return {
        "num_experts": metadata.whole("expert_count"),
        "num_experts_per_tok": metadata.whole("expert_used_count"),
        "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
    }


def _rope(metadata: _Metadata, head_dim: int) -> dict[str, Any]:
    num_turned = metadata.whole("rope.dimension_count", head_dim)
    if num_turned != head_dim:
        raise metadata.unusable("rope.dimension_count", num_turned, f"that of a head, {head_dim}")
    theta = {"rope_theta": metadata.number("rope.freq_base", 10_000.0)}
    kind = metadata.text("rope.scaling.type", "none")
    factor = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear", 1.0))
    if metadata.has("rope_freqs.weight"):
        return {**theta, "rope_scaling": _llama3_scaling(metadata, theta["rope_theta"], head_dim)}
    if kind == "linear" or (kind == "none" and factor != 1.0):
        return {**theta, "rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind != "none":
        raise metadata.unusable("rope.scaling.type", kind, "none or linear")
    return theta


def _llama3_scaling(metadata: _Metadata, theta: float, head_dim: int) -> dict[str, Any]:
    """Recovers the rope scaling of Llama 3.1 from the factors of all frequencies, which the file
    has instead.
    """
    info = metadata.model.tensors["rope_freqs.weight"]
    factors = (
        _read_floats(info) if info.type.name == "F32" and info.shape == (head_dim // 2,) else None
    )
    if factors is not None:
        inverse = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        for original in (8192, 4096, 16384, 32768, 131072):
            num_waves = original * inverse / (2 * np.pi)
            keep = np.clip((num_waves - 1.0) / 3.0, 0.0, 1.0)
            factor = float(factors.max())
            if np.allclose(factors, 1.0 / ((1.0 - keep) / factor + keep), rtol=1e-4):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": original,
                }
    raise CheckpointError(
        f"rope_freqs.weight in {metadata.model.path.name} is not the scaling of Llama 3.1",
        "No other factors of the rotary frequencies are supported.",
        "Use a file of a model without that.",
    )


def _read_floats(info: TensorInfo) -> np.ndarray:
    with info.path.open("rb") as file:
        file.seek(info.offset)
        return np.frombuffer(file.read(info.num_bytes), np.float32)


def _qwen3_5(metadata: _Metadata) -> dict[str, Any]:
    common = _common(metadata)
    is_sparse = metadata.architecture == "qwen35moe"
    num_layers = common["num_hidden_layers"] - metadata.whole("nextn_predict_layers", 0)
    num_value_heads = metadata.whole("ssm.time_step_rank")
    if num_value_heads < 1:
        raise metadata.unusable("ssm.time_step_rank", num_value_heads, "at least 1")
    if (kind := metadata.text("rope.scaling.type", "none")) != "none":
        raise metadata.unusable("rope.scaling.type", kind, "none")
    mlp = {"intermediate_size": metadata.whole("feed_forward_length")} if not is_sparse else {}
    if is_sparse:
        shared = metadata.whole("expert_shared_feed_forward_length")
        mlp = {**_experts(metadata), "shared_expert_intermediate_size": shared}
    num_turned = metadata.whole("rope.dimension_count")
    return {
        "model_type": "qwen3_5_moe_text" if is_sparse else "qwen3_5_text",
        **common,
        **mlp,
        "num_hidden_layers": num_layers,
        "layer_types": [
            "linear_attention" if metadata.has(f"blk.{layer}.ssm_a") else "full_attention"
            for layer in range(min(num_layers, len(metadata.model.tensors)))
        ],
        "linear_num_key_heads": metadata.whole("ssm.group_count"),
        "linear_num_value_heads": num_value_heads,
        "linear_key_head_dim": metadata.whole("ssm.state_size"),
        "linear_value_head_dim": metadata.whole("ssm.inner_size") // num_value_heads,
        "linear_conv_kernel_dim": metadata.whole("ssm.conv_kernel"),
        "mtp_num_hidden_layers": int(metadata.has(f"blk.{num_layers}.nextn.eh_proj.weight")),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": metadata.number("rope.freq_base", 1e7),
            "partial_rotary_factor": num_turned / max(common["head_dim"], 1),
        },
    }


ARCHITECTURES: dict[str, Callable[[_Metadata], dict[str, Any]]] = {
    "llama": _dense("llama"),
    "qwen2": _dense("qwen2"),
    "qwen3": _dense("qwen3"),
    "qwen3moe": _qwen3_moe,
    "qwen35": _qwen3_5,
    "qwen35moe": _qwen3_5,
}
