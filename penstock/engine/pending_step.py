"""The results of a launched step, on their way to the host. `PendingStep.wait` is the only place
where the host waits for the device.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from penstock.engine.pooling import PooledRows
from penstock.engine.row_table import SamplingNeeds
from penstock.types import PromptScores, StepOutput, StepPlan, TokenLogprob

Scores = tuple[Tensor, Tensor, Tensor]  # logprobs [T], top logprobs [T, k], top ids [T, k]


@dataclass(frozen=True, slots=True)
class StepResults:
    """What a step computes for the host. `token_ids` are [L]: a row's are at `max_tokens` places
    in a row, of which the first `num_new` count. A captured step with drafts gives both in one
    tensor instead, [R, 2 + n] (`AcceptedDrafts.for_host`), which takes one copy.
    """

    needs: SamplingNeeds
    token_ids: Tensor  # int64
    num_new: Tensor | None = None  # [R] of the sampling rows; None: one token each
    logprobs: Scores | None = None  # of token_ids
    scores: dict[int, Scores] = field(default_factory=dict)  # of prompt targets, by row
    pooled: list[PooledRows] = field(default_factory=list)

    def map(self, function: Callable[[Tensor], Tensor]) -> StepResults:
        def of_scores(scores: Scores) -> Scores:
            logprobs, top, top_ids = scores
            return function(logprobs), function(top), function(top_ids)

        return replace(
            self,
            token_ids=function(self.token_ids),
            num_new=None if self.num_new is None else function(self.num_new),
            logprobs=None if self.logprobs is None else of_scores(self.logprobs),
            scores={row: of_scores(scores) for row, scores in self.scores.items()},
            pooled=[PooledRows(one.rows, function(one.vectors)) for one in self.pooled],
        )


class PendingStep:
    """A launched step whose results are being copied to the host."""

    def __init__(self, plan: StepPlan, results: StepResults) -> None:
        self.plan = plan
        self._results = results
        self._event: torch.cuda.Event | None = None
        if results.token_ids.is_cuda:
            self._results = results.map(_copy_to_host)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> StepOutput:
        if self._event is not None:
            self._event.synchronize()
        token_ids = self._token_ids()
        return StepOutput(
            step=self.plan.step,
            token_ids=token_ids,
            logprobs=self._logprobs(token_ids),
            prompt_scores=self._prompt_scores(),
            vectors={
                row: vector.tobytes()
                for pooled in self._results.pooled
                for row, vector in zip(pooled.rows, pooled.vectors.numpy())
            },
        )

    def _token_ids(self) -> dict[int, tuple[int, ...]]:
        """The tokens that each sampling row gained."""
        results = self._results
        sampling = [row for row in self.plan.rows if row.samples]
        if results.token_ids.dim() == 2:
            by_row = zip(sampling, results.token_ids.tolist())
            return {row.row: tuple(own[:num_new]) for row, (num_new, *own) in by_row}
        token_ids = results.token_ids.tolist()
        if results.num_new is None:
            return {row.row: (token_id,) for row, token_id in zip(sampling, token_ids)}
        gained, first = {}, 0
        for row, num_new in zip(sampling, results.num_new.tolist()):
            gained[row.row] = tuple(token_ids[first : first + num_new])
            first += row.max_tokens
        return gained

    def _logprobs(self, gained: dict[int, tuple[int, ...]]) -> dict[int, tuple[TokenLogprob, ...]]:
        if self._results.logprobs is None:
            return {}
        logprobs, top, top_ids = (tensor.tolist() for tensor in self._results.logprobs)
        found, first = {}, 0
        sampling = [row for row in self.plan.rows if row.samples]
        for row, params in zip(sampling, self._results.needs.params):
            k = params.logprobs
            if k is not None:
                found[row.row] = tuple(
                    TokenLogprob(token_id, logprobs[i], tuple(zip(top_ids[i][:k], top[i][:k])))
                    for i, token_id in enumerate(gained[row.row], start=first)
                )
            first += row.max_tokens
        return found

    def _prompt_scores(self) -> dict[int, PromptScores]:
        targets = {
            row.row: row.prompt_targets for row in self.plan.rows if row.prompt_targets is not None
        }
        return {
            row: PromptScores(
                array("i", targets[row].token_ids).tobytes(),
                logprobs.float().numpy().tobytes(),
                top_ids.int().numpy().tobytes(),
                top.float().numpy().tobytes(),
                targets[row].num_top,
            )
            for row, (logprobs, top, top_ids) in self._results.scores.items()
        }


def _copy_to_host(tensor: Tensor) -> Tensor:
    """Starts an asynchronous copy, which needs pinned memory."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
