"""OpenAI's replies: turns deltas into JSON bodies and server-sent events, and errors into bodies.

The frame of a streamed chunk is encoded once for each reply; a chunk is that frame around one
encoded string. Knows the format of answers, not where they come from or how they are sent.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import msgspec

from penstock.errors import PenstockError, RequestError
from penstock.serve.answer import Choice, Pieces, Scores
from penstock.serve.event_stream import HEARTBEAT_COMMENT
from penstock.serve.journal import current_journal
from penstock.serve.openai.output_options import PLAIN_OUTPUT, OutputOptions
from penstock.serve.openai.scores import ChatScores, CompletionScores, PromptLogprobs
from penstock.serve.text_stream import ReplyDelta, ReplyExtra, Usage
from penstock.text.dialects import (
    ContentDelta,
    Delta,
    ParsedReply,
    ReasoningDelta,
    ReplyEnd,
    ToolArguments,
    ToolCallStart,
)

DONE = b"data: [DONE]\n\n"
CHUNK_END = b"}]}\n\n"  # closes its choice, its choices, and itself
Frame = tuple[bytes, bytes]


class OpenAIReplyFormat(ABC):
    """What the replies of both endpoints share: everything but the content of a choice."""

    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    tells_prompt_once: ClassVar[bool]  # prompt fields are beside the choices, not in each of them

    def __init__(
        self,
        request_id: str,
        model: str,
        *,
        has_logprobs: bool = False,
        include_usage: bool = False,
        output: OutputOptions = PLAIN_OUTPUT,
        fingerprint: str = "",
    ) -> None:
        journal = current_journal()
        self._head = {
            "id": f"{self.id_prefix}-{request_id}",
            "created": int(time.time()) if journal is None else journal.created,
            "model": model,
        }
        if fingerprint:
            self._head["system_fingerprint"] = fingerprint
        self._has_logprobs = has_logprobs
        self._include_usage = include_usage
        self._output = output
        # Everything of a streamed chunk before its choices, open for more fields.
        head = msgspec.json.encode({**self._head, "object": self.chunk_kind})
        self._chunk_head = b"data: %b," % head[:-1]
        self._scores: dict[int, Scores] = {}  # for each choice of a stream

    def new_choice(self) -> Choice:
        return Choice(
            scores=self._new_scores() if self._has_logprobs else None,
            prompt_scores=PromptLogprobs() if self._output.prompt_logprobs is not None else None,
        )

    @abstractmethod
    def encode_chunk(self, delta: ReplyDelta) -> bytes:
        """The events of one delta of a stream."""

    def encode_heartbeat(self) -> bytes:
        return HEARTBEAT_COMMENT

    def encode_end(self, usage: Usage) -> bytes:
        if not self._include_usage:
            return DONE
        counts = msgspec.json.encode(_usage(usage))
        return b'%b"choices":[],"usage":%b}\n\n%b' % (self._chunk_head, counts, DONE)

    def encode_failure(self, error: PenstockError) -> bytes:
        return encode_event(encode_error(error))

    def encode_body(self, choices: dict[int, Choice], usage: Usage) -> bytes:
        pieces: Pieces = [
            msgspec.json.encode({**self._head, "object": self.kind})[:-1],
            b',"choices":[',
        ]
        for place, (index, choice) in enumerate(sorted(choices.items())):
            pieces += [b"," if place else b"", *self._encode_choice(index, choice)]
        extra = self._of_prompt(choices[0]) if self.tells_prompt_once else []
        return b"".join((*pieces, b'],"usage":', msgspec.json.encode(_usage(usage)), *extra, b"}"))

    def _of_prompt(self, choice: Choice) -> Pieces:
        """The fields about a prompt, as JSON to append to an object."""
        pieces: Pieces = []
        if self._output.returns_token_ids:
            pieces += [b',"prompt_token_ids":', msgspec.json.encode(choice.prompt_token_ids)]
        if choice.prompt_scores is not None:
            pieces += [b',"prompt_logprobs":', *choice.prompt_scores.take()]
        return pieces

    def _encode_choice(self, index: int, choice: Choice) -> Pieces:
        reply = ParsedReply.of(choice.deltas)
        assert reply.reason is not None
        returns_ids = self._output.returns_token_ids
        return [
            msgspec.json.encode({"index": index, **self._reply_fields(reply)})[:-1],
            b',"logprobs":',
            *([b"null"] if choice.scores is None else choice.scores.take()),
            b',"finish_reason":%b' % _finish(reply.reason, reply.stop_reason),
            *([b',"token_ids":', msgspec.json.encode(choice.token_ids)] if returns_ids else []),
            *([] if self.tells_prompt_once else self._of_prompt(choice)),
            b"}",
        ]

    def _chunk_scores(self, delta: ReplyDelta) -> bytes:
        if not self._has_logprobs:
            return b"null"
        if delta.index not in self._scores:
            self._scores[delta.index] = self._new_scores()
        self._scores[delta.index].add(delta.logprobs)
        return b"".join(self._scores[delta.index].take())

    def _with_extra(self, chunk: bytes, extra: ReplyExtra | None) -> bytes:
        """Adds rarely requested fields to a chunk of one choice."""
        if extra is None:
            return chunk
        of_choice: dict[str, Any] = {}
        of_chunk: dict[str, Any] = {}
        if self._output.returns_token_ids:
            of_choice["token_ids"] = extra.token_ids
        if extra.prompt_token_ids:
            of = of_chunk if self.tells_prompt_once else of_choice
            of["prompt_token_ids"] = extra.prompt_token_ids
        if extra.usage is not None:
            of_chunk["usage"] = _usage(extra.usage)
        head = chunk.removesuffix(CHUNK_END)
        fields = [
            b"," + msgspec.json.encode(of)[1:-1] if of else b"" for of in (of_choice, of_chunk)
        ]
        return b"%b%b}]%b}\n\n" % (head, *fields)

    @abstractmethod
    def _reply_fields(self, reply: ParsedReply) -> dict[str, Any]:
        """A whole reply without its log-probabilities."""

    @abstractmethod
    def _new_scores(self) -> Scores: ...


class ChatReplyFormat(OpenAIReplyFormat):
    """chat.completion, and chat.completion.chunk: first a role, then the deltas, then the finish
    reason."""

    id_prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    tells_prompt_once = True

    def __init__(self, request_id: str, model: str, **options: Any) -> None:
        super().__init__(request_id, model, **options)
        self._frames: dict[int, dict[type[Delta], Frame]] = {}  # for each choice that has begun

    def encode_chunk(self, delta: ReplyDelta) -> bytes:
        frames = self._frames.get(delta.index)
        is_plain = not self._has_logprobs and delta.extra is None
        if frames is not None and len(delta.deltas) == 1 and is_plain:
            piece = delta.deltas[0]
            if isinstance(piece, (ContentDelta, ReasoningDelta)):  # nearly all: head + text + tail
                return msgspec.json.encode(piece.text).join(frames[type(piece)])
        chunks = []
        if frames is None:
            chunks.append(self._chunk(delta.index, b'{"role":"assistant","content":""}'))
            self._frames[delta.index] = {
                ContentDelta: self._frame(delta.index, b"content"),
                ReasoningDelta: self._frame(delta.index, b"reasoning_content"),
            }
        pieces = [fields for piece in delta.deltas if (fields := _delta_fields(piece)) is not None]
        has_ended = bool(delta.deltas) and isinstance(delta.deltas[-1], ReplyEnd)
        if (delta.logprobs or (delta.extra is not None and not has_ended)) and not pieces:
            pieces.append({"content": ""})
        for place, fields in enumerate(pieces):  # the log-probabilities go with the first
            logprobs = self._chunk_scores(delta) if place == 0 else b"null"
            chunks.append(self._chunk(delta.index, msgspec.json.encode(fields), logprobs))
        if delta.deltas and isinstance(end := delta.deltas[-1], ReplyEnd):
            chunks.append(
                self._chunk(delta.index, b"{}", finish=_finish(end.reason, end.stop_reason))
            )
        if delta.extra is not None:
            self._add_extra(chunks, delta.extra)
        return b"".join(chunks)

    def _add_extra(self, chunks: list[bytes], extra: ReplyExtra) -> None:
        """Adds the prompt's fields to the first chunk, the reply's to the first one after its role,
        and usage to all."""
        first = ReplyExtra(prompt_token_ids=extra.prompt_token_ids, usage=extra.usage)
        second = ReplyExtra(token_ids=extra.token_ids, usage=extra.usage)
        extras = [extra] if len(chunks) == 1 or not extra.prompt_token_ids else [first, second]
        extras += [ReplyExtra(usage=extra.usage)] * (len(chunks) - len(extras))
        chunks[:] = map(self._with_extra, chunks, extras)

    def _frame(self, index: int, field: bytes) -> Frame:
        """What comes before and after the text of a plain chunk; a NUL, which JSON never contains,
        marks its place."""
        head, tail = self._chunk(index, b'{"%b":\0}' % field).split(b"\0")
        return head, tail

    def _chunk(
        self, index: int, delta: bytes, logprobs: bytes = b"null", finish: bytes = b"null"
    ) -> bytes:
        return b'%b"choices":[{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}]}\n\n' % (
            self._chunk_head,
            index,
            delta,
            logprobs,
            finish,
        )

    def _reply_fields(self, reply: ParsedReply) -> dict[str, Any]:
        message = reply.message()
        if reply.calls:  # as at OpenAI, content is null if there are only calls
            message["content"] = reply.content or None
        return {"message": message}

    def _new_scores(self) -> ChatScores:
        return ChatScores()


class CompletionReplyFormat(OpenAIReplyFormat):
    """text_completion, streamed or not: the older format, with parallel lists of log-probabilities.

    A prompt with thinking (sagemaker.py) has the reasoning beside its text, as chats do.
    """

    id_prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    tells_prompt_once = False

    def encode_chunk(self, delta: ReplyDelta) -> bytes:
        text, thought, finish = "", "", b"null"
        for piece in delta.deltas:
            if isinstance(piece, ContentDelta):
                text += piece.text
            elif isinstance(piece, ReasoningDelta):
                thought += piece.text
            elif isinstance(piece, ReplyEnd):
                finish = _finish(piece.reason, piece.stop_reason)
        chunk = b'%s"choices":[{"index":%d,%s,"logprobs":%s,"finish_reason":%s}]}\n\n' % (
            self._chunk_head,
            delta.index,
            msgspec.json.encode(_text_fields(text, thought))[1:-1],
            self._chunk_scores(delta),
            finish,
        )
        return self._with_extra(chunk, delta.extra)

    def _reply_fields(self, reply: ParsedReply) -> dict[str, Any]:
        return _text_fields(reply.content, reply.reasoning)

    def _new_scores(self) -> CompletionScores:
        return CompletionScores()


def _text_fields(text: str, thought: str) -> dict[str, str]:
    return {"text": text, "reasoning_content": thought} if thought else {"text": text}


def _finish(reason: str, stop_reason: str | int | None) -> bytes:
    """The value of a chunk's finish_reason, and vLLM's field after it."""
    return b'%b,"stop_reason":%b' % (msgspec.json.encode(reason), msgspec.json.encode(stop_reason))


def _delta_fields(piece: Delta) -> dict[str, Any] | None:
    """A delta as the `delta` of a chunk; None if chunks have nothing for it."""
    match piece:
        case ContentDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return {"reasoning_content": text}
        case ToolCallStart(index, id, name):
            call = {
                "index": index,
                "id": id,
                "type": "function",
                "function": {"name": name, "arguments": ""},
            }
            return {"tool_calls": [call]}
        case ToolArguments(index, json):
            return {"tool_calls": [{"index": index, "function": {"arguments": json}}]}
    return None


def encode_error(error: PenstockError) -> bytes:
    param = error.param if isinstance(error, RequestError) else None
    return encode_error_fields(str(error), error.status, param=param, code=error.code)


def encode_error_fields(
    message: str, status: int, *, param: str | None = None, code: str | None = None
) -> bytes:
    kind = "invalid_request_error" if status < 500 else "server_error"
    code = code or _CODES.get(status)
    return msgspec.json.encode(
        {"error": {"message": message, "type": kind, "param": param, "code": code}}
    )


_CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large", 500: "internal_error"}


def encode_event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
    }
