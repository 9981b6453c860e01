"""Writes the problems of the gates: held out from training, 200 of each kind, one JSON line each.

    python -m training.problems.held_out

The output is reproducible; `tests/test_problems.py` checks that.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping
from random import Random

from penstock.eval.conversation import Conversation
from penstock.eval.held_out import FILE
from training.problems import (
    harness_sums,
    recall,
    refusals,
    small_talk,
    spot_checks,
    tool_calls,
    word_problems,
)
from training.problems.draw import pick

NUM_PROBLEMS = 200


def _thinking(rng: Random) -> Conversation:
    kind = pick(rng, (word_problems, spot_checks, tool_calls, refusals, recall, small_talk))
    return kind.sample(rng, True, True)


GATES: Mapping[str, Callable[[Random], Conversation]] = {
    "word_problems": lambda rng: word_problems.sample(rng, True),
    "spot_checks": lambda rng: spot_checks.sample(rng, True),
    "harness_sums": lambda rng: harness_sums.sample(rng, True),
    "tool_calls": lambda rng: tool_calls.sample(rng, True),
    "recall": lambda rng: recall.sample_far(rng, True),
    "thinking_closed": _thinking,
    "refusals": lambda rng: refusals.sample(rng, True),
}


def lines() -> Iterator[str]:
    for gate, draw in GATES.items():
        rng = Random(f"{gate}-0")
        for _ in range(NUM_PROBLEMS):
            yield json.dumps({"gate": gate, **draw(rng).as_json()}, ensure_ascii=False)


def main() -> None:
    text = "".join(f"{line}\n" for line in lines())
    FILE.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{FILE}: {len(GATES) * NUM_PROBLEMS} problems, {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
