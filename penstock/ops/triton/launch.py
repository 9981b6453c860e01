# mypy: disable-error-code="no-untyped-def"
"""How every kernel is launched: device properties, and the hand-over from one kernel to the next.

On GPUs that support it (sm_90 and later) a kernel starts while the one before it still runs
("programmatic dependent launch"). The contract, which every kernel of this folder keeps:

    let_next_start(PDL)      first of all: the next kernel may take SMs as they become free
    ... load what no kernel of this step writes: weights, states and KV of earlier steps ...
    wait_for_previous(PDL)   everything the kernels before have written is visible from here on
    ... read activations, write results ...

Nothing is written before the wait, and every program waits, even one that has nothing to do: so
when a kernel is complete, all before it are too.

The integers of a step's rows (positions, slots, lengths, pages) may be read early too: between the
kernel that writes them and the first layer there is the embedding, which lets the next kernel start
only after its own wait.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda


@triton.jit
def let_next_start(PDL: tl.constexpr):
    if PDL:
        tl_cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    if PDL:
        tl_cuda.gdc_wait()


@triton.jit
def arrives_last(arrived, num_programs):
    """Whether all other programs have stored their results, which are then visible here.

    The barrier orders the stores of all threads before the one thread's atomic, which releases
    them.
    """
    tl.debug_barrier()
    is_last = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == num_programs - 1
    if is_last:
        tl.store(arrived, 0)
    return is_last


@triton.jit
def prefetch_l2(pointers, PDL: tl.constexpr):
    """Prefetches the 128-byte lines of a block of pointers into L2; does not wait."""
    if PDL:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [pointers.to(tl.uint64, bitcast=True)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


def cdiv(a: int, b: int) -> int:
    """For the host, where Triton's own, made for kernels too, takes ten times as long."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def has_dependent_launch(device: torch.device) -> bool:
    return device.type == "cuda" and _capability(device.index or 0) >= (9, 0)


def launch_options(device: torch.device) -> dict[str, Any]:
    """Keyword arguments of every launch: the PDL constexpr of the kernel, and the launch
    attribute.
    """
    if has_dependent_launch(device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@functools.cache
def num_processors(device: torch.device) -> int:
    """The number of SMs, which a grid should fill. The interpreter pretends to have a few."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 4
    )


SMALL_MEMORY = 99 * 1024  # bytes of shared memory available to a program on every GPU
LARGE_MEMORY = 227 * 1024  # on data center GPUs


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes that one program may use."""
    if device.type != "cuda":
        return SMALL_MEMORY
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)
