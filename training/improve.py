"""Continues the training of the embedded model, in stages that each write a complete model.

    python -m training.improve --out OUT --work DIR [--stages polish --init MODEL] [--minutes 1.83]

`sums` trains the current model, mostly on sums in the wordings of other harnesses. `refusals`
continues with four more layers, mostly on requests whose tool is offered under another name or not
at all. `polish` combines both: many short rows of sums, and everything else rehearsed. If a stage
misses a gate, the model before it remains. OUT gets files small enough to transfer:

    STAGE.tar.00, STAGE.tar.01    the model folder: cat OUT/STAGE.tar.* | tar -x -C MODELS
    improve.json                  gates and seconds of each stage, and failures
    improve.log                   everything that was printed
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from training.tokenizer import ASSETS

PART_BYTES = 16_000_000  # some transfers are limited to 16 MiB per file
SECONDS_TO_START = 20.0  # of a stage: torch, the tokenizer, a graph per row length
SECONDS_TO_END = 45.0  # of a stage: evaluation and export after the last step
SECONDS_TO_STOP = 20.0
SHORTEST_STAGE_S = 5.0
SECONDS_AFTER_DEADLINE = 25.0
# Sums have up to 64 tokens, requests with tools 300 to 550. Close row lengths need less padding.
ROW_LENS = (64, 96, 128, 192, 320, 384, 448, 576, 1280, 2560)


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    shares: Mapping[str, float]  # by conversation: a sum has 50 tokens, a request with tools 400
    minutes: float
    layers: int | None = None
    row_lens: tuple[int, ...] = ROW_LENS
    tokens_per_batch: int = 65_536
    flags: tuple[str, ...] = ("--peak-lr", "1e-3", "--first-token-weight", "4")


STAGES = (
    Stage(
        "sums",
        {
            "harness_sums": 0.70,
            "spot_checks": 0.08,
            "word_problems": 0.09,
            "tool_calls": 0.06,
            "recall": 0.04,
            "small_talk": 0.03,
        },
        minutes=1.75,
    ),
    Stage(
        "refusals",
        {
            "harness_sums": 0.30,
            "spot_checks": 0.06,
            "word_problems": 0.16,
            "tool_calls": 0.13,
            "tool_choice": 0.20,
            "refusals": 0.06,
            "recall": 0.05,
            "small_talk": 0.04,
        },
        minutes=3.5,
        layers=12,
    ),
    # Over half of all tokens are sums. Small batches give twice the steps in the same time.
    Stage(
        "polish",
        {
            "harness_sums": 0.79,
            "spot_checks": 0.115,
            "word_problems": 0.032,
            "tool_calls": 0.017,
            "tool_choice": 0.019,
            "refusals": 0.004,
            "recall": 0.012,
            "small_talk": 0.016,
        },
        minutes=1.83,
        row_lens=(40, 48, 64, 96, 160, 320, 384, 448, 576, 1280, 2560),
        tokens_per_batch=32_768,
        flags=("--peak-lr", "6e-4", "--first-token-weight", "2"),
    ),
)


@dataclass(slots=True)
class Improvement:
    flags: argparse.Namespace
    log: TextIO
    started: float = field(default_factory=time.monotonic)
    report: dict[str, Any] = field(default_factory=dict)

    def run(self) -> int:
        start, trained = self.flags.init, {}
        stages = [stage for stage in STAGES if stage.name in self.flags.stages]
        minutes_of = self.flags.minutes or [stage.minutes for stage in stages]
        for stage, minutes in zip(stages, minutes_of, strict=False):
            left_s = self.flags.deadline - self.elapsed_s - SECONDS_TO_START - SECONDS_TO_END
            if left_s < SHORTEST_STAGE_S:
                self.note(
                    stage.name,
                    left_out=f"only {self.flags.deadline - self.elapsed_s:.0f} s were left",
                )
                break
            folder = self.train(stage, start, min(minutes, left_s / 60))
            if folder is None:
                break
            self.pack(stage.name, folder)
            start = trained[stage.name] = folder
        self.examine(trained)
        return 0 if len(trained) == len(stages) else 1

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    def train(self, stage: Stage, init: Path, minutes: float) -> Path | None:
        """The model folder, with averaged weights if the stage had to be stopped."""
        out, start_s = self.flags.work / stage.name, self.elapsed_s
        process = self.start(
            "training.train",
            *(
                "--out",
                out,
                "--init",
                init,
                "--minutes",
                f"{minutes:.3f}",
                "--no-check",
                *stage.flags,
            ),
            *(("--layers", stage.layers) if stage.layers else ()),
            *("--shares", *(f"{kind}={share}" for kind, share in stage.shares.items())),
            *("--row-lens", *(self.flags.row_lens or stage.row_lens)),
            *("--tokens-per-batch", self.flags.tokens_per_batch or stage.tokens_per_batch),
            *("--workers", self.flags.workers, "--problems", self.flags.problems),
        )
        code = self.wait(process, until_s=self.flags.deadline)
        folder = next(
            (out / name for name in ("model", "unfinished") if (out / name).is_dir()), None
        )
        seconds = round(self.elapsed_s - start_s, 1)
        self.note(stage.name, minutes=minutes, exit_code=code, seconds=seconds, folder=str(folder))
        return folder

    def pack(self, name: str, folder: Path) -> None:
        whole = self.flags.work / f"{name}.tar"
        with tarfile.open(whole, "w") as archive:
            archive.add(folder, arcname=name)
        content = whole.read_bytes()
        for number, start in enumerate(range(0, len(content), PART_BYTES)):
            (self.flags.out / f"{name}.tar.{number:02d}").write_bytes(
                content[start : start + PART_BYTES]
            )

    def examine(self, folders: Mapping[str, Path]) -> None:
        """Runs the gates on all models in parallel."""
        files = {name: self.flags.work / f"{name}.json" for name in folders}
        asked = {
            name: self.start(
                "training.examine",
                folder,
                "--limit",
                self.flags.limit,
                "--show",
                8,
                "--json",
                files[name],
            )
            for name, folder in folders.items()
        }
        for name, process in asked.items():
            code = self.wait(process, until_s=self.flags.deadline + SECONDS_AFTER_DEADLINE)
            found = json.loads(files[name].read_text()) if files[name].is_file() else None
            self.note(name, examined=found, all_gates_passed=code == 0)

    def start(self, module: str, *arguments: object) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            module,
            *map(str, arguments),
            "--device",
            self.flags.device,
        ]
        return subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT)

    def wait(self, process: subprocess.Popen[bytes], until_s: float) -> int:
        """The exit status. At the deadline the process gets a signal, and a training run then
        writes its current model.
        """
        try:
            return process.wait(max(1.0, until_s - self.elapsed_s))
        except subprocess.TimeoutExpired:
            process.terminate()
        try:
            return process.wait(SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def note(self, name: str, **facts: Any) -> None:
        self.report.setdefault(name, {}).update(facts)
        self.report["elapsed_s"] = round(self.elapsed_s, 1)
        (self.flags.out / "improve.json").write_text(json.dumps(self.report, indent=1) + "\n")
        print(f"[{self.elapsed_s:6.1f}s] {name}: {facts}", flush=True)


def parse_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="training.improve", description="Train the embedded model on."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for what is to be kept")
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument(
        "--init", type=Path, default=ASSETS, metavar="MODEL", help="the embedded model"
    )
    names = [stage.name for stage in STAGES]
    parser.add_argument(
        "--stages", nargs="+", choices=names, default=names, help="default: all, in order"
    )
    parser.add_argument(
        "--minutes", type=float, nargs="+", help="of training, by stage; default: its own"
    )
    parser.add_argument("--deadline", type=float, default=720.0, metavar="SECONDS", help="for all")
    parser.add_argument(
        "--limit", type=int, default=200, metavar="N", help="problems per gate (200)"
    )
    parser.add_argument(
        "--problems", type=int, default=24, help="asked at the end of a stage, times four"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=12, help="processes that make data")
    parser.add_argument("--row-lens", type=int, nargs="+", help="default: the stage's own")
    parser.add_argument("--tokens-per-batch", type=int, help="default: the stage's own")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    flags = parse_flags(argv)
    for folder in (flags.out, flags.work):
        folder.mkdir(parents=True, exist_ok=True)
    with (flags.out / "improve.log").open("a", buffering=1) as log:
        return Improvement(flags, log).run()


if __name__ == "__main__":
    sys.exit(main())
