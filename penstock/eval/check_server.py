"""Whether a server keeps the promises of the chat API: one [PASS] or [FAIL] line for each, and why.

    penstock eval check-server --base-url URL [--tokenizer FOLDER]

Any server of the OpenAI API will do. Ends with 0 when every promise is kept and with 1 when one is not; what
cannot be looked at here is a [SKIP] and changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.config import setting
from penstock.errors import PenstockError
from penstock.eval import crowd_promises, promises
from penstock.eval.chat_requests import UNLISTED_MODEL, listed_model
from penstock.eval.find_tokenizer import find_folder
from penstock.eval.probe import NotTested, Probe, Unmet
from penstock.eval.recount import TokenCounter
from penstock.eval.results import Bars, Reporter, prepare_output, require_above_zero
from penstock.progress import Phase

MAX_HANGING = 3  # promises in a row whose answer did not come, and the rest is not tried


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings:
    """Which server is looked at, and with what."""

    base_url: str = setting("http://127.0.0.1:8000", "a running server")
    model: str = setting("", "name to send (default: the server's first model)")
    tokenizer: str | None = setting(
        None, "the model's folder, to count tokens again (default: if found here)"
    )
    timeout: float = setting(
        60.0, "seconds after which a request has failed (default: 60; 300 or 600 where replies are long)"
    )
    output: str | None = setting(None, "write the verdicts to this file, as JSON")

    def __post_init__(self) -> None:
        require_above_zero(timeout=self.timeout)


@dataclass(frozen=True, slots=True)
class Promise:
    """`ids` are those of the checklist that the harness is written to."""

    name: str
    ids: str
    keep: Callable[[Probe], str]


PROMISES = (
    Promise("health", "T10", promises.health),
    Promise("model list", "T11", promises.model_list),
    Promise("required fields", "T11", promises.required_fields),
    Promise("any model name", "T11", promises.any_model_name),
    Promise("greedy by default", "T11", promises.greedy_by_default),
    Promise("greedy repeats", "T11", promises.greedy_is_repeatable),
    Promise("usage adds up", "T12", promises.usage_adds_up),
    Promise("usage follows the prompt", "T12", promises.usage_grows),
    Promise("finish_reason length", "T12", promises.length_limit),
    Promise("finish_reason stop", "T12", promises.natural_end),
    Promise("stop string", "T13", promises.stop_string),
    Promise("four stop strings", "T13", promises.four_stop_strings),
    Promise("seed", "T13", promises.seed),
    Promise("several choices", "T13", promises.several_choices),
    Promise("lm-eval's request", "T13", promises.lm_eval_request),
    Promise("stream equals whole", "T11", promises.stream_is_the_same),
    Promise("stream chunks", "T11", promises.stream_chunks),
    Promise("stream usage", "T12", promises.stream_usage),
    Promise("no thinking", "T7", promises.no_thinking),
    Promise("thinking off", "T7", promises.thinking_off),
    Promise("prompt recount", "T15", promises.prompt_recount),
    Promise("completion recount", "T15", promises.completion_recount),
    Promise("faulty requests", "T11", promises.refusals),
    Promise("too long a prompt", "T11", promises.too_long),
    Promise("unknown path", "T11", promises.unknown_path),
    Promise("64 at once", "T14", crowd_promises.many_at_once),
    Promise("leaving frees the place", "T14", crowd_promises.leaving_frees_the_place),
    Promise("still healthy", "T10", promises.health),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    promise: Promise
    mark: str  # PASS, FAIL or SKIP
    words: str

    def __str__(self) -> str:
        return f"[{self.mark}] {self.promise.ids:<3} {self.promise.name}: {self.words}"

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.promise.name,
            "id": self.promise.ids,
            "verdict": self.mark.lower(),
            "seen": self.words,
        }


def judge(promise: Promise, probe: Probe) -> Verdict:
    """Whatever a server does, this returns."""
    try:
        return Verdict(promise, "PASS", promise.keep(probe))
    except NotTested as reason:
        return Verdict(promise, "SKIP", f"not tested: {reason}")
    except Unmet as unmet:
        return Verdict(promise, "FAIL", str(unmet))
    except PenstockError as error:
        return Verdict(promise, "FAIL", f"{error.what} {error.why}".strip())
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        # An answer of another shape than anybody thought of is the server's fault, not a crash of the judge.
        return Verdict(
            promise, "FAIL", f"saw an answer that cannot be read ({type(error).__name__}: {error})"
        )


def run(settings: CheckSettings, reporter: Reporter) -> int:
    prepare_output(settings.output)
    counter = TokenCounter.load(settings.tokenizer) if settings.tokenizer else None
    probe = Probe(settings.base_url, settings.model, timeout_s=settings.timeout, counter=counter)
    if not probe.model:
        probe.model = _model_or_any(probe)
    if counter is None and (folder := find_folder(probe.client, probe.model)):
        print(f"tokens are counted again with {folder}", flush=True)
        probe.counter = TokenCounter.load(folder)
    verdicts: list[Verdict] = []
    for verdict in _judge_all(probe, reporter.bars):
        print(verdict, flush=True)
        verdicts.append(verdict)
    return _conclude(verdicts, settings, probe.model, reporter)


def _judge_all(probe: Probe, bars: Bars) -> Iterator[Verdict]:
    num_hanging = 0
    for number, promise in enumerate(PROMISES):
        if num_hanging == MAX_HANGING:
            yield Verdict(promise, "FAIL", f"not tried: the {MAX_HANGING} before it had hung")
            continue
        start_s = time.monotonic()
        with bars() as phases:
            phases(Phase("promises", promise.name, number / len(PROMISES)))
            verdict = judge(promise, probe)
        has_hung = verdict.mark == "FAIL" and time.monotonic() - start_s >= probe.timeout_s
        num_hanging = num_hanging + 1 if has_hung else 0
        yield verdict


def _model_or_any(probe: Probe) -> str:
    """A server that cannot list its models is judged all the same."""
    try:
        return listed_model(probe.client)
    except PenstockError:
        return UNLISTED_MODEL


def _conclude(verdicts: Sequence[Verdict], settings: CheckSettings, model: str, reporter: Reporter) -> int:
    counts = {mark: sum(verdict.mark == mark for verdict in verdicts) for mark in ("PASS", "FAIL", "SKIP")}
    print(
        f"\n{counts['PASS']} kept, {counts['FAIL']} broken, {counts['SKIP']} not tested: {settings.base_url}"
    )
    fields = {
        "benchmark": "check_server",
        "passed": not counts["FAIL"],
        "base_url": settings.base_url,
        "model": model,
        "promises": [verdict.as_json() for verdict in verdicts],
    }
    reporter.write(fields, settings.output)
    return int(bool(counts["FAIL"]))
