"""`penstock bench serve`: what clients of a server see under load, over HTTP only.

Requests are sent at a fixed concurrency, at random times, or as in a recorded trace, to a running
server or to a `penstock serve` that it starts. Prints a table for each level and one JSON line
last; --plot draws a chart. The load generator, prompts and summaries are in penstock.eval.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.commands.console import print_note, print_table
from penstock.commands.flags import add_flags, flags_of, foreign_flag, read_settings
from penstock.commands.provenance import gpu_name, provenance
from penstock.commands.started_server import StartedServer, running_or_started_server, server_words
from penstock.commands.variables import is_given_by_variable
from penstock.config import EngineConfig, ServeConfig, from_mapping, setting
from penstock.errors import ConfigError
from penstock.eval.chat_requests import ChatRequests
from penstock.eval.load import LoadClients
from penstock.eval.load_summary import LoadSummary, Spread, summarise
from penstock.eval.prompts import PromptMaker, RequestMaker, fit_prompts
from penstock.eval.report.charts import require_matplotlib
from penstock.eval.results import (
    deliver_line,
    prepare_output,
    read_fields,
    require_above_zero,
    require_at_least,
)
from penstock.eval.traces import (
    Arrival,
    Clamp,
    PossibleReuse,
    poisson_arrivals,
    possible_reuse,
    read_trace,
)
from penstock.progress import Phase, PhaseList, timed


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """What is sent, and when."""

    base_url: str | None = setting(
        None, "a running server (default: start one with the engine's flags)"
    )
    concurrency: tuple[int, ...] = setting(
        (1, 2, 4, 8), "concurrent requests, one level each; 0: all at once (default: 1,2,4,8)"
    )
    requests: int = setting(64, "requests per level")
    input_len: int = setting(1024, "tokens per prompt, chat template included")
    output_len: int = setting(1024, "tokens per reply")
    shared_prefix: int = setting(0, "tokens of text that all prompts begin with")
    rate: float | None = setting(
        None, "send this many requests per second, at random times; inf: all at once"
    )
    trace: str | None = setting(None, "replay a trace: Azure's CSV or Mooncake's JSON lines")
    speedup: float = setting(1.0, "factor by which the trace's clock runs faster")
    limit: int | None = setting(None, "requests of the trace to send (default: all)")
    scale: float = setting(
        1.0, "factor for the trace's lengths, shared blocks included: 0.25 is a quarter"
    )
    max_input_len: int | None = setting(
        None, "truncate the trace's prompts to this many tokens (default: the server's limit)"
    )
    max_output_len: int | None = setting(
        None, "truncate the trace's replies to this many tokens (default: no limit)"
    )
    seed: int = setting(0, "seed for prompts and random times")
    timeout: float = setting(300.0, "seconds until a request fails")
    clients: int = setting(1, "client processes")
    body: str = setting("", 'extra fields of every request, as JSON: {"temperature": 0.7}')
    plot: str | None = setting(
        None, "draw throughput and latency by level into this file (matplotlib)"
    )

    def __post_init__(self) -> None:
        for name in ("requests", "input_len", "output_len", "limit", "clients"):
            require_at_least(1, **{name: getattr(self, name)})
        require_at_least(0, shared_prefix=self.shared_prefix)
        require_above_zero(
            rate=self.rate, speedup=self.speedup, scale=self.scale, timeout=self.timeout
        )
        if min(self.concurrency) < 0:
            raise ConfigError(f"--concurrency has {min(self.concurrency)}", "It must be 0 or more.")


@dataclass(frozen=True, slots=True)
class Level:
    """One load: its arrivals, and how many may run concurrently (0: no limit)."""

    name: str
    short_name: str
    concurrency: int
    rate: float | None
    arrivals: list[Arrival]


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def refuse_contradictions(given: Mapping[str, Any]) -> None:
    """Refuses a flag that another one makes meaningless."""
    beside = {
        "trace": ("rate", "concurrency", "requests", "input_len", "output_len", "shared_prefix"),
        "rate": ("concurrency",),
    }
    for name, others in beside.items():
        for other in others:
            if name in given and other in given:
                raise ConfigError(
                    f"{flag_name(name)} and {flag_name(other)} are both set",
                    "They exclude each other: remove one.",
                )
    for name in ("speedup", "limit", "repeat", "scale", "max_input_len", "max_output_len"):
        if name in given and "trace" not in given:
            raise ConfigError(f"{flag_name(name)} needs --trace", "It only applies to a trace.")


def read_recorded(settings: LoadSettings) -> list[Arrival]:
    """The arrivals of --trace, read before a server starts; empty without a trace."""
    if not settings.trace:
        return []
    return read_trace(
        Path(settings.trace).expanduser(),
        speedup=settings.speedup,
        limit=settings.limit,
        scale=settings.scale,
    )


def plan_levels(
    settings: LoadSettings, recorded: list[Arrival], prompts: PromptMaker, max_model_len: int | None
) -> tuple[list[Level], int]:
    """The levels, and how many requests of a trace got another length."""
    if settings.trace:
        clamp = Clamp(
            prompts.min_len, settings.max_input_len, settings.max_output_len, max_model_len
        )
        arrivals = [clamp.apply(arrival) for arrival in recorded]
        num_clamped = sum(before != after for before, after in zip(recorded, arrivals))
        return [Level(Path(settings.trace).name, "trace", 0, None, arrivals)], num_clamped
    if settings.input_len < prompts.min_len:
        raise ConfigError(
            f"--input-len is {settings.input_len}",
            f"The server's chat template alone takes {prompts.num_template_tokens} tokens.",
            f"Use --input-len {prompts.min_len} or more.",
        )
    if settings.shared_prefix >= settings.input_len - prompts.num_template_tokens:
        raise ConfigError(
            f"--shared-prefix is {settings.shared_prefix} of {settings.input_len} tokens",
            f"The chat template takes {prompts.num_template_tokens}, and prompts must differ in "
            "the rest.",
            "Lower --shared-prefix, or raise --input-len.",
        )
    lengths = (settings.input_len, settings.output_len)
    if settings.rate and settings.rate != math.inf:
        arrivals = poisson_arrivals(settings.requests, settings.rate, *lengths, settings.seed)
        return [
            Level(
                f"{settings.rate:g} per second", f"{settings.rate:g}/s", 0, settings.rate, arrivals
            )
        ], 0
    at_once = [Arrival(0.0, *lengths)] * settings.requests
    concurrencies = (0,) if settings.rate else settings.concurrency
    names = {c: (f"{c} at a time", str(c)) if c else ("all at once", "all") for c in concurrencies}
    return [Level(*names[c], c, None, at_once) for c in concurrencies], 0


def load_in_words(settings: LoadSettings, num_clamped: int) -> str:
    if settings.trace:
        cut = f", {num_clamped} with a different length than recorded" if num_clamped else ""
        return f"{settings.speedup:g} x the speed of the trace{cut}"
    return (
        f"{settings.requests} requests of {settings.input_len:,} + {settings.output_len:,} tokens"
    )


def load_fields(settings: LoadSettings) -> dict[str, Any]:
    """The settings that define the load, without those that name output files."""
    shared = {"seed": settings.seed, "timeout_s": settings.timeout, "clients": settings.clients}
    if settings.trace:
        names = ["speedup", "limit", "scale", "max_input_len", "max_output_len"]
    else:
        names = ["requests", "input_len", "output_len", "shared_prefix"]
    return {
        "trace": Path(settings.trace).name if settings.trace else None,
        **{name: getattr(settings, name) for name in names},
        **shared,
        "body": read_fields("--body", settings.body),
    }


# Engine flags that the other benches set themselves.
SERVER_FLAGS = ("max_rows", "max_model_len", "prefix_cache")
TEXT_FLAGS = ("tokenizer", "max_queue")  # flags of the server
BUSY_CLIENT = 0.8  # of a core: beyond this the client may limit the result
LATE_MS = 50.0
FEW_TEXTS = 8.0  # tokens per event: more than speculation ever gives


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, LoadSettings, title="bench serve: the load")
    group = "bench serve: the server that it starts, beside the engine's flags"
    add_flags(parser, EngineConfig, title=group, only=SERVER_FLAGS)
    add_flags(parser, ServeConfig, title="bench serve: its text", only=TEXT_FLAGS)


def refuse_flags(arguments: argparse.Namespace) -> None:
    """For the other benches: refuses flags of this one, which must not be ignored."""
    names = [flag.field.name for flag in flags_of(LoadSettings)] + [*SERVER_FLAGS, *TEXT_FLAGS]
    for name in names:
        if hasattr(arguments, name) and not is_given_by_variable(arguments, name):
            raise foreign_flag(f"bench {arguments.what}", flag_name(name), "`penstock bench serve`")


def run(arguments: argparse.Namespace) -> int:
    given = read_settings(LoadSettings, arguments)
    refuse_contradictions(given)
    settings: LoadSettings = from_mapping(LoadSettings, given)
    extra = read_fields("--body", settings.body)
    prepare_output(settings.plot, "--plot")
    prepare_output(arguments.json, "--json")
    if settings.plot:
        require_matplotlib("--plot")
    recorded = read_recorded(settings)
    with _server(settings, arguments) as server:
        model = getattr(arguments, "model", "") if settings.base_url else ""
        api = ChatRequests(server.url, model, extra=extra, timeout_s=settings.timeout)
        with PhaseList() as phases, timed("prompts", phases) as report:
            prompts = fit_prompts(api.count_tokens, settings.seed)
            report(Phase("prompts", _describe(prompts)))
        levels, num_clamped = plan_levels(settings, recorded, prompts, api.max_model_len())
        maker = RequestMaker(prompts, num_shared=settings.shared_prefix)
        with LoadClients(settings.clients) as clients:
            results = [
                (level, *_measure(level, api, clients, maker, arguments.warmup)) for level in levels
            ]
    title = f"serve: {api.model}, {load_in_words(settings, num_clamped)}"
    print(f"\n{title}")
    print_table(COLUMNS, [_row(level, summary) for level, summary, _ in results])
    fields = {
        **provenance(),
        "gpu": None if settings.base_url else gpu_name(),
        "model": api.model,
        "base_url": settings.base_url,
        "server_flags": None if settings.base_url else server_words(arguments),
        "start_to_ready_s": None if settings.base_url else round(server.start_to_ready_s, 3),
        **load_fields(settings),
        "warmup": arguments.warmup,
        "template_tokens": prompts.num_template_tokens,
        "probes": prompts.num_probes,
        "clamped": num_clamped,
    }
    rows = [
        {
            "concurrency": level.concurrency,
            "rate": level.rate,
            **summary.as_dict(),
            **(possible.as_dict() if possible else {}),
        }
        for level, summary, possible in results
    ]
    deliver_line(json.dumps({"bench": "serve", **fields, "rows": rows}), arguments.json, "--json")
    if settings.plot:
        plot_levels(Path(settings.plot).expanduser(), title, rows)
    return int(any(summary.num_errors for _, summary, _ in results))


@contextlib.contextmanager
def _server(settings: LoadSettings, arguments: argparse.Namespace) -> Iterator[StartedServer]:
    if not settings.base_url and not settings.rate and not settings.trace:
        max_rows = from_mapping(EngineConfig, read_settings(EngineConfig, arguments)).max_rows
        if max_rows is not None and max(settings.concurrency) > max_rows:
            print_note(f"--max-rows is {max_rows}: requests beyond that wait in the server.")
    with (
        PhaseList() as phases,
        running_or_started_server(settings.base_url, arguments, phases) as server,
    ):
        phases.close()
        yield server


def _measure(
    level: Level, api: ChatRequests, clients: LoadClients, maker: RequestMaker, num_warmups: int
) -> tuple[LoadSummary, PossibleReuse | None]:
    result = clients.measure(
        level.name,
        api,
        maker.make(level.arrivals),
        concurrency=level.concurrency,
        bars=PhaseList,
        warmups=maker.make_warmups(level.arrivals[:num_warmups]),
    )
    summary, possible = summarise(result), _possible_reuse(level.arrivals, api)
    print(
        f"\n{level.name}: {summary.num_ok} of {summary.num_requests} requests in "
        f"{summary.wall_s:,.2f} s, "
        f"{summary.tok_s:,.1f} tok/s in and out, {summary.output_tok_s:,.1f} out"
    )
    print_table(["ms", *PERCENTILES], _latency_rows(summary))
    for remark in remarks(summary, possible):
        print_note(remark)
    return summary, possible


def _possible_reuse(arrivals: Sequence[Arrival], api: ChatRequests) -> PossibleReuse | None:
    """For a trace that tells which prefixes its prompts share; otherwise None."""
    if not any(arrival.block_ids for arrival in arrivals):
        return None
    kv_tokens = api.kv_tokens()
    bounded = None if kv_tokens is None else sum(possible_reuse(arrivals, max_tokens=kv_tokens))
    return PossibleReuse(sum(possible_reuse(arrivals)), kv_tokens, bounded)


def remarks(summary: LoadSummary, possible: PossibleReuse | None = None) -> list[str]:
    """What a reader must know to interpret the numbers."""
    found = [f"{count} failed: {message}" for message, count in summary.errors.most_common(5)]
    for what, lengths in (("prompts", summary.prompt), ("replies", summary.completion)):
        if lengths.num_off:
            found.append(
                f"{lengths.num_off} {what} do not have the requested length: "
                f"{lengths.min:,} to {lengths.max:,} tokens."
            )
    if summary.num_cached_tokens or possible is not None:
        found.append(
            f"{summary.num_cached_tokens:,} of {summary.prompt.total:,} prompt tokens were in the "
            f"server's prefix cache{'.' if possible is None else f'; {possible.in_words()}.'}"
        )
    num_tokens, num_events = summary.completion.total, summary.num_events
    if num_tokens > FEW_TEXTS * num_events:
        found.append(
            f"Only {num_events:,} of {num_tokens:,} tokens came with text: TTFT and ITL count only "
            "those. Is the tokenizer the model's? See --tokenizer."
        )
    elif num_tokens > 1.05 * num_events:
        found.append(
            f"An event carries {num_tokens / num_events:.2f} tokens on average: ITL is the time "
            "between events."
        )
    if summary.client_cpu > BUSY_CLIENT:
        found.append(f"The client used {summary.client_cpu:.0%} of a core: try more --clients.")
    if summary.max_lag_ms > LATE_MS:
        found.append(f"A request was sent {summary.max_lag_ms:.0f} ms later than planned.")
    return found


PERCENTILES = ("mean", "p50", "p90", "p95", "p99", "max")
COLUMNS = ["at a time", "ok", "tok/s", "output", "TTFT ms", "p99", "ITL ms", "p99"]


def _row(level: Level, summary: LoadSummary) -> list[str]:
    return [
        level.short_name,
        f"{summary.num_ok}/{summary.num_requests}",
        _short(summary.tok_s),
        _short(summary.output_tok_s),
        *(_ms(summary.ttft, "p50"), _ms(summary.ttft, "p99")),
        *(_ms(summary.itl, "p50"), _ms(summary.itl, "p99")),
    ]


def _latency_rows(summary: LoadSummary) -> list[list[str]]:
    spreads = {
        "TTFT": summary.ttft,
        "ITL": summary.itl,
        "TPOT": summary.tpot,
        "whole": summary.e2e,
    }
    return [
        [what, *(_ms(spread, name) for name in PERCENTILES)] for what, spread in spreads.items()
    ]


def _ms(spread: Spread | None, name: str) -> str:
    return "-" if spread is None else _short(getattr(spread, name))


def _short(number: float) -> str:
    """Small numbers keep two decimals, large ones have none and stay narrow."""
    return f"{number:,.{2 if number < 100 else 1 if number < 1000 else 0}f}"


def _describe(prompts: PromptMaker) -> str:
    about = "; lengths are approximate: no word is a single token for this server"
    exact = "" if prompts.is_exact else about
    return (
        f"{prompts.num_probes} probes, {prompts.num_template_tokens} tokens of chat template{exact}"
    )


def plot_levels(path: Path, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    from matplotlib.figure import Figure

    names = [str(row["concurrency"] or row["rate"] or "all") for row in rows]
    figure = Figure(figsize=(10, 4), layout="constrained")
    throughput, latency = figure.subplots(1, 2)
    throughput.plot(names, [row["tok_s"] for row in rows], marker="o", label="in and out")
    throughput.plot(names, [row["output_tok_s"] for row in rows], marker="o", label="out")
    throughput.set(ylabel="tokens per second", ylim=(0, None))
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
