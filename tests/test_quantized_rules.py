"""Tile rules of quantized GEMMs: a block's shared memory suffices for every size."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from compile_cases import CARDS
from penstock.ops import tuning
from penstock.ops.cuda import quantized, quantized_gemm, quantized_rules
from penstock.ops.cuda.program import CudaError, compile_source, nvrtc, read_source
from penstock.ops.cuda.quantized import TOKENS, Tile
from penstock.ops.cuda.quantized_rules import SHARED, shared_bytes
from penstock.ops.tiles import TiledRows, tile
from penstock.weights.on_the_fly import round_to
from penstock.weights.packing import pack

PROCESSORS = 132
# (N, K) of Qwen3.5 35B, 4B, 27B and 397B, and of Llama 70B.
WIDTHS = ((12288, 2048), (2048, 4096), (12288, 2560), (2560, 9216), (2560, 4096), (18432, 2560))
WIDTHS += ((5120, 17408), (4096, 8192), (57344, 8192), (8192, 28672), (248320, 2048))


EXPERT_MODES = (quantized.GATE_UP, quantized.DOWN_PAIRS, quantized.DOWN_TOKEN)


def rows_of(scheme: str, num_rows: int, num_columns: int) -> TiledRows:
    """Rows without data: only their sizes matter."""
    one = tile(pack(round_to(torch.ones(128, 256), scheme.split()[0])))
    group = 32 if scheme.endswith("32") else one.group
    return dataclasses.replace(one, num_rows=num_rows, num_columns=num_columns, group=group)


def staged_bytes(num_tokens: int, num_columns: int, group: int) -> int:
    has_room = quantized_rules.has_room_for_norm(num_tokens, num_columns)
    return quantized_rules.staged_bytes(num_tokens, num_columns, group) if has_room else 0


@pytest.mark.parametrize("scheme", ["int4", "int4 of 32", "int8", "fp8"])
@pytest.mark.parametrize(("num_rows", "num_columns"), WIDTHS)
def test_tokens_and_sums_fit_a_block(scheme: str, num_rows: int, num_columns: int) -> None:
    rows = rows_of(scheme, num_rows, num_columns)
    for num_tokens in range(1, quantized.MAX_TOKENS + 1):
        token_tiles = 1 << max(0, -(-num_tokens // TOKENS) - 1).bit_length()
        for staged in {0, staged_bytes(num_tokens, num_columns, rows.group)}:
            own = quantized.linear_rule(rows, token_tiles, PROCESSORS, staged)
            assert shared_bytes(own, token_tiles) + staged <= SHARED
            assert own["WARPS"] % own["ROW_WARPS"] == 0
    for mode in EXPERT_MODES:
        for num_tokens in (1, 2, 4, 64):
            own = quantized.expert_rule(mode, rows, 9, num_tokens)
            assert shared_bytes(own, 1) <= SHARED
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


@pytest.mark.parametrize("capability", CARDS)
@pytest.mark.parametrize("scheme", ["int4", "int4 of 32", "int8", "fp8"])
@pytest.mark.parametrize("is_down", [False, True])
@pytest.mark.parametrize(("num_rows", "num_columns"), [(1024, 2048), (32, 16), (256, 128)])
def test_blocks_of_experts_fit_an_sm(
    capability: int, scheme: str, is_down: bool, num_rows: int, num_columns: int
) -> None:
    rows, card = rows_of(scheme, num_rows, num_columns), CARDS[capability]
    for token_tiles in {tiles for _, tiles in quantized_gemm.PAIR_TILES} - {1}:
        shape = quantized_gemm.experts_shape(rows, token_tiles, is_down)
        tried = quantized_gemm.candidates(quantized_gemm.EXPERTS, shape, 1024, card)
        assert tried[0] == quantized_gemm.experts_rule(rows, token_tiles, card)
        for own in tried:
            shared = quantized_gemm.gemm_shared_bytes(rows, own)
            assert own["BLOCKS"] * shared <= card.shared_bytes
            assert own["TOKEN_TILES"] == token_tiles
            assert quantized_gemm.block_rows(own) % 32 == 0, "gates, and as many ups"


def test_more_pairs_of_an_expert_have_more_of_them_in_a_block() -> None:
    found = [quantized_gemm.pair_tiles(pairs) for pairs in (0.1, 4, 4.1, 16, 17, 10_000)]
    assert found == [1, 1, 2, 2, 4, 4]


def test_a_card_with_clusters_shares_the_columns_of_its_rows() -> None:
    """Otherwise every multiprocessor would read all tokens for a few rows."""
    rows = rows_of("int4", 12288, 2048)
    assert quantized_gemm.gemm_rule(rows, 64, CARDS[90])["CLUSTER"] > 1
    assert quantized_gemm.gemm_rule(rows, 64, CARDS[80])["CLUSTER"] == 1


@pytest.mark.skipif(nvrtc() is None, reason="there is no NVRTC")
@pytest.mark.parametrize("num_tokens", [1, 2])
def test_the_widest_norm_that_is_staged_compiles(num_tokens: int) -> None:
    """Llama 70B's gate and up: the compiler's count equals the rule's."""
    rows = rows_of("int4", 57344, 8192)
    staged = staged_bytes(num_tokens, 8192, rows.group)
    assert staged
    own: Tile = quantized.linear_rule(rows, 1, PROCESSORS, staged)
    constants = quantized.kernel_constants(quantized.LINEAR, rows, torch.bfloat16) | own
    constants |= {"STAGED_TOKENS": num_tokens, "HAS_NORM": 1}
    image = compile_source(read_source(quantized.SOURCE), constants, "sm_90")
    assert image.startswith(b"\x7fELF")
    too_large = constants | quantized_rules.new_tile(2, 16, 1, 2, 1) | {"STAGED_TOKENS": 2}
    with pytest.raises(CudaError, match="too much shared data"):
        compile_source(read_source(quantized.SOURCE), too_large, "sm_90")


@pytest.mark.parametrize("scheme", ["int4", "int4 of 32", "int8", "fp8"])
@pytest.mark.parametrize(("num_rows", "num_columns"), [*WIDTHS, (512, 2048), (16, 128)])
def test_tiles_to_try_fit_a_block_and_a_processor(
    scheme: str, num_rows: int, num_columns: int
) -> None:
    rows = rows_of(scheme, num_rows, num_columns)
    steps = -(-num_columns // 128)
    for mode, name in quantized_rules.KERNELS.items():
        slots = 0 if mode == quantized.LINEAR else 9
        for num_tokens in (1, 2, 4, 8, 16, 64):
            shape = quantized_rules.tile_shape(rows, slots)
            tried = quantized_rules.candidates(name, shape, num_tokens, PROCESSORS)
            assert 0 < len(tried) <= quantized_rules.MOST_TRIED
            for own in tried:
                staged = staged_bytes(num_tokens, num_columns, rows.group)
                assert quantized_rules.fits(own, num_tokens, 0 if slots else staged)
                assert own["WARPS"] * own["BLOCKS"] <= quantized_rules.MAX_RESIDENT
                assert own["WARPS"] % own["ROW_WARPS"] == 0
                if mode == quantized.DOWN_TOKEN:
                    assert own["WARPS"] == slots
                else:
                    assert own["WARPS"] // own["ROW_WARPS"] <= steps
                assert own["ROW_TILES"] % 2 == 0 or mode != quantized.GATE_UP


@pytest.mark.skipif(nvrtc() is None, reason="there is no NVRTC")
@pytest.mark.parametrize("mode", quantized_rules.KERNELS)
def test_tiles_to_try_compile(mode: int) -> None:
    rows = rows_of("int4", 1024, 2048)
    slots = 0 if mode == quantized.LINEAR else 9
    shape = quantized_rules.tile_shape(rows, slots)
    tried = quantized_rules.candidates(quantized_rules.KERNELS[mode], shape, 1, PROCESSORS)
    constants = quantized.kernel_constants(mode, rows, torch.bfloat16)
    constants |= {"NUM_EXPERTS": 256, "SLOTS": 9, "HAS_SHARED": 1} if slots else {"HAS_NORM": 1}
    for own in tried[::8]:
        image = compile_source(read_source(quantized.SOURCE), {**constants, **own}, "sm_90")
        assert image.startswith(b"\x7fELF")


def test_a_measured_tile_is_used_and_one_that_does_not_fit_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A shape with a norm may have been measured without one: then staged tokens need room too."""
    launched: list[Tile] = []
    monkeypatch.setattr(quantized, "_launch", lambda *given: launched.append(given[4]))
    monkeypatch.setattr(quantized, "num_processors", lambda _: PROCESSORS)
    rows = rows_of("int4", 12288, 8192)
    x, out = torch.zeros(2, 8192).bfloat16(), torch.zeros(2, 12288).bfloat16()
    key = tuning.Question("quantized_linear", quantized_rules.tile_shape(rows), 2, {}).key
    small, large = quantized_rules.new_tile(1, 2, 1, 1, 5), quantized_rules.new_tile(2, 16, 1, 1, 1)
    for tile_given, is_used in ((small, True), (large, False)):
        with tuning.trials({key: tile_given}):
            quantized.multiply(x, rows, out, norm_weight=torch.ones(8192))
            quantized.multiply(x, rows, out)
        with_norm, without = launched[-2:]
        assert (with_norm == tile_given) == is_used
        assert without == tile_given


@pytest.mark.parametrize("capability", CARDS)
@pytest.mark.parametrize("scheme", ["int4", "int4 of 32", "int8", "fp8"])
@pytest.mark.parametrize(("num_rows", "num_columns"), [*WIDTHS, (16, 128)])
def test_tiles_to_try_for_many_tokens_are_those_of_their_shape(
    capability: int, scheme: str, num_rows: int, num_columns: int
) -> None:
    """A table is indexed by shape alone, which determines the number of token tiles."""
    rows, card = rows_of(scheme, num_rows, num_columns), CARDS[capability]
    for num_tokens in (17, 40, 48, 49, 64):
        shape = quantized_gemm.gemm_shape(rows, num_tokens, num_plain=64)
        assert all(type(size) is int for size in shape)
        tried = quantized_gemm.candidates("quantized_gemm", shape, num_tokens, card)
        assert 0 < len(tried) <= quantized_gemm.MOST_TRIED
        assert tried[0] == quantized_gemm.gemm_rule(rows, num_tokens, card, 64)
        for own in tried:
            assert quantized_gemm.gemm_shared_bytes(rows, own) <= card.shared_bytes
            assert num_tokens <= TOKENS * own["TOKEN_TILES"] * own["TOKEN_WARPS"] < num_tokens + 16


def test_a_table_says_which_kernel_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    monkeypatch.setattr(quantized, "_launch", lambda *_: launched.append("few"))
    monkeypatch.setattr(quantized, "multiply_gemm", lambda *_, **__: launched.append("many"))
    monkeypatch.setattr(quantized, "num_processors", lambda _: PROCESSORS)
    rows = rows_of("int4", 12288, 2048)
    shape = quantized_rules.tile_shape(rows)
    for num_tokens, own in ((8, "few"), (16, "few"), (64, "many")):
        x, out = (torch.zeros(num_tokens, size).bfloat16() for size in (2048, 12288))
        key = tuning.Question("quantized_form", shape, num_tokens, {}).key
        quantized.multiply(x, rows, out)
        for is_gemm in (0, 1):
            with tuning.trials({key: {"is_gemm": is_gemm}}):
                quantized.multiply(x, rows, out)
        expected = [own, "few", "many"] if num_tokens > TOKENS else ["few"] * 3
        assert launched[-3:] == expected
