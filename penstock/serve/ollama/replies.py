"""Ollama's replies: turns deltas into lines of JSON, and errors into error bodies.

A stream is a line for each piece of text and for each whole call, then one that is `done`, with the
reason why the reply ended and the times it took. A call that turned out to be invalid is never
sent; one that a limit cut off has the arguments that were whole.
"""

from __future__ import annotations

import datetime
from abc import ABC, abstractmethod
from typing import Any

import msgspec

from penstock.errors import PenstockError
from penstock.serve.answer import Choice, Pieces, ReplyClock
from penstock.serve.ollama.requests import Conversation
from penstock.serve.openai.scores import ChatScores
from penstock.serve.text_stream import ReplyDelta, Usage
from penstock.text.dialects import (
    ContentDelta,
    ParsedCall,
    ParsedReply,
    ReasoningDelta,
    ReplyEnd,
    ToolArguments,
    ToolCallEnd,
    ToolCallStart,
)
from penstock.text.dialects.json_calls import whole_part
from penstock.text.dialects.values import is_json

NDJSON_TYPE = "application/x-ndjson"
Fields = dict[str, Any]


class TokenScores(ChatScores):
    """The list of OpenAI's chats, without the object around it."""

    def take(self) -> Pieces:
        _, content, _ = super().take()
        return [b"[", content, b"]"]


class OllamaFormat(ABC):
    """What the replies of both endpoints share: everything but the fields of the text."""

    def __init__(
        self,
        model: str,
        clock: ReplyClock,
        has_logprobs: bool,
        conversation: Conversation | None = None,  # to which the reply is added
    ) -> None:
        self._model = model
        self.clock = clock
        self._conversation = conversation
        self._said: list[str] = []
        self._scores = TokenScores() if has_logprobs else None
        self._call = ParsedCall("", "")  # being generated
        self._num_calls = 0
        self._end = ReplyEnd("stop")

    def new_choice(self) -> Choice:
        return Choice(scores=self._scores)

    def encode_chunk(self, delta: ReplyDelta) -> bytes:
        lines = [fields for piece in delta.deltas if (fields := self._take(piece)) is not None]
        if self._scores is not None and delta.logprobs:
            self._scores.add(delta.logprobs)
            lines = lines or [self._text_fields("")]
            lines[0]["logprobs"] = _raw(
                self._scores.take()
            )  # all of a delta go with its first line
        return b"".join(self._line(fields, is_done=False) for fields in lines)

    def _take(self, piece: object) -> Fields | None:
        match piece:
            case ContentDelta(text):
                self._said.append(text)
                return self._text_fields(text)
            case ReasoningDelta(text):
                return self._text_fields("", thinking=text)
            case ToolCallStart(_, id, name):
                self._call = ParsedCall(id, name)
            case ToolArguments(_, json):
                self._call.arguments += json
            case ToolCallEnd(_, is_broken=False):
                call = _call_fields(self._call, self._num_calls)
                self._num_calls += 1
                return self._text_fields("", tool_calls=[call])
            case ReplyEnd():
                self._end = piece
        return None

    def encode_heartbeat(self) -> bytes:
        """JSON has no comments, and clients fail on an empty line."""
        return self._line(self._text_fields(""), is_done=False)

    def encode_end(self, usage: Usage) -> bytes:
        ending = self._ending(self._end, usage, "".join(self._said))
        return self._line({**self._text_fields(""), **ending}, is_done=True)

    def encode_failure(self, error: PenstockError) -> bytes:
        return encode_error(error) + b"\n"

    def encode_body(self, choices: dict[int, Choice], usage: Usage) -> bytes:
        deltas = choices[0].deltas
        reply, end = ParsedReply.of(deltas), deltas[-1]
        assert isinstance(end, ReplyEnd)
        more: Fields = {"thinking": reply.reasoning} if reply.reasoning else {}
        if reply.calls:
            more["tool_calls"] = [
                _call_fields(call, index) for index, call in enumerate(reply.calls)
            ]
        fields = {
            **self._text_fields(reply.content, **more),
            **self._ending(end, usage, reply.content),
        }
        if self._scores is not None:
            fields["logprobs"] = _raw(self._scores.take())
        return self._line(fields, is_done=True)

    def _line(self, fields: Fields, *, is_done: bool) -> bytes:
        return msgspec.json.encode({**head(self._model), **fields, "done": is_done}) + b"\n"

    def _ending(self, end: ReplyEnd, usage: Usage, content: str) -> Fields:
        context = {}
        if self._conversation is not None:
            context["context"] = self._conversation.context_with(content)
        return {
            **context,
            "done_reason": "length" if end.reason == "length" else "stop",
            "total_duration": self.clock.total_ns,
            "load_duration": 0,  # it was loaded when the server started
            "prompt_eval_count": usage.num_prompt_tokens,
            "prompt_eval_duration": self.clock.prompt_ns,
            "eval_count": usage.num_completion_tokens,
            "eval_duration": self.clock.reply_ns,
        }

    @abstractmethod
    def _text_fields(self, content: str, **more: Any) -> Fields:
        """`more`: the reasoning or the calls beside it."""


class ChatFormat(OllamaFormat):
    def _text_fields(self, content: str, **more: Any) -> Fields:
        return {"message": {"role": "assistant", "content": content, **more}}


class GenerateFormat(OllamaFormat):
    def _text_fields(self, content: str, **more: Any) -> Fields:
        return {"response": content, **more}


def head(model: str) -> Fields:
    return {"model": model, "created_at": timestamp()}


def timestamp(seconds: float | None = None) -> str:
    """The time now, or at these seconds since 1970."""
    when = datetime.datetime.now(datetime.UTC)
    if seconds is not None:
        when = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return when.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def encode_error(error: PenstockError | str) -> bytes:
    return msgspec.json.encode({"error": str(error)})


def _call_fields(call: ParsedCall, index: int) -> Fields:
    written = call.arguments
    arguments = written if is_json(written) else whole_part(written) or "{}"
    function = {"index": index, "name": call.name, "arguments": msgspec.Raw(arguments.encode())}
    return {"id": call.id, "function": function}


def _raw(pieces: Pieces) -> msgspec.Raw:
    return msgspec.Raw(b"".join(pieces))
