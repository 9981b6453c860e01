"""The nouns of the engine, from a client's request to one step of the device and back.

`Request` (what a client asked) becomes a `Sequence` (its life in the engine), which owns a *row*
(its place in every step), *pages* (KV of the attention layers) and a *slot* (state of the DeltaNet
layers). The scheduler turns sequences into a `StepPlan` of integers; the runner answers with a
`StepOutput`; the engine reports `TokenDelta`s. No tensors here: everything can be printed, compared
and sent over a wire.
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

# What a grammar may cost, wherever one is compiled, in llguidance's units: a millisecond is some
# 50,000 of initial fuel, 14,000 of a step's fuel or 20,000 items; a lexer state takes one or two
# kB.
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
    # Texts that a reply must not contain; text/prompt.py tokenises them.
    bad_words: tuple[str, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False  # keep the stop string that ended a reply at its end
    skip_special_tokens: bool = True  # in a reply's text
    # Keep so many of the prompt's last tokens; -1: as many as fit.
    truncate_prompt_tokens: int | None = None
    logprobs: int | None = None  # None: none; k: of the sampled token and the k likeliest ones
    # The same for the prompt, which is then computed without the prefix cache.
    prompt_logprobs: int | None = None
    n: int = 1
    grammar: str | None = None  # that the reply must follow, as penstock.text.grammar writes it
    # The grammar starts after one of these token ids, the end of thinking.
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
    """Which vector to compute for a prompt, instead of a reply."""

    kind: PoolingKind = "last"  # of the final hidden states: the last token's, or their mean
    normalize: bool = True  # to length 1
    dimensions: int | None = None  # keep only the first so many; None: all
    # Instead of the hidden state, a head's output for it: the classifier's logits, or these
    # tokens'.
    is_classified: bool = False
    logit_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and how to continue it; `n > 1` was split into `n` requests before."""

    id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    pooling: Pooling | None = None  # if set, there is no reply: its last delta has a vector
    end_token_ids: tuple[int, ...] = ()  # any of these ends the reply with "stop"
    banned: tuple[tuple[int, ...], ...] = ()  # token sequences that may not occur in the reply
    # Prompt positions where messages start: good places for state checkpoints.
    boundaries: tuple[int, ...] = ()
    segments: tuple[Segment, ...] = ()  # parts of the prompt that are more than ids, by position
    priority: int = 0  # lower runs earlier
    session_id: str | None = None  # the conversation whose prefix the cache keeps for the next turn
    tenant: str = ""  # the owner: tenants share nothing in the cache
    cache_salt: str | None = None  # requests with different salts share nothing in the cache either
    # So many of the last token_ids are the reply so far, generated before this request.
    num_resumed_tokens: int = 0
    # Tokens after the prompt's first whose scores another engine has sent.
    num_scored_tokens: int = 0
    page_digests: PageDigests | None = None  # of its first pages; None: the engine computes them
    age_s: float = 0.0  # since its client sent it: it is due that much earlier

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids) - self.num_resumed_tokens

    @property
    def cache_scope(self) -> str:
        return scope_of(self.tenant, self.cache_salt)


class KeptState(NamedTuple):
    """A decode that replays drafts passes a place whose state is to be kept. It may also start
    behind that place or not reach it: where drafts ended, only the device knows."""

    num_tokens: int
    slot: int


NOTHING_KEPT = KeptState(0, 0)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """A request's life in the engine. Only the scheduler and the cache write to it.

    tokens:  [prompt .................... | generated ........ ]  len(tokens)
             [computed: in the cache ............ | still to run ]
    A sampled token that the host has not seen yet is not in `tokens`. A step in flight brings one
    token or, with drafts, several: until it is committed, the host knows only how many at most.
    """

    request: Request
    arrival: int
    due_s: float  # an earlier due time runs earlier
    tokens: list[int]
    num_prompt_tokens: int
    # Tokens whose keys, values and state are in the cache once planned steps ran, at most.
    num_computed: int = 0
    steps_in_flight: int = 0  # that sample it: each brings at least one token
    max_in_flight: int = 0  # tokens that these steps bring at most
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
    # Num_tokens -> chance that a state there is used.
    targets: dict[int, float] = field(default_factory=dict)
    checkpoints: dict[int, int] = field(
        default_factory=dict
    )  # num_tokens -> slot, not yet registered
    reply_checkpoint: int | None = None  # num_tokens of the last one within the reply
    # With drafts, the state to keep next, until a step is known to have passed its place.
    keep: KeptState = NOTHING_KEPT
    num_in_slot: int = 0  # tokens whose state the slot holds when the next step to commit starts
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
        """Tokens that exist at most, seen by the host or not."""
        return len(self.tokens) + self.max_in_flight

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def is_scored(self) -> bool:
        """Whether scores of its prompt are requested and not sent yet."""
        is_asked = self.request.sampling.prompt_logprobs is not None
        return is_asked and self.num_scored < self.num_prompt_tokens - 1

    @property
    def needs_every_token(self) -> bool:
        """Whether it needs hidden states of its prompt, which no cache has: its prefix is computed
        again."""
        pooling = self.request.pooling
        return self.is_scored or (pooling is not None and pooling.kind == "mean")


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The longest prefix for which both pages and, for hybrid models, a state checkpoint exist."""

    num_tokens: int = 0
    pages: tuple[int, ...] = ()
    checkpoint_slot: int | None = None
    num_known_tokens: int = 0  # whose pages exist; beyond num_tokens the state is missing


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence takes a row: what the device must know about it beyond one step."""

    row: int
    sampling: SamplingParams
    seed: int  # never None, so that every sample has a reproducible key
    num_prompt_tokens: int
    history: tuple[int, ...] = ()  # tokens so far; set only if penalties need them
    end_token_ids: tuple[int, ...] = ()  # set only while min_tokens forbids them


@dataclass(frozen=True, slots=True)
class PromptTargets:
    """The next tokens of a chunk of a prompt, whose log-probabilities are requested, with the
    likeliest."""

    token_ids: tuple[int, ...]
    num_top: int


@dataclass(frozen=True, slots=True)
class PooledChunk:
    """A chunk whose hidden states are pooled: the last of its prompt, and for a mean all others
    too."""

    pooling: Pooling
    is_last: bool


ON_DEVICE = -1  # where a decode starts


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One row of one step: a prefill chunk, a decode, or several tokens to verify, by its
    numbers. A decode continues from the row's last sample, wherever that is: the device knows.
    """

    row: int
    start: int  # position of a chunk's first token
    token_ids: tuple[int, ...]  # of a chunk; empty: a decode
    samples: bool  # False: the chunk ends before the known tokens do
    slot: int = 0  # where the state goes
    initial_slot: int = 0  # where the state comes from, unless start is 0 (then it is zero)
    checkpoints: tuple[
        tuple[int, int], ...
    ] = ()  # (tokens of this row, slot): save the state after them
    prompt_targets: PromptTargets | None = None
    pooled: PooledChunk | None = None
    max_tokens: int = 1  # that the row samples in this step: 1, and its drafts
    draft_ids: tuple[int, ...] = ()  # from the host; empty: the device drafts
    keep: KeptState = NOTHING_KEPT
    next_token: int = 0  # behind a chunk that does not sample, for drafters

    @staticmethod
    @functools.lru_cache(maxsize=4096)  # the same in nearly every step: a page may change its slots
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
        """A chunk of one prompt token is no decode: it is computed like the rest of its prompt."""
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
    """Everything the device must know for one step, as integers. Sent to other ranks as it is."""

    step: int
    rows: tuple[RowPlan, ...]
    admissions: tuple[Admission, ...] = ()
    page_updates: tuple[PageUpdate, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def is_decode(self) -> bool:
        """Whether every row continues from its last sample."""
        return all(row.is_decode for row in self.rows)

    @property
    def has_drafts(self) -> bool:
        return any(row.max_tokens > 1 for row in self.rows)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of one generated token, and those of the likeliest tokens at its
    place.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


# Packed, because a prefill chunk of a long prompt has hundreds of thousands: no Python object each.
class PromptScores(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities of consecutive prompt tokens (int32, float32) and of the likeliest at each
    place."""

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


_SCORE_BYTES = 4  # of an id, and of a log-probability


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step sampled, by row: one token, or several where drafts were accepted."""

    step: int
    token_ids: Mapping[int, tuple[int, ...]]
    logprobs: Mapping[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    prompt_scores: Mapping[int, PromptScores] = field(default_factory=dict)
    vectors: Mapping[int, bytes] = field(default_factory=dict)  # float32, of pooled prompts


# Created and sent for every token: a dataclass would take eight times as long to create.
class TokenDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A change of one request: scores of its prompt, then its tokens and, with the last, why it
    ended. An empty one says that the request takes part in the next step."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    prompt_scores: PromptScores | None = None  # of the next tokens of the prompt, after its first
    vector: bytes | None = None  # float32, of a pooled prompt


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What an attention layer stores for every token."""

    num_kv_heads: int
    head_dim: int

    def num_bytes(self, element_bytes: int) -> int:
        """For one token. A head's codes of one byte have a float32 scale beside them."""
        scale_bytes = 4 if element_bytes == 1 else 0
        return 2 * self.num_kv_heads * (self.head_dim * element_bytes + scale_bytes)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What a DeltaNet layer stores for every sequence: S, and a ring of the last inputs of its
    convolution."""

    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_channels: int
    conv_width: int  # entries of the ring; no fewer than the convolution has taps

    @property
    def num_recurrent_elements(self) -> int:
        return self.num_value_heads * self.key_dim * self.value_dim

    @property
    def num_conv_elements(self) -> int:
        return self.conv_channels * self.conv_width

    def num_bytes(self, element_bytes: int, state_bytes: int) -> int:
        """The ring has the model's dtype, S one of its own."""
        return state_bytes * self.num_recurrent_elements + element_bytes * self.num_conv_elements


CacheSpec = KVSpec | StateSpec


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The facts about a running engine, for people and for the server."""

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
    has_head: bool = True  # False: it gives vectors, no text
    num_labels: int = 0  # of its classifier; 0: it has none
    stored_as: tuple[
        str, ...
    ] = ()  # how its files store weights, such as Q4_K: what holds the most first
    bits_per_weight: float = 0.0  # in its files; 0: it has none
    kv_dtype: str = ""
    num_experts: int = 0  # of all layers, where the device does not hold all of them
    expert_slots: int = 0  # on the device
    expert_slot_bytes: int = 0
    experts_per_token: int = 0  # if fewer than the model was trained with
    speculate: str = "off"  # who drafts, and how many tokens of a step at most, such as mtp:3


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A conversation that the prefix cache keeps. Pages it shares with others count in each of
    them.
    """

    id: str
    num_tokens: int
    num_bytes: int
    num_hits: int  # requests that reused a part of their prompt
    age_s: float
    idle_s: float


@dataclass(frozen=True, slots=True)
class DraftCount:
    """Drafts of one drafter at one place of a step, 1 being the first."""

    drafter: str
    place: int
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class DraftStats:
    """What drafts brought. Of a decode: one sequence in one step."""

    num_decodes: int = 0
    num_tokens: int = 0
    saved_s: float = 0.0  # against plain steps of as many rows, as measured; less than 0: lost
    counts: tuple[DraftCount, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine is doing now. The free counts include what evicting idle prefixes would
    free.
    """

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
    num_checkpoints: int = 0  # states that prompts may continue from, each in a slot
    memory_used: int = 0  # bytes in use on its device, by others too; on a CPU, by its process
    memory_total: int = 0  # bytes of its device
    drafts: DraftStats | None = None  # None: nothing drafts
    # Hits, misses and what tiers moved, where the device does not hold all experts.
    experts: Mapping[str, int] = field(default_factory=dict)
    # There, too: a row for each layer, in it a byte for each expert. Its share of the layer's last
    # turns in 127ths, and 128 more if the device holds it.
    expert_heat: tuple[bytes, ...] = ()
