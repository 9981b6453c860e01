"""`penstock plan`: how a load would run on a number of GPUs, which layout is best, and how many
GPUs are needed.

Simulates time with the real router and scheduler (`penstock/planning`). Step times were measured on
one H200; collectives have a stated cost.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.commands.bench_serve import refuse_contradictions
from penstock.commands.console import print_table
from penstock.commands.flags import add_flags, add_model_argument, read_settings
from penstock.commands.layouts import GPUS, read_gpus
from penstock.commands.provenance import provenance
from penstock.config import EngineConfig, from_mapping, setting
from penstock.errors import ConfigError
from penstock.eval.report.charts import require_matplotlib
from penstock.eval.results import (
    deliver_line,
    prepare_output,
    require_above_zero,
    require_at_least,
)
from penstock.eval.traces import Arrival, poisson_arrivals, read_trace
from penstock.models.source import find_model
from penstock.progress import Phase, PhaseList, timed

if TYPE_CHECKING:
    from penstock.planning.fleet import Layout
    from penstock.planning.node import Slo
    from penstock.planning.outcome import Outcome

DESCRIPTION = "Simulate a load on a fleet: goodput, latencies, the best layout, the GPUs needed."
USAGE = "penstock plan [MODEL] --gpus 8xH200 (--trace FILE | --rate R) [flags]"
EXAMPLES = [
    "penstock plan Qwen3.5-35B-A3B --gpus 8xH200 --rate 40 --input-len 1k --output-len 256 "
    "--slo ttft=500ms,itl=30ms",
    "penstock plan Qwen3.5-397B-A17B --gpus 64xH200 --trace conversations.csv --speedup 10 "
    "--plot plan.png",
    "penstock plan Qwen3.5-35B-A3B --gpus 1000xH200 --tp 1 --trace hour.csv --repeat 24 "
    "--speedup 100",
]
ENGINE_FLAGS = (
    *("model", "tp", "dtype", "kv_dtype", "state_dtype", "quantization", "max_model_len"),
    *("max_rows", "max_step_tokens", "mixed_step_tokens", "bulk_share", "page_size"),
)
MOST_GPUS = 16384  # upper end of the search for the fewest GPUs
COLUMNS = [
    *("engines x tp", "goodput req/s", "tok/s", "kept", "ttft p50", "p99 ms", "itl p50", "p99 ms"),
    *("busy", "GPUs needed", "step times"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """The load, and the latency limits that it must keep."""

    gpus: str = setting("8xH200", f"the fleet: a count and one of {', '.join(GPUS)}")
    trace: str | None = setting(None, "arrivals: Azure's CSV or Mooncake's JSON lines")
    speedup: float = setting(1.0, "factor by which the trace's clock runs faster")
    repeat: int = setting(1, "how often to play the trace, one pass after the other")
    limit: int | None = setting(None, "requests of the trace to use (default: all)")
    rate: float | None = setting(None, "requests per second at random times, instead of a trace")
    requests: int = setting(1000, "number of requests, with --rate")
    input_len: int = setting(1024, "tokens per prompt, with --rate")
    output_len: int = setting(256, "tokens per reply, with --rate")
    slo: str = setting(
        "ttft=500ms,itl=30ms",
        "limits that a reply must keep to count: its TTFT, and its mean time between tokens",
    )
    seed: int = setting(0, "seed for random times, and for the router's choice of engines")
    results: str | None = setting(None, "folder of measured times (default: the checkout's)")
    plot: str | None = setting(None, "draw the distributions into this file (matplotlib)")

    def __post_init__(self) -> None:
        require_above_zero(speedup=self.speedup, rate=self.rate)
        for name in ("repeat", "limit", "requests", "input_len", "output_len"):
            require_at_least(1, **{name: getattr(self, name)})
        if (self.trace is None) == (self.rate is None):
            raise ConfigError(
                "A plan needs --trace or --rate"
                if self.trace is None
                else "--trace and --rate are both given",
                "The load is either recorded or random.",
                "Give one of them.",
            )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_flags(parser, PlanSettings, title="the load")
    add_flags(parser, EngineConfig, title="each engine", only=ENGINE_FLAGS)
    parser.add_argument("--json", metavar="FILE", help="write the JSON object to this file too")


def run(arguments: argparse.Namespace) -> int:
    of_load = read_settings(PlanSettings, arguments)
    settings: PlanSettings = from_mapping(PlanSettings, of_load)
    refuse_contradictions(of_load)
    given = read_settings(EngineConfig, arguments)
    count, gpu_name = read_gpus(settings.gpus)
    prepare_output(settings.plot, "--plot")
    if settings.plot:
        require_matplotlib("--plot")
    prepare_output(arguments.json, "--json")
    arrivals = read_load(settings)
    has_prefixes = any(arrival.block_ids for arrival in arrivals)
    only_tp = given.get("tp")
    config = from_mapping(EngineConfig, {**given, "tp": 1, "prefix_cache": has_prefixes})
    with PhaseList() as phases:
        with timed("libraries", phases):
            from penstock.planning.fleet import simulate_fleet
            from penstock.planning.layouts import Unfit, possible_layouts
            from penstock.planning.node import Slo
            from penstock.planning.step_times import RESULTS, Tables
        slo = Slo.parse(settings.slo)
        folder = RESULTS if settings.results is None else Path(settings.results).expanduser()
        source = find_model(config.model)
        layouts = possible_layouts(source, config, count, gpu_name, Tables.read(folder), only_tp)
        rows, outcomes = [], {}
        for layout in layouts:
            name = f"{count // layout.tp} x {layout.tp}"
            if isinstance(layout, Unfit):
                rows.append({"tp": layout.tp, "engines": count // layout.tp, "why_not": layout.why})
                continue
            with timed(name, phases) as report:
                started = time.monotonic()
                num_engines = count // layout.tp
                outcome = simulate_fleet(layout, num_engines, arrivals, slo, settings.seed)
                outcomes[name] = outcome
                rows.append(_row(layout, num_engines, outcome, arrivals, slo, settings.seed))
                rows[-1]["simulated_in_s"] = round(time.monotonic() - started, 2)
                report(Phase(name, f"{outcome.num_steps:,} steps"))
    best = choose(rows)
    _print(rows, best, slo, f"{source.name} on {count} x {gpu_name}", arrivals)
    report_ = {
        "plan": source.name,
        **provenance(),
        **dataclasses.asdict(settings),
        "quantization": config.quantization,
        "requests_of_load": len(arrivals),
        "rows": rows,
        "best_tp": best,
    }
    if settings.plot:
        draw(Path(settings.plot).expanduser(), f"{source.name}, {settings.gpus}", outcomes, slo)
    deliver_line(json.dumps(report_), arguments.json, "--json")
    return 0


def read_load(settings: PlanSettings) -> list[Arrival]:
    if settings.trace is None:
        assert settings.rate is not None
        return poisson_arrivals(
            settings.requests,
            settings.rate,
            settings.input_len,
            settings.output_len,
            settings.seed,
        )
    from penstock.planning.fleet import repeated

    path = Path(settings.trace).expanduser()
    trace = read_trace(path, speedup=settings.speedup, limit=settings.limit)
    return repeated(trace, settings.repeat)


def _row(
    layout: Layout,
    num_engines: int,
    outcome: Outcome,
    arrivals: list[Arrival],
    slo: Slo,
    seed: int,
) -> dict[str, Any]:
    from penstock.planning.fleet import fewest_engines

    needed = fewest_engines(layout, arrivals, slo, MOST_GPUS // layout.tp, seed)
    times = layout.times
    return {
        "tp": layout.tp,
        "engines": num_engines,
        "max_model_len": layout.shape.pools.max_model_len,
        **outcome.as_dict(num_engines),
        "gpus_needed": None if needed is None else needed * layout.tp,
        "step_times": times.source,
        "all_reduce_us": round(1e6 * times.all_reduce_s, 1) if layout.tp > 1 else None,
        "step_ms_of_1": round(1e3 * times.decodes_s(1, 1024), 4),
        "step_ms_of_64": round(1e3 * times.decodes_s(64, 64 * 1024), 4),
    }


def choose(rows: list[dict[str, Any]]) -> int | None:
    """The tp of the layout where most replies keep the limits; among equals, the one that needs
    the fewest GPUs, then the one with the lowest p99 TTFT. None if no layout fits."""
    fitting = [row for row in rows if "why_not" not in row]

    def rank(row: dict[str, Any]) -> tuple[float, float, float]:
        needed = row["gpus_needed"] or math.inf
        return -round(row["attainment"], 3), needed, row["ttft_ms"].get("p99", math.inf)

    return min(fitting, key=rank)["tp"] if fitting else None


def _print(
    rows: list[dict[str, Any]],
    best: int | None,
    slo: Slo,
    title: str,
    arrivals: list[Arrival],
) -> None:
    num_output = sum(one.output_len for one in arrivals)
    num_input = sum(one.input_len for one in arrivals)
    span_s = max(arrivals[-1].at_s, 1e-9)
    print(
        f"{len(arrivals):,} requests in {span_s:,.0f} s; on average, prompts of "
        f"{num_input / len(arrivals):,.0f} tokens and replies of {num_output / len(arrivals):,.0f}"
    )
    print(f"A reply counts if it keeps these limits: {slo.in_words()}")
    cells = []
    for row in rows:
        name = f"{row['engines']} x {row['tp']}"
        if "why_not" in row:
            cells.append([name, *[""] * (len(COLUMNS) - 2), row["why_not"]])
            continue
        ttft, itl, needed = row["ttft_ms"], row["itl_ms"], row["gpus_needed"]
        cells.append(
            [
                name,
                f"{row['goodput_requests_s']:,.1f}",
                f"{row['goodput_tok_s']:,.0f}",
                f"{row['attainment']:.1%}",
                *(f"{ttft[name]:,.0f}" if ttft else "" for name in ("p50", "p99")),
                *(f"{itl[name]:.1f}" if itl else "" for name in ("p50", "p99")),
                f"{row['busy']:.0%}",
                "more than tried" if needed is None else f"{needed:,}",
                row["step_times"],
            ]
        )
    print_table(COLUMNS, cells, title)
    for row in rows:
        if row.get("refused"):
            print(
                f"{row['engines']} x {row['tp']} refuses {row['refused']:,} requests: prompt and "
                f"reply are longer than {row['max_model_len']:,} tokens."
            )
    if best is None:
        print("No layout fits these GPUs.")
        return
    needed = next(row["gpus_needed"] for row in rows if row["tp"] == best)
    words = f"{needed:,} GPUs keep" if needed is not None else f"not even {MOST_GPUS:,} GPUs keep"
    print(f"Best: --tp {best}. With it, {words} the limits for 99 % of the requests.")


POINTS = 400  # per curve


def draw(path: Path, title: str, outcomes: Mapping[str, Outcome], slo: Slo) -> None:
    """Cumulative distributions of latencies. The file's suffix decides the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(1, 2)
    parts = (("ttfts", "first token, ms", slo.ttft_s), ("tpots", "between tokens, ms", slo.itl_s))
    for axes, (name, label, limit_s) in zip(panels, parts):
        for layout, outcome in outcomes.items():
            values = sorted(getattr(outcome, name))
            step = max(1, len(values) // POINTS)
            shares = [100 * (i + 1) / len(values) for i in range(0, len(values), step)]
            axes.plot([1e3 * value for value in values[::step]], shares, label=layout)
        if limit_s < float("inf"):
            axes.axvline(1e3 * limit_s, color="0.6", linestyle="--")
        axes.set_xscale("log")
        axes.set_xlabel(label)
        axes.set_ylabel("% of requests")
        axes.grid(alpha=0.3)
    if outcomes:
        panels[0].legend(title="engines x tp")
    figure.savefig(path, dpi=120)
