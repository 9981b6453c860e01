"""Mixture of experts: routes tokens to experts, and runs them; experts are matrices of a stack.

Two forms of one computation. Grouped, on a CPU: tokens are sorted by expert, and each used expert
runs once. Gathered, on CUDA: the experts of a few tokens at a time are copied and multiplied as a
batch, which needs memory but no synchronization.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.ops.cpu import decode, few_tokens
from penstock.ops.cpu import quantized as cpu_quantized
from penstock.ops.float8 import round_tokens, rounded_experts
from penstock.ops.reference.activation import sigmoid, silu
from penstock.ops.reference.matmul import linear, multiply, multiply_parts, swiglu, swiglu_linear
from penstock.ops.reference.norm import norm_tokens
from penstock.ops.tiles import TiledRows
from penstock.ops.weight import Weight

GATHERED_BYTES = 256 * 2**20  # of expert weights copied at a time
NUM_COUNTERS = 4096  # at least one per token, or per tile of 16 tokens of a step
ROUTED_TOKENS = 16  # at a time by a kernel that has a counter for each of their logits


def new_counters(num_experts: int, device: torch.device | str) -> Tensor:  # [n] int32
    """Counters for the kernels of one layer; each kernel leaves them at zero.

    Every layer has its own, because launches that may overlap, such as those of two engines, must
    not share them.
    """
    count = max(NUM_COUNTERS, ROUTED_TOKENS * (num_experts + 1))
    return torch.zeros(count, dtype=torch.int32, device=device)


def norm_route(
    hidden: Tensor,  # [T, H]
    norm_weight: Tensor,  # [H] float32
    eps: float,
    router: Weight,  # [E, H]
    k: int,
    normalize: bool = True,
    shared_gate: Weight | None = None,  # [1, H]
    counters: Tensor | None = None,  # from `new_counters`; without them a kernel allocates its own
    slots: Tensor | None = None,  # [E] int32  the matrix of each expert; None: in order
    *,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # [T, H], [T, k], [T, k], [T, 1]
    """The norm before the experts, and top-k routing. Returns the normed tokens like hidden; the
    float32 weights and ids (or slots) of each token's k most likely experts; and the shared
    expert's weight, float32.

    `normalize` makes the k weights sum to one. The router reads the normed tokens after rounding.
    """
    if few_tokens.are_few(hidden, deterministic) and few_tokens.can_multiply(router.values):
        gate = None if shared_gate is None else shared_gate.values
        given = (hidden, norm_weight, eps, router.values, k, normalize, gate)
        x, weights, ids, shared_weight = few_tokens.norm_route(*given)
        return x, weights, ids if slots is None else slots[ids].long(), shared_weight
    x = norm_tokens(hidden, norm_weight, eps, deterministic)
    wide = x.float()
    logits = multiply(wide, router.values.float(), deterministic=deterministic)
    likeliest, ids = logits.topk(k, dim=-1)
    # k weights of the softmax over all experts, normalized, are the softmax over these k.
    weights = likeliest.softmax(-1) if normalize else logits.softmax(-1).gather(-1, ids)
    if slots is not None:
        ids = slots[ids].long()
    if shared_gate is None:
        return x, weights, ids, None
    return (
        x,
        weights,
        ids,
        sigmoid(
            multiply(wide, shared_gate.values.float(), deterministic=deterministic), deterministic
        ),
    )


def own_experts(
    weights: Tensor,  # [T, k] float32
    ids: Tensor,  # [T, k]
    first: int,
    count: int,
) -> tuple[Tensor, Tensor]:  # [T, k], [T, k]
    """For a rank that has the experts from `first` on, at least k of them: their local ids.

    Another rank's expert gets weight zero and is replaced by one that the token has not chosen,
    because those of a token must differ: the lowest, so that all tokens read the same few.
    """
    k = ids.shape[1]
    local = ids - first
    is_own = (local >= 0) & (local < count)
    lowest = torch.arange(min(2 * k, count), device=ids.device)
    is_used = ((local.unsqueeze(-1) == lowest) & is_own.unsqueeze(-1)).any(1)  # [T, lowest]
    spare = is_used.int().argsort(dim=-1, stable=True)  # unused ones come first, in order
    place = ((~is_own).cumsum(-1) - 1).clamp(min=0)
    others = spare.gather(1, place)
    return weights.where(is_own, 0.0), local.where(is_own, others.to(local.dtype))


def sparse_mlp(
    x: Tensor,  # [T, H]  normed
    weights: Tensor,  # [T, k] float32
    ids: Tensor,  # [T, k]
    gate_up: Weight,  # [E, 2I, H]
    down: Weight,  # [E, H, I]
    residual: Tensor,  # [T, H]
    shared_weight: Tensor | None = None,  # [T, 1] float32
    shared_gate_up: Weight | None = None,  # [2I', H]
    shared_down: Weight | None = None,  # [H, I']
    counters: Tensor | None = None,  # from `new_counters`; without them a kernel allocates its own
    *,
    slots: Tensor | None = None,  # [E]  index of each expert in the stacks; None: in order
    deterministic: bool = False,
) -> Tensor:  # [T, H]
    """residual + the weighted sum of the chosen experts (+ the shared one), accumulated in
    float32.
    """
    num_experts = down.shape[0] if slots is None else len(slots)
    ids = ids if slots is None else slots[ids.long()]
    stored = (gate_up, down, shared_gate_up, shared_down)
    is_plain = not any(weight is not None and weight.parts for weight in stored)
    if is_plain and few_tokens.are_few(x, deterministic):
        matrices = _as_stored(stored)
        if all(few_tokens.can_multiply(one.values) for one in stored if one is not None):
            gates_ups, downs, shared_gates_ups, shared_downs = matrices
            assert gates_ups is not None
            assert downs is not None
            given = (x, weights, ids, gates_ups, downs, residual, shared_weight)
            return few_tokens.sparse_mlp(*given, shared_gates_ups, shared_downs)
    run = None
    if is_plain:
        if decode.is_alone(x, deterministic):
            run = decode.sparse_mlp
        elif decode.are_few(x, deterministic):
            run = decode.sparse_mlp_of_few
    if run is not None:
        return run(
            x,
            weights,
            ids,
            gate_up.values,
            down.values,
            residual,
            shared_weight,
            None if shared_gate_up is None else shared_gate_up.values,
            None if shared_down is None else shared_down.values,
        )
    rounded: tuple[TiledRows, ...] = ()
    if not deterministic:
        shared_stored = (shared_gate_up, shared_down)
        pairs_per_expert = ids.numel() / num_experts
        rounded = rounded_experts(x, pairs_per_expert, (gate_up, down), shared_stored)
    if rounded:
        outputs = _run_experts_rounded(x, ids, *rounded[:2])
        if shared_weight is not None and len(rounded) == 4:  # as one more expert
            shared = _run_experts_rounded(x, torch.zeros_like(ids[:, :1]), *rounded[2:])
            outputs = torch.cat([outputs, shared], dim=1)
            weights, shared_weight = torch.cat([weights, shared_weight], dim=1), None
    elif x.is_cuda:
        outputs = run_experts_gathered(
            x,
            ids,
            gate_up.dequantize().to(x.dtype),
            down.dequantize().to(x.dtype),
            deterministic=deterministic,
        )
    else:
        outputs = run_experts_grouped(x, ids, gate_up, down, deterministic=deterministic)
    return add_experts(
        outputs,
        weights,
        x,
        residual,
        shared_weight,
        shared_gate_up,
        shared_down,
        deterministic=deterministic,
    )


def _as_stored(weights: Sequence[Weight | None]) -> list[Tensor | None]:
    """All in bf16 if all have it, otherwise all in float32."""
    if all(weight is None or weight.short is not None for weight in weights):
        return [None if weight is None else weight.short for weight in weights]
    return [None if weight is None else weight.values for weight in weights]


def add_experts(
    outputs: Tensor,  # [T, k, H]  of the chosen experts
    weights: Tensor,  # [T, k] float32
    x: Tensor,  # [T, H]  normed
    residual: Tensor,  # [T, H]
    shared_weight: Tensor | None,  # [T, 1] float32
    shared_gate_up: Weight | None,  # [2I', H]
    shared_down: Weight | None,  # [H, I']
    *,
    deterministic: bool,
) -> Tensor:  # [T, H]
    """The last step of `sparse_mlp`: everything is summed in float32."""
    total = (outputs.float() * weights[..., None]).sum(1)
    if shared_weight is not None:
        assert shared_gate_up is not None
        assert shared_down is not None
        inner = linear(x, shared_gate_up, deterministic=deterministic)
        shared = swiglu_linear(inner, shared_down, deterministic=deterministic)
        total = total + shared.float() * shared_weight
    return (residual.float() + total).to(residual.dtype)


def _run_experts_rounded(
    x: Tensor, ids: Tensor, gate_up: TiledRows, down: TiledRows
) -> Tensor:  # [T, k, H]
    """With tokens, and the intermediate activations, quantized to E4M3 (`float8.py`)."""
    gates_ups, downs = (rows.dequantize().view(-1, *rows.shape[-2:]) for rows in (gate_up, down))
    rounded = round_tokens(x)
    outputs = x.new_empty(*ids.shape, down.num_rows)
    for expert in ids.unique().tolist():
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        gate, up = (rounded[tokens] @ gates_ups[expert].T).chunk(2, dim=-1)
        inner = round_tokens(silu(gate, deterministic=False) * up)
        outputs[tokens, slots] = (inner @ downs[expert].T).to(x.dtype)
    return outputs


def run_experts_grouped(
    x: Tensor, ids: Tensor, gate_up: Weight, down: Weight, *, deterministic: bool = False
) -> Tensor:  # [T, k, H]
    if len(x) == 1:  # nothing to sort
        used, counts = ids[0].tolist(), [1] * ids.shape[1]
        rows = x.expand(ids.shape[1], -1)
    else:
        order = ids.flatten().argsort(stable=True)
        by_expert = ids.flatten().bincount(minlength=gate_up.shape[0]).tolist()
        used = [expert for expert, count in enumerate(by_expert) if count]
        counts = [by_expert[expert] for expert in used]
        rows = x[order // ids.shape[1]]

    def one_expert(own: Tensor, weight: Weight, expert: int) -> Tensor:
        if weight.parts:
            return multiply_parts(own, weight.select(expert), deterministic=deterministic).to(
                own.dtype
            )
        return multiply(own, weight.values[expert], deterministic=deterministic)

    def each_expert(rows: Tensor, weight: Weight) -> Tensor:
        groups = zip(used, rows.split_with_sizes(counts))
        return torch.cat([one_expert(own, weight, expert) for expert, own in groups])

    if not deterministic and _can_fuse(rows, gate_up) and _can_fuse(rows, down):
        inner = cpu_quantized.multiply_experts(rows, gate_up.parts, used, counts)
        outputs = cpu_quantized.multiply_experts(inner, down.parts, used, counts, is_swiglu=True)
    else:
        outputs = each_expert(swiglu(each_expert(rows, gate_up), deterministic), down)
    if len(x) > 1:
        outputs = torch.empty_like(outputs).index_copy_(0, order, outputs)
    return outputs.view(*ids.shape, -1)


def _can_fuse(rows: Tensor, experts: Weight) -> bool:
    return bool(experts.parts) and cpu_quantized.can_fuse(rows, experts.parts, dim=3)


def run_experts_gathered(
    x: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, *, deterministic: bool = False
) -> Tensor:  # [T, k, H]
    bytes_a_token = ids.shape[1] * (gate_up[0].numel() + down[0].numel()) * x.element_size()
    tokens_a_block = 1 if deterministic else max(1, GATHERED_BYTES // bytes_a_token)
    outputs = x.new_empty(*ids.shape, down.shape[1])
    for first in range(0, len(x), tokens_a_block):
        block = slice(first, first + tokens_a_block)
        chosen = ids[block]
        inner = gate_up[chosen] @ x[block, None, :, None]  # [n, k, 2I, 1]
        outputs[block] = (
            down[chosen] @ swiglu(inner.squeeze(-1), deterministic).unsqueeze(-1)
        ).squeeze(-1)
    return outputs
