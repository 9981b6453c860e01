"""Bodies of the Responses API: from the bytes of a POST to a chat request and what its response repeats.

`reasoning.effort` says how much the model may think. "none" and "minimal": not at all. "low" and "medium": up
to 2048 and 8192 tokens, after which the thought is closed and the answer begins. "high" and above: as long as
the server lets it (`--thinking-share`). Without an effort it is as the server and the chat template have it.

Unknown fields are tolerated; a field that cannot be honoured is a `RequestError` that names it. How items
become messages is items.py's, which conversations are kept store.py's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.errors import RequestError
from penstock.serve.openai.body import decode_body
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
    json_form,
    plain_tools,
)
from penstock.serve.openai.requests import (
    DRAW_NAMES,
    NO_DEFAULTS,
    ChatRequest,
    Defaults,
    DrawFields,
    given_fields,
)
from penstock.serve.responses.items import NO_CALLS, Item, Items, PlainMessage, plain_messages
from penstock.types import SamplingParams

EFFORTS: dict[str | None, tuple[bool | None, int | None]] = {  # whether to think, and up to how many tokens
    None: (None, None),
    "none": (False, None),
    "minimal": (False, None),
    "low": (True, 2048),
    "medium": (True, 8192),
    "high": (True, None),
    "xhigh": (True, None),
    "max": (True, None),
}
HARMLESS_INCLUDES = (  # of things that no reply of ours has, or has anyway
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)
OWN_NAMES = {  # of the fields that chats call otherwise
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "tool_choice.function": "tool_choice",
    "tool_choice.allowed_tools.mode": "tool_choice.mode",
}


class FlatTool(msgspec.Struct):
    """A function; other types of tools have other fields."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class AllowedTool(msgspec.Struct, omit_defaults=True):
    type: str
    name: str | None = None


class FlatChoice(msgspec.Struct, omit_defaults=True):
    """One function, or those of which some may or must be called."""

    type: str
    name: str | None = None
    mode: str | None = None
    tools: Annotated[list[AllowedTool], Meta(max_length=1024)] | None = None


class TextFormat(msgspec.Struct, omit_defaults=True):
    type: str
    name: str | None = None
    description: str | None = None
    schema: Any = None
    strict: bool | None = None


class Text(msgspec.Struct, omit_defaults=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]


class ResponseBody(DrawFields, kw_only=True):
    input: str | Items
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
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)] | None = None
    include: Annotated[list[str], Meta(max_length=64)] | None = None
    truncation: str | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    chat: ChatRequest
    items: list[Item]  # the conversation up to the reply
    echo: dict[str, Any]  # fields that the response repeats
    is_stored: bool


def parse_response(body: bytes) -> ResponseBody:
    fields = decode_body(body, ResponseBody)
    _refuse_unsupported(fields)
    return fields


def response_request(
    fields: ResponseBody,
    history: list[Item],
    called: Mapping[str, str] = NO_CALLS,
    defaults: Defaults = NO_DEFAULTS,
) -> ResponseRequest:
    """`history`: the items before those that were sent; `called`: names of tools by ids of calls before;
    `defaults`: the server's sampling parameters."""
    if isinstance(fields.input, str):
        items = [Item(role="user", content=fields.input)]
    else:
        items = fields.input
    with own_names():
        omitted: list[str] = []
        messages = plain_messages(history, items, fields.instructions, called, omitted)
        chat = replace(_chat_request(fields, messages, defaults), omitted=omitted)
    is_stored = fields.store is not False
    return ResponseRequest(chat, [*history, *items], _echo(fields, chat.sampling, is_stored), is_stored)


@contextlib.contextmanager
def own_names() -> Iterator[None]:
    """Makes errors that name a field of a chat name this API's field."""
    try:
        yield
    except RequestError as error:
        use_own_name(error)
        raise


def use_own_name(error: RequestError) -> None:
    if error.param in OWN_NAMES:
        own = OWN_NAMES[error.param]
        error.what = error.what.replace(error.param, own, 1)
        error.param = own


def _chat_request(fields: ResponseBody, messages: list[PlainMessage], defaults: Defaults) -> ChatRequest:
    text = fields.text or Text()
    tools, must_call = chosen_tools(_nested(fields.tool_choice), _plain_tools(fields.tools or []))
    switch, budget = _thinking(fields.reasoning)
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
        effort_budget=budget,
        timeout_s=fields.timeout,
        session_id=fields.session_id,
        cache_key=fields.prompt_cache_key,
        priority=fields.priority or 0,
    )


def _refuse_unsupported(fields: ResponseBody) -> None:
    chat_has_them = "Log-probabilities are given by /v1/chat/completions."
    for name, is_used, why, todo in (
        ("background", fields.background, "A reply is generated while its client waits.", "Use stream."),
        ("conversation", fields.conversation, "Only replies are kept.", "Use previous_response_id."),
        ("prompt", fields.prompt, "No prompts are kept here.", "Send instructions and input."),
        ("top_logprobs", fields.top_logprobs, chat_has_them, "Leave top_logprobs out."),
    ):
        if is_used:
            raise RequestError(f"{name} is not supported", why, todo, param=name)
    if fields.truncation not in (None, "disabled"):
        raise RequestError(
            f"truncation is {fields.truncation[:32]!r}",
            "A conversation that does not fit the context is refused, not cut.",
            'Leave truncation out, or send "disabled".',
            param="truncation",
        )
    for name in fields.include or ():
        if name not in HARMLESS_INCLUDES:
            raise RequestError(f"include has {name[:64]!r}", "That cannot be given here.", param="include")


def _plain_tools(tools: list[FlatTool]) -> list[PlainTool]:
    """The functions, which the client runs. Agents also offer tools that a vendor's own server would run, and
    do without them where nobody does: the model is not told of those.
    """
    return plain_tools(
        [
            Tool(
                ToolFunction(
                    _function_name(tool, f"tools[{index}]", "tools"), tool.description, tool.parameters
                )
            )
            for index, tool in enumerate(tools)
            if tool.type == "function"
        ]
    )


def _function_name(tool: FlatTool | AllowedTool, where: str, param: str) -> str:
    if tool.type != "function":
        raise RequestError(
            f"{where}.type is {tool.type[:32]!r}",
            "Only functions are supported: the client runs what the model calls.",
            "Leave the tool out, or offer it as a function of your own.",
            param=param,
        )
    if tool.name is None:
        raise RequestError(f"{where} has no name", param=param)
    return tool.name


def _nested(choice: str | FlatChoice | None) -> str | ToolChoice | None:
    """A choice of tools as chats spell it."""
    if not isinstance(choice, FlatChoice):
        return choice
    if choice.type == "allowed_tools":
        named = [
            NamedTool(NamedFunction(_function_name(tool, f"tool_choice.tools[{index}]", "tool_choice")))
            for index, tool in enumerate(choice.tools or ())
        ]
        return ToolChoice(choice.type, allowed_tools=AllowedTools(named, choice.mode or "auto"))
    return ToolChoice(choice.type, None if choice.name is None else NamedFunction(choice.name))


def _json_form(form: TextFormat | None) -> JsonForm | None:
    if form is None:
        return None
    if form.type == "json_schema" and form.schema is None:
        raise RequestError("text.format has no schema", param="text.format")
    return json_form(ResponseFormat(form.type, JsonSchema(form.schema, form.name, form.strict)))


def _thinking(reasoning: Reasoning | None) -> tuple[bool | None, int | None]:
    """Whether to think, and for how many tokens at most; None: not said."""
    effort = None if reasoning is None else reasoning.effort
    if effort not in EFFORTS:
        raise RequestError(
            f"reasoning.effort is {(effort or '')[:32]!r}",
            f"It must be one of {', '.join(filter(None, EFFORTS))}.",
            param="reasoning.effort",
        )
    return EFFORTS[effort]


def _sampling(fields: ResponseBody, defaults: Defaults) -> SamplingParams:
    given = {**defaults, **given_fields(fields, DRAW_NAMES)}
    return SamplingParams(max_tokens=fields.max_output_tokens, **given)


def _echo(fields: ResponseBody, sampling: SamplingParams, is_stored: bool) -> dict[str, Any]:
    text, reasoning = fields.text or Text(), fields.reasoning or Reasoning()
    return {
        "background": False,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": fields.max_tool_calls,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": reasoning,
        "safety_identifier": fields.safety_identifier,
        "service_tier": "default",
        "store": is_stored,
        "temperature": sampling.temperature,
        "text": {"format": text.format or TextFormat("text"), "verbosity": text.verbosity or "medium"},
        "tool_choice": fields.tool_choice or "auto",
        "tools": fields.tools or [],
        "top_logprobs": 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "user": fields.user,
    }
