"""The masking kernel masks exactly the forbidden tokens of the named rows, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernel_checks import INTERPRETED, ON_GPU
from penstock.ops.reference import masking as reference
from penstock.ops.triton.masking import mask_logits

DEVICES = [
    pytest.param("cpu", marks=INTERPRETED, id="interpreted"),
    pytest.param("cuda", marks=ON_GPU, id="compiled"),
]


def random_words(num_rows: int, vocab: int, device: str, seed: int = 0) -> Tensor:
    """Random bits, including the sign bit and those past the last token."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows, -(-vocab // 32))
    words = torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64)
    return words.int().to(device)


def random_logits(num_rows: int, vocab: int, device: str) -> Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(1)).to(device)


def bits_of(words: Tensor, vocab: int) -> Tensor:
    """Computed with one Python integer per row."""
    rows = []
    for row in words.tolist():
        number = sum((word & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(row))
        rows.append([bool(number >> token & 1) for token in range(vocab)])
    return torch.tensor(rows, device=words.device)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 320])
def test_the_reference_forbids_exactly_the_zero_bits(vocab: int) -> None:
    words = random_words(2, vocab, "cpu")
    logits = random_logits(4, vocab, "cpu")
    expected = logits.clone()
    expected[[2, 0]] = expected[[2, 0]].masked_fill(~bits_of(words, vocab), -torch.inf)
    seen = reference.mask_logits(logits, torch.tensor([2, 0]), words)
    assert seen is logits
    assert torch.equal(seen, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab", [1, 31, 32, 2560, 4096, 9001])
def test_the_kernel_masks_what_the_reference_masks(device: str, vocab: int) -> None:
    logits, words = random_logits(5, vocab, device), random_words(3, vocab, device)
    rows = torch.tensor([4, 0, 2], device=device)
    expected = reference.mask_logits(logits.clone(), rows, words)
    seen = mask_logits(logits, rows, words)
    assert seen is logits
    assert torch.equal(seen, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_without_a_mask_keeps_every_bit_even_nan(device: str) -> None:
    logits = random_logits(3, 700, device)
    logits[1] = torch.nan
    before = logits.clone()
    mask_logits(logits, torch.tensor([0, 2], device=device), random_words(2, 700, device))
    assert torch.equal(logits[1].view(torch.int32), before[1].view(torch.int32))


@pytest.mark.parametrize("device", DEVICES)
def test_a_forbidden_nan_is_forbidden_too(device: str) -> None:
    logits = torch.full((1, 64), torch.nan, device=device)
    words = torch.tensor([[0, 1]], dtype=torch.int32, device=device)
    mask_logits(logits, torch.tensor([0], device=device), words)
    assert logits[0, 32].isnan()
    assert logits.isneginf().sum() == 63


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows_change_nothing(device: str) -> None:
    logits = random_logits(2, 100, device)
    before = logits.clone()
    mask_logits(
        logits, torch.empty(0, dtype=torch.int64, device=device), random_words(0, 100, device)
    )
    assert torch.equal(logits, before)


@pytest.mark.parametrize("device", DEVICES)
def test_logits_and_bits_may_be_parts_of_wider_rows(device: str) -> None:
    wide, words = random_logits(2, 1100, device), random_words(2, 2000, device)
    rows = torch.tensor([1, 0], device=device)
    expected = reference.mask_logits(wide[:, :1000].clone(), rows, words[:, :32].clone())
    untouched = wide[:, 1000:].clone()
    mask_logits(wide[:, :1000], rows, words[:, :32])
    assert torch.equal(wide[:, :1000], expected)
    assert torch.equal(wide[:, 1000:], untouched)


@pytest.mark.parametrize("device", DEVICES[1:])
def test_a_large_vocabulary_is_masked_in_a_captured_step(device: str) -> None:
    vocab, num_rows = 248_320, 64
    logits, words = random_logits(num_rows, vocab, device), random_words(num_rows, vocab, device)
    rows = torch.randperm(num_rows, generator=torch.Generator().manual_seed(2)).to(device)
    expected = reference.mask_logits(logits.clone(), rows, words)
    static = torch.zeros_like(logits)
    mask_logits(static, rows, words)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mask_logits(static, rows, words)
    static.copy_(logits)
    graph.replay()
    assert torch.equal(static, expected)
