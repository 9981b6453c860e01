"""The CUDA C++ kernels on a CPU, thread by thread (`cuda_emulator.py`). Their tests on a GPU have
more shapes; these find wrong indices without one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from cuda_emulator import COMPILER, emulated
from kernel_checks import HAS_GPU, random
from penstock.layers import linear, mlp
from penstock.ops.cuda import quantized, quantized_gemm, quantized_rules, skinny_gemm
from penstock.ops.product import Product, Tile
from penstock.ops.tiles import TiledRows, tile
from penstock.ops.triton import matmul, moe
from penstock.weights.on_the_fly import round_to
from penstock.weights.packing import pack
from quantized_codes import (
    assert_near,
    check_experts,
    experts_of,
    first_matrix,
    make_codes,
    tiled,
)

pytestmark = pytest.mark.skipif(
    HAS_GPU or COMPILER is None, reason="kernels run compiled here, or there is no C++ compiler"
)
DTYPES = [torch.bfloat16, torch.float16]
KINDS = ["zeros", "Q4_K", "Q6_K", "int8", "fp8"]  # one of every layout
numbers = partial(random, device="cpu")


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    with emulated():
        yield


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_dequantized(kind: str, dtype: torch.dtype) -> None:
    rows = tiled(pack(make_codes(kind, 40, 768)), "cpu")
    assert isinstance(rows, TiledRows)
    seen, exact = quantized.expand(rows, dtype), rows.dequantize()
    assert (seen.float() - exact).abs().max() <= exact.abs().max() * 2**-8
    ids = torch.tensor([39, 3, 3, 0])
    assert torch.equal(quantized.expand(rows, dtype, ids), seen[ids])


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_dequantized_into_one_matrix(kind: str) -> None:
    rows, plain = tiled(pack(make_codes(kind, 40, 768)), "cpu"), numbers(9, 768, dtype=DTYPES[0])
    assert isinstance(rows, TiledRows)
    columns = torch.randperm(768, generator=torch.Generator().manual_seed(0))
    permuted = replace(rows, columns=columns.int())
    parts = (plain, rows, permuted)
    seen = quantized.expand_parts(parts, DTYPES[0])
    own = quantized.expand(rows, DTYPES[0])
    expected = torch.cat([plain, own, torch.empty_like(own).index_copy_(1, columns, own)])
    assert torch.equal(seen, expected)


def guarded(num_tokens: int, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """An output followed by memory that no kernel may write."""
    whole = torch.full((num_tokens + 1, num_rows), 7.0, dtype=dtype)
    return whole[:-1], whole[-1]


def use_tiles(monkeypatch: pytest.MonkeyPatch, **tiles: tuple[int, ...]) -> None:
    """Row tiles, warps, warps with other rows, steps held and blocks, by the name of a kernel."""
    own = {name: quantized_rules.new_tile(*sizes) for name, sizes in tiles.items()}
    monkeypatch.setattr(quantized, "choose", lambda name, _, __, rule, ___: own.get(name, rule))


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 20])
@pytest.mark.parametrize("sizes", [(1, 4, 1, 1, 1), (2, 4, 1, 2, 1), (1, 4, 2, 4, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_expanded_rows(
    kind: str,
    sizes: tuple[int, ...],
    num_tokens: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a fused norm for one or two tokens and a residual for more; unquantized rows follow."""
    N, K = 72, 768
    use_tiles(monkeypatch, quantized_linear=sizes)
    rows, plain = tiled(pack(make_codes(kind, N, K)), "cpu"), numbers(24, K, dtype=dtype) / 20
    assert isinstance(rows, TiledRows)
    x, norm = numbers(num_tokens, K, dtype=dtype, seed=1), numbers(K, dtype=torch.float32, seed=2)
    bias, residual = numbers(N + 24, dtype=dtype), numbers(num_tokens, N + 24, dtype=dtype)
    has_norm = num_tokens <= quantized_rules.MAX_STAGED
    out, after = guarded(num_tokens, N + 24, torch.float32 if has_norm else dtype)
    quantized.multiply(
        x,
        rows,
        out,
        plain=plain,
        bias=bias,
        residual=None if has_norm else residual,
        norm_weight=norm if has_norm else None,
        eps=1e-6,
    )
    wide = x.double()
    if has_norm:
        wide = torch.nn.functional.rms_norm(wide, (K,), norm.double(), eps=1e-6)
    exact = torch.cat([rows.dequantize(), plain.float()]).double()
    expected = wide @ exact.T + bias.double()
    assert_near(out, expected if has_norm else expected + residual.double(), dtype)
    assert (after == 7.0).all()


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 7])
@pytest.mark.parametrize("sizes", [(1, 4, 1, 1, 1), (2, 4, 1, 2, 1), (1, 6, 3, 2, 1)])
@pytest.mark.parametrize("kind", [*KINDS, "fp8 in tiles"])
def test_gate_and_up_may_end_in_swiglu(
    kind: str,
    sizes: tuple[int, ...],
    num_tokens: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The number of row tiles is not a multiple of a block's, and odd for the gate alone."""
    N, K = 160, 768
    use_tiles(monkeypatch, quantized_linear=sizes)
    rows = tile(pack(make_codes(kind.split()[0], N, K)), keeps_rows=kind == "fp8")
    assert isinstance(rows, TiledRows)
    assert rows.is_row_major == (kind == "fp8")
    x, norm = numbers(num_tokens, K, dtype=dtype, seed=1), numbers(K, dtype=torch.float32, seed=2)
    has_norm = num_tokens <= quantized_rules.MAX_STAGED
    out, after = guarded(num_tokens, N // 2, dtype)
    weight, eps = (norm, 1e-6) if has_norm else (None, 0.0)
    quantized.multiply(x, rows, out, norm_weight=weight, eps=eps, ends_in_swiglu=True)
    wide = x.double()
    if has_norm:
        wide = torch.nn.functional.rms_norm(wide, (K,), norm.double(), eps=1e-6)
    gate, up = (wide @ rows.dequantize().double().T).chunk(2, dim=1)
    assert_near(out, torch.nn.functional.silu(gate) * up, dtype)
    assert (after == 7.0).all()


@pytest.mark.parametrize(
    ("num_rows", "num_tokens", "can"),
    [(160, 8, True), (160, 9, False), (144, 8, False), (72, 8, False)],
)
def test_swiglu_is_fused_for_a_few_tokens_and_whole_tiles(
    num_rows: int, num_tokens: int, can: bool
) -> None:
    rows = tiled(pack(make_codes("Q4_K", num_rows, 768)), "cpu")
    x = numbers(num_tokens, 768, dtype=torch.bfloat16)
    assert isinstance(rows, TiledRows)
    assert quantized.can_end_in_swiglu((rows,), x) == can
    others = (replace(rows, columns=torch.arange(768)), replace(rows, num_columns=764))
    for parts in ((rows, rows), (), (others[0],), (others[1],)):
        assert not quantized.can_end_in_swiglu(parts, x)


@pytest.mark.parametrize(
    ("num_tokens", "deterministic", "is_fused"),
    [(1, False, True), (8, False, True), (9, False, False), (1, True, False)],
)
def test_a_dense_mlp_applies_swiglu_once(
    num_tokens: int, deterministic: bool, is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its first GEMM, or before its second one; with the norm inside, and with eight tokens
    before it.
    """
    monkeypatch.setattr(mlp, "fuses_swiglu", matmul.fuses_swiglu)
    for name in ("norm_linear", "swiglu_linear"):
        monkeypatch.setattr(linear, name, getattr(matmul, name))
    layer = mlp.DenseMLP(
        hidden_size=256, intermediate_size=80, eps=1e-6, dtype=torch.float16, device="cpu"
    )
    values = [numbers(*shape, dtype=torch.float32) / 8 for shape in ((160, 256), (256, 80))]
    for weight, own in zip((layer.gate_up.weight, layer.down.weight), values, strict=True):
        weight.quantize((tile(pack(round_to(own, "int8"))),))
    norm, widths = numbers(256, dtype=torch.float32, seed=1), []
    assert layer.gate_up.norm is not None
    layer.gate_up.norm.data.copy_(norm)
    layer.down.register_forward_pre_hook(lambda _, given: widths.append(given[0].shape[1]))
    hidden = numbers(num_tokens, 256, dtype=torch.float16, seed=2)
    wide = hidden.double()  # the layer may write to `hidden`
    seen = layer(hidden, SimpleNamespace(deterministic=deterministic))
    assert widths == [80 if is_fused else 160]
    normed = torch.nn.functional.rms_norm(wide, (256,), norm.double(), eps=1e-6)
    gate_up, down = (w.dequantize().double() for w in (layer.gate_up.weight, layer.down.weight))
    gate, up = (normed @ gate_up.T).chunk(2, dim=1)
    expected = wide + (torch.nn.functional.silu(gate) * up) @ down.T
    assert_near(seen, expected, torch.float16)


def test_a_launch_that_ends_in_swiglu_adds_nothing() -> None:
    rows = tiled(pack(make_codes("int8", 160, 768)), "cpu")
    assert isinstance(rows, TiledRows)
    x, out = (numbers(1, width, dtype=torch.bfloat16) for width in (768, 80))
    with pytest.raises(AssertionError):
        quantized.multiply(x, rows, out, bias=out[0], ends_in_swiglu=True)


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_products_that_stage_tokens_are_those_of_the_expanded_rows(
    kind: str, dtype: torch.dtype
) -> None:
    N, K, T = 160, 768, 40
    rows, plain = tiled(pack(make_codes(kind, N, K)), "cpu"), numbers(16, K, dtype=dtype) / 20
    assert isinstance(rows, TiledRows)
    x, residual = numbers(T, K, dtype=dtype), numbers(T, N + 16, dtype=dtype, seed=1)
    out, after = guarded(T, N + 16, dtype)
    quantized.multiply_gemm(x, rows, out, plain=plain, residual=residual)
    exact = torch.cat([rows.dequantize(), plain.float()]).double()
    assert_near(out, x.double() @ exact.T + residual.double(), dtype)
    assert (after == 7.0).all()


# Each expert on its own, with few tokens by scanning, and listed: 8, 16 and 32 pairs per block.
TOKENS = [1, 3, 7, 9, 22, 60]


def test_every_height_of_a_block_of_pairs_is_met() -> None:
    heights = [quantized_gemm.pair_tiles(2 * num_tokens / 6) for num_tokens in TOKENS]
    assert heights == [1, 1, 1, 1, 2, 4]


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row_tiles", [1, 3])
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_those_of_the_expanded_rows(
    kind: str,
    num_tokens: int,
    row_tiles: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    E, k, I, H = 6, 2, 128, 256
    slots = k + 1
    use_tiles(monkeypatch, quantized_down_token=(row_tiles, slots, 1, 2, 1))
    down_kind = "zeros" if kind[0] == "Q" else kind
    gate_up = experts_of(kind, E, 2 * I, H, dtype, "cpu")
    down = experts_of(down_kind, E, H, I, dtype, "cpu")
    shared = (
        first_matrix(experts_of(kind, 1, 2 * I, H, dtype, "cpu", first=E), dtype),
        first_matrix(experts_of(down_kind, 1, H, I, dtype, "cpu", first=E), dtype),
    )
    check_experts(moe.sparse_mlp, num_tokens, k, gate_up, down, shared, dtype, "cpu")


# Row tiles, warps with other rows, warps that split K; stages; steps per warp and round.
@pytest.mark.thinned
@pytest.mark.parametrize("sizes", [(4, 1, 1, 2, 2), (2, 2, 2, 3, 1), (1, 8, 1, 4, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_arrangement_of_warps_gives_the_same_experts(
    kind: str, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts that do not fill a block of rows, columns that do not fill a step, and no shared
    expert.
    """
    row_tiles, row_warps, column_warps, stages, warp_steps = sizes
    E, k, I, H = 5, 2, 144, 256
    dtype, token_tiles = torch.bfloat16, 4
    own = quantized_gemm.gemm_tile(
        *(row_tiles, row_warps, 1, column_warps),
        token_tiles=token_tiles,
        stages=stages,
        warp_steps=warp_steps,
    )
    used = []

    def chosen(name: str, _: object, __: object, rule: Tile, ___: object) -> Tile:
        used.append(name)
        return own if name == quantized_gemm.EXPERTS else rule

    monkeypatch.setattr(quantized, "choose", chosen)
    gate_up = experts_of(kind, E, 2 * I, H, dtype, "cpu")
    down = experts_of("int8", E, H, I, dtype, "cpu")
    check_experts(moe.sparse_mlp, 50, k, gate_up, down, None, dtype, "cpu")
    assert used == [quantized_gemm.EXPERTS] * 2


def test_few_of_many_experts_are_found_by_scanning() -> None:
    """Seven choices among forty: a warp looks for them in two words of 32."""
    kind, dtype = "int8", torch.bfloat16
    gate_up, down = (experts_of(kind, 40, *sizes, dtype, "cpu") for sizes in ((64, 128), (128, 32)))
    check_experts(moe.sparse_mlp, 7, 1, gate_up, down, None, dtype, "cpu")


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
def test_skinny_products_are_those_of_float64(has_norm: bool, dtype: torch.dtype) -> None:
    N, K = 40, 1024
    x, weight = numbers(3, K, dtype=dtype), numbers(N, K, dtype=dtype, seed=1)
    norm, residual = numbers(K, dtype=torch.float32, seed=2), numbers(3, N, dtype=dtype, seed=3)
    product = Product(x, weight, dtype, residual=residual, norm_weight=norm if has_norm else None)
    tile = {"row_tiles": 2, "num_warps": 4, "held": 4, "blocks": 1}
    assert skinny_gemm.can_multiply(product)
    seen = skinny_gemm.multiply_skinny(product, tile)
    wide = x.double()
    if has_norm:
        wide = torch.nn.functional.rms_norm(wide, (K,), norm.double(), eps=0.0)
    assert_near(seen, wide @ weight.double().T + residual.double(), dtype)
