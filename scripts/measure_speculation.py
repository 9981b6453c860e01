"""Measures the gain of speculation: tokens per second of the embedded model, drafts on and off.

    OMP_NUM_THREADS=1 python scripts/measure_speculation.py [--rounds 3] [--problems 24]
    python scripts/measure_speculation.py --device cuda --tasks "word problems" --drafters mtp:2

There are two tasks; requests run one at a time. Word problems are held out from training and
answered freely. In copy editing, the reply repeats a text of the prompt with one in thirty words
replaced. The model is too small for that, so a grammar forces the reply, with and without drafts;
tokens that the grammar forces are drafted only in rows that say so.

Engines alternate after every request; the time of a request is the median of its rounds. On a CPU,
the gain is in CPU time of the process, because wall time (also reported) depends on other load, and
replies must be equal. On a GPU the gain is in wall time, and the share of equal replies is
reported: steps of several tokens round differently in bf16. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import platform
import re
import statistics
import subprocess
import time
from dataclasses import dataclass
from typing import Any

import torch

from penstock import LLM
from penstock.commands.provenance import gpu_name
from penstock.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.eval import held_out
from penstock.text.grammar import regex_grammar
from penstock.text.tokenizer import Tokenizer
from penstock.types import Request, SamplingParams

WORDS_AN_EDIT = 30  # of which one is replaced
NUM_PARTS = 40  # points of a plot


@dataclass(frozen=True)
class Setup:
    speculate: str
    forces: bool = False  # drafts tokens that the grammar forces

    @property
    def name(self) -> str:
        return f"{self.speculate} and what the grammar forces" if self.forces else self.speculate

    def engine(self, device: str = "cpu") -> Engine:
        config = EngineConfig(device=device, memory_gb=0.3, speculate=self.speculate)
        engine = Engine.from_config(config)
        if not self.forces:
            engine.policy.speculator._forced_ids = lambda *_: ()
            engine.policy.appends_forced = False
        return engine


def word_problems(num_problems: int, ends: tuple[int, ...]) -> list[Request]:
    llm = LLM(device="cpu", memory_gb=0.2)
    problems = held_out.take("word_problems", num_problems, seed=0)
    return [
        Request(
            id=f"p{number}",
            token_ids=tuple(llm.encode_chat(list(one.messages[:-1]), enable_thinking=False)),
            sampling=SamplingParams(max_tokens=200),
            end_token_ids=ends,
        )
        for number, one in enumerate(problems)
    ]


def copy_editing(num_texts: int, tokenizer: Tokenizer, ends: tuple[int, ...]) -> list[Request]:
    problems = held_out.take("word_problems", 4 * num_texts, seed=0)
    texts = [one.messages[-2]["content"] for one in problems]
    requests = []
    for number in range(num_texts):
        text = " ".join(texts[4 * number : 4 * number + 4])
        words = text.split(" ")
        edited = " ".join(
            "another" if place % WORDS_AN_EDIT == 9 else word for place, word in enumerate(words)
        )
        grammar = regex_grammar(re.escape(edited).replace("\\ ", " "))
        requests.append(
            Request(
                id=f"c{number}",
                token_ids=tuple(tokenizer.encode(f"{text}\n")),
                sampling=SamplingParams(max_tokens=400, grammar=grammar),
                end_token_ids=ends,
            )
        )
    return requests


@dataclass(frozen=True)
class Reply:
    """Times are from the first token to the last."""

    token_ids: list[int]
    cpu_s: float
    wall_s: float
    tokens_of_steps: list[int]


def reply(engine: Engine, request: Request) -> Reply:
    engine.submit(request)
    tokens: list[int] = []
    while not tokens:
        tokens += [token for delta in engine.step() for token in delta.token_ids]
    steps = []
    cpu, wall = time.process_time(), time.perf_counter()
    while engine.has_work:
        new = [token for delta in engine.step() for token in delta.token_ids]
        steps.append(len(new))
        tokens += new
    return Reply(tokens, time.process_time() - cpu, time.perf_counter() - wall, steps)


def measure(
    name: str, requests: list[Request], setups: list[Setup], rounds: int, device: str
) -> list[Any]:
    """Engines alternate after every request, so that all see the same disturbances."""
    engines = [setup.engine(device) for setup in setups]
    # [setup][request][round]
    said: list[list[list[Reply]]] = [[[] for _ in requests] for _ in setups]
    for turn in range(rounds):
        for number, request in enumerate(requests):
            for place, engine in enumerate(engines):
                # One tenant per round, so that no drafts come from the same reply of another round.
                again = dataclasses.replace(request, id=f"{request.id}.{turn}", tenant=str(turn))
                one = reply(engine, again)
                said[place][number].append(one)
                plain = said[0][number][0].token_ids
                is_same = one.token_ids == plain
                assert is_same or device != "cpu", f"{setups[place]} says something else"
    rows = []
    plain_times = _times(said[0])
    measured = 0 if device == "cpu" else 1  # CPU time, or wall time
    for setup, engine, replies in zip(setups, engines, said):
        drafts = engine.stats().drafts
        times = _times(replies)
        same = [
            one.token_ids == plain[0].token_ids
            for rounds_of, plain in zip(replies, said[0])
            for one in rounds_of
        ]
        steps = [one.tokens_of_steps for rounds_of in replies for one in rounds_of]
        rows.append(
            {
                "task": name,
                "speculate": setup.name,
                "tokens_per_second": round(1 / times[measured], 1),
                "gain": round(plain_times[measured] / times[measured], 2),
                "gain_in_wall_time": round(plain_times[1] / times[1], 2),
                "same_replies": round(statistics.fmean(same), 2),
                "tokens_a_step": round(sum(map(sum, steps)) / sum(map(len, steps)), 2),
                "acceptance": {
                    f"{count.drafter} {count.place}": round(
                        count.num_accepted / count.num_drafted, 2
                    )
                    for count in (drafts.counts if drafts else ())
                },
                "tokens_over_time": _over_time(steps),
            }
        )
    return rows


def _times(replies: list[list[Reply]]) -> tuple[float, float]:
    """CPU and wall seconds per token over all requests; medians over rounds per request."""
    cpu = sum(statistics.median(one.cpu_s for one in rounds_of) for rounds_of in replies)
    wall = sum(statistics.median(one.wall_s for one in rounds_of) for rounds_of in replies)
    num_tokens = sum(
        statistics.median(len(one.token_ids) - 1 for one in rounds_of) for rounds_of in replies
    )
    return cpu / num_tokens, wall / num_tokens


def _over_time(steps: list[list[int]]) -> list[float]:
    """Tokens per step over time, for all requests, averaged over NUM_PARTS parts."""
    every = [tokens for one in steps for tokens in one]
    edges = [len(every) * part // NUM_PARTS for part in range(NUM_PARTS + 1)]
    return [
        round(statistics.fmean(every[begin:end]), 2)
        for begin, end in itertools.pairwise(edges)
        if end > begin
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--problems", type=int, default=24)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tasks", default="word problems,copy editing")
    parser.add_argument("--drafters", default="mtp:1,mtp:2,mtp:3,ngram:7,suffix:7")
    given = parser.parse_args()
    tokenizer = Tokenizer.load(None)
    ends = tokenizer.eos_token_ids
    drafters = [Setup(name) for name in given.drafters.split(",")]
    rows: list[Any] = []
    if "word problems" in given.tasks:
        rows += measure(
            "word problems",
            word_problems(given.problems, ends),
            [Setup("off"), *drafters],
            given.rounds,
            given.device,
        )
    if "copy editing" in given.tasks:
        lookups = [Setup("off"), *(Setup(f"ngram:{n}") for n in (3, 7, 15))]
        rows += measure(
            "copy editing",
            copy_editing(given.problems // 6, tokenizer, ends),
            [*lookups, Setup("suffix:7"), *(Setup(name, True) for name in ("off", "ngram:7"))],
            given.rounds,
            given.device,
        )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    )
    result = {
        "what": "tokens a second of the embedded model with drafts, one request at a time",
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "machine": gpu_name()
        if given.device != "cpu"
        else f"{platform.machine()}, {torch.get_num_threads()} thread",
        "torch": torch.__version__,
        "rounds": given.rounds,
        "rows": rows,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
