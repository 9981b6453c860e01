"""Log-probabilities by the hundred thousand: bounded frames, and no encoding that blocks others."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import socket
import threading
import time
from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from penstock import wire
from penstock.engine import scheduler, worker
from penstock.errors import RequestError
from penstock.serve.metrics import Metrics, TokenTimer
from penstock.serve.openai.replies import ChatReplyFormat, CompletionReplyFormat, OpenAIReplyFormat
from penstock.serve.openai.requests import parse_completion
from penstock.serve.openai.scores import CompletionScores
from penstock.serve.text_engine import MAX_ECHO_CHARS, TextEngine
from penstock.serve.text_stream import PlainText, Reply, ReplyDelta, ScoredToken, TextStream
from penstock.text.dialects import ContentDelta
from penstock.text.prompt import MAX_SCORES, limit_scores
from penstock.text.template import ChatTemplate
from penstock.text.tokenizer import Tokenizer
from penstock.types import PromptScores, Request, SamplingParams, TokenDelta, TokenLogprob

NUM_TOP = 20
LONGEST_S = 0.1  # CPU time of this thread between two turns of the loop


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(None)


def packed(token_ids: list[int], num_top: int = NUM_TOP) -> PromptScores:
    num_tokens = len(token_ids)
    logprobs = [-0.1 - place / 7 for place in range(num_tokens)]
    top_ids = [(place * 31 + rank) % 1000 for place in range(num_tokens) for rank in range(num_top)]
    top = [-0.1 - place / 7 - rank / 3 for place in range(num_tokens) for rank in range(num_top)]
    parts = (array("i", token_ids), array("f", logprobs), array("i", top_ids), array("f", top))
    return PromptScores(*(part.tobytes() for part in parts), num_top)


def test_packed_scores_unpack_to_what_they_were_in_any_part() -> None:
    scores = packed([5, 6, 7], num_top=2)
    whole = scores.unpack()
    assert [score.token_id for score in whole] == [5, 6, 7]
    assert [token_id for token_id, _ in whole[1].top] == [31, 32]
    assert whole[2].logprob == pytest.approx(-0.1 - 2 / 7)
    assert [one for place in range(3) for one in scores.part(place, place + 1).unpack()] == whole
    assert scores.part(1, 9).unpack() == whole[1:]
    assert [score.top for score in packed([5, 6], num_top=0).unpack()] == [(), ()]


# What the engine sends


@contextlib.contextmanager
def channel_to(frames: list[bytes]) -> Iterator[wire.EngineChannel]:
    """An engine's end of a channel; the messages of the other end are in the list afterwards."""
    ours, theirs = socket.socketpair()

    def read() -> None:
        data = b"".join(iter(lambda: theirs.recv(65536), b""))
        while data:
            end = 4 + int.from_bytes(data[:4])
            frames.append(data[4:end])
            data = data[end:]

    thread = threading.Thread(target=read)
    thread.start()
    channel = wire.EngineChannel(ours)
    try:
        yield channel
    finally:
        channel.close()
        thread.join()
        theirs.close()


def deltas_in(frame: bytes) -> list[TokenDelta]:
    return msgspec.msgpack.decode(frame, type=wire.Deltas).deltas


def test_scores_have_frames_of_their_own_and_all_deltas_keep_their_order() -> None:
    scores = [TokenDelta("a", prompt_scores=packed([1] * num)) for num in (3, 2)]
    deltas = [TokenDelta("b", (1,)), TokenDelta("c", (2,)), *scores, TokenDelta("a", (3,))]
    frames: list[bytes] = []
    with channel_to(frames) as channel:
        worker.send_deltas(deltas, SimpleNamespace(), channel)  # type: ignore[arg-type]
        worker.send_deltas([], SimpleNamespace(), channel)  # type: ignore[arg-type]
    assert list(map(deltas_in, frames)) == [deltas[:2], deltas[2:3], deltas[3:4], deltas[4:]]


def test_the_longest_part_of_a_chunk_is_far_from_what_a_frame_holds() -> None:
    part = packed([150_000] * (scheduler.DELTA_SCORES // (NUM_TOP + 1)))
    assert len(wire.encode_frame(wire.Deltas([TokenDelta("a", prompt_scores=part)]))) < 64 * 1024


def test_what_no_frame_can_hold_ends_its_own_request_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 500)
    long = TokenDelta("long", (1,), tuple(TokenLogprob(1, -1.0) for _ in range(100)))
    deltas = [TokenDelta("before", (1,)), long, TokenDelta("after", (2,), finish="length")]
    dropped: list[str] = []
    frames: list[bytes] = []
    with channel_to(frames) as channel, caplog.at_level(logging.CRITICAL):
        worker.send_deltas(deltas, SimpleNamespace(drop=dropped.append), channel)  # type: ignore[arg-type]
    before, failed, after = [delta for frame in frames for delta in deltas_in(frame)]
    assert (before, after) == (deltas[0], deltas[2])
    assert (failed.request_id, failed.finish) == ("long", "error")
    assert "500" in (failed.error or "")
    assert dropped == ["long"]


class BrokenEngine:
    """Fails in an unexpected way for some requests."""

    def __init__(self) -> None:
        self.dropped: list[str] = []

    def submit(self, request: Request) -> None:
        raise ZeroDivisionError("inside")

    def drop(self, request_id: str) -> None:
        self.dropped.append(request_id)


def test_an_engine_that_cannot_take_a_request_refuses_it_and_lives(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = BrokenEngine()
    frames: list[bytes] = []
    with channel_to(frames) as channel, caplog.at_level(logging.CRITICAL):
        worker.handle(wire.Submit(Request(id="r", token_ids=(1,))), engine, channel)  # type: ignore[arg-type]
    (rejected,) = [msgspec.msgpack.decode(frame, type=wire.Rejected) for frame in frames]
    assert (rejected.request_id, engine.dropped) == ("r", ["r"])
    assert rejected.error.to_error().status == 500


@pytest.mark.parametrize("sampling", [{"temperature": -1.0}, {"temperature": "hot"}])
def test_a_request_that_cannot_be_read_is_refused_and_the_next_is_read(
    sampling: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Types validate values when they are created: no server can send these, only a bug could."""
    ours, theirs = socket.socketpair()
    bad = msgspec.msgpack.encode(
        {"type": "Submit", "request": {"id": "bad", "token_ids": [1], "sampling": sampling}}
    )
    theirs.sendall(len(bad).to_bytes(4) + bad + wire.encode_frame(wire.Abort("good")))
    with ours, theirs, caplog.at_level(logging.CRITICAL):
        assert worker._receive(wire.EngineChannel(ours)) == wire.Abort("good")
        answer = theirs.recv(65536)
    rejected = msgspec.msgpack.decode(answer[4:], type=wire.Rejected)
    assert rejected.request_id == "bad"
    assert "temperature" in rejected.error.why


# What the server makes of it


class Answering:
    """The replies to one call, from the engine's frames to the body, and the longest turn of the
    loop.
    """

    def __init__(
        self, tokenizer: Tokenizer, style: type[OpenAIReplyFormat], num_replies: int
    ) -> None:
        self.format = style("id", "model", has_logprobs=True)
        self.choices = {index: self.format.new_choice() for index in range(num_replies)}
        client: Any = SimpleNamespace(submit=lambda *_: None, abort=lambda _: None)
        self.stream = TextStream(client, lambda delta: self.choices[delta.index].take(delta))
        is_echo = style is CompletionReplyFormat
        sampling = SamplingParams(logprobs=NUM_TOP, prompt_logprobs=NUM_TOP if is_echo else None)
        self.replies = {
            str(index): Reply(
                self.stream,
                Request(id=str(index), token_ids=(7,), sampling=sampling),
                index,
                tokenizer,
                TokenTimer(Metrics(), 1, 0.0),
                PlainText(),
                echo="x" if is_echo else "",
                echoes_scores=is_echo,
            )
            for index in range(num_replies)
        }
        self.stream.submit([list(self.replies.values())])
        self.turns_s = [0.0]

    @property
    def longest_s(self) -> float:
        return max(self.turns_s)

    def take(self, message: Any) -> None:
        for delta in message.deltas:
            self.replies[delta.request_id].take(delta)

    async def watch(self) -> None:
        while True:
            started = time.thread_time()
            await asyncio.sleep(0)
            self.turns_s.append(time.thread_time() - started)

    async def run(self, steps: list[list[TokenDelta]]) -> bytes:
        """An engine in a thread sends these steps; returns the body of the response."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        connected: asyncio.Future[wire.ServerChannel] = loop.create_future()
        await loop.create_connection(lambda: wire.ServerChannel(connected.set_result), sock=ours)
        listening = asyncio.ensure_future((await connected).listen(self.take))
        watching = asyncio.ensure_future(self.watch())

        def send() -> None:
            channel = wire.EngineChannel(theirs)
            for deltas in steps:
                worker.send_deltas(deltas, SimpleNamespace(), channel)  # type: ignore[arg-type]
            channel.close()

        thread = threading.Thread(target=send)
        thread.start()
        await self.stream.wait_ended()
        body = self.format.encode_body(self.choices, self.stream.usage)
        await asyncio.sleep(0)
        watching.cancel()
        await listening
        thread.join()
        return body


@pytest.fixture
def _frozen() -> Iterator[None]:
    """Freezes objects like a started server: collections do not scan all that pytest has loaded."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def parts_of(scores: PromptScores) -> list[TokenDelta]:
    size = scheduler.DELTA_SCORES // (NUM_TOP + 1)
    starts = range(0, len(scores), size)
    return [TokenDelta("0", prompt_scores=scores.part(start, start + size)) for start in starts]


@pytest.mark.usefixtures("_frozen")
def test_a_long_scored_prompt_delays_no_other_request(tokenizer: Tokenizer) -> None:
    """20,000 tokens with twenty alternatives each once took 1.7 s in one turn of the loop."""
    ids = [place % 1000 for place in range(20_000)]
    last = TokenDelta("0", (5,), (TokenLogprob(5, -1.0, ((5, -1.0),)),), "length")

    async def scenario() -> tuple[bytes, float]:
        answering = Answering(tokenizer, CompletionReplyFormat, 1)
        return await answering.run([[*parts_of(packed(ids)), last]]), answering.longest_s

    body, longest_s = asyncio.run(scenario())
    scores = json.loads(body)["choices"][0]["logprobs"]
    texts = [tokenizer.token_bytes(id).decode("utf-8", "replace") for id in (7, *ids, 5)]
    assert scores["tokens"] == texts
    assert scores["token_logprobs"][:2] == [None, pytest.approx(-0.1)]
    assert len(scores["top_logprobs"]) == len(scores["text_offset"]) == len(texts)
    assert longest_s < LONGEST_S


@pytest.mark.usefixtures("_frozen")
def test_many_scored_replies_that_end_together_delay_no_other_request(tokenizer: Tokenizer) -> None:
    """A chat of n = 64 with twenty alternatives once took 0.8 s in the turn in which it ended."""
    num_replies, num_tokens = 64, 200
    top = tuple((rank * 17 % 1000, -float(rank)) for rank in range(NUM_TOP))

    def step(place: int) -> list[TokenDelta]:
        finish: Any = "length" if place == num_tokens - 1 else None
        scored = (TokenLogprob(place % 1000, -1.5, top),)
        return [
            TokenDelta(str(index), (place % 1000,), scored, finish) for index in range(num_replies)
        ]

    async def scenario() -> tuple[bytes, float]:
        answering = Answering(tokenizer, ChatReplyFormat, num_replies)
        return await answering.run(
            [step(place) for place in range(num_tokens)]
        ), answering.longest_s

    body, longest_s = asyncio.run(scenario())
    choices = json.loads(body)["choices"]
    assert [choice["index"] for choice in choices] == list(range(num_replies))
    for choice in choices:
        content = choice["logprobs"]["content"]
        assert len(content) == num_tokens
        assert [len(token["top_logprobs"]) for token in content] == [NUM_TOP] * num_tokens
    assert longest_s < LONGEST_S


def test_scores_are_the_same_however_they_arrive() -> None:
    """Whole, in a stream, and with values that JSON cannot express."""
    tokens = [
        ReplyDelta(0, [], packed_tokens([b"a", b"\xff", b'"'])),
        ReplyDelta(0, [], packed_tokens([b"b"], float("-inf"))),
    ]
    for style in (ChatReplyFormat, CompletionReplyFormat):
        whole, parts = style("id", "m", has_logprobs=True), style("id", "m", has_logprobs=True)
        choice = whole.new_choice()
        for delta in tokens:
            choice.take(delta)
        assert choice.scores is not None
        together = json.loads(b"".join(choice.scores.take()))
        streamed = [json.loads(parts._chunk_scores(delta)) for delta in tokens]
        for name, values in together.items():
            assert values is None or values == [value for one in streamed for value in one[name]]
    assert together["tokens"] == ["a", "\ufffd", '"', "b"]
    assert together["token_logprobs"][-1] == -9999.0
    assert together["text_offset"] == [0, 1, 2, 3]


def test_an_offset_counts_characters_of_the_text_and_not_their_parts() -> None:
    scores = CompletionScores()
    for data in (b"a\xe6", b"\xbc", b"\xa2", b"b"):  # the text is a漢b
        scores.add(packed_tokens([data]))
    assert json.loads(b"".join(scores.take()))["text_offset"] == [0, 1, 1, 2]


def packed_tokens(texts: list[bytes], logprob: float = -1.0) -> Any:
    return tuple(ScoredToken(text, logprob, ((b"z", logprob),)) for text in texts)


# What may be asked for


LEGITIMATE: dict[str, tuple[list[int], dict[str, Any]]] = {
    "lm-eval": ([32_768], {"max_tokens": 1, "logprobs": 1, "prompt_logprobs": 1}),
    "lm-eval in batches": ([2_048] * 128, {"max_tokens": 1, "logprobs": 1, "prompt_logprobs": 1}),
    "a whole context": ([262_143], {"max_tokens": 1, "logprobs": 1, "prompt_logprobs": 1}),
    "several replies": ([1000], {"n": 8, "max_tokens": 4096, "logprobs": 5}),
    "one long reply": ([1000], {"max_tokens": 32_768, "logprobs": 20}),
    "without scores": ([262_000], {"n": 128, "max_tokens": 262_000}),
}


@pytest.mark.parametrize("name", LEGITIMATE)
def test_what_people_ask_for_is_given(name: str) -> None:
    lengths, fields = LEGITIMATE[name]
    sampling = SamplingParams(**fields)
    assert limit_scores([[1] * length for length in lengths], sampling, 262_144) == sampling


@pytest.mark.parametrize(
    ("lengths", "fields", "numbers"),
    [
        (
            [10],
            {"n": 64, "max_tokens": 4096, "logprobs": 20},
            ["5,505,024", "n is 64", "max_tokens 4096"],
        ),
        (
            [198_000],
            {"max_tokens": 1, "logprobs": 20, "prompt_logprobs": 20},
            ["4,158,021", "4,158,000"],
        ),
        (
            [60_000] * 20,
            {"max_tokens": 1, "logprobs": 0, "prompt_logprobs": 0},
            ["1,200,020", "are 20"],
        ),
    ],
)
def test_more_scores_than_an_answer_may_have_are_refused_with_the_numbers(
    lengths: list[int], fields: dict[str, Any], numbers: list[str]
) -> None:
    with pytest.raises(RequestError) as refusal:
        limit_scores([[1] * length for length in lengths], SamplingParams(**fields), 262_144)
    for number in (*numbers, f"{MAX_SCORES:,}"):
        assert number in str(refusal.value)
    assert refusal.value.param == "logprobs"
    assert "Lower" in refusal.value.todo


def test_a_reply_without_a_limit_has_as_many_tokens_as_may_be_scored() -> None:
    def limit(max_model_len: int, n: int = 1) -> int | None:
        return limit_scores([[1] * 100], SamplingParams(logprobs=20, n=n), max_model_len).max_tokens

    assert limit(4096) is None
    assert limit(262_144) == MAX_SCORES // 21
    assert limit(262_144, n=128) == MAX_SCORES // 21 // 128


class SilentFleet:
    """Accepts requests, and sends for each what the test has set."""

    def __init__(self) -> None:
        self.receivers: list[tuple[Request, Any]] = []

    def require_ready(self) -> Any:
        return SimpleNamespace(max_model_len=2**22, page_size=64)

    def submit(self, receivers: Any, _: Any = None) -> None:
        self.receivers += receivers

    def abort(self, request_id: str) -> None:
        pass


def completion_of(tokenizer: Tokenizer, reply: list[int], **fields: Any) -> str:
    """The text of a completion whose reply has these tokens."""

    async def scenario() -> str:
        fleet, texts = SilentFleet(), []
        engine = TextEngine(fleet, tokenizer, ChatTemplate("x"), Metrics())  # type: ignore[arg-type]

        def deliver(delta: ReplyDelta) -> None:
            texts.extend(piece.text for piece in delta.deltas if isinstance(piece, ContentDelta))

        asked = parse_completion(json.dumps(fields).encode())
        await engine.stream_completion("id", asked, deliver)
        for request, receiver in fleet.receivers:
            receiver.take(TokenDelta(request.id, tuple(reply), finish="length"))
        return "".join(texts)

    return asyncio.run(scenario())


def test_an_echo_too_long_for_all_replies_together_is_refused(tokenizer: Tokenizer) -> None:
    prompt = "x" * (MAX_ECHO_CHARS // 64)
    assert len(completion_of(tokenizer, [5], prompt=prompt, echo=True, n=64)) > MAX_ECHO_CHARS
    with pytest.raises(RequestError, match="The echo would have") as refusal:
        completion_of(tokenizer, [5], prompt=prompt, echo=True, n=65)
    assert refusal.value.param == "echo"


def test_a_completion_of_sentence_piece_begins_with_the_space_that_parts_it_from_its_prompt() -> (
    None
):
    library = tokenizers.Tokenizer(models.BPE({"▁a": 0, "b": 1, "▁": 2}, []))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    library.add_special_tokens(["<s>"])
    tokenizer = Tokenizer(library)
    assert completion_of(tokenizer, [0, 1], prompt=[3, 0, 1]) == " ab"
    assert completion_of(tokenizer, [0, 1], prompt=[3, 0, 1], echo=True) == "ab ab"
    assert completion_of(tokenizer, [0, 1], prompt=[3]) == "ab"  # a text begins here
