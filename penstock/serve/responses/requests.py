"""Bodies of the Responses API: decodes a POST into a chat request and the fields that its response
repeats.

For the model a custom tool is a function with one text (custom_tools.py). Reasoning is not
summarised: if `reasoning.summary` is set, the summary is the reasoning itself.

A field that is not supported is a `RequestError` that names it; fields.py lists the ignored ones.
items.py turns items into messages, store.py stores conversations.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.errors import RequestError
from penstock.serve.body import decode_body, renaming, wrong_choice
from penstock.serve.fields import RESPONSES, FieldTable
from penstock.serve.openai.chat_options import (
    AllowedTools,
    JsonForm,
    JsonSchema,
    NamedFunction,
    NamedTool,
    PlainTool,
    ResponseFormat,
    Tool,
    ToolChoice,
    ToolFunction,
    chosen_tools,
    effort_of,
    json_form,
    plain_tools,
)
from penstock.serve.openai.requests import DRAW_NAMES, DrawFields, StreamOptions, given_fields
from penstock.serve.requests import NO_DEFAULTS, ChatRequest, Defaults, Metadata
from penstock.serve.responses.custom_tools import text_grammars, text_parameters
from penstock.serve.responses.items import NO_CALLS, Item, Items, PlainMessage, plain_messages
from penstock.types import SamplingParams

HARMLESS_INCLUDES = (  # no effect: replies never have these, or always
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
SEALED_THOUGHTS = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
SUMMARIES = ("auto", "concise", "detailed")
CLIENTS_TOOLS = ("function", "custom")  # tools that clients run
OWN_NAMES = {  # fields that have other names in chats
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "tool_choice.function": "tool_choice",
    "tool_choice.allowed_tools.mode": "tool_choice.mode",
}
own_names = functools.partial(renaming, OWN_NAMES)


class ToolFormat(msgspec.Struct, omit_defaults=True):
    """What the text for a custom tool must match."""

    type: str
    syntax: str | None = None
    definition: str | None = None


class FlatTool(msgspec.Struct):
    """A function or a custom tool; other types of tools have other fields."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: ToolFormat | None = None


class AllowedTool(msgspec.Struct, omit_defaults=True):
    type: str
    name: str | None = None


class FlatChoice(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """One tool that must be called, or a set of tools that may or must be."""

    type: str
    name: str | None = None
    mode: str | None = None
    tools: Annotated[list[AllowedTool], Meta(max_length=1024)] | None = None


class TextFormat(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    type: str
    name: str | None = None
    description: str | None = None
    schema: Any = None
    strict: bool | None = None


class Text(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None  # the older name
    context: str | None = None  # which reasoning a prompt repeats: the chat template decides
    mode: str | None = None

    def __post_init__(self) -> None:
        self.summary = self.summary or self.generate_summary


class ConversationId(msgspec.Struct):
    id: str


class ResponseBody(DrawFields, kw_only=True):
    input: str | Items | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[FlatTool], Meta(max_length=1024)] | None = None
    tool_choice: str | FlatChoice | None = None
    parallel_tool_calls: bool | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None
    metadata: Metadata | None = None
    include: Annotated[list[str], Meta(max_length=64)] | None = None
    truncation: str | None = None
    background: bool | None = None
    conversation: str | ConversationId | None = None
    prompt: Any = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    stream_options: StreamOptions | None = None

    @property
    def conversation_id(self) -> str | None:
        return (
            self.conversation.id
            if isinstance(self.conversation, ConversationId)
            else self.conversation
        )


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """How to format a reply's items."""

    custom_tools: frozenset[str] = frozenset()  # by name: their input is text
    has_summary: bool = False  # reasoning is sent as a summary, and sealed, instead of as content
    is_sealed: bool = False  # reasoning is also sent sealed, for clients that keep only that
    has_logprobs: bool = False


PLAIN_FORM = ReplyForm()


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    chat: ChatRequest
    items: list[Item]  # the conversation up to the reply
    echo: dict[str, Any]  # fields that the response repeats
    is_stored: bool
    is_background: bool
    form: ReplyForm


def parse_response(body: bytes, table: FieldTable = RESPONSES) -> ResponseBody:
    fields = decode_body(body, ResponseBody, table=table)
    _refuse_unsupported(fields)
    return fields


def response_request(
    fields: ResponseBody,
    history: list[Item],
    called: Mapping[str, str] = NO_CALLS,
    defaults: Defaults = NO_DEFAULTS,
) -> ResponseRequest:
    """`history`: the items before the sent ones; `called`: names of tools by the ids of earlier
    calls; `defaults`: the server's sampling parameters."""
    items = sent_items(fields)
    require_input([*history, *items])
    with own_names():
        omitted: list[str] = []
        messages = plain_messages(history, items, fields.instructions, called, omitted=omitted)
        chat = replace(_chat_request(fields, messages, defaults), omitted=omitted)
    is_stored = fields.store is not False
    form = ReplyForm(
        custom_tools=frozenset(
            name for name, tool in _by_name(fields).items() if tool.type == "custom"
        ),
        has_summary=fields.reasoning is not None and fields.reasoning.summary is not None,
        is_sealed=SEALED_THOUGHTS in (fields.include or ()),
        has_logprobs=chat.sampling.logprobs is not None,
    )
    return ResponseRequest(
        chat,
        [*history, *items],
        _echo(fields, chat.sampling, is_stored),
        is_stored,
        bool(fields.background),
        form,
    )


def require_input(items: list[Item]) -> None:
    if not items:
        raise RequestError(
            "The request has no input",
            "The model replies to input, or to a stored conversation.",
            "Send input as a text or a list of items.",
            param="input",
        )


def sent_items(fields: ResponseBody) -> list[Item]:
    if isinstance(fields.input, str):
        return [Item(role="user", content=fields.input)]
    return fields.input or []


def _chat_request(
    fields: ResponseBody, messages: list[PlainMessage], defaults: Defaults
) -> ChatRequest:
    text = fields.text or Text()
    tools, must_call = chosen_tools(_nested(fields.tool_choice), _plain_tools(fields.tools or []))
    effort = None if fields.reasoning is None else fields.reasoning.effort
    switch, budget = effort_of(effort, "reasoning.effort")
    return ChatRequest(
        messages=messages,
        tools=tools or None,
        template_arguments={} if switch is None else {"enable_thinking": switch},
        sampling=_sampling(fields, defaults),
        is_stream=bool(fields.stream),
        include_usage=True,
        must_call=must_call,
        is_parallel=fields.parallel_tool_calls is not False,
        json_form=_json_form(text.format),
        text_grammars=text_grammars(_by_name(fields)),
        drops_oldest=fields.truncation == "auto",
        effort_budget=budget,
        timeout_s=fields.timeout,
        session_id=fields.session_id,
        cache_salt=fields.cache_salt,
        cache_key=fields.prompt_cache_key,
        priority=fields.priority or 0,
    )


def _refuse_unsupported(fields: ResponseBody) -> None:
    if fields.prompt:
        raise RequestError(
            "prompt is not supported",
            "This server stores no prompts.",
            "Send instructions and input.",
            param="prompt",
        )
    for name in ("previous_response_id", "session_id"):
        if fields.conversation is not None and getattr(fields, name) is not None:
            raise RequestError(
                f"conversation and {name} are both set",
                "Each of them sets what comes before the input.",
                "Omit one of them.",
                param="conversation",
            )
    if fields.background and fields.store is False:
        raise RequestError(
            "background is true and store is false",
            "A background response must be stored, so that it can be fetched.",
            "Omit store.",
            param="background",
        )
    reasoning, text = fields.reasoning or Reasoning(), fields.text or Text()
    for name, value, known in (
        ("truncation", fields.truncation, ("auto", "disabled")),
        ("reasoning.summary", reasoning.summary, SUMMARIES),
        ("reasoning.mode", reasoning.mode, ("standard",)),
        ("text.verbosity", text.verbosity, ("low", "medium", "high")),
    ):
        if value is not None and value not in known:
            raise wrong_choice(name, value, known)
    for name in fields.include or ():
        if name not in (*HARMLESS_INCLUDES, SEALED_THOUGHTS, LOGPROBS):
            raise RequestError(
                f"include has {name[:64]!r}", "This server cannot include it.", param="include"
            )


def _plain_tools(tools: list[FlatTool]) -> list[PlainTool]:
    """The tools that the client runs. Agents also offer tools that a vendor's server would run, but
    work without them: these are left out."""
    return plain_tools(
        [
            Tool(
                ToolFunction(
                    _name_of(tool, f"tools[{index}]", "tools"),
                    tool.description,
                    tool.parameters if tool.type == "function" else text_parameters(tool),
                )
            )
            for index, tool in enumerate(tools)
            if tool.type in CLIENTS_TOOLS
        ]
    )


def _by_name(fields: ResponseBody) -> dict[str, FlatTool]:
    """The client's tools; of several with the same name, the last one."""
    return {tool.name or "": tool for tool in fields.tools or () if tool.type in CLIENTS_TOOLS}


def _name_of(tool: FlatTool | AllowedTool, where: str, param: str) -> str:
    if tool.type not in CLIENTS_TOOLS:
        raise RequestError(
            f"{where}.type is {tool.type[:32]!r}",
            "Only functions and custom tools are supported: the client runs what the model calls.",
            "Omit the tool, or offer it as a function.",
            param=param,
        )
    if tool.name is None:
        raise RequestError(f"{where} has no name", param=param)
    return tool.name


def _nested(choice: str | FlatChoice | None) -> str | ToolChoice | None:
    """A choice of tools in the format of chats."""
    if not isinstance(choice, FlatChoice):
        return choice
    if choice.type == "allowed_tools":
        named = [
            NamedTool(NamedFunction(_name_of(tool, f"tool_choice.tools[{index}]", "tool_choice")))
            for index, tool in enumerate(choice.tools or ())
        ]
        return ToolChoice(choice.type, allowed_tools=AllowedTools(named, choice.mode or "auto"))
    kind = "function" if choice.type in CLIENTS_TOOLS else choice.type
    return ToolChoice(kind, None if choice.name is None else NamedFunction(choice.name))


def _json_form(form: TextFormat | None) -> JsonForm | None:
    if form is None:
        return None
    if form.type == "json_schema" and form.schema is None:
        raise RequestError("text.format has no schema", param="text.format")
    return json_form(
        ResponseFormat(form.type, JsonSchema(form.schema, strict=form.strict), form.schema)
    )


def _sampling(fields: ResponseBody, defaults: Defaults) -> SamplingParams:
    given = {**defaults, **given_fields(fields, DRAW_NAMES)}
    logprobs = fields.top_logprobs or None
    if logprobs is None and LOGPROBS in (fields.include or ()):
        logprobs = 0
    with renaming({"logprobs": "top_logprobs"}):
        return SamplingParams(max_tokens=fields.max_output_tokens, logprobs=logprobs, **given)


def _echo(fields: ResponseBody, sampling: SamplingParams, is_stored: bool) -> dict[str, Any]:
    text, reasoning = fields.text or Text(), fields.reasoning or Reasoning()
    return {
        "background": bool(fields.background),
        "conversation": None if (id := fields.conversation_id) is None else {"id": id},
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": fields.max_tool_calls,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "safety_identifier": fields.safety_identifier,
        "service_tier": "default",
        "store": is_stored,
        "temperature": sampling.temperature,
        "text": {
            "format": text.format or TextFormat("text"),
            "verbosity": text.verbosity or "medium",
        },
        "tool_choice": fields.tool_choice or "auto",
        "tools": [_echoed(tool) for tool in fields.tools or () if tool.type in CLIENTS_TOOLS],
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": fields.truncation or "disabled",
        "user": fields.user,
    }


def _echoed(tool: FlatTool) -> dict[str, Any]:
    unused = ("parameters", "strict") if tool.type == "custom" else ("format",)
    return {
        name: value for name, value in msgspec.structs.asdict(tool).items() if name not in unused
    }
