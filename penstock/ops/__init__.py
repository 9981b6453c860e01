"""Pure functions on tensors, the vocabulary in which layers are written. Imports nothing of ours.

One alphabet for shapes, used in every signature of the project:

    T  tokens in the step        R  rows in the step          P  pages per row      L  wanted logits
    H  hidden size               Hq Hk Hv Hkv  heads          D  attention head     K V  DeltaNet head widths
    E  experts                   k  experts a token uses      I  expert width       C  conv channels
    M N  matmul dims             F  dense MLP width

An op is cut where a kernel is cut. `ops/reference` says in plain torch what each one computes: it is the
specification, the oracle of the kernel tests and the path on a CPU.
"""

from penstock.ops.reference.attention import paged_attention, rope_and_store
from penstock.ops.reference.delta_net import gated_delta_net
from penstock.ops.reference.matmul import linear, norm_linear, swiglu_linear
from penstock.ops.reference.moe import route, sparse_mlp
from penstock.ops.reference.norm import gated_rms_norm, rms_norm
from penstock.ops.reference.rope import rope_table
from penstock.ops.reference.sampling import edit_logits, penalize_repeats, sample, token_logprobs

__all__ = [
    "edit_logits",
    "gated_delta_net",
    "gated_rms_norm",
    "linear",
    "norm_linear",
    "paged_attention",
    "penalize_repeats",
    "rms_norm",
    "rope_and_store",
    "rope_table",
    "route",
    "sample",
    "sparse_mlp",
    "swiglu_linear",
    "token_logprobs",
]
