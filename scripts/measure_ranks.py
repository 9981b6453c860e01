"""Times one rank's shard of large models on this GPU, and collects rows for results/h200.

    python scripts/measure_ranks.py results/h200/parallel.json [--only 35B] [--repeats 20]

Runs `penstock bench step --tp N` for every model below, each in its own process, so that a failure
does not affect the others. Writes the file after every model, and keeps rows of earlier runs that
it does not replace.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# Published times of other engines on whole machines, to compare: ms per step at batch 1.
PUBLISHED = {
    "vLLM 0.19, 35B-A3B, TP 8 on 8 H200": 4.5,
    "SGLang, 397B-A17B with MTP on 8 H200": 2.24,
}
GOALS = {("Qwen3.5-35B-A3B", "bf16", 8): 1.2, ("Qwen3.5-397B-A17B", "bf16", 8): 4.0}
RUNS = [
    ("Qwen3.5-35B-A3B", 2),
    ("Qwen3.5-35B-A3B", 4),
    ("Qwen3.5-35B-A3B", 8),
    ("Qwen3.5-122B-A10B", 4),
    ("Qwen3.5-397B-A17B", 8),
]
SCHEMES = {"bf16": "none", "fp8": "fp8"}
CONTEXT = "1536"


def measure(
    model: str, tp: int, scheme: str, batches: str, repeats: int, us: float
) -> dict[str, Any] | None:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        words = ["bench", "step", "-m", model, "--tp", str(tp), "--random-weights"]
        words += ["--quantization", SCHEMES[scheme], "--batch", batches, "--context", CONTEXT]
        words += ["--repeats", str(repeats), "--all-reduce-us", str(us), "--json", file.name]
        done = subprocess.run([sys.executable, "-m", "penstock", *words])
        if done.returncode:
            return None
        found: dict[str, Any] = json.loads(Path(file.name).read_text())
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Times ranks of large models on one GPU.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="models whose name has this in it")
    parser.add_argument("--scheme", choices=SCHEMES, help="bf16 or fp8 (default: both)")
    parser.add_argument("--batch", default="1,8,64")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--all-reduce-us", type=float, default=10.0)
    arguments = parser.parse_args()
    table: dict[str, Any] = {"rows": []}
    if arguments.out.exists():
        table = json.loads(arguments.out.read_text())
    failed = []
    for model, tp in RUNS:
        for scheme in [arguments.scheme] if arguments.scheme else SCHEMES:
            if arguments.only not in model:
                continue
            given = (arguments.batch, arguments.repeats, arguments.all_reduce_us)
            found = measure(model, tp, scheme, *given)
            if found is None:
                failed.append(f"{model} tp {tp} {scheme}")
                continue
            own, goal = (model, tp, scheme), GOALS.get((model, scheme, tp))
            kept = [row for row in table["rows"] if (row["model"], row["tp"], row["scheme"]) != own]
            rows = [
                {**row, "commit": found["commit"], "goal_ms": goal if row["batch"] == 1 else None}
                for row in found["rows"]
            ]
            table = {
                "what": "one rank's part of a decode step, measured on one GPU with random weights "
                "and without collectives (own_ms), and with these at a stated cost "
                "(projected_ms): projections, not measurements of several GPUs",
                "how": "scripts/measure_ranks.py: `penstock bench step --tp N`",
                **{name: found[name] for name in ("time", "gpu", "torch", "python")},
                "published_ms": PUBLISHED,
                "rows": kept + rows,
            }
            arguments.out.write_text(json.dumps(table, indent=1) + "\n")
    for name in failed:
        print(f"failed: {name}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
