"""The blocks of GGUF files as codes: one function for each type, from rows of bytes to `Codes`.

A block is 32 or 256 elements of a row with their scales. In the K types (256) a block's scales and
offsets are small integers, multiplied by one 16-bit float: the second level of `Scales`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.weights.codes import Codes, Scales

IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the values of E2M1

Blocks = Tensor  # [N, K / block, bytes of a block] uint8


def q8_0(blocks: Blocks) -> Codes:
    return _codes(blocks[..., 2:].view(torch.int8), 8, Scales(_half(blocks, 0)))


def q4_0(blocks: Blocks) -> Codes:
    return _codes(_nibbles(blocks[..., 2:], 16).to(torch.int8) - 8, 4, Scales(_half(blocks, 0)))


def q4_1(blocks: Blocks) -> Codes:
    offsets = Scales(_half(blocks, 2))
    return _codes(_nibbles(blocks[..., 4:], 16), 4, Scales(_half(blocks, 0)), offsets=offsets)


def q5_0(blocks: Blocks) -> Codes:
    values = _nibbles(blocks[..., 6:], 16) | _bits(blocks[..., 2:6]) << 4
    return _codes(values.to(torch.int8) - 16, 5, Scales(_half(blocks, 0)))


def q5_1(blocks: Blocks) -> Codes:
    values = _nibbles(blocks[..., 8:], 16) | _bits(blocks[..., 4:8]) << 4
    return _codes(values, 5, Scales(_half(blocks, 0)), offsets=Scales(_half(blocks, 2)))


def q2_k(blocks: Blocks) -> Codes:
    scales = blocks[..., :16]
    return _codes(
        _pairs_of_bits(blocks[..., 16:80]),
        2,
        Scales(_row(scales & 15), _half(blocks, 80), 16),
        offsets=Scales(_row(scales >> 4), -_half(blocks, 82), 16),
    )


def q3_k(blocks: Blocks) -> Codes:
    # Bit j of byte i of the mask is the third bit of element 32 j + i.
    high = _planes(blocks[..., :32], range(8), 32, 1)
    values = (_pairs_of_bits(blocks[..., 32:96]) | high << 2).to(torch.int8) - 4
    low = _planes(blocks[..., 96:104], (0, 4), 8, 15)
    fine = (low | _planes(blocks[..., 104:108], (0, 2, 4, 6), 4, 3) << 4).to(torch.int8) - 32
    return _codes(values, 3, Scales(_row(fine), _half(blocks, 108), 16))


def q4_k(blocks: Blocks) -> Codes:
    scales, offsets = _k_scales(blocks)
    return _codes(_nibbles(blocks[..., 16:], 32), 4, scales, offsets=offsets)


def q5_k(blocks: Blocks) -> Codes:
    scales, offsets = _k_scales(blocks)
    values = _nibbles(blocks[..., 48:], 32) | _planes(blocks[..., 16:48], range(8), 32, 1) << 4
    return _codes(values, 5, scales, offsets=offsets)


def q6_k(blocks: Blocks) -> Codes:
    values = _nibbles(blocks[..., :128], 64) | _pairs_of_bits(blocks[..., 128:192]) << 4
    fine = blocks[..., 192:208].view(torch.int8)
    return _codes(values.to(torch.int8) - 32, 6, Scales(_row(fine), _half(blocks, 208), 16))


def iq4_nl(blocks: Blocks) -> Codes:
    return _codes(_nibbles(blocks[..., 2:], 16), 4, Scales(_half(blocks, 0)), levels=IQ4_LEVELS)


def iq4_xs(blocks: Blocks) -> Codes:
    high = _bits(blocks[..., 2:4], width=2)
    low = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), -1).flatten(-2)
    fine = (low | high << 4).to(torch.int8) - 32
    values = _nibbles(blocks[..., 8:], 16)
    return _codes(values, 4, Scales(_row(fine), _half(blocks, 0), 8), levels=IQ4_LEVELS)


def mxfp4(blocks: Blocks) -> Codes:
    exponents = blocks[..., 0].int()
    # Half of 2 ** (e - 127), built from its bits: the two smallest are subnormal.
    bits = torch.where(exponents < 2, 0x00200000 << exponents.clamp(max=1), (exponents - 1) << 23)
    return _codes(
        _nibbles(blocks[..., 1:], 16),
        4,
        Scales(bits.int().view(torch.float32)),
        levels=MXFP4_LEVELS,
    )


READERS: dict[str, Callable[[Blocks], Codes]] = {
    "Q8_0": q8_0,
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    "IQ4_NL": iq4_nl,
    "IQ4_XS": iq4_xs,
    "MXFP4": mxfp4,
}


def _codes(
    values: Tensor,  # [N, blocks, elements of a block]
    bits: int,
    scales: Scales,
    offsets: Scales | None = None,
    levels: tuple[int, ...] | None = None,
) -> Codes:
    rows = _row(values)
    table = None
    if levels is not None:
        table = torch.tensor(levels, dtype=torch.float32, device=values.device)
    block = rows.shape[-1] // max(scales.fine.shape[-1], 1)
    return Codes(rows, bits, (1, block), scales, offsets=offsets, levels=table)


def _row(per_block: Tensor) -> Tensor:
    return per_block.flatten(-2).contiguous()  # [N, blocks, n] -> [N, blocks * n]


def _half(blocks: Blocks, start: int) -> Tensor:  # [N, blocks] float16
    return blocks[..., start : start + 2].contiguous().view(torch.float16).squeeze(-1)


def _planes(data: Tensor, shifts: range | tuple[int, ...], run: int, mask: int) -> Tensor:
    """For every `run` bytes: the bits at the first shift of all of them, then those at the next."""
    amounts = torch.tensor(tuple(shifts), dtype=torch.uint8, device=data.device)[:, None]
    planes = data.unflatten(-1, (-1, 1, run)) >> amounts  # [..., runs, shifts, run]
    return (planes & mask).flatten(-3)


def _nibbles(data: Tensor, run: int) -> Tensor:
    return _planes(data, (0, 4), run, 15)


def _pairs_of_bits(data: Tensor) -> Tensor:
    return _planes(data, (0, 2, 4, 6), 32, 3)


def _bits(data: Tensor, width: int = 1) -> Tensor:
    """The bits of little-endian words, lowest first, `width` at a time."""
    amounts = torch.arange(0, 8, width, dtype=torch.uint8, device=data.device)
    return (data[..., None] >> amounts & (1 << width) - 1).flatten(-2)


def _k_scales(blocks: Blocks) -> tuple[Scales, Scales]:
    """For Q4_K and Q5_K: eight scales and eight offsets of 6 bits each, in 12 bytes."""
    first, second, third = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    fine = torch.cat((first & 63, third & 15 | first >> 2 & 48), -1)
    offsets = torch.cat((second & 63, third >> 4 | second >> 2 & 48), -1)
    return Scales(_row(fine), _half(blocks, 0), 8), Scales(_row(offsets), -_half(blocks, 2), 8)
