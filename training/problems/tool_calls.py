"""Requests for an offered tool, and turns around them: two calls, reports of results, no tool used.

One to four tools are offered, some of them invented. The right one is called with the values of the
request, typed as in its schema. Requests without a matching tool are in refusals.py.
"""

from __future__ import annotations

import json
from collections.abc import Container, Sequence, Set
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from penstock.eval.conversation import Conversation, ExactCalls, Mentions, Message
from penstock.eval.reply import Call
from training.problems import small_talk, spot_checks
from training.problems.daily_tools import DAILY_TOOLS
from training.problems.draw import between, is_held_out, pick
from training.problems.invented_tools import invent_tool
from training.problems.office_tools import OFFICE_TOOLS
from training.problems.tool import Request, Tool, spoken
from training.problems.turns import SYSTEM_PROMPTS, assistant, decide_thinking, system, user

CATALOG = DAILY_TOOLS + OFFICE_TOOLS

NUM_OFFERED = (1, 1, 1, 2, 2, 2, 2, 3, 3, 4)
FRAMES = (
    "{}",
    "{}",
    "{}",
    "{}",
    "Hi! {}",
    "Hello. {}",
    "{} Thanks.",
    "Please: {}",
    "{} Thank you!",
    "Hey! {}",
)
JOINTS = ("{} Also: {}", "{} And then: {}", "First: {} Second: {}", "{} {}", "Two things. {} {}")
ANNOUNCING_SYSTEMS = (
    "Before you call a tool, say which one.",
    "Tell the user which tool you use, then call it.",
)
# In small talk the model says that it does not know what these tools could find out.
INFORMING = frozenset({"get_weather", "get_forecast", "find_contact", "web_search", "get_route"})
ERRORS = (
    "not available",
    "not found",
    "no connection",
    "try again later",
    "access denied",
    "timed out",
)


@dataclass(frozen=True, slots=True)
class Errand:
    """A request for one tool, the right call, and its result."""

    tool: Tool
    request: Request
    text: str
    call: Call
    result: str = ""
    answer: str = ""
    told: tuple[str, ...] = ()  # values of the result that the answer must contain


def sample(rng: Random, held_out: bool, thinking: bool | None = None) -> Conversation:
    is_thinking = decide_thinking(rng, thinking)
    luck = rng.random()
    if luck < 0.54:
        return _ask_once(rng, held_out, is_thinking)
    if luck < 0.695:
        return _ask_twice(rng, held_out, is_thinking)
    if luck < 0.875:
        return _tell_result(rng, held_out, is_thinking)
    if luck < 0.955:
        return _ask_again(rng, held_out, is_thinking)
    return _answer_in_words(rng, held_out, is_thinking)


def draw_errand(rng: Random, held_out: bool, taken: Container[str] = ()) -> Errand:
    """A request for a tool whose name is not `taken`."""
    while True:
        tool = invent_tool(rng) if rng.random() < 0.25 else pick(rng, CATALOG)
        if tool.name in taken:
            continue
        request = pick(rng, tool.requests)
        values = {name: tool.parameters[name].draw(rng) for name in request.named}
        arguments = {
            name: values[name] if name in values else request.settled[name]
            for name in tool.parameters
            if name in values or name in request.settled
        }
        if is_held_out(f"{tool.name}{request.pattern}{arguments}") == held_out:
            break
    said = {name: spoken(value) for name, value in values.items()}
    return Errand(tool, request, request.pattern.format_map(said), Call(tool.name, arguments))


def fulfil(rng: Random, errand: Errand) -> Errand:
    """The errand with the tool's result, which is sometimes an error."""
    if rng.random() < 0.08:
        error = pick(rng, ERRORS)
        result: dict[str, Any] = {"error": error}
        answer = f"That did not work: {error}."
        told: tuple[str, ...] = (error,)
    else:
        result = {name: draw(rng) for name, draw in errand.tool.returns.items()}
        words = {**errand.call.arguments, **result}
        answer = errand.tool.answer.format_map(words)
        told = tuple(
            str(value) for name, value in result.items() if f"{{{name}}}" in errand.tool.answer
        )
    return replace(errand, result=json.dumps(result), answer=answer, told=told)


def _ask_once(rng: Random, held_out: bool, is_thinking: bool) -> Conversation:
    errand = draw_errand(rng, held_out)
    return _calling(rng, (), pick(rng, FRAMES).format(errand.text), [errand], is_thinking)


def _ask_twice(rng: Random, held_out: bool, is_thinking: bool) -> Conversation:
    first = draw_errand(rng, held_out)
    second = draw_errand(rng, held_out, (first.tool.name,))
    text = pick(rng, JOINTS).format(first.text, second.text)
    return _calling(rng, (), text, [first, second], is_thinking)


def _ask_again(rng: Random, held_out: bool, is_thinking: bool) -> Conversation:
    """A second request, after the first is complete."""
    past = fulfil(rng, draw_errand(rng, held_out))
    errand = draw_errand(rng, held_out)
    while errand.tool.name == past.tool.name and errand.tool is not past.tool:
        errand = draw_errand(rng, held_out)
    history = (
        user(past.text),
        assistant("", None, [past.call]),
        _result_turn(1, past.result),
        assistant(past.answer),
    )
    return _calling(rng, history, errand.text, [errand], is_thinking, also_offer=[past.tool])


def _tell_result(rng: Random, held_out: bool, is_thinking: bool) -> Conversation:
    """The tools have returned; the model must report the results."""
    errands = [fulfil(rng, draw_errand(rng, held_out))]
    text = errands[0].text
    if rng.random() < 0.15:
        errands.append(fulfil(rng, draw_errand(rng, held_out, (errands[0].tool.name,))))
        text = pick(rng, JOINTS).format(text, errands[1].text)
    answer = " ".join(errand.answer for errand in errands)
    thought = "I have the result and tell it." if is_thinking else None
    return Conversation(
        kind="tool_calls",
        messages=(
            *system_turn(rng),
            user(text),
            assistant(
                "", _calling_thought(errands) if is_thinking else None, [e.call for e in errands]
            ),
            *(_result_turn(number, errand.result) for number, errand in enumerate(errands, 1)),
            assistant(answer, thought),
        ),
        check=Mentions(tuple(value for errand in errands for value in errand.told)),
        enable_thinking=is_thinking,
        tools=offer(rng, [errand.tool for errand in errands]),
    )


def _answer_in_words(rng: Random, held_out: bool, is_thinking: bool) -> Conversation:
    """Tools are offered, but the question needs none."""
    kind = spot_checks if rng.random() < 0.5 else small_talk
    plain = kind.sample(rng, held_out, is_thinking)
    return Conversation(
        kind="tool_calls",
        messages=plain.messages,
        check=plain.check,
        enable_thinking=is_thinking,
        tools=offer(rng, [draw_errand(rng, held_out, INFORMING).tool], never=INFORMING),
    )


def _calling(
    rng: Random,
    history: tuple[Message, ...],
    text: str,
    errands: list[Errand],
    is_thinking: bool,
    also_offer: Sequence[Tool] = (),
) -> Conversation:
    calls = [errand.call for errand in errands]
    names = " and ".join(call.name for call in calls)
    announces = rng.random() < 0.1
    head = (system(pick(rng, ANNOUNCING_SYSTEMS)),) if announces else system_turn(rng)
    return Conversation(
        kind="tool_calls",
        messages=(
            *head,
            *history,
            user(text),
            assistant(
                f"I use {names}." if announces else "",
                _calling_thought(errands) if is_thinking else None,
                calls,
            ),
        ),
        check=ExactCalls(tuple(calls)),
        enable_thinking=is_thinking,
        tools=offer(rng, [*{id(t): t for t in (*also_offer, *(e.tool for e in errands))}.values()]),
    )


def _calling_thought(errands: Sequence[Errand]) -> str:
    return f"I should call {' and '.join(errand.tool.name for errand in errands)}."


def system_turn(rng: Random) -> tuple[Message, ...]:
    return (system(pick(rng, SYSTEM_PROMPTS)),) if rng.random() < 0.25 else ()


def _result_turn(number: int, result: str) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": result}


def offer(
    rng: Random, tools: Sequence[Tool], never: Set[str] = frozenset()
) -> tuple[dict[str, Any], ...]:
    """The tools and some others, in random order."""
    names = {*never, *(tool.name for tool in tools)}
    offered = [tool.schema for tool in tools]
    for _ in range(pick(rng, NUM_OFFERED) - len(tools)):
        other = invent_tool(rng) if rng.random() < 0.25 else pick(rng, CATALOG)
        if other.name not in names:
            names.add(other.name)
            offered.insert(between(rng, 0, len(offered)), other.schema)
    return tuple(offered)
