"""GEMMs of 17 to 64 tokens with quantized rows: every format, every arrangement of warps."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from kernel_checks import ON_GPU
from penstock.ops.cuda import quantized
from penstock.ops.cuda.quantized_gemm import Tile, gemm_tile
from penstock.ops.tiles import TiledRows, tile
from penstock.weights.codes import Codes, Scales
from penstock.weights.packing import pack
from quantized_codes import make_codes, reals
from quantized_codes import numbers as integers

pytestmark = ON_GPU
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-3}
KINDS = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "zeros", "int8", "fp8", "fp8 by rows"]
GROUPS = ["4 bits 16", "4 bits 32", "4 bits 64", "4 bits 256", "4 bits a row", "8 bits 64"]
# ROW_TILES, ROW_WARPS, TOKEN_WARPS, COLUMN_WARPS; stages, cluster, steps per warp and round
ARRANGEMENTS = [
    ((3, 4, 2, 1), 4, 1, 1),
    ((3, 4, 2, 1), 3, 2, 1),
    ((2, 2, 2, 2), 2, 1, 1),
    ((2, 2, 2, 2), 3, 2, 1),
    ((1, 1, 2, 4), 2, 2, 1),
    ((1, 8, 1, 1), 3, 1, 2),
    ((2, 4, 1, 2), 2, 2, 1),
]


def codes_of(kind: str, N: int, K: int) -> Codes:
    if " bits " not in kind:
        return make_codes(kind.removesuffix(" by rows"), N, K)
    bits, group = int(kind[0]), kind.split(" bits ")[1]
    columns = K if group == "a row" else int(group)
    half = 1 << (bits - 1)
    values = integers(-half, half, N, K, dtype=torch.int8)
    return Codes(values, bits, (1, columns), Scales(reals(N, -(-K // columns)).half()))


def rows_of(kind: str, N: int, K: int) -> TiledRows:
    rows = pack(codes_of(kind, N, K)).mapped(lambda tensor: tensor.cuda())
    return tile(rows, keeps_rows=kind.endswith("by rows"))


def reals_of(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def check(
    rows: TiledRows, num_tokens: int, dtype: torch.dtype, *, own: Tile | None = None,
    out_dtype: torch.dtype | None = None, num_plain: int = 0, is_padded: bool = False,
    adds: bool = False,
) -> None:  # fmt: skip
    """`is_padded` means that x and out are views of wider tensors, and out is unaligned."""
    out_dtype = out_dtype or dtype
    K, N = rows.num_columns, rows.num_rows + num_plain
    x = reals_of(num_tokens, K + 24, dtype=dtype, seed=1)[:, 8 : 8 + K]
    x = x if is_padded else x.contiguous()
    first = 3 if is_padded else 0
    wide = torch.full((num_tokens, N + 2 * first), torch.nan, dtype=out_dtype, device="cuda")
    out = wide[:, first : first + N]
    plain = reals_of(num_plain, K, dtype=dtype, seed=2) / 20 if num_plain else None
    bias = reals_of(N, dtype=dtype, seed=3) if adds else None
    residual = reals_of(num_tokens, N + 1, dtype=dtype, seed=4)[:, :N] if adds else None
    quantized.multiply_gemm(x, rows, out, plain=plain, bias=bias, residual=residual, tile=own)
    exact = rows.dequantize().double()
    if plain is not None:
        exact = torch.cat([exact, plain.double()])
    expected = x.double() @ exact.T
    if bias is not None and residual is not None:
        expected += bias.double() + residual.double()
    error = (out.double() - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE[out_dtype], f"off by {error:.5f} of the largest"
    assert wide[:, :first].isnan().all()
    assert wide[:, first + N :].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("kind", [*KINDS, *GROUPS])
def test_every_kind_is_multiplied_exactly(kind: str, dtype: torch.dtype) -> None:
    """Rows do not fill a block, and 600 columns do not fill a step if the groups allow that."""
    sizes = [(300, 768), (2056, 512), (9000, 256)]
    if kind in ("zeros", "int8", "fp8", "fp8 by rows", "4 bits a row"):
        sizes.append((130, 600))
    for N, K in sizes:
        rows = rows_of(kind, N, K)
        for num_tokens in (17, 33, 63, 64):
            check(rows, num_tokens, dtype, num_plain=40, is_padded=True, adds=True)
            check(rows, num_tokens, dtype, out_dtype=torch.float32)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("kind", ["zeros", "4 bits 128", "Q4_K", "Q6_K", "int8", "fp8 by rows"])
def test_every_arrangement_of_warps_gives_the_same(
    kind: str, arrangement: tuple[tuple[int, int, int, int], int, int, int]
) -> None:
    shape, stages, cluster, warp_steps = arrangement
    if cluster > 1 and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("there are no clusters")
    rows = rows_of(kind, 1000, 1280)
    for num_tokens, token_tiles in ((17, 4), (48, 6), (64, 8)):
        own = gemm_tile(
            *shape, token_tiles=token_tiles, stages=stages, cluster=cluster, warp_steps=warp_steps
        )
        if quantized.gemm_constants(rows, torch.bfloat16, own)["SHARED_BYTES"] > 99 * 1024:
            stages_less = own | {"STAGES": 2}
            own = stages_less
        needed = quantized.gemm_constants(rows, torch.bfloat16, own)["SHARED_BYTES"]
        if needed > quantized.card_of(torch.device("cuda", 0)).shared_bytes:
            continue
        given = {"own": own, "out_dtype": torch.float32, "num_plain": 70, "adds": True}
        check(rows, num_tokens, torch.bfloat16, **given)


def test_the_same_product_has_the_same_bits() -> None:
    """Partial sums are added in one order, whichever block finishes first."""
    rows = rows_of("4 bits 128", 2048, 4096)
    x = reals_of(64, 4096, dtype=torch.bfloat16)
    outs = []
    for _ in range(20):
        outs.append(torch.empty(64, 2048, dtype=torch.bfloat16, device="cuda"))
        quantized.multiply_gemm(x, rows, outs[-1])
    assert all(torch.equal(outs[0], other) for other in outs)


def test_weights_are_read_before_the_kernel_ahead_ends_and_tokens_after_it() -> None:
    """A chain of products: each reads what the one before it has written."""
    rows = rows_of("4 bits 128", 1024, 1024)
    exact = rows.dequantize().double()
    x = reals_of(64, 1024, dtype=torch.bfloat16) / 10
    graph, results = torch.cuda.CUDAGraph(), [x]

    def chain() -> None:
        del results[1:]
        for _ in range(8):
            out = torch.empty_like(x)
            quantized.multiply_gemm(results[-1], rows, out)
            results.append(out)

    chain()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    for before, after in itertools.pairwise(results):
        expected = before.double() @ exact.T
        assert (after.double() - expected).abs().max() <= 1e-2 * expected.abs().max()
