"""Scales inputs before matrices are quantized (AWQ, arXiv 2306.00978).

Columns with large inputs are multiplied by a scale, and the producer of these inputs is divided by
it: the layer computes the same, and the most important columns lose least. Works on the tensors of
a layer under their checkpoint names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.layers.attention import Attention
from penstock.layers.delta_net import DeltaNet
from penstock.layers.linear import Linear
from penstock.layers.mlp import DenseMLP, SparseMLP
from penstock.models.placement import Placement
from penstock.quantize.inputs import LayerInputs, Moments
from penstock.quantize.scheme import Scheme

POWERS = torch.linspace(0.0, 1.0, 11).tolist()
SEARCHED_ROWS, SEARCHED_MATRICES = 512, 16  # used by a search


@dataclass(frozen=True, slots=True)
class Fold:
    """A producer whose outputs the consumers read, column by column."""

    producers: tuple[tuple[str, int], ...]  # parameter and the first of its rows: norm, up, v
    consumers: tuple[str, ...]  # parameters
    expert: int | None
    num_scales: int
    source_of: Tensor | None = None  # [K]  the producer's row for each column; None: the same index


def scale_inputs(
    layer: nn.Module,
    prefix: str,
    places: dict[str, Placement],
    tensors: dict[str, Tensor],  # changed
    schemes: dict[str, Scheme],
    inputs: LayerInputs,
    dtype: torch.dtype,
) -> None:
    """Finds and applies the scales of every pair in a layer that has a quantized matrix."""
    for fold in _folds(layer, prefix):
        consumers = [n for n, place in places.items() if _reads(place, fold)]
        quantized = [name for name in consumers if name in schemes]
        if not quantized or not all(_producers_of(places, p, fold) for p, _ in fold.producers[:1]):
            continue
        is_routed = fold.expert is None and any(
            _expert_of(places[n]) is not None for n in consumers
        )
        moments = (
            inputs.of_all_experts(fold.producers[0][0].removesuffix("norm"))
            if is_routed
            else inputs.of(places[quantized[0]])
        )
        if moments is None:
            continue
        scales = _search(fold, moments, [(tensors[n], schemes[n]) for n in quantized], dtype)
        if scales is not None:
            _apply(fold, places, tensors, consumers, scales.cpu(), inputs)


def _folds(layer: nn.Module, prefix: str) -> Iterator[Fold]:
    for name, module in layer.named_modules():
        own = f"{prefix}{name}."
        if isinstance(module, Linear) and module.norm is not None:
            yield Fold(((f"{own}norm", 0),), (f"{own}weight",), None, len(module.norm))
        elif isinstance(module, DenseMLP):
            width = module.down.weight.shape[1]
            yield Fold(((f"{own}gate_up.weight", width),), (f"{own}down.weight",), None, width)
        elif isinstance(module, SparseMLP):
            readers = tuple(f"{own}{n}" for n in ("router", "gate_up", *_SHARED))
            yield Fold(((f"{own}norm", 0),), readers, None, len(module.norm))
            if module.shared_down is not None:
                width = module.shared_down.shape[1]
                yield Fold(((f"{own}shared_gate_up", width),), (f"{own}shared_down",), None, width)
            num_experts, _, width = module.down.shape
            for expert in range(num_experts):
                yield Fold(((f"{own}gate_up", width),), (f"{own}down",), expert, width)
        elif isinstance(module, Attention):
            yield _of_attention(module, own)
        elif isinstance(module, DeltaNet):
            size = len(module.gated_norm)
            columns = torch.arange(module.out.weight.shape[1]) % size
            yield Fold(((f"{own}gated_norm", 0),), (f"{own}out.weight",), None, size, columns)


_SHARED = ("shared_gate", "shared_gate_up")


def _of_attention(module: Attention, own: str) -> Fold:
    """All query heads of a group read the same value head."""
    first = module.query_size + module.gate_size + module.kv_size
    columns = torch.arange(module.query_size)
    head, within = columns // module.head_dim, columns % module.head_dim
    group = module.num_heads // module.num_kv_heads
    return Fold(
        ((f"{own}qkv.weight", first), (f"{own}qkv.bias", first)),
        (f"{own}out.weight",),
        None,
        module.kv_size,
        head // group * module.head_dim + within,
    )


def _expert_of(place: Placement) -> int | None:
    return next((part for part in place.index if isinstance(part, int)), None)


def _first_row(place: Placement) -> int:
    return next((part.start for part in place.index if isinstance(part, slice)), 0)


def _reads(place: Placement, fold: Fold) -> bool:
    is_own = fold.expert is None or _expert_of(place) == fold.expert
    return place.parameter in fold.consumers and is_own


def _producers_of(places: dict[str, Placement], parameter: str, fold: Fold) -> list[str]:
    rows = dict(fold.producers)[parameter]
    return [
        name
        for name, place in places.items()
        if place.parameter == parameter
        and _first_row(place) == rows
        and _expert_of(place) == fold.expert
    ]


def _search(
    fold: Fold, moments: Moments, matrices: list[tuple[Tensor, Scheme]], dtype: torch.dtype
) -> Tensor | None:  # [num_scales]
    """The power of the input magnitudes with the least output error; None: no scales are best."""
    device = moments.sizes.device
    source = None if fold.source_of is None else fold.source_of.to(device)
    sizes = moments.sizes / moments.num_tokens
    if source is not None:
        total = torch.zeros(fold.num_scales, device=device).index_add_(0, source, sizes)
        sizes = total * fold.num_scales / len(source)
    step = max(1, len(matrices) // SEARCHED_MATRICES)
    sampled = []
    for weight, scheme in matrices[::step]:
        rows = torch.linspace(0, len(weight) - 1, min(len(weight), SEARCHED_ROWS)).long()
        sampled.append((weight[rows].to(device, torch.float32), scheme))
    best, least = None, torch.inf
    for power in POWERS:
        scales = sizes.clamp_min(1e-4 * float(sizes.max()) + 1e-12) ** power
        scales /= (scales.max() * scales.min()).sqrt()
        spread = scales if source is None else scales[source]
        error, scaled = 0.0, moments.divided(spread)
        for weight, scheme in sampled:
            wide = weight * spread
            found = scheme.find_scales(wide, dtype, scaled.importance)
            found = scheme.spread(found, wide.shape[1])
            error += float(scaled.error_of(scheme.round(wide, found) * found - wide))
        if error < least:
            best, least = scales if power else None, error
    return best


def _apply(
    fold: Fold,
    places: dict[str, Placement],
    tensors: dict[str, Tensor],
    consumers: list[str],
    scales: Tensor,  # [num_scales]
    inputs: LayerInputs,
) -> None:
    for parameter, _ in fold.producers:
        for name in _producers_of(places, parameter, fold):
            if places[name].convert is not None or "norm" in parameter:
                tensors[name], scales = _divide_norm(places[name], tensors[name], scales)
            else:
                wide = tensors[name].float()
                tensors[name] = wide / (scales[:, None] if wide.dim() == 2 else scales)
    spread = scales if fold.source_of is None else scales[fold.source_of]
    for name in consumers:
        tensors[name] = tensors[name].float() * spread
    for parameter in fold.consumers:
        inputs.rescale(parameter, fold.expert, spread)


def _divide_norm(place: Placement, stored: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """A norm in its storage dtype, and the scales by which it was really divided."""
    offset = 0.0 if place.convert is None else float(place.convert(torch.zeros(1)))
    whole = stored.float() + offset
    divided = (whole / scales - offset).to(stored.dtype)
    real = whole / (divided.float() + offset)
    real = torch.where(torch.isfinite(real) & (real > 0), real, torch.ones_like(real))
    return torch.where(real == 1, stored, divided), real
