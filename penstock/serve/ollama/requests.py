"""Ollama's request bodies: decodes a POST into the requests that every API shares.

A chat, or a prompt with its system message, becomes the equivalent OpenAI body. A raw prompt
becomes a completion. Empty fields count as missing, as Ollama's clients expect. replies.py writes
the replies.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.errors import RequestError, nearest
from penstock.serve.body import decode_body, renaming, wrong_field
from penstock.serve.fields import OLLAMA_CHAT, OLLAMA_GENERATE, FieldTable
from penstock.serve.llama_options import OFF, LlamaOptions, require_off, sampling_fields
from penstock.serve.openai.chat_options import JsonSchema, ResponseFormat, Tool, json_form
from penstock.serve.openai.messages import Message, ToolCall
from penstock.serve.openai.requests import (
    ChatBody,
    CompletionBody,
    chat_request,
    completion_request,
)
from penstock.serve.requests import (
    MAX_ID_VALUES,
    MAX_IDS,
    CacheSalt,
    ChatRequest,
    CompletionRequest,
    Defaults,
    SessionId,
)

# Options for loading a model in Ollama, or for samplers that are off: they change nothing here.
HARMLESS = {
    *("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram"),
    *("f16_kv", "logits_all", "vocab_only", "use_mmap", "use_mlock", "embedding_only"),
    *("penalize_newline", "mirostat_tau", "mirostat_eta"),
}
NAMES = {
    "max_tokens": "num_predict",
    "repetition_penalty": "repeat_penalty",
    "reasoning_effort": "think",
    "response_format": "format",
    "logprobs": "top_logprobs",
}


class OllamaOptions(LlamaOptions, kw_only=True):
    num_predict: int | None = None


class OllamaMessage(msgspec.Struct):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ReplyFields(msgspec.Struct, kw_only=True):
    """The fields of both endpoints."""

    model: str | None = None
    stream: bool | None = None  # default: true
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: bool | str | None = None
    keep_alive: float | str | None = None  # the model is never unloaded
    logprobs: bool | None = None
    top_logprobs: int | None = None
    session_id: SessionId | None = None  # not Ollama's: a session of this server
    cache_salt: CacheSalt | None = None  # not Ollama's either


class OllamaChatBody(ReplyFields, kw_only=True):
    messages: Annotated[list[OllamaMessage], Meta(max_length=4096)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=1024)] | None = None


class GenerateBody(ReplyFields, kw_only=True):
    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    context: Annotated[list[int], Meta(max_length=MAX_IDS)] | None = None
    suffix: str | None = None
    template: str | None = None
    images: list[Any] | None = None


class ModelBody(msgspec.Struct, kw_only=True):
    """A body about a model."""

    model: str | None = None
    name: str | None = None  # its older name
    stream: bool | None = None

    @property
    def model_name(self) -> str:
        name = self.model or self.name
        if not name:
            raise RequestError("model is required", param="model")
        return name


@dataclass(frozen=True, slots=True)
class Generation:
    """A prompt as a chat or, if it is raw, as a completion."""

    asked: ChatRequest | CompletionRequest | None  # None: only load the model
    conversation: Conversation | None = None  # to which the reply is added


def parse_chat(
    body: bytes, defaults: Defaults, table: FieldTable = OLLAMA_CHAT
) -> ChatRequest | None:
    """None: the request only loads the model."""
    fields = decode_body(body, OllamaChatBody, table=table)
    if not fields.messages:
        return None
    for index, message in enumerate(fields.messages):
        _refuse_images(message.images, f"messages[{index}].images")
    messages = [_openai_message(message) for message in fields.messages]
    return _chat_request(fields, messages, defaults, fields.tools)


def parse_generate(
    body: bytes, defaults: Defaults, table: FieldTable = OLLAMA_GENERATE
) -> Generation:
    fields = decode_body(body, GenerateBody, MAX_ID_VALUES, table)
    _refuse_images(fields.images, "images")
    for name, why in (
        ("suffix", "The model only continues text."),
        ("template", "The server uses its own chat template, or none if raw is true."),
    ):
        if getattr(fields, name):
            raise RequestError(f"{name} is not supported", why, "Omit it.", param=name)
    if fields.raw:
        return _raw_generation(fields, defaults)
    said = decode_context(fields.context) if fields.context else []
    if not fields.prompt and not said:
        return Generation(None)
    if fields.system:
        said = [
            {"role": "system", "content": fields.system},
            *(m for m in said if m["role"] != "system"),
        ]
    said = [*said, {"role": "user", "content": fields.prompt or ""}]
    chat = _chat_request(fields, [msgspec.convert(message, Message) for message in said], defaults)
    return Generation(chat, conversation=Conversation(said))


def _raw_generation(fields: GenerateBody, defaults: Defaults) -> Generation:
    for name in ("system", "context", "think"):
        if getattr(fields, name):
            raise RequestError(
                f"{name} does not work with raw",
                "A raw prompt is used as it is.",
                "Omit one of them.",
                param=name,
            )
    if not fields.prompt:
        return Generation(None)
    sampling = _sampling(fields.options)
    body = CompletionBody(
        prompt=fields.prompt,
        stream=fields.stream is not False,
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        session_id=fields.session_id,
        cache_salt=fields.cache_salt,
    )
    _set(body, sampling)
    with renaming(NAMES):
        asked = completion_request(body, defaults)
        form = json_form(_response_format(fields.format))
    return Generation(
        replace(
            asked,
            # OpenAI's default does not apply.
            sampling=replace(asked.sampling, max_tokens=sampling.get("max_tokens")),
            is_cut_to_context=True,
            json_form=None if form is None else replace(form, param="format"),
        )
    )


def _chat_request(
    fields: ReplyFields,
    messages: list[Message],
    defaults: Defaults,
    tools: list[Tool] | None = None,
) -> ChatRequest:
    body = ChatBody(
        messages=messages,
        tools=tools,
        stream=fields.stream is not False,
        logprobs=fields.logprobs,
        top_logprobs=fields.top_logprobs,
        session_id=fields.session_id,
        cache_salt=fields.cache_salt,
        response_format=_response_format(fields.format),
    )
    if isinstance(fields.think, bool):
        body.enable_thinking = fields.think
    else:
        body.reasoning_effort = fields.think or None
    _set(body, _sampling(fields.options))
    with renaming(NAMES):
        chat = chat_request(body, defaults)
    return replace(chat, is_cut_to_context=True)


def _response_format(form: str | dict[str, Any] | None) -> ResponseFormat | None:
    if not form and not isinstance(form, dict):
        return None
    if isinstance(form, dict):
        return ResponseFormat("json_schema", JsonSchema(form))
    if form != "json":
        raise RequestError(
            f"format is {form[:32]!r}",
            'It must be "json" or a JSON schema, as an object.',
            param="format",
        )
    return ResponseFormat("json_object")


def _openai_message(message: OllamaMessage) -> Message:
    return Message(
        role=message.role,
        content=message.content or "",
        name=message.tool_name,
        reasoning_content=message.thinking or None,
        tool_calls=message.tool_calls,
        tool_call_id=message.tool_call_id,
    )


def _refuse_images(images: list[Any] | None, where: str) -> None:
    if images:
        raise RequestError(
            f"{where} has {len(images)} images",
            "This model reads only text.",
            "Omit them, or describe them in the text.",
            param=where,
        )


def _sampling(options: dict[str, Any] | None) -> dict[str, Any]:
    """The options as fields of OpenAI's bodies."""
    known = {*OllamaOptions.__struct_fields__, *HARMLESS, *OFF}
    for name in options or ():
        if name not in known:
            raise RequestError(
                f"options has {name[:64]!r}",
                "This server has no such option.",
                nearest(name, known),
                param=name,
            )
    # Clients may write an integer as 16.0.
    given = {
        n: int(v) if isinstance(v, float) and v.is_integer() else v
        for n, v in (options or {}).items()
    }
    require_off(given)
    try:
        checked = msgspec.convert(given, OllamaOptions)
    except msgspec.ValidationError as error:
        raise wrong_field(error, "options") from error
    fields = sampling_fields(checked)
    # Otherwise the reply may fill the context.
    if checked.num_predict is not None and checked.num_predict > 0:
        fields["max_tokens"] = checked.num_predict
    return fields


def _set(body: msgspec.Struct, fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        setattr(body, name, value)


NUMBER = "H"  # two bytes: every client's integers can hold them
MARK = b"penstock"  # prefix of every context


class SaidMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """The `context` of /api/generate, which the client sends back as a list of numbers. Ollama's
    contains tokens. Clients do not look inside, so here it contains the messages.
    """

    messages: list[dict[str, Any]]

    def context_with(self, reply: str) -> list[int]:
        """Leaves out reasoning, as templates do in earlier turns."""
        said = [*self.messages, {"role": "assistant", "content": reply}]
        data = MARK + msgspec.json.encode(said)
        data += b" " * (len(data) % 2)
        return array(NUMBER, data).tolist()


def decode_context(numbers: list[int]) -> list[dict[str, Any]]:
    try:
        data = array(NUMBER, numbers).tobytes()
        if not data.startswith(MARK):
            raise ValueError
        messages = msgspec.json.decode(data[len(MARK) :], type=list[SaidMessage])
    except (ValueError, OverflowError, msgspec.DecodeError) as error:
        raise RequestError(
            "context does not come from this server",
            "A context can be read only by the server that sent it.",
            "Send the context of an answer of this server, or use /api/chat.",
            param="context",
        ) from error
    return [msgspec.to_builtins(message) for message in messages]
