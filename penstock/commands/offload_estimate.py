"""The buyer's question: does a model run on a machine that is described by its memory, at what
speed at most, and what limits it?

Experts fill the GPU's memory first, then RAM, then the disk. Routing counts as uniform, the worst
case: an expert is as likely to be wanted as any other, so a tier serves the share that it holds.
Reads of all tiers overlap, so the slowest one sets the pace. Arithmetic only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GB = 1e9
CONTEXT = 8192  # tokens of the one request that must fit
STEP_BYTES = 2 * GB  # kernels, activations, workspaces on the GPU
SYSTEM_BYTES = 6 * GB  # RAM of the process and the system
PROMPT_TOKENS = 4096  # in a chunk, which needs nearly all experts once


@dataclass(frozen=True, slots=True)
class Tiers:
    """A machine: its memory, and how fast each tier gives what it holds."""

    gpu_bytes: float
    ram_bytes: float
    gpu_speed: float  # bytes a second, of its memory
    link_speed: float  # from RAM to the GPU
    disk_speed: float | None  # None: nothing is read from disk


@dataclass(frozen=True, slots=True)
class Need:
    """What a model needs, in bytes."""

    dense: float  # weights that every token reads, or that must be there
    experts: float
    token_experts: float  # that one token reads
    layer_experts: float  # of one layer: a prompt needs them on the GPU at once
    request: float  # KV and state of one request


@dataclass(frozen=True, slots=True)
class Estimate:
    tokens_per_s: float  # of one request; 0: it does not run
    prompt_tokens_per_s: float
    shares: Mapping[str, float]  # of the experts, by tier
    limit: str  # what sets the pace, or what is missing


def estimate(need: Need, machine: Tiers) -> Estimate:
    slots = machine.gpu_bytes - need.dense - need.request - STEP_BYTES
    least = min(need.layer_experts, need.experts)
    if slots < least:
        missing = (least - slots) / GB
        return Estimate(0.0, 0.0, {}, f"GPU memory: {missing:.1f} GB more are needed")
    in_ram = max(machine.ram_bytes - SYSTEM_BYTES, 0.0)
    on_gpu = min(slots, need.experts)
    in_ram = min(in_ram, need.experts - on_gpu)
    on_disk = need.experts - on_gpu - in_ram
    if on_disk > 0 and machine.disk_speed is None:
        return Estimate(
            0.0, 0.0, {}, f"RAM: {on_disk / GB:.1f} GB more are needed, or a disk (--disk-gbs)"
        )
    shares = {
        name: size / need.experts if need.experts else 0.0
        for name, size in (("gpu", on_gpu), ("ram", in_ram), ("disk", on_disk))
    }
    token = _seconds(need.dense, need.token_experts, shares, machine)
    prompt = _seconds(need.dense, need.experts, shares, machine)
    limit = max(token, key=lambda name: token[name])
    return Estimate(
        1 / max(token.values()), PROMPT_TOKENS / max(prompt.values()), shares, LIMITS[limit]
    )


LIMITS = {"gpu": "GPU memory speed", "link": "link from RAM to GPU", "disk": "disk"}


def _seconds(
    dense: float, experts: float, shares: Mapping[str, float], machine: Tiers
) -> dict[str, float]:
    """That each tier takes to give what a step reads; a copied expert is read again on the GPU."""
    seconds = {
        "gpu": (dense + experts) / machine.gpu_speed,
        "link": experts * (shares["ram"] + shares["disk"]) / machine.link_speed,
    }
    if machine.disk_speed is not None:
        seconds["disk"] = experts * shares["disk"] / machine.disk_speed
    return seconds
