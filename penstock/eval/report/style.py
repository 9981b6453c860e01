"""Colours and CSS of the page. Five roles, two themes; every text colour has a contrast of 4.5 or more."""

from __future__ import annotations

from collections.abc import Mapping

THEMES: Mapping[str, Mapping[str, str]] = {
    "light": {
        "paper": "#ffffff",
        "ink": "#1d2127",
        "quiet": "#5b6470",
        "hair": "#e3e6ea",
        "track": "#eef0f3",
        "ours": "#0a62b4",
        "rival": "#b04a12",
        "other": "#626c78",
        "bound": "#626c78",
        "goal": "#1f7a4d",
    },
    "dark": {
        "paper": "#0d1117",
        "ink": "#e8eaed",
        "quiet": "#9aa4b0",
        "hair": "#262c35",
        "track": "#1c222b",
        "ours": "#6fb4ff",
        "rival": "#f2a169",
        "other": "#9aa4b0",
        "bound": "#9aa4b0",
        "goal": "#6fce9b",
    },
}
ROLES = ("ours", "rival", "other", "bound", "goal")

_LAYOUT = """
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, -apple-system,
  "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", Arial, sans-serif; }
main { max-width: 768px; margin: 0 auto; padding: 40px 24px 72px; }
h1 { font-size: 1.9rem; line-height: 1.2; letter-spacing: -0.015em; margin: 0 0 8px; font-weight: 650; }
h2 { font-size: 1.3rem; line-height: 1.3; letter-spacing: -0.01em; margin: 0 0 4px; font-weight: 650; }
h3 { font-size: 0.95rem; margin: 28px 0 10px; font-weight: 600; }
p { margin: 0 0 12px; max-width: 65ch; }
.quiet, .notes, caption, figcaption { color: var(--quiet); }
.headlines { display: grid; grid-template-columns: repeat(auto-fit, minmax(118px, 1fr)); gap: 20px 24px;
  margin: 28px 0 0; padding: 0; list-style: none; }
.headlines b { display: block; font-size: 1.6rem; line-height: 1.2; font-weight: 600; letter-spacing: -0.01em;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
.headlines small { font-size: 0.95rem; font-weight: 400; color: var(--quiet); margin-left: 4px; }
.headlines span { display: block; font-size: 0.85rem; line-height: 1.4; color: var(--quiet); }
section { margin-top: 44px; padding-top: 28px; border-top: 1px solid var(--hair); }
figure { margin: 0; }
figcaption { font-size: 0.8rem; margin-top: 4px; }
.notes { font-size: 0.85rem; line-height: 1.5; margin: 16px 0 0; padding: 0; list-style: none; }
.notes li { margin-top: 6px; max-width: 75ch; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin-top: 20px; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; min-width: 100%; }
caption { text-align: left; font-size: 0.8rem; padding-bottom: 4px; }
th, td { text-align: right; padding: 5px 0 5px 16px; white-space: nowrap;
  border-bottom: 1px solid var(--hair); }
th { font-weight: 500; color: var(--quiet); vertical-align: bottom; }
thead th { white-space: normal; min-width: 4.2em; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
tbody tr:last-child td, tbody tr:last-child th { border-bottom: 0; }
tbody th { color: var(--ink); font-weight: 400; }
code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: 0.9em; }
.chart { display: block; width: 100%; height: auto; overflow: visible; }
.narrow { display: none; }
@media (max-width: 640px) {
  main { padding: 24px 16px 56px; }
  h1 { font-size: 1.5rem; }
  .wide { display: none; }
  .narrow { display: block; max-width: 480px; }
  .headlines { grid-template-columns: 1fr 1fr; }
  th, td { padding-left: 10px; }
  thead th { min-width: 3.4em; }
}
@media print { section { break-inside: avoid; } }
svg text { font-size: 12px; fill: var(--ink); font-variant-numeric: tabular-nums; white-space: pre; }
svg .tick, svg .axis, svg .note { fill: var(--quiet); font-size: 11px; }
svg .label { font-weight: 500; paint-order: stroke; stroke: var(--paper); stroke-width: 4px; }
svg .end { text-anchor: end; }
svg .middle { text-anchor: middle; }
svg .value { paint-order: stroke; stroke: var(--paper); stroke-width: 4px; }
svg .grid { stroke: var(--hair); stroke-width: 1; }
svg .track { fill: var(--track); }
svg .line { fill: none; stroke-width: 1.5; stroke-linejoin: round; }
svg .line.ours { stroke-width: 2.25; }
svg .line.dashed { stroke-dasharray: 6 4; }
svg .line.bound { stroke-dasharray: 1 4; stroke-width: 2; stroke-linecap: round; }
svg .mark { stroke-width: 2; }
svg .mark.under { stroke: var(--paper); stroke-width: 6; }
svg .hollow { fill-opacity: 0.35; stroke: var(--ours); stroke-dasharray: 4 3; }
svg .dot.dashed { fill: var(--paper); }
svg .range { stroke: var(--ours); stroke-width: 2; }
svg .range.thin { stroke-width: 1.25; }
svg .tail { stroke: var(--other); stroke-width: 1; }
svg .ring { fill: var(--paper); stroke: var(--ours); stroke-width: 2; }
"""


def stylesheet() -> str:
    """Light by default, dark where the reader's system is; a page that is printed is always light."""
    light, dark = (_variables(THEMES[name]) for name in ("light", "dark"))
    roles = "\n".join(
        f"svg .line.{role}, svg .mark.{role}, svg .dot.{role} {{ stroke: var(--{role}); }}\n"
        f"svg .bar.{role}, svg .dot.{role}, svg .label.{role} {{ fill: var(--{role}); }}"
        for role in ROLES
    )
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{roles}\n{_LAYOUT.strip()}"
    )


def _variables(theme: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in theme.items())
