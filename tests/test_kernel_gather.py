"""The kernel that takes rows of a table copies exactly those that its reference does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernel_checks import INTERPRETED, ON_GPU, random
from penstock.ops.reference import gather as reference
from penstock.ops.triton import gather

DEVICES = [
    pytest.param("cpu", marks=INTERPRETED, id="interpreted"),
    pytest.param("cuda", marks=ON_GPU, id="compiled"),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
VOCAB = 50


@pytest.fixture(autouse=True)
def results_start_as_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*shape: int, **given: Any) -> torch.Tensor:
        return torch.full(shape, torch.nan, **given)

    monkeypatch.setattr(torch, "empty", empty)


def ids_of(num_tokens: int, device: str) -> torch.Tensor:
    """The last token, the first, the last again and the others; then all of them once more."""
    order = [VOCAB - 1, 0, VOCAB - 1, *range(1, VOCAB - 1)]
    return torch.tensor([order[n % len(order)] for n in range(num_tokens)], device=device)


def assert_same(token_ids: torch.Tensor, table: torch.Tensor) -> None:
    seen = gather.take_rows(token_ids, table)
    assert seen.dtype == table.dtype
    assert torch.equal(seen, reference.take_rows(token_ids, table))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 3, 65])
@pytest.mark.parametrize("hidden_size", [1, 77, 1024, 1501])
def test_tokens_get_their_rows(
    device: str, dtype: torch.dtype, num_tokens: int, hidden_size: int
) -> None:
    table = random(VOCAB, hidden_size, dtype=dtype, device=device)
    assert_same(ids_of(num_tokens, device), table)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_and_tokens_may_be_parts_of_something_else(device: str) -> None:
    wide = torch.full((VOCAB, 100), torch.nan, device=device)
    wide[:, 3:80] = random(VOCAB, 77, dtype=torch.float32, device=device)
    buffer = torch.stack((ids_of(9, device), torch.full((9,), 1 << 40, device=device)), dim=1)
    assert_same(buffer[1:, 0], wide[:, 3:80])


@pytest.mark.parametrize("device", DEVICES)
def test_no_tokens_are_no_launch(device: str) -> None:
    table, none = random(VOCAB, 77, dtype=torch.float32, device=device), ids_of(0, device).long()
    assert gather.take_rows(none, table).shape == (0, 77)
    assert [out.shape for out in gather.take_rows_of_each(none, [table])] == [(0, 77)]
    gather.put_rows(none, table[:0], table)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("widths", [(1501,), (1, 77), (77, 1501, 1), (1024, 2048, 3000)])
@pytest.mark.parametrize("num_tokens", [1, 65])
def test_tokens_get_their_rows_of_each_table(
    device: str, num_tokens: int, widths: tuple[int, ...]
) -> None:
    wide = [random(VOCAB, n + 5, dtype=torch.bfloat16, device=device, seed=n) for n in widths]
    tables = [table[:, 2 : 2 + n] for table, n in zip(wide, widths)]
    ids = ids_of(num_tokens, device)
    outs = gather.take_rows_of_each(ids, tables)
    for out, expected in zip(outs, reference.take_rows_of_each(ids, tables), strict=True):
        assert out.is_contiguous()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 77, 1501])
def test_rows_are_put_where_they_belong(device: str, dtype: torch.dtype, width: int) -> None:
    """Padding occurs more than once, always with the same row."""
    ids = torch.tensor([[VOCAB - 1, 0], [3, 0], [0, 0], [7, 0], [7, 0]], device=device)[:, 0]
    rows = random(5, width + 3, dtype=dtype, device=device)[:, 1 : width + 1]
    rows[4] = rows[3]
    tables = [torch.zeros(VOCAB, width, dtype=dtype, device=device) for _ in range(2)]
    gather.put_rows(ids, rows, tables[0])
    reference.put_rows(ids, rows, tables[1])
    assert torch.equal(*tables)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU, id="compiled")])
@pytest.mark.parametrize("num_tokens", [1, 64, 8192])
def test_tokens_get_their_rows_at_full_size(device: str, num_tokens: int) -> None:
    """In a table of more than 2**31 elements."""
    table = torch.zeros(1_050_000, 2048, dtype=torch.bfloat16, device=device)
    table[-VOCAB:] = random(VOCAB, 2048, dtype=table.dtype, device=device)
    assert_same(ids_of(num_tokens, device) + len(table) - VOCAB, table)
