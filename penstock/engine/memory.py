"""The memory plan of a device, made once at start from the measured peak of the largest steps.

On a GPU a dry run launches these steps on a scratch cache, before the real one is allocated. It
compiles their kernels and measures the peak memory of steps. CUDA graphs and a reserve are
subtracted as well; pages and slots get the rest:

    [ weights | libraries, kernels | graphs | the largest step | reserve | slots | pages )
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from penstock.config import EngineConfig
from penstock.engine.device_cache import cache_specs, find_kv_dtype, journal_bytes
from penstock.engine.dry_run import DryRun, free_bytes
from penstock.engine.pools import GB, PoolSizes, size_pools
from penstock.engine.runner import Runner
from penstock.errors import CapacityError
from penstock.ops.weight import bytes_of
from penstock.parallel.ranks import Ranks
from penstock.progress import OnPhase, Phase, timed

# By GB of GPU memory (at least): tokens in a step of one request, and in a step of several.
STEP_TOKENS = ((80, 32768, 16384), (40, 16384, 16384), (0, 4096, 4096))
CPU_STEP_TOKENS = 512

# A step takes at most this fraction of the memory left by the weights, if a smaller step is
# possible.
STEP_SHARE = 8
# Of the memory left by the weights: rows and contexts are sized for this much, and will fit.
DRAFT_SHARE = 0.75
RESERVE_SHARE = 0.02  # of the memory left by the weights: rounding, fragmentation, other processes
LEAST_RESERVE_BYTES = 256 * 1024**2


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How many bytes of a device's memory each use gets."""

    weight_bytes: int
    pools: PoolSizes
    page_size: int
    max_step_tokens: int
    shared_step_tokens: int  # in a step of several requests
    step_bytes: int = 0  # the largest step, with every sampling option
    graph_bytes: int = 0
    reserve_bytes: int = 0
    lane_bytes: int = 0  # buffers for experts in RAM, for prefill
    kv_dtype: str = "auto"
    asked_rows: int | None = None

    @property
    def uses(self) -> list[tuple[str, int, str]]:
        """Name, bytes and capacity of each use."""
        pools = self.pools
        slots = f"{max(pools.num_slots - 1, 0):,}; {pools.max_checkpoints:,} may be checkpoints"
        num_pages = max(pools.num_pages - 1, 0)
        kept_in = "" if self.kv_dtype == "auto" else f", in {self.kv_dtype}"
        uses = [
            ("weights", self.weight_bytes, ""),
            ("staging", self.lane_bytes, "two layers of experts at a time, for prefill"),
            ("state slots", pools.num_slots * pools.slot_bytes, slots),
            (
                "KV pages",
                pools.num_pages * pools.page_bytes,
                f"{num_pages * self.page_size:,} tokens in {num_pages:,}{kept_in}",
            ),
            ("largest step", self.step_bytes, f"{self.max_step_tokens:,} tokens"),
            ("graphs", self.graph_bytes, ""),
            ("reserve", self.reserve_bytes, ""),
        ]
        return [use for use in uses if use[1]]

    def __str__(self) -> str:
        """A headline and a table, for the start-up log."""
        pools = self.pools
        headline = f"{pools.max_rows} requests of up to {pools.max_model_len:,} tokens"
        if (self.asked_rows or 0) > pools.max_rows:
            headline += f" (memory is too small for --max-rows {self.asked_rows})"
        lines = [headline]
        lines += [
            f"{name:<12} {_amount(num_bytes):>11}  {holds}".rstrip()
            for name, num_bytes, holds in self.uses
        ]
        return "\n".join(lines)


def _amount(num_bytes: int) -> str:
    return f"{num_bytes / GB:.2f} GB" if num_bytes >= GB / 10 else f"{num_bytes / 1e6:.1f} MB"


def build_runner(
    model: Any, config: EngineConfig, name: str, on_phase: OnPhase
) -> tuple[MemoryPlan, Runner]:
    """The runner for a loaded model, with caches allocated and graphs captured."""
    device = model.device
    with timed("cache", on_phase) as report:
        plan, warmed = plan_memory(model, config, name, report)
        report(Phase("cache", str(plan)))
    runner = Runner.for_pools(model, config, plan.pools)
    if device.type != "cuda":
        return plan, runner
    if config.graphs is not False:
        with timed("graphs", on_phase) as report:
            if plan.pools.shapes != warmed.shapes:
                runner.warm_up(plan.max_step_tokens)
            runner.capture(plan.max_step_tokens, report)
    num_missing = model.ranks.most(plan.step_bytes - free_bytes(device), device)
    if num_missing > 0:
        fitting_gb = max(plan.pools.num_bytes - num_missing - plan.reserve_bytes, 0) / GB
        raise CapacityError(
            f"The cache of {name} leaves too little memory on {device}",
            f"A step needs {plan.step_bytes / GB:.2f} GB, {num_missing / GB:.2f} GB more than is "
            "free.",
            f"Free memory on the GPU, or set --memory-gb {fitting_gb:.2f}.",
        )
    return plan, runner


def plan_memory(
    model: Any, config: EngineConfig, name: str, on_phase: OnPhase
) -> tuple[MemoryPlan, PoolSizes]:
    """The plan, and the pools whose shapes the kernels have been compiled for."""
    device = model.device
    if device.type != "cuda":
        num_tokens = config.max_step_tokens or CPU_STEP_TOKENS
        pools = _size(model, config, _cpu_budget(config))
        plan = MemoryPlan(
            bytes_of(model),
            pools,
            config.page_size,
            num_tokens,
            num_tokens,
            kv_dtype=config.kv_dtype,
            asked_rows=config.max_rows,
        )
        return plan, pools
    ranks: Ranks = model.ranks  # all plan with the smallest memory of any rank
    free_at_first = ranks.least(_usable_bytes(config, device), device)
    draft = _draft_pools(model, config, name, free_at_first)
    on_phase(Phase("cache", "compiling kernels"))
    most, shared = _step_tokens(config, device)
    limit = free_at_first // STEP_SHARE if config.max_step_tokens is None else free_at_first
    dry_run = DryRun(model, config, draft)
    step = dry_run.largest_step(most, limit)
    if step is None:
        raise _too_little_memory(name, device, free_at_first)
    graph_bytes = dry_run.graph_bytes(step.num_tokens) if config.graphs is not False else 0
    del dry_run
    free = ranks.least(_usable_bytes(config, device), device)
    reserve = max(int(RESERVE_SHARE * free), LEAST_RESERVE_BYTES)
    left = free - step.num_bytes - graph_bytes - reserve
    budget = (
        left if config.memory_gb is None else _given_budget(config.memory_gb, name, device, left)
    )
    try:
        pools = _size(model, config, budget, draft.max_rows)
    except CapacityError as error:
        if config.memory_gb is not None or config.max_model_len is not None:
            raise
        raise _too_little_memory(name, device, free_at_first, free_at_first - budget) from error
    plan = MemoryPlan(
        weight_bytes=bytes_of(model),
        pools=pools,
        page_size=config.page_size,
        max_step_tokens=step.num_tokens,
        shared_step_tokens=min(step.num_tokens, shared),
        step_bytes=step.num_bytes,
        graph_bytes=graph_bytes,
        reserve_bytes=reserve,
        lane_bytes=_lane_bytes(model),
        kv_dtype=config.kv_dtype,
        asked_rows=config.max_rows,
    )
    return plan, draft


def _lane_bytes(model: Any) -> int:
    lanes = getattr(getattr(model, "expert_store", None), "lanes", None)
    return 0 if lanes is None else int(lanes.num_bytes)


def first_pools(model: Any, config: EngineConfig, name: str, more_bytes: int = 0) -> PoolSizes:
    """Pools that fit in memory, before steps are measured; `more_bytes`: as if the weights were
    this much smaller.
    """
    if model.device.type != "cuda":
        return _size(model, config, _cpu_budget(config))
    usable = _usable_bytes(config, model.device) + more_bytes
    return _draft_pools(model, config, name, model.ranks.least(usable, model.device))


def _cpu_budget(config: EngineConfig) -> int:
    return int(GB if config.memory_gb is None else config.memory_gb * GB)


def estimate_memory(
    model: Any, config: EngineConfig, weight_bytes: int, free: int, *, is_gpu: bool
) -> MemoryPlan:
    """For a model that is not loaded: steps and graphs are not measured, so on a GPU the reserve
    covers them too.
    """
    left = free - weight_bytes
    budget = int(DRAFT_SHARE * left) if is_gpu else int(GB)
    most = STEP_TOKENS[-1][1] if is_gpu else CPU_STEP_TOKENS
    return MemoryPlan(
        weight_bytes=weight_bytes,
        pools=_size(model, config, budget, config.max_rows or _most_rows(is_gpu), is_gpu=is_gpu),
        page_size=config.page_size,
        max_step_tokens=most,
        shared_step_tokens=most,
        reserve_bytes=max(left - budget, 0) if is_gpu else 0,
        kv_dtype=config.kv_dtype,
        asked_rows=config.max_rows,
    )


def _most_rows(is_gpu: bool) -> int:
    return 256 if is_gpu else 64


def _usable_bytes(config: EngineConfig, device: torch.device) -> int:
    """Free memory, within `memory_share`. The share excludes the CUDA context and other
    processes.
    """
    free = free_bytes(device)
    if config.memory_share is None:
        return free
    total = torch.cuda.get_device_properties(device).total_memory
    allowed = int(config.memory_share * total) - torch.cuda.memory_reserved(device)
    return max(min(free, allowed), 0)


def _draft_pools(model: Any, config: EngineConfig, name: str, free: int) -> PoolSizes:
    """The number of rows and the context length, which kernels and graphs are compiled for."""
    budget = int(DRAFT_SHARE * free) if config.memory_gb is None else int(config.memory_gb * GB)
    try:
        return _size(model, config, budget)
    except CapacityError as error:
        if config.memory_gb is not None:
            raise
        if config.max_model_len is None:
            raise _too_little_memory(name, model.device, free) from error
        # Whether this context fits is known only after the steps are measured.
        draft = _draft_pools(model, dataclasses.replace(config, max_model_len=None), name, free)
        return dataclasses.replace(draft, max_model_len=config.max_model_len)


def _size(
    model: Any,
    config: EngineConfig,
    budget: int,
    max_rows: int | None = None,
    *,
    is_gpu: bool | None = None,  # None: where the model is
) -> PoolSizes:
    specs = cache_specs(model, config, is_gpu=is_gpu)
    most_rows = max_rows or config.max_rows or _most_rows(model.device.type == "cuda")

    def size(budget: int, max_rows: int) -> PoolSizes:
        return size_pools(
            specs,
            budget_bytes=budget,
            element_bytes=model.dtype.itemsize,
            kv_bytes=find_kv_dtype(config.kv_dtype, model.dtype).itemsize,
            state_bytes=config.state_bytes,
            page_size=config.page_size,
            max_rows=max_rows,
            are_rows_asked_for=config.max_rows is not None,
            max_model_len=config.max_model_len,
            max_position=model.max_position,
            prefix_cache=config.prefix_cache,
            checkpoint_bytes=None
            if config.checkpoint_gb is None
            else int(config.checkpoint_gb * GB),
        )

    pools = size(budget, most_rows)
    journal = journal_bytes(specs, config.speculation.num_drafts)
    if not journal:
        return pools
    # Rows that have no slot need no journal.
    return size(budget - (pools.max_rows + 1) * journal, pools.max_rows)


def _step_tokens(config: EngineConfig, device: torch.device) -> tuple[int, int]:
    """The most tokens in a step of one request, and in a step of several. Long prompts run best in
    large steps; with many short ones, the first should not wait for the last.
    """
    if config.max_step_tokens is not None:
        return config.max_step_tokens, config.max_step_tokens
    memory = torch.cuda.get_device_properties(device).total_memory
    return next((most, shared) for least_gb, most, shared in STEP_TOKENS if memory >= least_gb * GB)


def _given_budget(memory_gb: float, name: str, device: torch.device, available: int) -> int:
    if memory_gb * GB > available:
        raise CapacityError(
            f"--memory-gb {memory_gb:g} is more than {device} has for the cache of {name}",
            f"{max(available, 0) / GB:.2f} GB are left after weights, graphs and the largest step.",
            "Set less, or omit it: then the cache takes what is left.",
        )
    return int(memory_gb * GB)


def _too_little_memory(
    name: str, device: torch.device, free: int, num_needed: int = 0
) -> CapacityError:
    needed = f"; a step and graphs need {num_needed / GB:.2f} GB of it" if num_needed else ""
    return CapacityError(
        f"{name} fits on {device}, but leaves too little memory to run it",
        f"{free / GB:.2f} GB are left after the weights{needed}.",
        "Free memory on the GPU, lower --max-rows or --max-step-tokens, or use a smaller model.",
    )
