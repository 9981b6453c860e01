"""The MoE kernels for many tokens against their reference: list of pairs, experts, router."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_checks import FULL_SIZE, PLACES, assert_near, random
from penstock.ops.reference import moe as reference
from penstock.ops.tiles import tile
from penstock.ops.triton import moe, moe_grouped_gemm, moe_permute, moe_route
from penstock.ops.tuning import Question, trials
from penstock.ops.weight import Weight, map_part
from penstock.weights.on_the_fly import round_to
from penstock.weights.packing import pack

H, I, SHARED_I = 48, 24, 40
QUANTIZED_WIDTH = 128  # of tokens and of experts
EPS = 1e-6


def uneven_ids(counts: list[int], seed: int = 0) -> Tensor:
    """[T, 1]: this many tokens for each expert, in random order."""
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))][:, None]


def some_ids(num_tokens: int, num_experts: int, k: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :k].contiguous()


def sparse_inputs(
    ids: Tensor, num_experts: int, device: str, dtype: torch.dtype, *, shared_width: int = SHARED_I
) -> tuple[Any, ...]:
    num_tokens = len(ids)

    def some(*shape: int, seed: int) -> Weight:
        made = random(*shape, dtype=dtype, device=device, seed=seed, scale=shape[-1] ** -0.5)
        return Weight(made)

    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(ids.shape, generator=generator).to(device)
    shared: tuple[Any, ...] = (None, None, None)
    if shared_width:
        shared_weight = torch.rand(num_tokens, 1, generator=generator).to(device)
        shared = (shared_weight, some(2 * shared_width, H, seed=6), some(H, shared_width, seed=7))
    return (
        random(num_tokens, H, dtype=dtype, device=device, seed=2),
        weights,
        ids.to(device, torch.int32),
        some(num_experts, 2 * I, H, seed=3),
        some(num_experts, H, I, seed=4),
        random(num_tokens, H, dtype=dtype, device=device, seed=5),
        *shared,
    )


@contextmanager
def grouped(num_tokens: int, num_experts: int, k: int, height: int) -> Iterator[None]:
    """The form for many tokens, for any number of them, in tiles of this height."""
    shape = (num_experts, k, I, H)
    answers = {
        Question(kernel, shape, num_tokens, {}).key: tile
        for kernel, tile in (
            ("sparse_mlp", {"form": moe.GROUPED_GEMM}),
            ("moe_permute", {"BLOCK_M": height}),
        )
    }
    with trials() as trial:
        trial.answers.update(answers)
        yield
        assert answers.keys() <= trial.questions.keys(), "the form was not taken"


def assert_as_reference(arguments: tuple[Any, ...], dtype: torch.dtype, height: int) -> None:
    x, weights, ids, gate_up, *rest = arguments
    expected = reference.sparse_mlp(x, weights, ids.long(), gate_up, *rest)
    with grouped(len(ids), gate_up.shape[0], ids.shape[1], height):
        seen = moe.sparse_mlp(*arguments)
    assert_near(seen, expected, dtype)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "k", "shared_width"),
    [(1, 9, 3, SHARED_I), (63, 7, 2, 0), (63, 7, 2, I), (70, 5, 3, SHARED_I)],
)
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_experts_of_many_tokens_are_the_weighted_sum_of_the_reference(
    device: str, dtype: torch.dtype, num_tokens: int, num_experts: int, k: int, shared_width: int
) -> None:
    ids = some_ids(num_tokens, num_experts, k)
    arguments = sparse_inputs(ids, num_experts, device, dtype, shared_width=shared_width)
    assert_as_reference(arguments, dtype, height=64)


@pytest.mark.thinned
@pytest.mark.parametrize("height", [64, 128])
@pytest.mark.parametrize("counts", [[0, 300, 0], [65, 0, 130, 1, 64]], ids=["one expert", "uneven"])
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_experts_may_have_any_number_of_tokens(
    device: str, dtype: torch.dtype, counts: list[int], height: int
) -> None:
    """No token, a whole tile, one more; the last tile is short or full."""
    arguments = sparse_inputs(uneven_ids(counts), len(counts), device, dtype)
    assert_as_reference(arguments, dtype, height)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_pairs_whose_weight_is_zero_do_not_count(device: str, dtype: torch.dtype) -> None:
    """Experts left to the host share a slot, and no kernel writes all of its pairs."""
    num_tokens, k, width = 3, 4, 40
    weights = torch.rand(num_tokens, k).to(device)
    weights[:, 1::2] = 0.0
    outputs = random(num_tokens * k, width, dtype=torch.float32, device=device, seed=1)
    outputs[1::2] = float("nan")
    residual = random(num_tokens, width, dtype=dtype, device=device, seed=2)
    out = torch.empty_like(residual)
    moe_grouped_gemm.add_pairs(out, outputs, weights, None, residual)
    by_token = outputs.nan_to_num().view(num_tokens, k, width) * weights[..., None]
    assert_near(out, residual.float() + by_token.sum(1), dtype)


def quantized_inputs(
    num_tokens: int, num_experts: int, device: str, dtype: torch.dtype, *, has_shared: bool = True
) -> tuple[Any, ...]:
    """Two experts per token, all matrices of 4 bits."""
    width, inner = QUANTIZED_WIDTH, QUANTIZED_WIDTH
    ids = some_ids(num_tokens, num_experts, 2).to(device, torch.int32)

    def some(*shape: int, seed: int) -> Weight:
        values = random(*shape, dtype=torch.float32, device="cpu", seed=seed)
        weight = Weight(values.to(device, dtype))
        rows = tile(pack(round_to(values * shape[-1] ** -0.5, "int4")))
        weight.parts = (map_part(rows, lambda tensor: tensor.to(device)),)
        return weight

    shared: tuple[Any, ...] = (None, None, None)
    if has_shared:
        shared_weight = torch.rand(len(ids), 1).to(device)
        shared = (shared_weight, some(2 * inner, width, seed=6), some(width, inner, seed=7))
    return (
        random(len(ids), width, dtype=dtype, device=device, seed=2),
        torch.rand(ids.shape).to(device),
        ids,
        some(num_experts, 2 * inner, width, seed=3),
        some(num_experts, width, inner, seed=4),
        random(len(ids), width, dtype=dtype, device=device, seed=5),
        *shared,
    )


@pytest.mark.parametrize("has_shared", [True, False])
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_packed_experts_are_expanded_in_groups(
    device: str, dtype: torch.dtype, has_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of groups changes no bit, down to one expert at a time."""
    monkeypatch.setattr(moe, "MOST_PAIRS", 0)
    arguments = quantized_inputs(90, 5, device, dtype, has_shared=has_shared)
    whole, ids = moe.sparse_mlp(*arguments), arguments[2]
    x, weights, _, *rest = (
        Weight(given.parts[0].dequantize().to(dtype)) if isinstance(given, Weight) else given
        for given in arguments
    )
    assert_near(whole, reference.sparse_mlp(x, weights, ids.long(), *rest), dtype)
    for num_together in (3, 1):
        most = num_together * 2 * QUANTIZED_WIDTH**2 * dtype.itemsize
        monkeypatch.setattr(moe_grouped_gemm, "MOST_EXPANDED", most)
        assert torch.equal(moe.sparse_mlp(*arguments), whole)


# Kernels differ by how experts are stored and by the number of tokens, not by that of slots.
@pytest.mark.parametrize(
    ("num_slots", "num_tokens"),
    [
        *((5, 3), (14, 20), (5, 45), (14, 90)),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in ((14, 3), (5, 20), (14, 45), (5, 90))
        ),
    ],
)
@pytest.mark.parametrize("stored", ["as codes", "dequantized first", "plain"])
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_experts_in_slots_give_the_bits_of_those_in_order(
    device: str,
    dtype: torch.dtype,
    stored: str,
    num_slots: int,
    num_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With any number of slots and any contents of the others: layers share a pool of slots, and a
    larger cache must not change a token.
    """
    num_experts = 5
    if stored == "dequantized first":
        if device == "cpu":
            pytest.skip("there, codes are always dequantized first")
        monkeypatch.setattr(moe, "MOST_PAIRS", 0)
    if stored != "plain":
        arguments = quantized_inputs(num_tokens, num_experts, device, dtype)
    else:
        ids = some_ids(num_tokens, num_experts, 2)
        arguments = sparse_inputs(ids, num_experts, device, dtype)
    generator = torch.Generator().manual_seed(0)
    slots = torch.randperm(num_slots, generator=generator)[:num_experts].to(device)

    def spread(tensor: Tensor) -> Tensor:
        pool = tensor[torch.arange(num_slots, device=device) % num_experts]
        pool[slots] = tensor
        return pool

    def in_slots(weight: Weight) -> Weight:
        pool = Weight(spread(weight.values.data))
        pool.parts = tuple(map_part(part, spread) for part in weight.parts)
        return pool

    x, weights, ids, gate_up, down, *rest = arguments
    seen = moe.sparse_mlp(
        x, weights, ids, in_slots(gate_up), in_slots(down), *rest, slots=slots.int()
    )
    assert torch.equal(seen, moe.sparse_mlp(*arguments))


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_ids_and_weights_may_be_part_of_wider_tensors(device: str, dtype: torch.dtype) -> None:
    x, weights, ids, *rest = sparse_inputs(some_ids(70, 8, 2), 8, device, dtype)
    wide = [torch.cat((some, some.flip(0)), dim=1)[:, :2] for some in (weights, ids)]
    assert not wide[1].is_contiguous()
    assert_as_reference((x, *wide, *rest), dtype, height=64)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_tokens_beyond_a_limit_are_run_in_parts(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe, "MAX_TOKENS", 64)
    arguments = sparse_inputs(some_ids(150, 5, 2), 5, device, dtype)
    x, weights, ids, *rest = arguments
    assert_near(
        moe.sparse_mlp(*arguments), reference.sparse_mlp(x, weights, ids.long(), *rest), dtype
    )


@pytest.mark.parametrize("has_shared", [True, False])
@pytest.mark.parametrize(("height", "num_alike"), [(8, 10), (64, 130), (128, 400)])
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_every_pair_is_in_one_tile_of_its_expert(
    device: str, dtype: torch.dtype, height: int, num_alike: int, has_shared: bool
) -> None:
    """Listed by one program, by a larger one, and by several."""
    num_experts, k = 8, 2  # as many as counters are apart: none may be that of another
    alike = torch.tensor([[0, 1]]).expand(num_alike, k)
    ids = torch.cat((some_ids(num_alike + 40, num_experts - 1, k), alike))
    num_tokens, slots = len(ids), k + has_shared
    counters = reference.new_counters(num_experts, device)
    assert len(counters) >= moe_permute.SPREAD * (num_experts + 1), "otherwise it has its own"
    for _ in range(2):  # the first run must reset the counts to zero
        order, tiles = moe_permute.list_pairs(
            ids.int().to(device), num_experts, slots, height, counters
        )
        assert not counters.any()
        pairs_of: dict[int, list[int]] = {}
        rows: list[int] = []
        for expert, place, row, num_pairs in tiles.tolist():
            assert num_pairs <= height
            pairs_of.setdefault(expert, []).extend(order[place : place + num_pairs].tolist())
            rows.extend(range(row, row + num_pairs))
        assert sorted(rows) == list(range(num_tokens * slots))
        for expert in range(num_experts):
            chosen = (ids == expert).nonzero().tolist()
            assert sorted(pairs_of.get(expert, [])) == [
                token * slots + slot for token, slot in chosen
            ]
        shared = range(k, num_tokens * slots, slots) if has_shared else []
        assert sorted(pairs_of.get(num_experts, [])) == list(shared)


def route_inputs(
    num_tokens: int, num_experts: int, device: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, float, Weight]:
    hidden = random(num_tokens, H, dtype=dtype, device=device, seed=num_tokens)
    norm_weight = random(H, dtype=torch.float32, device=device, seed=1, scale=0.2) + 1.0
    router = Weight(random(num_experts, H, dtype=dtype, device=device, seed=2, scale=H**-0.5))
    return hidden, norm_weight, EPS, router


@pytest.fixture(params=["library", pytest.param("split", marks=pytest.mark.slow)])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both forms in which the router takes hundreds of tokens. Everyday tests of the second have
    fewer tokens (`test_kernel_moe.py`).
    """
    monkeypatch.setattr(moe_route, "SPLIT_TOKENS", 10**6 if request.param == "split" else 16)
    return str(request.param)


@pytest.mark.thinned
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("num_tokens", "num_experts", "k"), [(257, 9, 3), (300, 5, 1)])
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.usefixtures("form")
def test_many_tokens_get_their_most_likely_experts(
    device: str, dtype: torch.dtype, num_tokens: int, num_experts: int, k: int, normalize: bool
) -> None:
    inputs = route_inputs(num_tokens, num_experts, device, dtype)
    gate = Weight(random(1, H, dtype=dtype, device=device, seed=3, scale=H**-0.5))
    x, weights, ids, shared_weight = moe.norm_route(*inputs, k, normalize, gate)
    expected = reference.norm_route(*inputs, k, normalize, gate)
    assert shared_weight is not None
    assert expected[3] is not None
    assert_near(x, expected[0], dtype)
    assert_near(weights, expected[1], dtype)
    assert_near(shared_weight, expected[3], dtype)
    _, probabilities, by_rank, _ = reference.norm_route(*inputs, num_experts, False)
    by_expert = torch.zeros_like(probabilities).scatter_(1, by_rank, probabilities)
    assert_near(by_expert.gather(1, ids.long()), probabilities[:, :k], dtype)
    assert all(len(set(row)) == k for row in ids.tolist()), "an expert was chosen twice"


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.usefixtures("form")
def test_among_many_tokens_equal_experts_go_by_id_and_nan_spoils_no_other(
    device: str, dtype: torch.dtype
) -> None:
    hidden, norm_weight, eps, router = route_inputs(260, 6, device, dtype)
    hidden[7] = float("nan")
    equal = Weight(torch.zeros_like(router.values))  # a library may sum equal rows in two orders
    _, weights, ids, shared_weight = moe.norm_route(hidden, norm_weight, eps, equal, 2)
    assert shared_weight is None
    assert ids.tolist() == [[0, 1]] * 260
    assert_near(weights, torch.full_like(weights, 0.5), dtype)


@pytest.mark.parametrize("num_tokens", [300, 1024, 8192])
@pytest.mark.parametrize(("device", "dtype"), FULL_SIZE)
def test_a_layer_of_a_real_model_is_that_of_the_reference(
    device: str, dtype: torch.dtype, num_tokens: int
) -> None:
    generator = torch.Generator(device).manual_seed(0)

    def some(*shape: int) -> Tensor:
        made = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        return made.mul_(shape[-1] ** -0.5)

    hidden, ones = some(num_tokens, 2048).mul_(45), torch.ones(2048, device=device)
    route = (hidden, ones, EPS, Weight(some(256, 2048)), 8, True)
    experts = (Weight(some(256, 1024, 2048)), Weight(some(256, 2048, 512)))
    shared = (Weight(some(1024, 2048)), Weight(some(2048, 512)))
    x, weights, ids, shared_weight = moe.norm_route(*route, Weight(some(1, 2048)))
    expected_x, expected_weights, _, _ = reference.norm_route(*route)
    assert_near(x, expected_x, dtype)
    assert_near(weights, expected_weights, dtype)
    rest = (*experts, hidden, shared_weight, *shared)
    expected = reference.sparse_mlp(x, weights, ids.long(), *rest)
    for height in (64, 128):
        with trials() as trial:
            shape = (256, 8, 512, 2048)
            trial.answers[Question("sparse_mlp", shape, num_tokens, {}).key] = {
                "form": moe.GROUPED_GEMM
            }
            trial.answers[Question("moe_permute", shape, num_tokens, {}).key] = {"BLOCK_M": height}
            seen, again = (moe.sparse_mlp(x, weights, ids, *rest) for _ in range(2))
        assert_near(seen, expected, dtype)
        assert torch.equal(seen, again), "the order in which pairs were listed shows"
