"""Small configs of every family with unequal dimensions, and engines with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.models.source import ModelSource, find_model
from penstock.types import Request, SamplingParams, TokenDelta, TokenLogprob
from penstock.weights.load import load_model

HYBRID_MOE: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attn_output_gate": True,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "dtype": "float32",
}
HYBRID_DENSE = {
    **{key: value for key, value in HYBRID_MOE.items() if "expert" not in key and "moe" not in key},
    "model_type": "qwen3_5_text",
    "intermediate_size": 96,
    "tie_word_embeddings": True,
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
FAMILIES = {"hybrid_moe": HYBRID_MOE, "hybrid_dense": HYBRID_DENSE, "llama": LLAMA}
# For engine tests with many steps: two layers with states, which could be swapped, and one with
# keys.
_FEW_LAYERS = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention"] * 2 + ["full_attention"],
    "full_attention_interval": 3,
}
SHALLOW_MOE, SHALLOW_DENSE = HYBRID_MOE | _FEW_LAYERS, HYBRID_DENSE | _FEW_LAYERS
SHALLOW_FAMILIES = {"hybrid_moe": SHALLOW_MOE, "hybrid_dense": SHALLOW_DENSE, "llama": LLAMA}


def load_weights(path: Path, **settings: Any) -> Any:
    """The model of a checkpoint on the CPU in float32, with its drafting head, without an
    engine.
    """
    given = {"device": "cpu", "dtype": "float32", "random_weights": False, "seed": 0}
    given |= {"on_phase": lambda phase: None, "with_drafting_head": True}
    return load_model(find_model(str(path)), **{**given, **settings})


def make_engine(config: dict[str, Any], **settings: Any) -> Engine:
    given = {"random_weights": True, "device": "cpu", "deterministic": True, "max_model_len": 1024}
    given["memory_gb"] = 0.02  # zeroing a gigabyte takes longer than most tests
    engine_config = EngineConfig(**{**given, **settings})
    return Engine.from_source(ModelSource(name="small", path=None, config=config), engine_config)


def run(engine: Engine, *requests: Request, max_steps: int = 5000) -> dict[str, list[TokenDelta]]:
    """Submits all requests at once and steps until all have ended."""
    for request in requests:
        engine.submit(request)
    return drain(engine, max_steps)


def drain(engine: Engine, max_steps: int = 5000) -> dict[str, list[TokenDelta]]:
    deltas: dict[str, list[TokenDelta]] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            return deltas
        for delta in engine.step():
            deltas.setdefault(delta.request_id, []).append(delta)
    raise AssertionError(f"the engine still has work after {max_steps} steps")


def tokens_of(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def logprobs_of(deltas: list[TokenDelta]) -> list[TokenLogprob]:
    return [logprob for delta in deltas for logprob in delta.logprobs]


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Varied tokens, never the first ten, which tests use as ends and biases."""
    state, tokens = seed * 7919 + 1, []
    for _ in range(length):
        state = (state * 1103515245 + 12345) % 2**31
        tokens.append(10 + (state >> 8) % 300)
    return tuple(tokens)


def request(id: str, token_ids: tuple[int, ...], **sampling: Any) -> Request:
    ends = sampling.pop("end_token_ids", ())
    boundaries = sampling.pop("boundaries", ())
    given = {"max_tokens": 12, "logprobs": 3, **sampling}
    return Request(
        id=id,
        token_ids=token_ids,
        sampling=SamplingParams(**given),
        end_token_ids=ends,
        boundaries=boundaries,
    )
