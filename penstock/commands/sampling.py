"""The flags of `SamplingParams`, for the commands that generate text."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from penstock.commands.flags import add_flags, read_settings
from penstock.types import SamplingParams

HELPS = {
    "max_tokens": "end after this many tokens (default: when the model ends or the context is "
    "full)",
    "min_tokens": "do not end before this many tokens",
    "temperature": "0 takes the likeliest token; higher is more varied (default: the model's, or "
    "0)",
    "top_p": "keep the likeliest tokens up to this total probability (default: the model's, or 1)",
    "top_k": "keep this many of the likeliest tokens; 0 keeps all (default: the model's, or 0)",
    "min_p": "keep tokens at least this likely, relative to the likeliest (default: the model's, "
    "or 0)",
    "repetition_penalty": "above 1 discourages every token seen so far (default: the model's, or "
    "1)",
    "presence_penalty": "subtracted from the logit of a generated token",
    "frequency_penalty": "subtracted from the logit each time a token was generated",
    "logit_bias": "add X to the logit of token ID",
    "seed": "seed: the same seed gives the same text",
    "stop": "end before this text; may be repeated",
    "stop_token_ids": "end at any of these tokens",
    "bad_words": "text that an answer must not contain; may be repeated",
    "include_stop_str_in_output": "keep the stop text, or token, at the end of an answer",
    "skip_special_tokens": "leave control tokens out of the text",
    "truncate_prompt_tokens": "use only so many of the prompt's last tokens; -1: as many as fit",
    "ignore_eos": "continue when the model would end",
    "logprobs": "with --json: log-probabilities of the chosen and of the N likeliest tokens",
    "n": "number of answers",
}
NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})
# Not for the command line: penstock.text.grammar writes grammars, and only the API returns a
# prompt's.
INTERNAL = ("grammar", "grammar_starts_after", "prompt_logprobs")


def add_sampling_flags(parser: argparse.ArgumentParser, skip: Collection[str] = ()) -> None:
    add_flags(parser, SamplingParams, title="sampling", helps=HELPS, skip={*INTERNAL, *skip})


def given_sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """Only what was given, so that a server's own defaults apply to the rest."""
    return read_settings(SamplingParams, arguments)


def read_sampling(
    arguments: argparse.Namespace, defaults: Mapping[str, Any] = NO_DEFAULTS
) -> SamplingParams:
    """`defaults`: the model's, for what was not given."""
    return SamplingParams(**{**defaults, **given_sampling(arguments)})
