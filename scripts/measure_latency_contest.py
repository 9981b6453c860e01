"""Latency contest on one GPU: whole replies of transformers and of Penstock with the same weights.

    python scripts/measure_latency_contest.py --output results/h200/latency_contest.json

The model has the shape of Qwen3.5-4B and random bf16 weights, created by transformers and saved
once, so that both load the same file. Requests run one at a time, no prompt is repeated, and there
are three sizes of prompt + reply. The result is the median per size, and the mean of the three
ratios. Penstock runs in this process, without HTTP, with the settings of `--profile latency`.
Random weights say nothing about speculation, so it is off; its gain is measured on the embedded
model (`scripts/measure_speculation.py --device cuda`), whose tokens per step enter the projection.

Numbers for the A10G are projected, not measured. A decode step reads the weights once, with the
same share of peak bandwidth as on this GPU. Prefill time scales with peak operations per second.

The script ends within --seconds: it skips runs that would take longer, and reports how many it
made. `--small` tries everything on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.commands.provenance import gpu_name, provenance
from penstock.commands.serve import PROFILES
from penstock.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.eval.latency import PUBLISHED_MS
from penstock.models.presets import PRESETS
from penstock.models.source import find_model
from penstock.types import Request, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
SIZES = tuple(PUBLISHED_MS)
SMALL_SIZES = ((16, 8), (64, 16), (200, 16))
H200 = {"bytes_per_s": 4.8e12, "bf16_flops": 989e12}
A10G = {"bytes_per_s": 600e9, "bf16_flops": 70e12}
# Bytes per weight: 4 bits, and one 16-bit scale per 128 weights.
BYTES_OF = {"bf16": 2.0, "int8": 1.0, "int4": 0.5 + 2 / 128}


@dataclass(frozen=True)
class Run:
    seconds: float
    first_s: float | None  # time to first token, if known
    token_ids: list[int]


Generate = Callable[[list[int], int], Run]


class Clock:
    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def left(self) -> float:
        return self.end - time.monotonic()


def prompt_of(num_tokens: int, vocab_size: int, seed: int) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (num_tokens,), generator=random).tolist()


def model_config(is_small: bool) -> dict[str, Any]:
    given = dict(PRESETS["Qwen3.5-4B"]["text_config"])
    if is_small:
        given |= {
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "layer_types": given["layer_types"][:4],
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "intermediate_size": 256,
            "vocab_size": 1024,
            "eos_token_id": 1000,
            "rope_parameters": {**given["rope_parameters"], "mrope_section": [3, 3, 2]},
        }
    return given


def make_transformers(config: dict[str, Any], device: str) -> Any:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    text = {name: value for name, value in config.items() if not name.startswith("mtp")}
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**text))
    finally:
        torch.set_default_dtype(torch.float32)
    model.eval()
    model.generation_config.eos_token_id = None  # so replies have full length
    model.generation_config.pad_token_id = 0
    return model


def with_transformers(model: Any) -> Generate:
    device = model.device

    @torch.inference_mode()
    def generate(prompt: list[int], num_tokens: int) -> Run:
        started = time.perf_counter()
        given = torch.tensor([prompt], device=device)
        mask = torch.ones_like(given)
        out = model.generate(
            given,
            attention_mask=mask,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
        )
        token_ids = out[0, len(prompt) :].tolist()  # waits for the device
        return Run(time.perf_counter() - started, None, token_ids)

    return generate


def with_penstock(engine: Engine) -> Generate:
    numbers = iter(range(10**9))

    def generate(prompt: list[int], num_tokens: int) -> Run:
        sampling = SamplingParams(max_tokens=num_tokens)  # no token ends the request
        started = time.perf_counter()
        engine.submit(Request(id=str(next(numbers)), token_ids=tuple(prompt), sampling=sampling))
        token_ids: list[int] = []
        first_s = None
        while engine.has_work:
            token_ids += [token for delta in engine.step() for token in delta.token_ids]
            if token_ids and first_s is None:
                first_s = time.perf_counter() - started
        return Run(time.perf_counter() - started, first_s, token_ids)

    return generate


def measure(
    name: str,
    generate: Generate,
    sizes: tuple[tuple[int, int], ...],
    vocab_size: int,
    warmups: int,
    runs: int,
    clock: Clock,
    reserve_s: float,  # time that later runs need
) -> dict[tuple[int, int], list[Run]]:
    """Alternates between sizes, so that all have about as many runs when time runs out."""
    made: dict[tuple[int, int], list[Run]] = {size: [] for size in sizes}
    for turn in range(warmups + runs):
        for number, (num_prompt, num_reply) in enumerate(sizes):
            last = made[num_prompt, num_reply][-1:]
            if last and clock.left() - reserve_s < last[0].seconds:
                continue
            prompt = prompt_of(num_prompt, vocab_size, 1000 * turn + number)
            run = generate(prompt, num_reply)
            assert len(run.token_ids) == num_reply, f"{name} said {len(run.token_ids)} tokens"
            if turn >= warmups or clock.left() < reserve_s:
                made[num_prompt, num_reply].append(run)
    return made


def summary(runs: list[Run]) -> dict[str, Any]:
    firsts = [run.first_s for run in runs if run.first_s is not None]
    return {
        "runs": len(runs),
        "median_ms": round(1e3 * statistics.median(run.seconds for run in runs), 2),
        "first_token_ms": round(1e3 * statistics.median(firsts), 2) if firsts else None,
    }


def project(ours: list[dict[str, Any]], weight_bytes: int, is_h200: bool) -> dict[str, Any]:
    """Projects times for an A10G from bytes and operations."""
    speculation = json.loads((ROOT / "results/cpu/speculation.json").read_text())
    tokens_a_step = max(
        row["tokens_a_step"]
        for row in speculation["rows"]
        if row["task"] == "word problems" and row["speculate"] == "mtp:2"
    )
    rows = []
    for one in ours:
        num_steps = one["reply_tokens"] - 1
        step_s = (one["median_ms"] - one["first_token_ms"]) / 1e3 / num_steps
        share = min(weight_bytes / step_s / H200["bytes_per_s"], 1.0)
        prefill_s = one["first_token_ms"] / 1e3 * H200["bf16_flops"] / A10G["bf16_flops"]
        for scheme, bytes_of in BYTES_OF.items():
            read_s = weight_bytes * bytes_of / 2 / (share * A10G["bytes_per_s"])
            for drafts, tokens in (("none", 1.0), ("mtp:2", tokens_a_step)):
                seconds = prefill_s + num_steps * read_s / tokens
                published = PUBLISHED_MS.get((one["prompt_tokens"], one["reply_tokens"]))
                rows.append(
                    {
                        "prompt_tokens": one["prompt_tokens"],
                        "reply_tokens": one["reply_tokens"],
                        "scheme": scheme,
                        "drafts": drafts,
                        "ms": round(1e3 * seconds, 1),
                        "speed_up": round(published / 1e3 / seconds, 2) if published else None,
                    }
                )
    means = {
        f"{scheme}, drafts {drafts}": round(
            statistics.fmean(
                row["speed_up"]
                for row in rows
                if (row["scheme"], row["drafts"]) == (scheme, drafts)
            ),
            2,
        )
        for scheme in BYTES_OF
        for drafts in ("none", "mtp:2")
        if all(row["speed_up"] for row in rows)
    }
    return {
        "what": "a projection, not a measurement: bytes of weights a step, operations of a prompt",
        "from": "H200" if is_h200 else "another card: its numbers were taken for an H200's",
        "h200": H200,
        "a10g": A10G,
        "tokens_a_step_of_drafts": tokens_a_step,
        "rows": rows,
        "mean_speed_up": means,
    }


def folder_for(num_bytes: int) -> Path:
    """A temporary folder, in memory if there is room: weights are written and read once."""
    shm = Path("/dev/shm")
    has_room = shm.is_dir() and shutil.disk_usage(shm).free > 1.2 * num_bytes
    return Path(tempfile.mkdtemp(dir=shm if has_room else None, prefix="contest-"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="JSON file to write too")
    parser.add_argument("--seconds", type=float, default=140.0, help="time for everything")
    parser.add_argument("--warmup", type=int, default=5, help="of Penstock, of each size")
    parser.add_argument("--runs", type=int, default=50, help="of Penstock, of each size")
    parser.add_argument("--baseline-runs", type=int, default=2, help="of transformers")
    parser.add_argument("--small", action="store_true", help="a small model, to try the script")
    given = parser.parse_args()
    clock = Clock(given.seconds)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config, sizes = model_config(given.small), SMALL_SIZES if given.small else SIZES
    vocab_size = config["vocab_size"] - 400  # without control tokens
    started = time.monotonic()
    timing: dict[str, float] = {}

    def note(name: str) -> None:
        timing[name] = round(time.monotonic() - started, 1)
        print(f"{timing[name]:6.1f} s  {name}", file=sys.stderr, flush=True)

    model = make_transformers(config, device)
    num_bytes = sum(one.numel() * one.element_size() for one in model.parameters())
    note(f"transformers has made {num_bytes / 1e9:.2f} GB of weights")
    folder = folder_for(num_bytes)
    try:
        model.save_pretrained(folder)
        note("weights are saved")
        theirs_of = with_transformers(model)
        theirs_of(prompt_of(64, vocab_size, 0), 4)  # compiles and allocates
        theirs = measure(
            "transformers",
            theirs_of,
            sizes,
            vocab_size,
            0,
            given.baseline_runs,
            clock,
            0.55 * given.seconds,
        )
        note("transformers is measured")
        del model, theirs_of
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        settings = {**PROFILES["latency"].engine, "speculate": "off", "max_model_len": 8704}
        engine_config = EngineConfig(model=str(folder), device=device, dtype="bfloat16", **settings)
        engine = Engine.from_source(find_model(str(folder)), engine_config)
        note("Penstock is ready")
        ours = measure(
            "Penstock",
            with_penstock(engine),
            sizes,
            vocab_size,
            given.warmup,
            given.runs,
            clock,
            2.0,
        )
        note("Penstock is measured")
        weight_bytes = engine.info.weight_bytes
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows = []
    for num_prompt, num_reply in sizes:
        own = summary(ours[num_prompt, num_reply])
        baseline = summary(theirs[num_prompt, num_reply])
        rows.append(
            {
                "prompt_tokens": num_prompt,
                "reply_tokens": num_reply,
                **own,
                "ms_per_token": round(own["median_ms"] / num_reply, 3),
                "transformers_ms": baseline["median_ms"],
                "transformers_runs": baseline["runs"],
                "speed_up": round(baseline["median_ms"] / own["median_ms"], 2),
            }
        )
    result = {
        "benchmark": "latency contest",
        "what": "whole replies to one client, transformers and Penstock on the same weights",
        "model": "Qwen3.5-4B geometry, random weights, bf16" if not given.small else "small",
        "gpu": gpu_name() if device == "cuda" else None,
        "settings": settings,
        "sizes": rows,
        "mean_speed_up": round(statistics.fmean(row["speed_up"] for row in rows), 2),
        "weight_bytes": weight_bytes,
        "projection": project(rows, weight_bytes, "H200" in (gpu_name() or "")),
        "timing_s": timing,
        "transformers": importlib.metadata.version("transformers"),
        "transformers_has_fla": importlib.util.find_spec("fla") is not None,
        **provenance(),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if given.output is not None:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
