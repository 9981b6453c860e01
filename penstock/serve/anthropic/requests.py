"""Anthropic's request bodies: decodes a POST into the `ChatRequest` that every API shares.

Messages made of blocks become messages for chat templates: tool results before the text that came
with them, calls and reasoning beside an assistant's text, and adjacent messages of one role as one
turn. A block or a field that is not supported is a `RequestError` that names it; fields.py lists
the ignored fields. Nothing here renders or generates; replies.py writes the replies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from penstock.errors import RequestError
from penstock.serve.body import decode_body, wrong_choice, wrong_field
from penstock.serve.conversations import Thread, names_of_calls
from penstock.serve.fields import COUNT_TOKENS, MESSAGES, FieldTable
from penstock.serve.instructions import (
    PARAGRAPH,
    PlainMessage,
    place_instructions,
    plain_call,
    reminder,
    replace_attachment,
)
from penstock.serve.openai.chat_options import (
    JsonForm,
    NamedFunction,
    NamedTool,
    PlainTool,
    Thinking,
    check_tool_name,
    demanded_tools,
    effort_of,
    plain_tool,
    thinking_budget,
    thinking_switch,
)
from penstock.serve.requests import (
    NO_DEFAULTS,
    CacheSalt,
    ChatRequest,
    Defaults,
    SessionId,
    StopString,
)
from penstock.types import SamplingParams

# Claude Code's first system block. It differs in every request, so nothing after it would be
# cached.
BILLING_LINE = "x-anthropic-billing-header:"
MAX_BLOCKS = 16_384  # per request, including those in results: reading them blocks the server

Content = str | list[dict[str, Any]]  # blocks are checked one by one, by their type


class TextBlock(msgspec.Struct):
    text: str


class ThinkingBlock(msgspec.Struct):
    """Reasoning that a client sends back. Its signature is not checked."""

    thinking: str


class RedactedThinkingBlock(msgspec.Struct):
    """Encrypted reasoning, which only Anthropic can read."""


class ToolUseBlock(msgspec.Struct):
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct):
    tool_use_id: str
    content: Content | None = None
    is_error: bool | None = None


class SearchResultBlock(msgspec.Struct):
    """Occurs in a tool's result, like the next one."""

    title: str
    source: str
    content: list[TextBlock]


class DocumentSource(msgspec.Struct):
    type: str | None = None
    data: str | None = None
    content: Content | None = None


class DocumentBlock(msgspec.Struct):
    source: DocumentSource | None = None
    title: str | None = None
    context: str | None = None


Struct = TypeVar("Struct", bound=msgspec.Struct)
Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
BlockTypes = dict[str, type[Block]]

TEXT_ONLY: BlockTypes = {"text": TextBlock}
BLOCKS_OF_ROLE: dict[str, BlockTypes] = {
    "user": {**TEXT_ONLY, "tool_result": ToolResultBlock},
    "assistant": {
        **TEXT_ONLY,
        "thinking": ThinkingBlock,
        "redacted_thinking": RedactedThinkingBlock,
        "tool_use": ToolUseBlock,
    },
    "system": TEXT_ONLY,
}


class Message(msgspec.Struct):
    role: str
    content: Content


class OfferedTool(msgspec.Struct):
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    schema: dict[str, Any]
    name: str | None = None


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: OutputFormat | None = None
    effort: str | None = None
    # Ignored: it tells a model how much it may spend in total, which no template can express.
    task_budget: Any = None


class PromptBody(msgspec.Struct, kw_only=True):
    """The parts of a prompt: everything that counting tokens needs."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)]
    model: str | None = None
    system: Content | None = None
    tools: Annotated[list[OfferedTool], Meta(max_length=1024)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older name of output_config.format


class MessagesBody(PromptBody, kw_only=True):
    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=16)] | None = None
    stream: bool | None = None
    session_id: SessionId | None = None  # not Anthropic's: a session of this server
    cache_salt: CacheSalt | None = None  # not Anthropic's either
    thread: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class _Turn:
    """Adjacent messages of one role."""

    role: str
    blocks: list[Block]


def parse_messages(
    body: bytes, thinks: bool | None, defaults: Defaults = NO_DEFAULTS, table: FieldTable = MESSAGES
) -> ChatRequest:
    """`table`: the ignored fields."""
    return message_request(decode_body(body, MessagesBody, table=table), thinks, defaults)


def message_request(
    fields: MessagesBody,
    thinks: bool | None,
    defaults: Defaults = NO_DEFAULTS,
    thread: Thread | None = None,  # what comes before the messages
) -> ChatRequest:
    """`thinks`, `defaults`: the operator's defaults for requests, here and below."""
    given = {
        name: value
        for name in ("temperature", "top_p", "top_k")
        if (value := getattr(fields, name)) is not None
    }
    sampling = SamplingParams(
        max_tokens=fields.max_tokens,
        stop=tuple(fields.stop_sequences or ()),
        **{**defaults, **given},
    )
    chat = _chat_request(fields, thinks, sampling, bool(fields.stream), thread)
    return replace(chat, session_id=fields.session_id, cache_salt=fields.cache_salt)


def parse_count(body: bytes, thinks: bool | None, table: FieldTable = COUNT_TOKENS) -> ChatRequest:
    return _chat_request(decode_body(body, PromptBody, table=table), thinks, SamplingParams())


def _chat_request(
    fields: PromptBody,
    thinks: bool | None,
    sampling: SamplingParams,
    is_stream: bool = False,
    thread: Thread | None = None,
) -> ChatRequest:
    _check_num_blocks(fields)
    omitted: list[str] = []
    instructions, turns = _split_turns(fields, omitted)
    held: tuple[PlainMessage, ...] = ()
    tools = _plain_tools(fields.tools or []) or None
    if thread is not None and thread.previous is not None:
        _refuse_held_fields(fields)
        held, tools = thread.messages, list(thread.tools) or None
    choice = _openai_choice(fields.tool_choice)
    must_call, form = demanded_tools(choice, tools), _json_form(fields)
    reply_start = ""
    if turns and turns[-1].role == "assistant":
        start = _reply_start(turns[-1], f"messages[{len(fields.messages) - 1}]")
        if not (must_call or form):  # these constrain a reply from its beginning
            turns.pop()
            reply_start = start
    output = fields.output_config or OutputConfig()
    return ChatRequest(
        messages=place_instructions(
            [*held, *_system_message(instructions), *_plain_messages(turns, names_of_calls(held))]
        ),
        tools=None if choice == "none" else tools,
        template_arguments={"enable_thinking": _is_thinking(fields.thinking, thinks)},
        sampling=sampling,
        is_stream=is_stream,
        include_usage=True,
        must_call=must_call,
        is_parallel=not (
            fields.tool_choice is not None and fields.tool_choice.disable_parallel_tool_use
        ),
        json_form=form,
        effort_budget=None
        if output.effort is None
        else effort_of(output.effort, "output_config.effort")[1],
        thinking_budget=thinking_budget(fields.thinking),
        hides_thoughts=fields.thinking is not None and fields.thinking.display == "omitted",
        reply_start=reply_start,
        omitted=omitted,
        is_cut_to_context=True,
    )


def _refuse_held_fields(fields: PromptBody) -> None:
    for name in ("system", "tools"):
        if getattr(fields, name) is not None:
            raise RequestError(
                f"{name} cannot be sent with a continued thread",
                "A thread keeps the value that it was created with.",
                f"Omit {name}, or create another thread.",
                param=name,
            )


def _is_thinking(thinking: Thinking | None, thinks: bool | None) -> bool:
    """Without an operator's default, only requests that mention thinking think, as clients of this
    API expect."""
    switch = thinking_switch(thinking)
    if switch is None:
        switch = thinks
    return thinking is not None if switch is None else switch


def _json_form(fields: PromptBody) -> JsonForm | None:
    where, form = "output_format", fields.output_format
    if fields.output_config is not None and fields.output_config.format is not None:
        if form not in (None, fields.output_config.format):
            raise RequestError(
                "output_format and output_config.format are different",
                "The first is the older name of the second.",
                "Omit output_format.",
                param=where,
            )
        where, form = "output_config.format", fields.output_config.format
    if form is None:
        return None
    if form.type != "json_schema":
        raise RequestError(
            f"{where}.type is {form.type[:32]!r}", "It must be json_schema.", param=f"{where}.type"
        )
    return JsonForm(form.schema, is_strict=True)


def _plain_tools(tools: list[OfferedTool]) -> list[PlainTool]:
    places: dict[str, int] = {}
    for index, tool in enumerate(tools):
        first = places.setdefault(tool.name, index)
        if first != index:  # Anthropic refuses them too
            raise RequestError(
                f"tools[{index}] has the name of tools[{first}], {tool.name[:64]!r}",
                "A call identifies its tool by name.",
                "Use a different name for each tool.",
                param=f"tools[{index}].name",
            )
    return [_plain_tool(tool, index) for index, tool in enumerate(tools)]


def _plain_tool(tool: OfferedTool, index: int) -> PlainTool:
    where = f"tools[{index}]"
    if tool.type not in (None, "custom"):
        raise RequestError(
            f"{where} is of type {str(tool.type)[:64]!r}",
            "This server has no built-in tools.",
            "Describe the tool with a name, a description and an input_schema, and run it "
            "yourself.",
            param=f"{where}.type",
        )
    check_tool_name(tool.name, f"{where}.name", f"{where}.name")
    if tool.input_schema is None:
        raise RequestError(f"{where} has no input_schema", param=f"{where}.input_schema")
    return plain_tool(tool.name, tool.description, tool.input_schema)


def _openai_choice(choice: ToolChoice | None) -> str | NamedTool | None:
    if choice is None:
        return None
    if choice.type == "tool" and choice.name is not None:
        return NamedTool(NamedFunction(choice.name))
    names = {"auto": "auto", "any": "required", "none": "none"}
    if choice.type not in names:
        raise RequestError(
            f"tool_choice.type is {choice.type[:32]!r}",
            "It must be auto, any, none, or tool with a name.",
            param="tool_choice",
        )
    return names[choice.type]


def _check_num_blocks(fields: PromptBody) -> None:
    contents = [fields.system or "", *(message.content for message in fields.messages)]
    blocks = [block for content in contents if not isinstance(content, str) for block in content]
    inner = [block["content"] for block in blocks if isinstance(block.get("content"), list)]
    num_blocks = len(blocks) + sum(map(len, inner))
    if num_blocks > MAX_BLOCKS:
        raise RequestError(
            f"The messages consist of {num_blocks} blocks",
            f"The limit is {MAX_BLOCKS}.",
            "Join blocks of text.",
            param="messages",
        )


def _split_turns(fields: PromptBody, omitted: list[str]) -> tuple[list[str], list[_Turn]]:
    """The instructions, and the messages after them. Templates expect instructions only at the
    start."""
    instructions = _texts(_checked_blocks(fields.system or [], "system", TEXT_ONLY, omitted))
    turns: list[_Turn] = []
    for index, message in enumerate(fields.messages):
        where = f"messages[{index}]"
        role = message.role
        if role not in BLOCKS_OF_ROLE:
            raise wrong_choice(f"{where}.role", role, BLOCKS_OF_ROLE)
        blocks = _checked_blocks(message.content, f"{where}.content", BLOCKS_OF_ROLE[role], omitted)
        if role == "system":
            if not turns:
                instructions += _texts(blocks)
                continue
            role, blocks = "user", [TextBlock(reminder(text)) for text in _texts(blocks)]
        elif role == "user" and not blocks:
            raise RequestError(f"{where} has no content", param=f"{where}.content")
        if turns and turns[-1].role == role:
            turns[-1].blocks.extend(blocks)
        else:
            turns.append(_Turn(role, blocks))
    return instructions, turns


def _checked_blocks(
    content: Content, where: str, types: BlockTypes, omitted: list[str]
) -> list[Block]:
    if isinstance(content, str):
        return [TextBlock(content)]
    return [
        _checked_block(block, f"{where}[{i}]", types, omitted) for i, block in enumerate(content)
    ]


def _checked_block(
    block: dict[str, Any], where: str, types: BlockTypes, omitted: list[str]
) -> Block:
    kind = block.get("type")
    if not isinstance(kind, str):
        raise RequestError(f"{where} has no type", "Each block needs a type.", param=where)
    if kind not in types:
        raise RequestError(
            f"{where} is of type {kind[:64]!r}",
            "This model reads only text."
            if kind == "image"
            else f"The supported types are {', '.join(types)}.",
            "Omit the block, or describe it in a text block.",
            param=where,
        )
    checked = _converted(block, types[kind], where)
    if isinstance(checked, ToolResultBlock) and isinstance(checked.content, list):
        texts = [
            _result_text(part, f"{where}.content[{index}]", omitted)
            for index, part in enumerate(checked.content)
        ]
        checked.content = PARAGRAPH.join(texts)
    return checked


def _converted(block: dict[str, Any], kind: type[Struct], where: str) -> Struct:
    try:
        return msgspec.convert(block, kind)
    except msgspec.ValidationError as error:
        raise wrong_field(error, where) from error


def _result_text(block: dict[str, Any], where: str, omitted: list[str]) -> str:
    """The text of a block of a tool's result; a note instead of a block that is not text."""
    kind = block.get("type")
    if kind == "search_result":
        found = _converted(block, SearchResultBlock, where)
        return PARAGRAPH.join([found.title, found.source, *_texts([*found.content])])
    if kind == "document":
        return _document_text(_converted(block, DocumentBlock, where), where, omitted)
    return _part_text(block, where, omitted)


def _document_text(document: DocumentBlock, where: str, omitted: list[str]) -> str:
    source = document.source or DocumentSource()
    texts = [document.title, document.context]
    content = source.content
    if source.type == "text":
        texts.append(source.data)
    elif source.type != "content":
        texts.append(replace_attachment("document", where, omitted))
    elif isinstance(content, list):
        texts += [
            _part_text(part, f"{where}.source.content[{index}]", omitted)
            for index, part in enumerate(content)
        ]
    else:
        texts.append(content)
    return PARAGRAPH.join(text for text in texts if text)


def _part_text(block: dict[str, Any], where: str, omitted: list[str]) -> str:
    kind = block.get("type")
    if isinstance(kind, str) and kind != "text":
        return replace_attachment(kind, where, omitted)
    return "".join(_texts([_checked_block(block, where, TEXT_ONLY, omitted)]))


def _system_message(instructions: list[str]) -> list[PlainMessage]:
    texts = [_without_billing(text) for text in instructions]
    text = PARAGRAPH.join(text for text in texts if text)
    return [{"role": "system", "content": text}] if text else []


def _without_billing(text: str) -> str:
    return text.partition("\n")[2].lstrip("\n") if text.startswith(BILLING_LINE) else text


def _plain_messages(turns: list[_Turn], tool_names: dict[str, str]) -> list[PlainMessage]:
    """`tool_names`: by the ids of earlier calls."""
    messages: list[PlainMessage] = []
    for turn in turns:
        if turn.role == "assistant":
            tool_names |= {
                block.id: block.name for block in turn.blocks if isinstance(block, ToolUseBlock)
            }
            messages.append(_assistant_message(turn.blocks))
            continue
        results = [block for block in turn.blocks if isinstance(block, ToolResultBlock)]
        messages += [_result_message(result, tool_names) for result in results]
        texts = _texts(turn.blocks)
        if texts:
            messages.append({"role": "user", "content": PARAGRAPH.join(texts)})
    return messages


def _assistant_message(blocks: list[Block]) -> PlainMessage:
    """Joins its texts without a separator: replies.py split them at a call or at reasoning."""
    message: PlainMessage = {"role": "assistant", "content": "".join(_texts(blocks))}
    if thought := "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)):
        message["reasoning_content"] = thought
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    if calls:
        message["tool_calls"] = [plain_call(call.id, call.name, call.input) for call in calls]
    return message


def _result_message(result: ToolResultBlock, tool_names: dict[str, str]) -> PlainMessage:
    text = result.content or ""
    if result.is_error:  # templates have no other place for it
        text = f"Error: {text}"
    message: PlainMessage = {"role": "tool", "tool_call_id": result.tool_use_id, "content": text}
    if result.tool_use_id in tool_names:
        message["name"] = tool_names[result.tool_use_id]
    return message


def _reply_start(turn: _Turn, where: str) -> str:
    """The text that the reply continues, from an assistant message at the end."""
    if any(isinstance(block, ToolUseBlock) for block in turn.blocks):
        raise RequestError(
            f"{where}, the last message, calls a tool",
            "A call cannot be continued.",
            "Send its tool_result after it.",
            param=where,
        )
    text = "".join(_texts(turn.blocks))
    if text != text.rstrip():
        raise RequestError(
            f"{where}, the last message, ends with white space",
            "Tokens begin with a space rather than end with one, so the model cannot continue it.",
            "Remove the white space.",
            param=where,
        )
    return text


def _texts(blocks: list[Block]) -> list[str]:
    return [block.text for block in blocks if isinstance(block, TextBlock)]
