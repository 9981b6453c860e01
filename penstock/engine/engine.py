"""One engine: a policy that decides and a runner that computes, driven one step at a time.

`step()` is the whole loop: plan, launch, and commit the results, of this step or, when the device
runs asynchronously, of the previous one. The runner sees only the plan. A step with constrained
rows samples after the previous step's results are in, because its masks depend on them; the device
computes the logits meanwhile. The engine knows token ids only, no text.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from penstock import ops
from penstock.config import EngineConfig
from penstock.digests import PageDigests
from penstock.engine.device import on_device, used_and_total_bytes
from penstock.engine.device_part import (
    DevicePart,
    check_split,
    load_part,
    load_share,
    rank_device,
)
from penstock.engine.grammar_masks import ConstrainedRow, StepMasks
from penstock.engine.memory import MemoryPlan
from penstock.engine.model_drafter import ModelDrafter, load_model_drafter
from penstock.engine.pending_step import PendingStep
from penstock.engine.policy import Policy
from penstock.engine.rank_group import RankGroup
from penstock.errors import PenstockError
from penstock.gguf.folder import folder_of
from penstock.models.source import ModelSource, find_model
from penstock.offload.device_slots import DeviceSlots
from penstock.offload.store import ExpertStore
from penstock.parallel.links import GroupLinks
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
        """Takes a loaded model, and plans the memory for its cache."""
        drafter = _load_drafter(config, tokenizer_file, on_phase)
        part = DevicePart.of(model, config, name, on_phase)
        self._begin(part, name, tokenizer_file, drafter)

    def _begin(
        self,
        part: DevicePart,
        name: str,
        tokenizer_file: Path | None,
        drafter: ModelDrafter | None = None,
    ) -> None:
        config, self.runner = part.config, part.runner
        is_gpu = part.model.device.type == "cuda"
        self.expert_store: ExpertStore | DeviceSlots | None = getattr(
            part.model, "expert_store", None
        )
        self.info = _describe(part.model, name, part.memory, config)
        new_buffer = self.runner.rows.host_buffer
        drafts = self.runner.draft_graphs
        sizes = () if drafts is None else drafts.sizes
        self.policy = Policy(config, part.memory, self.info, tokenizer_file, new_buffer, sizes)
        if self.policy.speculator.pace is not None:
            self.policy.speculator.pace.prime(self.runner.step_seconds)
        if drafter is not None:
            drafter.vocab_size = min(drafter.vocab_size, self.info.vocab_size)
            self.policy.speculator.drafter = drafter
        self.other_ranks: RankGroup | None = None
        self._overlap = is_gpu if config.overlap is None else config.overlap
        self._pending: PendingStep | None = None
        # Called with the ids of requests before they first run.
        self.on_start: Callable[[list[str]], None] = lambda _: None

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        on_phase: OnPhase = lambda _: None,
        tokenizer: str | None = None,
        ranks_folder: str | None = None,
    ) -> Engine:
        source = find_model(config.model)
        return cls.from_source(source, config, on_phase, tokenizer, ranks_folder)

    @classmethod
    def from_source(
        cls,
        source: ModelSource,
        config: EngineConfig,
        on_phase: OnPhase = lambda _: None,
        tokenizer: str | None = None,  # a folder or a tokenizer.json, if not the model's own
        ranks_folder: str | None = None,  # for sockets; default: one of its own
    ) -> Engine:
        config.check_ranks()
        engine = cls.__new__(cls)
        tokenizer_file = _tokenizer_file(tokenizer, source)
        drafter = _load_drafter(config, tokenizer_file, on_phase)
        if config.tp == 1:
            part = load_part(source, config, 0, None, on_phase)
            engine._begin(part, source.name, tokenizer_file, drafter)
            return engine
        rank_device(config, 0)
        check_split(source, config)
        with timed("ranks", on_phase):
            group = RankGroup.start(source, config, ranks_folder)
        try:
            part = load_part(source, config, 0, group.meeting_file, on_phase)
            engine._begin(part, source.name, tokenizer_file)
        except Exception as error:
            reason = group.explain(error) if isinstance(error, RuntimeError) else error
            group.close()
            raise reason from error
        engine._lead(group)
        return engine

    @classmethod
    def of_share(
        cls, source: ModelSource, config: EngineConfig, on_phase: OnPhase = lambda _: None
    ) -> Engine:
        """Rank 0 of an engine of `tp` ranks, without the others: to time its part of a step."""
        engine = cls.__new__(cls)
        engine._begin(load_share(source, config, on_phase), source.name, None)
        return engine

    def _lead(self, group: RankGroup) -> None:
        """From here on, the other ranks mirror this one."""
        self.other_ranks = group
        group.has_started = True
        self.runner.tell_others = group.send
        links = self.runner.rows.ranks.links
        if self.runner.rows.device.type == "cuda" and isinstance(links, GroupLinks):
            group.on_failure = lambda _: links.abort()
        weakref.finalize(self, group.close)  # also when the process ends

    def close(self) -> None:
        """Ends the processes of other ranks, if there are any."""
        if self.other_ranks is not None:
            self.other_ranks.close()

    def submit(self, request: Request) -> None:
        self.policy.submit(request)

    def abort(self, request_id: str) -> None:
        """Frees the request's row, pages and slot; its last delta says "abort"."""
        self.policy.abort(request_id)

    def drop(self, request_id: str) -> TokenDelta | None:
        """Aborts without emitting a delta; returns the last delta if the request existed."""
        return self.policy.drop(request_id)

    @property
    def has_work(self) -> bool:
        return self.policy.has_work or self._pending is not None

    def step(self) -> list[TokenDelta]:
        if self.other_ranks is None:
            return self._step()
        try:
            return self._step()
        except RuntimeError as error:  # from a collective, if a rank is gone
            reason = self.other_ranks.explain(error)
            self.close()
            raise reason from error

    def _step(self) -> list[TokenDelta]:
        policy, started_at = self.policy, time.perf_counter()
        if self._pending is not None and policy.scheduler.holds_planning:
            self._commit_pending()
            return policy.take_deltas()
        if policy.needs_all_tokens:
            self._commit_pending()
        plan = policy.plan()
        if policy.scheduler.admitted_ids:
            self.on_start(policy.scheduler.admitted_ids)
        launched = self._launch(plan) if plan is not None else None
        if self._overlap:
            launched, self._pending = self._pending, launched
        if launched is not None:
            policy.commit(launched.wait())
            # While steps overlap, each call takes as long as the device needs for a step.
            policy.speculator.note_step(launched.plan, time.perf_counter() - started_at)
        deltas = policy.take_deltas()
        if plan is None and launched is None and not deltas:
            policy.wait_for_grammar()
        return deltas

    def _launch(self, plan: StepPlan) -> PendingStep:
        constrained = self.policy.constraints.rows_of(plan)
        masks = partial(self._fill_masks, constrained) if constrained else None
        return self.runner.launch(plan, masks)

    def _fill_masks(self, constrained: list[ConstrainedRow]) -> StepMasks:
        """Runs while the device computes the logits to mask."""
        self._commit_pending()
        return self.policy.fill_masks(constrained)

    def _commit_pending(self) -> None:
        if self._pending is not None:
            self.policy.commit(self._pending.wait())
            self._pending = None

    @torch.inference_mode()
    def warm_up_grammars(self) -> None:
        """Loads the vocabulary before the first constrained request: a large one takes seconds, and
        all requests would wait. If that fails, such a request gets the error.
        """
        rows = self.runner.rows
        logits = torch.zeros(1, rows.vocab_size, device=rows.device)
        words = rows.upload([[0] * -(-rows.vocab_size // 32)], torch.int32)
        with on_device(logits.device):
            # Compiles the kernel, which banned words need too.
            ops.mask_logits(logits, rows.upload([0]), words)
        try:
            self.policy.constraints.compiler.load_vocabulary()
        except PenstockError as error:
            log.info("no grammars: %s", error)

    def stats(self) -> EngineStats:
        used, total = used_and_total_bytes(self.runner.rows.device)
        stats = replace(self.policy.stats(), memory_used=used, memory_total=total)
        if self.expert_store is None:
            return stats
        store = self.expert_store
        return replace(stats, experts=store.stats(), expert_heat=store.heat())

    def num_cached_tokens(self, digests: PageDigests, num_tokens: int) -> int:
        """How many tokens of a prompt of this length the prefix cache would provide now."""
        return self.policy.cache.num_cached_tokens(digests, num_tokens)

    def sessions(self) -> list[SessionInfo]:
        return self.policy.cache.sessions.describe()

    def drop_session(self, session_id: str) -> SessionInfo | None:
        """A running request of the session continues, and stores its prefix for the session again
        when it ends.
        """
        return self.policy.cache.sessions.drop(session_id)


def _load_drafter(
    config: EngineConfig, tokenizer_file: Path | None, on_phase: OnPhase
) -> ModelDrafter | None:
    """Loads it before the model itself, whose cache takes the remaining memory."""
    if config.speculation.kind != "model":
        return None
    return load_model_drafter(config, tokenizer_file, on_phase)


def _describe(model: Any, name: str, memory: MemoryPlan, config: EngineConfig) -> EngineInfo:
    pools, dtype = memory.pools, str(model.dtype).removeprefix("torch.")
    return EngineInfo(
        model_name=name,
        device=str(model.device),
        dtype=dtype,
        quantization=config.quantization,
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
        speculate=str(config.speculation),
        **_storage_of(model),
        **_experts_of(model),
    )


def _experts_of(model: Any) -> dict[str, Any]:
    store: ExpertStore | DeviceSlots | None = getattr(model, "expert_store", None)
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
    """Random weights have no storage format."""
    storage: Storage | None = getattr(model, "storage", None)
    if storage is None:
        return {}
    return {
        "stored_as": tuple(storage.schemes),
        "bits_per_weight": round(storage.bits_per_weight, 2),
    }
