# mypy: disable-error-code="no-untyped-def"
"""Smooth activations inside kernels, in float32."""

from __future__ import annotations

import triton
import triton.language as tl


# x / (1 + 2^(-x log2 e)). The compiler's own exponential and division take twelve instructions to
# be exact for denormal numbers, which the sum never is; these take five.
SILU = tl.constexpr(
    "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; "
    "rcp.approx.ftz.f32 t, t; mul.f32 $0, $1, t; }"
)
IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def silu(x):  # float32
    if IS_INTERPRETED:
        return x / (1.0 + tl.exp(-x))
    else:
        return tl.inline_asm_elementwise(SILU, "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def softplus(x):
    """log(1 + exp(x)). Adding one rounds off low bits of exp(x); the quotient restores them."""
    small = tl.exp(-tl.abs(x))
    rounded = 1.0 + small
    kept = tl.where(rounded == 1.0, 1.0, rounded - 1.0)
    return tl.maximum(x, 0.0) + tl.where(rounded == 1.0, small, tl.log(rounded) * (small / kept))
