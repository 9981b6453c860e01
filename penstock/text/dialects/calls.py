"""Reads one tool call, from its opening to its end, and reports its parts on the way.

A call is refused (`NotACall`) at the first character that cannot belong to one; the part already
read is then text. A call of a tool that was not offered is text too, but is read to its end, so
that nothing inside its arguments is mistaken for a call.

XML values have no escapes, so a tag inside one cannot always be distinguished from its end. The
rule: `</parameter>` ends a value if another parameter or the end of the function follows, and is
part of it otherwise. Models forget that tag, so two more things end a value: `</function>` with
`</tool_call>` after it, if no `<function=` is in the value; and, at the start of a line, a
parameter that the tool has and the call has not given yet. If a parameter is given twice, the first
value counts, as it may have been sent already.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping

from penstock.text.dialects.deltas import Delta, ToolArguments, ToolCallEnd, ToolCallStart
from penstock.text.dialects.dialect import (
    CALL_END,
    FUNCTION,
    FUNCTION_END,
    PARAMETER,
    PARAMETER_END,
)
from penstock.text.dialects.scanner import Markers, Reading, Scanner, read_name, skip_space
from penstock.text.dialects.values import NULLS, TEXT_ONLY, Parameters, quote, to_json

Tools = Mapping[str, Parameters]

ANGLE = Markers((">",))
BODY_STARTS = Markers((FUNCTION, "{"))
AFTER_PARAMETER = Markers((PARAMETER, FUNCTION_END, CALL_END))
AFTER_FUNCTION = Markers((CALL_END,))
IN_VALUE = Markers((PARAMETER, PARAMETER_END, FUNCTION, FUNCTION_END))
_NOT_IN_LABEL = re.compile(r"[<\n]")


class NotACall(Exception):
    """The text read so far is not a call; the rest was given back to the scanner."""


class CallSink:
    """Receives what a reader finds. Ignores a call of an unknown tool."""

    def __init__(self, deltas: list[Delta], index: int, has_tag: bool) -> None:
        self._deltas = deltas
        self._index = index
        self.has_tag = has_tag  # opened by CALL_START: certainly meant as a call
        self.has_started = False
        self.is_unknown = False

    def refuse(self) -> None:
        """The tool was not offered."""
        if not self.has_tag:
            raise NotACall
        self.is_unknown = True

    def start(self, name: str) -> None:
        if not self.has_started and not self.is_unknown:
            self.has_started = True
            self._deltas.append(ToolCallStart(self._index, f"call_{secrets.token_hex(12)}", name))

    def write(self, json: str) -> None:
        if json and self.has_started:
            self._deltas.append(ToolArguments(self._index, json))

    def end(self, is_broken: bool, is_cut: bool = False) -> None:
        if self.has_started:
            self._deltas.append(ToolCallEnd(self._index, is_broken, is_cut))


def expect(scanner: Scanner, markers: Markers) -> Reading[str]:
    """The marker that must come next, after any white space."""
    _, marker = yield from skip_space(scanner, markers)
    if marker is None:
        raise NotACall
    return marker


class XmlCall:
    """`NAME>`, parameters and `</function>`, after `<function=`."""

    def __init__(self, scanner: Scanner, tools: Tools, sink: CallSink) -> None:
        self._scanner = scanner
        self._tools = tools
        self._sink = sink
        self._name = ""
        self._tool = Parameters(None)
        self._given: set[str] = set()

    def read(self) -> Reading[None]:
        self._name, is_known = yield from read_name(self._scanner, ANGLE, self._tools)
        if is_known:
            self._tool = self._tools[self._name]
        else:
            self._sink.refuse()
            yield from self._read_label()
        marker = yield from expect(self._scanner, AFTER_PARAMETER)
        label = yield from self._next_label(marker)
        while label is not None:
            label = yield from self._read_parameter(label)
        self._sink.start(self._name)
        self._sink.write("}" if self._given else "{}")

    def _next_label(self, marker: str) -> Reading[str | None]:
        """The name of the parameter that this marker begins; None if it ends the function."""
        if marker == PARAMETER:
            return (yield from self._read_label())
        if marker == CALL_END:
            self._scanner.back(len(CALL_END))
        return None

    def _read_label(self) -> Reading[str]:
        label: list[str] = []
        while True:
            text, is_marker = yield from self._scanner.next(ANGLE)
            if is_marker:
                return "".join(label)
            if wrong := _NOT_IN_LABEL.search(text):
                self._scanner.back(len(text) - wrong.start())
                raise NotACall
            label.append(text)

    def _read_parameter(self, label: str) -> Reading[str | None]:
        self._sink.start(self._name)
        if label in self._given:
            value = _Value(lambda _: None, TEXT_ONLY, frozenset())
        else:
            self._sink.write(f'{", " if self._given else "{"}"{quote(label)}": ')
            self._given.add(label)
            value = _Value(
                self._sink.write, self._tool.types_of(label), self._tool.choices_of(label)
            )
        next_label = yield from self._read_value(value)
        value.end()
        return next_label

    def _read_value(self, value: _Value) -> Reading[str | None]:
        """Reads to the value's end and past what follows it; returns the next parameter's name."""
        holds_function = False
        while True:
            text, is_marker = yield from self._scanner.next(IN_VALUE)
            if not is_marker:
                value.add(text)
            elif text == FUNCTION or (text == FUNCTION_END and holds_function):
                holds_function = True
                value.add(text)
            elif text == PARAMETER:
                missing = self._tool.names - self._given if value.is_at_line_start else ()
                label, is_missing = yield from read_name(self._scanner, ANGLE, missing)
                if is_missing:
                    return label
                value.add(text + label)
            else:
                follows = AFTER_PARAMETER if text == PARAMETER_END else AFTER_FUNCTION
                space, marker = yield from skip_space(self._scanner, follows)
                if marker is not None:
                    return (yield from self._next_label(marker))
                value.add(text + space)


class _Value:
    """A parameter's text on its way to JSON, without the line breaks beside the tags.

    A string is written as it comes. Everything else waits for its end; a string that may be null
    waits only while it could still be null.
    """

    def __init__(
        self, write: Callable[[str], None], types: frozenset[str], choices: frozenset[str]
    ) -> None:
        self._write = write
        self._types = types
        self._choices = choices
        self._waiting: list[str] = []
        self._is_text = types == TEXT_ONLY
        self._has_begun = False
        self._is_blank = True
        self._has_newline = False  # the last character, which may belong to the closing tag
        if self._is_text:
            write('"')

    @property
    def is_at_line_start(self) -> bool:
        return self._has_newline or self._is_blank

    def add(self, text: str) -> None:
        if not self._has_begun:
            self._has_begun = True
            text = text.removeprefix("\n")
        if not text:
            return
        self._is_blank = False
        if self._has_newline:
            text = "\n" + text
        self._has_newline = text.endswith("\n")
        self._put(text.removesuffix("\n"))

    def end(self) -> None:
        if self._is_text:
            self._write('"')
        else:
            self._write(to_json("".join(self._waiting), self._types, self._choices))

    def _put(self, text: str) -> None:
        if self._is_text:
            self._write(quote(text))
            return
        self._waiting.append(text)
        if self._types == {"string", "null"}:
            start = "".join(self._waiting)
            if not any(null.startswith(start.lower()) for null in NULLS):
                self._is_text = True
                self._write(f'"{quote(start)}')
