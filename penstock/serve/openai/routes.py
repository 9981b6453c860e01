"""OpenAI's endpoints, and those that vLLM added to them: chats, completions, models, tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.digests import PageDigests, scope_of
from penstock.serve.admission import tenant_of
from penstock.serve.answer import JSON_TYPE, NO_HEADERS, Answer, Start, json_response, read_body
from penstock.serve.fields import CHAT, COMPLETIONS
from penstock.serve.intake import place_of
from penstock.serve.openai.replies import ChatReplyFormat, CompletionReplyFormat, OpenAIReplyFormat
from penstock.serve.openai.requests import (
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from penstock.serve.requests import ChatRequest, CompletionRequest, TextRequest
from penstock.serve.sessions import SessionChat, completion_start
from penstock.serve.state import ServerState

LIST_PART = 50_000  # ids or texts: a few milliseconds


def routes(state: ServerState) -> list[Route]:
    api = OpenAIRoutes(state)
    return [
        Route("/v1/models", api.list_models),
        Route("/v1/models/{name:path}", api.show_model),
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/completions", api.complete, methods=["POST"]),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/detokenize", api.detokenize, methods=["POST"]),
    ]


class OpenAIRoutes:
    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._text = state.text
        self._defaults = state.config.sampling_defaults
        self._chat_table = CHAT.ignoring(state.config.ignore_field)
        self._completion_table = COMPLETIONS.ignoring(state.config.ignore_field)
        self._keeps_thoughts = state.config.reasoning == "content"

    async def list_models(self, request: Request) -> Response:
        """Answers in OpenAI's and Anthropic's format at once: clients of both use this path, and
        ignore other fields."""
        name = self._state.model_name
        ends = {"first_id": name, "last_id": name, "has_more": False}
        return json_response({"object": "list", "data": [self._model_card()], **ends})

    async def show_model(self, request: Request) -> Response:
        if request.path_params["name"] != self._state.model_name:
            raise HTTPException(
                404, f"This server has no such model; it serves {self._state.model_name}."
            )
        return json_response(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        name, started_at = self._state.model_name, self._state.started_at
        return {
            "id": name,
            "object": "model",
            "type": "model",
            "display_name": name,
            "lifecycle": "active",
            "created": started_at,
            "created_at": datetime.fromtimestamp(started_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "owned_by": "penstock",
            "root": name,
            "max_model_len": self._max_model_len(),
            "tasks": self._tasks(),
            "weights": self._state.weights,
        }

    def _tasks(self) -> list[str] | None:
        info = self._state.client.info
        return None if info is None else self._text.vectors.tasks(info)

    def _max_model_len(self) -> int | None:
        info = self._state.client.info
        return None if info is None else info.max_model_len

    async def chat(self, request: Request) -> Answer:
        chat = parse_chat(await read_body(request), self._defaults, self._chat_table)
        return self.answer_chat(request, chat)

    def answer_chat(
        self,
        request: Request,
        chat: ChatRequest,
        format_class: type[OpenAIReplyFormat] = ChatReplyFormat,
    ) -> Answer:
        # Constrained content has no room for thinking.
        keeps_thoughts = self._keeps_thoughts and chat.form is None and not chat.hides_thoughts
        chat = replace(chat, keeps_thoughts_in_content=keeps_thoughts)
        talk = SessionChat(chat, request, self._state)
        return self._answer(
            request.scope["request_id"], chat, format_class, talk.stream, talk.headers
        )

    async def complete(self, request: Request) -> Answer:
        asked = parse_completion(await read_body(request), self._defaults, self._completion_table)
        return self.answer_completion(request, asked)

    def answer_completion(self, request: Request, asked: CompletionRequest) -> Answer:
        return self._answer(
            request.scope["request_id"],
            asked,
            CompletionReplyFormat,
            completion_start(asked, request, self._text),
        )

    def _answer(
        self,
        request_id: str,
        asked: TextRequest,
        format_class: type[OpenAIReplyFormat],
        start: Start,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> Answer:
        formatter = format_class(
            request_id,
            self._state.model_name,
            has_logprobs=asked.sampling.logprobs is not None,
            include_usage=asked.include_usage,
            output=asked.output,
            fingerprint=self._state.fingerprint,
        )
        return Answer(
            start, formatter, asked.is_stream, asked.timeout_s, formatter.new_choice, headers
        )

    async def tokenize(self, request: Request) -> Response:
        asked = parse_tokenize(await read_body(request, for_reply=False))
        num_bytes = place_of(request.scope).num_bytes
        tokens = await self._text.tokenize(asked, tenant_of(request.scope), num_bytes)
        texts = await self._text.token_texts(tokens, num_bytes) if asked.shows_texts else None
        listed: Sequence[Any] = tokens
        if asked.shows_pieces:
            pieces = await self._text.token_pieces(tokens, num_bytes)
            listed = [{"id": id, "piece": piece} for id, piece in zip(tokens, pieces)]
        fields = {"count": len(tokens), "max_model_len": self._max_model_len()}
        if asked.counts_cached:
            fields["cached_tokens"] = await self._num_cached(tokens, tenant_of(request.scope))
        # Encoded in a thread, and in parts: there may be millions.
        body = await asyncio.to_thread(_encode_tokens, listed, texts, fields)
        return Response(body, media_type=JSON_TYPE)

    async def _num_cached(self, tokens: list[int], tenant: str) -> int | None:
        """None: no engine answered."""
        info = self._state.client.info
        if info is None:
            return None
        known = tokens[: info.max_model_len]
        digests = await asyncio.to_thread(PageDigests.of, known, info.page_size, scope_of(tenant))
        return await self._state.client.num_cached_tokens(digests, len(tokens))

    async def detokenize(self, request: Request) -> Response:
        tokens = parse_detokenize(await read_body(request, for_reply=False))
        text = await self._text.detokenize(tokens, place_of(request.scope).num_bytes)
        return json_response({"prompt": text, "content": text})  # vLLM's name and llama-server's


def _encode_tokens(
    tokens: Sequence[Any], texts: list[str] | None, fields: Mapping[str, Any]
) -> bytes:
    pieces = [b'{"tokens":[', *_encode_list(tokens), b"],", msgspec.json.encode(fields)[1:-1]]
    if texts is not None:
        pieces += [b',"token_strs":[', *_encode_list(texts), b"]"]
    return b"".join((*pieces, b"}"))


def _encode_list(values: Sequence[Any]) -> Iterator[bytes]:
    """The parts of a long JSON list. The encoder blocks other threads, so each part is small."""
    for start in range(0, len(values), LIST_PART):
        yield (b"," if start else b"") + msgspec.json.encode(values[start : start + LIST_PART])[
            1:-1
        ]
