"""Four layers of Qwen3.5-35B-A3B at full width against transformers, with the same weights, on a
GPU.

Both run in bf16. The tolerance is the distance of transformers in bf16 from transformers in
float32. With random routers, two tokens of five choose other experts in bf16 than in float32, which
moves single logits far. So every decode is compared where routing is clear, and the mean of many
where it is not.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from clear_routing import make_routing_clear
from penstock.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.logits_engine import LogitsEngine
from penstock.models import build_model
from penstock.models.presets import PRESETS
from penstock.weights.load import targets_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
NUM_SEQUENCES, NUM_PROMPT, NUM_DECODES = 8, 100, 256


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    config = copy.deepcopy(dict(PRESETS["Qwen3.5-35B-A3B"]))
    text = config.get("text_config", config)
    layer_types = ["linear_attention"] * 3 + ["full_attention"]
    return {**text, "num_hidden_layers": len(layer_types), "layer_types": layer_types}


def make_reference(config: dict[str, Any], is_clear: bool, seed: int) -> Any:
    transformers = pytest.importorskip("transformers")
    ours = ("model_type", "attn_output_gate", "dtype")
    known = {key: value for key, value in config.items() if key not in ours}
    with torch.device("cuda"):
        torch.manual_seed(seed)
        model = transformers.Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeTextConfig(**known))
        if is_clear:
            generator = torch.Generator("cuda").manual_seed(seed)
            make_routing_clear(model, config["num_experts_per_tok"], generator)
        return model.bfloat16()


@torch.inference_mode()
def make_ours(config: dict[str, Any], weights: dict[str, Tensor], **settings: Any) -> LogitsEngine:
    model = build_model(config, torch.bfloat16, torch.device("cuda"), with_drafting_head=False)
    parameters = targets_of(model)
    for name, place in model.placements(weights.keys()).items():
        parameters[place.parameter][place.index].copy_(place.converted(weights[name]))
    given = {
        "memory_gb": 4,
        "max_rows": NUM_SEQUENCES,
        "max_model_len": 1024,
        "prefix_cache": False,
    }
    return LogitsEngine(Engine(model, EngineConfig(**given, **settings), "cut"))


@torch.inference_mode()
def distances(
    config: dict[str, Any], *, deterministic: bool, is_clear: bool, seed: int
) -> tuple[Tensor, Tensor]:  # [sequences, 1 + decodes] each
    """Distances from transformers in float32: of our decodes, and of transformers in bf16."""
    reference = make_reference(config, is_clear, seed)
    tokens = torch.randint(0, config["vocab_size"], (NUM_SEQUENCES, NUM_PROMPT + NUM_DECODES))
    half = logits_of(reference, tokens)
    engine = make_ours(config, dict(reference.state_dict()), deterministic=deterministic)
    exact = logits_of(reference.float(), tokens)
    ids = list(range(NUM_SEQUENCES))
    ours = [engine.prefill(ids, list(tokens[:, :NUM_PROMPT])).cpu()]
    for step, token_ids in enumerate(tokens[:, NUM_PROMPT:].T):
        if step % 2:  # in one batch and in two, alternating
            ours.append(engine.decode(ids, token_ids).cpu())
        else:
            halves = (ids[:1], token_ids[:1]), (ids[1:], token_ids[1:])
            ours.append(torch.cat([engine.decode(*half).cpu() for half in halves]))
    return (torch.stack(ours, 1) - exact).norm(dim=-1), (half - exact).norm(dim=-1)


def logits_of(reference: Any, tokens: Tensor) -> Tensor:  # [sequences, 1 + decodes, vocab] float32
    wanted = slice(NUM_PROMPT - 1, None)
    return torch.stack(
        [reference(row[None].cuda()).logits[0, wanted].float().cpu() for row in tokens]
    )


@pytest.mark.parametrize("deterministic", [False, True])
def test_every_decode_is_as_near_to_float32_as_transformers_are_and_stays_so(
    config: dict[str, Any], deterministic: bool
) -> None:
    ours, theirs = distances(config, deterministic=deterministic, is_clear=True, seed=0)
    assert ours.max() <= theirs.max()
    assert (ours.mean(1) <= 0.9 * theirs.mean(1)).all()
    early, late = ours[:, :64].median(), ours[:, -64:].median()
    assert late <= 1.05 * early, "the state drifts"


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_decodes_whose_routing_rounds_are_on_average_nearer_to_float32_than_transformers_are(
    config: dict[str, Any], deterministic: bool, seed: int
) -> None:
    ours, theirs = distances(config, deterministic=deterministic, is_clear=False, seed=seed)
    assert ours.mean() <= theirs.mean()
    assert ours.median() <= theirs.median()
    early, late = ours[:, :64].median(), ours[:, -64:].median()
    assert late <= 1.25 * early, "what a changed expert left in the state does not fade"
