"""How fast an engine.py is: prefill, decode and mixed traces, with a fresh engine for every repeat.

    python evaluator/benchmark_throughput.py --engine workspace/engine.py [--also another.py ...]

create_engine is not timed; prefill, decode and remove are. Medians over the repeats, beside other
engines and the naive one, which computes everything anew. A bench of the naive one ends after a few
seconds; all others are then timed with the same calls too, and compared by these. Memory is what
engines add: on a GPU what torch allocates, on a CPU what the process grows by. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from penstock.errors import PenstockError
from penstock.forge.gate import compare
from penstock.forge.local import LocalPlayer, load_module
from penstock.forge.machine import Machine
from penstock.forge.measure import FAMILIES, Bench, draw_benches
from penstock.forge.oracle import Distance, Oracle, allowed_distance
from penstock.forge.sandbox import CandidateError
from penstock.forge.target import Target, default_target


def main() -> int:
    arguments = read_arguments()
    target = Target.open(arguments.config, arguments.weights, arguments.device)
    modules = {path: load_module(path) for path in (arguments.engine, *arguments.also)}
    knowing = Oracle(target)
    drawn = draw_benches(target, knowing, arguments.seed)
    benches = [bench for bench in drawn if bench.family in arguments.families]
    allowed = allowed_distance(knowing.rounding(drawn[0].case), share=1.0)
    del knowing
    report: dict[str, Any] = {"model": target.describe(), "device": target.device}
    report["machine"] = asdict(Machine.measure(target))
    if not arguments.no_baseline:
        baseline = load_module(Path(__file__).with_name("baseline_engine.py"))
        stretches, report["naive"] = time_engine(
            baseline, target, benches, allowed, 1, arguments.baseline_seconds
        )
        print_table("naive", report["naive"])
        whole = {bench.name for bench in benches}
        benches += [stretch for stretch in stretches if stretch.name not in whole]
    names = short_names(arguments.also)
    for path, module in modules.items():
        _, numbers = time_engine(module, target, benches, allowed, arguments.repeats)
        print_table(str(path), numbers)
        if path == arguments.engine:
            report["engine"] = numbers
        else:
            report.setdefault("also", {})[names[path]] = numbers
            report.setdefault("times_also", {})[names[path]] = times(report["engine"], numbers)
    if not arguments.no_baseline:
        report["times_naive"] = times(report["engine"], report["naive"])
    print(json.dumps(report))
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if report["engine"]["faults"] else 0


def short_names(paths: Sequence[Path]) -> dict[Path, str]:
    """Names each engine by the fewest last parts of its path that no other path ends in."""
    spelled = {path: path.absolute().with_suffix("").parts for path in paths}
    names = {}
    for path, parts in spelled.items():
        others = [other for other in spelled.values() if other != parts]
        counts = (
            count
            for count in range(1, len(parts))
            if all(o[-count:] != parts[-count:] for o in others)
        )
        names[path] = "/".join(parts[-next(counts, len(parts)) :])
    return names


def time_engine(
    module: ModuleType,
    target: Target,
    benches: Sequence[Bench],
    allowed: Distance,
    repeats: int,
    enough_s: float = math.inf,
) -> tuple[list[Bench], dict[str, Any]]:
    """Times each bench for about `enough_s` at most; returns what was timed, and the numbers."""
    stretches: dict[str, Bench] = {}
    seconds: dict[str, list[float]] = {}
    build_s, peak_bytes, faults = [], 0, []
    for number in range(repeats):
        player = LocalPlayer(module, target)
        build_s.append(player.build_s)
        for bench in benches:
            case = bench.plays[number % len(bench.plays)]
            played = player.play(
                case.calls, keep=case.answers, timed=bench.timed, enough_s=enough_s
            )
            stretch = shorten(bench, min(len(played.errors), bench.timed[1]))
            stretches[stretch.name] = stretch
            seconds.setdefault(stretch.name, []).append(played.seconds)
            peak_bytes = max(peak_bytes, played.peak_bytes)
            fault, _ = compare(case, played, allowed)
            faults += [f"{bench.name}: {fault}"] if fault else []
        del player
    numbers = {name: describe(stretch, seconds[name]) for name, stretch in stretches.items()}
    return list(stretches.values()), {
        "benches": numbers,
        "build_s": statistics.median(build_s),
        "peak_bytes": peak_bytes,
        "repeats": repeats,
        "faults": faults,
    }


def shorten(bench: Bench, stop: int) -> Bench:
    """The timed calls up to `stop`, under a name of their own: other engines are timed with them
    too.
    """
    start = bench.timed[0]
    if stop == bench.timed[1]:
        return bench
    return replace(bench, name=f"{bench.name}, first {stop - start} calls", timed=(start, stop))


def describe(bench: Bench, seconds: Sequence[float]) -> dict[str, Any]:
    median, num_calls = statistics.median(seconds), bench.timed[1] - bench.timed[0]
    return {
        "family": bench.family,
        "call_ms": 1e3 * median / num_calls,
        "tokens_per_second": bench.num_tokens / median,
        "decode_tokens_per_second": bench.num_decoded / median,
        "calls_timed": num_calls,
    }


def times(engine: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """How many times as fast as the other engine, on the benches that both were timed with."""
    ours, theirs = engine["benches"], other["benches"]
    return {
        name: round(ours[name]["tokens_per_second"] / theirs[name]["tokens_per_second"], 2)
        for name in theirs
        if name in ours
    }


def print_table(name: str, report: dict[str, Any]) -> None:
    memory = (
        f"{report['peak_bytes'] / 1e6:,.0f} MB at most"
        if report["peak_bytes"]
        else "memory not counted"
    )
    print(f"{name}: built in {report['build_s']:.1f} s, {memory}")
    for bench, numbers in report["benches"].items():
        speed = f"{numbers['tokens_per_second']:12,.0f} tokens/s"
        if numbers["decode_tokens_per_second"]:
            speed += f", {numbers['decode_tokens_per_second']:,.0f} of them decoded"
        print(f"  {bench:<24} {numbers['call_ms']:10.3f} ms a call {speed}")
    for fault in report["faults"]:
        print(f"  WRONG: {fault}")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", type=Path, default=Path("workspace/engine.py"))
    parser.add_argument(
        "--also", type=Path, nargs="+", default=[], help="other engines, timed beside it"
    )
    parser.add_argument(
        "--config", "--model-config", type=Path, default=default_target() / "model_config.json"
    )
    parser.add_argument(
        "--weights", "--weight-dir", type=Path, default=default_target() / "weights"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.add_argument("--seed", type=int, default=4321)
    parser.add_argument("--repeats", type=int, default=3, help="each with a fresh engine")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--no-baseline", action="store_true", help="leave the naive engine out")
    parser.add_argument(
        "--baseline-seconds",
        type=float,
        default=3.0,
        help="of every bench, for the naive engine (default: 3)",
    )
    parser.add_argument("--output", type=Path, help="the JSON object in a file, too")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (PenstockError, CandidateError) as error:
        sys.exit(f"error: {error}")
