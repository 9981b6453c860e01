"""Custom tools: for clients they take a text, for the model they are functions with one string.

The model calls them with JSON; the text is extracted while the JSON is being generated. Knows tools
as clients define them; penstock.text enforces grammars.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.errors import RequestError
from penstock.serve.responses.items import CUSTOM_INPUT
from penstock.text.call_grammar import TextGrammar

if TYPE_CHECKING:
    from penstock.serve.responses.requests import FlatTool

_START = re.compile(rf'\s*{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
# Characters and complete escapes. A high surrogate is complete only when its successor is known.
_WHOLE = re.compile(
    r"""(?:[^"\\]|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"""
    r"""|\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[0-9a-fA-F]{4}|(?=[^\\]|\\[^u])))*"""
)


def text_parameters(tool: FlatTool) -> dict[str, Any]:
    """The parameters of the function that the model sees instead of a custom tool."""
    text: dict[str, Any] = {"type": "string"}
    if tool.format is not None and tool.format.type == "grammar":
        text["description"] = (
            f"Text of this {tool.format.syntax} grammar:\n{tool.format.definition}"
        )
    return {
        "type": "object",
        "properties": {CUSTOM_INPUT: text},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }


def text_grammars(tools: Mapping[str, FlatTool]) -> Mapping[str, TextGrammar]:
    """The grammars that custom tools set for their texts, by tool name."""
    grammars: dict[str, TextGrammar] = {}
    for name, tool in tools.items():
        if tool.type != "custom" or tool.format is None or tool.format.type == "text":
            continue
        where, format = f"The format of the tool {name[:64]!r}", tool.format
        if format.type != "grammar":
            raise RequestError(
                f"{where} is of type {format.type[:32]!r}",
                "It must be text or grammar.",
                param="tools",
            )
        if format.syntax not in ("lark", "regex"):
            raise RequestError(
                f"{where} has the syntax {(format.syntax or '')[:32]!r}",
                "It must be lark or regex.",
                param="tools",
            )
        if not format.definition:
            raise RequestError(f"{where} has no definition", param="tools")
        syntax: Any = format.syntax
        grammars[name] = TextGrammar(syntax, format.definition)
    return grammars


class InputText:
    """The text in the arguments of a call, extracted while they arrive."""

    def __init__(self) -> None:
        self._unread = ""  # JSON
        self._has_begun = False
        self._is_open = False  # inside the string

    def feed(self, more: str) -> str:
        """Returns the new text; nothing if the arguments do not begin with the text: see `end`."""
        self._unread += more
        if not self._has_begun:
            start = _START.match(self._unread)
            if start is None:
                return ""
            self._has_begun = self._is_open = True
            self._unread = self._unread[start.end() :]
        if not self._is_open:
            return ""
        whole = _WHOLE.match(self._unread)
        assert whole is not None
        self._unread = self._unread[whole.end() :]
        self._is_open = not self._unread.startswith('"')
        return _without_surrogates(json.loads(f'"{whole.group()}"', strict=False))

    def end(self) -> str:
        """Returns the text of arguments that do not begin with it, or else all of them."""
        if self._has_begun:
            return ""
        try:
            text = json.loads(self._unread)[CUSTOM_INPUT]
        except (ValueError, KeyError, TypeError, RecursionError):
            text = None
        return _without_surrogates(text if isinstance(text, str) else self._unread)


def _without_surrogates(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
