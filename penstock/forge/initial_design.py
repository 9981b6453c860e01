"""The first designs: chosen from the machine's speed alone, before anything is profiled."""

from __future__ import annotations

from penstock.forge import decisions
from penstock.forge.machine import Machine
from penstock.forge.target import Target

LAYER_OPERATIONS = 30  # torch operations per layer in a decode step of one row
FEW_OPERATIONS = {  # choices that save torch operations, in prefill and decode
    "weights": "fused",
    "norm": "folded",
    "rope": "complex",
    "prefill": "packed",
    "decode": "grouped",
}
LEAST_SHARE = 0.2  # of a step's time: below it, launching is not worth improving first


def first_design(machine: Machine) -> dict[str, str]:
    """Plain torch with a cache; with one thread or packed weights if these are clearly quicker: a
    short budget may end with this design.
    """
    design = decisions.plain_design()
    if machine.is_quicker_with_one_thread:
        design = decisions.decide(design, "threads", "one")
    if machine.is_quicker_with_packed_weights:
        design = decisions.decide(design, "products", "packed")
    return design


def opening(target: Target, machine: Machine) -> tuple[dict[str, str], str] | None:
    """A design and the reason for it; None if only a profile can tell.

    If launching takes a large part of a step, steps are captured, which needs kernels, which need
    fused weights: one design, instead of one trial for each. Long passes over prompts are captured
    too if launching them takes longer than computing them. On a CPU the design has all choices that
    save operations: each gains too little to be measured beside other processes, but together they
    gain much.
    """
    if not target.is_cuda:
        design = first_design(machine)
        for name, choice in FEW_OPERATIONS.items():
            design = decisions.decide(design, name, choice)
        return design, "fewer operations, each of which saves too little to be measured alone"
    launching_s = LAYER_OPERATIONS * target.shape.num_layers * machine.launch_s
    reading_s = machine.decode_floor_s(target, batch=1, context_len=0)
    if launching_s < LEAST_SHARE * (launching_s + reading_s):
        return None
    why = (
        f"launching a step takes {1e3 * launching_s:.2f} ms, reading the weights "
        f"{1e3 * reading_s:.2f}"
    )
    design = decisions.decide(decisions.plain_design(), "graphs", "all")
    longest_pass = int(decisions.BY_NAME["passes"]["all"].value)
    if machine.prefill_floor_s(target, longest_pass) < launching_s:
        design = decisions.decide(design, "passes", "all")
    return design, why
