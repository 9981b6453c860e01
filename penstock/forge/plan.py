"""A writing model's plan: which decisions to try, in which order. All text and data.

It chooses among alternatives that forge knows how to write; whether they are right and faster,
trials say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.forge import decisions
from penstock.forge.decisions import Design

TASK = """You plan how an inference engine is made faster. Below is what can be decided, what the engine has
now, what was measured and where its time goes. Answer with one line for each trial, the most promising first:
`decision=alternative: why`. Choices that should be tried together stand in one line, with a space between
them. At most six lines, and nothing else."""

MAX_STEPS = 6
_CHOICE = re.compile(r"\b(\w+)\s*=\s*(\w+)")


@dataclass(frozen=True, slots=True)
class Step:
    choices: Mapping[str, str]  # decision -> alternative
    why: str

    def line(self) -> str:
        return " ".join(f"{name}={choice}" for name, choice in self.choices.items())

    def follow(self, design: Design) -> dict[str, str]:
        """The design with these choices, and what they require."""
        decided = dict(design)
        for name, choice in self.choices.items():
            decided = decisions.decide(decided, name, choice)
        return decided


def describe_choices(design: Design, device: str) -> str:
    """What can be decided on this device, and what is chosen now."""
    lines = []
    for decision in decisions.DECISIONS:
        possible = [one for one in decision.alternatives if device in one.devices]
        if len(possible) > 1:
            lines.append(f"  {decision.name} (now {design[decision.name]}): {decision.question}")
            lines += [f"    {decision.name}={one.name}: {one.says}" for one in possible]
    return "\n".join(lines)


def read_plan(reply: str, device: str) -> list[Step]:
    """The lines of a reply that name a possible decision; other lines are skipped."""
    steps = []
    for line in reply.splitlines():
        choices = {
            name: choice
            for name, choice in _CHOICE.findall(line)
            if _is_possible(name, choice, device)
        }
        if choices:
            steps.append(Step(choices, line.partition(":")[2].strip()[:120]))
    return steps[:MAX_STEPS]


def _is_possible(name: str, choice: str, device: str) -> bool:
    decision = decisions.BY_NAME.get(name)
    return decision is not None and any(
        one.name == choice and device in one.devices for one in decision.alternatives
    )
