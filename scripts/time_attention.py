"""Times attention of rows that decode on a CPU, one layer at a time:

    python scripts/time_attention.py --json results.json

Contexts are random, and each row has pages of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from penstock.commands.provenance import provenance
from penstock.layers.inputs import RowSpan
from penstock.ops.reference.attention import paged_attention
from penstock.ops.reference.rows import TokenBlocks

PAGE_SIZE, NUM_REPEATS = 64, 9
HEADS = ((12, 2, 128), (8, 2, 256))  # query heads, key heads, columns
SHAPES = ((1, 1024), (1, 4096), (1, 16384), (2, 4096), (8, 100), (8, 1024), (8, 4096))


def main() -> None:
    parser = argparse.ArgumentParser(description="Times attention of decodes on a CPU.")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rows = [time_shape(*heads, *shape) for heads in HEADS for shape in SHAPES]
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    known = provenance()
    names = ("time", "commit", "cpu", "num_cpus", "torch")
    result = {**{name: known[name] for name in names}, "threads": given.threads, "rows": rows}
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


def time_shape(q_heads: int, kv_heads: int, head_dim: int, rows: int, length: int) -> Any:
    num_pages = -(-length // PAGE_SIZE)
    shape = (rows * num_pages, PAGE_SIZE, kv_heads, head_dim)
    keys, values = torch.randn(shape), torch.randn(shape)
    table = torch.arange(rows * num_pages, dtype=torch.int32).view(rows, -1)
    lengths, starts = torch.full((rows,), length), torch.arange(rows + 1)
    spans = [RowSpan(1, length) for _ in range(rows)]
    blocks = TokenBlocks.of([], "cpu")
    given = (keys, values, table, starts, lengths, spans, blocks, head_dim**-0.5)
    q, times = torch.randn(rows, q_heads, head_dim), []
    with torch.inference_mode():
        for _ in range(NUM_REPEATS + 1):
            start = time.perf_counter()
            paged_attention(q, *given)
            times.append((time.perf_counter() - start) * 1e3)
    ms = statistics.median(times[1:])  # the first compiles the kernel
    num_bytes = 2 * rows * length * kv_heads * head_dim * 4
    sizes = {"rows": rows, "context": length, "q_heads": q_heads, "kv_heads": kv_heads}
    speed = {"ms": round(ms, 3), "gb_per_s": round(num_bytes / ms / 1e6, 1)}
    return {**sizes, "head_dim": head_dim, **speed}


if __name__ == "__main__":
    main()
