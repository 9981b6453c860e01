"""Random weights for a model config: python scripts/generate_toy_weights.py --config F --output FOLDER"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from penstock.forge.fragments.shape import read_shape
from penstock.forge.toy_weights import save_toy_weights


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes OUTPUT/model.pt: random weights for a config.")
    parser.add_argument("--config", type=Path, default=Path("target/model_config.json"))
    parser.add_argument(
        "--output", type=Path, default=Path("target/weights"), help="a folder, or a .pt in it"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    config = json.loads(arguments.config.read_text())
    folder = arguments.output.parent if arguments.output.suffix == ".pt" else arguments.output
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}.get(
        config.get("torch_dtype"), torch.float16
    )
    path = save_toy_weights(read_shape(config), folder, dtype, arguments.seed)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
