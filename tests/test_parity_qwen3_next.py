"""Qwen3-Next against transformers: logits, greedy tokens, and the names in its checkpoints.

The layers are those of Qwen3.5, whose tests say how they batch and split. These say what differs:
the fused projections, dense layers among sparse ones, and the defaults of config.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clear_routing import make_routing_clear
from penstock.commands.inspect import inspect_model
from penstock.config import EngineConfig
from penstock.errors import CheckpointError
from penstock.models import build_model
from penstock.models.presets import PRESETS
from penstock.models.qwen3_next import read_config
from small_models import make_engine, prompt, request, run, tokens_of
from step_inputs import ByHand
from test_parity_qwen3_5 import assert_close, load, logits_of, randomize, separate_experts, tokens

pytest.importorskip("transformers")
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

# Keys and types as in the published file: flat, with null for what is not set.
SHAPE: dict[str, Any] = {
    "model_type": "qwen3_next",
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "partial_rotary_factor": 0.25,
    "rope_theta": 500_000,
    "rope_scaling": None,
    "rms_norm_eps": 1e-3,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "sparse": SHAPE,
    "dense layers among sparse": {
        **{key: value for key, value in SHAPE.items() if key != "rope_theta"},
        "mlp_only_layers": [2],
        "full_attention_interval": 2,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "every second sparse": {**SHAPE, "decoder_sparse_step": 2, "linear_num_value_heads": 4},
    "dense": {**SHAPE, "num_experts": 0},
}
NUM_DECODES = 12


class Pair:
    """The same weights in transformers and in our model, which reads them from safetensors."""

    def __init__(self, config: dict[str, Any], path: Path) -> None:
        self.config = config
        self.reference: Any = Qwen3NextForCausalLM(
            Qwen3NextConfig(**{**config, "model_type": "qwen3_next"})
        )
        randomize(self.reference, seed=0)
        if config["num_experts"]:
            generator = torch.Generator().manual_seed(0)
            make_routing_clear(self.reference, config["num_experts_per_tok"], generator)
        self.reference.eval()
        self.checkpoint: dict[str, Tensor] = self.reference.state_dict()
        if config["tie_word_embeddings"]:
            self.checkpoint.pop("lm_head.weight")
        self.ours = load(path, config, self.checkpoint)


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(CONFIGS[request.param], tmp_path_factory.mktemp("model") / "small")


@pytest.mark.thinned
@pytest.mark.parametrize("length", [1, 3, 64, 65, 200])
def test_prefill_and_decode_logits_are_those_of_transformers(pair: Pair, length: int) -> None:
    ids = tokens(length + NUM_DECODES, seed=length)
    by_hand = ByHand(pair.ours)
    ours = torch.cat((by_hand.prefill(ids[:length]), by_hand.decode(ids[length:], length)))
    assert_close(ours, logits_of(pair.reference, ids, length))


def test_chunked_prefill_logits_are_those_of_transformers(pair: Pair) -> None:
    ids = tokens(150)
    assert_close(
        ByHand(pair.ours).prefill(ids, 37, 1, 64), logits_of(pair.reference, ids, len(ids))
    )


def test_greedy_tokens_are_those_of_transformers(pair: Pair) -> None:
    ids = tokens(40)
    theirs = pair.reference.generate(
        torch.tensor([ids]), max_new_tokens=NUM_DECODES, min_new_tokens=NUM_DECODES, do_sample=False
    )
    assert ByHand(pair.ours).generate(ids, NUM_DECODES) == theirs[0, len(ids) :].tolist()


def test_a_checkpoint_may_have_the_published_names(tmp_path: Path) -> None:
    """Separate experts, and a drafting head, which is loaded on request."""
    pair = Pair(SHAPE, tmp_path / "fused")
    tensors = dict(pair.checkpoint)
    head = build_model(SHAPE, torch.float32, torch.device("cpu")).placements()  # type: ignore[operator]
    generator = torch.Generator().manual_seed(1)
    for name, place in head.items():
        if name.startswith("mtp."):
            tensors[name] = torch.randn(place.shape, generator=generator)
    for prefix in ("mtp.layers.0.", *(f"model.layers.{layer}." for layer in range(4))):
        separate_experts(tensors, f"{prefix}mlp.experts.")
    ours = load(tmp_path / "separate", SHAPE, tensors)
    ids = tokens(20)
    assert torch.equal(ByHand(ours).prefill(ids), ByHand(pair.ours).prefill(ids))
    assert torch.equal(ours.mtp.fc.weight.values, tensors["mtp.fc.weight"])
    without = load(tmp_path / "separate", SHAPE, tensors, with_drafting_head=False)
    assert without.mtp is None
    assert torch.equal(ByHand(without).prefill(ids), ByHand(pair.ours).prefill(ids))


def test_the_engine_batches_it_as_it_runs_alone() -> None:
    config = {**CONFIGS["dense layers among sparse"], "vocab_size": 320}
    prompts = [prompt(length, seed=length) for length in (5, 70)]
    alone = [tokens_of(run(make_engine(config), request("one", ids))["one"]) for ids in prompts]
    together = run(make_engine(config), *(request(str(i), ids) for i, ids in enumerate(prompts)))
    assert [tokens_of(together[str(i)]) for i in range(2)] == alone


def test_the_preset_has_the_parameters_of_the_published_checkpoint() -> None:
    """81.3 B with the drafting head; 12 attention layers with two key-value heads of width 256."""
    report = inspect_model(EngineConfig(model="qwen3-next-80b-a3b"))
    total, mtp = report["parameters"]["total"], report["parameters"]["mtp"]
    assert (round(total / 1e9, 2), round((total - mtp) / 1e9, 2)) == (81.32, 79.67)
    assert report["kv_bytes_per_token"] == 12 * 2 * 2 * 256 * 2
    model: Any = build_model(PRESETS["Qwen3-Next-80B-A3B"], torch.bfloat16, torch.device("meta"))
    assert sum(torch.Size(place.shape).numel() for place in model.placements().values()) == total


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob in the model's config is False"),
        ({"mlp_only_layers": ["2"]}, "mlp_only_layers in the model's config is"),
        ({"mlp_only_layers": [0], "intermediate_size": None}, "no intermediate_size"),
        ({"num_experts": None}, "no num_experts"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_type in the model's config is 'yarn'",
        ),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads is 5"),
    ],
)
def test_a_config_we_would_run_wrongly_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        read_config({**SHAPE, **change})
