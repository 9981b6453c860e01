"""Experts read from a checkpoint's own files, one at a time, without converting them first.

An expert is repacked into the kernels' layout each time it is read from disk; `penstock convert`
does that once. All experts of a layer must have the format of the first one.
"""

from __future__ import annotations

import torch

from penstock.errors import CheckpointError
from penstock.offload.convert import Conversion
from penstock.offload.layout import ExpertLayout


class CheckpointLayer:
    """The experts of one layer, as records."""

    def __init__(self, conversion: Conversion, module: str, layout: ExpertLayout) -> None:
        self._conversion, self._module, self._key = conversion, module, layout.key

    def read(self, record: int, buffer: memoryview) -> None:
        """Fills the buffer with the record of an expert."""
        layout, tensors = self._conversion.read_expert(self._module, record)
        if layout.key != self._key:
            raise CheckpointError(
                f"Expert {record} of {self._module} has another format than the first one",
                f"{self._conversion.path} cannot be read in place.",
                "Convert it: penstock convert MODEL -o OUT.",
            )
        views = layout.views(torch.frombuffer(buffer, dtype=torch.uint8))
        for view, tensor in zip(views, tensors, strict=True):
            view.copy_(tensor[0])

    def close(self) -> None:
        """Nothing to close: the checkpoint's files are closed with its tensors."""
