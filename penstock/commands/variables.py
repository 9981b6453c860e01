"""Environment variables for a command's own flags: `penstock eval --limit` is PENSTOCK_EVAL_LIMIT.

Engine and server settings have shorter names, which all commands share (flags.py). A variable is
turned into its flag, before the typed ones, so that a typed flag overrides it. Errors name a
setting as the user wrote it. Knows argparse; never what a flag means.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.commands.flags import ENV_PREFIX, flags_of, read_boolean
from penstock.config import EngineConfig, ServeConfig
from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GivenByVariable:
    """`words` for the parser, and the fields that they set."""

    words: list[str]
    fields: frozenset[str]


def variable_of(command: str, action: argparse.Action) -> str | None:
    """None if it is not a flag of the command itself."""
    long = [name for name in action.option_strings if name.startswith("--")]
    if not long or long[0] in ("--help", "--debug") or action.dest == argparse.SUPPRESS:
        return None
    return f"{ENV_PREFIX}{command.upper()}_{long[0][2:].replace('-', '_').upper()}"


def variables_of(command: str, parser: argparse.ArgumentParser) -> list[str]:
    return [name for action in parser._actions if (name := variable_of(command, action))]


def read_variables(
    command: str, parser: argparse.ArgumentParser, typed: Sequence[str], environ: Mapping[str, str]
) -> GivenByVariable:
    """The flags that are set by variables and were not typed."""
    silenced = _typed_or_excluded(parser, typed)
    words: list[str] = []
    fields: set[str] = set()
    for action in parser._actions:
        name = variable_of(command, action)
        if name is None or not environ.get(name) or action.dest in silenced:
            continue
        words += _as_words(action, name, environ[name])
        fields.add(action.dest)
    return GivenByVariable(words, frozenset(fields))


def written_names(
    command: str, parser: argparse.ArgumentParser, typed: Sequence[str], environ: Mapping[str, str]
) -> dict[str, str]:
    """By field: the flag as it was typed, or else the variable that set it."""
    names = {
        flag.field.name: flag.variable
        for settings in (EngineConfig, ServeConfig)
        for flag in flags_of(settings)
        if environ.get(flag.variable)
    }
    for action in parser._actions:
        variable = variable_of(command, action)
        if variable is not None and environ.get(variable):
            names[action.dest] = variable
    for word in typed:
        name = word.partition("=")[0]
        if name in parser._option_string_actions:
            names[parser._option_string_actions[name].dest] = name
    return names


_SETTING = re.compile(r"(^|\band |\bbut |, )(?:--)?([\w-]+)(?= is )")


def as_written(text: str, names: Mapping[str, str]) -> str:
    """An error of a setting says `name is value`, with the name of the field or of its flag: this
    puts what the user wrote in its place.
    """

    def name_of(found: re.Match[str]) -> str:
        name = names.get(found[2].replace("-", "_"))
        return found[0] if name is None else found[1] + name

    return _SETTING.sub(name_of, text)


def is_given_by_variable(arguments: argparse.Namespace, field: str) -> bool:
    """Such a flag may belong to another command of the family: it is ignored, not refused."""
    given: Collection[str] = getattr(arguments, "from_variables", ())
    return field in given


def typed_fields(arguments: argparse.Namespace, defaults: Mapping[str, Any]) -> list[str]:
    """The fields that a user set on the command line to something else than these defaults."""
    return [
        name
        for name, default in defaults.items()
        if getattr(arguments, name) != default and not is_given_by_variable(arguments, name)
    ]


def _typed_or_excluded(parser: argparse.ArgumentParser, typed: Sequence[str]) -> set[str]:
    names = {word.partition("=")[0] for word in typed if word.startswith("-")}
    silenced = {action.dest for action in parser._actions if names & set(action.option_strings)}
    for group in parser._mutually_exclusive_groups:
        dests = {action.dest for action in group._group_actions}
        if dests & silenced:
            silenced |= dests
    return silenced


def _as_words(action: argparse.Action, variable: str, text: str) -> list[str]:
    flag = next(name for name in action.option_strings if name.startswith("--"))
    is_switch = isinstance(action, argparse.BooleanOptionalAction)
    try:
        if is_switch or action.nargs == 0:
            is_on = read_boolean(text)
            off = [f"--no-{flag[2:]}"] if is_switch else []
            return [flag] if is_on else off
        values = text.split(",") if isinstance(action, argparse._AppendAction) else [text]
        for value in values:
            if callable(action.type):
                action.type(value.strip())
        return [f"{flag}={value.strip()}" for value in values]
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise ConfigError(
            f"{variable} is {text!r}",
            f"{error}.",
            f"Correct or unset it; {flag} would override it.",
        ) from None
