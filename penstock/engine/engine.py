"""One engine: a policy that decides and a runner that computes, driven one step at a time.

`step()` is the whole loop: plan, launch, and commit the results, of this step or, when the device
runs asynchronously, of the previous one. The plan is all that the runner learns. A step with
constrained rows launches its sampling after the previous step's results are in, because its masks
depend on them; the device computes the logits meanwhile. The engine knows token ids only, no text.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from penstock import ops
from penstock.config import EngineConfig
from penstock.engine.device import on_device, pick_device
from penstock.engine.grammar_masks import Constraint, StepMasks
from penstock.engine.memory import MemoryPlan, build_runner
from penstock.engine.policy import Policy
from penstock.engine.runner import PendingStep
from penstock.errors import ConfigError, PenstockError
from penstock.gguf.folder import folder_of
from penstock.layers.packing import pack_weights
from penstock.models.source import ModelSource, find_model
from penstock.offload.load import load_with_experts, without_graphs
from penstock.offload.store import ExpertStore
from penstock.progress import OnPhase, timed
from penstock.types import EngineInfo, EngineStats, Request, SessionInfo, StepPlan, TokenDelta
from penstock.weights.storage_report import Storage

log = logging.getLogger("penstock.engine")


class Engine:
    def __init__(
        self,
        model: Any,
        config: EngineConfig,
        name: str,
        on_phase: OnPhase = lambda _: None,
        tokenizer_file: Path | None = None,  # the tokenizer that grammars are compiled for
    ) -> None:
        """Takes a model whose weights are loaded, and plans the memory for its cache."""
        is_gpu = model.device.type == "cuda"
        self.expert_store: ExpertStore | None = getattr(model, "expert_store", None)
        if self.expert_store is not None:
            config = without_graphs(config)
        check_page_size(config, model.device)
        if not is_gpu and not config.deterministic:
            pack_weights(model, keep=model.head.weight)
        with on_device(model.device):
            memory, self.runner = build_runner(model, config, name, on_phase)
        self.info = _describe(model, name, memory, config)
        new_buffer = self.runner.rows.host_buffer
        self.policy = Policy(config, memory, self.info, tokenizer_file, new_buffer)
        self._overlap = is_gpu if config.overlap is None else config.overlap
        self._pending: PendingStep | None = None
        # Called with the ids of requests before they first run.
        self.on_start: Callable[[list[str]], None] = lambda _: None

    @classmethod
    def from_config(
        cls, config: EngineConfig, on_phase: OnPhase = lambda _: None, tokenizer: str | None = None
    ) -> Engine:
        return cls.from_source(find_model(config.model), config, on_phase, tokenizer)

    @classmethod
    def from_source(
        cls,
        source: ModelSource,
        config: EngineConfig,
        on_phase: OnPhase = lambda _: None,
        tokenizer: str | None = None,  # a folder or a tokenizer.json, if not the model's own
    ) -> Engine:
        device = pick_device(config.device)
        with on_device(torch.device(device)):
            with timed("weights", on_phase) as report:
                model = load_with_experts(source, config, device, report)
            return cls(model, config, source.name, on_phase, _tokenizer_file(tokenizer, source))

    def submit(self, request: Request) -> None:
        self.policy.submit(request)

    def abort(self, request_id: str) -> None:
        """Frees the request's row, pages and slot; its last delta says "abort"."""
        self.policy.abort(request_id)

    def drop(self, request_id: str) -> TokenDelta | None:
        """Aborts without a delta to others: returns the last delta, if the request existed."""
        return self.policy.drop(request_id)

    @property
    def has_work(self) -> bool:
        return self.policy.has_work or self._pending is not None

    def step(self) -> list[TokenDelta]:
        policy = self.policy
        if self._pending is not None and policy.scheduler.holds_planning:
            self._commit_pending()
            return policy.take_deltas()
        plan = policy.plan()
        if policy.scheduler.admitted_ids:
            self.on_start(policy.scheduler.admitted_ids)
        launched = self._launch(plan) if plan is not None else None
        if self._overlap:
            launched, self._pending = self._pending, launched
        if launched is not None:
            policy.commit(launched.wait())
        deltas = policy.take_deltas()
        if plan is None and launched is None and not deltas:
            policy.wait_for_grammar()
        return deltas

    def _launch(self, plan: StepPlan) -> PendingStep:
        constrained = self.policy.constraints.rows_of(plan)
        masks = partial(self._fill_masks, constrained) if constrained else None
        return self.runner.launch(plan, masks)

    def _fill_masks(self, constrained: list[tuple[int, Constraint]]) -> StepMasks:
        """While the device computes the logits that they mask."""
        self._commit_pending()
        return self.policy.fill_masks(constrained)

    def _commit_pending(self) -> None:
        if self._pending is not None:
            self.policy.commit(self._pending.wait())
            self._pending = None

    @torch.inference_mode()
    def warm_up_grammars(self) -> None:
        """Loads the vocabulary before the first constrained request: a large one takes seconds, and
        all requests would wait. If that fails, such a request gets the reason."""
        rows = self.runner.rows
        logits = torch.zeros(1, rows.vocab_size, device=rows.device)
        words = rows.upload([[0] * -(-rows.vocab_size // 32)], torch.int32)
        with on_device(logits.device):
            # Compiles the kernel; banned words need it too.
            ops.mask_logits(logits, rows.upload([0]), words)
        try:
            self.policy.constraints.compiler.load_vocabulary()
        except PenstockError as error:
            log.info("no grammars: %s", error)

    def stats(self) -> EngineStats:
        stats = self.policy.stats()
        if self.expert_store is None:
            return stats
        return dataclasses.replace(stats, experts=self.expert_store.stats())

    def sessions(self) -> list[SessionInfo]:
        return self.policy.cache.sessions.describe()

    def drop_session(self, session_id: str) -> SessionInfo | None:
        """A running request of the session continues, and stores its work for the session again
        when it ends."""
        return self.policy.cache.sessions.drop(session_id)


def _describe(model: Any, name: str, memory: MemoryPlan, config: EngineConfig) -> EngineInfo:
    pools, dtype = memory.pools, str(model.dtype).removeprefix("torch.")
    return EngineInfo(
        model_name=name,
        device=str(model.device),
        dtype=dtype,
        kv_dtype=dtype if config.kv_dtype == "auto" else config.kv_dtype,
        max_model_len=pools.max_model_len,
        vocab_size=model.vocab_size,
        max_rows=pools.max_rows,
        page_size=memory.page_size,
        num_pages=pools.num_pages,
        num_slots=pools.num_slots,
        cache_bytes=pools.num_bytes,
        weight_bytes=memory.weight_bytes,
        hidden_size=model.config.hidden_size,
        has_head=model.has_head,
        num_labels=model.num_labels,
        experts_per_token=config.experts_per_token or 0,
        **_storage_of(model),
        **_experts_of(model),
    )


def _experts_of(model: Any) -> dict[str, Any]:
    store: ExpertStore | None = getattr(model, "expert_store", None)
    if store is None:
        return {}
    return {
        "num_experts": store.num_experts,
        "expert_slots": store.num_slots,
        "expert_slot_bytes": store.num_bytes,
    }


def _tokenizer_file(tokenizer: str | None, source: ModelSource) -> Path | None:
    """The file from which a `Tokenizer` of the same folder or file is read."""
    path = source.path if tokenizer is None else Path(tokenizer).expanduser()
    if path is None or path.suffix == ".json":
        return path
    return folder_of(path) / "tokenizer.json"


def _storage_of(model: Any) -> dict[str, Any]:
    """Random weights are stored nowhere."""
    storage: Storage | None = getattr(model, "storage", None)
    if storage is None:
        return {}
    return {
        "stored_as": tuple(storage.schemes),
        "bits_per_weight": round(storage.bits_per_weight, 2),
    }


def check_page_size(config: EngineConfig, device: torch.device) -> None:
    if device.type == "cuda" and config.page_size % ops.LEAST_KEYS:
        raise ConfigError(
            f"page_size is {config.page_size} and the model runs on a GPU",
            f"Its kernels read {ops.LEAST_KEYS} keys of a page at once.",
            f"Use a multiple of {ops.LEAST_KEYS}; 64 is the default.",
        )
