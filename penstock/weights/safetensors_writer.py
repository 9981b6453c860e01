"""Writes a safetensors file that is either complete or absent."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def save_atomically(tensors: Mapping[str, Tensor], path: Path) -> None:
    """A failed write is an OSError, which the library's own class only mentions."""
    part = path.with_name(path.name + ".part")
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    part.touch()
    mode = part.stat().st_mode  # the library's own file would be readable by its owner only
    try:
        save_file(whole, part, metadata={"format": "pt"})
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))
        raise (OSError(int(code[1]), os.strerror(int(code[1]))) if code else error) from None
    part.chmod(mode)
    with part.open("rb+") as file:
        os.fsync(file.fileno())
    part.replace(path)
