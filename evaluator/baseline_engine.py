"""The baseline: no cache; every call recomputes whole texts, one request after the other.

Also an engine to try the evaluators with at once:

    python evaluator/test_correctness.py --engine evaluator/baseline_engine.py
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from penstock.forge.reference import Reference
from penstock.forge.target import Target


class NaiveEngine:
    def __init__(self, target: Target) -> None:
        self.reference = Reference(target, target.dtype)
        self.longest = target.shape.max_len
        self.vocab_size = target.shape.vocab_size
        self.texts: dict[Hashable, list[int]] = {}

    def prefill(self, request_ids: Sequence[Hashable], input_ids: Sequence[Tensor]) -> Tensor:
        prompts = [torch.as_tensor(prompt).tolist() for prompt in input_ids]
        return self._run(request_ids, prompts)

    def decode(self, request_ids: Sequence[Hashable], token_ids: Tensor) -> Tensor:
        tokens = torch.as_tensor(token_ids).flatten().tolist()
        self._check_known(request_ids)
        if len(tokens) != len(request_ids):
            raise ValueError(f"{len(request_ids)} request ids came with {len(tokens)} tokens")
        return self._run(
            request_ids, [[*self.texts[id], token] for id, token in zip(request_ids, tokens)]
        )

    def remove(self, request_ids: Sequence[Hashable]) -> None:
        self._check_known(request_ids)
        for id in request_ids:
            del self.texts[id]

    def _run(self, request_ids: Sequence[Hashable], texts: list[list[int]]) -> Tensor:
        """Returns [R, V]. Stores the texts only after they have been run."""
        self._check(request_ids, texts)
        logits = torch.cat([self.reference.logits(text, [len(text) - 1]) for text in texts])
        self.texts |= dict(zip(request_ids, texts))
        return logits

    def _check_known(self, request_ids: Sequence[Hashable]) -> None:
        if unknown := [id for id in request_ids if id not in self.texts]:
            raise KeyError(f"requests {unknown} are not here; prefill them first")

    def _check(self, request_ids: Sequence[Hashable], texts: list[list[int]]) -> None:
        if (
            not request_ids
            or len(set(request_ids)) != len(request_ids)
            or len(texts) != len(request_ids)
        ):
            raise ValueError(f"{list(request_ids)} with {len(texts)} texts is no batch")
        for id, text in zip(request_ids, texts):
            if not 0 < len(text) <= self.longest:
                raise ValueError(
                    f"request {id!r} would have {len(text)} tokens; the model holds {self.longest}"
                )
            if min(text) < 0 or max(text) >= self.vocab_size:
                raise ValueError(f"request {id!r} has a token that is not below {self.vocab_size}")


def create_engine(
    model_config: dict[str, Any], weight_dir: str, device: str = "cuda"
) -> NaiveEngine:
    return NaiveEngine(Target.of(model_config, Path(weight_dir), device))
