"""The faults of test_node_faults.py at full size: 64 streams all the time, 50 kills. Minutes;
prints numbers.

pytest -m slow -s tests/test_node_faults_full.py
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from node_load import (
    NODE_ENGINE,
    all_ready,
    body_of,
    num_moved,
    replicas_of,
    said,
    stream_all,
    stream_one,
)
from penstock.eval.stream_client import StreamedReply
from serving import Server, start_server

pytestmark = pytest.mark.slow

NUM_STREAMS = 64
NUM_KILLS = int(os.environ.get("NUM_KILLS", "50"))
NUM_STOPS = int(os.environ.get("NUM_STOPS", "10"))
MAX_ROWS = 24  # of each of two engines: a quarter of the streams wait
MAX_TOKENS = 24
MAX_QUEUE = 2 * NUM_STREAMS
BODIES = [body_of(number, MAX_TOKENS) for number in range(NUM_STREAMS)]
DEATH_LINE = re.compile(r"^(\S+ \S+) ERROR .*The engine process (?:ended|hung)", re.MULTILINE)


class Crowd:
    """64 clients that each send the same question repeatedly, and know the reply."""

    def __init__(self, node: Server, undisturbed: list[StreamedReply]) -> None:
        self.replies: list[StreamedReply] = []
        self.num_wrong = 0
        self._node = node
        self._undisturbed = undisturbed
        self._is_over = False

    async def _ask_again_and_again(self, number: int) -> None:
        while not self._is_over:
            reply = await stream_one(self._node, BODIES[number])
            self.replies.append(reply)
            if not reply.error and said(reply) != said(self._undisturbed[number]):
                self.num_wrong += 1

    async def run(self, faults: Callable[[], Any]) -> None:
        clients = [
            asyncio.create_task(self._ask_again_and_again(number)) for number in range(NUM_STREAMS)
        ]
        await faults()
        self._is_over = True
        await asyncio.gather(*clients)

    def report(self) -> dict[str, Any]:
        good = [reply for reply in self.replies if not reply.error]
        bad = [reply for reply in self.replies if reply.error]
        gaps = sorted(max(reply.gaps_s) for reply in good if reply.gaps_s)
        return {
            "replies": len(self.replies),
            "lost_before_their_first_token": sum(not reply.token_times_s for reply in bad),
            "lost_under_way": sum(bool(reply.token_times_s) for reply in bad),
            "replies_that_differ": self.num_wrong,
            "errors": sorted({reply.error for reply in bad}),
            "longest_gap_s": round(gaps[-1], 3),
            "median_of_longest_gaps_s": round(gaps[len(gaps) // 2], 3),
        }


@pytest.fixture(scope="module")
def log_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("node") / "log"


@pytest.fixture(scope="module")
def node(log_file: Path) -> Iterator[Server]:
    engine = {**NODE_ENGINE, "max_rows": MAX_ROWS}
    settings = {
        "replicas": 2,
        "max_queue": MAX_QUEUE,
        "drain_timeout": 120.0,
        "resume_timeout": 60.0,
    }
    with log_file.open("w") as log, start_server(engine=engine, serve=settings, log=log) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(node: Server) -> list[StreamedReply]:
    replies = asyncio.run(stream_all(node, BODIES))
    assert [reply.error for reply in replies] == [""] * NUM_STREAMS
    return replies


def say(name: str, **numbers: Any) -> None:
    print(json.dumps({"fault": name, **numbers}), flush=True)


def spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "median": round(ordered[len(ordered) // 2], 4),
        "p90": round(ordered[int(len(ordered) * 0.9)], 4),
        "max": round(ordered[-1], 4),
    }


def deaths_in(log_file: Path) -> list[float]:
    lines = DEATH_LINE.findall(log_file.read_text())
    return [
        datetime.strptime(line, "%Y-%m-%d %H:%M:%S,%f").astimezone().timestamp() for line in lines
    ]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("number", "num_times"),
    [(signal.SIGKILL, NUM_KILLS), (signal.SIGSTOP, NUM_STOPS)],
    ids=["kill", "stop"],
)
def test_no_reply_changes_while_engines_are_killed_again_and_again(
    node: Server,
    undisturbed: list[StreamedReply],
    log_file: Path,
    number: signal.Signals,
    num_times: int,
) -> None:
    crowd = Crowd(node, undisturbed)
    moved, num_deaths = num_moved(node), len(deaths_in(log_file))
    struck: list[float] = []
    back_s: list[float] = []

    async def lose_engines() -> None:
        for _ in range(num_times):
            await asyncio.sleep(random.uniform(0.5, 3.0))
            await all_ready(node)
            victim = random.choice(node.engine_pids)
            num_restarts = sum(replica["restarts"] for replica in replicas_of(node))
            started = time.monotonic()
            struck.append(time.time())
            os.kill(victim, number)
            while sum(replica["restarts"] for replica in replicas_of(node)) == num_restarts:
                await asyncio.sleep(0.05)
            await all_ready(node)
            back_s.append(time.monotonic() - started)

    asyncio.run(crowd.run(lose_engines))
    deaths = deaths_in(log_file)[num_deaths:]
    seconds = [
        min(death for death in deaths if death > before - 0.002) - before for before in struck
    ]
    report = crowd.report()
    say(
        number.name,
        times=num_times,
        moved_requests=num_moved(node) - moved,
        detection_s=spread(seconds),
        back_in_service_s=spread(back_s),
        **report,
    )
    assert report["lost_before_their_first_token"] == 0
    assert report["lost_under_way"] == 0
    assert report["replies_that_differ"] == 0
    assert max(seconds) <= 2.0


@pytest.mark.timeout(900)
def test_all_engines_are_replaced_under_64_streams(
    node: Server, undisturbed: list[StreamedReply]
) -> None:
    crowd = Crowd(node, undisturbed)
    before, started = set(node.engine_pids), time.monotonic()

    async def restart() -> None:
        await asyncio.sleep(1.0)
        node.process.send_signal(signal.SIGHUP)
        while before & set(node.engine_pids) or len(node.engine_pids) < 2:
            await asyncio.sleep(0.1)
        await all_ready(node)

    asyncio.run(crowd.run(restart))
    report = crowd.report()
    say("SIGHUP", seconds=round(time.monotonic() - started, 1), **report)
    assert report["errors"] == []
    assert report["replies_that_differ"] == 0


@pytest.mark.timeout(900)
def test_requests_are_refused_at_once_while_the_queue_is_full(node: Server) -> None:
    """The queue is filled, then nine times as many requests arrive one after the other."""
    streams = [body_of(number, MAX_TOKENS) for number in range(MAX_QUEUE)]
    refused: list[StreamedReply] = []

    async def ask_in_vain() -> None:
        while node.stats()["num_running"] + node.stats()["num_waiting"] < MAX_QUEUE:
            await asyncio.sleep(0.05)
        for number in range(9 * MAX_QUEUE):
            refused.append(await stream_one(node, body_of(number, MAX_TOKENS)))

    served = asyncio.run(stream_all(node, streams, ask_in_vain))
    # A slot is free slightly before its client has read the last token.
    last_moment = min(one.ended_s for one in served) - 0.2
    in_time = [reply for reply in refused if reply.started_s < last_moment]
    say(
        "full queue",
        queue=MAX_QUEUE,
        accepted_and_served=sum(not reply.error for reply in served),
        refused_while_full=sum(reply.error.startswith("HTTP 429") for reply in in_time),
        asked_while_full=len(in_time),
        refused_after_s=spread([reply.e2e_s for reply in in_time]),
    )
    assert [reply.error for reply in served] == [""] * MAX_QUEUE
    assert all(reply.error.startswith("HTTP 429") for reply in in_time)
    assert all(replica["state"] == "ready" for replica in replicas_of(node))


@pytest.mark.timeout(900)
def test_sigterm_under_64_streams_ends_them_all_well(
    node: Server, undisturbed: list[StreamedReply]
) -> None:
    """The last test of this node."""
    seconds: list[float] = []

    async def terminate() -> None:
        await asyncio.sleep(1.5)
        started = time.monotonic()
        node.process.send_signal(signal.SIGTERM)
        while node.http.get(f"{node.url}/ready").status_code == 200:
            await asyncio.sleep(0.001)
        seconds.append(time.monotonic() - started)

    started = time.monotonic()
    replies = asyncio.run(stream_all(node, BODIES, terminate))
    code = node.process.wait(timeout=60)
    num_same = sum(said(reply) == said(calm) for reply, calm in zip(replies, undisturbed))
    say(
        "SIGTERM",
        streams=NUM_STREAMS,
        finished_as_undisturbed=num_same,
        not_ready_after_s=round(seconds[0], 4),
        exit_code=code,
        seconds=round(time.monotonic() - started, 1),
    )
    assert (num_same, code) == (NUM_STREAMS, 0)
