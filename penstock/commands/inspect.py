"""`penstock inspect`: the size of a model, the cost of a request, and how many requests fit this
machine.

The model is built without memory (torch's meta device), so a preset of any size takes seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.commands import inspect_experts
from penstock.commands.console import human_bytes, human_count, print_table
from penstock.commands.flags import (
    UsageError,
    add_flags,
    add_model_argument,
    read_number,
    read_settings,
)
from penstock.commands.inspect_experts import CONTEXT, GB, Need, Tiers, estimate
from penstock.commands.layouts import (
    GPUS,
    build_without_memory,
    describe_layouts,
    print_layouts,
    read_gpus,
)
from penstock.commands.model_files import ModelFiles
from penstock.commands.roofline import Roofline, text_config
from penstock.commands.variables import is_given_by_variable
from penstock.config import EngineConfig, from_mapping
from penstock.errors import CapacityError
from penstock.models.source import ModelSource, find_model, is_converted
from penstock.types import StateSpec

if TYPE_CHECKING:
    from penstock.engine.memory import MemoryPlan

DESCRIPTION = "Show a model's parameters and bytes, and how many requests fit this machine."
USAGE = "penstock inspect [MODEL | experts LOG] [flags]"
EXAMPLES = [
    "penstock inspect Qwen3.5-35B-A3B        a preset: no weights are needed",
    "penstock inspect ~/models/Qwen3.5-4B    a folder with a config.json",
    "penstock inspect model-Q4_K_M.gguf      a GGUF file: how its weights are stored",
    "penstock inspect Qwen3.5-397B-A17B --gpus 8xH200    how to spread it over GPUs",
    "penstock inspect Qwen3.5-4B --json      for a program",
    "penstock inspect Qwen3.5-397B-A17B --gpu-gb 24 --ram-gb 64 --disk-gbs 5    on such a machine",
    "penstock inspect experts experts.log    hit rates by cache size, from --expert-log",
]

TIERS = ("gpu", "ram", "disk")
LINK_GBS, GPU_GBS = 25.0, 900.0
CONTEXTS = (1024, 4096, 16384, 65536, 262144)
_MEMORY_SHARE = 0.9  # the share of free memory that an engine takes


@dataclass(frozen=True, slots=True)
class Machine:
    """The memory that a model would run in."""

    name: str
    total_bytes: int
    free_bytes: int
    is_gpu: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_flags(
        parser, EngineConfig, title="the model", only=("model", "dtype", "kv_dtype", "state_dtype")
    )
    parser.add_argument(
        "--gpus",
        metavar="NxNAME",
        help=f"estimate each layout on GPUs such as 8xH200 ({', '.join(GPUS)})",
    )
    parser.add_argument(
        "log", metavar="LOG", nargs="?", help="after the word experts: a file from --expert-log"
    )
    parser.add_argument("--png", metavar="FILE", help="with experts: also draw the curves")
    machine = parser.add_argument_group("another machine, with experts in RAM and on disk")
    for flag, default, what in (
        ("--gpu-gb", None, "GB of GPU memory"),
        ("--ram-gb", 0.0, "GB of RAM"),
        ("--disk-gbs", None, "GB/s of its disk; without it, nothing is read from disk"),
        ("--link-gbs", LINK_GBS, "GB/s from RAM to the GPU"),
        ("--gpu-gbs", GPU_GBS, "GB/s of the GPU's memory"),
    ):
        note = f" (default: {default:g})" if default is not None else ""
        machine.add_argument(flag, type=read_number, metavar="X", help=what + note)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    if arguments.log is not None:
        if getattr(arguments, "model", None) != "experts":
            raise UsageError(
                f"penstock inspect takes no argument {arguments.log!r}",
                "A second argument is only allowed after the word experts: its log.",
                "Run `penstock inspect --help` for all flags.",
            )
        return inspect_experts.run(arguments.log, arguments.json, arguments.png)
    if getattr(arguments, "model", None) == "experts" and not Path("experts").exists():
        raise UsageError(
            "penstock inspect experts needs a LOG",
            "It is the file that `penstock serve --expert-log LOG` writes.",
            "Run `penstock inspect experts LOG`.",
        )
    if arguments.png is not None and not is_given_by_variable(arguments, "png"):
        raise UsageError(
            "--png is for `penstock inspect experts LOG`", "A model has no curves to draw."
        )
    config: EngineConfig = from_mapping(EngineConfig, read_settings(EngineConfig, arguments))
    gpus = None if arguments.gpus is None else read_gpus(arguments.gpus)
    report = inspect_model(config, read_tiers(arguments), gpus)
    if arguments.json:
        print(json.dumps(report))
    else:
        _print_report(report)
        if gpus is not None:
            print_layouts(report["layouts"], gpus)
    return 0


def read_tiers(arguments: argparse.Namespace) -> Tiers | None:
    """The machine that the flags describe; None without --gpu-gb."""
    given = {
        name: getattr(arguments, name)
        for name in ("gpu_gb", "ram_gb", "disk_gbs", "link_gbs", "gpu_gbs")
    }
    for name, value in given.items():
        least = 0 if name == "ram_gb" else 1e-3
        flag = "--" + name.replace("_", "-")
        if value is not None and not value >= least:
            raise UsageError(f"{flag} is {value:g}", f"It must be at least {least:g}.")
        if value == math.inf:
            raise UsageError(f"{flag} is {value:g}", "It must be a finite number.")
        if value is not None and given["gpu_gb"] is None:
            raise UsageError(
                f"{flag} is given without --gpu-gb",
                "It describes a machine with a GPU, whose memory is missing.",
                "Add --gpu-gb.",
            )
    if given["gpu_gb"] is None:
        return None
    disk = given["disk_gbs"]
    return Tiers(
        GB * given["gpu_gb"],
        GB * (given["ram_gb"] or 0.0),
        GB * (given["gpu_gbs"] or GPU_GBS),
        GB * (given["link_gbs"] or LINK_GBS),
        None if disk is None else GB * disk,
    )


def inspect_model(
    config: EngineConfig, tiers: Tiers | None = None, gpus: tuple[int, str] | None = None
) -> dict[str, Any]:
    source = find_model(config.model)
    files = ModelFiles(source)
    # In the stored dtype: the report should not depend on what this machine computes in.
    model, roofline = build_without_memory(files, config)
    layouts = {} if gpus is None else {"layouts": describe_layouts(files, config, gpus)}
    storage = _describe_storage(files)
    machine = find_machine()
    parameters = roofline.parameters
    if drafts := _drafts_by_default(source, model, storage):
        config = dataclasses.replace(config, speculate="mtp")
    # What fits here does depend on it: a CPU has room for half as much in float32.
    here, taken = model, roofline
    if not machine.is_gpu:
        here, taken = build_without_memory(files, config, device="cpu")
    memory = _plan_memory(here, config, taken.weight_bytes, machine)
    backlog_bytes = _backlog_bytes(model, config, machine)
    free = int(machine.free_bytes * _MEMORY_SHARE) - taken.weight_bytes
    state_bytes = taken.state_bytes_per_request + backlog_bytes
    longest = text_config(source.config).get("max_position_embeddings", CONTEXTS[-1])
    on_machine = {} if tiers is None else {"on_machine": _on_machine(roofline, storage, tiers)}
    return {
        **on_machine,
        "model": source.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "parameters": {
            "total": parameters.total,
            "active": parameters.active,
            "embedding": parameters.embedding + (0 if parameters.is_tied else parameters.head),
            "experts": parameters.experts,
            "mtp": parameters.mtp,
        },
        "speculate": str(config.speculation) if drafts else "off",
        "max_context": longest,
        "weight_bytes": roofline.weight_bytes,
        "is_quantized": roofline.is_quantized,
        "stored": storage,
        "kv_bytes_per_token": roofline.kv_bytes_per_token,
        "state_bytes_per_request": roofline.state_bytes_per_request + backlog_bytes,
        "machine": {
            "name": machine.name,
            "dtype": str(here.dtype).removeprefix("torch."),
            "weight_bytes": taken.weight_bytes,
            "total_bytes": machine.total_bytes,
            "free_bytes": machine.free_bytes,
        },
        "memory": memory
        and {
            "max_rows": memory.pools.max_rows,
            "max_model_len": memory.pools.max_model_len,
            "uses": memory.uses,
        },
        "fits": {
            str(context): max(free, 0) // (state_bytes + taken.kv_bytes_per_token * context)
            for context in CONTEXTS
            if context <= longest
        },
        **layouts,
    }


def _on_machine(
    roofline: Roofline, storage: dict[str, Any] | None, tiers: Tiers
) -> list[dict[str, Any]]:
    """Estimates for the weights as stored or, without files, at the usual bit widths."""
    widths: dict[str, tuple[float, float]] = {  # bits of an expert's weight, and of others
        name: (bits, bits) for name, bits in (("bf16", 16.0), ("fp8", 8.25), ("int4", 4.25))
    }
    if storage is not None:
        of_experts, others = (
            [group for group in storage["groups"] if (group["part"] == "experts") == wanted]
            for wanted in (True, False)
        )
        widths = {"as stored": (_bits_of(of_experts), _bits_of(others))}
    counts = roofline.parameters
    rows = []
    for name, (expert_bits, dense_bits) in widths.items():
        experts = counts.experts * expert_bits / 8
        need = Need(
            dense=(counts.total - counts.experts - counts.mtp) * dense_bits / 8,
            experts=experts,
            token_experts=counts.experts_read(1) * expert_bits / 8,
            layer_experts=counts.last_experts * expert_bits / 8,
            request=roofline.state_bytes_per_request + roofline.kv_bytes_per_token * CONTEXT,
        )
        rows.append({"weights": name, **dataclasses.asdict(estimate(need, tiers))})
    return rows


def _bits_of(groups: list[dict[str, Any]]) -> float:
    num_weights = sum(group["num_weights"] for group in groups)
    return 8 * sum(group["num_bytes"] for group in groups) / max(num_weights, 1)


def _drafts_by_default(source: ModelSource, model: Any, storage: dict[str, Any] | None) -> bool:
    """Whether `--speculate auto` drafts. Many checkpoints store no drafting head although their
    config.json counts one."""
    if is_converted(source.path):
        return False
    if storage is None:
        return getattr(model, "mtp", None) is not None
    return any(group["part"] == "drafting head" for group in storage["groups"])


def _plan_memory(
    model: Any, config: EngineConfig, weight_bytes: int, machine: Machine
) -> MemoryPlan | None:
    """How an engine would divide this machine's memory; None: the model does not fit."""
    from penstock.engine.memory import estimate_memory

    if weight_bytes > machine.free_bytes:
        return None
    try:
        return estimate_memory(
            model, config, weight_bytes, machine.free_bytes, is_gpu=machine.is_gpu
        )
    except CapacityError:
        return None


def _backlog_bytes(model: Any, config: EngineConfig, machine: Machine) -> int:
    """Of one request: what a GPU stores beside its states."""
    from penstock.engine.device_cache import cache_specs

    specs = cache_specs(model, config, is_gpu=machine.is_gpu)
    return sum(spec.backlog_bytes for spec in specs if isinstance(spec, StateSpec))


def _describe_storage(files: ModelFiles) -> dict[str, Any] | None:
    storage = files.storage
    if storage is None:
        return None
    return {
        "num_bytes": storage.num_bytes,
        "bits_per_weight": round(storage.bits_per_weight, 2),
        "groups": [
            {**dataclasses.asdict(group), "bits_per_weight": round(group.bits_per_weight, 2)}
            for group in storage.groups
        ],
    }


def find_machine() -> Machine:
    import torch

    from penstock.ops.cpu.memory import ram_sizes

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return Machine(torch.cuda.get_device_name(), total, free, is_gpu=True)
    total, free = ram_sizes()
    name = "this machine's RAM" + (", if all of it is free" if free == total else "")
    return Machine(name, total, free, is_gpu=False)


def _print_report(report: dict[str, Any]) -> None:
    counts = report["parameters"]
    rows = [
        ["parameters", human_count(counts["total"])],
        ["  used by one token", human_count(counts["active"])],
        ["  embedding and head", human_count(counts["embedding"])],
        ["  experts", human_count(counts["experts"]) if counts["experts"] else "none"],
        ["  drafting head (MTP)", human_count(counts["mtp"]) if counts["mtp"] else "none"],
        ["drafts by default", f"--speculate {report['speculate']}"],
        [
            "weights, quantized" if report["is_quantized"] else f"weights in {report['dtype']}",
            human_bytes(report["weight_bytes"]),
        ],
        ["KV of one token", human_bytes(report["kv_bytes_per_token"])],
        ["state of one request", human_bytes(report["state_bytes_per_request"])],
        ["longest context", f"{report['max_context']:,} tokens"],
    ]
    print_table([report["model"], ""], rows)
    if stored := report["stored"]:
        _print_storage(stored)
    if on_machine := report.get("on_machine"):
        _print_on_machine(on_machine)
        return
    machine = report["machine"]
    free, total = human_bytes(machine["free_bytes"]), human_bytes(machine["total_bytes"])
    print(f"{machine['name']}: {free} free of {total}.")
    if machine["dtype"] != report["dtype"]:
        print(
            f"A CPU computes in {machine['dtype']} by default: weights take "
            f"{human_bytes(machine['weight_bytes'])} then, KV and states more than shown above.\n"
            f"With --dtype {report['dtype']} they take what is shown; most CPUs are slower then."
        )
    if not any(report["fits"].values()):
        print(f"The weights and one request do not fit in {_MEMORY_SHARE:.0%} of that.")
        return
    print_table(
        ["tokens each", "requests at a time"],
        [[f"{int(context):,}", f"{count:,}"] for context, count in report["fits"].items()],
    )
    if memory := report["memory"]:
        print(
            f"By default an engine serves {memory['max_rows']} requests of up to "
            f"{memory['max_model_len']:,} tokens here."
        )
        uses = [[name, human_bytes(num_bytes), holds] for name, num_bytes, holds in memory["uses"]]
        print_table(["memory", "bytes", "holds"], uses)


def _print_on_machine(rows: list[dict[str, Any]]) -> None:
    print(
        "Upper bounds on that machine, for one request and random routing (the worst case). They "
        "count bytes\nand no arithmetic, so prompts are slower where the experts are on the GPU."
    )
    print_table(
        ["weights", "tok/s", "prompt tok/s", "experts on GPU", "in RAM", "on disk", "limit"],
        [
            [
                row["weights"],
                f"{row['tokens_per_s']:.1f}" if row["tokens_per_s"] else "does not run",
                f"{row['prompt_tokens_per_s']:,.0f}" if row["tokens_per_s"] else "",
                *(f"{row['shares'][name]:.0%}" if row["shares"] else "" for name in TIERS),
                row["limit"],
            ]
            for row in rows
        ],
    )


def _print_storage(stored: dict[str, Any]) -> None:
    print(
        f"In its files: {human_bytes(stored['num_bytes'])}, {stored['bits_per_weight']:.2f} bits "
        "per weight."
    )
    print_table(
        ["part", "stored as", "weights", "bits", "bytes"],
        [
            [
                group["part"],
                group["scheme"],
                human_count(group["num_weights"]),
                f"{group['bits_per_weight']:.2f}",
                human_bytes(group["num_bytes"]),
            ]
            for group in stored["groups"]
        ],
    )
