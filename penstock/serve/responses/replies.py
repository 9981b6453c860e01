"""Replies in the format of the Responses API: output items, the response around them, events of a
stream.

One state machine (`Output`) turns a reply's deltas into items and emits their events on the way. A
whole body consists of that machine's items, so a stream ends with the same response as a body. Only
an invalid call differs: a stream that has announced it reports it as incomplete, and the item is
dropped; what the model wrote for it follows as text.

Knows the format of answers, not where they come from, how they are sent, or where they are stored.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from penstock.errors import ContextLengthError, OverloadedError, PenstockError, RequestError
from penstock.serve.answer import Choice
from penstock.serve.body import rename
from penstock.serve.event_stream import HEARTBEAT_COMMENT
from penstock.serve.openai.scores import ChatToken, chat_token
from penstock.serve.responses.custom_tools import InputText
from penstock.serve.responses.items import seal
from penstock.serve.responses.requests import OWN_NAMES, PLAIN_FORM, ReplyForm
from penstock.serve.text_stream import ReplyDelta, ScoredToken, Usage
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
Event = tuple[str, Fields]  # its type, and its other fields
Keep = Callable[[bytes, list[Fields]], None]
Status = Literal["in_progress", "completed", "incomplete"]


class TextItem:
    """A message or reasoning of the model: an item with one text part."""

    def __init__(self, token: str, index: int, is_thought: bool, form: ReplyForm) -> None:
        self.id = f"{'rs' if is_thought else 'msg'}_{token}_{index}"
        self.index = index
        self.is_thought = is_thought
        self._form = form
        self._is_summary = is_thought and form.has_summary
        self._voice = "output_text" if not is_thought else "reasoning_text"
        self._part_name, number = "content_part", "content_index"
        if self._is_summary:
            self._voice, number = "reasoning_summary_text", "summary_index"
            self._part_name = "reasoning_summary_part"
        self._texts: list[str] = []
        self._scores: list[ChatToken] = []
        self._place = {"item_id": self.id, "output_index": index, number: 0}
        # Nearly all events of a stream are text deltas: one frame around a number and a string.
        kind = f"response.{self._voice}.delta"
        fields = {"type": kind, **self._place}
        self._frame = b"event: %b\ndata: %b" % (kind.encode(), msgspec.json.encode(fields)[:-1])

    def encode_delta(self, text: str, number: int, scores: list[ChatToken]) -> bytes:
        self._texts.append(text)
        self._scores += scores
        logprobs = b"" if self.is_thought else b',"logprobs":%b' % msgspec.json.encode(scores)
        delta = msgspec.json.encode(text)
        return b'%b%b,"sequence_number":%d,"delta":%b}\n\n' % (self._frame, logprobs, number, delta)

    def fields(self, status: Status) -> Fields:
        parts = [self._part()] if status != "in_progress" else []
        if self.is_thought:
            is_sealed = self._form.is_sealed or self._is_summary
            return {
                "id": self.id,
                "type": "reasoning",
                "summary": parts if self._is_summary else [],
                "content": [] if self._is_summary else parts,
                "encrypted_content": seal(self._text()) if is_sealed and parts else None,
                "status": status,
            }
        return {
            "id": self.id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": parts,
        }

    def start(self) -> list[Event]:
        return [
            _item_event("added", self.index, self.fields("in_progress")),
            (f"response.{self._part_name}.added", {**self._place, "part": self._part()}),
        ]

    def end(self, status: Status) -> list[Event]:
        part = self._part()
        text = {"text": part["text"], **self._logprobs()}
        return [
            (f"response.{self._voice}.done", {**self._place, **text}),
            (f"response.{self._part_name}.done", {**self._place, "part": part}),
            _item_event("done", self.index, self.fields(status)),
        ]

    def _text(self) -> str:
        self._texts = ["".join(self._texts)]
        return self._texts[0]

    def _part(self) -> Fields:
        kind = "summary_text" if self._is_summary else self._voice
        part = {"type": kind, "text": self._text()}
        return part if self.is_thought else {**part, "annotations": [], **self._logprobs()}

    def _logprobs(self) -> Fields:
        return {} if self.is_thought else {"logprobs": self._scores}


class CallItem:
    """A call of a function."""

    prefix, kind, written = "fc", "function_call", "arguments"

    def __init__(self, token: str, index: int, call: ToolCallStart) -> None:
        self.id = f"{self.prefix}_{token}_{index}"
        self.index = index
        self._call = call
        self._texts: list[str] = []
        self._place = {"item_id": self.id, "output_index": index}

    def fields(self, status: Status) -> Fields:
        return {
            "id": self.id,
            "type": self.kind,
            "status": status,
            "call_id": self._call.id,
            "name": self._call.name,
            self.written: "".join(self._texts),
        }

    def start(self) -> list[Event]:
        return [_item_event("added", self.index, self.fields("in_progress"))]

    def add(self, json: str) -> list[Event]:
        return self._add_text(json)

    def end(self, status: Status) -> list[Event]:
        """Sends no `done` event for incomplete arguments: clients would use them."""
        done = self._whole() if status == "completed" else []
        return [*done, _item_event("done", self.index, self.fields(status))]

    def _add_text(self, text: str) -> list[Event]:
        self._texts.append(text)
        return [(f"response.{self.kind}_{self.written}.delta", {**self._place, "delta": text})]

    def _whole(self) -> list[Event]:
        fields = {"name": self._call.name, "arguments": "".join(self._texts)}
        return [("response.function_call_arguments.done", {**self._place, **fields})]


class CustomCallItem(CallItem):
    """A call of a custom tool, whose only argument is a text."""

    prefix, kind, written = "ctc", "custom_tool_call", "input"

    def __init__(self, token: str, index: int, call: ToolCallStart) -> None:
        super().__init__(token, index, call)
        self._input = InputText()

    def add(self, json: str) -> list[Event]:
        text = self._input.feed(json)
        return self._add_text(text) if text else []

    def _whole(self) -> list[Event]:
        last = self._input.end()
        events = self._add_text(last) if last else []
        fields = {**self._place, "input": "".join(self._texts)}
        return [*events, ("response.custom_tool_call_input.done", fields)]


def _item_event(change: str, index: int, item: Fields) -> Event:
    return f"response.output_item.{change}", {"output_index": index, "item": item}


class Output:
    """The items of one reply, the last of which may be open; emits events for every change."""

    def __init__(self, token: str, form: ReplyForm) -> None:
        self.items: list[Fields] = []  # finished ones
        self.reason: str | None = None  # why the reply ended
        self._token = token
        self._form = form
        self._scores = ScoreQueue()
        self._open: TextItem | CallItem | None = None
        self._num_items = 0  # ever begun
        self._num_events = 0
        self._has_answer = False  # a message or a whole call
        self._has_spoken = {True: False, False: False}  # reasoning, messages

    def encode_event(self, kind: str, fields: Fields) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        data = msgspec.json.encode({"type": kind, "sequence_number": number, **fields})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    def add_scores(self, tokens: Sequence[ScoredToken]) -> None:
        """The log-probabilities of tokens whose text comes next, if it is text."""
        if self._form.has_logprobs:
            self._scores.add(tokens)

    def take(self, piece: Delta) -> bytes:
        """The events of one delta."""
        match piece:
            case ContentDelta(text):
                return self._take_text(text, is_thought=False)
            case ReasoningDelta(text):
                return self._take_text(text, is_thought=True)
            case ToolCallStart():
                kind = CustomCallItem if piece.name in self._form.custom_tools else CallItem
                return self._begin(kind(self._token, self._num_items, piece))
            case ToolArguments(_, json):
                assert isinstance(self._open, CallItem)
                return self._encode(self._open.add(json))
            case ToolCallEnd(_, is_broken, is_cut):
                return self._end(
                    "incomplete" if is_broken or is_cut else "completed", is_dropped=is_broken
                )
            case ReplyEnd(reason):
                return self._take_end(reason)

    def unfinished(self, status: Status = "incomplete") -> list[Fields]:
        """All items; if the last one is unfinished, it gets this status."""
        open_items = (
            [] if self._open is None else [{**self._open.fields("incomplete"), "status": status}]
        )
        return [*self.items, *open_items]

    def _take_text(self, text: str, is_thought: bool) -> bytes:
        events = b""
        if not isinstance(self._open, TextItem) or self._open.is_thought != is_thought:
            if self._has_spoken[is_thought]:  # drops the separator from the previous text
                text = text.lstrip()
            self._has_spoken[is_thought] = True
            events = self._begin(TextItem(self._token, self._num_items, is_thought, self._form))
        assert isinstance(self._open, TextItem)
        number, self._num_events = self._num_events, self._num_events + 1
        scores = self._scores.take(text) if self._form.has_logprobs else []
        return events + self._open.encode_delta(text, number, [] if is_thought else scores)

    def _take_end(self, reason: str) -> bytes:
        self.reason = reason
        events = self._end("incomplete" if reason == "length" else "completed")
        if not self._has_answer and reason != "length":  # a reply without words is an empty message
            events += self._begin(TextItem(self._token, self._num_items, False, self._form))
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
        events = self._encode(item.end(status))
        if not is_dropped:
            self.items.append(item.fields(status))
            self._has_answer |= not (isinstance(item, TextItem) and item.is_thought)
        return events

    def _encode(self, events: list[Event]) -> bytes:
        return b"".join(self.encode_event(kind, fields) for kind, fields in events)


class ResponseChoice(Choice):
    """Keeps deltas as they came, because they show which tokens belong to which text."""

    def __init__(self) -> None:
        super().__init__()
        self.reply_deltas: list[ReplyDelta] = []

    def take(self, delta: ReplyDelta) -> None:
        self.reply_deltas.append(delta)


class ResponseReplyFormat:
    """The events and the body of a response. `keep` gets the response and its items at the end."""

    def __init__(
        self, id: str, model: str, echo: Fields, keep: Keep | None, form: ReplyForm = PLAIN_FORM
    ) -> None:
        self._head = {
            "id": id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
        }
        self._echo = echo
        self._keep = keep
        self._output = Output(id.removeprefix("resp_"), form)
        self._has_begun = False

    def encode_queued(self) -> bytes:
        """The events of a background response before its generation starts."""
        response = {"response": self._response("queued", [])}
        kinds = ("response.created", "response.queued")
        return b"".join([self._output.encode_event(kind, response) for kind in kinds])

    def encode_chunk(self, delta: ReplyDelta) -> bytes:
        events = b"" if self._has_begun else self._encode_start()
        self._output.add_scores(delta.logprobs)
        return events + b"".join([self._output.take(piece) for piece in delta.deltas])

    def encode_heartbeat(self) -> bytes:
        return (b"" if self._has_begun else self._encode_start()) + HEARTBEAT_COMMENT

    def encode_end(self, usage: Usage) -> bytes:
        response, body = self._finish(usage)
        return self._output.encode_event(
            f"response.{response['status']}", {"response": msgspec.Raw(body)}
        )

    def encode_failure(self, error: PenstockError) -> bytes:
        events = b"" if self._has_begun else self._encode_start()
        param = None
        if isinstance(error, RequestError):
            rename(error, OWN_NAMES)
            param = error.param
        events += self._output.encode_event(
            "error", {"code": error.code, "message": str(error), "param": param}
        )
        failure = {"code": _failure_code(error), "message": str(error)}
        response = self._response("failed", self._output.unfinished(), error=failure)
        return events + self._output.encode_event("response.failed", {"response": response})

    def encode_cancelled(self) -> bytes:
        """The tail of a stream whose response was cancelled; the API has no event of that name."""
        response = self._response("cancelled", self._output.unfinished())
        return self._output.encode_event("response.incomplete", {"response": response})

    def encode_body(self, choices: dict[int, Choice], usage: Usage) -> bytes:
        choice = choices[0]
        assert isinstance(choice, ResponseChoice)
        for delta in choice.reply_deltas:
            self.encode_chunk(delta)
        return self._finish(usage)[1]

    def encode_so_far(self, status: str, error: PenstockError | None = None) -> bytes:
        """The unfinished response with the items so far."""
        failure = None if error is None else {"code": _failure_code(error), "message": str(error)}
        output = self._output.unfinished("in_progress" if status == "in_progress" else "incomplete")
        return msgspec.json.encode(self._response(status, output, error=failure))

    def _encode_start(self) -> bytes:
        self._has_begun = True
        response = {"response": self._response("in_progress", [])}
        kinds = ["response.in_progress"]
        if not self._echo["background"]:
            kinds.insert(0, "response.created")
        return b"".join([self._output.encode_event(kind, response) for kind in kinds])

    def _finish(self, usage: Usage) -> tuple[Fields, bytes]:
        is_cut = self._output.reason == "length"
        response = self._response(
            "incomplete" if is_cut else "completed",
            self._output.items,
            usage=usage_fields(usage),
            completed_at=None if is_cut else int(time.time()),
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
        )
        body = msgspec.json.encode(response)
        if self._keep is not None:
            self._keep(body, self._output.items)
        return response, body

    def _response(self, status: str, output: list[Fields], **known: Any) -> Fields:
        later = {
            "error": None,
            "incomplete_details": None,
            "usage": None,
            "completed_at": None,
            **known,
        }
        return {**self._head, "status": status, **later, "output": output, **self._echo}


def _failure_code(error: PenstockError) -> str:
    """The nearest of the API's few codes."""
    # Codex shortens its conversation when it reads the first of these.
    if isinstance(error, RequestError):
        return error.code if isinstance(error, ContextLengthError) else "invalid_prompt"
    return "rate_limit_exceeded" if isinstance(error, OverloadedError) else "server_error"


def usage_fields(usage: Usage) -> Fields:
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
    }


class ScoreQueue:
    """Tokens whose text has not come yet: it may come later, in another piece, and belong to
    reasoning, calls or messages. Tokens and text are matched by bytes: the bytes of the tokens, in
    order, contain every piece of text."""

    def __init__(self) -> None:
        self._tokens: deque[ScoredToken] = deque()
        self._data = b""  # their bytes; of the first token, only those without text yet

    def add(self, tokens: Sequence[ScoredToken]) -> None:
        self._tokens += tokens
        self._data += b"".join(token.data for token in tokens)

    def take(self, text: str) -> list[ChatToken]:
        """The tokens that begin in this piece of text; tokens before it belong to no text."""
        data = text.encode()
        start = 0 if self._data.startswith(data) else self._data.rfind(data)
        # Not found: a character was replaced.
        end = start + len(data) if start >= 0 else len(self._data)
        taken: list[ChatToken] = []
        # Negative: part of the first token's text has come.
        at = len(self._data) - sum(len(token.data) for token in self._tokens)
        while self._tokens and at < end:
            token = self._tokens[0]
            after = at + len(token.data)
            if at >= 0 and after > start and token.logprob is not None:
                taken.append(chat_token(token))
            if after > end:  # its rest comes with the next text
                break
            self._tokens.popleft()
            at = after
        self._data = self._data[end:]
        return taken
