"""`penstock inspect experts LOG`: hit rates of expert caches, from a log of the experts that steps
used; and estimates of the speed on a machine given by its memory and bandwidths."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.commands.console import print_table
from penstock.eval.results import prepare_output

SHARES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75)  # of all experts that the device holds
SPANS = (1, 4, 16, 64, 256)  # steps


def run(path: str, as_json: bool, png: str | None = None) -> int:
    from penstock.eval.report.charts import require_matplotlib
    from penstock.offload.expert_log import read_log

    if png is not None:  # before a long log is read
        prepare_output(png, "--png")
        require_matplotlib("--png")
    report = analyze(read_log(Path(path).expanduser()))
    if png is not None:
        draw(report, Path(png).expanduser())
    if as_json:
        print(json.dumps(report))
    else:
        _print_report(report)
    return 0


def analyze(log: Any) -> dict[str, Any]:
    from penstock.offload.expert_log import (
        hit_rate,
        layered_hit_rate,
        lru_hit_rate,
        repeated_share,
        top_share,
        working_set,
    )

    total = log.num_layers * log.num_experts
    sizes = {share: max(round(share * total), 1) for share in SHARES}
    spans = {span: working_set(log, span) for span in SPANS}
    return {
        "layers": log.num_layers,
        "experts_in_a_layer": log.num_experts,
        "turns": len(log.turns),
        "steps": len(log.steps),
        "hit_rates": [
            {
                "share": share,
                "experts": size,
                "hit_rate": hit_rate(log, size),
                "gpu_hit_rate": layered_hit_rate(log, size),
                "lru_hit_rate": lru_hit_rate(log, size),
            }
            for share, size in sizes.items()
        ],
        "working_set": {str(span): n for span, n in spans.items() if not math.isnan(n)},
        "repeated_from_the_step_before": repeated_share(log),
        "uses_of_the_top_tenth": top_share(log, 0.1),
    }


def draw(report: dict[str, Any], path: Path) -> None:
    """Hit rates by cache size, and distinct experts by the number of consecutive steps."""
    from penstock.eval.report.charts import THEMES, LineChart, Series, save_png

    total = report["layers"] * report["experts_in_a_layer"]

    def hits(name: str) -> tuple[tuple[float, float], ...]:
        rates = report["hit_rates"]
        return tuple((100 * one["share"], 100 * one[name]) for one in rates if one[name] > 0)

    random = tuple((100 * share, 100 * share) for share in SHARES)
    curves = [
        Series("one pool", "", hits("hit_rate"), "ours"),
        Series("slots by layer", "", hits("gpu_hit_rate"), "goal"),
        Series("LRU", "", hits("lru_hit_rate"), "rival"),
        Series("random routing", "", random, "bound", is_dashed=True),
    ]
    spans = tuple((float(span), 100 * n / total) for span, n in report["working_set"].items())
    charts = [
        LineChart(
            "hits",
            "Hit rate of an expert cache",
            f"{report['steps']:,} steps",
            "% of all experts on the device",
            "% hits",
            tuple(one for one in curves if one.points),
        ),
        LineChart(
            "working-set",
            "Distinct experts in consecutive steps",
            f"{report['layers']} layers of {report['experts_in_a_layer']} experts",
            "consecutive steps",
            "% of all experts",
            (Series("used", "", spans, "ours"),),
        ),
    ]
    save_png([chart for chart in charts if chart.series[0].points], path, THEMES["light"])


def _print_report(report: dict[str, Any]) -> None:
    total = report["layers"] * report["experts_in_a_layer"]
    print(
        f"{report['steps']:,} steps through {report['layers']} layers of "
        f"{report['experts_in_a_layer']} experts."
    )
    print_table(
        ["experts on the device", "share", "hits", "slots by layer (GPU)", "LRU"],
        [
            [
                f"{row['experts']:,}",
                f"{row['share']:.0%}",
                f"{row['hit_rate']:.1%}",
                f"{row['gpu_hit_rate']:.1%}",
                f"{row['lru_hit_rate']:.1%}",
            ]
            for row in report["hit_rates"]
        ],
    )
    print_table(
        ["consecutive steps", "distinct experts", "of all"],
        [
            [span, f"{count:,.1f}", f"{count / total:.1%}"]
            for span, count in report["working_set"].items()
        ],
    )
    print(
        f"{report['repeated_from_the_step_before']:.1%} of a step's experts were used in the step "
        f"before; the most used tenth of all experts gets {report['uses_of_the_top_tenth']:.1%} of "
        "all uses."
    )


GB = 1e9
CONTEXT = 8192  # tokens of the one request that must fit
STEP_BYTES = 2 * GB  # kernels, activations, workspaces on the GPU
SYSTEM_BYTES = 6 * GB  # RAM of the process and the system
PROMPT_TOKENS = 4096  # per chunk, which reads nearly all experts once


@dataclass(frozen=True, slots=True)
class Tiers:
    """A machine: the size and the bandwidth of each tier of its memory."""

    gpu_bytes: float
    ram_bytes: float
    gpu_speed: float  # bytes per second of GPU memory
    link_speed: float  # from RAM to the GPU
    disk_speed: float | None  # None: nothing is read from disk


@dataclass(frozen=True, slots=True)
class Need:
    """What a model needs, in bytes."""

    dense: float  # weights that every token reads, or that must be there
    experts: float
    token_experts: float  # experts that one token reads
    layer_experts: float  # experts of one layer: a prefill needs all of them on the GPU
    request: float  # KV and state of one request


@dataclass(frozen=True, slots=True)
class Estimate:
    tokens_per_s: float  # of one request; 0: the model does not run
    prompt_tokens_per_s: float
    shares: Mapping[str, float]  # of the experts, by tier
    limit: str  # what sets the pace, or what is missing


def estimate(need: Need, machine: Tiers) -> Estimate:
    """Whether a model runs on a machine, at what speed at most, and what limits it.

    All experts on the GPU; or all in RAM, and some of them on the GPU beside two layers in transit;
    or GPU, RAM and disk filled in this order: the fastest that the machine has room for. Routing is
    assumed uniform, the worst case, so a tier serves the share that it holds. Reads of all tiers
    overlap: the slowest one sets the pace.
    """
    from penstock.offload.lanes import NUM_LANES

    slots = machine.gpu_bytes - need.dense - need.request - STEP_BYTES
    in_ram = max(machine.ram_bytes - SYSTEM_BYTES, 0.0)
    lanes = NUM_LANES * need.layer_experts
    has_disk = machine.disk_speed is not None
    held = []  # bytes of experts on the GPU and in RAM, in each way that is possible
    if slots >= need.experts:
        held.append((need.experts, 0.0))
    elif in_ram >= need.experts and slots >= lanes + need.token_experts:
        held.append((slots - lanes, need.experts))
    if has_disk and need.layer_experts <= slots < need.experts:
        held.append((slots, in_ram))
    if not held:
        least = need.layer_experts if has_disk else lanes + need.token_experts
        missing = min(least, need.experts) - slots
        return Estimate(0.0, 0.0, {}, _missing(missing, in_ram, need))
    ways = [_pace(need, machine, *one) for one in held]
    return max(ways, key=lambda way: way.tokens_per_s)


def _missing(on_gpu: float, in_ram: float, need: Need) -> str:
    if on_gpu <= 0:
        missing = (need.experts - in_ram) / GB
        return f"RAM: {missing:.1f} GB more are needed, or a disk (--disk-gbs)"
    said = f"GPU memory: {on_gpu / GB:.1f} GB more are needed"
    if on_gpu < need.dense and need.experts + on_gpu <= in_ram:
        said += ", or layers in RAM (--offload-layers)"
    return said


def _pace(need: Need, machine: Tiers, on_gpu: float, in_ram: float) -> Estimate:
    in_ram = min(in_ram, need.experts - on_gpu)
    on_disk = need.experts - on_gpu - in_ram
    shares = {
        name: size / need.experts if need.experts else 0.0
        for name, size in (("gpu", on_gpu), ("ram", in_ram), ("disk", on_disk))
    }
    token = _seconds(need.dense, need.token_experts, shares, machine)
    prompt = _seconds(need.dense, need.experts, shares, machine)
    limit = max(token, key=lambda name: token[name])
    return Estimate(
        1 / max(token.values()), PROMPT_TOKENS / max(prompt.values()), shares, LIMITS[limit]
    )


LIMITS = {"gpu": "GPU memory speed", "link": "link from RAM to GPU", "disk": "disk"}


def _seconds(
    dense: float, experts: float, shares: Mapping[str, float], machine: Tiers
) -> dict[str, float]:
    """Seconds that each tier needs per step; the GPU also reads the experts copied to it."""
    seconds = {
        "gpu": (dense + experts) / machine.gpu_speed,
        "link": experts * (shares["ram"] + shares["disk"]) / machine.link_speed,
    }
    if machine.disk_speed is not None:
        seconds["disk"] = experts * shares["disk"] / machine.disk_speed
    return seconds
