"""The DeltaNet kernel against its reference: outputs and final states of every slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernel_checks import FULL_SIZE, PLACES, assert_near, random
from penstock.layers.inputs import RowSpan
from penstock.ops.reference.delta_net import gated_delta_net as reference
from penstock.ops.reference.rows import TokenBlocks
from penstock.ops.triton.delta_net import gated_delta_net as kernel

EPS = 1e-2  # large: with a tiny eps the norm would hide the scale of its input
NUM_TAPS = 4

Op = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Row:
    slot: int
    position: int  # of its first token
    initial_slot: int | None = None  # None: the slot that is written
    num_tokens: int = 1
    checkpoints: tuple[tuple[int, int], ...] = ()

    @property
    def span(self) -> RowSpan:
        return RowSpan(self.num_tokens, self.position + self.num_tokens, self.checkpoints)


class Mixer:
    """The weights of a mixer, and pools that are NaN except where rows have started."""

    def __init__(
        self,
        heads: tuple[int, int, int, int],  # Hk, Hv, K, V
        device: str,
        dtype: torch.dtype,
        *,
        ring: int = NUM_TAPS,
        num_slots: int = 12,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.key_heads, value_heads, key_dim, value_dim = heads
        self.place = {"device": device, "dtype": dtype}
        self.channels = 2 * self.key_heads * key_dim + value_heads * value_dim
        self.width = self.channels + value_heads * value_dim + 2 * value_heads
        self.ring = ring
        self.conv_weight = random(NUM_TAPS, self.channels, **self.place, scale=0.5)
        in_float = {"device": device, "dtype": torch.float32}
        self.a_log = random(value_heads, **in_float)
        self.dt_bias = random(value_heads, **in_float, seed=1) - 2
        self.norm_weight = random(value_dim, **in_float, seed=2) + 1
        self.conv = torch.full((num_slots, ring, self.channels), torch.nan, **self.place)
        states = (num_slots, value_heads, key_dim, value_dim)
        self.recurrent = torch.full(states, torch.nan, device=device, dtype=state_dtype)

    def start(self, *slots: int) -> Mixer:
        for slot in slots:
            self.conv[slot] = random(self.ring, self.channels, **self.place, seed=slot)
            state = random(*self.recurrent.shape[1:], device="cpu", dtype=torch.float32, seed=slot)
            self.recurrent[slot] = state.to(self.recurrent.device)
        return self

    def to(self, device: str) -> Mixer:
        self.place["device"] = device
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))
        return self

    def inputs(self, num_tokens: int, seed: int = 7) -> Tensor:  # [T, C + Hv * V + 2 * Hv]
        return random(num_tokens, self.width, **self.place, seed=seed)

    def run(
        self,
        op: Op,
        mixed: Tensor,
        rows: Sequence[Row],
        *,
        integers: torch.dtype = torch.int64,
        deterministic: bool = False,
    ) -> Tensor:
        def on_device(numbers: Sequence[int]) -> Tensor:
            return torch.tensor(numbers, dtype=integers, device=mixed.device)

        starts = torch.tensor([0, *(row.num_tokens for row in rows)]).cumsum(0).tolist()
        return op(
            mixed,
            self.conv_weight,
            self.a_log,
            self.dt_bias,
            self.norm_weight,
            EPS,
            self.conv,
            self.recurrent,
            on_device(starts),
            on_device([row.span.context_len for row in rows]),
            on_device([row.slot for row in rows]),
            on_device([row.slot if row.initial_slot is None else row.initial_slot for row in rows]),
            [row.span for row in rows],
            TokenBlocks.of([row.span for row in rows], mixed.device),
            self.key_heads,
            deterministic=deterministic,
        )


def assert_same_slots(
    seen: Mixer,
    expected: Mixer,
    rows: Sequence[Row],
    touched: Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
) -> None:
    """States are near and rings equal where positions exist; slots of no row keep every bit.

    Decodes never round states to the model's dtype, so they are held to float32 in all of them;
    what rows of several tokens add to a state goes through products of that dtype.
    """
    for row in rows:
        assert_near(seen.recurrent[row.slot], expected.recurrent[row.slot], dtype)
        end = row.position + row.num_tokens
        entries = [position % seen.ring for position in range(max(0, end - seen.ring), end)]
        assert torch.equal(seen.conv[row.slot, entries], expected.conv[row.slot, entries])
    others = torch.ones(len(seen.conv), dtype=torch.bool)
    others[[row.slot for row in rows] + list(touched)] = False
    for pool, before in ((seen.conv, expected.conv), (seen.recurrent, expected.recurrent)):
        torch.testing.assert_close(pool[others], before[others], rtol=0, atol=0, equal_nan=True)


# Unequal widths, widths that are not powers of two, one and several value heads per key head.
HEADS = [(1, 2, 64, 128), (2, 4, 32, 48), (3, 3, 24, 16)]
ROWS = [
    Row(1, position=70),
    Row(2, position=0),
    Row(3, position=0, initial_slot=10),  # slots 2, 3 and 10 are NaN, and must not be read
    Row(4, position=1, initial_slot=11),
    Row(5, position=2),
    Row(6, position=64, initial_slot=11),
    Row(7, position=133),
]
STARTED = (1, 5, 7, 11)


@pytest.mark.thinned
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize(
    ("heads", "ring"),
    [
        (HEADS[0], NUM_TAPS),
        (HEADS[1], NUM_TAPS + 3),
        (HEADS[2], NUM_TAPS),
        pytest.param(HEADS[0], NUM_TAPS + 3, marks=pytest.mark.slow),
        pytest.param(HEADS[1], NUM_TAPS, marks=pytest.mark.slow),
        pytest.param(HEADS[2], NUM_TAPS + 3, marks=pytest.mark.slow),
    ],
)
def test_decode_is_the_reference(
    heads: tuple[int, int, int, int], ring: int, device: str, dtype: torch.dtype
) -> None:
    """Rows that continue, begin, or come from another slot, near the start and far from it."""
    seen, expected = (Mixer(heads, device, dtype, ring=ring).start(*STARTED) for _ in range(2))
    mixed = seen.inputs(len(ROWS))
    assert_near(seen.run(kernel, mixed, ROWS), expected.run(reference, mixed, ROWS), dtype)
    assert_same_slots(seen, expected, ROWS)


@pytest.mark.thinned
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("heads", HEADS[:2])
def test_states_in_float16_are_the_reference(
    heads: tuple[int, int, int, int], device: str, dtype: torch.dtype
) -> None:
    """Computed in float32 and rounded once, when written: outputs are as near as before."""
    seen, expected = (
        Mixer(heads, device, dtype, state_dtype=torch.float16).start(*STARTED) for _ in range(2)
    )
    mixed = seen.inputs(len(ROWS))
    assert_near(seen.run(kernel, mixed, ROWS), expected.run(reference, mixed, ROWS), dtype)
    assert_same_slots(seen, expected, ROWS, dtype=torch.float16)


@pytest.mark.thinned
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_states_too_large_for_float16_stay_numbers(
    num_tokens: int, device: str, dtype: torch.dtype
) -> None:
    """One decode and a row of several tokens, in the reference and in the kernels."""
    if dtype == torch.float16:
        pytest.skip("no value of a model in float16 is as large")
    for op in (reference, kernel):
        mixer = Mixer(HEADS[2], device, dtype, state_dtype=torch.float16).start(1)
        mixer.conv_weight *= 1e4
        mixed = mixer.inputs(num_tokens)
        mixed[:, : mixer.channels] *= 1e3
        mixer.run(op, mixed, [Row(1, position=9, num_tokens=num_tokens)])
        assert mixer.recurrent[1].isfinite().all()
        assert mixer.recurrent[1].abs().max() == torch.finfo(torch.float16).max


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("ring", [NUM_TAPS, NUM_TAPS + 3])
def test_rings_turn_over_many_steps(ring: int, device: str, dtype: torch.dtype) -> None:
    """One sequence from its first token and one from a checkpoint; its state stays in one slot."""
    seen, expected = (Mixer((1, 1, 16, 24), device, dtype, ring=ring).start(9) for _ in range(2))
    for step in range(9):
        rows = [Row(1, position=step), Row(2, position=21 + step, initial_slot=2 if step else 9)]
        mixed = seen.inputs(len(rows), seed=step)
        assert_near(seen.run(kernel, mixed, rows), expected.run(reference, mixed, rows), dtype)
    assert_same_slots(seen, expected, rows)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("num_taps", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_any_number_of_taps(num_taps: int, device: str, dtype: torch.dtype) -> None:
    seen, expected = (
        Mixer(HEADS[2], device, dtype, ring=num_taps).start(*STARTED) for _ in range(2)
    )
    for mixer in (seen, expected):
        mixer.conv_weight = mixer.conv_weight[:num_taps]
    mixed = seen.inputs(len(ROWS))
    assert_near(seen.run(kernel, mixed, ROWS), expected.run(reference, mixed, ROWS), dtype)
    assert_same_slots(seen, expected, ROWS)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_extreme_gates_and_inputs_are_the_reference(device: str, dtype: torch.dtype) -> None:
    """Gates that are shut, open or between; queries and keys long, and short enough for epsilon to
    matter.
    """
    seen, expected = (Mixer(HEADS[2], device, dtype).start(1) for _ in range(2))
    for mixer in (seen, expected):
        mixer.a_log[2] = 10.0  # amplifies the error of a softplus near zero
    rows = [Row(1, position=9), Row(2, position=0)]
    mixed = seen.inputs(2)
    mixed[:, -6:] = torch.tensor([-90.0, 90.0, 0.0, 60.0, -60.0, -10.0]).to(
        mixed
    )  # b, then a, for three heads
    mixed[:, : seen.channels] *= torch.tensor([[20.0], [1e-3]]).to(mixed)
    assert_near(seen.run(kernel, mixed, rows), expected.run(reference, mixed, rows), dtype)
    assert_same_slots(seen, expected, rows)


@pytest.mark.bitwise
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_padded_rows_of_a_graph_change_nothing_but_slot_0(device: str, dtype: torch.dtype) -> None:
    rows = [Row(1, position=5), Row(2, position=0)]
    padded = [*rows, *[Row(0, position=0)] * 3]
    alone, among = (Mixer(HEADS[2], device, dtype).start(1) for _ in range(2))
    mixed = alone.inputs(len(padded))
    out = among.run(kernel, mixed, padded)
    assert out.isfinite().all()
    assert torch.equal(out[:2], alone.run(kernel, mixed[:2], rows))
    assert_same_slots(among, alone, rows, touched=[0])


@pytest.mark.bitwise
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_strides_and_integer_widths_change_no_bit(device: str, dtype: torch.dtype) -> None:
    rows = ROWS[:4]
    plain, strided = (Mixer(HEADS[2], device, dtype).start(*STARTED) for _ in range(2))
    mixed = plain.inputs(len(rows))
    wide = torch.full((len(rows), mixed.shape[1] + 5), torch.nan, **plain.place)
    view = wide[:, 2 : 2 + mixed.shape[1]].copy_(mixed)
    out = strided.run(kernel, view, rows, integers=torch.int32)
    assert torch.equal(out, plain.run(kernel, mixed, rows))
    torch.testing.assert_close(strided.recurrent, plain.recurrent, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(strided.conv, plain.conv, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_decodes_and_prefills_share_a_step(device: str, dtype: torch.dtype) -> None:
    """An empty row between decodes, a chunk of a prompt, and a token whose state is kept."""
    rows = [
        Row(1, position=70),
        Row(2, position=30, num_tokens=0),
        Row(3, position=0),
        Row(4, position=64, initial_slot=11, num_tokens=5, checkpoints=((3, 8),)),
        Row(5, position=2, checkpoints=((1, 9),)),
        Row(6, position=6, initial_slot=11),
    ]
    seen, expected = (Mixer((1, 1, 24, 16), device, dtype).start(1, 5, 11) for _ in range(2))
    mixed = seen.inputs(sum(row.num_tokens for row in rows))
    assert_near(seen.run(kernel, mixed, rows), expected.run(reference, mixed, rows), dtype)
    kept = [Row(8, position=66), Row(9, position=2)]
    assert_same_slots(seen, expected, [row for row in rows if row.num_tokens] + kept, dtype=dtype)


@pytest.mark.bitwise
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_deterministic_rows_have_the_same_bits_in_any_step(device: str, dtype: torch.dtype) -> None:
    rows = [*ROWS[:2], Row(8, position=0, num_tokens=3), *ROWS[-2:]]
    together, apart = (Mixer((1, 1, 24, 16), device, dtype).start(*STARTED) for _ in range(2))
    mixed = together.inputs(sum(row.num_tokens for row in rows))
    out = together.run(kernel, mixed, rows, deterministic=True)
    blocks = mixed.split([row.num_tokens for row in rows])
    alone = [
        apart.run(kernel, block, [row], deterministic=True) for block, row in zip(blocks, rows)
    ]
    assert torch.equal(out, torch.cat(alone))
    torch.testing.assert_close(together.recurrent, apart.recurrent, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_a_step_without_rows_is_nothing(device: str, dtype: torch.dtype) -> None:
    mixer = Mixer(HEADS[2], device, dtype)
    assert mixer.run(kernel, mixer.inputs(0), []).shape == (0, 48)
    assert mixer.recurrent.isnan().all()


@pytest.mark.parametrize(("device", "dtype"), FULL_SIZE)
@pytest.mark.parametrize("num_rows", [1, 3, 64])
def test_full_size_decode_is_the_reference(num_rows: int, device: str, dtype: torch.dtype) -> None:
    """35B-A3B: a third of the rows continue in their slot, a third begin, a third come from a
    checkpoint.
    """
    num_slots = num_rows + 2
    seen, expected = (
        Mixer((16, 32, 128, 128), device, dtype, num_slots=num_slots).start(*range(1, num_slots))
        for _ in range(2)
    )
    kinds = ((100, None), (0, None), (40, num_slots - 1))
    rows = [Row(1 + i, *kinds[i % 3]) for i in range(num_rows)]
    mixed = seen.inputs(num_rows)
    assert_near(seen.run(kernel, mixed, rows), expected.run(reference, mixed, rows), dtype)
    assert_same_slots(seen, expected, rows)


@pytest.mark.parametrize(("device", "dtype"), FULL_SIZE)
def test_slots_beyond_two_to_the_31_elements_are_reached(device: str, dtype: torch.dtype) -> None:
    mixer = Mixer((1, 1, 128, 128), device, dtype, num_slots=2)
    last = 2**31 // (128 * 128) + 5
    mixer.conv = torch.empty(last + 1, NUM_TAPS, mixer.channels, device=device, dtype=dtype)
    mixer.recurrent = torch.empty(last + 1, 1, 128, 128, device=device)
    mixer.start(last, 1)
    mixed = mixer.inputs(2)
    rows = [Row(last - 1, position=9, initial_slot=last), Row(2, position=9, initial_slot=1)]
    out = mixer.run(kernel, mixed, rows)
    near = [Row(3, position=9, initial_slot=last), Row(4, position=9, initial_slot=1)]
    assert_near(out, mixer.run(reference, mixed, near), dtype)
    assert_near(mixer.recurrent[last - 1], mixer.recurrent[3], torch.float32)
    assert torch.equal(mixer.conv[last - 1], mixer.conv[3])
