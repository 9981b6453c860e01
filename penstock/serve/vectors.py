"""Turns texts into vectors and scores, with the same queue, preparation and engines as replies.

A request may have thousands of inputs. It gets at most a quarter of the queue, so that there is
room for others; each finished input gives its place to the next. Knows no HTTP and no schema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from penstock.digests import scope_of
from penstock.errors import ContextLengthError, EngineDeadError, PenstockError
from penstock.serve.admission import require_priority
from penstock.serve.fleet import Fleet
from penstock.serve.intake import Place
from penstock.serve.metrics import Metrics
from penstock.serve.text_stream import TextStream
from penstock.text.pooling import PairScores, VectorText
from penstock.text.prompt import build_pooling_request
from penstock.text.tokenizer import Tokenizer
from penstock.text.turns import Preparation
from penstock.types import EngineInfo, Pooling, Request, TokenDelta

QUEUE_SHARE = 4  # one request takes at most a quarter of the queue

TakeVector = Callable[[int, bytes], None]  # the index of an input, and float32 values
TakeScore = Callable[[int, float], None]  # the index of a pair
RefuseLong = Callable[[str, bool, str, int], None]  # a text, special tokens, scope, max_model_len


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorRequest:
    """The options of requests for vectors."""

    max_tokens: int | None = None  # truncates a prompt; -1: to the context
    timeout_s: float | None = None
    priority: int = 0
    tenant: str = ""
    cache_salt: str | None = None

    @property
    def cache_scope(self) -> str:
        return scope_of(self.tenant, self.cache_salt)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest(VectorRequest):
    inputs: Sequence[str | list[int]]
    prompt_name: str | None = None  # the checkpoint's name of a text that is put before inputs
    normalize: bool | None = None  # None: the checkpoint's default
    dimensions: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest(VectorRequest):
    pairs: Sequence[tuple[str, str]]  # queries and documents
    instruction: str | None = None


class VectorEngine:
    """An engine that computes vectors of texts."""

    def __init__(
        self,
        client: Fleet,
        tokenizer: Tokenizer,
        text: VectorText,
        metrics: Metrics,
        preparation: Preparation,
        refuse_long: RefuseLong,
        min_priority: int = 0,
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._text = text
        self._metrics = metrics
        self._preparation = preparation
        self._refuse_long = refuse_long
        self._min_priority = min_priority

    def tasks(self, info: EngineInfo) -> list[str]:
        """What the model can do, by vLLM's names."""
        return ["generate", "embed", "score"] if info.has_head else ["embed", "score"]

    async def stream_embeddings(
        self, request_id: str, asked: EmbeddingRequest, take: TakeVector, place: Place | None = None
    ) -> TextStream:
        """Calls `take` with each vector as it comes."""
        info = self._require_ready(asked)
        num_bytes = self._resize(place, len(asked.inputs))
        requests = await self._preparation.run(
            num_bytes, self._prepare_inputs, request_id, asked, info
        )
        return self._submit(requests, take, place)

    async def stream_scores(
        self, request_id: str, asked: ScoreRequest, take: TakeScore, place: Place | None = None
    ) -> TextStream:
        info = self._require_ready(asked)
        num_bytes = self._resize(place, len(asked.pairs))
        requests, scores = await self._preparation.run(
            num_bytes, self._prepare_pairs, request_id, asked, info
        )

        def take_vector(index: int, vector: bytes) -> None:
            for number, score in scores.take(index, vector):
                take(number, score)

        return self._submit(requests, take_vector, place)

    def _require_ready(self, asked: VectorRequest) -> EngineInfo:
        require_priority(asked.priority, self._min_priority)
        return self._client.require_ready()

    @property
    def _max_running(self) -> int:
        return max(1, self._client.intake.replies.max_places // QUEUE_SHARE)

    def _resize(self, place: Place | None, num_prompts: int) -> int:
        if place is None:
            return 0
        place.resize(min(num_prompts, self._max_running))
        return place.num_bytes

    def _prepare_inputs(
        self, request_id: str, asked: EmbeddingRequest, info: EngineInfo
    ) -> list[Request]:
        rules = self._text.rules.pooling
        normalize = rules.normalize if asked.normalize is None else asked.normalize
        pooling = Pooling(kind=rules.kind, normalize=normalize, dimensions=asked.dimensions)
        max_tokens = _most_tokens(asked, info)
        prompts = []
        for text in asked.inputs:
            if isinstance(text, str):
                if max_tokens is None:
                    self._check_length(text, "input", asked, info)
                prompts.append(
                    self._text.encode(text, asked.prompt_name, max_tokens, asked.cache_scope)
                )
            else:
                prompts.append(text if max_tokens is None else text[:max_tokens])
        return self._build(request_id, prompts, pooling, asked, info)

    def _prepare_pairs(
        self, request_id: str, asked: ScoreRequest, info: EngineInfo
    ) -> tuple[list[Request], PairScores]:
        pooling, max_tokens = self._text.score_pooling(info), _most_tokens(asked, info)
        if max_tokens is None:
            for text in {text for pair in asked.pairs for text in pair}:
                self._check_length(text, "documents", asked, info)
        prompts, scores = self._text.encode_pairs(
            asked.pairs, info, asked.instruction, max_tokens, asked.cache_scope
        )
        return self._build(request_id, prompts, pooling, asked, info), scores

    def _check_length(self, text: str, param: str, asked: VectorRequest, info: EngineInfo) -> None:
        try:
            self._refuse_long(text, True, asked.cache_scope, info.max_model_len + 1)
        except ContextLengthError as error:
            error.param = param
            raise

    def _build(
        self,
        request_id: str,
        prompts: Sequence[list[int]],
        pooling: Pooling,
        asked: VectorRequest,
        info: EngineInfo,
    ) -> list[Request]:
        return [
            build_pooling_request(
                f"{request_id}-{index}",
                token_ids,
                pooling,
                self._tokenizer,
                info.max_model_len,
                asked.priority,
                asked.tenant,
                asked.cache_salt,
                info.page_size,
            )
            for index, token_ids in enumerate(prompts)
        ]

    def _submit(self, requests: list[Request], take: TakeVector, place: Place | None) -> TextStream:
        stream = TextStream(self._client, lambda _: None)
        replies: list[VectorReply] = []
        waiting = islice(replies, self._max_running, None)
        for index, request in enumerate(requests):
            replies.append(VectorReply(stream, request, index, take, self._metrics, waiting))
        stream.submit([[reply] for reply in replies], place, self._max_running)
        return stream


class VectorReply:
    """Receives one vector, and lets the next input of the request start."""

    num_tokens = 0
    num_reasoning_tokens = 0

    def __init__(
        self,
        stream: TextStream,
        request: Request,
        index: int,
        take: TakeVector,
        metrics: Metrics,
        waiting: Iterator[VectorReply],  # other inputs of the same request
    ) -> None:
        self.request = request
        self.num_cached_tokens = 0
        self._stream = stream
        self._index = index
        self._take = take
        self._metrics = metrics
        self._waiting = waiting

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.token_ids)

    def take(self, delta: TokenDelta) -> None:
        if delta.vector is None:
            if delta.finish == "abort":
                raise EngineDeadError("The engine aborted the request", delta.error or "")
            raise PenstockError("The engine could not compute a vector", delta.error or "")
        self.num_cached_tokens = delta.num_cached_tokens
        self._metrics.num_prompt_tokens += self.num_prompt_tokens
        self._take(self._index, delta.vector)
        following = next(self._waiting, None)
        if following is not None:
            self._stream.go_on(self.request.id, following.request, following)
        self._stream.end(self.request.id)

    def fail(self, error: Exception) -> None:
        self._stream.fail(error)

    def abandon(self) -> None:
        """Vectors are not timed."""


def _most_tokens(asked: VectorRequest, info: EngineInfo) -> int | None:
    if asked.max_tokens is None:
        return None
    return info.max_model_len if asked.max_tokens < 0 else min(asked.max_tokens, info.max_model_len)
