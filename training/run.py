"""A training run from the first batch to the model folder: loop, time budget, log, stop and resume.

The learning rate depends on the elapsed share of the budget, so a run always ends with a decayed
rate. The parts are elsewhere: step.py runs on the device, data.py makes batches, evaluate.py
evaluates, export.py writes.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from training.checkpoint import Progress, load_progress, save_progress
from training.config import ModelConfig, TrainConfig
from training.data import BatchMaker, Corpus, Feed, LocalFeed, Problem, WorkerFeed
from training.evaluate import Report, evaluate
from training.export import check_with_transformers, export
from training.model import Qwen35Moe
from training.optimizer import FlatAdamW
from training.start import start_weights
from training.step import COLUMNS, Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Settings that may differ between a run and its resumption."""

    out: Path
    budget_s: float | None = None
    budget_steps: int | None = None  # instead of time, for a reproducible run
    pause_after_s: float | None = None
    pause_after_steps: int | None = None
    device: str = "cuda"
    num_workers: int = 14  # 0: makes batches in this process
    use_graphs: bool = True
    use_compile: bool = False
    resume: bool = False
    init: Path | None = None  # model folder with initial weights; None: random weights
    log_every_s: float = 5.0
    save_every_s: float = 60.0
    evaluate_every_s: float = 240.0
    num_problems: int = 128  # per evaluation; four times as many at the end
    max_reply_tokens: int = 320
    check_export: bool = True  # with transformers: takes 10 s or more


class Run:
    def __init__(
        self,
        corpus: Corpus,
        model_config: ModelConfig,
        train_config: TrainConfig,
        settings: RunSettings,
    ) -> None:
        self.corpus = corpus
        self.config = train_config
        self.settings = settings
        settings.out.mkdir(parents=True, exist_ok=True)
        self._log = (settings.out / "train.log").open("a", buffering=1)
        self.progress = (
            load_progress(settings.out, model_config, train_config)
            if settings.resume
            else Progress()
        )
        self.progress.run += 1
        self.feed = self._start_feed()  # forks, so it must precede CUDA initialization
        self.device = torch.device(settings.device)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.model = Qwen35Moe(model_config, dtype, train_config.delta_chunk)
        start_weights(self.model, train_config.seed, settings.init)
        self.model.to(self.device)
        self.optimizer = FlatAdamW(self.model, train_config)
        if self.progress.optimizer is not None:
            self.optimizer.restore(self.progress.optimizer)
        self.trainer = Trainer(
            self.model, self.optimizer, train_config, len(corpus.kinds), self.device
        )
        self.problems = corpus.held_out(settings.num_problems * 4)
        self.history: list[tuple[int, float]] = []  # step, mean loss since the previous entry
        self._stop_asked = False

    def train(self) -> Path | None:
        """Trains to the end of the budget and exports; returns None if stopped earlier."""
        self.report(
            f"{sum(p.numel() for p in self.model.parameters()):,} parameters, {self.config}, "
            f"{self.settings}"
        )
        previous = {
            number: signal.signal(number, self._ask_to_stop)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            self.trainer.prepare(self.report, self.settings.use_graphs, self.settings.use_compile)
            # Shows errors in checks or in generation now, not after minutes.
            self._evaluate("before training", self.problems[: self.settings.num_problems // 8])
            self._loop()
            return self._finish()
        finally:
            self.feed.close()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def report(self, line: str) -> None:
        stamped = f"[{self.progress.elapsed_s:6.1f}s] {line}"
        print(stamped, flush=True)
        self._log.write(stamped + "\n")

    def _loop(self) -> None:
        progress = self.progress
        start = time.monotonic() - progress.elapsed_s
        started_at, first_step = progress.elapsed_s, progress.step
        logged = saved = evaluated = _Mark(progress.elapsed_s, progress.num_tokens)
        while True:
            progress.elapsed_s = time.monotonic() - start
            now = _Mark(progress.elapsed_s, progress.num_tokens)
            if (
                now.elapsed_s - logged.elapsed_s >= self.settings.log_every_s
                and progress.step > first_step
            ):
                self._log_totals(logged)
                logged = now
            if self._is_over() or self._must_pause(started_at, first_step):
                return
            if now.elapsed_s - saved.elapsed_s >= self.settings.save_every_s:
                self._save()
                saved = now
            if now.elapsed_s - evaluated.elapsed_s >= self.settings.evaluate_every_s:
                self._evaluate("on the way", self.problems[: self.settings.num_problems])
                evaluated = now
            batch = self.feed.next_batch()
            self.trainer.step(batch, self.config.learning_rate(self._fraction()))
            progress.step += 1
            progress.num_tokens += batch.token_ids.size

    def _fraction(self) -> float:
        if self.settings.budget_steps is not None:
            return self.progress.step / self.settings.budget_steps
        assert self.settings.budget_s is not None
        return self.progress.elapsed_s / self.settings.budget_s

    def _is_over(self) -> bool:
        return self._fraction() >= 1.0

    def _must_pause(self, started_at: float, first_step: int) -> bool:
        settings, progress = self.settings, self.progress
        is_late = (
            settings.pause_after_s is not None
            and progress.elapsed_s - started_at >= settings.pause_after_s
        )
        is_far = (
            settings.pause_after_steps is not None
            and progress.step - first_step >= settings.pause_after_steps
        )
        return self._stop_asked or is_late or is_far

    def _finish(self) -> Path | None:
        self._save()
        if not self._is_over():
            # The unfinished model may still be useful. Without decay, averaged weights are better.
            with self.optimizer.published_weights(use_average=True):
                self._export(self.settings.out / "unfinished")
            self.report(f"stopped before the end at step {self.progress.step}; --resume goes on")
            return None
        folder = self.settings.out / "model"
        with self.optimizer.published_weights(use_average=False):
            self._export(folder)
            trained = self._evaluate("trained weights", self.problems)
        with self.optimizer.published_weights(use_average=True):
            averaged = self._evaluate("averaged weights", self.problems)
            if averaged.total.num_right > trained.total.num_right:
                self.report("the averaged weights are better")
                self._export(folder)
        if self.settings.check_export:
            difference = check_with_transformers(folder, self.model)
            self.report(f"transformers loads {folder} and agrees to {difference:.1e}")
        return folder

    def _export(self, folder: Path) -> None:
        facts = export(self.model, folder, self.corpus.special, self.corpus.text_files)
        self.report(
            f"wrote {folder}: {facts['num_parameters']:,} parameters, {facts['num_bytes']:,} bytes"
        )

    def _evaluate(self, label: str, problems: Sequence[Problem]) -> Report:
        start = time.monotonic()
        found = evaluate(
            self.model, problems, self.corpus.special.ends, self.settings.max_reply_tokens
        )
        self.report(f"{label}: {found} ({time.monotonic() - start:.1f}s)")
        return found

    def _save(self) -> None:
        self.progress.feed = self.feed.state()
        self.progress.optimizer = {
            name: tensor.cpu() for name, tensor in self.optimizer.state().items()
        }
        save_progress(self.settings.out, self.progress, self.model.config, self.config)

    def _log_totals(self, since: _Mark) -> None:
        totals, num_skipped = self.trainer.read_totals()
        progress = self.progress
        sums = [sum(column) for column in zip(*totals, strict=True)]
        self.history.append((progress.step, sums[0] / max(1.0, sums[1])))
        rate = (progress.num_tokens - since.num_tokens) / max(
            1e-9, progress.elapsed_s - since.elapsed_s
        )
        kinds = " ".join(
            f"{kind}={_describe(row)}"
            for kind, row in zip(self.corpus.kinds, totals, strict=True)
            if row[1]
        )
        fraction = self._fraction()
        skipped = (
            f" SKIPPED {num_skipped} steps with gradients that are not finite"
            if num_skipped
            else ""
        )
        self.report(
            f"step {progress.step} {fraction:.1%} lr {self.config.learning_rate(fraction):.2e} "
            f"{rate:,.0f} tok/s all={_describe(sums)} | {kinds} | {self.feed.report()}{skipped}"
        )

    def _start_feed(self) -> Feed:
        if self.settings.num_workers == 0:
            return LocalFeed(
                BatchMaker(self.corpus, self.config, f"train-{self.config.seed}"),
                self.progress.feed,
            )
        return WorkerFeed(self.corpus, self.settings.num_workers, self.config, self.progress.run)

    def _ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        self._stop_asked = True


@dataclass(frozen=True, slots=True)
class _Mark:
    elapsed_s: float
    num_tokens: int


def _describe(totals: Sequence[float]) -> str:
    """Loss per token, share of rows that greedy decoding reproduces, share of accepted drafts."""
    row = dict(zip(COLUMNS, totals, strict=True))
    return (
        f"{row['loss'] / max(1.0, row['tokens']):.4f}/"
        f"{row['exact_rows'] / max(1.0, row['rows']):.1%}/"
        f"{row['draft_hits'] / max(1.0, row['draft_tokens']):.1%}"
    )
