"""The grammar that constrains a reply, for the engine: tool calls, JSON or other text, or a choice
of calls and text.

Knows the request's constraints and how its model writes calls; penstock.text writes the grammars.
"""

from __future__ import annotations

import json

from penstock.errors import RequestError
from penstock.serve.openai.chat_options import JsonForm
from penstock.serve.openai.forms import TextForm
from penstock.serve.requests import ChatRequest, TextRequest
from penstock.text.call_grammar import tool_calls_grammar
from penstock.text.dialects import Dialect
from penstock.text.grammar import (
    choice_grammar,
    client_grammar,
    json_object_grammar,
    json_schema_grammar,
    regex_grammar,
    with_blank_start,
)
from penstock.text.tokenizer import Tokenizer


def chat_grammar(
    chat: ChatRequest, dialect: Dialect, tokenizer: Tokenizer, is_thinking: bool, open_schemas: bool
) -> str | None:
    """None: the reply is not constrained. `is_thinking`: the reply begins with thinking, and the
    grammar applies after it."""
    calls = _calls_grammar(chat, dialect, tokenizer, open_schemas)
    if chat.must_call:
        if calls is None:
            raise RequestError(
                "This model cannot be made to call a tool",
                "Its chat template does not show its format of calls.",
                'Omit tool_choice, or use "none".',
                param="tool_choice",
            )
        grammar = calls
    elif chat.form is None:
        return calls  # None, or calls after free text, if the text of a tool has a grammar
    else:
        grammar = form_grammar(chat.form, open_schemas)
        if calls is not None:
            return _either(calls, grammar, is_thinking)
    return with_blank_start(grammar) if is_thinking else grammar


def form_grammar(form: JsonForm | TextForm, open_schemas: bool) -> str:
    """`open_schemas`: objects may have keys that their schema does not list."""
    if isinstance(form, TextForm):
        if isinstance(form.value, tuple):
            return choice_grammar(form.value, param=form.param)
        return (regex_grammar if form.kind == "regex" else client_grammar)(
            form.value, param=form.param
        )
    if form.schema is None:
        return json_object_grammar()
    is_open = open_schemas and not form.is_closed
    return json_schema_grammar(
        form.schema, is_lenient=not form.is_strict, is_open=is_open, param=form.param
    )


def form_param(asked: TextRequest) -> str:
    """The field to name in an error about a grammar that is too expensive."""
    if isinstance(asked, ChatRequest) and (asked.must_call or asked.text_grammars):
        return "tools"
    return "response_format" if asked.form is None else asked.form.param


def _calls_grammar(
    chat: ChatRequest, dialect: Dialect, tokenizer: Tokenizer, open_schemas: bool
) -> str | None:
    """The grammar of calls that are required, or allowed instead of formatted text, or allowed at
    the end of free text if the text of a tool has a grammar; None: calls are not constrained."""
    may_be_other = chat.must_call is None and chat.form is None
    tools = chat.must_call or (None if may_be_other and not chat.text_grammars else chat.tools)
    if not tools or dialect.call is None:
        return None
    return tool_calls_grammar(
        tools,
        dialect.call,
        lambda text: tokenizer.id_of(text) is not None,
        is_required=not may_be_other,
        is_parallel=chat.is_parallel,
        is_open=open_schemas,
        text_grammars=chat.text_grammars,
    )


def _either(calls: str, body: str, is_thinking: bool) -> str:
    """One of two grammars; after thinking, preceded by up to two newlines."""
    start = "start: @calls | @body" if not is_thinking else "start: /\\n{0,2}/ (@calls | @body)"
    (call_rules, *nested), (body_rules,) = (
        json.loads(grammar)["grammars"] for grammar in (calls, body)
    )
    named = [{"name": "calls", **call_rules}, {"name": "body", **body_rules}, *nested]
    return json.dumps({"grammars": [{"lark_grammar": start}, *named]}, ensure_ascii=False)
