"""Drafts from a small model with the same tokenizer and its own cache.

A row has two states. One has consumed only accepted tokens: a proposal starts by prefilling those
accepted since. The other continues from it and consumes the drafts, one per step. The next proposal
starts from the first state again, so nothing is rolled back. Keys and values of drafts are
overwritten.

When rows or pages are short, the sequence that drafted least recently is evicted: its next proposal
recomputes its tokens.
"""

from __future__ import annotations

import dataclasses
import json
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from penstock.config import EngineConfig
from penstock.engine.device import on_device, pick_device
from penstock.engine.device_part import check_page_size
from penstock.engine.memory import MemoryPlan, build_runner
from penstock.engine.pending_step import PendingStep
from penstock.engine.runner import Runner
from penstock.errors import ConfigError
from penstock.gguf.folder import folder_of, read_text
from penstock.layers.packing import narrow_weights, pack_weights, shorten_weights
from penstock.models.source import ModelSource, find_model
from penstock.offload.load import load_with_experts
from penstock.progress import OnPhase, timed
from penstock.types import Admission, PageUpdate, RowPlan, SamplingParams, Sequence, StepPlan

MOST_ROWS = 16  # sequences with rows; others evict them
CPU_GB = 0.25  # for the cache
GPU_SHARE = 0.04  # of the memory left after its weights


@dataclass(slots=True, eq=False)
class DraftRow:
    number: int
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0  # tokens in the first state

    @property
    def certain_slot(self) -> int:
        return 1 + 2 * self.number

    @property
    def guessed_slot(self) -> int:
        return 2 + 2 * self.number


class ModelDrafter:
    is_costly = True

    def __init__(self, runner: Runner, memory: MemoryPlan) -> None:
        pools = memory.pools
        self.runner = runner
        self.page_size, self.max_len = memory.page_size, pools.max_model_len
        self.max_step_tokens = memory.max_step_tokens
        self.vocab_size = runner.rows.vocab_size  # tokens that both models know
        self._free_rows = list(range(max(pools.max_rows // 2, 1)))
        self._free_pages = list(range(1, pools.num_pages))
        self._rows: OrderedDict[Sequence, DraftRow] = OrderedDict()  # most recent last
        self._num_steps = 0

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        tokens = sequence.tokens
        most = min(most, self.max_len - len(tokens))
        if most <= 0 or max(tokens) >= self.vocab_size:
            return ()
        is_new = sequence not in self._rows
        row = self._take_row(sequence)
        first_page = len(row.pages)
        if not self._take_pages(row, len(tokens) + most):
            self.end(sequence)
            return ()
        update = PageUpdate(row.number, first_page, tuple(row.pages[first_page:]))
        admission = Admission(row.number, SamplingParams(), seed=0, num_prompt_tokens=len(tokens))
        pending = self._add_certain(row, tokens, update, (admission,) if is_new else ())
        steps = [pending]
        slots = (row.guessed_slot, row.certain_slot)
        for _ in range(most - 1):
            steps.append(self._launch(RowPlan.decode(row.number, *slots)))
            slots = (row.guessed_slot, row.guessed_slot)
        drafted = [step.wait().token_ids[row.number][0] for step in steps]
        usable = next((i for i, one in enumerate(drafted) if one >= self.vocab_size), most)
        return tuple(drafted[:usable])

    def end(self, sequence: Sequence) -> None:
        row = self._rows.pop(sequence, None)
        if row is not None:
            self._free_rows.append(row.number)
            self._free_pages += row.pages

    def _add_certain(
        self,
        row: DraftRow,
        tokens: list[int],
        update: PageUpdate,
        admissions: tuple[Admission, ...],
    ) -> PendingStep:
        """Computes the newly accepted tokens; the last step samples the first draft."""
        updates = (update,) if update.pages else ()
        slot = row.certain_slot
        while True:
            start = row.num_computed
            end = min(len(tokens), start + self.max_step_tokens)
            row.num_computed, is_last = end, end == len(tokens)
            plan = RowPlan(row.number, start, tuple(tokens[start:end]), is_last, slot, slot)
            pending = self._launch(plan, admissions, updates)
            if is_last:
                return pending
            admissions = updates = ()

    def _launch(
        self,
        row: RowPlan,
        admissions: tuple[Admission, ...] = (),
        updates: tuple[PageUpdate, ...] = (),
    ) -> PendingStep:
        self._num_steps += 1
        return self.runner.launch(StepPlan(self._num_steps, (row,), admissions, updates))

    def _take_row(self, sequence: Sequence) -> DraftRow:
        row = self._rows.get(sequence)
        if row is None:
            if not self._free_rows:
                self.end(next(iter(self._rows)))
            row = self._rows[sequence] = DraftRow(self._free_rows.pop())
        self._rows.move_to_end(sequence)
        return row

    def _take_pages(self, row: DraftRow, num_tokens: int) -> bool:
        num_needed = -(-num_tokens // self.page_size) - len(row.pages)
        while num_needed > len(self._free_pages) and len(self._rows) > 1:
            self.end(next(iter(self._rows)))
        if num_needed > len(self._free_pages):
            return False
        row.pages += [self._free_pages.pop() for _ in range(num_needed)]
        return True


def load_model_drafter(
    config: EngineConfig,
    tokenizer_file: Path | None,  # of the target model
    on_phase: OnPhase = lambda _: None,
) -> ModelDrafter:
    path = config.speculation.path
    source = find_model(path)
    if config.tp > 1:
        raise ConfigError(
            f"speculate is {config.speculate!r} and tp is {config.tp}",
            "A draft model runs on one device.",
            "Use --speculate ngram, or --tp 1.",
        )
    _require_same_tokenizer(source, tokenizer_file)
    device = torch.device(pick_device(config.device))
    own = dataclasses.replace(
        EngineConfig(),
        model=path,
        device=str(device),
        dtype=config.dtype,
        page_size=config.page_size,
        max_rows=2 * min(config.max_rows or MOST_ROWS, MOST_ROWS),
        prefix_cache=False,
        random_weights=config.random_weights,
        weights_seed=config.weights_seed,
        graphs=config.graphs,
        speculate="off",
    )
    check_page_size(own, device)
    with on_device(device):
        with timed("draft model", on_phase) as report:
            model: Any = load_with_experts(source, own, str(device), report)
        if device.type == "cpu":
            narrow_weights(model)
            pack_weights(model, keep=model.head.weight)
            shorten_weights(model)
        own = dataclasses.replace(own, memory_gb=_cache_gb(device))
        memory, runner = build_runner(model, own, source.name, on_phase)
    return ModelDrafter(runner, memory)


def _cache_gb(device: torch.device) -> float:
    if device.type != "cuda":
        return CPU_GB
    free, _ = torch.cuda.mem_get_info(device)
    return GPU_SHARE * free / 1e9


def _require_same_tokenizer(source: ModelSource, tokenizer_file: Path | None) -> None:
    """A draft is a token id: the same ids must mean the same text."""
    if source.path is None or tokenizer_file is None:
        return
    ours, theirs = (
        _ids_of(file) for file in (tokenizer_file, folder_of(source.path) / "tokenizer.json")
    )
    wrong = next((text for text, id in theirs.items() if ours.get(text) != id), None)
    if wrong is None and len(ours) != len(theirs):
        wrong = next(text for text in ours if text not in theirs)
    if wrong is not None:
        raise ConfigError(
            f"The draft model {source.name} has another tokenizer",
            f"{wrong!r} is token {theirs.get(wrong, 'none')} there, and token "
            f"{ours.get(wrong, 'none')} in {tokenizer_file}.",
            "Use a draft model of the same family, or --speculate ngram, which needs no model.",
        )


def _ids_of(tokenizer_file: Path) -> dict[str, int]:
    try:
        stored = json.loads(read_text(tokenizer_file))
        added = {one["content"]: int(one["id"]) for one in stored.get("added_tokens") or ()}
        vocabulary = stored["model"]["vocab"]
        if not isinstance(vocabulary, dict):  # unigram: pairs of a piece and its score
            vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
        return {**vocabulary, **added}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"The vocabulary of {tokenizer_file} cannot be read",
            f"{type(error).__name__}: {error}.",
            "A draft model needs the same tokenizer.json as the model.",
        ) from error
