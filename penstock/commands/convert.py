"""`penstock convert`: puts the experts of a model into files that an engine reads one by one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.commands.console import human_bytes, print_note, print_table
from penstock.commands.provenance import provenance
from penstock.errors import CheckpointError
from penstock.models.source import find_model, is_converted
from penstock.progress import PhaseList, timed

if TYPE_CHECKING:
    from penstock.offload.convert import Plan
    from penstock.offload.files import Index

DESCRIPTION = """Convert a checkpoint for a machine that has no room for all of its experts.

Each layer's experts go into one file, aligned for direct reads; everything else goes into another.
Quantized weights are copied as they are, so the converted model gives the same tokens. The experts
of one layer at a time are in memory, and at the end everything else. To continue a run that was
stopped, run the same command again."""
USAGE = "penstock convert MODEL -o OUT [flags]"
EXAMPLES = [
    "penstock convert ~/models/Qwen3.5-397B-A17B-INT4 -o experts --dry-run",
    "penstock convert ~/models/Qwen3.5-397B-A17B-INT4 -o experts",
    "penstock convert ~/models/Qwen3.5-397B-A17B-INT4 -o experts --verify",
    "penstock serve experts --expert-cache 16GB --expert-ram 40GB",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a checkpoint's folder, or a GGUF file")
    parser.add_argument(
        "-o", "--output", metavar="OUT", required=True, help="a new folder for the converted model"
    )
    parser.add_argument(
        "--for",
        dest="made_for",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="device whose kernels will read the weights (default: cuda if there is a GPU)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show what would be written, and write nothing"
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare every weight in OUT with MODEL; converts first if OUT does not exist",
    )
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    source = find_model(arguments.model)
    output = Path(arguments.output).expanduser()
    with PhaseList() as phases:
        with timed("libraries", phases):
            from penstock.engine.device import leave_a_core, pick_device
            from penstock.offload.convert import Conversion
            from penstock.offload.files import read_index
        leave_a_core()
        made_for = arguments.made_for
        if made_for == "auto":
            made_for = pick_device("auto")
        index = read_index(output) if arguments.verify and is_converted(output) else None
        conversion = Conversion(source, made_for if index is None else index.made_for)
        if arguments.dry_run:
            conversion.check_output(output)
            phases.close()
            return _print_plan(conversion.plan, output, made_for, arguments.json)
        if index is None:
            index = conversion.write(output, phases)
        if arguments.verify:
            conversion.verify(index, phases)
    report = _report(index, source.name, is_verified=arguments.verify)
    if arguments.json:
        print(json.dumps({**report, **provenance()}))
    else:
        _print_report(report)
        print_note(f"Try it: penstock serve {output} --expert-cache 6GB")
    return 0


def _print_plan(plan: Plan, output: Path, made_for: str, as_json: bool) -> int:
    import shutil

    folder = next((one for one in (output, *output.absolute().parents) if one.is_dir()), None)
    if folder is None:
        raise CheckpointError(
            f"-o is {output}", "None of its parent folders exists.", "Give another folder."
        )
    free = shutil.disk_usage(folder).free
    report = {
        "layers": len(plan.modules),
        "experts_in_a_layer": plan.num_experts,
        "expert_bytes": plan.expert_bytes,
        "dense_bytes": plan.dense_bytes,
        "made_for": made_for,
        "most_bytes": plan.num_bytes,
        "free_bytes": free,
        "fits": plan.num_bytes <= free,
    }
    if as_json:
        print(json.dumps(report))
        return 0
    each = plan.expert_bytes // max(len(plan.modules) * plan.num_experts, 1)
    print_table(
        ["to write", ""],
        [
            ["files of experts", f"{len(plan.modules)}"],
            ["experts in each", f"{plan.num_experts}, of about {human_bytes(each)}"],
            ["experts", human_bytes(plan.expert_bytes)],
            ["everything else", human_bytes(plan.dense_bytes)],
            ["total, at most about", human_bytes(plan.num_bytes)],
            [f"free in {folder}", human_bytes(free)],
        ],
    )
    if not report["fits"]:
        print_note("That does not fit: choose a folder on another disk with -o.")
    return 0


def _report(index: Index, name: str, *, is_verified: bool) -> dict[str, Any]:
    return {
        "model": name,
        "output": str(index.folder),
        "made_for": index.made_for,
        "layers": len(index.layers),
        "experts": sum(layer.num_experts for layer in index.layers),
        "record_bytes": [layout.record_bytes for layout in index.layouts],
        "expert_bytes": index.num_bytes,
        "dense_bytes": index.dense_bytes,
        "verified": is_verified,
    }


def _print_report(report: dict[str, Any]) -> None:
    sizes = ", ".join(human_bytes(size) for size in report["record_bytes"])
    print_table(
        [report["model"], report["output"]],
        [
            ["layers with experts", f"{report['layers']}"],
            ["experts", f"{report['experts']:,} of {sizes}"],
            ["experts, bytes", human_bytes(report["expert_bytes"])],
            ["everything else", human_bytes(report["dense_bytes"])],
            ["for", report["made_for"]],
            ["verified", "yes, every weight" if report["verified"] else "no"],
        ],
    )
