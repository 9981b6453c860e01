"""The reference ops against independent definitions: torch's own, or a float64 loop over tokens.

Dimensions are unequal and lengths odd; unwritten cache memory is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock import ops
from penstock.layers.inputs import RowSpan
from penstock.ops.cpu import decode, few_tokens
from penstock.ops.reference import activation, matmul
from penstock.ops.reference.moe import run_experts_gathered, run_experts_grouped
from penstock.ops.weight import Weight
from qwen3_5_float64 import delta_rule_by_token

LENGTHS = (1, 2, 3, 63, 64, 65, 200)
EPS = 1e-6


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def assert_close(ours: Tensor, exact: Tensor, tolerance: float = 2e-6) -> None:
    error = (ours.double() - exact.double()).abs().max() / exact.abs().max()
    assert error <= tolerance, f"{error:.2e} of the largest value"


def take_plain_forms(patch: pytest.MonkeyPatch) -> None:
    """Makes the paths for a single token and for a few take the path for many."""
    patch.setattr(few_tokens, "are_few", lambda x, deterministic: False)
    patch.setattr(decode, "is_alone", lambda x, deterministic: False)
    patch.setattr(decode, "are_few", lambda x, deterministic: False)
    patch.setattr(decode, "may_be_drafts", lambda x, deterministic: False)


def assert_one_token_is_like_many(
    run: Callable[[], Sequence[Tensor]], patch: pytest.MonkeyPatch
) -> None:
    alone = run()
    take_plain_forms(patch)
    torch.testing.assert_close(alone, run(), rtol=1e-5, atol=2e-6)


@pytest.mark.bitwise
@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (activation.sigmoid, torch.sigmoid),
        (activation.silu, F.silu),
        (activation.softplus, F.softplus),
    ],
)
def test_activations_are_exact_and_the_same_at_every_place(
    ours: Callable[[Tensor, bool], Tensor], torchs: Callable[[Tensor], Tensor]
) -> None:
    x = torch.cat((randn(5000) * 4, torch.tensor([-200.0, -90.0, 0.0, 20.0, 21.0, 90.0, 200.0])))
    exact = torchs(x.double()).float()
    torch.testing.assert_close(ours(x, True), exact, rtol=3e-7, atol=1e-37)
    torch.testing.assert_close(ours(x, False), exact, rtol=1e-6, atol=1e-8)
    for size in (1, 7, 33):
        assert torch.equal(
            torch.cat([ours(part.clone(), True) for part in x.split(size)]), ours(x, True)
        )


@pytest.mark.bitwise
def test_rms_norms() -> None:
    x, gate, weight = randn(5, 3, 24), randn(5, 3, 24, seed=1), randn(24) + 1
    exact = F.rms_norm(x.double(), (24,), weight.double(), EPS)
    assert_close(ops.rms_norm(x, weight, EPS), exact)
    assert_close(ops.gated_rms_norm(x, gate, weight, EPS), exact * F.silu(gate.double()))
    half = ops.rms_norm(x.bfloat16(), weight, EPS)
    assert torch.equal(half, ops.rms_norm(x.bfloat16().float(), weight, EPS).bfloat16())


def test_matmuls_are_torchs_with_what_belongs_to_them() -> None:
    x, weight, bias, residual = randn(37, 40), randn(56, 40), randn(56), randn(37, 56)
    for deterministic in (False, True):
        given: dict[str, Any] = {"deterministic": deterministic}
        assert_close(
            ops.linear(x, Weight(weight), bias, residual, **given), x @ weight.T + bias + residual
        )
        norm = randn(40) + 1
        exact = F.rms_norm(x, (40,), norm, EPS) @ weight.T + bias
        assert_close(ops.norm_linear(x, norm, EPS, Weight(weight), bias, **given), exact)
        wide = ops.norm_linear(x, norm, EPS, Weight(weight), bias, out_dtype=torch.float64, **given)
        assert_close(wide, exact)
        gate, up = x.chunk(2, dim=-1)
        exact = (F.silu(gate) * up) @ weight[:, :20].T + residual
        assert_close(ops.swiglu_linear(x, Weight(weight[:, :20]), residual, **given), exact)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_wider_result_is_not_rounded_on_its_way(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.ops.reference.matmul.WIDENED_ELEMENTS", 40 * 25)  # three parts
    x, weight, norm = randn(5, 40).bfloat16(), randn(56, 40).bfloat16(), randn(40) + 1
    exact = ops.rms_norm(x, norm, EPS).double() @ weight.double().T
    kept, given = Weight(weight), {"deterministic": deterministic}
    ours = ops.norm_linear(x, norm, EPS, kept, out_dtype=torch.float32, **given)
    assert ours.dtype == torch.float32
    assert_close(ours, exact, 1e-6)
    narrow = ops.norm_linear(x, norm, EPS, kept, **given)
    assert narrow.dtype == torch.bfloat16
    assert_close(narrow, ours, 2**-8)


@pytest.mark.bitwise
def test_deterministic_matmul_gives_a_row_the_same_bits_in_any_batch() -> None:
    x, weight, norm = randn(70, 96), Weight(randn(200, 96)), randn(96) + 1
    whole = ops.norm_linear(x, norm, EPS, weight, deterministic=True)
    for begin, end in (*((row, row + 1) for row in range(70)), (3, 20), (10, 70)):
        part = ops.norm_linear(x[begin:end], norm, EPS, weight, deterministic=True)
        assert torch.equal(part, whole[begin:end])


def test_deterministic_matmul_keeps_its_bits_with_a_blas_that_rounds_by_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As OpenBLAS does with AVX2: here every other row of a tile is summed in reverse order."""
    multiply = F.linear

    def multiply_by_place(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out, reversed_out = multiply(x, weight, bias), multiply(x.flip(-1), weight.flip(-1), bias)
        out[1::2] = reversed_out[1::2]
        return out

    x, weight = randn(20, 96), randn(200, 96)
    assert not torch.equal(multiply_by_place(x, weight)[1:], multiply_by_place(x[1:], weight))
    monkeypatch.setattr(F, "linear", multiply_by_place)
    matmul._tile_height.cache_clear()
    try:
        kept, parts = Weight(weight), ((0, 1), (1, 9), (9, 20))
        whole = ops.linear(x, kept, deterministic=True)
        alone = [ops.linear(x[begin:end], kept, deterministic=True) for begin, end in parts]
    finally:
        matmul._tile_height.cache_clear()
    assert torch.equal(torch.cat(alone), whole)
    assert_close(whole, x.double() @ weight.double().T)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_turns_pairs_by_their_angle_and_passes_the_rest(interleaved: bool) -> None:
    head_dim, rotary, positions = 20, 12, torch.tensor([0, 5, 63, 3])
    inv_freq = 1 / 100.0 ** (torch.arange(6) / 6)
    x, values = randn(4, 2, head_dim), randn(4, 2, head_dim, seed=1)
    keys_cache, values_cache = (torch.full((2, 4, 2, head_dim), torch.nan) for _ in range(2))
    kv_index = torch.tensor([6, 0, 3, 7])
    rope = ops.rope_table(inv_freq, 64, scale=0.5)
    turned = ops.rope_and_store(
        x,
        x,
        values,
        None,
        None,
        EPS,
        rope,
        positions,
        kv_index,
        keys_cache,
        values_cache,
        interleaved,
    )
    pairs = x[..., :rotary].unflatten(-1, (6, 2) if interleaved else (2, 6))
    pairs = pairs if interleaved else pairs.transpose(-1, -2)
    angles = positions[:, None, None] * inv_freq
    exact = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.tensor(0.5), angles)
    )
    exact = exact.flatten(-2) if interleaved else exact.transpose(-1, -2).flatten(-2)
    assert_close(turned, torch.cat((exact, x[..., rotary:]), dim=-1))
    assert torch.equal(keys_cache.flatten(0, 1)[kv_index], turned)
    assert torch.equal(values_cache.flatten(0, 1)[kv_index], values)
    assert int(keys_cache.isnan().all(-1).sum()) == 8  # two heads of four unwritten entries


def test_rope_and_store_norms_the_heads_first() -> None:
    q, k, caches = randn(3, 4, 16), randn(3, 2, 16), torch.zeros(2, 1, 4, 2, 16)
    q_norm, k_norm, rope = randn(16) + 1, randn(16, seed=1) + 1, ops.rope_table(torch.ones(4), 8)
    where = torch.arange(3)
    ours = ops.rope_and_store(
        q, k, k, q_norm, k_norm, EPS, rope, where, where, caches[0], caches[1]
    )
    normed = (ops.rms_norm(q, q_norm, EPS), ops.rms_norm(k, k_norm, EPS))
    keys = torch.zeros_like(caches)
    plain = ops.rope_and_store(
        normed[0], normed[1], k, None, None, EPS, rope, where, where, keys[0], keys[1]
    )
    assert_close(ours, plain)
    assert_close(caches[0], keys[0])


class Paged:
    """Rows of random queries over their own pages, shuffled by default; all other pages are NaN."""

    def __init__(
        self, rows: list[tuple[int, int]], page_size: int, seed: int = 0, in_order: bool = False
    ) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = 6, 2, 20
        self.spans = tuple(RowSpan(num_tokens, context_len) for num_tokens, context_len in rows)
        generator = torch.Generator().manual_seed(seed)
        num_pages = [-(-context_len // page_size) for _, context_len in rows]
        order = torch.randperm(sum(num_pages), generator=generator) + 1
        order = order.sort().values if in_order else order
        shape = (sum(num_pages) + 1, page_size, self.num_kv_heads, self.head_dim)
        self.keys, self.values = (torch.full(shape, torch.nan) for _ in range(2))
        self.page_table = torch.zeros(len(rows), max(num_pages) + 1, dtype=torch.int32)
        self.context: list[tuple[Tensor, Tensor]] = []
        for row, (pages, (_, context_len)) in enumerate(zip(order.split(num_pages), rows)):
            self.page_table[row, : len(pages)] = pages
            k, v = (torch.randn(context_len, *shape[2:], generator=generator) for _ in range(2))
            self.context.append((k, v))
            for cache, values in ((self.keys, k), (self.values, v)):
                for page, part in zip(pages, values.split(page_size)):
                    cache[page, : len(part)] = part
        self.num_tokens = sum(span.num_tokens for span in self.spans)
        self.q = torch.randn(self.num_tokens, self.num_heads, self.head_dim, generator=generator)
        self.gate = torch.randn(
            self.num_tokens, self.num_heads * self.head_dim, generator=generator
        )

    def attend(self, window: int = 0, deterministic: bool = False) -> Tensor:
        lens = torch.tensor([0, *(span.num_tokens for span in self.spans)])
        return ops.paged_attention(
            self.q,
            self.keys,
            self.values,
            self.page_table,
            lens.cumsum(0).int(),
            torch.tensor([span.context_len for span in self.spans]).int(),
            self.spans,
            ops.TokenBlocks.of(self.spans, "cpu"),
            0.3,
            window,
            self.gate,
            deterministic=deterministic,
        )

    def expected(self, window: int = 0) -> Tensor:
        outputs = []
        for q, (k, v) in zip(self.q.split([span.num_tokens for span in self.spans]), self.context):
            position = torch.arange(len(k) - len(q), len(k))[:, None]
            key = torch.arange(len(k))
            visible = (key <= position) & (
                key > position - window if window else torch.tensor(True)
            )
            q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, visible, scale=0.3, enable_gqa=True)
            outputs.append(out.transpose(0, 1).flatten(1))
        return torch.cat(outputs) * self.gate.double().sigmoid()


RAGGED = [(1, 1), (1, 130), (0, 40), (65, 65), (1, 64), (100, 137), (1, 65), (7, 200)]


@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("window", [0, 1, 50, 64, 100])
@pytest.mark.parametrize("deterministic", [False, True])
def test_paged_attention_is_softmax_attention(
    page_size: int, window: int, deterministic: bool
) -> None:
    paged = Paged(RAGGED, page_size)
    assert_close(paged.attend(window, deterministic), paged.expected(window))


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("window", [0, 1, 50, 64, 100])
@pytest.mark.parametrize("context_len", [1, 63, 64, 65, 200])
def test_decode_attention_of_one_row_is_softmax_attention(
    in_order: bool, window: int, context_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over contiguous and scattered pages, in the form for one row and in that for many."""
    paged = Paged([(1, context_len)], 16, in_order=in_order)
    assert decode.is_alone(paged.q, deterministic=False)
    assert not decode.is_alone(paged.q, deterministic=True)
    assert_close(paged.attend(window), paged.expected(window))
    take_plain_forms(monkeypatch)
    assert_close(paged.attend(window), paged.expected(window))


@pytest.mark.bitwise
def test_decode_attention_is_the_same_whatever_the_page_table_is_padded_to() -> None:
    paged = Paged([(1, 70), (1, 3), (1, 128)], 64)
    before = paged.attend()
    paged.page_table = F.pad(paged.page_table, (0, 5))
    assert torch.equal(paged.attend(), before)


class Mixer:
    """A DeltaNet mixer with Hk, Hv, K, V heads and 4 taps; slots not in use are NaN."""

    def __init__(
        self, key_heads: int, value_heads: int, key_dim: int, value_dim: int, ring_width: int = 4
    ) -> None:
        self.heads = (key_heads, value_heads, key_dim, value_dim)
        self.channels = 2 * key_heads * key_dim + value_heads * value_dim
        self.width = self.channels + value_heads * value_dim + 2 * value_heads
        self.conv_weight = randn(4, self.channels)
        self.a_log, self.dt_bias = randn(value_heads), randn(value_heads, seed=1) - 2
        self.norm_weight = randn(value_dim) + 1
        self.conv = torch.full((12, ring_width, self.channels), torch.nan)
        self.recurrent = torch.full((12, value_heads, key_dim, value_dim), torch.nan)

    def start(self, slot: int) -> None:
        self.conv[slot] = randn(*self.conv.shape[1:], seed=slot)
        self.recurrent[slot] = randn(*self.recurrent.shape[1:], seed=slot)

    def last_inputs(
        self, slot: int, context_len: int, num_inputs: int
    ) -> Tensor:  # [num_inputs, C]
        """Reads the slot's ring in order; zero for positions before 0."""
        nothing = torch.zeros(self.channels)
        ring = self.conv[slot]
        positions = range(context_len - num_inputs, context_len)
        return torch.stack([ring[p % len(ring)] if p >= 0 else nothing for p in positions])

    def run(
        self,
        mixed: Tensor,
        spans: list[RowSpan],
        slots: list[int],
        initial: list[int],
        **given: Any,
    ) -> Tensor:
        starts = torch.tensor([0, *(span.num_tokens for span in spans)]).cumsum(0)
        return ops.gated_delta_net(
            mixed,
            self.conv_weight,
            self.a_log,
            self.dt_bias,
            self.norm_weight,
            EPS,
            self.conv,
            self.recurrent,
            starts.int(),
            torch.tensor([span.context_len for span in spans]).int(),
            torch.tensor(slots),
            torch.tensor(initial),
            spans,
            ops.TokenBlocks.of(spans, "cpu"),
            self.heads[0],
            **given,
        )

    def expected(
        self, mixed: Tensor, history: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs, final state, and history including inputs, in float64 from the definitions."""
        key_heads, value_heads, key_dim, value_dim = self.heads
        sizes = (self.channels, value_heads * value_dim, value_heads, value_heads)
        inputs, z, b, a = mixed.double().split(sizes, dim=-1)
        inputs = torch.cat((history.double(), inputs))
        weight = self.conv_weight.double().T[:, None]
        seen = inputs[-(len(mixed) + 3) :].T[None]
        u = F.silu(F.conv1d(seen, weight, groups=self.channels))[0].T
        q, k, v = u.split(
            (key_heads * key_dim, key_heads * key_dim, value_heads * value_dim), dim=-1
        )
        q, k = (x.unflatten(-1, (key_heads, key_dim)) for x in (q, k))
        q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        q, k = (
            x.repeat_interleave(value_heads // key_heads, dim=1) for x in (q * key_dim**-0.5, k)
        )
        decay = (-self.a_log.double().exp() * F.softplus(a + self.dt_bias)).exp()
        v = v.unflatten(-1, (value_heads, value_dim))
        out, state = delta_rule_by_token(q, k, v, decay, b.sigmoid(), state.double())
        normed = F.rms_norm(out, (value_dim,), self.norm_weight.double(), EPS)
        return (normed * F.silu(z.view(out.shape))).flatten(1), state, inputs


MIXERS = [(2, 6, 16, 24), (3, 3, 24, 16)]


@pytest.mark.parametrize(
    ("heads", "ring_width"),
    [
        (MIXERS[0], 4),
        (MIXERS[1], 7),
        pytest.param(MIXERS[0], 7, marks=pytest.mark.slow),
        pytest.param(MIXERS[1], 4, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("start", [0, 2, 5, 64])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("form", ["blocks", "tokens", "tokens alone"])
def test_delta_net_is_the_recurrence(
    heads: tuple[int, int, int, int],
    start: int,
    length: int,
    form: str,
    ring_width: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In blocks or token by token, from zero or from a state in another slot: outputs, states, and
    rings, which are complete even if the step wrote only a part.
    """
    mixer = Mixer(*heads, ring_width)
    mixer.start(3)
    mixer.conv[3, start:] = torch.nan  # positions before 0
    history, state = mixer.last_inputs(3, start, ring_width), mixer.recurrent[3].clone()
    if not start:
        state = torch.zeros_like(state)
    mixed = randn(length, mixer.width, seed=start)
    initial = 3 if start else 9  # 9 holds NaN: a row that starts at 0 must not read it
    if form == "tokens":
        take_plain_forms(monkeypatch)
    if form != "blocks":
        outputs = []
        for t in range(length):
            source = 7 if t else initial
            outputs.append(mixer.run(mixed[t : t + 1], [RowSpan(1, start + t + 1)], [7], [source]))
        out = torch.cat(outputs)
    else:
        out = mixer.run(mixed, [RowSpan(length, start + length)], [7], [initial])
    exact_out, exact_state, exact_inputs = mixer.expected(mixed, history, state)
    assert_close(out, exact_out, 1e-4)  # for an output whose norm may divide by almost zero
    assert (out.double() - exact_out).abs().median() <= 1e-6
    assert_close(mixer.recurrent[7], exact_state, 5e-6)
    assert torch.equal(
        mixer.last_inputs(7, start + length, ring_width).double(), exact_inputs[-ring_width:]
    )


@pytest.mark.parametrize("length", [1, 3, 5, 70])
@pytest.mark.parametrize("ring_width", [4, 7])
def test_a_step_writes_its_own_entries_of_a_ring_and_no_other(length: int, ring_width: int) -> None:
    for start in (0, 6):
        mixer = Mixer(*MIXERS[0], ring_width)
        mixer.start(3)
        before = mixer.conv[3].clone()
        mixer.run(randn(length, mixer.width), [RowSpan(length, start + length)], [3], [3])
        changed = (mixer.conv[3] != before).any(-1).nonzero().flatten().tolist()
        assert changed == sorted(
            {position % ring_width for position in range(start, start + length)}
        )


@pytest.mark.parametrize("start", [0, 2, 6])
@pytest.mark.parametrize("after", [1, 2, 6, 64])
def test_a_checkpoint_holds_the_ring_of_its_moment(start: int, after: int) -> None:
    """The last inputs before the checkpoint, from this step or older ones; the row itself
    continues.
    """
    mixer = Mixer(*MIXERS[0], ring_width=7)
    mixer.start(3)
    history = mixer.last_inputs(3, start, 7)
    mixed = randn(80, mixer.width)
    mixer.run(mixed, [RowSpan(80, start + 80, ((after, 10),))], [3], [3])
    inputs = torch.cat((history, mixed[:, : mixer.channels]))
    assert torch.equal(mixer.last_inputs(10, start + after, 7), inputs[after : after + 7])
    assert torch.equal(mixer.last_inputs(3, start + 80, 7), inputs[-7:])


@pytest.mark.bitwise
@pytest.mark.parametrize("deterministic", [False, True])
def test_delta_net_rows_do_not_meet_and_touch_only_their_slots(deterministic: bool) -> None:
    """Decodes around prefills, an empty row, a new row of one token, a state read from a
    checkpoint.
    """
    spans = [
        RowSpan(1, 70),
        RowSpan(1, 1),
        RowSpan(0, 30),
        RowSpan(80, 144, ((64, 10),)),
        RowSpan(1, 65),
        RowSpan(2, 2),
    ]
    slots, initial = [1, 2, 3, 4, 5, 6], [1, 9, 3, 8, 8, 9]
    together, apart = Mixer(*MIXERS[0]), Mixer(*MIXERS[0])
    for mixer in (together, apart):
        for slot in (1, 8):
            mixer.start(slot)
    mixed = randn(sum(span.num_tokens for span in spans), together.width)
    out = together.run(mixed, spans, slots, initial, deterministic=deterministic)
    alone = [
        apart.run(part, [span], [slot], [source], deterministic=deterministic)
        for part, span, slot, source in zip(
            mixed.split([s.num_tokens for s in spans]), spans, slots, initial
        )
    ]
    bound = 0.0 if deterministic else 1e-5
    torch.testing.assert_close(out, torch.cat(alone), rtol=bound, atol=bound)
    torch.testing.assert_close(
        together.recurrent, apart.recurrent, rtol=bound, atol=bound, equal_nan=True
    )
    written = ~together.recurrent.isnan().flatten(1).any(1)
    assert written.nonzero().flatten().tolist() == [1, 2, 4, 5, 6, 8, 10]
    pristine = Mixer(*MIXERS[0])
    pristine.start(8)
    assert torch.equal(together.recurrent[8], pristine.recurrent[8])
    assert torch.equal(together.conv[8], pristine.conv[8])


def make_experts() -> tuple[Tensor, Weight, Weight, Weight]:
    x, router = randn(23, 40), Weight(randn(8, 40))
    return x, router, Weight(randn(8, 2 * 24, 40) / 6), Weight(randn(8, 40, 24) / 5)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_sparse_mlp_is_the_weighted_sum_of_its_experts(
    normalize: bool, has_shared: bool, deterministic: bool
) -> None:
    x, router, gate_up, down = make_experts()
    residual, norm = randn(23, 40, seed=1), randn(40) + 1
    shared = (randn(1, 40), randn(2 * 28, 40) / 6, randn(40, 28) / 5)
    given = tuple(map(Weight, shared)) if has_shared else (None, None, None)
    normed, weights, ids, shared_weight = ops.norm_route(
        x, norm, EPS, router, 3, normalize, given[0], deterministic=deterministic
    )
    ours = ops.sparse_mlp(
        normed,
        weights,
        ids,
        gate_up,
        down,
        residual,
        shared_weight,
        *given[1:],
        deterministic=deterministic,
    )

    def swiglu(token: Tensor, inner: Tensor, outer: Tensor) -> Tensor:
        gate, up = (inner.double() @ token).chunk(2)
        return outer.double() @ (F.silu(gate) * up)

    def expert(e: Tensor) -> tuple[Tensor, Tensor]:
        return gate_up.values[e], down.values[e]

    for t, token in enumerate(F.rms_norm(x.double(), (40,), norm.double(), EPS)):
        probabilities = (router.values.double() @ token).softmax(-1)
        best = probabilities.argsort(descending=True)[:3]
        total = probabilities[best].sum() if normalize else 1.0
        exact = residual[t] + sum(
            probabilities[e] / total * swiglu(token, *expert(e)) for e in best
        )
        if has_shared:
            exact = exact + (shared[0].double() @ token).sigmoid() * swiglu(token, *shared[1:])
        assert_close(ours[t], exact)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_the_experts_of_one_token_or_a_few_are_those_of_many(
    num_tokens: int, normalize: bool, has_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, router, gate_up, down = make_experts()
    hidden, norm = x[5 : 5 + num_tokens] * 3, randn(40) + 1
    shared = (randn(1, 40), randn(2 * 28, 40) / 6, randn(40, 28) / 5)
    given = tuple(map(Weight, shared)) if has_shared else (None, None, None)

    def run() -> list[Tensor]:
        normed, weights, ids, shared = ops.norm_route(
            hidden, norm, EPS, router, 3, normalize, given[0]
        )
        out = ops.sparse_mlp(normed, weights, ids, gate_up, down, hidden, shared, *given[1:])
        return [normed, weights, ids.float(), out, *([] if shared is None else [shared])]

    assert_one_token_is_like_many(run, monkeypatch)


def test_one_token_s_matmuls_are_those_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = randn(1, 40) * 3, Weight(randn(56, 40)), randn(56)
    residual, norm = randn(1, 56), randn(40) + 1

    def run() -> list[Tensor]:
        before = residual.clone()
        results = [
            ops.norm_linear(x, norm, 0.5, weight, bias),
            ops.linear(x, weight, residual=residual),
            ops.linear(x, weight, bias, residual),
            ops.norm_linear(x, norm, EPS, weight, out_dtype=torch.float64),
        ]
        assert torch.equal(residual, before)
        return results

    assert_one_token_is_like_many(run, monkeypatch)


def test_gathered_experts_are_grouped_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    x, router, *experts = make_experts()
    x, _, ids, _ = ops.norm_route(x, torch.ones(40), EPS, router, 3)
    gate_up, down = (weight.values for weight in experts)
    grouped = run_experts_grouped(x, ids, *experts)
    assert_close(run_experts_gathered(x, ids, gate_up, down), grouped)
    assert_close(run_experts_gathered(x, ids, gate_up, down, deterministic=True), grouped)
    monkeypatch.setattr(
        "penstock.ops.reference.moe.GATHERED_BYTES", 200_000
    )  # blocks of a few tokens
    assert_close(run_experts_gathered(x, ids, gate_up, down), grouped)


@pytest.mark.bitwise
def test_deterministic_experts_give_a_token_the_same_bits_in_any_batch() -> None:
    x, router, gate_up, down = make_experts()

    def run(part: Tensor) -> Tensor:
        x, weights, ids, _ = ops.norm_route(
            part, torch.ones(40), EPS, router, 3, deterministic=True
        )
        return ops.sparse_mlp(x, weights, ids, gate_up, down, part, deterministic=True)

    whole = run(x)
    for begin, end in ((0, 1), (22, 23), (4, 21)):
        assert torch.equal(run(x[begin:end]), whole[begin:end])


@pytest.mark.parametrize("window", [0, 5, 70])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("first", [1, 62, 130])
def test_a_token_and_its_drafts_attend_like_decodes_of_each(
    first: int, gated: bool, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tokens, page_size = 4, 64
    keys, values = (randn(6, page_size, 2, 24, seed=seed) for seed in range(2))
    table = torch.tensor([[2, 5, 1]] * num_tokens, dtype=torch.int32)
    lens = [first + place for place in range(num_tokens)]
    spans = [RowSpan(1, length) for length in lens]
    q, gate = randn(num_tokens, 6, 24), randn(num_tokens, 6 * 24)
    numbers = torch.arange(num_tokens + 1), torch.tensor(lens)
    blocks = ops.TokenBlocks.of(spans, "cpu")

    def run() -> list[Tensor]:
        given = (gate,) if gated else ()
        return [
            ops.paged_attention(
                q, keys, values, table, *numbers, spans, blocks, 0.2, window, *given
            )
        ]

    assert_one_token_is_like_many(run, monkeypatch)
