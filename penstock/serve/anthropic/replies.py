"""Anthropic's replies: turns deltas into blocks and their events, and errors into error bodies.

A stream is message_start, then for every block content_block_start, its deltas and
content_block_stop, then message_delta with the stop reason, and message_stop. A block ends where a
delta of another kind begins.

A call that turned out to be invalid is closed in a stream, which has announced it, and left out of
a body. In both, what the model wrote for it becomes text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.errors import PenstockError, RequestError
from penstock.serve.answer import Choice
from penstock.serve.text_stream import ReplyDelta, Usage
from penstock.text.dialects import (
    ContentDelta,
    Delta,
    ReasoningDelta,
    ReplyEnd,
    ToolArguments,
    ToolCallEnd,
    ToolCallStart,
)
from penstock.text.dialects.json_calls import whole_part

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    529: "overloaded_error",
}
# Clients drop unsigned reasoning, and send signed reasoning back. The signature is not checked
# here.
SIGNATURE = "penstock"

Frame = tuple[bytes, bytes]


class MessageFormat:
    """One message, streamed or whole."""

    usage_so_far: Callable[[], Usage] | None = None  # None: the prompt is still being prepared

    def __init__(self, request_id: str, model: str, max_tokens: int | None) -> None:
        self._request_id = request_id
        self.id = f"msg_{request_id}"
        self._head = {"id": self.id, "type": "message", "role": "assistant", "model": model}
        self._max_tokens = max_tokens
        self._has_begun = False
        self._num_blocks = 0  # begun so far
        self._open: type[Delta] | None = None  # the kind of the open block
        self._frame: Frame = (b"", b"")  # around each piece of the open block
        self._end = ReplyEnd("stop")

    def encode_chunk(self, delta: ReplyDelta) -> bytes:
        deltas = delta.deltas
        only = deltas[0] if len(deltas) == 1 else None
        if isinstance(only, (ContentDelta, ReasoningDelta)) and type(only) is self._open:
            return msgspec.json.encode(only.text).join(
                self._frame
            )  # nearly all chunks: head + text + tail
        events = [self._message_start()]
        for piece in deltas:
            events += self._events_of(piece)
        return b"".join(events)

    def encode_heartbeat(self) -> bytes:
        return self._message_start() + _event("ping", {})

    def _message_start(self) -> bytes:
        """Sent once, as soon as the prompt's tokens are counted. message_delta reports how many
        were cached."""
        if self._has_begun or self.usage_so_far is None:
            return b""
        self._has_begun = True
        fields: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = {**self._head, **fields, "usage": _usage(self.usage_so_far())}
        return _event("message_start", {"message": message})

    def _events_of(self, piece: Delta) -> Iterable[bytes]:
        match piece:
            case ContentDelta(text) | ReasoningDelta(text) | ToolArguments(_, text):
                if self._open is not type(piece):
                    yield from self._open_block(type(piece), EMPTY_BLOCKS[type(piece)])
                yield msgspec.json.encode(text).join(self._frame)
            case ToolCallStart(_, id, name):
                call = {"type": "tool_use", "id": id, "name": name, "input": {}}
                yield from self._open_block(ToolArguments, call)
            case ToolCallEnd():
                yield from self._close_block()
            case ReplyEnd():
                yield from self._close_block()
                self._end = piece

    def _open_block(self, kind: type[Delta], block: dict[str, Any]) -> Iterable[bytes]:
        yield from self._close_block()
        index = self._num_blocks
        self._num_blocks += 1
        self._open = kind
        self._frame = _delta_frame(index, *DELTA_FIELDS[kind])
        yield _event("content_block_start", {"index": index, "content_block": block})

    def _close_block(self) -> Iterable[bytes]:
        if self._open is None:
            return
        index = self._num_blocks - 1
        if self._open is ReasoningDelta:
            signature = {"type": "signature_delta", "signature": SIGNATURE}
            yield _event("content_block_delta", {"index": index, "delta": signature})
        self._open = None
        yield _event("content_block_stop", {"index": index})

    def encode_end(self, usage: Usage) -> bytes:
        end = {"delta": self._ending(self._end, usage), "usage": _usage(usage)}
        return _event("message_delta", end) + _event("message_stop", {})

    def encode_failure(self, error: PenstockError) -> bytes:
        return b"event: error\ndata: %b\n\n" % encode_error(error, self._request_id)

    def encode_body(self, choices: dict[int, Choice], usage: Usage) -> bytes:
        deltas = choices[0].deltas
        end = deltas[-1]
        assert isinstance(end, ReplyEnd)
        blocks = [block.fields() for block in _blocks_of(deltas)]
        body = {**self._head, "content": blocks, **self._ending(end, usage), "usage": _usage(usage)}
        return msgspec.json.encode(body)

    def _ending(self, end: ReplyEnd, usage: Usage) -> dict[str, str | None]:
        """A call must be answered, so it is reported even if a stop string came after it."""
        reason, stop_string = STOP_REASONS[end.reason], None
        if end.reason == "stop" and end.stop_string is not None:
            reason, stop_string = "stop_sequence", end.stop_string
        elif end.reason == "length" and not end.is_loop:
            is_context_full = usage.num_completion_tokens < (self._max_tokens or 0)
            reason = "model_context_window_exceeded" if is_context_full else reason
        return {"stop_reason": reason, "stop_sequence": stop_string}


EMPTY_BLOCKS: dict[type[Delta], dict[str, Any]] = {
    ContentDelta: {"type": "text", "text": ""},
    ReasoningDelta: {"type": "thinking", "thinking": "", "signature": ""},
}
DELTA_FIELDS: dict[type[Delta], tuple[str, str]] = {
    ContentDelta: ("text_delta", "text"),
    ReasoningDelta: ("thinking_delta", "thinking"),
    ToolArguments: ("input_json_delta", "partial_json"),
}


def _delta_frame(index: int, kind: str, field: str) -> Frame:
    """What comes before and after each piece of a block; a NUL, which JSON never contains, marks
    its place."""
    delta = {"type": kind, field: msgspec.Raw(b"\0")}
    head, tail = _event("content_block_delta", {"index": index, "delta": delta}).split(b"\0")
    return head, tail


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (
        kind.encode(),
        msgspec.json.encode({"type": kind, **fields}),
    )


@dataclass(slots=True)
class _Block:
    """A block of a body while its pieces are collected."""

    kind: type[Delta]
    pieces: list[str] = field(default_factory=list)
    id: str = ""
    name: str = ""

    def fields(self) -> dict[str, Any]:
        text = "".join(self.pieces)
        if self.kind is ContentDelta:
            return {"type": "text", "text": text}
        if self.kind is ReasoningDelta:
            return {"type": "thinking", "thinking": text, "signature": SIGNATURE}
        return {
            "type": "tool_use",
            "id": self.id,
            "name": self.name,
            "input": msgspec.Raw(text.encode()),
        }


def _blocks_of(deltas: list[Delta]) -> list[_Block]:
    blocks: list[_Block] = []
    for piece in deltas:
        match piece:
            case ContentDelta(text) | ReasoningDelta(text):
                if not blocks or blocks[-1].kind is not type(piece):
                    blocks.append(_Block(type(piece)))
                blocks[-1].pieces.append(text)
            case ToolCallStart(_, id, name):
                blocks.append(_Block(ToolArguments, id=id, name=name))
            case ToolArguments(_, json):
                blocks[-1].pieces.append(json)
            case ToolCallEnd(_, is_broken=True):
                blocks.pop()
            case ToolCallEnd(_, is_cut=True):  # a body needs a whole object, a stream does not
                blocks[-1].pieces = [whole_part("".join(blocks[-1].pieces)) or "{}"]
    return blocks


def _usage(usage: Usage) -> dict[str, Any]:
    """The three kinds of input tokens add up to the prompt."""
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.num_completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.num_reasoning_tokens},
    }


def error_status(status: int) -> int:
    """The status that Anthropic's clients expect instead of ours. To them, 429 means a rate limit,
    and there is none: a server that is full or not ready is overloaded."""
    return 529 if status in (429, 503) else status


def encode_error(error: PenstockError, request_id: str | None = None) -> bytes:
    details = error.details if isinstance(error, RequestError) else None
    return encode_error_fields(str(error), error.status, request_id, details)


def encode_error_fields(
    message: str, status: int, request_id: str | None = None, details: dict[str, Any] | None = None
) -> bytes:
    other = "api_error" if status >= 500 else "invalid_request_error"
    kind = ERROR_TYPES.get(error_status(status), other)
    error = {"type": kind, "message": message, **({} if details is None else {"details": details})}
    return msgspec.json.encode({"type": "error", "error": error, "request_id": request_id})
