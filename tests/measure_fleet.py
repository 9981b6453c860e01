"""Measures the overhead of a server with eight engines: tokens per second and token latency at the
client, compared with a server of one engine.

    python tests/measure_fleet.py [--engines 8] [--streams 64] [--rounds 3] [--seconds 12]

Engines without a model send one token to each of their streams per step of an H200
(`results/h200/decode.json`: Qwen3.5-35B-A3B with that many rows). Everything else is the real
server: sockets, fleet, detokenizer, events, HTTP. The clients are one process that only counts
events. An engine records when it sent each token, and all processes share a clock, so the latency
of a token at its client is known. The two servers alternate. Prints a table and, as its last line,
one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from penstock.commands.provenance import provenance
from penstock.config import EngineConfig, ServeConfig
from penstock.progress import OnPhase
from penstock.serve.client import EngineClient
from penstock.types import Request
from stub_engine import launch_stub, run_stub

ROOT = Path(__file__).resolve().parents[1]
TEXT = "The river carries water from the hills to the sea, and nobody asks it why it does so. "
SETTLE_S = 0.5  # after the start of the last stream, and before the end of the first
TOKEN, END = b'"delta":{"content":"', b"data: [DONE]"  # in events; the first has a role instead
TICKS = os.sysconf("SC_CLK_TCK")


def step_of_h200(num_rows: int) -> float:
    rows = json.loads((ROOT / "results/h200/decode.json").read_text())["rows"]
    return next(row["ms"] for row in rows if row["batch"] == num_rows) / 1000


# The engine process


def run_engine(socket_path: str, step_s: float, ids: list[int], record: Path) -> None:
    """Records when it sent each token, by the seed of the request."""
    sent_s: defaultdict[str, list[float]] = defaultdict(list)  # by request
    seeds: dict[str, int | None] = {}

    def next_token(request: Request) -> int:
        times = sent_s[request.id]
        times.append(time.monotonic())
        seeds[request.id] = request.sampling.seed
        return ids[(len(times) - 1) % len(ids)]

    def write_down() -> None:
        path = record / f"{os.getpid()}.json"
        found = {seed: sent_s[id] for id, seed in seeds.items()}
        path.with_suffix(".part").write_text(json.dumps(found))
        path.with_suffix(".part").rename(path)

    run_stub(socket_path, step_s, next_token, write_down)


# The server process


async def serve(port: int, num_engines: int, step_s: float, record: str) -> None:
    from penstock.assets import default_model
    from penstock.serve.fleet import Fleet
    from penstock.serve.http_server import load_text, load_vector_text, serve_http
    from penstock.serve.server import open_port

    config = ServeConfig(max_queue=10**6)
    path = default_model()
    text = load_text(path)
    ids = json.dumps(text[0].encode(TEXT))

    def launch(on_phase: OnPhase) -> Coroutine[Any, Any, EngineClient]:
        return launch_stub(on_phase, __file__, str(step_s), ids, record)

    fleet = Fleet([launch] * num_engines, config, lambda _: None)
    try:
        await serve_http(
            open_port("127.0.0.1", port),
            fleet,
            config,
            name="stub",
            text=text,
            vector_text=load_vector_text(text, path, EngineConfig()),
            system_prompt=None,
            session_minutes=1.0,
            batches=None,
            on_ready=lambda: print("ready", flush=True),
        )
    finally:
        await fleet.close()


@contextlib.contextmanager
def started(num_engines: int, step_s: float, record: str) -> Iterator[tuple[int, int]]:
    """Pid and port of a server that is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [str(port), str(num_engines), str(step_s), record]
    process = subprocess.Popen(
        [sys.executable, __file__, "--server", *words], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process.pid, port
    finally:
        process.terminate()
        process.wait()


# The clients


@dataclass(slots=True)
class Stream:
    connection: socket.socket
    arrivals_s: list[float] = field(default_factory=list)  # one per event with a token
    tail: bytes = b""


def request_bytes(number: int, num_tokens: int) -> bytes:
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": f"Question {number}: what is a river?"}],
            "max_tokens": num_tokens,
            "seed": number,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


def read_streams(port: int, num_streams: int, num_tokens: int) -> list[list[float]]:
    """Times at which the tokens of each stream arrived."""
    selector = selectors.DefaultSelector()
    streams = []
    for number in range(num_streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(request_bytes(number, num_tokens))
        connection.setblocking(False)
        streams.append(Stream(connection))
        selector.register(connection, selectors.EVENT_READ, streams[-1])
    num_open, clock = num_streams, time.monotonic
    while num_open:
        for key, _ in selector.select():
            stream: Stream = key.data
            data = stream.connection.recv(65536)
            now_s = clock()
            assert stream.tail or data.startswith(b"HTTP/1.1 200"), data
            seen = stream.tail + data
            stream.arrivals_s += [now_s] * seen.count(TOKEN)
            stream.tail = seen[1 - len(TOKEN) :]
            if not data or END in seen:
                selector.unregister(stream.connection)
                stream.connection.close()
                num_open -= 1
    return [stream.arrivals_s for stream in streams]


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def measure(num_engines: int, num_streams: int, step_s: float, seconds: float) -> dict[str, float]:
    """Measures one server once."""
    num_tokens = int(seconds / step_s)
    with (
        tempfile.TemporaryDirectory() as record,
        started(num_engines, step_s, record) as (pid, port),
    ):
        read_streams(port, num_engines, 4)  # warm-up
        servers_s, clients_s, begun_s = cpu_s(pid), time.process_time(), time.monotonic()
        arrivals = read_streams(port, num_engines * num_streams, num_tokens)
        wall_s = time.monotonic() - begun_s
        servers_s, clients_s = cpu_s(pid) - servers_s, time.process_time() - clients_s
        sent: dict[int, list[float]] = {}
        deadline = time.monotonic() + 10
        while len(sent) < len(arrivals):
            assert time.monotonic() < deadline, "engines did not write down what they sent"
            for path in Path(record).glob("*.json"):
                sent |= {
                    int(number): times for number, times in json.loads(path.read_text()).items()
                }
            time.sleep(0.1)
    assert {len(times) for times in arrivals} == {num_tokens}, "tokens are missing"
    first_s = max(times[0] for times in arrivals) + SETTLE_S
    last_s = min(times[-1] for times in arrivals) - SETTLE_S
    assert first_s < last_s, "the last stream began after the first had ended: give --seconds"
    ages = sorted(
        came_s - sent_s
        for number, times in enumerate(arrivals)
        for came_s, sent_s in zip(times, sent[number][-num_tokens:])
        if first_s <= came_s < last_s
    )
    num_all = sum(map(len, arrivals))
    return {
        "tok_s": len(ages) / (last_s - first_s),
        "whole_tok_s": num_all / wall_s,
        "p50_ms": 1e3 * ages[len(ages) // 2],
        "p99_ms": 1e3 * ages[int(0.99 * len(ages))],
        "server_us_per_token": 1e6 * servers_s / num_all,
        "client_us_per_token": 1e6 * clients_s / num_all,
    }


def best(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Takes each number from the round that other load on the machine disturbed least."""
    return {
        name: round((max if name.endswith("tok_s") else min)(one[name] for one in rounds), 3)
        for name in rounds[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--streams", type=int, default=64, help="of each engine")
    parser.add_argument("--step-ms", type=float, help="default: an H200's with so many rows")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=12.0)
    arguments = parser.parse_args()
    step_s = arguments.step_ms / 1e3 if arguments.step_ms else step_of_h200(arguments.streams)
    rounds: dict[int, list[dict[str, float]]] = {1: [], arguments.engines: []}
    for _ in range(arguments.rounds):
        for num_engines, found in rounds.items():
            found.append(measure(num_engines, arguments.streams, step_s, arguments.seconds))
            print(num_engines, {name: round(value, 2) for name, value in found[-1].items()})
    one, all_ = best(rounds[1]), best(rounds[arguments.engines])
    share = all_["tok_s"] / (arguments.engines * one["tok_s"])
    added_ms = all_["p99_ms"] - one["p99_ms"]
    print(
        f"{arguments.engines} engines: {share:.2%} of {arguments.engines} x one, "
        f"p99 of a token {added_ms:+.2f} ms"
    )
    report: dict[str, Any] = {"measured": "fleet", **vars(arguments), **provenance()}
    report |= {"step_ms": round(1e3 * step_s, 3), "load": round(os.getloadavg()[0], 2)}
    report |= {
        "one": one,
        "all": all_,
        "share": round(share, 4),
        "added_p99_ms": round(added_ms, 3),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--stub"]:
        path, step, ids, folder = sys.argv[2:]
        run_engine(path, float(step), json.loads(ids), Path(folder))
    elif sys.argv[1:2] == ["--server"]:
        import uvloop

        port, count, step, folder = sys.argv[2:]
        uvloop.run(serve(int(port), int(count), float(step), folder))
    else:
        main()
