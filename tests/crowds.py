"""Crowds of clients: polite clients, whose latency is measured, and abusive ones around them.

Abusive clients send half a header or half a body, send or read a few bytes at a time, or
disconnect. They run in a separate process, so that their own cost is not measured as the server's.
This file is that program; arguments: host, port, number of clients, seconds and, optionally, one
behaviour.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

Address = tuple[str, int]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

ARRIVAL_S = 10.0  # all abusive clients connect within this time
PAUSES_S = (0.2, 0.6)  # between requests of a polite client
POLITE_TOKENS = 8


def head(num_body_bytes: int) -> bytes:
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
        % num_body_bytes
    )


def stream_request(draw: random.Random, num_tokens: int) -> bytes:
    question = f"Tell me about river {draw.randrange(10**6)}."
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    data = json.dumps(body).encode()
    return head(len(data)) + data


# Polite clients


@dataclass(slots=True)
class Waits:
    """Seconds that polite clients waited for each of their requests."""

    first_s: list[float] = field(default_factory=list)  # time to first text
    whole_s: list[float] = field(default_factory=list)

    def __add__(self, other: Waits) -> Waits:
        return Waits(self.first_s + other.first_s, self.whole_s + other.whole_s)


async def ask_politely(address: Address, seed: int, until: float, waits: Waits) -> None:
    """Sends one short request after the other."""
    draw = random.Random(seed)
    while time.monotonic() < until:
        started = time.monotonic()
        reader, writer = await asyncio.open_connection(*address)
        writer.write(stream_request(draw, POLITE_TOKENS))
        first = await reader.readline()
        assert b"200" in first, first
        await reader.readuntil(b"data: ")
        waits.first_s.append(time.monotonic() - started)
        await reader.readuntil(b"data: [DONE]")
        waits.whole_s.append(time.monotonic() - started)
        writer.close()
        await asyncio.sleep(draw.uniform(*PAUSES_S))


def wait_in_peace(address: Address, num_polite: int, seconds: float) -> Waits:
    async def ask_all() -> Waits:
        until, waits = time.monotonic() + seconds, Waits()
        await asyncio.gather(
            *(ask_politely(address, seed, until, waits) for seed in range(num_polite))
        )
        return waits

    return asyncio.run(ask_all())


def wait_among(
    address: Address, num_polite: int, num_rude: int, seconds: float, manner: str = ""
) -> tuple[Waits, dict[str, Any]]:
    """Latency of polite clients among abusive ones, and how the abusive connections ended."""
    words = [sys.executable, __file__, *map(str, address), str(num_rude), str(seconds), manner]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as rude:
        waits = wait_in_peace(address, num_polite, seconds)
        said, _ = rude.communicate(timeout=60.0)
    return waits, json.loads(said)


# Abusive clients


async def half_send_head(streams: Streams, draw: random.Random) -> None:
    streams[1].write(head(100)[: draw.randrange(5, 60)])
    await asyncio.sleep(draw.uniform(1, 60))  # the server's limit is 10 seconds


async def half_send_body(streams: Streams, draw: random.Random) -> None:
    streams[1].write(head(100_000) + b'{"messages": [' + b" " * draw.randrange(50_000))
    await asyncio.sleep(draw.uniform(1, 60))  # the server's limit is 30 seconds


async def read_slowly(streams: Streams, draw: random.Random) -> None:
    streams[1].write(stream_request(draw, 8))
    for _ in range(draw.randrange(40, 120)):
        if not await streams[0].read(1):
            return
        await asyncio.sleep(0.5)


async def leave_midway(streams: Streams, draw: random.Random) -> None:
    streams[1].write(stream_request(draw, 400))
    for _ in range(draw.randrange(12)):
        if not await streams[0].readline():
            return
    streams[1].transport.abort()
    await asyncio.sleep(draw.uniform(10, 30))


async def drip(streams: Streams, draw: random.Random) -> None:
    """Sends a header that never ends, a byte per second, until the server closes the connection."""
    closing = asyncio.ensure_future(streams[0].read())
    for byte in itertools.chain(b"GET /v1/models HTTP/1.1\r\nx-slow: ", itertools.repeat(ord("a"))):
        streams[1].write(bytes([byte]))
        done, _ = await asyncio.wait({closing}, timeout=1.0)
        if done:
            return


Manner = Callable[[Streams, random.Random], Coroutine[Any, Any, None]]
# Replies are short: generation speed is measured elsewhere.
STORM: dict[Manner, int] = {half_send_head: 8, half_send_body: 8, read_slowly: 3, leave_midway: 1}


@dataclass(slots=True)
class RudeCrowd:
    address: Address
    until: float
    manners: dict[Manner, int]  # weights of each behaviour
    counts: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0  # longest connection that did not end with the run

    async def act(self, seed: int) -> None:
        draw = random.Random(seed)
        await asyncio.sleep(draw.uniform(0, ARRIVAL_S))
        while time.monotonic() < self.until:
            (manner,) = draw.choices(list(self.manners), list(self.manners.values()))
            started = time.monotonic()
            try:
                streams = await asyncio.open_connection(*self.address, limit=2**16)
            except OSError:
                self.counts["refused"] += 1
                await asyncio.sleep(1)
                continue
            self.counts[manner.__name__] += 1
            try:
                async with asyncio.timeout(max(0.1, self.until - time.monotonic())):
                    await manner(streams, draw)
                self.longest_s = max(self.longest_s, time.monotonic() - started)
            except TimeoutError:
                self.counts["still there at the end"] += 1
            except OSError:
                self.counts["cut off"] += 1
            finally:
                streams[1].transport.abort()


async def be_rude(address: Address, num_rude: int, seconds: float, manner: str) -> RudeCrowd:
    manners: dict[Manner, int] = {globals()[manner]: 1} if manner else STORM
    crowd = RudeCrowd(address, time.monotonic() + seconds, manners)
    await asyncio.gather(*(crowd.act(seed) for seed in range(num_rude)))
    return crowd


def main() -> None:
    host, port, num_rude, seconds, manner = sys.argv[1:]
    crowd = asyncio.run(be_rude((host, int(port)), int(num_rude), float(seconds), manner))
    print(json.dumps({"counts": crowd.counts, "longest_s": crowd.longest_s}))


if __name__ == "__main__":
    main()
