"""The Responses API's endpoints: replies, and stored responses to read, stream again or delete."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.errors import RequestError
from penstock.serve.admission import tenant_of
from penstock.serve.answer import (
    JSON_TYPE,
    Answer,
    Choice,
    Within,
    event_stream,
    ids_of_page,
    json_response,
    list_fields,
    read_body,
    require_open,
    shorter,
)
from penstock.serve.body import decode_body
from penstock.serve.fields import COMPACT, RESPONSES, FieldTable
from penstock.serve.intake import Place, place_of
from penstock.serve.responses.items import Item, Items, items_of, seal, shown
from penstock.serve.responses.replies import (
    Fields,
    Keep,
    ResponseChoice,
    ResponseReplyFormat,
    usage_fields,
)
from penstock.serve.responses.requests import (
    Reasoning,
    ResponseBody,
    ResponseRequest,
    own_names,
    parse_response,
    require_input,
    response_request,
    sent_items,
)
from penstock.serve.responses.runs import Run, Runs
from penstock.serve.responses.store import Kind, ResponseStore, new_id
from penstock.serve.sessions import SessionChat, session_key
from penstock.serve.state import ServerState
from penstock.serve.text_stream import Usage
from penstock.text.dialects import ParsedReply

DEFAULT_ITEMS, MAX_LISTED_ITEMS = 20, 100  # per page


def routes(state: ServerState, store: ResponseStore) -> list[Route]:
    api = ResponsesRoutes(state, store)
    return [
        Route("/v1/responses", api.respond, methods=["POST"]),
        Route("/v1/responses/input_tokens", api.count_tokens, methods=["POST"]),
        Route("/v1/responses/compact", api.compact, methods=["POST"]),
        Route("/v1/responses/{id}", api.show, methods=["GET"]),
        Route("/v1/responses/{id}", api.delete, methods=["DELETE"]),
        Route("/v1/responses/{id}/cancel", api.cancel, methods=["POST"]),
        Route("/v1/responses/{id}/input_items", api.list_input, methods=["GET"]),
    ]


class ResponsesRoutes:
    def __init__(self, state: ServerState, store: ResponseStore) -> None:
        self._state = state
        self._store = store
        self._runs = Runs()
        self._table = RESPONSES.ignoring(state.config.ignore_field)
        self._compact_table = COMPACT.ignoring(state.config.ignore_field)

    async def respond(self, request: Request) -> Within | Response:
        fields = parse_response(await read_body(request), self._table)
        asked = self._asked(fields, request)
        talk = SessionChat(asked.chat, request, self._state)
        tenant, id = tenant_of(request.scope), new_id()
        said = [*items_of(talk.held), *asked.items]
        keep = self._keeper(id, said if asked.is_stored else None, fields, tenant)
        formatter = ResponseReplyFormat(id, self._state.model_name, asked.echo, keep, asked.form)
        chat = asked.chat
        if asked.is_background:
            run = Run(
                formatter,
                lambda body: self._store.keep(id, body, said, tenant, len(said)),
                chat.is_stream,
            )
            return await self._run(id, run, talk, request, chat.timeout_s)
        form = (formatter, chat.is_stream, chat.timeout_s, ResponseChoice)
        return Within(Answer(talk.stream, *form, headers=talk.headers), own_names)

    def _keeper(
        self, id: str, said: list[Item] | None, fields: ResponseBody, tenant: str
    ) -> Keep | None:
        """Returns a function that stores the ended response and extends its conversation. None:
        neither was requested, so a long request need not stay in memory. `said`: None if the
        response is not stored."""
        conversation = fields.conversation_id
        if said is None and conversation is None:
            return None
        sent = [] if conversation is None else sent_items(fields)

        def keep(body: bytes, output: list[Fields]) -> None:
            reply = msgspec.convert(output, list[Item])
            if said is not None:
                self._store.keep(id, body, [*said, *reply], tenant, num_inputs=len(said))
            if conversation is not None:
                add_if_there(self._store, conversation, [*sent, *reply], tenant, len(sent))

        return keep

    async def _run(
        self, id: str, run: Run, talk: SessionChat, request: Request, timeout_s: float | None
    ) -> Response:
        """Starts a reply that continues if its client disconnects. Raises errors in the request at
        once."""
        require_open(self._state)
        with own_names():
            stream = await talk.stream(run.deliver)
        self._runs.add(id, tenant_of(request.scope), run)
        run.follow(stream, shorter(timeout_s, self._state.config.request_timeout))
        if run.events is not None:
            return event_stream(run.events.read(0), request)
        return Response(run.body(), headers=talk.headers, media_type=JSON_TYPE)

    def _asked(self, fields: ResponseBody, request: Request) -> ResponseRequest:
        """The request with the conversation that it continues, and with its references
        resolved."""
        tenant, place = tenant_of(request.scope), place_of(request.scope)
        history: list[Item] = []
        before: tuple[tuple[str, Kind, str | None], ...] = (
            ("previous_response_id", "response", fields.previous_response_id),
            ("conversation", "conversation", fields.conversation_id),
        )
        for name, kind, id in before:
            if id is not None:
                self._require_ended(id, tenant, name)
                self._store.require(id, kind, tenant, name)
                place.add_bytes(self._store.num_bytes_of(id, name, tenant))
                history = self._store.items_of(id, name, tenant)
        if isinstance(fields.input, list):
            fields.input = resolved(fields.input, self._store, tenant, place)
        key = session_key(fields.session_id, request)
        called = {} if key is None else self._state.conversations.names_of_calls(key)
        return response_request(fields, history, called, self._state.config.sampling_defaults)

    def _require_ended(self, id: str, tenant: str, param: str) -> None:
        if self._runs.find(id, tenant) is not None:
            raise RequestError(
                f"The response {id[:64]!r} has not ended",
                "It runs in the background.",
                "Wait until its status is completed.",
                param=param,
            )

    async def show(self, request: Request) -> Response:
        id, tenant = request.path_params["id"], tenant_of(request.scope)
        run = self._runs.find(id, tenant)
        body = self._kept(id, tenant) if run is None else run.body()
        if request.query_params.get("stream", "false") == "false":
            return Response(body, media_type=JSON_TYPE)
        after = request.query_params.get("starting_after", "-1")
        if after != "-1" and not (after.isascii() and after.isdigit() and len(after) < 10):
            raise RequestError(
                f"starting_after is {after[:32]!r}",
                "It must be an event's number.",
                param="starting_after",
            )
        return event_stream(self._runs.events_of(id).read(int(after) + 1), request)

    async def delete(self, request: Request) -> Response:
        id, tenant = request.path_params["id"], tenant_of(request.scope)
        if (run := self._runs.find(id, tenant)) is not None:
            run.cancel()
        self._kept(id, tenant)
        self._store.delete(id, tenant)
        self._runs.forget(id)
        return json_response({"id": id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """Cancelling again returns the same response."""
        id, tenant = request.path_params["id"], tenant_of(request.scope)
        if (run := self._runs.find(id, tenant)) is not None:
            run.cancel()
        body = self._kept(id, tenant)
        kept = msgspec.json.decode(body, type=_Ended)
        if not kept.background:
            raise RequestError(
                f"The response {id[:64]!r} cannot be cancelled",
                "It was not requested with background: true.",
                "Close the connection that waits for such a reply.",
            )
        if kept.status != "cancelled":
            raise RequestError(f"Cannot cancel a {kept.status} response.", "It has already ended.")
        return Response(body, media_type=JSON_TYPE)

    async def list_input(self, request: Request) -> Response:
        id, tenant = request.path_params["id"], tenant_of(request.scope)
        self._require_ended(id, tenant, "response_id")
        self._kept(id, tenant)
        item_ids = self._store.item_ids_of(id, tenant, is_input=True)
        return json_response(page_of(item_ids, request, self._store))

    def _kept(self, id: str, tenant: str) -> bytes:
        self._store.require(id, "response", tenant)
        return self._store.body_of(id, tenant)

    async def count_tokens(self, request: Request) -> Response:
        fields = parse_response(await read_body(request, for_reply=False), self._table)
        chat = self._asked(fields, request).chat
        with own_names():
            num_tokens = await self._state.text.num_tokens(
                chat, tenant_of(request.scope), place_of(request.scope).num_bytes
            )
        return json_response({"object": "response.input_tokens", "input_tokens": num_tokens})

    async def compact(self, request: Request) -> Within:
        fields = parse_compact(await read_body(request), self._compact_table)
        asked = self._asked(fields, request)
        require_input(asked.items[:-1])  # the last one is `ASK`
        # Not a turn of a session: the client continues with the result.
        chat = replace(asked.chat, loop_guard=True, tenant=tenant_of(request.scope))
        id, place = request.scope["request_id"], place_of(request.scope)
        start = partial(self._state.text.stream_chat, id, chat, place=place)
        return Within(Answer(start, CompactionFormat(asked.items), is_stream=False), own_names)


class _Ended(msgspec.Struct):
    background: bool
    status: str


def resolved(
    items: list[Item], store: ResponseStore, tenant: str, place: Place, param: str = "input"
) -> list[Item]:
    """Replaces references by the items themselves; `param`: the field that has them."""
    ids = [item.id or "" for item in items if item.is_reference]
    if not ids:
        return items
    place.add_bytes(store.num_bytes_of_items(ids, tenant, param))
    found = iter(store.items_by_id(ids, tenant))
    return [next(found) if item.is_reference else item for item in items]


def add_if_there(
    store: ResponseStore, id: str, items: list[Item], tenant: str, num_inputs: int
) -> None:
    """Extends a conversation, unless it was deleted meanwhile."""
    try:
        store.extend(id, items, tenant, num_inputs)
    except RequestError:
        return


def page_of(item_ids: Sequence[str], request: Request, store: ResponseStore) -> Fields:
    """The requested page of these items."""
    ids, has_more = ids_of_page(item_ids, request, DEFAULT_ITEMS, MAX_LISTED_ITEMS)
    return list_of(ids, store, tenant_of(request.scope), has_more)


def list_of(
    ids: Sequence[str], store: ResponseStore, tenant: str, has_more: bool = False
) -> Fields:
    return list_fields(ids, [shown(item) for item in store.items_by_id(ids, tenant)], has_more)


ASK = (
    "Summarise our conversation for someone who goes on with it and has not read it: the goal, "
    "what was done and found, decisions with their reasons, names, paths and numbers that are "
    "still needed, and what is left to do. Reply with the summary alone."
)
KEPT_ROLES = ("user", "system", "developer")


class CompactBody(msgspec.Struct, kw_only=True):
    """A request to shorten a long conversation (see `CompactionFormat`). The oldest messages are
    left out if they do not all fit the context.
    """

    model: str | None = None
    input: str | Items | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None


def parse_compact(body: bytes, table: FieldTable = COMPACT) -> ResponseBody:
    """The request for a summary."""
    fields = decode_body(body, CompactBody, table=table)
    asked = ResponseBody(
        input=fields.input,
        instructions=fields.instructions,
        previous_response_id=fields.previous_response_id,
        prompt_cache_key=fields.prompt_cache_key,
        reasoning=Reasoning(effort="none"),
        truncation="auto",
        store=False,
    )
    asked.input = [*sent_items(asked), Item(role="user", content=ASK)]
    return asked


class CompactionFormat:
    """A conversation as its user messages and the model's summary of the rest: an opaque item that
    clients send back like any other. Never streamed."""

    def __init__(self, items: Sequence[Item]) -> None:
        *said, _ = items  # the last item is `ASK`
        self._kept = [item for item in said if item.role in KEPT_ROLES]

    def encode_body(self, choices: dict[int, Choice], usage: Usage) -> bytes:
        summary = ParsedReply.of(choices[0].deltas).content
        token = new_id("cmp")
        compaction = {"id": token, "type": "compaction", "encrypted_content": seal(summary)}
        messages = [
            {**shown(item), "id": item.id or f"msg_{token.removeprefix('cmp_')}_{index}"}
            for index, item in enumerate(self._kept)
        ]
        head = {"id": new_id(), "object": "response.compaction", "created_at": int(time.time())}
        output = {"output": [*messages, compaction], "usage": usage_fields(usage)}
        return msgspec.json.encode({**head, **output})
