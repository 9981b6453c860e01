"""The C++ attention for rows of a few tokens against the reference ops."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.ops.cpu import attention, library
from penstock.ops.reference.attention import paged_attention, rope_and_store
from penstock.ops.reference.rope import rope_table
from penstock.ops.reference.rows import TokenBlocks

pytestmark = pytest.mark.skipif(library._compiler() is None, reason="no C++ compiler here")
NUM_PAGES, PAGE = 24, 16
NO_BLOCKS = TokenBlocks.of([], "cpu")


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.bitwise
@pytest.mark.parametrize(
    ("Hq", "Hkv", "D", "half", "is_interleaved"),
    [
        (12, 2, 128, 64, False),
        (9, 1, 32, 4, False),
        (6, 2, 16, 8, True),
        (3, 3, 48, 20, False),
    ],
)
@pytest.mark.parametrize("T", [1, 4])
def test_tokens_are_turned_stored_and_attend_as_the_references_say(
    Hq: int,
    Hkv: int,
    D: int,
    half: int,
    is_interleaved: bool,
    T: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = (Hq * D, Hq * D, Hkv * D, Hkv * D)
    q, gate, k, v = randn(T, sum(sizes), seed=0).split_with_sizes(sizes, dim=-1)
    heads = q.unflatten(-1, (Hq, D)), k.unflatten(-1, (Hkv, D)), v.unflatten(-1, (Hkv, D))
    rope = rope_table(torch.rand(half, generator=torch.Generator().manual_seed(3)), 400)
    places = 5 * PAGE + 3 + torch.arange(T)
    pages = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(6)).int()

    def run(length: int, window: int, is_gated: bool) -> tuple[Tensor, ...]:
        keys, values = (randn(NUM_PAGES, PAGE, Hkv, D, seed=seed) for seed in (4, 5))
        lengths = length - T + 1 + torch.arange(T)
        given = (rope, lengths - 1, places, keys, values)
        turned = rope_and_store(*heads, None, None, 1e-6, *given, is_interleaved)
        spans: list[Any] = [
            SimpleNamespace(num_tokens=1, context_len=int(own), is_decode=True) for own in lengths
        ]
        rows = (pages.expand(T, -1), torch.arange(T + 1), lengths, spans, NO_BLOCKS)
        gates = (gate,) if is_gated else ()
        attended = paged_attention(turned, keys, values, *rows, D**-0.5, window, *gates)
        return turned, keys, values, attended

    cases = ((T, 0, False), (77, 0, True), (384, 0, False), (384, 50, True))
    seen = [run(*case) for case in cases]
    monkeypatch.setattr(attention, "can_rotate", lambda *_: False)
    monkeypatch.setattr(attention, "can_attend", lambda *_: False)
    for case, found in zip(cases, seen, strict=True):
        *stored, attended = run(*case)
        assert all(torch.equal(one, other) for one, other in zip(found, stored, strict=False))
        torch.testing.assert_close(found[-1], attended, rtol=1e-5, atol=5e-6)


@pytest.mark.bitwise
def test_heads_are_normed_before_they_are_turned_and_alone_as_among_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, v = randn(5, 6, 64, seed=0), randn(5, 2, 64, seed=1), randn(5, 2, 64, seed=2)
    norms = randn(64, seed=3) + 1, randn(64, seed=4) + 1
    rope = rope_table(torch.rand(16, generator=torch.Generator().manual_seed(3)), 400)
    where = torch.arange(5)

    def run(some: slice) -> tuple[Tensor, Tensor]:
        keys, values = torch.zeros(1, PAGE, 2, 64), torch.zeros(1, PAGE, 2, 64)
        given = (rope, where[some], where[some], keys, values)
        return rope_and_store(q[some], k[some], v[some], *norms, 1e-6, *given), keys[0, some]

    turned, keys = run(slice(5))
    for place in range(5):
        alone, key = run(slice(place, place + 1))
        assert torch.equal(alone[0], turned[place])
        assert torch.equal(key[0], keys[place])
    monkeypatch.setattr(attention, "can_rotate", lambda *_: False)
    torch.testing.assert_close((turned, keys), run(slice(5)), rtol=1e-5, atol=2e-6)


@pytest.mark.bitwise
@pytest.mark.parametrize("window", [0, 50, 300])
@pytest.mark.parametrize(("Hq", "Hkv", "D"), [(12, 2, 128), (9, 1, 16), (3, 3, 48)])
def test_rows_of_any_lengths_attend_as_the_reference_does_and_as_alone(
    Hq: int, Hkv: int, D: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, lengths = (1, 3, 1, 2, 1, 4, 1), (1, 256, 257, 513, 600, 259, 40)  # a segment is 256
    num_pages = 600 // PAGE + 2
    keys, values = (randn(7 * num_pages, PAGE, Hkv, D, seed=seed) for seed in (4, 5))
    order = torch.randperm(7 * num_pages, generator=torch.Generator().manual_seed(6)).int()
    table = order.view(7, -1)
    for row, length in enumerate(lengths):  # what no row may read
        end = table[row, length // PAGE].item()
        for cache in (keys, values):
            cache[end, length % PAGE :] = torch.nan
            cache[table[row, length // PAGE + 1 :]] = torch.nan
    q, gate = randn(sum(counts), Hq, D, seed=0), randn(sum(counts), Hq * D, seed=1)
    starts = torch.tensor((0, *counts)).cumsum(0)

    def run(rows: slice, is_decode: bool = True) -> Tensor:
        tokens = slice(int(starts[rows.start]), int(starts[rows.stop]))
        spans: list[Any] = [
            SimpleNamespace(num_tokens=count, context_len=length, is_decode=is_decode)
            for count, length in zip(counts[rows], lengths[rows])
        ]
        given = (table[rows], starts[rows.start : rows.stop + 1], torch.tensor(lengths[rows]))
        own = q[tokens], keys, values, *given, spans, NO_BLOCKS, D**-0.5, window, gate[tokens]
        attended = paged_attention(*own)
        assert isinstance(attended, Tensor)
        return attended

    together = run(slice(0, 7))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    alone = torch.cat([run(slice(row, row + 1)) for row in range(7)])
    torch.set_num_threads(num_threads)
    assert torch.equal(together, alone)
    monkeypatch.setattr(attention, "can_attend", lambda *_: False)
    torch.testing.assert_close(together, run(slice(0, 7), is_decode=False), rtol=1e-5, atol=5e-6)


def test_tensors_on_another_device_are_not_read_as_if_they_lay_in_memory() -> None:
    q, k = torch.empty(1, 2, 32, device="meta"), torch.empty(1, 1, 32, device="meta")
    cache = torch.empty(1, 64, 1, 32, device="meta")
    assert not attention.can_rotate(q, k, k, cache)
    assert not attention.can_attend(q, cache, torch.empty(1, dtype=torch.int32, device="meta"))
