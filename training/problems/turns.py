"""Turns of a generated conversation, and whether its last one thinks."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from penstock.eval.conversation import Message
from penstock.eval.reply import Call
from training.problems.draw import pick

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a friendly assistant. Keep your answers short.",
    "Answer briefly and correctly.",
    "Be helpful, honest and brief.",
    "You are a careful assistant that never makes things up.",
    "You help people with small everyday questions.",
    "Be polite. Be exact.",
    "You are an assistant that runs on a small computer.",
    "Help the user as well as you can.",
    "You are a calm and precise assistant.",
)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def assistant(text: str, thought: str | None = None, calls: Sequence[Call] = ()) -> Message:
    """A turn of the model; `thought` is None if it does not think."""
    message: Message = {"role": "assistant", "content": text}
    if thought is not None:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(calls, 1)
        ]
    return message


def sometimes_system(rng: Random) -> tuple[Message, ...]:
    """A short system turn or, more often, none."""
    return (system(pick(rng, SYSTEM_PROMPTS)),) if rng.random() < 0.35 else ()


def decide_thinking(rng: Random, thinking: bool | None) -> bool:
    return rng.random() < 0.5 if thinking is None else thinking
