"""The Responses API's endpoints: replies, and those that were kept, to read and to delete."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from penstock.errors import RequestError
from penstock.serve.answer import JSON_TYPE, Answer, json_response, read_body
from penstock.serve.fields import RESPONSES
from penstock.serve.intake import place_of
from penstock.serve.responses.items import Item, items_of
from penstock.serve.responses.replies import Fields, ResponseReplyFormat
from penstock.serve.responses.requests import own_names, parse_response, response_request
from penstock.serve.responses.store import ResponseStore, new_id
from penstock.serve.serving import Serving
from penstock.serve.sessions import SessionChat, session_key
from penstock.serve.tenants import tenant_of


def routes(serving: Serving) -> list[Route]:
    api = ResponsesRoutes(serving)
    return [
        Route("/v1/responses", api.respond, methods=["POST"]),
        Route("/v1/responses/{id}", api.show, methods=["GET"]),
        Route("/v1/responses/{id}", api.delete, methods=["DELETE"]),
    ]


class ResponsesRoutes:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._store = ResponseStore()
        self._table = RESPONSES.ignoring(serving.config.ignore_field)

    async def respond(self, request: Request) -> OwnNames:
        fields = parse_response(await read_body(request), self._table)
        place = place_of(request.scope)
        history: list[Item] = []
        if (previous := fields.previous_response_id) is not None:
            tenant = tenant_of(request.scope)
            place.add_bytes(self._store.num_bytes_of(previous, "previous_response_id", tenant))
            history = self._store.items_of(previous, "previous_response_id", tenant)
        key = session_key(fields.session_id, request)
        called = {} if key is None else self._serving.conversations.names_of_calls(key)
        asked = response_request(fields, history, called, self._serving.config.sampling_defaults)
        talk = SessionChat(asked.chat, request, self._serving)
        said, id = [*items_of(talk.held), *asked.items], new_id()

        def keep(body: bytes, output: list[Fields]) -> None:
            items = [*said, *msgspec.convert(output, list[Item])]
            self._store.keep(id, body, items, tenant_of(request.scope))

        style = ResponseReplyFormat(
            id, self._serving.model_name, asked.echo, keep if asked.is_stored else None
        )
        chat = asked.chat
        return OwnNames(Answer(talk.stream, style, chat.is_stream, chat.timeout_s, headers=talk.headers))

    async def show(self, request: Request) -> Response:
        if request.query_params.get("stream", "false") != "false":
            raise RequestError("A response that is kept cannot be streamed again", param="stream")
        body = self._store.body_of(request.path_params["id"], tenant_of(request.scope))
        return Response(body, media_type=JSON_TYPE)

    async def delete(self, request: Request) -> Response:
        id = request.path_params["id"]
        self._store.delete(id, tenant_of(request.scope))
        return json_response({"id": id, "object": "response", "deleted": True})


class OwnNames:
    """An answer whose refusals name fields as this API does, not as chats do."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with own_names():
            await self._answer(scope, receive, send)
