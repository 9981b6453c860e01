"""Decides whether a model's drafting head is used: resolves `--speculate auto` for a model and a
device.

A head pays off if its drafts are often accepted, a step's weights are on the device anyway, and it
fits in memory. An explicit `mtp` is used, or is an error.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from penstock.config import EngineConfig
from penstock.engine.memory import first_pools
from penstock.engine.mtp_drafter import drafting_rows
from penstock.errors import CapacityError, CheckpointError, ConfigError, PenstockError
from penstock.models.source import ModelSource, is_converted
from penstock.ops.cuda import quantized
from penstock.ops.cuda.program import is_available
from penstock.ops.weight import bytes_of
from penstock.progress import OnPhase, Phase
from penstock.weights.on_the_fly import rounded_copy

FEW_BITS = 6  # per weight, with scales: a copy in INT4 would not be read much faster
LEAST_ROOM = 0.8  # of rows and of context: `auto` drafts if the head leaves this share of both


def settle_before_load(config: EngineConfig, source: ModelSource) -> EngineConfig:
    """Turns `auto` off where drafts cannot pay off, so that the head is not even loaded."""
    is_spread = config.expert_cache is not None or config.expert_ram is not None
    # Drafts of random weights are never accepted. With offloaded experts a step waits for them, and
    # every draft needs its own.
    if config.speculate == "auto" and (
        config.random_weights or is_spread or is_converted(source.path)
    ):
        return _without_drafts(config)
    return config


def wants_head(config: EngineConfig) -> bool:
    return config.speculate == "auto" or config.speculation.kind == "mtp"


def is_of_the_head(error: PenstockError) -> bool:
    """Whether a model that failed to load with `auto` may load without the head: memory is short,
    or the head's tensors do not match the config.
    """
    if isinstance(error, CapacityError):
        return True
    return isinstance(error, CheckpointError) and "mtp." in f"{error.what} {error.why}"


def settle(config: EngineConfig, model: Any, name: str, on_phase: OnPhase) -> EngineConfig:
    """The drafter of a loaded model; `auto` uses its head if there is one and it fits."""
    # Many checkpoints have no drafting head although their config.json lists one.
    has_head = getattr(model, "mtp", None) is not None
    if config.speculate != "auto":
        if config.speculation.kind == "mtp" and not has_head:
            raise ConfigError(
                f"speculate is {config.speculate!r}, and {name} has no drafting head",
                "Its checkpoint stores no tensors named mtp.",
                "Use --speculate ngram, which needs no head, or --speculate off.",
            )
        return config
    if not has_head:
        return _without_drafts(config)
    drafting = dataclasses.replace(config, speculate="mtp")
    if reason := _missing_room(drafting, model, name):
        return give_up(config, model, reason, on_phase)
    return drafting


def round_vocabulary(config: EngineConfig, model: Any) -> None:
    """Gives the head an INT4 copy of the rows that choose its drafts, on a GPU: reading these rows
    takes half of a draft's time or more, and a worse draft changes no token of a reply.
    """
    num_tokens = config.draft_vocabulary
    if config.speculation.kind != "mtp" or not num_tokens or config.deterministic:
        return
    has_kernel = is_available(model.device) and model.dtype in quantized.DTYPES
    if not model.ranks.is_alone or not has_kernel:
        return
    rows = drafting_rows(model, num_tokens)
    bits = 8 * rows.num_bytes / rows.shape.numel()
    if rows.shape[0] <= num_tokens and len(rows.parts) <= 1 and bits > FEW_BITS:
        model.mtp.vocabulary = rounded_copy(rows, "int4")


def give_up(config: EngineConfig, model: Any, reason: str, on_phase: OnPhase) -> EngineConfig:
    """Continues without the head because memory is short, and reports it."""
    size = f"{bytes_of(model.mtp) / 1e9:.2f} GB"
    on_phase(no_drafts(f"There is too little memory for it ({size}). {reason}"))
    return _drop(config, model)


def no_drafts(reason: str) -> Phase:
    return Phase("drafts", f"none, the drafting head is not used. {reason}".strip(), seconds=0.0)


def describe(config: EngineConfig) -> str:
    """The drafter, for the start-up log; "" if there is none."""
    drafts = config.speculation
    if not drafts.num_drafts:
        return ""
    who = {"mtp": "the model's drafting head", "model": drafts.path}.get(drafts.kind, drafts.kind)
    return f"up to {drafts.num_drafts} tokens per step by {who} (--speculate {drafts})"


def name_the_head(error: CapacityError, model: Any) -> CapacityError:
    """The same error for an explicit drafting head, with the advice to do without it."""
    size = f"{bytes_of(model.mtp) / 1e9:.2f} GB"
    todo = f"{error.todo} Or use --speculate off: the drafting head takes {size}."
    return CapacityError(error.what, error.why, todo.strip())


def _missing_room(config: EngineConfig, model: Any, name: str) -> str:
    """What the head would leave too little of; "" if it leaves enough."""
    plain = dataclasses.replace(config, speculate="off")
    try:
        without = first_pools(model, plain, name, bytes_of(model.mtp))
    except CapacityError:
        return ""  # it does not fit without the head either: the following plan reports it
    try:
        left = first_pools(model, config, name)
    except CapacityError as error:
        return f"With it: {error.what}."
    if (
        left.max_rows >= LEAST_ROOM * without.max_rows
        and left.max_model_len >= LEAST_ROOM * without.max_model_len
    ):
        return ""
    return (
        f"With it there is room for {left.max_rows} requests of up to {left.max_model_len:,} "
        f"tokens, without it for {without.max_rows} of {without.max_model_len:,}."
    )


def _drop(config: EngineConfig, model: Any) -> EngineConfig:
    model.mtp = None
    return _without_drafts(config)


def _without_drafts(config: EngineConfig) -> EngineConfig:
    return dataclasses.replace(config, speculate="off")
