"""Pure functions on tensors, from which layers are built. Imports none of our other packages.

One notation for shapes, used in every signature of the project:

    T  tokens in the step    R  rows in the step      P  pages per row    L  wanted logits
    H  hidden size           Hq Hk Hv Hkv  heads      D  attention head   K V  DeltaNet head sizes
    E  experts               k  experts per token     I  expert size      F  dense MLP size
    C  conv channels         Kc  conv taps            W  entries of a conv ring buffer

A GEMM has M rows of activations (its tokens, so T in signatures), N rows of the weight, and sums
over K: x [T, K], weight [N, K]. Tiles of kernels are BLOCK_M, BLOCK_N and BLOCK_K.

An op is what one kernel (or a fixed few) computes. `ops/reference` defines each one in plain torch:
it is the specification, the oracle of the kernel tests and the CPU path. Ops with a kernel in
`ops/triton` go through `op`, which selects it on a GPU.
"""

from penstock.ops.dispatch import op
from penstock.ops.float8 import RoundedTokens
from penstock.ops.reference import (
    attention,
    delta_net,
    expert_cache,
    gather,
    masking,
    matmul,
    moe,
    norm,
    sampling,
)
from penstock.ops.reference import decode_rows as _decode_rows
from penstock.ops.reference.backlog import MOST_LATE, Backlog, whole_states
from penstock.ops.reference.decode_rows import AcceptedDrafts, PlacedDrafts
from penstock.ops.reference.expert_cache import copy_table
from penstock.ops.reference.journal import Journal, Replay
from penstock.ops.reference.moe import new_counters
from penstock.ops.reference.norm import gated_rms_norm
from penstock.ops.reference.rope import rope_table
from penstock.ops.reference.rows import BLOCK_TOKENS, LEAST_KEYS, TokenBlocks, cut_blocks
from penstock.ops.reference.sampling import bias_logits, penalize_repeats, token_logprobs
from penstock.ops.weight import Weight, take_rows

linear = op(matmul.linear)
norm_linear = op(matmul.norm_linear)
swiglu_linear = op(matmul.swiglu_linear)
fuses_swiglu = op(matmul.fuses_swiglu)
rms_norm = op(norm.rms_norm)
rms_norm_pair = op(norm.rms_norm_pair)
rope_and_store = op(attention.rope_and_store)
paged_attention = op(attention.paged_attention)
norm_route = op(moe.norm_route)
own_experts = op(moe.own_experts)
sparse_mlp = op(moe.sparse_mlp)
take_slots = op(expert_cache.take_slots)
fetch_experts = op(expert_cache.fetch_experts)
gated_delta_net = op(delta_net.gated_delta_net)
accept_drafts = op(_decode_rows.accept_drafts)
advance_rows = op(_decode_rows.advance_rows)
decode_rows = op(_decode_rows.decode_rows)
draft_tokens = op(_decode_rows.draft_tokens)
place_drafts = op(_decode_rows.place_drafts)
put_rows = op(gather.put_rows)
take_rows_of_each = op(gather.take_rows_of_each)
mask_logits = op(masking.mask_logits)
likeliest = op(sampling.likeliest)
sample = op(sampling.sample)

__all__ = [
    "BLOCK_TOKENS",
    "LEAST_KEYS",
    "MOST_LATE",
    "AcceptedDrafts",
    "Backlog",
    "Journal",
    "PlacedDrafts",
    "Replay",
    "RoundedTokens",
    "TokenBlocks",
    "Weight",
    "accept_drafts",
    "advance_rows",
    "bias_logits",
    "copy_table",
    "cut_blocks",
    "decode_rows",
    "draft_tokens",
    "fetch_experts",
    "fuses_swiglu",
    "gated_delta_net",
    "gated_rms_norm",
    "likeliest",
    "linear",
    "mask_logits",
    "new_counters",
    "norm_linear",
    "norm_route",
    "own_experts",
    "paged_attention",
    "penalize_repeats",
    "place_drafts",
    "put_rows",
    "rms_norm",
    "rms_norm_pair",
    "rope_and_store",
    "rope_table",
    "sample",
    "sparse_mlp",
    "swiglu_linear",
    "take_rows",
    "take_rows_of_each",
    "take_slots",
    "token_logprobs",
    "whole_states",
]
