"""The CUDA kernel for a few rows with drafts, on a GPU or emulated (`cuda_emulator.py`): it writes
what the reference writes, with every number of blocks per head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from unittest import mock

import pytest
import torch
from torch import Tensor

from cuda_emulator import COMPILER, emulated
from kernel_checks import HAS_GPU, ON_GPU, assert_near, random
from penstock.layers.inputs import RowSpan
from penstock.ops import Backlog, Journal, Replay
from penstock.ops.cuda import delta_net_drafts
from penstock.ops.reference.delta_net import gated_delta_net as reference
from penstock.ops.reference.rows import TokenBlocks
from penstock.ops.triton.delta_net import gated_delta_net as kernel
from test_kernel_delta_net import EPS, HEADS, NUM_TAPS, Mixer

EMULATED = pytest.mark.skipif(
    HAS_GPU or COMPILER is None, reason="kernels run compiled here, or there is no C++ compiler"
)
DEVICES = [pytest.param("cpu", marks=EMULATED), pytest.param("cuda", marks=ON_GPU)]
FULL_HEADS = (16, 32, 128, 128)  # of Qwen3.5-35B-A3B
ENTRIES, MOST_LATE, NUM_SLOTS = 3, 3, 12
# For each row: tokens, position of the first, slots to write and to read, accepted drafts, length
# of the backlog, and where (0: nowhere) and in which slot to keep a state.
ROWS = [
    (4, 70, 1, 1, 2, 3, 0, 0),
    (4, 62, 2, 9, 3, 1, 61, 8),  # moves to another slot; a state is kept inside the replay
    (3, 2, 3, 3, 0, 0, 2, 7),  # one draft less; fewer earlier inputs than taps
    (1, 0, 4, 4, 0, 2, 0, 0),  # no earlier tokens: neither state nor backlog may be read
    (2, 130, 5, 10, 1, 2, 0, 0),
]


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(delta_net_drafts, "MAX_ROWS", len(ROWS))
    with nullcontext() if HAS_GPU else emulated():
        yield


def use_cluster(monkeypatch: pytest.MonkeyPatch, cluster: int) -> None:
    if HAS_GPU and cluster > 1 and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("there are no clusters")
    monkeypatch.setattr(delta_net_drafts, "choose_cluster", lambda *_: cluster)


def run(
    op: object,
    heads: tuple[int, int, int, int],
    dtype: torch.dtype,
    has_backlog: bool,
    device: str = "cpu",
    rows: Sequence[tuple[int, ...]] = ROWS,
    entries: int = ENTRIES,
) -> tuple[Tensor, ...]:
    """Runs one step of all rows; returns its output and everything that the op may write."""
    mixer = Mixer(heads, "cpu", dtype, ring=NUM_TAPS + entries, num_slots=NUM_SLOTS)
    read = [row[3] for row in rows if row[1] > 0]
    mixer.start(*read)
    _, num_heads, key_dim, value_dim = mixer.recurrent.shape
    shape = (len(rows) + 1, entries)
    own_keys = random(*shape, mixer.key_heads, key_dim, dtype=torch.float32, device="cpu", seed=1)
    journal = Journal(
        own_keys.repeat_interleave(num_heads // mixer.key_heads, dim=2),
        random(*shape, num_heads, value_dim, dtype=torch.float32, device="cpu", seed=2),
        random(*shape, 3, num_heads, dtype=torch.float32, device="cpu", seed=3).abs() / 2,
    )
    journal.gates[:, :, 0] *= -1
    # The reference stores normalized keys, a kernel stores the factor that normalizes them.
    scale = (journal.keys.square().sum(-1) + 1e-6).rsqrt()
    if op is reference:
        journal.keys.mul_(scale[..., None])
    journal.gates[:, :, 2] = 1.0 if op is reference else scale
    backlog = Backlog.empty(NUM_SLOTS, num_heads, key_dim, value_dim, MOST_LATE, "cpu")
    for i, part in enumerate(backlog[1:]):
        part.copy_(random(*part.shape, dtype=torch.float32, device="cpu", seed=4 + i).abs() / 4)
    for row in rows:
        backlog.counts[row[7]] = 1  # of a state that is overwritten
        backlog.counts[row[3]] = row[5]
    columns = [torch.tensor(column, device=device) for column in zip(*rows)]
    lens, starts, slots, initial_slots, accepted, _, keep_at, keep_slots = columns
    spans = [RowSpan(row[0], row[1] + row[0], num_drafts=row[0] - 1) for row in rows]
    mixer.to(device)
    journal = Journal(*(part.to(device) for part in journal))
    backlog = Backlog(*(part.to(device) for part in backlog))
    out = op(  # type: ignore[operator]
        mixer.inputs(int(lens.sum())),
        mixer.conv_weight,
        mixer.a_log,
        mixer.dt_bias,
        mixer.norm_weight,
        EPS,
        mixer.conv,
        mixer.recurrent,
        torch.nn.functional.pad(lens.cumsum(0), (1, 0)),
        starts + lens,
        slots,
        initial_slots,
        spans,
        TokenBlocks.of(spans, device),
        mixer.key_heads,
        journal,
        Replay(torch.arange(1, len(rows) + 1, device=device), accepted, keep_at, keep_slots),
        backlog if has_backlog else None,
    )
    journal.keys.mul_(journal.gates[:, :, 2, :, None])
    written = (out, mixer.recurrent, mixer.conv, *journal, backlog.counts)
    return tuple(tensor.cpu() for tensor in written)


def rows_of(num_rows: int, width: int) -> list[tuple[int, ...]]:
    """The first of `ROWS`, each with this many tokens now and up to this many in the last step."""
    return [(width, *row[1:4], min(row[4], width - 1), *row[5:]) for row in ROWS[:num_rows]]


def check(
    heads: tuple[int, int, int, int],
    dtype: torch.dtype,
    has_backlog: bool,
    device: str,
    rows: Sequence[tuple[int, ...]] = ROWS,
    entries: int = ENTRIES,
) -> None:
    given = (heads, dtype, has_backlog)
    out, states, rings, keys, values, gates, counts = run(kernel, *given, device, rows, entries)
    expected = run(reference, *given, "cpu", rows, entries)
    assert_near(out, expected[0], dtype)
    written = [slot for row in rows for slot in (row[2], row[7]) if slot]
    assert_near(states[written], expected[1][written], torch.float32)
    for i, (num_tokens, start, slot, *_) in enumerate(rows, start=1):
        used = range(max(0, start - NUM_TAPS + 1), start + num_tokens)
        places = [position % rings.shape[1] for position in used]
        assert torch.equal(rings[slot, places], expected[2][slot, places])
        if num_tokens > 1:  # without the factors that normalize keys
            journals = zip((keys, values, gates[:, :, :2]), (*expected[3:5], expected[5][:, :, :2]))
            for seen, wanted in journals:
                own = (i, slice(num_tokens - 1))
                assert_near(seen[own], wanted[own], torch.float32)
    for *_, at, kept in rows:
        places = [position % rings.shape[1] for position in range(max(0, at - NUM_TAPS + 1), at)]
        if kept:
            assert torch.equal(rings[kept, places], expected[2][kept, places])
    # Slot 0 is padding; with a backlog, the reference also completes the states that it reads.
    touched = {0, *written, *(row[3] for row in rows if has_backlog)}
    others = [slot for slot in range(NUM_SLOTS) if slot not in touched]
    for seen, wanted in ((states, expected[1]), (rings, expected[2])):
        torch.testing.assert_close(seen[others], wanted[others], rtol=0, atol=0, equal_nan=True)
    if has_backlog:
        assert not counts[written].any()


@pytest.mark.thinned
@pytest.mark.parametrize("has_backlog", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "cluster"), [(0, 1), (0, 2), (1, 1), (1, 2)])
@pytest.mark.parametrize("device", DEVICES)
def test_a_step_leaves_what_the_reference_leaves(
    heads: int,
    cluster: int,
    dtype: torch.dtype,
    has_backlog: bool,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_cluster(monkeypatch, cluster)
    check(HEADS[heads], dtype, has_backlog, device)


@pytest.mark.thinned
@pytest.mark.parametrize("form", list(product([1, 2], [2, 3, 4, 5, 8])), ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 4])
@pytest.mark.parametrize("device", DEVICES)
def test_rows_have_any_number_of_tokens(
    num_rows: int, form: tuple[int, int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With so many blocks per head; they determine how many tokens a warp compares at once."""
    cluster, width = form
    use_cluster(monkeypatch, cluster)
    heads = FULL_HEADS if device == "cuda" else HEADS[0]
    check(heads, torch.bfloat16, True, device, rows_of(num_rows, width), width - 1)


@EMULATED
def test_only_what_it_supports_is_launched() -> None:
    """Other dtypes, widths and batches use the other kernel, and so does `deterministic`."""
    mixer = Mixer(HEADS[0], "cpu", torch.bfloat16)
    mixed, weight, ring, states = (
        mixer.inputs(4),
        mixer.conv_weight,
        mixer.conv,
        mixer.recurrent,
    )
    can_decode = delta_net_drafts.can_decode
    pools = (mixed, weight, ring, states, ENTRIES)
    assert can_decode(1, 4, *pools)
    assert can_decode(delta_net_drafts.MAX_ROWS, 4, *pools)
    assert not can_decode(delta_net_drafts.MAX_ROWS + 1, 4, *pools)
    assert can_decode(1, delta_net_drafts.MIN_WIDTH, *pools)
    assert not can_decode(1, delta_net_drafts.MIN_WIDTH - 1, *pools)
    with mock.patch.object(delta_net_drafts, "choose_cluster", return_value=1):
        assert not can_decode(1, delta_net_drafts.MIN_WIDTH, *pools)
    assert not can_decode(1, delta_net_drafts.MAX_WIDTH + 1, *pools)
    assert not can_decode(1, 4, mixed.float(), weight.float(), ring.float(), *pools[3:])
    assert not can_decode(1, 4, *pools[:3], states.half(), ENTRIES)
    assert not can_decode(1, 4, *pools[:3], states[:, :, :24], ENTRIES)
    for value_dim, can in ((24, False), (32, True), (512, True), (528, False)):
        wide = torch.empty(1, 1, 32, value_dim, device="meta")  # whole warps, and not too many
        assert can_decode(1, 4, *pools[:3], wide, ENTRIES) == can
    assert not can_decode(1, 4, mixed[:, 1:], *pools[1:])  # pairs of channels are not aligned
    odd = torch.empty(4, mixed.shape[1] + 1, dtype=mixed.dtype)[:, :-1]
    assert can_decode(1, 4, odd.new_empty(odd.shape), *pools[1:])
    assert not can_decode(1, 4, odd, *pools[1:])
    odd = torch.empty(2, ring[0].numel() + 1, dtype=ring.dtype)[:, :-1]
    assert not can_decode(1, 4, mixed, weight, odd.view(2, *ring[0].shape), *pools[3:])
    with mock.patch.object(delta_net_drafts, "MOST_ELEMENTS", mixed.numel()):  # of 32-bit places
        assert can_decode(1, 4, mixed[:3], *pools[1:])
        assert not can_decode(1, 4, *pools)
    assert not can_decode(1, 4, *pools[:4], 60)  # entries do not fit into shared memory
    with mock.patch.object(delta_net_drafts, "decode_with_drafts") as launched:
        run(kernel, HEADS[2], torch.bfloat16, has_backlog=True)
        run(partial(kernel, deterministic=True), HEADS[0], torch.bfloat16, has_backlog=False)
    launched.assert_not_called()


def test_blocks_share_a_head_where_there_are_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = delta_net_drafts.choose_cluster.__wrapped__
    for capability, cluster in (((8, 9), 1), ((9, 0), 2)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, own=capability: own)
        assert choose(torch.device("cuda")) == cluster
