"""What an answer contains besides its text, and what a reply continues: fields that vLLM added to
OpenAI's.

Checks them and converts them. Prompt and text are created elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from penstock.errors import RequestError


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What an answer contains besides the text."""

    returns_token_ids: bool = False  # for prompt and reply
    prompt_logprobs: int | None = None  # alternatives for every token of the prompt
    counts_usage: bool = False  # in every chunk of a stream

    @property
    def is_plain(self) -> bool:
        return not (self.returns_token_ids or self.counts_usage) and self.prompt_logprobs is None


PLAIN_OUTPUT = OutputOptions()


class OutputFields(Protocol):
    """The fields of either endpoint's body."""

    stream: bool | None
    stream_options: Any
    return_token_ids: bool | None
    prompt_logprobs: int | None


def output_options(fields: OutputFields) -> OutputOptions:
    if fields.prompt_logprobs is not None and fields.stream:
        raise RequestError(
            "prompt_logprobs does not work with stream: true",
            "The log-probabilities of a prompt are sent only in answers that are not streamed.",
            "Omit one of them.",
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
    """Alternatives per prompt token: the larger number of the two fields."""
    given = [number for number in (prompt_logprobs, echo_logprobs) if number is not None]
    return max(given, default=None)


@dataclass(frozen=True, slots=True)
class Prefill:
    """The beginning of the assistant's turn, which the reply continues."""

    thought: str
    text: str


def take_prefill(
    messages: list[dict[str, Any]], continues: bool | None, adds_prompt: bool | None, has_form: bool
) -> Prefill | None:
    """Removes an assistant message at the end of the messages if the reply continues it.

    It does, unless the request has `continue_final_message: false` or `add_generation_prompt:
    true`, or a form, which applies only to a whole reply, or the message calls a tool.
    """
    where = f"messages[{len(messages) - 1}]"
    if continues and adds_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt are both true",
            "A reply either continues the last message or begins a new turn.",
            "Omit add_generation_prompt.",
            param="continue_final_message",
        )
    last = messages[-1]
    obstacle = ""
    if last["role"] != "assistant":
        obstacle = f"{where}, the last message, has the role {last['role']}."
    elif last.get("tool_calls"):
        obstacle = f"{where}, the last message, calls a tool."
    elif has_form:
        obstacle = "response_format or tool_choice constrains the reply from its beginning."
    is_alone = len(messages) == 1 and not continues  # a session may hold the message to continue
    if not (obstacle or is_alone) and continues is not False and not adds_prompt:
        messages.pop()
        return Prefill(last.get("reasoning_content", ""), last["content"])
    if continues:
        raise RequestError(
            "The last message cannot be continued",
            obstacle,
            "End with an assistant message, and omit response_format and tool_choice.",
            param="continue_final_message",
        )
    return None
