"""Anthropic's endpoints: messages and token counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.errors import RequestError
from penstock.serve.admission import tenant_of
from penstock.serve.answer import Answer, Within, json_response, read_body
from penstock.serve.anthropic.replies import MessageFormat
from penstock.serve.anthropic.requests import MessagesBody, message_request, parse_count
from penstock.serve.body import decode_body
from penstock.serve.conversations import Conversations, Key, Thread
from penstock.serve.fields import COUNT_TOKENS, MESSAGES
from penstock.serve.intake import place_of
from penstock.serve.sessions import SessionChat
from penstock.serve.state import ServerState
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

    async def create_message(self, request: Request) -> Within:
        fields = decode_body(await read_body(request), MessagesBody, table=self._table)
        thread = None
        if fields.thread is not None:
            if fields.session_id is not None:
                raise RequestError(
                    "thread and session_id are both set",
                    "Each of them sets what comes before the messages.",
                    "Omit one of them.",
                    param="thread",
                )
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
        return Within(answer, partial(self._threads.continuing, thread or Thread()))

    async def count_tokens(self, request: Request) -> Response:
        chat = parse_count(
            await read_body(request, for_reply=False), self._thinks, self._count_table
        )
        num_bytes = place_of(request.scope).num_bytes
        num_tokens = await self._text.num_tokens(chat, tenant_of(request.scope), num_bytes)
        return json_response({"input_tokens": num_tokens})


REPLAY = 'Send the whole conversation with thread {"type": "create"}.'


class ThreadUnsupportedError(RequestError):
    """SDKs continue without a thread when they get this."""

    details: ClassVar[dict[str, Any]] = {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }


class ThreadNotFoundError(RequestError):
    status = 404
    details: ClassVar[dict[str, Any]] = {"error_code": "thread_not_found"}


class ThreadAlreadyContinuedError(RequestError):
    details: ClassVar[dict[str, Any]] = {"error_code": "thread_already_continued"}


class ThreadInFlightError(RequestError):
    details: ClassVar[dict[str, Any]] = {"error_code": "thread_continue_in_flight"}


class Threads:
    """Threads: a reply's id stands for the conversation up to it, with its tools and system prompt.

    `{"type": "create"}` starts one; `{"type": "continue", "previous_message_id"}` sends only what
    is new. A thread is a session (conversations.py) named by its last reply's id: the same limits
    apply, and a failed reply changes nothing. A reply can be continued once. SDKs read the
    `details` of these errors, and send the whole conversation again.
    """

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations
        self._in_flight: set[Key] = set()

    def find(self, asked: dict[str, Any], tenant: str) -> Thread:
        """The thread that the field `thread` of a request names."""
        if not self._conversations.is_keeping:
            raise ThreadUnsupportedError(
                "thread is not supported",
                "--session-mb is 0: no messages are kept.",
                param="thread",
            )
        previous = asked.get("previous_message_id")
        if asked.get("type") == "create":
            return Thread()
        if asked.get("type") != "continue" or not isinstance(previous, str):
            raise RequestError(
                "thread is invalid",
                'It must be {"type": "create"} or {"type": "continue", "previous_message_id": '
                '"…"}.',
                param="thread",
            )
        return self._continue((tenant, previous))

    def _continue(self, key: Key) -> Thread:
        thread = self._conversations.thread(key)
        if thread is not None:
            return thread
        if self._conversations.why_ended(key) == "deleted":  # the next reply's session replaced it
            raise ThreadAlreadyContinuedError(
                f"{key[1][:64]!r} has already been continued",
                "A reply can be continued once.",
                REPLAY,
                param="thread",
            )
        raise ThreadNotFoundError(
            f"No thread has the reply {key[1][:64]!r}",
            "Threads are kept like sessions: for --session-minutes, in --session-mb of memory.",
            REPLAY,
            param="thread",
        )

    @contextmanager
    def continuing(self, thread: Thread) -> Iterator[None]:
        """A context in which no other request may continue the same reply."""
        if thread.previous is None:
            yield
            return
        if thread.previous in self._in_flight:
            raise ThreadInFlightError(
                f"{thread.previous[1][:64]!r} is being continued",
                "A reply can be continued once.",
                f"Wait for the other request. {REPLAY}",
                param="thread",
            )
        self._in_flight.add(thread.previous)
        try:
            yield
        finally:
            self._in_flight.discard(thread.previous)
