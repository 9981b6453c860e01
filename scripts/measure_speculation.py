"""What drafts bring on a CPU: tokens a second of the embedded model, with drafts and without.

    OMP_NUM_THREADS=1 python scripts/measure_speculation.py [--rounds 3] [--problems 24]

Two tasks, one request at a time. Word problems are held out from training, and answered freely. For
copy editing the reply is a text of the prompt with one in thirty words replaced; the model is too
small to do that, so a grammar holds it to the reply, with drafts and without, and what the grammar
forces is drafted only where a row says so. Engines take turns, round by round; times are CPU time
of the process, since wall time depends on what else runs. Prints one JSON object.
"""

from __future__ import annotations

import argparse
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
from penstock.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.eval import held_out
from penstock.text.grammar import regex_grammar
from penstock.text.tokenizer import Tokenizer
from penstock.types import Request, SamplingParams

WORDS_AN_EDIT = 30  # one of them is replaced


@dataclass(frozen=True)
class Setup:
    speculate: str
    forces: bool = False  # drafts what a grammar forces

    @property
    def name(self) -> str:
        return f"{self.speculate} and what the grammar forces" if self.forces else self.speculate

    def engine(self) -> Engine:
        config = EngineConfig(device="cpu", memory_gb=0.3, speculate=self.speculate)
        engine = Engine.from_config(config)
        if not self.forces:
            engine.policy.speculator._forced_ids = lambda *_: ()
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


def replies(engine: Engine, requests: list[Request]) -> tuple[list[list[int]], float, int]:
    """Tokens, seconds from each reply's first token to its last, and the steps of that time."""
    said, seconds, num_steps = [], 0.0, 0
    for request in requests:
        engine.submit(request)
        tokens: list[int] = []
        while not tokens:
            tokens += [token for delta in engine.step() for token in delta.token_ids]
        started = time.process_time()
        while engine.has_work:
            tokens += [token for delta in engine.step() for token in delta.token_ids]
            num_steps += 1
        seconds += time.process_time() - started
        said.append(tokens)
    return said, seconds, num_steps


def measure(name: str, requests: list[Request], setups: list[Setup], rounds: int) -> list[Any]:
    engines = [setup.engine() for setup in setups]
    times: list[list[float]] = [[] for _ in setups]
    steps = [0] * len(setups)
    plain: list[list[int]] = []
    for _ in range(rounds):
        for place, engine in enumerate(engines):
            said, seconds, steps[place] = replies(engine, requests)
            plain = plain or said
            assert said == plain, f"{setups[place]} says something else"
            times[place].append(seconds)
    num_tokens = sum(len(tokens) - 1 for tokens in plain)
    rows = []
    for setup, engine, seconds_of, num_steps in zip(setups, engines, times, steps):
        drafts = engine.stats().drafts
        rows.append(
            {
                "task": name,
                "speculate": setup.name,
                "tokens_per_second": round(num_tokens / statistics.median(seconds_of), 1),
                "gain": round(statistics.median(times[0]) / statistics.median(seconds_of), 2),
                "tokens_a_step": round(num_tokens / num_steps, 2),
                "acceptance": {
                    f"{count.drafter} {count.place}": round(
                        count.num_accepted / count.num_drafted, 2
                    )
                    for count in (drafts.counts if drafts else ())
                },
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--problems", type=int, default=24)
    given = parser.parse_args()
    tokenizer = Tokenizer.load(None)
    ends = tokenizer.eos_token_ids
    heads = [Setup(f"mtp:{number}") for number in (1, 2, 3)]
    rows = measure(
        "word problems",
        word_problems(given.problems, ends),
        [Setup("off"), *heads, Setup("ngram:7")],
        given.rounds,
    )
    lookups = [Setup("off"), *(Setup(f"ngram:{n}") for n in (3, 7, 15))]
    rows += measure(
        "copy editing",
        copy_editing(given.problems // 6, tokenizer, ends),
        [*lookups, Setup("ngram:7", forces=True)],
        given.rounds,
    )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    )
    result = {
        "what": "tokens a second of the embedded model with drafts, one request at a time",
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} thread",
        "torch": torch.__version__,
        "rounds": given.rounds,
        "rows": rows,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
