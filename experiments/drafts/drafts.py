"""The kernel for a row of drafts alone: compared with the reference, then timed in a CUDA graph.

python experiments/drafts/drafts.py [--quick]   writes $OUT/drafts.json
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "experiments" / "drafts" / "old")]

import torch  # noqa: E402

import old_drafts  # noqa: E402
import test_cuda_drafts as checks  # noqa: E402
from penstock.ops import Backlog, Journal, Replay  # noqa: E402
from penstock.ops.cuda import delta_net_drafts as drafts  # noqa: E402
from penstock.ops.cuda.program import program  # noqa: E402
from penstock.ops.triton import delta_net, delta_net_drafts  # noqa: E402

OUT = Path(os.environ.get("OUT", "."))
START = time.time()
LIMIT = 90.0
LAYERS, DEVICE = 30, "cuda"
HK, HV, K, V = checks.FULL_HEADS
CHANNELS = 2 * HK * K + HV * V
found: dict = {"gpu": torch.cuda.get_device_name(), "checks": {}, "us": {}}


def say(*words: object) -> None:
    print(f"{time.time() - START:6.1f}", *words, flush=True)
    OUT.mkdir(exist_ok=True, parents=True)
    (OUT / "drafts.json").write_text(json.dumps(found, indent=1))


def tile(cluster: int, parts: int, blocks: int) -> dict:
    return {"CLUSTER": cluster, "PARTS": parts, "BLOCKS": blocks}


# name -> tile; None: what the code chooses
TILES = {
    "cluster 1": tile(1, 8, 1),
    "cluster 2": tile(2, 16, 2),
    "cluster 2, 8 parts": tile(2, 8, 2),
    "cluster 2, all registers": tile(2, 16, 1),
    "cluster 4": tile(4, 16, 4),
    "cluster 4, 3 blocks": tile(4, 16, 3),
    "cluster 4, all registers": tile(4, 16, 1),
    "cluster 4, 8 parts": tile(4, 8, 4),
}


def using(one: dict | None):
    stack = ExitStack()
    if one is not None:
        stack.enter_context(
            mock.patch.object(drafts, "choose_cluster", lambda *_: one["CLUSTER"])
        )
        stack.enter_context(mock.patch.object(drafts, "tile_of", lambda *_: one))
    return stack


class Layers:
    """Weights, states and journals of the layers of a model, for some rows."""

    def __init__(self, num_rows: int, width: int, accepted: int) -> None:
        torch.manual_seed(0)
        entries, slots = width - 1, num_rows + 1
        on = {"device": DEVICE}
        self.width = width
        self.weight = torch.randn(4, CHANNELS, **on).bfloat16() / 2
        self.a_log, self.dt_bias = torch.randn(2, HV, **on)
        self.norm = torch.ones(V, **on)
        self.mixed = torch.randn(num_rows * width, CHANNELS + HV * V + 2 * HV, **on).bfloat16()
        self.conv = torch.randn(LAYERS, slots, 4 + entries, CHANNELS, **on).bfloat16()
        self.states = torch.randn(LAYERS, slots, HV, K, V, **on) / 10
        self.backlogs = [Backlog.empty(slots, HV, K, V, 3, DEVICE) for _ in range(LAYERS)]
        shape = (slots, entries, HV)
        self.journals = []
        for _ in range(LAYERS):
            gates = torch.rand(slots, entries, 3, HV, **on) / 2
            gates[:, :, 0] *= -1
            gates[:, :, 2] = 0.1
            self.journals.append(
                Journal(torch.randn(*shape, K, **on), torch.randn(*shape, V, **on), gates)
            )
        rows = torch.arange(1, num_rows + 1, **on)
        zeros = torch.zeros_like(rows)
        self.replay = Replay(rows, torch.full_like(rows, min(accepted, entries)), zeros, zeros)
        self.starts = torch.arange(0, num_rows * width + 1, width, **on)
        self.lens = torch.full_like(rows, 1536 + width)
        self.rows = rows
        self.out = torch.empty(num_rows * width, HV * V, dtype=torch.bfloat16, **on)

    def run(self, op) -> None:
        for i in range(LAYERS):
            op(
                self.out, self.mixed, self.weight, self.a_log, self.dt_bias, self.norm, 1e-6,
                self.conv[i], self.states[i], self.starts, self.lens, self.rows, self.rows, HK,
                self.journals[i], self.replay, self.backlogs[i], self.width,
            )  # fmt: skip


def triton_op(*given) -> None:
    """What runs where the CUDA kernel does not."""
    tile = delta_net._drafts_rule(len(given[11]), given[8], False)
    delta_net_drafts.decode_with_drafts(*given[:-1], tile)


def graph_of(layers: Layers, op) -> torch.cuda.CUDAGraph:
    layers.run(op)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers.run(op)
    return graph


def time_graph(graph: torch.cuda.CUDAGraph, repeats: int = 40) -> float:
    """Microseconds per launch: the median of five."""
    times = []
    for _ in range(5):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(repeats):
            graph.replay()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) * 1e3 / repeats / LAYERS)
    return sorted(times)[2]


def compile_all(widths: tuple[int, ...]) -> None:
    def one(width: int, own: dict | None) -> None:
        torch.cuda.set_device(0)
        layers = Layers(1, width, 1)
        given = (HK, layers.weight, layers.conv[0], layers.states[0], width - 1, 3)
        if own is None:
            constants = old_drafts.kernel_constants(width, *given)
            program(old_drafts.SOURCE, "delta_net_drafts", tuple(constants.items()), "cuda")
        else:
            constants = drafts.kernel_constants(width, layers.mixed.stride(0), *given, own)
            program(drafts.SOURCE, "delta_net_drafts", tuple(constants.items()), "cuda")

    with ThreadPoolExecutor(12) as pool:
        jobs = [
            pool.submit(one, width, own) for width in widths for own in (None, *TILES.values())
        ]
        for job in jobs:
            try:
                job.result()
            except Exception:
                traceback.print_exc()


def check_all() -> None:
    for name in ("cluster 1", "cluster 2", "cluster 4", "cluster 4, 3 blocks"):
        for width in (3, 4, 5):
            for num_rows in (1, 2, 3, 4):
                rows = checks.rows_of(num_rows, width)
                try:
                    with using(TILES[name]), mock.patch.object(drafts, "MAX_ROWS", 8):
                        checks.check(
                            checks.FULL_HEADS, torch.bfloat16, True, DEVICE, rows, width - 1
                        )
                    said = "ok"
                except Exception as error:
                    said = f"{type(error).__name__}: {error}"
                    traceback.print_exc()
                found["checks"][f"{name}, {num_rows} rows of {width}"] = said
                if said != "ok":
                    say(name, num_rows, width, said)
        say("checked", name)


def time_all() -> None:
    for num_rows, width, accepted in (
        (1, 4, 2), (1, 3, 1), (1, 2, 1), (2, 4, 2), (4, 4, 2), (1, 4, 0), (1, 4, 3),
        (1, 8, 4), (8, 4, 2), (8, 2, 1), (4, 2, 1), (2, 2, 1), (2, 3, 1), (4, 3, 1),
    ):  # fmt: skip
        if time.time() - START > LIMIT:
            break
        layers = Layers(num_rows, width, accepted)
        graphs = {}
        for name, own in {"old": None, "triton": None, **TILES}.items():
            try:
                with using(own):
                    op = (old_drafts if own is None else drafts).decode_with_drafts
                    graphs[name] = graph_of(layers, triton_op if name == "triton" else op)
            except Exception:
                traceback.print_exc()
        taken: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(2):  # in turns
            for name, graph in graphs.items():
                taken[name].append(round(time_graph(graph), 3))
        key = f"{num_rows} rows of {width}, {accepted} accepted"
        found["us"][key] = taken
        say(key, taken)
        del graphs, layers


if __name__ == "__main__":
    with torch.inference_mode():
        for part in (lambda: compile_all((2, 3, 4)), check_all, time_all):
            try:
                part()
            except Exception:
                traceback.print_exc()
            say("next")
