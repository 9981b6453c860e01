"""Random experts, which exist only in memory, written to temporary files: to time a model on disk
without having one.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from penstock.errors import CapacityError
from penstock.layers.mlp import SparseMLP
from penstock.offload.convert import written_whole
from penstock.offload.files import FOLDER, Index, LayerRecords
from penstock.offload.layout import ExpertLayout, stack_tensors
from penstock.ops import Weight

WRITERS = 4


@contextmanager
def spilled(mlps: Sequence[SparseMLP], made_for: str, dtype: torch.dtype) -> Iterator[Index]:
    """The layers' stacks in files; layers keep only shapes. The files lose their names at the end,
    so that nothing of them stays, however the engine ends: who opened them still reads them.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-experts-") as folder:
        yield _spill(mlps, made_for, dtype, Path(folder))


def _spill(mlps: Sequence[SparseMLP], made_for: str, dtype: torch.dtype, folder: Path) -> Index:
    layouts: dict[str, ExpertLayout] = {}
    layers, jobs = [], []
    for number, mlp in enumerate(mlps):
        layout = ExpertLayout.of(mlp.gate_up, mlp.down)
        layouts.setdefault(layout.key, layout)
        stacks = stack_tensors([mlp.gate_up, mlp.down])
        name = f"{FOLDER}/layer-{number:03}.bin"
        place = list(layouts).index(layout.key)
        layers.append(LayerRecords(str(number), name, len(stacks[0]), place, (0,) * len(stacks[0])))
        jobs.append((layout, stacks, folder / name))
        for stack in ("gate_up", "down"):
            shape = getattr(mlp, stack).shape
            setattr(mlp, stack, Weight(torch.empty(shape, dtype=dtype, device="meta")))
    index = Index(folder, made_for, tuple(layouts.values()), tuple(layers), {}, ())
    free = shutil.disk_usage(folder).free
    if index.num_bytes > free:
        raise CapacityError(
            f"{folder.parent} has too little space for random experts",
            f"They take {index.num_bytes / 1e9:.1f} GB; {free / 1e9:.1f} GB are free.",
            "Set TMPDIR to a folder on a larger disk.",
        )
    (folder / FOLDER).mkdir()
    with ThreadPoolExecutor(WRITERS) as writers:
        list(writers.map(lambda job: _write(*job), jobs))
    return index


def _write(layout: ExpertLayout, stacks: list[Tensor], path: Path) -> None:
    record = torch.zeros(layout.record_bytes, dtype=torch.uint8)
    views = layout.views(record)
    with written_whole(path) as file:
        for expert in range(len(stacks[0])):
            for view, stack in zip(views, stacks, strict=True):
                view.copy_(stack[expert])
            file.write(record.numpy().data)
