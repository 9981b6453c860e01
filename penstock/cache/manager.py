"""The cache as the scheduler sees it: pages and a slot for every running sequence, prefixes for the next.

Owns both pools and the prefix index, and is the only writer of a sequence's pages, slot and checkpoints.
Works for plain models (pages only), hybrids (both) and purely recurrent ones (slots only). It decides
nothing about time: which sequence runs, waits or is preempted is the scheduler's business. Everything
here takes effect on the host at once; the device executes plans in order, so memory that is given back
now may be handed to the next plan while the step in flight still uses it.
"""

from __future__ import annotations

import sys
from collections import Counter

from penstock.cache.pages import PagePool
from penstock.cache.prefix import Node, PrefixIndex
from penstock.cache.slots import SlotPool
from penstock.errors import CapacityError
from penstock.types import PrefixHit, Sequence

COUNTERS = (
    "hit",
    "miss_empty",
    "miss_no_prefix",
    "miss_no_checkpoint",
    "miss_short_prompt",
    "miss_disabled",
    "tokens_reused",
    "evicted_pages",
    "evicted_checkpoints",
)


class Cache:
    def __init__(
        self,
        *,
        page_size: int,
        num_pages: int = 0,  # with the reserved one; 0: the model has no attention layers
        num_slots: int = 0,  # with the reserved one; 0: the model has no recurrent layers
        max_checkpoints: int | None = None,  # None: half of the slots
        prefix_cache: bool = True,  # False: nothing is ever reused
        salt: bytes = b"",
    ) -> None:
        for name, size in (("pages", num_pages), ("slots", num_slots)):
            if size == 1:
                raise CapacityError(
                    f"The cache has 1 of {name}.",
                    "One is reserved, so at least 2 are needed to run anything.",
                    "Give the cache more memory with --memory-gb.",
                )
        self.page_size = page_size
        self.has_pages = num_pages > 0
        self.has_slots = num_slots > 0
        self.is_enabled = prefix_cache
        self.max_checkpoints = max(num_slots - 1, 0) // 2 if max_checkpoints is None else max_checkpoints
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._pages = PagePool(num_pages)
        self._slots = SlotPool(num_slots)
        self._index = PrefixIndex(page_size, salt)
        self._owners: set[Sequence] = set()
        self._pinned: set[int] = set()  # checkpoints that rows of the plan being made read from
        self._num_planned_checkpoints = 0

    @property
    def num_pages(self) -> int:
        return self._pages.num_pages

    @property
    def num_slots(self) -> int:
        return self._slots.num_slots

    @property
    def num_free_pages(self) -> int:
        return self._pages.num_free + self._index.num_idle

    @property
    def num_free_slots(self) -> int:
        return self._slots.num_free + self._index.num_checkpoints

    @property
    def max_sequence_tokens(self) -> int | None:
        """The longest sequence that fits alone; its last token is never computed. None: any fits."""
        return (self.num_pages - 1) * self.page_size + 1 if self.has_pages else None

    @property
    def keeps_checkpoints(self) -> bool:
        return self.is_enabled and self.has_slots and self.max_checkpoints > 0

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size) if self.has_pages else 0

    def num_free_tokens(self, sequence: Sequence) -> int:
        """How many more tokens of this sequence could be computed with what is free now."""
        if not self.has_pages:
            return sys.maxsize
        return (len(sequence.pages) + self.num_free_pages) * self.page_size - sequence.num_computed

    def max_hit(self, sequence: Sequence) -> int:
        """The longest prefix that may be reused: one token at least must run to give logits."""
        return (len(sequence.tokens) - 1) // self.page_size * self.page_size

    def match(self, sequence: Sequence) -> PrefixHit:
        """The longest prefix that can be reused now. Takes nothing; `admit` does."""
        if not self.is_enabled:
            return PrefixHit()
        self._index.extend_digests(sequence.digests, sequence.tokens)
        digests = sequence.digests
        num_pages = self.max_hit(sequence) // self.page_size
        if self.has_pages:
            num_pages = self._index.num_known_pages(digests, num_pages)
        if self.has_slots:
            num_pages = self._index.nearest_checkpoint(digests, num_pages)
        if num_pages == 0:
            return PrefixHit()
        nodes = (self._index.node(digest) for digest in digests[:num_pages])
        return PrefixHit(
            num_tokens=num_pages * self.page_size,
            pages=tuple(node.page for node in nodes if node is not None),
            checkpoint_slot=self._index.checkpoint(digests[num_pages - 1]) if self.has_slots else None,
        )

    def admit(
        self,
        sequence: Sequence,
        hit: PrefixHit | None = None,  # what `match` has just found; None: it is looked up
        *,
        spare_pages: int = 0,
    ) -> bool:
        """Gives the sequence the pages of its hit and a slot, or changes nothing and answers False.

        All known tokens and `spare_pages` must find room, so that a prefill that starts can be completed.
        The checkpoint it continues from is pinned until `end_plan`: its first row must be in this plan.
        """
        hit = self.match(sequence) if hit is None else hit
        num_idle_hits = sum(self._index.is_idle(page) for page in hit.pages)
        num_new_pages = self.pages_for(len(sequence.tokens)) - len(hit.pages)
        if self.has_pages and num_new_pages + spare_pages > self.num_free_pages - num_idle_hits:
            return False
        reason = self._outcome(sequence, hit)
        if self.has_slots:
            slot = self._take_slot(sequence, hit)
            if slot is None:
                return False
            sequence.slot = slot
            sequence.initial_slot = hit.checkpoint_slot
            if hit.checkpoint_slot is not None:
                self._pinned.add(hit.checkpoint_slot)
        for page in hit.pages:
            self._pages.share(page)
            self._index.set_used(page)
        sequence.pages = list(hit.pages)
        sequence.num_registered_pages = len(hit.pages)
        sequence.num_computed = hit.num_tokens
        self._owners.add(sequence)
        if not sequence.num_preemptions:  # on coming back, its own pages are not a hit
            sequence.num_cached_tokens = hit.num_tokens
            self.counters[reason] += 1
            self.counters["tokens_reused"] += hit.num_tokens
        return True

    def reserve(self, sequence: Sequence, num_tokens: int) -> list[int] | None:
        """Pages for the next `num_tokens` tokens. None, and no change, when there are not enough."""
        num_new = self.pages_for(sequence.num_computed + num_tokens) - len(sequence.pages)
        if num_new > self.num_free_pages:
            return None
        pages = [self._take_page() for _ in range(num_new)]
        sequence.pages.extend(pages)
        return pages

    def plan_checkpoint(self, sequence: Sequence, num_tokens: int) -> int | None:
        """A slot for the state after `num_tokens` tokens, at the cost of the least recently used checkpoint.

        None when the state is saved already or nothing may be given up for it.
        """
        if not self.keeps_checkpoints or num_tokens in sequence.checkpoints:
            return None
        if self._index.checkpoint(sequence.digests[num_tokens // self.page_size - 1]) is not None:
            return None
        has_budget = self._index.num_checkpoints + self._num_planned_checkpoints < self.max_checkpoints
        if not (has_budget and self._slots.num_free) and not self._evict_checkpoint():
            return None
        slot = self._slots.take()
        assert slot is not None
        sequence.checkpoints[num_tokens] = slot
        self._num_planned_checkpoints += 1
        return slot

    def end_plan(self) -> None:
        """The plan is made: later plans run after it, so what its rows read may be overwritten by them."""
        self._pinned.clear()

    def commit(self, sequence: Sequence) -> list[int]:
        """Registers what the sequence has computed, for others to reuse.

        A page that somebody else registered first is used instead of the sequence's own, which is given
        back. So whoever uses a registered page uses all pages before it, and idle pages can always be
        evicted. Returns the indices, in the sequence's page table, of the pages that changed so.
        """
        if not self.is_enabled or sequence not in self._owners:
            return []
        replaced = self._register_pages(sequence) if self.has_pages else []
        for num_tokens in [n for n in sequence.checkpoints if n <= sequence.num_computed]:
            self._attach_checkpoint(sequence, num_tokens)
        return replaced

    def release(self, sequence: Sequence) -> None:
        """Takes everything from the sequence. Registered pages stay, idle, until memory is short."""
        for page in reversed(sequence.pages):  # the index wants the last page to become idle first
            self._drop_page(page)
        for slot in sequence.checkpoints.values():
            self._slots.give_back(slot)
        if sequence.slot is not None:
            self._slots.give_back(sequence.slot)
        self._num_planned_checkpoints -= len(sequence.checkpoints)
        self._owners.discard(sequence)
        sequence.pages, sequence.checkpoints = [], {}
        sequence.slot = sequence.initial_slot = None
        sequence.num_registered_pages = sequence.num_computed = 0

    def check(self) -> None:
        """Asserts that every page and every slot is accounted for exactly once."""
        self._index.check(self.has_pages)
        used = Counter(page for sequence in self._owners for page in sequence.pages)
        free, idle = self._pages.free_pages(), self._index.idle_pages()
        for page in range(1, self.num_pages):
            assert self._pages.num_users(page) == used[page], f"page {page} has a wrong number of users"
            assert (page in free) + (page in idle) + (used[page] > 0) == 1, f"page {page} leaked"
            assert used[page] < 2 or self._index.holds(page), f"page {page} is shared, but not registered"
        assert 0 not in used, "a sequence owns the reserved page"
        assert all(self._index.holds(page) for page in idle)
        for sequence in self._owners:
            for index, digest in enumerate(sequence.digests[: sequence.num_registered_pages]):
                node = self._index.node(digest)
                assert node is not None, f"page {sequence.pages[index]} was evicted while in use"
                assert node.page == sequence.pages[index]
        planned = [slot for sequence in self._owners for slot in sequence.checkpoints.values()]
        taken = [sequence.slot for sequence in self._owners if sequence.slot is not None] + planned
        taken += [*self._index.checkpoint_slots(), *self._slots.free_slots()]
        assert sorted(taken) == list(range(1, self.num_slots)), "a slot leaked or is owned twice"
        assert len(planned) == self._num_planned_checkpoints
        assert len(planned) + self._index.num_checkpoints <= self.max_checkpoints

    def _outcome(self, sequence: Sequence, hit: PrefixHit) -> str:
        if not self.is_enabled:
            return "miss_disabled"
        if hit.num_tokens:
            return "hit"
        if not self.max_hit(sequence):
            return "miss_short_prompt"
        if self._index.is_empty:
            return "miss_empty"
        if self.has_pages and self.has_slots and self._index.num_known_pages(sequence.digests, 1):
            return "miss_no_checkpoint"
        return "miss_no_prefix"

    def _take_slot(self, sequence: Sequence, hit: PrefixHit) -> int | None:
        """A free slot, else that of a checkpoint: running comes before remembering."""
        if hit.checkpoint_slot is not None:
            # The last to go: when it does, the sequence continues in the very slot that it reads from.
            self._index.touch_checkpoint(sequence.digests[hit.num_tokens // self.page_size - 1])
        if not self._slots.num_free and not self._evict_checkpoint():
            return None
        return self._slots.take()

    def _take_page(self) -> int:
        if not self._pages.num_free:
            page, slot = self._index.evict_page()
            self._pages.give_back(page)
            self.counters["evicted_pages"] += 1
            if slot is not None:
                self._slots.give_back(slot)
                self.counters["evicted_checkpoints"] += 1
        return self._pages.take()

    def _drop_page(self, page: int) -> None:
        if self._pages.drop(page):
            if self._index.holds(page):
                self._index.set_idle(page)
            else:
                self._pages.give_back(page)

    def _evict_checkpoint(self) -> bool:
        slot = self._index.evict_checkpoint(keep=self._pinned)
        if slot is None:
            return False
        self._slots.give_back(slot)
        self.counters["evicted_checkpoints"] += 1
        return True

    def _register_pages(self, sequence: Sequence) -> list[int]:
        num_full = min(len(sequence.tokens), sequence.num_computed) // self.page_size
        self._index.extend_digests(sequence.digests, sequence.tokens)
        replaced = []
        for index in range(sequence.num_registered_pages, num_full):
            digest, page = sequence.digests[index], sequence.pages[index]
            known = self._index.node(digest)
            if known is None:
                parent = sequence.digests[index - 1] if index else self._index.root
                self._index.insert(digest, Node(page, parent))
                continue
            self._pages.share(known.page)
            self._index.set_used(known.page)
            sequence.pages[index] = known.page
            self._drop_page(page)
            replaced.append(index)
        sequence.num_registered_pages = max(sequence.num_registered_pages, num_full)
        return replaced

    def _attach_checkpoint(self, sequence: Sequence, num_tokens: int) -> None:
        slot = sequence.checkpoints.pop(num_tokens)
        self._num_planned_checkpoints -= 1
        digest = sequence.digests[num_tokens // self.page_size - 1]
        if self._index.checkpoint(digest) is None:
            self._index.attach_checkpoint(digest, slot)
        else:
            self._slots.give_back(slot)
