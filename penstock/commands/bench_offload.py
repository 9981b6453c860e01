"""`penstock bench offload`: replies of a model whose experts are not all on the device.

Runs the same requests several times and compares their tokens: with those of the resident model, if
asked for, else with those of the first run. Times stand beside the floor that the missed bytes set
at the speeds of the tiers, measured in the same run.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import random
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.commands.console import print_table
from penstock.commands.flags import read_settings
from penstock.commands.provenance import cpu_name, gpu_name, provenance
from penstock.config import EngineConfig, from_mapping
from penstock.errors import ConfigError
from penstock.eval.results import deliver_line, prepare_output
from penstock.models.source import find_model, is_converted
from penstock.progress import PhaseList, timed
from penstock.types import Request, SamplingParams

if TYPE_CHECKING:
    from penstock.engine.engine import Engine
    from penstock.offload.speeds import TierSpeeds

COLUMNS = [
    *("batch", "prompt tok/s", "tok/s avg", "min", "max", "hits", "RAM", "disk"),
    *("copied GB/s", "of floor", "tokens"),
]
Tokens = dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class Run:
    tokens: Tokens
    prompt_s: float
    decode_s: float
    counts: dict[str, int]  # of the store, while tokens were decoded


def run(arguments: argparse.Namespace) -> int:
    prepare_output(arguments.json, "--json")
    settings = read_settings(EngineConfig, arguments)
    settings["max_rows"] = max(arguments.batch)
    settings["max_model_len"] = max(arguments.context) + arguments.new_tokens + 1
    settings["prefix_cache"] = False
    config: EngineConfig = from_mapping(EngineConfig, settings)
    source = find_model(config.model)
    with PhaseList() as phases:
        with timed("libraries", phases):
            from penstock.engine.device import leave_a_core, select_device
            from penstock.engine.engine import Engine
            from penstock.offload.speeds import measure_speeds
        select_device(config.device)
        leave_a_core()
        expected: dict[int, Tokens] = {}
        context = max(arguments.context)
        if arguments.against_resident:
            room_for_all = "1000TB" if is_converted(source.path) else None
            resident = dataclasses.replace(config, expert_cache=room_for_all, expert_ram=None)
            engine = Engine.from_source(source, resident)
            with timed("resident", phases):
                for batch in arguments.batch:
                    expected[batch] = _run(engine, batch, context, arguments.new_tokens).tokens
            del engine
            gc.collect()
        engine = Engine.from_source(source, config, phases)
        store = engine.expert_store
        if store is None:
            raise ConfigError(
                f"All experts of {source.name} are on the device",
                todo="Give --expert-cache less than they take, or use `penstock bench step`.",
            )
        with timed("tiers", phases):
            speeds = measure_speeds(store, store.num_experts // store.num_layers)
    rows = []
    for batch in arguments.batch:
        with PhaseList() as phases, timed(f"batch {batch}", phases):
            runs = [
                _run(engine, batch, context, arguments.new_tokens)
                for _ in range(arguments.runs + 1)
            ]
        rows.append(_summarize(batch, context, runs, speeds, expected.get(batch)))
    title = f"offload: {source.name}, {engine.info.dtype}, {gpu_name() or cpu_name()}"
    print_table(COLUMNS, [_as_row(row) for row in rows], title)
    report = {
        "bench": "offload",
        **provenance(),
        "gpu": gpu_name() if engine.info.device != "cpu" else None,
        "model": source.name,
        "dtype": engine.info.dtype,
        "quantization": config.quantization,
        "slots": store.num_slots,
        "slot_bytes": store.num_bytes,
        "experts": store.num_experts,
        "others_in": store.host.place,
        "copy_gb_per_s": round(speeds.copy / 1e9, 3),
        "read_gb_per_s": None if speeds.read is None else round(speeds.read / 1e9, 3),
        "rows": rows,
    }
    deliver_line(json.dumps(report), arguments.json, "--json")
    return 0 if all(row["match"] for row in rows) else 1


def _run(engine: Engine, batch: int, context: int, num_new: int) -> Run:
    """The same prompts in every run; greedy, to the last token."""
    rng = random.Random(batch)
    tokens: Tokens = {}
    for row in range(batch):
        prompt = tuple(rng.randrange(engine.info.vocab_size) for _ in range(context))
        sampling = SamplingParams(max_tokens=num_new)
        engine.submit(Request(id=str(row), token_ids=prompt, sampling=sampling))
        tokens[str(row)] = []
    started = time.perf_counter()
    first_at, before = None, dict[str, int]()
    while engine.has_work:
        for delta in engine.step():
            tokens[delta.request_id] += delta.token_ids
        if first_at is None and all(tokens.values()):
            first_at, before = time.perf_counter(), dict(engine.stats().experts)
    ended = time.perf_counter()
    assert first_at is not None
    after = engine.stats().experts
    counts = {name: count - before.get(name, 0) for name, count in after.items()}
    return Run(tokens, first_at - started, ended - first_at, counts)


def _summarize(
    batch: int, context: int, runs: list[Run], speeds: TierSpeeds, expected: Tokens | None
) -> dict[str, Any]:
    """The first run fills the slots, and is not timed."""
    timed_runs = runs[1:]
    num_new = sum(len(tokens) - 1 for tokens in runs[0].tokens.values())
    rates = [num_new / max(one.decode_s, 1e-9) for one in timed_runs]

    def total(name: str) -> int:
        return sum(one.counts.get(name, 0) for one in timed_runs)

    decode_s = sum(one.decode_s for one in timed_runs)
    lookups = max(total("hits") + total("misses"), 1)
    floor_s = total("fetched_bytes") / speeds.copy
    if speeds.read is not None:
        floor_s = max(floor_s, total("disk_bytes") / speeds.read)
    return {
        "batch": batch,
        "context": context,
        "prompt_tok_s": batch * context / statistics.mean(one.prompt_s for one in timed_runs),
        "tok_s": statistics.mean(rates),
        "tok_s_min": min(rates),
        "tok_s_max": max(rates),
        "hit_rate": total("hits") / lookups,
        "ram_rate": total("ram_hits") / lookups,
        "disk_rate": total("disk_reads") / lookups,
        "copied_gb_per_s": total("fetched_bytes") / decode_s / 1e9,
        "read_gb_per_s": total("disk_bytes") / decode_s / 1e9,
        "of_floor": floor_s / decode_s,
        "compared_with": "first run" if expected is None else "resident",
        "match": all(one.tokens == (expected or runs[0].tokens) for one in runs),
    }


def _as_row(row: dict[str, Any]) -> list[str]:
    rates = [f"{row[name]:.1f}" for name in ("prompt_tok_s", "tok_s", "tok_s_min", "tok_s_max")]
    shares = [f"{row[name]:.1%}" for name in ("hit_rate", "ram_rate", "disk_rate")]
    word = "MATCH" if row["match"] else "MISMATCH"
    return [
        str(row["batch"]),
        *rates,
        *shares,
        f"{row['copied_gb_per_s']:.2f}",
        f"{row['of_floor']:.0%}",
        f"{word} ({row['compared_with']})",
    ]
