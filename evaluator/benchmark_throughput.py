"""How fast an engine.py is: prefill, decode and mixed traces, with a fresh engine for every repeat.

    python evaluator/benchmark_throughput.py --engine workspace/engine.py

create_engine is not timed; prefill, decode and remove are. Medians over the repeats, beside the naive engine
that computes everything anew. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from penstock.errors import PenstockError
from penstock.forge import naive_engine
from penstock.forge.gate import compare
from penstock.forge.local import LocalPlayer, load_module
from penstock.forge.machine import Machine
from penstock.forge.measure import FAMILIES, Bench, Sizes, draw_benches
from penstock.forge.oracle import Oracle
from penstock.forge.target import Target


def main() -> int:
    arguments = read_arguments()
    target = Target.open(arguments.config, arguments.weights, arguments.device)
    sizes = replace(Sizes.of(target), repeats=1)
    knowing = Oracle(target)
    benches = [
        bench
        for bench in draw_benches(target, knowing, arguments.seed, sizes)
        if bench.family in arguments.families
    ]
    del knowing
    report: dict[str, Any] = {"model": target.describe(), "device": target.device}
    report["machine"] = Machine.measure(target).facts()
    engines = {"engine": load_module(arguments.engine)}
    if not arguments.no_baseline:
        engines["naive"] = naive_engine
    for name, module in engines.items():
        report[name] = time_engine(module, target, benches, 1 if name == "naive" else arguments.repeats)
        print_table(name, report[name])
    if "naive" in report:
        ratios = {
            bench: report["engine"]["benches"][bench]["tokens_per_second"] / numbers["tokens_per_second"]
            for bench, numbers in report["naive"]["benches"].items()
        }
        report["times_naive"] = {bench: round(ratio, 2) for bench, ratio in ratios.items()}
    print(json.dumps(report))
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def time_engine(module: ModuleType, target: Target, benches: Sequence[Bench], repeats: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {bench.name: [] for bench in benches}
    build_s, peak_bytes, faults = [], 0, []
    for _ in range(repeats):
        player = LocalPlayer(module, target)
        build_s.append(player.build_s)
        for bench in benches:
            checked = [index for index, answer in enumerate(bench.case.answers) if answer is not None]
            played = player.play(bench.case.calls, keep=checked, timed=bench.timed)
            seconds[bench.name].append(played.seconds)
            peak_bytes = max(peak_bytes, played.peak_bytes)
            fault, _ = compare(bench.case, played, allowed=1.0)
            faults += [f"{bench.name}: {fault}"] if fault else []
        del player
    numbers = {}
    for bench in benches:
        median, num_calls = statistics.median(seconds[bench.name]), bench.timed[1] - bench.timed[0]
        numbers[bench.name] = {
            "family": bench.family,
            "call_ms": 1e3 * median / num_calls,
            "tokens_per_second": bench.num_tokens / median,
        }
    return {
        "benches": numbers,
        "build_s": statistics.median(build_s),
        "peak_bytes": peak_bytes,
        "repeats": repeats,
        "faults": faults,
    }


def print_table(name: str, report: dict[str, Any]) -> None:
    memory = f"{report['peak_bytes'] / 1e9:.2f} GB at most" if report["peak_bytes"] else "memory not counted"
    print(f"{name}: built in {report['build_s']:.1f} s, {memory}")
    for bench, numbers in report["benches"].items():
        speed = f"{numbers['tokens_per_second']:12,.0f} tokens/s"
        print(f"  {bench:<12} {numbers['call_ms']:10.3f} ms a call {speed}")
    for fault in report["faults"]:
        print(f"  WRONG: {fault}")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", type=Path, default=Path("workspace/engine.py"))
    parser.add_argument("--config", type=Path, default=Path("target/model_config.json"))
    parser.add_argument("--weights", "--weight-dir", type=Path, default=Path("target/weights"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=4321)
    parser.add_argument("--repeats", type=int, default=3, help="each with a fresh engine")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--no-baseline", action="store_true", help="leave the naive engine out")
    parser.add_argument("--output", type=Path, help="the JSON object in a file, too")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PenstockError as error:
        sys.exit(f"error: {error}")
