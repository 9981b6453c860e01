"""`penstock bench`: times decode steps and prefills of the engine, next to the floor the memory sets.

A check that decoding equals prefilling, warm-up, a synchronised clock, the median of repeats and its
spread; a table for people and, as the last line of stdout, one JSON object that says where the numbers were
born.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import __version__
from penstock.commands.console import PhaseList, print_table
from penstock.commands.flags import add_flags, read_count, read_counts, read_settings
from penstock.commands.roofline import Roofline
from penstock.config import EngineConfig, from_mapping
from penstock.errors import ConfigError, PenstockError
from penstock.models.source import find_model
from penstock.progress import timed

if TYPE_CHECKING:
    import torch

    from penstock.engine.direct import DirectEngine

USAGE = "penstock bench {step,prefill} [-m MODEL] [flags]"
DESCRIPTION = "Time decode steps, or prefills of whole prompts, through the engine's own runner."
EXAMPLES = [
    "penstock bench step -m Qwen3.5-35B-A3B --random-weights --batch 1,2,4,8 --context 1536",
    "penstock bench prefill -m Qwen3.5-4B --random-weights --batch 1,8 --context 1k --json prefill.json",
]


@dataclass(frozen=True, slots=True)
class Limits:
    """What this machine can do at best, measured with the plainest code there is."""

    bytes_per_s: float  # of a large copy, read + write
    operations_per_s: float  # of a large matmul in the model's dtype


@dataclass(frozen=True, slots=True)
class Measurement:
    """One shape: the time of every repeat, and what it moved at least."""

    batch: int
    context: int
    num_tokens: int  # that one repeat puts through the model
    seconds: tuple[float, ...]
    num_bytes: int
    floor_s: float

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half of the range between the 10th and the 90th percentile, relative to the median."""
        if len(self.seconds) < 2:
            return 0.0
        deciles = statistics.quantiles(self.seconds, n=10, method="inclusive")
        return (deciles[-1] - deciles[0]) / (2 * self.median_s)

    def as_row(self) -> list[str]:
        return [
            str(self.batch),
            f"{self.context:,}",
            f"{self.median_s * 1e3:.3f}",
            f"{self.spread:.1%}",
            f"{self.num_tokens / self.median_s:,.1f}",
            f"{self.num_bytes / self.median_s / 1e9:,.1f}",
            f"{self.floor_s * 1e3:.3f}",
            f"{self.floor_s / self.median_s:.1%}",
        ]

    def as_dict(self) -> dict[str, Any]:
        return {
            "batch": self.batch,
            "context": self.context,
            "ms_median": round(self.median_s * 1e3, 4),
            "ms_min": round(min(self.seconds) * 1e3, 4),
            "spread": round(self.spread, 4),
            "repeats": len(self.seconds),
            "tokens_per_s": round(self.num_tokens / self.median_s, 2),
            "gb_per_s": round(self.num_bytes / self.median_s / 1e9, 2),
            "floor_ms": round(self.floor_s * 1e3, 4),
            "fraction_of_floor": round(self.floor_s / self.median_s, 4),
        }


# How far decode may be from a prefill of the same tokens, relative to the size of the logits; unrelated ones
# differ by 1.4. Made-up weights and a router that flips near ties need the room in half precision.
TOLERANCES = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.25}
CHECK_TOKENS = 100  # more than one page and no multiple of anything
COLUMNS = ["batch", "context", "ms", "spread", "tok/s", "GB/s", "floor ms", "of floor"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("step", "prefill"), help="decode steps, or prefills of prompts")
    parser.add_argument("--batch", type=read_counts, default=(1,), metavar="N,N", help="requests in a step")
    parser.add_argument(
        "--context", type=read_count, default=1024, metavar="N", help="tokens in the cache, or in a prompt"
    )
    parser.add_argument("--repeats", type=read_count, default=20, metavar="N", help="timed runs of a shape")
    parser.add_argument("--warmup", type=read_count, default=3, metavar="N", help="runs before these")
    parser.add_argument("--json", metavar="FILE", help="write the JSON object to this file too")
    # The shapes that are timed decide how many rows and tokens the engine needs room for.
    add_flags(parser, EngineConfig, title="the engine", skip=("max_rows", "max_model_len", "prefix_cache"))


def run(arguments: argparse.Namespace) -> int:
    _check_shapes(arguments)
    settings = read_settings(EngineConfig, arguments)
    settings["max_rows"] = max(arguments.batch)
    longest = arguments.context + arguments.warmup + arguments.repeats
    settings["max_model_len"] = max(longest, CHECK_TOKENS + 1)
    settings["prefix_cache"] = False  # the second repeat would find the first one's work
    config: EngineConfig = from_mapping(EngineConfig, settings)

    with PhaseList() as phases:
        with timed("libraries", phases):
            from penstock.engine.direct import DirectEngine
            from penstock.engine.engine import Engine
        source = find_model(config.model)
        engine = DirectEngine(Engine.from_source(source, config, phases))
    model = engine.engine.runner.model
    difference = check_decode(engine)
    limits = measure_limits(engine)
    roofline = Roofline.of(model, source.config, _dtype(engine).itemsize)
    measure = measure_steps if arguments.what == "step" else measure_prefills
    measurements = [
        measure(engine, roofline, limits, batch, arguments.context, arguments.warmup, arguments.repeats)
        for batch in arguments.batch
    ]
    report = _report(arguments, config, engine, difference, limits, measurements)
    title = f"{arguments.what}: {source.name}, {report['dtype']}, {report['gpu'] or report['cpu']}"
    print_table(COLUMNS, [measurement.as_row() for measurement in measurements], title)
    line = json.dumps(report)
    if arguments.json:
        Path(arguments.json).expanduser().write_text(line + "\n")
    print(line)
    return 0


def _check_shapes(arguments: argparse.Namespace) -> None:
    sizes = {"--context": arguments.context, "--repeats": arguments.repeats, "--batch": min(arguments.batch)}
    for flag, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{flag} is {value}", "It must be 1 or more.")


def check_decode(engine: DirectEngine) -> float:
    """The relative difference between a decode step and a prefill that ends with the same token."""
    tokens = _prompts(engine, 1, CHECK_TOKENS + 1)[0]
    expected = engine.prefill([0], [tokens])
    engine.prefill([0], [tokens[:-1]])
    decoded = engine.decode([0], tokens[-1:])
    engine.remove([0])
    difference = float((decoded - expected).norm() / expected.norm())
    dtype = engine.engine.info.dtype
    if not difference <= TOLERANCES[dtype]:  # NaN fails this too
        raise PenstockError(
            "Decoding gives other logits than prefilling the same tokens",
            f"They differ by {difference:.2%} of their size; the limit is {TOLERANCES[dtype]:.1%} ({dtype}).",
            "This is a bug: a time of wrong results is worth nothing, so none was taken.",
        )
    return difference


def measure_steps(
    engine: DirectEngine,
    roofline: Roofline,
    limits: Limits,
    batch: int,
    context: int,
    warmup: int,
    repeats: int,
) -> Measurement:
    """Decode steps from `context` tokens on; the context grows by one with each."""
    ids = list(range(batch))
    engine.prefill(ids, _prompts(engine, batch, context))
    tokens = _prompts(engine, 1, batch)[0]
    seconds = _time(engine, lambda: engine.decode(ids, tokens), warmup, repeats)
    engine.remove(ids)
    num_bytes = roofline.decode_bytes(batch, context + warmup + repeats // 2)
    return Measurement(batch, context, batch, seconds, num_bytes, num_bytes / limits.bytes_per_s)


def measure_prefills(
    engine: DirectEngine,
    roofline: Roofline,
    limits: Limits,
    batch: int,
    context: int,
    warmup: int,
    repeats: int,
) -> Measurement:
    """Whole prompts from nothing; a known id is replaced, so every repeat is the first."""
    ids = list(range(batch))
    prompts = _prompts(engine, batch, context)
    seconds = _time(engine, lambda: engine.prefill(ids, prompts), warmup, repeats)
    engine.remove(ids)
    num_bytes = roofline.prefill_bytes(batch, context)
    compute_s = roofline.prefill_operations(batch, context) / limits.operations_per_s
    floor_s = max(num_bytes / limits.bytes_per_s, compute_s)
    return Measurement(batch, context, batch * context, seconds, num_bytes, floor_s)


def _prompts(engine: DirectEngine, batch: int, length: int) -> list[torch.Tensor]:
    import torch

    generator = torch.Generator().manual_seed(0)
    vocab_size = engine.engine.info.vocab_size
    return [torch.randint(0, vocab_size, (length,), generator=generator) for _ in range(batch)]


def _time(engine: DirectEngine, work: Callable[[], object], warmup: int, repeats: int) -> tuple[float, ...]:
    """Seconds of each repeat, the device drained before and after."""
    synchronize = _synchronizer(engine.engine.info.device)
    for _ in range(warmup):
        work()
    seconds = []
    for _ in range(repeats):
        synchronize()
        started = time.perf_counter()
        work()
        synchronize()
        seconds.append(time.perf_counter() - started)
    return tuple(seconds)


def _synchronizer(device: str) -> Callable[[], None]:
    import torch

    return torch.cuda.synchronize if device.startswith("cuda") else lambda: None


def _dtype(engine: DirectEngine) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, engine.engine.info.dtype)
    return dtype


def measure_limits(engine: DirectEngine) -> Limits:
    """The floor's two numbers, on the device and in the dtype that will be timed."""
    import torch

    device = engine.engine.info.device
    on_gpu = device.startswith("cuda")
    source = torch.ones((2**30 if on_gpu else 2**26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = min(_time(engine, lambda: target.copy_(source), 3, 10))
    size = 8192 if on_gpu else 512
    matrix = torch.ones(size, size, dtype=_dtype(engine), device=device)
    matmul_s = min(_time(engine, lambda: matrix @ matrix, 3, 5))
    return Limits(2 * source.numel() / copy_s, 2 * size**3 / matmul_s)


def _report(
    arguments: argparse.Namespace,
    config: EngineConfig,
    engine: DirectEngine,
    difference: float,
    limits: Limits,
    measurements: list[Measurement],
) -> dict[str, Any]:
    import torch

    info = engine.engine.info
    on_gpu = info.device.startswith("cuda")
    return {
        "bench": arguments.what,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "commit": _commit(),
        "host": platform.node(),
        "cpu": _cpu_name(),
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpu": torch.cuda.get_device_name(info.device) if on_gpu else None,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "model": info.model_name,
        "dtype": info.dtype,
        "random_weights": config.random_weights,
        "seed": config.weights_seed,
        "weight_bytes": info.weight_bytes,
        "decode_vs_prefill": round(difference, 6),
        "copy_gb_per_s": round(limits.bytes_per_s / 1e9, 2),
        "matmul_tflops": round(limits.operations_per_s / 1e12, 3),
        "results": [measurement.as_dict() for measurement in measurements],
    }


def _commit() -> str | None:
    """Of the checkout this code runs from, with a + when files differ from it; None outside of one."""
    folder = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
