"""`penstock top`: a server's live numbers in a terminal, as on the page's live view."""

from __future__ import annotations

import argparse
import base64
import contextlib
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

from penstock.commands.console import human_bytes
from penstock.http_client import HttpClient

if TYPE_CHECKING:
    from rich.console import Group

USAGE = "penstock top [--base-url URL] [--once]"
DESCRIPTION = "Watch a running server: speed, requests, latency, cache and engines. Ctrl-C leaves."
EXAMPLES = [
    "penstock top                                    the server on port 8000 of this machine",
    "penstock top --base-url http://gpu-box:8000",
    "penstock top --once | grep generated            once, for a script",
]
DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 10.0
WINDOW = 60  # events for quantiles and the curve
MISSED = "missed_tokens_"
BARS = " ▁▂▃▄▅▆▇█"
Event = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help = "the server to watch; PENSTOCK_API_KEY has its key"
    parser.add_argument(
        "--base-url", metavar="URL", default=DEFAULT_URL, help=f"{help} (default: {DEFAULT_URL})"
    )
    parser.add_argument(
        "--once", action="store_true", help="print the numbers of one second and end"
    )


def run(arguments: argparse.Namespace) -> int:
    client = HttpClient(arguments.base_url, timeout_s=TIMEOUT_S)
    with contextlib.closing(client.watch("/live")) as events:
        if arguments.once or not sys.stdout.isatty():
            history = deque(islice(events, 2))
            print("\n".join(f"{name:<24}{value}" for name, value in rows_of(history)))
        else:
            _show(events)
    return 0


def _show(events: Iterator[Event]) -> None:
    from rich.live import Live

    history: deque[Event] = deque(maxlen=WINDOW)
    with Live(screen=True, auto_refresh=False) as live, contextlib.suppress(KeyboardInterrupt):
        for event in events:
            if history and event["generated_tokens"] < history[-1]["generated_tokens"]:
                history.clear()  # the server was restarted and counts from zero
            history.append(event)
            live.update(_screen(history), refresh=True)


def _screen(history: Sequence[Event]) -> Group:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    numbers = Table.grid(padding=(0, 3))
    for name, value in rows_of(history):
        numbers.add_row(Text(name, style="dim"), Text(value))
    engines = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("engine", "state", "requests", "memory in use", "restarts", "last problem"):
        engines.add_column(column)
    for one in history[-1]["replicas"]:
        state = (str(one[name]) for name in ("replica", "state", "requests"))
        engines.add_row(*state, _memory(one), str(one["restarts"]), one["problem"])
    speeds = [
        rate(before, now, "generated_tokens")
        for before, now in zip(history, islice(history, 1, None))
    ]
    head = Text.assemble(("penstock top", "bold"), f"  {_about(history[-1])}")
    maps = [line for one in history[-1]["replicas"] for line in heat_map(one)]
    return Group(head, Text(curve(speeds) + "\n"), numbers, Text(), engines, *map(Text, maps))


def rows_of(history: Sequence[Event]) -> list[tuple[str, str]]:
    """Names and values: rates of the last second, latencies over the whole history."""
    now, before, first = history[-1], history[-2 if len(history) > 1 else -1], history[0]
    rows = [
        ("generated tokens/s", f"{rate(before, now, 'generated_tokens'):,.0f}"),
        ("prompt tokens/s", f"{rate(before, now, 'prompt_tokens'):,.0f}"),
        ("first token", _latency(first["first_token_s"], now["first_token_s"])),
        ("between tokens", _latency(first["inter_token_s"], now["inter_token_s"])),
    ]
    stats = now["stats"]
    if stats is None:
        return [*rows, ("engine", "starting, or in a long step")]
    prefix: dict[str, int] = stats["prefix"]
    reused = prefix.get("tokens_reused", 0)
    missed = {
        name.removeprefix(MISSED): n for name, n in prefix.items() if name.startswith(MISSED) and n
    }
    num_tokens = reused + sum(missed.values())
    num_lookups = sum(n for name, n in prefix.items() if name == "hit" or name.startswith("miss_"))
    reasons = ", ".join(f"{name.replace('_', ' ')} {n:,}" for name, n in missed.items())
    return [
        *rows,
        ("running, waiting", f"{stats['num_running']}, {stats['num_waiting']}"),
        ("pages in use", _used(stats["num_free_pages"], stats["num_pages"])),
        ("state slots in use", _used(stats["num_free_slots"], stats["num_slots"])),
        ("state checkpoints", f"{stats['num_checkpoints']:,}"),
        ("memory, fullest engine", _memory(max(now["replicas"], key=_fullness))),
        (
            "prompt from the cache",
            f"{reused / num_tokens:.1%} of {num_tokens:,} tokens" if num_tokens else "none",
        ),
        ("prompts with a hit", f"{prefix.get('hit', 0):,} of {num_lookups:,}"),
        ("computed because", reasons or "nothing was computed"),
        ("preempted", f"{stats['num_preemptions']:,}"),
        *_draft_rows(before["stats"], stats),
        *expert_rows(before, now),
        ("sessions", f"{stats['num_sessions']:,} with {human_bytes(stats['session_bytes'])}"),
    ]


def _draft_rows(before: Event | None, now: Event) -> list[tuple[str, str]]:
    """For engines that may draft: totals, and the rate of the last second."""
    drafts = now["drafts"]
    if drafts is None:
        return []
    last = None if before is None else _tokens_a_step(before["drafts"], drafts)
    shares: dict[str, list[str]] = {}
    for one in drafts["counts"]:
        share = f"{one['num_accepted'] / one['num_drafted']:.0%}" if one["num_drafted"] else "-"
        shares.setdefault(one["drafter"], []).append(share)
    steps = [_tokens_a_step(None, drafts), f"{last} in the last second" if last else None]
    return [
        ("tokens per step", ", ".join(filter(None, steps)) or "none"),
        (
            "drafts accepted",
            "; ".join(f"{name} {' '.join(found)}" for name, found in shares.items()) or "none",
        ),
        ("saved by drafts", f"{drafts['saved_s']:,.1f} s"),
    ]


def _tokens_a_step(before: Event | None, now: Event) -> str | None:
    """Tokens per decoding request and step; None: there was no such step."""
    num_decodes = now["num_decodes"] - (before["num_decodes"] if before else 0)
    num_tokens = now["num_tokens"] - (before["num_tokens"] if before else 0)
    return f"{num_tokens / num_decodes:.2f}" if num_decodes > 0 else None


def rate(before: Event, now: Event, name: str) -> float:
    """Per second."""
    elapsed = now["time"] - before["time"]
    return max(0.0, (now[name] - before[name]) / elapsed) if elapsed > 0 else 0.0


def quantile_bound(before: Event, now: Event, share: float) -> float | None:
    """The lowest histogram bound below which this share of the new values lies; None: there are no
    new values. Infinite: above every bound.
    """
    counts = [n - m for n, m in zip(now["counts"], before["counts"])]
    if not counts[-1]:
        return None
    place = next(place for place, n in enumerate(counts) if n >= share * counts[-1])
    return now["bounds"][place] if place < len(now["bounds"]) else float("inf")


def curve(values: Sequence[float]) -> str:
    most = max(values, default=0.0) or 1.0
    return "".join(BARS[round(value / most * (len(BARS) - 1))] for value in values)


def _latency(before: Event, now: Event) -> str:
    bounds = {share: quantile_bound(before, now, share) for share in (0.5, 0.95)}
    said = [
        f"{share:.0%} within {bound:g} s" for share, bound in bounds.items() if bound is not None
    ]
    return ", ".join(said).replace("within inf s", "beyond all bounds") or "none"


def _used(num_free: int, num_all: int) -> str:
    """One page is reserved for padding rows."""
    usable = max(0, num_all - 1)
    return f"{usable - num_free:,} of {usable:,}"


def _memory(engine: Event) -> str:
    """Memory in use on its device; on a CPU, by its process."""
    used, total = engine["memory_used"], engine["memory_total"]
    return f"{human_bytes(used)} of {human_bytes(total)}" if total else "unknown"


def _fullness(engine: Event) -> float:
    return engine["memory_used"] / (engine["memory_total"] or 1)


def _about(event: Event) -> str:
    engine = event["engine"]
    if engine is None:
        return f"{event['model']}, {event['failure'] or event['phase']['name']}"
    weights = human_bytes(engine["weight_bytes"])
    return f"{event['model']} on {engine['device']}, {engine['dtype']}, {weights} of weights"


HELD = 128  # in a byte of heat: the device holds the expert; see `EngineStats.expert_heat`
MAX_LINES, MAX_COLUMNS = 16, 64  # of a heat map
SHADES = " ░▒▓█"


def expert_rows(before: Event, now: Event) -> list[tuple[str, str]]:
    """For engines whose device does not hold all experts."""
    experts = now["stats"]["experts"]
    if not experts:
        return []
    num_needed, num_missed = experts["hits"] + experts["misses"], experts["misses"]
    found = "none was needed"
    if num_needed:
        found = f"{experts['hits'] / num_needed:.1%} of {num_needed:,}"
    below = [
        f"{experts.get(key, 0) / num_missed:.1%} in {tier}"
        for key, tier in (("ram_hits", "RAM"), ("disk_reads", "files"))
        if num_missed
    ]
    elapsed = now["time"] - before["time"]
    fetched, waited = 0.0, 0.0
    if before["stats"] is not None and elapsed > 0:
        old = before["stats"]["experts"]
        fetched = max(0, experts["fetched_bytes"] - old.get("fetched_bytes", 0)) / elapsed
        waited = max(0, experts["wait_us"] - old.get("wait_us", 0)) / 1e6 / elapsed
    return [
        ("experts on the device", found),
        ("missed experts", ", ".join(below) or "none"),
        ("experts fetched", f"{human_bytes(int(fetched))}/s, {waited:.1%} of the time waiting"),
    ]


def heat_map(engine: Event) -> list[str]:
    """A line for each layer or a few, a shade for each expert or a few: how many of the layer's
    last steps needed them.
    """
    rows = [[byte & (HELD - 1) for byte in base64.b64decode(row)] for row in engine["expert_heat"]]
    if not rows:
        return []
    layers = _split(list(range(len(rows))), MAX_LINES)
    width = len(str(len(rows) - 1))
    cells = [
        [
            max(heat for layer in some for heat in rows[layer][columns[0] : columns[-1] + 1])
            for columns in _split(list(range(len(rows[some[0]]))), MAX_COLUMNS)
        ]
        for some in layers
    ]
    most = max(map(max, cells)) or 1
    head = f"\nexperts of engine {engine['replica']} by layer; darker ones are needed more often"
    return [
        head,
        *(
            f"{some[0]:>{width}} "
            + "".join(SHADES[round(heat / most * (len(SHADES) - 1))] for heat in line)
            for some, line in zip(layers, cells)
        ),
    ]


def _split(places: Sequence[int], most: int) -> list[Sequence[int]]:
    """Splits into at most `most` runs of neighbours, of nearly equal length."""
    count = min(most, len(places))
    edges = [len(places) * part // count for part in range(count + 1)]
    return [places[first:last] for first, last in pairwise(edges)]
