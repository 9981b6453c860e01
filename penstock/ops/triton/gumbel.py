# mypy: disable-error-code="no-untyped-def"
"""Shared by sampling kernels: the Gumbel noise, and an integer key that orders tokens like the
reference.

The noise is bit for bit the reference's hash of (seed, position, token id); only the last bit of a
logarithm may differ. `sampling_filters` implements the filters.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2**62) - 1)  # below every token's key


@triton.jit
def order_of(b_value, b_token):
    """An int64 that grows with the value and, between equal values, falls with the token id.

    Its upper 32 bits are the float's, mapped so that they compare as an integer; 31 bits are the
    id's.
    """
    bits = (b_value + 0.0).to(tl.int32, bitcast=True)  # -0 is 0
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (key.to(tl.int64) << 31) | (0x7FFFFFFF - b_token).to(tl.int64)


@triton.jit
def token_of(b_order):
    return 0x7FFFFFFF - (b_order & 0x7FFFFFFF)


@triton.jit
def value_of(b_order):
    key = (b_order >> 31).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def noise_key_of(seed, position):
    """The part of the hash that all tokens of a row share; seed and position are int64."""
    key = _scramble(position.to(tl.uint32))
    key = _scramble(key ^ seed.to(tl.uint32))
    return _scramble(key ^ (seed >> 32).to(tl.uint32))


@triton.jit
def perturbed(b_logit, b_token, temperature, noise_key):
    """The argmax of these over a row is a sample from the softmax. The division rounds like the
    reference.
    """
    bits = _scramble(noise_key + b_token.to(tl.uint32) * 0x9E3779B9)
    uniform = ((bits >> 9).to(tl.int32).to(tl.float32) + 0.5) * (2.0**-23)
    return tl.div_rn(b_logit, temperature) - tl.log(-tl.log(uniform))


@triton.jit
def _scramble(x):
    """MurmurHash3's 32-bit finalizer, on uint32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)
