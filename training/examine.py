"""Runs the gates on an exported model in this process: on a GPU, thousands of problems per minute.

    python -m training.examine MODEL [--limit 200] [--seed 0] [--gates tool_calls recall] [--json F]

Problems, checks and thresholds are those of `penstock eval gates`, which queries a server and is
authoritative; this one computes with the training code. Exits with 1 if the model misses a gate.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from penstock.errors import PenstockError
from penstock.eval import held_out
from penstock.eval.conversation import Conversation
from penstock.eval.gates import (
    GATES,
    REPORTED,
    format_failures,
    format_gates,
    num_problems_reported,
    score,
)
from penstock.eval.reply import Reply
from training.config import ModelConfig, TrainConfig
from training.corpus import ConversationCorpus
from training.evaluate import generate
from training.export import load_published
from training.model import Qwen35Moe

MAX_REPLY_TOKENS = 320
NAMES = (*GATES, *REPORTED)


def load_model(folder: Path, device: torch.device) -> Qwen35Moe:
    tensors = load_file(folder / "model.safetensors")
    config = ModelConfig.of_folder(folder)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Qwen35Moe(config, dtype, TrainConfig().delta_chunk)
    model.load_state_dict(load_published(tensors, config.num_experts))
    return model.to(device)


def ask(
    model: Qwen35Moe,
    corpus: ConversationCorpus,
    conversations: Sequence[Conversation],
    max_new: int = MAX_REPLY_TOKENS,
    rows: int = 128,
) -> list[Reply]:
    """Greedy replies in the order of the conversations, `rows` of similar length at a time."""
    prompts = [corpus.problem_of(conversation).prompt for conversation in conversations]
    places = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
    replies: dict[int, Reply] = {}
    for start in range(0, len(places), rows):
        asked = places[start : start + rows]
        found = generate(model, [prompts[place] for place in asked], corpus.special.ends, max_new)
        for place, token_ids in zip(asked, found, strict=True):
            replies[place] = corpus.read_reply(conversations[place], token_ids)
    return [replies[place] for place in range(len(prompts))]


def parse_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="training.examine", description="Ask an exported model the gates."
    )
    parser.add_argument("model", type=Path, help="folder with model.safetensors and the tokenizer")
    parser.add_argument(
        "--limit", type=int, default=200, metavar="N", help="problems per gate (200)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the problems (0)")
    parser.add_argument("--gates", nargs="+", choices=NAMES, help="default: all")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu with patience")
    parser.add_argument(
        "--rows", type=int, default=128, metavar="N", help="problems at a time (128)"
    )
    parser.add_argument(
        "--show", type=int, default=5, metavar="N", help="print N wrong replies per gate (5)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="F", help="also write the results to this file"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    flags = parse_flags(argv)
    try:
        corpus = ConversationCorpus.open(flags.model)
        model = load_model(flags.model, torch.device(flags.device))
    except PenstockError as error:
        print(error, file=sys.stderr)
        return 1
    start = time.monotonic()
    results = []
    for gate in NAMES:
        if flags.gates and gate not in flags.gates:
            continue
        num_problems = num_problems_reported(flags.limit) if gate in REPORTED else flags.limit
        problems = held_out.take(gate, num_problems, flags.seed)
        results.append(score(gate, problems, ask(model, corpus, problems, rows=flags.rows)))
        if flags.show and results[-1].failures:
            print(format_failures(results[-1], flags.show), flush=True)
    print(format_gates(results))
    print(f"{time.monotonic() - start:.1f} s")
    if flags.json:
        gates = {
            result.name: result.as_json() for result in results if result.threshold is not None
        }
        reported = {result.name: result.as_json() for result in results if result.threshold is None}
        asked = {"limit": flags.limit, "seed": flags.seed}
        flags.json.write_text(json.dumps({"gates": gates, "reported": reported, **asked}) + "\n")
    return int(any(result.is_missed for result in results))


if __name__ == "__main__":
    sys.exit(main())
