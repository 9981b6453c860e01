"""The prefill attention kernel against its reference, for any split into chunks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor

from kernel_checks import FULL_SIZE, PLACES, STORED, assert_near, make_paged_cache, random
from penstock.layers.inputs import RowSpan
from penstock.ops import TokenBlocks, Weight, cut_blocks, float8
from penstock.ops.float8 import RoundedTokens
from penstock.ops.reference import attention as reference
from penstock.ops.tiles import tile
from penstock.ops.triton import fp8
from penstock.ops.triton import prefill_attention as prefill
from penstock.ops.triton.attention import paged_attention
from penstock.ops.triton.matmul import linear
from test_kernel_fp8 import packed

UNTOUCHED = 77.0
# Decodes at both ends and between, a row without tokens, rows with unaligned starts and ends.
RAGGED = [RowSpan(*row) for row in ((1, 65), (70, 70), (0, 7), (1, 1), (3, 129), (1, 30))]


@dataclass(frozen=True)
class Step:
    """Rows over a cache that is NaN wherever no row has written."""

    spans: list[RowSpan]
    q: Tensor  # [T, Hq, D]
    keys: Tensor  # [pages, page_size, Hkv, D]
    values: Tensor
    page_table: Tensor  # [R, P]
    gate: Tensor | None  # [T, Hq * D], a view of a wider tensor
    scales: Tensor | None = None  # of codes

    @property
    def num_tokens(self) -> list[int]:
        return [span.num_tokens for span in self.spans]

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)

    def attend(
        self,
        window: int = 0,
        deterministic: bool = False,
        blocks: Sequence[tuple[int, ...]] | None = None,
        rounded_out: RoundedTokens | None = None,
    ) -> Tensor:
        if blocks is None:
            blocks = cut_blocks(self.spans)[0]
        out = torch.full_like(self.q.flatten(1), UNTOUCHED)
        prefill.prefill_attention(
            out,
            self.q,
            self.keys,
            self.values,
            self.scales,
            self.page_table,
            *self._lengths(),
            self._blocks(blocks),
            self.scale,
            window,
            self.gate,
            rounded_out,
            num_tokens=len(self.q),
            deterministic=deterministic,
        )
        return out

    def expected(self, window: int = 0) -> Tensor:
        out = reference.paged_attention(
            self.q,
            self.keys,
            self.values,
            self.page_table,
            *self._lengths(),
            self.spans,
            self._blocks([]),
            self.scale,
            window,
            self.gate,
            self.scales,
        )
        for tokens, span in zip(out.split(self.num_tokens), self.spans):
            if span.num_tokens == 1 and not span.checkpoints:
                tokens.fill_(UNTOUCHED)
        return out

    def row(self, index: int, start: int = 0, end: int | None = None) -> Step:
        """Some tokens of one row, as a step of their own."""
        span, first = self.spans[index], sum(self.num_tokens[:index])
        end = span.num_tokens if end is None else end
        tokens = slice(first + start, first + end)
        return replace(
            self,
            spans=[RowSpan(end - start, span.context_len - span.num_tokens + end)],
            q=self.q[tokens],
            page_table=self.page_table[index : index + 1],
            gate=None if self.gate is None else self.gate[tokens],
        )

    def _lengths(self) -> tuple[Tensor, Tensor]:
        query_start = torch.tensor((0, *self.num_tokens)).cumsum(0)
        context_lens = torch.tensor([span.context_len for span in self.spans])
        return query_start.to(self.q.device), context_lens.to(self.q.device)

    def _blocks(self, blocks: Sequence[tuple[int, ...]]) -> TokenBlocks:
        table = torch.tensor(blocks, dtype=torch.int32).reshape(-1, 4).to(self.q.device)
        return TokenBlocks(table=table, rows=table.new_empty(0, 2))


def make_step(
    spans: list[RowSpan],
    heads: int,
    kv_heads: int,
    dim: int,
    *,
    dtype: torch.dtype,
    device: str,
    page_size: int = 64,
    num_pages: int = 0,  # width of the table; at least what the longest row needs
    gated: bool = True,
    stored: torch.dtype | None = None,  # of codes
) -> Step:
    cache = make_paged_cache(
        [span.context_len for span in spans],
        kv_heads,
        dim,
        dtype=dtype,
        device=device,
        page_size=page_size,
        num_pages=num_pages,
        stored=stored,
    )
    num_tokens, width = sum(span.num_tokens for span in spans), heads * dim
    gate = random(num_tokens, 3 * width, dtype=dtype, device=device, seed=3)[:, width : 2 * width]
    return Step(
        **cache._asdict(),
        spans=spans,
        q=random(num_tokens, heads, dim, dtype=dtype, device=device, seed=4),
        gate=gate if gated else None,
    )


def use_processors(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(prefill, "num_processors", lambda device: number)


@pytest.mark.thinned
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(2, 2, 32), (6, 2, 24), (4, 1, 64)])
def test_prefill_is_its_reference_for_ragged_rows_and_leaves_decodes_alone(
    device: str,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    stored: torch.dtype | None,
) -> None:
    step = make_step(RAGGED, heads, kv_heads, dim, dtype=dtype, device=device, stored=stored)
    assert_near(step.attend(), step.expected(), dtype)


@pytest.mark.bitwise
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(2, 1, 256), (3, 1, 128)])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_codes_are_those_of_the_result(
    num_splits: int,
    heads: int,
    kv_heads: int,
    dim: int,
    device: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rounded to the model's dtype first, as between two kernels."""
    monkeypatch.setattr(prefill, "_plan_splits", lambda *given: num_splits)
    longest = 70
    if device == "cuda":
        longest = 64 * 2 * prefill.WORTHWHILE_SPLIT.value + 70
    else:
        monkeypatch.setattr(prefill, "WORTHWHILE_SPLIT", tl.constexpr(1))
    spans = [RowSpan(67, longest), RowSpan(5, 133)]
    step = make_step(spans, heads, kv_heads, dim, dtype=dtype, device=device)
    codes, scales = fp8.new_codes(72, heads * dim, step.q.device)
    left = step.attend(rounded_out=RoundedTokens(codes, scales, 72, dtype))
    assert (left == UNTOUCHED).all()
    expected, expected_scales, _ = fp8.quantize_tokens(step.attend())
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales, expected_scales)


@pytest.mark.bitwise
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_a_gemm_that_reads_the_result_gets_it_in_codes(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype == torch.float32:
        monkeypatch.setattr(float8, "DTYPES", (torch.float32,))
    if device == "cpu":
        monkeypatch.setattr(float8, "_is_able", lambda x: True)
    weight = Weight(torch.empty(384, 256))
    weight.quantize((tile(packed(384, 256, device), keeps_rows=True),))

    def run(spans: list[RowSpan], heads: int = 2, **given: Any) -> Any:
        step = make_step(spans, heads, 1, 256 // heads, dtype=dtype, device=device)
        blocks = step._blocks(cut_blocks(spans)[0])
        caches = (step.keys, step.values, step.page_table, *step._lengths(), spans, blocks)
        return paged_attention(step.q, *caches, step.scale, gate=step.gate, **given)

    row = RowSpan(67, 70)
    seen, plain = run([row], reader=weight), run([row])
    assert isinstance(seen, RoundedTokens)
    assert torch.equal(linear(seen, weight), linear(plain, weight))
    assert isinstance(run([row], reader=weight, deterministic=True), Tensor)
    assert isinstance(run([row, RowSpan(1, 3)], reader=weight), Tensor)
    assert isinstance(run([row], 4, reader=weight), Tensor)  # heads of half a block of columns
    partly_plain = Weight(torch.empty(400, 256))
    partly_plain.quantize((*weight.parts, torch.empty(16, 256, device=device, dtype=dtype)))
    for reader in (partly_plain, Weight(torch.empty(384, 256))):
        assert isinstance(run([row], reader=reader), Tensor)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_output_without_a_gate_is_not_gated(device: str, dtype: torch.dtype) -> None:
    step = make_step(RAGGED[1:2], 2, 1, 32, dtype=dtype, device=device, gated=False)
    assert_near(step.attend(), step.expected(), dtype)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize(("block_heads", "block_keys"), [(1, 16), (1, 64), (2, 32), (4, 64)])
def test_every_tile_computes_the_same(
    device: str,
    dtype: torch.dtype,
    block_heads: int,
    block_keys: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tile = {"BLOCK_HEADS": block_heads, "BLOCK_KEYS": block_keys, "num_warps": 4, "num_stages": 2}
    monkeypatch.setattr(prefill, "_prefill_rule", lambda *_: tile)
    step = make_step(RAGGED[1:6], 3, 1, 32, dtype=dtype, device=device)
    assert_near(step.attend(window=40), step.expected(window=40), dtype)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("window", [1, 64, 100, 129, 1000])
def test_a_query_sees_a_window_of_its_newest_keys(
    device: str, dtype: torch.dtype, window: int
) -> None:
    step = make_step([RowSpan(70, 230), RowSpan(3, 64)], 2, 1, 32, dtype=dtype, device=device)
    assert_near(step.attend(window), step.expected(window), dtype)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("page_size", [16, 48, 128])
def test_prefill_is_its_reference_for_any_page_size(
    device: str, dtype: torch.dtype, page_size: int
) -> None:
    spans = [RowSpan(20, 143), RowSpan(3, 3)]
    step = make_step(spans, 2, 1, 32, dtype=dtype, device=device, page_size=page_size)
    assert_near(step.attend(), step.expected(), dtype)


@pytest.mark.bitwise
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("window", [0, 70])
def test_deterministic_prefill_is_the_same_to_the_bit_in_any_step_and_any_split(
    device: str, dtype: torch.dtype, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_processors(monkeypatch, 1000)
    step = make_step([RowSpan(9, 20), RowSpan(90, 140)], 1, 1, 32, dtype=dtype, device=device)
    together = step.attend(window, deterministic=True)[9:]
    for cuts in ((0, 90), (0, 14, 78, 90), (0, 1, 50, 90)):
        parts = []
        for start, end in itertools.pairwise(cuts):
            part = step.row(1, start, end)
            blocks = cut_blocks([replace(part.spans[0], checkpoints=((end - start, 5),))])[0]
            parts.append(part.attend(window, deterministic=True, blocks=blocks))
        assert torch.equal(torch.cat(parts), together)
    assert_near(together, step.expected(window)[9:], dtype)


@pytest.mark.bitwise
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_a_checkpoint_within_a_row_changes_nothing(device: str, dtype: torch.dtype) -> None:
    span = RowSpan(100, 110)
    step = make_step([span, RowSpan(1, 20)], 2, 1, 32, dtype=dtype, device=device)
    saving = replace(step, spans=[replace(span, checkpoints=((40, 3), (100, 4))), RowSpan(1, 20)])
    assert torch.equal(step.attend(), saving.attend())


@pytest.mark.bitwise
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_pieces_without_tokens_write_nothing(device: str, dtype: torch.dtype) -> None:
    step = make_step(RAGGED[3:], 2, 1, 32, dtype=dtype, device=device)
    blocks = cut_blocks(step.spans)[0]
    padded = [*blocks, (0, 0, 0, 0), (0, 5, 0, 0)]
    assert torch.equal(step.attend(blocks=padded), step.attend(blocks=blocks))
    assert (step.attend(blocks=[]) == UNTOUCHED).all()


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize(("window", "stored"), [(0, None), (1090, None), (0, torch.int8)])
def test_few_tokens_of_long_rows_are_the_same_in_splits(
    device: str,
    dtype: torch.dtype,
    window: int,
    stored: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_processors(monkeypatch, 1000)
    # One at a time: a longer context has more splits than are merged at once.
    monkeypatch.setattr(prefill, "MERGE_TILE", {**prefill.MERGE_TILE, "BLOCK_SPLITS": 1})
    spans = [RowSpan(3, 1154), RowSpan(1, 9), RowSpan(5, 5)]
    step = make_step(spans, 1, 1, 16, dtype=dtype, device=device, num_pages=64, stored=stored)
    step.q.mul_(3)  # so that splits have different weights
    assert prefill._plan_splits(3, 64 * 64, step.q.device) > 1
    assert_near(step.attend(window), step.expected(window), dtype)


def test_number_of_splits_follows_from_programs_and_the_width_of_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_processors(monkeypatch, 132)
    device = torch.device("cpu")
    assert prefill._plan_splits(8, 32768, device) == 16  # one program per SM
    assert prefill._plan_splits(8, 2048, device) == 2  # shorter splits are not worth a merge
    assert prefill._plan_splits(128, 262144, device) == 1  # the blocks alone fill the GPU
    assert prefill._plan_splits(1000, 64, device) == 1


def test_rule_fits_the_shared_memory_of_every_card() -> None:
    shapes = [
        (16, 2, 256, 64),
        (16, 4, 256, 64),
        (24, 4, 256, 64),
        (32, 8, 128, 64),
        (6, 2, 24, 48),
    ]
    for num_bytes in (99 * 1024, 163 * 1024, 227 * 1024):
        for shape in shapes:
            for dtype in (torch.bfloat16, torch.float32):
                tile = prefill._prefill_rule(shape, dtype, num_bytes)
                held = 64 * tile["BLOCK_HEADS"] + 2 * tile["num_stages"] * tile["BLOCK_KEYS"]
                assert held * shape[2] * dtype.itemsize <= num_bytes
                assert shape[3] % tile["BLOCK_KEYS"] == 0


@pytest.mark.parametrize(("device", "dtype"), FULL_SIZE)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 2, 256), (24, 4, 256), (32, 8, 128)])
@pytest.mark.parametrize(
    "rows",
    [
        [(1024, 1024)],
        [(1, 900), (1000, 1000), (1, 5000), (777, 3001), (0, 50), (64, 64)],
        [(2048, 33000)],
        [(5, 33000)],
        [(5, 2000), (200, 33000)],
    ],
    ids=str,
)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("stored", STORED)
def test_prefill_is_its_reference_at_full_size(
    device: str,
    dtype: torch.dtype,
    stored: torch.dtype | None,
    heads: int,
    kv_heads: int,
    dim: int,
    rows: list[tuple[int, int]],
    deterministic: bool,
) -> None:
    spans = [RowSpan(*row) for row in rows]
    step = make_step(spans, heads, kv_heads, dim, dtype=dtype, device=device, stored=stored)
    seen, expected = step.attend(deterministic=deterministic), step.expected()
    for mine, theirs in zip(seen.split(step.num_tokens), expected.split(step.num_tokens)):
        if len(mine):  # relative to the row's largest value: outputs of long rows are small
            assert_near(mine, theirs, dtype)
