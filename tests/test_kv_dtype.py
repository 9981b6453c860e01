"""8-bit keys and values: the codes, the kernel that writes them, and engines that use them.

Attention over codes is tested with the attention kernels (`test_kernel_attention.py`,
`test_kernel_prefill_attention.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_checks import PLACES, assert_near
from penstock import LLM, SamplingParams
from penstock.engine.engine import Engine
from penstock.eval import held_out
from penstock.layers.inputs import KVCache
from penstock.llm import Completion
from penstock.ops.reference import attention as reference
from penstock.ops.reference import kv_codes
from penstock.ops.triton import attention
from small_models import SHALLOW_FAMILIES, logprobs_of, make_engine, prompt, request, run
from test_kernel_attention import CONTEXTS, MAX_LEN, Projected, make_decode, make_projected

FP8, INT8 = torch.float8_e4m3fn, torch.int8
CODES = pytest.mark.parametrize("codes", [FP8, INT8], ids=["fp8", "int8"])
GREEDY = SamplingParams(max_tokens=48, logprobs=0)
NAMES = pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])


def read(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.float() * scales[..., None]


# The codes


@CODES
@pytest.mark.parametrize("size", [1e-20, 1e-3, 1.0, 1e6])
def test_a_head_of_any_size_is_read_back_within_half_a_step(
    codes: torch.dtype, size: float
) -> None:
    x = size * torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(0))
    stored, scales = kv_codes.encode(x, codes)
    amax = x.abs().amax(-1, keepdim=True)
    step = torch.maximum(x.abs() / 16, amax / 448 / 512 / 2) if codes == FP8 else amax / 127 / 2
    assert ((read(stored, scales) - x).abs() <= 1.001 * step).all()
    assert read(stored, scales).abs().amax(-1) == pytest.approx(amax[..., 0], rel=1e-5)


@CODES
def test_zeros_are_read_back_as_zeros(codes: torch.dtype) -> None:
    stored, scales = kv_codes.encode(torch.zeros(2, 1, 8), codes)
    assert (read(stored, scales) == 0).all()


# The kernels


def make_caches(codes: torch.dtype, heads: int, dim: int, device: str) -> tuple[Tensor, ...]:
    shape = (MAX_LEN // 64, 64, heads, dim)
    pools = [torch.full(shape, 0x7F, dtype=torch.uint8, device=device) for _ in range(2)]
    scales = torch.full((2, *shape[:3]), torch.nan, device=device)
    return *(pool.view(codes) for pool in pools), scales


def store(op: Any, projected: Projected, caches: tuple[Tensor, ...]) -> Tensor:
    keys, values, scales = caches
    places = (projected.rope, projected.positions, projected.kv_index)
    made = (projected.q, projected.k, projected.v, *projected.norms)
    stored: Tensor = op(*made, 1e-6, *places, keys, values, False, scales)
    return stored


@CODES
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rot"), [(9, 3, 64, 16), (6, 2, 80, 20)])
def test_the_kernel_writes_the_codes_of_the_reference(
    device: str,
    dtype: torch.dtype,
    codes: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    rot: int,
) -> None:
    projected = make_projected(
        9, heads, kv_heads, dim, rot, normed=True, dtype=dtype, device=device
    )
    # Every exponent that E4M3 has and some below, and a head of zeros.
    sizes = torch.logspace(0, -6, dim, base=10.0, device=device)
    projected = replace(projected, v=(projected.v * sizes).to(dtype))
    projected.v[1, 0] = 0
    seen, expected = (make_caches(codes, kv_heads, dim, device) for _ in range(2))
    assert_near(
        store(attention.rope_and_store, projected, seen),
        store(reference.rope_and_store, projected, expected),
        dtype,
    )
    keys, values, scales = seen
    assert torch.equal(values.view(torch.uint8), expected[1].view(torch.uint8))
    assert torch.equal(scales[1].nan_to_num(), expected[2][1].nan_to_num())
    assert torch.equal(scales.isnan(), expected[2].isnan()), "something else was written"
    # A key may lie between two codes, and either is right.
    differing = (keys.view(torch.uint8) != expected[0].view(torch.uint8)).float().mean()
    assert differing <= 1e-3
    in_steps = (keys.float() - expected[0].float()).abs().nan_to_num()
    assert in_steps.max() <= (32 if codes == FP8 else 1)


@CODES
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_kernels_read_every_code_exactly(
    device: str, dtype: torch.dtype, codes: torch.dtype
) -> None:
    """A row with one key returns its value."""
    every = torch.arange(256, dtype=torch.uint8, device=device).view(codes)
    is_code = every.float().isfinite() & (every.view(torch.uint8) != 0x80)
    every = torch.where(is_code, every.view(torch.uint8), 0).view(codes)
    decode = make_decode((1,), 1, 1, 256, dtype=dtype, device=device, gated=False, stored=codes)
    assert decode.scales is not None
    decode.values.view(torch.uint8)[1, 0, 0] = every.view(torch.uint8)
    decode.scales[1, 1, 0, 0] = 2.0
    assert torch.equal(decode.attend()[0], 2.0 * every.to(dtype))


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_small_values_keep_their_digits(device: str, dtype: torch.dtype) -> None:
    """Scales and weights are both small: in float16 their products must not vanish."""
    decode = make_decode((500,), 4, 2, 64, dtype=dtype, device=device, gated=False, stored=FP8)
    assert decode.scales is not None
    decode.scales[1] *= 2.0**-8
    assert_near(decode.attend() * 2**8, decode.expected() * 2**8, dtype)


@CODES
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_attention_sees_the_codes_that_were_stored_just_before(
    device: str, dtype: torch.dtype, codes: torch.dtype
) -> None:
    decode = make_decode(CONTEXTS, 2, 1, 64, dtype=dtype, device=device, stored=codes)
    projected = make_projected(len(CONTEXTS), 2, 1, 64, 32, normed=True, dtype=dtype, device=device)
    newest = decode.context_lens - 1
    pages = decode.page_table.gather(1, newest[:, None] // 64)[:, 0].long()
    projected = replace(projected, kv_index=pages * 64 + newest % 64)
    assert decode.scales is not None
    decode.scales.flatten(1, 2)[:, projected.kv_index] = torch.nan
    q = store(attention.rope_and_store, projected, (decode.keys, decode.values, decode.scales))
    mine = replace(decode, q=q)
    assert_near(mine.attend(), mine.expected(), dtype)


# Engines


@pytest.mark.thinned
@NAMES
@pytest.mark.parametrize("family", ["hybrid_moe", "llama"])
def test_replies_do_not_depend_on_the_batch_or_the_cut_or_the_cache(
    family: str, kv_dtype: str
) -> None:
    """Bitwise in deterministic mode: a page of codes is a function of its own tokens."""
    config, requests = (
        SHALLOW_FAMILIES[family],
        [request(f"r{n}", prompt(n, n)) for n in (1, 65, 200)],
    )
    engine = make_engine(config, kv_dtype=kv_dtype)
    together = run(engine, *requests)
    again = run(engine, *(replace(one, id=f"{one.id} again") for one in requests))
    assert sum(deltas[0].num_cached_tokens for deltas in again.values()) > 0
    cut = run(make_engine(config, kv_dtype=kv_dtype, max_step_tokens=64), *requests)
    for one in requests:
        alone = run(make_engine(config, kv_dtype=kv_dtype), one)[one.id]
        for deltas in (together[one.id], cut[one.id], again[f"{one.id} again"]):
            assert logprobs_of(deltas) == logprobs_of(alone)


@NAMES
@pytest.mark.parametrize("is_alone", [True, False])
def test_a_token_alone_reads_what_many_read(is_alone: bool, kv_dtype: str) -> None:
    """The two forms of a decode on a CPU are far nearer to each other than to float32."""
    one, settings = request("r", prompt(90, 1), max_tokens=8), {"deterministic": False}
    plain = run(make_engine(SHALLOW_FAMILIES["llama"], **settings), one)["r"]
    others = [] if is_alone else [request("other", prompt(70, 2), max_tokens=8)]
    engine = make_engine(SHALLOW_FAMILIES["llama"], kv_dtype=kv_dtype, **settings)
    exact = make_engine(SHALLOW_FAMILIES["llama"], kv_dtype=kv_dtype)
    said, wanted = (
        [token.logprob for token in logprobs_of(run(e, one, *others)["r"])] for e in (engine, exact)
    )
    assert said == pytest.approx(wanted, abs=1e-4)
    assert said != pytest.approx([token.logprob for token in logprobs_of(plain)], abs=1e-5)


def kv_bytes(engine: Engine) -> int:
    caches = [cache for cache in engine.runner.caches if isinstance(cache, KVCache)]
    return sum(
        pool.nbytes
        for cache in caches
        for pool in (cache.keys, cache.values, cache.scales)
        if pool is not None
    )


@pytest.mark.parametrize("kv_dtype", ["auto", "bfloat16", "fp8", "fp8_e4m3", "int8"])
def test_the_plan_counts_what_is_allocated(kv_dtype: str) -> None:
    engine = make_engine(SHALLOW_FAMILIES["llama"], kv_dtype=kv_dtype, memory_gb=0.01)
    pages = engine.info.num_pages
    assert kv_bytes(engine) == engine.info.cache_bytes
    plain = make_engine(SHALLOW_FAMILIES["llama"], memory_gb=0.01).info
    head_dim = engine.runner.caches[0].keys.shape[-1]  # type: ignore[union-attr]
    element = {"auto": 4.0, "bfloat16": 2.0}.get(kv_dtype, 1 + 4 / head_dim)
    assert pages / plain.num_pages == pytest.approx(4 / element, rel=0.02)
    assert engine.info.kv_dtype == ("float32" if kv_dtype == "auto" else kv_dtype)


@pytest.fixture(scope="module")
def exact() -> tuple[list[list[int]], list[Completion]]:
    """Prompts, and their greedy replies with KV in float32."""
    llm = LLM(device="cpu", memory_gb=0.1)
    prompts = [
        llm.encode_chat(list(one.messages[:-1]), enable_thinking=one.enable_thinking)
        for one in held_out.take("word_problems", 6, 0)
    ]
    return prompts, llm.generate(prompts, GREEDY)


@pytest.mark.parametrize(("kv_dtype", "error"), [("fp8", 1e-4), ("int8", 2e-5)])
def test_the_embedded_model_hardly_changes_its_mind(
    exact: tuple[list[list[int]], list[Completion]], kv_dtype: str, error: float
) -> None:
    """The greedy replies are the same; this is the mean change of their log-probabilities."""
    prompts, wanted = exact
    said = LLM(device="cpu", memory_gb=0.1, kv_dtype=kv_dtype).generate(prompts, GREEDY)
    same = [pair for pair in zip(said, wanted) if pair[0].token_ids == pair[1].token_ids]
    assert len(same) >= 5
    differences = torch.tensor(
        [
            abs(mine.logprob - theirs.logprob)
            for one, other in same
            for mine, theirs in zip(one.logprobs, other.logprobs)
        ]
    )
    print(f"{kv_dtype}: {differences.mean():.1e}, at most {differences.max():.1e}")
    assert 0 < differences.mean() < error
