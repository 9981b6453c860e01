"""`--ep`: ranks have whole experts instead of slices, and the result is that of one rank."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from kernel_checks import PLACES
from packed_checkpoints import FORMATS, in_mlx_form, pack_state, plain_state, some_formats, write
from penstock.errors import ConfigError
from penstock.models import build_model
from penstock.ops.reference import moe as reference
from penstock.ops.triton import moe
from penstock.parallel.ranks import Ranks
from penstock.weights.slices import cut_values, shares_of
from rank_models import NEXT, QWEN3_MOE, assert_close, logits_of, values_of
from small_models import HYBRID_MOE, load_weights, make_engine, prompt, request, run, tokens_of
from thread_ranks import on_ranks, random_model, ranked_engine

EXPERTS_16: dict[str, Any] = {**HYBRID_MOE, "num_experts": 32, "linear_num_value_heads": 8}
EXPERTS_16 |= {"num_attention_heads": 8, "shared_expert_intermediate_size": 64}
MODELS = {
    "hybrid": {**HYBRID_MOE, "mtp_num_hidden_layers": 1},
    "qwen3_moe": QWEN3_MOE,
    "next": NEXT,
}


def whole(ranks: Ranks) -> Ranks:
    return dataclasses.replace(ranks, whole_experts=True)


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_with_whole_experts_compute_the_logits_of_one(name: str) -> None:
    config = MODELS[name]
    expected = logits_of(random_model(config))
    first, second = on_ranks(2, lambda ranks: logits_of(random_model(config, whole(ranks))))
    assert_close(first, expected)
    assert torch.equal(first, second)


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 8])
def test_more_ranks_do_too(size: int) -> None:
    expected = logits_of(random_model(EXPERTS_16))
    found = on_ranks(size, lambda ranks: logits_of(random_model(EXPERTS_16, whole(ranks))))
    for one in found:
        assert_close(one, expected)


def test_an_engine_of_two_ranks_replies_as_one() -> None:
    asked = [request(str(i), prompt(30 + 7 * i, seed=i), max_tokens=10) for i in range(3)]
    expected = run(make_engine(HYBRID_MOE, weights_seed=3), *asked)
    with ranked_engine(HYBRID_MOE, 2, ep=True) as engine:
        model: Any = engine.runner.model
        assert model.layers[0].mlp.own == range(4)
        found = run(engine, *asked)
    assert {id: tokens_of(one) for id, one in found.items()} == {
        id: tokens_of(one) for id, one in expected.items()
    }


PACKED = {**HYBRID_MOE, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
PACKED |= {"linear_value_head_dim": 32}


@pytest.mark.parametrize("name", some_formats("fp8", "int8", "gptq", "nvfp4", "mlx"))
def test_ranks_keep_whole_experts_of_a_packed_checkpoint(tmp_path: Path, name: str) -> None:
    form = FORMATS[name]
    packed, _ = pack_state(plain_state(PACKED), form)
    if name == "mlx":
        packed = in_mlx_form(packed, "language_model.")
    path = write(tmp_path / "model", packed, {**PACKED, form.key: form.quantization})
    expected = values_of(load_weights(path))
    for rank in range(2):
        model = load_weights(path, ranks=Ranks(rank, 2, None, True))
        shares = shares_of(model)
        for name_, values in values_of(model).items():
            share = shares.get(name_)
            part = expected[name_] if share is None else cut_values(expected[name_], share)
            assert torch.equal(values, part), f"{name_} of rank {rank}"
        assert model.layers[0].mlp.gate_up.shape[0] == 4


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize(("num_experts", "k", "size"), [(8, 3, 2), (32, 8, 4), (12, 5, 2)])
def test_a_token_keeps_its_own_experts_and_no_other_weighs(
    device: str, dtype: torch.dtype, num_experts: int, k: int, size: int
) -> None:
    generator = torch.Generator().manual_seed(k)
    scores = torch.rand(40, num_experts, generator=generator)
    weights, ids = (one.to(device) for one in scores.topk(k))
    count = num_experts // size
    total = torch.zeros(40, num_experts, device=device)
    for rank in range(size):
        first = rank * count
        own = [
            run(weights, ids.int(), first, count)
            for run in (moe.own_experts, reference.own_experts)
        ]
        for seen, expected in zip(*own):
            assert torch.equal(seen, expected.to(seen.dtype))
        own_weights, own_ids = own[0]
        assert all(len(set(row)) == k for row in own_ids.tolist()), "an expert stands twice"
        assert own_ids.min() >= 0
        assert own_ids.max() < count
        total.scatter_add_(1, own_ids.long() + first, own_weights)
    assert torch.equal(total, torch.zeros_like(total).scatter_(1, ids, weights))


def test_too_few_experts_for_whole_ones_are_refused() -> None:
    with pytest.raises(ConfigError, match="A rank would have 2, fewer than the 3"):
        build_model(
            {**EXPERTS_16, "num_experts": 16, "num_experts_per_tok": 3},
            torch.float32,
            torch.device("meta"),
            ranks=Ranks(0, 8, None, True),
        )
