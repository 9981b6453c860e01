"""The fields that constrain a reply's text: JSON, a regular expression, a list of texts or a
grammar.

OpenAI has `response_format`; vLLM, SGLang and llama.cpp have their own names for the same things. A
request may use only one of them. response_grammar.py enforces the forms.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from penstock.errors import RequestError
from penstock.serve.openai.chat_options import JsonForm, json_form
from penstock.text.grammar import MAX_SCHEMA_BYTES

if TYPE_CHECKING:
    from penstock.serve.openai.requests import SamplingFields

Schema = str | dict[str, Any] | bool  # a text is JSON


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's object; one of the first five fields is set."""

    json: Schema | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None  # the default here, unless --open-schemas
    disable_fallback: bool | None = None  # no effect: there is no other backend to fall back to


@dataclass(frozen=True, slots=True)
class TextForm:
    """Text that a regular expression, a list of texts or a grammar (Lark or GBNF) allows."""

    kind: Literal["regex", "choice", "grammar"]
    value: str | tuple[str, ...]
    param: str


def form_of(fields: SamplingFields) -> JsonForm | TextForm | None:
    forms = [
        form
        for form in (json_form(fields.response_format), *_other_forms(fields))
        if form is not None
    ]
    if len(forms) > 1:
        raise RequestError(
            f"{forms[0].param} and {forms[1].param} both constrain the reply",
            "Only one of them can be enforced.",
            "Omit one of them.",
            param=forms[1].param,
        )
    return forms[0] if forms else None


def _other_forms(fields: SamplingFields) -> list[JsonForm | TextForm | None]:
    asked = fields.structured_outputs or StructuredOutputs()
    for name in ("structural_tag", "whitespace_pattern", "disable_any_whitespace"):
        if getattr(asked, name):
            raise RequestError(
                f"structured_outputs.{name} is not supported",
                "The supported ones are json, json_object, regex, choice and grammar.",
                "Omit it.",
                param=f"structured_outputs.{name}",
            )
    return [
        JsonForm(param="structured_outputs.json_object") if asked.json_object else None,
        _schema_form(
            asked.json, "structured_outputs.json", bool(asked.disable_additional_properties)
        ),
        _schema_form(fields.guided_json, "guided_json"),
        _schema_form(fields.json_schema, "json_schema"),
        _text_form("regex", asked.regex, "structured_outputs.regex"),
        _text_form("regex", fields.guided_regex, "guided_regex"),
        _text_form("regex", fields.regex, "regex"),
        _text_form("choice", asked.choice, "structured_outputs.choice"),
        _text_form("choice", fields.guided_choice, "guided_choice"),
        _text_form("grammar", asked.grammar, "structured_outputs.grammar"),
        _text_form("grammar", fields.guided_grammar, "guided_grammar"),
        _text_form("grammar", fields.ebnf, "ebnf"),
        _text_form("grammar", fields.grammar, "grammar"),
    ]


def _schema_form(schema: Schema | None, param: str, is_closed: bool = False) -> JsonForm | None:
    if isinstance(schema, str):
        if len(schema) > MAX_SCHEMA_BYTES:
            raise RequestError(
                f"{param} has {len(schema)} characters",
                f"The limit is {MAX_SCHEMA_BYTES}.",
                param=param,
            )
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"{param} is not JSON",
                f"{error}.",
                "Send a JSON schema, as an object or as text.",
                param=param,
            ) from error
    return None if schema is None else JsonForm(schema, param=param, is_closed=is_closed)


def _text_form(
    kind: Literal["regex", "choice", "grammar"], value: str | list[str] | None, param: str
) -> TextForm | None:
    if value is None or value == "":  # llama.cpp's clients send an empty grammar
        return None
    return TextForm(kind, value if isinstance(value, str) else tuple(value), param)
