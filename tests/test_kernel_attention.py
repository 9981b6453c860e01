"""The attention kernels match their references, and read nothing that was not written."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kernel_checks import FULL_SIZE, ON_GPU, PLACES, STORED, assert_near, make_paged_cache, random
from penstock.layers.inputs import RowSpan
from penstock.ops.reference import attention as reference
from penstock.ops.reference.rope import rope_table
from penstock.ops.reference.rows import TokenBlocks
from penstock.ops.triton import attention, decode_attention

CONTEXTS = (1, 15, 63, 64, 65, 129, 500)
MAX_LEN = 512
EPS = 1e-6


@dataclass(frozen=True)
class Decode:
    """Rows of one token over a cache that is NaN wherever no row has written."""

    q: Tensor  # [R, Hq, D]
    keys: Tensor  # [pages, page_size, Hkv, D]
    values: Tensor
    page_table: Tensor  # [R, P]
    context_lens: Tensor  # [R]
    gate: Tensor | None  # [R, Hq * D], a view of a wider tensor
    scales: Tensor | None = None  # of codes

    def attend(self, window: int = 0, deterministic: bool = False, num_newest: int = 1) -> Tensor:
        # In a graph, the host's lengths are those of the capture, so the kernel must not use them.
        spans = [RowSpan(1, 1, num_newest=num_newest)] * len(self.q)
        return self._call(attention.paged_attention, spans, window, deterministic)

    def expected(self, window: int = 0) -> Tensor:
        return self._call(reference.paged_attention, self.spans(), window, False)

    def spans(self) -> list[RowSpan]:
        return [RowSpan(1, context_len) for context_len in self.context_lens.tolist()]

    def rows(self, rows: slice, num_pages: int | None = None) -> Decode:
        gate = None if self.gate is None else self.gate[rows]
        table = self.page_table[rows, :num_pages]
        return replace(
            self, q=self.q[rows], page_table=table, context_lens=self.context_lens[rows], gate=gate
        )

    def _call(self, op, spans, window: int, deterministic: bool) -> Tensor:  # type: ignore[no-untyped-def]
        query_start = torch.arange(len(self.q) + 1, device=self.q.device)
        scale = self.q.shape[2] ** -0.5
        return op(
            self.q,
            self.keys,
            self.values,
            self.page_table,
            query_start,
            self.context_lens,
            spans,
            TokenBlocks.of(spans, self.q.device),
            scale,
            window,
            self.gate,
            self.scales,
            deterministic=deterministic,
        )


def make_decode(
    contexts: tuple[int, ...],
    heads: int,
    kv_heads: int,
    dim: int,
    *,
    dtype: torch.dtype,
    device: str,
    page_size: int = 64,
    num_pages: int = 0,  # width of the table; at least what the longest row needs
    gated: bool = True,
    stored: torch.dtype | None = None,  # of codes
) -> Decode:
    cache = make_paged_cache(
        contexts,
        kv_heads,
        dim,
        dtype=dtype,
        device=device,
        page_size=page_size,
        num_pages=num_pages,
        stored=stored,
    )
    width = heads * dim
    gate = random(len(contexts), 3 * width, dtype=dtype, device=device, seed=3)[
        :, width : 2 * width
    ]
    return Decode(
        **cache._asdict(),
        q=random(len(contexts), heads, dim, dtype=dtype, device=device, seed=4),
        context_lens=torch.tensor(contexts, device=device),
        gate=gate if gated else None,
    )


def use_processors(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(decode_attention, "num_processors", lambda device: number)


@pytest.mark.thinned
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("num_newest", [2, 4, 16])
def test_keys_of_drafts_are_read_after_the_kernel_that_writes_them(
    num_newest: int, stored: torch.dtype | None, device: str, dtype: torch.dtype
) -> None:
    """If any keys are read late, within a block, across two, or all of them, the result is the
    same.
    """
    contexts = (1, 2, 15, 16, 17, 18, 33, 130)
    step = make_decode(contexts, 4, 2, 64, dtype=dtype, device=device, stored=stored)
    late = step.attend(num_newest=num_newest)
    assert_near(late, step.expected(), dtype)
    assert torch.equal(late, step.attend())


@pytest.mark.thinned
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(2, 2, 32), (4, 2, 64), (8, 1, 128), (6, 2, 80), (20, 1, 16)]
)
def test_decode_is_its_reference_for_mixed_contexts(
    device: str,
    dtype: torch.dtype,
    stored: torch.dtype | None,
    heads: int,
    kv_heads: int,
    dim: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_processors(monkeypatch, 1)
    decode = make_decode(CONTEXTS, heads, kv_heads, dim, dtype=dtype, device=device, stored=stored)
    assert_near(decode.attend(), decode.expected(), dtype)


@pytest.mark.thinned
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    "processors", [1, 3, 1000]
)  # one split per row, a few, and one per block of keys
def test_decode_is_the_same_in_any_number_of_splits(
    device: str, dtype: torch.dtype, gated: bool, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_processors(monkeypatch, processors)
    decode = make_decode((1, 129, 500), 2, 1, 80, dtype=dtype, device=device, gated=gated)
    assert_near(decode.attend(), decode.expected(), dtype)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_splits_can_be_merged_a_few_at_a_time(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_processors(monkeypatch, 1000)
    tile = {"BLOCK_SPLITS": 2, "BLOCK_D": 32, "num_warps": 1, "num_stages": 1}
    monkeypatch.setattr(decode_attention, "_merge_rule", lambda *_: tile)
    decode = make_decode((1, 300, 310, 320), 2, 1, 32, dtype=dtype, device=device)
    decode.keys.mul_(3)  # so that splits have different weights
    assert_near(decode.attend(), decode.expected(), dtype)


@pytest.mark.thinned
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("window", [1, 64, 100, 129, 1000])
@pytest.mark.parametrize("processors", [1, 16])
def test_decode_sees_a_window_of_its_newest_keys(
    device: str, dtype: torch.dtype, window: int, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_processors(monkeypatch, processors)
    decode = make_decode((1, 64, 65, 200), 2, 1, 32, dtype=dtype, device=device)
    assert_near(decode.attend(window), decode.expected(window), dtype)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("page_size", [16, 48, 128])
def test_decode_is_its_reference_for_any_page_size(
    device: str, dtype: torch.dtype, page_size: int
) -> None:
    decode = make_decode(
        (1, 47, 48, 129), 2, 1, 32, dtype=dtype, device=device, page_size=page_size
    )
    assert_near(decode.attend(), decode.expected(), dtype)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_pages_that_no_block_of_keys_divides_take_the_reference(
    device: str, dtype: torch.dtype
) -> None:
    decode = make_decode((1, 47), 2, 1, 32, dtype=dtype, device=device, page_size=20)
    seen = decode._call(attention.paged_attention, decode.spans(), 0, False)
    assert_near(seen, decode.expected(), dtype)


def test_number_of_splits_follows_from_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    use_processors(monkeypatch, 132)
    tile = {"BLOCK_KEYS": 32, "programs_per_processor": 2}
    long = 4096 * 64

    def plan(walks: int, max_keys: int, deterministic: bool = False) -> tuple[int, int]:
        return decode_attention._plan_splits(
            walks, max_keys, tile, torch.device("cpu"), deterministic
        )

    assert plan(2, long) == (132, 1)  # two programs per SM
    assert plan(2, 64) == (2, 1)  # at most one split per block
    assert plan(1000, 2048) == (1, 32)  # the rows alone fill the GPU
    assert plan(1000, long) == (
        32,
        32,
    )  # one row may be long, without cost for the others
    assert plan(1, long, True) == plan(1000, long, True)


@pytest.mark.bitwise
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_deterministic_decode_is_the_same_to_the_bit_alone_and_in_any_batch(
    device: str, dtype: torch.dtype
) -> None:
    contexts = (1, 65, 129, 1100)
    batch = make_decode(contexts, 2, 1, 32, dtype=dtype, device=device, num_pages=40)
    together = batch.attend(deterministic=True)
    assert_near(together, batch.rows(slice(None), 18).expected(), dtype)
    for row, context in enumerate(contexts):
        for num_pages in (
            None,
            -(-context // 64),
        ):  # width of the table in a graph, or in an eager step
            alone = batch.rows(slice(row, row + 1), num_pages).attend(deterministic=True)
            assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_padded_rows_of_a_graph_leave_the_others_alone(device: str, dtype: torch.dtype) -> None:
    decode = make_decode((1, 1, 65, 200, 1), 2, 1, 32, dtype=dtype, device=device, num_pages=8)
    decode.page_table[[0, 1, 4]] = 0  # page 0 is NaN here
    real = decode.rows(slice(2, 4))
    for deterministic in (False, True):
        assert_near(decode.attend(deterministic=deterministic)[2:4], real.expected(), dtype)


@pytest.mark.bitwise
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_rows_of_several_tokens_and_decodes_share_a_step(device: str, dtype: torch.dtype) -> None:
    lens, contexts = (1, 1, 70, 3, 0, 1), (65, 1, 100, 129, 7, 30)
    rows = make_decode(contexts, 2, 1, 32, dtype=dtype, device=device)
    q = random(sum(lens), 2, 32, dtype=dtype, device=device)
    gate = random(sum(lens), 64, dtype=dtype, device=device, seed=1)
    query_start = torch.tensor((0, *lens)).cumsum(0).to(device)
    spans = [RowSpan(*pair) for pair in zip(lens, contexts)]
    cache = (rows.keys, rows.values, rows.page_table)
    blocks = TokenBlocks.of(spans, device)
    step = (q, *cache, query_start, rows.context_lens, spans, blocks, 32**-0.5, 0, gate)
    expected = reference.paged_attention(*step)
    assert_near(attention.paged_attention(*step), expected, dtype)
    in_step = attention.paged_attention(*step, deterministic=True)
    assert_near(in_step, expected, dtype)
    alone = replace(rows.rows(slice(5, 6)), q=q[-1:], gate=gate[-1:])
    assert torch.equal(alone.attend(deterministic=True), in_step[-1:])


@dataclass(frozen=True)
class Projected:
    """The output of the projection before attention, and the cache it is stored in."""

    q: Tensor  # [T, Hq, D], and k, v: views of one tensor
    k: Tensor
    v: Tensor
    norms: tuple[Tensor | None, Tensor | None]
    rope: Tensor
    positions: Tensor
    kv_index: Tensor

    def store(self, op, keys: Tensor, values: Tensor, interleaved: bool = False) -> Tensor:  # type: ignore[no-untyped-def]
        return op(
            self.q,
            self.k,
            self.v,
            *self.norms,
            EPS,
            self.rope,
            self.positions,
            self.kv_index,
            keys,
            values,
            interleaved,
        )


def make_projected(
    num_tokens: int,
    heads: int,
    kv_heads: int,
    dim: int,
    rot: int,
    *,
    normed: bool,
    dtype: torch.dtype,
    device: str,
    num_places: int = MAX_LEN,
) -> Projected:
    widths = (heads * dim, heads * dim, kv_heads * dim, kv_heads * dim)
    q, _, k, v = random(num_tokens, sum(widths), dtype=dtype, device=device, scale=2.0).split(
        widths, dim=1
    )
    q_norm, k_norm = (random(dim, dtype=torch.float32, device=device, seed=seed) for seed in (1, 2))
    generator = torch.Generator().manual_seed(3)
    inv_freq = 1.0 / 10000.0 ** (torch.arange(0, rot, 2) / rot)
    return Projected(
        q=q.unflatten(1, (heads, dim)),
        k=k.unflatten(1, (kv_heads, dim)),
        v=v.unflatten(1, (kv_heads, dim)),
        norms=(q_norm, k_norm) if normed else (None, None),
        rope=rope_table(inv_freq, MAX_LEN).to(device),
        positions=torch.randint(0, MAX_LEN, (num_tokens,), generator=generator).to(device),
        kv_index=torch.randperm(num_places, generator=generator)[:num_tokens].to(device),
    )


def check_store(
    projected: Projected, dtype: torch.dtype, interleaved: bool, num_places: int = MAX_LEN
) -> None:
    kv_heads, dim = projected.k.shape[1:]
    blank = torch.full(
        (num_places // 64, 64, kv_heads, dim), torch.nan, dtype=dtype, device=projected.k.device
    )
    seen, expected = (blank.clone(), blank.clone()), (blank.clone(), blank.clone())
    q = projected.store(attention.rope_and_store, *seen, interleaved)
    assert q.is_contiguous()
    assert_near(q, projected.store(reference.rope_and_store, *expected, interleaved), dtype)
    for mine, theirs in zip(seen, expected):
        mine, theirs = mine.flatten(0, 1), theirs.flatten(0, 1)
        assert torch.equal(mine.isnan(), theirs.isnan()), "something else was written"
        assert_near(mine[projected.kv_index], theirs[projected.kv_index], dtype)


@pytest.mark.thinned
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rot"),
    [(2, 2, 32, 32), (9, 3, 64, 16), (8, 1, 128, 32), (6, 2, 80, 20)],
)
def test_rope_and_store_is_its_reference(
    device: str,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    rot: int,
    normed: bool,
    interleaved: bool,
) -> None:
    for num_tokens in (1, 7):
        projected = make_projected(
            num_tokens, heads, kv_heads, dim, rot, normed=normed, dtype=dtype, device=device
        )
        check_store(projected, dtype, interleaved)


@pytest.mark.bitwise
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_rope_and_store_is_the_same_to_the_bit_alone_and_in_any_batch(
    device: str, dtype: torch.dtype
) -> None:
    batch = make_projected(33, 3, 1, 64, 32, normed=True, dtype=dtype, device=device)
    blank = torch.zeros(MAX_LEN // 64, 64, 1, 64, dtype=dtype, device=device)
    caches, caches_alone = (blank.clone(), blank.clone()), (blank.clone(), blank.clone())
    together = batch.store(attention.rope_and_store, *caches)
    for token in range(0, 33, 16):
        one = slice(token, token + 1)
        names = ("q", "k", "v", "positions", "kv_index")
        alone = replace(batch, **{name: getattr(batch, name)[one] for name in names})
        assert torch.equal(alone.store(attention.rope_and_store, *caches_alone), together[one])
        for mine, theirs in zip(caches_alone, caches):
            place = batch.kv_index[token]
            assert torch.equal(mine.flatten(0, 1)[place], theirs.flatten(0, 1)[place])


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_attention_sees_the_key_that_was_stored_just_before(
    device: str, dtype: torch.dtype
) -> None:
    decode = make_decode(CONTEXTS, 2, 1, 64, dtype=dtype, device=device)
    projected = make_projected(len(CONTEXTS), 2, 1, 64, 32, normed=True, dtype=dtype, device=device)
    newest = decode.context_lens - 1
    pages = decode.page_table.gather(1, newest[:, None] // 64)[:, 0].long()
    projected = replace(projected, kv_index=pages * 64 + newest % 64)
    for cache in (decode.keys, decode.values):
        cache.flatten(0, 1)[projected.kv_index] = torch.nan
    theirs = replace(decode, keys=decode.keys.clone(), values=decode.values.clone())
    theirs = replace(
        theirs, q=projected.store(reference.rope_and_store, theirs.keys, theirs.values)
    )
    mine = replace(decode, q=projected.store(attention.rope_and_store, decode.keys, decode.values))
    assert_near(mine.attend(), theirs.expected(), dtype)


@pytest.mark.parametrize(("device", "dtype"), [pytest.param("cuda", torch.bfloat16, marks=ON_GPU)])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("stored", STORED)
def test_captured_attention_follows_the_lengths_on_the_device(
    device: str, dtype: torch.dtype, stored: torch.dtype | None, deterministic: bool
) -> None:
    decode = make_decode(
        CONTEXTS, 16, 2, 256, dtype=dtype, device=device, num_pages=4096, stored=stored
    )
    lens = decode.context_lens.clone()
    decode.context_lens.fill_(1)
    decode.attend(deterministic=deterministic)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode.attend(deterministic=deterministic)
    for context_lens in (lens, lens.clamp(max=64), lens):
        decode.context_lens.copy_(context_lens)
        graph.replay()
        assert_near(out, decode.rows(slice(None), 8).expected(), dtype)


@pytest.mark.parametrize(("device", "dtype"), FULL_SIZE)
@pytest.mark.parametrize(
    ("batch", "context"), [(1, 1536), (8, 1536), (64, 1536), (300, 200), (1, 32768)]
)
@pytest.mark.parametrize("num_pages", [0, 4096])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("stored", STORED)
def test_decode_is_its_reference_at_full_size(
    device: str,
    dtype: torch.dtype,
    stored: torch.dtype | None,
    batch: int,
    context: int,
    num_pages: int,
    deterministic: bool,
) -> None:
    contexts = tuple(max(1, context - 7 * row) for row in range(batch))
    places = {"dtype": dtype, "device": device, "num_pages": num_pages, "stored": stored}
    decode = make_decode(contexts, 16, 2, 256, **places)
    expected = decode.rows(slice(None), -(-context // 64)).expected()
    assert_near(decode.attend(deterministic=deterministic), expected, dtype)


@pytest.mark.parametrize(("device", "dtype"), FULL_SIZE)
@pytest.mark.parametrize("num_tokens", [1, 64, 8192])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rot"), [(16, 2, 256, 64), (32, 8, 128, 128)])
def test_rope_and_store_is_its_reference_at_full_size(
    device: str, dtype: torch.dtype, num_tokens: int, heads: int, kv_heads: int, dim: int, rot: int
) -> None:
    projected = make_projected(
        num_tokens,
        heads,
        kv_heads,
        dim,
        rot,
        normed=True,
        dtype=dtype,
        device=device,
        num_places=16384,
    )
    check_store(projected, dtype, False, num_places=16384)
