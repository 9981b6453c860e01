"""Where each engine process of a server runs: its GPU or its share of the cores, as variables it is given.

Decided once, before anything is started, from the settings and from what the machine has. Never imports
torch: an engine that does not find its GPU says so itself.
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
    """The settings all engines share, and for each of them the variables that make its place its own."""
    num_replicas = max(serve.replicas, len(serve.gpus))
    if serve.gpus and serve.replicas not in (1, len(serve.gpus)):
        raise ConfigError(
            f"--replicas is {serve.replicas} and --gpus names {len(serve.gpus)}",
            "Every engine has one GPU, and every GPU one engine.",
            "Leave one of the two flags out.",
        )
    if num_replicas == 1 and not serve.gpus:
        return engine, [{}]
    if serve.gpus or (engine.device != "cpu" and num_gpus):
        gpus = serve.gpus or tuple(range(num_replicas))
        return _on_gpus(engine, gpus, environ, num_gpus)
    num_threads = max(1, ((os.cpu_count() or 1) - 1) // num_replicas)
    threads = {} if THREADS in environ else {THREADS: str(num_threads)}
    return engine, [threads] * num_replicas


def _on_gpus(
    engine: EngineConfig, gpus: tuple[int, ...], environ: Mapping[str, str], num_gpus: int
) -> tuple[EngineConfig, list[dict[str, str]]]:
    if engine.device not in ("auto", "cuda"):
        raise ConfigError(
            f"--device is {engine.device} and {len(gpus)} engines get a GPU each",
            "The GPUs are named by --gpus then.",
            "Leave --device out.",
        )
    visible = environ[VISIBLE].split(",") if environ.get(VISIBLE) else [str(i) for i in range(num_gpus)]
    for gpu in gpus:
        if not 0 <= gpu < len(visible) or gpus.count(gpu) > 1:
            raise ConfigError(
                f"GPU {gpu} cannot be used",
                f"{len(visible)} are visible here ({', '.join(visible) or 'none'}), each for one engine.",
                f"Name others with --gpus, or fewer; {VISIBLE} says which can be seen.",
            )
    # Not "auto": an engine that cannot have its GPU must not quietly take the processor.
    return replace(engine, device="cuda"), [{VISIBLE: visible[gpu]} for gpu in gpus]


def count_gpus() -> int:
    return len(glob("/dev/nvidia[0-9]*"))
