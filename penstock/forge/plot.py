"""A run as a picture: the best engine so far over the trials, and the outcome of every idea."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from penstock.forge.ledger import Row

WIDTH, HEIGHT = 960, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 76, 56
KEPT, LOST, LINE = "#1a7f5a", "#b04a3a", "#8a8f98"
MAX_LABEL = 34


def draw_progress(rows: Sequence[Row], title: str) -> str:
    """An SVG. Higher is faster, on a logarithmic axis; failed trials are at the bottom."""
    scores = [row.score for row in rows if row.score]
    lowest, highest = min([1.0, *scores]), max([2.0, *scores])

    def x_of(trial: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (trial + 0.5) / max(1, len(rows))

    def y_of(score: float) -> float:
        share = math.log(score / lowest) / math.log(highest / lowest)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    parts = [_text(LEFT, 24, title, "font-weight='bold'"), *_scale(lowest, highest, y_of)]
    parts += [_text(LEFT, 42, "times as fast as the first version; a trial each", f"fill='{LINE}'")]
    steps: list[tuple[float, float]] = []
    best = 0.0
    for row in rows:
        x = x_of(row.trial)
        if row.verdict == "kept" and row.score:
            steps += [(x, y_of(best)), (x, y_of(row.score))] if best else [(x, y_of(row.score))]
            best = row.score
        parts.append(_mark(row, x, y_of))
    steps.append((WIDTH - RIGHT, y_of(best) if best else y_of(lowest)))
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in steps)
    parts.insert(0, f"<polyline points='{points}' fill='none' stroke='{KEPT}' stroke-width='2'/>")
    for row in rows:
        if row.verdict == "kept" and row.score:
            parts.append(_label(row, x_of(row.trial), y_of(row.score)))
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' "
        "font-family='sans-serif'"
    )
    background = f"<rect width='{WIDTH}' height='{HEIGHT}' fill='white'/>"
    return "\n".join([f"{head} font-size='12'>", background, *parts, "</svg>"]) + "\n"


def _scale(lowest: float, highest: float, y_of: Callable[[float], float]) -> list[str]:
    """Draws a line for every doubling."""
    lines = []
    for power in range(math.ceil(math.log2(lowest)), math.floor(math.log2(highest)) + 1):
        y = y_of(2.0**power)
        lines.append(
            f"<line x1='{LEFT}' y1='{y:.1f}' x2='{WIDTH - RIGHT}' y2='{y:.1f}' stroke='#e4e6ea'/>"
        )
        lines.append(_text(LEFT - 8, y + 4, f"{2.0**power:g}x", f"text-anchor='end' fill='{LINE}'"))
    return lines


def _mark(row: Row, x: float, y_of: Callable[[float], float]) -> str:
    """Filled: kept. Hollow: correct, but no faster. A cross at the bottom: not fully timed."""
    said = f"<title>{escape(row.line())}</title>"
    if not row.score:
        y = HEIGHT - BOTTOM + 14
        cross = f"M{x - 4:.1f},{y - 4} l8,8 m0,-8 l-8,8"
        return f"<path d='{cross}' stroke='{LOST}' stroke-width='2'>{said}</path>"
    fill = KEPT if row.verdict == "kept" else "white"
    edge = KEPT if row.verdict == "kept" else LINE
    return (
        f"<circle cx='{x:.1f}' cy='{y_of(row.score):.1f}' r='4' fill='{fill}' "
        f"stroke='{edge}'>{said}</circle>"
    )


def _label(row: Row, x: float, y: float) -> str:
    """Labels extend towards the middle, so that none leaves the picture."""
    idea = row.idea if len(row.idea) <= MAX_LABEL else row.idea[: MAX_LABEL - 1] + "…"
    anchor, shift = ("start", 8) if x < WIDTH / 2 else ("end", -8)
    return _text(x + shift, y - 8, idea, f"text-anchor='{anchor}'")


def _text(x: float, y: float, words: str, style: str) -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' {style}>{escape(words)}</text>"
