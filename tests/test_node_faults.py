"""A node of two engines stays correct while engines are killed, stopped, restarted and flooded."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterator

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
from serving import Server, eventually, is_alive, start_server

NUM_STREAMS = 10  # more than the 8 rows of both engines: some are still queued when a fault occurs
MAX_QUEUE = 12
BODIES = [body_of(number, max_tokens=16) for number in range(NUM_STREAMS)]


@pytest.fixture(scope="module")
def node() -> Iterator[Server]:
    settings = {"replicas": 2, "max_queue": MAX_QUEUE, "drain_timeout": 120.0}
    with start_server(engine=NODE_ENGINE, serve=settings) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(node: Server) -> list[StreamedReply]:
    replies = asyncio.run(stream_all(node, BODIES))
    assert [reply.error for reply in replies] == [""] * NUM_STREAMS
    return replies


def disturb(node: Server, meanwhile: Callable[[], Awaitable[None]]) -> list[StreamedReply]:
    replies = asyncio.run(stream_all(node, BODIES, meanwhile))
    asyncio.run(all_ready(node))
    return replies


async def under_way(node: Server) -> None:
    """Waits until both engines work, and then a little longer."""
    while not all(replica["requests"] > 1 for replica in replicas_of(node)):
        await asyncio.sleep(0.01)
    await asyncio.sleep(random.uniform(0.0, 0.2))


def test_no_reply_changes_when_an_engine_is_killed(
    node: Server, undisturbed: list[StreamedReply]
) -> None:
    moved, victim = num_moved(node), node.engine_pids[0]

    async def kill() -> None:
        await under_way(node)
        os.kill(victim, signal.SIGKILL)

    replies = disturb(node, kill)
    assert list(map(said, replies)) == list(map(said, undisturbed))
    assert num_moved(node) > moved
    assert victim not in node.engine_pids
    restarts = [replica["restarts"] for replica in replicas_of(node)]
    assert sorted(restarts) == [0, 1]


@pytest.mark.slow  # test_fleet.py states it without processes
def test_a_stopped_engine_is_replaced_within_two_seconds_and_no_reply_changes(
    node: Server, undisturbed: list[StreamedReply]
) -> None:
    victim = node.engine_pids[0]
    seconds: list[float] = []

    async def stop() -> None:
        await under_way(node)
        os.kill(victim, signal.SIGSTOP)
        started = time.monotonic()
        while is_alive(victim):
            await asyncio.sleep(0.02)
        seconds.append(time.monotonic() - started)

    replies = disturb(node, stop)
    assert list(map(said, replies)) == list(map(said, undisturbed))
    assert seconds[0] < 3.0  # 1.75 on an idle machine


@pytest.mark.slow  # test_fleet.py states it without processes
def test_a_rolling_restart_under_load_replaces_every_engine_and_loses_nothing(
    node: Server, undisturbed: list[StreamedReply]
) -> None:
    before = set(node.engine_pids)

    async def restart() -> None:
        await under_way(node)
        node.process.send_signal(signal.SIGHUP)
        while before & set(node.engine_pids):
            assert node.http.get(f"{node.url}/ready").status_code == 200
            reply = await stream_one(node, BODIES[0])
            assert said(reply) == said(undisturbed[0])
            await asyncio.sleep(0.5)

    replies = disturb(node, restart)
    assert list(map(said, replies)) == list(map(said, undisturbed))
    assert len(node.engine_pids) == 2


def test_ten_times_what_fits_is_refused_at_once_and_what_was_accepted_is_served(
    node: Server,
) -> None:
    replies = asyncio.run(
        stream_all(node, [body_of(n, max_tokens=8) for n in range(10 * MAX_QUEUE)])
    )
    refused = [reply for reply in replies if reply.error.startswith("HTTP 429")]
    served = [reply for reply in replies if not reply.error]
    assert len(refused) + len(served) == len(replies)
    assert len(served) >= MAX_QUEUE
    assert max(reply.ended_s for reply in refused) < max(reply.ended_s for reply in served)
    assert eventually(lambda: node.stats()["num_running"] == 0)


def test_sigterm_under_load_lets_every_stream_end_and_refuses_the_rest(
    node: Server, undisturbed: list[StreamedReply]
) -> None:
    """The last test of this node. One of its engines is killed during shutdown."""
    engines = node.engine_pids

    async def terminate() -> None:
        await under_way(node)
        node.process.send_signal(signal.SIGTERM)
        while node.http.get(f"{node.url}/ready").status_code == 200:
            await asyncio.sleep(0.01)
        os.kill(engines[0], signal.SIGKILL)
        late = await stream_one(node, BODIES[0])
        assert late.error.startswith("HTTP 503")

    replies = asyncio.run(stream_all(node, BODIES, terminate))
    assert list(map(said, replies)) == list(map(said, undisturbed))
    assert node.process.wait(timeout=30.0) == 0
    assert not any(map(is_alive, engines))
