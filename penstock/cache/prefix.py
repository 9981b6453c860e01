"""The prefix index: computed pages and state checkpoints, by the tokens that lead to them.

A full page is identified by its chained digest (penstock.digests), so one lookup compares the whole
prefix. The index does not count users: its owner tells it when a page becomes idle and when it is
used again. Two rules of the owner keep it simple. A sequence that uses a page uses all pages before
it, and pages become idle from the last to the first. Hence a page is never idle before the pages
after it, and the order of becoming idle is both least recently used first and leaves first:

    idle:  [oldest leaf, its parent, ..., | next leaf, ...]  evicted from the left, without a search

A page may be pinned, together with all pages before it; without users it is then kept apart from
the idle ones and never evicted. Checkpoints have their own order and pins (checkpoints.py), because
slots run out independently of pages. The index remembers the digests of evicted pages for a while,
to distinguish a miss by eviction from an unknown prompt.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.cache.checkpoints import Checkpoints
from penstock.digests import ROOT

MAX_PAST_PAGES = 2**16  # digests of evicted pages, about 10 MB


@dataclass(frozen=True, slots=True)
class Node:
    """One registered page."""

    page: int
    parent: bytes  # digest of the page before, or the root


class PrefixIndex:
    def __init__(self) -> None:
        self.checkpoints = Checkpoints()
        self._nodes: dict[bytes, Node] = {}
        self._digests: dict[int, bytes] = {}  # page -> digest
        # Pages without users, in eviction order.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._kept: set[int] = set()  # pages without users that are pinned
        self._page_pins: Counter[bytes] = Counter()
        # Digests of evicted pages, the latest last.
        self._past: OrderedDict[bytes, None] = OrderedDict()

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
    def is_empty(self) -> bool:
        return not self._nodes and not self.checkpoints

    def num_known_pages(self, digests: Sequence[bytes], limit: int) -> int:
        """How many of the first `limit` pages are registered. All ancestors of a registered page
        are registered, so this bisects.
        """
        return longest_prefix(digests, limit, self._nodes.__contains__)

    def num_past_pages(self, digests: Sequence[bytes], limit: int) -> int:
        """How many of them are or were registered, as far as the index remembers."""
        return longest_prefix(
            digests, limit, lambda digest: digest in self._nodes or digest in self._past
        )

    def remember(self, digest: bytes) -> None:
        """Remembers a page that was evicted, or was never kept."""
        self._past[digest] = None
        self._past.move_to_end(digest)
        if len(self._past) > MAX_PAST_PAGES:
            self._past.popitem(last=False)

    def node(self, digest: bytes) -> Node | None:
        return self._nodes.get(digest)

    def holds(self, page: int) -> bool:
        return page in self._digests

    def insert(self, digest: bytes, node: Node) -> None:
        assert digest not in self._nodes
        assert node.page not in self._digests
        self._nodes[digest] = node
        self._digests[node.page] = digest
        self._past.pop(digest, None)

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
        """Call once for each pin; for a prefix, the last page first."""
        self._page_pins[digest] -= 1
        if self._page_pins[digest]:
            return
        del self._page_pins[digest]
        page = self._nodes[digest].page
        if page in self._kept:
            self._kept.discard(page)
            self._idle[page] = None

    def evict_page(self) -> tuple[int, int | None]:
        """Removes the least recently used idle page. Returns it and the slot of its checkpoint, if
        any.
        """
        page, _ = self._idle.popitem(last=False)
        digest = self._digests.pop(page)
        del self._nodes[digest]
        self.remember(digest)
        return page, self.checkpoints.forget(digest)

    def idle_pages(self) -> frozenset[int]:
        return frozenset(self._idle)

    def kept_pages(self) -> frozenset[int]:
        return frozenset(self._kept)

    def check(self, has_pages: bool) -> None:
        """Asserts the rules of this module's docstring."""
        self.checkpoints.check()
        assert not self._past.keys() & self._nodes.keys(), "a page is both evicted and registered"
        assert {node.page: digest for digest, node in self._nodes.items()} == self._digests
        idle_order = {page: order for order, page in enumerate(self._idle)}
        for node in self._nodes.values():
            if node.parent == ROOT:
                continue
            assert node.parent in self._nodes, f"the page before page {node.page} was evicted first"
            parent_page = self._nodes[node.parent].page
            if self._digests[node.page] in self._page_pins:
                assert node.parent in self._page_pins, (
                    f"page {node.page} is pinned, but not the one before it"
                )
            if parent_page in self._kept:
                assert node.page in idle_order or node.page in self._kept, (
                    f"page {node.page} has lost its user"
                )
            if parent_page in idle_order:
                assert node.page in idle_order, (
                    f"page {parent_page} is idle, but not page {node.page} after it"
                )
                assert idle_order[node.page] < idle_order[parent_page]
        if has_pages:
            assert self.checkpoints.digests() <= self._nodes.keys(), (
                "a checkpoint outlived its page"
            )

    def check_pins(self, pages: list[bytes], checkpoints: list[bytes]) -> None:
        """Asserts that these are all pins, and that every pinned page exists and is not idle."""
        assert self._page_pins == Counter(pages)
        assert self.checkpoints.pinned == Counter(checkpoints)
        assert self._page_pins.keys() <= self._nodes.keys(), "a pinned page was evicted"
        assert all(self._digests[page] in self._page_pins for page in self._kept)
        assert not any(self._digests[page] in self._page_pins for page in self._idle)


def longest_prefix(
    digests: Sequence[bytes], limit: int, is_known: Callable[[bytes], bool], low: int = 0
) -> int:
    """How many of the first `limit` pages are known, at least `low`. All pages before a known one
    are known, so this bisects.
    """
    high = min(limit, len(digests))
    while low < high:
        middle = (low + high + 1) // 2
        if is_known(digests[middle - 1]):
            low = middle
        else:
            high = middle - 1
    return low
