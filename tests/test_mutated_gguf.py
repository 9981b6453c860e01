"""Damaged GGUF files: any file either loads or gives one of our errors."""

from __future__ import annotations

import json
import random
import struct
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from gguf_files import random_state, tokenizer_metadata, write_gguf
from small_models import HYBRID_MOE, LLAMA
from test_mutated_files import (
    GGUF,
    HYBRID,
    LLAMA3_ROPE,
    NUM_FULL,
    NUMBERS,
    SMALL,
    TEMPLATE,
    Findings,
    Kinds,
    check,
    mutate_bytes,
    report,
    run_mutants_of,
    write_tokenizer,
)

WIDE = {
    **SMALL,
    "hidden_size": 32,
    "intermediate_size": 32,
    "head_dim": 16,
}  # a block of Q8_0 is 32 wide
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        **LLAMA,
        **WIDE,
        "rope_scaling": {**LLAMA3_ROPE, "original_max_position_embeddings": 8192},
    },
    "qwen3moe": {**LLAMA, **WIDE, **EXPERTS, "model_type": "qwen3_moe"},
    "qwen35moe": {**HYBRID_MOE, **WIDE, **HYBRID, **EXPERTS, "mtp_num_hidden_layers": 1},
}
BATCH = 250  # mutants of one process: each is loaded twice, as an engine and as a server does
HEADER_BYTES = 12_000  # at least; the rest is weights, in which any byte is valid


def write_models(folder: Path) -> list[Path]:
    write_tokenizer(folder / "tokenizer.json", is_plain=True)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    pieces = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": [-float(id) for id in range(320)],
    }
    folders = []
    for architecture, config in CONFIGS.items():
        metadata = {
            **tokenizer_metadata(tokenizer, "qwen2", 320),
            "tokenizer.ggml.bos_token_id": 258,
            "tokenizer.ggml.eos_token_id": 259,
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.chat_template": TEMPLATE,
            "general.sampling.temp": 0.6,
            **(pieces if architecture == "llama" else {}),
        }
        (folder / architecture).mkdir()
        write_gguf(
            folder / architecture / GGUF,
            architecture,
            config,
            {name: tensor.abs() + 0.01 for name, tensor in random_state(config).items()},
            matrices="Q8_0",
            metadata=metadata,
        )
        folders.append(folder / architecture)
    return folders


def mutate_start(data: bytes, draw: random.Random) -> bytes:
    return mutate_bytes(data[:HEADER_BYTES], draw) + data[HEADER_BYTES:]


def mutate_numbers(data: bytes, draw: random.Random) -> bytes:
    """Changes counts, lengths, types, dimensions and offsets."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        start, size = draw.choice(places_of(data))
        number = int.from_bytes(data[start : start + size], "little")
        near = (number + 1, number - 1, 2 * number, number // 2, number + 32, number ^ 1)
        other = draw.choice((*NUMBERS, *near, draw.getrandbits(64), draw.randrange(45)))
        changed[start : start + size] = (other % 2 ** (8 * size)).to_bytes(size, "little")
    return bytes(changed)


@cache
def places_of(data: bytes) -> list[tuple[int, int]]:
    """Positions and sizes of the header's numbers; only the first number of a list."""
    places = [(4, 4), (8, 8), (16, 8)]
    offset = 24
    num_tensors, num_values = struct.unpack_from("<QQ", data, 8)
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

    def number(size: int) -> int:
        nonlocal offset
        places.append((offset, size))
        offset += size
        return int.from_bytes(data[offset - size : offset], "little")

    def text() -> None:
        nonlocal offset
        length = number(8)
        offset += length

    def value(kind: int) -> None:
        nonlocal offset
        if kind == 8:
            text()
        elif kind == 9:
            kind, count = number(4), number(8)
            kept = len(places) + 20
            for _ in range(count):
                value(kind)
            del places[kept:]
        else:
            number(sizes[kind])

    for _ in range(num_values):
        text()
        value(number(4))
    for _ in range(num_tensors):
        text()
        for _ in range(number(4)):
            number(8)
        number(4)
        number(8)
    return places


KINDS: Kinds = [
    (GGUF, mutate) for mutate in (mutate_bytes, mutate_start, mutate_numbers, mutate_numbers)
]


def run(num_mutants: int, folder: Path) -> Findings:
    torch.set_num_threads(1)
    return run_mutants_of(write_models(folder), KINDS, num_mutants, folder, BATCH)


def test_the_places_of_numbers_are_those_of_the_gguf_package(tmp_path: Path) -> None:
    (folder, *_) = write_models(tmp_path)
    data = (folder / GGUF).read_bytes()
    offsets = Counter(start for start, _ in places_of(data))
    reader = gguf.GGUFReader(folder / GGUF)
    assert all(offsets[field.offset] for field in reader.fields.values() if field.offset)
    assert all(offsets[tensor.field.offset] for tensor in reader.tensors)


def test_mutated_gguf_files_load_or_are_refused_in_our_own_words(tmp_path: Path) -> None:
    check(run(200, tmp_path), 200, KINDS)


@pytest.mark.slow
@pytest.mark.timeout(2 * 3600)
def test_a_hundred_thousand_mutated_gguf_files(tmp_path: Path) -> None:
    started = time.monotonic()
    found = run(NUM_FULL, tmp_path)
    report("mutated GGUF", found, time.monotonic() - started)
    check(found, NUM_FULL, KINDS)
