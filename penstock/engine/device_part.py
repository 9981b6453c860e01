"""One rank's shard of the model on its device, and a runner over it.

The same on every rank, and for a single-device engine. Rank 0 also has the policy (`engine.py`);
the other ranks follow its plans (`rank.py`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock import ops
from penstock.config import EngineConfig
from penstock.engine import drafting_head
from penstock.engine.device import on_device, pick_device
from penstock.engine.memory import MemoryPlan, build_runner
from penstock.engine.runner import Runner
from penstock.engine.timing import StepTimer
from penstock.errors import CapacityError, ConfigError, PenstockError
from penstock.layers.packing import narrow_weights, pack_weights, shorten_weights
from penstock.models import build_model
from penstock.models.source import ModelSource
from penstock.offload.device_slots import DeviceSlots
from penstock.offload.load import load_with_experts, without_graphs
from penstock.offload.store import ExpertStore
from penstock.parallel.links import GroupLinks, NoLinks
from penstock.parallel.one_shot import connect
from penstock.parallel.ranks import ALONE, Ranks
from penstock.progress import OnPhase, Phase, timed

# A prefill step copies all experts to the GPU, whatever its length: few long steps are best.
OFFLOADED_MIXED_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class DevicePart:
    model: Any
    config: EngineConfig  # with the drafter resolved for this model
    memory: MemoryPlan
    runner: Runner

    @classmethod
    def of(cls, model: Any, config: EngineConfig, name: str, on_phase: OnPhase) -> DevicePart:
        """For a loaded model: plans the memory, and allocates its cache."""
        is_auto = config.speculate == "auto"
        config = drafting_head.settle(config, model, name, on_phase)
        drafting_head.round_vocabulary(config, model)
        store = getattr(model, "expert_store", None)
        if store is not None:
            config = without_graphs(config, store)
            if isinstance(store, DeviceSlots) and config.mixed_step_tokens is None:
                config = dataclasses.replace(config, mixed_step_tokens=OFFLOADED_MIXED_TOKENS)
        if config.timing or config.offload_layers is not None:
            config = dataclasses.replace(config, graphs=False)
        check_page_size(config, model.device)
        if model.device.type == "cpu" and not config.deterministic:
            narrow_weights(model)
            pack_weights(model, keep=model.head.weight)
            shorten_weights(model)
        with on_device(model.device):
            try:
                memory, runner = build_runner(model, config, name, on_phase)
            except CapacityError as error:
                if config.speculation.kind != "mtp":
                    raise
                if not is_auto:
                    raise drafting_head.name_the_head(error, model) from error
                reason = f"With it: {error.what}."
                runner = None  # free the failed attempt's memory before planning again
            if runner is None:
                config = drafting_head.give_up(config, model, reason, on_phase)
                memory, runner = build_runner(model, config, name, on_phase)
        if drafts := drafting_head.describe(config):
            on_phase(Phase("drafts", drafts, seconds=0.0))
        if config.timing:
            runner.timer = StepTimer(model.device)
            if isinstance(store, ExpertStore):
                runner.timer.waited_s = store.waited_s
        return cls(model, config, memory, runner)


def load_part(
    source: ModelSource,
    config: EngineConfig,
    rank: int,
    meeting_file: Path | None,  # None: a single rank
    on_phase: OnPhase = lambda _: None,
) -> DevicePart:
    device = rank_device(config, rank)
    ranks = ALONE
    with on_device(torch.device(device)):
        if meeting_file is not None:
            links = GroupLinks.of_file(meeting_file, rank, config.tp, torch.device(device))
            ranks = Ranks(rank, config.tp, links, config.ep)
            if config.custom_all_reduce:
                _connect(links, str(meeting_file), ranks, torch.device(device), on_phase)
        return _load(source, config, device, ranks, on_phase)


def _connect(
    links: GroupLinks, name: str, ranks: Ranks, device: torch.device, on_phase: OnPhase
) -> None:
    why_not = connect(links, name, ranks.rank, ranks.size, device)
    how = f"by torch.distributed: {why_not}" if why_not else "through shared memory"
    on_phase(Phase("all-reduce", f"small tensors {how}", seconds=0.0))


def load_share(
    source: ModelSource, config: EngineConfig, on_phase: OnPhase = lambda _: None
) -> DevicePart:
    """Rank 0's shard of the model on one device, without the other ranks: its collectives exchange
    nothing. Its results are meaningless; its times are those of a rank.
    """
    device = pick_device(config.device)
    with on_device(torch.device(device)):
        return _load(source, config, device, Ranks(0, config.tp, NoLinks(), config.ep), on_phase)


def _load(
    source: ModelSource, config: EngineConfig, device: str, ranks: Ranks, on_phase: OnPhase
) -> DevicePart:
    config = drafting_head.settle_before_load(config, source)
    with timed("weights", on_phase) as report:
        model = _load_model(source, config, device, ranks, report, on_phase)
    return DevicePart.of(model, config, source.name, on_phase)


def _load_model(
    source: ModelSource,
    config: EngineConfig,
    device: str,
    ranks: Ranks,
    report: OnPhase,  # for the loading phase
    on_phase: OnPhase,
) -> Any:
    def load(with_head: bool) -> Any:
        return load_with_experts(
            source, config, device, report, with_drafting_head=with_head, ranks=ranks
        )

    if config.speculate != "auto":
        return load(drafting_head.wants_head(config))
    model, reason = None, ""
    try:
        model = load(with_head=True)
    except PenstockError as error:
        if not drafting_head.is_of_the_head(error):
            raise
        reason = f"{error.what}. {error.why}"
    # The head is used on all ranks or on none.
    if ranks.most(int(model is None), torch.device(device)):
        model = None  # freed before loading again
        model = load(with_head=False)
        on_phase(drafting_head.no_drafts(reason or "Another rank could not load it."))
    return model


def rank_device(config: EngineConfig, rank: int) -> str:
    """Rank r runs on the r-th visible GPU."""
    device = pick_device(config.device)
    if config.tp == 1 or not device.startswith("cuda"):
        return device
    if device != "cuda":
        raise ConfigError(
            f"device is {config.device} and tp is {config.tp}",
            "Each rank needs its own GPU.",
            "Use --device cuda; CUDA_VISIBLE_DEVICES selects the GPUs.",
        )
    num_devices = torch.cuda.device_count()
    if num_devices < config.tp:
        raise ConfigError(
            f"tp is {config.tp}, but torch sees {num_devices} CUDA devices",
            "Each rank needs its own GPU.",
            f"Use --tp {num_devices} or less, or make more GPUs visible.",
        )
    return f"cuda:{rank}"


def check_split(source: ModelSource, config: EngineConfig) -> None:
    """Refuses a number of ranks that the model cannot be split over, before any of them starts."""
    ranks = Ranks(0, config.tp, None, config.ep)
    build_model(source.config, torch.float32, torch.device("meta"), ranks=ranks)


def check_page_size(config: EngineConfig, device: torch.device) -> None:
    if device.type == "cuda" and config.page_size % ops.LEAST_KEYS:
        raise ConfigError(
            f"page_size is {config.page_size} and the model runs on a GPU",
            f"The kernels read {ops.LEAST_KEYS} keys of a page at once.",
            f"Use a multiple of {ops.LEAST_KEYS}; 64 is the default.",
        )
