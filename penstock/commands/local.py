"""A model in this process, for commands that use one. Imports the engine when it is loaded."""

from __future__ import annotations

import argparse
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.commands.flags import TEXT_SETTINGS, read_settings
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
