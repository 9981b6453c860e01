"""Response formats: a grammar allows exactly what was requested; abusive ones fail at once."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest

from grammar_walks import PERSON, is_allowed, is_valid, random_text
from penstock.errors import RequestError
from penstock.text.grammar import (
    choice_grammar,
    client_grammar,
    gbnf_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
    with_blank_start,
)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def wide(num_properties: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {f"p{i}": {"type": "string"} for i in range(num_properties)},
    }


TREE = {
    "$defs": {"node": {"type": "object", "properties": {"c": {"items": {"$ref": "#/$defs/node"}}}}},
    "$ref": "#/$defs/node",
}

REFUSED: dict[str, Any] = {  # the largest are created on use
    "deep": nested(1000),
    "deeper": lambda: nested(100_000),
    "one level too deep": nested(50),
    "many values": lambda: {"enum": list(range(10**6))},
    "one value too many": {"enum": list(range(5001))},
    "endless text": {"type": "string", "maxLength": 10**9},
    "endless list": {"type": "array", "minItems": 1e300},
    "long regex": {"type": "string", "pattern": "a" * 2049},
    "long regex of keys": {"type": "object", "patternProperties": {"a" * 2049: {}}},
    "look-around": {"type": "string", "pattern": "(?=a)b"},
    "back reference": {"type": "string", "pattern": r"(a)\1"},
    "no regex": {"type": "string", "pattern": "(["},
    "circle": {"$ref": "#"},
    "circle of two": {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        "$ref": "#/$defs/a",
    },
    "reference into nowhere": {"$ref": "#/$defs/none"},
    "reference to the net": {"$ref": "http://example.org/schema.json"},
    "10 MB of one text": {"type": "object", "description": "x" * 10**7},
    "10 MB of properties": lambda: wide(300_000),
    "one optional property too many": wide(401),
    "more ways than can be kept in sight": {
        "anyOf": [wide(20) | {"title": str(i)} for i in range(50)]
    },
    "product of choices": {
        "allOf": [
            {"anyOf": [wide(i + 1) | {"title": str(i)} for i in range(10)]} for _ in range(15)
        ]
    },
    "no value": {"enum": []},
    "empty range": {"type": "integer", "minimum": 5, "maximum": 3},
    "unknown type": {"type": "banana"},
    "type of a wrong type": {"type": 3},
    "properties of a wrong type": {"type": "object", "properties": 3},
    "not a number": {"type": "number", "minimum": float("nan")},
    "half a character": {"const": "\ud800"},
    "a list": [1, 2],
    "a text": "object",
    "nothing": None,
    "false": False,
}

USABLE: dict[str, tuple[Any, str]] = {
    "nested to the limit": (nested(48), "[" * 48 + '"x"' + "]" * 48),
    "catastrophic for backtracking": ({"type": "string", "pattern": "^(a+)+$"}, '"aaaaaaaaaaaa"'),
    "counts within counts": (
        {"pattern": "^(((a{1,99}){1,99}){1,99}){1,99}$", "type": "string"},
        '"aaa"',
    ),
    "tree": (TREE, '{"c":[{"c":[]},{}]}'),
    "true": (True, '{"any": [1, null]}'),
    "empty": ({}, "3"),
    "one of": ({"oneOf": [{"type": "string"}, {"type": "null"}]}, "null"),
    "annotations": ({"title": "t", "description": "d", "examples": [1], "type": "integer"}, "12"),
    "many properties": (wide(400), '{"p0": "x", "p399": "y"}'),
    "many values": ({"enum": [f"v{i}" for i in range(5000)]}, '"v4999"'),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_refused_in_a_second_and_says_why(name: str) -> None:
    schema = REFUSED[name]() if callable(REFUSED[name]) else REFUSED[name]
    started = time.monotonic()
    with pytest.raises(RequestError) as raised:
        json_schema_grammar(schema, param="response_format.json_schema")
    assert time.monotonic() - started < 1
    error = raised.value
    assert error.param == "response_format.json_schema"
    assert error.what
    assert error.why.endswith(".")
    assert len(str(error)) < 500, "the client's own text comes back to it"
    assert "verbose" not in str(error)


@pytest.mark.parametrize("name", USABLE)
def test_what_only_looks_hostile_is_enforced(name: str) -> None:
    schema, example = USABLE[name]
    started = time.monotonic()
    grammar = json_schema_grammar(schema)
    assert time.monotonic() - started < 1
    assert is_allowed(grammar, example)


@pytest.mark.parametrize("seed", range(12))
def test_every_text_of_a_schema_is_valid_against_it(seed: int) -> None:
    value = json.loads(random_text(json_schema_grammar(PERSON), seed))
    assert is_valid(value, PERSON, PERSON), value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name":"A","age":0,"kind":7,"boss":null}', True),
        (
            '{\n    "name": "A",\n    "age": 130,\n    "kind": "foe",\n    "boss": {"ok": true}\n}',
            True,
        ),
        ('{"name":"A","age":131,"kind":7,"boss":null}', False),
        ('{"name":"A","age":0,"kind":8,"boss":null}', False),
        ('{"name":"A","age":0,"kind":7}', False),
        ('{"name":"A","age":0,"kind":7,"boss":null,"more":1}', False),
        ('{"name":"ABCDEFGHIJKLM","age":0,"kind":7,"boss":null}', False),
        ('{"name":"A","age":0,"kind":7,"tags":["A"],"boss":null}', False),
        (' {"name":"A","age":0,"kind":7,"boss":null}', False),
    ],
)
def test_a_text_is_allowed_if_it_is_valid(text: str, expected: bool) -> None:
    assert is_allowed(json_schema_grammar(PERSON), text) is expected


def test_blanks_inside_json_are_those_that_people_write() -> None:
    """Otherwise a model that has lost its way writes blanks until its tokens are used up."""
    grammar = json_object_grammar()
    for indent in (None, 1, 2, 4, "\t"):
        assert is_allowed(grammar, json.dumps({"a": [1, {"b": None}], "c": {}}, indent=indent))
    assert is_allowed(grammar, json.dumps({"a": 1}, separators=(",", ":")))
    assert not is_allowed(grammar, '{  "a": 1}')
    assert not is_allowed(grammar, '{"a": 1\n\n}')
    assert not is_allowed(grammar, '{"a":\n' + " " * 41 + "1}")


def test_an_object_is_asked_for_and_nothing_else_is_one() -> None:
    grammar = json_object_grammar()
    assert is_allowed(grammar, '{"ü": "\\n", "b": [true, -1.5e3]}')
    for text in ("[]", '"a"', "3", "{", "{}x", "{'a': 1}", '{"a": NaN}', '{"a": 01}'):
        assert not is_allowed(grammar, text)


def test_keywords_that_cannot_be_enforced_are_named_or_ignored_on_demand() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    with pytest.raises(RequestError, match="uniqueItems"):
        json_schema_grammar(schema)
    assert is_allowed(json_schema_grammar(schema, is_lenient=True), "[1,1]")


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        (r"[a-c]{2}", "ab", "abc"),
        (r"^ab$", "ab", "xab"),
        (r"a/b\n", "a/b\n", "a/b"),
        ("a\nb", "a\nb", "a b"),
        (r"(yes|no)", "no", "maybe"),
        (r"(x+x+)+y", "xxxxxxxxy", "xxxxxxxx"),
        ("ü+", "üü", "u"),
    ],
)
def test_a_regular_expression_is_matched_as_a_whole(pattern: str, yes: str, no: str) -> None:
    grammar = regex_grammar(pattern)
    assert is_allowed(grammar, yes)
    assert not is_allowed(grammar, no)


@pytest.mark.parametrize("pattern", ["(", "a" * 2049, "(?<=a)b", "\ud800"])
def test_a_regular_expression_that_is_none_is_refused(pattern: str) -> None:
    with pytest.raises(RequestError) as raised:
        regex_grammar(pattern, param="guided_regex")
    assert raised.value.param == "guided_regex"
    assert raised.value.why


@pytest.mark.parametrize(
    "lark", ["", "start: none", "start: /(/", "x" * 200_000, 'start: "\ud800"']
)
def test_a_lark_grammar_that_is_none_is_refused(lark: str) -> None:
    with pytest.raises(RequestError) as raised:
        lark_grammar(lark)
    assert raised.value.param == "grammar"


@pytest.mark.parametrize(
    "grammar", [json_object_grammar(), regex_grammar("[{][}]"), lark_grammar('start: "{}"')]
)
def test_after_thinking_two_line_ends_may_come_first(grammar: str) -> None:
    after = with_blank_start(grammar)
    for start in ("", "\n", "\n\n"):
        assert is_allowed(after, start + "{}")
    for text in ("\n\n\n{}", " {}", "\n\n", "\n{}\n"):
        assert not is_allowed(after, text)


CHAIN = "".join(f"r{i} ::= r{i + 1}\n" for i in range(2000))


@pytest.mark.parametrize(
    ("gbnf", "yes", "no"),
    [
        ('root ::= "yes" | "no" end\nend ::= [.!]?', ["yes", "no", "no!"], ["", "yes!", "maybe"]),
        ('root ::= "\\u0041\\x42" [\\u4e00-\\u9fa5]{2}', ["AB中文"], ["AB中", "ABab"]),
        ('root ::= "a\\\\u0041"', ["a\\u0041"], ["aA"]),
        ('root ::= ("(" root ")") | "." # "quoted', [".", "((.))"], ["((.)", "#"]),
        ("root ::= . .", ["a\n", "中文"], ["a"]),
        (
            'root ::= my-rule ("," my-rule)*\nmy-rule ::=\n  [^,\\n]+ |\n  "-"',
            ["a,b c"],
            ["a,", "a\nb"],
        ),
        ('root ::= "<|im_end|>" "\\""', ['<|im_end|>"'], ["<|im_end|>"]),
    ],
)
def test_a_grammar_of_llama_cpp_means_what_it_means_there(
    gbnf: str, yes: list[str], no: list[str]
) -> None:
    grammar = gbnf_grammar(gbnf)
    assert [text for text in (*yes, *no) if is_allowed(grammar, text)] == yes


@pytest.mark.parametrize(
    "gbnf",
    [
        "",
        "no grammar",
        'rule ::= "a"',
        "root ::= nowhere",
        'root ::= "a',
        'root ::= "\\ud800"',
        'root ::= "\\Uffffffff"',
        "root ::= root",
        "root ::= " + "(" * 15_000 + '"a"' + ")" * 15_000,
        "root ::= r0\n" + CHAIN,
        'root ::= "a"' + " " * 40_000,
    ],
)
def test_a_grammar_of_llama_cpp_that_is_none_is_refused_in_a_second(gbnf: str) -> None:
    started = time.monotonic()
    with pytest.raises(RequestError) as refused:
        gbnf_grammar(gbnf)
    assert refused.value.param == "grammar"
    assert time.monotonic() - started < 2.0


@pytest.mark.parametrize("choices", [["yes", "no"], ["a", "ab", ""], ['q"uo\\te\n', "ü", "a|b"]])
def test_a_choice_is_one_of_its_texts(choices: list[str]) -> None:
    grammar = choice_grammar(choices)
    assert all(is_allowed(grammar, choice) for choice in choices)
    assert not is_allowed(grammar, "no such text")


@pytest.mark.parametrize("choices", [[], [str(i) for i in range(5_001)], ["x" * 200_000]])
def test_a_choice_of_nothing_or_of_too_much_is_refused(choices: list[str]) -> None:
    with pytest.raises(RequestError) as refusal:
        choice_grammar(choices, param="guided_choice")
    assert refusal.value.param == "guided_choice"


SUMS = {
    "gbnf": 'root ::= term ("+" term)*  # a sum\nterm ::= [0-9]+ | "(" root ")"\n',
    "lark": 'start: term ("+" term)*\nterm: /[0-9]+/ | "(" start ")"\n',
}


@pytest.mark.parametrize("language", SUMS)
def test_a_clients_grammar_is_lark_or_gbnf(language: str) -> None:
    grammar = client_grammar(SUMS[language])
    assert is_allowed(grammar, "1+(22+3)")
    assert not is_allowed(grammar, "1+a")


@pytest.mark.parametrize(
    "text",
    [
        "hello world",
        "root ::= (",
        "root ::= nowhere",
        'root ::= "\\ud800"',
        "root ::= " + "(" * 5_000 + '"a"' + ")" * 5_000,
        'root ::= "a"' + ' | "a"' * 30_000,
        'start: "a',
    ],
)
def test_a_clients_grammar_that_is_none_is_refused_at_once(text: str) -> None:
    begun = time.perf_counter()
    with pytest.raises(RequestError) as refusal:
        client_grammar(text, param="ebnf")
    assert refusal.value.param == "ebnf"
    assert time.perf_counter() - begun < 5


def test_importing_the_module_does_not_import_llguidance() -> None:
    modules = "penstock.text.grammar, penstock.text.call_grammar"
    code = f"import sys, {modules}; assert 'llguidance' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
