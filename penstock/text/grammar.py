"""A client's constraint on a reply, as a grammar that an engine can enforce.

A JSON schema, "any JSON object", a regular expression, a list of texts or a grammar (Lark, or
llama.cpp's GBNF) becomes one string in llguidance's format. Its size is checked before anything is
built from it, and then it is compiled once on a vocabulary of bytes, within the engine's limits: a
grammar that cannot work is refused in milliseconds, with a message for the client. One that
compiles may still become too expensive while a reply grows; then the engine ends that reply.

llguidance is imported when the first grammar is made. Knows nothing of models, requests and HTTP.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from penstock.errors import RequestError
from penstock.text.closed_schemas import close_objects
from penstock.types import GRAMMAR_LIMITS

MAX_SCHEMA_BYTES = 64 * 1024
MAX_SCHEMA_DEPTH = 50
MAX_ENUM_VALUES = 5_000
MAX_OPTIONAL_PROPERTIES = 400  # per object: any of them may come next
MAX_REGEX_CHARACTERS = 2_048
MAX_COUNT = 1_000_000  # of characters, items or properties
MAX_LARK_CHARACTERS = 128 * 1024
MAX_GBNF_CHARACTERS = 32 * 1024

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")

# One space, or a newline and its indentation, as models write. Some never stop if white space is
# unlimited.
_JSON_BLANK = r" |\n[ \t]{0,40}"

# Texts, classes, comments and the dot of GBNF; llguidance reads what is inside them differently.
_GBNF_PART = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|\.', re.DOTALL)
# An escaped backslash, or a code point, of which llguidance drops the leading zeros.
_GBNF_ESCAPE = re.compile(r"\\\\|\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})")
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)

# What models write between their thinking and their answer.
_BLANK_START = r"\n{0,2}"


def json_object_grammar() -> str:
    """Any JSON object."""
    return json_schema_grammar({"type": "object"})


def json_schema_grammar(
    schema: Any, *, is_lenient: bool = False, is_open: bool = False, param: str = "response_format"
) -> str:
    """JSON that is valid against a schema (as parsed from JSON).

    `is_lenient`: ignores keywords that cannot be enforced. `oneOf` is always read as `anyOf`.
    `is_open`: an object may have keys that its schema does not list, unless it forbids them
    (closed_schemas.py).
    """
    schema = check_schema(schema, param)
    if not is_open:
        schema = close_objects(schema)
    grammar = {"json_schema": {**schema, "x-guidance": json_options(is_lenient)}}
    return _compiled(grammar, "The JSON schema", param)


def json_options(is_lenient: bool) -> dict[str, Any]:
    """llguidance's options for JSON, at the root of a schema."""
    return {"whitespace_pattern": _JSON_BLANK, "coerce_one_of": True, "lenient": is_lenient}


def regex_grammar(pattern: str, *, param: str = "regex") -> str:
    """Text that a regular expression matches from its start to its end."""
    check_size("A regular expression", len(pattern), MAX_REGEX_CHARACTERS, param)
    try:
        literal = regex_in_lark(pattern)
    except ValueError as error:
        raise RequestError(
            "The regular expression is not Unicode", f"{error}.", param=param
        ) from error
    return _compiled({"lark_grammar": f"start: /{literal}/"}, "The regular expression", param)


def choice_grammar(choices: Sequence[str], *, param: str = "choice") -> str:
    """One of these texts."""
    if not choices or len(choices) > MAX_ENUM_VALUES:
        raise RequestError(
            f"{param} has {len(choices)} texts",
            f"It must have 1 to {MAX_ENUM_VALUES}.",
            param=param,
        )
    literals = [_to_json(choice, param) for choice in dict.fromkeys(choices)]
    check_size("The grammar", sum(map(len, literals)), MAX_LARK_CHARACTERS, param)
    return _compiled({"lark_grammar": f"start: {' | '.join(literals)}"}, "The choice", param)


def client_grammar(text: str, *, param: str = "grammar") -> str:
    """A grammar as clients send it: Lark, or GBNF, whose rules are `name ::= ...`."""
    check_size("The grammar", len(text), MAX_LARK_CHARACTERS, param)
    if not _GBNF_RULE.search(text):
        return lark_grammar(text, param=param)
    return gbnf_grammar(text, param=param)


def check_size(what: str, num_chars: int, limit: int, param: str) -> None:
    if num_chars > limit:
        raise RequestError(
            f"{what} has {num_chars} characters", f"The limit is {limit}.", param=param
        )


def regex_in_lark(pattern: str) -> str:
    """The pattern with slashes and newlines escaped, to be put between slashes."""
    import llguidance

    literal: str = llguidance.regex_to_lark(pattern, "")
    return literal


def lark_grammar(
    lark: str, nested: Mapping[str, str] = MappingProxyType({}), *, param: str = "grammar"
) -> str:
    """A grammar in llguidance's dialect of lark; `<name>` in it is a control token of the model,
    `@name` one of the nested grammars."""
    num_chars = len(lark) + sum(map(len, nested.values()))
    check_size("The grammar", num_chars, MAX_LARK_CHARACTERS, param)
    others = [{"name": name, "lark_grammar": text} for name, text in nested.items()]
    return _compiled({"lark_grammar": lark}, "The grammar", param, others, has_control_tokens=True)


def gbnf_grammar(gbnf: str, *, param: str = "grammar") -> str:
    """A grammar in llama.cpp's format, whose first rule is `root`."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    check_size("The grammar", len(gbnf), MAX_GBNF_CHARACTERS, param)
    try:
        lark = gbnf_to_lark(_GBNF_PART.sub(_plain_part, gbnf))
    except RecursionError as error:
        raise RequestError(
            "The grammar is nested too deeply", todo="Simplify it.", param=param
        ) from error
    except Exception as error:  # llguidance raises plain exceptions here
        raise RequestError(
            "The grammar cannot be read as GBNF", _sentence(str(error)), param=param
        ) from error
    return _compiled({"lark_grammar": lark}, "The grammar", param)


def _plain_part(part: re.Match[str]) -> str:
    if part[0] == ".":
        return "[\\x00-\U0010ffff]"  # newlines too
    return "" if part[0].startswith("#") else _GBNF_ESCAPE.sub(_plain_character, part[0])


def _plain_character(escape: re.Match[str]) -> str:
    digits = escape[1] or escape[2]
    if digits is None:
        return escape[0]
    code = int(digits, 16)
    return f"\\x{code:02x}" if code < 0x80 else chr(code)


def with_blank_start(grammar: str) -> str:
    """Allows up to two newlines before the grammar, for replies that follow thinking."""
    body, *nested = json.loads(grammar)["grammars"]
    start = {"lark_grammar": f"start: /{_BLANK_START}/ @body"}
    return json.dumps({"grammars": [start, {"name": "body", **body}, *nested]}, ensure_ascii=False)


def check_schema(schema: Any, param: str) -> dict[str, Any]:
    """Refuses a schema that is too large to process; returns it as an object."""
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise RequestError(
            "The JSON schema is "
            f"{json.dumps(schema) if schema is False else type(schema).__name__}",
            "It must be an object.",
            param=param,
        )
    size = 0  # a lower bound of its characters
    unseen: list[tuple[Any, int]] = [(schema, 1)]
    while unseen and size <= MAX_SCHEMA_BYTES:  # no recursion: it may be nested a million times
        value, depth = unseen.pop()
        if depth > MAX_SCHEMA_DEPTH:
            raise RequestError(
                "The JSON schema is nested too deeply",
                f"The limit is {MAX_SCHEMA_DEPTH} levels.",
                param=param,
            )
        if isinstance(value, dict):
            _check_keywords(value, param)
        size += len(value)
        if size > MAX_SCHEMA_BYTES:
            break
        children = value.values() if isinstance(value, dict) else value
        size += sum(len(child) for child in children if isinstance(child, str))
        unseen += [(child, depth + 1) for child in children if isinstance(child, (dict, list))]
    if size > MAX_SCHEMA_BYTES or len(_to_json(schema, param).encode()) > MAX_SCHEMA_BYTES:
        raise RequestError(
            "The JSON schema is too large",
            f"The limit is {MAX_SCHEMA_BYTES} bytes.",
            "Remove descriptions, or parts that are not needed.",
            param=param,
        )
    return schema


def _check_keywords(schema: Mapping[str, Any], param: str) -> None:
    values = schema.get("enum")
    if isinstance(values, list) and len(values) > MAX_ENUM_VALUES:
        raise RequestError(
            f"An enum of the JSON schema has {len(values)} values",
            f"The limit is {MAX_ENUM_VALUES}.",
            "Use a string, or a string with a pattern.",
            param=param,
        )
    for keyword in _COUNTS:
        count = schema.get(keyword)
        if isinstance(count, (int, float)) and count > MAX_COUNT:
            raise RequestError(
                f"{keyword} is {count} in the JSON schema",
                f"The limit is {MAX_COUNT}.",
                "Omit it: max_tokens limits the reply.",
                param=param,
            )
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, dict):
        num_optional = len(properties) - (len(required) if isinstance(required, list) else 0)
        if num_optional > MAX_OPTIONAL_PROPERTIES:
            raise RequestError(
                f"An object of the JSON schema has {num_optional} optional properties",
                f"The limit is {MAX_OPTIONAL_PROPERTIES}.",
                "Make properties required.",
                param=param,
            )
    patterns = schema.get("patternProperties")
    for pattern in (schema.get("pattern"), *(patterns if isinstance(patterns, dict) else ())):
        if isinstance(pattern, str):
            check_size("A regular expression", len(pattern), MAX_REGEX_CHARACTERS, param)


def _to_json(value: Any, param: str) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except ValueError as error:  # NaN, or a lone surrogate
        raise RequestError(
            "The JSON schema or grammar is not JSON", f"{error}.", param=param
        ) from error
    return text


def _compiled(
    grammar: dict[str, Any],
    what: str,
    param: str,
    nested: Sequence[dict[str, Any]] = (),
    has_control_tokens: bool = False,
) -> str:
    text = _to_json({"grammars": [grammar, *nested]}, param)
    problem = _problem_of(text, has_control_tokens)
    if problem:
        raise RequestError(f"{what} cannot be enforced", problem, "Simplify it.", param=param)
    return text


@functools.lru_cache(maxsize=256)  # agents send the same tools with every turn
def _problem_of(grammar: str, has_control_tokens: bool) -> str:
    """Why llguidance refuses a grammar, as a sentence; empty if it accepts it."""
    import llguidance

    limits = llguidance.LLParserLimits(verbose_errors=False, **GRAMMAR_LIMITS)
    if has_control_tokens:  # they are not in the byte vocabulary, only in the engine's
        return _sentence(llguidance.LLMatcher.validate_grammar(grammar, limits=limits))
    matcher = llguidance.LLMatcher(_byte_vocabulary(), grammar, log_level=0, limits=limits)
    # Two steps: the first finds grammars that match nothing; the second finds large schemas that
    # are too expensive.
    for _ in range(2):
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_stopped():
            break
        matcher.consume_token((allowed & -allowed).bit_length() - 1)
    return _sentence(matcher.get_error())


@functools.cache
def _byte_vocabulary() -> Any:
    import llguidance

    return llguidance.LLTokenizer("byte")


def _sentence(message: str) -> str:
    """The main point of llguidance's errors, which have many lines."""
    lines = [
        line.strip() for line in message.partition("<non-verbose/>")[0].splitlines() if line.strip()
    ]
    if not lines:
        return ""
    line = next(
        (line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0]
    )
    if "NoExtension" in line:
        line = "nothing matches it"
    elif "items; max is" in line:
        line = "it allows too many alternatives at once"
    return f"{line[:1].upper()}{line[1:300].rstrip('.')}."
