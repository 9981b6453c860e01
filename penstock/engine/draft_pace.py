"""Decides whether drafts pay off, from measured step times and acceptance. Never touches a tensor.

A draft costs the extra time of its step, and is worth the tokens it adds. Times are measured by
rows and tokens per row: at start for an engine with graphs (`prime`), and for every step while it
runs; acceptance by request and position. Plain steps are measured too from time to time, and drafts
that do not pay off are tried again after a while, because the workload changes. A time is the
median of recent ones, since other programs disturb some. With few measurements it is the minimum,
an optimistic estimate, so that it is tried.

The total loss from drafting is bounded by a share of the time since the start: whatever the
acceptance rate, an engine that drafts is not slower than a plain one by more than that.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence

FIRST_STEPS = 4  # for a row count without times: two with all drafts, two without
PLAIN_EVERY = 256  # steps, of which the first are plain
PLAIN_STEPS = 2  # the first of them still replays drafts, and is not measured
PROBE_EVERY = 512  # steps after which drafts that did not pay off are tried again
PROBE_ENDS = PLAIN_STEPS + 4  # steps that this probe lasts
NUM_TIMES = 9  # times kept for each pair of rows and tokens
FEW_TIMES = 3  # with fewer, the minimum counts
OLD = 128  # steps after which only the newest times still count: plain steps are rare
NEWEST = 0.1  # weight of the newest draft in the acceptance rate
FIRST_GUESS = 0.8  # initial acceptance rate
DISTURBED = 1.1  # longer times are clipped to this multiple of the typical time
LOSS_SHARE = 0.01  # of the time of all decodes: the most that drafts may lose
FIRST_LOSS = 4  # plain steps: what drafts may lose before any time has passed


class DraftPace:
    def __init__(self) -> None:
        # By rows (a power of two) and tokens per row.
        self._times: defaultdict[int, dict[int, deque[float]]] = defaultdict(dict)
        self._seconds: defaultdict[int, dict[int, float]] = defaultdict(dict)  # their typical times
        self._primed: set[int] = set()
        self._num_steps: Counter[int] = Counter()  # by rows
        self._noted_at: dict[tuple[int, int], int] = {}  # rows, tokens per row: last step
        self._lost_s = self._decoded_s = 0.0

    def prime(self, seconds: Mapping[tuple[int, int], float]) -> None:
        """Step times by rows and tokens per row, measured before the first step."""
        for (num_rows, tokens_a_row), one in seconds.items():
            self._add_time(num_rows, tokens_a_row, one)
            self._primed.add(_bucket(num_rows))

    def note_step(self, num_rows: int, tokens_a_row: int, seconds: float) -> None:
        bucket = _bucket(num_rows)
        times = self._times[bucket].get(tokens_a_row)
        age = self._num_steps[bucket] - self._noted_at.get((bucket, tokens_a_row), 0)
        self._noted_at[bucket, tokens_a_row] = self._num_steps[bucket]
        while times is not None and age > OLD and len(times) >= FEW_TIMES:
            times.popleft()
        self._add_time(num_rows, tokens_a_row, seconds)
        self._decoded_s += seconds

    def _add_time(self, num_rows: int, tokens_a_row: int, seconds: float) -> None:
        bucket = _bucket(num_rows)
        times = self._times[bucket].setdefault(tokens_a_row, deque(maxlen=NUM_TIMES))
        times.append(seconds)
        typical = min(times) if len(times) < FEW_TIMES else statistics.median(times)
        self._seconds[bucket][tokens_a_row] = typical

    def note_gain(self, num_rows: int, tokens_a_row: int, num_new: int, seconds: float) -> float:
        """The time a step with drafts saved: its new tokens as plain steps, minus its own time.
        Disturbances from outside are not counted against the drafts.
        """
        plain, typical = (self.seconds(num_rows, number) for number in (1, tokens_a_row))
        if plain is None or typical is None:
            return 0.0
        saved = plain * num_new / num_rows - min(seconds, DISTURBED * typical)
        self._lost_s = max(self._lost_s - saved, 0.0)
        return saved

    def start_step(self, num_rows: int) -> int:
        """The number of earlier steps with this many rows."""
        bucket = _bucket(num_rows)
        self._num_steps[bucket] += 1
        return self._num_steps[bucket] - 1

    def seconds(self, num_rows: int, tokens_a_row: int) -> float | None:
        """Measured, or interpolated: the time of a step grows with its tokens. Beyond the
        measurements, the longest.
        """
        known = self._seconds[_bucket(num_rows)]
        if tokens_a_row in known:
            return known[tokens_a_row]
        below = max((n for n in known if n < tokens_a_row), default=None)
        above = min((n for n in known if n > tokens_a_row), default=None)
        if below is None or above is None:
            return None if below is None else known[below]
        share = (tokens_a_row - below) / (above - below)
        return known[below] + share * (known[above] - known[below])

    def may_lose(self, num_rows: int) -> bool:
        """Whether drafts that turn out to be wrong would stay within the loss limit."""
        first = FIRST_LOSS * (self.seconds(num_rows, 1) or 0.0)
        return self._lost_s <= LOSS_SHARE * self._decoded_s + first

    def num_drafts(self, num_rows: int, acceptance: Sequence[float], most: int, step: int) -> int:
        """The number of drafts with the highest expected tokens per second."""
        is_primed = _bucket(num_rows) in self._primed
        if not is_primed and step < FIRST_STEPS:
            return most if step < FIRST_STEPS // 2 else 0
        is_plain = step >= PLAIN_EVERY and step % PLAIN_EVERY < PLAIN_STEPS
        if is_plain or not self.may_lose(num_rows):
            return 0
        best, best_speed, tokens, chance = 0, 0.0, 1.0, 1.0
        for num_drafts in range(most + 1):
            seconds = self.seconds(num_rows, 1 + num_drafts)
            if seconds is not None and tokens / seconds > best_speed:
                best, best_speed = num_drafts, tokens / seconds
            if num_drafts < most:
                chance *= acceptance[num_drafts]
                tokens += chance
        is_probe = not best and step >= PROBE_EVERY and step % PROBE_EVERY < PROBE_ENDS
        return most if is_probe else best


class Acceptance:
    """The probability by position that a draft is accepted if all before it are."""

    def __init__(self, rates: Sequence[float]) -> None:
        self.rates = list(rates)

    def note(self, num_drafts: int, num_right: int) -> None:
        for place in range(min(num_drafts, num_right + 1)):
            self.rates[place] += NEWEST * ((place < num_right) - self.rates[place])


def mean_rates(of_rows: Sequence[Sequence[float]]) -> list[float]:
    """For rows with the same number of drafts: tokens add up, so probabilities are averaged."""
    return [sum(rates) / len(rates) for rates in zip(*of_rows)]


def _bucket(num_rows: int) -> int:
    return 1 << max(num_rows - 1, 0).bit_length()
