"""The order in which waiting sequences are admitted, and each tenant's share.

Tenants, one per API key, are served in turn: next is the tenant that has received the fewest tokens
so far (a virtual token counter each). Within a tenant, and if there is only one, sequences are
ordered by due time. Never touches a tensor or the cache.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain

from penstock.types import Sequence

# A request that is due this much later is background work, like the requests of a batch. Next to
# others it gets one row in this many: more rows make every step longer.
BACKGROUND_S = 3600.0
BACKGROUND_SHARE = 8

# A decoded token reads all weights for one row; the tokens of a prefill share that.
DECODE_COST = 4


def due_order(sequence: Sequence) -> tuple[float, int]:
    return sequence.due_s, sequence.arrival


class WaitingLine:
    """The sequences without a row, and the service that each of their tenants has received."""

    def __init__(self) -> None:
        self._resumed: list[Sequence] = []  # both ordered by due time
        self._of_tenant: dict[str, list[Sequence]] = {}  # none is empty
        self._num_here: Counter[str] = Counter()  # waiting and running sequences by tenant
        # Tokens served, by tenant, relative to what all of them have received.
        self._served: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._resumed) + sum(map(len, self._of_tenant.values()))

    def __iter__(self) -> Iterator[Sequence]:
        """In no particular order between tenants."""
        return chain(self._resumed, *self._of_tenant.values())

    @property
    def num_tenants(self) -> int:
        return len(self._num_here)

    def enter(self, sequence: Sequence) -> None:
        """Adds a new sequence. A tenant gets no credit for the time it was absent."""
        tenant = sequence.request.tenant
        if tenant not in self._num_here:
            self._served[tenant] = min(self._served.values(), default=0)
        self._num_here[tenant] += 1
        self.add(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Removes a sequence that ended without a row."""
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
        """A reply that began on another engine already had a row and a reader: it comes before all
        others.
        """
        if sequence.request.num_resumed_tokens and not sequence.num_preemptions:
            return self._resumed
        return self._of_tenant.setdefault(sequence.request.tenant, [])

    def charge(self, sequence: Sequence, num_tokens: int, is_decode: bool) -> None:
        self._served[sequence.request.tenant] += DECODE_COST if is_decode else num_tokens

    def in_turn(self, now_s: float) -> Iterator[Sequence]:
        """Consume or abandon the iterator before adding or removing a sequence."""
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
        """Sequences that are already due come first; among them, the tenant that was served
        least.
        """
        order = due_order(self._of_tenant[tenant][index])
        is_early = order[0] > now_s
        return is_early, order[0] if is_early else num_served, order, num_served, index, tenant


def by_rank(running: Iterable[Sequence]) -> list[Sequence]:
    """The first of every tenant, then the second of every tenant, and so on; `running` is ordered
    by due time.

    The last one is preempted first: it belongs to the tenant with the most rows.
    """
    ranks: Counter[str] = Counter()
    ranked = []
    for sequence in running:
        ranks[sequence.request.tenant] += 1
        ranked.append((ranks[sequence.request.tenant], due_order(sequence), sequence))
    return [sequence for *_, sequence in sorted(ranked, key=lambda entry: entry[:2])]


class Background:
    """Work with lower priority than all other requests: only a few of its rows decode next to
    others, and all of them when there are no others.
    """

    def __init__(self, running: list[Sequence], now_s: float, max_rows: int) -> None:
        """`running` is ordered by due time."""
        self._latest_s = now_s + BACKGROUND_S
        self.num_running = len(running) - bisect_right(
            running, self._latest_s, key=lambda one: one.due_s
        )
        is_alone = self.num_running == len(running)
        self.max_rows = max_rows if is_alone else max(1, max_rows // BACKGROUND_SHARE)

    def includes(self, sequence: Sequence) -> bool:
        return sequence.due_s > self._latest_s

    def holds_back(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence must keep waiting, although a row may be free."""
        return self.includes(sequence) and self.num_running >= self.max_rows


class Holdings:
    """The rows and pages that tenants hold, as shares of all."""

    def __init__(
        self, running: list[Sequence], num_tenants: int, max_rows: int, num_pages: int
    ) -> None:
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
        """Whether the sequence's tenant stays within its share with one more row and this many
        pages.
        """
        tenant = sequence.request.tenant
        return self._part(self._rows[tenant] + 1, self._pages[tenant] + num_pages) <= self._share

    def victim_for(self, sequence: Sequence, num_pages: int) -> Sequence | None:
        """The sequence that may be preempted for this one, which needs this many pages: afterwards
        this one's tenant is still within its share, and the victim's tenant was above its own.
        Every tenant keeps one row.
        """
        needy = sequence.request.tenant
        if self._rows[needy] and not self.are_within_share(sequence, num_pages):
            return None
        parts = {t: self._part(self._rows[t], self._pages[t]) for t in self._rows if t != needy}
        above = [t for t, part in parts.items() if part > self._share and self._rows[t] > 1]
        if not above:
            return None
        richest = max(above, key=lambda tenant: parts[tenant])
        return [one for one in self._running if one.request.tenant == richest][-1]
