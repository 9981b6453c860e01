"""E4M3 GEMMs equal the product of quantized tokens with dequantized rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernel_checks import INTERPRETED, ON_GPU
from penstock.ops.cuda import fp8_experts
from penstock.ops.float8 import RoundedTokens, can_take, round_tokens
from penstock.ops.product import Product
from penstock.ops.quantized import QuantizedRows
from penstock.ops.reference.matmul import linear as reference_linear
from penstock.ops.tiles import _order, tile
from penstock.ops.triton import fp8, fp8_logits, moe_fp8_gemm
from penstock.ops.weight import Weight
from penstock.weights.codes import Codes, Scales
from penstock.weights.packing import pack

DEVICES = [
    pytest.param("cpu", torch.float16, marks=INTERPRETED, id="interpreted-fp16"),
    pytest.param("cuda", torch.bfloat16, marks=ON_GPU, id="compiled-bf16"),
]

ON_HOPPER = [
    pytest.param("cuda", dtype, marks=ON_GPU, id=f"compiled-{dtype}")
    for dtype in (torch.bfloat16, torch.float16)
]


def packed(N: int, K: int, device: str, seed: int = 0, channels: bool = False) -> QuantizedRows:
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(N, K, generator=generator) * 50).clamp(-448, 448)
    block = (1, K) if channels else (128, 128)
    scales = torch.rand(-(-N // block[0]), -(-K // block[1]), generator=generator) * 1e-3 + 1e-4
    rows = pack(Codes(values.to(torch.float8_e4m3fn), 8, block, Scales(scales)))
    return rows.mapped(lambda tensor: tensor.to(device))


def tokens(T: int, K: int, device: str, dtype: torch.dtype, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, K, generator=generator) * torch.rand(T, 1, generator=generator) * 3
    return x.to(device, dtype)


def rounded(x: Tensor) -> Tensor:
    """The values that the codes of tokens encode."""
    blocks = x.double().unflatten(-1, (-1, 128))
    scale = (blocks.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448).float().double()
    codes = (blocks / scale).float().to(torch.float8_e4m3fn)
    return (codes.double() * scale).flatten(-2)


def assert_near(seen: Tensor, expected: Tensor, tolerance: float) -> None:
    error = (seen.double() - expected).abs().max() / expected.abs().max()
    assert error <= tolerance, f"off by {error:.4f} of the largest"


def test_the_specification_rounds_tokens_as_the_kernels_do() -> None:
    x = tokens(7, 384, "cpu", torch.float32)
    assert_near(round_tokens(x), rounded(x), 1e-6)


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_tokens_become_codes_with_a_scale_for_each_128_columns(
    device: str, dtype: torch.dtype
) -> None:
    x = tokens(5, 384, device, dtype)
    x[2] = 0
    codes, scales, _ = fp8.quantize_tokens(x)
    assert len(codes) == 8  # padded to the alignment of cuBLAS
    codes, scales = codes[:5], scales[:, :5]
    seen = codes.float().unflatten(-1, (-1, 128)) * scales.T[..., None]
    assert_near(seen.flatten(-2), x.double(), 2**-4)
    assert torch.equal(seen.flatten(-2), round_tokens(x))
    assert codes[2].float().abs().max() == 0
    assert (codes.float().unflatten(-1, (-1, 128)).abs().amax(-1)[:2] == 448).all()


@pytest.mark.bitwise
@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_codes_for_tiles_are_the_same_in_the_order_of_a_tile_s_row(
    device: str, dtype: torch.dtype
) -> None:
    x = tokens(5, 384, device, dtype)
    codes, scales, _ = fp8.quantize_tokens(x)
    tiled, same_scales, _ = fp8.quantize_tokens(x, for_tiles=True)
    order = _order(8, True, False, torch.device(device)).view(2, 16, 64)[:, 0].flatten()
    expected = codes[:5].view(torch.uint8).unflatten(-1, (-1, 128))[..., order]
    assert torch.equal(tiled[:5].view(torch.uint8).unflatten(-1, (-1, 128)), expected)
    assert torch.equal(same_scales[:, :5], scales[:, :5])


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_what_comes_before_a_product_is_part_of_it(device: str, dtype: torch.dtype) -> None:
    x, norm = tokens(6, 768, device, dtype), tokens(1, 768, device, torch.float32, 2)[0].abs()
    codes, scales, kept = fp8.quantize_tokens(x, norm, 1e-6, keeps_values=True)
    normed = torch.nn.functional.rms_norm(x.double(), (768,), norm.double(), 1e-6)
    assert kept is not None
    assert_near(kept, normed, 1e-2)
    assert_mostly_equal(codes, scales, normed.to(dtype))
    codes, scales, _ = fp8.quantize_tokens(x, is_swiglu=True)
    gate, up = x.double().chunk(2, dim=-1)
    assert_mostly_equal(codes, scales, (torch.nn.functional.silu(gate) * up).to(dtype))


def assert_mostly_equal(codes: Tensor, scales: Tensor, x: Tensor) -> None:
    """A number between two codes may be rounded to either."""
    seen = codes[: len(x)].double().unflatten(-1, (-1, 128)) * scales.T[: len(x), :, None].double()
    difference = seen.flatten(-2) - rounded(x)
    assert difference.norm() <= 1e-2 * x.double().norm()


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize(
    ("N", "K", "channels"),
    [(256, 256, False), (200, 256, True), (256, 512, False)],
    ids=["blocks", "channels", "blocks that the library takes"],
)
def test_a_product_is_that_of_the_rounded_tokens(
    device: str, dtype: torch.dtype, N: int, K: int, channels: bool
) -> None:
    rows = tile(packed(N, K, device, channels=channels), keeps_rows=True)
    x = tokens(130, K, device, dtype)
    bias, residual = tokens(1, N, device, dtype, 3)[0], tokens(130, N, device, dtype, 4)
    out = torch.full((132, N + 8), torch.nan, device=device, dtype=dtype)
    fp8.multiply(*fp8.quantize_tokens(x)[:2], rows, out[:, :N], bias, residual)
    expected = rounded(x) @ rows.dequantize().double().T + bias.double() + residual.double()
    assert_near(out[:130, :N], expected, 1e-2)
    assert out[:, N:].isnan().all()


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_parts_of_a_weight_have_their_own_bias_and_residual(
    device: str, dtype: torch.dtype
) -> None:
    """Quantized rows read the codes, unquantized ones the tokens as they were."""
    rows = [tile(packed(N, 256, device, seed=N), keeps_rows=True) for N in (256, 128)]
    plain, x = tokens(24, 256, device, dtype, 2) / 50, tokens(70, 256, device, dtype)
    parts = (rows[0], plain, rows[1])
    bias, residual = tokens(1, 408, device, dtype, 3)[0], tokens(70, 408, device, dtype, 4)
    product = Product(x, torch.empty(408, 256), dtype, bias=bias, residual=residual.clone())
    seen = fp8.multiply_parts(parts, product)
    first, last = (rounded(x) @ own.dequantize().double().T for own in rows)
    expected = torch.cat((first, x.double() @ plain.double().T, last), dim=1)
    expected += bias.double() + residual.double()
    assert_near(seen, expected, 1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_specification_multiplies_the_values_of_codes(dtype: torch.dtype) -> None:
    x, weight = tokens(6, 256, "cpu", dtype), Weight(torch.randn(8, 256).to(dtype))
    blocks = x.float().unflatten(-1, (-1, 128))
    scales = blocks.abs().amax(-1) / 448
    codes = (blocks / scales[..., None]).to(torch.float8_e4m3fn).flatten(-2)
    padded = torch.cat((codes, codes[:2]))  # what is behind the tokens has no meaning
    given = RoundedTokens(padded, torch.cat((scales, scales[:2])).t(), 6, dtype)
    seen = reference_linear(given, weight)
    assert seen.dtype == dtype
    assert seen.shape == (6, 8)
    assert_near(seen, rounded(x) @ weight.values.double().T, 1e-2)


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize("num_tokens", [50, 200])
@pytest.mark.parametrize(
    ("N", "K", "channels"), [(384, 384, False), (200, 256, True)], ids=["blocks", "channels"]
)
def test_logits_are_those_of_tokens_as_they_are(
    device: str, dtype: torch.dtype, N: int, K: int, channels: bool, num_tokens: int
) -> None:
    """Rows and tokens that do not fill a tile, in views of wider tensors."""
    rows = tile(packed(N, K, device, channels=channels), keeps_rows=True)
    x = tokens(num_tokens, K + 8, device, dtype)[:, 8:]
    out = torch.full((num_tokens, N + 8), torch.nan, device=device)
    fp8_logits.multiply(x, rows, out[:, :N])
    assert_near(out[:, :N], x.double() @ rows.dequantize().double().T, 1e-5)
    assert out[:, N:].isnan().all()


@pytest.mark.thinned
@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize(
    ("has_shared", "num_tokens", "channels"),
    [(False, 9, False), (True, 70, False), (True, 9, True)],
    ids=["routed", "shared", "channels"],
)
@pytest.mark.parametrize("by_cuda", [False, True])
def test_experts_are_those_of_the_rounded_tokens(
    device: str,
    dtype: torch.dtype,
    has_shared: bool,
    num_tokens: int,
    channels: bool,
    by_cuda: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not by_cuda:
        monkeypatch.setattr(fp8_experts, "can_multiply", lambda *_: False)
    elif channels or device == "cpu":
        pytest.skip("the kernel in CUDA C++ is for blocks, on a GPU")
    width = 256 if by_cuda else 384  # a multiple of 256 there; here another number of blocks than I
    check_experts(device, dtype, has_shared, num_tokens, channels, H=width)


@pytest.mark.parametrize(("device", "dtype"), ON_HOPPER)
@pytest.mark.parametrize("num_tokens", [300, 9000], ids=["some", "more than one block's work"])
@pytest.mark.parametrize(("I", "H"), [(128, 512), (512, 256)])
def test_experts_of_many_tokens_are_those_of_the_rounded_tokens(
    device: str, dtype: torch.dtype, num_tokens: int, I: int, H: int
) -> None:
    check_experts(device, dtype, True, num_tokens, False, I, H)


def check_experts(
    device: str,
    dtype: torch.dtype,
    has_shared: bool,
    num_tokens: int,
    channels: bool,
    I: int = 256,
    H: int = 256,
) -> None:
    E, k = 4, 2
    stacks = [
        tile(QuantizedRows.stack([packed(N, K, device, seed, channels) for seed in range(E)]))
        for N, K in ((2 * I, H), (H, I))
    ]
    sizes = ((2 * I, H), (H, I)) if has_shared else ()
    shared = [tile(packed(N, K, device, 9, channels)) for N, K in sizes]
    x = tokens(num_tokens, H, device, dtype)
    seeded = torch.Generator().manual_seed(2)
    ids = torch.stack([torch.randperm(E, generator=seeded)[:k] for _ in range(num_tokens)])
    ids = ids.int().to(device)
    weights = torch.rand(num_tokens, k, generator=seeded).to(device)
    shared_weight = torch.rand(num_tokens, 1, generator=seeded).to(device) if has_shared else None
    residual = tokens(num_tokens, H, device, dtype, 5)
    out = torch.full_like(residual, torch.nan)
    parts = [*stacks, *shared]
    assert all(map(can_take, parts))
    moe_fp8_gemm.run(out, x, weights, ids, parts, residual, shared_weight, None)

    def expert(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = (rounded(x) @ gate_up.double().T).chunk(2, dim=-1)
        inner = torch.nn.functional.silu(gate) * up
        return rounded(inner) @ down.double().T

    expected = residual.double()
    matrices = [part.dequantize() for part in parts]
    for i in range(E):
        of_all = expert(x, matrices[0][i], matrices[1][i])
        chosen = (weights * (ids == i)).sum(-1, keepdim=True)
        expected = expected + of_all * chosen.double()
    if shared_weight is not None:
        expected = expected + expert(x, matrices[2], matrices[3]) * shared_weight.double()
    assert_near(out, expected, 2e-2)
