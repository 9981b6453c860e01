"""Times prompts and decode steps of one GGUF file on a CPU, beside llama.cpp on the same file:

    python scripts/make_random_gguf.py Qwen3.5-2B -o /tmp/random.gguf
    python scripts/measure_cpu.py /tmp/random.gguf --json results.json

The two take turns, each in its own process, because a machine's speed varies by the minute. Without
the package `llama-cpp-python`, only Penstock is timed. All tokens are random, so that a step's
experts are not those of the step before: Penstock samples them, and llama.cpp's steps include no
sampling.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

NAMES = {"penstock": "Penstock", "llama_cpp": "llama.cpp"}
NUM_ROWS = (1, 8)
PROMPTS = (60, 512)  # tokens
SHORT, NUM_STEPS, NUM_PROMPTS = 60, 24, 3
FIRST_TOKEN, LAST_TOKEN = 3, 250  # every vocabulary has these

Prefill = Callable[[int, int], float]  # rows, tokens of each -> ms
Steps = Callable[[int, int], list[float]]  # rows, tokens before them -> ms of each step


def main() -> None:
    parser = argparse.ArgumentParser(description="Times a GGUF file on a CPU beside llama.cpp.")
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--contexts", type=int, nargs="+", default=[SHORT], help="of the steps")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each (default: 3)")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--only", choices=list(NAMES), help="time this one, in this process")
    given = parser.parse_args()
    if given.only:
        print(json.dumps(measure(given.only, given.model, given.threads, given.contexts)))
        return
    engines = [name for name in NAMES if name == "penstock" or importlib.util.find_spec(name)]
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for number in range(given.rounds):
        for name in engines:
            runs[name].append(in_process(name, given.model, given.threads, given.contexts))
            print(f"round {number + 1}, {NAMES[name]}: {runs[name][-1]}", flush=True)
    rows = summarize(runs)
    for row in rows:
        print(
            "  ".join(f"{name} {value}" if name != "case" else value for name, value in row.items())
        )
    result = {"model": given.model.name, "threads": given.threads, **circumstances(), "rows": rows}
    if given.json:
        given.json.write_text(json.dumps(result, indent=2) + "\n")


def in_process(name: str, model: Path, threads: int, contexts: Sequence[int]) -> dict[str, float]:
    command = [sys.executable, __file__, str(model), "--threads", str(threads), "--only", name]
    command += ["--contexts", *map(str, contexts)]
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        print(done.stderr, file=sys.stderr)  # llama.cpp also logs there
        sys.exit(f"error: {NAMES[name]} ended with exit status {done.returncode}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(name: str, model: Path, threads: int, contexts: Sequence[int]) -> dict[str, float]:
    """Milliseconds: the fastest of some prompts, the median of steps."""
    prefill, steps = {"penstock": of_penstock, "llama_cpp": of_llama_cpp}[name](model, threads)
    prefill(1, SHORT)
    times = {f"prompt of {n}": min(prefill(1, n) for _ in range(NUM_PROMPTS)) for n in PROMPTS}
    times[f"{NUM_ROWS[-1]} prompts of {SHORT}"] = min(
        prefill(NUM_ROWS[-1], SHORT) for _ in range(NUM_PROMPTS)
    )
    for context in contexts:
        for rows in NUM_ROWS:
            times[f"step of {rows} at {context}"] = statistics.median(steps(rows, context))
    return {case: round(ms, 1) for case, ms in times.items()}


def summarize(runs: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """The median of the rounds; `ratio`: how many times as fast as llama.cpp."""
    rows = []
    for case in runs["penstock"][0]:
        medians = {
            f"{name}_ms": round(statistics.median(run[case] for run in of_one), 1)
            for name, of_one in runs.items()
        }
        row: dict[str, Any] = {"case": case, **medians}
        if "llama_cpp_ms" in row:
            row["ratio"] = round(row["llama_cpp_ms"] / row["penstock_ms"], 2)
        rows.append(row)
    return rows


def circumstances() -> dict[str, Any]:
    from penstock.commands.provenance import provenance

    known = provenance()
    names = ("time", "commit", "cpu", "num_cpus", "torch")
    found = {name: known[name] for name in names}
    if importlib.util.find_spec("llama_cpp"):
        found["llama_cpp"] = importlib.metadata.version("llama-cpp-python")
    return found


def of_penstock(model: Path, threads: int) -> tuple[Prefill, Steps]:
    """Whole steps of the engine: plan, forward pass and sampling."""
    import torch

    from penstock.config import EngineConfig
    from penstock.engine.engine import Engine
    from penstock.types import Request, SamplingParams

    torch.set_num_threads(threads)
    engine = Engine.from_config(EngineConfig(model=str(model), device="cpu"))

    def times(rows: int, num_tokens: int, new: int) -> list[tuple[float, int]]:
        """Milliseconds of each step, and how many rows gained a token."""
        for _ in range(rows):
            sampling = SamplingParams(max_tokens=new, temperature=1.0, seed=random.getrandbits(32))
            token_ids = random_tokens(num_tokens)
            engine.submit(Request(id=str(sampling.seed), token_ids=token_ids, sampling=sampling))
        found = []
        while engine.has_work:
            start = time.perf_counter()
            deltas = engine.step()
            found.append(((time.perf_counter() - start) * 1e3, len(deltas)))
        return found

    def steps(rows: int, context: int) -> list[float]:
        """Those of all rows: prompts may end in different steps."""
        return [ms for ms, num_rows in times(rows, context, NUM_STEPS + 16) if num_rows == rows]

    return lambda rows, num_tokens: sum(ms for ms, _ in times(rows, num_tokens, 1)), steps


def of_llama_cpp(model: Path, threads: int) -> tuple[Prefill, Steps]:
    """`llama_decode` alone."""
    import llama_cpp as llama

    llama.llama_backend_init()
    loaded = llama.llama_model_load_from_file(
        str(model).encode(), llama.llama_model_default_params()
    )
    settings = llama.llama_context_default_params()
    settings.n_ctx = settings.n_batch = 1 << 14
    settings.n_seq_max = NUM_ROWS[-1]
    settings.n_threads = settings.n_threads_batch = threads
    settings.kv_unified = True
    context = llama.llama_init_from_model(loaded, settings)

    def decode(rows: int, first: int, num_tokens: int) -> float:
        batch = llama.llama_batch_init(rows * num_tokens, 0, 1)
        batch.n_tokens = rows * num_tokens
        for i, token in enumerate(random_tokens(rows * num_tokens)):
            row, place = divmod(i, num_tokens)
            batch.token[i], batch.pos[i] = token, first + place
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
            batch.logits[i] = place == num_tokens - 1
        start = time.perf_counter()
        assert llama.llama_decode(context, batch) == 0
        llama.llama_synchronize(context)
        ms = (time.perf_counter() - start) * 1e3
        llama.llama_batch_free(batch)
        return ms

    def prefill(rows: int, num_tokens: int) -> float:
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        return decode(rows, 0, num_tokens)

    def steps(rows: int, context: int) -> list[float]:
        prefill(rows, context)
        return [decode(rows, context + i, 1) for i in range(NUM_STEPS)]

    return prefill, steps


def random_tokens(count: int) -> tuple[int, ...]:
    return tuple(random.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(count))


if __name__ == "__main__":
    main()
