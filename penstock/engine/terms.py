"""What a request's own numbers say about its whole life, settled when it comes: whether it can ever be
served, where it must end, and which states of its prompt are worth keeping. Never touches a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.cache import Cache
from penstock.errors import ContextLengthError, RequestError
from penstock.types import Request


@dataclass(frozen=True, slots=True)
class Terms:
    max_num_tokens: int  # of prompt and reply together
    targets: tuple[int, ...]  # where the state of its prompt is worth saving

    @classmethod
    def of(cls, request: Request, cache: Cache, max_model_len: int) -> Terms:
        """Raises why the request can never be served."""
        _require_room(request, cache, max_model_len)
        limits = [max_model_len]
        if request.sampling.max_tokens is not None:
            limits.append(request.num_prompt_tokens + request.sampling.max_tokens)
        if cache.max_sequence_tokens is not None:
            limits.append(cache.max_sequence_tokens)
        targets = checkpoint_targets(request, cache.page_size) if cache.keeps_checkpoints else ()
        return cls(min(limits), targets)


def checkpoint_targets(request: Request, page_size: int) -> tuple[int, ...]:
    """The page boundaries of a prompt where another prompt is likely to part from it.

    They are its end, the end of the system prompt (where the second message starts) and the starts of the
    last two messages, all rounded down.
    """
    last = len(request.token_ids) - 1
    starts = [start for start in request.boundaries if 0 < start <= last]
    wanted = {last, *starts[:1], *starts[-2:]}
    return tuple(sorted({n // page_size * page_size for n in wanted} - {0}))


def _require_room(request: Request, cache: Cache, max_model_len: int) -> None:
    num_prompt = len(request.token_ids)
    if num_prompt == 0:
        raise RequestError("The prompt has no tokens", "There is nothing to continue from.", param="prompt")
    if num_prompt >= max_model_len:
        raise ContextLengthError(
            f"The prompt has {num_prompt} tokens",
            f"The context holds {max_model_len}, one of them at least for the reply.",
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
