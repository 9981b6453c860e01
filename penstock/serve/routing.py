"""Which engine of several gets a request: the least busy one, or one that knows the prompt's beginning.

Everything is counted in prompt tokens. A reply that runs weighs as much as a prompt of `ROW_TOKENS`, because
it slows its neighbours down for as long as it lasts; a beginning that is cached somewhere is worth `AFFINITY`
times its length there. So a long conversation returns to where it was unless the others have much less to do.
Knows nothing of processes: engines are numbers here, and what is said of their caches is a guess.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ROW_TOKENS = 2048
AFFINITY = 2  # a token found in a cache is not computed, and does not need memory twice
BLOCK_TOKENS = 64  # prompts are compared in blocks; caches are shared by the page, which is no smaller
MAX_BLOCKS = 2**17


@dataclass(slots=True)
class Load:
    """What one engine has to do."""

    num_requests: int = 0
    num_prompt_tokens: int = 0  # of those without a token yet, less what they found cached
    last_pick: int = 0

    @property
    def cost(self) -> int:
        return ROW_TOKENS * self.num_requests + self.num_prompt_tokens


class PrefixMap:
    """Who has seen which beginnings of prompts: one bit an engine for every block, the latest blocks only.

    A block's key is chained over all blocks before it. Two that collide cost a detour, no more.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._engines: OrderedDict[int, int] = OrderedDict()  # key -> bits, the latest last

    def __len__(self) -> int:
        return len(self._engines)

    def num_known_tokens(self, keys: Sequence[int], engine: int) -> int:
        """How far this engine has seen the prompt whose blocks have these keys."""
        num_blocks = 0
        for key in keys:
            if not self._engines.get(key, 0) >> engine & 1:
                break
            num_blocks += 1
        return num_blocks * BLOCK_TOKENS

    def add(self, keys: Iterable[int], engine: int) -> None:
        for key in keys:
            self._engines[key] = self._engines.get(key, 0) | 1 << engine
            self._engines.move_to_end(key)
        while len(self._engines) > self._max_blocks:
            self._engines.popitem(last=False)

    def forget(self, engine: int) -> None:
        """Its cache is gone."""
        for key, bits in list(self._engines.items()):
            left = bits & ~(1 << engine)
            if left:
                self._engines[key] = left
            else:
                del self._engines[key]


class Router:
    """Picks, and remembers what it picked."""

    def __init__(self, num_engines: int, max_blocks: int = MAX_BLOCKS) -> None:
        self.loads = [Load() for _ in range(num_engines)]
        self._prefixes = PrefixMap(max_blocks)
        self._num_picks = 0

    def pick(self, token_ids: tuple[int, ...], among: Sequence[int]) -> tuple[int, int]:
        """One of these engines, and how many of the tokens it should have to compute."""
        keys = block_keys(token_ids) if len(self.loads) > 1 else []
        known = {engine: self._prefixes.num_known_tokens(keys, engine) for engine in among}

        def cost(engine: int) -> tuple[int, int]:
            load = self.loads[engine]
            return load.cost - AFFINITY * known[engine], load.last_pick  # of equals, who waited longest

        engine = min(among, key=cost)
        self._num_picks += 1
        self.loads[engine].last_pick = self._num_picks
        self._prefixes.add(keys, engine)
        return engine, len(token_ids) - known[engine]

    def forget(self, engine: int) -> None:
        self._prefixes.forget(engine)


def block_keys(token_ids: tuple[int, ...]) -> list[int]:
    """Of all whole blocks."""
    keys = []
    key = 0
    for start in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        key = hash((key, token_ids[start : start + BLOCK_TOKENS]))
        keys.append(key)
    return keys
