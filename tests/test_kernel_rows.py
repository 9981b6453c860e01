"""The first and last kernels of a decode step read and write exactly what the references do."""

from __future__ import annotations

import pytest
import torch

from kernel_checks import INTERPRETED, ON_GPU
from penstock.ops.reference import decode_rows as reference
from penstock.ops.triton.decode_rows import (
    accept_drafts,
    advance_rows,
    decode_rows,
    draft_tokens,
    place_drafts,
)

DEVICES = [
    pytest.param("cpu", marks=INTERPRETED, id="interpreted"),
    pytest.param("cuda", marks=ON_GPU, id="compiled"),
]
Tables = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def tables(context_lens: list[int], num_pages: int, device: str) -> Tables:
    """Last tokens, context lengths and pages for one row per length."""
    num_rows = len(context_lens)
    generator = torch.Generator().manual_seed(num_rows + num_pages)
    last_token = torch.randint(0, 250_000, (num_rows,), generator=generator)
    page_table = torch.randint(
        1, 2**31 - 1, (num_rows, num_pages), generator=generator, dtype=torch.int32
    )
    return last_token.to(device), torch.tensor(context_lens, device=device), page_table.to(device)


def assert_same(rows: torch.Tensor, given: Tables, page_size: int) -> None:
    expected = reference.decode_rows(rows, *given, page_size)
    for seen, there in zip(decode_rows(rows, *given, page_size), expected, strict=True):
        assert seen.dtype == there.dtype
        assert torch.equal(seen, there)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [1, 16, 48])
@pytest.mark.parametrize("num_pages", [1, 7, 2500])
def test_rows_find_their_token_and_their_pages(device: str, page_size: int, num_pages: int) -> None:
    most = num_pages * page_size
    given = tables(
        [1, 7, 7, most, 7, min(page_size + 1, most), 7, 7, -(-most // 2)], num_pages, device
    )
    # The rows of a step are not in the order of the table; 0 is padding.
    assert_same(torch.tensor([3, 8, 0, 0, 5], device=device), given, page_size)


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_starts_at_its_last_token_and_pages_beyond_it_are_zero(device: str) -> None:
    last_token, context_len, page_table = tables([9, 34], 5, device)
    rows = torch.tensor([1], device=device)
    token_ids, positions, kv_index, context_lens, row_pages = decode_rows(
        rows, last_token, context_len, page_table, 16
    )
    assert (token_ids.item(), positions.item(), context_lens.item()) == (last_token[1], 33, 34)
    assert kv_index.item() == int(page_table[1, 2]) * 16 + 1
    assert torch.equal(row_pages[0, :3], page_table[1, :3])
    assert row_pages[0, 3:].tolist() == [0, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_the_rows_of_a_step_may_be_a_part_of_a_wider_buffer(device: str) -> None:
    buffer = torch.tensor([[0, 0, 0], [2, 1, 3]], device=device)
    assert_same(buffer[1, 1:], tables([5, 41, 18, 1], 6, device), 16)


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_without_rows_is_no_launch(device: str) -> None:
    given, rows = tables([1] * 4, 6, device), torch.empty(0, dtype=torch.int64, device=device)
    shapes = [tuple(result.shape) for result in decode_rows(rows, *given, 16)]
    assert shapes == [(0,), (0,), (0,), (0,), (0, 6)]
    advance_rows(rows, rows, rows, *given[:2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_padding", [0, 1, 200])
def test_rows_gain_their_tokens_and_padding_gains_none(device: str, num_padding: int) -> None:
    """A row may gain any number of tokens; a padding row may occur any number of times."""
    rows = torch.tensor([3, 1, 4] + [0] * num_padding, device=device)
    num_new = torch.tensor([1, 5, 2] + [0] * num_padding, device=device)
    token_ids = torch.arange(70, 70 + len(rows), device=device)
    results = []
    for run in (advance_rows, reference.advance_rows):
        last_token, context_len, _ = tables([1, 64, 9, 30, 7], 1, device)
        before = last_token.tolist()
        run(rows, num_new, token_ids, last_token, context_len)
        assert context_len.tolist() == [1, 69, 9, 31, 9]
        assert last_token.tolist() == [before[0], 71, before[2], 70, 72]
        results.append((last_token, context_len))
    assert all(torch.equal(*pair) for pair in zip(*results))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_padding", [0, 1, 200])
def test_drafts_are_right_up_to_the_first_that_the_model_does_not_say(
    device: str, num_padding: int
) -> None:
    """At every place, in rows with all, fewer and no drafts; padding gains nothing."""
    drafts = torch.tensor([[0] * 3, [11, 12, 13], [21, 22, 23], [31, 32, 33], [41, 42, 43]])
    rows = torch.tensor([3, 1, 4, 2] + [0] * num_padding, device=device)
    num_tokens = torch.tensor([4, 4, 2, 1] + [0] * num_padding, device=device)
    for wrong in range(4):
        said = [31, 32, 33, 34, 11, 12, 13, 14, 41, 42, 21]
        if wrong < 3:
            said[4 + wrong] = 99
        results = []
        for run in (accept_drafts, reference.accept_drafts):
            last_token, context_len, _ = tables([1, 64, 9, 30, 7], 1, device)
            before, accepted = last_token.tolist(), torch.full_like(last_token, 5)
            given = (torch.tensor(said, device=device), drafts.to(device))
            gained = run(rows, num_tokens, *given, last_token, context_len, accepted)
            assert gained.num_new.tolist() == [4, wrong + 1, 2, 1] + [0] * num_padding
            assert accepted.tolist() == [5, wrong, 0, 3, 1]
            assert context_len.tolist() == [1, 65 + wrong, 10, 34, 9]
            assert last_token.tolist() == [before[0], said[4 + wrong], 21, 34, 42]
            assert gained.for_host[0].tolist() == [4, *said[:4]]
            assert gained.for_host[2:, 1:].tolist()[:2] == [[41, 42, 0, 0], [21, 0, 0, 0]]
            assert gained.last_places.tolist() == [3, 4 + wrong, 9, 10] + [11] * num_padding
            assert gained.last_lens.tolist() == [33, 64 + wrong, 8, 9] + [1] * num_padding
            results.append((last_token, context_len, accepted, *gained))
        assert all(torch.equal(*pair) for pair in zip(*results))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("num_pages", [2, 2500])
def test_drafts_are_placed_in_pages_of_their_row_and_padding_in_none(
    device: str, width: int, num_pages: int
) -> None:
    page_size = 16
    most = num_pages * page_size
    lens = [1, 7, page_size, page_size + 1, most]
    _, context_len, page_table = tables(lens, num_pages, device)
    accepted = torch.tensor([0, 3, 1, 2, 0], device=device)
    # A full row has no room for a draft; 0 is padding.
    rows = torch.tensor([4, 2, 3, 1, 0, 0], device=device)
    num_tokens = torch.tensor([1, width, max(1, width - 1), 1, 0, 0], device=device)
    given = (rows, num_tokens, width, context_len, accepted, page_table, page_size)
    seen, expected = place_drafts(*given), reference.place_drafts(*given)
    for mine, there in zip(seen, expected, strict=True):
        assert mine.dtype == there.dtype
        assert torch.equal(mine, there)
    positions = seen.positions.view(len(rows), width)
    assert positions[1].tolist() == list(range(page_size - 1, page_size - 1 + width))
    assert not positions[0, 1:].any()
    assert not seen.kv_index.view(len(rows), width)[0, 1:].any()
    assert torch.equal(seen.by_place[0].t(), positions)
    assert seen.row_lens.tolist() == [lens[row] + width - 1 for row in rows.tolist()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_drafts_are_the_hosts_where_it_has_some(device: str, num_drafts: int) -> None:
    results = []
    for run in (draft_tokens, reference.draft_tokens):
        last_token = torch.tensor([5, 6, 7, 8], device=device)
        drafts = torch.arange(16, device=device).view(4, 4) + 100
        rows = torch.tensor([3, 1], device=device)
        given = torch.full((num_drafts, 2), -1, device=device)
        given[:, 1] = torch.arange(num_drafts, device=device)
        seen = run(rows, given, last_token, drafts).view(2, -1).tolist()
        assert seen[0] == [8, *range(112, 112 + num_drafts)]
        assert seen[1] == [6, *range(num_drafts)]
        assert drafts[1].tolist() == [*range(num_drafts), *range(104 + num_drafts, 108)]
        results.append(drafts)
    assert torch.equal(*results)


@pytest.mark.parametrize("device", DEVICES)
def test_measurements_force_how_many_drafts_are_taken(device: str) -> None:
    """This many of the existing drafts; a row without a forced number compares as always."""
    drafts = torch.tensor([[0] * 3, [11, 12, 13], [21, 22, 23], [31, 32, 33]], device=device)
    rows = torch.tensor([3, 1, 2, 0], device=device)
    num_tokens = torch.tensor([4, 2, 4, 0], device=device)
    said = torch.tensor([70, 71, 72, 73, 74, 75, 0, 0, 21, 99, 0, 0, 0, 0, 0, 0], device=device)
    forced = torch.tensor([2, 3, -1, 2], device=device)
    results = []
    for run in (accept_drafts, reference.accept_drafts):
        last_token, context_len, _ = tables([1, 64, 9, 30], 1, device)
        accepted = torch.zeros_like(last_token)
        state = (last_token, context_len, accepted)
        gained = run(rows, num_tokens, said, drafts, *state, forced, 4)
        assert gained.num_new.tolist() == [3, 2, 2, 0]
        assert gained.last_places.tolist() == [2, 5, 9, 12]
        assert gained.last_lens.tolist() == [32, 65, 10, 1]
        assert accepted.tolist() == [0, 1, 1, 2]
        assert context_len.tolist() == [1, 66, 11, 33]
        assert last_token[1:].tolist() == [75, 99, 72]
        results.append((*state, *gained))
    assert all(torch.equal(*pair) for pair in zip(*results))
