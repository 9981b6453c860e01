"""Replies as the Responses API spells them: output items, the response around them, events of a stream.

One machine (`Output`) makes items of a reply's news and tells their events on the way. A body that is sent
whole is that machine's items, so a stream ends with the very response it would have been. Only a call that
came to nothing differs: a stream that had begun it says that it is incomplete, and then it is forgotten; all
the model wrote of it follows as text.

Knows how answers are spelled, not where they come from, how they travel, or where they are kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from penstock.errors import ContextLengthError, OverloadedError, PenstockError, RequestError
from penstock.serve.answer import Choice
from penstock.serve.event_stream import HEARTBEAT_COMMENT
from penstock.serve.responses.requests import use_own_name
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

Fields = dict[str, Any]
Event = tuple[str, Fields]  # its type, and what it says besides
Keep = Callable[[bytes, list[Fields]], None]
Status = Literal["in_progress", "completed", "incomplete"]


class TextItem:
    """A message or a thought of the model's: an item with one part of text."""

    def __init__(self, token: str, index: int, is_thought: bool) -> None:
        self.id = f"{'rs' if is_thought else 'msg'}_{token}_{index}"
        self.index = index
        self.is_thought = is_thought
        self._voice = "reasoning_text" if is_thought else "output_text"
        self._texts: list[str] = []
        self._place = {"item_id": self.id, "output_index": index, "content_index": 0}
        # Text deltas are nearly all events of a stream: one frame around a number and a string.
        kind = f"response.{self._voice}.delta"
        fields = {"type": kind, **self._place, **self._no_logprobs()}
        self._frame = b"event: %b\ndata: %b" % (kind.encode(), msgspec.json.encode(fields)[:-1])

    def encode_delta(self, text: str, number: int) -> bytes:
        self._texts.append(text)
        return b'%b,"sequence_number":%d,"delta":%b}\n\n' % (self._frame, number, msgspec.json.encode(text))

    def fields(self, status: Status) -> Fields:
        content = [self._part()] if status != "in_progress" else []
        if self.is_thought:
            return {
                "id": self.id,
                "type": "reasoning",
                "summary": [],
                "content": content,
                "encrypted_content": None,
                "status": status,
            }
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}

    def start(self) -> list[Event]:
        item = self.fields("in_progress")
        return [
            ("response.output_item.added", {"output_index": self.index, "item": item}),
            ("response.content_part.added", {**self._place, "part": self._part()}),
        ]

    def end(self, status: Status) -> list[Event]:
        part = self._part()
        return [
            (f"response.{self._voice}.done", {**self._place, "text": part["text"], **self._no_logprobs()}),
            ("response.content_part.done", {**self._place, "part": part}),
            ("response.output_item.done", {"output_index": self.index, "item": self.fields(status)}),
        ]

    def _part(self) -> Fields:
        self._texts = ["".join(self._texts)]
        part = {"type": self._voice, "text": self._texts[0]}
        return part if self.is_thought else {**part, "annotations": [], **self._no_logprobs()}

    def _no_logprobs(self) -> Fields:
        return {} if self.is_thought else {"logprobs": []}


class CallItem:
    """A call of a function."""

    def __init__(self, token: str, index: int, call: ToolCallStart) -> None:
        self.id = f"fc_{token}_{index}"
        self.index = index
        self._call = call
        self._arguments: list[str] = []
        self._place = {"item_id": self.id, "output_index": index}

    def fields(self, status: Status) -> Fields:
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self._call.id,
            "name": self._call.name,
            "arguments": "".join(self._arguments),
        }

    def start(self) -> list[Event]:
        return [
            ("response.output_item.added", {"output_index": self.index, "item": self.fields("in_progress")})
        ]

    def add(self, json: str) -> list[Event]:
        self._arguments.append(json)
        return [("response.function_call_arguments.delta", {**self._place, "delta": json})]

    def end(self, status: Status) -> list[Event]:
        item = self.fields(status)
        done = ("response.output_item.done", {"output_index": self.index, "item": item})
        if status != "completed":  # whoever waits for arguments must not take these
            return [done]
        arguments = {**self._place, "name": self._call.name, "arguments": item["arguments"]}
        return [("response.function_call_arguments.done", arguments), done]


class Output:
    """The items of one reply, of which the last may be open; makes events of all that happens to them."""

    def __init__(self, token: str) -> None:
        self.items: list[Fields] = []  # that are done
        self.reason: str | None = None  # why the reply ended
        self._token = token
        self._open: TextItem | CallItem | None = None
        self._num_items = 0  # that were ever begun
        self._num_events = 0
        self._has_answer = False  # a message or a whole call
        self._has_spoken = {True: False, False: False}  # thoughts, messages

    def encode_event(self, kind: str, fields: Fields) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        data = msgspec.json.encode({"type": kind, "sequence_number": number, **fields})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    def take(self, piece: Delta) -> bytes:
        """The events of one piece of news."""
        match piece:
            case ContentDelta(text):
                return self._take_text(text, is_thought=False)
            case ReasoningDelta(text):
                return self._take_text(text, is_thought=True)
            case ToolCallStart():
                return self._begin(CallItem(self._token, self._num_items, piece))
            case ToolArguments(_, json):
                assert isinstance(self._open, CallItem)
                return self._encode(self._open.add(json))
            case ToolCallEnd(_, is_broken, is_cut):
                return self._end("incomplete" if is_broken or is_cut else "completed", is_dropped=is_broken)
            case ReplyEnd(reason):
                return self._take_end(reason)

    def unfinished(self) -> list[Fields]:
        """All items, when the reply has failed."""
        return [*self.items, *([self._open.fields("incomplete")] if self._open is not None else [])]

    def _take_text(self, text: str, is_thought: bool) -> bytes:
        events = b""
        if not isinstance(self._open, TextItem) or self._open.is_thought != is_thought:
            if self._has_spoken[is_thought]:  # what parted this text from the last
                text = text.lstrip()
            self._has_spoken[is_thought] = True
            events = self._begin(TextItem(self._token, self._num_items, is_thought))
        assert isinstance(self._open, TextItem)
        number, self._num_events = self._num_events, self._num_events + 1
        return events + self._open.encode_delta(text, number)

    def _take_end(self, reason: str) -> bytes:
        self.reason = reason
        events = self._end("incomplete" if reason == "length" else "completed")
        if not self._has_answer and reason != "length":  # a reply without words is an empty message
            events += self._begin(TextItem(self._token, self._num_items, is_thought=False))
            events += self._end("completed")
        return events

    def _begin(self, item: TextItem | CallItem) -> bytes:
        ended = self._end("completed")
        self._open = item
        self._num_items += 1
        return ended + self._encode(item.start())

    def _end(self, status: Status, is_dropped: bool = False) -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        if not is_dropped:
            self.items.append(item.fields(status))
            self._has_answer = self._has_answer or isinstance(item, CallItem) or not item.is_thought
        return self._encode(item.end(status))

    def _encode(self, events: list[Event]) -> bytes:
        return b"".join(self.encode_event(kind, fields) for kind, fields in events)


class ResponseReplyFormat:
    """A response: created, its items, completed. `keep` is given one that has ended, and its items."""

    def __init__(self, id: str, model: str, echo: Fields, keep: Keep | None) -> None:
        self._head = {"id": id, "object": "response", "created_at": int(time.time()), "model": model}
        self._echo = echo
        self._keep = keep
        self._output = Output(id.removeprefix("resp_"))
        self._has_begun = False

    def encode_chunk(self, delta: ReplyDelta) -> bytes:
        events = b"" if self._has_begun else self._encode_start()
        return events + b"".join([self._output.take(piece) for piece in delta.news])

    def encode_heartbeat(self) -> bytes:
        return (b"" if self._has_begun else self._encode_start()) + HEARTBEAT_COMMENT

    def encode_end(self, usage: Usage) -> bytes:
        response, body = self._finish(usage)
        return self._output.encode_event(f"response.{response['status']}", {"response": msgspec.Raw(body)})

    def encode_failure(self, error: PenstockError) -> bytes:
        events = b"" if self._has_begun else self._encode_start()
        param = None
        if isinstance(error, RequestError):
            use_own_name(error)
            param = error.param
        events += self._output.encode_event(
            "error", {"code": error.code, "message": str(error), "param": param}
        )
        failure = {"code": _failure_code(error), "message": str(error)}
        response = self._response("failed", self._output.unfinished(), error=failure)
        return events + self._output.encode_event("response.failed", {"response": response})

    def encode_body(self, choices: dict[int, Choice], usage: Usage) -> bytes:
        for piece in choices[0].news:
            self._output.take(piece)
        return self._finish(usage)[1]

    def _encode_start(self) -> bytes:
        self._has_begun = True
        response = {"response": self._response("in_progress", [])}
        kinds = ("response.created", "response.in_progress")
        return b"".join([self._output.encode_event(kind, response) for kind in kinds])

    def _finish(self, usage: Usage) -> tuple[Fields, bytes]:
        is_cut = self._output.reason == "length"
        response = self._response(
            "incomplete" if is_cut else "completed",
            self._output.items,
            usage=_usage(usage),
            completed_at=None if is_cut else int(time.time()),
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
        )
        body = msgspec.json.encode(response)
        if self._keep is not None:
            self._keep(body, self._output.items)
        return response, body

    def _response(self, status: str, output: list[Fields], **known: Any) -> Fields:
        later = {"error": None, "incomplete_details": None, "usage": None, "completed_at": None, **known}
        return {**self._head, "status": status, **later, "output": output, **self._echo}


def _failure_code(error: PenstockError) -> str:
    """The nearest of the few that the API has."""
    if isinstance(error, RequestError):  # Codex shortens its conversation where it reads the first of these
        return error.code if isinstance(error, ContextLengthError) else "invalid_prompt"
    return "rate_limit_exceeded" if isinstance(error, OverloadedError) else "server_error"


def _usage(usage: Usage) -> Fields:
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
    }
