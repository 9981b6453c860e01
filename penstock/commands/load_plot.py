"""The levels of `bench serve` as a picture: throughput and the time between tokens, by requests at a time."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError


def require_matplotlib() -> None:
    """Before anything is measured: half an hour of load must not end with a missing package."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PenstockError(
            "--plot needs matplotlib",
            "It is not installed.",
            "Run `pip install matplotlib`, or leave --plot out.",
        )


def plot_levels(path: Path, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    from matplotlib.figure import Figure

    names = [str(row["concurrency"] or row["rate"] or "all") for row in rows]
    figure = Figure(figsize=(10, 4), layout="constrained")
    throughput, latency = figure.subplots(1, 2)
    throughput.plot(names, [row["tok_s"] for row in rows], marker="o", label="in and out")
    throughput.plot(names, [row["output_tok_s"] for row in rows], marker="o", label="out")
    throughput.set(ylabel="tokens a second", ylim=(0, None))
    for share in ("p50", "p99"):
        gaps = [row["itl_ms"][share] if row["itl_ms"] else None for row in rows]
        latency.plot(names, gaps, marker="o", label=share)
    latency.set(ylabel="ms between events (ITL)", ylim=(0, None))
    for axes in (throughput, latency):
        axes.set_xlabel("requests at a time")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    figure.savefig(path)
