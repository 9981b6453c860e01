"""One streamed request over a raw socket: sends bytes, and records every piece of the answer with
its time.

While a load runs, the reading side only parses HTTP (in C) and records (time, piece); `read_answer`
decodes the pieces afterwards. So one core can follow tens of thousands of events per second without
limiting the result. Every request has its own connection; its clock starts before that is opened.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import socket
import ssl
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import httptools
import msgspec

from penstock.http_client import key_header, lost_connection_is_said, message_in, read_address

CONNECT_TIMEOUT_S = 10.0
MAX_MESSAGE_CHARS = 300


@dataclass(frozen=True, slots=True)
class Target:
    """A server with the OpenAI API: its address, resolved once, and the path of the endpoint."""

    address: str
    port: int
    host: str
    path: str
    is_https: bool

    @classmethod
    def of(cls, base_url: str, endpoint: str = "/v1/chat/completions") -> Target:
        """Takes the first address of the host name that accepts a connection."""
        url = read_address(base_url)
        is_https = url.scheme == "https"
        host, port = url.hostname or "127.0.0.1", url.port or (443 if is_https else 80)
        path = url.path.rstrip("/").removesuffix("/v1") + endpoint
        # A name may have several addresses, of which only some answer: localhost often does.
        with (
            lost_connection_is_said(base_url),
            socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S) as connection,
        ):
            address = connection.getpeername()[0]
            if is_https:
                _certificates().wrap_socket(connection, server_hostname=host).close()
        return cls(address, port, host, path, is_https)

    def encode_request(self, body: bytes) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        key = "".join(f"{name}: {value}\r\n" for name, value in key_header().items())
        head = (
            f"POST {self.path} HTTP/1.1\r\n"
            f"Host: {host}:{self.port}\r\n"
            "Content-Type: application/json\r\n"
            "Accept: text/event-stream\r\n"
            f"Connection: close\r\n{key}"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


@dataclass(slots=True)
class RawAnswer:
    """The undecoded answer. Times are from the monotonic clock, which all processes share."""

    started_s: float
    ended_s: float = 0.0
    status: int = 0  # 0 if there was not even a status line
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    failure: str = ""  # of the transport; the server's own errors are read later
    is_timeout: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)


class _Exchange(asyncio.Protocol):
    """Sends the request and records the answer; `ended` is done at its end, or on disconnect."""

    def __init__(self, request: bytes, answer: RawAnswer, on_piece: Callable[[], None]) -> None:
        self._request = request
        self._answer = answer
        self._on_piece = on_piece
        self._parser = httptools.HttpResponseParser(self)
        self._now_s = 0.0
        self.transport: asyncio.Transport | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's do not inherit from it
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now_s = time.monotonic()
        self._on_piece()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"The answer is not HTTP: {error}.")

    def on_headers_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._answer.pieces.append((self._now_s, body))

    def on_message_complete(self) -> None:
        self._end()

    def connection_lost(self, error: Exception | None) -> None:
        self._end(f"The connection broke: {error}." if error else "")

    def _end(self, failure: str = "") -> None:
        if not self.ended.done():
            self._answer.failure = failure
            self.ended.set_result(None)


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Loaded once: it can take longer than a first token."""
    return ssl.create_default_context()


async def exchange(
    target: Target, request: bytes, timeout_s: float, on_piece: Callable[[], None] = lambda: None
) -> RawAnswer:
    """Sends one encoded request and awaits its whole answer. A server cannot make it raise."""
    answer = RawAnswer(time.monotonic())
    protocol = _Exchange(request, answer, on_piece)
    security: dict[str, Any] = {}
    if target.is_https:
        security = {"ssl": _certificates(), "server_hostname": target.host}
    try:
        async with asyncio.timeout(timeout_s):
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: protocol, target.address, target.port, **security)
            await protocol.ended
    except TimeoutError:
        answer.is_timeout = True
        answer.failure = f"No end after {timeout_s:g} s."
    except OSError as error:
        answer.failure = f"No connection: {error}."
    finally:
        answer.ended_s = time.monotonic()
        if protocol.transport is not None:
            protocol.transport.abort()
    return answer


@dataclass(slots=True)
class StreamedReply:
    """A reply as its client saw it. If `error` is not empty, nothing else of it counts."""

    started_s: float
    ended_s: float
    error: str = ""
    # One for every event with text.
    token_times_s: array[float] = field(default_factory=lambda: array("d"))
    text: str = ""
    content: str = ""  # the text without reasoning in a field of its own
    finish_reason: str = ""
    num_prompt_tokens: int = 0  # this and the next two are the server's counts
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def ttft_s(self) -> float | None:
        """Time to the first text; None if there was none: unknown tokens have no text."""
        return self.token_times_s[0] - self.started_s if self.token_times_s else None

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.started_s

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.token_times_s)]

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; unlike gaps, independent of tokens per event."""
        if self.num_completion_tokens < 2 or len(self.token_times_s) < 2:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.num_completion_tokens - 1)


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None

    @property
    def text(self) -> str:
        return self.content or self.reasoning_content or self.reasoning or ""


class _Choice(msgspec.Struct):
    delta: _Delta | None = None  # of a chunk
    message: _Delta | None = None  # of a whole chat completion
    text: str | None = None  # of completions of raw prompts, whole or not
    finish_reason: str | None = None

    @property
    def part(self) -> _Delta:
        return self.delta or self.message or _Delta(self.text)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    """A chunk of a stream, or a whole completion: a stream of one chunk."""

    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: Any = None


_EVENTS = msgspec.json.Decoder(_Event)


def read_answer(answer: RawAnswer) -> StreamedReply:
    """The content of an answer, and its error if there is one."""
    reply = StreamedReply(answer.started_s, answer.ended_s)
    if answer.status not in (0, 200):
        reply.error = f"HTTP {answer.status}: {_message_in(answer.body)}"
        return reply
    is_whole = bool(answer.pieces) and not answer.failure and answer.pieces[0][1].startswith(b"{")
    try:
        is_done = (
            _read_whole(reply, answer) if is_whole else _read_events(reply, _events(answer.pieces))
        )
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        what = "The answer" if is_whole else "An event"
        reply.error = f"{what} is not a chat completion{'' if is_whole else ' chunk'}: {error}."
        return reply
    if reply.error:
        pass
    elif answer.failure:
        so_far = f" {len(reply.token_times_s)} events with text had come." if answer.status else ""
        reply.error = answer.failure + so_far
    elif not is_done:
        reply.error = (
            "The stream ended without [DONE]."
            if answer.status
            else "The connection closed without an answer."
        )
    elif not reply.num_prompt_tokens:
        reply.error = "The server sent no usage, so its tokens cannot be counted."
    return reply


def _read_whole(reply: StreamedReply, answer: RawAnswer) -> bool:
    """An answer without a stream is one event; its text is not timed, as it came all at once."""
    body = answer.body
    if not any(
        choice.message or choice.text is not None for choice in _EVENTS.decode(body).choices
    ):
        raise msgspec.ValidationError("it has no choice with a message or a text")
    return _read_events(reply, [(None, body), (None, b"[DONE]")])


def _read_events(reply: StreamedReply, events: Iterable[tuple[float | None, bytes]]) -> bool:
    """Fills in the content of the events; returns whether [DONE] came last."""
    texts, contents = [], []
    is_done = False
    for time_s, data in events:
        if data == b"[DONE]":
            is_done = True
            break
        event = _EVENTS.decode(data)
        if event.error is not None:
            reply.error = f"The stream failed: {_message_in(data)}"
            break
        for choice in event.choices:
            part = choice.part
            contents.append(part.content or "")
            if part.text or part.tool_calls:
                texts.append(part.text)
                if time_s is not None:
                    reply.token_times_s.append(time_s)
            reply.finish_reason = choice.finish_reason or reply.finish_reason
        if (usage := event.usage) is not None:
            details = usage.prompt_tokens_details
            reply.num_prompt_tokens = usage.prompt_tokens
            reply.num_completion_tokens = usage.completion_tokens
            reply.num_cached_tokens = (details.cached_tokens or 0) if details else 0
    reply.text, reply.content = "".join(texts), "".join(contents)
    return is_done


def _events(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The data of events, each with the time at which its line ended."""
    rest = b""
    for time_s, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield time_s, line[5:].strip()


def _message_in(body: bytes) -> str:
    """A server's own message, on one line."""
    return " ".join(message_in(body).split())[:MAX_MESSAGE_CHARS]
