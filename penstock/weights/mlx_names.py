"""Renames and reshapes MLX checkpoints to the published form.

MLX stacks experts by projection, moves the taps of a convolution to the middle and, in such files,
stores the weight of a zero-centered norm as `1 + w`, in quantized and bf16 files alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import Tensor

from penstock.weights.codes import Codes, Scales
from penstock.weights.stored import StoredTensor

STACKED = re.compile(r"(.*\.mlp\.)switch_mlp\.(gate_proj|up_proj|down_proj)\.weight")
PREFIXES = {"language_model.": "", "vision_tower.": "model.visual."}
DRAFTING = ("mtp.", "language_model.mtp.")  # MLX's converters drop it
NORMS = ("input_layernorm", "post_attention_layernorm", "model.norm", "q_norm", "k_norm")


def as_published(stored: list[StoredTensor]) -> list[StoredTensor]:
    """The tensors with the names and shapes that placements use; others are unchanged."""
    is_folded = any(_has_taps_inside(tensor) for tensor in stored)
    return [
        published
        for tensor in stored
        if not (is_folded and tensor.name.startswith(DRAFTING))
        for published in _published(tensor, is_folded)
    ]


def _has_taps_inside(tensor: StoredTensor) -> bool:
    return (
        tensor.name.endswith(".conv1d.weight")
        and tensor.shape[1:] != (1, 1)
        and tensor.shape[2:] == (1,)
    )


def _published(tensor: StoredTensor, is_folded: bool) -> Iterator[StoredTensor]:
    for prefix, ours in PREFIXES.items():
        if tensor.name.startswith(prefix):
            tensor = replace(tensor, name=ours + tensor.name.removeprefix(prefix))
    stacked = STACKED.fullmatch(tensor.name)
    if stacked and len(tensor.shape) == 3:
        for expert in range(tensor.shape[0]):
            yield _one_of(tensor, expert, f"{stacked[1]}experts.{expert}.{stacked[2]}.weight")
    elif _has_taps_inside(tensor):
        channels, taps, _ = tensor.shape
        read = _after(tensor, lambda values: values.transpose(1, 2))
        yield replace(tensor, shape=(channels, 1, taps), read=read)
    elif (
        is_folded and tensor.name.removesuffix(".weight").endswith(NORMS) and len(tensor.shape) == 1
    ):
        yield replace(tensor, read=_after(tensor, lambda values: values.float() - 1.0))
    else:
        yield tensor


def _one_of(tensor: StoredTensor, index: int, name: str) -> StoredTensor:
    """One matrix of a stack, as a separate tensor."""
    own, read_stack = slice(index, index + 1), tensor.read_codes

    def read(rows: slice | None) -> Tensor:
        return tensor.load(own)[0][rows or slice(None)]

    def read_codes(rows: slice | None, columns: slice | None = None) -> Codes:
        assert read_stack is not None
        found = _matrix(read_stack(own), (0, rows or slice(None)))
        return found if columns is None else found.cut(slice(None), columns)

    return replace(
        tensor,
        name=name,
        shape=tensor.shape[1:],
        read=read,
        stored_bytes=tensor.num_bytes // tensor.shape[0],
        read_codes=None if read_stack is None else read_codes,
    )


def _matrix(stack: Codes, own: tuple[int, slice]) -> Codes:
    """MLX has a scale and a bias for each group of a row, and nothing else."""
    offsets = None if stack.offsets is None else Scales(stack.offsets.fine[own])
    return replace(
        stack, values=stack.values[own], scales=Scales(stack.scales.fine[own]), offsets=offsets
    )


def _after(
    tensor: StoredTensor, change: Callable[[Tensor], Tensor]
) -> Callable[[slice | None], Tensor]:
    return lambda rows: change(tensor.load(rows))
