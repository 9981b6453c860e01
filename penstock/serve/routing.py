"""Chooses an engine for each request, by one of three policies; ties go to the engine that was
picked least recently.

`prefix`: the least busy engine, or one that has the prompt's prefix. Everything is counted in
prompt tokens. A running reply weighs as much as a prompt of `ROW_TOKENS`, because it slows its
neighbours down; a cached prefix is worth `AFFINITY` times its length. So a long conversation
returns to its engine unless the others have much less to do; a session gets a further bonus.
`least-pending`: the engine with the fewest requests. `round-robin`: each in turn, however busy it
is. Knows no processes: engines are numbers, and the contents of their caches are estimated.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.config import ROUTING_POLICIES
from penstock.types import Request

ROW_TOKENS = 2048
AFFINITY = 2  # a cached token needs neither computation nor memory again
MAX_PAGES = 2**17
HOME_TOKENS = (
    1024  # bonus of the engine that had a session's last request; less than a running reply
)
MAX_HOMES = 4096


@dataclass(slots=True)
class Load:
    """The work of one engine."""

    num_requests: int = 0
    num_prompt_tokens: int = 0  # still to be computed, without cached tokens
    last_pick: int = 0

    @property
    def cost(self) -> int:
        return ROW_TOKENS * self.num_requests + self.num_prompt_tokens


class PrefixMap:
    """Which engines have seen which prefixes: one bit per engine for each of the most recent
    pages."""

    def __init__(self, max_pages: int = MAX_PAGES) -> None:
        self._max_pages = max_pages
        self._engines: OrderedDict[bytes, int] = OrderedDict()  # digest -> bits, newest last

    def __len__(self) -> int:
        return len(self._engines)

    def num_known_pages(self, digests: Sequence[bytes], engine: int) -> int:
        """How many of a prompt's first pages this engine has seen."""
        num_pages = 0
        for digest in digests:
            if not self._engines.get(digest, 0) >> engine & 1:
                break
            num_pages += 1
        return num_pages

    def add(self, digests: Iterable[bytes], engine: int) -> None:
        for digest in digests:
            self._engines[digest] = self._engines.get(digest, 0) | 1 << engine
            self._engines.move_to_end(digest)
        while len(self._engines) > self._max_pages:
            self._engines.popitem(last=False)

    def forget(self, engine: int) -> None:
        """Called when the engine has lost its cache."""
        for digest, bits in list(self._engines.items()):
            left = bits & ~(1 << engine)
            if left:
                self._engines[digest] = left
            else:
                del self._engines[digest]


class Router:
    """Picks engines, and remembers its picks."""

    def __init__(
        self, num_engines: int, policy: str = "prefix", max_pages: int = MAX_PAGES
    ) -> None:
        assert policy in ROUTING_POLICIES
        self._policy = policy
        self.loads = [Load() for _ in range(num_engines)]
        self._prefixes = PrefixMap(max_pages)
        self._homes: OrderedDict[str, int] = OrderedDict()  # session -> engine, newest last
        self._num_picks = 0

    def pick(self, request: Request, among: Sequence[int]) -> tuple[int, int]:
        """Returns an engine, and how many prompt tokens it will probably have to compute."""
        pages = request.page_digests  # the engine looks up the same ones
        digests: list[bytes] = []
        if pages is not None and len(self.loads) > 1 and self._policy == "prefix":
            digests = pages.split()
        page_size = pages.page_size if pages else 0
        home = None if request.session_id is None else self._homes.get(request.session_id)
        known = {one: page_size * self._prefixes.num_known_pages(digests, one) for one in among}

        def cost(engine: int) -> tuple[int, int]:
            load = self.loads[engine]
            costs = {
                "prefix": load.cost
                - AFFINITY * known[engine]
                - (HOME_TOKENS if engine == home else 0),
                "least-pending": load.num_requests,
                "round-robin": 0,
            }
            return costs[self._policy], load.last_pick

        engine = min(among, key=cost)
        self._num_picks += 1
        self.loads[engine].last_pick = self._num_picks
        self._prefixes.add(digests, engine)
        if request.session_id is not None:
            self._settle(request.session_id, engine)
        return engine, len(request.token_ids) - known[engine]

    def _settle(self, session_id: str, engine: int) -> None:
        self._homes[session_id] = engine
        self._homes.move_to_end(session_id)
        if len(self._homes) > MAX_HOMES:
            self._homes.popitem(last=False)

    def forget(self, engine: int) -> None:
        self._prefixes.forget(engine)
        for session_id in [id for id, home in self._homes.items() if home == engine]:
            del self._homes[session_id]
