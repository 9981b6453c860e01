"""A model with only one layer in memory at a time: read, filled, run, and dropped again.

The whole model exists on torch's meta device; its placements tell which tensors a layer needs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.layers.inputs import KVCache, LayerCache, RowSpan, StateCache, StepInputs
from penstock.models import build_model
from penstock.models.source import ModelSource
from penstock.ops import TokenBlocks, Weight
from penstock.quantize.rules import Matrix
from penstock.types import CacheSpec, KVSpec
from penstock.weights.load import match_tensors, resolve_dtype, targets_of, without_idle_biases
from penstock.weights.quantized import find_format, open_weights
from penstock.weights.stored import StoredTensor

PAGE_SIZE = 64
STEP_TOKENS = 2048  # per run of a layer
LOGIT_ELEMENTS = 2**25  # in memory at a time
FUSED = re.compile(r"(.*\bmlp\.experts\.)(gate_up|down)_proj")
LAYER = re.compile(r"layers\.(\d+)\.")


class LayerwiseModel:
    def __init__(self, source: ModelSource, device: str) -> None:
        assert source.path is not None
        self.device = torch.device(device)
        dtype = resolve_dtype("auto", source.config, device)
        self.stored_dtype = resolve_dtype("auto", source.config, "meta")
        model: Any = build_model(source.config, dtype, torch.device("meta"))
        self.model: Any = model
        stored = split_experts(open_weights(source, find_format(source)))
        self.placements = model.placements([tensor.name for tensor in stored])
        stored = without_idle_biases(stored, self.placements)
        self.stored = {tensor.name: tensor for tensor in stored}
        match_tensors(source.path, stored, self.placements, model.ignored)
        self.num_layers = len(model.layers)
        self.rope = model.rope.rows(min(model.max_position, STEP_TOKENS)).to(self.device)

    @property
    def can_score(self) -> bool:
        return bool(self.model.has_head)

    def names_of_stage(self, stage: int) -> list[str]:
        """Tensors by stage: the embedding, each layer, everything else."""
        return [name for name in self.stored if self._stage_of(name) == stage]

    @property
    def num_stages(self) -> int:
        return self.num_layers + 2

    def _stage_of(self, name: str) -> int:
        place = self.placements.get(name)
        if place is None:
            return self.num_layers + 1
        if place.parameter == "embedding":
            return 0
        layer = LAYER.match(place.parameter)
        return 1 + int(layer[1]) if layer else self.num_layers + 1

    def matrices(self) -> list[Matrix]:
        """The candidates for quantization: the linear layers whose ops support codes."""
        weights = {
            name
            for name, module in self.model.named_modules()
            if isinstance(module, Weight) and module.can_quantize
        } - {"embedding"}
        return [
            Matrix(tensor.name, (tensor.shape[0], tensor.shape[1]))
            for tensor in self.stored.values()
            if len(tensor.shape) == 2
            and (place := self.placements.get(tensor.name)) is not None
            and place.parameter in weights
        ]

    def kept_dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor that stays unquantized."""
        tensor = self.stored[name]
        return self.stored_dtype if tensor.scheme else tensor.dtype

    def embed(self, token_ids: Tensor) -> Tensor:  # [T] -> [T, H], on the host
        (tensor,) = [self.stored[n] for n in self.names_of_stage(0)[:1]]
        place = self.placements[tensor.name]
        return place.converted(tensor.load_part(place.source))[token_ids].to(self.model.dtype)

    @contextmanager
    def layer(self, number: int, tensors: Mapping[str, Tensor]) -> Iterator[nn.Module]:
        """A layer with these weights, for the duration of the context."""
        layer: nn.Module = self.model.layers[number]
        self._fill(layer, tensors)
        yield layer
        layer.to("meta")

    def _fill(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        module.to_empty(device=self.device)
        for buffer in module.buffers():
            buffer.zero_()
        self.refill(tensors)

    def refill(self, tensors: Mapping[str, Tensor]) -> None:
        """Sets other values for the current layer."""
        targets = targets_of(self.model)
        for name, values in tensors.items():
            if place := self.placements.get(name):
                targets[place.parameter][place.index].copy_(place.converted(values))

    def run(self, number: int, hidden: Tensor, row_len: int) -> Tensor:  # [T, H] -> [T, H]
        """Runs rows of `row_len` tokens through the current layer; the activations stay on the
        host.
        """
        layer, spec = self.model.layers[number], self.model.cache_specs()[number]
        out = torch.empty_like(hidden)
        num_tokens = max(1, STEP_TOKENS // row_len) * row_len
        for first in range(0, len(hidden), num_tokens):
            own = hidden[first : first + num_tokens].to(self.device, copy=True)
            rows = torch.zeros(len(own) // row_len, row_len, dtype=torch.int64)  # ids are not read
            inputs = whole_rows(rows, self.device)
            cache = new_cache(spec, inputs, self.model.dtype)
            out[first : first + num_tokens] = layer(own, inputs, cache, self.rope)
        return out

    def load_head(self) -> dict[str, Tensor]:
        """The tensors of the final norm and the head, by name."""
        is_tied = self.model.head.weight is self.model.embedding
        found = {}
        for parameter in ("head.norm", "embedding" if is_tied else "head.weight"):
            name = next(n for n, p in self.placements.items() if p.parameter == parameter)
            found[name] = self.stored[name].load()
        return found

    def score(self, tensors: Mapping[str, Tensor], hidden: Tensor, token_ids: Tensor) -> Score:
        """A head with these tensors on activations [R * L, H] of rows [R, L]."""
        head = self.model.head
        self._fill(head, tensors)
        num_rows, row_len = token_ids.shape
        asked = hidden.view(num_rows, row_len, -1)[:, :-1].flatten(0, 1)
        targets = token_ids[:, 1:].flatten()
        losses, choices = [], []
        step = max(1, LOGIT_ELEMENTS // self.model.vocab_size)
        for first in range(0, len(asked), step):
            logits = self.model.logits(asked[first : first + step].to(self.device)).float()
            own = targets[first : first + step].to(self.device)
            losses.append(torch.nn.functional.cross_entropy(logits, own, reduction="none").cpu())
            choices.append(logits.argmax(-1).cpu())
        head.to("meta")
        return Score(torch.cat(losses), torch.cat(choices), targets)


@dataclass(frozen=True, slots=True)
class Score:
    """Scores of a text by token: the loss, the model's argmax, and the actual token."""

    losses: Tensor  # [n] float32
    choices: Tensor  # [n]
    targets: Tensor  # [n]

    @property
    def perplexity(self) -> float:
        return float(self.losses.double().mean().exp())

    @property
    def accuracy(self) -> float:
        return float((self.choices == self.targets).double().mean())


def new_cache(spec: CacheSpec, inputs: StepInputs, dtype: torch.dtype) -> LayerCache:
    """For one step of `whole_rows`."""
    num_rows, num_pages = inputs.page_table.shape
    device = inputs.page_table.device
    if isinstance(spec, KVSpec):
        shape = (1 + num_rows * num_pages, PAGE_SIZE, spec.num_kv_heads, spec.head_dim)
        keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        return KVCache(keys, values)
    states = (1 + num_rows, spec.num_value_heads, spec.key_dim, spec.value_dim)
    taps = (1 + num_rows, spec.conv_width, spec.conv_channels)
    return StateCache(
        torch.zeros(states, dtype=torch.float32, device=device),
        torch.zeros(taps, dtype=dtype, device=device),
    )


def whole_rows(token_ids: Tensor, device: torch.device) -> StepInputs:  # [R, L]
    """A step of prompts of one length, each with its own pages and slot."""
    num_rows, row_len = token_ids.shape
    pages_each = -(-row_len // PAGE_SIZE)
    page_table = 1 + torch.arange(num_rows * pages_each, dtype=torch.int32).view(num_rows, -1)
    positions = torch.arange(row_len).repeat(num_rows)
    owner = torch.arange(num_rows).repeat_interleave(row_len)
    page = page_table[owner, positions // PAGE_SIZE].long()
    spans = (RowSpan(row_len, row_len, is_prompt=True),) * num_rows
    slots = 1 + torch.arange(num_rows)
    return StepInputs(
        token_ids=token_ids.flatten().to(device),
        positions=positions.to(device),
        query_start=(torch.arange(num_rows + 1) * row_len).int().to(device),
        context_lens=torch.full((num_rows,), row_len, dtype=torch.int32, device=device),
        page_table=page_table.to(device),
        kv_index=(page * PAGE_SIZE + positions % PAGE_SIZE).to(device),
        state_slots=slots.to(device),
        initial_slots=slots.to(device),
        spans=spans,
        blocks=TokenBlocks.of(spans, device),
    )


def split_experts(stored: list[StoredTensor]) -> list[StoredTensor]:
    """Splits stacked experts as in compressed-tensors files: one by one, gate and up separate."""
    split = []
    for tensor in stored:
        fused = FUSED.fullmatch(tensor.name)
        if fused is None or len(tensor.shape) != 3:
            split.append(tensor)
            continue
        num_experts, num_rows, num_columns = tensor.shape
        parts = {"down_proj": slice(0, num_rows)}
        if fused[2] == "gate_up":
            half = num_rows // 2
            parts = {"gate_proj": slice(0, half), "up_proj": slice(half, num_rows)}
        for expert in range(num_experts):
            for part, rows in parts.items():
                split.append(
                    StoredTensor(
                        f"{fused[1]}{expert}.{part}.weight",
                        (rows.stop - rows.start, num_columns),
                        tensor.dtype,
                        read=_expert_reader(tensor, expert, rows),
                        scheme=tensor.scheme,
                    )
                )
    return split


def _expert_reader(stack: StoredTensor, expert: int, rows: slice) -> Any:
    def read(wanted: slice | None) -> Tensor:
        own = stack.load(slice(expert, expert + 1))[0, rows]
        return own.clone() if wanted is None else own[wanted].clone()

    return read
