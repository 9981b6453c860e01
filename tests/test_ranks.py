"""One model on several ranks: shards are slices of the whole, and the logits are equal."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from gguf_files import random_state, write_gguf
from packed_checkpoints import FORMATS, in_mlx_form, pack_state, plain_state, write
from penstock.errors import ConfigError
from penstock.models import build_model
from penstock.ops.cpu import quantized
from penstock.parallel.ranks import Ranks
from penstock.weights.gguf_blocks import READERS
from penstock.weights.packing import can_pack
from penstock.weights.slices import cut_values, shares_of
from rank_models import FAMILIES, LLAMA_4, assert_close, logits_of, values_of
from small_models import HYBRID_MOE, LLAMA, load_weights
from thread_ranks import on_ranks, random_model


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_compute_the_logits_of_one(name: str) -> None:
    config = FAMILIES[name]
    expected = logits_of(random_model(config))
    first, second = on_ranks(2, lambda ranks: logits_of(random_model(config, ranks)))
    assert_close(first, expected)
    assert torch.equal(first, second), "every rank goes on from the same numbers"


def assert_parts_of_the_whole(path: Path, size: int) -> None:
    whole = values_of(load_weights(path))
    for rank in range(size):
        model = load_weights(path, ranks=Ranks(rank, size))
        shares, found = shares_of(model), values_of(model)
        assert found.keys() == whole.keys()
        for name, values in found.items():
            share = shares.get(name)
            expected = whole[name] if share is None else cut_values(whole[name], share)
            assert torch.equal(values, expected), f"{name} of rank {rank}"


PACKED = {**HYBRID_MOE, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
PACKED = {**PACKED, "linear_value_head_dim": 32, "mtp_num_hidden_layers": 1}


GROUPED = ("fp8", "int4", "gptq", "mxfp4", "mlx")


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, 4) for name in GROUPED),
        ("fp8", 2),
        ("gptq", 2),
        *(pytest.param(name, 4, marks=pytest.mark.slow) for name in FORMATS if name not in GROUPED),
    ],
)
def test_ranks_keep_the_numbers_of_a_packed_checkpoint(
    tmp_path: Path, name: str, size: int
) -> None:
    """Also if a rank's columns end inside a group: 4 ranks cut groups of 32 columns into 16."""
    form = FORMATS[name]
    state = plain_state(PACKED)
    packed, _ = pack_state(state, form)
    if name == "mlx":
        packed = in_mlx_form(packed, "language_model.")
    path = write(tmp_path / "model", packed, {**PACKED, form.key: form.quantization})
    assert_parts_of_the_whole(path, size)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_ranks_keep_the_numbers_of_a_gguf_file(tmp_path: Path, kind: str) -> None:
    config = {**PACKED, "hidden_size": 256, "moe_intermediate_size": 512}
    config |= {"shared_expert_intermediate_size": 512, "mtp_num_hidden_layers": 0}
    config |= {"linear_value_head_dim": 128, "vocab_size": 320, "num_hidden_layers": 2}
    config |= {"layer_types": ["linear_attention", "full_attention"], "num_experts": 2}
    config |= {"num_experts_per_tok": 1}
    state = random_state(config)
    assert_parts_of_the_whole(
        write_gguf(tmp_path / "model.gguf", "qwen35moe", config, state, matrices=kind), 2
    )


@pytest.mark.parametrize("kind", READERS)
def test_cut_blocks_mean_what_they_meant_in_the_whole(kind: str) -> None:
    """Two levels of scales, cut at the edge of a block and inside one."""
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    random = torch.Generator().manual_seed(1)
    blocks = torch.randint(256, (6, 4, size), dtype=torch.uint8, generator=random)
    codes = READERS[kind](blocks)
    whole = codes.dequantize()
    length = whole.shape[-1]
    for first, end in ((0, length // 2), (length // 2, length), (length // 8 * 3, length // 8 * 5)):
        part = codes.cut(slice(2, 5), slice(first, end))
        assert can_pack(part)
        expected = whole[2:5, first:end].nan_to_num(nan=0.5)  # random scales may be NaN
        assert torch.equal(part.dequantize().nan_to_num(nan=0.5), expected)


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Weights, by the size of each read."""
    sizes: list[int] = []
    read = os.preadv

    def counted(file: int, buffers: Any, offset: int) -> int:
        sizes.append(read(file, buffers, offset))
        return sizes[-1]

    monkeypatch.setattr(os, "preadv", counted)
    yield sizes
    monkeypatch.undo()


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_rank_reads_its_part_of_a_file_and_no_more(
    tmp_path: Path, bytes_read: list[int], is_fused: bool
) -> None:
    wide = {"moe_intermediate_size": 4096, "shared_expert_intermediate_size": 4096}
    config = {**HYBRID_MOE, **wide, "head_dim": 512, "num_experts": 4, "num_hidden_layers": 4}
    state = random_state(config) if is_fused else plain_state(config)
    assert ("model.layers.0.mlp.experts.down_proj" in state) == is_fused
    path = write(tmp_path / "model", state, config)
    model = load_weights(path, ranks=Ranks(1, 4))
    kept = sum(values.numel() * 4 for values in model.parameters())
    assert kept < 0.3 * (path / "model.safetensors").stat().st_size
    assert sum(bytes_read) < 1.1 * kept, "but for rows that are shorter than a page of a disk"
    assert_parts_of_the_whole(path, 4)


@pytest.mark.parametrize("name", ["fp8", "int4", "int8", "awq", "nvfp4", "mxfp4", "mlx"])
def test_codes_of_other_ranks_are_not_read(
    tmp_path: Path, bytes_read: list[int], name: str
) -> None:
    """Every rank reads the scales of all columns, and what is neither quantized nor split."""
    form = FORMATS[name]
    config = {**LLAMA_4, "num_hidden_layers": 1, "intermediate_size": 32768, "vocab_size": 64}
    packed, _ = pack_state(plain_state(config), form)
    path = write(tmp_path / "model", packed, {**config, form.key: form.quantization})
    load_weights(path, ranks=Ranks(1, 4))
    assert sum(bytes_read) < 0.35 * (path / "model.safetensors").stat().st_size
    assert_parts_of_the_whole(path, 4)


def test_ranks_of_a_quantized_model_differ_only_by_the_rounding_of_activations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel rounds activations to 16 bits per 128 columns, and ranks have other columns.
    Dequantized weights give the logits of one rank.
    """
    form = FORMATS["int8"]
    packed, _ = pack_state(plain_state(LLAMA_4), form)
    path = write(tmp_path, packed, {**LLAMA_4, form.key: form.quantization})

    def both() -> tuple[Tensor, Tensor]:
        alone = logits_of(load_weights(path))
        return alone, on_ranks(2, lambda ranks: logits_of(load_weights(path, ranks=ranks)))[0]

    alone, found = both()
    monkeypatch.setattr(quantized, "is_available", lambda *_: False)
    expected, dequantized = both()
    assert_close(dequantized, expected)
    for rounded in (alone, found):
        assert float((rounded - expected).abs().max() / expected.abs().max()) < 3e-4


@pytest.mark.parametrize(
    ("config", "ranks", "what", "todo"),
    [
        (LLAMA, Ranks(0, 4), "tp is 4, but the model has 6 attention heads", "Use --tp 1 or 2."),
        # Three ranks could split the attention heads, but not the two KV heads.
        (LLAMA, Ranks(0, 3), "tp is 3, but the model has 2 KV heads", "Use --tp 1 or 2."),
        (
            HYBRID_MOE,
            Ranks(0, 4, whole_experts=True),
            "ep is on, tp is 4, but a layer has only 8 experts",
            "Use --tp 1 or 2, or omit --ep.",
        ),
    ],
)
def test_a_split_that_is_impossible_is_refused_with_sizes_that_work(
    config: dict[str, Any], ranks: Ranks, what: str, todo: str
) -> None:
    with pytest.raises(ConfigError) as error:
        build_model(config, torch.float32, torch.device("meta"), ranks=ranks)
    assert (error.value.what, error.value.todo) == (what, todo)
