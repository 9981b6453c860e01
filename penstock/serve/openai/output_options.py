"""What a reply tells besides its text, and what it goes on from: fields that vLLM added to OpenAI's.

Checks them and gives what follows from them. Prompt and text themselves are made elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from penstock.errors import RequestError


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What is told besides the text."""

    returns_token_ids: bool = False  # of the prompt and of the reply
    prompt_logprobs: int | None = None  # how many alternatives of every token of the prompt
    counts_usage: bool = False  # in every chunk of a stream

    @property
    def is_plain(self) -> bool:
        return not (self.returns_token_ids or self.counts_usage) and self.prompt_logprobs is None


PLAIN_OUTPUT = OutputOptions()


class OutputFields(Protocol):
    """Of a body of either endpoint."""

    stream: bool | None
    stream_options: Any
    return_token_ids: bool | None
    prompt_logprobs: int | None


def output_options(fields: OutputFields) -> OutputOptions:
    if fields.prompt_logprobs is not None and fields.stream:
        raise RequestError(
            "prompt_logprobs is given with stream: true",
            "Those of a prompt come with the whole answer.",
            "Leave one of them out.",
            param="prompt_logprobs",
        )
    options = fields.stream_options
    is_counted = options is not None and options.include_usage and options.continuous_usage_stats
    return OutputOptions(
        returns_token_ids=bool(fields.return_token_ids),
        prompt_logprobs=fields.prompt_logprobs,
        counts_usage=bool(fields.stream and is_counted),
    )


def scored_alternatives(prompt_logprobs: int | None, echo_logprobs: int | None) -> int | None:
    """Of each token of a prompt, as many as the field that wants most of them."""
    given = [number for number in (prompt_logprobs, echo_logprobs) if number is not None]
    return max(given, default=None)


@dataclass(frozen=True, slots=True)
class Prefill:
    """What the assistant has thought and said already, and the reply goes on from."""

    thought: str
    text: str


def take_prefill(
    messages: list[dict[str, Any]], continues: bool | None, adds_prompt: bool | None, has_form: bool
) -> Prefill | None:
    """Takes an assistant's last message off the messages if the reply is to continue it.

    It is, unless the request says `continue_final_message: false` or `add_generation_prompt: true`, or asks
    for a form, which only a whole reply can have, or the message calls a tool.
    """
    where = f"messages[{len(messages) - 1}]"
    if continues and adds_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt are both true",
            "A reply goes on from the last message, or begins a turn of its own.",
            "Leave add_generation_prompt out.",
            param="continue_final_message",
        )
    last = messages[-1]
    obstacle = ""
    if last["role"] != "assistant":
        obstacle = f"{where}, the last one, is of the role {last['role']}."
    elif last.get("tool_calls"):
        obstacle = f"{where}, the last one, calls a tool."
    elif has_form:
        obstacle = "The reply is to have a form (response_format, tool_choice), from its beginning."
    is_alone = len(messages) == 1 and not continues  # a session may have what it goes on from
    if not (obstacle or is_alone) and continues is not False and not adds_prompt:
        messages.pop()
        return Prefill(last.get("reasoning_content", ""), last["content"])
    if continues:
        raise RequestError(
            "continue_final_message cannot be followed",
            obstacle,
            "End the messages with an assistant's, and ask for no form.",
            param="continue_final_message",
        )
    return None
