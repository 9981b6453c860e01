"""Requests for tools under varying names: the matching tool has a name to be read, or is missing.

A model that has memorized tools calls them whether they are offered or not. Here it must read the
name from the offered tools, so every call teaches it to look. The same requests come with and
without the matching tool; without it, the right reply says so.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from random import Random
from typing import Any

from penstock.eval.conversation import Conversation, ExactCalls, Mentions
from penstock.eval.reply import Call
from training.problems.draw import between, pick
from training.problems.names import invented_word
from training.problems.refusals import REFUSAL, REFUSING_THOUGHT, draw_errand_to_refuse
from training.problems.tool import Tool
from training.problems.tool_calls import FRAMES, Errand, draw_errand, system_turn
from training.problems.turns import assistant, decide_thinking, user

FITTING_SHARE = 0.6
NUM_OFFERED = (1, 1, 1, 1, 2, 2, 2, 3)
PREFIXES = ("app", "api", "my", "home", "do", "user", "main")
SUFFIXES = ("now", "tool", "v2", "2", "fn", "new")
SYNONYMS = {
    "get": ("fetch", "read", "show"),
    "set": ("change", "adjust"),
    "find": ("lookup", "discover"),
    "search": ("find", "browse"),
    "book": ("reserve",),
    "create": ("make", "add"),
    "send": ("deliver", "write"),
    "check": ("query", "look_at"),
    "start": ("begin", "launch"),
    "stop": ("end", "halt"),
    "delete": ("remove", "erase"),
    "order": ("buy", "request"),
}


def sample(rng: Random, held_out: bool, thinking: bool | None = None) -> Conversation:
    is_thinking = decide_thinking(rng, thinking)
    errand = draw_errand_to_refuse(rng, held_out)
    if rng.random() < FITTING_SHARE:
        return _calling(rng, rename(rng, errand), is_thinking)
    tools = _others(rng, {errand.tool.name}, pick(rng, NUM_OFFERED))
    last = assistant(REFUSAL, REFUSING_THOUGHT if is_thinking else None)
    return _conversation(rng, errand, tools, last, is_thinking, Mentions())


def _calling(rng: Random, errand: Errand, is_thinking: bool) -> Conversation:
    tools = _others(rng, {errand.tool.name, errand.call.name}, pick(rng, NUM_OFFERED) - 1)
    tools.insert(between(rng, 0, len(tools)), errand.tool.schema)
    thought = f"I should call {errand.call.name}." if is_thinking else None
    last = assistant("", thought, [errand.call])
    return _conversation(rng, errand, tools, last, is_thinking, ExactCalls((errand.call,)))


def _conversation(
    rng: Random,
    errand: Errand,
    tools: list[dict[str, Any]],
    last: dict[str, Any],
    is_thinking: bool,
    check: ExactCalls | Mentions,
) -> Conversation:
    return Conversation(
        kind="tool_choice",
        messages=(*system_turn(rng), user(pick(rng, FRAMES).format(errand.text)), last),
        check=check,
        enable_thinking=is_thinking,
        tools=tuple(tools),
    )


def rename(rng: Random, errand: Errand) -> Errand:
    """The errand, half of the time with its tool renamed; a name that the request mentions is
    kept.
    """
    if errand.tool.name in errand.text or rng.random() < 0.5:
        return errand
    tool = _renamed(rng, errand.tool)
    return replace(errand, tool=tool, call=Call(tool.name, errand.call.arguments))


def _others(rng: Random, taken: Container[str], num: int) -> list[dict[str, Any]]:
    """Schemas of other tools, some of them renamed."""
    schemas: dict[str, dict[str, Any]] = {}
    known: set[str] = set()
    while len(schemas) < num:
        other = draw_errand(rng, False, taken).tool
        shown = _renamed(rng, other) if rng.random() < 0.4 else other
        if other.name not in known and shown.name not in schemas and shown.name not in taken:
            known.add(other.name)
            schemas[shown.name] = shown.schema
    return list(schemas.values())


def _renamed(rng: Random, tool: Tool) -> Tool:
    name = _other_name(rng, tool.name)
    return replace(
        tool,
        name=name,
        schema={**tool.schema, "function": {**tool.schema["function"], "name": name}},
    )


def _other_name(rng: Random, name: str) -> str:
    first, *rest = name.split("_")
    luck = rng.random()
    if luck < 0.2:
        return (
            first + "".join(part.capitalize() for part in rest)
            if rest
            else f"{first}_{pick(rng, SUFFIXES)}"
        )
    if luck < 0.4:
        return f"{pick(rng, PREFIXES)}_{name}"
    if luck < 0.55:
        return f"{name}_{pick(rng, SUFFIXES)}"
    if luck < 0.8 and rest:
        return (
            "_".join((*rest, first))
            if first not in SYNONYMS
            else "_".join((pick(rng, SYNONYMS[first]), *rest))
        )
    # Meaningless names: only the description tells what the tool does.
    return invented_word(rng).lower() if rng.random() < 0.6 else f"tool_{between(rng, 1, 99)}"
