"""Sessions over HTTP: which conversation a request belongs to; listing and deleting sessions.

A request names its session with the field `session_id` or the header `x-session-id`, in any API;
the field wins. Tenants do not see each other's sessions. The engines keep what was computed
(cache/sessions.py), the server keeps the messages (conversations.py): a chat continues from them on
any engine. The prompt of a raw completion is the whole text, so only its cache is kept.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.errors import ContextLengthError, PenstockError, RequestError
from penstock.serve.admission import priority_in, tenant_of
from penstock.serve.answer import Start, json_response
from penstock.serve.conversations import (
    SHORTEN,
    ConversationInfo,
    Conversations,
    Key,
    Message,
    Packed,
    Thread,
    Turn,
)
from penstock.serve.fleet import Fleet
from penstock.serve.instructions import warning_headers
from penstock.serve.intake import place_of
from penstock.serve.requests import (
    MAX_SESSION_ID_CHARS,
    ChatRequest,
    CompletionRequest,
    TextRequest,
)
from penstock.serve.state import ServerState
from penstock.serve.text_engine import TextEngine
from penstock.serve.text_stream import Deliver, ReplyDelta, TextStream, without_thoughts
from penstock.text.dialects import Delta, ParsedReply, ReplyEnd
from penstock.types import SessionInfo

HEADER = "x-session-id"
# Session headers of agents. They send whole histories, and other requests with the same header: so
# it only locates the cache, and no messages are held for it.
CACHE_HEADERS = ("x-claude-code-session-id", "session-id", "session_id")
STATUS_HEADER = "x-session-status"  # in answers; its values are `conversations.Status`
WHY_ENDED = {
    "deleted": "It was deleted.",
    "expired": "It was not used for longer than --session-minutes.",
    "evicted": "Other sessions evicted it: --session-mb limits the messages of all sessions.",
}

Asked = TypeVar("Asked", bound=TextRequest)


class SessionNotFoundError(PenstockError):
    """No session with this id is kept."""

    status = 404
    code = "session_not_found"


def in_session(asked: Asked, request: Request) -> Asked:
    """The request with its tenant, and with the session that the header names if the body names
    none."""
    tenant = tenant_of(request.scope)
    session_id = named_session(asked.session_id, request)
    if session_id is not None:
        session_id = _scoped(tenant, session_id)
    else:
        names = [asked.cache_key, *(request.headers.get(name) for name in CACHE_HEADERS)]
        cache_key = next((name for name in names if name), None)
        session_id = None if cache_key is None else _cached(tenant, cache_key)
    priority = priority_in(request.scope, asked.priority)
    return replace(asked, tenant=tenant, session_id=session_id, priority=priority)


def completion_start(asked: CompletionRequest, request: Request, text: TextEngine) -> Start:
    """Begins a completion, which may belong to a session: only its cache is kept."""
    return partial(
        text.stream_completion,
        request.scope["request_id"],
        in_session(asked, request),
        place=place_of(request.scope),
    )


def named_session(field: str | None, request: Request) -> str | None:
    """The client's name of its session; `field`: the one in the body."""
    return field if field is not None else _session_of_header(request)


def session_key(field: str | None, request: Request) -> Key | None:
    session_id = named_session(field, request)
    return None if session_id is None else (tenant_of(request.scope), session_id)


class SessionChat:
    """A chat that may belong to a session: then it continues from the session's messages, and its
    first reply is added to them when it has ended."""

    def __init__(
        self,
        asked: ChatRequest,
        request: Request,
        state: ServerState,
        thread: Thread | None = None,  # its session is new, and replaces the previous one
    ) -> None:
        self._text: TextEngine = state.text
        self._request_id: str = request.scope["request_id"]
        self._place = place_of(request.scope)
        self._conversations = state.conversations
        self._turn: Turn | None = None
        self.held: list[Message] = []  # messages of the session, before the sent ones
        self._omitted = asked.omitted
        if (key := session_key(asked.session_id, request)) is not None:
            self._place.add_bytes(state.conversations.num_bytes_of(key))
            self._turn, self.held, messages = state.conversations.begin(key, asked.messages)
            asked = replace(asked, messages=messages)
            if thread is not None:
                tools = Packed.of(asked.tools or [])
                self._turn = replace(self._turn, tools=tools, replaces=thread.previous)
        self._chat = in_session(asked, request)

    @property
    def headers(self) -> dict[str, str]:
        status = {} if self._turn is None else {STATUS_HEADER: self._turn.status}
        return {**status, **warning_headers(self._omitted)}

    async def stream(self, deliver: Deliver) -> TextStream:
        note = None
        if self._chat.hides_thoughts:
            deliver = without_thoughts(deliver)
        if self._turn is not None:
            note = ReplyNote(self._conversations, self._turn, self._chat)
            deliver = note.before(deliver)
        try:
            stream = await self._text.stream_chat(
                self._request_id, self._chat, deliver, self._place
            )
        except ContextLengthError as error:
            if self.held:
                error.todo = f"{len(self.held)} of the messages are from the session. {SHORTEN}"
            raise
        if note is not None:
            note.stream = stream
        return stream


class ReplyNote:
    """Collects a chat's first reply, and adds it to its session when all replies have ended."""

    stream: TextStream  # set before the first delta

    def __init__(self, conversations: Conversations, turn: Turn, chat: ChatRequest) -> None:
        self._conversations = conversations
        self._turn = turn
        self._reply_start = chat.reply_start
        self._reply_thought = chat.reply_thought or ""
        self._num_open = chat.sampling.n
        self._deltas: list[Delta] = []

    def before(self, deliver: Deliver) -> Deliver:
        """Adds the reply before the client reads its end, so that the client can continue at
        once."""

        def note_and_deliver(delta: ReplyDelta) -> None:
            self._take(delta)
            deliver(delta)

        return note_and_deliver

    def _take(self, delta: ReplyDelta) -> None:
        if delta.index == 0:
            self._deltas += delta.deltas
        if not (delta.deltas and isinstance(delta.deltas[-1], ReplyEnd)):
            return
        self._num_open -= 1
        if self._num_open == 0:
            reply = ParsedReply.of(self._deltas)
            reply.content = self._reply_start + reply.content
            reply.reasoning = self._reply_thought + reply.reasoning
            # Templates decide which reasoning a prompt repeats.
            num_tokens = self.stream.num_context_tokens
            self._conversations.end(self._turn, reply.message(), num_tokens)


def _session_of_header(request: Request) -> str | None:
    session_id = request.headers.get(HEADER)
    if session_id is not None and not 0 < len(session_id) <= MAX_SESSION_ID_CHARS:
        raise RequestError(
            f"The header {HEADER} has {len(session_id)} characters",
            f"It must have 1 to {MAX_SESSION_ID_CHARS}.",
            param=HEADER,
        )
    return session_id


def _scoped(tenant: str, session_id: str) -> str:
    """A session's name in the engines."""
    return f"{tenant}/{session_id}"


def _cached(tenant: str, cache_key: str) -> str:
    """A name in the engines for a cache without a session: it is not listed, and no session can
    have it."""
    return f"{tenant}#{cache_key[:MAX_SESSION_ID_CHARS]}"


def routes(state: ServerState) -> list[Route]:
    api = SessionRoutes(state)
    return [
        Route("/v1/sessions", api.list),
        Route("/v1/sessions/{id:path}", api.show, methods=["GET"]),
        Route("/v1/sessions/{id:path}", api.delete, methods=["DELETE"]),
    ]


class SessionRoutes:
    def __init__(self, state: ServerState) -> None:
        self._client = state.client
        self._conversations = state.conversations

    async def list(self, request: Request) -> Response:
        """Lists the most recently used first."""
        self._client.require_ready()
        return json_response(
            {
                "object": "list",
                "data": await _describe_all(request, self._client, self._conversations),
            }
        )

    async def show(self, request: Request) -> Response:
        self._client.require_ready()
        for session in await _describe_all(request, self._client, self._conversations):
            if session["id"] == request.path_params["id"]:
                return json_response(session)
        raise self._unknown(request)

    async def delete(self, request: Request) -> Response:
        self._client.require_ready()
        tenant, session_id = _key_of_path(request)
        had_messages = self._conversations.delete((tenant, session_id))
        if not (await self._client.drop_session(_scoped(tenant, session_id)) or had_messages):
            raise self._unknown(request)
        return json_response({"id": session_id, "object": "session", "deleted": True})

    def _unknown(self, request: Request) -> SessionNotFoundError:
        tenant, session_id = _key_of_path(request)
        why = self._conversations.why_ended((tenant, session_id))
        return SessionNotFoundError(
            f"No session is named {session_id[:MAX_SESSION_ID_CHARS]!r}",
            "It never existed, or ended long ago." if why is None else WHY_ENDED[why],
            "GET /v1/sessions lists all sessions. A request that names this one starts it again.",
        )


async def _describe_all(
    request: Request, client: Fleet, conversations: Conversations
) -> list[dict[str, Any]]:
    """The tenant's sessions, by the names that it gave them."""
    tenant = tenant_of(request.scope)
    scope = _scoped(tenant, "")
    infos = [info for info in await client.sessions() if info.id.startswith(scope)]
    in_cache = {info.id.removeprefix(scope): info for info in infos}
    with_messages = {info.id: info for info in conversations.describe(tenant)}
    sessions = [
        _describe(id, in_cache.get(id), with_messages.get(id)) for id in in_cache | with_messages
    ]
    return sorted(sessions, key=lambda session: session["idle_seconds"])


def _key_of_path(request: Request) -> Key:
    return tenant_of(request.scope), request.path_params["id"]


def _describe(
    id: str, in_cache: SessionInfo | None, with_messages: ConversationInfo | None
) -> dict[str, Any]:
    """What the engines and the server keep; one of them may have dropped the session before the
    other."""
    infos = [info for info in (in_cache, with_messages) if info is not None]
    return {
        "id": id,
        "object": "session",
        "messages": 0 if with_messages is None else with_messages.num_messages,
        "message_bytes": 0 if with_messages is None else with_messages.num_bytes,
        "continues": with_messages is not None,
        "cached": in_cache is not None,
        "tokens": infos[0].num_tokens,
        "bytes": 0 if in_cache is None else in_cache.num_bytes,
        "hits": 0 if in_cache is None else in_cache.num_hits,
        "age_seconds": round(max(info.age_s for info in infos), 3),
        "idle_seconds": round(min(info.idle_s for info in infos), 3),
    }
