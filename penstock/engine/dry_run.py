"""Launches the largest steps of an engine at start on a scratch cache, to measure their memory.

This also compiles and loads the kernels, which a graph capture cannot do. The results are
discarded: every row reads and writes page 0 and slot 0.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from penstock.config import EngineConfig
from penstock.engine.graph_sizes import DraftSize, draft_sizes
from penstock.engine.graphs import is_out_of_memory
from penstock.engine.pools import PoolSizes
from penstock.engine.runner import Runner
from penstock.types import MAX_LOGPROBS, Admission, PromptTargets, RowPlan, SamplingParams, StepPlan

LEAST_STEP_TOKENS = 512

# Every option that a step can have. Each needs tensors of [rows, vocabulary].
EVERY_OPTION = SamplingParams(
    temperature=1.0,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={0: 1.0},
    min_tokens=2,  # so that end tokens are masked
    logprobs=MAX_LOGPROBS,
)

# Factor on a peak: blocks are rounded up, and one graph's blocks do not always fit another's.
FRAGMENT_SHARE = 1.1
LAYER_GRAPH_BYTES = 256 * 1024  # driver memory for one layer of a graph


@dataclass(frozen=True, slots=True)
class StepBytes:
    num_tokens: int
    num_bytes: int


class DryRun:
    def __init__(self, model: Any, config: EngineConfig, pools: PoolSizes) -> None:
        self.model = model
        self.device = model.device
        self.max_row_tokens = pools.max_model_len
        self.captures = config.graphs is not False
        self.runner = Runner.for_pools(
            model, config, dataclasses.replace(pools, num_pages=2, num_slots=2)
        )

    @torch.inference_mode()
    def largest_step(self, max_tokens: int, limit: int) -> StepBytes | None:
        """The largest step of at most `max_tokens` tokens that takes no more than `limit` bytes, or
        else the smallest step that fits in memory. None: no step fits.
        """
        if self.captures:
            self.runner.warm_up(max_tokens)
        decode_bytes = 0
        for size in self._decode_sizes():
            peak = self._peak(partial(self._launch_decodes, size))
            if peak is None:
                return None
            decode_bytes = max(decode_bytes, peak)
        num_tokens = max_tokens
        while True:
            prompt_bytes = self._peak(partial(self._launch_prompts, num_tokens))
            is_least = num_tokens <= LEAST_STEP_TOKENS
            if prompt_bytes is not None and (prompt_bytes <= limit or is_least):
                return StepBytes(num_tokens, int(FRAGMENT_SHARE * max(prompt_bytes, decode_bytes)))
            if is_least:
                return None
            num_tokens = max(num_tokens // 2, LEAST_STEP_TOKENS)

    @torch.inference_mode()
    def graph_bytes(self, max_step_tokens: int) -> int:
        """An estimate for all graphs: their steps share one memory pool, and the driver stores
        every kernel node.
        """
        num_bytes, num_captures = 0, 0
        for graphs in self.runner.graphs_to_capture(max_step_tokens):
            if not graphs.num_captures:
                continue
            *_, launch_largest = graphs.warmup.after or [lambda: None]
            num_bytes = max(num_bytes, self._peak(launch_largest) or 0)
            num_captures += graphs.num_captures
        return (
            int(FRAGMENT_SHARE * num_bytes)
            + num_captures * len(self.model.layers) * LAYER_GRAPH_BYTES
        )

    def _peak(self, launch: Callable[[], object]) -> int | None:
        """The peak memory while it runs. None: more than there is."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        try:
            launch()
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            if not is_out_of_memory(error) or not self.model.ranks.is_alone:
                raise  # other ranks wait for this one's collectives
            return None
        peak = torch.cuda.max_memory_allocated(self.device) - before
        return self.model.ranks.most(peak, self.device)

    def _launch_prompts(self, num_tokens: int) -> None:
        """Prefills with all tokens scored."""
        lens = [self.max_row_tokens] * (num_tokens // self.max_row_tokens)
        lens += [num_tokens % self.max_row_tokens] if num_tokens % self.max_row_tokens else []
        table = self.runner.rows
        tokens = tuple(place % table.vocab_size for place in range(max(lens)))
        rows = [
            RowPlan(
                row,
                0,
                tokens[:n],
                samples=True,
                prompt_targets=PromptTargets(tokens[1:n], MAX_LOGPROBS),
            )
            for row, n in enumerate(lens[: table.max_rows])
        ]
        self.runner.launch(StepPlan(0, tuple(rows))).wait()

    def _decode_sizes(self) -> list[DraftSize]:
        """The largest decode steps that may run: all rows, and those with the most drafts."""
        table = self.runner.rows
        if not self.captures:
            return [DraftSize(table.max_rows, table.num_drafts)]
        drafted = draft_sizes(table.max_rows, table.num_drafts)
        largest = max(drafted, key=lambda size: size.num_places, default=None)
        return [DraftSize(table.max_rows, 0), *([largest] if largest else [])]

    def _launch_decodes(self, size: DraftSize) -> None:
        """With every sampling option."""
        numbers = range(size.num_rows)
        plan = StepPlan(
            step=0,
            rows=tuple(RowPlan.decode(row, max_tokens=size.width) for row in numbers),
            admissions=tuple(
                Admission(
                    row, EVERY_OPTION, seed=0, num_prompt_tokens=1, history=(0,), end_token_ids=(0,)
                )
                for row in numbers
            ),
        )
        self.runner.launch(plan).wait()


def free_bytes(device: torch.device) -> int:
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
