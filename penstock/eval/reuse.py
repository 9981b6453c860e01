"""How much of a load a prefix cache could reuse: a reference for a server's own count.

Simulates a cache of whole pages that can continue after every page and evicts the least recently
used one. Prompts come one after the other, and each is cached as soon as it has come. Knows
arrivals only, no server.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count

from penstock.eval.traces import Arrival

PAGE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class PossibleReuse:
    """Of one load, in tokens."""

    unbounded: int  # with a cache that evicts nothing
    kv_tokens: int | None  # size of the server's cache, if it reports it
    bounded: int | None  # with a cache of that size

    def in_words(self) -> str:
        words = f"{self.unbounded:,} could be in one that evicts nothing"
        if self.bounded is not None:
            words += f", {self.bounded:,} in one of {self.kv_tokens:,} tokens"
        return words

    def as_dict(self) -> dict[str, int | None]:
        return {
            "possible_cached_tokens": self.unbounded,
            "possible_cached_tokens_same_memory": self.bounded,
            "server_kv_tokens": self.kv_tokens,
        }


def possible_reuse(
    arrivals: Iterable[Arrival], max_tokens: int | None = None, page_tokens: int = PAGE_TOKENS
) -> list[int]:
    """The tokens of each prompt that such a cache of `max_tokens` has; None: it evicts nothing."""
    max_pages = None if max_tokens is None else max_tokens // page_tokens
    pages: OrderedDict[int, None] = OrderedDict()  # the next to be evicted first
    numbers = count()
    reused = []
    for arrival in arrivals:
        keys = list(_page_keys(arrival, page_tokens, next(numbers)))
        limit = (arrival.input_len - 1) // page_tokens
        known = next(
            (i for i, key in enumerate(keys[:limit]) if key not in pages), min(limit, len(keys))
        )
        reused.append(known * page_tokens)
        for key in reversed(keys):  # of a prompt, the last page is evicted first
            pages[key] = None
            pages.move_to_end(key)
        while max_pages is not None and len(pages) > max_pages:
            pages.popitem(last=False)
    return reused


def _page_keys(arrival: Arrival, page_tokens: int, number: int) -> Iterator[int]:
    """One for each page of prompt and reply, equal if all tokens up to its end are."""
    num_prompt, num_all = arrival.input_len, arrival.input_len + arrival.output_len
    key = 0
    for end in range(page_tokens, num_all + page_tokens, page_tokens):
        last_block = (end - 1) // arrival.block_tokens
        is_named = end <= num_prompt and last_block < len(arrival.block_ids)
        first_block = (end - page_tokens) // arrival.block_tokens
        content = arrival.block_ids[first_block : last_block + 1] if is_named else (-1, number)
        key = hash((key, content))
        yield key
