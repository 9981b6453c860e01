"""Vectors and scores over HTTP: OpenAI's /v1/embeddings, Jina's and Cohere's /v1/rerank, vLLM's
/v1/score.

Answers are never streamed. A vector is encoded as it comes: encoding thousands of them at the end
of a request would block the server.
"""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.routing import Route

from penstock.errors import RequestError
from penstock.serve.admission import priority_in, tenant_of
from penstock.serve.answer import Answer, read_body
from penstock.serve.body import decode_body, wrong_choice
from penstock.serve.fields import EMBEDDINGS, RERANK, SCORE
from penstock.serve.intake import place_of
from penstock.serve.openai.requests import split_prompts
from penstock.serve.requests import (
    MAX_ID_VALUES,
    CacheSalt,
    Dimensions,
    Priority,
    Timeout,
    TokenId,
)
from penstock.serve.state import ServerState
from penstock.serve.text_stream import TextStream, Usage
from penstock.serve.vectors import EmbeddingRequest, ScoreRequest

MAX_INPUTS = 2048  # per request, as at OpenAI
ENCODING_FORMATS = ("float", "base64")
MAX_INSTRUCTION_CHARS = 16_384

Texts = Annotated[list[str], Meta(min_length=1)]


class VectorBody(msgspec.Struct, kw_only=True):
    """The fields that all three endpoints share."""

    model: str | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    timeout: Timeout | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None


class EmbeddingBody(VectorBody, kw_only=True):
    input: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    encoding_format: (
        Annotated[str, Meta(extra_json_schema={"enum": list(ENCODING_FORMATS)})] | None
    ) = None
    dimensions: Dimensions | None = None
    normalize: bool | None = None
    prompt_name: str | None = None


class Document(msgspec.Struct):
    text: str


class RerankBody(VectorBody, kw_only=True):
    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1)]
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool | None = None
    instruction: Annotated[str, Meta(max_length=MAX_INSTRUCTION_CHARS)] | None = None


class ScoreBody(VectorBody, kw_only=True):
    text_1: str | Texts
    text_2: str | Texts
    instruction: Annotated[str, Meta(max_length=MAX_INSTRUCTION_CHARS)] | None = None


def _check_number(what: str, num_texts: int, param: str) -> None:
    if num_texts > MAX_INPUTS:
        raise RequestError(
            f"{num_texts} {what} are too many for one request",
            f"The limit is {MAX_INPUTS}.",
            "Split the request.",
            param=param,
        )


def _common(fields: VectorBody, request: Request) -> dict[str, Any]:
    if fields.truncate_prompt_tokens == 0:
        raise RequestError(
            "truncate_prompt_tokens is 0",
            "No token of the input would be left.",
            "Use 1 or more, or -1 for as many as fit the context.",
            param="truncate_prompt_tokens",
        )
    return {
        "max_tokens": fields.truncate_prompt_tokens,
        "timeout_s": fields.timeout,
        "priority": priority_in(request.scope, fields.priority or 0),
        "tenant": tenant_of(request.scope),
        "cache_salt": fields.cache_salt,
    }


def routes(state: ServerState) -> list[Route]:
    api = VectorRoutes(state)
    return [
        Route("/v1/embeddings", api.embed, methods=["POST"]),
        *(Route(f"{v}/rerank", api.rerank, methods=["POST"]) for v in ("/v1", "/v2", "")),
        *(Route(path, api.score, methods=["POST"]) for path in ("/v1/score", "/score")),
    ]


class VectorRoutes:
    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._embed_table, self._rerank_table, self._score_table = (
            table.ignoring(state.config.ignore_field) for table in (EMBEDDINGS, RERANK, SCORE)
        )

    async def embed(self, request: Request) -> Answer:
        fields = decode_body(
            await read_body(request), EmbeddingBody, MAX_ID_VALUES, self._embed_table
        )
        if fields.encoding_format not in (None, *ENCODING_FORMATS):
            raise wrong_choice("encoding_format", fields.encoding_format or "", ENCODING_FORMATS)
        inputs = split_prompts(fields.input, "input")
        _check_number("inputs", len(inputs), "input")
        asked = EmbeddingRequest(
            inputs=inputs,
            prompt_name=fields.prompt_name,
            normalize=fields.normalize,
            dimensions=fields.dimensions,
            **_common(fields, request),
        )
        answer = EmbeddingAnswer(self._state.model_name, fields.encoding_format == "base64")
        start = partial(self._state.text.vectors.stream_embeddings, asked=asked, take=answer.take)
        return _whole_answer(start, request, answer, asked.timeout_s)

    async def rerank(self, request: Request) -> Answer:
        fields = decode_body(await read_body(request), RerankBody, table=self._rerank_table)
        _check_number("documents", len(fields.documents), "documents")
        texts = [one if isinstance(one, str) else one.text for one in fields.documents]
        answer = RerankAnswer(
            request.scope["request_id"],
            self._state.model_name,
            fields.top_n,
            texts if fields.return_documents else None,
        )
        return self._score(request, fields, [(fields.query, text) for text in texts], answer)

    async def score(self, request: Request) -> Answer:
        fields = decode_body(await read_body(request), ScoreBody, table=self._score_table)
        first, second = (
            [one] if isinstance(one, str) else one for one in (fields.text_1, fields.text_2)
        )
        if len(first) not in (1, len(second)):
            raise RequestError(
                f"text_1 has {len(first)} texts and text_2 has {len(second)}",
                "They are compared pairwise, or one text_1 with each text_2.",
                "Send one text_1, or as many as there are text_2.",
                param="text_1",
            )
        _check_number("texts", len(second), "text_2")
        pairs = list(zip(first * len(second) if len(first) == 1 else first, second))
        answer = ScoreAnswer(request.scope["request_id"], self._state.model_name)
        return self._score(request, fields, pairs, answer)

    def _score(
        self,
        request: Request,
        fields: RerankBody | ScoreBody,
        pairs: list[tuple[str, str]],
        answer: ScoreAnswer,
    ) -> Answer:
        asked = ScoreRequest(
            pairs=pairs, instruction=fields.instruction, **_common(fields, request)
        )
        start = partial(self._state.text.vectors.stream_scores, asked=asked, take=answer.take)
        return _whole_answer(start, request, answer, asked.timeout_s)


def _whole_answer(
    start: Callable[..., Awaitable[TextStream]],
    request: Request,
    answer: EmbeddingAnswer | ScoreAnswer,
    timeout_s: float | None,
) -> Answer:
    """The answer receives the vectors itself."""
    id, place = request.scope["request_id"], place_of(request.scope)
    return Answer(lambda _: start(id, place=place), answer, False, timeout_s)


def _usage(usage: Usage) -> dict[str, int]:
    return {"prompt_tokens": usage.num_prompt_tokens, "total_tokens": usage.num_prompt_tokens}


class EmbeddingAnswer:
    def __init__(self, model: str, is_base64: bool) -> None:
        self._model = model
        self._is_base64 = is_base64
        self._encoded: dict[int, bytes] = {}

    def take(self, index: int, vector: bytes) -> None:
        if self._is_base64:
            self._encoded[index] = b'"' + b64encode(vector) + b'"'
        else:
            self._encoded[index] = msgspec.json.encode(memoryview(vector).cast("f").tolist())

    def encode_body(self, choices: object, usage: Usage) -> bytes:
        pieces = []
        for index in range(len(self._encoded)):
            head = b'{"object":"embedding","index":%d,"embedding":' % index
            pieces.append(head + self._encoded[index] + b"}")
        rest = {"model": self._model, "usage": _usage(usage)}
        tail = b"]," + msgspec.json.encode(rest)[1:]
        return b'{"object":"list","data":[' + b",".join(pieces) + tail


class ScoreAnswer:
    """Scores in the order of their pairs."""

    def __init__(self, id: str, model: str) -> None:
        self._id = id
        self._model = model
        self._created = int(time.time())
        self._scores: dict[int, float] = {}

    def take(self, index: int, score: float) -> None:
        self._scores[index] = score

    def encode_body(self, choices: object, usage: Usage) -> bytes:
        return msgspec.json.encode({**self._fields(), "usage": _usage(usage)})

    def _fields(self) -> dict[str, Any]:
        return {
            "id": f"score-{self._id}",
            "object": "list",
            "created": self._created,
            "model": self._model,
            "data": [
                {"index": index, "object": "score", "score": score}
                for index, score in sorted(self._scores.items())
            ],
        }


class RerankAnswer(ScoreAnswer):
    """Scores with the best first."""

    def __init__(self, id: str, model: str, top_n: int | None, texts: list[str] | None) -> None:
        super().__init__(id, model)
        self._top_n = top_n
        self._texts = texts  # repeated in the answer

    def _fields(self) -> dict[str, Any]:
        ranked = sorted(self._scores, key=lambda index: (-self._scores[index], index))
        results = []
        for index in ranked[: self._top_n]:
            result: dict[str, Any] = {"index": index, "relevance_score": self._scores[index]}
            if self._texts is not None:
                result["document"] = {"text": self._texts[index]}
            results.append(result)
        head = {"id": f"rerank-{self._id}", "object": "rerank", "model": self._model}
        return {**head, "results": results}
