# mypy: disable-error-code="no-untyped-def"
"""8-bit KV inside kernels: quantizes from float32, and widens to the dtype of the dot products.

`ops/reference/kv_codes` is the specification. Kernels see E4M3 as uint8 and convert with integer
instructions: GPUs before sm_89 have no conversion instruction, and where there is one, it is
slower.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.ops.reference import kv_codes as reference

LEAST_AMAX = tl.constexpr(reference.LEAST_AMAX)
# Value scales are multiplied by this, and results by its inverse: the products are then as large as
# the values, within float16's exponent range.
SCALE_UNIT = tl.constexpr(256.0)

# A word of four codes becomes two words of two bf16 each.
#
# E4M3: a code moved to the high byte of a bf16 and shifted by 4 has its exponent and mantissa in
# place; what is missing is a factor of 2^(127 - 7). Adding -0 keeps the sign of zero.
_E4M3_TO_BF16 = tl.constexpr("""
{
    .reg .b32 low, high, low_magnitude, high_magnitude, factor, zero;
    mov.b32 factor, 0x7b807b80;
    mov.b32 zero, 0x80008000;
    prmt.b32 low, $2, 0, 0x1404;
    prmt.b32 high, $2, 0, 0x3424;
    shr.b32 low_magnitude, low, 4;
    shr.b32 high_magnitude, high, 4;
    and.b32 low_magnitude, low_magnitude, 0x07f007f0;
    and.b32 high_magnitude, high_magnitude, 0x07f007f0;
    lop3.b32 low, low, 0x80008000, low_magnitude, 0xea;
    lop3.b32 high, high, 0x80008000, high_magnitude, 0xea;
    fma.rn.bf16x2 $0, low, factor, zero;
    fma.rn.bf16x2 $1, high, factor, zero;
}
""")
# int8: a code plus 128 is the last byte of a float32 between 2^23 and 2^23 + 255. After subtracting
# 2^23 + 128, the upper half of the float32 holds the exact value.
_INT8_TO_BF16 = tl.constexpr("""
{
    .reg .b32 codes, a, b, c, d;
    xor.b32 codes, $2, 0x80808080;
    prmt.b32 a, codes, 0x4b000000, 0x7440;
    prmt.b32 b, codes, 0x4b000000, 0x7441;
    prmt.b32 c, codes, 0x4b000000, 0x7442;
    prmt.b32 d, codes, 0x4b000000, 0x7443;
    sub.f32 a, a, 0f4B000080;
    sub.f32 b, b, 0f4B000080;
    sub.f32 c, c, 0f4B000080;
    sub.f32 d, d, 0f4B000080;
    prmt.b32 $0, a, b, 0x7632;
    prmt.b32 $1, c, d, 0x7632;
}
""")


def stored_as(cache: Tensor) -> str:
    """The constexpr that tells kernels the storage format of a cache."""
    return {torch.float8_e4m3fn: "e4m3", torch.int8: "int8"}.get(cache.dtype, "plain")


def view_codes(cache: Tensor, dtype: torch.dtype) -> Tensor:
    """A cache as kernels access it: written as bytes, and read as words of four. A loop then
    carries one register per word, not per element.
    """
    return cache if stored_as(cache) == "plain" else cache.view(dtype)


@triton.jit
def encode(b_x, STORED: tl.constexpr):
    """[heads, D] float32 -> its codes, uint8, and the scales [heads]."""
    LARGEST: tl.constexpr = 448.0 if STORED == "e4m3" else 127.0
    b_amax = tl.maximum(tl.max(tl.abs(b_x), axis=1), LEAST_AMAX)
    # Exact divisions, so that the kernel writes the same codes as the reference.
    b_x = b_x * tl.div_rn(tl.full(b_amax.shape, LARGEST, tl.float32), b_amax)[:, None]
    if STORED == "e4m3":
        b_codes = _encode_e4m3(b_x)
    else:
        # Adding 1.5 * 2^23 rounds to an integer, half to even, and leaves it in the low bits.
        b_codes = ((b_x + 12582912.0).to(tl.uint32, bitcast=True) & 0xFF).to(tl.uint8)
    return b_codes, tl.div_rn(b_amax, tl.full(b_amax.shape, LARGEST, tl.float32))


@triton.jit
def _encode_e4m3(b_x):
    """Values up to 448, rounded half to even."""
    b_bits = b_x.to(tl.uint32, bitcast=True)
    b_sign = (b_bits >> 24) & 0x80
    b_bits = b_bits & 0x7FFFFFFF
    # The exponent's bias is 7 instead of 127, and the mantissa has 3 bits instead of 23.
    b_normal = ((b_bits + 0x7FFFF + ((b_bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes count multiples of 2^-9, which is the last bit of numbers from 2^14 on.
    b_shifted = b_bits.to(tl.float32, bitcast=True) + 16384.0
    b_small = b_shifted.to(tl.uint32, bitcast=True) & 0xFF
    b_codes = tl.where(b_bits < 0x3C800000, b_small, b_normal)
    return (b_codes | b_sign).to(tl.uint8)


@triton.jit
def widen(b_stored, DTYPE: tl.constexpr, STORED: tl.constexpr):
    """Keys or values [n, D] as DTYPE: codes, [n, D // 4] words, without their scales. Every code is
    represented exactly.
    """
    if STORED == "plain":
        return b_stored.to(DTYPE)
    else:
        return _widen_words(b_stored, DTYPE, STORED)


@triton.jit
def _widen_words(b_words, DTYPE: tl.constexpr, STORED: tl.constexpr):
    if DTYPE.is_bf16():
        b_low, b_high = tl.inline_asm_elementwise(
            _E4M3_TO_BF16 if STORED == "e4m3" else _INT8_TO_BF16,
            "=r,=r,r",
            [b_words],
            dtype=(tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )
        b_even = tl.join(_half_of(b_low, 0), _half_of(b_high, 0))
        b_odd = tl.join(_half_of(b_low, 16), _half_of(b_high, 16))
    else:
        b_even = tl.join(_code_of(b_words, 0, STORED), _code_of(b_words, 16, STORED))
        b_odd = tl.join(_code_of(b_words, 8, STORED), _code_of(b_words, 24, STORED))
    b_all = tl.join(b_even, b_odd).to(DTYPE)  # [n, D // 4, 2, 2]
    return b_all.reshape(b_words.shape[0], b_words.shape[1] * 4)


@triton.jit
def _half_of(b_words, SHIFT: tl.constexpr):
    return (b_words >> SHIFT).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _code_of(b_words, SHIFT: tl.constexpr, STORED: tl.constexpr):
    """The code at this bit position of each word, as float32."""
    if STORED == "int8":
        return ((b_words << (24 - SHIFT)) >> 24).to(tl.float32)
    else:  # float16 has exponent and mantissa 7 bits further left, and bias 15
        b_bits = (b_words >> SHIFT).to(tl.uint16)
        b_half = (((b_bits & 0x80) << 8) | ((b_bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        return b_half.to(tl.float32) * 256.0
