"""The memory that a model takes on each of several GPUs, and the speed that each layout can reach.

A layout divides N GPUs into N / tp engines of tp ranks. Times are floors, not measurements: the
bytes that a rank must read at its memory's bandwidth, and its all-reduces at a stated cost.
Dependencies between kernels, sampling and the host add to them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.commands.console import human_bytes, print_table
from penstock.commands.roofline import Roofline
from penstock.config import EngineConfig
from penstock.errors import CapacityError, ConfigError, nearest

if TYPE_CHECKING:
    from penstock.commands.model_files import ModelFiles
    from penstock.engine.memory import MemoryPlan

NODE_GPUS = 8  # of one machine: the ranks of an engine are all on one
CONTEXT = 4096  # tokens of a request
BATCHES = (1, 64)  # requests in a step of one engine


@dataclass(frozen=True, slots=True)
class Gpu:
    memory_bytes: float
    bytes_per_s: float  # memory bandwidth
    link_bytes_per_s: float  # to another GPU, in one direction
    all_reduce_s: float  # of a small tensor, including the wait for the slowest rank


_LINKED, _PCIE = (450e9, 10e-6), (25e9, 30e-6)
# The H200's bandwidth is measured (docs/performance.md); others are 90 % of the data sheet's.
GPUS = {
    "B200": Gpu(180e9, 7.2e12, 900e9, 10e-6),
    "H200": Gpu(141e9, 4.3e12, *_LINKED),
    "H100": Gpu(80e9, 3.0e12, *_LINKED),
    "A100": Gpu(80e9, 1.8e12, 300e9, 12e-6),
    "L40S": Gpu(48e9, 0.78e12, *_PCIE),
    "RTX4090": Gpu(24e9, 0.9e12, *_PCIE),
}


def read_gpus(text: str) -> tuple[int, str]:
    """Reads a count and a name, such as 8xH200."""
    match = re.fullmatch(r"([1-9]\d{0,4})x(\w+)", text)
    name = match[2].upper() if match else ""
    if match is None or name not in GPUS:
        raise ConfigError(
            f"--gpus is {text!r}",
            f"It must be a count and a name, such as 8xH200; known GPUs are {', '.join(GPUS)}.",
            nearest(name, GPUS),
        )
    return int(match[1]), name


def describe_layouts(
    files: ModelFiles, config: EngineConfig, gpus: tuple[int, str]
) -> list[dict[str, Any]]:
    """One layout for each tp that divides the number of GPUs; `why_not` if it does not work."""
    count, name = gpus
    found = []
    for tp in (size for size in range(1, min(count, NODE_GPUS) + 1) if count % size == 0):
        try:
            found.append({"tp": tp, "replicas": count // tp, **_layout(files, config, tp, name)})
        except ConfigError as error:
            found.append({"tp": tp, "replicas": count // tp, "why_not": error.why})
        except CapacityError as error:
            found.append({"tp": tp, "replicas": count // tp, "why_not": error.what})
    return found


def build_without_memory(
    files: ModelFiles,
    config: EngineConfig,
    tp: int = 1,
    *,
    with_drafting_head: bool = True,
    device: str = "cuda",
) -> tuple[Any, Roofline]:
    """One rank of a model on torch's meta device, in the dtype that this device would use; weights
    that its files store quantized count as they are stored.
    """
    import torch

    from penstock.engine.device_cache import find_kv_dtype
    from penstock.models import build_model
    from penstock.offload.load import refuse_ranks
    from penstock.parallel.ranks import Ranks
    from penstock.weights.load import resolve_dtype

    source, ranks = files.source, Ranks(0, tp)
    refuse_ranks(source, config, ranks)
    dtype = resolve_dtype(config.dtype, source.config, device)
    given: dict[str, Any] = {"with_drafting_head": with_drafting_head, "ranks": ranks}
    model: Any = build_model(source.config, dtype, torch.device("meta"), **given)
    kv_bytes = find_kv_dtype(config.kv_dtype, dtype).itemsize
    given = {"kv_bytes": kv_bytes, "quantized": files.quantized_bytes(model, dtype)}
    return model, Roofline.of(model, source.config, dtype.itemsize, config.state_bytes, **given)


def collectives_s(
    tp: int, num_layers: int, num_bytes: int, all_reduce_s: float, link_bytes_per_s: float
) -> float:
    """Seconds per step for the collectives, if its hidden states take `num_bytes`: two all-reduces
    per layer, one for the embedding, one to find the token. A ring sends each byte twice.
    """
    sent_s = 2 * (tp - 1) / tp * num_bytes / link_bytes_per_s
    return num_collectives(num_layers) * (all_reduce_s + sent_s)


def num_collectives(num_layers: int) -> int:
    return 2 * num_layers + 2


def _layout(files: ModelFiles, config: EngineConfig, tp: int, name: str) -> dict[str, Any]:
    gpu = GPUS[name]
    model, roofline = build_without_memory(files, config, tp)
    memory = plan_rank_memory(model, roofline, config, name)
    pools = memory.pools
    num_tokens = max(pools.num_pages - 1, 0) * memory.page_size
    steps = {str(batch): _step_s(roofline, gpu, len(model.layers), tp, batch) for batch in BATCHES}
    return {
        "weight_bytes": roofline.weight_bytes,
        "kv_tokens": num_tokens,
        "requests": min(pools.max_rows, num_tokens // CONTEXT if num_tokens else pools.max_rows),
        "max_model_len": pools.max_model_len,
        "step_s": steps,
    }


def plan_rank_memory(model: Any, roofline: Roofline, config: EngineConfig, name: str) -> MemoryPlan:
    """The memory plan of a rank on one such GPU. Raises an error if its weights do not fit."""
    from penstock.engine.memory import estimate_memory

    num_bytes = int(GPUS[name].memory_bytes)
    if roofline.weight_bytes > num_bytes:
        raise CapacityError(
            f"A rank's weights take {human_bytes(roofline.weight_bytes)}; one {name} has "
            f"{human_bytes(num_bytes)}"
        )
    return estimate_memory(model, config, roofline.weight_bytes, num_bytes, is_gpu=True)


def _step_s(roofline: Roofline, gpu: Gpu, num_layers: int, tp: int, batch: int) -> float:
    read_s = roofline.decode_bytes(batch, CONTEXT) / gpu.bytes_per_s
    if tp == 1:
        return read_s
    num_bytes = batch * roofline.hidden_size * roofline.element_bytes
    return read_s + collectives_s(tp, num_layers, num_bytes, gpu.all_reduce_s, gpu.link_bytes_per_s)


def print_layouts(layouts: list[dict[str, Any]], gpus: tuple[int, str]) -> None:
    count, name = gpus
    print(f"On {count} x {name}, with {CONTEXT:,} tokens per request; times are floors:")
    rows = []
    for layout in layouts:
        place = [f"{layout['replicas']} x {layout['tp']}"]
        if "why_not" in layout:
            rows.append([*place, layout["why_not"], *[""] * (2 + 2 * len(BATCHES))])
            continue
        cells = [human_bytes(layout["weight_bytes"]), f"{layout['kv_tokens']:,}"]
        cells.append(f"{layout['replicas'] * layout['requests']:,}")
        for batch in BATCHES:
            seconds = layout["step_s"][str(batch)]
            all_tokens = layout["replicas"] * batch / seconds
            cells += [f"{1e3 * seconds:.2f}", f"{all_tokens:,.0f}"]
        rows.append([*place, *cells])
    header = ["engines x tp", "weights/GPU", "KV tokens/engine", "requests"]
    for batch in BATCHES:
        header += [f"ms at {batch}", "total tok/s"]
    print_table(header, rows)
