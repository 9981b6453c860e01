"""Every GGUF block type: our codes give the numbers of the gguf package, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from penstock.gguf.header import BLOCK_TYPES, BlockType
from penstock.weights.gguf_blocks import READERS

NUM_ROWS, NUM_BLOCKS = 48, 3
TYPES = {block_type.name: block_type for block_type in BLOCK_TYPES.values()}
# Where each type keeps its 16-bit floats.
HALVES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
}
EXTREMES = (0.0, -0.0, 6e-8, -6e-8, 6.1e-5, 65504.0, -65504.0, 1.0, -1.0)


def random_blocks(block_type: BlockType) -> np.ndarray:
    """Rows of bytes as a file may contain them: any bits, and scales from the smallest to the
    largest.
    """
    generator = np.random.default_rng(block_type.block_bytes)
    blocks = generator.integers(
        0, 256, (NUM_ROWS, NUM_BLOCKS, block_type.block_bytes), dtype=np.uint8
    )
    for place in HALVES[block_type.name]:
        scales = generator.normal(0, 0.1, (NUM_ROWS, NUM_BLOCKS)).astype(np.float16)
        scales[: len(EXTREMES), 0] = EXTREMES
        blocks[..., place : place + 2] = scales[..., None].view(np.uint8)
    if block_type.name == "MXFP4":
        blocks[:6, 0, 0] = (0, 1, 2, 127, 254, 255)
    return blocks.reshape(NUM_ROWS, -1)


@pytest.mark.parametrize("name", READERS)
def test_dequantized_codes_equal_the_gguf_package_bit_for_bit(name: str) -> None:
    block_type = TYPES[name]
    rows = random_blocks(block_type)
    with np.errstate(over="ignore"):
        expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[name])
    blocks = torch.from_numpy(rows).unflatten(-1, (-1, block_type.block_bytes))
    codes = READERS[name](blocks)
    found = codes.dequantize()
    assert found.shape == expected.shape
    assert found.numpy().tobytes() == expected.tobytes()
    assert codes.values.dtype in (torch.uint8, torch.int8)
    lowest, highest = int(codes.values.min()), int(codes.values.max())
    assert highest - lowest == 2**codes.bits - 1, (
        "every code a number of so many bits can be occurs"
    )


def test_the_sizes_of_blocks_are_those_of_the_format() -> None:
    for number, ours in BLOCK_TYPES.items():
        theirs = gguf.GGMLQuantizationType(number)
        assert (ours.name, ours.block_size, ours.block_bytes) == (
            theirs.name,
            *gguf.GGML_QUANT_SIZES[theirs],
        )
