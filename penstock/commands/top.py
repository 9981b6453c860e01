"""`penstock top`: what a server does now, in a terminal; the numbers of the page's live view."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from penstock.commands import top_experts
from penstock.commands.console import human_bytes
from penstock.http_client import HttpClient

if TYPE_CHECKING:
    from rich.console import Group

USAGE = "penstock top [--base-url URL] [--once]"
DESCRIPTION = "Watch a running server: speed, requests, latency, cache and engines. Ctrl-C leaves."
EXAMPLES = [
    "penstock top                                    the server on port 8000 of this machine",
    "penstock top --base-url http://gpu-box:8000",
    "penstock top --once | grep generated            one look, for a script",
]
DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 10.0
WINDOW = 60  # events that quantiles and the curve are of
MISSED = "missed_tokens_"
BARS = " ▁▂▃▄▅▆▇█"
Event = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help = "the server to watch; its key is read from PENSTOCK_API_KEY"
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
                history.clear()  # another server, which counts from zero
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
    maps = [line for one in history[-1]["replicas"] for line in top_experts.heat_map(one)]
    return Group(head, Text(curve(speeds) + "\n"), numbers, Text(), engines, *map(Text, maps))


def rows_of(history: Sequence[Event]) -> list[tuple[str, str]]:
    """Names and values: of the last second, and latencies of all that is remembered."""
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
        ("checkpoints of states", f"{stats['num_checkpoints']:,}"),
        ("memory of the fullest", _memory(max(now["replicas"], key=_fullness))),
        (
            "prompt from the cache",
            f"{reused / num_tokens:.1%} of {num_tokens:,} tokens" if num_tokens else "none",
        ),
        ("prompts with a hit", f"{prefix.get('hit', 0):,} of {num_lookups:,}"),
        ("computed because", reasons or "nothing was computed"),
        ("preempted", f"{stats['num_preemptions']:,}"),
        *_draft_rows(before["stats"], stats),
        *top_experts.rows_of(before, now),
        ("sessions", f"{stats['num_sessions']:,} with {human_bytes(stats['session_bytes'])}"),
    ]


def _draft_rows(before: Event | None, now: Event) -> list[tuple[str, str]]:
    """Only of engines that may draft: totals, and what the last second brought."""
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
        ("tokens a step", ", ".join(filter(None, steps)) or "none"),
        (
            "drafts right, by place",
            "; ".join(f"{name} {' '.join(found)}" for name, found in shares.items()) or "none",
        ),
        ("saved by drafts", f"{drafts['saved_s']:,.1f} s"),
    ]


def _tokens_a_step(before: Event | None, now: Event) -> str | None:
    """That a step brings a request which decodes; None: there was no such step."""
    num_decodes = now["num_decodes"] - (before["num_decodes"] if before else 0)
    num_tokens = now["num_tokens"] - (before["num_tokens"] if before else 0)
    return f"{num_tokens / num_decodes:.2f}" if num_decodes > 0 else None


def rate(before: Event, now: Event, name: str) -> float:
    """A second."""
    elapsed = now["time"] - before["time"]
    return max(0.0, (now[name] - before[name]) / elapsed) if elapsed > 0 else 0.0


def quantile_bound(before: Event, now: Event, share: float) -> float | None:
    """The least bound of a histogram that so many of the new values are below; None: there are
    none. Infinite: above every bound.
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
    """In use on its device; on a CPU, by its process."""
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
