"""A request for text as every API parses it: checked, and free of HTTP and of any one schema.

The parsers of the APIs create these (openai/requests.py and others); text_engine.py runs them.
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

MAX_IDS = 2**20  # token ids in one request: as many as the longest contexts
MAX_ID_VALUES = MAX_IDS + 2**12  # JSON values in a body with token ids
MAX_CHARS_ASKED = 4 * 1024**2  # in a text or chat that is only tokenised
MAX_TIMEOUT_S = 7 * 24 * 3600
MAX_PRIORITY = 1000
MAX_SESSION_ID_CHARS = 256

Defaults = Mapping[str, float]  # sampling parameters of requests that set none
NO_DEFAULTS: Defaults = MappingProxyType({})

Scalar = bool | int | float | str | None
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
SessionId = Annotated[str, Meta(min_length=1, max_length=MAX_SESSION_ID_CHARS)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=1024)]
Timeout = Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)]
MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)]
Dimensions = Annotated[int, Meta(ge=1, lt=2**31)]  # of a vector
Priority = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]  # lower runs earlier


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """What a request for text has besides its prompt."""

    sampling: SamplingParams
    is_stream: bool
    include_usage: bool
    timeout_s: float | None = None
    priority: int = 0  # lower runs earlier
    session_id: str | None = None
    # Requests with the same key go to the same engine, and stay cached.
    cache_key: str | None = None
    tenant: str = ""  # shares no cache with others
    cache_salt: str | None = None  # within a tenant, only requests with the same salt share a cache
    json_form: JsonForm | None = None
    text_form: TextForm | None = None  # instead of json_form
    loop_guard: bool | None = None  # None: the server's default
    is_cut_to_context: bool = False  # lower max_tokens to what fits after the prompt
    output: OutputOptions = PLAIN_OUTPUT

    @property
    def form(self) -> JsonForm | TextForm | None:
        return self.json_form or self.text_form

    @property
    def cache_scope(self) -> str:
        """Requests of one scope share the cache."""
        return scope_of(self.tenant, self.cache_salt)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(TextRequest):
    messages: list[dict[str, Any]]
    tools: list[PlainTool] | None  # the tools that may be called
    template_arguments: dict[str, Scalar]
    must_call: list[PlainTool] | None = None  # one of these must be called
    is_parallel: bool = True  # allows more than one call
    # Grammars of tools whose only argument is a text, by name.
    text_grammars: Mapping[str, TextGrammar] = field(default_factory=dict)
    thinking_budget: int | None = None  # in tokens, set by the request
    # In tokens, set by an effort: the server's own budget may be smaller.
    effort_budget: int | None = None
    keeps_thoughts_in_content: bool = False  # for clients without a field for reasoning
    hides_thoughts: bool = False
    reply_start: str = ""  # text that the reply continues
    # Reasoning before `reply_start`; None: the reply may not begin with thinking.
    reply_thought: str | None = None
    add_generation_prompt: bool = True
    drops_oldest: bool = False  # drops the oldest messages if not all fit the context
    omitted: Sequence[str] = ()  # parts of tool results that are not text: what, and where


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(TextRequest):
    prompts: list[str | list[int]]
    echo: bool


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    text: str = ""
    chat: ChatRequest | None = None  # instead of the text
    add_special_tokens: bool = False
    shows_texts: bool = False
    knows_control_tokens: bool = True  # False: the text contains none
    shows_pieces: bool = False  # llama-server's format: each token with its text
    counts_cached: bool = False
