"""Writes GGUF files of small checkpoints with the gguf package, as llama.cpp's converters do."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.assets import default_model
from penstock.models import build_model
from small_models import HYBRID_DENSE, HYBRID_MOE, LLAMA

ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
# Keys are architecture names of GGUF files.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        **LLAMA,
        "rope_theta": 500000.0,
        "rope_scaling": {**ROPE_LLAMA3, "original_max_position_embeddings": 8192},
    },
    "qwen2": {**LLAMA, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {
        **LLAMA,
        "model_type": "qwen3",
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "qwen3moe": {**LLAMA, "model_type": "qwen3_moe", **EXPERTS},
    "qwen35": {**HYBRID_DENSE, "mtp_num_hidden_layers": 1},
    "qwen35moe": {**HYBRID_MOE, "mtp_num_hidden_layers": 1},
}
KEYS = {
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "intermediate_size": "feed_forward_length",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "full_attention_interval": "full_attention_interval",
    "mtp_num_hidden_layers": "nextn_predict_layers",
}
GLOBALS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "mtp.fc.weight": "blk.{last}.nextn.eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "blk.{last}.nextn.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "blk.{last}.nextn.hnorm.weight",
    "mtp.norm.weight": "blk.{last}.nextn.shared_head_norm.weight",
}
IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}


def random_state(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random tensors of a config's checkpoint, by name."""
    generator = torch.Generator().manual_seed(seed)
    placements = build_model(config, torch.float32, torch.device("meta")).placements()  # type: ignore[operator]
    return {
        name: 0.1 * torch.randn(place.shape, generator=generator)
        for name, place in placements.items()
    }


def write_folder(folder: Path, config: dict[str, Any], state: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors"
    )
    return folder


def write_gguf(
    path: Path,
    architecture: str,
    config: Mapping[str, Any],
    state: Mapping[str, Tensor],
    *,
    matrices: str = "F32",  # type of all matrices that fit its block size
    is_expanded: bool = False,  # written as float32 after quantization
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, tuple[np.ndarray, str]] | None = None,  # additional tensors of the file
    fuses_experts: bool = False,  # gate and up in one tensor
    **settings: Any,  # of the writer
) -> Path:
    writer = gguf.GGUFWriter(path, architecture, **settings)
    for key, value in {**metadata_of(architecture, config), **(metadata or {})}.items():
        add_value(writer, key, value)
    kind = gguf.GGMLQuantizationType[matrices]
    tensors = dict(converted(architecture, config, state))
    for name in [name for name in tensors if fuses_experts and "ffn_gate_exps" in name]:
        both = (tensors.pop(name), tensors.pop(name.replace("gate", "up")))
        tensors[name.replace("gate", "gate_up")] = torch.cat(both, dim=1)
    for name, tensor in tensors.items():
        values = tensor.float().contiguous().numpy()
        if (
            values.ndim == 1
            or values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]
            or "conv1d" in name
        ):
            writer.add_tensor(name, values)
            continue
        packed = gguf.quants.quantize(values, kind)
        if is_expanded:
            writer.add_tensor(name, gguf.quants.dequantize(packed, kind))
        else:
            writer.add_tensor(name, packed, raw_dtype=kind)
    for name, (data, stored_as) in (extra or {}).items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[stored_as])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def metadata_of(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        f"{architecture}.{theirs}": config[ours] for ours, theirs in KEYS.items() if ours in config
    }
    num_layers = config["num_hidden_layers"] + config.get("mtp_num_hidden_layers", 0)
    rope = {**config, **config.get("rope_parameters", {})}
    found |= {
        "general.name": "a small model",
        f"{architecture}.block_count": num_layers,
        f"{architecture}.attention.key_length": config["head_dim"],
        f"{architecture}.attention.value_length": config["head_dim"],
        f"{architecture}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{architecture}.rope.freq_base": rope["rope_theta"],
        f"{architecture}.rope.dimension_count": int(
            config["head_dim"] * rope.get("partial_rotary_factor", 1.0)
        ),
    }
    if "linear_value_head_dim" in config:
        inner_size = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        found[f"{architecture}.ssm.inner_size"] = inner_size
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "linear":
        found[f"{architecture}.rope.scaling.type"] = "linear"
        found[f"{architecture}.rope.scaling.factor"] = scaling["factor"]
    return found


def converted(
    architecture: str, config: Mapping[str, Any], state: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    last = config["num_hidden_layers"]
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in unfused(state):
        if name in GLOBALS:
            is_norm = "norm" in name and architecture.startswith("qwen35")
            yield GLOBALS[name].format(last=last), tensor + 1 if is_norm else tensor
            continue
        layer, _, inside = name.replace("mtp.layers.0.", f"model.layers.{last}.")[13:].partition(
            "."
        )
        stem, _, suffix = inside.rpartition(".")
        if stem.startswith("mlp.experts."):
            _, _, expert, projection = stem.split(".")
            joined = f"blk.{layer}.{IN_LAYER[f'mlp.experts.{projection}']}.weight"
            experts.setdefault(joined, {})[int(expert)] = tensor
            continue
        if stem == "post_attention_layernorm":
            ours = "post_attention_norm" if architecture.startswith("qwen35") else "ffn_norm"
        else:
            ours = IN_LAYER.get(stem) or IN_LAYER[inside]
        suffix = "" if inside in IN_LAYER else f".{suffix}"
        yield f"blk.{layer}.{ours}{suffix}", changed(architecture, config, inside, tensor)
    for name, tensors in experts.items():
        yield name, torch.stack([tensors[expert] for expert in range(len(tensors))])
    if (config.get("rope_scaling") or {}).get("rope_type") == "llama3":
        yield "rope_freqs.weight", llama3_factors(config)


def unfused(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Each expert's matrices as separate tensors."""
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                for projection, half in zip(("gate", "up"), both.chunk(2)):
                    yield name.replace("gate_up_proj", f"{expert}.{projection}_proj.weight"), half
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(tensor):
                yield name.replace("down_proj", f"{expert}.down_proj.weight"), down
        else:
            yield name, tensor


def changed(architecture: str, config: Mapping[str, Any], inside: str, tensor: Tensor) -> Tensor:
    if architecture == "llama" and inside in ("self_attn.q_proj.weight", "self_attn.k_proj.weight"):
        heads = config["num_attention_heads" if ".q_" in inside else "num_key_value_heads"]
        return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
    if not architecture.startswith("qwen35"):
        return tensor
    if "norm" in inside and inside != "linear_attn.norm.weight":
        return tensor + 1
    if inside == "mlp.shared_expert_gate.weight":
        return tensor.squeeze(0)
    if inside.startswith("linear_attn."):
        return changed_delta_net(config, inside.removeprefix("linear_attn."), tensor)
    return tensor


def changed_delta_net(config: Mapping[str, Any], name: str, tensor: Tensor) -> Tensor:
    num_keys, num_values = config["linear_num_key_heads"], config["linear_num_value_heads"]

    def tiled(values: Tensor, dim: int = 0) -> Tensor:
        """Reorders value heads from key by key to the first of every key, then the second of every
        key.
        """
        heads = values.unflatten(dim, (num_keys, num_values // num_keys, -1))
        return heads.transpose(dim, dim + 1).reshape(values.shape)

    key_rows = 2 * num_keys * config["linear_key_head_dim"]
    match name:
        case "in_proj_qkv.weight":
            return torch.cat((tensor[:key_rows], tiled(tensor[key_rows:])))
        case "conv1d.weight":
            taps = tensor.squeeze(1)
            return torch.cat((taps[:key_rows], tiled(taps[key_rows:])))
        case "A_log":
            return tiled(-torch.exp(tensor))
        case "out_proj.weight":
            return tiled(tensor, 1)
        case "norm.weight":
            return tensor
    return tiled(tensor)


def llama3_factors(config: Mapping[str, Any]) -> Tensor:
    scaling, head_dim = config["rope_scaling"], config["head_dim"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    factors = []
    for place in range(0, head_dim, 2):
        wave = 2 * math.pi * config["rope_theta"] ** (place / head_dim)
        if wave < original / high:
            factors.append(1.0)
        elif wave > original / low:
            factors.append(scaling["factor"])
        else:
            smooth = (original / wave - low) / (high - low)
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return torch.tensor(np.array(factors, np.float32))


def tokenizer_metadata(tokenizer: Mapping[str, Any], pre: str, vocab_size: int) -> dict[str, Any]:
    """The vocabulary of a byte-level tokenizer.json, as a converter writes it: ids without a token
    are filled up.
    """
    tokens = [f"[PAD{id}]" for id in range(vocab_size)]
    types = [gguf.TokenType.UNUSED] * vocab_size
    for token, id in tokenizer["model"]["vocab"].items():
        tokens[id], types[id] = token, gguf.TokenType.NORMAL
    for added in tokenizer["added_tokens"]:
        is_control = added["special"] or added["content"].startswith("<|")
        kind = gguf.TokenType.CONTROL if is_control else gguf.TokenType.USER_DEFINED
        tokens[added["id"]], types[added["id"]] = added["content"], kind
    merges = [
        merge if isinstance(merge, str) else " ".join(merge)
        for merge in tokenizer["model"]["merges"]
    ]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
        "tokenizer.ggml.merges": merges,
    }


def write_embedded(
    path: Path, matrices: str = "F32", changed_metadata: Mapping[str, Any] | None = None
) -> Path:
    """The embedded model with its tokenizer and template, plus sampling parameters that it does not
    have.
    """
    folder = Path(default_model())
    config = json.loads((folder / "config.json").read_text())["text_config"]
    state = {
        name.replace("model.language_model.", "model."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    metadata = {
        **tokenizer_metadata(tokenizer, "qwen35", config["vocab_size"]),
        "tokenizer.ggml.eos_token_id": 2529,
        "tokenizer.ggml.padding_token_id": 2527,
        "tokenizer.chat_template": (folder / "chat_template.jinja").read_text(),
        "general.sampling.temp": 0.7,
        "general.sampling.top_k": 20,
        **(changed_metadata or {}),
    }
    return write_gguf(path, "qwen35moe", config, state, matrices=matrices, metadata=metadata)
