"""Whose turn it is: the order in which waiting sequences may be admitted, and what is a tenant's share.

Tenants, who send one API key each, are served in turn: next is the one that has had the least, in tokens
(a virtual token counter each). Within a tenant the order is that of being due, as it is where there is only
one. Never touches a tensor, and never looks into the cache.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain

from penstock.types import Sequence

# A request that is due so much later is background work, as a batch's requests are. Beside others it has one
# row in so many: more rows make every step longer.
BACKGROUND_S = 3600.0
BACKGROUND_SHARE = 8

# A decoded token reads all weights for one row; of a prompt, many tokens share that.
DECODE_COST = 4


def due_order(sequence: Sequence) -> tuple[float, int]:
    return sequence.due_s, sequence.arrival


class WaitingLine:
    """The sequences without a row, and what every tenant that has sequences here was given so far."""

    def __init__(self) -> None:
        self._resumed: list[Sequence] = []  # both by when they are due
        self._of_tenant: dict[str, list[Sequence]] = {}  # none is empty
        self._num_here: Counter[str] = Counter()  # of each tenant: those that wait or run
        self._served: dict[str, int] = {}  # of those tenants: tokens, less what all of them have had

    def __len__(self) -> int:
        return len(self._resumed) + sum(map(len, self._of_tenant.values()))

    def __iter__(self) -> Iterator[Sequence]:
        """In no order between tenants."""
        return chain(self._resumed, *self._of_tenant.values())

    @property
    def num_tenants(self) -> int:
        return len(self._num_here)

    def enter(self, sequence: Sequence) -> None:
        """A new sequence. A tenant that was away is owed nothing for that time."""
        tenant = sequence.request.tenant
        if tenant not in self._num_here:
            self._served[tenant] = min(self._served.values(), default=0)
        self._num_here[tenant] += 1
        self.add(sequence)

    def leave(self, sequence: Sequence) -> None:
        """It has ended, and does not wait any more."""
        tenant = sequence.request.tenant
        self._num_here[tenant] -= 1
        if not self._num_here[tenant]:
            del self._num_here[tenant], self._served[tenant]

    def add(self, sequence: Sequence) -> None:
        insort(self._line_of(sequence), sequence, key=due_order)

    def remove(self, sequence: Sequence) -> None:
        line, tenant = self._line_of(sequence), sequence.request.tenant
        del line[bisect_left(line, due_order(sequence), key=due_order)]
        if not self._of_tenant.get(tenant, True):
            del self._of_tenant[tenant]

    def _line_of(self, sequence: Sequence) -> list[Sequence]:
        """A reply that has begun elsewhere had a row, and somebody reads it: it comes before all others."""
        if sequence.request.num_resumed_tokens and not sequence.num_preemptions:
            return self._resumed
        return self._of_tenant.setdefault(sequence.request.tenant, [])

    def charge(self, sequence: Sequence, num_tokens: int, is_decode: bool) -> None:
        self._served[sequence.request.tenant] += DECODE_COST if is_decode else num_tokens

    def in_turn(self, now_s: float) -> Iterator[Sequence]:
        """Must be read to its end, or left, before a sequence is added or removed."""
        yield from self._resumed
        if len(self._of_tenant) == 1:
            yield from next(iter(self._of_tenant.values()))
            return
        heads = [self._head(tenant, 0, self._served[tenant], now_s) for tenant in self._of_tenant]
        heapq.heapify(heads)
        while heads:
            *_, num_served, index, tenant = heads[0]
            line = self._of_tenant[tenant]
            yield line[index]
            num_served += len(line[index].tokens)
            if index + 1 < len(line):
                heapq.heapreplace(heads, self._head(tenant, index + 1, num_served, now_s))
            else:
                heapq.heappop(heads)

    def _head(
        self, tenant: str, index: int, num_served: int, now_s: float
    ) -> tuple[bool, float, tuple[float, int], int, int, str]:
        """Before others: who is due already, and of those the tenant that was served least."""
        order = due_order(self._of_tenant[tenant][index])
        is_early = order[0] > now_s
        return is_early, order[0] if is_early else num_served, order, num_served, index, tenant


def by_rank(running: Iterable[Sequence]) -> list[Sequence]:
    """The first of every tenant, then the second of every tenant, and so on; `running` is by when due.

    Who is last has to give up its row first: one of the tenant that has most.
    """
    ranks: Counter[str] = Counter()
    ranked = []
    for sequence in running:
        ranks[sequence.request.tenant] += 1
        ranked.append((ranks[sequence.request.tenant], due_order(sequence), sequence))
    return [sequence for *_, sequence in sorted(ranked, key=lambda entry: entry[:2])]


class Background:
    """What runs behind all others: at most so many rows decode beside them, and all where there are none."""

    def __init__(self, running: list[Sequence], now_s: float, max_rows: int) -> None:
        """`running` is by when due."""
        self._latest_s = now_s + BACKGROUND_S
        self.num_running = len(running) - bisect_right(running, self._latest_s, key=lambda one: one.due_s)
        is_alone = self.num_running == len(running)
        self.max_rows = max_rows if is_alone else max(1, max_rows // BACKGROUND_SHARE)

    def includes(self, sequence: Sequence) -> bool:
        return sequence.due_s > self._latest_s

    def holds_back(self, sequence: Sequence) -> bool:
        """Whether one that waits has to go on waiting, though there may be a row."""
        return self.includes(sequence) and self.num_running >= self.max_rows


class Holdings:
    """What tenants hold of rows and pages, as parts of all there are."""

    def __init__(self, running: list[Sequence], num_tenants: int, max_rows: int, num_pages: int) -> None:
        self._running = running
        self._share = 1 / num_tenants
        self._max_rows, self._num_pages = max_rows, max(num_pages, 1)
        self._rows = Counter(sequence.request.tenant for sequence in running)
        self._pages: Counter[str] = Counter()
        for sequence in running:
            self._pages[sequence.request.tenant] += len(sequence.pages)

    def _part(self, num_rows: int, num_pages: int) -> float:
        return max(num_rows / self._max_rows, num_pages / self._num_pages)

    def are_within_share(self, sequence: Sequence, num_pages: int) -> bool:
        """Whether they are, of its tenant, when it has a row and so many pages."""
        tenant = sequence.request.tenant
        return self._part(self._rows[tenant] + 1, self._pages[tenant] + num_pages) <= self._share

    def victim_for(self, sequence: Sequence, num_pages: int) -> Sequence | None:
        """Whose row and pages this one may have, which needs so many: it stays within its tenant's share
        then, and the other tenant has more than its own. Everybody keeps one row."""
        needy = sequence.request.tenant
        if self._rows[needy] and not self.are_within_share(sequence, num_pages):
            return None
        parts = {t: self._part(self._rows[t], self._pages[t]) for t in self._rows if t != needy}
        above = [t for t, part in parts.items() if part > self._share and self._rows[t] > 1]
        if not above:
            return None
        richest = max(above, key=lambda tenant: parts[tenant])
        return [one for one in self._running if one.request.tenant == richest][-1]
