"""The memory plan of a device, made once at start from the measured peak of the largest steps.

On a GPU a dry run launches these steps on a scratch cache, before the real one exists. It compiles
their kernels, and its peak is what steps need. CUDA graphs and a reserve are subtracted as well;
pages and slots get the rest:

    [ weights | libraries, kernels | graphs | the largest step | reserve | slots | pages )
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from penstock.config import EngineConfig
from penstock.engine.device_cache import find_kv_dtype
from penstock.engine.dry_run import DryRun, free_bytes
from penstock.engine.pools import GB, PoolSizes, size_pools
from penstock.engine.runner import Runner
from penstock.errors import CapacityError
from penstock.progress import OnPhase, Phase, timed

# GPUs of at least so many GB: tokens in a step of one request, and in a step of several.
STEP_TOKENS = ((80, 32768, 16384), (40, 16384, 16384), (0, 4096, 4096))
CPU_STEP_TOKENS = 512

# A step takes at most this part of the memory beside the weights, if a smaller step is possible.
STEP_SHARE = 8
# Of the memory beside the weights: rows and contexts are sized for this much, and will fit.
DRAFT_SHARE = 0.75
RESERVE_SHARE = 0.02  # of the memory beside the weights: rounding, fragmentation, other processes
LEAST_RESERVE_BYTES = 256 * 1024**2


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How many bytes of a device each use of its memory gets."""

    pools: PoolSizes
    page_size: int
    max_step_tokens: int
    shared_step_tokens: int  # in a step of several requests
    step_bytes: int = 0  # the largest step, with every sampling option
    graph_bytes: int = 0
    reserve_bytes: int = 0

    def describe(self) -> str:
        parts = [self.pools.describe(self.page_size)]
        uses = {
            f"a step of {self.max_step_tokens:,} tokens": self.step_bytes,
            "graphs": self.graph_bytes,
            "reserve": self.reserve_bytes,
        }
        beside = [
            f"{num_bytes / GB:.2f} GB for {use}" for use, num_bytes in uses.items() if num_bytes
        ]
        if beside:
            parts.append("besides " + ", ".join(beside))
        return "; ".join(parts)


def build_runner(
    model: Any, config: EngineConfig, name: str, on_phase: OnPhase
) -> tuple[MemoryPlan, Runner]:
    """The runner for a model whose weights are loaded, with caches allocated and graphs
    captured.
    """
    device = model.device
    with timed("cache", on_phase) as report:
        plan, warmed = plan_memory(model, config, name, report)
        stored = "" if config.kv_dtype == "auto" else f"; KV in {config.kv_dtype}"
        report(Phase("cache", plan.describe() + stored))
    runner = Runner.for_pools(model, config, plan.pools)
    if device.type != "cuda":
        return plan, runner
    if config.graphs is not False:
        with timed("graphs", on_phase) as report:
            if plan.pools.shapes != warmed.shapes:
                runner.warm_up(plan.max_step_tokens)
            runner.capture(plan.max_step_tokens, report)
    num_missing = plan.step_bytes - free_bytes(device)
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
        budget = GB if config.memory_gb is None else config.memory_gb * GB
        num_tokens = config.max_step_tokens or CPU_STEP_TOKENS
        pools = _size(model, config, int(budget))
        return MemoryPlan(pools, config.page_size, num_tokens, num_tokens), pools
    free_at_first = _usable_bytes(config, device)
    draft = _draft_pools(model, config, name, free_at_first)
    on_phase(Phase("cache", "compiling kernels"))
    most, shared = _step_tokens(config, device)
    limit = free_at_first // STEP_SHARE if config.max_step_tokens is None else free_at_first
    dry_run = DryRun(model, config, draft)
    step = dry_run.largest_step(most, limit)
    if step is None:
        raise _too_tight(name, device, free_at_first)
    graph_bytes = dry_run.graph_bytes(step.num_tokens) if config.graphs is not False else 0
    del dry_run
    free = _usable_bytes(config, device)
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
        raise _too_tight(name, device, free_at_first, free_at_first - budget) from error
    plan = MemoryPlan(
        pools=pools,
        page_size=config.page_size,
        max_step_tokens=step.num_tokens,
        shared_step_tokens=min(step.num_tokens, shared),
        step_bytes=step.num_bytes,
        graph_bytes=graph_bytes,
        reserve_bytes=reserve,
    )
    return plan, draft


def _usable_bytes(config: EngineConfig, device: torch.device) -> int:
    """Free memory, within `memory_share`. The CUDA context and other processes do not count for the
    share."""
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
            raise _too_tight(name, model.device, free) from error
        # Whether so long a context fits is known only after the steps are measured.
        draft = _draft_pools(model, dataclasses.replace(config, max_model_len=None), name, free)
        return dataclasses.replace(draft, max_model_len=config.max_model_len)


def _size(model: Any, config: EngineConfig, budget: int, max_rows: int | None = None) -> PoolSizes:
    return size_pools(
        model.cache_specs(),
        budget_bytes=budget,
        element_bytes=model.dtype.itemsize,
        kv_bytes=find_kv_dtype(config.kv_dtype, model.dtype).itemsize,
        state_bytes=config.state_bytes,
        page_size=config.page_size,
        max_rows=max_rows or config.max_rows or (256 if model.device.type == "cuda" else 64),
        max_model_len=config.max_model_len,
        max_position=model.max_position,
        prefix_cache=config.prefix_cache,
        checkpoint_bytes=None if config.checkpoint_gb is None else int(config.checkpoint_gb * GB),
    )


def _step_tokens(config: EngineConfig, device: torch.device) -> tuple[int, int]:
    """Most tokens of a step of one request, and of a step of several. Long prompts run best in
    large steps; with many short ones, the first should not wait for the last."""
    if config.max_step_tokens is not None:
        return config.max_step_tokens, config.max_step_tokens
    memory = torch.cuda.get_device_properties(device).total_memory
    return next((most, shared) for least_gb, most, shared in STEP_TOKENS if memory >= least_gb * GB)


def _given_budget(memory_gb: float, name: str, device: torch.device, available: int) -> int:
    if memory_gb * GB > available:
        raise CapacityError(
            f"--memory-gb {memory_gb:g} is more than {device} has for the cache of {name}",
            f"{max(available, 0) / GB:.2f} GB are left beside weights, graphs and the largest "
            "step.",
            "Set less, or omit it: then the cache takes what is left.",
        )
    return int(memory_gb * GB)


def _too_tight(name: str, device: torch.device, free: int, num_needed: int = 0) -> CapacityError:
    needed = f"; a step and graphs need {num_needed / GB:.2f} GB of it" if num_needed else ""
    return CapacityError(
        f"{name} fits on {device}, but leaves too little memory to run it",
        f"{free / GB:.2f} GB are free beside the weights{needed}.",
        "Free memory on the GPU, lower --max-rows or --max-step-tokens, or use a smaller model.",
    )
