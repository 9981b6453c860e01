"""The core types of the engine, from a client's request to one step of the device and back.

`Request` (what a client sent) becomes a `Sequence` (its state in the engine), which owns a *row*
(its index in every step), *pages* (KV of the attention layers) and a *slot* (state of the DeltaNet
layers). The scheduler turns sequences into a `StepPlan` of integers; the runner returns a
`StepOutput`; the engine reports `TokenDelta`s. No tensors here: everything can be printed, compared
and serialized.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from penstock.digests import PageDigests, Segment, scope_of
from penstock.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]
PoolingKind = Literal["last", "mean"]

MAX_LOGPROBS = 20

# Limits for compiling and running a grammar, in llguidance's units: a millisecond is about 50,000
# of initial fuel, 14,000 of a step's fuel or 20,000 items; a lexer state takes one or two kB.
GRAMMAR_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one reply. The defaults give greedy decoding until the model ends its turn."""

    max_tokens: int | None = None  # None: until the context is full
    min_tokens: int = 0
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps every token
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    # Texts that a reply must not contain; text/prompt.py tokenizes them.
    bad_words: tuple[str, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False  # keep the stop string that ended a reply at its end
    skip_special_tokens: bool = True  # in a reply's text
    # Keep only this many of the prompt's last tokens; -1: as many as fit.
    truncate_prompt_tokens: int | None = None
    logprobs: int | None = None  # None: off; k: of the sampled token and the k most likely ones
    # The same for the prompt, which is then computed without the prefix cache.
    prompt_logprobs: int | None = None
    n: int = 1
    grammar: str | None = None  # constrains the reply; written by penstock.text.grammar
    # The grammar applies after one of these token ids, which end the thinking.
    grammar_starts_after: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, lowest, highest in _RANGES:
            value = getattr(self, name)
            if value is not None and not (lowest <= value <= highest):  # NaN fails this too
                raise RequestError(
                    f"{name} is {value}",
                    f"It must be between {lowest} and {highest}.",
                    param=name,
                )
        for token_id, bias in self.logit_bias.items():
            if token_id < 0 or not -100 <= bias <= 100:
                raise RequestError(
                    f"logit_bias has {{{token_id}: {bias}}}",
                    "Keys are token ids (0 or more) and values are between -100 and 100.",
                    param="logit_bias",
                )
        if "" in self.bad_words:
            raise RequestError(
                "bad_words has an empty string", "It has no tokens.", param="bad_words"
            )
        if self.truncate_prompt_tokens == 0:
            raise RequestError(
                "truncate_prompt_tokens is 0",
                "It must be 1 or more, or -1 for as many as fit.",
                param="truncate_prompt_tokens",
            )
        if self.grammar is not None and self.min_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens} and the reply has a grammar",
                "When the grammar is complete, only an end token can follow.",
                "Omit min_tokens, and put lengths into the grammar.",
                param="min_tokens",
            )

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 1, 2**31),
    ("min_tokens", 0, 2**31),
    ("temperature", 0.0, 100.0),
    ("top_p", 1e-9, 1.0),
    ("top_k", 0, 2**31),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 1e-3, 100.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("seed", -(2**63), 2**63 - 1),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
    ("truncate_prompt_tokens", -1, 2**31),
    ("n", 1, 128),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """The pooled vector to compute for a prompt, instead of a reply."""

    kind: PoolingKind = "last"  # of the final hidden states: the last token's, or their mean
    normalize: bool = True  # to length 1
    dimensions: int | None = None  # keep only this many of the first; None: all
    # Instead of the hidden state, pool a head's output: the classifier's logits, or the logits of
    # these tokens.
    is_classified: bool = False
    logit_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtLimit:
    """A reply that thinks for this many tokens without `end_id` goes on with `closing_ids`, which
    end its thinking. An engine that cannot append them ignores the limit: its server closes the
    thinking with another request, which is slower.
    """

    num_tokens: int
    end_id: int
    closing_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and how to continue it; `n > 1` was split into `n` requests before."""

    id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    pooling: Pooling | None = None  # if set, there is no reply: the last delta has a vector
    end_token_ids: tuple[int, ...] = ()  # any of these ends the reply with "stop"
    banned: tuple[tuple[int, ...], ...] = ()  # token sequences that may not occur in the reply
    # Prompt positions where messages start: good places for state checkpoints.
    boundaries: tuple[int, ...] = ()
    segments: tuple[Segment, ...] = ()  # non-token parts of the prompt, by position
    priority: int = 0  # lower runs first
    session_id: str | None = None  # the conversation whose prefix the cache keeps for the next turn
    tenant: str = ""  # the owner: tenants share nothing in the cache
    cache_salt: str | None = None  # requests with different salts share nothing in the cache either
    # This many of the last token_ids are the reply so far, generated before this request.
    num_resumed_tokens: int = 0
    # Tokens after the prompt's first whose scores another engine has already sent.
    num_scored_tokens: int = 0
    page_digests: PageDigests | None = None  # of the first pages; None: the engine computes them
    age_s: float = 0.0  # since the client sent it; makes it due that much earlier
    thought_limit: ThoughtLimit | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids) - self.num_resumed_tokens

    @property
    def cache_scope(self) -> str:
        return scope_of(self.tenant, self.cache_salt)


class KeptState(NamedTuple):
    """A decode that replays drafts crosses a position whose state must be kept. It may also start
    after that position or not reach it: only the device knows where the accepted drafts ended.
    """

    num_tokens: int
    slot: int


NOTHING_KEPT = KeptState(0, 0)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """A request's state in the engine. Only the scheduler and the cache write to it.

    tokens:  [prompt .................... | generated ........ ]  len(tokens)
             [computed: in the cache ............ | still to run ]
    A sampled token that the host has not read yet is not in `tokens`. A step in flight adds one
    token or, with drafts, several: until it is committed, the host knows only an upper bound.
    """

    request: Request
    arrival: int
    due_s: float  # earlier runs first
    tokens: list[int]
    num_prompt_tokens: int
    # Upper bound of tokens whose keys, values and state are in the cache once the planned steps
    # ran.
    num_computed: int = 0
    steps_in_flight: int = 0  # that sample for it: each adds at least one token
    max_in_flight: int = 0  # upper bound of tokens that these steps add
    num_cached_tokens: int = 0  # of the prompt, found by the first prefix match
    row: int | None = None
    pages: list[int] = field(default_factory=list)
    slot: int | None = None
    initial_slot: int | None = (
        None  # checkpoint to start from, for the first step after a prefix hit
    )
    digests: list[bytes] = field(
        default_factory=list
    )  # of the full pages of `tokens`, from the start
    num_registered_pages: int = 0
    # num_tokens -> probability that a state there will be reused.
    targets: dict[int, float] = field(default_factory=dict)
    checkpoints: dict[int, int] = field(
        default_factory=dict
    )  # num_tokens -> slot, not yet registered
    reply_checkpoint: int | None = None  # num_tokens of the last one within the reply
    # With drafts, the state to keep next, until a step is known to have crossed its position.
    keep: KeptState = NOTHING_KEPT
    num_in_slot: int = 0  # tokens whose state the slot holds when the next step to commit starts
    closes_at: int | None = None  # number of tokens with which its thinking must end
    num_preemptions: int = 0
    num_scored: int = 0  # tokens after the prompt's first whose scores have been sent
    finish: FinishReason | None = None

    @classmethod
    def start(cls, request: Request, arrival: int, due_s: float = 0.0) -> Sequence:
        return cls(
            request=request,
            arrival=arrival,
            due_s=due_s,
            tokens=list(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            num_scored=request.num_scored_tokens,
        )

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def num_tokens(self) -> int:
        """Upper bound of existing tokens, including those the host has not read."""
        return len(self.tokens) + self.max_in_flight

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def is_scored(self) -> bool:
        """Whether prompt scores are requested and not sent yet."""
        is_asked = self.request.sampling.prompt_logprobs is not None
        return is_asked and self.num_scored < self.num_prompt_tokens - 1

    @property
    def needs_every_token(self) -> bool:
        """Whether it needs hidden states of its prompt. These are not cached, so the prefix is
        recomputed.
        """
        pooling = self.request.pooling
        return self.is_scored or (pooling is not None and pooling.kind == "mean")


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The longest prefix for which both pages and, for hybrid models, a state checkpoint exist."""

    num_tokens: int = 0
    pages: tuple[int, ...] = ()
    checkpoint_slot: int | None = None
    num_known_tokens: int = 0  # tokens whose pages exist; beyond num_tokens the state is missing


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence takes a row: what the device must know about it for more than one step."""

    row: int
    sampling: SamplingParams
    seed: int  # never None, so that every sample has a reproducible key
    num_prompt_tokens: int
    history: tuple[int, ...] = ()  # tokens so far; set only if penalties need them
    end_token_ids: tuple[int, ...] = ()  # set only while min_tokens forbids them


@dataclass(frozen=True, slots=True)
class PromptTargets:
    """The next token at each position of a prompt chunk, whose log-probabilities are requested,
    with the most likely ones.
    """

    token_ids: tuple[int, ...]
    num_top: int


@dataclass(frozen=True, slots=True)
class PooledChunk:
    """A chunk whose hidden states are pooled: the last of its prompt, or every chunk for mean
    pooling.
    """

    pooling: Pooling
    is_last: bool


ON_DEVICE = -1  # start of a decode: only the device knows it


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One row of one step: a prefill chunk, a decode, or several tokens to verify. A decode
    continues from the row's last sampled token; only the device knows its position.
    """

    row: int
    start: int  # position of a chunk's first token
    token_ids: tuple[int, ...]  # of a chunk; empty: a decode
    samples: bool  # False: the chunk ends before the known tokens do
    slot: int = 0  # where the state is written
    initial_slot: int = 0  # where the state is read, unless start is 0 (then it is zero)
    checkpoints: tuple[
        tuple[int, int], ...
    ] = ()  # (tokens of this row, slot): save the state after them
    prompt_targets: PromptTargets | None = None
    pooled: PooledChunk | None = None
    max_tokens: int = 1  # that the row samples in this step: 1 plus its drafts
    draft_ids: tuple[int, ...] = ()  # from the host; empty: the device drafts
    keep: KeptState = NOTHING_KEPT
    next_token: int = 0  # after a chunk that does not sample, for drafters

    @staticmethod
    @functools.lru_cache(maxsize=4096)  # equal in nearly every step; a new page may change slots
    def decode(row: int, slot: int = 0, initial_slot: int = 0, max_tokens: int = 1) -> RowPlan:
        return RowPlan(row, ON_DEVICE, (), True, slot, initial_slot, max_tokens=max_tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) or self.max_tokens

    @property
    def num_drafts(self) -> int:
        return self.max_tokens - 1

    @property
    def is_decode(self) -> bool:
        """A chunk of one prompt token is not a decode: it is computed like the rest of its
        prompt.
        """
        return not self.token_ids

    @property
    def needs_all_states(self) -> bool:
        """Whether it needs more than the hidden state of its last token."""
        is_mean = self.pooled is not None and self.pooled.pooling.kind == "mean"
        return is_mean or self.prompt_targets is not None


@dataclass(frozen=True, slots=True)
class PageUpdate:
    """Consecutive entries of one row's page table."""

    row: int
    start: int  # index of the first
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything the device must know for one step, as integers. Also sent to the other ranks."""

    step: int
    rows: tuple[RowPlan, ...]
    admissions: tuple[Admission, ...] = ()
    page_updates: tuple[PageUpdate, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def is_decode(self) -> bool:
        """Whether every row is a decode, which continues from its last sample."""
        return all(row.is_decode for row in self.rows)

    @property
    def has_drafts(self) -> bool:
        return any(row.max_tokens > 1 for row in self.rows)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of one generated token, and those of the most likely tokens at its
    position.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


# Packed into bytes: a chunk of a long prompt has hundreds of thousands, too many for Python
# objects.
class PromptScores(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities of consecutive prompt tokens (int32, float32) and of the most likely tokens
    at each position.
    """

    token_ids: bytes = b""  # [T]
    logprobs: bytes = b""  # [T]
    top_ids: bytes = b""  # [T, num_top]
    top_logprobs: bytes = b""  # [T, num_top]
    num_top: int = 0

    def __len__(self) -> int:
        return len(self.token_ids) // _SCORE_BYTES

    def part(self, start: int, end: int) -> PromptScores:
        tokens = slice(_SCORE_BYTES * start, _SCORE_BYTES * end)
        tops = slice(tokens.start * self.num_top, tokens.stop * self.num_top)
        return PromptScores(
            self.token_ids[tokens],
            self.logprobs[tokens],
            self.top_ids[tops],
            self.top_logprobs[tops],
            self.num_top,
        )

    def unpack(self) -> list[TokenLogprob]:
        token_ids, top_ids = (
            memoryview(part).cast("i").tolist() for part in (self.token_ids, self.top_ids)
        )
        logprobs, top = (
            memoryview(part).cast("f").tolist() for part in (self.logprobs, self.top_logprobs)
        )
        pairs, k = list(zip(top_ids, top)), self.num_top
        return [
            TokenLogprob(token_id, logprob, tuple(pairs[k * place : k * (place + 1)]))
            for place, (token_id, logprob) in enumerate(zip(token_ids, logprobs))
        ]


_SCORE_BYTES = 4  # per id and per log-probability


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The sampled tokens of one step, by row: one, or several where drafts were accepted."""

    step: int
    token_ids: Mapping[int, tuple[int, ...]]
    logprobs: Mapping[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    prompt_scores: Mapping[int, PromptScores] = field(default_factory=dict)
    vectors: Mapping[int, bytes] = field(default_factory=dict)  # float32, for pooled prompts


# Created and sent for every token: a dataclass would take eight times as long to create.
class TokenDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """News about one request: scores of its prompt, then its tokens and, with the last, the finish
    reason. An empty one says that the request takes part in the next step.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    prompt_scores: PromptScores | None = None  # of the next prompt tokens, after the first
    vector: bytes | None = None  # float32, for a pooled prompt


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What an attention layer stores for every token."""

    num_kv_heads: int
    head_dim: int

    def num_bytes(self, element_bytes: int) -> int:
        """Per token. Quantized KV adds a float32 scale per head."""
        scale_bytes = 4 if element_bytes == 1 else 0
        return 2 * self.num_kv_heads * (self.head_dim * element_bytes + scale_bytes)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What a DeltaNet layer stores for every sequence: S, and a ring buffer of its convolution's
    last inputs.
    """

    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_channels: int
    conv_width: int  # entries of the ring buffer; at least the number of taps
    num_late: int = (
        0  # tokens that S may lack; they are stored beside it (`ops/reference/backlog.py`)
    )

    @property
    def num_recurrent_elements(self) -> int:
        return self.num_value_heads * self.key_dim * self.value_dim

    @property
    def num_conv_elements(self) -> int:
        return self.conv_channels * self.conv_width

    def num_bytes(self, element_bytes: int, state_bytes: int) -> int:
        """The ring buffer has the model's dtype; S has its own."""
        rings = element_bytes * self.num_conv_elements
        return state_bytes * self.num_recurrent_elements + rings + self.backlog_bytes

    @property
    def backlog_bytes(self) -> int:
        """Per head a count and, for every token, a key, a correction and a decay in float32."""
        entry = self.key_dim + self.value_dim + 1
        return 4 * self.num_value_heads * (1 + self.num_late * entry) if self.num_late else 0


CacheSpec = KVSpec | StateSpec


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts about a running engine, for people and for the server."""

    model_name: str
    device: str
    dtype: str
    max_model_len: int
    vocab_size: int
    max_rows: int
    page_size: int
    num_pages: int
    num_slots: int
    cache_bytes: int
    weight_bytes: int
    hidden_size: int = 0
    has_head: bool = True  # False: embeddings only, no text
    num_labels: int = 0  # of its classifier; 0: none
    stored_as: tuple[
        str, ...
    ] = ()  # storage formats of its weights, such as Q4_K, largest share first
    bits_per_weight: float = 0.0  # in its files; 0: no files
    quantization: str = "none"  # at load, of weights that are not quantized in its files
    kv_dtype: str = ""
    num_experts: int = 0  # in all layers, if the device does not hold all of them
    expert_slots: int = 0  # on the device
    expert_slot_bytes: int = 0
    experts_per_token: int = 0  # if fewer than the model was trained with
    speculate: str = "off"  # the drafter and its maximum per step, such as mtp:3


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A conversation that the prefix cache keeps. Shared pages count in each of its users."""

    id: str
    num_tokens: int
    num_bytes: int
    num_hits: int  # requests that reused a part of their prompt
    age_s: float
    idle_s: float


@dataclass(frozen=True, slots=True)
class DraftCount:
    """Draft tokens of one drafter at one position of a step; 1 is the first."""

    drafter: str
    place: int
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class DraftStats:
    """Counters of speculative decoding. A decode is one sequence in one step."""

    num_decodes: int = 0
    num_tokens: int = 0
    saved_s: float = 0.0  # against plain steps with as many rows, as measured; negative: slower
    counts: tuple[DraftCount, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The current load of an engine. Free counts include what evicting idle prefixes would free."""

    num_waiting: int
    num_running: int
    num_free_pages: int
    num_pages: int
    num_free_slots: int
    num_slots: int
    num_preemptions: int
    prefix: Mapping[str, int]  # hits, misses by reason, tokens reused
    num_sessions: int = 0
    session_bytes: int = 0
    num_kv_tokens: int = 0  # capacity of all pages together
    num_checkpoints: int = 0  # state checkpoints, each in a slot
    memory_used: int = 0  # bytes in use on its device, also by others; on a CPU, by its process
    memory_total: int = 0  # bytes of its device
    drafts: DraftStats | None = None  # None: nothing drafts
    # Hits, misses and bytes moved by tier, if the device does not hold all experts.
    experts: Mapping[str, int] = field(default_factory=dict)
    # In that case: one row per layer, one byte per expert: how often the layer used it lately, in
    # 127ths, plus 128 if the device holds it.
    expert_heat: tuple[bytes, ...] = ()
