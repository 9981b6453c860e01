"""Builds an engine's requests from prompt ids and sampling parameters.

Refuses invalid requests before they cost anything: checks lengths, ids and limits. Knows nothing
of HTTP or of the engine.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from penstock.digests import PageDigests, Segment, scope_of
from penstock.errors import ContextLengthError, RequestError
from penstock.text.tokenizer import Tokenizer
from penstock.types import Pooling, Request, SamplingParams

# Log-probabilities in one answer, alternatives included: about 30 MB of a completion, twice as much
# of a chat. Enough for a prompt of 262,144 tokens with three alternatives, or eight replies of
# 4,096 tokens with twenty.
MAX_SCORES = 2**20
SHORTEN = (
    "Please reduce the length of the messages, or serve with a larger --max-model-len "
    "if the model supports it."
)


def build_requests(
    id: str,
    token_ids: Sequence[int],
    sampling: SamplingParams,
    tokenizer: Tokenizer,
    max_model_len: int,
    priority: int = 0,
    session_id: str | None = None,
    tenant: str = "",
    cache_salt: str | None = None,
    # For an engine in another process, whose stepping thread should not hash prompts.
    page_size: int | None = None,
    segments: tuple[Segment, ...] = (),
) -> list[Request]:
    """`sampling.n` requests for one prompt, each with its own id and, if a seed is given, its own
    seed."""
    prompt = _checked(token_ids, "prompt", tokenizer)
    check_ids("logit_bias", sampling.logit_bias, tokenizer.vocab_size)
    check_ids("stop_token_ids", sampling.stop_token_ids, tokenizer.vocab_size)
    max_tokens = _resolve_max_tokens(len(prompt), sampling, max_model_len)
    eos = () if sampling.ignore_eos else tokenizer.eos_token_ids
    end_token_ids = tuple(dict.fromkeys((*sampling.stop_token_ids, *eos)))
    banned = _banned_ids(sampling.bad_words, tokenizer)
    boundaries = _places_of(tokenizer.turn_start_ids, prompt)
    digests = _digests(prompt, page_size, scope_of(tenant, cache_salt), segments)
    return [
        Request(
            id=id if sampling.n == 1 else f"{id}-{i}",
            token_ids=prompt,
            sampling=replace(
                sampling, n=1, max_tokens=max_tokens, seed=_offset_seed(sampling.seed, i)
            ),
            end_token_ids=end_token_ids,
            banned=banned,
            boundaries=boundaries,
            segments=segments,
            priority=priority,
            session_id=session_id,
            tenant=tenant,
            cache_salt=cache_salt,
            page_digests=digests,
        )
        for i in range(sampling.n)
    ]


def truncated(token_ids: list[int], sampling: SamplingParams, max_model_len: int) -> list[int]:
    """The last tokens of a prompt, as many as the request allows; all of them by default."""
    num_kept = sampling.truncate_prompt_tokens
    if num_kept == -1:
        num_kept = max(1, max_model_len - (sampling.max_tokens or 1))
    return token_ids if num_kept is None else token_ids[-num_kept:]


def build_pooling_request(
    id: str,
    token_ids: Sequence[int],
    pooling: Pooling,
    tokenizer: Tokenizer,
    max_model_len: int,
    priority: int = 0,
    tenant: str = "",
    cache_salt: str | None = None,
    page_size: int | None = None,
) -> Request:
    """A request for the vector of one prompt, which may fill the context: there is no reply."""
    prompt = _checked(token_ids, "input", tokenizer)
    if len(prompt) > max_model_len:
        raise ContextLengthError(
            f"the input is too long: {len(prompt)} tokens > {max_model_len} maximum",
            f"This model's maximum context length is {max_model_len} tokens.",
            "Shorten it, cut it with truncate_prompt_tokens, or serve with a larger "
            "--max-model-len.",
            param="input",
        )
    return Request(
        id=id,
        token_ids=prompt,
        pooling=pooling,
        priority=priority,
        tenant=tenant,
        cache_salt=cache_salt,
        page_digests=_digests(prompt, page_size, scope_of(tenant, cache_salt)),
    )


def _checked(token_ids: Sequence[int], name: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    if not token_ids:
        raise RequestError(
            f"the {name} is empty",
            "It has 0 tokens; a model needs at least 1.",
            "Send some text.",
            param=name,
        )
    check_ids(name, token_ids, tokenizer.vocab_size)
    return tuple(token_ids)


def _digests(
    prompt: tuple[int, ...],
    page_size: int | None,
    scope: str,
    segments: tuple[Segment, ...] = (),
) -> PageDigests | None:
    return None if page_size is None else PageDigests.of(prompt, page_size, scope, segments)


def limit_scores(
    prompts: Sequence[Sequence[int]], sampling: SamplingParams, max_model_len: int
) -> SamplingParams:
    """Refuses a request whose answer could have too many log-probabilities: it is stored and sent
    as a whole.

    A reply without a limit gets one if the context would allow too many.
    """
    if sampling.logprobs is None and sampling.prompt_logprobs is None:
        return sampling
    num_prompt_scores = num_reply_scores = 0
    if sampling.prompt_logprobs is not None:
        num_prompt_scores = sampling.n * sum(map(len, prompts)) * (sampling.prompt_logprobs + 1)
    if sampling.logprobs is not None:
        scores_a_token = sampling.n * len(prompts) * (sampling.logprobs + 1)
        max_tokens = (MAX_SCORES - num_prompt_scores) // scores_a_token
        if sampling.max_tokens is None and max_tokens > 0:
            room = max_model_len - min(map(len, prompts))
            return sampling if room <= max_tokens else replace(sampling, max_tokens=max_tokens)
        num_reply_scores = scores_a_token * (sampling.max_tokens or 1)
    if num_prompt_scores + num_reply_scores > MAX_SCORES:
        of_prompt = f", {num_prompt_scores:,} of them for the prompt" if num_prompt_scores else ""
        raise RequestError(
            f"the answer could have {num_prompt_scores + num_reply_scores:,} "
            f"log-probabilities{of_prompt}",
            f"The limit is {MAX_SCORES:,} in one answer. There are {len(prompts)} prompts, n is "
            f"{sampling.n}, max_tokens {sampling.max_tokens or 1}; a reply token has "
            f"{sampling.logprobs or 0} alternatives, a prompt token "
            f"{sampling.prompt_logprobs or 0}.",
            "Lower the alternatives (logprobs, top_logprobs in a chat, prompt_logprobs), n or "
            "max_tokens, or split the call.",
            param="logprobs" if sampling.logprobs is not None else "prompt_logprobs",
        )
    return sampling


def check_ids(name: str, ids: Collection[int], vocab_size: int) -> None:
    """Refuses ids outside the vocabulary; `name` is their field."""
    for token_id in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{name} has token id {token_id}",
                f"The vocabulary has {vocab_size} ids, 0 to {vocab_size - 1}.",
                "Use ids of this model's tokenizer.",
                param=name,
            )


def _banned_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word at the start of a text and after a space, where they differ."""
    spellings = dict.fromkeys(
        spelling for word in words for spelling in (word, f" {word.lstrip(' ')}")
    )
    ids = dict.fromkeys(tuple(tokenizer.encode(spelling)) for spelling in spellings)
    return tuple(word for word in ids if word)


def _places_of(token_ids: Collection[int], prompt: tuple[int, ...]) -> tuple[int, ...]:
    """The positions of these tokens, except 0. Searches, because prompts are long."""
    places = []
    for token_id in token_ids:
        place = 0
        for _ in range(prompt[1:].count(token_id)):
            place = prompt.index(token_id, place + 1)
            places.append(place)
    return tuple(sorted(places))


def prompt_too_long(num_tokens: str, max_model_len: int, details: str = "") -> ContextLengthError:
    """Clients look for these words to shorten a conversation: the first line is as in Anthropic's
    API, the second as in OpenAI's. `num_tokens`: a number, perhaps with "at least" before it."""
    return ContextLengthError(
        f"prompt is too long: {num_tokens} tokens > {max_model_len - 1} maximum",
        f"{_holds(max_model_len)} However, your messages resulted in {num_tokens} tokens, and the "
        f"reply needs at least 1.{details}",
        SHORTEN,
        param="prompt",
    )


def _holds(max_model_len: int) -> str:
    return f"This model's maximum context length is {max_model_len} tokens."


def _resolve_max_tokens(
    num_prompt_tokens: int, sampling: SamplingParams, max_model_len: int
) -> int:
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise prompt_too_long(f"{num_prompt_tokens}", max_model_len)
    max_tokens = room if sampling.max_tokens is None else sampling.max_tokens
    if max_tokens > room:
        raise ContextLengthError(
            f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}",
            f"{_holds(max_model_len)} However, you requested {num_prompt_tokens + max_tokens} "
            f"tokens ({num_prompt_tokens} in the messages, {max_tokens} in the completion).",
            f"Ask for at most {room} tokens, or: {SHORTEN[0].lower()}{SHORTEN[1:]}",
            param="max_tokens",
        )
    if sampling.min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens is {sampling.min_tokens}",
            f"The reply can have at most {max_tokens} tokens.",
            f"Ask for at most {max_tokens}.",
            param="min_tokens",
        )
    return max_tokens


def _offset_seed(seed: int | None, offset: int) -> int | None:
    """seed + offset, staying inside 64 signed bits."""
    return None if seed is None else (seed + offset + 2**63) % 2**64 - 2**63
