"""`penstock bench offload`: replies of a model whose experts are not all on the device.

Runs the same requests several times and compares their tokens: with `--against-resident` to those
of the resident model, otherwise to those of the first run. Times are compared with a floor: the
bytes of missed experts at the speeds of the tiers, measured in the same run.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.commands.console import print_table
from penstock.commands.flags import read_settings
from penstock.commands.provenance import cpu_name, gpu_name, provenance
from penstock.commands.roofline import text_config
from penstock.commands.started_server import server_words
from penstock.commands.tune import cut_layers
from penstock.config import EngineConfig, from_mapping
from penstock.errors import ConfigError
from penstock.eval.results import deliver_line, prepare_output
from penstock.models.source import ModelSource, find_model, is_converted
from penstock.progress import PhaseList, timed
from penstock.types import Request, SamplingParams

if TYPE_CHECKING:
    from penstock.engine.engine import Engine
    from penstock.offload.speeds import TierSpeeds

GPU_SHARE = {"memory_gb": 3.0, "max_step_tokens": 4096}  # what a small card would have left
BOTH = {**GPU_SHARE, "expert_misses": "auto"}


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    model: str
    expert_cache: str
    batch: int = 1
    context: int = 4096
    new_tokens: int = 64
    runs: int = 3
    layers: int | None = None  # run only this many, and project the time to all
    against_resident: bool = False
    is_cached: bool = False  # there is room for all experts
    settings: dict[str, Any] = field(default_factory=lambda: dict(GPU_SHARE))

    @property
    def engine(self) -> object:
        """Cases with an equal key can be measured with one engine."""
        given = tuple(sorted(self.settings.items()))
        return self.model, self.expert_cache, self.layers, self.against_resident, given


A3B, A10B, A17B = "Qwen3.5-35B-A3B", "Qwen3.5-122B-A10B", "Qwen3.5-397B-A17B"
RESIDENT: dict[str, Any] = {"against_resident": True}
SHORT: dict[str, Any] = {"new_tokens": 32, "runs": 2, "settings": BOTH}
# The same share of the experts in RAM as 64 GB hold with all 60 layers.
FROM_DISK = {"memory_gb": 1.0, "max_step_tokens": 512, "expert_ram": "8.5GB"}
ON_DISK: dict[str, Any] = {"context": 16, "new_tokens": 16, "runs": 1, "layers": 8}
FETCHED = "35B-A3B int4 6GB batch {}, all fetched"
# Models that do not fit a small card, on a large one with limited memory. Random weights and tokens
# choose experts at random, the worst case for any cache.
_LISTED = (
    Case("35B-A3B int4 6GB batch 1", A3B, "6GB", **RESIDENT, settings=BOTH),
    Case("35B-A3B int4 6GB batch 8", A3B, "6GB", batch=8, context=256, **RESIDENT, settings=BOTH),
    Case(FETCHED.format(1), A3B, "6GB", **RESIDENT),
    Case(FETCHED.format(8), A3B, "6GB", batch=8, context=256, **RESIDENT),
    Case("35B-A3B int4 all cached batch 1", A3B, "30GB", is_cached=True, **RESIDENT),
    Case("122B-A10B int4 24GB batch 1", A10B, "13.5GB", runs=2, settings=BOTH),
    Case("122B-A10B int4 24GB batch 8", A10B, "13.5GB", batch=8, context=256, **SHORT),
    Case("397B-A17B int4 RAM projected", A17B, "10.1GB", context=1024, layers=24, **SHORT),
    Case("397B-A17B int4 64GB RAM + disk projected", A17B, "3.5GB", **ON_DISK, settings=FROM_DISK),
)
CASES = {case.name: case for case in _LISTED}


COLUMNS = [
    *("batch", "prompt tok/s", "tok/s avg", "min", "max", "hits", "RAM", "disk"),
    *("copied GB/s", "of floor", "tokens"),
]
Tokens = dict[str, list[int]]
CPU_TOLERANCE = 2e-2  # relative to the largest value, as for any bfloat16 kernel


@dataclass(frozen=True, slots=True)
class Run:
    tokens: Tokens
    prompt_s: float
    decode_s: float  # since all requests have their first token
    num_decoded: int  # tokens since then
    counts: dict[str, int]  # the expert store's counters since then

    @property
    def decoded_per_s(self) -> float:
        return self.num_decoded / max(self.decode_s, 1e-9)


def run(arguments: argparse.Namespace) -> int:
    prepare_output(arguments.json, "--json")
    settings = read_settings(EngineConfig, arguments)
    if arguments.case:
        groups = group_cases(arguments.case)
        if len(groups) > 1:
            return _run_apart(groups, server_words(arguments), arguments.json)
        report = run_group(groups[0], settings)
    else:
        cases = [
            Case(
                name="",
                model=settings.get("model", ""),
                expert_cache="",
                batch=batch,
                context=max(arguments.context),
                new_tokens=arguments.new_tokens,
                runs=arguments.runs,
                against_resident=arguments.against_resident,
            )
            for batch in arguments.batch
        ]
        report = _measure(cases, settings)
    deliver_line(json.dumps(report), arguments.json, "--json")
    return 0 if all(row["match"] for row in report["rows"]) else 1


def group_cases(names: Sequence[str]) -> list[list[Case]]:
    """Groups the cases that one engine can run."""
    wanted = list(CASES) if "all" in names else names
    unknown = [name for name in wanted if name not in CASES]
    if unknown:
        raise ConfigError(
            f"There is no case {unknown[0]!r}",
            f"The cases are {', '.join(CASES)}.",
            "Use one of them, or `all`.",
        )
    groups: dict[object, list[Case]] = {}
    for name in wanted:
        groups.setdefault(CASES[name].engine, []).append(CASES[name])
    return list(groups.values())


def _run_apart(groups: list[list[Case]], flags: list[str], output: str | None) -> int:
    """Runs each group in its own process, one after the other, with the machine to itself."""
    report: dict[str, Any] = {**provenance(), "rows": [], "reports": []}
    for group in groups:
        words = [sys.executable, "-m", "penstock", "bench", "offload", *flags]
        for case in group:
            words += ["--case", case.name]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
        last = done.stdout.strip().rpartition("\n")[2]
        if not last.startswith("{"):
            print(f"{group[0].name}: no result, exit code {done.returncode}", file=sys.stderr)
            continue
        own = json.loads(last)
        report["rows"] += own["rows"]
        report["reports"].append({key: value for key, value in own.items() if key != "rows"})
    print_table(COLUMNS, [_as_row(row) for row in report["rows"]], "offload")
    deliver_line(json.dumps(report), output, "--json")
    has_all = len(report["rows"]) == sum(len(group) for group in groups)
    return 0 if has_all and all(row["match"] for row in report["rows"]) else 1


def run_group(group: Sequence[Case], given: dict[str, Any] | None = None) -> dict[str, Any]:
    """Flags of the command line (`given`) override the cases' own settings."""
    case = group[0]
    settings = {
        "model": case.model,
        "random_weights": True,
        "alike_experts": True,
        "quantization": "int4",
        "expert_cache": case.expert_cache,
        **case.settings,
        **(given or {}),
    }
    return _measure(group, settings)


def _measure(cases: Sequence[Case], settings: dict[str, Any]) -> dict[str, Any]:
    """Measures cases of one group, with one engine."""
    started = time.perf_counter()
    settings = {
        **settings,
        "max_rows": max(case.batch for case in cases),
        "max_model_len": max(case.context + case.new_tokens for case in cases) + 1,
        "prefix_cache": False,
    }
    settings.setdefault("speculate", "off")  # tokens are compared with those of plain steps
    config: EngineConfig = from_mapping(EngineConfig, settings)
    source, layers = find_model(config.model), cases[0].layers
    num_layers = text_config(source.config)["num_hidden_layers"]
    if layers is not None:
        source = cut_layers(source, layers)
    projection = 1.0 if layers is None else layers / num_layers
    with PhaseList() as phases:
        with timed("libraries", phases):
            from penstock.engine.device import leave_a_core, select_device
            from penstock.engine.engine import Engine
        select_device(config.device)
        leave_a_core()
        resident: list[Run | None] = [None] * len(cases)
        if cases[0].against_resident:
            with timed("resident", phases):
                resident = [*_run_resident(source, config, cases)]
        engine = Engine.from_source(source, config, phases)
        store, speeds = engine.expert_store, None
        if store is None and not cases[0].is_cached:
            raise ConfigError(
                f"All experts of {source.name} are on the device",
                todo="Lower --expert-cache below their size, or use `penstock bench step`.",
            )
        if store is not None:
            from penstock.offload.speeds import measure_speeds

            with timed("tiers", phases):
                speeds = measure_speeds(store, store.num_experts // store.num_layers)
    _forget_peak(engine.info.device)
    rows = []
    for case, known in zip(cases, resident, strict=True):
        expected = None if known is None else known.tokens
        with PhaseList() as phases, timed(f"batch {case.batch}", phases):
            check = _check_cpu(engine, case, expected)
            runs = [_run(engine, case) for _ in range(case.runs + 1)]
        row = {**_summarize(case, runs, speeds, expected, projection), **check}
        if known is not None:
            row["resident_tok_s"] = known.decoded_per_s
        rows.append(row)
    title = f"offload: {source.name}, {engine.info.dtype}, {gpu_name() or cpu_name()}"
    print_table(COLUMNS, [_as_row(row) for row in rows], title)
    return {
        "bench": "offload",
        **provenance(),
        "gpu": gpu_name() if engine.info.device != "cpu" else None,
        "gpu_gb": _gpu_gb(engine.info.device),
        "model": source.name,
        "layers": layers or num_layers,
        "dtype": engine.info.dtype,
        "quantization": config.quantization,
        "expert_misses": config.expert_misses,
        **({} if store is None else _describe(store, speeds)),
        "seconds": round(time.perf_counter() - started, 1),
        "rows": rows,
    }


def _describe(store: Any, speeds: TierSpeeds | None) -> dict[str, Any]:
    assert speeds is not None
    tiers = {name: getattr(speeds, name) for name in ("copy", "read", "fetch", "compute")}
    return {
        "slots": store.num_slots,
        "slot_bytes": store.num_bytes,
        "experts": store.num_experts,
        "others_in": store.host.place,
        **{
            f"{name}_gb_per_s": None if speed is None else round(speed / 1e9, 3)
            for name, speed in tiers.items()
        },
    }


def _check_cpu(engine: Engine, case: Case, expected: Tokens | None) -> dict[str, Any]:
    """If the CPU computes some misses, tokens depend on its rounding. So tokens are compared with
    all misses fetched, and the CPU's products with those of fetched experts.
    """
    store = engine.expert_store
    if getattr(store, "products", None) is None:
        return {}
    from penstock.offload.device_slots import DeviceSlots
    from penstock.offload.host_products import largest_difference
    from penstock.offload.load import sparse_layers

    assert isinstance(store, DeviceSlots)
    mlps = list(sparse_layers(engine.runner.model).values())  # type: ignore[arg-type]
    difference = largest_difference(store, mlps)
    share = store.host_share.clone()
    products, store.host_share[:] = store.products, 0.0
    assert products is not None
    split, products.split = products.split, None
    runs = [_run(engine, case) for _ in range(1 if expected else 2)]
    products.split = split
    store.host_share.copy_(share)
    is_same = all(one.tokens == (expected or runs[0].tokens) for one in runs)
    return {
        "cpu_share": float(share),
        "cpu_difference": difference,
        "compared_with": "resident, if fetched" if expected else "first run, if fetched",
        "match": is_same and difference <= CPU_TOLERANCE,
    }


def _forget_peak(device: str) -> None:
    """Resets the peak memory: at start, creating the weights takes more."""
    if device != "cpu":
        import torch

        gc.collect()
        torch.cuda.reset_peak_memory_stats()


def _gpu_gb(device: str) -> float | None:
    """The peak memory of tensors since `_forget_peak`."""
    if device == "cpu":
        return None
    import torch

    return round(torch.cuda.max_memory_allocated() / 1e9, 2)


def _run_resident(source: ModelSource, config: EngineConfig, cases: Sequence[Case]) -> list[Run]:
    """The second of two runs of each case, with all experts on the device."""
    from penstock.engine.engine import Engine

    room_for_all = "1000TB" if is_converted(source.path) else None
    resident = dataclasses.replace(
        config, expert_cache=room_for_all, expert_ram=None, expert_misses="fetch", expert_log=None
    )
    engine = Engine.from_source(source, resident)
    found = [[_run(engine, case) for _ in range(2)][1] for case in cases]
    del engine
    gc.collect()
    if config.device != "cpu":
        import torch

        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    return found


def _run(engine: Engine, case: Case) -> Run:
    """Runs the same prompts in every run. Tokens are sampled with fixed seeds: greedy replies of
    random weights repeat themselves, and so do their experts.
    """
    rng = random.Random(case.batch)
    tokens: Tokens = {}
    for row in range(case.batch):
        prompt = tuple(rng.randrange(engine.info.vocab_size) for _ in range(case.context))
        sampling = SamplingParams(max_tokens=case.new_tokens, temperature=1.0, seed=row)
        engine.submit(Request(id=str(row), token_ids=prompt, sampling=sampling))
        tokens[str(row)] = []
    started = time.perf_counter()
    first_at, before, num_first = None, dict[str, int](), 0
    while engine.has_work:
        for delta in engine.step():
            tokens[delta.request_id] += delta.token_ids
        if first_at is None and all(tokens.values()):
            first_at, before = time.perf_counter(), _counts(engine)
            num_first = sum(map(len, tokens.values()))
    ended = time.perf_counter()
    assert first_at is not None
    counts = {name: count - before.get(name, 0) for name, count in _counts(engine).items()}
    num_decoded = sum(map(len, tokens.values())) - num_first
    return Run(tokens, first_at - started, ended - first_at, num_decoded, counts)


def _counts(engine: Engine) -> dict[str, int]:
    store = engine.expert_store
    return {} if store is None else dict(getattr(store, "stats_now", store.stats)())


def _summarize(
    case: Case,
    runs: list[Run],
    speeds: TierSpeeds | None,
    expected: Tokens | None,
    projection: float,
) -> dict[str, Any]:
    """Leaves out the first run's times: it fills the slots."""
    timed_runs = runs[1:]
    rates = [projection * one.decoded_per_s for one in timed_runs]

    def total(name: str) -> int:
        return sum(one.counts.get(name, 0) for one in timed_runs)

    decode_s = sum(one.decode_s for one in timed_runs)
    lookups = max(total("hits") + total("misses"), 1)
    missed = total("fetched_bytes") + total("computed_bytes")
    floor_s = 0.0 if speeds is None else missed / speeds.best
    if speeds is not None and speeds.read is not None:
        floor_s = max(floor_s, total("disk_bytes") / speeds.read)
    prompt_s = statistics.mean(one.prompt_s for one in timed_runs)
    return {
        **({"case": case.name} if case.name else {}),
        "batch": case.batch,
        "context": case.context,
        "prompt_tok_s": projection * case.batch * case.context / prompt_s,
        "tok_s": statistics.mean(rates),
        "tok_s_min": min(rates),
        "tok_s_max": max(rates),
        "is_projected": projection != 1.0,
        "hit_rate": total("hits") / lookups,
        "ram_rate": total("ram_hits") / lookups,
        "disk_rate": total("disk_reads") / lookups,
        "copied_gb_per_s": total("fetched_bytes") / decode_s / 1e9,
        "computed_gb_per_s": total("computed_bytes") / decode_s / 1e9,
        "read_gb_per_s": total("disk_bytes") / decode_s / 1e9,
        "of_floor": None if speeds is None else floor_s / decode_s,
        "compared_with": "first run" if expected is None else "resident",
        "match": all(one.tokens == (expected or runs[0].tokens) for one in runs),
    }


def _as_row(row: dict[str, Any]) -> list[str]:
    rates = [f"{row[name]:.1f}" for name in ("prompt_tok_s", "tok_s", "tok_s_min", "tok_s_max")]
    shares = [f"{row[name]:.1%}" for name in ("hit_rate", "ram_rate", "disk_rate")]
    word = "MATCH" if row["match"] else "MISMATCH"
    return [
        row.get("case", str(row["batch"])),
        *rates,
        *shares,
        f"{row['copied_gb_per_s']:.2f}",
        "" if row["of_floor"] is None else f"{row['of_floor']:.0%}",
        f"{word} ({row['compared_with']})",
    ]
