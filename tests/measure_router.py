"""Measures the latency of the fleet: from an engine's send to the receiver of a token, with and
without a fleet.

    python tests/measure_router.py [--streams 64] [--step-ms 10] [--rounds 5] [--seconds 4]
    python tests/measure_router.py --engines 8 --step-ms 17.9

Engines without a model send one token to every request at a fixed rate. Each token is the
microsecond in which it was sent; all processes share a clock. Three paths are compared: the client
of one engine, a fleet of one, and a fleet of two that share the streams. They alternate, so that
other load affects them equally. With `--engines`, the third path has that many engines, each with
as many streams as the single engine of the others. Prints a table and, as its last line, one JSON
object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from penstock.config import ServeConfig
from penstock.progress import OnPhase
from penstock.serve.fleet import Fleet
from penstock.types import Request, SamplingParams, TokenDelta
from stub_engine import launch_stub, run_stub

PROMPT_TOKENS = 1024


def now_us() -> int:
    return time.monotonic_ns() // 1000 % 2**31


class Recorder:
    """Receives a reply and notes how old each of its tokens is."""

    def __init__(self, ages_us: list[int], on_end: Any) -> None:
        self._ages_us = ages_us
        self._on_end = on_end

    def take(self, delta: TokenDelta) -> None:
        self._ages_us.append((now_us() - delta.token_ids[0]) % 2**31)
        if delta.finish is not None:
            self._on_end()

    def fail(self, error: Exception) -> None:
        raise error


async def measure(
    num_engines: int, num_streams: int, step_s: float, seconds: float
) -> dict[str, Any]:
    """Measures one round of one path."""

    def launch(on_phase: OnPhase) -> Any:
        return launch_stub(on_phase, __file__, str(step_s))

    if num_engines:
        settings = ServeConfig(max_queue=10**6)
        path: Any = Fleet([launch] * num_engines, settings, lambda _: None)
    else:
        path = await launch(lambda _: None)
    await path.wait_ready()
    ages_us: list[int] = []
    ended = asyncio.Event()
    num_left = num_streams

    def end() -> None:
        nonlocal num_left
        num_left -= 1
        if num_left == 0:
            ended.set()

    sampling = SamplingParams(max_tokens=max(2, int(seconds / max(step_s, 0.001))))
    submits_s = []
    cpu = time.process_time()
    for number in range(num_streams):
        tokens = tuple(range(number, number + PROMPT_TOKENS))
        started = time.perf_counter()
        path.submit(
            [(Request(id=str(number), token_ids=tokens, sampling=sampling), Recorder(ages_us, end))]
        )
        submits_s.append(time.perf_counter() - started)
        await asyncio.sleep(0)  # staggered, as requests of many clients are
    begun = time.monotonic()
    await ended.wait()
    seconds = time.monotonic() - begun
    cpu = time.process_time() - cpu
    await path.close()
    return {
        "ages_us": ages_us,
        "submits_s": submits_s,
        "cpu_us_per_token": cpu / len(ages_us) * 1e6,
        "tok_s": len(ages_us) / seconds,
    }


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def summarize(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Takes each number from the round that other load on the machine disturbed least."""
    return {
        "p50_ms": round(min(percentile(one["ages_us"], 0.5) for one in rounds) / 1000, 3),
        "p99_ms": round(min(percentile(one["ages_us"], 0.99) for one in rounds) / 1000, 3),
        "submit_us": round(min(percentile(one["submits_s"], 0.5) for one in rounds) * 1e6, 1),
        "cpu_us_per_token": round(min(one["cpu_us_per_token"] for one in rounds), 2),
        "tok_s": round(max(one["tok_s"] for one in rounds), 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--engines", type=int)
    arguments = parser.parse_args()
    num_engines, streams = arguments.engines or 2, arguments.streams
    last = streams * num_engines if arguments.engines else streams
    paths = {"direct": (0, streams), "fleet of 1": (1, streams)}
    paths[f"fleet of {num_engines}"] = num_engines, last
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in paths}
    step_s = arguments.step_ms / 1000
    for _ in range(arguments.rounds):
        for name, (count, num_streams) in paths.items():
            rounds[name].append(uvloop.run(measure(count, num_streams, step_s, arguments.seconds)))
    results = {name: summarize(found) for name, found in rounds.items()}
    print(
        f"{'path':<12} {'p50 ms':>8} {'p99 ms':>8} {'submit us':>10} {'cpu us/token':>13} {'tok/s':>9}"
    )
    for name, found in results.items():
        print(
            f"{name:<12} "
            + " ".join(
                f"{value:>{width}}" for value, width in zip(found.values(), (8, 8, 10, 13, 9))
            )
        )
    machine = {
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
    }
    print(
        json.dumps({"measured": "router", **vars(arguments), "machine": machine, "paths": results})
    )
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--stub"]:
        run_stub(sys.argv[2], float(sys.argv[3]), lambda _: now_us())
    else:
        sys.exit(main())
