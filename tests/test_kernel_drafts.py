"""The DeltaNet mixer with a journal: steps with drafts leave the same state as plain decodes of the
same tokens, and the kernel matches the reference.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernel_checks import PLACES, assert_near
from penstock.layers.inputs import RowSpan
from penstock.ops import Journal, Replay
from penstock.ops.reference.delta_net import gated_delta_net as reference
from penstock.ops.reference.rows import TokenBlocks
from penstock.ops.triton.delta_net import gated_delta_net as kernel
from test_kernel_delta_net import EPS, HEADS, NUM_TAPS, Mixer, Row

NUM_DRAFTS = 3
Op = Callable[..., Tensor]
# STEPS: drafts and accepted drafts per step. FIRST: tokens before the first step, by slot.
STEPS = [(3, 3), (3, 0), (0, 0), (2, 1), (1, 1), (3, 2), (0, 0)]
FIRST = {1: 70, 2: 62, 3: 1}


class Drafting:
    """Rows that run steps with drafts, on a mixer with a journal."""

    def __init__(
        self,
        mixer: Mixer,
        op: Op,
        *,
        deterministic: bool = False,
        keep: dict[int, int] | None = None,
    ) -> None:
        self.mixer, self.op, self.deterministic = mixer, op, deterministic
        heads, key_dim, value_dim = mixer.recurrent.shape[1:]
        places = {"dtype": torch.float32, "device": mixer.conv.device}
        shape = (len(FIRST) + 2, NUM_DRAFTS)
        self.journal = Journal(
            torch.full((*shape, heads, key_dim), 7.0, **places),
            torch.full((*shape, heads, value_dim), 7.0, **places),
            torch.full((*shape, 3, heads), -7.0, **places),
        )
        self.keep = keep or {}  # number of tokens -> slot, for the first row
        self.num_right = dict.fromkeys(FIRST, 0)
        self.lengths = dict(FIRST)

    def step(self, tokens: dict[int, Tensor], num_right: int) -> Tensor:
        """Runs a token of each row and its drafts, of which this many are accepted."""

        def numbers(values: list[int]) -> Tensor:
            return torch.tensor(values, device=self.mixer.conv.device)

        slots, mixer = list(tokens), self.mixer
        lens = [len(tokens[slot]) for slot in slots]
        ends = [self.lengths[slot] + n for slot, n in zip(slots, lens)]
        spans = [RowSpan(n, end, num_drafts=n - 1) for n, end in zip(lens, ends)]
        kept = [
            next(((at, to) for at, to in self.keep.items() if slot == 1), (0, 0)) for slot in slots
        ]
        out = self.op(
            torch.cat([tokens[slot] for slot in slots]),
            mixer.conv_weight,
            mixer.a_log,
            mixer.dt_bias,
            mixer.norm_weight,
            EPS,
            mixer.conv,
            mixer.recurrent,
            numbers([0, *lens]).cumsum(0),
            numbers(ends),
            numbers(slots),
            numbers(slots),
            spans,
            TokenBlocks.of(spans, mixer.conv.device),
            mixer.key_heads,
            self.journal,
            Replay(
                numbers([slot + 1 for slot in slots]),
                numbers([self.num_right[slot] for slot in slots]),
                numbers([at for at, _ in kept]),
                numbers([to for _, to in kept]),
            ),
            deterministic=self.deterministic,
        )
        for slot in slots:
            right = min(num_right, len(tokens[slot]) - 1)
            self.num_right[slot] = right
            self.lengths[slot] += 1 + right
        return out


def walk(
    drafting: Drafting, script: list[tuple[int, int]], inputs: dict[int, Tensor], wrong: Tensor
) -> dict[int, list[Tensor]]:
    """Outputs of the accepted tokens, in order, by row."""
    outputs: dict[int, list[Tensor]] = {slot: [] for slot in FIRST}
    for num_drafts, num_right in script:
        tokens = {}
        for slot in FIRST:
            # One row has one draft less than the others: rows of a step are ragged.
            own = max(0, num_drafts - (slot == 2))
            right = min(own, num_right)
            begin = drafting.lengths[slot] - FIRST[slot]
            good = inputs[slot][begin : begin + 1 + right]
            tokens[slot] = torch.cat((good, wrong[: own - right]))
        out = drafting.step(tokens, num_right)
        first = 0
        for slot, own in tokens.items():
            outputs[slot] += out[first : first + 1 + min(num_right, len(own) - 1)]
            first += len(own)
    return outputs


def make(device: str, dtype: torch.dtype, heads: int, states: torch.dtype) -> Mixer:
    ring = NUM_TAPS + NUM_DRAFTS
    mixer = Mixer(HEADS[heads], device, dtype, ring=ring, state_dtype=states)
    return mixer.start(*FIRST)


@pytest.mark.parametrize(
    "states", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("heads", [*(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1)), 2])
def test_drafts_leave_what_plain_decodes_leave(
    heads: int, device: str, dtype: torch.dtype, states: torch.dtype
) -> None:
    """Any number of drafts is right in each step; a kept state is the one at its place."""
    place = FIRST[1] + 6  # inside the replay of the second step
    expected = make(device, dtype, heads, states)
    inputs = {slot: expected.inputs(20, seed=slot) for slot in FIRST}
    wrong = expected.inputs(NUM_DRAFTS, seed=99)
    plain: dict[int, list[Tensor]] = {slot: [] for slot in FIRST}
    kept = None
    for step in range(14):
        rows = [Row(slot, FIRST[slot] + step) for slot in FIRST]
        mixed = torch.stack([inputs[slot][step] for slot in FIRST])
        for slot, out in zip(FIRST, expected.run(reference, mixed, rows)):
            plain[slot].append(out)
        if FIRST[1] + step + 1 == place:
            kept = expected.recurrent[1].clone(), expected.conv[1].clone()
    for op in (reference, kernel):
        seen = make(device, dtype, heads, states)
        drafting = Drafting(seen, op, keep={place: 11})
        outputs = walk(drafting, STEPS, inputs, wrong)
        for slot in FIRST:
            own = torch.stack(outputs[slot])
            # float16 states that round differently show in later outputs.
            coarsest = states if states == torch.float16 else dtype
            assert_near(own, torch.stack(plain[slot][: len(own)]), coarsest)
        # The last step has no drafts: states and rings are those of plain decodes.
        length = drafting.lengths[1] - FIRST[1]
        again = make(device, dtype, heads, states)
        for step in range(length):
            rows = [Row(1, FIRST[1] + step)]
            again.run(reference, inputs[1][step : step + 1], rows)
        assert_near(seen.recurrent[1], again.recurrent[1], states)
        assert kept is not None
        assert_near(seen.recurrent[11], kept[0], states)
        needed = [position % seen.ring for position in range(place - NUM_TAPS + 1, place)]
        assert torch.equal(seen.conv[11, needed], kept[1][needed])


@pytest.mark.bitwise
@pytest.mark.parametrize("heads", [0, 1, 2])
def test_the_reference_is_exact_where_results_must_not_depend_on_a_step(heads: int) -> None:
    expected, seen = (make("cpu", torch.float32, heads, torch.float32) for _ in range(2))
    inputs = {slot: expected.inputs(20, seed=slot) for slot in FIRST}
    outputs = walk(
        Drafting(seen, reference, deterministic=True), STEPS, inputs, expected.inputs(3, seed=99)
    )
    for slot in FIRST:
        for step, own in enumerate(outputs[slot]):
            rows = [Row(slot, FIRST[slot] + step)]
            mixed = inputs[slot][step : step + 1]
            assert torch.equal(own, expected.run(reference, mixed, rows, deterministic=True)[0])
        assert torch.equal(seen.recurrent[slot], expected.recurrent[slot])


def test_a_row_alone_takes_another_road_to_the_same_place() -> None:
    """On a CPU in float32, in as few calls as possible, with a state kept on the way."""
    place = FIRST[1] + 5
    mixers = [make("cpu", torch.float32, 1, torch.float32) for _ in range(2)]
    rows = [Drafting(mixer, reference, keep={place: 11}) for mixer in mixers]
    inputs = mixers[0].inputs(40, seed=5)
    begin = 0
    for num_drafts, num_right in STEPS:
        tokens = inputs[begin : begin + 1 + num_drafts]
        alone = rows[0].step({1: tokens}, num_right)
        # With a second row, the first uses the kernel for many rows.
        beside = rows[1].step({1: tokens, 2: inputs[:1]}, num_right)
        assert_near(alone, beside[: len(tokens)], torch.float32)
        for slot in (1, 11):
            if not mixers[0].recurrent[slot].isnan().any():
                assert_near(mixers[0].recurrent[slot], mixers[1].recurrent[slot], torch.float32)
        begin += 1 + num_right
    assert not mixers[0].recurrent[11].isnan().any()
    used = [position % mixers[0].ring for position in range(place - NUM_TAPS + 1, place)]
    assert torch.equal(mixers[0].conv[11, used], mixers[1].conv[11, used])
