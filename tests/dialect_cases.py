"""Model outputs and their parsed meaning, for test_dialects.py.

The tool `make` has two parameters: text, a string, and count, an integer.
"""

from __future__ import annotations

from typing import Any

MAKE, TEXT, COUNT = "<function=make>", "<parameter=text>", "<parameter=count>"
EMPTY = "<function=make></function></tool_call>"
HERMES, LLAMA = '<tool_call>{"name": "make", "arguments": ', '{"name": "make", "parameters": '

# Pieces of the formats, of which garbage is made.
XML_FRAGMENTS = (
    "<tool_call> </tool_call> <function= </function> <parameter= </parameter> <think> "
    "</think> > < </"
)
JSON_FRAGMENTS = '{ } " , : [ ] {} null 1e5 true \\ "a\\ \\u00e ; "text" "arguments": "parameters":'
WORDS = "make make_more nobody größe 🚀 5 <|im_end|> <|im_start|> <|python_tag|> <tool"
FORMAT_FRAGMENTS = [
    *XML_FRAGMENTS.split(),
    *JSON_FRAGMENTS.split(),
    *WORDS.split(),
    *(" ", "\t", "\n", "\n\n", MAKE, TEXT, COUNT, "\n</parameter>\n", HERMES, LLAMA),
]

# Schema of a parameter, its text, and the value the two make.
TYPED: list[tuple[Any, str, Any]] = [
    ({"type": "integer"}, "5", 5),
    ({"type": "integer"}, " -5 ", -5),
    ({"type": "integer"}, "5.0", 5),
    ({"type": "integer"}, "5.5", "5.5"),
    ({"type": "integer"}, "0x10", "0x10"),
    ({"type": "integer"}, "1_000", "1_000"),
    ({"type": "integer"}, "__import__('os').getpid()", "__import__('os').getpid()"),
    ({"type": "integer"}, "9" * 5000, "9" * 5000),
    ({"type": "integer"}, "٣", "٣"),
    ({"type": "integer"}, "", ""),
    ({"type": "number"}, "2.50", 2.5),
    ({"type": "number"}, "1e999", "1e999"),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "false", False),
    ({"type": "boolean"}, "yes", "yes"),
    ({"type": "null"}, "None", None),
    ({"type": "array"}, '[1, {"a": null}]', [1, {"a": None}]),
    ({"type": "array"}, "[1, 2", "[1, 2"),
    ({"type": "array"}, "[NaN]", "[NaN]"),
    ({"type": "array"}, "(1, 2)", "(1, 2)"),
    ({"type": "array"}, "[" * 100_000, "[" * 100_000),
    ({"type": "array"}, '{"a": 1}', '{"a": 1}'),
    ({"type": "object"}, '{\n "a": [1]\n}', {"a": [1]}),
    ({"type": "object"}, "{'a': 1}", "{'a': 1}"),
    ({"type": "string"}, "5", "5"),
    ({"type": "string"}, "\n  two\n\nlines  \n", "\n  two\n\nlines  \n"),
    ({"type": ["integer", "null"]}, "null", None),
    ({"type": ["string", "null"]}, "None", None),
    ({"type": ["string", "null"]}, "Nonesuch", "Nonesuch"),
    ({"type": ["string", "null"]}, "nul", "nul"),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5", 5),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "five", "five"),
    ({"oneOf": [{"type": "array"}, {"type": "boolean"}]}, "true", True),
    ({"allOf": [{"$ref": "#/$defs/Count"}, {"description": "of things"}]}, "5", 5),
    ({"$ref": "#/$defs/Count"}, "5", 5),
    ({"$ref": "#/$defs/Circle"}, "5", 5),
    ({"$ref": "#/nowhere"}, "5", 5),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"enum": [1, 2]}, "1", 1),
    ({"enum": ["1", 1, None]}, "1", "1"),
    ({"enum": ["on", True]}, "true", True),
    ({"const": 3}, "3", 3),
    ({"type": "integer", "nullable": True}, "None", None),
    ({}, "5", 5),
    ({}, "five", "five"),
    ({"type": "whatever"}, "[1]", [1]),
    (True, "x", "x"),
    ({"type": {"not": "a type"}, "anyOf": 3, "enum": "ab"}, "5", 5),
]

# Malformed calls that models write: dialect, text, and the content and arguments that are read.
VARIANTS: list[tuple[str, str, str, list[dict[str, Any]]]] = [
    # White space, and missing or repeated tags.
    (
        "qwen_xml",
        f"<tool_call>{MAKE}{COUNT}5</parameter></function></tool_call>",
        "",
        [{"count": 5}],
    ),
    ("qwen_xml", f"<tool_call>\n\n {MAKE}\n\n</function> \n\n</tool_call>\n", "", [{}]),
    (
        "qwen_xml",
        f"{MAKE}\n{TEXT}\na\n</parameter>\n</function>\n</tool_call>",
        "",
        [{"text": "a"}],
    ),
    (
        "qwen_xml",
        f"<tool_call>\n{MAKE}\n</function>\n{MAKE}\n</function>\n</tool_call>",
        "",
        [{}, {}],
    ),
    ("qwen_xml", f"<tool_call>\n{MAKE}\n</function>", "", [{}]),
    (
        "qwen_xml",
        f"<tool_call>\n<tool_call>\n{MAKE}\n</function>\n</tool_call>",
        "<tool_call>",
        [{}],
    ),
    (
        "qwen_xml",
        f"<tool_call>{MAKE}{TEXT}\n\n</parameter></function></tool_call>",
        "",
        [{"text": ""}],
    ),
    ("qwen_xml", f"<tool_call>{MAKE}{TEXT}</parameter></function></tool_call>", "", [{"text": ""}]),
    ("qwen_xml", f"<tool_call>{MAKE}{TEXT}\na\n</function>\n</tool_call>", "", [{"text": "a"}]),
    ("qwen_xml", f"<tool_call>{MAKE}{TEXT}\na\n</parameter>\n</tool_call>", "", [{"text": "a"}]),
    (
        "qwen_xml",
        f"{MAKE}{TEXT}\na\n{COUNT}\n5\n</parameter></function>",
        "",
        [{"text": "a", "count": 5}],
    ),
    (
        "qwen_xml",
        f"{MAKE}{TEXT}\n{COUNT}\n5\n</parameter></function>",
        "",
        [{"text": "", "count": 5}],
    ),
    # The other form in the same tag.
    (
        "qwen_xml",
        '<tool_call>{"name": "make", "arguments": {"count": 1}}</tool_call>',
        "",
        [{"count": 1}],
    ),
    # Tags inside a value.
    (
        "qwen_xml",
        f"{MAKE}{TEXT}'</parameter>'</parameter></function>",
        "",
        [{"text": "'</parameter>'"}],
    ),
    (
        "qwen_xml",
        f"{MAKE}{TEXT}\n</parameter>\n</parameter></function>",
        "",
        [{"text": "</parameter>"}],
    ),
    ("qwen_xml", f"{MAKE}{TEXT}\n{TEXT}\n</parameter></function>", "", [{"text": TEXT}]),
    ("qwen_xml", f"{MAKE}{TEXT}\na {COUNT}\n</parameter></function>", "", [{"text": f"a {COUNT}"}]),
    ("qwen_xml", f"{MAKE}{TEXT}\n{EMPTY}\n</parameter></function>", "", [{"text": EMPTY}]),
    # A repeated parameter.
    ("qwen_xml", f"{MAKE}{TEXT}a</parameter>{TEXT}b</parameter></function>", "", [{"text": "a"}]),
    # JSON with raw line breaks, in another order, inside a string, without arguments, with text
    # after it.
    (
        "hermes",
        '<tool_call>{"name":"make","arguments":{"text":"a\n\tb"}}</tool_call>',
        "",
        [{"text": "a\n\tb"}],
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"count": 1}, "name": "make"}</tool_call>',
        "",
        [{"count": 1}],
    ),
    (
        "hermes",
        r'<tool_call>{"name": "make", "arguments": "{\"count\": 1}"}</tool_call>',
        "",
        [{"count": 1}],
    ),
    ("hermes", '<tool_call>{"name": "make", "arguments": null}</tool_call>', "", [{}]),
    ("hermes", '<tool_call>{"name": "make"}</tool_call>', "", [{}]),
    (
        "hermes",
        '<tool_call>{"type": "function", "id": 1, "name": "make", "arguments": {}}',
        "",
        [{}],
    ),
    ("hermes", '<tool_call>{"name": "make", "arguments": {}}}</tool_call>', "}", [{}]),
    ("hermes", f'{HERMES}{{"text": "</tool_call>"}}}}</tool_call>', "", [{"text": "</tool_call>"}]),
    ("llama3", f'<|python_tag|>{LLAMA}{{}}, "type": "function"}}<|eom_id|>', "", [{}]),
    ("llama3", f'{LLAMA}{{"count": 1}}}}\n{LLAMA}{{}}}}', "", [{"count": 1}, {}]),
    ("llama3", 'Sure: {"name": "make", "arguments": {}}', "Sure:", [{}]),
    ("llama3", '<|python_tag|>print("hi")', 'print("hi")', []),
]

# Dialect and text that resembles a call but is none.
NOT_CALLS = [
    (
        "qwen_xml",
        "<tool_call>\n<function=nobody>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    ),
    ("qwen_xml", "<tool_call>\n<function=mak>\n</function>\n</tool_call>"),
    ("qwen_xml", "<tool_call>\nI would call make.\n</tool_call>"),
    ("qwen_xml", "<tool_call>\n<function=make\n</function>\n</tool_call>"),
    ("qwen_xml", "<tool_call>\n<function=make>\nmake it!\n</function>\n</tool_call>"),
    (
        "qwen_xml",
        "<tool_call>\n<function=make>\n<parameter=text\na\n</parameter>\n</function>\n</tool_call>",
    ),
    ("qwen_xml", "Write <function=NAME> and <parameter=x>."),
    ("qwen_xml", "<tool_call>\n</tool_call>"),
    ("hermes", '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "make", "arguments": {"text": x}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "make", "arguments": {"text": "\\x"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "make", "arguments": {"count": 01}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "make", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "make", "arguments": "make"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "make", "arguments": {}, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    (
        "hermes",
        '<tool_call>{"name": "make", "arguments": {"items": '
        + "[" * 200
        + "]" * 200
        + "}}</tool_call>",
    ),
    (
        "hermes",
        '<tool_call>{"name": "make", "arguments": {"count": ' + "1" * 400 + "}}</tool_call>",
    ),
    ("llama3", '{"name": "nobody", "parameters": {}}'),
    ("llama3", '{"name": "make"}'),
    ("llama3", '{"answer": 42, "nested": {"name": "make"}}'),
    ("llama3", 'if (x) { return "y"; }'),
]

XML_HEAD = "<tool_call>\n<function=make>\n<parameter=text>\n"
# Inputs that could take more than linear time: dialect, beginning, and what is repeated after it.
HOSTILE = [
    ("qwen_xml", "", " "),
    ("qwen_xml", XML_HEAD, "</parameter>  "),
    ("qwen_xml", XML_HEAD + "</parameter>", " "),
    ("qwen_xml", "<tool_call><function=make><parameter=note>", " "),
    ("qwen_xml", "", "<tool_call><function=make><parameter=text>"),
    ("qwen_xml", "<tool_call><function=", "x"),
    ("hermes", '<tool_call>{"name": "make", "arguments": {"count": ', "1"),
    ("hermes", '<tool_call>{"name": "make", "arguments": {"text": "', "\\n"),
    ("hermes", "", '<tool_call>{"name": "make", "arguments": {"text": "</tool_call>'),
    ("llama3", "", '{"name": "make", "parameters": {}}'),
    ("llama3", "", "{ "),
]

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
HERMES_TOOLS = r"""{{- '<tool_call>\n{\"name\": <name>, \"arguments\": <args>}\n</tool_call>' }}"""
LLAMA_TOOLS = (
    """{{- '<|start_header_id|>' }}{{- '{"name": function name, "parameters": dictionary}' }}"""
)
# A chat template, the name of the dialect it teaches, and whether it thinks.
TEMPLATES = [
    (None, "plain", False),
    (CHATML, "plain", False),
    (CHATML + "{{ content.split('</think>')[-1] }}", "plain", True),
    (CHATML + HERMES_TOOLS, "hermes", False),
    (CHATML + HERMES_TOOLS + "<think>\n\n</think>", "hermes", True),
    (LLAMA_TOOLS, "llama3", False),
    ("<|start_header_id|>{{ m.role }}<|end_header_id|>", "plain", False),
    (
        "<tool_call>{{ name }}\n<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>",
        "plain",
        False,
    ),
]

BFCL_TYPES = {
    "dict": "object",
    "float": "number",
    "tuple": "array",
    "String": "string",
    "Boolean": "boolean",
}
BFCL_TYPES |= {"ArrayList": "array", "HashMap": "object", "long": "integer"}


def as_json_schema(schema: Any) -> Any:
    """BFCL names some types as Python and Java do; its own checker translates them as well."""
    if isinstance(schema, list):
        return [as_json_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: as_json_schema(value) for key, value in schema.items()}
    if isinstance(schema.get("type"), str):
        plain["type"] = BFCL_TYPES.get(schema["type"], schema["type"])
    return plain
