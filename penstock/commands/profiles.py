"""Settings for one purpose: `penstock serve --profile NAME`. A flag or a variable of its own beats
them. None changes what a model says: quality is the checkpoint's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.config import EngineConfig
from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Profile:
    purpose: str
    engine: Mapping[str, Any]  # settings of the engine, by name


PROFILES = {
    "latency": Profile(
        "one person, and the answer now",
        {
            # Fewer rows leave memory for contexts, and fewer graphs are captured at start.
            "max_rows": 8,
            # A prompt of a few thousand tokens is one step.
            "max_step_tokens": 8192,
            # Exact: the reply is that of plain decoding.
            "speculate": "auto",
        },
    ),
}


def with_profile(name: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The profile's engine settings under those that were given."""
    if name is None:
        return dict(given)
    if name not in PROFILES:
        raise ConfigError(
            f"There is no profile {name!r}", "", f"The profiles are {', '.join(PROFILES)}."
        )
    return {**PROFILES[name].engine, **given}


def purposes() -> str:
    return "; ".join(f"{name} ({profile.purpose})" for name, profile in PROFILES.items())


def describe(name: str, config: EngineConfig) -> str:
    """What the profile set, in the words of the command line."""
    profile = PROFILES[name]
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    flags = [
        f"--{field.replace('_', '-')} {getattr(config, field)}"
        for field in profile.engine
        if field in known
    ]
    return f"{profile.purpose}: {' '.join(flags)}"
