"""Laws of the head of a decode step: the kernel gathers exactly what the reference gathers."""

from __future__ import annotations

import pytest
import torch

from kernel_checks import INTERPRETED, ON_GPU
from penstock.ops.reference.decode_rows import decode_rows as reference
from penstock.ops.triton.decode_rows import decode_rows

DEVICES = [
    pytest.param("cpu", marks=INTERPRETED, id="interpreted"),
    pytest.param("cuda", marks=ON_GPU, id="compiled"),
]


def tables(num_rows: int, num_pages: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows + num_pages)
    last_token = torch.randint(0, 250_000, (num_rows,), generator=generator)
    page_table = torch.randint(
        1, 2**31 - 1, (num_rows, num_pages), generator=generator, dtype=torch.int32
    )
    return last_token.to(device), page_table.to(device)


def assert_same(
    packed: torch.Tensor, last_token: torch.Tensor, pages: torch.Tensor, page_size: int
) -> None:
    for seen, expected in zip(
        decode_rows(packed, last_token, pages, page_size),
        reference(packed, last_token, pages, page_size),
    ):
        assert seen.dtype == expected.dtype
        assert torch.equal(seen, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [1, 16, 48])
@pytest.mark.parametrize("num_pages", [1, 7, 2500])
def test_rows_find_their_token_and_their_pages(device: str, page_size: int, num_pages: int) -> None:
    last_token, page_table = tables(9, num_pages, device)
    last = num_pages * page_size - 1
    packed = torch.tensor(
        [
            [3, 8, 0, 0, 5],  # the order of a step is not that of the table; 0 pads it
            [last, last // 2, 0, 0, min(page_size, last)],
            [1, 2, 0, 0, 4],
            [1, 2, 0, 0, 6],
        ]
    )
    assert_same(packed.to(device), last_token, page_table, page_size)


@pytest.mark.parametrize("device", DEVICES)
def test_pages_beyond_the_position_are_zero(device: str) -> None:
    last_token, page_table = tables(2, 5, device)
    packed = torch.tensor([[1], [33], [0], [0]], device=device)
    *_, row_pages = decode_rows(packed, last_token, page_table, 16)
    assert torch.equal(row_pages[0, :3], page_table[1, :3])
    assert row_pages[0, 3:].tolist() == [0, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_the_integers_of_a_step_may_be_a_part_of_a_wider_buffer(device: str) -> None:
    last_token, page_table = tables(4, 6, device)
    buffer = torch.tensor([[2, 1, 3], [17, 40, 0], [1, 2, 3], [1, 2, 3]], device=device)
    assert_same(buffer[:, :2], last_token, page_table, 16)


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_without_rows_is_no_launch(device: str) -> None:
    last_token, page_table = tables(4, 6, device)
    shapes = [
        tuple(t.shape)
        for t in decode_rows(
            torch.empty(4, 0, dtype=torch.int64, device=device), last_token, page_table, 16
        )
    ]
    assert shapes == [(0,), (0,), (0,), (0, 6)]
