"""Arrival times and lengths of requests: recorded traces of real services, or random arrivals.

Reads two public formats: Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens) and Mooncake's
JSON lines (timestamp in ms, input_length, output_length, and hash_ids that name shared blocks of
the prompt). Knows lengths and times, not the prompts; computes which tokens could be reused.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import itertools
import json
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from penstock.errors import PenstockError

BLOCK_TOKENS = 512  # per hash id in a Mooncake trace
PAGE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Arrival:
    """A future request: its time since the first one, and its lengths in tokens."""

    at_s: float
    input_len: int
    output_len: int
    block_ids: tuple[int, ...] = ()  # prompts with equal leading ids share a prefix
    block_tokens: int = BLOCK_TOKENS  # per id


def read_trace(
    path: Path, *, speedup: float = 1.0, limit: int | None = None, scale: float = 1.0
) -> list[Arrival]:
    """The first `limit` arrivals of a trace, in order of time, `speedup` times as fast and `scale`
    times as long as recorded."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            first = file.readline()
            file.seek(0)
            rows = _read_json_lines(file) if first.startswith("{") else _read_csv(file)
            recorded = list(itertools.islice(rows, limit))
    except OSError as error:
        raise PenstockError(
            f"Cannot read the trace {path}", f"{error.strerror or error}.", "Use an existing file."
        ) from error
    except (ValueError, KeyError, TypeError, OverflowError, csv.Error) as error:
        raise PenstockError(
            f"{path} is not a trace that can be replayed",
            f"{type(error).__name__}: {error}.",
            "Use an Azure CSV (TIMESTAMP,ContextTokens,GeneratedTokens) or Mooncake JSON lines.",
        ) from error
    if not recorded:
        raise PenstockError(f"{path} has no requests")
    recorded.sort(key=lambda arrival: arrival.at_s)
    start_s = recorded[0].at_s
    block_tokens = max(1, round(BLOCK_TOKENS * scale))
    return [
        Arrival(
            (arrival.at_s - start_s) / speedup,
            max(1, arrival.input_len * block_tokens // BLOCK_TOKENS),
            max(1, arrival.output_len * block_tokens // BLOCK_TOKENS),
            arrival.block_ids,
            block_tokens,
        )
        for arrival in recorded
    ]


def _read_csv(file: Iterable[str]) -> Iterator[Arrival]:
    for row in csv.DictReader(file):
        time = datetime.datetime.fromisoformat(row["TIMESTAMP"]).replace(tzinfo=datetime.UTC)
        yield Arrival(time.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _read_json_lines(file: Iterable[str]) -> Iterator[Arrival]:
    numbers: dict[object, int] = {}  # of blocks: their ids may be negative, or texts
    for line in file:
        if not line.strip():
            continue
        row = json.loads(line)
        at_s = row["timestamp"] / 1e3
        if not math.isfinite(at_s):
            raise ValueError(f"a timestamp is {row['timestamp']}")
        ids = row.get("hash_ids", ())
        blocks = tuple(numbers.setdefault(id, len(numbers)) for id in ids)
        yield Arrival(at_s, int(row["input_length"]), int(row["output_length"]), blocks)


def poisson_arrivals(
    num_requests: int, rate: float, input_len: int, output_len: int, seed: int
) -> list[Arrival]:
    """Independent requests, `rate` per second on average; inf: all at once."""
    rng = Random(f"arrivals-{seed}")
    arrivals = []
    at_s = 0.0
    for _ in range(num_requests):
        arrivals.append(Arrival(at_s, input_len, output_len))
        at_s += rng.expovariate(rate) if rate != math.inf else 0.0
    return arrivals


@dataclass(frozen=True, slots=True)
class Clamp:
    """The limits of a server or a user: clamps lengths to them."""

    min_input: int
    max_input: int | None = None
    max_output: int | None = None
    max_total: int | None = None  # input and output together

    def apply(self, arrival: Arrival) -> Arrival:
        output_len = max(1, arrival.output_len)
        if self.max_output is not None:
            output_len = min(output_len, self.max_output)
        if self.max_total is not None:
            output_len = min(output_len, self.max_total - self.min_input)
        input_len = arrival.input_len
        if self.max_input is not None:
            input_len = min(input_len, self.max_input)
        if self.max_total is not None:
            input_len = min(input_len, self.max_total - output_len)
        return dataclasses.replace(
            arrival, input_len=max(self.min_input, input_len), output_len=output_len
        )


@dataclass(frozen=True, slots=True)
class PossibleReuse:
    """Prompt tokens of one load that a prefix cache could have."""

    unbounded: int  # with a cache that evicts nothing
    kv_tokens: int | None  # size of the server's cache, if it reports it
    bounded: int | None  # with a cache of that size

    def in_words(self) -> str:
        words = f"{self.unbounded:,} could be in one that evicts nothing"
        if self.bounded is not None:
            words += f", {self.bounded:,} in one with {self.kv_tokens:,} tokens"
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
    """The tokens of each prompt that a prefix cache of `max_tokens` has; None: it evicts nothing.

    A reference for a server's own count: an LRU cache of whole pages that can continue after every
    page. Prompts arrive one after the other, and each is cached at once.
    """
    max_pages = None if max_tokens is None else max_tokens // page_tokens
    pages: OrderedDict[int, None] = OrderedDict()  # in order of eviction
    reused = []
    for number, arrival in enumerate(arrivals):
        keys = list(_page_keys(arrival, page_tokens, number))
        limit = (arrival.input_len - 1) // page_tokens
        known = next(
            (i for i, key in enumerate(keys[:limit]) if key not in pages), min(limit, len(keys))
        )
        reused.append(known * page_tokens)
        for key in reversed(keys):  # a prompt's last page is evicted first
            pages[key] = None
            pages.move_to_end(key)
        while max_pages is not None and len(pages) > max_pages:
            pages.popitem(last=False)
    return reused


def _page_keys(arrival: Arrival, page_tokens: int, number: int) -> Iterator[int]:
    """A key for each page of prompt and reply, equal if all tokens up to its end are."""
    num_prompt, num_all = arrival.input_len, arrival.input_len + arrival.output_len
    key = 0
    for end in range(page_tokens, num_all + page_tokens, page_tokens):
        last_block = (end - 1) // arrival.block_tokens
        is_named = end <= num_prompt and last_block < len(arrival.block_ids)
        first_block = (end - page_tokens) // arrival.block_tokens
        content = arrival.block_ids[first_block : last_block + 1] if is_named else (-1, number)
        key = hash((key, content))
        yield key
