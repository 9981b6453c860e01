"""Anthropic's endpoints: messages, and how many tokens a prompt has."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.serve.answer import Answer, json_response, read_body
from penstock.serve.anthropic.replies import MessageFormat
from penstock.serve.anthropic.requests import parse_count, parse_messages
from penstock.serve.fields import COUNT_TOKENS, MESSAGES
from penstock.serve.intake import place_of
from penstock.serve.openai.requests import TokenizeRequest
from penstock.serve.serving import Serving
from penstock.serve.sessions import SessionChat
from penstock.serve.tenants import tenant_of
from penstock.serve.text_stream import Deliver, TextStream


def routes(serving: Serving) -> list[Route]:
    api = AnthropicRoutes(serving)
    return [
        Route("/v1/messages", api.create_message, methods=["POST"]),
        Route("/v1/messages/count_tokens", api.count_tokens, methods=["POST"]),
    ]


class AnthropicRoutes:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._text = serving.text
        self._thinks = serving.config.enable_thinking
        self._defaults = serving.config.sampling_defaults
        self._table = MESSAGES.ignoring(serving.config.ignore_field)
        self._count_table = COUNT_TOKENS.ignoring(serving.config.ignore_field)

    async def create_message(self, request: Request) -> Answer:
        chat = parse_messages(await read_body(request), self._thinks, self._defaults, self._table)
        talk = SessionChat(chat, request, self._serving)
        style = MessageFormat(request.scope["request_id"], self._serving.model_name, chat.sampling.max_tokens)

        async def start(deliver: Deliver) -> TextStream:
            stream = await talk.stream(deliver)
            style.usage_so_far = lambda: stream.usage
            return stream

        return Answer(start, style, chat.is_stream, chat.timeout_s, headers=talk.headers)

    async def count_tokens(self, request: Request) -> Response:
        chat = parse_count(await read_body(request, for_reply=False), self._thinks)
        asked = TokenizeRequest(text="", chat=chat, add_special_tokens=False, shows_texts=False)
        num_bytes = place_of(request.scope).num_bytes
        tokens = await self._text.tokenize(asked, tenant_of(request.scope), num_bytes)
        return json_response({"input_tokens": len(tokens)})
