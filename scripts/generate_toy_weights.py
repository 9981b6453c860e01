"""Writes random weights for a model config, as the forge's reference model loads them.

Usage: python scripts/generate_toy_weights.py --config FILE --output FOLDER
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from penstock.errors import PenstockError
from penstock.forge.fragments.shape import Shape, pick_dtype
from penstock.forge.reference import tensor_shapes
from penstock.forge.target import Target, read_config

STD = 0.02


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
    path = output if output.suffix == ".pt" else output / "model.pt"
    config = read_config(arguments.config)
    shape = Target.of(config, path.parent, "cpu").shape
    dtype = pick_dtype(config, torch.device("cuda"))  # the dtype that a GPU computes in
    try:
        save_toy_weights(shape, path, dtype, arguments.seed)
    except OSError as error:
        raise PenstockError(
            f"{path} cannot be written", f"{error}.", "Name another --output."
        ) from None
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


def save_toy_weights(shape: Shape, path: Path, dtype: torch.dtype, seed: int) -> None:
    """Matrices are normal, norms near one."""
    # A GPU, if there is one, draws and rounds: eight billion numbers take a CPU minutes.
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(seed)

    def draw(size: tuple[int, ...]) -> Tensor:
        numbers = torch.randn(size, generator=generator, device=device).mul_(STD)
        return (numbers.add_(1.0) if len(size) == 1 else numbers).to(dtype).cpu()

    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({f"{name}.weight": draw(size) for name, size in tensor_shapes(shape)}, path)


if __name__ == "__main__":
    try:
        main()
    except PenstockError as error:
        sys.exit(f"error: {error}")
