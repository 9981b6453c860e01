"""The gates' problems, held out from the embedded model's training (`training/problems`)."""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from random import Random

from penstock.errors import ConfigError
from penstock.eval.conversation import Conversation

FILE = Path(__file__).resolve().parent.parent / "assets" / "held_out.jsonl.gz"


def take(gate: str, num_problems: int, seed: int) -> list[Conversation]:
    """`num_problems` of a gate: with seed 0 the first ones, otherwise a random choice."""
    problems = _by_gate()[gate]
    if num_problems > len(problems):
        raise ConfigError(
            f"{num_problems} problems of the kind {gate!r} are requested",
            f"Only {len(problems)} were held out from training.",
            f"Use --limit {len(problems)} or less.",
        )
    return problems[:num_problems] if seed == 0 else Random(seed).sample(problems, num_problems)


@functools.cache
def _by_gate() -> Mapping[str, list[Conversation]]:
    kinds: dict[str, list[Conversation]] = {}
    with gzip.open(FILE, "rt", encoding="utf-8") as lines:
        for line in lines:
            fields = json.loads(line)
            kinds.setdefault(fields["gate"], []).append(Conversation.from_json(fields))
    return kinds
