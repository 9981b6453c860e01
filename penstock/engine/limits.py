"""Per-request limits, computed at submit: whether the request can ever be served, how many tokens
it may have, and which states of its prompt are worth a checkpoint. Never touches a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.cache import Cache
from penstock.cache.checkpoints import GUESS, LADDER
from penstock.errors import ContextLengthError, RequestError
from penstock.types import Request

EDGE_TOKENS = 512  # many prompts, and the block traces of benchmarks, diverge at multiples of this
RUNG_TOKENS = 8192  # the most that a prompt diverging from a long one anywhere recomputes


@dataclass(frozen=True, slots=True)
class RequestLimits:
    max_num_tokens: int  # prompt and reply together
    # Where to checkpoint the prompt's state, and the probability that each is used.
    targets: dict[int, float]

    @classmethod
    def of(cls, request: Request, cache: Cache, max_model_len: int) -> RequestLimits:
        """Raises an error if the request can never be served."""
        _require_room(request, cache, max_model_len)
        limits = [max_model_len]
        if request.sampling.max_tokens is not None:
            limits.append(request.num_prompt_tokens + request.sampling.max_tokens)
        if cache.max_sequence_tokens is not None:
            limits.append(cache.max_sequence_tokens)
        targets = checkpoint_targets(request, cache.page_size) if cache.keeps_checkpoints else {}
        return cls(min(limits), targets)


def closing_place(request: Request, limits: RequestLimits) -> int | None:
    """The number of tokens with which the request's thinking must end. None: it has no limit, or
    has ended, or there is no room for an answer, or sampling must see every token of the reply.
    """
    limit, sampling = request.thought_limit, request.sampling
    sees_all = sampling.grammar is not None or bool(request.banned) or sampling.has_penalties
    if limit is None or sees_all:
        return None
    said = request.token_ids[request.num_prompt_tokens :]
    if limit.end_id in said or len(said) >= limit.num_tokens:
        return None
    place = request.num_prompt_tokens + limit.num_tokens
    return place if place + len(limit.closing_ids) < limits.max_num_tokens else None


def checkpoint_targets(request: Request, page_size: int) -> dict[int, float]:
    """The page boundaries of a prompt where another prompt may diverge from it, with probabilities.

    These are its end, the end of the system prompt (where the second message starts), the starts of
    the last two messages, the last multiple of 512, all rounded down, and for a long prompt a
    sparse ladder. The cache learns later where prompts really diverge.
    """
    last = len(request.token_ids) - 1
    starts = [start for start in request.boundaries if 0 < start <= last]
    edge = last // EDGE_TOKENS * EDGE_TOKENS
    rungs = dict.fromkeys(range(RUNG_TOKENS, last + 1, RUNG_TOKENS), LADDER)
    likely = dict.fromkeys([*starts[:1], *starts[-2:], edge, last], GUESS)
    chances = {n // page_size * page_size: chance for n, chance in (rungs | likely).items()}
    return {n: chances[n] for n in sorted(chances) if n}


def _require_room(request: Request, cache: Cache, max_model_len: int) -> None:
    num_prompt = len(request.token_ids)
    if num_prompt == 0:
        raise RequestError(
            "The prompt has no tokens", "There is nothing to continue from.", param="prompt"
        )
    if request.pooling is not None:
        _require_room_to_pool(num_prompt, cache, max_model_len)
        return
    if num_prompt >= max_model_len:
        raise ContextLengthError(
            f"The prompt has {num_prompt} tokens",
            f"The context is {max_model_len} tokens, and the reply needs at least one.",
            "Shorten the prompt, or raise --max-model-len.",
            param="prompt",
        )
    capacity = cache.max_sequence_tokens
    max_tokens = request.sampling.max_tokens
    num_wanted = num_prompt + 1 if max_tokens is None else request.num_prompt_tokens + max_tokens
    num_needed = min(num_wanted, max_model_len)
    if capacity is not None and num_needed > capacity:
        raise ContextLengthError(
            f"The request needs room for {num_needed} tokens ({num_prompt} of prompt)",
            f"The cache holds {capacity} in {cache.num_pages - 1} pages of {cache.page_size}.",
            "Lower max_tokens, shorten the prompt, or give the cache more memory with --memory-gb.",
            param="max_tokens",
        )


def _require_room_to_pool(num_tokens: int, cache: Cache, max_model_len: int) -> None:
    """A pooled prompt has no reply, so it may fill the context."""
    capacity = max_model_len
    if cache.max_sequence_tokens is not None:
        capacity = min(capacity, cache.max_sequence_tokens - 1)
    if num_tokens > capacity:
        raise ContextLengthError(
            f"The input has {num_tokens} tokens",
            f"The context is {max_model_len} tokens, and the cache has room for {capacity}.",
            "Shorten the input, raise --max-model-len, or give the cache more memory with "
            "--memory-gb.",
            param="input",
        )
