"""Writes a GGUF file of random weights, to benchmark a model without downloading it:

    python scripts/make_random_gguf.py Qwen3.5-35B-A3B -o /dev/shm/random.gguf
    penstock bench step -m /dev/shm/random.gguf --batch 1

Blocks are random bytes. The two scales of each block are set so that a matrix preserves the
variance of its input. One pool of blocks per type is drawn, so only the disk limits how fast 20 GB
are written. Tensors, their types and their order are those of llama.cpp's files; the tokenizer has
byte tokens only.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from penstock.errors import ConfigError, PenstockError
from penstock.gguf.header import BLOCK_TYPES, BlockType
from penstock.models import build_model, model_type_of
from penstock.models.placement import Placement
from penstock.models.source import find_model
from penstock.weights.gguf_layout import GLOBALS, IN_LAYER, IN_MTP
from penstock.weights.random_weights import fill_parameter

ALIGNMENT = 32
POOL_BLOCKS = 2**16  # per type; 9 MB for Q4_K
PIECE_BYTES = 16 * 2**20
NUM_WRITERS = 16
BY_NAME = {block_type.name: (number, block_type) for number, block_type in BLOCK_TYPES.items()}

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "qwen3_5": "qwen35",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe": "qwen35moe",
    "qwen3_5_moe_text": "qwen35moe",
}
KEYS = {
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "intermediate_size": "feed_forward_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "full_attention_interval": "full_attention_interval",
}
OTHER_NAMES = {  # changed by converters
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
}
EXPERTS = re.compile(r"mlp\.experts\.(?:(\d+)\.)?(gate_up|gate|up|down)_proj(?:\.weight)?")
# Small tensors that stay float32: norms, routers, gates, and the parameters of DeltaNet's decay.
KEPT = re.compile(r".*(norm|bias|ssm_a|ssm_conv1d|ffn_gate_inp|ffn_gate_inp_shexp)(\.weight)?")


@dataclass(frozen=True, slots=True)
class Blocks:
    """The byte offsets of the 16-bit scales in a block, and how to set them for random codes.

    `deviation` is the standard deviation of the weights for a scale of 1. `offset` is the second
    scale in units of the first; it centres the weights on zero.
    """

    scale_at: int
    deviation: float
    offset_at: int | None = None
    offset: float = 0.0


BLOCKS = {
    "Q4_K": Blocks(0, 261.0, 2, 7.5),
    "Q5_K": Blocks(0, 533.0, 2, 15.5),
    "Q6_K": Blocks(208, 1365.0),
    "Q8_0": Blocks(0, 73.9),
}


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    type: BlockType
    parameter: str  # in our model; decides the distribution

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) // self.type.block_size * self.type.block_bytes


def tensors_of(config: dict[str, Any], mix: str, with_drafting_head: bool) -> Iterator[Tensor]:
    """All tensors of a file, from the table that the GGUF loader uses."""
    model: Any = build_model(
        config, torch.bfloat16, torch.device("meta"), with_drafting_head=with_drafting_head
    )
    placements = {
        name.replace("model.language_model.", "model."): place
        for name, place in model.placements().items()
    }
    num_layers, is_tied = len(model.layers), "lm_head.weight" not in placements
    for name, shape, parameter in _named(placements, config):
        type_name = "F32"
        if KEPT.fullmatch(name) is None:
            type_name = _type_of(name, mix, num_layers, is_tied)
            while shape[-1] % BY_NAME[type_name][1].block_size:
                type_name = "Q8_0" if type_name.endswith("K") else "F32"
        yield Tensor(name, shape, BY_NAME[type_name][1], parameter)


def _named(
    placements: Mapping[str, Placement], config: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Name and shape in the file, and our parameter."""
    text = config.get("text_config", config)
    stems = {ours: theirs for theirs, ours in IN_LAYER.items()}
    if architecture_of(config) not in ("qwen35", "qwen35moe"):
        stems["post_attention_layernorm"] = "ffn_norm"
    in_drafting_head = f"blk.{text['num_hidden_layers']}."
    whole = {ours: theirs for theirs, ours in GLOBALS.items()}
    whole |= {ours: in_drafting_head + theirs for theirs, ours in IN_MTP.items()}
    for name, place in placements.items():
        if name in whole:
            yield whole[name], place.shape, place.parameter
            continue
        layer, inside = re.fullmatch(r"(.*layers\.\d+\.)(.*)", name).groups()  # type: ignore[union-attr]
        layer = (
            in_drafting_head if layer.startswith("mtp.") else layer.replace("model.layers", "blk")
        )
        if (experts := EXPERTS.fullmatch(inside)) is not None:
            expert, projections = experts.groups()
            if expert in (None, "0"):  # fused or separate in our model; a stack in the file
                *_, num_rows, width = place.shape
                num_rows //= 1 + projections.count("_")
                for projection in projections.split("_"):
                    stack = (text["num_experts"], num_rows, width)
                    yield f"{layer}ffn_{projection}_exps.weight", stack, place.parameter
            continue
        stem, _, suffix = inside.rpartition(".")
        own_name = OTHER_NAMES.get(inside) or f"{stems[stem]}.{suffix}"
        shape = tuple(size for size in place.shape if size > 1)  # of taps, and of the shared gate
        yield layer + own_name, shape, place.parameter


def _type_of(name: str, mix: str, num_layers: int, is_tied: bool) -> str:
    """The choice of llama.cpp: more bits for the head and for some value and down projections."""
    if name == "output.weight" or (name == "token_embd.weight" and is_tied):
        return "Q6_K"
    if mix == "Q4_K":
        return "Q4_K"
    if "attn_qkv" in name:
        return "Q5_K"
    match = re.match(r"blk\.(\d+)\.(attn_v|ffn_down)", name)
    if match is None:
        return "Q4_K"
    layer, eighth = int(match[1]), num_layers // 8
    is_outer = layer < eighth or layer >= 7 * num_layers // 8
    return "Q6_K" if is_outer or (layer - eighth) % 3 == 2 else "Q4_K"


def architecture_of(config: Mapping[str, Any]) -> str:
    model_type = model_type_of(config)
    if model_type not in ARCHITECTURES:
        raise ConfigError(
            f"A GGUF file of a {model_type} model cannot be written",
            f"Known are {', '.join(ARCHITECTURES)}.",
            "Choose a model of one of these.",
        )
    return ARCHITECTURES[model_type]


def metadata_of(name: str, config: Mapping[str, Any], num_drafting: int) -> dict[str, Any]:
    architecture, text = architecture_of(config), config.get("text_config", config)
    rope = {"rope_theta": 10_000.0, **text, **text.get("rope_parameters", {})}
    head_dim = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    found = {theirs: text[ours] for ours, theirs in KEYS.items() if text.get(ours) is not None}
    found |= {
        "block_count": text["num_hidden_layers"] + num_drafting,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
    }
    if "mrope_section" in rope:
        found["rope.dimension_sections"] = [*rope["mrope_section"], 0]
    if num_drafting:
        found["nextn_predict_layers"] = num_drafting
    if "linear_value_head_dim" in text:
        num_heads = text["linear_num_value_heads"]
        found["ssm.inner_size"] = num_heads * text["linear_value_head_dim"]
    return {
        "general.architecture": architecture,
        "general.name": f"{name} with random weights",
        **{f"{architecture}.{key}": value for key, value in found.items()},
        **_vocabulary(text["vocab_size"], "qwen35" if "qwen35" in architecture else "qwen2"),
    }


def _vocabulary(size: int, rule: str) -> dict[str, Any]:
    """One token per byte, an end-of-text token, and placeholders for the remaining ids."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in shown}
    others = (byte for byte in range(256) if byte not in letters)
    letters |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    tokens = [letters[byte] for byte in range(256)] + ["<|endoftext|>"]
    normal, control, unused = 1, 3, 5
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.tokens": tokens + [f"[PAD{id}]" for id in range(len(tokens), size)],
        "tokenizer.ggml.token_type": [normal] * 256 + [control] + [unused] * (size - len(tokens)),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": 256,
    }


def header_of(metadata: Mapping[str, Any], tensors: list[Tensor]) -> tuple[bytes, list[int]]:
    """The header of the file, and the offset of each tensor after it."""
    entries, offsets, end = [], [], 0
    for tensor in tensors:
        offsets.append(end)
        dimensions = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape[::-1])
        number = BY_NAME[tensor.type.name][0]
        entries.append(_text(tensor.name) + dimensions + struct.pack("<IQ", number, end))
        end += tensor.num_bytes + -tensor.num_bytes % ALIGNMENT
    values = [_text(key) + _value(value) for key, value in metadata.items()]
    counts = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(values))
    header = b"".join([counts, *values, *entries])
    return header + bytes(-len(header) % ALIGNMENT), offsets


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _text(value)
    if value and isinstance(value[0], int):
        return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))


class RandomBytes:
    """Data for tensors: views of one pool of blocks per type and width."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._draw = np.random.default_rng(seed)
        self._pools: dict[tuple[str, int], np.ndarray] = {}

    def pieces(self, tensor: Tensor) -> Iterator[tuple[int, memoryview]]:
        """(offset in the tensor, bytes) of each piece."""
        if tensor.type.name == "F32":
            yield 0, self._numbers(tensor).data.cast("B")
            return
        pool = self._pool(tensor.type, tensor.shape[-1])
        start = 0
        while start < tensor.num_bytes:
            first = int(self._draw.integers(POOL_BLOCKS // 2))
            piece = pool[first * tensor.type.block_bytes :][: tensor.num_bytes - start]
            yield start, piece.data
            start += len(piece)

    def _pool(self, type: BlockType, width: int) -> np.ndarray:
        if (type.name, width) not in self._pools:
            blocks = self._draw.integers(0, 256, (POOL_BLOCKS, type.block_bytes), np.uint8)
            known = BLOCKS[type.name]
            scale = width**-0.5 / known.deviation
            _set_half(blocks, known.scale_at, scale)
            if known.offset_at is not None:
                _set_half(blocks, known.offset_at, scale * known.offset)
            self._pools[type.name, width] = blocks.reshape(-1)
        return self._pools[type.name, width]

    def _numbers(self, tensor: Tensor) -> np.ndarray:
        is_conv = tensor.parameter.endswith("conv")  # [taps, channels] in our model
        values = torch.empty(tensor.shape[::-1] if is_conv else tensor.shape)
        fill_parameter(tensor.parameter, values, self._seed)
        if tensor.name.endswith("ssm_a"):
            values = -values.exp()
        return (values.t() if is_conv else values).contiguous().numpy()


def _set_half(blocks: np.ndarray, start: int, number: float) -> None:
    blocks[:, start : start + 2] = np.frombuffer(np.float16(number).tobytes(), np.uint8)


def write_file(
    path: Path, header: bytes, tensors: list[Tensor], offsets: list[int], seed: int
) -> int:
    """Writes pieces in parallel; returns the size of the file."""
    data = RandomBytes(seed)
    size = len(header) + offsets[-1] + tensors[-1].num_bytes
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        os.truncate(file, size)
        os.pwrite(file, header, 0)

        def write(piece: tuple[int, memoryview]) -> None:
            place, rest = piece
            while rest:
                written = os.pwrite(file, rest, place)
                place, rest = place + written, rest[written:]

        pieces = (
            (len(header) + offset + start, piece)
            for tensor, offset in zip(tensors, offsets, strict=True)
            for start, piece in data.pieces(tensor)
        )
        with ThreadPoolExecutor(NUM_WRITERS) as pool:
            for _ in pool.map(write, pieces):
                pass
    finally:
        os.close(file)
    return size


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes a GGUF file of random weights.")
    parser.add_argument("model", help="a preset, such as Qwen3.5-35B-A3B, or a folder")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the file to write")
    parser.add_argument(
        "--mix",
        choices=("Q4_K_M", "Q4_K"),
        default="Q4_K_M",
        help="Q4_K with more bits for some matrices, as most files have it, or for the head only",
    )
    parser.add_argument("--layers", type=int, help="only so many, for a smaller file")
    parser.add_argument("--with-drafting-head", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    started = time.monotonic()
    source = find_model(arguments.model)
    config = with_layers(source.config, arguments.layers)
    tensors = list(tensors_of(config, arguments.mix, arguments.with_drafting_head))
    num_drafting = int(any(".nextn." in tensor.name for tensor in tensors))
    header, offsets = header_of(metadata_of(source.name, config, num_drafting), tensors)
    size = write_file(arguments.output, header, tensors, offsets, arguments.seed)
    seconds = time.monotonic() - started
    print(f"{arguments.output}: {len(tensors)} tensors, {size / 1e9:.2f} GB in {seconds:.1f} s")


def with_layers(config: dict[str, Any], num_layers: int | None) -> dict[str, Any]:
    if num_layers is None:
        return config
    text = config.get("text_config", config)
    text = {**text, "num_hidden_layers": num_layers}
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:num_layers]
    return {**config, "text_config": text} if "text_config" in config else text


if __name__ == "__main__":
    try:
        main()
    except PenstockError as error:
        sys.exit(f"error: {error}")
