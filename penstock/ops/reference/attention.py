"""Causal attention over paged keys and values. Knows pages and rows, not sequences.

Decode rows are one batched computation over their pages. Rows of several tokens are computed in
blocks of 64 queries, aligned to absolute positions, so that a token has the same shapes and the
same bits however its prompt was split. With `deterministic`, decode rows are too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.ops.cpu import attention as cpu_attention
from penstock.ops.cpu import decode, few_tokens
from penstock.ops.float8 import RoundedTokens
from penstock.ops.reference import kv_codes
from penstock.ops.reference.activation import sigmoid
from penstock.ops.reference.rope import rotate
from penstock.ops.reference.rows import Span, TokenBlocks, cut_rows
from penstock.ops.weight import Weight

QUERY_BLOCK = 64


def rope_and_store(
    q: Tensor,  # [T, Hq, D]
    k: Tensor,  # [T, Hkv, D]
    v: Tensor,  # [T, Hkv, D]
    q_norm: Tensor | None,  # [D] float32
    k_norm: Tensor | None,  # [D] float32
    eps: float,
    rope: Tensor,  # [max_len, 2, rot/2] float32
    positions: Tensor,  # [T]
    kv_index: Tensor,  # [T]
    keys: Tensor,  # [pages, page_size, Hkv, D]  written
    values: Tensor,  # [pages, page_size, Hkv, D]  written
    interleaved: bool = False,
    kv_scales: Tensor | None = None,  # [2, pages, page_size, Hkv] float32  written
) -> Tensor:  # [T, Hq, D]
    """Head norms and rope; stores keys and values in their pages; returns the queries.

    With scales, keys and values are quantized to 8 bits (`kv_codes`).
    """
    assert (q_norm is None) == (k_norm is None)
    if kv_scales is None and cpu_attention.can_rotate(q, k, v, keys, positions, kv_index):
        given = (q, k, v, q_norm, k_norm, eps, rope, positions, kv_index, keys, values)
        return cpu_attention.rope_and_store(*given, interleaved)
    num_heads = (q.shape[1], k.shape[1])
    heads = torch.cat((q, k), dim=1).float()  # [T, Hq + Hkv, D]
    if q_norm is not None and k_norm is not None:
        heads = F.rms_norm(heads, heads.shape[-1:], eps=eps)
        for own, norm in zip(heads.split_with_sizes(num_heads, dim=1), (q_norm, k_norm)):
            own.mul_(norm)
    cos, sin = rope.index_select(0, positions).unbind(1)
    q, k = rotate(heads, cos, sin, interleaved).to(q.dtype).split_with_sizes(num_heads, dim=1)
    key_scales, value_scales = (None, None) if kv_scales is None else kv_scales
    kv_codes.store(keys, key_scales, kv_index, k)
    kv_codes.store(values, value_scales, kv_index, v)
    return q


def paged_attention(
    q: Tensor,  # [T, Hq, D]
    keys: Tensor,  # [pages, page_size, Hkv, D]
    values: Tensor,  # [pages, page_size, Hkv, D]
    page_table: Tensor,  # [R, P]
    query_start: Tensor,  # [R + 1]
    context_lens: Tensor,  # [R]
    spans: Sequence[Span],
    blocks: TokenBlocks,
    scale: float,
    window: int = 0,  # keys a query sees, including itself; 0: all
    gate: Tensor | None = None,  # [T, Hq * D]
    kv_scales: Tensor | None = None,  # [2, pages, page_size, Hkv] float32, of 8-bit KV
    reader: Weight | None = None,  # that of the GEMM which alone reads the result
    *,
    deterministic: bool = False,
) -> Tensor | RoundedTokens:  # [T, Hq * D]
    """softmax(q k^T * scale) v for every token of every row, times sigmoid(gate)."""
    # query_start and blocks are for kernels; here the spans have the same information on the host.
    caches = _Caches(keys, values, *((None, None) if kv_scales is None else kv_scales))
    has_kernel = (
        not deterministic and kv_scales is None and cpu_attention.can_attend(q, keys, page_table)
    )

    def attend_rows(tokens: slice, rows: slice, gate: Tensor | None) -> Tensor:
        return cpu_attention.attend(
            q[tokens],
            keys,
            values,
            page_table[rows],
            [span.num_tokens for span in spans[rows]],
            [span.context_len for span in spans[rows]],
            window,
            scale,
            gate,
        )

    if has_kernel and all(1 <= span.num_tokens <= few_tokens.MOST_TOKENS for span in spans):
        return attend_rows(slice(None), slice(None), gate)
    is_alone = decode.is_alone(q, deterministic) and len(spans) == 1
    are_few = not is_alone and decode.may_be_drafts(q, deterministic)
    are_drafts = are_few and _are_one_sequence(spans, page_table)
    if is_alone:
        alone = decode.attend(q, *caches, page_table[0], spans[0].context_len, scale, window)
        return alone if gate is None else alone.mul_(sigmoid(gate, deterministic))
    if are_drafts:
        context_len = spans[-1].context_len
        drafts = decode.attend_drafts(q, *caches, page_table[0], context_len, scale, window)
        return drafts if gate is None else drafts.mul_(sigmoid(gate, deterministic))
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    for group in cut_rows(spans, batch_decodes=not deterministic):
        pages = page_table[group.rows]
        if group.span is None and has_kernel:
            own = attend_rows(group.tokens, group.rows, None)
            out[group.tokens] = own.view(-1, *q.shape[1:])
        elif group.span is None:
            longest = max(span.context_len for span in spans[group.rows])
            context_lens_here = context_lens[group.rows]
            out[group.tokens] = _decode(
                q[group.tokens], caches, pages, context_lens_here, longest, scale, window
            )
        else:
            out[group.tokens] = _attend_row(
                q[group.tokens], caches, pages[0], group.span.context_len, scale, window
            )
    flat = out.flatten(1)
    return (flat if gate is None else flat * sigmoid(gate, deterministic)).to(q.dtype)


def _are_one_sequence(spans: Sequence[Span], page_table: Tensor) -> bool:
    """Whether all rows are consecutive decode tokens of one sequence."""
    first = spans[0].context_len
    are_in_turn = all(
        span.is_decode and span.num_tokens == 1 and span.context_len == first + place
        for place, span in enumerate(spans)
    )
    return are_in_turn and torch.equal(page_table[1:], page_table[:-1])


class _Caches(NamedTuple):
    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None


def _decode(
    q: Tensor,  # [n, Hq, D]
    caches: _Caches,
    page_table: Tensor,  # [n, P]
    context_lens: Tensor,  # [n]
    longest: int,
    scale: float,
    window: int,
) -> Tensor:  # [n, Hq, D]
    num_rows, num_heads, head_dim = q.shape
    page_size, num_kv_heads = caches.keys.shape[1:3]
    if not q.is_cuda:
        # A captured graph may depend only on shapes, never on the current lengths of rows.
        page_table = page_table[:, : -(-longest // page_size)]
    pages, shape = page_table.flatten(), (num_rows, -1, num_kv_heads, head_dim)  # [n, S, Hkv, D]
    k = kv_codes.read_pages(caches.keys, caches.key_scales, pages).view(shape)
    v = kv_codes.read_pages(caches.values, caches.value_scales, pages).view(shape)
    age = context_lens[:, None] - 1 - torch.arange(k.shape[1], device=q.device)  # [n, S]
    unseen = (age < 0) | (age >= window) if window else age < 0
    grouped = q.float().view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("nhgd,nshd->nhgs", grouped, k) * scale
    weights = scores.masked_fill(unseen[:, None, None], -torch.inf).softmax(-1)
    # Unwritten page entries can hold anything, and 0 * NaN is NaN.
    v.masked_fill_(unseen[:, :, None, None], 0.0)
    return torch.einsum("nhgs,nshd->nhgd", weights, v).reshape(q.shape)


def _attend_row(
    q: Tensor,  # [n, Hq, D]
    caches: _Caches,
    pages: Tensor,  # [P]
    context_len: int,
    scale: float,
    window: int,
) -> Tensor:  # [n, Hq, D]
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = caches.keys.shape[2]
    start = context_len - num_tokens
    first_block, last_block = start // QUERY_BLOCK, (context_len - 1) // QUERY_BLOCK
    padded_len = (last_block + 1) * QUERY_BLOCK
    first_key = _first_key(first_block, window)
    lens = (first_key, context_len, padded_len)
    k = _gather(caches.keys, caches.key_scales, pages, *lens)  # [Hkv, S, D]
    v = _gather(caches.values, caches.value_scales, pages, *lens)
    padding = (0, 0, 0, 0, start - first_block * QUERY_BLOCK, padded_len - context_len)
    blocks = F.pad(q.float(), padding).unflatten(0, (-1, QUERY_BLOCK))  # [blocks, 64, Hq, D]
    outputs = []
    for index, block in enumerate(blocks, start=first_block):
        visible = slice(
            _first_key(index, window) - first_key, (index + 1) * QUERY_BLOCK - first_key
        )
        # [Hkv, G * 64, D]: the query heads that share a key head are multiplied together
        grouped = block.permute(1, 0, 2).reshape(num_kv_heads, -1, head_dim)
        scores = (grouped @ k[:, visible].transpose(1, 2)).unflatten(1, (-1, QUERY_BLOCK)) * scale
        unseen = _unseen(index, scores.shape[-1], window, q.device)
        weights = scores.masked_fill(unseen, -torch.inf).softmax(-1).flatten(1, 2)
        attended = (weights @ v[:, visible]).view(num_heads, QUERY_BLOCK, head_dim)
        outputs.append(attended.transpose(0, 1))
    return torch.cat(outputs)[padding[4] : padding[4] + num_tokens]


def _first_key(block: int, window: int) -> int:
    """The first key any query of the block sees, rounded down to a block."""
    oldest = max(0, block * QUERY_BLOCK - window + 1) if window else 0
    return oldest // QUERY_BLOCK * QUERY_BLOCK


def _gather(
    cache: Tensor,
    scales: Tensor | None,
    pages: Tensor,
    first: int,
    context_len: int,
    padded_len: int,
) -> Tensor:
    """Positions first..padded_len of one row as [Hkv, S, D] float32; zero from context_len on."""
    page_size = cache.shape[1]
    first_page, end_page = first // page_size, -(-context_len // page_size)
    rows = kv_codes.read_pages(cache, scales, pages[first_page:end_page]).flatten(0, 1)
    rows = rows[first - first_page * page_size : context_len - first_page * page_size]
    return F.pad(rows, (0, 0, 0, 0, 0, padded_len - context_len)).transpose(0, 1).contiguous()


def _unseen(block: int, num_keys: int, window: int, device: torch.device) -> Tensor:
    """[64, S] True where a query of the block must not see a key; its keys end with the block."""
    query = torch.arange(num_keys - QUERY_BLOCK, num_keys, device=device)
    age = query[:, None] - torch.arange(num_keys, device=device)
    return (age < 0) | (age >= window) if window else age < 0
