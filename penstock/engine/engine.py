"""One engine: a model, its memory, a scheduler and a runner, driven one step at a time.

`step()` is the whole loop: plan, launch, and take in the results, of this step or, when the device works
behind the host's back, of the one before. The engine knows token ids; text is somebody else's business.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from penstock.cache.manager import Cache
from penstock.config import EngineConfig
from penstock.engine.pools import GB, PoolSizes, size_pools
from penstock.engine.rows import RowTable
from penstock.engine.runner import PendingStep, Runner
from penstock.engine.scheduler import Scheduler
from penstock.engine.storage import allocate_caches
from penstock.errors import ConfigError, RequestError
from penstock.models.source import ModelSource, find_model
from penstock.progress import OnPhase, Phase, timed
from penstock.types import EngineInfo, EngineStats, Request, TokenDelta
from penstock.weights.load import load_model


class Engine:
    def __init__(
        self, model: Any, config: EngineConfig, name: str, on_phase: OnPhase = lambda _: None
    ) -> None:
        """Takes a model whose weights are in place and the memory its cache may use."""
        device = model.device
        with timed("cache", on_phase) as report:
            pools = _size_pools(model, config, device)
            report(Phase("cache", pools.describe(config.page_size)))
            caches = allocate_caches(
                model.cache_specs(),
                num_pages=pools.num_pages,
                page_size=config.page_size,
                num_slots=pools.num_slots,
                dtype=model.dtype,
                device=device,
            )
        rows = RowTable(
            max_rows=pools.max_rows,
            max_pages=-(-pools.max_model_len // config.page_size),
            page_size=config.page_size,
            vocab_size=model.vocab_size,
            device=device,
        )
        self.cache = Cache(
            page_size=config.page_size,
            num_pages=pools.num_pages,
            num_slots=pools.num_slots,
            max_checkpoints=pools.max_checkpoints,
            prefix_cache=config.prefix_cache,
        )
        self.runner = Runner(model, caches, rows, config.deterministic)
        max_step_tokens = config.max_step_tokens or (8192 if device.type == "cuda" else 512)
        if device.type == "cuda" and config.graphs is not False:
            with timed("graphs", on_phase) as report:
                self.runner.capture(max_step_tokens, report)
        self.scheduler = Scheduler(
            self.cache,
            max_rows=pools.max_rows,
            max_step_tokens=max_step_tokens,
            mixed_step_tokens=config.mixed_step_tokens or (1024 if device.type == "cuda" else None),
            max_model_len=pools.max_model_len,
        )
        self.info = EngineInfo(
            model_name=name,
            device=str(device),
            dtype=str(model.dtype).removeprefix("torch."),
            max_model_len=pools.max_model_len,
            vocab_size=model.vocab_size,
            max_rows=pools.max_rows,
            page_size=config.page_size,
            num_pages=pools.num_pages,
            num_slots=pools.num_slots,
            cache_bytes=pools.num_bytes,
            weight_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        )
        self._overlap = device.type == "cuda" if config.overlap is None else config.overlap
        self._pending: PendingStep | None = None
        self._news: list[TokenDelta] = []

    @classmethod
    def from_config(cls, config: EngineConfig, on_phase: OnPhase = lambda _: None) -> Engine:
        source = find_model(config.model)
        return cls.from_source(source, config, on_phase)

    @classmethod
    def from_source(
        cls, source: ModelSource, config: EngineConfig, on_phase: OnPhase = lambda _: None
    ) -> Engine:
        with timed("weights", on_phase) as report:
            model = load_model(
                source,
                device=pick_device(config.device),
                dtype=config.dtype,
                random_weights=config.random_weights,
                seed=config.weights_seed,
                on_phase=report,
            )
        return cls(model, config, source.name, on_phase)

    def submit(self, request: Request) -> None:
        """Refuses what would end the engine for everybody: the device indexes with these ids unchecked."""
        check_token_ids("prompt", request.token_ids, self.info.vocab_size)
        check_token_ids("logit_bias", request.sampling.logit_bias, self.info.vocab_size)
        check_token_ids("stop_token_ids", request.end_token_ids, self.info.vocab_size)
        self.scheduler.submit(request)

    def abort(self, request_id: str) -> None:
        """Frees the request's row, pages and slot; its last delta says "abort"."""
        delta = self.scheduler.abort(request_id)
        if delta is not None:
            self._news.append(delta)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._pending is not None or bool(self._news)

    def step(self) -> list[TokenDelta]:
        plan = self.scheduler.plan()
        finished = self.runner.launch(plan) if plan is not None else None
        if self._overlap:
            finished, self._pending = self._pending, finished
        news, self._news = self._news, []
        if finished is not None:
            news += self.scheduler.commit(finished.wait())
        return news

    def stats(self) -> EngineStats:
        return EngineStats(
            num_waiting=self.scheduler.num_waiting,
            num_running=self.scheduler.num_running,
            num_free_pages=self.cache.num_free_pages,
            num_pages=self.info.num_pages,
            num_free_slots=self.cache.num_free_slots,
            num_slots=self.info.num_slots,
            num_preemptions=self.scheduler.num_preemptions,
            prefix=dict(self.cache.counters),
        )


def check_token_ids(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise RequestError(
            f"{name} has the token id {wrong}", f"The vocabulary has {vocab_size} tokens.", param=name
        )


def pick_device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f"The device {name!r} is not there",
            f"torch {torch.__version__} sees no CUDA device.",
            "Use --device cpu, or install a CUDA build of torch and a driver.",
        )
    try:
        torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"The device {name!r} does not exist", "", "Use auto, cpu, cuda or cuda:N."
        ) from error
    return name


def _size_pools(model: Any, config: EngineConfig, device: torch.device) -> PoolSizes:
    if config.memory_gb is not None:
        budget = int(config.memory_gb * GB)
    elif device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        budget = int(free * 0.9)
    else:
        budget = int(GB)
    return size_pools(
        model.cache_specs(),
        budget_bytes=budget,
        element_bytes=model.dtype.itemsize,
        page_size=config.page_size,
        max_rows=config.max_rows,
        max_model_len=config.max_model_len,
        max_position=model.max_position,
        prefix_cache=config.prefix_cache,
        checkpoint_bytes=None if config.checkpoint_gb is None else int(config.checkpoint_gb * GB),
    )
