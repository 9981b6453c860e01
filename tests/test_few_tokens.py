"""The C++ layers for a few tokens against the reference ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock import ops
from penstock.layers.inputs import RowSpan
from penstock.ops import Journal, Replay, Weight
from penstock.ops.cpu import decode, few_tokens, library

pytestmark = pytest.mark.skipif(library._compiler() is None, reason="no C++ compiler here")
EPS = 1e-6


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def without_kernels(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(few_tokens, "are_few", lambda x, deterministic: False)


@pytest.mark.parametrize("T", [1, 2, 5, 16])
@pytest.mark.parametrize("N", [1, 7, 64])
def test_products_with_all_that_belongs_to_them(T: int, N: int) -> None:
    x, weight, bias, residual = randn(T, 48) * 3, randn(N, 48), randn(N), randn(T, N, seed=1)
    norm = randn(48, seed=2) + 1
    assert few_tokens.are_few(x, deterministic=False)
    assert not few_tokens.are_few(x, deterministic=True)
    plain = few_tokens.linear(x, weight, residual=residual)
    torch.testing.assert_close(plain, F.linear(x, weight) + residual, rtol=1e-5, atol=2e-5)
    normed = F.rms_norm(x, (48,), norm, EPS)
    fused = few_tokens.linear(x, weight, bias, norm=norm, eps=EPS)
    torch.testing.assert_close(fused, F.linear(normed, weight, bias), rtol=1e-5, atol=2e-5)


@pytest.mark.bitwise
def test_a_token_has_the_same_bits_among_any_others() -> None:
    x, weight, norm = randn(16, 64), randn(33, 64), randn(64) + 1
    whole = few_tokens.linear(x, weight, norm=norm, eps=EPS)
    for begin, end in ((0, 1), (3, 8), (15, 16)):
        some = few_tokens.linear(x[begin:end], weight, norm=norm, eps=EPS)
        assert torch.equal(some, whole[begin:end])


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize("T", [1, 3, 16])
def test_experts(
    T: int, has_shared: bool, normalize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, norm, router = randn(T, 48) * 2, randn(48) + 1, Weight(randn(10, 48))
    gate_up, down = Weight(randn(10, 64, 48) / 5), Weight(randn(10, 48, 32) / 5)
    shared = tuple(map(Weight, (randn(1, 48), randn(32, 48) / 5, randn(48, 16) / 4)))
    given = shared if has_shared else (None, None, None)

    def run() -> list[Tensor]:
        normed, weights, ids, weight = ops.norm_route(
            hidden, norm, EPS, router, 3, normalize, given[0]
        )
        out = ops.sparse_mlp(normed, weights, ids, gate_up, down, hidden, weight, *given[1:])
        return [normed, weights, ids.float(), out]

    found = run()
    without_kernels(monkeypatch)
    torch.testing.assert_close(found, run(), rtol=1e-5, atol=5e-6)


@pytest.mark.bitwise
@pytest.mark.parametrize("T", [1, 5])
def test_weights_in_bf16_give_the_same_bits(T: int) -> None:
    """The values are the same in half the bytes; other weights have no such copy."""
    hidden, norm = randn(T, 48), randn(48) + 1
    router = Weight(randn(10, 48).bfloat16().float())
    stacks = (randn(10, 64, 48), randn(10, 48, 32), randn(32, 48), randn(48, 16))
    stored = [Weight((one / 5).bfloat16().float()) for one in stacks]
    gate_up, down, shared_gate_up, shared_down = stored

    def run() -> list[Tensor]:
        normed, weights, ids, shared = ops.norm_route(
            hidden, norm, EPS, router, 3, True, Weight(norm[None])
        )
        given = (normed, weights, ids, gate_up, down, hidden, shared)
        return [
            ops.sparse_mlp(*given, shared_gate_up, shared_down),
            ops.norm_linear(hidden, norm, EPS, shared_gate_up, out_dtype=torch.float32),
            ops.linear(hidden, shared_gate_up, residual=randn(T, 32)),
        ]

    plain = run()
    for weight in stored:
        weight.shorten()
        assert weight.short is not None
    for found, expected in zip(run(), plain, strict=True):
        assert torch.equal(found, expected)
    inexact = Weight(randn(8, 48))
    inexact.shorten()
    assert inexact.short is None


class Row:
    """One sequence in a mixer: steps with one token and its drafts."""

    heads = (2, 6, 16, 32)  # key heads, value heads, their dimensions

    def __init__(self, num_drafts: int) -> None:
        key_heads, value_heads, key_dim, value_dim = self.heads
        self.channels = 2 * key_heads * key_dim + value_heads * value_dim
        self.weights = (
            randn(4, self.channels) / 2,
            randn(value_heads),
            randn(value_heads, seed=1),
            randn(value_dim) + 1,
        )
        self.width = self.channels + value_heads * value_dim + 2 * value_heads
        self.conv = randn(5, 4 + num_drafts, self.channels, seed=3)
        self.recurrent = randn(5, value_heads, key_dim, value_dim, seed=4)
        shape = (2, num_drafts, value_heads)
        self.journal = Journal(
            torch.zeros(*shape, key_dim),
            torch.zeros(*shape, value_dim),
            torch.zeros(2, num_drafts, 3, value_heads),
        )

    def step(
        self,
        mixed: Tensor,
        start: int,
        initial: int,
        replayed: tuple[int, ...] = (1, 0, 0, 0),
        *,
        is_prompt: bool = False,
    ) -> Tensor:
        num_drafts = 0 if is_prompt else len(mixed) - 1
        spans = [
            RowSpan(len(mixed), start + len(mixed), is_prompt=is_prompt, num_drafts=num_drafts)
        ]
        return ops.gated_delta_net(
            mixed,
            *self.weights,
            EPS,
            self.conv,
            self.recurrent,
            torch.tensor([0, len(mixed)]),
            torch.tensor([start + len(mixed)]),
            torch.tensor([1]),
            torch.tensor([initial]),
            spans,
            ops.TokenBlocks.of(spans, "cpu"),
            self.heads[0],
            self.journal,
            Replay(*(torch.tensor([number]) for number in replayed)),
        )


@pytest.mark.parametrize("first", [0, 2, 70])
@pytest.mark.parametrize("form", ["torch", "reference"])
def test_a_mixer_replays_drafts_and_keeps_states(
    first: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with and without drafts, of which none, some or all are right; a state is kept where a
    replay passes a page boundary.
    """

    def run() -> list[Any]:
        row = Row(num_drafts=3)
        seen: list[Any] = []
        start, accepted = first, 0
        # Tokens, and accepted drafts.
        steps = ((4, 2), (3, 0), (1, 0), (4, 3), (2, 1), (1, 0))
        for number, (num_tokens, num_right) in enumerate(steps):
            mixed = randn(num_tokens, row.width, seed=number)
            keep = (start - 1, 3) if accepted else (0, 0)
            initial = 1 if number or not first else 2  # it starts empty, or from another slot
            seen.append(row.step(mixed, start, initial, (1, accepted, *keep)))
            seen += [row.recurrent[1].clone(), row.conv[1].clone(), row.recurrent[3].clone()]
            start, accepted = start + 1 + num_right, num_right
        seen.append([part[1] for part in row.journal])
        return seen

    found = run()
    without_kernels(monkeypatch)
    if form == "reference":
        monkeypatch.setattr(decode, "is_alone", lambda x, deterministic: False)
        monkeypatch.setattr(decode, "may_be_drafts", lambda x, deterministic: False)
    torch.testing.assert_close(found, run(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("first", [0, 2, 70])
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 16])
def test_a_short_prompt_is_certain(
    num_tokens: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state is that of its last token, and its inputs overfill the ring."""

    def run() -> list[Tensor]:
        row = Row(num_drafts=0)
        mixed = randn(num_tokens, row.width)
        out = row.step(mixed, first, 1, is_prompt=True)
        decoded = row.step(randn(1, row.width, seed=5), first + num_tokens, 1)
        return [out, decoded, row.recurrent[1], row.conv[1]]

    found = run()
    without_kernels(monkeypatch)
    torch.testing.assert_close(found, run(), rtol=1e-4, atol=2e-5)


# Tokens, tokens before, state slot, initial slot, accepted drafts, whether it is a prompt
ROWS_OF_A_STEP = [
    (1, 70, 1, 1, 0, False),
    (3, 9, 2, 2, 1, False),
    (5, 0, 3, 3, 0, True),
    (16, 8, 4, 7, 0, True),
    (1, 0, 5, 5, 0, False),
]


def mix_rows(places: list[int], rows: list[tuple[Any, ...]]) -> tuple[list[Tensor], list[Tensor]]:
    """A step of these rows, `places` among all: the output of each, and what is stored after it."""
    model = Row(num_drafts=2)
    slots = (randn(8, 6, model.channels, seed=3), randn(8, 6, 16, 32, seed=4))
    sizes = (5, 2, 6)  # rows, drafts, heads
    journal = Journal(
        randn(*sizes, 16, seed=5), randn(*sizes, 32, seed=6), -randn(*sizes[:2], 3, 6).abs()
    )
    given = [randn(row[0], model.width, seed=place) for place, row in zip(places, rows)]
    spans, columns = [], zip(*rows)
    for num_tokens, start, _, _, _, is_prompt in rows:
        num_drafts = 0 if is_prompt else num_tokens - 1
        end = start + num_tokens
        spans.append(RowSpan(num_tokens, end, is_prompt=is_prompt, num_drafts=num_drafts))
    counts, starts, state, initial, accepted, _ = (torch.tensor(column) for column in columns)
    none = torch.zeros(len(rows), dtype=torch.int64)
    out = ops.gated_delta_net(
        torch.cat(given),
        *model.weights,
        EPS,
        *slots,
        torch.cat([none[:1], counts.cumsum(0)]),
        starts + counts,
        state,
        initial,
        spans,
        ops.TokenBlocks.of(spans, "cpu"),
        Row.heads[0],
        journal,
        Replay(torch.tensor(places), accepted, none, none),
    )
    return list(out.split_with_sizes(counts.tolist())), [*slots, *journal]


def test_rows_of_a_step_are_each_what_they_are_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes with and without drafts beside short prompts, from empty and other states."""
    places = list(range(len(ROWS_OF_A_STEP)))
    together, stored = mix_rows(places, ROWS_OF_A_STEP)
    for place, row in enumerate(ROWS_OF_A_STEP):
        alone, own = mix_rows([place], [row])
        assert torch.equal(alone[0], together[place])
        slot = row[2]
        assert all(torch.equal(own[part][slot], stored[part][slot]) for part in range(2))
        assert all(torch.equal(own[part][place], stored[part][place]) for part in range(2, 5))
    without_kernels(monkeypatch)
    torch.testing.assert_close(
        (together, stored), mix_rows(places, ROWS_OF_A_STEP), rtol=1e-4, atol=2e-5
    )


def test_a_row_that_starts_from_another_s_state_reads_it_before_that_step() -> None:
    rows = [(1, 70, 1, 1, 0, False), (1, 70, 2, 1, 0, False)]
    together, stored = mix_rows([0, 1], rows)
    (alone,), own = mix_rows([1], rows[1:])
    torch.testing.assert_close(together[1], alone, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(stored[1][2], own[1][2], rtol=1e-4, atol=2e-5)
