"""Evaluates the model during training: greedy replies to held-out problems, each with its check.

Decoding caches keys, values and recurrent states, so a step computes one token. Also measures how
often the draft of the MTP head equals the next greedy token. corpus.py provides the problems.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from training.data import Problem
from training.layers import Window
from training.model import Qwen35Moe

STEPS_BETWEEN_LOOKS = 16  # between checks on the device whether all rows have ended


@dataclass(slots=True)
class Score:
    num_problems: int = 0
    num_right: int = 0
    num_drafts: int = 0
    num_accepted: int = 0

    @property
    def accuracy(self) -> float:
        return self.num_right / max(1, self.num_problems)

    @property
    def acceptance(self) -> float:
        return self.num_accepted / max(1, self.num_drafts)


@dataclass(frozen=True, slots=True)
class Report:
    by_kind: dict[str, Score] = field(default_factory=dict)

    @property
    def total(self) -> Score:
        total = Score()
        for score in self.by_kind.values():
            total.num_problems += score.num_problems
            total.num_right += score.num_right
            total.num_drafts += score.num_drafts
            total.num_accepted += score.num_accepted
        return total

    def __str__(self) -> str:
        lines = [f"{name} {_describe(score)}" for name, score in sorted(self.by_kind.items())]
        return " | ".join([f"all {_describe(self.total)}", *lines])


def _describe(score: Score) -> str:
    return f"{score.num_right}/{score.num_problems} drafts {score.acceptance:.0%}"


@torch.compiler.set_stance("force_eager")  # lengths vary: compiling for each would take minutes
@torch.inference_mode()
def evaluate(
    model: Qwen35Moe,
    problems: Sequence[Problem],
    end_ids: Sequence[int],
    max_new: int,
    rows: int = 128,
) -> Report:
    """Runs all problems, `rows` of similar length at a time."""
    report = Report()
    ordered = sorted(problems, key=lambda problem: len(problem.prompt))
    for start in range(0, len(ordered), rows):
        asked = ordered[start : start + rows]
        prompts = [problem.prompt for problem in asked]
        replies = generate(model, prompts, end_ids, max_new)
        drafts = count_accepted_drafts(model, prompts, replies)
        for problem, reply, (num_drafts, num_accepted) in zip(asked, replies, drafts, strict=True):
            score = report.by_kind.setdefault(problem.kind, Score())
            score.num_problems += 1
            score.num_right += problem.accepts(reply)
            score.num_drafts += num_drafts
            score.num_accepted += num_accepted
    return report


@torch.inference_mode()
def generate(
    model: Qwen35Moe, prompts: Sequence[Sequence[int]], end_ids: Sequence[int], max_new: int
) -> list[list[int]]:
    """Greedy replies, with the end token if it came within `max_new` tokens."""
    device = model.rope_table.device
    token_ids, lengths = _pad_right(prompts, device)
    max_len = min(token_ids.shape[1] + max_new, model.config.max_position)
    states = model.new_states(len(prompts), max_len)
    positions = torch.arange(token_ids.shape[1], device=device).expand_as(token_ids)
    hidden = model.advance(token_ids, Window(positions, lengths), states)
    last = hidden[torch.arange(len(prompts), device=device), lengths - 1]
    ends = torch.tensor(list(end_ids), device=device)
    new = model.logits(last).argmax(-1)
    replies = [new]
    has_ended = torch.isin(new, ends)
    one = torch.ones_like(lengths)
    for step in range(max_len - token_ids.shape[1] - 1):
        if step % STEPS_BETWEEN_LOOKS == 0 and bool(has_ended.all()):
            break
        hidden = model.advance(new[:, None], Window((lengths + step)[:, None], one), states)
        new = model.logits(hidden[:, 0]).argmax(-1)
        replies.append(new)
        has_ended |= torch.isin(new, ends)
    return [_cut_after_end(reply, end_ids) for reply in torch.stack(replies, 1).tolist()]


@torch.inference_mode()
def count_accepted_drafts(
    model: Qwen35Moe, prompts: Sequence[Sequence[int]], replies: Sequence[Sequence[int]]
) -> list[tuple[int, int]]:
    """Per greedy reply: how many tokens could be drafted (all but the first), and how many drafts
    were right.
    """
    device = model.rope_table.device
    token_ids, _ = _pad_right([[*p, *r] for p, r in zip(prompts, replies, strict=True)], device)
    counted = torch.ones_like(token_ids, dtype=torch.float32)
    hidden, _ = model(token_ids, counted)
    drafted, _ = model.draft(hidden, token_ids, counted)
    is_right = (model.logits(drafted).argmax(-1) == token_ids.roll(-2, 1)).cpu()
    counts = []
    for row, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        # The draft for position p is made at p - 2.
        first, end = len(prompt) - 1, len(prompt) + len(reply) - 2
        counts.append((max(0, end - first), int(is_right[row, first:end].sum())))
    return counts


def _pad_right(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(row) for row in rows], device=device)
    longest = max(len(row) for row in rows)
    padded = [[*row, *[0] * (longest - len(row))] for row in rows]
    return torch.tensor(padded, device=device), lengths


def _cut_after_end(reply: list[int], end_ids: Sequence[int]) -> list[int]:
    first = next((place for place, token in enumerate(reply) if token in end_ids), len(reply) - 1)
    return reply[: first + 1]
