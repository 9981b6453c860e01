"""The tiny model with sampling defaults, as published models have; its own file has none."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.assets import default_model

SAMPLED = {"do_sample": True, "temperature": 1.5, "top_k": 50}


def write_sampled_model(folder: Path) -> Path:
    for file in default_model().iterdir():
        if file.name != "generation_config.json":
            (folder / file.name).symlink_to(file)
    ends = json.loads((default_model() / "generation_config.json").read_text())["eos_token_id"]
    (folder / "generation_config.json").write_text(json.dumps({**SAMPLED, "eos_token_id": ends}))
    return folder
