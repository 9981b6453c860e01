"""Many connections and requests at full size: a million short requests, ten thousand open
connections, and a thousand abusive clients.

Measures the server's resources and the latency of polite clients. Takes minutes each; numbers are
printed as JSON lines, and those of one run are in results/cpu/api.json.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import resource
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import uvloop

from crowds import Waits, stream_request, wait_among, wait_in_peace
from penstock.assets import default_model
from penstock.serve.connection import MAX_HEAD_S
from serving import Server, eventually, start_server
from small_models import HYBRID_DENSE
from test_clients_full import answers_by_status, report

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * 3600)]

NUM_REQUESTS = int(os.environ.get("SOAK_REQUESTS", 1_000_000))
NUM_IN_FLIGHT = 64
CHATS = 8  # one in this many requests; the others are completions
REPEATED = 5  # one in this many completions repeats, so its prefix may be cached
SAMPLE_S = 10.0
WARM_UP_SHARE = 0.2  # of the requests, while caches fill and pools grow
MAX_MIB_PER_HOUR = 5.0
# A complete engine with only two layers: leaks do not depend on the compute.
SMALLEST: dict[str, Any] = {
    **HYBRID_DENSE,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "full_attention_interval": 2,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "vocab_size": 2560,  # from the embedded model, whose tokenizer it uses
}

NUM_IDLE = 9000
NUM_STREAMS = 1000
NUM_AT_ONCE = 250  # connections opened concurrently
TOKENS = 8
AWAKE_S = 40.0  # interval of small requests on idle connections; the server closes them after 75
MAX_SERVER_MB = 500.0
MAX_IDLE_KB = 10.0

NUM_RUDE = 1000
DRIP_S = 60.0
NUM_POLITE = 8
QUIET_S = 30.0  # before and after, because other load may change
WARM_UP_S = 30.0
STORM_S = float(os.environ.get("STORM_SECONDS", 300))
MAX_LEAK_MB = 16.0
MAX_THREADS = 32  # thread pools grow to their maximum under any load


@dataclass(frozen=True, slots=True)
class Footprint:
    """Resources of an idle server."""

    server_mb: float
    engine_mb: float
    num_descriptors: int
    num_threads: int
    free_pages: int
    free_slots: int
    num_unfinished: int

    @classmethod
    def of(cls, server: Server) -> Footprint:
        stats = server.stats()
        return cls(
            server_mb=resident_mb(server.process.pid),
            engine_mb=resident_mb(server.engine_pid),
            num_descriptors=count_entries(server.process.pid, "fd"),
            num_threads=count_entries(server.process.pid, "task"),
            free_pages=stats["num_free_pages"],
            free_slots=stats["num_free_slots"],
            num_unfinished=stats["num_running"] + stats["num_waiting"],
        )


def resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) / 1024


def count_entries(pid: int, folder: str) -> int:
    return len(list(Path(f"/proc/{pid}/{folder}").iterdir()))


# A million short requests


@dataclass(frozen=True, slots=True)
class Sample:
    """Both processes under load."""

    seconds: float
    num_answered: int
    server_mb: float
    engine_mb: float
    counts: tuple[int, ...]  # descriptors and threads of server and engine

    @classmethod
    def of(cls, server: Server, seconds: float, num_answered: int) -> Sample:
        pids = (server.process.pid, server.engine_pid)
        counts = tuple(count_entries(pid, folder) for pid in pids for folder in ("fd", "task"))
        return cls(seconds, num_answered, *map(resident_mb, pids), counts)


def short_request(number: int) -> bytes:
    if number % CHATS == 0:
        path, asked = (
            b"/v1/chat/completions",
            {"messages": [{"role": "user", "content": f"{number}?"}]},
        )
    else:
        place = number % 100 if number % REPEATED == 0 else number
        path, asked = (
            b"/v1/completions",
            {"prompt": f"{place} and {place * 7919 % 10007} are numbers"},
        )
    body = json.dumps({**asked, "max_tokens": 1}).encode()
    return b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (
        path,
        len(body),
        body,
    )


class Asker(asyncio.Protocol):
    """A keep-alive connection: sends a request, reads the response and repeats until no number is
    left.
    """

    num_answered = 0  # of all connections

    def __init__(self, numbers: Iterator[int]) -> None:
        self._numbers = numbers
        self._unread = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._ask()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("closed by the server"))

    def _ask(self) -> None:
        number = next(self._numbers, None)
        if number is None:
            self.done.set_result(None)
            self._transport.close()
        else:
            self._transport.write(short_request(number))

    def data_received(self, data: bytes) -> None:
        self._unread += data
        head, end, body = self._unread.partition(b"\r\n\r\n")
        if not end:
            return
        (length,) = re.findall(rb"content-length: (\d+)", head)
        if len(body) < int(length):
            return
        if not head.startswith(b"HTTP/1.1 200") and not self.done.done():
            self.done.set_exception(AssertionError(self._unread.decode()))
            return
        self._unread = b""
        Asker.num_answered += 1
        self._ask()


async def ask_all(server: Server, numbers: Iterator[int]) -> list[Sample]:
    """Sends every number once; returns the server's resources during the run."""
    loop, started = asyncio.get_running_loop(), time.monotonic()
    Asker.num_answered = 0
    made = [
        await loop.create_connection(lambda: Asker(numbers), *server.address)
        for _ in range(NUM_IN_FLIGHT)
    ]
    answering = asyncio.gather(*(asker.done for _, asker in made))
    samples = []
    while not answering.done():
        await asyncio.wait([answering], timeout=SAMPLE_S)
        samples.append(Sample.of(server, time.monotonic() - started, Asker.num_answered))
        if not answering.done() and len(samples) % 6 == 0:
            report("soak so far", **asdict(samples[-1]))
    await answering
    return samples


@pytest.fixture
def small_server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "config.json").write_text(json.dumps(SMALLEST))
    engine = {"model": str(tmp_path), "random_weights": True, "max_model_len": 256}
    engine |= {
        "memory_gb": 0.02,
        "page_size": 4,
    }  # eight thousand pages: full after a few thousand prompts
    with (
        open(os.devnull, "w") as nowhere,
        start_server(engine, serve={"tokenizer": str(default_model())}, log=nowhere) as running,
    ):
        yield running


def test_a_million_short_requests_leave_nothing_behind(small_server: Server) -> None:
    server = small_server
    uvloop.run(ask_all(server, iter(range(1000))))
    assert eventually(server.is_idle)
    before = Footprint.of(server)
    samples = uvloop.run(ask_all(server, iter(range(NUM_REQUESTS))))
    assert eventually(server.is_idle)
    after = Footprint.of(server)
    steady = [sample for sample in samples if sample.num_answered > WARM_UP_SHARE * NUM_REQUESTS][
        :-1
    ]
    hours = [sample.seconds / 3600 for sample in steady]
    per_hour = {
        name: statistics.linear_regression(
            hours, [getattr(sample, name) for sample in steady]
        ).slope
        for name in ("server_mb", "engine_mb")
    }
    num_per_hour = (steady[-1].num_answered - steady[0].num_answered) / (hours[-1] - hours[0])
    report(
        "soak",
        requests=NUM_REQUESTS,
        seconds=samples[-1].seconds,
        mib_per_hour=per_hour,
        mib_per_100k={name: slope * 1e5 / num_per_hour for name, slope in per_hour.items()},
        before=asdict(before),
        after=asdict(after),
        samples=[
            (s.num_answered, s.server_mb, s.engine_mb) for s in steady[:: max(1, len(steady) // 20)]
        ],
        prefix=server.stats()["prefix"],
    )
    assert samples[-1].num_answered == NUM_REQUESTS
    assert set(answers_by_status(server)) == {"200"}
    assert len({sample.counts for sample in steady}) == 1  # the same descriptors and threads
    assert (after.free_pages, after.free_slots) == (before.free_pages, before.free_slots)
    assert max(per_hour.values()) <= MAX_MIB_PER_HOUR, per_hour


# Ten thousand open connections


class Idle(asyncio.Protocol):
    """A connection kept open by a small request now and then."""

    num_lost = 0  # of all connections

    def __init__(self) -> None:
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._ask()

    def _ask(self) -> None:
        self.transport.write(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
        self._next = asyncio.get_running_loop().call_later(AWAKE_S, self._ask)

    def data_received(self, data: bytes) -> None:
        assert data.startswith((b"HTTP/1.1 200", b"{")), data
        if not self.answered.done():
            self.answered.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        Idle.num_lost += 1
        self._next.cancel()


class Streamed(asyncio.Protocol):
    """A connection that reads one reply to its end."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._read = b""
        self._asked_at = time.monotonic()
        self.first_s = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.write(stream_request(random.Random(self._number), TOKENS))

    def data_received(self, data: bytes) -> None:
        self.first_s = self.first_s or time.monotonic() - self._asked_at
        self._read += data
        if b"data: [DONE]" in data:
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError(f"closed after {self._read!r}"))


async def open_many(server: Server) -> dict[str, Any]:
    """Opens idle connections, then streams beside them; returns the server's resources and how many
    connections failed.
    """
    loop, Idle.num_lost = asyncio.get_running_loop(), 0
    empty_mb, num_before = resident_mb(server.process.pid), count_entries(server.process.pid, "fd")
    idle: list[Idle] = []
    while len(idle) < NUM_IDLE:
        some = [loop.create_connection(Idle, *server.address) for _ in range(NUM_AT_ONCE)]
        opened = [protocol for _, protocol in await asyncio.gather(*some)]
        await asyncio.gather(*(protocol.answered for protocol in opened))
        idle += opened
    idle_mb = resident_mb(server.process.pid)

    started = time.monotonic()
    made = [
        loop.create_connection(lambda n=n: Streamed(n), *server.address) for n in range(NUM_STREAMS)
    ]
    streams = [protocol for _, protocol in await asyncio.gather(*made)]
    num_open = 0  # most at once; new ones may wait to be accepted
    ending = asyncio.gather(*(stream.done for stream in streams), return_exceptions=True)
    peak_mb = idle_mb
    while not ending.done():
        await asyncio.wait([ending], timeout=0.5)
        peak_mb = max(peak_mb, resident_mb(server.process.pid))
        num_open = max(num_open, count_entries(server.process.pid, "fd") - num_before)
    errors = [repr(error) for error in await ending if error is not None]
    firsts = sorted(stream.first_s for stream in streams)
    lost = Idle.num_lost
    for connection in idle:
        connection.transport.abort()
    return {
        "num_open": num_open,
        "idle_kb": (idle_mb - empty_mb) * 1024 / NUM_IDLE,
        "server_mb": {"empty": empty_mb, "idle": idle_mb, "peak": peak_mb},
        "seconds": time.monotonic() - started,
        "first_token_s": {"p50": firsts[len(firsts) // 2], "last": firsts[-1]},
        "num_lost": lost,
        "errors": errors,
    }


def test_ten_thousand_connections_cost_little_and_a_thousand_of_them_stream() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard > NUM_IDLE + NUM_STREAMS + 100, f"only {hard} descriptors are allowed"
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))  # the usual limit
    engine = {"max_model_len": 256, "memory_gb": 2.0, "max_rows": NUM_STREAMS}
    with (
        open(os.devnull, "w") as nowhere,
        start_server(engine, log=nowhere) as server,
    ):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        try:
            found = uvloop.run(open_many(server))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert eventually(server.is_idle, 60.0)
        report("ten thousand connections", **found)
        assert found["num_open"] == NUM_IDLE + NUM_STREAMS
        assert (found["num_lost"], found["errors"]) == (0, [])
        assert found["server_mb"]["peak"] < MAX_SERVER_MB
        assert found["idle_kb"] < MAX_IDLE_KB
        assert set(answers_by_status(server)) == {"200"}


# Abusive connections


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with start_server(engine={"max_model_len": 8192, "memory_gb": 0.5}) as running:
        yield running


def p99(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=100)[98]


def test_a_thousand_dripping_heads_end_in_ten_seconds_and_delay_no_other_client(
    server: Server,
) -> None:
    def in_peace() -> Waits:
        return wait_in_peace(server.address, NUM_POLITE, DRIP_S / 2)

    in_peace()
    quiet = in_peace()
    dripping, rude = wait_among(server.address, NUM_POLITE, NUM_RUDE, DRIP_S, "drip")
    quiet += in_peace()
    report(
        "dripping heads",
        seconds=DRIP_S,
        connections=NUM_RUDE,
        rude=rude,
        polite_requests=[len(quiet.first_s), len(dripping.first_s)],
        first_token_p50_s=[statistics.median(waits.first_s) for waits in (quiet, dripping)],
        first_token_p99_s=[p99(waits.first_s) for waits in (quiet, dripping)],
    )
    assert rude["counts"]["drip"] > NUM_RUDE
    assert "refused" not in rude["counts"]
    assert rude["longest_s"] < MAX_HEAD_S + 1.0
    assert p99(dripping.first_s) < 1.1 * p99(quiet.first_s)


def test_a_thousand_abusive_connections_leave_nothing_behind_and_hardly_delay_others(
    server: Server,
) -> None:
    wait_among(server.address, NUM_POLITE, NUM_RUDE, WARM_UP_S)  # pools have reached their size
    assert eventually(server.is_idle, 60.0)
    before = Footprint.of(server)
    quiet = wait_in_peace(server.address, NUM_POLITE, QUIET_S)
    stormy, rude = wait_among(server.address, NUM_POLITE, NUM_RUDE, STORM_S)
    assert eventually(server.is_idle, 60.0)
    assert eventually(lambda: Footprint.of(server).num_descriptors <= before.num_descriptors, 90.0)
    quiet += wait_in_peace(server.address, NUM_POLITE, QUIET_S)
    assert eventually(server.is_idle, 60.0)
    after = Footprint.of(server)
    p99s = [p99(waits.whole_s) for waits in (quiet, stormy)]
    report(
        "storm",
        seconds=STORM_S,
        connections=NUM_RUDE,
        rude=rude,
        polite_requests=[len(quiet.whole_s), len(stormy.whole_s)],
        p50_s=[statistics.median(waits.whole_s) for waits in (quiet, stormy)],
        p99_s=p99s,
        p99_ratio=p99s[1] / p99s[0],
        before=asdict(before),
        after=asdict(after),
        answers=answers_by_status(server),
    )
    assert (after.free_pages, after.free_slots) == (before.free_pages, before.free_slots)
    assert after.num_unfinished == 0
    assert after.num_threads < MAX_THREADS
    assert after.server_mb - before.server_mb < MAX_LEAK_MB
    assert after.engine_mb - before.engine_mb < MAX_LEAK_MB
    assert not [status for status in answers_by_status(server) if status.startswith("5")]
    assert p99s[1] < 2 * p99s[0]
