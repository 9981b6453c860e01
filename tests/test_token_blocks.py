"""The token blocks of kernels: each token of a row once, in order, no block across a boundary."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.layers.inputs import RowSpan
from penstock.ops import TokenBlocks, cut_blocks


@st.composite
def spans(draw: st.DrawFn) -> RowSpan:
    num_tokens = draw(st.integers(0, 300))
    checkpoints = draw(st.sets(st.integers(1, num_tokens), max_size=3)) if num_tokens else set()
    slots = tuple((after, 10 + after) for after in checkpoints)
    return RowSpan(num_tokens, draw(st.integers(0, 200)) + num_tokens, slots)


@given(st.lists(spans(), max_size=5))
def test_blocks_cover_what_is_not_a_decode(rows: list[RowSpan]) -> None:
    blocks, ranges = cut_blocks(rows)
    starts = [sum(span.num_tokens for span in rows[:row]) for row in range(len(rows))]
    covered = [(row, first + i) for row, first, num_tokens, _ in blocks for i in range(num_tokens)]
    assert covered == [
        (row, starts[row] + i)
        for row, span in enumerate(rows)
        if span.num_tokens > 1 or span.checkpoints
        for i in range(span.num_tokens)
    ]
    for row, first, num_tokens, slot in blocks:
        position = rows[row].context_len - rows[row].num_tokens + first - starts[row]
        assert num_tokens > 0
        assert position // 64 == (position + num_tokens - 1) // 64
        saved = dict(rows[row].checkpoints)
        done = first - starts[row] + num_tokens
        assert slot == saved.get(done, 0)
        assert not any(done - num_tokens < after < done for after in saved)
    assert [
        row for first, end in ranges for row in {block[0] for block in blocks[first:end]}
    ] == sorted({row for row, *_ in blocks})


def test_a_step_of_decodes_has_no_blocks() -> None:
    blocks = TokenBlocks.of([RowSpan(1, 9), RowSpan(1, 64)], "cpu")
    assert blocks.table.shape == (0, 4)
    assert blocks.rows.shape == (0, 2)
