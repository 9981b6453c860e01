"""The config.json of well-known models, to size, test and time them without a download.

Pure data: one row of numbers per model, and one function per family that expands the row to the
published file. Imports no torch and does not know what the numbers mean to a layer.
"""

from __future__ import annotations

from typing import Any

# name: hidden, layers, heads, kv heads, value heads, ffn | (experts, experts per token, expert
# width), tied
_QWEN3_5: dict[str, tuple[int, int, int, int, int, int | tuple[int, int, int], bool]] = {
    "Qwen3.5-0.8B": (1024, 24, 8, 2, 16, 3584, True),
    "Qwen3.5-2B": (2048, 24, 8, 2, 16, 6144, True),
    "Qwen3.5-4B": (2560, 32, 16, 4, 32, 9216, True),
    "Qwen3.5-9B": (4096, 32, 16, 4, 32, 12288, False),
    "Qwen3.5-27B": (5120, 64, 24, 4, 48, 17408, False),
    "Qwen3.5-35B-A3B": (2048, 40, 16, 2, 32, (256, 8, 512), False),
    "Qwen3.5-122B-A10B": (3072, 48, 32, 2, 64, (256, 8, 1024), False),
    "Qwen3.5-397B-A17B": (4096, 60, 32, 2, 64, (512, 10, 1024), False),
}


def _qwen3_5(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    value_heads: int,
    ffn: int | tuple[int, int, int],
    tied: bool,
) -> dict[str, Any]:
    if isinstance(ffn, tuple):
        experts, experts_per_token, width = ffn
        model_type, architecture = "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"
        ffn_keys = {
            "num_experts": experts,
            "num_experts_per_tok": experts_per_token,
            "moe_intermediate_size": width,
            "shared_expert_intermediate_size": width,
        }
    else:
        model_type, architecture = "qwen3_5", "Qwen3_5ForConditionalGeneration"
        ffn_keys = {"intermediate_size": ffn}
    text_config = {
        "model_type": f"{model_type}_text",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        **ffn_keys,
        "full_attention_interval": 4,
        "layer_types": [
            "linear_attention",
            "linear_attention",
            "linear_attention",
            "full_attention",
        ]
        * (layers // 4),
        "attn_output_gate": True,
        "attention_bias": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
        "max_position_embeddings": 262144,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "vocab_size": 248320,
        "eos_token_id": 248044,
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
    }
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "text_config": text_config,
        "tie_word_embeddings": tied,
    }


# Instruct and Thinking share these numbers.
_QWEN3_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "intermediate_size": 5120,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "partial_rotary_factor": 0.25,
    "rope_theta": 10_000_000,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 262144,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


# name: type, hidden, layers, heads, kv heads, head width, ffn, vocabulary, context, rope theta,
# eps, tied
_LLAMA_LIKE: dict[str, tuple[str, int, int, int, int, int, int, int, int, float, float, bool]] = {
    "Llama-2-7B": ("llama", 4096, 32, 32, 32, 128, 11008, 32000, 4096, 1e4, 1e-5, False),
    "Llama-3.1-8B": ("llama", 4096, 32, 32, 8, 128, 14336, 128256, 131072, 5e5, 1e-5, False),
    "Llama-3.1-70B": ("llama", 8192, 80, 64, 8, 128, 28672, 128256, 131072, 5e5, 1e-5, False),
    "Llama-3.2-1B": ("llama", 2048, 16, 32, 8, 64, 8192, 128256, 131072, 5e5, 1e-5, True),
    "Llama-3.2-3B": ("llama", 3072, 28, 24, 8, 128, 8192, 128256, 131072, 5e5, 1e-5, True),
    "Mistral-7B-v0.3": ("mistral", 4096, 32, 32, 8, 128, 14336, 32768, 32768, 1e6, 1e-5, False),
    "Qwen2.5-0.5B": ("qwen2", 896, 24, 14, 2, 64, 4864, 151936, 32768, 1e6, 1e-6, True),
    "Qwen2.5-7B": ("qwen2", 3584, 28, 28, 4, 128, 18944, 152064, 131072, 1e6, 1e-6, False),
    "Qwen3-0.6B": ("qwen3", 1024, 28, 16, 8, 128, 3072, 151936, 40960, 1e6, 1e-6, True),
    "Qwen3-8B": ("qwen3", 4096, 36, 32, 8, 128, 12288, 151936, 40960, 1e6, 1e-6, False),
    "Qwen3-32B": ("qwen3", 5120, 64, 64, 8, 128, 25600, 151936, 40960, 1e6, 1e-6, False),
    "Qwen3-30B-A3B": ("qwen3_moe", 2048, 48, 32, 4, 128, 6144, 151936, 40960, 1e6, 1e-6, False),
    "Qwen3-235B-A22B": ("qwen3_moe", 4096, 94, 64, 4, 128, 12288, 151936, 40960, 1e6, 1e-6, False),
}

_ARCHITECTURE_NAMES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def _llama3_rope(factor: float) -> dict[str, Any]:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    return {"rope_scaling": {**scaling, "original_max_position_embeddings": 8192}}


def _experts(width: int) -> dict[str, Any]:
    routing = {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
    return {
        **routing,
        "moe_intermediate_size": width,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


_EXTRAS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": _llama3_rope(8.0),
    "Llama-3.1-70B": _llama3_rope(8.0),
    "Llama-3.2-1B": _llama3_rope(32.0),
    "Llama-3.2-3B": _llama3_rope(32.0),
    "Mistral-7B-v0.3": {"sliding_window": None},
    "Qwen3-30B-A3B": _experts(768),
    "Qwen3-235B-A22B": _experts(1536),
}


def _llama_like(
    model_type: str,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    vocab: int,
    context: int,
    theta: float,
    eps: float,
    tied: bool,
) -> dict[str, Any]:
    return {
        "architectures": [_ARCHITECTURE_NAMES[model_type]],
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rope_theta": theta,
        "rms_norm_eps": eps,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }


PRESETS: dict[str, dict[str, Any]] = {
    **{name: _qwen3_5(*row) for name, row in _QWEN3_5.items()},
    "Qwen3-Next-80B-A3B": _QWEN3_NEXT,
    **{name: {**_llama_like(*row), **_EXTRAS.get(name, {})} for name, row in _LLAMA_LIKE.items()},
}
