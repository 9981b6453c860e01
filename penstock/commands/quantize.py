"""`penstock quantize`: writes a quantized checkpoint of a model, and reports its errors."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from penstock.commands.console import human_bytes, print_note, print_table
from penstock.commands.flags import add_flags, read_settings
from penstock.commands.provenance import provenance
from penstock.config import from_mapping
from penstock.models.source import find_model
from penstock.progress import PhaseList, timed
from penstock.quantize.settings import QuantizeSettings

DESCRIPTION = """Quantize a checkpoint to FP8, INT8 or INT4, in the compressed-tensors format.

Only one layer at a time is in memory. To continue a run that was stopped, run the same command
again."""
USAGE = "penstock quantize MODEL -o OUT --scheme {fp8,int8,int4} [flags]"
EXAMPLES = [
    "penstock quantize ~/models/Qwen3.5-4B -o Qwen3.5-4B-FP8 --scheme fp8",
    "penstock quantize ~/models/Qwen3.5-4B -o Qwen3.5-4B-INT4 --scheme int4 --method gptq",
    "penstock quantize MODEL -o OUT --scheme int4 --rule 'self_attn=int8' --rule 'layers.0.=keep'",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a checkpoint's folder, or a GGUF file")
    parser.add_argument(
        "-o", "--output", metavar="OUT", required=True, help="a new folder for the checkpoint"
    )
    add_flags(parser, QuantizeSettings, title="how")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    settings: QuantizeSettings = from_mapping(
        QuantizeSettings, read_settings(QuantizeSettings, arguments)
    )
    source = find_model(arguments.model)
    output = Path(arguments.output).expanduser()
    with PhaseList() as phases:
        with timed("libraries", phases):
            from penstock.engine.device import leave_a_core, pick_device, select_device
            from penstock.quantize.run import quantize
        device = pick_device(settings.device)
        select_device(device)
        leave_a_core()
        report = quantize(source, output, settings, device, phases)
    if report["was_quantized"]:
        print_note(f"{report['model']} was already quantized: its errors add to the new ones.")
    if arguments.json:
        print(json.dumps({**report, **provenance()}))
    else:
        _print_report(report)
        print_note(f"Try it: penstock serve {output}")
    return 0


def _print_report(report: dict[str, Any]) -> None:
    print_table(
        ["part", "weight error", "output error", "bits", "bytes"],
        [
            [
                row["stage"],
                _share(row.get("weight_error")),
                _share(row.get("output_error")),
                f"{row['bits_per_weight']:.2f}",
                human_bytes(row["bytes"]),
            ]
            for row in report["layers"]
        ],
    )
    rows = [
        ["bytes", human_bytes(report["bytes_before"]), human_bytes(report["bytes"])],
        ["bits per weight", _bits_before(report), f"{report['bits_per_weight']:.2f}"],
    ]
    if "perplexity_after" in report:
        rows += [
            ["perplexity", *(f"{report[f'perplexity_{w}']:.3f}" for w in ("before", "after"))],
            [
                "next token right",
                *(_share(report[f"next_token_accuracy_{w}"]) for w in ("before", "after")),
            ],
        ]
    print_table([report["model"], "before", report["scheme"]], rows)


def _bits_before(report: dict[str, Any]) -> str:
    return f"{8 * report['bytes_before'] / max(report['num_weights'], 1):.2f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"
