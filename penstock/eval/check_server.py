"""Checks whether a server conforms to the chat API: prints [PASS] or [FAIL] and why, per check.

    penstock eval check-server --base-url URL [--tokenizer FOLDER]

Works with any server with the OpenAI API. Exits with 0 when every check passes and with 1 when one
fails. A check that cannot run here is a [SKIP] and does not change the exit status.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from penstock.config import setting
from penstock.errors import PenstockError
from penstock.eval import conformance
from penstock.eval.chat_requests import UNLISTED_MODEL, listed_model
from penstock.eval.probe import CheckFailed, NotTested, Probe
from penstock.eval.recount import TokenCounter, find_folder
from penstock.eval.results import Bars, Reporter, ServerSettings, prepare_output, require_above_zero
from penstock.progress import Phase

MAX_HANGING = 3  # consecutive checks without an answer; then the rest is not tried


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings(ServerSettings):
    """Which server to check, and how."""

    tokenizer: str | None = setting(
        None, "the model's folder, to count tokens again (default: if found on this machine)"
    )
    timeout: float = setting(
        60.0, "seconds until a request fails (default: 60; 300 or 600 for long replies)"
    )

    def __post_init__(self) -> None:
        require_above_zero(timeout=self.timeout)


@dataclass(frozen=True, slots=True)
class Check:
    """`ids`: its ids in the harness's checklist."""

    name: str
    ids: str
    run: Callable[[Probe], str]


CHECKS = (
    Check("health", "T10", conformance.health),
    Check("model list", "T11", conformance.model_list),
    Check("required fields", "T11", conformance.required_fields),
    Check("any model name", "T11", conformance.any_model_name),
    Check("greedy by default", "T11", conformance.greedy_by_default),
    Check("greedy repeats", "T11", conformance.greedy_is_repeatable),
    Check("usage adds up", "T12", conformance.usage_adds_up),
    Check("usage follows the prompt", "T12", conformance.usage_grows),
    Check("finish_reason length", "T12", conformance.length_limit),
    Check("finish_reason stop", "T12", conformance.natural_end),
    Check("stop string", "T13", conformance.stop_string),
    Check("four stop strings", "T13", conformance.four_stop_strings),
    Check("seed", "T13", conformance.seed),
    Check("several choices", "T13", conformance.several_choices),
    Check("lm-eval's request", "T13", conformance.lm_eval_request),
    Check("stream equals whole", "T11", conformance.stream_is_the_same),
    Check("stream chunks", "T11", conformance.stream_chunks),
    Check("stream usage", "T12", conformance.stream_usage),
    Check("no thinking", "T7", conformance.no_thinking),
    Check("thinking off", "T7", conformance.thinking_off),
    Check("prompt recount", "T15", conformance.prompt_recount),
    Check("completion recount", "T15", conformance.completion_recount),
    Check("faulty requests", "T11", conformance.refusals),
    Check("too long a prompt", "T11", conformance.too_long),
    Check("unknown path", "T11", conformance.unknown_path),
    Check("64 at once", "T14", conformance.many_at_once),
    Check("leaving frees the place", "T14", conformance.leaving_frees_the_place),
    Check("still healthy", "T10", conformance.health),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    check: Check
    mark: str  # PASS, FAIL or SKIP
    words: str

    def __str__(self) -> str:
        return f"[{self.mark}] {self.check.ids:<3} {self.check.name}: {self.words}"

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.check.name,
            "id": self.check.ids,
            "verdict": self.mark.lower(),
            "seen": self.words,
        }


def judge(check: Check, probe: Probe) -> Verdict:
    """Returns a verdict, whatever the server does."""
    try:
        return Verdict(check, "PASS", check.run(probe))
    except NotTested as reason:
        return Verdict(check, "SKIP", f"not tested: {reason}")
    except CheckFailed as failure:
        return Verdict(check, "FAIL", str(failure))
    except PenstockError as error:
        return Verdict(check, "FAIL", f"{error.what} {error.why}".strip())
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        # An answer of unexpected shape is the server's fault and must not crash the check.
        return Verdict(
            check, "FAIL", f"saw an answer that cannot be read ({type(error).__name__}: {error})"
        )


def run(settings: CheckSettings, reporter: Reporter) -> int:
    prepare_output(settings.output)
    counter = TokenCounter.load(settings.tokenizer) if settings.tokenizer else None
    probe = Probe(settings.base_url, settings.model, timeout_s=settings.timeout, counter=counter)
    if not probe.model:
        probe.model = _model_or_any(probe)
    if counter is None and (folder := find_folder(probe.client, probe.model)):
        print(f"counting tokens again with {folder}", flush=True)
        probe.counter = TokenCounter.load(folder)
    verdicts: list[Verdict] = []
    for verdict in _judge_all(probe, reporter.bars):
        print(verdict, flush=True)
        verdicts.append(verdict)
    marks = Counter(verdict.mark for verdict in verdicts)
    counted = f"{marks['PASS']} passed, {marks['FAIL']} failed, {marks['SKIP']} not tested"
    print(f"\n{counted}: {settings.base_url}")
    fields = {
        "benchmark": "check_server",
        "passed": not marks["FAIL"],
        "base_url": settings.base_url,
        "model": probe.model,
        "promises": [verdict.as_json() for verdict in verdicts],
    }
    reporter.write(fields, settings.output)
    return int(bool(marks["FAIL"]))


def _judge_all(probe: Probe, bars: Bars) -> Iterator[Verdict]:
    num_hanging = 0
    for number, check in enumerate(CHECKS):
        if num_hanging == MAX_HANGING:
            yield Verdict(check, "FAIL", f"not tried: the {MAX_HANGING} checks before it hung")
            continue
        start_s = time.monotonic()
        with bars() as phases:
            phases(Phase("checks", check.name, number / len(CHECKS)))
            verdict = judge(check, probe)
        has_hung = verdict.mark == "FAIL" and time.monotonic() - start_s >= probe.timeout_s
        num_hanging = num_hanging + 1 if has_hung else 0
        yield verdict


def _model_or_any(probe: Probe) -> str:
    """A server that cannot list its models is checked anyway."""
    try:
        return listed_model(probe.client)
    except PenstockError:
        return UNLISTED_MODEL
