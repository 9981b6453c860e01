"""Maps each tensor of the checkpoint to a part of a tensor in a GGUF file.

Converters to GGUF rename tensors, reorder rows and columns and change some values; this file undoes
that. Opens no file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.gguf.header import Header, TensorInfo
from penstock.gguf.model_config import architecture_of, config_of

GLOBALS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
IGNORED = ("rope_freqs.weight",)  # config_of reads it
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
IN_MTP = {
    "nextn.eh_proj.weight": "mtp.fc.weight",
    "nextn.enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "nextn.hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "nextn.shared_head_norm.weight": "mtp.norm.weight",
}
EXPERTS = {"ffn_gate_exps": ("gate",), "ffn_up_exps": ("up",), "ffn_down_exps": ("down",)}
FUSED_EXPERTS = {"ffn_gate_up_exps": ("gate", "up")}
_IN_LAYER = re.compile(r"blk\.(?P<layer>0|[1-9]\d{0,3})\.(?P<rest>.+)")


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the checkpoint: rows of a tensor in the file."""

    name: str
    info: TensorInfo
    shape: tuple[int, ...]
    first_row: int = 0
    order: Tensor | None = None  # [rows] int64: row j is row first + order[j] of the file
    columns: Tensor | None = None  # [K] int64: the file's column j is column columns[j]
    convert: Callable[[Tensor], Tensor] | None = None  # applied to the values read

    @property
    def width(self) -> int:
        """Elements per row in the file; a vector is read as rows of one element."""
        return self.info.shape[-1] if len(self.info.shape) > 1 else 1

    @property
    def row_bytes(self) -> int:
        return self.width // self.info.type.block_size * self.info.type.block_bytes

    @property
    def num_rows(self) -> int:
        """Rows of the tensor in the file."""
        return math.prod(self.shape) // self.width

    def rows_of(self, rows: slice | None) -> range | Tensor:
        """The rows of the file that hold these rows of the tensor."""
        if rows is None:
            start, end = 0, self.num_rows
        else:
            per_row = self.num_rows // self.shape[0]
            start, end, step = rows.indices(self.shape[0])
            assert step == 1, "rows are read contiguously"
            start, end = start * per_row, max(start, end) * per_row
        if self.order is None:
            return range(self.first_row + start, self.first_row + end)
        return self.first_row + self.order[start:end]


def parts_of(model: Header) -> list[Part]:
    """With the models' names; an unknown tensor keeps its name and is refused later."""
    config = config_of(model)
    return [
        part
        for info in model.tensors.values()
        if info.name not in IGNORED
        for part in _parts(info, architecture_of(model), config)
    ]


def _parts(info: TensorInfo, architecture: str, config: dict[str, Any]) -> Iterator[Part]:
    is_qwen3_5 = architecture in ("qwen35", "qwen35moe")
    match = _IN_LAYER.fullmatch(info.name)
    if match is None:
        name = GLOBALS.get(info.name, info.name)
        yield Part(
            name, info, info.shape, convert=_minus_one if is_qwen3_5 and "norm" in name else None
        )
        return
    layer, rest = int(match["layer"]), match["rest"]
    prefix = f"model.layers.{layer}."
    if is_qwen3_5 and layer == config["num_hidden_layers"]:
        if rest in IN_MTP:
            yield Part(
                IN_MTP[rest], info, info.shape, convert=_minus_one if "norm" in rest else None
            )
            return
        prefix = "mtp.layers.0."
    stem, _, suffix = rest.rpartition(".")
    if stem in EXPERTS or stem in FUSED_EXPERTS:
        yield from _experts(info, f"{prefix}mlp.experts.", (EXPERTS | FUSED_EXPERTS)[stem])
        return
    name = f"{prefix}{IN_LAYER[stem]}.{suffix}" if stem in IN_LAYER else info.name
    part = Part(name, info, info.shape)
    if is_qwen3_5:
        yield _qwen3_5_part(part, rest, prefix, config)
    elif architecture == "llama" and stem in ("attn_q", "attn_k"):
        key = "num_attention_heads" if stem == "attn_q" else "num_key_value_heads"
        yield _with_halves(part, config[key])
    else:
        yield part


def _experts(info: TensorInfo, prefix: str, names: tuple[str, ...]) -> Iterator[Part]:
    """The experts of a layer are one tensor [E, N, K]; a fused one has the rows of gate, then of
    up.
    """
    if len(info.shape) != 3 or info.shape[1] % len(names):
        yield Part(info.name, info, info.shape)
        return
    num_experts, num_rows, width = info.shape
    size = num_rows // len(names)
    for expert in range(num_experts):
        for index, name in enumerate(names):
            first_row = expert * num_rows + index * size
            yield Part(f"{prefix}{expert}.{name}_proj.weight", info, (size, width), first_row)


def _with_halves(part: Part, num_heads: int) -> Part:
    """Llama's queries and keys: rotated pairs are adjacent in the file, half a head apart here."""
    num_rows = part.shape[0]
    if num_heads < 1 or num_rows % (2 * num_heads):
        return part  # the shape differs from the config; reported later
    order = torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).flatten()
    return replace(part, order=order)


def _qwen3_5_part(part: Part, rest: str, prefix: str, config: dict[str, Any]) -> Part:
    heads, values = _value_order(config, max(part.shape))
    stem = rest.rpartition(".")[0]
    linear = f"{prefix}linear_attn."
    num_keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    match stem or rest:
        case "attn_norm" | "post_attention_norm" | "attn_q_norm" | "attn_k_norm":
            return replace(part, convert=_minus_one)
        case "attn_qkv":
            return _reordered(part, values, num_keys)
        case "ssm_conv1d":
            part = _reordered(part, values, num_keys)
            return replace(part, shape=(part.shape[0], 1, *part.shape[1:]))
        case "attn_gate":
            return _reordered(part, values)
        case "ssm_beta" | "ssm_alpha":
            return _reordered(part, heads)
        case "ssm_a":
            return _reordered(replace(part, name=f"{linear}A_log", convert=_log_of_negative), heads)
        case "ssm_dt":
            return _reordered(replace(part, name=f"{linear}dt_bias"), heads)
        case "ssm_out" if values is not None and part.shape[-1] == len(values):
            return replace(part, columns=values.argsort())
        case "ffn_gate_inp_shexp":
            return replace(part, shape=(1, math.prod(part.shape)))
    return part


def _value_order(config: dict[str, Any], longest: int) -> tuple[Tensor | None, Tensor | None]:
    """Value head `key * r + s` of the checkpoint is head `s * num_keys + key` of the file. Returns
    the order of heads, and of their elements; None if it is longer than every dimension of the
    tensors, because a damaged file could ask for any size.
    """
    num_keys, num_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    width = config["linear_value_head_dim"]
    if num_keys < 1 or num_values % num_keys or num_values in (0, num_keys):
        return None, None
    if num_values > longest:
        return None, None
    heads = torch.arange(num_values).view(-1, num_keys).t().flatten()
    if not 1 <= width <= longest // num_values:
        return heads, None
    return heads, (heads[:, None] * width + torch.arange(width)).flatten()


def _reordered(part: Part, order: Tensor | None, num_before: int = 0) -> Part:
    """Reorders the rows after the first ones. A wrong number of rows is reported later."""
    if order is None or part.shape[0] != num_before + len(order):
        return part
    return replace(part, order=torch.cat((torch.arange(num_before), num_before + order)))


def _minus_one(weight: Tensor) -> Tensor:
    return weight.float() - 1.0  # the models add the 1, as for any checkpoint


def _log_of_negative(weight: Tensor) -> Tensor:
    return torch.log(-weight.double()).float()
