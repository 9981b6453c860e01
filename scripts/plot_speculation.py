"""Plots tokens per step over time, from the output of `scripts/measure_speculation.py`.

    python scripts/plot_speculation.py results/cpu/speculation.json docs/plots

Writes speculation-light.png and speculation-dark.png into the folder.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from PIL import Image

from penstock.eval.report.charts import THEMES

# The row of each task to plot, and its colour in a theme.
DRAWN = {
    "word problems": {"mtp:1": "other", "mtp:2": "ours", "ngram:7": "rival"},
    "copy editing": {
        "ngram:3": "other",
        "ngram:7": "ours",
        "off and what the grammar forces": "goal",
    },
}


def draw(rows: list[dict[str, Any]], theme: Any, path: Path) -> None:
    figure = Figure(figsize=(10, 4.2), layout="constrained", facecolor=theme["paper"])
    for axes, (task, drawn) in zip(figure.subplots(1, len(DRAWN)), DRAWN.items()):
        axes.set_facecolor(theme["paper"])
        axes.set_title(task, loc="left", color=theme["ink"], fontweight="bold")
        axes.spines[:].set_visible(False)
        axes.tick_params(colors=theme["quiet"])
        axes.grid(axis="y", color=theme["hair"])
        for row in rows:
            role = drawn.get(row["speculate"]) if row["task"] == task else None
            if role is None:
                continue
            values = row["tokens_over_time"]
            share = [100 * (number + 0.5) / len(values) for number in range(len(values))]
            label = f"{row['speculate']}, {row['gain']:.2f} x plain"
            axes.plot(share, values, color=theme[role], linewidth=1.8, label=label)
        axes.axhline(1.0, color=theme["bound"], linestyle=":", linewidth=1.2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("% of all steps", color=theme["quiet"])
        axes.set_ylabel("tokens a step", color=theme["quiet"])
        axes.legend(
            frameon=False,
            labelcolor=theme["ink"],
            fontsize=9,
            loc="upper left",
            bbox_to_anchor=(0.0, -0.2),
        )
    figure.savefig(path, dpi=110, facecolor=theme["paper"])
    picture = Image.open(path).convert("RGB")
    picture.quantize(32, dither=Image.Dither.NONE).save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="JSON of the measurement")
    parser.add_argument("folder", type=Path, help="where the plots are written")
    given = parser.parse_args()
    source, folder = given.source, given.folder
    mpl.rcParams["font.family"] = "DejaVu Sans"
    rows = json.loads(source.read_text())["rows"]
    for name, theme in THEMES.items():
        draw(rows, theme, folder / f"speculation-{name}.png")


if __name__ == "__main__":
    main()
