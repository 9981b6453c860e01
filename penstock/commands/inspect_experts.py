"""`penstock inspect experts LOG`: what a log of experts says about caches for them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from penstock.commands.console import print_table
from penstock.errors import ConfigError
from penstock.eval.results import prepare_output

SHARES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75)  # of all experts, on the device
SPANS = (1, 4, 16, 64, 256)  # steps


def run(path: str, as_json: bool, png: str | None = None) -> int:
    from penstock.offload.expert_log import read_log

    if png is not None:
        _require_charts(png)
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


def _require_charts(png: str) -> None:
    """Before a long log is read."""
    from penstock.eval.report.charts import has_matplotlib

    prepare_output(png, "--png")
    if not has_matplotlib():
        raise ConfigError(
            "--png needs matplotlib",
            "It is not installed.",
            "Run `pip install 'penstock[eval]'` or `pip install matplotlib`, or leave --png out.",
        )


def draw(report: dict[str, Any], path: Path) -> None:
    """Hit rates over the size of a cache, and different experts over steps in a row."""
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
            "Hits of a cache for experts",
            f"{report['steps']:,} steps",
            "% of all experts on the device",
            "% hits",
            tuple(one for one in curves if one.points),
        ),
        LineChart(
            "working-set",
            "Different experts of steps in a row",
            f"{report['layers']} layers of {report['experts_in_a_layer']} experts",
            "steps in a row",
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
        ["steps in a row", "different experts", "of all"],
        [
            [span, f"{count:,.1f}", f"{count / total:.1%}"]
            for span, count in report["working_set"].items()
        ],
    )
    print(
        f"Of a step's experts {report['repeated_from_the_step_before']:.1%} were used in the step "
        f"before; the most used tenth of all experts gets {report['uses_of_the_top_tenth']:.1%} of "
        "all uses."
    )
