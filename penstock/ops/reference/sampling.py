"""From logits to the next token, row by row: penalties, biases, filters, and reproducible sampling.

The noise depends only on (seed, position, token id), so a row gives the same text whatever else is
in its batch. No softmax is materialized: the argmax of `logit / temperature + Gumbel noise` is a
sample from the softmax.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.cpu import sampling as cpu_sampling

_MASK = 0xFFFFFFFF


def penalize_repeats(
    logits: Tensor,  # [L, vocab] float32, changed in place
    generated: Tensor,  # [L, vocab] int32  how often each token was generated
    in_prompt: Tensor,  # [L, vocab] bool
    repetition: Tensor,  # [L]
    presence: Tensor,  # [L]
    frequency: Tensor,  # [L]
) -> Tensor:
    """Repetition counts the prompt too; presence and frequency only generated tokens."""
    factor = torch.where(in_prompt | (generated > 0), repetition[:, None], 1.0)
    logits.copy_(torch.where(logits > 0, logits / factor, logits * factor))
    logits -= frequency[:, None] * generated
    logits -= presence[:, None] * (generated > 0)
    return logits


def bias_logits(logits: Tensor, rows: Tensor, token_ids: Tensor, bias: Tensor) -> Tensor:
    """Adds bias [N] to single logits in place, at most once to each; -inf forbids a token."""
    return logits.index_put_((rows, token_ids), logits[rows, token_ids] + bias)


def likeliest(
    logits: Tensor,  # [L, vocab]
    rows: Tensor | None = None,  # [L] int64
    table: Tensor | None = None,  # [rows] int64  written at `rows`, if given
) -> Tensor:  # [L] int64
    """The token with the largest logit, the lowest of several."""
    token_ids = logits.argmax(-1)
    if table is not None:
        assert rows is not None
        table.index_copy_(0, rows, token_ids)
    return token_ids


def sample(
    logits: Tensor,  # [L, vocab] float32
    temperature: Tensor,  # [L]  0: greedy
    top_k: Tensor,  # [L] int64  0: all tokens
    top_p: Tensor,  # [L]
    min_p: Tensor,  # [L]
    seeds: Tensor,  # [L] int64
    positions: Tensor,  # [L] int64  of the sampled token
    filtered: bool,  # whether any row uses top_k, top_p or min_p
) -> Tensor:  # [L] int64
    run = cpu_sampling.sample if cpu_sampling.can_sample(logits) else draw
    return run(logits, temperature, top_k, top_p, min_p, seeds, positions, filtered)


def draw(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    filtered: bool,
) -> Tensor:
    """What `sample` means."""
    greedy = logits.argmax(-1)
    scaled = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    noise = gumbel_noise(seeds, positions, logits.shape[-1])
    if filtered:
        likely, ids = keep_likely(scaled, top_k, top_p, min_p)
        drawn = ids.gather(-1, (likely + noise.gather(-1, ids)).argmax(-1, keepdim=True))[:, 0]
    else:
        drawn = (scaled + noise).argmax(-1)
    return torch.where(temperature > 0, drawn, greedy)


def keep_likely(
    logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[
    Tensor, Tensor
]:  # both [L, vocab]: sorted logits, -inf if filtered out, and their token ids
    """top_k first, then top_p of the rest, then min_p; the most likely token always stays."""
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[-1], device=logits.device)
    ordered = ordered.masked_fill((top_k[:, None] > 0) & (rank >= top_k[:, None]), -torch.inf)
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1) - probs
    cut = (before >= top_p[:, None]) | (probs < min_p[:, None] * probs[:, :1])
    return ordered.masked_fill(cut & (rank > 0), -torch.inf), ids


def token_logprobs(
    logits: Tensor,  # [L, vocab] float32
    token_ids: Tensor,  # [L]
    num_top: int,
) -> tuple[Tensor, Tensor, Tensor]:  # [L], [L, num_top], [L, num_top] ids
    logprobs = logits.log_softmax(-1)
    top, top_ids = logprobs.topk(num_top, dim=-1)
    return logprobs.gather(-1, token_ids[:, None])[:, 0], top, top_ids


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:  # [L, vocab] float32
    token_ids = torch.arange(vocab_size, device=seeds.device)
    key = _scramble(
        _scramble(_scramble(positions & _MASK) ^ (seeds & _MASK)) ^ ((seeds >> 32) & _MASK)
    )
    bits = _scramble((key[:, None] + token_ids * 0x9E3779B9) & _MASK)
    # 23 bits plus a half: the largest value is the float below 1, so neither logarithm is infinite.
    uniform = ((bits >> 9).float() + 0.5) * 2.0**-23
    return -(-uniform.log()).log()


def _scramble(x: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finalizer, on int64 tensors that hold 32-bit values."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)
