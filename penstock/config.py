"""Every setting of an engine and of a server, once: its name, type, default and what it does.

Command-line flags are generated from these fields, so a name exists in one place only. Values are never
written back; what follows from them is a property. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from penstock.errors import ConfigError, nearest

DTYPES = ("auto", "float32", "bfloat16", "float16")


def setting(default: Any, help: str, **extra: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, **extra})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What one engine runs and how much of the machine it may use."""

    model: str = setting("", "folder of a checkpoint, a .pt state dict, or a preset such as Qwen3.5-35B-A3B")
    random_weights: bool = setting(False, "make up seeded weights instead of reading them")
    weights_seed: int = setting(0, "seed of --random-weights")
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    dtype: str = setting("auto", "of weights, activations and KV", choices=DTYPES)
    max_model_len: int | None = setting(
        None, "longest context in tokens (default: what the model and memory allow)"
    )
    max_rows: int = setting(64, "sequences that may run at the same time")
    max_step_tokens: int | None = setting(None, "tokens in one step (default: 512 on a CPU, 8192 on a GPU)")
    mixed_step_tokens: int | None = setting(
        None, "of those, tokens of prompts while others decode and few wait (default: 1024 on a GPU)"
    )
    page_size: int = setting(64, "tokens in one page of KV")
    memory_gb: float | None = setting(
        None, "GB for the cache (default: 90 %% of what is free on a GPU, 1 GB on a CPU)"
    )
    prefix_cache: bool = setting(True, "reuse the work of prompts that start alike")
    checkpoint_gb: float | None = setting(
        None,
        "GB of state checkpoints for the prefix cache of hybrid models (default: half of the state slots)",
    )
    deterministic: bool = setting(False, "results that never depend on what else is being served; slower")
    graphs: bool | None = setting(None, "capture decode steps as CUDA graphs at start (default: on a GPU)")
    overlap: bool | None = setting(
        None, "plan a step while the device runs the one before (default: on a GPU)"
    )

    def __post_init__(self) -> None:
        positive: dict[str, float | None] = {
            "max_rows": self.max_rows,
            "page_size": self.page_size,
            "max_model_len": self.max_model_len,
            "max_step_tokens": self.max_step_tokens,
            "mixed_step_tokens": self.mixed_step_tokens,
            "memory_gb": self.memory_gb,
        }
        for name, value in positive.items():
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value}", "It must be more than 0.")
        if self.deterministic and self.page_size % 64:
            raise ConfigError(
                f"page_size is {self.page_size} and deterministic is on",
                "States are computed in chunks of 64 tokens; a prefix ending inside one rounds differently.",
                "Use a multiple of 64.",
            )
        if self.dtype not in DTYPES:
            raise ConfigError(
                f"dtype is {self.dtype!r}",
                f"It must be one of {', '.join(DTYPES)}.",
                nearest(self.dtype, DTYPES),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(EngineConfig):
    """What the engine process of a server is told."""

    tokenizer: str | None = setting(None, "the server's, which says what the tokens of a grammar spell")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Where the server listens and what it promises."""

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 for every interface")
    port: int = setting(8000, "port to listen on")
    served_model_name: str | None = setting(None, "name in /v1/models and in answers (default: the folder's)")
    tokenizer: str | None = setting(None, "folder or tokenizer.json to use (default: the model's own)")
    max_queue: int = setting(1024, "requests that may wait or run; more are answered 503 with Retry-After")
    enable_thinking: bool | None = setting(None, "what the chat template is told when a request does not say")


def from_mapping(cls: type[Any], values: dict[str, Any]) -> Any:
    """A config from names and values; a name that does not exist is answered with the nearest one."""
    known = [field.name for field in dataclasses.fields(cls)]
    for name in values:
        if name not in known:
            raise ConfigError(
                f"{cls.__name__} has no setting {name!r}", f"It has {', '.join(known)}.", nearest(name, known)
            )
    return cls(**values)
