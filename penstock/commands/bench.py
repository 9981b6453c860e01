"""`penstock bench`: times decode steps and prefills of the engine, next to the memory-bandwidth
floor.

Prints a table for people and, as the last line of stdout, one JSON object with the provenance of
the numbers. `measure` takes the times, `breakdown` shows the kernels of a step; `bench_serve`
measures a server under load.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.commands import bench_drafts, bench_offload, bench_serve, breakdown
from penstock.commands.console import print_table
from penstock.commands.flags import (
    UsageError,
    add_flags,
    foreign_flag,
    read_chances,
    read_count,
    read_counts,
    read_number,
    read_settings,
)
from penstock.commands.measure import (
    CHECK_TOKENS,
    COLUMNS,
    PROFILED_STEPS,
    Bench,
    Measurement,
    check_decode,
    is_on_gpu,
    load_engine,
    measure_limits,
    require_room,
    roofline_of,
)
from penstock.commands.provenance import cpu_name, provenance
from penstock.commands.rank_share import ALL_REDUCE_US, Links
from penstock.commands.rank_share import COLUMNS as SHARE_COLUMNS
from penstock.commands.roofline import text_config
from penstock.commands.variables import typed_fields
from penstock.config import EngineConfig, from_mapping
from penstock.errors import ConfigError
from penstock.eval.results import deliver_line, prepare_output, require_at_least
from penstock.models.source import ModelSource, find_model
from penstock.progress import Phase, PhaseList, timed
from penstock.types import SamplingParams

if TYPE_CHECKING:
    from penstock.engine.logits_engine import LogitsEngine

USAGE = "penstock bench {step,prefill,engine,offload,serve} [-m MODEL] [flags]"
DESCRIPTION = (
    "Time decode steps or prefills through the engine's own runner, or a server under load."
)
EXAMPLES = [
    "penstock bench step -m Qwen3.5-35B-A3B --random-weights --batch 1,2,4,8 --context 1536",
    "penstock bench step -m Qwen3.5-35B-A3B --random-weights --batch 1,8 --drafts 1,2,3 "
    "--acceptance 0.85,0.75,0.65",
    "penstock bench step -m Qwen3.5-397B-A17B --tp 8 --random-weights    one rank's part of a step",
    "penstock bench prefill -m Qwen3.5-4B --random-weights --batch 1,8 --context 1k --json "
    "prefill.json",
    "penstock bench offload -m Qwen3.5-35B-A3B --random-weights --quantization int4 "
    "--expert-cache 6GB",
    "penstock bench serve -m Qwen3.5-35B-A3B --random-weights --concurrency 1,8,64 --input-len 1k",
    "penstock bench serve --base-url http://host:9000 --trace conversations.csv --limit 500 "
    "--speedup 2",
]

WARMUP = 3
OWN_DEFAULTS = {
    "batch": (1,),
    "context": (1024,),
    "repeats": 20,
    "sampled": False,
    "breakdown": False,
    "all_reduce_us": ALL_REDUCE_US,
}
DRAFT_DEFAULTS = {"drafts": (), "acceptance": (0.85, 0.75, 0.65)}
OFFLOAD_DEFAULTS = {"runs": 3, "new_tokens": 32, "against_resident": False, "case": []}
SAMPLED = SamplingParams(temperature=0.7, top_p=0.8, top_k=20)  # uses every filter, as chats do


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=("step", "prefill", "engine", "offload", "serve"),
        help="decode steps, prefills, decode steps through the scheduler, replies with experts in "
        "RAM or files, or a server under load",
    )
    parser.add_argument("--batch", type=read_counts, metavar="N,N", help="requests per step")
    parser.add_argument(
        "--context", type=read_counts, metavar="N,N", help="cached tokens, or prompt tokens"
    )
    parser.add_argument("--repeats", type=read_count, metavar="N", help="timed runs per shape")
    parser.add_argument(
        "--warmup",
        type=read_count,
        default=WARMUP,
        metavar="N",
        help="untimed runs before the timed",
    )
    parser.add_argument(
        "--sampled", action="store_true", help="sample with temperature, top_k and top_p"
    )
    offload = parser.add_argument_group("bench offload")
    offload.add_argument("--runs", type=read_count, metavar="N", help="timed runs per batch")
    offload.add_argument("--new-tokens", type=read_count, metavar="N", help="tokens per reply")
    offload.add_argument(
        "--against-resident",
        action="store_true",
        help="compare tokens with those of an engine that has all experts on the device",
    )
    offload.add_argument(
        "--case",
        action="append",
        metavar="NAME",
        help="a case of results/h200/offload.json, which sets model and settings, or `all`",
    )
    parser.add_argument(
        "--all-reduce-us",
        type=read_number,
        metavar="X",
        help="with --tp: cost of an all-reduce in microseconds, added to the rank's own time "
        f"(default: {ALL_REDUCE_US:g})",
    )
    parser.add_argument(
        "--breakdown", action="store_true", help="also time each kernel of a step or prefill (GPU)"
    )
    drafts = parser.add_argument_group("bench step with drafts")
    drafts.add_argument(
        "--drafts",
        type=read_counts,
        metavar="N,N",
        help="drafts per row: times steps with the drafting head, and plain steps for comparison",
    )
    drafts.add_argument(
        "--acceptance",
        type=read_chances,
        metavar="P,P",
        help="probability that draft 1, 2, ... is accepted if those before it were; simulated, "
        "whatever the weights",
    )
    parser.add_argument("--json", metavar="FILE", help="write the JSON object to this file too")
    add_flags(parser, EngineConfig, title="the engine", skip=bench_serve.SERVER_FLAGS)
    bench_serve.add_arguments(parser)
    parser.set_defaults(**OWN_DEFAULTS, **OFFLOAD_DEFAULTS, **DRAFT_DEFAULTS)


def run(arguments: argparse.Namespace) -> int:
    if arguments.what == "serve":
        _refuse(arguments, {**OWN_DEFAULTS, **OFFLOAD_DEFAULTS, **DRAFT_DEFAULTS})
        return bench_serve.run(arguments)
    bench_serve.refuse_flags(arguments)
    _check_shapes(arguments)
    if arguments.what != "step":
        _refuse(arguments, DRAFT_DEFAULTS)
    elif arguments.drafts:
        _refuse(arguments, {**OFFLOAD_DEFAULTS, "sampled": False})
        return bench_drafts.run(arguments)
    if arguments.what == "offload":
        names = ("repeats", "sampled", "breakdown", "all_reduce_us")
        _refuse(arguments, {"warmup": WARMUP, **{name: OWN_DEFAULTS[name] for name in names}})
        if arguments.case:
            _refuse_beside_case(arguments)
        return bench_offload.run(arguments)
    _refuse(arguments, OFFLOAD_DEFAULTS)
    prepare_output(arguments.json, "--json")
    config = _engine_config(arguments)
    source = find_model(config.model)
    is_share = config.tp > 1 and arguments.what != "engine"
    _require_positions(arguments, config, source)
    with PhaseList() as phases:
        engine = load_engine(source, config, phases, of_share=is_share)
        if engine.engine.expert_store is not None:
            raise ConfigError(
                f"The device does not hold all experts of {source.name}",
                "This bench compares with the floor of a model that is entirely on the device.",
                "Use `penstock bench offload`.",
            )
        require_room(engine, max(arguments.batch), _most_tokens(arguments, config))
        with timed("check", phases):
            difference = check_decode(engine)
        with timed("limits", phases):
            limits = measure_limits(engine)
    info, runner = engine.engine.info, engine.engine.runner
    roofline = roofline_of(engine, source, config)
    bench = Bench(engine, roofline, limits, arguments.warmup, arguments.repeats)
    links = None
    if is_share:
        sizes = (len(runner.model.layers), roofline.hidden_size, roofline.element_bytes)
        links = Links(config.tp, *sizes, arguments.all_reduce_us)
    measurements, breakdowns, checks = [], [], []
    for context, batch in itertools.product(arguments.context, arguments.batch):
        measurement, found, check = _measure(arguments, bench, batch, context)
        checks.append(check)
        measurements.append(measurement)
        if found is not None:
            name = (
                f"batch {batch}, context {context:,}: {found.step_us:.0f} us, busy {found.busy:.1%}"
            )
            print_table(breakdown.COLUMNS, found.as_rows(), name)
            breakdowns.append({"batch": batch, "context": context, **found.as_dict()})
    title = f"{arguments.what}: {source.name}, {info.dtype}, {_gpu_name(engine) or cpu_name()}"
    report = {**_report(arguments, config, bench, difference, measurements), "checks": checks}
    if links is None:
        print_table(COLUMNS, [measurement.as_row() for measurement in measurements], title)
    else:
        rows = [links.row_of(measurement) for measurement in measurements]
        print_table(SHARE_COLUMNS, rows, f"{title}; one rank, links at {links.all_reduce_us:g} us")
        scheme = "bf16" if config.quantization == "none" else config.quantization
        report["rows"] = [
            links.dict_of(measurement, source.name, scheme, config.ep)
            for measurement in measurements
        ]
    engine.engine.close()
    if breakdowns:
        report["breakdowns"] = breakdowns
    deliver_line(json.dumps(report), arguments.json, "--json")
    return 0


def _measure(
    arguments: argparse.Namespace, bench: Bench, batch: int, context: int
) -> tuple[Measurement, breakdown.Breakdown | None, dict[str, Any]]:
    """Checks, times and prints one shape, so that Ctrl-C loses only those not yet measured."""
    sampling = SAMPLED if arguments.sampled else SamplingParams()
    found, name = None, f"{batch} x {context:,}"
    with PhaseList() as phases, timed(name, phases) as report:
        report(Phase(name, "comparing with the references"))
        check: dict[str, Any] = {"batch": batch, "context": context}
        if bench.engine.engine.other_ranks is None:  # other ranks cannot run op by op
            run_check = bench.check_prefills if arguments.what == "prefill" else bench.check_decodes
            check = run_check(batch, context)
        if arguments.what == "prefill":
            measurement = bench.prefills(batch, context)
            if arguments.breakdown and is_on_gpu(bench.engine):
                found = bench.prefill_breakdown(batch, context)
        elif arguments.what == "engine":
            measurement, found = bench.whole_engine(batch, context, sampling)
        else:
            measurement = bench.steps(batch, context, sampling)
            if arguments.breakdown and is_on_gpu(bench.engine):
                found = bench.step_breakdown(batch, context, sampling)
        report(Phase(name, measurement.in_words()))
    return measurement, found, check


def _refuse(arguments: argparse.Namespace, defaults: Mapping[str, Any]) -> None:
    """Refuses flags of the other benches: they must not be ignored."""
    for name in typed_fields(arguments, defaults):
        owner = "`penstock bench offload`" if name in OFFLOAD_DEFAULTS else "the other benches"
        owner = "`penstock bench step`" if name in DRAFT_DEFAULTS else owner
        raise foreign_flag(f"bench {arguments.what}", bench_serve.flag_name(name), owner)


def _refuse_beside_case(arguments: argparse.Namespace) -> None:
    own = {"batch": OWN_DEFAULTS["batch"], "context": OWN_DEFAULTS["context"], **OFFLOAD_DEFAULTS}
    for name in typed_fields(arguments, own):
        if name != "case":
            raise UsageError(
                f"{bench_serve.flag_name(name)} and --case are both set",
                f"Each case has its own {bench_serve.flag_name(name)}.",
                "Omit one of them.",
            )


def _engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """The timed shapes decide how much memory the engine needs."""
    settings = read_settings(EngineConfig, arguments)
    settings["max_rows"] = max(arguments.batch)
    longest = max(arguments.context) + arguments.warmup + arguments.repeats + PROFILED_STEPS + 2
    # With the whole engine, the first requests decode while the last prompts are computed.
    longest += max(arguments.batch)
    settings["max_model_len"] = max(longest, CHECK_TOKENS + 1)
    settings["prefix_cache"] = False  # the second repeat would reuse the first one's prefix
    settings.setdefault("speculate", "off")  # times plain steps; --drafts times drafted ones
    config: EngineConfig = from_mapping(EngineConfig, settings)
    return config


def _require_positions(
    arguments: argparse.Namespace, config: EngineConfig, source: ModelSource
) -> None:
    """Refuses a context longer than the model's, before the weights are loaded."""
    known, longest = text_config(source.config).get("max_position_embeddings"), config.max_model_len
    if not isinstance(known, int) or longest is None or longest <= known:
        return
    context = max(arguments.context)
    room = known - (longest - context)
    raise ConfigError(
        f"--context {context:,} is too long for {source.name}",
        f"The model has {known:,} positions; with the timed steps, it would need {longest:,}.",
        f"Use --context {room} or less." if room > 0 else "Use fewer --repeats.",
    )


def _most_tokens(arguments: argparse.Namespace, config: EngineConfig) -> int:
    """The tokens in the cache of one request with the longest context."""
    if arguments.what == "engine":
        return config.max_model_len or 0
    num_steps = 0 if arguments.what == "prefill" else arguments.warmup + arguments.repeats
    return int(max(arguments.context) + num_steps)


def _check_shapes(arguments: argparse.Namespace) -> None:
    names = ("repeats", "warmup", "runs", "new_tokens")
    require_at_least(1, context=min(arguments.context), batch=min(arguments.batch))
    require_at_least(1, **{name: getattr(arguments, name) for name in names})


def _report(
    arguments: argparse.Namespace,
    config: EngineConfig,
    bench: Bench,
    difference: float,
    measurements: list[Measurement],
) -> dict[str, Any]:
    info, limits = bench.engine.engine.info, bench.limits
    return {
        "bench": arguments.what,
        **provenance(),
        "gpu": _gpu_name(bench.engine),
        "model": info.model_name,
        "dtype": info.dtype,
        "random_weights": config.random_weights,
        "seed": config.weights_seed,
        "weight_bytes": info.weight_bytes,
        "sampled": arguments.sampled,
        "deterministic": config.deterministic,
        "kv_dtype": info.kv_dtype,
        "state_dtype": config.state_dtype,
        "decode_vs_prefill": round(difference, 6),
        "copy_gb_per_s": round(limits.bytes_per_s / 1e9, 2),
        "matmul_tflops": round(limits.operations_per_s / 1e12, 3),
        "rows": [measurement.as_dict() for measurement in measurements],
    }


def _gpu_name(engine: LogitsEngine) -> str | None:
    import torch

    return torch.cuda.get_device_name(engine.engine.info.device) if is_on_gpu(engine) else None
