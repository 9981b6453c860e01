"""The fields of a chat request that constrain its reply: tools and their choice, JSON, thinking.

Checks them one by one and converts them; a field that is not supported is a `RequestError` that
names it. response_grammar.py enforces the forms.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.errors import RequestError
from penstock.serve.body import wrong_choice

PlainTool = dict[str, Any]  # in OpenAI's format, which chat templates expect
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")

# Whether to think, and up to how many tokens; None: until the server's limit (`--thinking-share`).
EFFORTS: dict[str, tuple[bool, int | None]] = {
    "none": (False, None),
    "minimal": (False, None),
    "low": (True, 2048),
    "medium": (True, 8192),
    "high": (True, None),
    "xhigh": (True, None),
    "max": (True, None),
}


class ToolFunction(msgspec.Struct):
    name: Annotated[str, Meta(extra_json_schema={"pattern": f"^{_TOOL_NAME.pattern}$"})]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct):
    function: ToolFunction | None = None
    type: Annotated[str, Meta(extra_json_schema={"enum": ["function"]})] = "function"


class NamedFunction(msgspec.Struct):
    name: str


class NamedTool(msgspec.Struct):
    """A `tool_choice` that is one tool."""

    function: NamedFunction
    type: str = "function"


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True):
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=1024)]
    mode: str = "auto"


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """A `tool_choice` that is an object: one tool, or some of them and whether one must be
    called.
    """

    type: str = "function"
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    schema: Any = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    json_schema: JsonSchema | None = None
    schema: Any = None  # llama.cpp's, beside json_object


DISPLAYS = ("summarized", "omitted")  # the reasoning as it is, and none of it


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    """Anthropic's field for thinking, which others adopted."""

    type: str = "enabled"
    budget_tokens: int | None = None
    display: str | None = None  # "omitted": the reasoning is not sent
    clear_thinking: bool | None = None  # no effect: the chat template decides


class Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    """OpenRouter's field. With `exclude`, the model thinks but the reasoning is not sent."""

    effort: str | None = None
    max_tokens: int | None = None
    exclude: bool | None = None
    enabled: bool | None = None
    summary: str | None = None  # no effect: reasoning is not summarised


@dataclass(frozen=True, slots=True)
class JsonForm:
    """JSON that a schema describes; without one, any object. `is_strict`: the whole schema must be
    enforced."""

    schema: Any = None
    is_strict: bool = False
    is_closed: bool = False  # even if the server leaves objects open
    param: str = "response_format"


def plain_tools(tools: Sequence[Tool]) -> list[PlainTool]:
    """Keeps the last of several tools with the same name, in the position of the first: OpenAI
    accepts duplicates, and clients that look up a called tool by name find the last."""
    functions: dict[str, ToolFunction] = {}
    for index, tool in enumerate(tools):
        if tool.type != "function":
            raise RequestError(
                f"tools[{index}].type is {tool.type[:32]!r}",
                "Only functions are supported.",
                param="tools",
            )
        if tool.function is None:
            raise RequestError(f"tools[{index}] has no function", param=f"tools[{index}].function")
        check_tool_name(tool.function.name, f"tools[{index}].function.name", "tools")
        functions[tool.function.name] = tool.function
    return [plain_tool(f.name, f.description, f.parameters) for f in functions.values()]


def check_tool_name(name: str, where: str, param: str) -> None:
    """Used by every API: a name appears in the prompt and in the grammar of calls."""
    if not _TOOL_NAME.fullmatch(name):
        raise RequestError(
            f"{where} is {name[:64]!r}",
            "Names have 1 to 128 letters, digits and the characters _ . : -",
            param=param,
        )


def plain_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> PlainTool:
    given = {"name": name, "description": description, "parameters": parameters}
    function = {key: value for key, value in given.items() if value is not None}
    return {"type": "function", "function": function}


def chosen_tools(
    choice: str | ToolChoice | None, tools: list[PlainTool] | None
) -> tuple[list[PlainTool] | None, list[PlainTool] | None]:
    """The tools that may be called, and those of which one must be called."""
    if isinstance(choice, ToolChoice) and choice.type == "allowed_tools":
        if choice.allowed_tools is None:
            raise RequestError(
                "tool_choice has no allowed_tools", param="tool_choice.allowed_tools"
            )
        if choice.allowed_tools.mode not in ("auto", "required"):
            raise RequestError(
                f"tool_choice.allowed_tools.mode is {choice.allowed_tools.mode[:32]!r}",
                "It must be auto or required.",
                param="tool_choice.allowed_tools.mode",
            )
        tools = _named_tools([tool.function.name for tool in choice.allowed_tools.tools], tools)
        return tools, demanded_tools(choice.allowed_tools.mode, tools)
    if isinstance(choice, ToolChoice):
        if choice.type != "function" or choice.function is None:
            raise RequestError(
                "tool_choice names no function",
                "It must be none, auto, required, name a function, or have allowed_tools.",
                param="tool_choice.function",
            )
        return tools, demanded_tools(NamedTool(choice.function), tools)
    return None if choice == "none" else tools, demanded_tools(choice, tools)


def demanded_tools(
    choice: str | NamedTool | None, tools: list[PlainTool] | None
) -> list[PlainTool] | None:
    """The tools of which one must be called; None: the model decides."""
    if choice in (None, "auto", "none"):
        return None
    if isinstance(choice, NamedTool):
        return _named_tools([choice.function.name], tools)
    if choice != "required":
        raise RequestError(
            f"tool_choice is {str(choice)[:32]!r}",
            "It must be none, auto, required, or name a function.",
            param="tool_choice",
        )
    if not tools:
        raise RequestError("tool_choice is required, but there are no tools", param="tool_choice")
    return tools


def _named_tools(names: Sequence[str], tools: list[PlainTool] | None) -> list[PlainTool]:
    known = {tool["function"]["name"] for tool in tools or ()}
    for name in names:
        if name not in known:
            raise RequestError(
                f"tool_choice names {name[:64]!r}",
                "tools has no tool of that name.",
                param="tool_choice",
            )
    chosen = set(names)
    return [tool for tool in tools or () if tool["function"]["name"] in chosen]


def json_form(form: ResponseFormat | None) -> JsonForm | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return JsonForm(form.schema)
    if form.type != "json_schema":
        raise RequestError(
            f"response_format.type is {form.type[:32]!r}",
            "It must be text, json_object or json_schema.",
            "For regular expressions, lists and grammars use structured_outputs.",
            param="response_format",
        )
    inner = form.json_schema or JsonSchema(form.schema)
    if inner.schema is None:
        raise RequestError("response_format has no json_schema.schema", param="response_format")
    return JsonForm(inner.schema, bool(inner.strict))


def thinking_switch(thinking: bool | Thinking | None) -> bool | None:
    """None: the default of the server and the chat template."""
    if thinking is None or isinstance(thinking, bool):
        return thinking
    switches = {"enabled": True, "disabled": False, "auto": None, "adaptive": None}
    if thinking.type not in switches:
        raise wrong_choice("thinking.type", thinking.type, switches)
    if thinking.display is not None and thinking.display not in DISPLAYS:
        raise wrong_choice("thinking.display", thinking.display, DISPLAYS)
    return switches[thinking.type]


def effort_of(effort: str | None, param: str) -> tuple[bool | None, int | None]:
    """Whether to think, and up to how many tokens; None: the default of the server and the chat
    template."""
    if effort is None:
        return None, None
    if effort not in EFFORTS:
        raise wrong_choice(param, effort, EFFORTS)
    return EFFORTS[effort]


def thinking_budget(thinking: bool | Thinking | None) -> int | None:
    budget = thinking.budget_tokens if isinstance(thinking, Thinking) else None
    return checked_budget(budget, "thinking.budget_tokens")


def checked_budget(budget: int | None, param: str) -> int | None:
    if budget is not None and not 1 <= budget <= 2**31:
        raise RequestError(
            f"{param} is {budget}",
            "It must be 1 or more.",
            'To turn thinking off, send thinking: {"type": "disabled"}.',
            param=param,
        )
    return budget
