"""How a family of models writes its reasoning and its tool calls, as data.

A dialect defines what a parser looks for, what a grammar that forces a call must allow, and what
ends thinking that has used up its budget. It is detected from a checkpoint's chat template, which
shows the model how to call; there is no table of model names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


@dataclass(frozen=True, slots=True)
class Thinking:
    start: str = "<think>"
    end: str = "</think>"
    # Appended to thinking that must stop, so that the answer begins.
    forced_end: str = "\n</think>\n\n"

    def split(self, reply: str) -> tuple[str, str]:
        """The reasoning that a reply begins with, and the answer."""
        if not reply.lstrip().startswith(self.start):
            return "", reply
        thought, _, answer = reply.lstrip().removeprefix(self.start).partition(self.end)
        return thought.strip("\n"), answer.lstrip("\n")

    def is_open_after(self, prompt: str) -> bool:
        """Whether a prompt ends inside thinking, so that the reply begins with it."""
        return prompt.rstrip().endswith(self.start)


@dataclass(frozen=True, slots=True)
class CallForm:
    """The format of a call: `start` + arguments + `end`, with `separator` between calls.

    `arguments` is the format in the middle: "json", one object that the tool's schema describes; or
    "xml", for every parameter `parameter_start` + value + `parameter_end`, where a value is a bare
    string or, for every other type, JSON.
    """

    arguments: Literal["json", "xml"]
    start: str
    end: str
    separator: str
    parameter_start: str = ""
    parameter_end: str = ""

    def start_of(self, tool_name: str) -> str:
        return self.start.replace("NAME", tool_name)

    def start_of_parameter(self, parameter_name: str) -> str:
        return self.parameter_start.replace("NAME", parameter_name)


@dataclass(frozen=True, slots=True)
class Dialect:
    name: str
    thinking: Thinking | None = None  # None: the model has no thinking
    call: CallForm | None = None  # None: it has no tools
    # Each may begin a call, in text or (only CALL_START) in reasoning.
    openings: tuple[str, ...] = ()
    separators: str = ""  # characters that, besides white space, only separate calls
    control_tokens: tuple[str, ...] = ()  # never shown as text, wherever they are


QWEN_XML = Dialect(
    name="qwen_xml",
    thinking=Thinking(),
    call=CallForm(
        arguments="xml",
        start=f"{CALL_START}\n{FUNCTION}NAME>\n",
        parameter_start=f"{PARAMETER}NAME>\n",
        parameter_end=f"\n{PARAMETER_END}\n",
        end=f"{FUNCTION_END}\n{CALL_END}",
        separator="\n",
    ),
    openings=(CALL_START, FUNCTION),  # models often forget the first
    control_tokens=("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
)

HERMES = Dialect(
    name="hermes",
    thinking=Thinking(),
    call=CallForm(
        arguments="json",
        start=f'{CALL_START}\n{{"name": "NAME", "arguments": ',
        end=f"}}\n{CALL_END}",
        separator="\n",
    ),
    openings=(CALL_START,),
    control_tokens=("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
)

LLAMA3 = Dialect(
    name="llama3",
    call=CallForm(
        arguments="json",
        start='{"name": "NAME", "parameters": ',
        end="}",
        separator="; ",
    ),
    openings=("{",),
    separators=";,",
    control_tokens=("<|python_tag|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
)

PLAIN = Dialect(name="plain")

DIALECTS = {dialect.name: dialect for dialect in (QWEN_XML, HERMES, LLAMA3, PLAIN)}

_ARGUMENTS_KEY = re.compile(r"""["']arguments\\?["']""")
_PARAMETERS_KEY = re.compile(r"""["']parameters\\?["']\s*:""")


def dialect_of(template: str | None) -> Dialect:
    """The dialect of a chat template; plain text if it has no known format of tool calls."""
    template = template or ""
    thinking = Thinking()
    return replace(_calls_of(template), thinking=thinking if thinking.end in template else None)


def _calls_of(template: str) -> Dialect:
    if CALL_START in template and PARAMETER in template:
        return QWEN_XML
    if CALL_START in template and _ARGUMENTS_KEY.search(template):
        return HERMES
    if "<|start_header_id|>" in template and _PARAMETERS_KEY.search(template):
        return LLAMA3
    return PLAIN
