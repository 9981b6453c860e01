"""States that are written at every fourth token: every reader of a slot gets all of its tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from kernel_checks import PLACES, assert_near
from penstock.ops import MOST_LATE, Backlog, whole_states
from penstock.ops.reference.delta_net import gated_delta_net as reference
from penstock.ops.triton.delta_net import gated_delta_net as kernel
from test_kernel_delta_net import HEADS, Mixer, Row
from test_kernel_drafts import FIRST, NUM_DRAFTS, Drafting, make, walk

STEPS, KEPT = 9, 9
Op = Callable[..., Tensor]


class Late:
    """Two mixers: kernels of one may leave a backlog, states of the other are always complete."""

    def __init__(
        self,
        heads: tuple[int, int, int, int],
        device: str,
        dtype: torch.dtype,
        *slots: int,
        state_dtype: torch.dtype = torch.float32,
        op: Op = kernel,
    ) -> None:
        given = (heads, device, dtype)
        self.seen, self.expected = (
            Mixer(*given, state_dtype=state_dtype).start(*slots) for _ in range(2)
        )
        self.dtype = dtype
        self.backlog = Backlog.empty(*self.seen.recurrent.shape, MOST_LATE, device)
        self.op = op
        for part in self.backlog[1:]:
            part.fill_(torch.nan)

    def step(self, rows: list[Row], seed: int) -> None:
        mixed = self.seen.inputs(sum(row.num_tokens for row in rows), seed=seed)
        seen = self.seen.run(partial(self.op, backlog=self.backlog), mixed, rows)
        assert_near(seen, self.expected.run(reference, mixed, rows), self.dtype)
        for row in rows:
            self.check(row.slot)

    def check(self, slot: int) -> None:
        """Compares the state, which many tokens in the model's dtype have changed."""
        slots = torch.tensor([slot], device=self.seen.recurrent.device)
        whole = whole_states(self.seen.recurrent, self.backlog, slots)[0]
        assert_near(whole, self.expected.recurrent[slot], self.dtype)
        assert self.backlog.counts[slot].max() <= MOST_LATE


@pytest.mark.thinned
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("heads", HEADS)
def test_decodes_with_a_backlog_are_those_of_whole_states(
    heads: tuple[int, int, int, int], device: str, dtype: torch.dtype
) -> None:
    """Also rows that begin, in slots with old contents."""
    late = Late(heads, device, dtype, 1, 5)
    late.backlog.counts[2] = MOST_LATE
    writes = 0
    for step in range(STEPS):
        before = late.seen.recurrent[[1, 2, 5]].clone()
        late.step([Row(1, 70 + step), Row(2, step), Row(5, 2 + step)], seed=step)
        now = late.seen.recurrent[[1, 2, 5]]
        writes += int((now != before).flatten(1).any(1).sum())
    assert writes <= 3 * (STEPS // (MOST_LATE + 1) + 1) + 1, "states are not written every time"


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_a_backlog_is_never_longer_than_it_may_be(device: str, dtype: torch.dtype) -> None:
    """Also for a row that goes back, so that no position writes its state."""
    late = Late(HEADS[2], device, dtype, 1)
    for step in range(STEPS):
        late.step([Row(1, 8 + step % 2)], seed=step)
        late.check(1)


@pytest.mark.thinned
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("num_decodes", range(1, MOST_LATE + 3))
@pytest.mark.parametrize(("heads", "op"), [(0, kernel), (1, kernel), (1, reference)])
def test_a_row_that_leaves_a_slot_and_prompts_from_there_read_its_backlog(
    heads: int, op: Op, num_decodes: int, device: str, dtype: torch.dtype
) -> None:
    """The slot that a row leaves becomes a checkpoint and keeps its backlog, also after it was
    read. A prompt's kernel has all columns of a head, or several programs have some each.
    """
    late = Late(HEADS[heads], device, dtype, 1)
    for step in range(num_decodes):
        late.step([Row(1, 30 + step)], seed=step)
    end, late.op = 30 + num_decodes, op
    late.backlog.counts[[3, 4, 6]] = MOST_LATE  # of rows that had these slots before
    late.step([Row(3, end, initial_slot=1)], seed=20)
    late.check(1)
    moved = Row(4, end, initial_slot=1, num_tokens=70, checkpoints=((64 - end % 64, 6),))
    late.step([moved], seed=21)
    late.check(6)
    late.check(1)
    late.step([Row(1, end, num_tokens=5)], seed=22)  # a prompt in the slot itself
    assert not late.backlog.counts[[1, 3, 4, 6]].any()
    late.op = kernel
    for step in range(3):
        late.step([Row(1, end + 5 + step), Row(4, end + 70 + step)], seed=30 + step)


@pytest.mark.thinned
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("num_decodes", range(1, MOST_LATE + 2))
@pytest.mark.parametrize("op", [kernel, reference])
def test_drafts_after_plain_decodes_read_their_backlog(
    op: Op, num_decodes: int, device: str, dtype: torch.dtype
) -> None:
    """Plain steps, steps with drafts that are accepted or not, and plain steps again. A state kept
    on the way is complete.
    """
    seen, expected = (make(device, dtype, 1, torch.float32) for _ in range(2))
    backlog = Backlog.empty(*seen.recurrent.shape, MOST_LATE, device)
    backlog.counts[KEPT] = MOST_LATE  # of another row
    keep = {FIRST[1] + num_decodes + 2: KEPT}  # among the drafts that are accepted first
    ops = (partial(kernel, backlog=backlog), reference)
    both = [Drafting(mixer, one, keep=keep) for mixer, one in zip((seen, expected), ops)]
    inputs = {slot: seen.inputs(40, seed=slot) for slot in FIRST}
    wrong = seen.inputs(NUM_DRAFTS, seed=99)
    for _ in range(2):
        for _ in range(num_decodes):
            rows = [Row(slot, both[0].lengths[slot]) for slot in FIRST]
            mixed = torch.cat(
                [inputs[row.slot][row.position - FIRST[row.slot]][None] for row in rows]
            )
            outs = [drafting.mixer.run(drafting.op, mixed, rows) for drafting in both]
            assert_near(*outs, dtype)
            for drafting in both:
                for slot in FIRST:
                    drafting.lengths[slot] += 1
        plain, both[0].op = both[0].op, partial(op, backlog=backlog)
        walked = [walk(drafting, [(3, 2), (2, 0), (0, 0)], inputs, wrong) for drafting in both]
        for slot in FIRST:
            assert_near(torch.stack(walked[0][slot]), torch.stack(walked[1][slot]), dtype)
        both[0].op = plain
        for slot in (*FIRST, KEPT):
            whole = whole_states(seen.recurrent, backlog, torch.tensor([slot], device=device))
            assert_near(whole[0], expected.recurrent[slot], dtype)


@pytest.mark.parametrize(("device", "dtype"), PLACES[:1])
def test_states_in_float16_are_rounded_only_when_they_are_written(
    device: str, dtype: torch.dtype
) -> None:
    late = Late(HEADS[0], device, dtype, 1, state_dtype=torch.float16)
    exact = Late(HEADS[0], device, dtype, 1).expected
    exact.recurrent[1] = late.seen.recurrent[1].float()
    rows = [[Row(1, 8 + step)] for step in range(STEPS)]
    for step, row in enumerate(rows):
        mixed = exact.inputs(1, seed=step)
        late.seen.run(partial(kernel, backlog=late.backlog), mixed, row)
        exact.run(reference, mixed, row)
    whole = whole_states(late.seen.recurrent, late.backlog, torch.tensor([1], device=device))
    assert_near(whole[0], exact.recurrent[1], torch.float16)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_the_reference_ends_a_backlog(device: str, dtype: torch.dtype) -> None:
    late = Late(HEADS[0], device, dtype, 1)
    for step in range(2):
        late.step([Row(1, 43 + step)], seed=step)
    assert late.backlog.counts[1].any()
    mixed = late.seen.inputs(1, seed=9)
    seen = late.seen.run(partial(reference, backlog=late.backlog), mixed, [Row(1, 45)])
    assert_near(seen, late.expected.run(reference, mixed, [Row(1, 45)]), dtype)
    assert not late.backlog.counts[1].any()
    late.check(1)
