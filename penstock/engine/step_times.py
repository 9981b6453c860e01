"""Measures captured decode steps by rows and tokens per row, once at start.

Rows get different tokens, so that they choose different experts. They gain no tokens and stay at
the beginning of an empty context. A running engine measures its own steps and corrects these
(`draft_pace.py`).
"""

from __future__ import annotations

import itertools
import statistics
from functools import partial
from typing import TYPE_CHECKING

import torch

from penstock.engine.step_inputs import PADDING_LEN
from penstock.types import RowPlan

if TYPE_CHECKING:
    from penstock.engine.graphs import Launch
    from penstock.engine.runner import Runner

StepSeconds = dict[tuple[int, int], float]  # by (rows, tokens per row)
UNTIMED, TIMED = 2, 5  # steps per shape


def measure_steps(runner: Runner) -> StepSeconds:
    """For every shape with drafts, and for plain steps with as many rows."""
    graphs, drafts = runner.graphs, runner.draft_graphs
    if graphs is None or drafts is None:
        return {}
    seconds: StepSeconds = {}
    for num_rows in sorted({size.num_rows for size in drafts.sizes}):
        plain = graphs.size_for([RowPlan.decode(row) for row in range(num_rows)])
        assert plain is not None
        standing = tuple(RowPlan.decode(row, max_tokens=0) for row in range(num_rows))
        seconds[num_rows, 1] = _time(runner, partial(graphs.replay, standing, plain, "greedy"))
        for size in drafts.sizes:
            if size.num_rows == num_rows:
                launch = partial(drafts.replay, standing, size, "greedy")
                seconds[num_rows, size.width] = _time(runner, launch)
    _reset_rows(runner)
    return seconds


def _time(runner: Runner, launch: Launch) -> float:
    _randomize_rows(runner)
    for _ in range(UNTIMED):
        launch()
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(TIMED + 1)]
    ends[0].record()
    for end in ends[1:]:
        launch()
        end.record()
    ends[-1].synchronize()
    times = [first.elapsed_time(end) / 1e3 for first, end in itertools.pairwise(ends)]
    return statistics.median(times)


def _randomize_rows(runner: Runner) -> None:
    """Gives every row its own token and, for the drafting head, its own state."""
    table = runner.rows
    _reset_rows(runner)
    table.last_token[:-1].random_(0, table.vocab_size)
    if runner.drafter is not None:
        runner.drafter.hidden[:-1].normal_()


def _reset_rows(runner: Runner) -> None:
    """Resets all rows; the steps wrote only to page 0 and slot 0, which belong to no sequence."""
    table = runner.rows
    table.context_len.fill_(PADDING_LEN)
    for numbers in (table.last_token, table.num_accepted, table.drafts):
        numbers.zero_()
    runner.zero_padding()
    if runner.drafter is not None:
        runner.drafter.hidden.zero_()
