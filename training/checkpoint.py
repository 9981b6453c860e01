"""Saves a run so that it can resume: optimizer state, progress in its budget, data feed state.

Checkpoints are written atomically. A checkpoint belongs to one model and one training config;
loading it with others is an error.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CheckpointError
from training.config import ModelConfig, TrainConfig

FILE_NAME = "checkpoint.pt"


@dataclass(slots=True)
class Progress:
    """The progress of a run. `run` counts how often it was started."""

    step: int = 0
    num_tokens: int = 0
    elapsed_s: float = 0.0
    run: int = 0
    feed: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Tensor] | None = None  # None: not started


def save_progress(folder: Path, progress: Progress, model: ModelConfig, train: TrainConfig) -> None:
    content = {
        "configs": [asdict(model), asdict(train)],
        "progress": {name: getattr(progress, name) for name in Progress.__dataclass_fields__},
    }
    partial = folder / f"{FILE_NAME}.partial"
    torch.save(content, partial)
    partial.replace(folder / FILE_NAME)


def load_progress(folder: Path, model: ModelConfig, train: TrainConfig) -> Progress:
    path = folder / FILE_NAME
    if not path.is_file():
        raise CheckpointError(
            f"there is no run to resume in {folder}",
            f"{path} does not exist.",
            "Start it without --resume, or give the --out of the run that was stopped.",
        )
    # Loads only files that this module wrote; the state of `random.Random` is nested tuples.
    content = torch.load(path, map_location="cpu", weights_only=True)
    wanted = [asdict(model), asdict(train)]
    differing = [
        f"{name} was {saved[name]}, now {value}"
        for saved, current in zip(content["configs"], wanted, strict=True)
        for name, value in current.items()
        if saved[name] != value
    ]
    if differing:
        raise CheckpointError(
            f"{path} belongs to another run",
            "; ".join(differing) + ".",
            "Give the same flags as when it was started, or another --out.",
        )
    return Progress(**content["progress"])
