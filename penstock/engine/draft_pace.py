"""Whether drafts pay, from what was measured: step times and acceptance. Never touches a tensor.

A draft costs the time by which it makes a step longer, and is worth the tokens it brings. Both are
measured while the engine runs: times by the number of rows and of tokens a row, acceptance by
request and place. Plain steps are measured too, now and then, and drafts that do not pay are tried
again after a while: work changes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

FIRST_STEPS = 4  # of a number of rows: two with all drafts, two without
PLAIN_EVERY = 128  # steps, one of which is plain
PROBE_EVERY = 512  # steps, after which drafts that did not pay are tried again
PROBE_STEPS = 4
NEWEST = 0.1  # weight of the newest measurement
FIRST_GUESS = 0.8  # acceptance before there is any


class DraftPace:
    def __init__(self) -> None:
        # By rows (a power of two) and tokens a row.
        self._seconds: defaultdict[int, dict[int, float]] = defaultdict(dict)
        self._num_steps: Counter[int] = Counter()  # by rows

    def note_step(self, num_rows: int, tokens_a_row: int, seconds: float) -> None:
        known = self._seconds[_bucket(num_rows)]
        before = known.get(tokens_a_row, seconds)
        known[tokens_a_row] = before + NEWEST * (seconds - before)

    def start_step(self, num_rows: int) -> int:
        """The number of steps of so many rows before this one."""
        bucket = _bucket(num_rows)
        self._num_steps[bucket] += 1
        return self._num_steps[bucket] - 1

    def seconds(self, num_rows: int, tokens_a_row: int) -> float | None:
        """Measured, or between what was measured: the time of a step grows with its tokens."""
        known = self._seconds[_bucket(num_rows)]
        if tokens_a_row in known or not known:
            return known.get(tokens_a_row)
        below = max((n for n in known if n < tokens_a_row), default=None)
        above = min((n for n in known if n > tokens_a_row), default=None)
        if below is None or above is None:
            return None
        share = (tokens_a_row - below) / (above - below)
        return known[below] + share * (known[above] - known[below])

    def num_drafts(self, num_rows: int, acceptance: Sequence[float], most: int, step: int) -> int:
        """The number that gives the most tokens a second."""
        if step < FIRST_STEPS:
            return most if step < FIRST_STEPS // 2 else 0
        if step % PLAIN_EVERY == 0:
            return 0
        best, best_speed, tokens, chance = 0, 0.0, 1.0, 1.0
        for num_drafts in range(most + 1):
            seconds = self.seconds(num_rows, 1 + num_drafts)
            if seconds is not None and tokens / seconds > best_speed:
                best, best_speed = num_drafts, tokens / seconds
            if num_drafts < most:
                chance *= acceptance[num_drafts]
                tokens += chance
        is_probe = not best and step % PROBE_EVERY < PROBE_STEPS
        return most if is_probe else best


class Acceptance:
    """How often a draft at each place is right if all before it are."""

    def __init__(self, rates: Sequence[float]) -> None:
        self.rates = list(rates)

    def note(self, num_drafts: int, num_right: int) -> None:
        for place in range(min(num_drafts, num_right + 1)):
            self.rates[place] += NEWEST * ((place < num_right) - self.rates[place])


def _bucket(num_rows: int) -> int:
    return 1 << max(num_rows - 1, 0).bit_length()
