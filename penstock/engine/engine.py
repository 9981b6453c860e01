"""One engine: a model, its memory, a scheduler and a runner, driven one step at a time.

`step()` is the whole loop: plan, launch, and commit the results, of this step or, when the device
runs asynchronously, of the previous one. A step with constrained rows launches its sampling after
the previous step's results are in, because its masks depend on them; the device computes the logits
meanwhile. The engine knows token ids only, no text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from penstock import ops
from penstock.cache import Cache, SessionLimits
from penstock.config import EngineConfig
from penstock.engine.device import on_device, pick_device
from penstock.engine.grammar_masks import Constraints, GrammarCompiler
from penstock.engine.memory import build_runner
from penstock.engine.pools import GB, PoolSizes
from penstock.engine.runner import PendingStep
from penstock.engine.scheduler import Scheduler
from penstock.errors import ConfigError, PenstockError, RequestError
from penstock.gguf.folder import folder_of
from penstock.layers.packing import pack_weights
from penstock.models.source import ModelSource, find_model
from penstock.ops.weight import bytes_of
from penstock.progress import OnPhase, timed
from penstock.types import EngineInfo, EngineStats, Request, SessionInfo, StepPlan, TokenDelta
from penstock.weights.load import load_model
from penstock.weights.storage_report import Storage

log = logging.getLogger("penstock.engine")

GRAMMAR_WAIT_S = 0.01  # to wait for a grammar when nothing else runs: the longest delay of an abort


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
        device = model.device
        check_page_size(config, device)
        if device.type == "cpu" and not config.deterministic:
            pack_weights(model, keep=model.head.weight)
        with on_device(device):
            memory, self.runner = build_runner(model, config, name, on_phase)
        pools = memory.pools
        self.cache = Cache(
            page_size=config.page_size,
            num_pages=pools.num_pages,
            num_slots=pools.num_slots,
            max_checkpoints=pools.max_checkpoints,
            prefix_cache=config.prefix_cache,
            # Steps of one token round differently from a prefill.
            reply_states=not config.deterministic,
            session_limits=_session_limits(config, pools),
        )
        self.scheduler = Scheduler(
            self.cache,
            max_rows=pools.max_rows,
            max_step_tokens=memory.max_step_tokens,
            shared_step_tokens=memory.shared_step_tokens,
            mixed_step_tokens=config.mixed_step_tokens or (1024 if device.type == "cuda" else None),
            bulk_share=config.bulk_share,
            max_model_len=pools.max_model_len,
        )
        self.constraints = Constraints(
            GrammarCompiler(tokenizer_file, model.vocab_size),
            vocab_size=model.vocab_size,
            max_rows=pools.max_rows,
            is_pinned=device.type == "cuda",
        )
        self.info = EngineInfo(
            model_name=name,
            device=str(device),
            dtype=(dtype := str(model.dtype).removeprefix("torch.")),
            kv_dtype=dtype if config.kv_dtype == "auto" else config.kv_dtype,
            max_model_len=pools.max_model_len,
            vocab_size=model.vocab_size,
            max_rows=pools.max_rows,
            page_size=config.page_size,
            num_pages=pools.num_pages,
            num_slots=pools.num_slots,
            cache_bytes=pools.num_bytes,
            weight_bytes=bytes_of(model),
            hidden_size=model.config.hidden_size,
            has_head=model.has_head,
            num_labels=model.num_labels,
            **_storage_of(model),
        )
        self._overlap = device.type == "cuda" if config.overlap is None else config.overlap
        self._pending: PendingStep | None = None
        self._news: list[TokenDelta] = []
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
                model = load_model(
                    source,
                    device=device,
                    dtype=config.dtype,
                    random_weights=config.random_weights,
                    seed=config.weights_seed,
                    on_phase=report,
                )
            return cls(model, config, source.name, on_phase, _tokenizer_file(tokenizer, source))

    def submit(self, request: Request) -> None:
        """Refuses what would crash the engine for all requests: the device indexes with these ids
        unchecked."""
        check_token_ids("prompt", request.token_ids, self.info.vocab_size)
        check_token_ids("logit_bias", request.sampling.logit_bias, self.info.vocab_size)
        check_token_ids("stop_token_ids", request.end_token_ids, self.info.vocab_size)
        check_token_ids(
            "bad_words", {id for word in request.banned for id in word}, self.info.vocab_size
        )
        check_token_ids(
            "grammar_starts_after", request.sampling.grammar_starts_after, self.info.vocab_size
        )
        _require_task(request, self.info)
        if self.constraints.is_preparing(request.id):
            raise RequestError(
                f"A request with id {request.id!r} is already running or queued",
                "",
                "Use another id.",
            )
        if request.sampling.grammar is not None:
            _require_end(request)
        sequence = self.scheduler.submit(request)
        if request.sampling.grammar is not None:
            self.scheduler.abort(request.id)  # it fits; it returns when its grammar is compiled
            self.constraints.prepare(request)
        elif request.banned:
            self.constraints.add(sequence)

    def abort(self, request_id: str) -> None:
        """Frees the request's row, pages and slot; its last delta says "abort"."""
        delta = self.drop(request_id)
        if delta is not None:
            self._news.append(delta)

    def drop(self, request_id: str) -> TokenDelta | None:
        """Aborts without a delta to others: returns the last delta, if the request existed."""
        delta = self.scheduler.abort(request_id)
        if delta is None and self.constraints.drop(request_id):
            delta = TokenDelta(request_id, finish="abort")
        return delta

    @property
    def has_work(self) -> bool:
        is_busy = self.scheduler.has_work or self._pending is not None
        return is_busy or self.constraints.num_preparing > 0 or bool(self._news)

    def step(self) -> list[TokenDelta]:
        if self._pending is not None and self.scheduler.holds_planning:
            self._commit(self._pending)
            self._pending = None
            return self._take_news()
        self._submit_prepared()
        plan = self.scheduler.plan()
        if self.scheduler.admitted_ids:
            self.on_start(self.scheduler.admitted_ids)
        launched = self._launch(plan) if plan is not None else None
        if self._overlap:
            launched, self._pending = self._pending, launched
        self._commit(launched)
        news = self._take_news()
        if plan is None and launched is None and not news and self.constraints.num_preparing:
            self.constraints.wait(GRAMMAR_WAIT_S)
        return news

    def _launch(self, plan: StepPlan) -> PendingStep:
        constrained = self.constraints.rows_of(plan)
        if not constrained:
            return self.runner.launch(plan)
        logits = self.runner.launch_logits(plan)
        self._commit(self._pending)
        self._pending = None
        masks = self.constraints.fill(constrained)
        for request_id, problem in masks.failures:
            self._fail(request_id, problem)
        return self.runner.launch_sampling(logits, masks)

    def _commit(self, launched: PendingStep | None) -> None:
        if launched is not None:
            self._news += self.scheduler.commit(launched.wait())

    def _take_news(self) -> list[TokenDelta]:
        news, self._news = self._news, []
        return news

    def _submit_prepared(self) -> None:
        for prepared in self.constraints.take_prepared():
            if prepared.matcher is None:
                delta = TokenDelta(prepared.request.id, finish="error", error=prepared.problem)
                self._news.append(delta)
            else:
                self.constraints.add(self.scheduler.submit(prepared.request), prepared.matcher)

    def _fail(self, request_id: str, problem: str) -> None:
        """Ends a request whose grammar failed; a step in flight that still has its row is not
        affected."""
        aborted = self.scheduler.abort(request_id)
        if aborted is not None:
            error = f"The reply can no longer follow its grammar: {problem}"
            num_cached = aborted.num_cached_tokens
            self._news.append(
                TokenDelta(request_id, finish="error", num_cached_tokens=num_cached, error=error)
            )

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
            self.constraints.compiler.load_vocabulary()
        except PenstockError as error:
            log.info("no grammars: %s", error)

    def stats(self) -> EngineStats:
        self.cache.sessions.expire()
        return EngineStats(
            num_waiting=self.scheduler.num_waiting + self.constraints.num_preparing,
            num_running=self.scheduler.num_running,
            num_free_pages=self.cache.num_free_pages,
            num_pages=self.info.num_pages,
            num_free_slots=self.cache.num_free_slots,
            num_slots=self.info.num_slots,
            num_preemptions=self.scheduler.num_preemptions,
            prefix=dict(self.cache.counters),
            num_sessions=len(self.cache.sessions),
            session_bytes=self.cache.sessions.num_bytes,
            num_kv_tokens=max(self.info.num_pages - 1, 0) * self.info.page_size,
        )

    def sessions(self) -> list[SessionInfo]:
        return self.cache.sessions.describe()

    def drop_session(self, session_id: str) -> SessionInfo | None:
        """A running request of the session continues, and stores its work for the session again
        when it ends."""
        return self.cache.sessions.drop(session_id)


def check_token_ids(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise RequestError(
            f"{name} has the token id {wrong}",
            f"The vocabulary has {vocab_size} tokens.",
            param=name,
        )


def _require_task(request: Request, info: EngineInfo) -> None:
    """Refuses a task that the model has no head for."""
    pooling = request.pooling
    if not info.has_head and (pooling is None or pooling.logit_ids):
        raise RequestError(
            f"{info.model_name} cannot generate text",
            "Its checkpoint has no language-model head (lm_head): it gives embeddings or scores.",
            "Use /v1/embeddings, /v1/rerank or /v1/score, or serve a model that generates.",
            param="model",
        )
    if pooling is None:
        return
    check_token_ids("logit_ids", pooling.logit_ids, info.vocab_size)
    if pooling.dimensions is not None and not 1 <= pooling.dimensions <= info.hidden_size:
        raise RequestError(
            f"dimensions is {pooling.dimensions}",
            f"The model's vectors have {info.hidden_size}.",
            f"Use 1 to {info.hidden_size}.",
            param="dimensions",
        )
    if pooling.is_classified and not info.num_labels:
        raise RequestError(
            f"{info.model_name} has no classifier",
            "Its checkpoint has no score.weight.",
            "Serve a model for sequence classification.",
            param="model",
        )


def _require_end(request: Request) -> None:
    if not request.end_token_ids:
        raise RequestError(
            "The reply has a grammar but no token that could end it",
            "When the grammar is complete, only an end token can follow.",
            "Omit ignore_eos.",
            param="ignore_eos",
        )


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


def _session_limits(config: EngineConfig, pools: PoolSizes) -> SessionLimits:
    """A quarter of the checkpoints stays for other prompts: states are large, and a few fill the
    pool."""
    num_bytes = pools.num_bytes // 2 if config.session_gb is None else int(config.session_gb * GB)
    return SessionLimits(
        max_bytes=num_bytes,
        max_idle_s=60 * config.session_minutes,
        page_bytes=pools.page_bytes,
        slot_bytes=pools.slot_bytes,
        max_checkpoints=-(-3 * pools.max_checkpoints // 4),
    )


def check_page_size(config: EngineConfig, device: torch.device) -> None:
    if device.type == "cuda" and config.page_size % ops.LEAST_KEYS:
        raise ConfigError(
            f"page_size is {config.page_size} and the model runs on a GPU",
            f"Its kernels read {ops.LEAST_KEYS} keys of a page at once.",
            f"Use a multiple of {ops.LEAST_KEYS}; 64 is the default.",
        )
