"""What has been computed before: pages and state checkpoints by the tokens that lead to them.

A full page is known by a chained digest, that of the pages before it and of its own tokens, so that one
lookup compares the whole prefix. The index does not count users: its owner says when a page becomes idle
and when it is used again. Two rules of the owner keep it simple. A sequence that uses a page uses all pages
before it, and pages become idle from the last to the first. Hence a page is never idle before the pages
after it, and the order of becoming idle is both least recently used first and leaves first:

    idle:  [oldest leaf, its parent, ..., | next leaf, ...]  evicted from the left, no search, no tree

A page may be pinned, together with all pages before it; then it is kept apart from the idle ones while nobody
uses it, and is never evicted. Checkpoints have an order of their own, because slots run out independently of
pages, and pins of their own.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Node:
    """One registered page."""

    page: int
    parent: bytes  # digest of the page before, or the root


class PrefixIndex:
    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.root = blake2b(digest_size=DIGEST_BYTES).digest()
        self._nodes: dict[bytes, Node] = {}
        self._digests: dict[int, bytes] = {}  # page -> digest
        self._idle: OrderedDict[int, None] = OrderedDict()  # pages without users, next to be evicted first
        self._kept: set[int] = set()  # pages without users that are pinned
        self._page_pins: Counter[bytes] = Counter()
        self._checkpoint_pins: Counter[bytes] = Counter()
        self._checkpoints: OrderedDict[bytes, int] = (
            OrderedDict()
        )  # digest -> slot, least recently used first

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_kept(self) -> int:
        """Pages that would be idle if nothing were pinned."""
        return len(self._kept)

    @property
    def num_pinned_pages(self) -> int:
        return len(self._page_pins)

    @property
    def num_checkpoints(self) -> int:
        return len(self._checkpoints)

    @property
    def num_pinned_checkpoints(self) -> int:
        return len(self._checkpoint_pins)

    @property
    def is_empty(self) -> bool:
        return not self._nodes and not self._checkpoints

    def extend_digests(self, digests: list[bytes], tokens: Sequence[int], tenant: str = "") -> None:
        """Adds the digests of full pages of `tokens` that `digests` lacks. Those of two tenants differ."""
        num_known, num_full = len(digests), len(tokens) // self.page_size
        if num_known == num_full:
            return
        new = array("q", tokens[num_known * self.page_size : num_full * self.page_size])
        page_bytes = self.page_size * new.itemsize
        content = memoryview(new).cast("B")
        parent = digests[-1] if digests else self.root + tenant.encode()
        for start in range(0, len(content), page_bytes):
            digest = blake2b(parent, digest_size=DIGEST_BYTES)
            digest.update(content[start : start + page_bytes])
            parent = digest.digest()
            digests.append(parent)

    def num_known_pages(self, digests: Sequence[bytes], limit: int) -> int:
        """How many of the first `limit` pages are registered. A page's ancestors always are: bisect."""
        low, high = 0, min(limit, len(digests))
        while low < high:
            middle = (low + high + 1) // 2
            if digests[middle - 1] in self._nodes:
                low = middle
            else:
                high = middle - 1
        return low

    def node(self, digest: bytes) -> Node | None:
        return self._nodes.get(digest)

    def holds(self, page: int) -> bool:
        return page in self._digests

    def insert(self, digest: bytes, node: Node) -> None:
        assert digest not in self._nodes
        assert node.page not in self._digests
        self._nodes[digest] = node
        self._digests[node.page] = digest

    def is_idle(self, page: int) -> bool:
        return page in self._idle

    def set_idle(self, page: int) -> None:
        if self._digests[page] in self._page_pins:
            self._kept.add(page)
        else:
            self._idle[page] = None

    def set_used(self, page: int) -> None:
        self._idle.pop(page, None)
        self._kept.discard(page)

    def pin_page(self, digest: bytes) -> None:
        self._page_pins[digest] += 1
        page = self._nodes[digest].page
        if page in self._idle:
            del self._idle[page]
            self._kept.add(page)

    def unpin_page(self, digest: bytes) -> None:
        """Once for each time it was pinned; of a prefix, the last page first."""
        self._page_pins[digest] -= 1
        if self._page_pins[digest]:
            return
        del self._page_pins[digest]
        page = self._nodes[digest].page
        if page in self._kept:
            self._kept.discard(page)
            self._idle[page] = None

    def pin_checkpoint(self, digest: bytes) -> None:
        assert digest in self._checkpoints
        self._checkpoint_pins[digest] += 1

    def unpin_checkpoint(self, digest: bytes) -> None:
        self._checkpoint_pins[digest] -= 1
        if not self._checkpoint_pins[digest]:
            del self._checkpoint_pins[digest]

    def evict_page(self) -> tuple[int, int | None]:
        """Forgets the least recently used idle page. Returns it and the slot of its checkpoint, if any."""
        page, _ = self._idle.popitem(last=False)
        digest = self._digests.pop(page)
        del self._nodes[digest]
        return page, self._checkpoints.pop(digest, None)

    def checkpoint(self, digest: bytes) -> int | None:
        return self._checkpoints.get(digest)

    def nearest_checkpoint(self, digests: Sequence[bytes], num_pages: int) -> int:
        """The number of pages, at most `num_pages`, after which the longest checkpoint was saved."""
        while num_pages > 0 and digests[num_pages - 1] not in self._checkpoints:
            num_pages -= 1
        return num_pages

    def attach_checkpoint(self, digest: bytes, slot: int) -> None:
        assert digest not in self._checkpoints
        self._checkpoints[digest] = slot

    def touch_checkpoint(self, digest: bytes) -> None:
        self._checkpoints.move_to_end(digest)

    def evict_checkpoint(self, keep: Collection[int]) -> int | None:
        """Forgets the least recently used one that is neither pinned nor in `keep`. Returns its slot."""
        for digest, slot in self._checkpoints.items():
            if slot not in keep and digest not in self._checkpoint_pins:
                return self._checkpoints.pop(digest)
        return None

    def forget_checkpoint(self, digest: bytes, keep: Collection[int]) -> int | None:
        """Forgets this one, if it is there and neither pinned nor in `keep`. Returns its slot."""
        if digest in self._checkpoint_pins or self._checkpoints.get(digest) in keep:
            return None
        return self._checkpoints.pop(digest, None)

    def idle_pages(self) -> frozenset[int]:
        return frozenset(self._idle)

    def kept_pages(self) -> frozenset[int]:
        return frozenset(self._kept)

    def checkpoint_slots(self) -> Iterator[int]:
        return iter(self._checkpoints.values())

    def check(self, has_pages: bool) -> None:
        """Asserts what the docstring of this module promises."""
        assert {node.page: digest for digest, node in self._nodes.items()} == self._digests
        idle_order = {page: order for order, page in enumerate(self._idle)}
        for node in self._nodes.values():
            if node.parent == self.root:
                continue
            assert node.parent in self._nodes, f"the page before page {node.page} was evicted first"
            parent_page = self._nodes[node.parent].page
            if self._digests[node.page] in self._page_pins:
                assert node.parent in self._page_pins, f"page {node.page} is pinned, the one before it is not"
            if parent_page in self._kept:
                assert node.page in idle_order or node.page in self._kept, (
                    f"page {node.page} has lost its user"
                )
            if parent_page in idle_order:
                assert node.page in idle_order, (
                    f"page {parent_page} is idle, page {node.page} after it is not"
                )
                assert idle_order[node.page] < idle_order[parent_page]
        if has_pages:
            assert self._checkpoints.keys() <= self._nodes.keys(), "a checkpoint outlived its page"

    def check_pins(self, pages: list[bytes], checkpoints: list[bytes]) -> None:
        """Asserts that these are all the pins, and that what is pinned is there and is not idle."""
        assert self._page_pins == Counter(pages)
        assert self._checkpoint_pins == Counter(checkpoints)
        assert self._page_pins.keys() <= self._nodes.keys(), "a pinned page was evicted"
        assert self._checkpoint_pins.keys() <= self._checkpoints.keys(), "a pinned checkpoint was evicted"
        assert all(self._digests[page] in self._page_pins for page in self._kept)
        assert not any(self._digests[page] in self._page_pins for page in self._idle)
