"""What a model's files say about its weights: their headers are read once per command, and no
weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from penstock.models.source import ModelSource, has_weight_files, is_converted

if TYPE_CHECKING:
    import torch

    from penstock.offload.files import Index
    from penstock.weights.storage_report import Storage
    from penstock.weights.stored import StoredTensor


@dataclass(frozen=True)
class ModelFiles:
    source: ModelSource

    @cached_property
    def stored(self) -> list[StoredTensor]:
        """A checkpoint's weights. Empty for a preset, a config without weights, and a converted
        model.
        """
        from penstock.weights.quantized import find_format, open_weights

        source = self.source
        if source.path is None or not has_weight_files(source.path) or is_converted(source.path):
            return []
        return open_weights(source, find_format(source))

    @cached_property
    def index(self) -> Index | None:
        """Of a converted model."""
        from penstock.offload.files import read_index

        path = self.source.path
        return None if path is None or not is_converted(path) else read_index(path)

    @property
    def storage(self) -> Storage | None:
        """How the files store the weights; None without weight files."""
        from penstock.weights.storage_report import Storage, StorageGroup, describe_storage

        if self.index is not None:
            return Storage(tuple(StorageGroup(**group) for group in self.index.storage))
        path = self.source.path
        return None if path is None or not has_weight_files(path) else describe_storage(self.stored)

    def quantized_bytes(self, model: Any, dtype: torch.dtype) -> dict[str, int]:
        """The memory of each weight that stays quantized, by its name in the model."""
        from penstock.weights.load import quantized_bytes

        if self.index is not None:
            model.placements(self.index.dense)  # drops a drafting head that the files do not have
            return self.index.quantized_bytes(dtype)
        return quantized_bytes(model, self.stored, dtype)
