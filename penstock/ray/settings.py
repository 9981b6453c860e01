"""The settings of a deployment on Ray, in addition to the flags of each server."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from penstock.config import from_mapping, setting
from penstock.errors import ConfigError

HEAD = "node:__internal_head__"  # Ray's own name of a resource that only the head node has
FRACTION = 0.001  # of a resource that only sets the placement


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    model: str = setting("", "folder of a checkpoint on every node, a file, or a preset")
    tp: int = setting(1, "GPUs of one engine, all on one node")
    flags: str = setting("", "flags of `penstock serve` for every engine, in one string")
    gpus: int | None = setting(None, "GPUs that Ray gives an engine (default: --tp; 0: a CPU)")
    cpus: float = setting(4.0, "cores that Ray sets aside for an engine")
    min_replicas: int = setting(1, "fewest engines")
    max_replicas: int = setting(1, "most engines")
    queued_tokens: int = setting(
        8192, "waiting prompt tokens per engine above which Ray starts another"
    )
    upscale_delay: float = setting(10.0, "seconds above that before it does")
    downscale_delay: float = setting(300.0, "seconds without need before an engine stops")
    max_requests: int = setting(512, "concurrent requests per engine; others wait at the door")
    doors: int = setting(1, "replicas that accept HTTP")
    doors_on: str = setting(
        HEAD,
        "resource of the nodes that doors run on; empty: any node. Streams of a lost door are lost",
    )
    drain_timeout: float = setting(300.0, "seconds that running replies have when an engine ends")
    batch_ms: float = setting(
        50.0, "milliseconds over which bytes of a reply are batched, after the first ones"
    )

    def __post_init__(self) -> None:
        for name in ("tp", "min_replicas", "queued_tokens", "max_requests", "doors"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}", "It must be 1 or more.")
        if self.max_replicas < self.min_replicas:
            raise ConfigError(
                f"max_replicas is {self.max_replicas} and min_replicas is {self.min_replicas}",
                "There cannot be fewer than the fewest.",
            )

    @classmethod
    def read(cls, given: dict[str, Any]) -> RaySettings:
        """From YAML or the arguments of `serve run`, where every value may be a string."""
        kinds: dict[str, type] = {"tp": int, "gpus": int, "cpus": float}
        kinds |= dict.fromkeys(("min_replicas", "max_replicas", "queued_tokens"), int)
        kinds |= dict.fromkeys(("max_requests", "doors"), int)
        kinds |= dict.fromkeys(
            ("upscale_delay", "downscale_delay", "drain_timeout", "batch_ms"), float
        )
        try:
            read = {name: kinds.get(name, str)(value) for name, value in given.items()}
        except ValueError as error:
            raise ConfigError("A setting of penstock.ray is not a number", f"{error}.") from error
        settings: RaySettings = from_mapping(cls, read)
        return settings

    @property
    def num_gpus(self) -> int:
        return self.tp if self.gpus is None else self.gpus

    @property
    def door_options(self) -> dict[str, Any]:
        """Ray's options for a door's actor. A head node often offers Ray no cores."""
        if self.doors_on:
            return {"num_cpus": 0, "resources": {self.doors_on: FRACTION}}
        return {"num_cpus": min(1.0, self.cpus)}

    @property
    def words(self) -> list[str]:
        """The arguments of `penstock serve`."""
        model = [self.model] if self.model else []
        tp = ["--tp", str(self.tp)]
        drain = ["--drain-timeout", f"{self.drain_timeout:g}"]
        # Doors call it by an address of this machine, and check only what it would check.
        return [*model, *tp, *drain, "--allowed-host", "*", *shlex.split(self.flags)]

    @property
    def bundle(self) -> dict[str, float]:
        """What one node must have for an engine, all ranks together."""
        gpus = {"GPU": float(self.num_gpus)} if self.num_gpus else {}
        return {"CPU": self.cpus, **gpus}
