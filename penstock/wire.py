"""The protocol between a server and its engine process: msgpack messages in length-prefixed frames.

Owns the messages and their bytes, for a blocking side (the engine) and an asyncio side (the
server). Never unpickles anything: a frame decodes to one of the messages below or to a `WireError`.
Does not know what the messages do.

    frame = [length of the rest, 4 bytes big-endian | msgpack of one message]
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import tempfile
import threading
from collections.abc import Callable
from typing import Any, cast

import msgspec

from penstock import errors
from penstock.digests import PageDigests
from penstock.errors import PenstockError, RequestError
from penstock.progress import Phase
from penstock.types import EngineInfo, EngineStats, Request, SessionInfo, TokenDelta

MAX_FRAME_BYTES = 64 * 1024 * 1024
RANKS_PREFIX = "penstock-ranks-"  # of the folder with the sockets of an engine's ranks
MAX_SOCKET_FOLDER_BYTES = 70  # a socket's path may have about 100
_LENGTH = struct.Struct(">I")


class WireError(PenstockError):
    """Bytes that are not one of our messages, or a frame that is too long."""


class FrameTooLongError(WireError):
    """A message with more bytes than a frame may have; nothing of it was sent."""


class UnreadableRequestError(WireError):
    """A frame with a request that cannot be decoded; the next frame can be read."""

    def __init__(self, request_id: str, why: str) -> None:
        super().__init__("The engine could not read the request", why)
        self.request_id = request_id


class ServerGoneError(WireError):
    """The other end of the engine's channel is closed."""


class ErrorFields(msgspec.Struct, frozen=True):
    """An error of penstock.errors for another process; `kind` is the name of its class."""

    kind: str
    what: str
    why: str = ""
    todo: str = ""
    param: str | None = None

    @classmethod
    def of(cls, error: PenstockError) -> ErrorFields:
        param = error.param if isinstance(error, RequestError) else None
        return cls(type(error).__name__, error.what, error.why, error.todo, param)

    def to_error(self) -> PenstockError:
        kind: Any = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, PenstockError)):
            kind = PenstockError
        error: PenstockError = kind(self.what, self.why, self.todo)
        if isinstance(error, RequestError):
            error.param = self.param
        return error


class Submit(msgspec.Struct, tag=True, frozen=True):
    request: Request


class Abort(msgspec.Struct, tag=True, frozen=True):
    request_id: str


class StatsQuery(msgspec.Struct, tag=True, frozen=True):
    query_id: int


class ListSessions(msgspec.Struct, tag=True, frozen=True):
    query_id: int


class DropSession(msgspec.Struct, tag=True, frozen=True):
    query_id: int
    session_id: str


class CachedQuery(msgspec.Struct, tag=True, frozen=True):
    """How much of a prompt of this many tokens is in the prefix cache; it is not run."""

    query_id: int
    digests: PageDigests
    num_tokens: int


class Ping(msgspec.Struct, tag=True, frozen=True):
    pass


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    pass


class Progress(msgspec.Struct, tag=True, frozen=True):
    phase: Phase


class Ready(msgspec.Struct, tag=True, frozen=True):
    info: EngineInfo


class Deltas(msgspec.Struct, tag=True, frozen=True):
    """All deltas of one step."""

    deltas: list[TokenDelta]


class Rejected(msgspec.Struct, tag=True, frozen=True):
    request_id: str
    error: ErrorFields


class StatsAnswer(msgspec.Struct, tag=True, frozen=True):
    query_id: int
    stats: EngineStats


class SessionsAnswer(msgspec.Struct, tag=True, frozen=True):
    """All sessions, or the one that was dropped."""

    query_id: int
    sessions: list[SessionInfo]


class CachedAnswer(msgspec.Struct, tag=True, frozen=True):
    query_id: int
    num_tokens: int


class Pong(msgspec.Struct, tag=True, frozen=True):
    """The engine's process runs; `step_s` is how long it has been in its current step, 0 between
    steps."""

    step_s: float


class Dying(msgspec.Struct, tag=True, frozen=True):
    """The engine's last message, with the reason."""

    error: ErrorFields


ToEngine = Submit | Abort | StatsQuery | ListSessions | DropSession | CachedQuery | Ping | Shutdown
Answer = StatsAnswer | SessionsAnswer | CachedAnswer
FromEngine = Progress | Ready | Deltas | Rejected | Answer | Pong | Dying


def encode_frame(message: ToEngine | FromEngine) -> bytes:
    payload = msgspec.msgpack.encode(message)
    _check_length(len(payload))
    return _LENGTH.pack(len(payload)) + payload


def _check_length(num_bytes: int) -> None:
    if num_bytes > MAX_FRAME_BYTES:
        raise FrameTooLongError(
            "A message between server and engine is too long",
            f"It has {num_bytes} bytes; the limit is {MAX_FRAME_BYTES}.",
        )


def _decode(decoder: msgspec.msgpack.Decoder[Any], payload: bytearray | memoryview) -> Any:
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, PenstockError) as error:  # constructors validate values, too
        raise WireError(
            "A message between server and engine cannot be read", f"{error}."
        ) from error


def _request_id_in(payload: bytearray) -> str | None:
    """The id of a `Submit` that does not decode otherwise."""
    try:
        found = msgspec.msgpack.decode(payload)["request"]["id"]
    except (msgspec.DecodeError, TypeError, KeyError):
        return None
    return found if isinstance(found, str) else None


def new_socket_folder(prefix: str) -> str:
    """A folder of mode 0700, so that only this user can connect; in /tmp if TMPDIR does not exist
    or is too long.
    """
    chosen = tempfile.gettempdir()
    is_usable = os.path.isdir(chosen) and len(os.fsencode(chosen)) <= MAX_SOCKET_FOLDER_BYTES
    return tempfile.mkdtemp(prefix=prefix, dir=chosen if is_usable else "/tmp")


def read_exactly(connection: socket.socket, num_bytes: int) -> bytearray | None:
    """None: the other end has closed. Not with a buffered file: a thread that waits in one holds
    its lock, even against closing it.
    """
    data = bytearray(num_bytes)
    rest = memoryview(data)
    while rest:
        num_read = connection.recv_into(rest)
        if num_read == 0:
            return None
        rest = rest[num_read:]
    return data


class EngineChannel:
    """The engine's end: blocking. One thread may receive while any others send."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()  # frames must not interleave
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)

    @classmethod
    def connect(cls, path: str) -> EngineChannel:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(path)
        return cls(connection)

    def send(self, message: FromEngine) -> None:
        """Blocks only if the server is far behind, which bounds its memory."""
        frame = encode_frame(message)
        try:
            with self._sending:
                self._connection.sendall(frame)
        except ConnectionError as error:
            raise ServerGoneError("The server is gone", f"{error}.") from error

    def receive(self) -> ToEngine | None:
        """The next message; None when the server is gone, even in the middle of a frame."""
        header = self._read(_LENGTH.size)
        if header is None:
            return None
        (num_bytes,) = _LENGTH.unpack(header)
        _check_length(num_bytes)
        payload = self._read(num_bytes)
        if payload is None:
            return None
        try:
            message: ToEngine = _decode(self._decoder, payload)
        except WireError as error:
            request_id = _request_id_in(payload)
            if request_id is None:
                raise
            raise UnreadableRequestError(request_id, error.why) from error
        return message

    def _read(self, num_bytes: int) -> bytearray | None:
        try:
            return read_exactly(self._connection, num_bytes)
        except ConnectionError:
            return None

    def close(self) -> None:
        self._connection.close()


class ServerChannel(asyncio.Protocol):
    """The server's end: an asyncio protocol that delivers messages as they are read.

    It reads only when the loop gets to it, so an engine that is faster than its server waits in
    `send`.
    """

    def __init__(self, on_connect: Callable[[ServerChannel], None]) -> None:
        self._on_connect = on_connect
        self._take: Callable[[FromEngine], None] | None = None
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._unread = bytearray()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def send(self, message: ToEngine) -> None:
        """Never waits. Messages to an engine that is gone are dropped: `listen` reports its end."""
        if not self._transport.is_closing():
            self._transport.write(encode_frame(message))

    async def listen(self, take: Callable[[FromEngine], None]) -> None:
        """Calls `take` with every message until the engine is gone, even in the middle of a
        frame.
        """
        self._take = take
        self.data_received(b"")  # data received before
        await self._ended

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not inherit from it
        self._on_connect(self)

    def data_received(self, data: bytes) -> None:
        self._unread += data
        if self._take is None or self._ended.done():
            return
        try:
            with memoryview(self._unread) as unread:
                num_taken = self._take_frames(unread, self._take)
        except Exception as error:
            self._ended.set_exception(error)
            self._transport.abort()
        else:
            del self._unread[:num_taken]

    def _take_frames(self, unread: memoryview, take: Callable[[FromEngine], None]) -> int:
        """Delivers every complete message; returns the number of bytes they took."""
        start = 0
        while len(unread) - start >= _LENGTH.size:
            (num_bytes,) = _LENGTH.unpack_from(unread, start)
            _check_length(num_bytes)
            end = start + _LENGTH.size + num_bytes
            if len(unread) < end:
                break
            take(_decode(self._decoder, unread[start + _LENGTH.size : end]))
            start = end
        return start

    def connection_lost(self, error: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_result(None)
