"""Tile rules of quantized GEMMs: a block's shared memory suffices for every size."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from compile_cases import CARDS
from penstock.ops.cuda import quantized, quantized_gemm
from penstock.ops.cuda.program import CudaError, compile_source, nvrtc, read_source
from penstock.ops.cuda.quantized import SHARED, STAGED_BYTES, TOKENS, Tile
from penstock.ops.tiles import TiledRows, tile
from penstock.weights.on_the_fly import round_to
from penstock.weights.packing import pack

PROCESSORS = 132
# (N, K) of Qwen3.5 35B, 4B, 27B and 397B, and of Llama 70B.
WIDTHS = ((12288, 2048), (2048, 4096), (12288, 2560), (2560, 9216), (2560, 4096), (18432, 2560))
WIDTHS += ((5120, 17408), (4096, 8192), (57344, 8192), (8192, 28672), (248320, 2048))


def rows_of(scheme: str, num_rows: int, num_columns: int) -> TiledRows:
    """Only their sizes matter."""
    one = tile(pack(round_to(torch.ones(128, 256), scheme.split()[0])))
    group = 32 if scheme.endswith("32") else one.group
    return dataclasses.replace(one, num_rows=num_rows, num_columns=num_columns, group=group)


def staged_bytes(num_tokens: int, num_columns: int, group: int) -> int:
    """As `can_stage` allows it."""
    num_staged = 1 << (num_tokens - 1).bit_length()
    is_little = num_tokens <= quantized.MAX_STAGED and 2 * num_columns * num_staged <= STAGED_BYTES
    return quantized.staged_bytes(num_tokens, num_columns, group) if is_little else 0


@pytest.mark.parametrize("scheme", ["int4", "int4 of 32", "int8", "fp8"])
@pytest.mark.parametrize(("num_rows", "num_columns"), WIDTHS)
def test_tokens_and_sums_fit_a_block(scheme: str, num_rows: int, num_columns: int) -> None:
    rows = rows_of(scheme, num_rows, num_columns)
    for num_tokens in range(1, quantized.MAX_TOKENS + 1):
        token_tiles = 1 << max(0, -(-num_tokens // TOKENS) - 1).bit_length()
        for staged in {0, staged_bytes(num_tokens, num_columns, rows.group)}:
            own = quantized.linear_rule(rows, token_tiles, PROCESSORS, staged)
            assert quantized.shared_bytes(own, token_tiles) + staged <= SHARED
            assert own["WARPS"] % own["ROW_WARPS"] == 0
    for mode in (quantized.GATE_UP, quantized.DOWN_PAIRS, quantized.DOWN_TOKEN):
        for num_tokens in (1, 2, 4, 64):
            own = quantized.expert_rule(mode, rows, 9, num_tokens)
            assert quantized.shared_bytes(own, 1) <= SHARED
            assert own["ROW_TILES"] % 2 == 0 or mode != quantized.GATE_UP


@pytest.mark.parametrize("capability", CARDS)
@pytest.mark.parametrize("scheme", ["int4", "int4 of 32", "int8", "fp8"])
@pytest.mark.parametrize(("num_rows", "num_columns"), [*WIDTHS, (16, 128), (300, 768)])
def test_stages_of_more_tokens_fit_a_block(
    capability: int, scheme: str, num_rows: int, num_columns: int
) -> None:
    rows, card = rows_of(scheme, num_rows, num_columns), CARDS[capability]
    for num_tokens in range(quantized_gemm.HEAD_TOKENS, quantized.MAX_TOKENS + 1):
        for num_plain in (0, 64):
            own = quantized_gemm.gemm_rule(rows, num_tokens, card, num_plain)
            assert "STAGES" in own
            assert quantized_gemm.gemm_shared_bytes(rows, own) <= card.shared_bytes
            assert num_tokens <= TOKENS * own["TOKEN_TILES"] * own["TOKEN_WARPS"] < num_tokens + 16
            assert own["CLUSTER"] <= min(card.max_cluster, -(-num_columns // 128))
            assert quantized_gemm.block_rows(own) % (4 * own["CLUSTER"]) == 0
            assert quantized_gemm.num_warps(own) <= quantized.MAX_WARPS
            assert own["STAGES"] >= 2


def test_a_card_with_clusters_shares_the_columns_of_its_rows() -> None:
    """Else every multiprocessor would read all tokens for a few rows."""
    rows = rows_of("int4", 12288, 2048)
    assert quantized_gemm.gemm_rule(rows, 64, CARDS[90])["CLUSTER"] > 1
    assert quantized_gemm.gemm_rule(rows, 64, CARDS[80])["CLUSTER"] == 1


@pytest.mark.skipif(nvrtc() is None, reason="there is no NVRTC")
@pytest.mark.parametrize("num_tokens", [1, 2])
def test_the_widest_norm_that_is_staged_compiles(num_tokens: int) -> None:
    """Llama 70B's gate and up: what the compiler counts is what the rule counts."""
    rows = rows_of("int4", 57344, 8192)
    staged = staged_bytes(num_tokens, 8192, rows.group)
    assert staged
    own: Tile = quantized.linear_rule(rows, 1, PROCESSORS, staged)
    constants = quantized.kernel_constants(quantized.LINEAR, rows, torch.bfloat16) | own
    constants |= {"STAGED_TOKENS": num_tokens, "HAS_NORM": 1}
    image = compile_source(read_source(quantized.SOURCE), constants, "sm_90")
    assert image.startswith(b"\x7fELF")
    too_large = constants | quantized._tile(2, 16, 1, 2, 1) | {"STAGED_TOKENS": 2}
    with pytest.raises(CudaError, match="too much shared data"):
        compile_source(read_source(quantized.SOURCE), too_large, "sm_90")
