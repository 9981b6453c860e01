"""Measures the quality loss of quantization, and writes results/cpu/quantized_quality.json.

    python scripts/measure_quantized_quality.py gates [--schemes fp8,int8,int4] [--limit 200]
    python scripts/measure_quantized_quality.py text MODEL.gguf TEXT.jsonl

`gates` quantizes the embedded model with each scheme and runs the held-out problems on each.
`text` compares perplexities on a text: for the codes of a GGUF file, computed from codes and
dequantized, and for the model quantized by `penstock quantize` with each scheme and method.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.commands.provenance import provenance
from penstock.commands.started_server import started_server
from penstock.eval.endpoint import Endpoint
from penstock.eval.gates import run_gates
from penstock.layers.inputs import RowSpan, StepInputs
from penstock.models.source import ModelSource, find_model
from penstock.ops import TokenBlocks
from penstock.progress import Phase, PhaseList
from penstock.quantize.layerwise import LayerwiseModel, Score, new_cache, whole_rows
from penstock.quantize.run import quantize, read_rows
from penstock.quantize.settings import QuantizeSettings
from penstock.text.tokenizer import Tokenizer
from penstock.weights.load import load_model

FOLDER = Path(__file__).resolve().parents[1] / "results"
RESULTS, SHIPPED = FOLDER / "cpu" / "quantized_quality.json", FOLDER / "gates.json"
SCHEMES = ("fp8", "int8", "int4")
WAYS = [("fp8", "rtn"), ("int8", "rtn"), *(("int4", m) for m in ("rtn", "awq", "gptq"))]
ROW_TOKENS, STEP_TOKENS = 128, 32  # steps small enough that the CPU computes from codes

CALIBRATION_TOKENS = 4096


def quiet(phase: Phase) -> None:
    """Reports nothing."""


def measure_gates(schemes: list[str], limit: int, rows: dict[str, Any]) -> dict[str, Any]:
    """Adds a row per scheme. The row of the unquantized model is in results/gates.json."""
    source = find_model("")
    plain = json.loads(SHIPPED.read_text())["gates"]
    with tempfile.TemporaryDirectory() as folder, PhaseList() as phases:
        for scheme in schemes:
            path = Path(folder) / scheme
            quantize(source, path, QuantizeSettings(scheme=scheme), "cpu", quiet)
            with started_server(["-m", str(path)], phases) as server:
                results = run_gates(
                    Endpoint(server.url).ask, num_problems=limit, seed=0, concurrency=16
                )
            if num_errors := sum(gate.num_errors for gate in results):
                raise SystemExit(f"{num_errors} requests had no reply: the machine is too busy")
            shares = {gate.name: gate.share for gate in results if gate.share is not None}
            losses = {name: 100 * (plain[name] - share) for name, share in shares.items()}
            rows[scheme] = {"gates": shares, "largest_loss_points": round(max(losses.values()), 2)}
            print(scheme, rows[scheme], file=sys.stderr, flush=True)
    return {"problems_a_gate": limit, "as_it_is": plain, "rows": rows}


def measure_text(model: Path, text: Path, num_tokens: int) -> dict[str, Any]:
    source = find_model(str(model))
    tokenizer = Tokenizer.load(model)
    rows = torch.tensor(
        read_rows(str(text), num_tokens, tokenizer, judges=True, longest=ROW_TOKENS)
    )
    expanded, packed = reference(source, rows), in_codes(source, rows)
    print(compared(packed, expanded), file=sys.stderr, flush=True)
    result: dict[str, Any] = {
        "model": model.name,
        "text": f"{text.parent.name}/{text.name}",
        "tokens": rows.numel(),
        "calibration": f"{CALIBRATION_TOKENS} tokens of Python's own manual",
        "codes_of_the_file": compared(packed, expanded),
        "rows": {},
    }
    with tempfile.TemporaryDirectory() as folder, PhaseList() as phases:
        for scheme, method in WAYS:
            own = Path(folder) / f"{scheme}-{method}"
            settings = QuantizeSettings(
                scheme=scheme, method=method, eval_tokens=0, calibration_tokens=CALIBRATION_TOKENS
            )
            report = quantize(source, own, settings, "cpu", phases)
            made = find_model(str(own))
            row = compared(in_codes(made, rows), reference(made, rows))
            row |= {"bits_per_weight": report["bits_per_weight"], "bytes": report["bytes"]}
            row["against_the_file"] = row["perplexity"] / expanded.perplexity - 1
            result["rows"][f"{scheme} {method}"] = row
            print(scheme, method, row, file=sys.stderr, flush=True)
    return result


def compared(packed: Score, expanded: Score) -> dict[str, float]:
    return {
        "perplexity": packed.perplexity,
        "perplexity_expanded": expanded.perplexity,
        "difference": packed.perplexity / expanded.perplexity - 1,
        "next_token_accuracy": packed.accuracy,
    }


@torch.no_grad()
def reference(source: ModelSource, rows: Tensor) -> Score:
    """Computes with the stored values in float32, a layer at a time."""
    model = LayerwiseModel(source, "cpu")
    hidden = model.embed(rows.flatten())
    for number in range(model.num_layers):
        names = model.names_of_stage(number + 1)
        with model.layer(number, {name: model.stored[name].load() for name in names}):
            hidden = model.run(number, hidden, rows.shape[1])
    return model.score(hidden, rows)


@torch.no_grad()
def in_codes(source: ModelSource, rows: Tensor) -> Score:
    """Computes as the engine does on a CPU."""
    model: Any = load_model(
        source, device="cpu", dtype="float32", random_weights=False, seed=0, on_phase=quiet
    )
    losses, choices = [], []
    for row in rows:
        whole = whole_rows(row[None], torch.device("cpu"))
        caches = [new_cache(spec, whole, torch.float32) for spec in model.cache_specs()]
        steps = (step_of(whole, first) for first in range(0, len(row), STEP_TOKENS))
        logits = torch.cat([model.logits(model(step, caches)) for step in steps])[:-1]
        losses.append(torch.nn.functional.cross_entropy(logits, row[1:], reduction="none"))
        choices.append(logits.argmax(-1))
    return Score(torch.cat(losses), torch.cat(choices), rows[:, 1:].flatten())


def step_of(whole: StepInputs, first: int) -> StepInputs:
    """Some tokens of a step with one row."""
    own = slice(first, min(first + STEP_TOKENS, len(whole.token_ids)))
    num_tokens = own.stop - first
    spans = (RowSpan(num_tokens, own.stop, is_prompt=True),)
    return dataclasses.replace(
        whole,
        token_ids=whole.token_ids[own],
        positions=whole.positions[own],
        kv_index=whole.kv_index[own],
        query_start=torch.tensor([0, num_tokens], dtype=torch.int32),
        context_lens=torch.tensor([own.stop], dtype=torch.int32),
        spans=spans,
        blocks=TokenBlocks.of(spans, torch.device("cpu")),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("gates", "text"))
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=2048)
    arguments = parser.parse_args()
    if arguments.what == "text" and len(arguments.files) != 2:
        parser.error("text needs a model and a text")
    origin = provenance()
    del origin["host"]
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    if arguments.what == "gates":
        rows = results.get("gates", {}).get("rows", {})
        found = measure_gates(arguments.schemes.split(","), arguments.limit, rows)
    else:
        model, text = arguments.files
        found = measure_text(model, text, arguments.tokens)
    command = " ".join(word.rpartition("/")[2] for word in sys.argv)
    results[arguments.what] = {**found, **origin, "command": f"python scripts/{command}"}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
