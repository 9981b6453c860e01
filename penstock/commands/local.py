"""Loads a model into this process, for commands that need one, and defines the sampling flags.
Imports the engine only when a model is loaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Generator, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from penstock.commands.flags import TEXT_SETTINGS, add_flags, read_settings
from penstock.config import EngineConfig, ServeConfig
from penstock.progress import PhaseList, timed
from penstock.text.dialects import ContentDelta, Delta, ReasoningDelta, StreamParser, dialect_of
from penstock.types import SamplingParams

if TYPE_CHECKING:
    from penstock.llm import LLM


def load_llm(arguments: argparse.Namespace) -> LLM:
    """Loads the model that flags and variables name, and shows the progress."""
    settings = read_settings(EngineConfig, arguments)
    text = read_settings(ServeConfig, arguments)
    text = {name: text[name] for name in TEXT_SETTINGS if name in text}
    with PhaseList() as phases:
        with timed("libraries", phases):
            from penstock.engine.device import leave_a_core
            from penstock.llm import LLM
        leave_a_core(settings.get("tp", 1))
        return LLM(settings.pop("model", ""), on_phase=phases, **text, **settings)


@dataclass(slots=True)
class LocalModel:
    """The model of `penstock chat`. Counts tokens by tokenising the answer again."""

    llm: LLM
    sampling: SamplingParams
    num_tokens: int | None = None

    @property
    def name(self) -> str:
        return self.llm.engine.info.model_name

    def stream(
        self, messages: list[dict[str, str]], thinking: bool | None
    ) -> Generator[tuple[str, bool]]:
        """Pieces of the answer, each with whether it is reasoning."""
        variables: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
        prompt = self.llm.chat_encoder.render(messages, variables=variables)
        dialect = dialect_of(self.llm.template.source)
        parser = StreamParser(
            dialect, in_thinking=prompt.opens(dialect.thinking), parses_tools=False
        )
        reply = ""
        self.num_tokens = None
        try:
            for piece in self.llm.stream(self.llm.chat_encoder.encode(prompt), self.sampling):
                reply += piece
                yield from _texts_of(parser.feed(piece))
            yield from _texts_of(parser.close("stop"))
        finally:
            self.num_tokens = len(self.llm.tokenizer.encode(reply))


def _texts_of(deltas: list[Delta]) -> Iterator[tuple[str, bool]]:
    for delta in deltas:
        if isinstance(delta, ContentDelta | ReasoningDelta):
            yield delta.text, isinstance(delta, ReasoningDelta)


HELPS = {
    "max_tokens": "stop after this many tokens (default: when the model ends or the context is "
    "full)",
    "min_tokens": "do not stop before this many tokens",
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
    "stop": "stop before this text; may be repeated",
    "stop_token_ids": "stop at any of these tokens",
    "bad_words": "text that an answer must not contain; may be repeated",
    "include_stop_str_in_output": "keep the stop text, or token, at the end of an answer",
    "skip_special_tokens": "leave control tokens out of the text",
    "truncate_prompt_tokens": "keep only this many of the prompt's last tokens; -1: all that fit",
    "ignore_eos": "continue where the model would end",
    "logprobs": "with --json: log-probabilities of the chosen and of the N likeliest tokens",
    "n": "number of answers",
}
NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})
# Not for the command line: penstock.text.grammar writes grammars, and only the API returns
# prompt logprobs.
INTERNAL = ("grammar", "grammar_starts_after", "prompt_logprobs")


def add_sampling_flags(parser: argparse.ArgumentParser, skip: Collection[str] = ()) -> None:
    add_flags(parser, SamplingParams, title="sampling", helps=HELPS, skip={*INTERNAL, *skip})


def given_sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """Only the parameters that were given, so that a server's own defaults apply to the rest."""
    return read_settings(SamplingParams, arguments)


def read_sampling(
    arguments: argparse.Namespace, defaults: Mapping[str, Any] = NO_DEFAULTS
) -> SamplingParams:
    """`defaults`: the model's, for parameters that were not given."""
    return SamplingParams(**{**defaults, **given_sampling(arguments)})
