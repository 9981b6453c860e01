"""OpenAI's endpoints, and those that vLLM added beside them: chats, completions, models, tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.serve.access import tenant_of
from penstock.serve.answer import JSON_TYPE, Answer, Start, json_response, read_body
from penstock.serve.openai.replies import ChatReplyFormat, CompletionReplyFormat, OpenAIReplyFormat
from penstock.serve.openai.requests import (
    ChatRequest,
    CompletionRequest,
    TextRequest,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from penstock.serve.serving import Serving
from penstock.serve.sessions import in_session

LIST_PART = 50_000  # ids or texts: some milliseconds


def routes(serving: Serving) -> list[Route]:
    api = OpenAIRoutes(serving)
    return [
        Route("/v1/models", api.list_models),
        Route("/v1/models/{name:path}", api.show_model),
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/completions", api.complete, methods=["POST"]),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/detokenize", api.detokenize, methods=["POST"]),
    ]


class OpenAIRoutes:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._text = serving.text

    async def list_models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model_card()]})

    async def show_model(self, request: Request) -> Response:
        if request.path_params["name"] != self._serving.model_name:
            raise HTTPException(404, f"There is no such model here; there is {self._serving.model_name}.")
        return json_response(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._serving.model_name,
            "object": "model",
            "created": self._serving.started_at,
            "owned_by": "penstock",
            "max_model_len": self._max_model_len(),
        }

    def _max_model_len(self) -> int | None:
        info = self._serving.client.info
        return None if info is None else info.max_model_len

    async def chat(self, request: Request) -> Answer:
        chat = in_session(parse_chat(await read_body(request)), request)
        return self.answer_chat(request.scope["request_id"], chat)

    def answer_chat(self, request_id: str, chat: ChatRequest) -> Answer:
        return self._answer(
            request_id,
            chat,
            ChatReplyFormat,
            lambda deliver: self._text.stream_chat(request_id, chat, deliver),
        )

    async def complete(self, request: Request) -> Answer:
        asked = in_session(parse_completion(await read_body(request)), request)
        return self.answer_completion(request.scope["request_id"], asked)

    def answer_completion(self, request_id: str, asked: CompletionRequest) -> Answer:
        return self._answer(
            request_id,
            asked,
            CompletionReplyFormat,
            lambda deliver: self._text.stream_completion(request_id, asked, deliver),
        )

    def _answer(
        self, request_id: str, asked: TextRequest, style: type[OpenAIReplyFormat], start: Start
    ) -> Answer:
        spelled = style(
            request_id,
            self._serving.model_name,
            has_logprobs=asked.sampling.logprobs is not None,
            include_usage=asked.include_usage,
        )
        return Answer(start, spelled, asked.is_stream, asked.timeout_s, spelled.new_choice)

    async def tokenize(self, request: Request) -> Response:
        asked = parse_tokenize(await read_body(request))
        tokens = await self._text.tokenize(asked, tenant_of(request.scope))
        # In a thread, and in parts: there may be millions.
        body = await asyncio.to_thread(self._encode_tokens, tokens, asked.shows_texts)
        return Response(body, media_type=JSON_TYPE)

    def _encode_tokens(self, tokens: list[int], shows_texts: bool) -> bytes:
        fields = {"count": len(tokens), "max_model_len": self._max_model_len()}
        pieces = [b'{"tokens":[', *_encode_list(tokens), b"],", msgspec.json.encode(fields)[1:-1]]
        if shows_texts:
            pieces += [b',"token_strs":[', *_encode_list(self._token_texts(tokens)), b"]"]
        return b"".join((*pieces, b"}"))

    def _token_texts(self, token_ids: list[int]) -> list[str]:
        texts = {token_id: self._text.token_text(token_id) for token_id in set(token_ids)}
        return [texts[token_id] for token_id in token_ids]

    async def detokenize(self, request: Request) -> Response:
        tokens = parse_detokenize(await read_body(request))
        return json_response({"prompt": await self._text.detokenize(tokens)})


def _encode_list(values: Sequence[Any]) -> Iterator[bytes]:
    """The parts of a long JSON list. An encoder lets no other thread run, so each has little to do."""
    for start in range(0, len(values), LIST_PART):
        yield (b"," if start else b"") + msgspec.json.encode(values[start : start + LIST_PART])[1:-1]
