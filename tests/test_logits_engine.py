"""create_engine's three calls: for any order of prefill, decode and remove, the logits are those of
the whole sequence run alone.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import create_engine
from penstock.engine.logits_engine import LogitsEngine
from penstock.errors import CapacityError, ContextLengthError, RequestError
from small_models import SHALLOW_FAMILIES, SHALLOW_MOE, prompt


def direct(config: dict[str, Any], **settings: Any) -> LogitsEngine:
    given = {"random_weights": True, "max_model_len": 512, **settings}
    return create_engine(config, "small", "cpu", **given)


def logits_alone(config: dict[str, Any], tokens: list[int]) -> torch.Tensor:
    return direct(config).prefill(["alone"], [torch.tensor(tokens)])[0]


@pytest.fixture(params=SHALLOW_FAMILIES)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return SHALLOW_FAMILIES[request.param]


def test_decode_equals_prefill_of_the_same_tokens(config: dict[str, Any]) -> None:
    engine = direct(config)
    tokens = list(prompt(150))
    engine.prefill(["a"], [torch.tensor(tokens[:100])])
    for end in range(101, 151):
        logits = engine.decode(["a"], torch.tensor(tokens[end - 1 : end]))
        if end in (101, 128, 129, 150):
            torch.testing.assert_close(
                logits[0], logits_alone(config, tokens[:end]), atol=2e-4, rtol=1e-4
            )


def test_any_order_of_calls_keeps_every_request_right(config: dict[str, Any]) -> None:
    """Random inserts, replacements, decodes and removals in any order; results are checked now and
    then.
    """
    rng = random.Random(5)
    engine = direct(config, max_rows=6, max_step_tokens=128)
    alive: dict[str, list[int]] = {}
    for turn in range(60):
        choice = rng.random()
        if choice < 0.3 or not alive:
            ids = rng.sample("abcdef", rng.randint(1, 3))
            prompts = [
                list(prompt(rng.choice((1, 5, 63, 64, 65, 130)), seed=turn + i))
                for i in range(len(ids))
            ]
            logits = engine.prefill(ids, [torch.tensor(tokens) for tokens in prompts])
            alive |= dict(zip(ids, prompts))
        elif choice < 0.85:
            ids = rng.sample(sorted(alive), rng.randint(1, len(alive)))
            tokens = [rng.randrange(320) for _ in ids]
            logits = engine.decode(ids, torch.tensor(tokens))
            for id, token in zip(ids, tokens):
                alive[id].append(token)
        else:
            id = rng.choice(sorted(alive))
            engine.remove([id])
            del alive[id]
            continue
        if turn % 4 == 0:
            for id, row in zip(ids, logits):
                torch.testing.assert_close(
                    row, logits_alone(config, alive[id]), atol=2e-4, rtol=1e-4
                )
    engine.remove(sorted(alive))
    engine.engine.policy.cache.check()
    assert engine.engine.policy.cache.num_free_pages == engine.engine.info.num_pages - 1


def test_errors_name_the_fault_and_leave_the_state_alone() -> None:
    engine = direct(SHALLOW_MOE, max_rows=2)
    tokens = list(prompt(70))
    engine.prefill(["a"], [torch.tensor(tokens)])
    ones = torch.ones(1, dtype=torch.int64)
    for error, call in (
        (RequestError, lambda: engine.decode(["b"], ones)),
        (RequestError, lambda: engine.remove(["b"])),
        (RequestError, lambda: engine.remove(["a", "b"])),
        (RequestError, lambda: engine.decode([], ones[:0])),
        (RequestError, lambda: engine.decode(["a", "a"], torch.ones(2, dtype=torch.int64))),
        (RequestError, lambda: engine.decode(["a"], torch.ones(2, dtype=torch.int64))),
        (RequestError, lambda: engine.decode(["a"], torch.tensor([320]))),
        (RequestError, lambda: engine.decode(["a"], torch.tensor([-1]))),
        (RequestError, lambda: engine.prefill(["b"], [torch.ones(0, dtype=torch.int64)])),
        (RequestError, lambda: engine.prefill(["b"], [torch.ones((1, 3), dtype=torch.int64)])),
        (RequestError, lambda: engine.prefill(["a"], [torch.tensor([1, 999])])),
        (ContextLengthError, lambda: engine.prefill(["a"], [torch.ones(513, dtype=torch.int64)])),
        (CapacityError, lambda: engine.prefill(["b", "c"], [ones, ones])),
    ):
        with pytest.raises(error):
            call()
    logits = engine.decode(["a"], torch.tensor([5]))[0]
    torch.testing.assert_close(
        logits, logits_alone(SHALLOW_MOE, [*tokens, 5]), atol=2e-4, rtol=1e-4
    )


def test_plain_state_dict_folder_is_enough(tmp_path: Path) -> None:
    """The documented call: a config dict, a folder with model.pt, a device."""
    config = {
        "model_type": "tiny_llama",
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "vocab_size": 100,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": "float16",
    }
    torch.manual_seed(0)
    shapes = {"embed_tokens.weight": (100, 48), "norm.weight": (48,), "lm_head.weight": (100, 48)}
    for layer in range(2):
        at = f"layers.{layer}."
        shapes |= {
            at + "input_layernorm.weight": (48,),
            at + "post_attention_layernorm.weight": (48,),
        }
        shapes |= {at + f"self_attn.{name}_proj.weight": (24, 48) for name in "kv"}
        shapes |= {at + f"self_attn.{name}_proj.weight": (48, 48) for name in "qo"}
        shapes |= {at + f"mlp.{name}_proj.weight": (80, 48) for name in ("gate", "up")}
        shapes |= {at + "mlp.down_proj.weight": (48, 80)}
    torch.save(
        {name: torch.randn(shape).half() * 0.1 for name, shape in shapes.items()},
        tmp_path / "model.pt",
    )
    engine = create_engine(config, str(tmp_path), device="cpu")
    logits = engine.prefill(["x", "y"], [torch.tensor([1, 2, 3]), torch.tensor([4])])
    assert logits.shape == (2, 100)
    assert logits.dtype == torch.float32
    stepped = engine.decode(["y", "x"], torch.tensor([7, 9]))
    fresh = engine.prefill(["z"], [torch.tensor([1, 2, 3, 9])])
    torch.testing.assert_close(stepped[1], fresh[0], atol=1e-5, rtol=1e-5)
