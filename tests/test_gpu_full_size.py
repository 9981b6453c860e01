"""Four layers of Qwen3.5-35B-A3B at their real width against transformers, on the same weights, on a GPU.

Both run in bf16, and what is near enough is not chosen: transformers' own distance from its float32 self is.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.config import EngineConfig
from penstock.engine.direct import DirectEngine
from penstock.engine.engine import Engine
from penstock.models import build_model
from penstock.models.presets import PRESETS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
NUM_PROMPT, NUM_DECODES = 100, 12


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    config = copy.deepcopy(dict(PRESETS["Qwen3.5-35B-A3B"]))
    text = config.get("text_config", config)
    layer_types = ["linear_attention"] * 3 + ["full_attention"]
    return {**text, "num_hidden_layers": len(layer_types), "layer_types": layer_types}


def make_reference(config: dict[str, Any]) -> Any:
    transformers = pytest.importorskip("transformers")
    ours = ("model_type", "attn_output_gate", "dtype")
    known = {key: value for key, value in config.items() if key not in ours}
    with torch.device("cuda"):
        torch.manual_seed(0)
        return transformers.Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeTextConfig(**known)).bfloat16()


@torch.inference_mode()
def make_ours(config: dict[str, Any], weights: dict[str, Tensor], **settings: Any) -> DirectEngine:
    model = build_model(config, torch.bfloat16, torch.device("cuda"))
    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    for name, place in model.placements(weights.keys()).items():
        values = place.convert(weights[name]) if place.convert else weights[name]
        parameters[place.parameter][place.index].copy_(values)
    given = {"memory_gb": 4, "max_rows": 8, "max_model_len": 1024, "prefix_cache": False}
    return DirectEngine(Engine(model, EngineConfig(**given, **settings), "cut"))


@pytest.mark.parametrize("deterministic", [False, True])
@torch.inference_mode()
def test_decoded_logits_are_as_near_to_float32_as_transformers_are(
    config: dict[str, Any], deterministic: bool
) -> None:
    reference = make_reference(config)
    tokens = torch.randint(0, config["vocab_size"], (NUM_PROMPT + NUM_DECODES,))
    wanted = slice(NUM_PROMPT - 1, NUM_PROMPT + NUM_DECODES)
    half = reference(tokens[None].cuda()).logits[0, wanted].float()
    engine = make_ours(config, dict(reference.state_dict()), deterministic=deterministic)
    exact = reference.float()(tokens[None].cuda()).logits[0, wanted]
    seen = [engine.prefill(["alone"], [tokens[:NUM_PROMPT]])[0]]
    others = [f"other {i}" for i in range(4)]
    engine.prefill(others, [tokens[i : NUM_PROMPT + i] for i in range(4)])
    for token in tokens[NUM_PROMPT:]:  # alone and in a batch of five, by turns
        ids = ["alone"] if token % 2 else ["alone", *others]
        seen.append(engine.decode(ids, token.expand(len(ids)))[0])
    allowed = (half - exact).norm(dim=-1)
    assert ((torch.stack(seen) - exact).norm(dim=-1) <= 1.25 * allowed.max()).all()
    assert (torch.stack(seen) - exact).norm() <= 1.1 * (half - exact).norm()
