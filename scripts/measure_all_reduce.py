"""Times all-reduces through shared memory (`ops/cuda/all_reduce.cu`) as far as one GPU can.

    python scripts/measure_all_reduce.py results/h200/all_reduce.json

Two measurements, neither of which has a link in it:

- `streams`: every rank is a stream of this GPU with a graph of many all-reduces; they really wait
  for each other. Time per all-reduce, by ranks and bytes.
- `steps`: one rank's part of a decode step (`penstock bench step --tp 8`), with the all-reduces of
  its layers in its graph, and without. A rank stores its values into its own buffer once for every
  rank, and waits for all of them: what each rank of several does, but for the way to the others.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import penstock.engine.device_part as device_part
import penstock.ops.cuda.all_reduce as all_reduce
from penstock.cli import main as penstock
from penstock.commands.provenance import gpu_name, provenance
from penstock.ops.cuda.all_reduce import EMPTY, MOST_BYTES, OneShot, buffer_words
from penstock.ops.cuda.program import Program, program
from penstock.parallel.links import NoLinks

NUM_CALLS, REPEATS = 80, 30
HIDDEN = 2048
SUMS = "total.add(found, r == 0);"  # of the kernel
OWN_SUM = "if (r == 0) total.add(found, true);"  # of one rank's values, not eight times these


def program_that_starts_late(*given: Any) -> Program:
    """Launches without early start, which would occupy SMs that the other ranks need to finish."""
    own = program(*given)
    own._num_attributes = 0
    return own


def time_streams(num_ranks: int, num_tokens: int) -> dict[str, Any]:
    device = torch.device("cuda", 0)
    buffers = [
        torch.full((buffer_words(num_ranks),), EMPTY, dtype=torch.int32, device=device)
        for _ in range(num_ranks)
    ]
    addresses = [buffer.data_ptr() for buffer in buffers]
    ranks = [OneShot(rank, addresses, device) for rank in range(num_ranks)]
    values = [torch.zeros(num_tokens, HIDDEN, dtype=torch.bfloat16, device=device) for _ in ranks]
    streams = [torch.cuda.Stream() for _ in ranks]
    graphs = [torch.cuda.CUDAGraph() for _ in ranks]
    torch.cuda.synchronize()
    for rank, own, stream in zip(ranks, values, streams):  # compiled before it is captured
        with torch.cuda.stream(stream):
            rank.reduce(own)
    torch.cuda.synchronize()
    for rank, own, stream, graph in zip(ranks, values, streams, graphs):
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(NUM_CALLS):
                rank.reduce(own)
    seconds = [_replay_together(graphs, streams) for _ in range(REPEATS)]
    us = 1e6 * statistics.median(seconds[3:]) / NUM_CALLS
    num_bytes = values[0].nbytes
    return {"ranks": num_ranks, "tokens": num_tokens, "bytes": num_bytes, "us": round(us, 2)}


def _replay_together(graphs: list[Any], streams: list[Any]) -> float:
    """Microseconds from a common start, for which all streams wait, to the end of the last one."""
    start, ends = _event(), [_event() for _ in streams]
    torch.cuda._sleep(2_000_000)  # until all are launched
    start.record()
    for graph, stream, end in zip(graphs, streams, ends):
        stream.wait_event(start)
        with torch.cuda.stream(stream):
            graph.replay()
            end.record()
    torch.cuda.synchronize()
    return max(start.elapsed_time(end) for end in ends) / 1e3


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)


class Loop(NoLinks):
    """All-reduces of one rank that takes the place of all `size` ranks."""

    def __init__(self, size: int) -> None:
        device = torch.device("cuda", 0)
        self.buffer = torch.full((buffer_words(size),), EMPTY, dtype=torch.int32, device=device)
        base = self.buffer.data_ptr()
        # In the buffer of rank r, this rank writes to the place that rank r has in its own buffer.
        self.one_shot = OneShot(0, [base + rank * MOST_BYTES for rank in range(size)], device)

    def add(self, values: Tensor) -> None:
        if self.one_shot.can_reduce(values):
            self.one_shot.reduce(values)

    def maximize(self, values: Tensor) -> None:
        padded = torch.nn.functional.pad(values, (0, len(values) % 2))
        self.one_shot.reduce(padded)
        values.copy_(padded[: len(values)])


@contextlib.contextmanager
def summing_one_rank() -> Iterator[None]:
    """Sums one rank's values only: eight times the values in each layer would soon be infinite."""
    source = all_reduce.SOURCE
    text = source.read_text()
    assert SUMS in text
    own = source.with_name("all_reduce_of_one.cu")
    own.write_text(text.replace(SUMS, OWN_SUM))
    all_reduce.SOURCE = own
    try:
        yield
    finally:
        all_reduce.SOURCE = source
        own.unlink()


def time_steps(model: str, tp: int, batches: str) -> list[dict[str, Any]]:
    words = ["bench", "step", "-m", model, "--tp", str(tp), "--random-weights", "--batch", batches]
    words += ["--context", "1536", "--repeats", "20", "--all-reduce-us", "0"]
    found: dict[str, list[dict[str, Any]]] = {}
    for name, links in (("without", NoLinks), ("with", lambda: Loop(tp))):
        device_part.NoLinks = links  # type: ignore[assignment,misc]
        with summing_one_rank(), tempfile.NamedTemporaryFile(suffix=".json") as file:
            assert penstock([*words, "--json", file.name]) == 0
            found[name] = json.loads(Path(file.name).read_text())["rows"]
    return [
        {
            "model": model,
            "tp": tp,
            "batch": row["batch"],
            "context": row["context"],
            "all_reduces": row["collectives"],
            "ms_without": without["own_ms"],
            "ms": row["own_ms"],
            "us_per_all_reduce": round(
                1e3 * (row["own_ms"] - without["own_ms"]) / row["collectives"], 2
            ),
        }
        for row, without in zip(found["with"], found["without"])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Times all-reduces on one GPU.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="Qwen3.5-35B-A3B")
    parser.add_argument("--batch", default="1,8")
    arguments = parser.parse_args()
    steps = time_steps(arguments.model, 8, arguments.batch)
    for row in steps:
        print(row, flush=True)
    streams = []
    all_reduce.program = program_that_starts_late  # type: ignore[assignment]
    for ranks, tokens in itertools.product((2, 4, 8), (1, 8, 64)):
        streams.append(time_streams(ranks, tokens))
        print(streams[-1], flush=True)
    table = {
        "what": "all-reduces through memory that ranks share, all on one GPU: without a link",
        "how": "scripts/measure_all_reduce.py",
        **provenance(),
        "gpu": gpu_name(),
        "streams": streams,
        "steps": steps,
    }
    arguments.out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
