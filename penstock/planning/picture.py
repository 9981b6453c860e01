"""A plot of a plan: the distributions of TTFT and ITL, for every layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from penstock.planning.outcome import Outcome
from penstock.planning.slo import Slo

POINTS = 400  # of a curve


def draw(path: Path, title: str, outcomes: Mapping[str, Outcome], slo: Slo) -> None:
    """Shares of requests by their times. The format follows the file's ending."""
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
    panels[0].legend(title="engines x tp")
    figure.savefig(path, dpi=120)
