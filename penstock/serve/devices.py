"""Where each engine of a server runs: its GPUs, one for each rank, or its share of the cores, as
environment variables.

Decided once, before any process starts, from the settings and the machine. Never imports torch: an
engine that does not find its GPU reports that itself.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from glob import glob

from penstock.config import EngineConfig, ServeConfig
from penstock.errors import ConfigError
from penstock.models.source import ModelSource, is_converted, weight_files

VISIBLE = "CUDA_VISIBLE_DEVICES"
THREADS = "OMP_NUM_THREADS"
WEIGHT_ROOM = 1.25  # weights take at most four fifths of the GPUs' memory
ROUNDED_SHARE = {"fp8": 0.53, "int8": 0.53, "int4": 0.3}  # size relative to 16-bit weights
ASK_TIMEOUT_S = 10.0


def place_engines(
    engine: EngineConfig, serve: ServeConfig, environ: Mapping[str, str], num_gpus: int
) -> tuple[EngineConfig, list[dict[str, str]]]:
    """The settings that all engines share, and the environment variables of each one."""
    num_replicas = max(serve.replicas, len(serve.gpus) // engine.tp)
    if serve.gpus and len(serve.gpus) % engine.tp:
        raise ConfigError(
            f"--tp is {engine.tp} and --gpus names {len(serve.gpus)}",
            "Each engine needs one GPU per rank.",
            f"Name a multiple of {engine.tp}, or change --tp.",
        )
    if serve.gpus and serve.replicas not in (1, len(serve.gpus) // engine.tp):
        raise ConfigError(
            f"--replicas is {serve.replicas} and --gpus names {len(serve.gpus)}",
            "Each engine uses one GPU, and each GPU has one engine."
            if engine.tp == 1
            else f"Each engine uses {engine.tp} GPUs, and each GPU has one engine.",
            "Omit one of the two flags.",
        )
    if num_replicas == 1 and not serve.gpus:
        return engine, [{}]
    if serve.gpus or (engine.device != "cpu" and num_gpus):
        gpus = serve.gpus or tuple(range(num_replicas * engine.tp))
        return _on_gpus(engine, gpus, environ, num_gpus)
    num_threads = max(1, ((os.cpu_count() or 1) - 1) // (num_replicas * engine.tp))
    threads = {} if THREADS in environ else {THREADS: str(num_threads)}
    return engine, [threads] * num_replicas


def _on_gpus(
    engine: EngineConfig, gpus: tuple[int, ...], environ: Mapping[str, str], num_gpus: int
) -> tuple[EngineConfig, list[dict[str, str]]]:
    if engine.device not in ("auto", "cuda"):
        raise ConfigError(
            f"--device is {engine.device}, but every engine gets a GPU of its own",
            "GPUs are chosen with --gpus.",
            "Omit --device.",
        )
    visible = (
        environ[VISIBLE].split(",") if environ.get(VISIBLE) else [str(i) for i in range(num_gpus)]
    )
    for gpu in gpus:
        if not 0 <= gpu < len(visible) or gpus.count(gpu) > 1:
            raise ConfigError(
                f"GPU {gpu} cannot be used",
                f"{len(visible)} GPUs are visible ({', '.join(visible) or 'none'}), each for one "
                "engine.",
                f"Choose other or fewer GPUs with --gpus; {VISIBLE} sets which are visible.",
            )
    # Not "auto": an engine without its GPU must not silently use the CPU.
    firsts = range(0, len(gpus), engine.tp)
    groups = [[visible[gpu] for gpu in gpus[first : first + engine.tp]] for first in firsts]
    return replace(engine, device="cuda"), [{VISIBLE: ",".join(group)} for group in groups]


def count_gpus() -> int:
    return len(glob("/dev/nvidia[0-9]*"))


def choose_tp(
    source: ModelSource, engine: EngineConfig, num_gpus: int, gpu_bytes: int | None
) -> int:
    """The default of --tp: the fewest GPUs that hold the weights and leave room for requests; 1 if
    not even all of them do, so that the engine reports what does not fit."""
    is_asked = (engine.expert_cache, engine.expert_ram, engine.offload_layers) != (None,) * 3
    is_offloaded = is_asked or is_converted(source.path)  # not with ranks
    if engine.device not in ("auto", "cuda") or gpu_bytes is None or is_offloaded:
        return 1
    needed = WEIGHT_ROOM * weight_bytes(source, engine)
    sizes = [1 << power for power in range(num_gpus.bit_length()) if num_gpus % (1 << power) == 0]
    return next((tp for tp in sizes if needed <= tp * gpu_bytes), 1)


def weight_bytes(source: ModelSource, engine: EngineConfig) -> float:
    """Size of the weights in memory, estimated from their files; 0 for a preset, which has none."""
    if source.path is None or engine.random_weights:
        return 0.0
    stored = sum(file.stat().st_size for file in weight_files(source.path))
    is_quantized = "quantization_config" in source.config or source.path.suffix == ".gguf"
    return stored * (1.0 if is_quantized else ROUNDED_SHARE.get(engine.quantization, 1.0))


def least_gpu_bytes() -> int | None:
    """Memory of the smallest GPU, from nvidia-smi; None if that cannot be run or read."""
    words = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(words, capture_output=True, text=True, timeout=ASK_TIMEOUT_S)
        return min(int(line) for line in said.stdout.splitlines()) * 1024**2
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
