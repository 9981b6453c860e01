"""Where each engine of a server runs: its GPUs, one for each rank, or its share of the cores, as
environment variables.

Decided once, before any process starts, from the settings and the machine. Never imports torch: an
engine that does not find its GPU reports that itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from glob import glob

from penstock.config import EngineConfig, ServeConfig
from penstock.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
THREADS = "OMP_NUM_THREADS"


def place_engines(
    engine: EngineConfig, serve: ServeConfig, environ: Mapping[str, str], num_gpus: int
) -> tuple[EngineConfig, list[dict[str, str]]]:
    """The settings that all engines share, and the environment variables of each one."""
    num_replicas = max(serve.replicas, len(serve.gpus) // engine.tp)
    if serve.gpus and len(serve.gpus) % engine.tp:
        raise ConfigError(
            f"--tp is {engine.tp} and --gpus names {len(serve.gpus)}",
            "Each engine has a GPU for each of its ranks.",
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
            f"--device is {engine.device} and {len(gpus) // engine.tp} engines each get a GPU",
            "Then --gpus chooses the GPUs.",
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
