"""Times the sampling kernels on a GPU, and prints a digest of the tokens they draw.

To compare two commits, run it once for each on the same machine:

    python scripts/time_sampling.py --json new.json
    git worktree add /tmp/before COMMIT
    PYTHONPATH=/tmp/before python scripts/time_sampling.py --json before.json

Equal digests mean that every draw is the same, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
from pathlib import Path

import torch
from torch import Tensor

from penstock.ops.triton.sampling import sample

VOCAB = 248_320
ROWS = (1, 8, 64, 256)
# temperature, top_k, top_p, min_p
SETTINGS = {
    "plain": (0.7, 0, 1.0, 0.0),
    "top_k 20, top_p 0.8": (0.7, 20, 0.8, 0.0),
    "top_p 0.95": (1.0, 0, 0.95, 0.0),
    "min_p 0.05": (1.0, 0, 1.0, 0.05),
    "top_k 1000, top_p 0.9": (1.0, 1000, 0.9, 0.0),
}
# Flat logits are the worst case of top_p; peaked ones are typical of a trained model.
SHAPES = ("flat", "peaked")
CALLS, REPEATS = 20, 15  # draws in a graph, and its replays


def logits_of(shape: str, rows: int, seed: int) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    logits = torch.randn(rows, VOCAB, device="cuda", generator=generator) * 2
    if shape == "peaked":
        ids = torch.randint(0, VOCAB, (rows, 40), device="cuda", generator=generator)
        heights = torch.rand(rows, 40, device="cuda", generator=generator) * 16
        logits.scatter_add_(1, ids, heights)
    return logits


def arguments_of(setting: tuple[float, int, float, float], rows: int, seed: int) -> list[Tensor]:
    temperature, top_k, top_p, min_p = setting
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    floats = [torch.full((rows,), value) for value in (temperature, top_p, min_p)]
    tensors = [floats[0], torch.full((rows,), top_k), floats[1], floats[2], seeds]
    return [tensor.cuda() for tensor in (*tensors, torch.arange(rows) + seed)]


def microseconds(logits: Tensor, arguments: list[Tensor], filtered: bool) -> float:
    """Time of one draw on the GPU: the median over replays of a graph of many draws."""
    sample(logits, *arguments, filtered=filtered)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            sample(logits, *arguments, filtered=filtered)
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / CALLS)
    return statistics.median(times[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the table to this file too")
    parser.add_argument("--seeds", type=int, default=5, help="draws of each cell in the digest")
    options = parser.parse_args()
    table = []
    for shape in SHAPES:
        for name, setting in SETTINGS.items():
            filtered = name != "plain"
            for rows in ROWS:
                digest = hashlib.blake2b(digest_size=8)
                for seed in range(options.seeds):
                    drawn = sample(
                        logits_of(shape, rows, seed),
                        *arguments_of(setting, rows, seed),
                        filtered=filtered,
                    )
                    digest.update(drawn.cpu().numpy().tobytes())
                us = microseconds(
                    logits_of(shape, rows, 0), arguments_of(setting, rows, 0), filtered
                )
                row = {"shape": shape, "filters": name, "rows": rows, "us": round(us, 2)}
                table.append({**row, "tokens": digest.hexdigest()})
                print(f"{shape:7} {name:22} {rows:4} rows {us:9.2f} us  {digest.hexdigest()}")
    if options.json:
        report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": table}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
