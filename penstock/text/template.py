"""Renders a conversation to the text a model was trained on, with the checkpoint's own chat template.

Owns where templates are found and the limits they run under. Knows nothing of tokens. A template comes with
the checkpoint and never from a request. It runs in minijinja, which cannot reach Python internals, refuses
giant ranges and repetitions, and burns fuel for every instruction; it works on a copy of the conversation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import minijinja
import msgspec

from penstock.errors import CheckpointError, RequestError

TEMPLATE_FILE = "chat_template.jinja"
RESERVED_NAMES = frozenset({"messages", "tools", "add_generation_prompt", "chat_template", "tokenize"})
SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)

# A turn of the Qwen3.5 template burns about 150; a runaway loop burns 500,000 in some 15 ms.
BASE_FUEL = 500_000
FUEL_PER_ITEM = 2_000
MAX_INDENT = 16

# transformers marks the assistant's text with this tag for training; for rendering it is transparent.
_GENERATION_TAG = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


class ChatTemplate:
    """One compiled chat template, or the knowledge that the model has none."""

    def __init__(
        self,
        source: str | None,
        origin: str = "the chat template",
        special_tokens: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.source = source
        self._origin = origin
        self._environment = None if source is None else _compile(source, origin, special_tokens)

    @classmethod
    def load(cls, path: Path | str | None) -> ChatTemplate:
        """The template of a checkpoint folder (or of a file in it); None is the embedded model's."""
        if path is None:
            from penstock.assets import default_model

            path = default_model()
        path = Path(path)
        folder = path if path.is_dir() else path.parent
        source, origin = find_template(folder)
        return cls(source, origin, _special_tokens(folder))

    @property
    def variables(self) -> frozenset[str]:
        """The names the template reads besides the conversation: what a request may set."""
        if self._environment is None:
            return frozenset()
        names = frozenset(self._environment.undeclared_variables_in_template("chat"))
        return names - RESERVED_NAMES - self._environment.globals.keys()

    def render(
        self,
        /,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt text. Further names, such as `enable_thinking`, reach the template as variables."""
        if self._environment is None:
            raise RequestError(
                "this model has no chat template",
                f"{self._origin}.",
                f"Use the completions endpoint, or put a {TEMPLATE_FILE} into the model's folder.",
                param="messages",
            )
        for name in RESERVED_NAMES & kwargs.keys():
            raise RequestError(
                f"{name} cannot be a template variable",
                "It is set by the request itself or by the checkpoint.",
                "Leave it out of chat_template_kwargs.",
                param="chat_template_kwargs",
            )
        num_items = len(messages) + len(tools or ())
        fuel = BASE_FUEL + FUEL_PER_ITEM * num_items
        self._environment.fuel = fuel
        try:
            context = msgspec.to_builtins({"messages": messages, "tools": tools, **kwargs})
            parse_arguments(context["messages"])
            if not context["tools"]:
                del context["tools"]  # templates ask both `if tools` and `if tools is defined`
            return self._environment.render_template(
                "chat", add_generation_prompt=add_generation_prompt, **context
            )
        except minijinja.TemplateError as error:
            raise self._refusal(error, fuel) from error
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(
                "the messages cannot be given to the chat template",
                f"{type(error).__name__}: {error}.",
                "Send plain JSON values that are not nested hundreds of levels deep.",
                param="messages",
            ) from error

    def _refusal(self, error: minijinja.TemplateError, fuel: int) -> RequestError:
        if error.kind == "OutOfFuel":
            return RequestError(
                "the chat template ran out of fuel",
                f"It was stopped after {fuel:,} instructions ({FUEL_PER_ITEM:,} for every message and tool, "
                f"and {BASE_FUEL:,}).",
                "Send fewer or smaller messages; if it happens with every request, the template loops.",
                param="messages",
            )
        return RequestError(
            "the chat template cannot render these messages",
            f"Line {error.line} of {self._origin}: {error.detail or error.kind}.",
            "Check the roles, the content and the tool calls of the messages.",
            param="messages",
        )


def find_template(folder: Path) -> tuple[str | None, str]:
    """The template's source and where it was found; without one, None and where it was looked for."""
    file = folder / TEMPLATE_FILE
    if file.is_file():
        return file.read_text(encoding="utf-8"), str(file)
    for name in ("tokenizer_config.json", "chat_template.json"):
        config = folder / name
        if not config.is_file():
            continue
        source = _choose(read_json(config).get("chat_template"), config)
        if source is not None:
            return source, str(config)
    return None, f"There is no {TEMPLATE_FILE} in {folder} and no chat_template in its tokenizer_config.json"


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object of the checkpoint; {} when the file is absent."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON", f"{error}.", "Fetch the file again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a {type(value).__name__}", "A JSON object is expected.")
    return value


def parse_arguments(messages: list[dict[str, Any]]) -> None:
    """Turns the arguments of tool calls, in place, from the API's JSON strings into objects.

    Clients send back what the API gave them, a string; templates loop over the names and values.
    """
    for index, message in enumerate(messages):
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function", call) if isinstance(call, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
                continue
            text = function["arguments"]
            try:
                arguments = json.loads(text or "{}")
            except ValueError as error:
                arguments, why = None, f"They are not JSON: {error}."
            else:
                why = f"They are a JSON {type(arguments).__name__}."
            if not isinstance(arguments, dict):
                raise RequestError(
                    f"messages[{index}] has a tool call whose arguments are {text[:80]!r}",
                    why,
                    "Send the arguments as a JSON object, or as a string that holds one.",
                    param="messages",
                )
            function["arguments"] = arguments


def _choose(found: Any, config: Path) -> str | None:
    """A template is a string, or a list of named ones of which chat uses the one called default."""
    if found is None or isinstance(found, str):
        return found
    named = {}
    if isinstance(found, list):
        named = {
            entry["name"]: entry["template"]
            for entry in found
            if isinstance(entry, dict) and isinstance(entry.get("template"), str) and "name" in entry
        }
    if not named:
        raise CheckpointError(
            f"chat_template in {config} is not a template",
            f"It is a {type(found).__name__} without named templates; expected is a string or such a list.",
        )
    return named.get("default") or next(iter(named.values()))


def _special_tokens(folder: Path) -> dict[str, str]:
    """bos_token and its kin, which templates write out by name."""
    config = read_json(folder / "tokenizer_config.json")
    tokens = {name: config.get(name) for name in SPECIAL_TOKEN_NAMES}
    texts = {name: t.get("content") if isinstance(t, dict) else t for name, t in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _compile(source: str, origin: str, special_tokens: Mapping[str, str]) -> minijinja.Environment:
    environment = minijinja.Environment(
        filters={"tojson": _to_json, "indent": _indent, "trim": _trim},
        globals={**special_tokens, "raise_exception": _raise_exception, "strftime_now": _strftime_now},
        trim_blocks=True,
        lstrip_blocks=True,
        pycompat=True,
        fuel=BASE_FUEL,
    )
    for amplifier in ("batch", "slice"):  # one number makes them allocate gigabytes
        environment.remove_filter(amplifier)
    plain = _GENERATION_TAG.sub(
        lambda tag: f"{{%{tag[1]} {'endif' if tag[2] else 'if true'} {tag[3]}%}}", source
    )
    try:
        environment.add_template("chat", plain)
    except minijinja.TemplateError as error:
        raise CheckpointError(
            f"{origin} does not parse",
            f"Line {error.line}: {error.detail or error.kind}.",
            "Fetch the file again, or correct the template.",
        ) from error
    return environment


def _raise_exception(message: str) -> None:
    raise RequestError(str(message), "The model's chat template refused the messages.", param="messages")


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """What transformers gives templates: key order kept, nothing escaped for HTML, ", " and ": " between."""
    if indent is not None:
        _check_indent(indent)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _indent(value: str, width: int = 4, first: bool = False, blank: bool = False) -> str:
    _check_indent(width)
    margin = " " * width
    lines = [line if not line and not blank else margin + line for line in value.split("\n")]
    return "\n".join(lines) if first else "\n".join(lines).removeprefix(margin)


def _check_indent(width: object) -> None:
    """Builtin filters would allocate whatever one number asks for."""
    if not isinstance(width, int) or width > MAX_INDENT:
        raise ValueError(
            f"the template asks for an indent of {str(width)[:20]!r}; at most {MAX_INDENT} is allowed"
        )


def _trim(value: Any, characters: str | None = None) -> str:
    """Python's idea of white space, which differs from Rust's in a few control characters."""
    return "" if value is None else str(value).strip(characters)
