"""How much the logits of two ranks differ from those of one, on a CPU, with the embedded model.

    python scripts/measure_rank_differences.py --json results/cpu/rank_differences.json

Each row compares two engines on the same tokens: held-out prompts, and after each of them decodes
of what the first engine finds likeliest. A difference is relative to the largest logit of its
token. Every engine runs in a process of its own; without a C++ compiler it computes with
dequantized weights, which shows what the rounding of activations changes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock import LLM
from penstock.commands.provenance import provenance
from penstock.engine.logits_engine import LogitsEngine
from penstock.eval import held_out
from penstock.models.source import find_model
from penstock.quantize.run import quantize
from penstock.quantize.settings import QuantizeSettings

NUM_PROMPTS, PROMPT_TOKENS, NUM_DECODES = 12, 160, 32
NO_COMPILER = {"CXX": "none"}


def run_engine(folder: Path, model: str, tp: int, quantization: str) -> None:
    """Writes the logits of all tokens. Decodes the tokens in the folder; the first engine chooses
    them.
    """
    settings: dict[str, Any] = {"quantization": quantization} if quantization else {}
    llm = LLM(
        model, device="cpu", tp=tp, speculate="off", prefix_cache=False, memory_gb=0.3, **settings
    )
    engine, chosen = LogitsEngine(llm.engine), folder / "tokens.pt"
    known = torch.load(chosen) if chosen.exists() else None
    logits, tokens = [], []
    for number, one in enumerate(held_out.take("word_problems", NUM_PROMPTS, 0)):
        prompt = llm.encode_chat(list(one.messages), enable_thinking=one.enable_thinking)
        logits.append(engine.prefill([0], [torch.tensor(prompt[-PROMPT_TOKENS:])]))
        for step in range(NUM_DECODES):
            token = logits[-1].argmax(-1) if known is None else known[number, step][None]
            tokens.append(token)
            logits.append(engine.decode([0], token))
    if known is None:
        torch.save(torch.cat(tokens).view(NUM_PROMPTS, NUM_DECODES), chosen)
    torch.save(torch.cat(logits), folder / "logits.pt")
    llm.engine.close()


def logits_of(
    folder: Path,
    model: str,
    tp: int,
    quantization: str = "",
    variables: dict[str, str] | None = None,
) -> Tensor:
    words = ["--folder", str(folder), "--model", model, "--tp", str(tp)]
    words += ["--quantization", quantization] if quantization else []
    environment = {**os.environ, **(variables or {})}
    subprocess.run([sys.executable, __file__, *words], env=environment, check=True)
    found: Tensor = torch.load(folder / "logits.pt")
    return found


def compared(what: str, found: Tensor, expected: Tensor) -> dict[str, Any]:
    largest = expected.abs().amax(-1)
    differences = (found - expected).abs().amax(-1) / largest
    row = {
        "what": what,
        "median": float(f"{differences.median():.1e}"),
        "p99": float(f"{differences.quantile(0.99):.1e}"),
        "largest": float(f"{differences.max():.1e}"),
        "same_top_token": round(
            float((found.argmax(-1) == expected.argmax(-1)).double().mean()), 4
        ),
    }
    print(row, file=sys.stderr, flush=True)
    return row


def measure(folder: Path) -> list[dict[str, Any]]:
    plain = logits_of(folder, "", 1)
    rows = [compared("unquantized, 2 ranks against 1", logits_of(folder, "", 2), plain)]
    path = str(folder / "int8")
    quantize(find_model(""), Path(path), QuantizeSettings(scheme="int8"), "cpu", lambda _: None)
    stored = logits_of(folder, path, 1)
    rows.append(compared("INT8 checkpoint, 2 ranks against 1", logits_of(folder, path, 2), stored))
    exact = logits_of(folder, path, 1, variables=NO_COMPILER)
    rows.append(compared("INT8 checkpoint, 1 rank against itself dequantized", stored, exact))
    loaded = [logits_of(folder, "", tp, "int8") for tp in (1, 2)]
    rows.append(compared("--quantization int8, 2 ranks against 1", loaded[1], loaded[0]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write")
    inner = parser.add_argument_group("of one engine, for the script's own processes")
    inner.add_argument("--folder", type=Path)
    inner.add_argument("--model", default="")
    inner.add_argument("--tp", type=int, default=1)
    inner.add_argument("--quantization", default="")
    given = parser.parse_args()
    if given.folder is not None:
        run_engine(given.folder, given.model, given.tp, given.quantization)
        return
    report = {"what": __doc__.splitlines()[0], **provenance()}
    del report["host"]
    report["command"] = "python scripts/measure_rank_differences.py"
    report |= {"prompts": NUM_PROMPTS, "decodes_per_prompt": NUM_DECODES, "dtype": "float32"}
    with tempfile.TemporaryDirectory() as folder:
        report["rows"] = measure(Path(folder))
    print(json.dumps(report, indent=2))
    if given.json:
        given.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
