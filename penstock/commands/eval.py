"""`penstock eval`: measures a running server, ours or any other with the OpenAI API.

It uses only HTTP and knows no engine. penstock.eval has the measurements; this file has their flags
and draws their progress bars.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.commands.flags import (
    add_flags,
    flags_of,
    foreign_flag,
    read_count,
    read_counts,
    read_number,
    read_settings,
)
from penstock.commands.provenance import provenance
from penstock.commands.variables import is_given_by_variable
from penstock.config import from_mapping
from penstock.errors import ConfigError
from penstock.eval import check_server, correctness, gates, latency, quality, score, throughput
from penstock.eval.report import run_report
from penstock.eval.results import Reporter
from penstock.progress import PhaseList

DESCRIPTION = """Evaluate any server with the OpenAI API over HTTP.

  check-server  conformance to the chat API: one [PASS] or [FAIL] line per check
  correctness   GSM8K-CoT through lm-evaluation-harness, or generated problems; gate 87.5 %
  throughput    tokens per second by concurrency, counted again by the client
  score         correctness and throughput in one weighted number
  latency       the time of a whole reply at three lengths
  quality       samples of MMLU-Pro and IFEval (lm-evaluation-harness) and GPQA-Diamond (streamed)
  gates         generated problems that no model was trained on, each kind with a pass mark
  report        a page (--output report.html) that compares earlier results; needs no server

A flag of several measurements is listed with the first."""
USAGE = (
    "penstock eval {check-server,correctness,throughput,score,latency,quality,gates,report} [flags]"
)
EXAMPLES = [
    "penstock eval check-server --base-url http://host:9000 --tokenizer ~/models/Qwen3.5-4B",
    "penstock eval correctness --data gsm8k/test.jsonl --output correctness.json",
    "penstock eval correctness --problems embedded         for the tiny model, without lm-eval",
    "penstock eval throughput --concurrency 1,8,64 --tokenizer ~/models/Qwen3.5-4B --output "
    "speed.json",
    "penstock eval score --correctness correctness.json --throughput speed.json",
    "penstock eval gates --limit 20 --show 3               a quick look, with three wrong answers "
    "a gate",
    "penstock eval report results/h200 --output report.html --png docs/plots",
]


@dataclass(frozen=True, slots=True)
class Measurement:
    settings: type[Any]
    run: Callable[[Any, Reporter], int]


MEASUREMENTS = {
    "check-server": Measurement(check_server.CheckSettings, check_server.run),
    "correctness": Measurement(correctness.CorrectnessSettings, correctness.run),
    "throughput": Measurement(throughput.ThroughputSettings, throughput.run),
    "score": Measurement(score.ScoreSettings, score.run),
    "latency": Measurement(latency.LatencySettings, latency.run),
    "quality": Measurement(quality.QualitySettings, quality.run),
    "gates": Measurement(gates.GateSettings, gates.run),
    "report": Measurement(
        run_report.ReportSettings, lambda settings, reporter: run_report.run(settings)
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A flag of several measurements is listed with the first, and means the same in all."""
    parser.add_argument("what", choices=MEASUREMENTS, metavar="WHAT", help="which measurement")
    parser.add_argument(
        "--concurrency",
        nargs="+",  # both formats: 1,2,4 and 1 2 4
        type=read_counts,
        metavar="N",
        default=argparse.SUPPRESS,
        help="concurrent requests; throughput takes several levels (default: 1 to 64; gates: 8)",
    )
    parser.add_argument(
        "--limit",
        type=read_limit,
        metavar="N",
        default=argparse.SUPPRESS,
        help="problems to run, a count or a fraction such as 0.1 "
        "(default: 200; quality: QUALITY_LIMIT, or 100 per task)",
    )
    parser.add_argument(
        "results",
        nargs="*",
        metavar="RESULTS",
        default=argparse.SUPPRESS,
        help="for report only: folders and files of results (default: results)",
    )
    added = {"concurrency", "limit", "results"}
    for name, measurement in MEASUREMENTS.items():
        add_flags(parser, measurement.settings, title=name, skip=added)
        added |= {flag.field.name for flag in flags_of(measurement.settings)}


def read_limit(text: str) -> int | float:
    """A count such as 200 or 4k, or a fraction of all."""
    return read_number(text) if "." in text and not text[-1:].isalpha() else read_count(text)


def run(arguments: argparse.Namespace) -> int:
    measurement = MEASUREMENTS[arguments.what]
    _refuse_flags_of_others(arguments, measurement)
    given = read_settings(measurement.settings, arguments)
    if "concurrency" in given:
        given["concurrency"] = _read_concurrency(arguments, measurement)
    settings = from_mapping(measurement.settings, given)
    return measurement.run(settings, Reporter(PhaseList, provenance()))


def _refuse_flags_of_others(arguments: argparse.Namespace, measurement: Measurement) -> None:
    """A flag of another measurement must not be ignored."""
    own = {flag.field.name for flag in flags_of(measurement.settings)}
    owners: dict[str, list[str]] = {}
    for name, other in MEASUREMENTS.items():
        for flag in flags_of(other.settings):
            is_typed = hasattr(arguments, flag.field.name) and not is_given_by_variable(
                arguments, flag.field.name
            )
            if flag.field.name not in own and is_typed:
                owners.setdefault(flag.name, []).append(name)
    if owners:
        flag_name, names = next(iter(owners.items()))
        raise foreign_flag(f"eval {arguments.what}", flag_name, ", ".join(names))


def _read_concurrency(arguments: argparse.Namespace, measurement: Measurement) -> Any:
    levels = tuple(level for word in arguments.concurrency for level in word)
    if measurement.settings is not gates.GateSettings:
        return levels
    if len(levels) != 1:
        raise ConfigError("eval gates takes one number for --concurrency", f"It got {len(levels)}.")
    return levels[0]
