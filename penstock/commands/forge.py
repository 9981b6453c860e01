"""`penstock forge`: writes an engine for one model on this machine, and shows how it got there."""

from __future__ import annotations

import argparse
import os
import re
import signal
from pathlib import Path

from penstock.errors import ConfigError
from penstock.eval.results import prepare_output
from penstock.forge.fork_server import ForkServer
from penstock.forge.run_log import RunLog

DESCRIPTION = (
    "Writes an engine for one model on this machine: plan, write, check, measure, keep the best."
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="model_config.json (default: of /target or target)",
    )
    parser.add_argument(
        "--weights",
        type=Path,
        metavar="FOLDER",
        help="the folder of model.pt (default: of /target or target)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        default=Path("workspace/engine.py"),
        help="where the engine goes; ledger, log and report beside it (default: "
        "workspace/engine.py)",
    )
    parser.add_argument(
        "--budget",
        type=read_duration,
        metavar="TIME",
        default=600.0,
        help="90s, 10m (default: 10m)",
    )
    parser.add_argument(
        "--device", metavar="NAME", default="auto", help="auto, cuda or cpu (default: auto)"
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", default=0, help="of the traces (default: 0)"
    )
    parser.add_argument(
        "--max-trials", type=int, metavar="N", default=1000, help="stop after that many"
    )
    parser.add_argument(
        "--llm-base-url",
        metavar="URL",
        default=os.environ.get("PENSTOCK_LLM_BASE_URL", ""),
        help="a server whose model plans and proposes edits (PENSTOCK_LLM_BASE_URL)",
    )
    parser.add_argument(
        "--llm-model",
        metavar="NAME",
        default=os.environ.get("PENSTOCK_LLM_MODEL", ""),
        help="its name (PENSTOCK_LLM_MODEL; default: the server's first)",
    )


def run(arguments: argparse.Namespace) -> int:
    check_out(arguments.out)
    # Ends like Ctrl-C: with a report.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    log = RunLog(arguments.out.parent)
    try:
        # The server before torch: it imports the same at the same time.
        with log.explaining(), ForkServer(arguments.device) as server:
            return _run(arguments, server, log)
    finally:
        signal.signal(signal.SIGTERM, before)


def check_out(out: Path) -> None:
    """Before any time is spent: whether there can be an engine, and files beside it."""
    if out.is_dir():
        todo = f"Name the file: --out {out / 'engine.py'}"
        raise ConfigError(f"--out {out} is a folder", "An engine is one file.", todo)
    parent = out.absolute().parent
    found = next(folder for folder in (parent, *parent.parents) if folder.exists())
    if not found.is_dir():
        todo = "Name another place with --out."
        raise ConfigError(f"--out {out} cannot be written", f"{found} is no folder.", todo)
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
        else "right; there was no time to time it"
    )
    print(f"{arguments.out}: {said}; see {arguments.out.parent / 'report.md'}")
    return 0
