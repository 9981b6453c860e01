"""What Ray costs: tokens per second of streams through it, and of the same streams without it.

    python tests/on_ray/measure_ray.py [--streams 64] [--step-ms 18] [--tokens 256] [--rounds 3]

A server without a model sends one event to every stream at a fixed pace, as an engine with that
step time would. The two paths take turns, so that whatever else the machine does meets them alike.
Prints a table and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ["RAY_AUTH_MODE"] = "disabled"

from penstock.commands.provenance import provenance  # noqa: E402
from penstock.ray.engine import Engine  # noqa: E402
from penstock.ray.settings import RaySettings  # noqa: E402

PORT, STUB_PORT = 8715, 8716
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = {"id": "chatcmpl-0123456789abcdef", "object": "chat.completion.chunk", "model": "stub"}
SPACE = 240  # bytes of an event, as of a real one


async def serve_stub(port: int, step_s: float) -> None:
    """Sends a token to all streams at the same moment, as the rows of one step do."""
    tick = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = [line.partition(b":") for line in head.lower().split(b"\r\n")]
        length = next((int(value) for name, _, value in lines if name == b"content-length"), 0)
        count = json.loads(await reader.readexactly(length))["max_tokens"] if length else 1
        writer.write(HEAD)
        for number in range(count):
            await tick.wait()
            data = json.dumps({**EVENT, "token": number}).ljust(SPACE)
            event = f"data: {data}\n\n".encode()
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def pace() -> None:
        nonlocal tick
        due_s = time.monotonic()
        while True:
            due_s = max(due_s + step_s, time.monotonic() - step_s)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            tick, last = asyncio.Event(), tick
            last.set()

    server = await asyncio.start_server(answer, "127.0.0.1", port, backlog=2048)
    async with server:
        await pace()


def run_stub(port: int, step_s: float) -> None:
    asyncio.run(serve_stub(port, step_s))


class StubEngine(Engine):
    """Forwards to the stub of this machine, which the measurement has started."""

    def __init__(self, settings: RaySettings) -> None:
        self._batch_s = settings.batch_ms / 1e3
        self._queued_tokens = 0
        self._key = "of-nobody"
        self._host, self._port = "127.0.0.1", STUB_PORT

    def __del__(self) -> None:
        pass


async def stream(port: int, num_tokens: int) -> tuple[int, list[float]]:
    """Counts events, and records when pieces with events arrived."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"max_tokens": num_tokens, "messages": []}).encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: stub\r\nconnection: close\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )
    count, times = 0, []
    while data := await reader.read(65536):
        events = data.count(b"data: ")
        if events:
            count += events
            times.append(time.monotonic())
        if b"\r\n0\r\n\r\n" in data or data.endswith(b"0\r\n\r\n"):
            break
    writer.close()
    return count, times


async def load(port: int, num_streams: int, num_tokens: int) -> dict[str, float]:
    begun_s = time.monotonic()
    found = await asyncio.gather(*(stream(port, num_tokens) for _ in range(num_streams)))
    wall_s = time.monotonic() - begun_s
    assert all(count == num_tokens for count, _ in found), "tokens are missing"
    firsts = sorted(times[0] - begun_s for _, times in found)
    return {"tok_s": num_streams * num_tokens / wall_s, "first_ms": 1e3 * statistics.median(firsts)}


def main() -> None:
    parser = argparse.ArgumentParser(description="What Ray costs.")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=18.0)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-ms", type=float, default=25.0)
    arguments = parser.parse_args()
    import ray
    from ray import serve

    from penstock.ray.application import build

    stub = multiprocessing.get_context("spawn").Process(
        target=run_stub, args=(STUB_PORT, arguments.step_ms / 1e3), daemon=True
    )
    stub.start()
    ray.init(
        num_cpus=4, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False
    )
    serve.start(http_options={"port": PORT})
    given = {"cpus": 0.5, "gpus": 0, "batch_ms": arguments.batch_ms, "max_requests": 1024}
    serve.run(build(given, StubEngine), name="stub", route_prefix="/")
    paths = {"direct": STUB_PORT, "ray": PORT}
    asyncio.run(load(PORT, 4, 8))
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in paths}
    for _ in range(arguments.rounds):
        for name, port in paths.items():
            seen[name].append(asyncio.run(load(port, arguments.streams, arguments.tokens)))
    serve.shutdown()
    ray.shutdown()
    best = {
        name: {
            "tok_s": round(max(one["tok_s"] for one in rounds), 1),
            "first_ms": round(min(one["first_ms"] for one in rounds), 2),
        }
        for name, rounds in seen.items()
    }
    share = best["ray"]["tok_s"] / best["direct"]["tok_s"]
    for name, row in best.items():
        print(f"{name:<8} {row['tok_s']:>10,.1f} tok/s, first token after {row['first_ms']:.1f} ms")
    print(f"of the direct path: {share:.1%}")
    report: dict[str, Any] = {"measured": "ray", **vars(arguments), **provenance()}
    print(json.dumps({**report, "ray": ray.__version__, "paths": best, "share": round(share, 4)}))
    stub.terminate()


if __name__ == "__main__":
    main()
