"""How `penstock bench` measures: checks results, warms up, and reports the median of repeats, their
spread and the floor.

Times of wrong results are worthless. So before anything is timed, decoding is compared with
prefilling, which finds a cache that is read or written at the wrong place. Then each shape is
compared with the references, op by op (`op_check`), which finds a kernel that is wrong for it.

Decode steps are timed from the end of one to the end of the next, as a client would see them: on a
GPU by its own clock, with the host free to run ahead as it does in the engine.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.commands.breakdown import Breakdown, break_down
from penstock.commands.op_check import check_graphs, check_ops, layers_of_each_kind
from penstock.commands.roofline import Roofline
from penstock.config import EngineConfig
from penstock.errors import CapacityError, PenstockError
from penstock.models.source import ModelSource
from penstock.progress import OnPhase, timed
from penstock.types import (
    Admission,
    PageUpdate,
    Request,
    RowPlan,
    SamplingParams,
    Sequence,
    StateSpec,
    StepPlan,
)

if TYPE_CHECKING:
    import torch

    from penstock.engine.engine import Engine
    from penstock.engine.logits_engine import LogitsEngine
    from penstock.engine.pending_step import PendingStep


@dataclass(frozen=True, slots=True)
class Limits:
    """This machine's peak rates, measured with the simplest code."""

    bytes_per_s: float  # of a large copy, read + write
    operations_per_s: float  # of a large matmul in the model's dtype


@dataclass(frozen=True, slots=True)
class Measurement:
    """One shape: the time of every repeat, and the fewest bytes that it moves."""

    batch: int
    context: int
    num_tokens: int  # processed by one repeat
    seconds: tuple[float, ...]
    num_bytes: int
    floor_s: float

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half of the range between the 10th and the 90th percentile, relative to the median."""
        if len(self.seconds) < 2:
            return 0.0
        deciles = statistics.quantiles(self.seconds, n=10, method="inclusive")
        return (deciles[-1] - deciles[0]) / (2 * self.median_s)

    def in_words(self) -> str:
        """For a user who watches, or stops the bench before its table is printed."""
        return (
            f"{self.median_s * 1e3:.3f} ms, {self.num_tokens / self.median_s:,.1f} tok/s, "
            f"{self.floor_s / self.median_s:.1%} of the floor"
        )

    def as_row(self) -> list[str]:
        return [
            str(self.batch),
            f"{self.context:,}",
            f"{self.median_s * 1e3:.3f}",
            f"{self.spread:.1%}",
            f"{self.num_tokens / self.median_s:,.1f}",
            f"{self.num_bytes / self.median_s / 1e9:,.1f}",
            f"{self.floor_s * 1e3:.3f}",
            f"{self.floor_s / self.median_s:.1%}",
        ]

    def as_dict(self) -> dict[str, Any]:
        return {
            "batch": self.batch,
            "context": self.context,
            "tokens": self.num_tokens,
            "ms": round(self.median_s * 1e3, 4),
            "ms_min": round(min(self.seconds) * 1e3, 4),
            "spread": round(self.spread, 4),
            "repeats": len(self.seconds),
            "tok_s": round(self.num_tokens / self.median_s, 2),
            "gb_s": round(self.num_bytes / self.median_s / 1e9, 2),
            "floor_ms": round(self.floor_s * 1e3, 4),
            "of_floor": round(self.floor_s / self.median_s, 4),
        }


COLUMNS = ["batch", "context", "ms", "spread", "tok/s", "GB/s", "floor ms", "of floor"]

# How far the median row's decode may be from a prefill of the same tokens, relative to the size of
# the logits; unrelated logits differ by 1.4. In half precision, random weights and routers that
# flip near ties need this much over all layers: the comparison op by op is the strict one.
TOLERANCES = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.4}
ROUNDED_TOLERANCE = 0.2  # added if prompts are rounded to FP8, and decodes are not
PROFILED_PREFILLS = 3
PROFILED_STEPS = 20
CHECK_TOKENS = 100  # more than one page and no multiple of anything
CHECK_ROWS = 8


@dataclass(frozen=True, slots=True)
class Bench:
    """An engine and the floor that it is measured against."""

    engine: LogitsEngine
    roofline: Roofline
    limits: Limits
    warmup: int
    repeats: int

    def steps(self, batch: int, context: int, sampling: SamplingParams) -> Measurement:
        """Decode steps from `context` tokens on; the context grows by one with each."""
        decoding = Decoding(
            self.engine.engine, batch, context, self.warmup + self.repeats, sampling
        )
        for _ in range(self.warmup):
            pending = decoding.step()
        pending.wait()
        seconds = time_steps(self.engine, decoding.step, self.repeats)
        decoding.release()
        num_bytes = self.roofline.decode_bytes(batch, context + self.warmup + self.repeats // 2)
        return Measurement(
            batch, context, batch, seconds, num_bytes, num_bytes / self.limits.bytes_per_s
        )

    def check_decodes(self, batch: int, context: int) -> dict[str, Any]:
        """Checks a decode step of the shape: ops against references and, on a GPU, its graph."""
        engine, shape = self.engine.engine, f"{batch} x {context:,}"
        dtype = engine.info.dtype
        decoding = Decoding(engine, batch, context, 1, SamplingParams())
        plan = StepPlan(1, decoding.rows())
        runner = layers_of_each_kind(engine.runner)
        found = check_ops(dtype, shape, lambda: runner.logits(plan))
        report = {"batch": batch, "context": context, **found.as_dict()}
        if engine.runner.graphs is not None:
            reset = partial(fill_with_noise, engine, seed=0)
            report["graph_error"] = round(check_graphs(dtype, shape, engine.runner, plan, reset), 6)
        decoding.release()
        return report

    def check_prefills(self, batch: int, context: int) -> dict[str, Any]:
        """Checks one prefill step with the shape's prompts, truncated to what fits one step."""
        engine, shape = self.engine.engine, f"{batch} x {context:,}"
        budget = (
            engine.policy.scheduler.max_step_tokens
            if batch == 1
            else engine.policy.scheduler.shared_step_tokens
        )
        prompts = random_prompts(self.engine, batch, max(1, min(context, budget // batch)))
        ids, whole = list(range(batch)), engine.runner
        engine.runner = layers_of_each_kind(whole)
        try:
            found = check_ops(engine.info.dtype, shape, lambda: self.engine.prefill(ids, prompts))
        finally:
            engine.runner = whole
        self.engine.remove(ids)
        return {"batch": batch, "context": context, **found.as_dict()}

    def step_breakdown(self, batch: int, context: int, sampling: SamplingParams) -> Breakdown:
        decoding = Decoding(self.engine.engine, batch, context, PROFILED_STEPS, sampling)
        found = break_down(decoding.step, PROFILED_STEPS)
        decoding.release()
        return found

    def prefill_breakdown(self, batch: int, context: int) -> Breakdown:
        ids, prompts = list(range(batch)), random_prompts(self.engine, batch, context)
        found = break_down(lambda: self.engine.prefill(ids, prompts), PROFILED_PREFILLS)
        self.engine.remove(ids)
        return found

    def prefills(self, batch: int, context: int) -> Measurement:
        """Whole prompts without a cache: each repeat replaces the sequences of the one before."""
        ids, prompts = list(range(batch)), random_prompts(self.engine, batch, context)
        seconds = time_each(
            self.engine, lambda: self.engine.prefill(ids, prompts), self.warmup, self.repeats
        )
        self.engine.remove(ids)
        num_bytes = self.roofline.prefill_bytes(batch, context)
        compute_s = self.roofline.prefill_operations(batch, context) / self.limits.operations_per_s
        floor_s = max(num_bytes / self.limits.bytes_per_s, compute_s)
        return Measurement(batch, context, batch * context, seconds, num_bytes, floor_s)

    def whole_engine(
        self, batch: int, context: int, sampling: SamplingParams
    ) -> tuple[Measurement, Breakdown | None]:
        """Decode steps through `Engine.step`, including the scheduler; on a GPU, also a breakdown
        by kernel."""
        engine = self.engine.engine
        num_steps = self.warmup + self.repeats + PROFILED_STEPS
        # The first request to decode must not end before the last one has been measured.
        engine.policy.scheduler.mixed_step_tokens = engine.policy.scheduler.shared_step_tokens
        sampling = dataclasses.replace(sampling, max_tokens=num_steps + batch + 2, ignore_eos=True)
        for row, prompt in enumerate(random_prompts(self.engine, batch, context)):
            engine.submit(
                Request(id=f"bench-{row}", token_ids=tuple(prompt.tolist()), sampling=sampling)
            )
        while engine.policy.scheduler.num_decoding < batch:
            engine.step()
        for _ in range(self.warmup):
            engine.step()
        ends = [time.perf_counter()]
        for _ in range(self.repeats):
            engine.step()
            ends.append(time.perf_counter())
        seconds = tuple(after - before for before, after in itertools.pairwise(ends))
        found = break_down(engine.step, PROFILED_STEPS) if is_on_gpu(self.engine) else None
        assert engine.policy.scheduler.num_decoding == batch, "a reply ended while it was measured"
        for row in range(batch):
            engine.abort(f"bench-{row}")
        while engine.has_work:
            engine.step()
        num_bytes = self.roofline.decode_bytes(batch, context + num_steps // 2)
        floor_s = num_bytes / self.limits.bytes_per_s
        return Measurement(batch, context, batch, seconds, num_bytes, floor_s), found


class Decoding:
    """Requests in the middle of their replies, with a context that was never computed: the cache
    is filled with noise, which is enough to time a step, because the rows differ. Equal rows would
    choose the same experts, and read a fraction of the weights."""

    def __init__(
        self, engine: Engine, batch: int, context: int, num_steps: int, sampling: SamplingParams
    ) -> None:
        self.engine = engine
        self._sequences = [
            Sequence.start(Request(id=f"bench-{row}", token_ids=(0,) * context), arrival=row)
            for row in range(batch)
        ]
        updates = []
        for row, sequence in enumerate(self._sequences):
            sequence.row = row
            is_admitted = engine.policy.cache.admit(sequence)
            assert is_admitted, "the engine was sized for this"
            pages = engine.policy.cache.reserve(sequence, context + num_steps)
            assert pages is not None
            sequence.num_computed = context
            updates.append(PageUpdate(row, 0, tuple(pages)))
        admissions = [
            Admission(row, sampling, seed=row, num_prompt_tokens=context) for row in range(batch)
        ]
        table = engine.runner.rows
        table.update(StepPlan(0, (), tuple(admissions), tuple(updates)))
        tokens = [row * 7919 % num_known_tokens(engine) for row in range(batch)]
        table.set_last_tokens(range(batch), tokens, [context + 1] * batch)
        fill_with_noise(engine)
        self._num_steps = 0

    def step(self, max_tokens: int = 1) -> PendingStep:
        self._num_steps += 1
        return self.engine.runner.launch(StepPlan(self._num_steps, self.rows(max_tokens)))

    def rows(self, max_tokens: int = 1) -> tuple[RowPlan, ...]:
        """The same in every step: the device counts positions. `max_tokens` > 1: with drafts."""
        return tuple(
            RowPlan.decode(
                row, slot=one.slot or 0, initial_slot=one.slot or 0, max_tokens=max_tokens
            )
            for row, one in enumerate(self._sequences)
        )

    def release(self) -> None:
        for sequence in self._sequences:
            self.engine.policy.cache.release(sequence)


def fill_with_noise(engine: Engine, seed: int = 0) -> None:
    import torch

    generator = torch.Generator(engine.runner.rows.device).manual_seed(seed)
    for cache in engine.runner.caches:
        for name in cache.__slots__:
            pool = getattr(cache, name)
            if name == "backlog" and pool is not None:
                pool.counts.zero_()
            if not isinstance(pool, torch.Tensor):  # a journal: these rows replay none of it
                continue
            if pool.dtype.itemsize == 1:  # any E4M3 code except NaN
                pool.view(torch.uint8).random_(256, generator=generator).bitwise_and_(0xF7)
            elif name == "scales":
                pool.fill_(1e-3)
            else:
                pool.normal_(std=0.1, generator=generator)


def load_engine(
    source: ModelSource, config: EngineConfig, phases: OnPhase, *, of_share: bool = False
) -> LogitsEngine:
    """`of_share`: loads one rank of several, without the others."""
    with timed("libraries", phases):
        from penstock.engine.device import select_device
        from penstock.engine.engine import Engine
        from penstock.engine.logits_engine import LogitsEngine
    select_device(config.device)
    return LogitsEngine(
        (Engine.of_share if of_share else Engine.from_source)(source, config, phases)
    )


def roofline_of(engine: LogitsEngine, source: ModelSource, config: EngineConfig) -> Roofline:
    from penstock.engine.device_cache import cache_specs, find_kv_dtype

    model: Any = engine.engine.runner.model
    kv_bytes = find_kv_dtype(config.kv_dtype, model.dtype).itemsize
    num_late = max(
        (spec.num_late for spec in cache_specs(model, config) if isinstance(spec, StateSpec)),
        default=0,
    )
    given = (model.dtype.itemsize, config.state_bytes, kv_bytes, 1 / (1 + num_late))
    return Roofline.of(model, source.config, *given)


def require_room(engine: LogitsEngine, batch: int, num_tokens: int) -> None:
    """Refuses shapes that do not fit: an engine takes fewer rows and pages if memory is short."""
    info = engine.engine.info
    if batch > info.max_rows:
        raise CapacityError(
            f"A batch of {batch} does not fit the cache",
            f"The cache ({info.cache_bytes / 1e9:.2f} GB) has room for {info.max_rows} requests.",
            f"Use --batch {info.max_rows} or less, or raise --memory-gb.",
        )
    # Page 0 is reserved.
    num_needed, num_free = batch * -(-num_tokens // info.page_size), info.num_pages - 1
    if info.num_pages and num_needed > num_free:
        raise CapacityError(
            f"A batch of {batch} with {num_tokens:,} tokens each does not fit the cache",
            f"It needs {num_needed:,} pages of {info.page_size} tokens; {num_free:,} are free.",
            "Lower --batch or --context, or raise --memory-gb.",
        )


def check_decode(engine: LogitsEngine) -> float:
    """The relative difference between decoded rows of unequal lengths and prefills that end with
    the same tokens. Takes the median row, because a router may flip in some rows."""
    import torch

    from penstock.ops.float8 import rounds_prompts

    info = engine.engine.info
    pages_a_row = -(-(CHECK_TOKENS + 1) // info.page_size)
    num_rows = min(CHECK_ROWS, info.max_rows)
    if info.num_pages:
        num_rows = max(1, min(num_rows, (info.num_pages - 1) // pages_a_row))
    prompts = random_prompts(engine, num_rows, CHECK_TOKENS + 1)
    prompts = [prompt[: CHECK_TOKENS + 1 - 9 * row] for row, prompt in enumerate(prompts)]
    ids = list(range(num_rows))
    expected = engine.prefill(ids, prompts)
    engine.prefill(ids, [prompt[:-1] for prompt in prompts])
    decoded = engine.decode(ids, torch.stack([prompt[-1] for prompt in prompts]))
    engine.remove(ids)
    differences = (decoded - expected).norm(dim=1) / expected.norm(dim=1)
    difference, dtype = float(differences.nan_to_num(nan=torch.inf).median()), info.dtype
    is_rounded = rounds_prompts(engine.engine.runner.model)  # type: ignore[arg-type]
    tolerance = TOLERANCES[dtype] + (ROUNDED_TOLERANCE if is_rounded else 0.0)
    if not difference <= tolerance:
        raise PenstockError(
            "Decoding and prefilling the same tokens give different logits",
            f"They differ by {difference:.2%} of their size; the limit is {tolerance:.1%} "
            f"({dtype}).",
            "This is a bug. Times of wrong results are worthless, so nothing was timed.",
        )
    return difference


def measure_limits(engine: LogitsEngine) -> Limits:
    """The two rates of the floor, on the device and in the dtype that will be timed."""
    import torch

    device, on_gpu = engine.engine.info.device, is_on_gpu(engine)
    source = torch.ones((2**30 if on_gpu else 2**26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = min(time_each(engine, lambda: target.copy_(source), 3, 10))
    size = 8192 if on_gpu else 512
    matrix = torch.ones(size, size, dtype=getattr(torch, engine.engine.info.dtype), device=device)
    matmul_s = min(time_each(engine, lambda: matrix @ matrix, 3, 5))
    return Limits(2 * source.numel() / copy_s, 2 * size**3 / matmul_s)


def time_steps(
    engine: LogitsEngine, step: Callable[[], PendingStep], repeats: int
) -> tuple[float, ...]:
    if is_on_gpu(engine):
        return over_cycles(time_chain(step, repeats))
    return time_each(engine, lambda: step().wait(), 0, repeats)


def over_cycles(seconds: tuple[float, ...]) -> tuple[float, ...]:
    """Means of consecutive decode steps, as many as there are until every state is written once:
    with few rows, steps that write states take longer than others.
    """
    from penstock.ops import MOST_LATE

    count = min(1 + MOST_LATE, len(seconds))
    return tuple(
        statistics.fmean(seconds[first : first + count])
        for first in range(len(seconds) - count + 1)
    )


def time_chain(launch: Callable[[], object], repeats: int) -> tuple[float, ...]:
    """Seconds from the end of each launch to the end of the next, by the GPU's clock."""
    import torch

    ends = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    ends[0].record()
    for end in ends[1:]:
        launch()
        end.record()
    torch.cuda.synchronize()
    return tuple(before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(ends))


def time_each(
    engine: LogitsEngine, work: Callable[[], object], warmup: int, repeats: int
) -> tuple[float, ...]:
    """Seconds per repeat, with the device synchronized before and after."""
    synchronize = _synchronizer(engine)
    for _ in range(warmup):
        work()
    seconds = []
    for _ in range(repeats):
        synchronize()
        started = time.perf_counter()
        work()
        synchronize()
        seconds.append(time.perf_counter() - started)
    return tuple(seconds)


def random_prompts(engine: LogitsEngine, batch: int, length: int) -> list[torch.Tensor]:
    import torch

    generator = torch.Generator().manual_seed(0)
    vocab_size = num_known_tokens(engine.engine)
    return [torch.randint(0, vocab_size, (length,), generator=generator) for _ in range(batch)]


def num_known_tokens(engine: Engine) -> int:
    """Tokens of the vocabulary that rank 0 holds. Without the other ranks it embeds theirs as
    zeros, and rows of zeros would all choose the same experts."""
    return engine.info.vocab_size // engine.runner.rows.ranks.size


def is_on_gpu(engine: LogitsEngine) -> bool:
    return engine.engine.info.device.startswith("cuda")


def _synchronizer(engine: LogitsEngine) -> Callable[[], None]:
    import torch

    return torch.cuda.synchronize if is_on_gpu(engine) else lambda: None
