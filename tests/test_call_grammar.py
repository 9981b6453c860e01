"""Forced tool calls: the parser reads everything that the grammar allows as calls of the tools."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from grammar_walks import PERSON, is_allowed, is_valid, random_text
from penstock.errors import RequestError
from penstock.text.call_grammar import TextGrammar, tool_calls_grammar, without_annotations
from penstock.text.dialects import DIALECTS, ParsedReply, StreamParser
from penstock.text.grammar import with_blank_start
from penstock.text.parameter_lists import parameter_lists

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "where"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"$ref": "#/$defs/unit"},
        "details": {
            "type": "object",
            "properties": {"wind": {"type": "boolean"}},
            "required": ["wind"],
        },
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["celsius", "fahrenheit"], "type": "string"}},
}
SCHEMAS = {"weather": WEATHER, "people.add": PERSON}
TOOLS = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items()]
FORMS = {name: dialect.call for name, dialect in DIALECTS.items() if dialect.call is not None}

EXAMPLES = {
    "qwen_xml": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nNew\nYork\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n<parameter=unit>\ncelsius\n</parameter>\n</function>\n</tool_call>"
    ),
    "hermes": (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "New\\nYork", "days": 3, "unit": '
        '"celsius"}}'
        "\n</tool_call>"
    ),
    "llama3": '{"name": "weather", "parameters": {"city": "New\\nYork", "days": 3, "unit": '
    '"celsius"}}',
}


def grammar_of(dialect: str, tools: list[dict[str, Any]] | None = None, **options: Any) -> str:
    """Compiles a grammar on a vocabulary of bytes, where tags are text."""
    return tool_calls_grammar(
        TOOLS if tools is None else tools, FORMS[dialect], lambda _: False, **options
    )


def parse(dialect: str, text: str) -> ParsedReply:
    parser = StreamParser(DIALECTS[dialect], TOOLS)
    return ParsedReply.of([*parser.feed(text), *parser.close("stop")])


@pytest.mark.parametrize("dialect", FORMS)
def test_a_call_as_the_model_was_taught_it_is_allowed(dialect: str) -> None:
    example = EXAMPLES[dialect]
    assert is_allowed(grammar_of(dialect), example)
    for wrong in ("weather", "3", "city"):
        assert not is_allowed(grammar_of(dialect), example.replace(wrong, "other"))
    assert not is_allowed(grammar_of(dialect), f"Sure! {example}")
    assert not is_allowed(grammar_of(dialect), example + " Done.")


@pytest.mark.parametrize("dialect", FORMS)
@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_allowed_parses_as_valid_calls_and_nothing_else(
    dialect: str, seed: int
) -> None:
    ending = FORMS[dialect].parameter_end or '"'
    reply = parse(dialect, random_text(grammar_of(dialect), seed, ending))
    assert reply.content.strip() == ""
    assert reply.calls
    for call in reply.calls:
        arguments, schema = json.loads(call.arguments), SCHEMAS[call.name]
        if dialect == "qwen_xml":  # in text, only listed values are enforced
            assert set(schema["required"]) <= arguments.keys() <= schema["properties"].keys()
        else:
            assert is_valid(arguments, schema, schema), arguments


PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "side": {"enum": ["left", "right"]}},
    "required": ["x"],
}
REFERENCES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    # Parameters, and valid and invalid values of the last one.
    ({"a": PLACE, "b": {"$ref": "#/properties/a"}}, ['{"x": 1}'], ["[]", "1", '{"y": 1}']),
    ({"a": PLACE, "b": {"$ref": "#/properties/a/properties/x"}}, ["7"], ["left", "{}"]),
    ({"a": PLACE, "b": {"$ref": "#/properties/a/properties/side"}}, ["left"], ["up", "7"]),
    (
        {"a": {"anyOf": [PLACE, {"const": 5}]}, "b": {"$ref": "#/properties/a/anyOf/1"}},
        ["5"],
        ["6"],
    ),
    ({"b": {"type": "array", "items": {"$ref": "#"}}}, ["[]", '[{"b": []}]'], ["[[]]", "[1]"]),
    ({"b": {"anyOf": [{"$ref": "#/$defs/a~1b"}, {"type": "null"}]}}, ["aa", "null"], ["ab", "1"]),
    ({"b": {"allOf": [{"$ref": "#/$defs/a~1b"}]}}, ["bb"], ["null", "x"]),
    ({"b": {"anyOf": [{"type": "integer"}, {"const": "auto"}]}}, ["3", "auto"], ["other"]),
]


@pytest.mark.parametrize(("properties", "allowed", "refused"), REFERENCES)
def test_a_value_between_tags_is_held_to_what_its_schema_refers_to(
    properties: dict[str, Any], allowed: list[str], refused: list[str]
) -> None:
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": "https://example.com/tool",
        "type": "object",
        "properties": properties,
        "required": ["b"],
        "$defs": {"a/b": {"enum": ["aa", "bb"]}},
    }
    grammar = grammar_of("qwen_xml", [{"function": {"name": "f", "parameters": schema}}])
    call = "<tool_call>\n<function=f>\n<parameter=b>\n{}\n</parameter>\n</function>\n</tool_call>"
    assert [value for value in allowed if not is_allowed(grammar, call.format(value))] == []
    assert [value for value in refused if is_allowed(grammar, call.format(value))] == []


@pytest.mark.parametrize("dialect", FORMS)
def test_a_schema_that_is_a_reference_is_what_it_refers_to(dialect: str) -> None:
    """pydantic writes such schemas for recursive models."""
    node = {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "maximum": 9},
            "unit": {"anyOf": [{"$ref": "#/$defs/Node"}, {"const": "celsius"}]},
        },
        "required": ["city", "days"],
    }
    schema = {"$defs": {"Node": node}, "$ref": "#/$defs/Node"}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    assert is_allowed(grammar_of(dialect, tools), EXAMPLES[dialect])
    for wrong in ("3", "city", "celsius"):
        assert not is_allowed(grammar_of(dialect, tools), EXAMPLES[dialect].replace(wrong, "other"))
    parser = StreamParser(DIALECTS[dialect], tools)
    reply = ParsedReply.of([*parser.feed(EXAMPLES[dialect]), *parser.close("stop")])
    assert json.loads(reply.calls[0].arguments)["days"] == 3


CITY = {"properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
DAYS = {"properties": {"days": {"type": "integer"}}, "required": ["days"]}
NO_WHERE = {"type": "object", "properties": {"days": {"type": "boolean"}}}
BOTH_SCHEMAS = {**CITY["properties"], **DAYS["properties"]}  # type: ignore[dict-item]
BY_CITY, BY_DAYS = {"city": "Rome"}, {"days": "3"}
BOTH = {**BY_CITY, **BY_DAYS}
COMBINED: list[tuple[dict[str, Any], list[dict[str, str]], list[dict[str, str]]]] = [
    # Parameters of a tool, and arguments that are allowed and refused.
    ({"allOf": [CITY]}, [BY_CITY], [{}, {"city": "Bonn"}, BOTH]),
    ({"allOf": [{"$ref": "#/$defs/city"}, DAYS]}, [BOTH], [{}, BY_CITY, BY_DAYS]),
    ({"type": "object", "allOf": [CITY, {"required": ["days"]}, NO_WHERE]}, [], [BOTH, BY_CITY]),
    ({"oneOf": [CITY, DAYS]}, [BY_CITY, BY_DAYS], [{}, BOTH, {"days": "x"}, {"city": "Bonn"}]),
    ({"anyOf": [{"$ref": "#/$defs/city"}, {"type": "null"}]}, [BY_CITY], [{}, {"city": "Bonn"}]),
    ({"anyOf": [CITY, NO_WHERE]}, [BY_CITY, {}, {"days": "true"}], [BY_DAYS]),
    ({"anyOf": [{"allOf": [CITY, DAYS]}, DAYS]}, [BOTH, BY_DAYS], [BY_CITY]),
    (
        {"properties": BOTH_SCHEMAS, "anyOf": [{"required": ["city"]}, {"required": ["days"]}]},
        [BY_CITY, BY_DAYS, BOTH],
        [{}],
    ),
    ({"allOf": [CITY, {"properties": {"city": {"type": "string"}}}]}, [BY_CITY], [BY_DAYS]),
    ({"anyOf": [CITY, {"type": "object"}]}, [BY_CITY, BY_DAYS, {"other": "x"}], []),
    ({"allOf": [{"$ref": "#"}, CITY]}, [BY_CITY], [BY_DAYS]),
]


@pytest.mark.parametrize(("schema", "allowed", "refused"), COMBINED)
def test_parameters_between_tags_may_be_listed_in_parts_and_alternatives(
    schema: dict[str, Any], allowed: list[dict[str, str]], refused: list[dict[str, str]]
) -> None:
    tools = [{"function": {"name": "f", "parameters": {**schema, "$defs": {"city": CITY}}}}]
    grammar = grammar_of("qwen_xml", tools)

    def call_of(arguments: dict[str, str]) -> str:
        parts = [f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in arguments.items()]
        return f"<tool_call>\n<function=f>\n{''.join(parts)}</function>\n</tool_call>"

    assert [one for one in allowed if not is_allowed(grammar, call_of(one))] == []
    assert [one for one in refused if is_allowed(grammar, call_of(one))] == []
    if BY_DAYS in allowed and {"other": "x"} not in allowed:
        parser = StreamParser(DIALECTS["qwen_xml"], tools)
        reply = ParsedReply.of([*parser.feed(call_of(BY_DAYS)), *parser.close("stop")])
        assert json.loads(reply.calls[0].arguments) == {"days": 3}


def test_a_schema_of_countless_alternatives_is_read_in_time() -> None:
    part: dict[str, Any] = {"anyOf": [{"$ref": "#"}] * 200}
    schema = {"allOf": [part] * 50, "properties": {"days": {"type": "integer"}}}
    started = time.monotonic()
    (one,) = parameter_lists(schema)
    assert one.schemas == {"days": {"type": "integer"}}
    assert time.monotonic() - started < 1.0


@pytest.mark.parametrize("dialect", FORMS)
def test_parallel_calls_are_allowed_on_demand(dialect: str) -> None:
    two = FORMS[dialect].separator.join([EXAMPLES[dialect]] * 2)
    assert is_allowed(grammar_of(dialect), two)
    assert not is_allowed(grammar_of(dialect, is_parallel=False), two)
    assert is_allowed(grammar_of(dialect, is_parallel=False), EXAMPLES[dialect])


def test_a_named_tool_is_the_only_one() -> None:
    assert not is_allowed(grammar_of("hermes", TOOLS[1:]), EXAMPLES["hermes"])


def test_where_calls_are_not_demanded_text_is_free() -> None:
    grammar = grammar_of("hermes", is_required=False)
    for text in ("", "Hello\nworld", EXAMPLES["hermes"], "Let me look.\n" + EXAMPLES["hermes"]):
        assert is_allowed(grammar, text)


SHELL = {
    "function": {
        "name": "sh",
        "parameters": {
            "type": "object",
            "properties": {"input": {"type": "string"}},
            "required": ["input"],
        },
    }
}
SHELL_CALLS = {
    "qwen_xml": (
        "<tool_call>\n<function=sh>\n<parameter=input>\nTEXT\n</parameter>\n</function>\n</tool_call>"
    ),
    "hermes": '<tool_call>\n{"name": "sh", "arguments": {"input": "TEXT"}}\n</tool_call>',
    "llama3": '{"name": "sh", "parameters": {"input": "TEXT"}}',
}
PATCH = """start: "*** Begin" LF line+ "*** End" LF?
line: ("+" | "-") /(.*)/ LF
%import common.LF
"""


@pytest.mark.parametrize("dialect", SHELL_CALLS)
def test_a_text_that_is_the_only_argument_is_held_to_its_regular_expression(dialect: str) -> None:
    texts = {"sh": TextGrammar("regex", "(ls|cat)( [a-z/]+)?")}
    grammar = grammar_of(dialect, [SHELL, *TOOLS], text_grammars=texts)
    for text, is_right in (("ls", True), ("cat /etc", True), ("rm", False), ("ls ", False)):
        assert is_allowed(grammar, SHELL_CALLS[dialect].replace("TEXT", text)) == is_right
    assert is_allowed(grammar, EXAMPLES[dialect])


def test_a_text_between_tags_is_held_to_its_lark_grammar() -> None:
    texts = {"sh": TextGrammar("lark", PATCH)}
    grammar = grammar_of("qwen_xml", [SHELL, *TOOLS], text_grammars=texts)
    right = ("*** Begin\n+a\n-b\n*** End", "*** Begin\n+\n*** End\n")
    for text in right:
        assert is_allowed(grammar, SHELL_CALLS["qwen_xml"].replace("TEXT", text))
    for text in ("*** Begin\n*** End", "*** Begin\na\n*** End", "ls"):
        assert not is_allowed(grammar, SHELL_CALLS["qwen_xml"].replace("TEXT", text))
    after_thought = with_blank_start(grammar)
    assert is_allowed(after_thought, "\n\n" + SHELL_CALLS["qwen_xml"].replace("TEXT", right[0]))


@pytest.mark.parametrize(
    ("dialect", "syntax", "definition"),
    [("hermes", "lark", PATCH), ("qwen_xml", "lark", "start: x"), ("qwen_xml", "regex", "[")],
)
def test_a_grammar_that_cannot_hold_a_text_is_refused_with_its_tool(
    dialect: str, syntax: Any, definition: str
) -> None:
    with pytest.raises(RequestError, match="'sh'") as caught:
        grammar_of(dialect, [SHELL], text_grammars={"sh": TextGrammar(syntax, definition)})
    assert caught.value.param == "tools"


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object"}, {"properties": {"a\nb": {}}}])
def test_a_tool_that_names_no_parameters_may_get_any(parameters: Any) -> None:
    tools = [{"function": {"name": "f", "parameters": parameters}}]
    head, tail = "<tool_call>\n<function=f>\n", "</function>\n</tool_call>"
    grammar = grammar_of("qwen_xml", tools)
    for some in ("", "<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n</parameter>\n"):
        assert is_allowed(grammar, head + some + tail)
    if not (parameters or {}).get("properties"):
        assert is_allowed(grammar_of("llama3", tools), '{"name": "f", "parameters": {"a": [1]}}')


def test_tags_are_control_tokens_where_the_model_has_them() -> None:
    tokens = {"<tool_call>", "</tool_call>"}
    lark = json.loads(tool_calls_grammar(TOOLS, FORMS["qwen_xml"], tokens.__contains__))[
        "grammars"
    ][0]
    assert '<tool_call> "\\n<function=weather>\\n"' in lark["lark_grammar"]
    assert lark["lark_grammar"].count('"<tool_call>') == 0


def test_annotations_are_left_out_but_not_properties_of_their_name() -> None:
    schema = {
        "title": "T",
        "properties": {
            "description": {"type": "string", "description": "d"},
            "title": {"default": 1},
        },
        "enum": [{"title": "kept"}],
    }
    bare = {
        "properties": {"description": {"type": "string"}, "title": {}},
        "enum": [{"title": "kept"}],
    }
    assert without_annotations(schema) == bare


@pytest.mark.parametrize(
    "function",
    [
        {"name": 'f"} evil', "parameters": {}},
        {"name": "f\nstart: /.*/", "parameters": {}},
        {"name": "", "parameters": {}},
        {"name": "f", "parameters": {"type": "banana"}},
        {"name": "f", "parameters": {"enum": list(range(10_000))}},
        {"name": "f", "parameters": {"properties": {"a": {"pattern": "(", "type": "string"}}}},
        {"name": "f", "parameters": [1]},
        {"name": "f", "parameters": {"properties": {"a": {"const": "\ud800"}}}},
    ],
)
def test_a_hostile_tool_is_refused(function: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as raised:
        grammar_of("hermes", [{"function": function}])
    assert raised.value.param == "tools"


@pytest.mark.parametrize("name", ['a"b', "a/b", "a\\", "ü", "%json {}", "start: x"])
def test_a_parameter_may_have_any_name_that_a_tag_can_hold(name: str) -> None:
    tools = [{"function": {"name": "f", "parameters": {"properties": {name: {}}, "required": 5}}}]
    call = (
        f"<tool_call>\n<function=f>\n<parameter={name}>\n1\n</parameter>\n</function>\n</tool_call>"
    )
    assert is_allowed(grammar_of("qwen_xml", tools), call)


def test_a_large_definition_that_many_parameters_refer_to_is_refused_in_a_second() -> None:
    large = {"type": "object", "properties": {f"k{n}": {"type": "integer"} for n in range(300)}}
    referring = {"type": "array", "items": {"$ref": "#/$defs/large"}}
    schema = {
        "type": "object",
        "properties": {f"p{n}": referring for n in range(300)},
        "$defs": {"large": large},
    }
    tools = [{"function": {"name": f"f{n}", "parameters": schema}} for n in range(256)]
    began = time.perf_counter()
    with pytest.raises(RequestError, match="The grammar has"):
        grammar_of("qwen_xml", tools)
    assert time.perf_counter() - began < 1


def test_without_tools_no_call_can_be_demanded() -> None:
    with pytest.raises(RequestError):
        grammar_of("hermes", [])
