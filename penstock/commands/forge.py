"""`penstock forge`: writes an engine for one model on this machine, and logs every attempt."""

from __future__ import annotations

import argparse
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.eval.results import prepare_output
from penstock.forge.fork_server import ForkServer
from penstock.forge.run_log import RunLog

DESCRIPTION = (
    "Write an engine for one model on this machine: plan, write, check, measure, keep the best."
)
USAGE = "penstock forge [flags]"
EXAMPLES = [
    "penstock forge                                            /target or target → "
    "workspace/engine.py",
    "penstock forge --config c.json --weights w --budget 10m   another model, ten minutes",
    "penstock forge --llm-base-url http://127.0.0.1:8000       a model plans and edits too",
]

_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smh]?)")
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def read_duration(text: str) -> float:
    """90, 90s, 10m, 1.5h -> seconds"""
    match = _DURATION.fullmatch(text.strip().lower())
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration; write 90s or 10m")
    return float(match[1]) * _SECONDS[match[2]]


# Flag, type, metavar, default, help; {} stands for the default.
FLAGS: tuple[tuple[str, Callable[[str], Any], str, Any, str], ...] = (
    ("--config", Path, "FILE", None, "model_config.json (default: in /target or target)"),
    ("--weights", Path, "FOLDER", None, "folder with model.pt (default: target/weights)"),
    ("--out", Path, "FILE", Path("workspace/engine.py"), "the engine; logs go beside it ({})"),
    ("--budget", read_duration, "TIME", 600.0, "time limit, such as 90s or 10m (default: 10m)"),
    ("--device", str, "NAME", "auto", "auto, cuda or cpu ({})"),
    ("--seed", int, "N", 0, "seed of the traces ({})"),
    ("--max-trials", int, "N", 1000, "stop after this many trials ({})"),
    ("--llm-base-url", str, "URL", "", "a server whose model plans and proposes edits"),
    ("--llm-model", str, "NAME", "", "the model on that server (default: its first)"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for flag, kind, metavar, default, words in FLAGS:
        words = words.replace("{}", f"default: {default}")
        if flag.startswith("--llm-"):
            variable = f"PENSTOCK_{flag[2:].replace('-', '_').upper()}"
            default, words = os.environ.get(variable, ""), f"{words} ({variable})"
        parser.add_argument(flag, type=kind, metavar=metavar, default=default, help=words)


def run(arguments: argparse.Namespace) -> int:
    check_out(arguments.out)
    # SIGTERM ends the run as Ctrl-C does: with a report.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    log = RunLog(arguments.out.parent)
    try:
        # Start the fork server before importing torch: both then import it in parallel.
        with log.explaining(), ForkServer(arguments.device) as server:
            return _run(arguments, server, log)
    finally:
        signal.signal(signal.SIGTERM, before)


def check_out(out: Path) -> None:
    """Checks before any work that the engine, and files beside it, can be written."""
    if out.is_dir():
        todo = f"Name the file: --out {out / 'engine.py'}"
        raise ConfigError(f"--out {out} is a folder", "An engine is one file.", todo)
    parent = out.absolute().parent
    found = next(folder for folder in (parent, *parent.parents) if folder.exists())
    if not found.is_dir():
        todo = "Choose another path with --out."
        raise ConfigError(f"--out {out} cannot be written", f"{found} is not a folder.", todo)
    prepare_output(str(out), "--out")


def _run(arguments: argparse.Namespace, server: ForkServer, log: RunLog) -> int:
    from penstock.forge.run import forge
    from penstock.forge.target import default_target, read_device

    default = default_target()
    best = forge(
        config=arguments.config or default / "model_config.json",
        weights=arguments.weights or default / "weights",
        out=arguments.out,
        device=read_device(arguments.device),
        budget_s=arguments.budget,
        seed=arguments.seed,
        max_trials=arguments.max_trials,
        llm_base_url=arguments.llm_base_url,
        llm_model=arguments.llm_model,
        server=server,
        log=log,
        say=lambda line: print(line, flush=True),
    )
    gained = ", ".join(f"{family} {gain:.2f}x" for family, gain in best.total.items())
    said = (
        f"{gained} as fast as the first version"
        if best.timings
        else "correct; no time was left to measure it"
    )
    print(f"{arguments.out}: {said}; see {arguments.out.parent / 'report.md'}")
    return 0
