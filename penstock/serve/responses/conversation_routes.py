"""OpenAI's Conversations API: named lists of items that responses continue and extend.

A conversation is stored like a response, in memory and within the same limits; its age counts from
the last addition. Sessions (serve/sessions.py) do the same for every API, and share nothing with
these.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.serve.admission import tenant_of
from penstock.serve.answer import JSON_TYPE, json_response, read_body
from penstock.serve.body import decode_body
from penstock.serve.fields import CONVERSATIONS
from penstock.serve.intake import place_of
from penstock.serve.requests import Metadata
from penstock.serve.responses.items import MAX_ITEMS, Item, Items, plain_messages, shown
from penstock.serve.responses.routes import list_of, page_of, resolved
from penstock.serve.responses.store import ResponseStore, UnknownItemError, new_id
from penstock.serve.state import ServerState


class ConversationBody(msgspec.Struct, kw_only=True):
    items: Annotated[list[Item], Meta(max_length=MAX_ITEMS)] | None = None
    metadata: Metadata | None = None


class MetadataBody(msgspec.Struct, kw_only=True):
    metadata: Metadata | None


class ItemsBody(msgspec.Struct, kw_only=True):
    items: Items


def routes(state: ServerState, store: ResponseStore) -> list[Route]:
    api = ConversationRoutes(state, store)
    one, items = "/v1/conversations/{id}", "/v1/conversations/{id}/items"
    return [
        Route("/v1/conversations", api.create, methods=["POST"]),
        Route(one, api.show, methods=["GET"]),
        Route(one, api.update, methods=["POST"]),
        Route(one, api.delete, methods=["DELETE"]),
        Route(items, api.list_items, methods=["GET"]),
        Route(items, api.add_items, methods=["POST"]),
        Route(items + "/{item_id}", api.show_item, methods=["GET"]),
        Route(items + "/{item_id}", api.delete_item, methods=["DELETE"]),
    ]


class ConversationRoutes:
    def __init__(self, state: ServerState, store: ResponseStore) -> None:
        self._store = store
        self._table = CONVERSATIONS.ignoring(state.config.ignore_field)

    async def create(self, request: Request) -> Response:
        body = await read_body(request, for_reply=False)
        fields = decode_body(body or b"{}", ConversationBody, table=self._table)
        items = self._new_items(fields.items or [], request)
        plain_messages([], items, None, field="items")  # raises an error if they are wrong
        id = new_id("conv")
        body = _describe(id, int(time.time()), fields.metadata or {})
        self._store.keep(id, body, items, tenant_of(request.scope))
        return Response(body, media_type=JSON_TYPE)

    async def show(self, request: Request) -> Response:
        return Response(self._body(request), media_type=JSON_TYPE)

    async def update(self, request: Request) -> Response:
        fields = decode_body(
            await read_body(request, for_reply=False), MetadataBody, table=self._table
        )
        id, tenant = request.path_params["id"], tenant_of(request.scope)
        said: dict[str, Any] = msgspec.json.decode(self._body(request))
        body = _describe(id, said["created_at"], fields.metadata or {})
        self._store.replace_body(id, body, tenant)
        return Response(body, media_type=JSON_TYPE)

    async def delete(self, request: Request) -> Response:
        id = request.path_params["id"]
        self._body(request)
        self._store.delete(id, tenant_of(request.scope))
        return json_response({"id": id, "object": "conversation.deleted", "deleted": True})

    async def list_items(self, request: Request) -> Response:
        return json_response(page_of(self._item_ids(request), request, self._store))

    async def add_items(self, request: Request) -> Response:
        fields = decode_body(
            await read_body(request, for_reply=False), ItemsBody, table=self._table
        )
        id, tenant = request.path_params["id"], tenant_of(request.scope)
        self._body(request)
        place_of(request.scope).add_bytes(self._store.num_bytes_of(id, None, tenant))
        items = self._new_items(fields.items, request)
        plain_messages(self._store.items_of(id, None, tenant), items, None, field="items")
        return json_response(list_of(self._store.extend(id, items, tenant), self._store, tenant))

    async def show_item(self, request: Request) -> Response:
        tenant, item_id = tenant_of(request.scope), request.path_params["item_id"]
        if item_id not in self._item_ids(request):
            raise UnknownItemError(
                f"Item with id {item_id[:64]!r} not found.", "The conversation has no such item."
            )
        (item,) = self._store.items_by_id([item_id], tenant)
        return json_response(shown(item))

    async def delete_item(self, request: Request) -> Response:
        self._body(request)
        id, tenant = request.path_params["id"], tenant_of(request.scope)
        self._store.remove_item(id, request.path_params["item_id"], tenant)
        return Response(self._body(request), media_type=JSON_TYPE)

    def _body(self, request: Request) -> bytes:
        id, tenant = request.path_params["id"], tenant_of(request.scope)
        self._store.require(id, "conversation", tenant)
        return self._store.body_of(id, tenant)

    def _item_ids(self, request: Request) -> list[str]:
        self._body(request)
        return self._store.item_ids_of(request.path_params["id"], tenant_of(request.scope))

    def _new_items(self, items: list[Item], request: Request) -> list[Item]:
        return resolved(
            items, self._store, tenant_of(request.scope), place_of(request.scope), "items"
        )


def _describe(id: str, created_at: int, metadata: dict[str, str]) -> bytes:
    fields = {"id": id, "object": "conversation", "created_at": created_at, "metadata": metadata}
    return msgspec.json.encode(fields)
