"""OpenAI's request bodies: decodes a POST into a request and checks every field.

The schema ends here: the result has messages or prompts, `SamplingParams`, and how to answer. A
field with a wrong type or value is a `RequestError` that names it; fields.py lists the ignored
ones. Nothing here renders, tokenises or generates; replies.py writes the replies.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.errors import RequestError
from penstock.serve.body import decode_body, renaming
from penstock.serve.fields import CHAT, COMPLETIONS, DETOKENIZE, TOKENIZE, FieldTable
from penstock.serve.openai.chat_options import (
    JsonForm,
    Reasoning,
    ResponseFormat,
    Thinking,
    Tool,
    ToolChoice,
    checked_budget,
    chosen_tools,
    effort_of,
    plain_tools,
    thinking_budget,
    thinking_switch,
)
from penstock.serve.openai.forms import Schema, StructuredOutputs, TextForm, form_of
from penstock.serve.openai.messages import Message, plain_messages
from penstock.serve.openai.output_options import (
    output_options,
    scored_alternatives,
    take_prefill,
)
from penstock.serve.requests import (
    MAX_CHARS_ASKED,
    MAX_ID_VALUES,
    MAX_IDS,
    NO_DEFAULTS,
    CacheSalt,
    ChatRequest,
    CompletionRequest,
    Defaults,
    Priority,
    Scalar,
    SessionId,
    StopString,
    Timeout,
    TokenId,
    TokenizeRequest,
)
from penstock.text.template import RESERVED_NAMES
from penstock.types import SamplingParams

MAX_REPLIES = 128  # prompts x n of one request
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions
MAX_TEMPLATE_ARGUMENTS = 64

TemplateArguments = Annotated[dict[str, Any], Meta(max_length=MAX_TEMPLATE_ARGUMENTS)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis: none is sent
    continuous_usage_stats: bool | None = None


class DrawFields(msgspec.Struct, kw_only=True):
    """The fields of all of OpenAI's endpoints, Responses included."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    timeout: Timeout | None = None
    priority: Priority | None = None
    session_id: SessionId | None = None
    cache_salt: CacheSalt | None = None


DRAW_NAMES = (  # the fields that `SamplingParams` has by the same name
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "seed", "ignore_eos"),
)


def given_fields(fields: DrawFields, names: tuple[str, ...]) -> dict[str, Any]:
    given = {name: value for name in names if (value := getattr(fields, name)) is not None}
    if given.get("top_k") == -1:  # the other common value for "off"
        given["top_k"] = 0
    return given


class SamplingFields(DrawFields, kw_only=True):
    """The fields of both endpoints."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=1024)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    n: int | None = None
    stream_options: StreamOptions | None = None
    usage: Any = None  # OpenRouter's {"include": true}
    prompt_cache_key: str | None = None
    loop_guard: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None  # vLLM's, as are the guided_* fields
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: Schema | None = None  # these are SGLang's and llama.cpp's
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    bad_words: Annotated[list[StopString], Meta(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None  # no effect: none are added
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None


OUTPUT_NAMES = ("include_stop_str_in_output", "skip_special_tokens", "truncate_prompt_tokens")


class ChatBody(SamplingFields, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[Tool], Meta(max_length=1024)] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    thinking: bool | Thinking | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    reasoning: Reasoning | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None  # vLLM's name, and Qwen's
    thinking_budget: int | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    functions: Any = None
    function_call: Any = None


class CompletionBody(SamplingFields, kw_only=True):
    prompt: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """A text, or a chat as its template renders it."""

    prompt: Annotated[str, Meta(max_length=MAX_CHARS_ASKED)] | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=1024)] | None = None
    chat_template_kwargs: TemplateArguments | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    count_cached: bool | None = None  # also count the tokens that the prefix cache has now
    # llama-server's names: a text, and what to return.
    content: Annotated[str, Meta(max_length=MAX_CHARS_ASKED)] | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_IDS)]


def parse_chat(
    body: bytes, defaults: Defaults = NO_DEFAULTS, table: FieldTable = CHAT
) -> ChatRequest:
    """`defaults`: the server's sampling parameters; `table`: the ignored fields; here and below."""
    return chat_request(decode_body(body, ChatBody, table=table), defaults)


def chat_request(fields: ChatBody, defaults: Defaults = NO_DEFAULTS) -> ChatRequest:
    if fields.max_completion_tokens is not None:  # the newer name of the same field
        fields.max_tokens = fields.max_completion_tokens
    if fields.functions or fields.function_call:
        raise RequestError(
            "functions and function_call are not supported",
            "Tools replaced them.",
            "Use tools and tool_choice.",
            param="functions" if fields.functions else "function_call",
        )
    logprobs = None
    if fields.logprobs:
        logprobs = fields.top_logprobs or 0
    elif fields.top_logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    tools = plain_tools(fields.tools or ()) or None
    tools, must_call = chosen_tools(fields.tool_choice, tools)
    form = form_of(fields)
    omitted: list[str] = []
    messages = plain_messages(fields.messages, omitted)
    prefill = take_prefill(
        messages,
        fields.continue_final_message,
        fields.add_generation_prompt,
        bool(form or must_call),
    )
    return ChatRequest(
        messages=messages,
        omitted=omitted,
        reply_start="" if prefill is None else prefill.text,
        reply_thought=None if prefill is None else prefill.thought,
        add_generation_prompt=prefill is not None or fields.add_generation_prompt is not False,
        tools=tools,
        template_arguments=_template_arguments(fields),
        **_thinking_options(fields),
        sampling=_sampling(fields, logprobs, {"logprobs": "top_logprobs"}, defaults),
        must_call=must_call,
        is_parallel=fields.parallel_tool_calls is not False,
        **_common(fields, form),
    )


def parse_completion(
    body: bytes, defaults: Defaults = NO_DEFAULTS, table: FieldTable = COMPLETIONS
) -> CompletionRequest:
    return completion_request(decode_body(body, CompletionBody, MAX_ID_VALUES, table), defaults)


def completion_request(
    fields: CompletionBody, defaults: Defaults = NO_DEFAULTS
) -> CompletionRequest:
    if fields.suffix:
        raise RequestError(
            "suffix is not supported", "The model only continues text.", param="suffix"
        )
    if fields.best_of is not None and fields.best_of != (fields.n or 1):
        raise RequestError(
            "best_of is not supported", "Every reply is returned: use n.", param="best_of"
        )
    if fields.max_tokens is None:
        fields.max_tokens = COMPLETION_MAX_TOKENS
    prompts = split_prompts(fields.prompt)
    if len(prompts) * (fields.n or 1) > MAX_REPLIES:
        raise RequestError(
            f"{len(prompts)} prompts with n = {fields.n or 1} are too many for one request",
            f"The limit is {MAX_REPLIES} replies.",
            "Split the request.",
            param="prompt",
        )
    sampling = _sampling(fields, fields.logprobs, {}, defaults)
    if fields.echo:
        num_scored = scored_alternatives(fields.prompt_logprobs, fields.logprobs)
        sampling = replace(sampling, prompt_logprobs=num_scored)
    return CompletionRequest(
        prompts=prompts,
        sampling=sampling,
        echo=bool(fields.echo),
        **_common(fields, form_of(fields)),
    )


def parse_tokenize(body: bytes) -> TokenizeRequest:
    fields = decode_body(body, TokenizeBody, table=TOKENIZE)
    if [fields.prompt, fields.messages, fields.content].count(None) != 2:
        raise RequestError("Either prompt or messages is required, not both", param="prompt")
    if fields.content is not None:
        return TokenizeRequest(
            text=fields.content,
            add_special_tokens=bool(fields.add_special),
            knows_control_tokens=fields.parse_special is not False,
            shows_pieces=bool(fields.with_pieces),
            counts_cached=bool(fields.count_cached),
        )
    chat = None
    if fields.messages is not None:
        continues = fields.continue_final_message
        if continues is None and fields.add_generation_prompt is False:
            continues = False  # a whole conversation, as it is
        chat = chat_request(
            ChatBody(
                messages=fields.messages,
                tools=fields.tools,
                chat_template_kwargs=fields.chat_template_kwargs,
                continue_final_message=continues,
                add_generation_prompt=fields.add_generation_prompt,
            )
        )
    return TokenizeRequest(
        text=fields.prompt or "",
        chat=chat,
        add_special_tokens=fields.add_special_tokens is not False,
        shows_texts=bool(fields.return_token_strs),
        counts_cached=bool(fields.count_cached),
    )


def parse_detokenize(body: bytes) -> list[int]:
    return decode_body(body, DetokenizeBody, MAX_ID_VALUES, DETOKENIZE).tokens


def _includes_usage(fields: SamplingFields) -> bool:
    if isinstance(fields.usage, dict) and fields.usage.get("include") is True:
        return True
    return bool(fields.stream_options is not None and fields.stream_options.include_usage)


def _sampling(
    fields: SamplingFields, logprobs: int | None, renamed: dict[str, str], defaults: Defaults
) -> SamplingParams:
    """`renamed`: this endpoint's names of fields that have other names in `SamplingParams`."""
    names = ("max_tokens", "min_tokens", *DRAW_NAMES, "n", *OUTPUT_NAMES, "prompt_logprobs")
    given = {**defaults, **given_fields(fields, names)}
    stop = fields.stop or ()
    given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    given["stop_token_ids"] = tuple(fields.stop_token_ids or ())
    given["bad_words"] = tuple(fields.bad_words or ())
    given["logit_bias"] = _logit_bias(fields.logit_bias or {})
    if getattr(fields, "max_completion_tokens", None) is not None:
        renamed = {**renamed, "max_tokens": "max_completion_tokens"}
    with renaming(renamed):
        return SamplingParams(logprobs=logprobs, **given)


def _logit_bias(biases: dict[str, float]) -> dict[int, float]:
    for key in biases:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise RequestError(
                f"logit_bias has the key {key[:32]!r}",
                'Keys are token ids, such as "42".',
                param="logit_bias",
            )
    return {int(key): bias for key, bias in biases.items()}


def _common(fields: SamplingFields, form: JsonForm | TextForm | None) -> dict[str, Any]:
    """The options of both endpoints besides prompts and sampling."""
    return {
        "json_form": form if isinstance(form, JsonForm) else None,
        "text_form": None if isinstance(form, JsonForm) else form,
        "is_stream": bool(fields.stream),
        "include_usage": _includes_usage(fields),
        "timeout_s": fields.timeout,
        "priority": fields.priority or 0,
        "session_id": fields.session_id,
        "cache_salt": fields.cache_salt,
        "cache_key": fields.prompt_cache_key,
        "loop_guard": fields.loop_guard,
        "output": output_options(fields),
    }


def _effort(fields: ChatBody) -> tuple[bool | None, int | None]:
    if fields.reasoning_effort is None and fields.reasoning is not None:
        return effort_of(fields.reasoning.effort, "reasoning.effort")
    return effort_of(fields.reasoning_effort, "reasoning_effort")


def _thinking_options(fields: ChatBody) -> dict[str, Any]:
    """How long thinking may take, and whether the reasoning is sent."""
    reasoning, thinking = fields.reasoning or Reasoning(), fields.thinking
    budgets = (
        thinking_budget(thinking),
        checked_budget(reasoning.max_tokens, "reasoning.max_tokens"),
        checked_budget(fields.thinking_token_budget, "thinking_token_budget"),
        checked_budget(fields.thinking_budget, "thinking_budget"),
    )
    is_omitted = isinstance(thinking, Thinking) and thinking.display == "omitted"
    return {
        "thinking_budget": next((budget for budget in budgets if budget is not None), None),
        "effort_budget": _effort(fields)[1],
        "hides_thoughts": bool(reasoning.exclude)
        or fields.include_reasoning is False
        or is_omitted,
    }


def _template_arguments(fields: ChatBody) -> dict[str, Scalar]:
    arguments: dict[str, Scalar] = {}
    reasoning = fields.reasoning or Reasoning()
    switches = (  # the last one that is set counts
        None if reasoning.max_tokens is None else True,
        _effort(fields)[0],
        reasoning.enabled,
        thinking_switch(fields.thinking),
        fields.enable_thinking,
    )
    for flag in switches:
        if flag is not None:
            arguments["enable_thinking"] = flag
    for name, value in (fields.chat_template_kwargs or {}).items():
        if not isinstance(value, bool | int | float | str | None):
            raise RequestError(
                f"chat_template_kwargs.{name[:64]} is a {type(value).__name__}",
                "Only strings, numbers and booleans are passed to the template.",
                param="chat_template_kwargs",
            )
        if name in RESERVED_NAMES:
            raise RequestError(
                f"chat_template_kwargs has {name}",
                "The request itself, or the template, sets it.",
                "Omit it.",
                param="chat_template_kwargs",
            )
        arguments[name] = value
    return arguments


def split_prompts(
    prompt: str | list[str | int | list[int]], name: str = "prompt"
) -> list[str | list[int]]:
    """OpenAI accepts a text, a list of texts, token ids, or a list of token ids; never a
    mixture.
    """
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if len(kinds) != 1:
        raise RequestError(
            f"{name} mixes texts and token ids",
            "It must be a text, a list of texts, a list of ids or a list of lists of ids.",
            param=name,
        )
    if kinds == {int}:
        return [[item for item in prompt if isinstance(item, int)]]
    return [item for item in prompt if not isinstance(item, int)]
