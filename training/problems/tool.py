"""One tool of a problem: its schema, request patterns, results, and patterns to report them.

A request pattern has its parameters in braces; the call has exactly those, in the order of the
schema. Does not decide which tools a conversation has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from string import Formatter
from typing import Any

from training.problems.draw import between, pick
from training.problems.names import invented_code, invented_word, person

Draw = Callable[[Random], Any]


@dataclass(frozen=True, slots=True)
class Parameter:
    """Every request names required parameters; others only if the pattern has them."""

    schema: Mapping[str, Any]
    draw: Draw
    is_required: bool = True


@dataclass(frozen=True, slots=True)
class Request:
    """A request pattern: the text, the parameters it names, and those it implies without naming a
    value.
    """

    pattern: str
    named: tuple[str, ...]
    settled: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    schema: dict[str, Any]
    parameters: Mapping[str, Parameter]
    requests: tuple[Request, ...]
    returns: Mapping[str, Draw] = field(default_factory=dict)
    answer: str = ""  # of required parameters and returned values


def tool(
    name: str,
    description: str,
    parameters: Mapping[str, Parameter],
    requests: Sequence[str | tuple[str, Mapping[str, Any]]],
    returns: Mapping[str, Draw],
    answer: str,
) -> Tool:
    """A tool from its table entry; all conversations share its schema."""
    pairs = [(entry, {}) if isinstance(entry, str) else entry for entry in requests]
    return Tool(
        name,
        function_schema(name, description, parameters),
        parameters,
        tuple(Request(pattern, _names_in(pattern), settled) for pattern, settled in pairs),
        returns,
        answer,
    )


def function_schema(
    name: str, description: str, parameters: Mapping[str, Parameter]
) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {
                    label: dict(parameter.schema) for label, parameter in parameters.items()
                },
                "required": [
                    label for label, parameter in parameters.items() if parameter.is_required
                ],
            },
        },
    }


def _names_in(pattern: str) -> tuple[str, ...]:
    return tuple(name for _, name, _, _ in Formatter().parse(pattern) if name)


def optional(parameter: Parameter) -> Parameter:
    return Parameter(parameter.schema, parameter.draw, is_required=False)


def text(draw: Draw, description: str = "") -> Parameter:
    schema = {"type": "string", "description": description} if description else {"type": "string"}
    return Parameter(schema, draw)


def whole(lowest: int, highest: int, description: str = "") -> Parameter:
    schema = {"type": "integer", "description": description} if description else {"type": "integer"}
    return Parameter(schema, lambda rng: between(rng, lowest, highest))


def decimal(lowest: int, highest: int) -> Parameter:
    """A number with one decimal, never an integer, so that its type is unambiguous."""
    return Parameter(
        {"type": "number"},
        lambda rng: float(f"{between(rng, lowest, highest)}.{between(rng, 1, 9)}"),
    )


def switch() -> Parameter:
    return Parameter({"type": "boolean"}, lambda rng: rng.random() < 0.5)


def choice(*values: str) -> Parameter:
    return Parameter({"type": "string", "enum": list(values)}, lambda rng: pick(rng, values))


def several(draw: Draw, item_type: str = "string") -> Parameter:
    """Two or three different values."""

    def draw_several(rng: Random) -> list[Any]:
        return list(dict.fromkeys(draw(rng) for _ in range(between(rng, 2, 3))))

    return Parameter({"type": "array", "items": {"type": item_type}}, draw_several)


def from_list(values: Sequence[Any]) -> Draw:
    return lambda rng: pick(rng, values)


def integer(lowest: int, highest: int) -> Draw:
    return lambda rng: between(rng, lowest, highest)


def first_name(rng: Random) -> str:
    return person(rng)["name"]


def clock_time(rng: Random) -> str:
    return f"{between(rng, 0, 23):02d}:{between(rng, 0, 59):02d}"


def date(rng: Random) -> str:
    return f"2026-{between(rng, 1, 12):02d}-{between(rng, 1, 28):02d}"


def place(known: Sequence[str]) -> Draw:
    """A place from a list or, sometimes, an invented one."""
    return lambda rng: invented_word(rng) if rng.random() < 0.3 else pick(rng, known)


def code(rng: Random) -> str:
    return invented_code(rng)


def spoken(value: Any) -> str:
    """A value as a user writes it in a request."""
    if isinstance(value, list):
        words = [str(item) for item in value]
        return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    return str(value).lower() if isinstance(value, bool) else str(value)
