"""A request for text as every API parses it: checked, and with nothing of HTTP or of one schema left in it.

The parsers of the APIs make these (openai/requests.py and its like); text_engine.py takes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any

from msgspec import Meta

from penstock.digests import scope_of
from penstock.serve.openai.chat_options import JsonForm, PlainTool
from penstock.serve.openai.forms import TextForm
from penstock.serve.openai.output_options import PLAIN_OUTPUT, OutputOptions
from penstock.text.call_grammar import TextGrammar
from penstock.types import SamplingParams

MAX_IDS = 2**20  # of one call, in prompts or to be detokenised: as many as the longest contexts hold
MAX_ID_VALUES = MAX_IDS + 2**12  # of a body with ids, all else included
MAX_CHARS_ASKED = 4 * 1024**2  # of a text, or of a chat, that is only tokenised
MAX_TIMEOUT_S = 7 * 24 * 3600
MAX_PRIORITY = 1000
MAX_SESSION_ID_CHARS = 256

Defaults = Mapping[str, float]  # sampling parameters of requests that do not say
NO_DEFAULTS: Defaults = MappingProxyType({})

Scalar = bool | int | float | str | None
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
SessionId = Annotated[str, Meta(min_length=1, max_length=MAX_SESSION_ID_CHARS)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=1024)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """What a request for text says besides its prompt."""

    sampling: SamplingParams
    is_stream: bool
    include_usage: bool
    timeout_s: float | None = None
    priority: int = 0  # lower runs earlier
    session_id: str | None = None
    cache_key: str | None = None  # requests that share it go to the same engine, and stay cached
    tenant: str = ""  # who may share caches with it
    cache_salt: str | None = None  # and of its requests, those with the same salt
    json_form: JsonForm | None = None
    text_form: TextForm | None = None  # instead
    loop_guard: bool | None = None  # None: as the server was told
    is_cut_to_context: bool = False  # where max_tokens is more than fits behind the prompt
    output: OutputOptions = PLAIN_OUTPUT

    @property
    def form(self) -> JsonForm | TextForm | None:
        return self.json_form or self.text_form

    @property
    def cache_scope(self) -> str:
        """What is cached is shared by requests of one scope."""
        return scope_of(self.tenant, self.cache_salt)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(TextRequest):
    messages: list[dict[str, Any]]
    tools: list[PlainTool] | None  # that may be called
    template_arguments: dict[str, Scalar]
    must_call: list[PlainTool] | None = None  # one of these
    is_parallel: bool = True  # more than one call
    text_grammars: Mapping[str, TextGrammar] = field(default_factory=dict)  # of tools that take only a text
    thinking_budget: int | None = None  # tokens, as the request says
    effort_budget: int | None = None  # tokens, of an effort: the server's own budget may be less
    keeps_thoughts_in_content: bool = False  # for clients that know no field for them
    hides_thoughts: bool = False
    reply_start: str = ""  # what the reply goes on from
    reply_thought: str | None = None  # what was thought before that; None: then no thought may be begun
    add_generation_prompt: bool = True
    drops_oldest: bool = False  # messages, where they do not all fit the context
    omitted: Sequence[str] = ()  # of the results of tools, since no text: what, and where it stood


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(TextRequest):
    prompts: list[str | list[int]]
    echo: bool


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    text: str
    chat: ChatRequest | None  # instead of the text
    add_special_tokens: bool
    shows_texts: bool
    knows_control_tokens: bool = True  # False: nothing of the text is one
    shows_pieces: bool = False  # as llama-server has them: each token with its text
