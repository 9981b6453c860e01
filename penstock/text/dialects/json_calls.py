"""Reads a tool call that is one JSON object: `{"name": ..., "arguments": {...}}`, or with
"parameters".

Arguments already have their types and are passed on as they are written, checked character by
character. One exception: newlines and other control characters inside a string, which JSON forbids
and models write, are escaped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from penstock.text.dialects.calls import CallSink, NotACall, Tools, expect
from penstock.text.dialects.scanner import NO_MARKERS, Markers, Reading, Scanner, read_name
from penstock.text.dialects.values import is_json, quote

ARGUMENTS_KEYS = frozenset({"arguments", "parameters"})
KEYS = ARGUMENTS_KEYS | {"name", "type", "id"}
MAX_DEPTH = 100  # more than any tool needs; JSON parsers fail at some hundreds
MAX_SCALAR_CHARS = 300

QUOTE, COLON = Markers('"'), Markers(":")
AFTER_MEMBER = Markers((",", "}"))
ARGUMENTS_STARTS = Markers(("{", '"', "null"))

_SPACE = re.compile(r"[ \t\r\n]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_BEGINNING = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_SCALAR_CHARS = re.compile(r"[-+.0-9a-zA-Z]+")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")


class JsonCall:
    """Members and `}`, after `{`."""

    def __init__(self, scanner: Scanner, tools: Tools, sink: CallSink) -> None:
        self._scanner = scanner
        self._tools = tools
        self._sink = sink
        self._name: str | None = None
        self._arguments: list[str] | None = None  # those before the name, or not an object

    def read(self) -> Reading[None]:
        keys = KEYS
        marker = ","
        while marker == ",":
            yield from expect(self._scanner, QUOTE)
            key, is_key = yield from read_name(self._scanner, QUOTE, keys)
            if not is_key:
                raise NotACall
            keys -= ARGUMENTS_KEYS if key in ARGUMENTS_KEYS else {key}
            yield from expect(self._scanner, COLON)
            yield from self._read_member(key)
            marker = yield from expect(self._scanner, AFTER_MEMBER)
        has_arguments = not keys & ARGUMENTS_KEYS
        if self._name is None or not (has_arguments or self._sink.has_tag):
            self._scanner.back(1)
            raise NotACall
        self._sink.start(self._name)
        if not has_arguments:
            self._sink.write("{}")
        elif self._arguments is not None:
            self._sink.write("".join(self._arguments))

    def _read_member(self, key: str) -> Reading[None]:
        if key == "name":
            yield from self._read_tool_name()
        elif key in ARGUMENTS_KEYS:
            yield from self._read_arguments()
        else:
            yield from self._read_value("", lambda _: None)

    def _read_tool_name(self) -> Reading[None]:
        yield from expect(self._scanner, QUOTE)
        self._name, is_known = yield from read_name(self._scanner, QUOTE, self._tools)
        if not is_known:
            self._sink.refuse()
            yield from self._read_value('"', lambda _: None)

    def _read_arguments(self) -> Reading[None]:
        opening = yield from expect(self._scanner, ARGUMENTS_STARTS)
        if opening == "{" and self._name is not None:
            self._sink.start(self._name)
            yield from self._read_value(opening, self._sink.write)
            return
        self._arguments = ["{}"] if opening == "null" else []
        if opening != "null":
            yield from self._read_value(opening, self._arguments.append)
        if opening == '"':  # an object written as a string
            text = json.loads("".join(self._arguments)).strip()
            if not (text.startswith("{") and is_json(text)):
                raise NotACall
            self._arguments = [text]

    def _read_value(self, opening: str, write: Callable[[str], None]) -> Reading[None]:
        """Any JSON value; `opening` has been read."""
        value = JsonText()
        value.take(opening)
        write(value.take_checked())
        while not value.is_complete:
            text, _ = yield from self._scanner.next(NO_MARKERS)
            num_taken = value.take(text)
            write(value.take_checked())
            self._scanner.back(len(text) - num_taken)
            if value.is_wrong:
                raise NotACall


class JsonText:
    """Checks one JSON value that arrives in pieces, and returns it with corrected strings."""

    def __init__(self) -> None:
        self.is_complete = False
        self.is_wrong = False
        self._checked: list[str] = []
        self._brackets: list[str] = []  # closing characters of the open brackets
        self._num_whole = 0  # checked pieces when a value was last complete
        self._whole_depth = 0  # open brackets at that time
        self._allowed = "value"
        self._is_in_string = False
        self._escape = ""  # incomplete
        self._scalar = ""  # an incomplete number, true, false or null

    def take(self, text: str) -> int:
        """Returns how many characters belong to the value: all, unless it ends or is wrong."""
        position = 0
        while position < len(text) and not (self.is_complete or self.is_wrong):
            if self._is_in_string:
                position = self._take_in_string(text, position)
            elif self._scalar:
                position = self._take_in_scalar(text, position)
            else:
                position = self._take_between(text, position)
        return position

    def take_checked(self) -> str:
        text = "".join(self._checked)
        self._checked.clear()
        return text

    def _take_in_string(self, text: str, position: int) -> int:
        if self._escape:
            return self._take_in_escape(text, position)
        if match := _PLAIN.match(text, position):
            self._checked.append(match.group())
            return match.end()
        character = text[position]
        if character == "\\":
            self._escape = character
        elif character == '"':
            self._checked.append(character)
            self._is_in_string = False
            if self._allowed in ("key", "key or end"):
                self._allowed = "colon"
            else:
                self._complete_value()
        else:
            self._checked.append(quote(character))
        return position + 1

    def _take_in_escape(self, text: str, position: int) -> int:
        escape = self._escape + text[position]
        if _ESCAPE.fullmatch(escape):
            self._checked.append(escape)
            self._escape = ""
        elif _ESCAPE_BEGINNING.fullmatch(escape):
            self._escape = escape
        else:
            self.is_wrong = True
            return position
        return position + 1

    def _take_in_scalar(self, text: str, position: int) -> int:
        if match := _SCALAR_CHARS.match(text, position):
            num_room = MAX_SCALAR_CHARS - len(self._scalar)
            end = min(match.end(), position + num_room)
            self._scalar += text[position:end]
            self.is_wrong = end == position
            return end
        if _SCALAR.fullmatch(self._scalar):
            self._checked.append(self._scalar)
            self._scalar = ""
            self._complete_value()
        else:
            self.is_wrong = True
        return position

    def _take_between(self, text: str, position: int) -> int:
        if match := _SPACE.match(text, position):
            self._checked.append(match.group())
            return match.end()
        character = text[position]
        if self._brackets and character == self._brackets[-1] and self._allowed.endswith("end"):
            self._checked.append(self._brackets.pop())
            self._complete_value()
            return position + 1
        elif character == '"' and self._allowed in ("value", "value or end", "key", "key or end"):
            self._is_in_string = True
        elif (
            character in "{["
            and self._allowed.startswith("value")
            and len(self._brackets) < MAX_DEPTH
        ):
            self._brackets.append("}" if character == "{" else "]")
            self._allowed = "key or end" if character == "{" else "value or end"
            self._checked.append(character)
            self._mark_whole()
            return position + 1
        elif character == ":" and self._allowed == "colon":
            self._allowed = "value"
        elif character == "," and self._allowed == "comma or end":
            self._allowed = "key" if self._brackets[-1] == "}" else "value"
        elif self._allowed.startswith("value") and _SCALAR_CHARS.match(character):
            self._scalar = character
            return position + 1
        else:
            self.is_wrong = True
            return position
        self._checked.append(character)
        return position + 1

    def _complete_value(self) -> None:
        self._allowed = "comma or end"
        self.is_complete = not self._brackets
        self._mark_whole()

    def _mark_whole(self) -> None:
        self._num_whole, self._whole_depth = len(self._checked), len(self._brackets)

    def whole_part(self) -> str:
        """The text up to the last complete value, closed there, if `take_checked` was not used."""
        closing = reversed(self._brackets[: self._whole_depth])
        return "".join([*self._checked[: self._num_whole], *closing])


def read_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call in a history, as the object that templates print. A call that was cut
    off or is invalid comes back with every later request: its complete members are read, and text
    that is not an object becomes the value of "arguments"."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = json.loads(whole_part(text) or "null")
    if isinstance(value, dict):
        return value
    return {"arguments": text}


def whole_part(text: str) -> str:
    """JSON text up to its last complete value, closed there; empty if it does not begin as JSON."""
    value = JsonText()
    value.take(text.lstrip())
    return value.whole_part()
