"""Anthropic's endpoints: messages, and how many tokens a prompt has."""

from __future__ import annotations

from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from penstock.serve.answer import Answer, json_response, read_body
from penstock.serve.anthropic.replies import MessageFormat
from penstock.serve.anthropic.requests import MessagesBody, message_request, parse_count
from penstock.serve.anthropic.threads import Threads
from penstock.serve.body import decode_body
from penstock.serve.conversations import Thread
from penstock.serve.fields import COUNT_TOKENS, MESSAGES
from penstock.serve.intake import place_of
from penstock.serve.requests import TokenizeRequest
from penstock.serve.sessions import SessionChat
from penstock.serve.state import ServerState
from penstock.serve.tenants import tenant_of
from penstock.serve.text_stream import Deliver, TextStream


def routes(state: ServerState) -> list[Route]:
    api = AnthropicRoutes(state)
    return [
        Route("/v1/messages", api.create_message, methods=["POST"]),
        Route("/v1/messages/count_tokens", api.count_tokens, methods=["POST"]),
    ]


class AnthropicRoutes:
    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._text = state.text
        self._thinks = state.config.enable_thinking
        self._defaults = state.config.sampling_defaults
        self._table = MESSAGES.ignoring(state.config.ignore_field)
        self._count_table = COUNT_TOKENS.ignoring(state.config.ignore_field)
        self._threads = Threads(state.conversations)

    async def create_message(self, request: Request) -> ThreadAnswer:
        fields = decode_body(await read_body(request), MessagesBody, table=self._table)
        thread = None
        if fields.thread is not None:
            thread = self._threads.find(fields.thread, tenant_of(request.scope))
            if thread.previous is not None:
                place_of(request.scope).add_bytes(
                    self._state.conversations.num_bytes_of(thread.previous)
                )
        chat = message_request(fields, self._thinks, self._defaults, thread)
        formatter = MessageFormat(
            request.scope["request_id"], self._state.model_name, chat.sampling.max_tokens
        )
        if thread is not None:
            chat = replace(chat, session_id=formatter.id)
        talk = SessionChat(chat, request, self._state, thread)

        async def start(deliver: Deliver) -> TextStream:
            stream = await talk.stream(deliver)
            formatter.usage_so_far = lambda: stream.usage
            return stream

        answer = Answer(start, formatter, chat.is_stream, chat.timeout_s, headers=talk.headers)
        return ThreadAnswer(answer, self._threads, thread or Thread())

    async def count_tokens(self, request: Request) -> Response:
        chat = parse_count(
            await read_body(request, for_reply=False), self._thinks, self._count_table
        )
        asked = TokenizeRequest(text="", chat=chat, add_special_tokens=False, shows_texts=False)
        num_bytes = place_of(request.scope).num_bytes
        tokens = await self._text.tokenize(asked, tenant_of(request.scope), num_bytes)
        return json_response({"input_tokens": len(tokens)})


class ThreadAnswer:
    """An answer during which no other request may continue its thread."""

    def __init__(self, answer: Answer, threads: Threads, thread: Thread) -> None:
        self._answer = answer
        self._threads = threads
        self._thread = thread

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._threads.continuing(self._thread):
            await self._answer(scope, receive, send)
