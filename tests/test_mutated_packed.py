"""Damaged checkpoints of every packed format: they load, or give one of our errors."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from packed_checkpoints import FORMATS, in_mlx_form, pack_state, plain_state
from test_mutated_files import (
    FAMILIES,
    KINDS,
    NUM_FULL,
    SHARDS,
    check,
    report,
    run_mutants_of,
    write_checkpoint,
)

WIDE = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 1,
}
FAMILY = {  # with experts if the format stores them in its own way
    "mlx": "hybrid",
    "fp8": "hybrid",
    "int4": "experts",
}
BATCH = 250  # mutants per process, on a machine with other load
MUTATIONS = [kind for kind in KINDS if kind[0] in (*SHARDS, "config.json")]
MUTATIONS += [kind for kind in MUTATIONS if kind[0] == "config.json"]


def write_packed(folder: Path) -> list[Path]:
    """A checkpoint of each format, as small as its groups allow."""
    folders = []
    for name, format in FORMATS.items():
        family = FAMILIES[FAMILY.get(name, "windows")]
        config: dict[str, Any] = {**family, **WIDE, format.key: format.quantization}
        if "layer_types" in config:
            config |= {"num_hidden_layers": 2}
        packed, _ = pack_state(plain_state(config), format)
        if name == "mlx":
            packed = in_mlx_form(packed, "language_model.")
        state = {name: part.contiguous() for name, part in packed.items()}
        folders.append(write_checkpoint(folder / name.replace(" ", "_"), config, state))
    return folders


def test_mutated_packed_files_load_or_are_refused_in_our_own_words(tmp_path: Path) -> None:
    num_mutants = 20 * len(MUTATIONS)
    found = run_mutants_of(write_packed(tmp_path), MUTATIONS, num_mutants, tmp_path)
    check(found, num_mutants, MUTATIONS)


@pytest.mark.slow
@pytest.mark.timeout(2 * 3600)
def test_a_hundred_thousand_mutated_packed_files(tmp_path: Path) -> None:
    started = time.monotonic()
    found = run_mutants_of(write_packed(tmp_path), MUTATIONS, NUM_FULL, tmp_path, BATCH)
    report("mutated packed files", found, time.monotonic() - started)
    check(found, NUM_FULL, MUTATIONS)
