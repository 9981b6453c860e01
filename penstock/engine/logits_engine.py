"""The engine as three calls on logits: prefill, decode, remove. The caller chooses the tokens.

It drives the same runner and cache as `Engine`, with its own plans: no scheduler, no sampling.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.config import EngineConfig, from_mapping
from penstock.engine.device import pick_device
from penstock.engine.engine import Engine
from penstock.engine.policy import check_token_ids
from penstock.errors import CapacityError, ContextLengthError, RequestError
from penstock.models.source import ModelSource
from penstock.types import PageUpdate, Request, RowPlan, StepPlan
from penstock.types import Sequence as Row


def create_engine(
    model_config: dict[str, Any], weight_dir: str, device: str = "cuda", **settings: Any
) -> LogitsEngine:
    """An engine for the model that `model_config` (the dict of its config.json) describes."""
    source = ModelSource(name=Path(weight_dir).name, path=Path(weight_dir), config=model_config)
    # The caller chooses the tokens, so there are no drafts.
    given = {
        "device": pick_device(device),
        "prefix_cache": False,
        "speculate": "off",
        **settings,
    }
    if model_config.get("model_type") == "tiny_llama" and "dtype" not in settings:
        given["dtype"] = _plain_dtype(model_config, device)
    config: EngineConfig = from_mapping(EngineConfig, given)
    return LogitsEngine(Engine.from_source(source, config))


def _plain_dtype(model_config: dict[str, Any], device: str) -> str:
    """The dtype of plain Llama state dicts: half precision on a GPU, single on a CPU."""
    if not device.startswith("cuda"):
        return "float32"
    return "bfloat16" if model_config.get("torch_dtype") == "bfloat16" else "float16"


class LogitsEngine:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._requests: dict[Hashable, Row] = {}
        self._free_rows = list(reversed(range(engine.info.max_rows)))
        self._num_steps = 0

    def prefill(
        self, request_ids: Sequence[Hashable], input_ids: Sequence[Tensor]
    ) -> Tensor:  # [batch, vocab]
        """Runs whole prompts and returns the logits after each. A known id is replaced."""
        if len(request_ids) != len(input_ids):
            raise RequestError(
                f"{len(request_ids)} request ids were given with {len(input_ids)} prompts"
            )
        self._check_ids(request_ids)
        prompts = [self._checked_tokens(id, tokens) for id, tokens in zip(request_ids, input_ids)]
        self._check_room(request_ids, prompts)
        for id in request_ids:
            if id in self._requests:
                self.remove([id])
        rows = []
        for id, prompt in zip(request_ids, prompts):
            row = Row.start(Request(id=str(id), token_ids=prompt), arrival=0)
            row.row = self._free_rows.pop()
            admitted = self.engine.policy.cache.admit(row)
            assert admitted, "room was checked"
            self._requests[id] = row
            rows.append(row)
        return self._run(rows)

    def decode(
        self, request_ids: Sequence[Hashable], token_ids: Tensor
    ) -> Tensor:  # [batch, vocab]
        """Appends one token to each request and returns the logits after it."""
        self._check_ids(request_ids)
        tokens = torch.as_tensor(token_ids).tolist()
        if len(tokens) != len(request_ids):
            raise RequestError(
                f"{len(request_ids)} request ids were given with {len(tokens)} tokens"
            )
        for id, token in zip(request_ids, tokens):
            self._known(id)
            check_token_ids(f"request {id!r}", [token], self.engine.info.vocab_size)
            self._check_length(id, self._requests[id].num_tokens + 1)
        page_size = self.engine.info.page_size
        rows = [self._requests[id] for id in request_ids]
        self._check_pages(sum(row.num_tokens % page_size == 0 for row in rows))
        for row, token in zip(rows, tokens):
            row.tokens.append(token)
        numbers, lengths = [row.row or 0 for row in rows], [row.num_tokens for row in rows]
        self.engine.runner.set_last_tokens(numbers, tokens, lengths)
        return self._run(rows, are_decodes=True)

    def remove(self, request_ids: Sequence[Hashable]) -> None:
        self._check_ids(request_ids)
        for id in request_ids:
            self._known(id)
        for id in request_ids:
            row = self._requests.pop(id)
            assert row.row is not None
            self._free_rows.append(row.row)
            self.engine.policy.cache.release(row)

    def _run(self, rows: list[Row], are_decodes: bool = False) -> Tensor:
        """Steps until every row's tokens are computed; a step takes what fits its token budget."""
        logits: dict[int, Tensor] = {}
        while pending := [row for row in rows if row.num_uncomputed]:
            plans, updates = self._plan_rows(pending, are_decodes)
            self._num_steps += 1
            step = StepPlan(step=self._num_steps, rows=tuple(plans), page_updates=tuple(updates))
            results = self.engine.runner.logits(step)
            sampled = [plan.row for plan in plans if plan.samples]
            logits |= dict(zip(sampled, results))
        return torch.stack([logits[row.row] for row in rows if row.row is not None])

    def _plan_rows(
        self, rows: list[Row], are_decodes: bool
    ) -> tuple[list[RowPlan], list[PageUpdate]]:
        plans: list[RowPlan] = []
        updates: list[PageUpdate] = []
        scheduler = self.engine.policy.scheduler
        budget = scheduler.max_step_tokens if len(rows) == 1 else scheduler.shared_step_tokens
        page_size = self.engine.info.page_size
        for row in rows:
            num_tokens = row.num_uncomputed
            if num_tokens > budget:
                num_tokens = budget // page_size * page_size
            if plans and num_tokens == 0:
                break
            num_tokens = num_tokens or page_size
            budget = max(budget - num_tokens, 0)
            assert row.row is not None
            first = len(row.pages)
            pages = self.engine.policy.cache.reserve(row, num_tokens)
            assert pages is not None, "room was checked"
            if pages:
                updates.append(PageUpdate(row.row, first, tuple(pages)))
            start, row.num_computed = row.num_computed, row.num_computed + num_tokens
            slot = row.slot or 0
            if are_decodes:
                plans.append(RowPlan.decode(row.row, slot=slot, initial_slot=slot))
                continue
            tokens, samples = tuple(row.tokens[start : start + num_tokens]), not row.num_uncomputed
            plans.append(RowPlan(row.row, start, tokens, samples, slot=slot, initial_slot=slot))
        return plans, updates

    def _check_ids(self, request_ids: Sequence[Hashable]) -> None:
        if not request_ids:
            raise RequestError("The batch is empty", "", "Give at least one request id.")
        if len(set(request_ids)) != len(request_ids):
            raise RequestError(f"A request id occurs twice in {list(request_ids)}")

    def _known(self, id: Hashable) -> None:
        if id not in self._requests:
            raise RequestError(
                f"Request {id!r} is unknown",
                f"The known ids are {list(self._requests)}.",
                "Prefill it first.",
            )

    def _checked_tokens(self, id: Hashable, tokens: Tensor) -> tuple[int, ...]:
        tokens = torch.as_tensor(tokens)
        if tokens.ndim != 1 or tokens.numel() == 0:
            raise RequestError(
                f"The prompt of {id!r} has shape {list(tokens.shape)}",
                "A prompt is a 1-D tensor of at least one token.",
            )
        values = tokens.tolist()
        check_token_ids(f"request {id!r}", values, self.engine.info.vocab_size)
        self._check_length(id, len(values))
        return tuple(values)

    def _check_length(self, id: Hashable, length: int) -> None:
        longest = self.engine.info.max_model_len
        if length > longest:
            raise ContextLengthError(
                f"Request {id!r} would have {length} tokens", f"The context is {longest} tokens."
            )

    def _check_room(self, request_ids: Sequence[Hashable], prompts: list[tuple[int, ...]]) -> None:
        """Called before anything changes: rows and pages must suffice once the replaced requests
        are removed.
        """
        replaced = [self._requests[id] for id in request_ids if id in self._requests]
        if len(prompts) > len(self._free_rows) + len(replaced):
            raise CapacityError(
                f"{len(self._requests) - len(replaced) + len(prompts)} requests do not fit",
                f"The engine has {self.engine.info.max_rows} rows.",
                "Remove some, or build it with a larger max_rows.",
            )
        page_size = self.engine.info.page_size
        needed = sum(-(-len(prompt) // page_size) for prompt in prompts)
        self._check_pages(needed - sum(len(row.pages) for row in replaced))

    def _check_pages(self, needed: int) -> None:
        cache, info = self.engine.policy.cache, self.engine.info
        if info.num_pages and needed > cache.num_free_pages:
            raise CapacityError(
                f"{needed} more pages are needed",
                f"{cache.num_free_pages} of {info.num_pages - 1} are free ({info.page_size} tokens "
                "each).",
                "Remove some requests, or build the engine with a larger memory_gb.",
            )
