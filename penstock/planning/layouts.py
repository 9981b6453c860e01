"""The possible layouts of a fleet: for each number of ranks, an engine's sizes and step times.

Builds models without memory (torch's meta device), once for each number of ranks.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from penstock.commands.layouts import (
    GPUS,
    NODE_GPUS,
    build_without_memory,
    plan_rank_memory,
)
from penstock.commands.model_files import ModelFiles
from penstock.commands.roofline import Roofline
from penstock.config import EngineConfig
from penstock.engine.memory import STEP_TOKENS
from penstock.errors import CapacityError, ConfigError, PenstockError
from penstock.models.source import ModelSource, find_model
from penstock.planning.engine import EngineShape
from penstock.planning.fleet import Layout
from penstock.planning.step_times import (
    Curve,
    Tables,
    decode_share,
    prompt_share,
    quantized,
    step_times,
)

REFERENCE = "Qwen3.5-35B-A3B"  # the model with the most tables
# Bits per weight including scales: the blocks and groups of `--quantization`.
BITS = {"bf16": 16.0, "fp8": 8.0, "int8": 8.0, "int4": 4.25}
LEAST_ROWS = 2  # fewest rows of a table to be used for a model


@dataclass(frozen=True, slots=True)
class Unfit:
    tp: int
    why: str


def possible_layouts(
    source: ModelSource,
    config: EngineConfig,
    count: int,
    gpu_name: str,
    tables: Tables,
    only_tp: int | None = None,
) -> list[Layout | Unfit]:
    most = min(count, NODE_GPUS)
    if only_tp is not None and not 1 <= only_tp <= most:
        raise ConfigError(
            f"--tp is {only_tp}, and there are {count} GPUs",
            f"An engine has at least one GPU, and all of them in one machine of {NODE_GPUS}.",
            f"Use --tp {most} or less.",
        )
    sizes = [only_tp] if only_tp else [tp for tp in (1, 2, 4, 8) if tp <= most]
    files = ModelFiles(source)
    found: list[Layout | Unfit] = []
    for tp in sizes:
        try:
            found.append(_layout(files, config, tp, gpu_name, tables))
        except ConfigError as error:
            found.append(Unfit(tp, error.why))
        except CapacityError as error:
            found.append(Unfit(tp, error.what))
    return found


def _layout(
    files: ModelFiles, config: EngineConfig, tp: int, gpu_name: str, tables: Tables
) -> Layout:
    model, roofline, scheme = _build(files, config, tp)
    gpu = GPUS[gpu_name]
    memory = plan_rank_memory(model, roofline, config, gpu_name)
    most, shared = next(
        (most, shared) for gb, most, shared in STEP_TOKENS if gpu.memory_bytes >= gb * 1e9
    )
    if config.max_step_tokens is not None:
        most = shared = config.max_step_tokens
    *shares, words = _shares(files, config, scheme, tp, roofline, tables)
    times = step_times(roofline, len(model.layers), tp, gpu_name, (shares[0], shares[1]), words)
    return Layout(config, EngineShape(memory.pools, most, min(most, shared)), times, tp)


def _build(files: ModelFiles, config: EngineConfig, tp: int) -> tuple[Any, Roofline, str]:
    """A model, and the scheme of its weights: a quantized checkpoint stays as it is."""
    model, roofline = build_without_memory(files, config, tp, with_drafting_head=False)
    if roofline.is_quantized:
        bits = 8 * roofline.stored.in_layers / roofline.parameters.in_layers
        return model, roofline, "fp8" if bits > 6 else "int4"
    if config.quantization == "none":
        return model, roofline, "bf16"
    return model, quantized(roofline, BITS[config.quantization]), config.quantization


def _shares(
    files: ModelFiles,
    config: EngineConfig,
    scheme: str,
    tp: int,
    roofline: Roofline,
    tables: Tables,
) -> tuple[Curve, Curve, str]:
    """For decodes and prefills, and their source: a rank of this model, this model on one GPU, or
    the model with the most tables.
    """
    source = files.source
    own = tables.of("decodes", source.name, scheme, tp)
    if len(own) >= LEAST_ROWS:
        decodes, words = decode_share(own, roofline), "measured"
        if tp > 1:
            words = "a rank's share measured, links added"
    else:
        name = source.name if len(tables.of("decodes", source.name, scheme)) > 1 else REFERENCE
        # Unmeasured schemes are assumed to reach what FP8 does: both dequantize.
        known = scheme if len(tables.of("decodes", name, scheme)) >= LEAST_ROWS else "fp8"
        rows = tables.of("decodes", name, known)
        if not rows:
            raise PenstockError(
                f"No decode steps of {REFERENCE} in {known} are in the results",
                "Step times are derived from those.",
                "Name another results folder with --results.",
            )
        decodes = decode_share(rows, _reference(name, files, config, known))
        words = f"from {name} in {known} on one GPU"
    name = source.name if tables.of("prefills", source.name, scheme) else REFERENCE
    known = scheme if tables.of("prefills", name, scheme) else "bf16"
    rows = tables.of("prefills", name, known)
    prompts = prompt_share(rows, _reference(name, files, config, known), decodes)
    return decodes, prompts, words


def _reference(name: str, files: ModelFiles, config: EngineConfig, scheme: str) -> Roofline:
    """As measured: with KV and states in their default dtypes."""
    usual = EngineConfig(quantization="none" if scheme == "bf16" else scheme)
    usual = dataclasses.replace(usual, dtype=config.dtype)
    if name != files.source.name:
        files = ModelFiles(find_model(name))
    _, roofline, _ = _build(files, usual, 1)
    return roofline
