"""Reads state dicts written by torch.save (.pt, .pth, .bin) without running code of the pickle."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.weights.stored import StoredTensor


def open_torch_file(path: Path) -> list[StoredTensor]:
    """The tensors of a flat state dict, memory-mapped if the format allows."""
    try:
        # Files from before torch 1.6 are not zip archives and cannot be mapped.
        content: Any = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path) or None
        )
    except pickle.UnpicklingError as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"{path.name} contains more than tensors; none of its code was run ({reason})"
        ) from error
    except Exception as error:  # a damaged archive or pickle can raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path.name} is truncated or not a torch file ({reason})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path.name} holds a {type(content).__name__}, not a state dict")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(
                f"{path.name} is not a flat state dict: {name!r} is a {type(value).__name__}, not "
                "a tensor"
            )
        if kind := _unsupported_kind(value):
            raise CheckpointError(
                f"{path.name} holds {name} as a {kind} tensor, not as plain numbers"
            )
    return [
        StoredTensor(name, tuple(tensor.shape), tensor.dtype, _reader(tensor))
        for name, tensor in content.items()
    ]


def _unsupported_kind(tensor: Tensor) -> str:
    """Why a tensor cannot be copied as it is, if so: torch also saves other kinds of tensors."""
    if tensor.is_nested:
        return "nested"
    if tensor.is_meta:
        return "meta"
    if tensor.is_quantized:
        return "quantized"
    return "" if tensor.layout is torch.strided else str(tensor.layout).removeprefix("torch.")


def _reader(tensor: Tensor) -> Callable[[slice | None], Tensor]:
    return lambda rows: tensor.detach() if rows is None else tensor.detach()[rows]
