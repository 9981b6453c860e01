"""Tracks prompts that are being computed, and the waiting requests that share a prefix with one of
them.

Waiting for a leader is cheaper than computing the same prefix again: n replies to one prompt share
it this way, and so do simultaneous requests about one document. On a hybrid a follower needs a
state where the two prompts diverge, so the leader is told to write a checkpoint there. A follower
waits only if its leader reaches that position no later than the follower would. Never touches a
tensor.
"""

from __future__ import annotations

from penstock.cache import Cache
from penstock.cache.prefix import longest_prefix
from penstock.types import PrefixHit, Sequence


class Leaders:
    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._sequences: set[Sequence] = set()
        # By the digest of each page that is being computed.
        self._leaders: dict[bytes, Sequence] = {}
        # Follower -> its leader, tokens to wait for.
        self._awaited: dict[Sequence, tuple[Sequence, int]] = {}

    @property
    def is_empty(self) -> bool:
        return not (self._sequences or self._leaders or self._awaited)

    def add(self, sequence: Sequence) -> None:
        """Called at admission: the sequence computes the pages beyond its hit."""
        self._awaited.pop(sequence, None)
        self._sequences.add(sequence)
        for digest in sequence.digests[sequence.num_computed // self._cache.page_size :]:
            self._leaders.setdefault(digest, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Called when its prompt is computed and committed, or it has left."""
        self._awaited.pop(sequence, None)
        if sequence not in self._sequences:
            return
        self._sequences.remove(sequence)
        for digest in sequence.digests:
            if self._leaders.get(digest) is sequence:
                del self._leaders[digest]

    def is_awaited(self, sequence: Sequence) -> bool:
        """Whether the prefix that this sequence waits for is still being computed."""
        leader, num_tokens = self._awaited.get(sequence, (None, 0))
        return leader is not None and self._is_pending(leader, num_tokens)

    def follow(self, sequence: Sequence, hit: PrefixHit) -> bool:
        """Whether it waits for a longer prefix than `hit`, and for which one. If it computes that
        prefix itself, it writes a checkpoint where it diverges from the leader: other prompts may
        diverge there too.
        """
        page_size, max_hit = self._cache.page_size, self._cache.max_hit(sequence)
        num_hit, digests = hit.num_tokens // page_size, sequence.digests
        num_shared = longest_prefix(
            digests, max_hit // page_size, self._leaders.__contains__, low=num_hit
        )
        if num_shared == num_hit:
            return False
        leader = self._leaders[digests[num_shared - 1]]
        place = self._wait_position(leader, hit.num_tokens, num_shared * page_size)
        if place is None:
            if num_shared * page_size > hit.num_known_tokens:
                self._cache.learn(sequence, num_shared * page_size)
            return False
        if place > leader.num_computed:
            self._cache.learn(leader, place)
        self._awaited[sequence] = (leader, place)
        return True

    def _wait_position(self, leader: Sequence, num_hit: int, num_shared: int) -> int | None:
        """The furthest position that the leader reaches no later than a follower with `num_hit`
        tokens would.
        """
        if self._cache.has_slots and not self._cache.keeps_checkpoints:
            return None
        if num_shared > leader.num_computed or not self._cache.has_slots:
            return num_shared if leader.num_computed >= num_hit else None
        return max((n for n in leader.checkpoints if num_hit < n <= num_shared), default=None)

    def _is_pending(self, leader: Sequence, num_tokens: int) -> bool:
        if leader.row is None:
            return False
        if not self._cache.has_slots:
            return num_tokens > leader.num_registered_pages * self._cache.page_size
        return num_tokens > leader.num_computed or num_tokens in leader.checkpoints
