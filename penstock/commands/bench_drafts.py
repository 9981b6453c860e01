"""`penstock bench step --drafts`: decode steps that verify drafts, beside plain ones.

Random weights accept no drafts. So the number of accepted drafts is drawn from a seed, with the
given probability for each position, and the timing does not depend on the weights. Before that,
with nothing forced, results are checked: replies with the head's drafts, and replies with correct
drafts, must be those of plain decoding.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.commands import breakdown
from penstock.commands.console import print_table
from penstock.commands.flags import read_settings
from penstock.commands.measure import (
    PROFILED_STEPS,
    Decoding,
    is_on_gpu,
    load_engine,
    random_prompts,
    require_room,
    roofline_of,
    time_chain,
    time_each,
    time_steps,
)
from penstock.commands.provenance import cpu_name, gpu_name, provenance
from penstock.commands.roofline import DraftBytes, Roofline
from penstock.config import EngineConfig, from_mapping
from penstock.errors import ConfigError, PenstockError
from penstock.eval.results import deliver_line, prepare_output, require_at_least
from penstock.models.source import find_model
from penstock.progress import Phase, PhaseList, timed
from penstock.types import Request, SamplingParams, Sequence

if TYPE_CHECKING:
    from penstock.engine.logits_engine import LogitsEngine
    from penstock.engine.pending_step import PendingStep

COLUMNS = [
    *("batch", "context", "drafts", "ms a step", "tokens a step", "ms a token", "times plain"),
    *("ms a draft", "bytes / floor"),
]
STEP_TOKENS = 256  # per prefill step, so that few prefill graphs are captured


@dataclass(frozen=True, slots=True)
class DraftedSteps:
    """Steps of one shape; `num_drafts` is 0 for plain steps."""

    batch: int
    context: int
    num_drafts: int
    seconds: tuple[float, ...]
    tokens_a_step: float  # per row, expected from the acceptance
    plain_s: float  # a plain step in the same run
    verify_s: float | None  # the same step without the drafting head
    num_bytes: DraftBytes

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def ms_a_token(self) -> float:
        """Per request."""
        return self.median_s / self.tokens_a_step * 1e3

    @property
    def gain(self) -> float:
        return self.plain_s * 1e3 / self.ms_a_token

    @property
    def ms_a_draft(self) -> float | None:
        """The time that the drafting head adds to a step, per draft."""
        if self.verify_s is None or not self.num_drafts:
            return None
        return (self.median_s - self.verify_s) / self.num_drafts * 1e3

    def as_row(self) -> list[str]:
        head = "" if self.ms_a_draft is None else f"{self.ms_a_draft:.3f}"
        return [
            str(self.batch),
            f"{self.context:,}",
            str(self.num_drafts),
            f"{self.median_s * 1e3:.3f}",
            f"{self.tokens_a_step:.2f}",
            f"{self.ms_a_token:.3f}",
            f"{self.gain:.2f}",
            head,
            f"{self.num_bytes.read / self.num_bytes.floor:.3f}",
        ]

    def as_dict(self, model: str, scheme: str, acceptance: List[float]) -> dict[str, Any]:
        return {
            "model": model,
            "scheme": scheme,
            "batch": self.batch,
            "ms_per_token": round(self.ms_a_token, 4),
            "acceptance": list(acceptance[: self.num_drafts]),
            "context": self.context,
            "drafts": self.num_drafts,
            "ms_per_step": round(self.median_s * 1e3, 4),
            "ms_min": round(min(self.seconds) * 1e3, 4),
            "repeats": len(self.seconds),
            "tokens_per_step": round(self.tokens_a_step, 4),
            "plain_ms": round(self.plain_s * 1e3, 4),
            "times_plain": round(self.gain, 4),
            "verify_ms": None if self.verify_s is None else round(self.verify_s * 1e3, 4),
            "ms_per_draft": None if self.ms_a_draft is None else round(self.ms_a_draft, 4),
            "bytes_read": self.num_bytes.read,
            "bytes_floor": self.num_bytes.floor,
            "bytes_of_floor": round(self.num_bytes.read / self.num_bytes.floor, 4),
        }


def run(arguments: argparse.Namespace) -> int:
    prepare_output(arguments.json, "--json")
    _check(arguments)
    config = _config(arguments)
    source = find_model(config.model)
    with PhaseList() as phases:
        engine = load_engine(source, config, phases)
        require_room(engine, max(arguments.batch), config.max_model_len or 0)
        with timed("check", phases) as report:
            checked = check_replies(engine)
            report(Phase("check", "\n".join(map(str, checked))))
    bench = DraftBench(engine, roofline_of(engine, source, config), arguments)
    measured = []
    for context in arguments.context:
        for batch in arguments.batch:
            measured += bench.shape(batch, context)
    device = gpu_name() or cpu_name()
    scheme = _scheme(config, engine.engine.info.dtype)
    print_table(COLUMNS, [one.as_row() for one in measured], f"{source.name}, {scheme}, {device}")
    rows = [one.as_dict(source.name, scheme, arguments.acceptance) for one in measured]
    line: dict[str, Any] = {
        "bench": "drafts",
        **provenance(),
        "gpu": gpu_name(),
        "draft_vocabulary": config.draft_vocabulary,
        "random_weights": config.random_weights,
        "deterministic": config.deterministic,
        "kv_dtype": engine.engine.info.kv_dtype,
        "state_dtype": config.state_dtype,
        "check": [asdict(one) | {"distance": round(one.distance, 5)} for one in checked],
        "rows": rows,
    }
    if bench.breakdowns:
        line["breakdowns"] = bench.breakdowns
    deliver_line(json.dumps(line), arguments.json, "--json")
    return 0


def _check(arguments: argparse.Namespace) -> None:
    require_at_least(1, drafts=min(arguments.drafts))
    if max(arguments.drafts) > len(arguments.acceptance):
        raise ConfigError(
            f"--drafts is {max(arguments.drafts)}, but --acceptance has "
            f"{len(arguments.acceptance)} probabilities",
            "Each draft needs one.",
            "For three drafts, use --acceptance 0.85,0.75,0.65.",
        )
    if not all(0 <= chance <= 1 for chance in arguments.acceptance):
        raise ConfigError(
            f"--acceptance is {arguments.acceptance}", "Probabilities are between 0 and 1."
        )


def _config(arguments: argparse.Namespace) -> EngineConfig:
    """The timed shapes decide how much memory the engine needs."""
    settings = read_settings(EngineConfig, arguments)
    settings.setdefault("max_step_tokens", STEP_TOKENS)
    num_steps = max(arguments.warmup + arguments.repeats, PROFILED_STEPS) + 2
    longest = max(arguments.context) + num_steps * (1 + max(arguments.drafts))
    settings["max_rows"] = max(*arguments.batch, NUM_ROWS)
    checked = PROMPT_TOKENS + NUM_TOKENS + 16
    settings["max_model_len"] = max(longest, checked)
    settings["prefix_cache"] = False
    settings["speculate"] = f"mtp:{max(arguments.drafts)}"
    config: EngineConfig = from_mapping(EngineConfig, settings)
    return config


def _scheme(config: EngineConfig, dtype: str) -> str:
    if config.quantization not in ("", "none", "auto", None):
        return str(config.quantization)
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[dtype]


def expected_tokens(acceptance: List[float], num_drafts: int) -> float:
    """Expected tokens per row and step: a draft counts if it and all before it are accepted."""
    return 1 + sum(math.prod(acceptance[: place + 1]) for place in range(num_drafts))


def draw_accepted(acceptance: List[float], num_drafts: int, count: int, seed: int) -> list[int]:
    """The number of accepted drafts in each of `count` steps of a row."""
    generator = random.Random(seed)
    drawn = []
    for _ in range(count):
        right = 0
        while right < num_drafts and generator.random() < acceptance[right]:
            right += 1
        drawn.append(right)
    return drawn


class DraftBench:
    def __init__(
        self, engine: LogitsEngine, roofline: Roofline, arguments: argparse.Namespace
    ) -> None:
        self.engine, self.roofline = engine, roofline
        self.warmup, self.repeats = arguments.warmup, arguments.repeats
        self.drafts, self.acceptance = sorted(set(arguments.drafts)), arguments.acceptance
        self.breaks_down = arguments.breakdown and is_on_gpu(engine)
        self.breakdowns: list[dict[str, Any]] = []

    def shape(self, batch: int, context: int) -> list[DraftedSteps]:
        """Plain steps, and steps with each number of drafts that has a graph."""
        measured: list[DraftedSteps] = []
        limit = self.engine.engine.policy.speculator.most_drafts
        for num_drafts in (0, *self.drafts):
            if num_drafts > (num_drafts if limit is None else limit(batch)):
                continue
            name = f"{batch} x {context:,}, {num_drafts} drafts"
            with PhaseList() as phases, timed(name, phases) as report:
                plain_s = measured[0].median_s if measured else None
                one = self._steps(batch, context, num_drafts, plain_s)
                measured.append(one)
                words = f"{one.median_s * 1e3:.3f} ms a step, {one.ms_a_token:.3f} ms a token"
                report(Phase(name, words))
            if self.breaks_down:
                self._break_down(name, batch, context, num_drafts)
        return measured

    def _break_down(self, name: str, batch: int, context: int, num_drafts: int) -> None:
        decoding, step = self._decoding(batch, context, num_drafts, PROFILED_STEPS)
        found = breakdown.break_down(step, PROFILED_STEPS)
        decoding.release()
        title = f"{name}: {found.step_us:.0f} us, busy {found.busy:.1%}"
        print_table(breakdown.COLUMNS, found.as_rows(), title)
        shape = {"batch": batch, "context": context, "drafts": num_drafts}
        self.breakdowns.append({**shape, **found.as_dict()})

    def _decoding(
        self, batch: int, context: int, num_drafts: int, num_steps: int
    ) -> tuple[Decoding, Callable[[], PendingStep]]:
        """Rows in the middle of their replies, and a function that launches a step of them."""
        inner = self.engine.engine
        decoding = Decoding(inner, batch, context, num_steps * (1 + num_drafts), SamplingParams())
        take = self._taker(batch, num_drafts, num_steps)

        def step() -> PendingStep:
            take()
            return decoding.step(1 + num_drafts)

        return decoding, step

    def _steps(
        self, batch: int, context: int, num_drafts: int, plain_s: float | None
    ) -> DraftedSteps:
        inner, num_steps = self.engine.engine, self.warmup + self.repeats
        decoding, step = self._decoding(batch, context, num_drafts, num_steps)
        seconds = self._time(step)
        decoding.release()
        verify_s = self._time_without_head(batch, context, num_drafts) if num_drafts else None
        tokens = expected_tokens(self.acceptance, num_drafts)
        middle = context + int(tokens * (self.warmup + self.repeats // 2))
        vocabulary = getattr(inner.runner.drafter, "vocabulary", None)
        num_bytes = self.roofline.draft_bytes(
            batch, middle, num_drafts, tokens - 1, 0 if vocabulary is None else vocabulary.num_bytes
        )
        inner.runner.rows.forced.fill_(-1)
        own_s = statistics.median(seconds)
        return DraftedSteps(
            batch,
            context,
            num_drafts,
            seconds,
            tokens,
            own_s if plain_s is None else plain_s,
            verify_s,
            num_bytes,
        )

    def _taker(self, batch: int, num_drafts: int, num_steps: int) -> Callable[[], None]:
        """A function that sets how many drafts each row accepts in the next step."""
        table = self.engine.engine.runner.rows
        drawn = [
            draw_accepted(self.acceptance, num_drafts, num_steps, seed) for seed in range(batch)
        ]
        steps = iter(table.upload(drawn).t().contiguous())

        def take() -> None:
            if num_drafts:
                table.forced[:batch].copy_(next(steps))

        return take

    def _time(self, step: Callable[[], PendingStep]) -> tuple[float, ...]:
        for _ in range(self.warmup):
            step().wait()
        return time_steps(self.engine, step, self.repeats)

    def _time_without_head(self, batch: int, context: int, num_drafts: int) -> float:
        """The same steps without the drafting head; the drafts in the row table stay the same."""
        import torch

        from penstock.engine.draft_step import DraftStep
        from penstock.engine.graph_sizes import DraftSize
        from penstock.engine.graphs import capture

        inner, num_steps = self.engine.engine, self.warmup + self.repeats + 1
        runner = inner.runner
        decoding = Decoding(inner, batch, context, num_steps * (1 + num_drafts), SamplingParams())
        take = self._taker(batch, num_drafts, num_steps)
        with torch.inference_mode():
            given = (runner.model, runner.caches, runner.rows, None)
            step = DraftStep(*given, DraftSize(batch, num_drafts), runner.deterministic)
            run: Callable[[], object] = partial(step.run, "greedy")

            def launch() -> None:
                take()
                step.load(decoding.rows(1 + num_drafts))
                run()

            launch()  # compiles kernels, if no graph has this size
            if is_on_gpu(self.engine):
                graph, _ = capture(partial(step.run, "greedy"), torch.cuda.graph_pool_handle())
                run = graph.replay
            for _ in range(self.warmup):
                launch()
            if is_on_gpu(self.engine):
                seconds = time_chain(launch, self.repeats)
            else:
                seconds = time_each(self.engine, launch, 0, self.repeats)
        decoding.release()
        return statistics.median(seconds)


NUM_ROWS, NUM_TOKENS, PROMPT_TOKENS = 4, 24, 100
# How much further than a plain reply's tokens, in units of a random token's distance.
MOST_FURTHER = 0.1

Replies = dict[str, tuple[int, ...]]


class ReplyDrafter:
    """Drafts the reply of plain decoding, as long as the reply is the same: always correct."""

    is_costly = False

    def __init__(self, replies: Replies) -> None:
        self.replies = replies

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        said = tuple(sequence.tokens[sequence.num_prompt_tokens :])
        known = self.replies[sequence.id]
        return known[len(said) : len(said) + most] if known[: len(said)] == said else ()

    def end(self, sequence: Sequence) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Found:
    """How replies of one kind compare with plain ones."""

    kind: str
    num_same: int  # tokens before the first that differs from the plain reply
    distance: float  # of a token's logprob from the likeliest's, relative to a random token's
    drafted: int = 0
    accepted: int = 0

    def __str__(self) -> str:
        drafts = f", {self.accepted} of {self.drafted} drafts right" if self.drafted else ""
        return f"{self.kind}: {self.num_same} tokens the same, distance {self.distance:.3f}{drafts}"


def check_replies(engine: LogitsEngine) -> list[Found]:
    """Compares plain replies with those with the head's drafts, and with correct drafts (those of
    the plain reply). Raises an error if one is wrong.

    With `--deterministic`, results must not depend on the step, so tokens are compared one by one.
    Otherwise, steps of several tokens round products differently, and a router with random weights
    flips at the next near tie: after a few tokens, two correct replies differ. So each is judged
    on its own: a prefill of the same text scores its tokens, which must be about as likely as
    those of a plain reply. Tokens from a wrong state would be as unlikely as random ones.
    """
    speculator = engine.engine.policy.speculator
    pace, most, drafter = speculator.pace, speculator.most_drafts, speculator.drafter
    speculator.pace, speculator.most_drafts = None, lambda _: 0
    found = []
    try:
        plain = _replies(engine)
        found.append(Found("plain", NUM_ROWS * NUM_TOKENS, _distance(engine, plain)))
        speculator.most_drafts = most
        for kind in ("the head's drafts", "right drafts"):
            if kind == "right drafts":
                speculator.drafter = ReplyDrafter(plain)
            before = speculator.stats()
            replies = _replies(engine)
            counts = [_total(stats) for stats in (before, speculator.stats())]
            drafted, accepted = (after - first for first, after in zip(*counts))
            speculator.most_drafts = lambda _: 0  # scored without drafts
            distance = _distance(engine, replies)
            speculator.most_drafts = most
            same = sum(_num_same(plain[id], replies[id]) for id in plain)
            found.append(Found(kind, same, distance, drafted, accepted))
            _judge(engine, found[0], found[-1])
    finally:
        speculator.pace, speculator.most_drafts, speculator.drafter = pace, most, drafter
    return found


def _judge(engine: LogitsEngine, plain: Found, found: Found) -> None:
    is_exact = engine.engine.runner.deterministic
    if is_exact and found.num_same < plain.num_same:
        why = (
            f"Only {found.num_same} of {plain.num_same} tokens are the same; with --deterministic, "
            "all must be."
        )
    elif not found.distance <= plain.distance + MOST_FURTHER:
        why = (
            f"Its tokens are {found.distance:.1%} as far from the likeliest as random tokens; "
            f"those of a plain reply, {plain.distance:.1%}."
        )
    else:
        return
    raise PenstockError(
        f"A reply with {found.kind} differs from that of plain decoding",
        why,
        "This is a bug. Times of wrong results are worthless, so nothing was timed.",
    )


def _num_same(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    pairs = enumerate(zip(one, other, strict=True))
    return next((place for place, (a, b) in pairs if a != b), len(one))


def _total(stats: Any) -> tuple[int, int]:
    drafted = sum(count.num_drafted for count in stats.counts)
    return drafted, sum(count.num_accepted for count in stats.counts)


def _prompts(engine: LogitsEngine) -> dict[str, tuple[int, ...]]:
    prompts = random_prompts(engine, NUM_ROWS, PROMPT_TOKENS)
    return {
        f"check-{row}": tuple(prompt[: PROMPT_TOKENS - 9 * row].tolist())
        for row, prompt in enumerate(prompts)
    }


def _replies(engine: LogitsEngine) -> Replies:
    inner = engine.engine
    sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    for id, prompt in _prompts(engine).items():
        inner.submit(Request(id=id, token_ids=prompt, sampling=sampling))
    said: dict[str, list[int]] = {}
    while inner.has_work:
        for delta in inner.step():
            said.setdefault(delta.request_id, []).extend(delta.token_ids)
    return {id: tuple(tokens) for id, tokens in said.items()}


def _distance(engine: LogitsEngine, replies: Replies) -> float:
    """The mean distance (in logprobs) between a reply's tokens and the likeliest tokens at their
    positions, relative to that of the prompts' tokens, which are random."""
    inner, prompts = engine.engine, _prompts(engine)
    sampling = SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=1)
    for id, reply in replies.items():
        inner.submit(Request(id=id, token_ids=(*prompts[id], *reply), sampling=sampling))
    gaps: dict[str, list[float]] = {}
    while inner.has_work:
        for delta in inner.step():
            if delta.prompt_scores is not None:
                scores = delta.prompt_scores.unpack()
                new = [one.top[0][1] - one.logprob for one in scores]
                gaps.setdefault(delta.request_id, []).extend(new)
    blind, said = [], []
    for id, prompt in prompts.items():
        blind += gaps[id][: len(prompt) - 1]
        said += gaps[id][len(prompt) - 1 :]
    return statistics.mean(said) / max(statistics.mean(blind), 1e-9)
