"""SageMaker's container API: /ping when the server is ready, and /invocations for everything else.

An invocation with messages is a chat, and one with a prompt is a completion, as in OpenAI's
endpoints, except that thinking is off unless `thinking` turns it on. A prompt with thinking becomes
a chat of one message, because only the chat template knows how a model thinks; the answer is still
a completion's, because the client sent a prompt: `text`, and the reasoning beside it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.errors import RequestError
from penstock.serve.answer import Answer, read_body
from penstock.serve.body import decode_body
from penstock.serve.fields import INVOCATION_CHAT, INVOCATION_PROMPT
from penstock.serve.openai.chat_options import Thinking, thinking_switch
from penstock.serve.openai.messages import Message
from penstock.serve.openai.replies import CompletionReplyFormat
from penstock.serve.openai.requests import (
    ChatBody,
    CompletionBody,
    chat_request,
    completion_request,
)
from penstock.serve.openai.routes import OpenAIRoutes
from penstock.serve.requests import MAX_ID_VALUES
from penstock.serve.state import ServerState


class Invocation(msgspec.Struct):
    """The fields that decide whether a body is a chat or a completion."""

    messages: msgspec.Raw = msgspec.Raw(b"null")
    prompt: msgspec.Raw = msgspec.Raw(b"null")
    thinking: bool | Thinking | None = None

    def has(self, name: str) -> bool:
        return bytes(getattr(self, name)) != b"null"

    @property
    def speaks_of_thinking(self) -> bool:
        """Whether it mentions thinking without turning it off. The chat template decides what
        "auto" means."""
        return self.thinking is not None and thinking_switch(self.thinking) is not False


class PromptToThinkAbout(ChatBody, kw_only=True):
    """A chat of one message, with the fields of a completion."""

    prompt: str | Annotated[list[str], Meta(min_length=1, max_length=1)]
    messages: list[Message] = msgspec.field(default_factory=list)
    logprobs: bool | int | None = None  # type: ignore[assignment]  # how many alternatives
    echo: bool | None = None

    def as_chat(self) -> ChatBody:
        if self.echo:
            raise RequestError(
                "echo does not work with thinking",
                "With thinking, the prompt becomes a chat.",
                "Omit one of them.",
                param="echo",
            )
        prompt = self.prompt if isinstance(self.prompt, str) else self.prompt[0]
        self.messages = [Message("user", prompt)]
        if self.logprobs is not None and not isinstance(self.logprobs, bool):
            self.top_logprobs, self.logprobs = self.logprobs, True
        return self


def routes(state: ServerState) -> list[Route]:
    invocations = Invocations(state)
    return [
        Route("/ping", invocations.ping),
        Route("/invocations", invocations.invoke, methods=["POST"]),
    ]


class Invocations:
    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._openai = OpenAIRoutes(state)
        self._defaults = state.config.sampling_defaults
        self._chat_table = INVOCATION_CHAT.ignoring(state.config.ignore_field)
        self._prompt_table = INVOCATION_PROMPT.ignoring(state.config.ignore_field)

    async def ping(self, request: Request) -> Response:
        return Response(status_code=200 if self._state.is_ready else 503)

    async def invoke(self, request: Request) -> Answer:
        body = await read_body(request)
        shape = decode_body(body, Invocation, MAX_ID_VALUES)
        if shape.has("messages") == shape.has("prompt"):
            raise RequestError("Either prompt or messages is required, not both", param="prompt")
        if shape.has("messages"):
            fields = decode_body(body, ChatBody, table=self._chat_table)
            is_open = fields.enable_thinking is None and not fields.reasoning_effort
            if is_open and not fields.reasoning and not shape.speaks_of_thinking:
                fields.enable_thinking = False
            return self._openai.answer_chat(request, chat_request(fields, self._defaults))
        if shape.speaks_of_thinking:
            asked = decode_body(body, PromptToThinkAbout, table=self._chat_table)
            chat = chat_request(asked.as_chat(), self._defaults)
            return self._openai.answer_chat(request, chat, CompletionReplyFormat)
        plain = decode_body(body, CompletionBody, MAX_ID_VALUES, self._prompt_table)
        return self._openai.answer_completion(request, completion_request(plain, self._defaults))
