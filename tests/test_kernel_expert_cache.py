"""Expert slots managed by the device: kernels decide and copy as the references do, and the table
matches the content of the slots.
"""

from __future__ import annotations

import pytest
import torch

from kernel_checks import INTERPRETED, ON_GPU
from penstock.ops.reference import expert_cache as reference
from penstock.ops.reference.expert_cache import copy_table
from penstock.ops.triton.expert_cache import fetch_experts, take_slots

DEVICES = [
    pytest.param("cpu", marks=INTERPRETED, id="interpreted"),
    pytest.param("cuda", marks=ON_GPU, id="compiled"),
]
Tables = list[torch.Tensor]


def new_tables(num_experts: int, num_slots: int, device: str, share: float = 0.0) -> Tables:
    slot_of = torch.full((num_experts,), -1, dtype=torch.int32, device=device)
    slot_of[:num_slots] = torch.arange(num_slots, dtype=torch.int32)
    return [
        slot_of,
        torch.zeros(num_experts, device=device),
        torch.zeros(num_experts, dtype=torch.int32, device=device),
        torch.zeros(reference.NUM_COUNTS, dtype=torch.int64, device=device),
        torch.tensor([share], device=device),
    ]


def choose(num_tokens: int, k: int, num_experts: int, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack(
        [torch.randperm(num_experts, generator=generator)[:k] for _ in range(num_tokens)]
    )
    return ids.int(), torch.rand(num_tokens, k, generator=generator)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize(("num_tokens", "num_experts", "num_slots"), [(1, 7, 3), (4, 40, 12)])
def test_kernels_decide_as_the_reference_does(
    device: str, share: float, num_tokens: int, num_experts: int, num_slots: int
) -> None:
    k = 3
    ours, theirs = (new_tables(num_experts, num_slots, where, share) for where in (device, "cpu"))
    for step in range(12):
        ids, weights = choose(num_tokens, k, num_experts, step)
        seen = take_slots(ids.to(device), weights.to(device), *ours, num_slots)
        expected = reference.take_slots(ids, weights, *theirs, num_slots)
        count = 1 + 2 * int(expected[3][0])
        for mine, other in zip(seen[:3], expected[:3], strict=True):
            assert torch.equal(mine.cpu(), other)
        assert seen[3][:count].tolist() == expected[3][:count].tolist()
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine.cpu(), other)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shapes", [[(5, 4), (3, 4100), (1,)], [(5, 4), (3, 4100)]])
def test_slots_hold_what_the_table_says(device: str, shapes: list[tuple[int, ...]]) -> None:
    """Whatever is chosen, a token's slots contain its experts; fields have different sizes, which
    threads copy 4 or 16 bytes at a time.
    """
    num_experts, num_slots, k = 20, 8, 2
    sources = [
        torch.randint(0, 2**31 - 1, (num_experts, *shape), dtype=torch.int32) for shape in shapes
    ]
    if device == "cuda":
        sources = [source.pin_memory() for source in sources]
    targets = [
        torch.zeros(num_slots + 1, *shape, dtype=torch.int32, device=device) for shape in shapes
    ]
    for source, target in zip(sources, targets, strict=True):
        target[:num_slots] = source[:num_slots].to(device)
    table, tables = copy_table(sources, targets), new_tables(num_experts, num_slots, device)
    for step in range(8):
        ids, weights = choose(4, k, num_experts, step)
        slots, *_, wanted = take_slots(ids.to(device), weights.to(device), *tables, num_slots)
        fetch_experts(wanted, sources, targets, table)
        for source, target in zip(sources, targets, strict=True):
            assert torch.equal(target.cpu()[slots.cpu().long()], source[ids.long()])
            assert not target[num_slots].any()
    hits, misses, fetched = tables[3].tolist()
    assert fetched == misses > 0
    assert hits > 0


def test_what_is_needed_often_stays() -> None:
    """Two frequent experts among random ones are always hits, in fewer slots than a random cache
    needs.
    """
    tables = new_tables(64, 8, "cpu")
    generator = torch.Generator().manual_seed(0)
    for step in range(60):
        others = 2 + torch.randperm(62, generator=generator)[:2]
        ids = torch.cat([torch.tensor([0, 1]), others])[None].int()
        before = tables[0].clone()
        reference.take_slots(ids, torch.ones(1, 4), *tables, 8)
        if step > 4:
            assert (before[:2] >= 0).all()
