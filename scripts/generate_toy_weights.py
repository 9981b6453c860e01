"""Writes random weights for a model config, as the forge's reference model loads them.

Usage: python scripts/generate_toy_weights.py --config FILE --output FOLDER
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from penstock.errors import PenstockError
from penstock.forge.fragments.shape import pick_dtype
from penstock.forge.reference import save_toy_weights
from penstock.forge.target import Target, read_config


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes random weights for a config.")
    parser.add_argument("--config", type=Path, default=Path("target/model_config.json"))
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("target/weights"),
        help="a folder for model.pt, or a file that ends in .pt (default: target/weights)",
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    output = arguments.output
    folder, name = (output.parent, output.name) if output.suffix == ".pt" else (output, "model.pt")
    config = read_config(arguments.config)
    shape = Target.of(config, folder, "cpu").shape
    dtype = pick_dtype(config, torch.device("cuda"))  # the dtype that a GPU computes in
    try:
        path = save_toy_weights(shape, folder, dtype, arguments.seed, name)
    except OSError as error:
        raise PenstockError(
            f"{folder / name} cannot be written", f"{error}.", "Name another --output."
        ) from None
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    try:
        main()
    except PenstockError as error:
        sys.exit(f"error: {error}")
