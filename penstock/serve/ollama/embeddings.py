"""Ollama's embeddings: /api/embed for texts, and the older /api/embeddings for one text."""

from __future__ import annotations

import time
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta
from starlette.requests import Request

from penstock.serve.answer import Answer, ReplyFormat, read_body
from penstock.serve.body import decode_body
from penstock.serve.fields import FieldTable
from penstock.serve.intake import place_of
from penstock.serve.openai.embeddings import MAX_INPUTS
from penstock.serve.requests import CacheSalt
from penstock.serve.state import ServerState
from penstock.serve.tenants import tenant_of
from penstock.serve.text_stream import Usage
from penstock.serve.vectors import EmbeddingRequest

TO_CONTEXT = -1  # truncate an input to the context


class EmbedBody(msgspec.Struct, kw_only=True):
    input: str | Annotated[list[str], Meta(max_length=MAX_INPUTS)] = ""
    model: str | None = None
    truncate: bool | None = None  # default: true
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    keep_alive: float | str | None = None
    options: dict[str, Any] | None = None  # for loading and sampling: neither applies here
    cache_salt: CacheSalt | None = None  # not Ollama's


class EmbeddingsBody(msgspec.Struct, kw_only=True):
    prompt: str = ""
    model: str | None = None
    keep_alive: float | str | None = None
    options: dict[str, Any] | None = None
    cache_salt: CacheSalt | None = None


class EmbedAnswer:
    """All vectors, or the only one."""

    def __init__(self, model: str, is_single: bool = False) -> None:
        self._model = model
        self._is_single = is_single
        self._asked_ns = time.perf_counter_ns()
        self._encoded: dict[int, bytes] = {}

    def take(self, index: int, vector: bytes) -> None:
        self._encoded[index] = msgspec.json.encode(memoryview(vector).cast("f").tolist())

    def encode_body(self, choices: object, usage: Usage) -> bytes:
        vectors = [msgspec.Raw(self._encoded[index]) for index in range(len(self._encoded))]
        if self._is_single:
            return msgspec.json.encode({"embedding": vectors[0] if vectors else []})
        return msgspec.json.encode(
            {
                "model": self._model,
                "embeddings": vectors,
                "total_duration": time.perf_counter_ns() - self._asked_ns,
                "load_duration": 0,
                "prompt_eval_count": usage.num_prompt_tokens,
            }
        )


async def embed(request: Request, serving: ServerState, table: FieldTable) -> Answer | bytes:
    """Bytes: there was nothing to embed; clients send that to load a model."""
    fields = decode_body(await read_body(request), EmbedBody, table=table)
    inputs = [fields.input] if isinstance(fields.input, str) else fields.input
    asked = EmbeddingRequest(
        inputs=inputs,
        normalize=True,
        dimensions=fields.dimensions,
        max_tokens=None if fields.truncate is False else TO_CONTEXT,
        tenant=tenant_of(request.scope),
        cache_salt=fields.cache_salt,
    )
    return _answer(request, serving, asked, EmbedAnswer(serving.model_name))


async def embed_one(request: Request, serving: ServerState, table: FieldTable) -> Answer | bytes:
    fields = decode_body(await read_body(request), EmbeddingsBody, table=table)
    asked = EmbeddingRequest(
        inputs=[fields.prompt],
        normalize=False,
        max_tokens=TO_CONTEXT,
        tenant=tenant_of(request.scope),
        cache_salt=fields.cache_salt,
    )
    return _answer(request, serving, asked, EmbedAnswer(serving.model_name, is_single=True))


def _answer(
    request: Request, serving: ServerState, asked: EmbeddingRequest, answer: EmbedAnswer
) -> Answer | bytes:
    if not any(asked.inputs):
        return answer.encode_body({}, Usage(0, 0, 0, 0))
    vectors, id, place = serving.text.vectors, request.scope["request_id"], place_of(request.scope)
    return Answer(
        lambda _: vectors.stream_embeddings(id, asked, answer.take, place),
        cast(ReplyFormat, answer),
        False,
    )
