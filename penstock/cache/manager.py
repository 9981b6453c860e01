"""The cache as the scheduler sees it: pages and a slot for every running sequence, and reusable
prefixes.

Owns both pools, the prefix index and its sessions, and is the only writer of a sequence's pages,
slot and checkpoints. Works for plain models (pages only), hybrids (both) and purely recurrent ones
(slots only). It decides nothing about order: the scheduler decides which sequence runs, waits or is
preempted. Everything here takes effect on the host at once; the device executes plans in order, so
memory that is given back now may be handed to the next plan while the step in flight still uses it.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Collection

from penstock.cache.checkpoints import GUESS, PROVEN
from penstock.cache.pages import PagePool
from penstock.cache.prefix import Node, PrefixIndex
from penstock.cache.sessions import NO_SESSIONS, Clock, SessionLimits, Sessions
from penstock.cache.slots import SlotPool
from penstock.digests import ROOT, PageDigests, extend_digests
from penstock.errors import CapacityError
from penstock.types import NOTHING_KEPT, KeptState, PrefixHit, Sequence

COUNTERS = (
    "hit",
    "miss_empty",
    "miss_no_prefix",
    "miss_no_checkpoint",
    "miss_evicted",
    "miss_short_prompt",
    "miss_disabled",
    "tokens_reused",
    "missed_tokens_no_prefix",  # together with these, all tokens of all prompts
    "missed_tokens_no_checkpoint",
    "missed_tokens_evicted",
    "missed_tokens_partial_page",
    "missed_tokens_disabled",
    "evicted_pages",
    "evicted_checkpoints",
)


class Cache:
    def __init__(
        self,
        *,
        page_size: int,
        num_pages: int = 0,  # including the reserved one; 0: the model has no attention layers
        num_slots: int = 0,  # including the reserved one; 0: the model has no recurrent layers
        max_checkpoints: int | None = None,  # None: half of the slots
        prefix_cache: bool = True,  # False: nothing is reused
        # False: with states, reuse only what prompts computed: another prefill rounds the same way.
        reply_states: bool = True,
        session_limits: SessionLimits = NO_SESSIONS,
        clock: Clock = time.monotonic,
    ) -> None:
        for name, size in (("pages", num_pages), ("slots", num_slots)):
            if size == 1:
                raise CapacityError(
                    f"The cache has only 1 of {name}.",
                    "One is reserved, so at least 2 are needed.",
                    "Give the cache more memory with --memory-gb.",
                )
        self.page_size = page_size
        self.has_pages = num_pages > 0
        self.has_slots = num_slots > 0
        self.is_enabled = prefix_cache
        self.max_checkpoints = (
            max(num_slots - 1, 0) // 2 if max_checkpoints is None else max_checkpoints
        )
        self._reply_states = reply_states
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._pages = PagePool(num_pages)
        self._slots = SlotPool(num_slots)
        self._index = PrefixIndex()
        self._checkpoints = self._index.checkpoints
        self.sessions = Sessions(self._index, session_limits, clock)
        self._owners: set[Sequence] = set()
        self._pinned: set[int] = set()  # checkpoints that the current plan reads
        self._num_planned_checkpoints = 0

    @property
    def num_pages(self) -> int:
        return self._pages.num_pages

    @property
    def num_slots(self) -> int:
        return self._slots.num_slots

    @property
    def num_free_pages(self) -> int:
        """Excludes pages that sessions keep, although running sequences may evict them."""
        return self._pages.num_free + self._index.num_idle

    @property
    def num_free_slots(self) -> int:
        return self._slots.num_free + len(self._checkpoints) - self._checkpoints.num_pinned

    @property
    def num_checkpoints(self) -> int:
        return len(self._checkpoints)

    @property
    def max_sequence_tokens(self) -> int | None:
        """The longest sequence that fits alone; its last token is never computed. None: no
        limit.
        """
        return (self.num_pages - 1) * self.page_size + 1 if self.has_pages else None

    @property
    def keeps_checkpoints(self) -> bool:
        return self.is_enabled and self.has_slots and self.max_checkpoints > 0

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size) if self.has_pages else 0

    def num_free_tokens(self, sequence: Sequence) -> int:
        """How many more tokens of this running sequence fit into the memory that it may use now."""
        if not self.has_pages:
            return sys.maxsize
        num_pages = len(sequence.pages) + self.num_free_pages + self._index.num_kept
        return num_pages * self.page_size - sequence.num_computed

    def max_hit(self, sequence: Sequence) -> int:
        """The longest prefix that may be reused: at least one token must run to give logits, and so
        must all tokens whose logits are still to be scored or whose hidden states are averaged.
        """
        num_tokens = sequence.num_scored if sequence.needs_every_token else len(sequence.tokens) - 1
        return num_tokens // self.page_size * self.page_size

    def take_digests(self, sequence: Sequence) -> None:
        """The digests of its prompt: those sent with the request, and the rest, if any, computed
        here. At submit, so that no plan has to hash.
        """
        given = sequence.request.page_digests
        if not self.is_enabled:
            return
        if given is not None and given.page_size == self.page_size:
            sequence.digests = given.split()[: len(sequence.tokens) // self.page_size]
        self._extend_digests(sequence)

    def match(self, sequence: Sequence) -> PrefixHit:
        """The longest prefix that can be reused now. Allocates nothing; `admit` does."""
        if not self.is_enabled:
            return PrefixHit()
        self._extend_digests(sequence)
        digests, max_pages = sequence.digests, self.max_hit(sequence) // self.page_size
        num_pages, num_known = self._cached_pages(digests, max_pages)
        nodes = (self._index.node(digest) for digest in digests[:num_pages])
        return PrefixHit(
            num_tokens=num_pages * self.page_size,
            pages=tuple(node.page for node in nodes if node is not None),
            checkpoint_slot=self._checkpoints.slot_at(digests[num_pages - 1])
            if num_pages
            else None,
            num_known_tokens=max(num_known, num_pages) * self.page_size,
        )

    def num_cached_tokens(self, digests: PageDigests, num_tokens: int) -> int:
        """How many tokens of a prompt of this length would be reused now."""
        if not self.is_enabled or digests.page_size != self.page_size:
            return 0
        max_pages = (num_tokens - 1) // self.page_size  # its last token runs to give logits
        return self._cached_pages(digests.split(), max_pages)[0] * self.page_size

    def _cached_pages(self, digests: list[bytes], max_pages: int) -> tuple[int, int]:
        """How many of a prompt's pages can be reused, and how many have been seen."""
        if self.has_pages:
            num_known = num_pages = self._index.num_known_pages(digests, max_pages)
        else:
            num_known, num_pages = self._index.num_past_pages(digests, max_pages), max_pages
        if self.has_slots:
            num_pages = self._checkpoints.nearest(digests, num_pages)
        return num_pages, num_known

    def learn(self, sequence: Sequence, num_tokens: int) -> None:
        """Another prompt diverged from this one here: its prefill will write a checkpoint there."""
        if self.keeps_checkpoints and num_tokens:
            sequence.targets[num_tokens] = PROVEN

    def admit(
        self,
        sequence: Sequence,
        hit: PrefixHit | None = None,  # what `match` has just found; None: look it up
        *,
        spare_pages: int = 0,
        ends_sessions: bool = False,  # if nothing runs, no other memory would become free
    ) -> bool:
        """Gives the sequence the pages of its hit and a slot, or returns False and changes no
        sequence.

        All known tokens and `spare_pages` must fit, so that a prefill that starts can be completed.
        The checkpoint it continues from is pinned until `end_plan`: its first row must be in this
        plan.
        """
        self.sessions.expire()
        hit = self.match(sequence) if hit is None else hit
        reason = self._outcome(sequence, hit)
        while not self._has_room(sequence, hit, spare_pages):
            if not (ends_sessions and self.sessions.evict_oldest()):
                return False
        if self.has_slots:
            while (slot := self._take_slot(hit)) is None:
                if not (ends_sessions and self.sessions.evict_oldest()):
                    return False
            if hit.num_tokens:
                self._checkpoints.use(sequence.digests[hit.num_tokens // self.page_size - 1])
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
        if not sequence.num_preemptions:  # after a preemption, its own pages are not a hit
            self._count(sequence, hit, reason)
            if hit.num_known_tokens > hit.num_tokens:
                self.learn(sequence, hit.num_known_tokens)
        return True

    def _has_room(self, sequence: Sequence, hit: PrefixHit, spare_pages: int) -> bool:
        num_idle_hits = sum(self._index.is_idle(page) for page in hit.pages)
        num_new_pages = self.pages_for(len(sequence.tokens)) - len(hit.pages)
        return (
            not self.has_pages or num_new_pages + spare_pages <= self.num_free_pages - num_idle_hits
        )

    def _count(self, sequence: Sequence, hit: PrefixHit, outcome: str) -> None:
        sequence.num_cached_tokens = hit.num_tokens
        self.counters[outcome] += 1
        self.counters["tokens_reused"] += hit.num_tokens
        for why, num_tokens in self._missed_tokens(sequence, hit).items():
            self.counters[f"missed_tokens_{why}"] += num_tokens
        if sequence.request.session_id is not None:
            self.sessions.use(sequence.request.session_id, is_hit=hit.num_tokens > 0)

    def reserve(self, sequence: Sequence, num_tokens: int) -> list[int] | None:
        """Pages for the next `num_tokens` tokens. None, and no change, when there are not enough.

        Evicts sessions if necessary, the least recently used first: no sequence is preempted for a
        session.
        """
        num_new = self.pages_for(sequence.num_computed + num_tokens) - len(sequence.pages)
        if num_new > self.num_free_pages + self._index.num_kept:
            return None
        while num_new > self.num_free_pages:
            self.sessions.evict_oldest()
        pages = [self._take_page() for _ in range(num_new)]
        sequence.pages.extend(pages)
        return pages

    def plan_checkpoint(self, sequence: Sequence, num_tokens: int) -> int | None:
        """A slot for the state after `num_tokens` tokens, possibly that of a less valuable
        checkpoint.

        None: the state is already saved, or no checkpoint may be evicted for it.
        """
        if not self.keeps_checkpoints or num_tokens in sequence.checkpoints:
            return None
        if sequence.digests[num_tokens // self.page_size - 1] in self._checkpoints:
            return None
        slot = self._take_checkpoint_slot(sequence, num_tokens)
        if slot is not None:
            sequence.checkpoints[num_tokens] = slot
            self._num_planned_checkpoints += 1
        return slot

    def keep_reply_state(self, sequence: Sequence) -> None:
        """The sequence decodes past a page boundary: the state there becomes a checkpoint.

        Nothing is copied: its slot becomes the checkpoint's, and the next step reads it and writes
        to another slot. The checkpoint of the same reply at the previous boundary is evicted.
        """
        if (
            not (self.keeps_checkpoints and self._reply_states)
            or sequence.num_computed in sequence.checkpoints
        ):
            return
        slot = self._next_reply_slot(sequence, sequence.num_computed)
        if slot is None:
            return
        assert sequence.slot is not None
        sequence.checkpoints[sequence.num_computed] = sequence.slot
        self._num_planned_checkpoints += 1
        sequence.reply_checkpoint = sequence.num_computed
        sequence.initial_slot, sequence.slot = sequence.slot, slot

    def keep_passed_state(self, sequence: Sequence) -> KeptState:
        """The same for a sequence with drafts, which may cross a boundary in any step: the step
        that does copies the state there to a separate slot. `note_passed_state` learns which step
        it was.
        """
        if not (self.keeps_checkpoints and self._reply_states) or sequence.keep.slot:
            return sequence.keep
        place = sequence.num_computed // self.page_size * self.page_size
        if place <= max(sequence.num_in_slot - 1, sequence.reply_checkpoint or 0):
            return NOTHING_KEPT
        slot = None if place in sequence.checkpoints else self._next_reply_slot(sequence, place)
        if slot is not None:
            sequence.keep = KeptState(place, slot)
            sequence.reply_checkpoint = place
            self._num_planned_checkpoints += 1
        return sequence.keep

    def note_passed_state(self, sequence: Sequence, keep: KeptState, start: int) -> None:
        """A step that was to keep a state has ended; it replayed the tokens from `num_in_slot` to
        `start`.
        """
        place, slot = sequence.keep
        if keep == sequence.keep and sequence.num_in_slot <= place <= start:
            sequence.checkpoints[place] = slot
            sequence.keep = NOTHING_KEPT
        elif place <= start:  # it was crossed before it had a slot
            self._forget_kept_state(sequence)

    def _forget_kept_state(self, sequence: Sequence) -> None:
        if sequence.keep.slot:
            self._slots.give_back(sequence.keep.slot)
            self._num_planned_checkpoints -= 1
            sequence.keep = NOTHING_KEPT

    def end_plan(self) -> None:
        """The plan is complete. Later plans run after it, so they may overwrite what its rows
        read.
        """
        self._pinned.clear()

    def commit(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Registers the computed pages of the sequence, for others to reuse.

        If another sequence registered a page first, this sequence uses that page and frees its own.
        So a sequence that uses a registered page uses all pages before it, and idle pages can
        always be evicted. Returns the changed parts of the sequence's page table, as (first, one
        past the last) entries.
        """
        if not self.is_enabled or sequence not in self._owners:
            return []
        self._extend_digests(sequence)
        num_known = min(len(sequence.tokens), sequence.num_computed)
        if self.has_slots and not self._reply_states:  # keys of a reply come from its states
            num_known = min(num_known, sequence.num_prompt_tokens)
        replaced = (
            self._register_pages(sequence, num_known // self.page_size) if self.has_pages else []
        )
        for num_tokens in [n for n in sequence.checkpoints if n <= num_known]:
            self._attach_checkpoint(sequence, num_tokens)
        return replaced

    def keep_session(self, sequence: Sequence) -> None:
        """The sequence has ended and is committed: pins the prefix from which its session's next
        request continues.
        """
        session_id = sequence.request.session_id
        if session_id is None or not self.is_enabled:
            return
        digests = sequence.digests
        num_pages = sequence.num_registered_pages if self.has_pages else len(digests)
        states: list[int] = []
        if self.has_slots:
            states = self._session_states(sequence, num_pages)
            num_pages = max(states, default=0)
        self.sessions.keep(
            session_id,
            num_tokens=len(sequence.tokens),
            page_digests=digests[:num_pages] if self.has_pages else (),
            checkpoints=[digests[n - 1] for n in states],
        )

    def _session_states(self, sequence: Sequence, num_pages: int) -> list[int]:
        """The numbers of pages before the states from which a next request may continue.

        Its prompt may contain the reply, or not: the same request may come again, or without the
        thinking. In the second case the last message, which was opened for the model to continue,
        differs too.
        """
        prompt_end = max(sequence.request.boundaries, default=sequence.num_prompt_tokens - 1)
        limits = {min(num_pages, prompt_end // self.page_size), num_pages}
        return sorted(
            {self._checkpoints.nearest(sequence.digests, limit) for limit in limits} - {0}
        )

    def release(self, sequence: Sequence) -> None:
        """Releases everything the sequence holds. Registered pages stay, idle, until memory is
        short.
        """
        for page in reversed(sequence.pages):  # the index needs the last page to become idle first
            self._drop_page(page)
        if self.is_enabled and not self.has_pages:
            for digest in sequence.digests[: sequence.num_computed // self.page_size]:
                self._index.remember(digest)
        for slot in sequence.checkpoints.values():
            self._slots.give_back(slot)
        self._forget_kept_state(sequence)
        if sequence.slot is not None:
            self._slots.give_back(sequence.slot)
        self._num_planned_checkpoints -= len(sequence.checkpoints)
        self._owners.discard(sequence)
        sequence.pages, sequence.checkpoints = [], {}
        sequence.slot = sequence.initial_slot = sequence.reply_checkpoint = None
        sequence.num_registered_pages = sequence.num_computed = sequence.num_in_slot = 0

    def check(self) -> None:
        """Asserts that every page and every slot is accounted for exactly once."""
        self._index.check(self.has_pages)
        self.sessions.check()
        used = Counter(page for sequence in self._owners for page in sequence.pages)
        free, idle = self._pages.free_pages(), self._index.idle_pages() | self._index.kept_pages()
        for page in range(1, self.num_pages):
            users = used.get(page, 0)
            assert self._pages.num_users(page) == users, f"page {page} has a wrong number of users"
            assert (page in free) + (page in idle) + (users > 0) == 1, f"page {page} leaked"
            assert users < 2 or self._index.holds(page), (
                f"page {page} is shared, but not registered"
            )
        assert 0 not in used, "a sequence owns the reserved page"
        assert all(self._index.holds(page) for page in idle)
        for sequence in self._owners:
            for index, digest in enumerate(sequence.digests[: sequence.num_registered_pages]):
                node = self._index.node(digest)
                assert node is not None, f"page {sequence.pages[index]} was evicted while in use"
                assert node.page == sequence.pages[index]
        planned = [slot for sequence in self._owners for slot in sequence.checkpoints.values()]
        planned += [sequence.keep.slot for sequence in self._owners if sequence.keep.slot]
        taken = [sequence.slot for sequence in self._owners if sequence.slot is not None] + planned
        taken += [*self._checkpoints.slots(), *self._slots.free_slots()]
        assert sorted(taken) == list(range(1, self.num_slots)), "a slot leaked or is owned twice"
        assert len(planned) == self._num_planned_checkpoints
        assert len(planned) + len(self._checkpoints) <= self.max_checkpoints

    def _outcome(self, sequence: Sequence, hit: PrefixHit) -> str:
        if not self.is_enabled or sequence.needs_every_token:
            return "miss_disabled"
        if hit.num_tokens:
            return "hit"
        if not self.max_hit(sequence):
            return "miss_short_prompt"
        if self._index.is_empty:
            return "miss_empty"
        if hit.num_known_tokens:
            return "miss_no_checkpoint"
        return (
            "miss_evicted" if self._index.num_past_pages(sequence.digests, 1) else "miss_no_prefix"
        )

    def _missed_tokens(self, sequence: Sequence, hit: PrefixHit) -> dict[str, int]:
        """Why tokens of a prompt must be computed; together with the reused ones, these are all its
        tokens.
        """
        if not self.is_enabled or sequence.needs_every_token:
            return {"disabled": len(sequence.tokens)}
        limit = self.max_hit(sequence)
        num_past = (
            self._index.num_past_pages(sequence.digests, limit // self.page_size) * self.page_size
        )
        num_past = max(num_past, hit.num_known_tokens)
        return {
            "no_checkpoint": hit.num_known_tokens - hit.num_tokens,
            "evicted": num_past - hit.num_known_tokens,
            "no_prefix": limit - num_past,
            "partial_page": len(sequence.tokens) - limit,
        }

    def _extend_digests(self, sequence: Sequence) -> None:
        request = sequence.request
        extend_digests(
            sequence.digests,
            sequence.tokens,
            self.page_size,
            request.cache_scope,
            request.segments,
        )

    def _take_slot(self, hit: PrefixHit) -> int | None:
        """A free slot, or else a checkpoint's: running sequences come before cached ones."""
        if not self._slots.num_free:
            # Its own goes last: then the sequence continues in the same slot that it reads from.
            others = self._pinned | {hit.checkpoint_slot}
            if not (self._evict_checkpoint(others) or self._evict_checkpoint(self._pinned)):
                return None
        return self._slots.take()

    def _take_checkpoint_slot(self, sequence: Sequence, num_tokens: int) -> int | None:
        """A free slot, or else that of a less valuable checkpoint; a session's checkpoint may
        replace any.
        """
        has_budget = len(self._checkpoints) + self._num_planned_checkpoints < self.max_checkpoints
        if not (has_budget and self._slots.num_free):
            worth = math.inf
            if sequence.request.session_id is None:
                below = max((n for n in sequence.checkpoints if n < num_tokens), default=0)
                saved = num_tokens - max(below, self._nearest_below(sequence, num_tokens))
                worth = sequence.targets.get(num_tokens, GUESS) * saved
            if not self._evict_checkpoint(self._pinned, worth):
                return None
        return self._slots.take()

    def _nearest_below(self, sequence: Sequence, num_tokens: int) -> int:
        # Tokens in flight have no digests yet.
        num_pages = min(num_tokens // self.page_size - 1, len(sequence.digests))
        return self._checkpoints.nearest(sequence.digests, num_pages) * self.page_size

    def _next_reply_slot(self, sequence: Sequence, num_tokens: int) -> int | None:
        """The slot of the reply's previous checkpoint, or else another, but at most half of the
        slots for such replies.
        """
        previous = sequence.reply_checkpoint
        if previous in sequence.checkpoints:
            self._num_planned_checkpoints -= 1
            return sequence.checkpoints.pop(previous)
        if previous is not None:
            digest = sequence.digests[previous // self.page_size - 1]
            slot = self._checkpoints.slot_at(digest)
            if (
                slot is not None
                and slot not in self._pinned
                and not self._checkpoints.is_pinned(digest)
            ):
                return self._checkpoints.forget(digest)
        elif sequence.request.session_id is None:
            num_replies = sum(owner.reply_checkpoint is not None for owner in self._owners)
            if num_replies >= self.max_checkpoints // 2:
                return None
        return self._take_checkpoint_slot(sequence, num_tokens)

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

    def _evict_checkpoint(self, keep: Collection[int | None], worth: float = math.inf) -> bool:
        """Evicts the least valuable checkpoint not in `keep`, if it is worth less than `worth`."""
        slot = self._checkpoints.evict_for(worth, keep)
        if slot is None:
            return False
        self._slots.give_back(slot)
        self.counters["evicted_checkpoints"] += 1
        return True

    def _register_pages(self, sequence: Sequence, num_full: int) -> list[tuple[int, int]]:
        replaced: list[tuple[int, int]] = []
        for index in range(sequence.num_registered_pages, num_full):
            digest, page = sequence.digests[index], sequence.pages[index]
            known = self._index.node(digest)
            if known is None:
                parent = sequence.digests[index - 1] if index else ROOT
                self._index.insert(digest, Node(page, parent))
                continue
            self._pages.share(known.page)
            self._index.set_used(known.page)
            sequence.pages[index] = known.page
            self._drop_page(page)
            if replaced and replaced[-1][1] == index:
                replaced[-1] = (replaced[-1][0], index + 1)
            else:
                replaced.append((index, index + 1))
        sequence.num_registered_pages = max(sequence.num_registered_pages, num_full)
        return replaced

    def _attach_checkpoint(self, sequence: Sequence, num_tokens: int) -> None:
        slot = sequence.checkpoints.pop(num_tokens)
        self._num_planned_checkpoints -= 1
        digest = sequence.digests[num_tokens // self.page_size - 1]
        if digest in self._checkpoints:
            self._slots.give_back(slot)
            return
        below = self._nearest_below(sequence, num_tokens)
        self._checkpoints.attach(
            digest,
            slot,
            base=sequence.digests[below // self.page_size - 1] if below else None,
            saved=num_tokens - below,
            chance=sequence.targets.get(num_tokens, GUESS),
        )
