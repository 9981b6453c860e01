"""`penstock bench serve`: what clients of a server see under load, over HTTP only.

Requests come c at a time, at random, or as a recorded trace has them; the server is a running one, or a
`penstock serve` that is started for the occasion. Prints a table for each level and one JSON line last. How
load is made, prompts are sized and replies are read is in penstock.eval; this is how it is shown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from penstock.commands import birth
from penstock.commands.console import PhaseList, print_note, print_table
from penstock.commands.flags import add_flags, flags_of, foreign_flag, read_settings
from penstock.commands.load_levels import (
    Level,
    LoadSettings,
    flag_name,
    load_fields,
    load_in_words,
    plan_levels,
    read_recorded,
    refuse_contradictions,
)
from penstock.commands.load_plot import plot_levels, require_matplotlib
from penstock.commands.started_server import (
    StartedServer,
    given_server_flags,
    server_words,
    started_server,
)
from penstock.commands.variables import is_given_by_variable
from penstock.config import EngineConfig, ServeConfig, from_mapping
from penstock.errors import ConfigError
from penstock.eval.chat_requests import ChatRequests
from penstock.eval.load import Job, LoadClients, LoadProgress, LoadResult, OnProgress
from penstock.eval.load_summary import LoadSummary, Spread, summarise
from penstock.eval.results import deliver_line, prepare_output
from penstock.eval.reuse import PossibleReuse, possible_reuse
from penstock.eval.sized_prompts import PromptMaker, fit_prompts
from penstock.eval.stream_client import Target
from penstock.eval.traces import Arrival
from penstock.progress import Phase, timed

SERVER_FLAGS = ("max_rows", "max_model_len", "prefix_cache")  # of the engine; other benches decide them
TEXT_FLAGS = ("tokenizer", "max_queue")  # of the server
BUSY_CLIENT = 0.8  # of a core: from here on the client may be what is measured
LATE_MS = 50.0
FEW_TEXTS = 8.0  # tokens an event: more than any speculation gives
WARMUP_TOKENS = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, LoadSettings, title="bench serve: the load")
    group = "bench serve: the server it starts, beside the engine's flags"
    add_flags(parser, EngineConfig, title=group, only=SERVER_FLAGS)
    add_flags(parser, ServeConfig, title="bench serve: its text", only=TEXT_FLAGS)


def refuse_flags(arguments: argparse.Namespace) -> None:
    """For the other benches: a flag of this one must not pass unheard."""
    names = [flag.field.name for flag in flags_of(LoadSettings)] + [*SERVER_FLAGS, *TEXT_FLAGS]
    for name in names:
        if hasattr(arguments, name) and not is_given_by_variable(arguments, name):
            raise foreign_flag(f"bench {arguments.what}", flag_name(name), "`penstock bench serve`")


def run(arguments: argparse.Namespace) -> int:
    given = read_settings(LoadSettings, arguments)
    refuse_contradictions(given)
    settings: LoadSettings = from_mapping(LoadSettings, given)
    extra_fields = settings.extra_fields
    prepare_output(settings.plot, "--plot")
    prepare_output(arguments.json, "--json")
    if settings.plot:
        require_matplotlib()
    recorded = read_recorded(settings)
    with _server(settings, arguments) as server:
        model = getattr(arguments, "model", "") if settings.base_url else ""
        requests = ChatRequests(server.url, model, extra=extra_fields, timeout_s=settings.timeout)
        with PhaseList() as phases, timed("prompts", phases) as report:
            prompts = fit_prompts(requests.count_tokens, settings.seed)
            report(Phase("prompts", _describe(prompts)))
        levels, num_clamped = plan_levels(settings, recorded, prompts, requests.max_model_len())
        target = Target.of(server.url)
        with LoadClients(settings.clients) as clients:
            bench = _ServeBench(settings, requests, prompts, clients, target, arguments.warmup)
            results = [(level, *bench.measure(level)) for level in levels]
    title = f"serve: {requests.model}, {load_in_words(settings, num_clamped)}"
    print(f"\n{title}")
    print_table(COLUMNS, [_row(level, summary) for level, summary, _ in results])
    fields = {
        **birth.certificate(),
        "gpu": None if settings.base_url else birth.gpu_name(),
        "model": requests.model,
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
    if settings.base_url:
        for flag, _ in given_server_flags(arguments):
            if flag.field.name != "model":
                raise ConfigError(
                    f"{flag.name} and --base-url are both given",
                    "One says how to start a server, the other names one that runs.",
                )
        yield StartedServer(settings.base_url, 0.0)
        return
    max_rows = from_mapping(EngineConfig, read_settings(EngineConfig, arguments)).max_rows
    is_closed = not settings.rate and not settings.trace
    if is_closed and max_rows is not None and max(settings.concurrency) > max_rows:
        print_note(f"--max-rows is {max_rows}: of more requests at a time, the rest wait in the server.")
    with PhaseList() as phases, started_server(server_words(arguments), phases) as server:
        phases.close()
        yield server


class _ServeBench:
    """Measures one level after the other; no prompt is sent twice."""

    def __init__(
        self,
        settings: LoadSettings,
        requests: ChatRequests,
        prompts: PromptMaker,
        clients: LoadClients,
        target: Target,
        num_warmups: int,
    ) -> None:
        self._settings = settings
        self._requests = requests
        self._prompts = prompts
        self._clients = clients
        self._target = target
        self._num_warmups = num_warmups
        self._num_prompts = 0

    def measure(self, level: Level) -> tuple[LoadSummary, PossibleReuse | None]:
        arrivals = level.arrivals
        if warmups := [_as_warmup(arrival) for arrival in arrivals[: self._num_warmups]]:
            with PhaseList() as phases, timed("warm-up", phases):
                self._send(warmups, level.concurrency, lambda progress: None)
        with PhaseList() as phases, timed(level.name, phases) as report:

            def show(progress: LoadProgress) -> None:
                report(Phase(level.name, _in_words(progress), progress.num_done / len(arrivals)))

            result = self._send(arrivals, level.concurrency, show)
        summary = summarise(result, [(arrival.input_len, arrival.output_len) for arrival in arrivals])
        print(f"\n{_headline(level, summary)}")
        print_table(["ms", *PERCENTILES], _latency_rows(summary))
        possible = self._possible_reuse(arrivals)
        for remark in remarks(summary, possible):
            print_note(remark)
        return summary, possible

    def _possible_reuse(self, arrivals: Sequence[Arrival]) -> PossibleReuse | None:
        """Of a trace that says what its prompts share; others share nothing that is known here."""
        if not any(arrival.block_ids for arrival in arrivals):
            return None
        kv_tokens = self._requests.kv_tokens()
        bounded = None if kv_tokens is None else sum(possible_reuse(arrivals, max_tokens=kv_tokens))
        return PossibleReuse(sum(possible_reuse(arrivals)), kv_tokens, bounded)

    def _send(self, arrivals: Sequence[Arrival], concurrency: int, on_progress: OnProgress) -> LoadResult:
        jobs = [Job(self._requests.body(self._prompt(a), a.output_len), a.at_s) for a in arrivals]
        return self._clients.run(
            self._target,
            jobs,
            concurrency=concurrency or None,
            timeout_s=self._settings.timeout,
            on_progress=on_progress,
        )

    def _prompt(self, arrival: Arrival) -> str:
        if arrival.block_ids:
            return self._prompts.make_of_blocks(arrival.block_ids, arrival.input_len, arrival.block_tokens)
        number, self._num_prompts = self._num_prompts, self._num_prompts + 1
        return self._prompts.make(number, arrival.input_len, num_shared=self._settings.shared_prefix)


def _as_warmup(arrival: Arrival) -> Arrival:
    """The same prompt length, at once, and a reply just long enough to have been everywhere."""
    return Arrival(0.0, arrival.input_len, min(arrival.output_len, WARMUP_TOKENS))


def remarks(summary: LoadSummary, possible: PossibleReuse | None = None) -> list[str]:
    """Whatever a reader of the numbers has to know to believe them."""
    found = [f"{count} failed: {message}" for message, count in summary.errors.most_common(5)]
    for what, lengths in (("prompts", summary.prompt), ("replies", summary.completion)):
        if lengths.num_off:
            found.append(
                f"{lengths.num_off} {what} have another length than was asked for: "
                f"{lengths.min:,} to {lengths.max:,} tokens."
            )
    if summary.num_cached_tokens or possible is not None:
        found.append(
            f"{summary.num_cached_tokens:,} of {summary.prompt.total:,} prompt tokens were in the server's "
            f"prefix cache{'.' if possible is None else f'; {possible.in_words()}.'}"
        )
    num_tokens, num_events = summary.completion.total, summary.num_events
    if num_tokens > FEW_TEXTS * num_events:
        found.append(
            f"Only {num_events:,} of {num_tokens:,} tokens came with text: TTFT and ITL are about those. "
            "Is the tokenizer the model's? See --tokenizer."
        )
    elif num_tokens > 1.05 * num_events:
        found.append(
            f"An event carries {num_tokens / num_events:.2f} tokens on average: the gaps are between events."
        )
    if summary.client_cpu > BUSY_CLIENT:
        found.append(f"The client used {summary.client_cpu:.0%} of a core: try more --clients.")
    if summary.max_lag_ms > LATE_MS:
        found.append(f"A request left {summary.max_lag_ms:.0f} ms later than planned.")
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
    return [[what, *(_ms(spread, name) for name in PERCENTILES)] for what, spread in spreads.items()]


def _ms(spread: Spread | None, name: str) -> str:
    return "-" if spread is None else _short(getattr(spread, name))


def _short(number: float) -> str:
    """Four digits or more: small numbers keep what tells them apart, large ones stay narrow."""
    return f"{number:,.{2 if number < 100 else 1 if number < 1000 else 0}f}"


def _headline(level: Level, summary: LoadSummary) -> str:
    return (
        f"{level.name}: {summary.num_ok} of {summary.num_requests} requests in {summary.wall_s:,.2f} s, "
        f"{summary.tok_s:,.1f} tok/s in and out, {summary.output_tok_s:,.1f} out"
    )


def _in_words(progress: LoadProgress) -> str:
    failed = f", {progress.num_failed} failed" if progress.num_failed else ""
    rate = progress.num_pieces / max(progress.elapsed_s, 1e-9)
    return f"{progress.num_done} done{failed}, {rate:,.0f} events/s"


def _describe(prompts: PromptMaker) -> str:
    exact = "" if prompts.is_exact else ", lengths only about right: no word is one token for this server"
    return f"{prompts.num_probes} probes, {prompts.num_template_tokens} tokens of chat template{exact}"
