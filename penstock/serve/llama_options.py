"""Sampling options by llama.cpp's names, which Ollama uses too.

An option is supported, ignored because it cannot change a reply, or refused by name: for a sampler
that does not exist here, only the value that turns it off is accepted. Knows no HTTP and no body;
each API brings its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.errors import RequestError
from penstock.serve.fields import NEUTRAL
from penstock.serve.requests import StopString

RANDOM_SEEDS = (-1, 2**32 - 1)  # the second is the first as an unsigned number
PENALTIES = {
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}  # with the values that turn them off
SAMPLERS = "mirostat typical_p tfs_z dynatemp_range dry_multiplier xtc_probability top_n_sigma"
OFF: dict[str, tuple[float, ...]] = {
    **{name: NEUTRAL[name] for name in SAMPLERS.split()},
    "n_indent": (0,),
    "min_keep": (0, 1),
    "t_max_predict_ms": (-1, 0),
}


class LlamaOptions(msgspec.Struct, kw_only=True):
    """The options that llama-server and Ollama share."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


def sampling_fields(options: LlamaOptions) -> dict[str, Any]:
    """The options as fields of OpenAI's bodies."""
    fields: dict[str, Any] = {
        name: getattr(options, name)
        for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop", *PENALTIES)
    }
    fields["repetition_penalty"] = fields.pop("repeat_penalty")
    if fields["seed"] in RANDOM_SEEDS:
        fields["seed"] = None
    for name in ("temperature", "top_k"):  # below zero they mean the same as zero
        if fields[name] is not None:
            fields[name] = max(0, fields[name])
    if options.repeat_last_n == 0:
        fields |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    elif options.repeat_last_n not in (None, -1) and _has_penalty(options):
        raise RequestError(
            f"repeat_last_n is {options.repeat_last_n}",
            "Penalties here count all tokens, including the prompt's.",
            "Use -1, or omit it.",
            param="repeat_last_n",
        )
    return fields


def _has_penalty(options: LlamaOptions) -> bool:
    return any(getattr(options, name) not in (None, off) for name, off in PENALTIES.items())


def require_off(options: Mapping[str, Any]) -> None:
    """Refuses samplers that do not exist here, unless they are turned off."""
    for name, values in OFF.items():
        value = options.get(name)
        if value is not None and value not in values:
            raise RequestError(
                f"{name} is {str(value)[:32]}",
                "This sampler does not exist here.",
                f"Omit it, or send {values[0]:g}, which turns it off.",
                param=name,
            )
