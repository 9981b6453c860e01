"""Tiles are lossless for every format: only the order of codes changes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from penstock.ops import Weight
from penstock.ops.cuda import quantized
from penstock.ops.product import Product
from penstock.ops.quantized import QuantizedRows
from penstock.ops.tiles import TILE_ROWS, can_tile, tile
from penstock.ops.triton import matmul
from penstock.weights import on_the_fly
from penstock.weights.codes import Codes, Scales
from penstock.weights.on_the_fly import SCHEMES, round_to
from penstock.weights.packing import LAUNCH_BYTES, join_widened, pack
from quantized_codes import BYTE, KINDS, SIGNED, make_codes, numbers, reals

MXFP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "levels"])
@pytest.mark.parametrize(("N", "K"), [(130, 768), (16, 256)])
def test_tiles_are_lossless(kind: str, N: int, K: int) -> None:
    codes = make_codes(kind, N, K)
    rows = pack(codes)
    assert can_tile(rows)
    ids = torch.tensor([[N - 1, 0, 3], [3, 15, N // 2]])
    for keeps_rows in (False, True):
        tiled = tile(rows, keeps_rows=keeps_rows)
        assert tiled.is_row_major == (keeps_rows and kind == "fp8")
        assert tiled.shape == (N, K)
        assert torch.equal(tiled.dequantize(), codes.dequantize())
        assert torch.equal(tiled.rows(ids), codes.dequantize()[ids])


@pytest.mark.parametrize("keeps_rows", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "levels"])
def test_a_slice_of_rows_has_their_numbers(kind: str, keeps_rows: bool) -> None:
    whole = tile(pack(make_codes(kind, 300, 256)), keeps_rows=keeps_rows)
    for first, last in ((0, 128), (128, 300), (256, 300), (0, 300)):
        some = whole.row_slice(first, last)
        assert some.shape == (last - first, 256)
        assert some.codes.data_ptr() - whole.codes.data_ptr() == first * whole.codes[0].nbytes // 16
        assert torch.equal(some.dequantize(), whole.dequantize()[first:last])


@pytest.mark.parametrize("most", [128, 256, 1024])
def test_logits_of_many_tokens_are_multiplied_in_pieces(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head of three formats, the first of which is not quantized."""
    parts = [
        tile(pack(make_codes(kind, rows, 256))) for kind, rows in (("Q6_K", 520), ("int8", 300))
    ]
    generator = torch.Generator().manual_seed(0)
    sizes = ((200, 256), (5, 256), (1020,))
    plain, x, bias = (torch.randn(size, generator=generator) for size in sizes)
    plain, x = (plain / 20).half(), x.half()
    head = Weight(torch.empty(1020, 256, dtype=torch.float16))
    head.quantize((plain, *parts))
    monkeypatch.setattr(matmul, "PIECE_BYTES", most * 512)
    pieces = list(quantized.expand_in_pieces(head.parts, torch.float16, most))
    assert [own.start for own, _ in pieces[1:]] == [own.stop for own, _ in pieces[:-1]]
    assert max(len(values) for _, values in pieces) <= most
    product = Product(x, head.values, torch.float32, bias=bias)
    seen = matmul._multiply_in_pieces(product, head)
    exact = x.double() @ head.dequantize().half().double().T + bias
    assert seen.dtype == torch.float32
    assert (seen - exact).abs().max() < 1e-3


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [16, 32, 64, 128, 576])
def test_groups_and_widths_that_fill_no_step_are_lossless_too(bits: int, group: int) -> None:
    N, K = 40, 576
    for dtype in (BYTE, SIGNED):
        low = 0 if dtype == BYTE else -(1 << (bits - 1))
        values = numbers(low, low + (1 << bits), N, K, dtype=dtype)
        scales = Scales(reals(N, -(-K // group), seed=1))
        codes = Codes(values, bits, (1, group), scales)
        assert torch.equal(tile(pack(codes)).dequantize(), codes.dequantize())


def test_levels_of_half_integers_become_codes_of_eight_bits() -> None:
    codes = Codes(
        numbers(0, 16, 32, 256, dtype=BYTE), 4, (1, 32), Scales(reals(32, 8)), levels=MXFP4
    )
    tiled = tile(pack(codes))
    assert (tiled.bits, tiled.zero) == (8, 128)
    assert torch.equal(tiled.dequantize(), codes.dequantize())
    assert not can_tile(pack(make_codes("levels", 32, 256))), "no 8 bits hold these levels"


def test_a_q4_k_weight_takes_less_than_five_bits() -> None:
    tiled = tile(pack(make_codes("Q4_K", 160, 1024)))
    assert tiled.num_bytes * 8 / (160 * 1024) <= 4.75


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "levels"])
def test_columns_that_are_permuted_by_heads_are_put_in_order(kind: str) -> None:
    """A GGUF file tiles the value heads of DeltaNet: with reordered steps, none is gathered."""
    K = 768
    heads = torch.tensor([3, 0, 5, 1, 4, 2])
    columns = (128 * heads[:, None] + torch.arange(128)).flatten()
    codes = dataclasses.replace(make_codes(kind, 48, K), columns=columns)
    tiled = tile(pack(codes))
    assert tiled.columns is None
    assert torch.equal(tiled.dequantize(), codes.dequantize())
    half = (64 * torch.randperm(12)[:, None] + torch.arange(64)).flatten()
    codes = dataclasses.replace(codes, columns=half)
    assert torch.equal(tile(pack(codes)).dequantize(), codes.dequantize())


def test_a_stack_is_its_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    matrices = [pack(make_codes("zeros", 2 * TILE_ROWS, 256)) for _ in range(5)]
    stack = QuantizedRows.stack(matrices)
    whole = tile(stack)
    monkeypatch.setattr("penstock.ops.tiles.TILED_ELEMENTS", 2 * 32 * 256)
    in_parts = tile(stack)
    assert torch.equal(whole.codes, in_parts.codes)
    assert torch.equal(whole.records, in_parts.records)
    assert torch.equal(whole.dequantize(), stack.dequantize())


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(48, 320), (3, 32, 256)])
def test_rounding_moves_a_weight_by_half_a_step_at_most(
    scheme: str, shape: tuple[int, ...]
) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    codes = round_to(values, scheme)
    error = (codes.dequantize() - values).abs()
    if scheme == "fp8":  # three bits of mantissa, or one step for the smallest numbers
        blocks = codes.scales.expand().repeat_interleave(128, -1).repeat_interleave(128, -2)
        least = blocks[..., : shape[-2], : shape[-1]] * 2**-9
        assert (error <= torch.maximum(values.abs() / 16, least)).all()
    else:
        scales = codes.scales.expand().repeat_interleave(codes.block[1], -1)[..., : shape[-1]]
        # Scales are rounded, so the largest weight may be clipped by a 256th.
        assert (error <= scales * (0.5 + (1 << codes.bits - 1) / 256)).all()


def test_rows_that_differ_in_bits_only_become_one_part_with_the_same_numbers() -> None:
    """In a GPU's layer, if reading the added bits takes less time than one more launch."""
    rows = [pack(make_codes(kind, 32, 512)) for kind in ("Q5_K", "Q4_K", "Q6_K", "Q4_K")]
    expected = torch.cat([part.dequantize() for part in rows])
    parts = join_widened([*rows])
    assert [part.shape[0] for part in parts] == [64, 32, 32]  # Q6_K has another kind of scales
    tiled = [tile(part) for part in parts if isinstance(part, QuantizedRows)]
    assert [part.bits for part in tiled] == [8, 8, 4]
    assert torch.equal(torch.cat([part.dequantize() for part in tiled]), expected)


def test_rows_that_are_many_stay_as_they_are() -> None:
    wide, narrow = (pack(make_codes(kind, 32, 512)) for kind in ("Q5_K", "Q4_K"))
    many = QuantizedRows.join([narrow] * 2048, 2048 * 32)
    assert many.num_rows * many.num_columns // 2 > LAUNCH_BYTES
    assert join_widened([wide, many]) == [wide, many]


@pytest.mark.parametrize("stored", ["plain", *SCHEMES])
def test_a_copy_in_other_codes_is_made_some_rows_at_a_time(
    stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_the_fly, "ROUNDED_ELEMENTS", 8 * 300 * 256)  # 256 rows
    values = torch.randn(900, 256).bfloat16()
    weight = Weight(values)
    if stored != "plain":
        weight.quantize((tile(pack(round_to(values, stored))),))
    copy = on_the_fly.rounded_copy(weight, "int4")
    assert copy.shape == weight.shape
    assert torch.equal(copy.dequantize(), pack(round_to(weight.dequantize(), "int4")).dequantize())
