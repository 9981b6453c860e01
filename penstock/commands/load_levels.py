"""The load of `penstock bench serve`: settings, their contradictions, and their levels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config import setting
from penstock.errors import ConfigError
from penstock.eval.prompts import PromptMaker
from penstock.eval.results import read_fields, require_above_zero, require_at_least
from penstock.eval.traces import Arrival, Clamp, poisson_arrivals, read_trace


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """What is sent, and when."""

    base_url: str | None = setting(
        None, "a running server (default: one is started with the engine's flags)"
    )
    concurrency: tuple[int, ...] = setting(
        (1, 2, 4, 8), "requests at a time, one level each; 0 is all at once (default: 1,2,4,8)"
    )
    requests: int = setting(64, "requests in a level")
    input_len: int = setting(1024, "tokens of a prompt, chat template included")
    output_len: int = setting(1024, "tokens of a reply")
    shared_prefix: int = setting(0, "tokens of text that all prompts begin with")
    rate: float | None = setting(
        None, "requests per second at random times instead; inf: all at once"
    )
    trace: str | None = setting(
        None, "replay a trace instead: Azure's CSV or Mooncake's JSON lines"
    )
    speedup: float = setting(1.0, "factor by which the trace's clock runs faster")
    limit: int | None = setting(None, "requests of the trace to send (default: all)")
    scale: float = setting(
        1.0, "factor of the trace's lengths, shared blocks included: 0.25 is a quarter"
    )
    max_input_len: int | None = setting(
        None, "truncate the trace's prompts to this (default: the server's limit)"
    )
    max_output_len: int | None = setting(
        None, "truncate the trace's replies to this (default: no limit)"
    )
    seed: int = setting(0, "seed of prompts and random times")
    timeout: float = setting(300.0, "seconds after which a request has failed")
    clients: int = setting(1, "client processes")
    body: str = setting("", 'fields for every request, as JSON: {"temperature": 0.7}')
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
    """One load: its arrivals, and how many may run at a time (0: no limit)."""

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
                    "They exclude each other.",
                )
    for name in ("speedup", "limit", "scale", "max_input_len", "max_output_len"):
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
    """The levels, and how many requests of a trace had to change their length."""
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
        cut = f", {num_clamped} with another length than recorded" if num_clamped else ""
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
