"""Attention of one token in C++ against the ops' own references."""

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
def test_a_token_is_turned_stored_and_attends_as_the_references_say(
    Hq: int,
    Hkv: int,
    D: int,
    half: int,
    is_interleaved: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = randn(1, (Hq + 2 * Hkv) * D, seed=0)
    q, k, v = row.split_with_sizes((Hq * D, Hkv * D, Hkv * D), dim=-1)
    heads = q.unflatten(-1, (Hq, D)), k.unflatten(-1, (Hkv, D)), v.unflatten(-1, (Hkv, D))
    rope = rope_table(torch.rand(half, generator=torch.Generator().manual_seed(3)), 400)
    place = torch.tensor([5 * PAGE + 3])
    pages = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(6)).int()[None]

    def run(length: int, window: int) -> tuple[Tensor, ...]:
        keys, values = (randn(NUM_PAGES, PAGE, Hkv, D, seed=seed) for seed in (4, 5))
        given = (rope, torch.tensor([length - 1]), place, keys, values, is_interleaved)
        turned = rope_and_store(*heads, None, None, 1e-6, *given)
        spans: list[Any] = [SimpleNamespace(num_tokens=1, context_len=length)]
        rows = (pages, torch.tensor([0, 1]), torch.tensor([length]), spans, NO_BLOCKS)
        attended = paged_attention(turned, keys, values, *rows, D**-0.5, window)
        return turned, keys, values, attended

    cases = ((1, 0), (77, 0), (384, 0), (384, 50))
    seen = [run(*case) for case in cases]
    monkeypatch.setattr(attention, "is_better", lambda *_: False)
    for case, found in zip(cases, seen, strict=True):
        *stored, attended = run(*case)
        assert all(torch.equal(one, other) for one, other in zip(found, stored, strict=False))
        torch.testing.assert_close(found[-1], attended, rtol=1e-5, atol=5e-6)


def test_tensors_on_another_device_are_not_read_as_if_they_lay_in_memory() -> None:
    q, k = torch.empty(1, 2, 32, device="meta"), torch.empty(1, 1, 32, device="meta")
    assert not attention.is_better(q, k, torch.empty(1, 64, 1, 32, device="meta"))
