"""Messages of server and engine: each arrives unchanged, and nothing else is accepted."""

from __future__ import annotations

import asyncio
import socket
import struct
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import errors
from penstock.digests import PageDigests
from penstock.errors import ContextLengthError, EngineDeadError, PenstockError, RequestError
from penstock.progress import Phase
from penstock.types import (
    EngineInfo,
    EngineStats,
    Request,
    SamplingParams,
    TokenDelta,
    TokenLogprob,
)
from penstock.wire import (
    MAX_FRAME_BYTES,
    Abort,
    CachedAnswer,
    CachedQuery,
    Deltas,
    Dying,
    EngineChannel,
    ErrorFields,
    FromEngine,
    Ping,
    Pong,
    Progress,
    Ready,
    Rejected,
    ServerChannel,
    ServerGoneError,
    Shutdown,
    StatsAnswer,
    StatsQuery,
    Submit,
    WireError,
    encode_frame,
)

SAMPLING = SamplingParams(
    max_tokens=7,
    temperature=0.5,
    logit_bias={3: -100.0, 70_000: 1.5},
    seed=-(2**63),
    stop=("a", "ü"),
    logprobs=2,
)
INFO = EngineInfo("m", "cpu", "float32", 512, 1024, 64, 16, 33, 9, 10**11, 10**12)
STATS = EngineStats(1, 2, 3, 4, 5, 6, 7, {"hit": 8})
TO_ENGINE = [
    Submit(
        Request(
            id="r",
            token_ids=tuple(range(300)),
            sampling=SAMPLING,
            end_token_ids=(2,),
            boundaries=(4,),
        )
    ),
    Abort("r"),
    StatsQuery(2**40),
    CachedQuery(1, PageDigests.of(range(40), 16), 40),
    Ping(),
    Shutdown(),
]
FROM_ENGINE = [
    Progress(Phase("weights", "3 of 4", 0.75)),
    Ready(INFO),
    Deltas([TokenDelta("r", (1, 2), (TokenLogprob(1, float("-inf"), ((2, -0.25),)),), "stop", 64)]),
    Deltas([TokenDelta(f"r{i}", (i,)) for i in range(64)]),
    Rejected("r", ErrorFields("RequestError", "what", "why", "todo", "prompt")),
    StatsAnswer(2**40, STATS),
    CachedAnswer(1, 32),
    Pong(0.25),
    Dying(ErrorFields("CapacityError", "no room")),
]


def engine_pair() -> tuple[EngineChannel, socket.socket]:
    ours, theirs = socket.socketpair()
    return EngineChannel(ours), theirs


async def receive_all(
    data: bytes, messages: list[FromEngine] | None = None, piece_bytes: int = 2**20
) -> list[FromEngine]:
    """What the server reads from bytes that end."""
    messages = [] if messages is None else messages
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    _, channel = await loop.create_connection(lambda: ServerChannel(lambda _: None), sock=ours)
    listening = asyncio.create_task(channel.listen(messages.append))
    theirs.setblocking(False)
    for start in range(0, len(data), piece_bytes):
        await loop.sock_sendall(theirs, data[start : start + piece_bytes])
        await asyncio.sleep(0)
    theirs.close()
    try:
        await listening
    finally:
        channel.close()
    return messages


def test_every_message_to_the_engine_arrives_as_it_was() -> None:
    channel, server = engine_pair()
    server.sendall(b"".join(map(encode_frame, TO_ENGINE)))
    assert [channel.receive() for _ in TO_ENGINE] == TO_ENGINE


@pytest.mark.parametrize("piece_bytes", [1, 5, 4096])
def test_every_message_from_the_engine_arrives_as_it_was_however_it_is_cut(
    piece_bytes: int,
) -> None:
    data = b"".join(map(encode_frame, FROM_ENGINE))
    assert asyncio.run(receive_all(data, piece_bytes=piece_bytes)) == FROM_ENGINE


def test_what_the_engine_sends_before_a_reader_connects_is_not_lost() -> None:
    async def scenario() -> list[FromEngine]:
        messages: list[FromEngine] = []
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_connection(lambda: ServerChannel(lambda _: None), sock=ours)
        with theirs:
            theirs.sendall(encode_frame(FROM_ENGINE[0]))
            await asyncio.sleep(0.05)
        await channel.listen(messages.append)
        return messages

    assert asyncio.run(scenario()) == FROM_ENGINE[:1]


@settings(max_examples=50, deadline=None)
@given(
    token_ids=st.lists(st.integers(0, 2**31), max_size=40).map(tuple),
    bias=st.dictionaries(st.integers(0, 2**31), st.floats(-100, 100), max_size=4),
    stop=st.lists(st.text(st.characters(exclude_categories=("Cs",)), min_size=1), max_size=3).map(
        tuple
    ),
    temperature=st.floats(0, 100),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
)
def test_any_request_survives_the_wire(token_ids, bias, stop, temperature, seed) -> None:  # type: ignore[no-untyped-def]
    sampling = SamplingParams(logit_bias=bias, stop=stop, temperature=temperature, seed=seed)
    message = Submit(Request(id="r", token_ids=token_ids, sampling=sampling))
    channel, server = engine_pair()
    server.sendall(encode_frame(message))
    assert channel.receive() == message
    server.close()
    channel.close()


def test_a_frame_cut_anywhere_is_the_end_and_not_a_message() -> None:
    frame = encode_frame(FROM_ENGINE[2])
    for length in range(len(frame)):
        assert asyncio.run(receive_all(frame[:length])) == []
        channel, server = engine_pair()
        server.sendall(frame[:length])
        server.close()
        assert channel.receive() is None
        channel.close()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"type": "Nothing"}),
        msgspec.msgpack.encode({"type": "Abort", "request_id": 5}),
        encode_frame(FROM_ENGINE[0])[4:],  # a message, but not for this direction
        b"cos\nsystem\n(S'true'\ntR.",
    ],
)
def test_bytes_that_are_no_message_are_a_wire_error(payload: bytes) -> None:
    channel, server = engine_pair()
    server.sendall(struct.pack(">I", len(payload)) + payload)
    with pytest.raises(WireError):
        channel.receive()


@pytest.mark.parametrize("payload", [b"", b"\xc1", encode_frame(TO_ENGINE[0])[4:]])
def test_bytes_that_are_no_message_of_an_engine_end_the_listening_after_what_came_before(
    payload: bytes,
) -> None:
    messages: list[FromEngine] = []
    good = encode_frame(FROM_ENGINE[0])
    with pytest.raises(WireError):
        asyncio.run(receive_all(good + struct.pack(">I", len(payload)) + payload + good, messages))
    assert messages == FROM_ENGINE[:1]


def test_a_frame_longer_than_the_limit_is_refused_before_it_is_read() -> None:
    header = struct.pack(">I", MAX_FRAME_BYTES + 1)
    channel, server = engine_pair()
    server.sendall(header)
    with pytest.raises(WireError, match=str(MAX_FRAME_BYTES)):
        channel.receive()
    with pytest.raises(WireError):
        asyncio.run(receive_all(header))
    with pytest.raises(WireError):
        encode_frame(Abort("x" * (MAX_FRAME_BYTES + 1)))


def test_frames_of_two_threads_never_mix() -> None:
    """The reader thread answers pings while the other one sends the results of a step."""
    channel, server = engine_pair()
    deltas = Deltas([TokenDelta(f"r{i}", tuple(range(1000))) for i in range(64)])
    pong = Pong(0.5)

    async def listen() -> list[FromEngine]:
        messages: list[FromEngine] = []
        loop = asyncio.get_running_loop()
        _, ours = await loop.create_connection(lambda: ServerChannel(lambda _: None), sock=server)
        listening = asyncio.create_task(ours.listen(messages.append))
        senders = [loop.run_in_executor(None, send, message) for message in (deltas, pong)]
        await asyncio.gather(*senders)
        channel.close()
        await listening
        ours.close()
        return messages

    def send(message: FromEngine) -> None:
        for _ in range(30):
            channel.send(message)

    messages = asyncio.run(listen())
    assert (messages.count(deltas), messages.count(pong)) == (30, 30)


def test_sending_to_a_server_that_left_says_so() -> None:
    channel, server = engine_pair()
    server.close()
    with pytest.raises(ServerGoneError):
        channel.send(Shutdown())  # type: ignore[arg-type]  # any message will do


@pytest.mark.parametrize(
    "error",
    [
        ContextLengthError("what", "why", "todo", param="prompt"),
        RequestError("what", param="n"),
        EngineDeadError("what", "why"),
        PenstockError("what"),
    ],
)
def test_an_error_keeps_its_class_and_its_words_across_the_wire(error: PenstockError) -> None:
    again = ErrorFields.of(error).to_error()
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.status == error.status
    assert getattr(again, "param", None) == getattr(error, "param", None)


@pytest.mark.parametrize(
    "kind", ["nearest", "Iterable", "difflib", "__builtins__", "NoSuchError", ""]
)
def test_an_unknown_error_kind_is_never_called(kind: str) -> None:
    assert kind == "" or kind == "NoSuchError" or hasattr(errors, kind)
    assert type(ErrorFields(kind, "what").to_error()) is PenstockError


def test_a_worker_that_fails_says_why_in_one_line_and_ends(tmp_path: Path) -> None:
    """A config that cannot be read stands for any unexpected exception."""
    path = str(tmp_path / "engine.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        worker = subprocess.Popen(
            [sys.executable, "-m", "penstock.engine.worker", "--socket", path],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=Path(__file__).resolve().parents[1],
        )
        assert worker.stdin is not None
        worker.stdin.write(b"not json")
        worker.stdin.close()
        worker.stdin = None
        connection, _ = listener.accept()
        data = b"".join(iter(lambda: connection.recv(65536), b""))
        _, log = worker.communicate(timeout=60)
        connection.close()
    last = asyncio.run(receive_all(data))[-1]
    assert isinstance(last, Dying)
    assert last.error.kind == "EngineDeadError"
    assert "DecodeError" in last.error.what
    assert "\n" not in last.error.what
    assert b"Traceback" in log  # for the operator
    assert worker.returncode == 1
