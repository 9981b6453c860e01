"""How much an 8-bit KV cache changes a model's predictions, on a CPU.

    python scripts/measure_kv.py --json results/cpu/kv_fp8.json
    python scripts/measure_kv.py --model MODEL.gguf --text gsm8k/test.jsonl --json FILE

Prompts are prefilled, so every token after the first attends to stored keys and values. Without
`--text` they are held-out conversations of the embedded model. Besides the values of `--kv-dtype`,
this measures two schemes of other engines: FP8 without scales, and FP8 with one scale per layer for
keys and one for values, calibrated on the same text.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock import LLM
from penstock.commands.provenance import provenance
from penstock.eval import held_out
from penstock.ops.reference import kv_codes
from penstock.types import Request, SamplingParams

Encode = Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]]
E4M3_MAX = 448.0
GATES = ("word_problems", "tool_calls", "recall")
LONGEST = 512  # tokens per prompt


class LargestSeen:
    """One scale per tensor of a cache, calibrated in a first pass and used in a second."""

    def __init__(self) -> None:
        self.largest: dict[int, float] = {}
        self.is_calibrating = True

    def store(self, cache: Tensor, scales: Tensor | None, places: Tensor, x: Tensor) -> None:
        assert scales is not None
        # The address identifies a layer: every engine allocates layers in the same order.
        key = cache.data_ptr()
        if self.is_calibrating:
            self.largest[key] = max(self.largest.get(key, 0.0), float(x.abs().max()))
        write(cache, scales, places, x, self.largest[key] / E4M3_MAX)


def store_unscaled(cache: Tensor, scales: Tensor | None, places: Tensor, x: Tensor) -> None:
    assert scales is not None
    write(cache, scales, places, x, 1.0)


def write(cache: Tensor, scales: Tensor, places: Tensor, x: Tensor, scale: float) -> None:
    codes = (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(cache.dtype)
    cache.view(torch.uint8).flatten(0, 1)[places] = codes.view(torch.uint8)
    scales.flatten(0, 1)[places] = scale


def predict(llm: LLM, prompts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Log-probability of each prompt token after the first, and the most likely token there."""
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=1)
    logprobs, top = [], []
    for number, prompt in enumerate(prompts):  # one at a time, to keep the order
        llm.engine.submit(Request(id=str(number), token_ids=tuple(prompt), sampling=sampling))
        while llm.engine.has_work:
            for delta in llm.engine.step():
                if (scores := delta.prompt_scores) is not None:
                    logprobs.append(np.frombuffer(scores.logprobs, np.float32))
                    top.append(np.frombuffer(scores.top_ids, np.int32))
    return np.concatenate(logprobs).astype(np.float64), np.concatenate(top)


def compare(
    name: str, seen: tuple[np.ndarray, np.ndarray], exact: tuple[np.ndarray, np.ndarray]
) -> dict[str, Any]:
    difference = np.abs(seen[0] - exact[0])
    return {
        "kv": name,
        "perplexity": round(math.exp(-seen[0].mean()), 4),
        "mean_logprob_error": round(float(difference.mean()), 5),
        "p99_logprob_error": round(float(np.quantile(difference, 0.99)), 4),
        "same_top_token": round(float((seen[1] == exact[1]).mean()), 4),
    }


def measure(model: str, read_prompts: Callable[[LLM], list[list[int]]]) -> dict[str, Any]:
    def load(kv_dtype: str) -> LLM:
        return LLM(model, device="cpu", memory_gb=0.3, kv_dtype=kv_dtype, prefix_cache=False)

    llm = load("auto")
    prompts = read_prompts(llm)
    exact = predict(llm, prompts)
    rows = [compare(llm.engine.info.kv_dtype, exact, exact)]
    for name in ("bfloat16", "fp8", "int8"):
        rows.append(compare(name, predict(load(name), prompts), exact))
    own, llm = kv_codes.store, load("fp8")
    calibrated = LargestSeen()
    kv_codes.store = calibrated.store
    predict(llm, prompts)
    calibrated.is_calibrating = False
    rows.append(compare("fp8, a scale for each tensor", predict(llm, prompts), exact))
    kv_codes.store = store_unscaled
    rows.append(compare("fp8, no scales", predict(llm, prompts), exact))
    kv_codes.store = own
    info = llm.engine.info
    num_tokens = sum(map(len, prompts))
    return {"model": info.model_name, "dtype": info.dtype, "num_tokens": num_tokens, "rows": rows}


def held_out_prompts(llm: LLM) -> list[list[int]]:
    conversations = [one for gate in GATES for one in held_out.take(gate, 12, 0)]
    return [
        llm.encode_chat(list(one.messages), tools=one.tools, enable_thinking=one.enable_thinking)[
            :LONGEST
        ]
        for one in conversations
    ]


def text_prompts(file: Path, num_tokens: int) -> Callable[[LLM], list[list[int]]]:
    """Splits the values of JSON lines, or plain text, into prompts of `LONGEST` tokens."""
    text = file.read_text()
    if file.suffix == ".jsonl":
        lines = [json.loads(line) for line in text[:200_000].splitlines()[:-1]]
        text = "\n".join(" ".join(map(str, line.values())) for line in lines)

    def read(llm: LLM) -> list[list[int]]:
        tokens = list(llm.tokenizer.encode(text[: 8 * num_tokens]))[:num_tokens]
        return [tokens[start : start + LONGEST] for start in range(0, len(tokens), LONGEST)]

    return read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="", help="folder or GGUF file")
    parser.add_argument("--text", type=Path, help="file to predict (default: held-out problems)")
    parser.add_argument("--tokens", type=int, default=2048, help="of --text")
    parser.add_argument("--json", type=Path, help="file to write")
    given = parser.parse_args()
    prompts = text_prompts(given.text, given.tokens) if given.text else held_out_prompts
    report = {"what": __doc__.splitlines()[0], **provenance(), **measure(given.model, prompts)}
    print(json.dumps(report, indent=2))
    if given.json:
        given.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
