"""Turns the fields of a settings dataclass into command-line flags and environment variables, and
back.

A field `max_rows` becomes `--max-rows` and, for the classes of config.py, `PENSTOCK_MAX_ROWS`. A
flag overrides the variable, the variable overrides the default. Knows types and formats, never what
a setting means.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

from penstock.config import EngineConfig, ServeConfig
from penstock.errors import ConfigError, PenstockError, nearest

ENV_PREFIX = "PENSTOCK_"
# Variables of `penstock forge`, which run.sh passes on.
FORGE_VARIABLES = ("PENSTOCK_LLM_BASE_URL", "PENSTOCK_LLM_MODEL")
# Server settings that also apply to a model in the command's own process.
TEXT_SETTINGS = (
    "tokenizer",
    "chat_template",
    "allow_special_tokens_in_content",
    "generation_config",
)
SHORT_FLAGS = {"model": "-m"}
_COUNT = re.compile(r"(-?\d+(?:\.\d+)?)([kmg]?)", re.IGNORECASE)
_SCALES = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True}
_BOOLEANS |= {"0": False, "false": False, "no": False, "off": False}


class UsageError(PenstockError):
    """A command line that cannot be parsed; the program exits with code 2."""


def foreign_flag(command: str, flag: str, owners: str) -> UsageError:
    """For a flag that belongs to another command of the same family."""
    family = command.partition(" ")[0]
    help_line = f"Run `penstock {family} --help` for all flags."
    return UsageError(f"{command} has no flag {flag}", f"It belongs to {owners}.", help_line)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises `UsageError` and suggests the nearest flag."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(self._plain(message), todo=f"Run `{self.prog} --help` for all flags.")

    def _plain(self, message: str) -> str:
        """argparse's message in our words."""
        positionals = [action for action in self._actions if not action.option_strings]
        if missing := re.fullmatch(r"the following arguments are required: (.*)", message):
            for action in positionals:  # a choice is clearer than its placeholder
                if (
                    action.choices
                    and action.required
                    and missing[1] in (action.metavar, action.dest)
                ):
                    return f"{self.prog} needs one of {', '.join(action.choices)}"
            return f"{self.prog} needs {missing[1]}"
        message = re.sub(r"^argument (\S+): ", r"\1: ", message)
        message = re.sub(r": expected (one|at least one) argument$", " needs a value", message)
        message = re.sub(r": ignored explicit argument .*", " takes no value", message)
        if choice := re.fullmatch(r"(.*): invalid choice: '(.*)' \(choose from (.*)\)", message):
            is_flag, names = choice[1].startswith("-"), choice[3].replace("'", "")
            wrong = f"{choice[1]} is" if is_flag else f"{self.prog} takes no argument"
            return f"{wrong} {choice[2]!r}; it must be one of {names}"
        return message

    def parse_strictly(self, words: Sequence[str]) -> argparse.Namespace:
        # Intermixed: `serve --port 8001 MODEL` must work as `serve MODEL --port 8001` does.
        arguments, unknown = self.parse_known_intermixed_args(list(words))
        if unknown:
            shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
            flags = [flag for action in shown for flag in action.option_strings]
            word = unknown[0].split("=")[0]
            if word.startswith("-"):
                what, hint = f"{self.prog} has no flag {word}", nearest(word, flags, cutoff=0.65)
            else:
                what = f"{self.prog} takes no argument {word!r}"
                hint = "Text with spaces needs quotes."
            raise UsageError(what, hint, f"Run `{self.prog} --help` for all flags.")
        return arguments


class Switch(argparse.BooleanOptionalAction):
    """`--x`, `--no-x`, and other names for `--no-x`."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, inverse: Sequence[str] = (), **rest: Any
    ) -> None:
        super().__init__(option_strings, dest, **rest)
        self.inverse = inverse
        self.option_strings = [*self.option_strings, *inverse]

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        assert option_string is not None
        is_off = option_string.startswith("--no-") or option_string in self.inverse
        setattr(namespace, self.dest, not is_off)


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """One field as a flag: how to parse its text, and whether it is a switch."""

    field: dataclasses.Field[Any]
    read: Callable[[str], Any]
    metavar: str
    is_switch: bool

    @property
    def name(self) -> str:
        return "--" + self.field.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.field.name.upper()


def read_count(text: str) -> int:
    """An integer, with an optional suffix: 4k is 4096, 1.5k is 1536."""
    match = _COUNT.fullmatch(text.strip().replace("_", "").replace(",", ""))
    value = float(match[1]) * _SCALES[match[2].lower()] if match else 0.5
    if match and not match[2] and "." not in match[1]:
        return int(match[1])  # not through float, which would round a 64-bit seed
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number; write 4096 or 4k")
    return int(value)


def read_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def read_boolean(text: str) -> bool:
    if text.lower() not in _BOOLEANS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a switch; write 1 or 0")
    return _BOOLEANS[text.lower()]


def read_counts(text: str) -> tuple[int, ...]:
    return tuple(read_count(part) for part in text.split(","))


def read_chances(text: str) -> tuple[float, ...]:
    return tuple(read_number(part) for part in text.split(","))


def read_texts(text: str) -> tuple[str, ...]:
    """A variable's format, `a,b`; a flag is repeated instead."""
    return tuple(part.strip() for part in text.split(","))


def read_biases(text: str) -> dict[int, float]:
    """`12=-100,7=2.5`: token ids, each with a number to add to its logit."""
    pairs = [part.partition("=") for part in text.split(",")]
    return {read_count(token_id): read_number(bias) for token_id, _, bias in pairs}


# By the field's type without None: how to parse its text, and its placeholder in the help.
_READERS: dict[Any, tuple[Callable[[str], Any], str]] = {
    str: (str, ""),  # the field's own name
    int: (read_count, "N"),
    float: (read_number, "X"),
    bool: (read_boolean, ""),
    tuple[int, ...]: (read_counts, "N,N"),
    tuple[str, ...]: (read_texts, "TEXT"),
    Mapping[int, float]: (read_biases, "ID=X,ID=X"),
}


def flags_of(settings: type[Any]) -> list[Flag]:
    hints = typing.get_type_hints(settings)
    flags = []
    for field in dataclasses.fields(settings):
        kind = _without_none(hints[field.name])
        read, metavar = _READERS[kind]
        # The settings check choices, and suggest the nearest one.
        if choices := field.metadata.get("choices"):
            metavar = f"{{{','.join(choices)}}}"
        metavar = metavar or field.name.rpartition("_")[2].upper()
        flags.append(Flag(field, read, metavar, is_switch=kind is bool))
    return flags


def _without_none(hint: Any) -> Any:
    if isinstance(hint, types.UnionType):
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    return hint


def add_flags(
    parser: argparse.ArgumentParser,
    settings: type[Any],
    *,
    title: str,
    helps: Mapping[str, str] = types.MappingProxyType({}),
    only: Collection[str] | None = None,
    skip: Collection[str] = (),
) -> None:
    """One flag per field. A flag that is not given sets nothing, so that the variable applies."""
    group = parser.add_argument_group(title)
    for flag in flags_of(settings):
        if flag.field.name in skip or (only is not None and flag.field.name not in only):
            continue
        options = [flag.name]
        if flag.field.name in SHORT_FLAGS:
            options.insert(0, SHORT_FLAGS[flag.field.name])
        options += flag.field.metadata.get("aliases", ())
        help = flag.field.metadata.get("help") or helps.get(flag.field.name, "")
        common: dict[str, Any] = {"dest": flag.field.name, "default": argparse.SUPPRESS}
        common["help"] = help + _default_note(flag, help)
        if flag.is_switch:
            inverse = flag.field.metadata.get("inverse", ())
            group.add_argument(*options, action=Switch, inverse=inverse, **common)
        elif flag.read is read_texts:
            group.add_argument(*options, action="append", metavar=flag.metavar, **common)
        else:
            group.add_argument(*options, type=flag.read, metavar=flag.metavar, **common)


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """For commands that load a model into their own process."""
    add_flags(parser, EngineConfig, title="the engine")
    add_flags(parser, ServeConfig, title="the text", only=TEXT_SETTINGS)


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """The model as a positional argument, for commands about a model; --model means the same."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default=argparse.SUPPRESS,
        help="a folder, a GGUF file or a preset (default: the embedded tiny model)",
    )


def _default_note(flag: Flag, help: str) -> str:
    default = flag.field.default
    if "(default" in help or default in (None, "", ()) or default is dataclasses.MISSING:
        return ""
    if flag.is_switch:
        default = "on" if default else "off"
    return f" (default: {default})"


def read_settings(
    settings: type[Any],
    arguments: argparse.Namespace,
    environ: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The values that were given, by flag or by variable, and no others."""
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for flag in flags_of(settings):
        name = flag.field.name
        if hasattr(arguments, name):
            value = getattr(arguments, name)
            values[name] = tuple(value) if isinstance(value, list) else value
        elif settings in (EngineConfig, ServeConfig) and environ.get(flag.variable):
            values[name] = _read_variable(flag, environ[flag.variable])
    return values


def _read_variable(flag: Flag, text: str) -> Any:
    try:
        return flag.read(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(
            f"{flag.variable} is {text!r}",
            f"{error}.",
            f"Correct or unset it; {flag.name} would override it.",
        ) from None


def unknown_variables(
    environ: Mapping[str, str], own: Collection[str] = (), others: tuple[str, ...] = ()
) -> list[str]:
    """A sentence for each PENSTOCK_ variable that sets nothing: it may be misspelt.

    `own`: the variables of the running command; `others`: prefixes of other commands' variables.
    """
    known = [
        flag.variable for settings in (EngineConfig, ServeConfig) for flag in flags_of(settings)
    ]
    known += [*own, *FORGE_VARIABLES]
    unknown = sorted(
        name
        for name in environ
        if name.startswith(ENV_PREFIX) and name not in known and not name.startswith(others)
    )
    return [
        f"{name} is set, but no setting has that name. {nearest(name, known)}".strip()
        for name in unknown
    ]
