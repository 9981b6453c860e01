"""Tool calls as a grammar: every call names an offered tool, with arguments that match its schema.

The dialect (`CallForm`) defines the format of calls. Its tags are control tokens if the model's
vocabulary has them, and text otherwise. JSON arguments are enforced like JSON schemas; XML
arguments come in the order of the schema, each of its type, but for texts only the choice between
listed values is enforced.

A tool whose only argument is a text may have a grammar for it (`TextGrammar`). Between XML tags the
text is verbatim; inside JSON it is escaped, which works with a regular expression but not with a
lark grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from penstock.errors import RequestError
from penstock.text.closed_schemas import close_objects
from penstock.text.dialects.dialect import CallForm
from penstock.text.dialects.values import Parameters
from penstock.text.grammar import (
    MAX_LARK_CHARACTERS,
    check_schema,
    check_size,
    json_options,
    lark_grammar,
    regex_grammar,
    regex_in_lark,
)
from penstock.text.parameter_lists import listed_values, parameter_lists
from penstock.text.references import standalone, target_of

_TOOL_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_PARAMETER_NAME = re.compile(r"[^\n<>]{1,256}")
_TAG = re.compile(r"(</?[a-z_]+>)")

# These do not affect validity, and are the largest part of big tools.
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$comment", "deprecated"})
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TextGrammar:
    """The grammar that a tool's only argument, a text, must match."""

    syntax: Literal["lark", "regex"]
    definition: str


NO_TEXT_GRAMMARS: Mapping[str, TextGrammar] = MappingProxyType({})


def tool_calls_grammar(
    # OpenAI's format: {"function": {"name": ..., "parameters": ...}}.
    tools: Sequence[Mapping[str, Any]],
    form: CallForm,
    is_token: Callable[[str], bool],  # whether a text is one token of the model
    *,
    is_required: bool = True,
    is_parallel: bool = True,
    is_open: bool = False,
    text_grammars: Mapping[str, TextGrammar] = NO_TEXT_GRAMMARS,  # by the names of their tools
    param: str = "tools",
) -> str:
    """A grammar for calls of these tools and nothing else. `is_required=False` allows any text
    before optional calls; `is_open` allows keys that an object's schema does not list."""
    if not tools:
        raise RequestError("A tool call is required, but there are no tools", param=param)
    names: list[str] = []
    rules: list[str] = []
    nested: dict[str, str] = {}
    num_chars = 0
    for index, function in enumerate(tool["function"] for tool in tools):
        name = function["name"]
        if not _TOOL_NAME.fullmatch(name):
            raise RequestError(
                f"A tool has the name {name[:64]!r}",
                "Names have up to 128 letters, digits and the characters _ . : -",
                param=param,
            )
        schema = without_annotations(check_schema(function.get("parameters") or {}, param))
        if not is_open:
            schema = close_objects(schema)
        if text_grammars and name not in text_grammars and not is_required:
            schema = {}  # no constraint, as if no tool of the request had a grammar
        writer = _Writer(
            form, is_token, f"call_{index}", _checked(text_grammars.get(name), name, form, param)
        )
        write = writer.xml_call if form.arguments == "xml" else writer.json_call
        for rule in write(name, schema):
            num_chars += len(rule)
            check_size("The grammar", num_chars, MAX_LARK_CHARACTERS, param)
            rules.append(rule)
        names.append(writer.rule)
        nested |= writer.nested
    calls = f"call ({_literal(form.separator)} call)*" if is_parallel else "call"
    start = calls if is_required else f"TEXT ({calls})?\nTEXT: /(.|\\n)*/"
    lines = [f"start: {start}", f"call: {' | '.join(names)}", *rules]
    return lark_grammar("\n".join(lines), nested, param=param)


def _checked(
    grammar: TextGrammar | None, tool: str, form: CallForm, param: str
) -> TextGrammar | None:
    """Compiles the grammar alone, so that errors are about it, not about the rules around it."""
    if grammar is None:
        return None
    if grammar.syntax == "lark" and form.arguments == "json":
        raise RequestError(
            f"The lark grammar of the tool {tool!r} cannot be enforced",
            "This model writes arguments as JSON, where text is escaped.",
            'Use a grammar with the syntax "regex", or the format {"type": "text"}.',
            param=param,
        )
    compile = lark_grammar if grammar.syntax == "lark" else regex_grammar
    try:
        compile(grammar.definition, param=param)
    except RequestError as error:
        error.what = f"The tool {tool!r}: {error.what}"
        raise
    return grammar


def without_annotations(schema: Any) -> Any:
    """The schema without keys that do not affect validity."""
    if isinstance(schema, list):
        return [without_annotations(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    bare = {}
    for keyword, value in schema.items():
        if keyword in _NAMED_SCHEMAS and isinstance(value, dict):
            bare[keyword] = {name: without_annotations(child) for name, child in value.items()}
        elif keyword in ("enum", "const"):
            bare[keyword] = value
        elif keyword not in _ANNOTATIONS:
            bare[keyword] = without_annotations(value)
    return bare


class _Writer:
    """Writes the lark rules of one tool; their names begin with `rule`."""

    def __init__(
        self,
        form: CallForm,
        is_token: Callable[[str], bool],
        rule: str,
        text_grammar: TextGrammar | None = None,
    ) -> None:
        self.form = form
        self.rule = rule
        self.nested: dict[str, str] = {}  # lark grammars that the rules refer to, by name
        self._is_token = is_token
        self._text_grammar = text_grammar

    def json_call(self, name: str, schema: Schema) -> Iterator[str]:
        arguments = f"{self.rule}_arguments"
        if self._text_grammar is not None:
            (name_of_text,) = schema["properties"]
            text = {"type": "string", "pattern": f"^({self._text_grammar.definition})$"}
            schema = {**schema, "properties": {name_of_text: text}}
        start, end = self._spelled(self.form.start_of(name)), self._spelled(self.form.end)
        yield f"{self.rule}: {start} {arguments} {end}"
        yield f"{arguments}: {_json({'type': 'object', **schema})}"

    def xml_call(self, name: str, schema: dict[str, Any]) -> Iterator[str]:
        rules: dict[tuple[str, int], str] = {}  # by name and schema: alternatives may share them
        alternatives: dict[str, None] = {}
        children: dict[str, tuple[str, Any]] = {}  # by rule: a parameter's name and schema
        some = f"{self.rule}_any"
        for one in parameter_lists(schema):
            if one.schemas is None or not all(map(_PARAMETER_NAME.fullmatch, one.schemas)):
                alternatives[f"{some}*"] = None  # the parameters are unknown
                continue
            parts = []
            for key, child in one.schemas.items():
                rule = rules.setdefault((key, id(child)), f"{self.rule}_{len(rules)}")
                children[rule] = key, child
                parts.append(rule if key in one.required else f"{rule}?")
            alternatives[" ".join(parts)] = None
        start, end = self._spelled(self.form.start_of(name)), self._spelled(self.form.end)
        yield f"{self.rule}: {start} {_one_of(alternatives)} {end}"
        if f"{some}*" in alternatives:
            before, after = self.form.parameter_start.split("NAME")
            some_name = f"{_literal(before)} /[^\\n<>]{{1,64}}/ {_literal(after)}"
            yield f"{some}: {some_name} {some}_value"
            yield self._text(f"{some}_value")
        for rule, (key, child) in children.items():
            yield f"{rule}: {_literal(self.form.start_of_parameter(key))} {rule}_value"
            yield self._value(f"{rule}_value", child, schema)

    def _value(self, rule: str, schema: Any, root: dict[str, Any]) -> str:
        """The rule of a value: text is verbatim, everything else is JSON."""
        parameters = Parameters(root)
        forms: list[str] = []
        for part in _alternatives(schema, root):
            if choices := listed_values(part):
                forms += [_literal(c if isinstance(c, str) else json.dumps(c)) for c in choices]
            elif "string" in parameters.types_in(part):
                return self._text(rule)
            else:
                forms.append(_json(standalone(part, root)))
        return f"{rule}: ({' | '.join(forms)}) {_literal(self.form.parameter_end)}"

    def _text(self, rule: str) -> str:
        grammar, end = self._text_grammar, _literal(self.form.parameter_end)
        if grammar is not None and grammar.syntax == "lark":
            self.nested[f"{self.rule}_text"] = grammar.definition
            return f"{rule}: @{self.rule}_text {end}"
        regex = "(.|\\n)*" if grammar is None else regex_in_lark(grammar.definition)
        return f"{rule}[lazy]: /{regex}/ {end}"

    def _spelled(self, text: str) -> str:
        parts = [part for part in _TAG.split(text) if part]
        return " ".join(
            part if _TAG.fullmatch(part) and self._is_token(part) else _literal(part)
            for part in parts
        )


def _one_of(alternatives: Collection[str]) -> str:
    """In lark's notation. An empty alternative makes the others optional."""
    if len(alternatives) == 1:
        return next(iter(alternatives))
    return f"({' | '.join(filter(None, alternatives))}){'?' if '' in alternatives else ''}"


def _alternatives(schema: Any, root: Schema) -> list[Any]:
    """The schemas one of which a value matches: behind references and lists of alternatives."""
    found: list[Any] = []
    waiting, seen = [schema], set()
    while waiting:
        part = waiting.pop()
        if id(part) in seen:  # references may be circular
            continue
        seen.add(id(part))
        options = _options(part, root)
        if options:
            waiting += reversed(options)
        else:
            found.append(part)
    return found or [schema]


def _options(schema: Any, root: Schema) -> list[Any]:
    """The schemas that this one stands for; none if it says something itself."""
    if not isinstance(schema, dict):
        return []
    target = target_of(schema.get("$ref"), root)
    if target is not None and (len(schema) == 1 or listed_values(target)):
        return [target]
    for keyword in ("anyOf", "oneOf", "allOf"):
        options = schema.get(keyword)
        if isinstance(options, list) and len(schema) == 1:
            return options if keyword != "allOf" or len(options) == 1 else []
    return []


def _json(schema: Schema) -> str:
    return "%json " + json.dumps(
        {**schema, "x-guidance": json_options(is_lenient=True)}, ensure_ascii=False
    )


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
