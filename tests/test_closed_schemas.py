"""An object has only the keys that its schema lists, unless the schema allows others."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from grammar_walks import is_allowed
from penstock.serve.openai.requests import parse_completion
from penstock.serve.response_grammar import form_grammar
from penstock.text.call_grammar import tool_calls_grammar
from penstock.text.closed_schemas import close_objects
from penstock.text.dialects import DIALECTS
from penstock.text.grammar import json_schema_grammar

Schema = dict[str, Any]
INTEGER: Schema = {"type": "integer"}


def listing(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties}


A, B, C = listing(a=INTEGER), listing(b=INTEGER), listing(c=INTEGER)
DEFS: Schema = {"$defs": {"A": A, "B": B}}
REF_A, REF_B = {"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}
CLOSED: dict[str, tuple[Schema, list[str], list[str]]] = {  # what is allowed, and what is not
    "plain": (A, ['{"a":1}', "{}"], ['{"b":1}', '{"a":1,"b":1}']),
    "no keys": (listing(), ["{}"], ['{"b":1}']),
    "nested": (listing(x=A), ['{"x":{"a":1}}'], ['{"x":{"b":1}}']),
    "items": ({"type": "array", "items": A}, ['[{"a":1}]'], ['[{"b":1}]']),
    "reference": ({**DEFS, **REF_A}, ['{"a":1}'], ['{"b":1}']),
    "recursive": (
        {
            "$defs": {"N": listing(next={"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]})},
            "$ref": "#/$defs/N",
        },
        ['{"next":{"next":null}}'],
        ['{"x":1}', '{"next":{"x":1}}'],
    ),
    "alternatives": ({"anyOf": [A, B]}, ['{"a":1}', '{"b":1}'], ['{"c":1}', '{"a":1,"b":1}']),
    "alternative references": ({**DEFS, "oneOf": [REF_A, REF_B]}, ['{"b":1}'], ['{"c":1}']),
    "which are required": (
        {**listing(a=INTEGER, b=INTEGER), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"a":1}', '{"b":1}'],
        ["{}", '{"c":1}'],
    ),
    "parts": ({"allOf": [A, B]}, ['{"a":1}', '{"b":1}', '{"a":1,"b":1}'], ['{"c":1}']),
    "parts by reference": ({**DEFS, "allOf": [REF_A, REF_B]}, ['{"a":1,"b":1}'], ['{"c":1}']),
    "a part and own": ({**DEFS, **C, "allOf": [REF_A]}, ['{"c":1,"a":1}', '{"a":1}'], ['{"b":1}']),
    "one part": ({**DEFS, **listing(x={"allOf": [REF_A]})}, ['{"x":{"a":1}}'], ['{"x":{"b":1}}']),
    "a key with a keyword's name": (
        listing(properties=A),
        ['{"properties":{"a":1}}'],
        ['{"properties":{"b":1}}'],
    ),
}
OPEN: dict[str, tuple[Schema, str]] = {  # where other keys must stay possible
    "no list": ({"type": "object"}, '{"x":1}'),
    "says so": ({**A, "additionalProperties": True}, '{"x":1}'),
    "says of what kind": ({**A, "additionalProperties": INTEGER}, '{"x":1}'),
    "patterns": ({**A, "patternProperties": {"^x": INTEGER}}, '{"xy":1}'),
    "a required key that is not listed": ({**A, "required": ["z"]}, '{"z":1}'),
    "one that a part requires": ({"allOf": [{**A, "required": ["z"]}, B]}, '{"a":1,"b":1,"z":1}'),
    "alternatives that add keys": ({**A, "anyOf": [B, C]}, '{"a":1,"b":1}'),
    "a part with alternatives": ({"allOf": [A, {"anyOf": [B, C]}]}, '{"a":1,"b":1}'),
    "a reference beside own": ({**DEFS, **C, **REF_A}, '{"c":1,"a":1}'),
    "a constant": (listing(a={"const": {"properties": {"x": 1}}}), '{"a":{"properties":{"x":1}}}'),
}


@pytest.mark.parametrize("name", CLOSED)
def test_keys_that_are_not_listed_are_not_written(name: str) -> None:
    schema, allowed, others = CLOSED[name]
    grammar = json_schema_grammar(schema, is_lenient=True)
    assert [is_allowed(grammar, text) for text in allowed] == [True] * len(allowed)
    assert [is_allowed(grammar, text) for text in others] == [False] * len(others)


@pytest.mark.parametrize("name", OPEN)
def test_a_schema_that_speaks_of_other_keys_stays_open(name: str) -> None:
    schema, text = OPEN[name]
    assert is_allowed(json_schema_grammar(schema, is_lenient=True), text)


def test_the_strict_reading_allows_every_other_key() -> None:
    assert is_allowed(json_schema_grammar(listing(x=A), is_open=True), '{"x":{"b":1},"y":1}')


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_request_can_close_what_the_server_leaves_open(is_closed: bool) -> None:
    body = {
        "prompt": "x",
        "structured_outputs": {"json": A, "disable_additional_properties": is_closed},
    }
    form = parse_completion(json.dumps(body).encode()).form
    assert form is not None
    assert is_allowed(form_grammar(form, open_schemas=True), '{"b":1}') is not is_closed


@pytest.mark.parametrize("is_open", [False, True])
def test_arguments_of_a_call_are_closed_as_well(is_open: bool) -> None:
    form = DIALECTS["hermes"].call
    assert form is not None
    tools = [{"function": {"name": "f", "parameters": listing(x=A)}}]
    grammar = tool_calls_grammar(tools, form, lambda text: False, is_open=is_open)
    call = form.start_of("f") + '{"x":%s}' + form.end
    assert is_allowed(grammar, call % '{"a":1}')
    assert is_allowed(grammar, call % '{"b":1}') is is_open


def test_references_that_multiply_or_go_in_circles_take_no_time() -> None:
    def part(number: int) -> Schema:
        reference = {"$ref": f"#/$defs/D{number + 1}"}
        return {"allOf": [reference, reference]}

    many = {"$defs": {f"D{i}": part(i) for i in range(40)} | {"D40": A}, "$ref": "#/$defs/D0"}
    circle = {"$defs": {"N": {"$ref": "#/$defs/N"}}, "allOf": [{"$ref": "#/$defs/N"}, A]}
    begun = time.perf_counter()
    close_objects(many)
    close_objects(circle)
    assert time.perf_counter() - begun < 2


def test_the_schema_that_was_sent_is_left_as_it_is() -> None:
    schema = {"allOf": [listing(x=A), B]}
    before = repr(schema)
    close_objects(schema)
    assert repr(schema) == before
