"""The MoE kernels against their reference: routing and experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_checks import FULL_SIZE, PLACES, assert_near, random
from penstock.layers.mlp import SparseMLP
from penstock.ops.reference import moe as reference
from penstock.ops.reference.moe import new_counters
from penstock.ops.triton import moe, moe_grouped_gemm, moe_route, moe_small_gemm
from penstock.ops.tuning import Question, Tile, trials
from penstock.ops.weight import Weight

E, K, H, I, SHARED_I = 16, 4, 96, 40, 56
EPS = 1e-6
SLOW = pytest.mark.slow


def router_inputs(
    num_tokens: int, device: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, float, Weight]:
    hidden = random(num_tokens, H, dtype=dtype, device=device, seed=num_tokens)
    norm_weight = random(H, dtype=torch.float32, device=device, seed=1, scale=0.2) + 1.0
    router = Weight(random(E, H, dtype=dtype, device=device, seed=2, scale=H**-0.5))
    return hidden, norm_weight, EPS, router


def gate(device: str, dtype: torch.dtype) -> Weight:
    return Weight(random(1, H, dtype=dtype, device=device, seed=3, scale=H**-0.5))


def assert_chosen(
    weights: Tensor, ids: Tensor, inputs: tuple[Tensor, Tensor, float, Weight], normalize: bool
) -> None:
    """The k most likely experts with their probabilities, in descending order."""
    _, probabilities, order, _ = reference.norm_route(*inputs, E, False)
    by_expert = torch.zeros_like(probabilities).scatter_(1, order, probabilities)
    expected = probabilities[:, :K]
    of_chosen = by_expert.gather(1, ids.long())
    if normalize:
        expected = expected / expected.sum(-1, keepdim=True)
        of_chosen = of_chosen / of_chosen.sum(-1, keepdim=True)
    dtype = inputs[0].dtype
    assert_near(weights, expected, dtype)
    assert_near(weights, of_chosen, dtype)
    assert all(len(set(row)) == K for row in ids.tolist()), "an expert was chosen twice"


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "num_tokens", [1, 16, 17, pytest.param(3, marks=SLOW), pytest.param(33, marks=SLOW)]
)
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_the_most_likely_experts_are_chosen_with_their_weights(
    device: str, dtype: torch.dtype, num_tokens: int, deterministic: bool
) -> None:
    inputs = router_inputs(num_tokens, device, dtype)
    x, weights, ids, shared_weight = moe.norm_route(
        *inputs, K, True, gate(device, dtype), deterministic=deterministic
    )
    expected_x, _, _, expected_shared = reference.norm_route(*inputs, K, True, gate(device, dtype))
    assert shared_weight is not None
    assert expected_shared is not None
    assert_near(x, expected_x, dtype)
    assert_near(shared_weight, expected_shared, dtype)
    assert_chosen(weights, ids, inputs, normalize=True)


@pytest.mark.parametrize("num_tokens", [2, 18])
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_a_router_may_have_no_shared_expert_and_weights_that_do_not_sum_to_one(
    device: str, dtype: torch.dtype, num_tokens: int
) -> None:
    inputs = router_inputs(num_tokens, device, dtype)
    _, weights, ids, shared_weight = moe.norm_route(*inputs, K, False)
    assert shared_weight is None
    assert_chosen(weights, ids, inputs, normalize=False)
    assert (weights.sum(-1) < 0.999).all()


@pytest.mark.parametrize("num_tokens", [2, 18])
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_of_equal_experts_the_lowest_are_chosen(
    device: str, dtype: torch.dtype, num_tokens: int
) -> None:
    hidden, norm_weight, eps, router = router_inputs(num_tokens, device, dtype)
    equal = Weight(router.values[:1].expand(E, H).contiguous())
    _, weights, ids, _ = moe.norm_route(hidden, norm_weight, eps, equal, K)
    assert ids.tolist() == [list(range(K))] * num_tokens
    assert_near(weights, torch.full_like(weights, 1 / K), dtype)


@pytest.mark.parametrize("num_tokens", [1, 16])
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_logits_of_zero_are_logits(device: str, dtype: torch.dtype, num_tokens: int) -> None:
    """A program waits until the logits of its token are not zero bits."""
    hidden, *given = router_inputs(num_tokens, device, dtype)
    counters = new_counters(E, device)
    shared_gate = Weight(torch.ones(1, H, dtype=dtype, device=device))
    route = (hidden.zero_(), *given, K, True, shared_gate, counters)
    _, weights, ids, shared_weight = moe.norm_route(*route)
    assert ids.tolist() == [list(range(K))] * num_tokens
    assert_near(weights, torch.full_like(weights, 1 / K), dtype)
    assert shared_weight is not None
    assert (shared_weight == 0.5).all()
    assert not counters.any()


@pytest.mark.bitwise
@pytest.mark.parametrize("num_tokens", [3, 18])
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_a_token_of_nan_gets_experts_that_exist_and_spoils_no_other(
    device: str, dtype: torch.dtype, num_tokens: int
) -> None:
    hidden, *rest = router_inputs(num_tokens, device, dtype)
    _, clean_weights, clean_ids, _ = moe.norm_route(hidden, *rest, K)
    hidden[1] = float("nan")
    _, weights, ids, _ = moe.norm_route(hidden, *rest, K)
    assert ((ids >= 0) & (ids < E)).all()
    others = [row for row in range(num_tokens) if row != 1]
    assert torch.equal(ids[others], clean_ids[others])
    assert torch.equal(weights[others], clean_weights[others])


@pytest.mark.bitwise
@pytest.mark.parametrize("num_tokens", [3, 18])
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_counters_are_zero_again_after_every_launch(
    device: str, dtype: torch.dtype, num_tokens: int
) -> None:
    inputs, counters = router_inputs(num_tokens, device, dtype), new_counters(E, device)
    given = (*inputs, K, True, gate(device, dtype))
    first, second = (moe.norm_route(*given, counters) for _ in range(2))
    assert not counters.any()
    without = moe.norm_route(*given)
    for one, other, third in zip(first, second, without):
        assert one is not None
        assert torch.equal(one, other)
        assert torch.equal(one, third)


@pytest.mark.parametrize("num_tokens", [3, 18])
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_a_launch_counts_in_its_own_counters_alone(
    device: str, dtype: torch.dtype, num_tokens: int
) -> None:
    """Counters of another engine may be in use by a launch; too small ones are left alone."""
    given = (*router_inputs(num_tokens, device, dtype), K, True, gate(device, dtype))
    _, weights, ids, _ = moe.norm_route(*given)
    too_few = torch.full((1,), 7, dtype=torch.int32, device=device)
    _, seen_weights, seen_ids, _ = moe.norm_route(*given, too_few)
    assert torch.equal(seen_ids, ids)
    assert torch.equal(seen_weights, weights)
    assert too_few.tolist() == [7]
    one, two = (sparse_layer(device, dtype) for _ in range(2))
    assert one.counters.data_ptr() != two.counters.data_ptr()
    assert "counters" not in one.state_dict(), "no checkpoint has them"


@pytest.mark.bitwise
@pytest.mark.parametrize(("num_tokens", "split_tokens"), [(3, 64), (18, 64), (40, 32)])
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_experts_may_lie_in_any_slots(
    device: str,
    dtype: torch.dtype,
    num_tokens: int,
    split_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stack with more matrices than experts, in another order: each form of the router writes the
    slot of every expert.
    """
    monkeypatch.setattr(moe_route, "SPLIT_TOKENS", split_tokens)
    inputs = router_inputs(num_tokens, device, dtype)
    slots = torch.randperm(E + 3, generator=torch.Generator().manual_seed(0))[:E].to(
        device, torch.int32
    )
    x, weights, ids, _ = moe.norm_route(*inputs, K)
    again, same_weights, places, _ = moe.norm_route(*inputs, K, slots=slots)
    assert torch.equal(again, x)
    assert torch.equal(same_weights, weights)
    assert torch.equal(places, slots[ids.long()])
    expected = reference.norm_route(*inputs, K, slots=slots)[2]
    assert torch.equal(expected, slots[reference.norm_route(*inputs, K)[2]])


def sparse_layer(device: str, dtype: torch.dtype) -> SparseMLP:
    return SparseMLP(
        hidden_size=H,
        num_experts=E,
        experts_per_token=K,
        expert_size=I,
        shared_expert_size=SHARED_I,
        normalize=True,
        eps=EPS,
        dtype=dtype,
        device=device,
    )


@pytest.mark.parametrize("num_tokens", [8, 64, 2048])
@pytest.mark.parametrize(("device", "dtype"), FULL_SIZE)
def test_two_layers_may_run_at_once_on_two_streams(
    device: str, dtype: torch.dtype, num_tokens: int, full_size: tuple[Weight, ...]
) -> None:
    """Like two engines in one process: each has its own counters, and a thousand launches."""
    router, shared_gate, *experts, shared_gate_up, shared_down = full_size
    hidden = random(num_tokens, 2048, dtype=dtype, device=device)
    route = (hidden, torch.ones(2048, device=device), EPS, router, 8, True, shared_gate)

    def run(counters: Tensor) -> Tensor:
        x, weights, ids, shared_weight = moe.norm_route(*route, counters)
        rest = (*experts, hidden, shared_weight, shared_gate_up, shared_down, counters)
        return moe.sparse_mlp(x, weights, ids, *rest)

    expected = run(new_counters(256, device))
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    owned = [new_counters(256, device) for _ in streams]
    torch.cuda.synchronize()
    seen: list[Tensor] = []
    for _ in range(1000 if num_tokens < 100 else 50):
        for stream, counters in zip(streams, owned):
            with torch.cuda.stream(stream):
                seen.append(run(counters))
        seen = seen[-8:]
    torch.cuda.synchronize()
    for one in seen:
        assert_near(one, expected, dtype)
    assert not any(counters.any() for counters in owned)


class Experts:
    """Random experts, and tokens that chose some of them; `chosen` makes all tokens choose the
    same.
    """

    def __init__(
        self,
        num_tokens: int,
        device: str,
        dtype: torch.dtype,
        *,
        num_experts: int = E,
        has_shared: bool = True,
        chosen: list[int] | None = None,
    ) -> None:
        def some(*shape: int, seed: int) -> Weight:
            made = random(*shape, dtype=dtype, device=device, seed=seed, scale=shape[-1] ** -0.5)
            return Weight(made)

        generator = torch.Generator().manual_seed(num_tokens)
        order = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :K]
        ids = (
            order if chosen is None else torch.tensor([chosen]).expand(num_tokens, -1).contiguous()
        )
        weights = torch.rand(num_tokens, K, generator=generator)
        self.tokens = (
            random(num_tokens, H, dtype=dtype, device=device, seed=10),
            weights.to(device),
            ids.to(device, torch.int32),
        )
        self.weights = (some(num_experts, 2 * I, H, seed=11), some(num_experts, H, I, seed=12))
        self.residual = random(num_tokens, H, dtype=dtype, device=device, seed=13)
        self.shared_weight: Tensor | None = None
        self.shared: tuple[Weight | None, ...] = (None, None)
        if has_shared:
            self.shared_weight = torch.rand(num_tokens, 1, generator=generator).to(device)
            self.shared = (some(2 * SHARED_I, H, seed=14), some(H, SHARED_I, seed=15))

    def arguments(self, rows: slice = slice(None)) -> tuple[Any, ...]:
        tokens = tuple(tensor[rows] for tensor in self.tokens)
        shared_weight = None if self.shared_weight is None else self.shared_weight[rows]
        return (*tokens, *self.weights, self.residual[rows], shared_weight, *self.shared)

    def expected(self) -> Tensor:
        x, weights, ids, *rest = self.arguments()
        assert ids is not None
        return reference.sparse_mlp(x, weights, ids.long(), *rest)

    @contextmanager
    def with_tiles(self, **tiles: Tile) -> Iterator[None]:
        shape = (self.weights[0].shape[0], K, I, H)
        with trials() as trial:
            for kernel, tile in tiles.items():
                trial.answers[Question(kernel, shape, len(self.residual), {}).key] = tile
            yield
            assert trial.answers.keys() <= trial.questions.keys(), "a tile was not used"


@pytest.mark.parametrize(
    "num_tokens", [1, 2, 8, 9, 33, pytest.param(7, marks=SLOW), pytest.param(17, marks=SLOW)]
)
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_experts_are_the_weighted_sum_of_the_reference(
    device: str, dtype: torch.dtype, num_tokens: int
) -> None:
    experts = Experts(num_tokens, device, dtype)
    assert_near(moe.sparse_mlp(*experts.arguments()), experts.expected(), dtype)


@pytest.mark.bitwise
@pytest.mark.parametrize(("device", "_"), PLACES[::2])
def test_pairs_of_more_than_a_block_are_listed_by_expert(device: str, _: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 5, (700, 2), generator=generator, dtype=torch.int32)
    order, starts = moe_small_gemm._list_pairs(ids.to(device), 5, ids.numel())
    assert order.tolist() == ids.flatten().argsort(stable=True).tolist()
    assert starts.diff().tolist() == ids.flatten().bincount(minlength=5).tolist()


@pytest.mark.parametrize("width", [520, 1100])  # what one program adds up is 512, or 1,024
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_tokens_wider_than_a_program_get_all_their_columns(
    device: str, dtype: torch.dtype, width: int
) -> None:
    num_tokens, k, inner = 6, 2, 16
    x, residual = (random(num_tokens, width, dtype=dtype, device=device, seed=i) for i in range(2))
    sizes = ((3, 2 * inner, width), (3, width, inner))
    stacks = [random(*size, dtype=dtype, device=device, scale=size[-1] ** -0.5) for size in sizes]
    weights = torch.rand(num_tokens, k, generator=torch.Generator().manual_seed(0)).to(device)
    ids = torch.tensor([[0, 2], [1, 0], [2, 1]] * 2, dtype=torch.int32, device=device)
    experts = [Weight(stack) for stack in stacks]
    expected = reference.sparse_mlp(x, weights, ids.long(), *experts, residual)
    assert_near(moe.sparse_mlp(x, weights, ids, *experts, residual), expected, dtype)
    outputs, out = random(num_tokens * k, width, dtype=dtype, device=device), x.clone()
    moe_grouped_gemm.add_pairs(out, outputs, weights, None, residual)
    pairs = outputs.view(num_tokens, k, width).double() * weights.double()[..., None]
    assert_near(out, (residual.double() + pairs.sum(1)).to(dtype), dtype)


@pytest.mark.thinned
@pytest.mark.parametrize("has_shared", [True, False])
@pytest.mark.parametrize("is_vector", [True, False])
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_every_form_gives_the_same_with_and_without_a_shared_expert(
    device: str, dtype: torch.dtype, is_vector: bool, has_shared: bool
) -> None:
    experts = Experts(3, device, dtype, has_shared=has_shared)
    with experts.with_tiles(sparse_mlp={"form": moe.GEMV if is_vector else moe.SMALL_GEMM}):
        seen = moe.sparse_mlp(*experts.arguments())
    assert_near(seen, experts.expected(), dtype)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts"), [(19, 128), (70, 16)], ids=["searched", "listed"]
)
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_all_tokens_may_choose_the_same_experts(
    device: str, dtype: torch.dtype, num_tokens: int, num_experts: int
) -> None:
    """With tiles so small that an expert has several, and with more pairs listed than programs."""
    experts = Experts(num_tokens, device, dtype, num_experts=num_experts, chosen=[7, 0, 5, 2])
    tile = {"BLOCK_M": 16, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 2}
    with experts.with_tiles(
        sparse_mlp={"form": moe.SMALL_GEMM}, moe_gate_up_small_gemm=tile, moe_down_small_gemm=tile
    ):
        seen = moe.sparse_mlp(*experts.arguments())
    assert_near(seen, experts.expected(), dtype)


@pytest.mark.bitwise
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_deterministic_routing_of_a_token_is_the_same_alone_and_among_others(
    device: str, dtype: torch.dtype
) -> None:
    hidden, *rest = router_inputs(18, device, dtype)
    together = moe.norm_route(hidden, *rest, K, True, gate(device, dtype), deterministic=True)
    for row in (0, 5, 17):
        rows = slice(row, row + 1)
        alone = moe.norm_route(
            hidden[rows], *rest, K, True, gate(device, dtype), deterministic=True
        )
        for one, all_rows in zip(alone, together):
            assert one is not None
            assert all_rows is not None
            assert torch.equal(one, all_rows[rows])


@pytest.mark.bitwise
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_deterministic_experts_of_a_token_give_the_same_alone_and_among_others(
    device: str, dtype: torch.dtype
) -> None:
    experts = Experts(9, device, dtype)
    together = moe.sparse_mlp(*experts.arguments(), deterministic=True)
    assert_near(together, experts.expected(), dtype)
    for row in (0, 8):
        rows = slice(row, row + 1)
        assert torch.equal(
            moe.sparse_mlp(*experts.arguments(rows), deterministic=True), together[rows]
        )


@pytest.fixture(scope="module")
def full_size() -> tuple[Weight, ...]:
    """Qwen3.5-35B-A3B: router, shared gate, gate_up, down, shared gate_up, shared down."""
    generator = torch.Generator("cuda").manual_seed(0)

    def some(*shape: int) -> Weight:
        made = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        return Weight(made.mul_(shape[-1] ** -0.5))

    return (
        some(256, 2048),
        some(1, 2048),
        some(256, 1024, 2048),
        some(256, 2048, 512),
        some(1024, 2048),
        some(2048, 512),
    )


@pytest.mark.parametrize("num_tokens", [1, 4, 8, 16, 64, 256, 1024])
@pytest.mark.parametrize(("device", "dtype"), FULL_SIZE)
def test_the_layer_of_a_real_model_is_that_of_the_reference(
    device: str, dtype: torch.dtype, num_tokens: int, full_size: tuple[Weight, ...]
) -> None:
    router, shared_gate, *experts, shared_gate_up, shared_down = full_size
    hidden = random(num_tokens, 2048, dtype=dtype, device=device)
    norm_weight = torch.ones(2048, device=device)
    route = (hidden, norm_weight, EPS, router, 8, True, shared_gate)
    x, weights, ids, shared_weight = moe.norm_route(*route)
    expected_x, expected_weights, _, expected_shared = reference.norm_route(*route)
    assert shared_weight is not None
    assert expected_shared is not None
    assert_near(x, expected_x, dtype)
    assert_near(weights, expected_weights, dtype)
    assert_near(shared_weight, expected_shared, dtype)
    rest = (*experts, hidden, shared_weight, shared_gate_up, shared_down)
    expected = reference.sparse_mlp(x, weights, ids.long(), *rest)
    assert_near(moe.sparse_mlp(x, weights, ids, *rest), expected, dtype)
    assert_near(moe.sparse_mlp(x, weights, ids, *rest, deterministic=True), expected, dtype)
