"""Renders a conversation to the text a model was trained on, with the checkpoint's own chat
template.

Owns where templates are found, their limits and the errors when one exceeds them. Knows nothing of
tokens. A template comes with the checkpoint, never from a request. It is still untrusted code: it
runs in a process of its own with limited memory and time (template_process.py), in minijinja, which
cannot reach Python internals and burns fuel for every instruction, and on a copy of the
conversation.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from penstock.assets import NO_THINK_TEMPLATE, default_model
from penstock.errors import CheckpointError, ConfigError, RequestError, TemplateProcessError
from penstock.file_kinds import impostor
from penstock.gguf.folder import folder_of, has_file, on_disk, read_text
from penstock.text.dialects.json_calls import read_arguments
from penstock.text.json_values import refuse_many_arguments
from penstock.text.template_process import MEMORY_LIMIT_BYTES, Answer, Failure, shared_processes

TEMPLATE_FILE = "chat_template.jinja"
NAMED_TEMPLATES = {"no-think": NO_THINK_TEMPLATE}
SPECIAL_TOKEN_NAMES = [
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
]
# Names that every template has (template_worker.py): a variable with such a name would hide it.
TEMPLATE_GLOBALS = (
    *("cycler", "debug", "dict", "joiner", "namespace", "raise_exception", "range"),
    *("strftime_now", *SPECIAL_TOKEN_NAMES),
)
RESERVED_NAMES = frozenset(
    {"messages", "tools", "add_generation_prompt", "chat_template", "tokenize", *TEMPLATE_GLOBALS}
)

# A turn of the Qwen3.5 template burns about 150; a runaway loop burns 500,000 in some 15 ms.
BASE_FUEL = 500_000
FUEL_PER_ITEM = 2_000
# Fuel counts instructions, but one may copy a long text.
BASE_CPU_SECONDS = 0.5
CPU_SECONDS_PER_ITEM = 0.0001
CPU_SECONDS_PER_MB = 0.1
MAX_PROMPT_CHARS = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one rendering, besides the memory of its process."""

    fuel: int
    cpu_seconds: float
    max_chars: int

    @classmethod
    def of(cls, num_items: int, num_bytes: int) -> Limits:
        """For `num_items` messages and tools with `num_bytes` together."""
        cpu_seconds = (
            BASE_CPU_SECONDS
            + CPU_SECONDS_PER_ITEM * num_items
            + CPU_SECONDS_PER_MB * num_bytes / 1e6
        )
        return cls(BASE_FUEL + FUEL_PER_ITEM * num_items, cpu_seconds, MAX_PROMPT_CHARS)

    def reached(self, failure: Failure) -> tuple[str, str] | None:
        """The limit that stopped the template, as `what` and `why`; None: it failed by itself."""
        match failure.kind:
            case "OutOfFuel":
                return (
                    "the chat template ran out of fuel",
                    f"It was stopped after {self.fuel:,} instructions: {BASE_FUEL:,}, and "
                    f"{FUEL_PER_ITEM:,} for every message and tool.",
                )
            case "OutOfTime":
                allowed = failure.detail or f"{self.cpu_seconds:.1f} s of CPU time"
                return "the chat template ran out of time", f"It was stopped after {allowed}."
            case "OutOfMemory":
                allowed = f"{MEMORY_LIMIT_BYTES // 2**20} MiB of memory"
                return "the chat template ran out of memory", f"The limit is {allowed}."
            case "TooLong":
                return (
                    "the chat template wrote too long a prompt",
                    f"It wrote {failure.detail}; the limit is {self.max_chars:,}.",
                )
            case "Died":
                return (
                    "the chat template crashed",
                    f"Two processes failed in turn: {failure.detail}.",
                )
        return None


class ChatTemplate:
    """One compiled chat template, or the fact that the model has none."""

    def __init__(
        self,
        source: str | None,
        file: Path | None = None,  # where it was found
        special_tokens: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.source = source
        self._file = file
        self.special_tokens = dict(special_tokens)
        self._variables = frozenset() if source is None else self._names_it_reads()

    @classmethod
    def load(cls, path: Path | str | None, chosen: str | None = None) -> ChatTemplate:
        """The template of a checkpoint folder (or of a file in it); None is the embedded model's.

        `chosen`: a file, or a name of `NAMED_TEMPLATES`, instead of the checkpoint's own.
        """
        if path is None:
            path = default_model()
        path = Path(path)
        folder = folder_of(path)
        source, file = find_template(folder) if chosen is None else _read_chosen(chosen)
        return cls(source, file, _special_tokens(folder))

    @property
    def variables(self) -> frozenset[str]:
        """The names that the template reads besides the conversation: a request may set them."""
        return self._variables - RESERVED_NAMES

    def render(
        self,
        /,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt text. Further names, such as `enable_thinking`, reach the template as
        variables.
        """
        context = self.context(messages, tools, add_generation_prompt, kwargs)
        return self.render_json(encode_context(context), len(messages) + len(tools or ()))

    def context(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Everything that the template sees, as plain values."""
        if self.source is None:
            raise RequestError(
                "this model has no chat template",
                f"There is no {TEMPLATE_FILE} beside it, and none in its tokenizer's config.",
                f"Use the completions endpoint, or put a {TEMPLATE_FILE} into the model's folder.",
                param="messages",
            )
        for name in RESERVED_NAMES & variables.keys():
            raise RequestError(
                f"{name} cannot be a template variable",
                "The request itself or the checkpoint sets it.",
                "Remove it from chat_template_kwargs.",
                param="chat_template_kwargs",
            )
        try:
            context: dict[str, Any] = msgspec.to_builtins(
                {"messages": messages, "tools": tools, **variables}
            )
            parse_arguments(context["messages"])
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise _cannot_be_given(f"{type(error).__name__}: {error}") from error
        if not context["tools"]:
            del context["tools"]  # templates test both `if tools` and `if tools is defined`
        context["add_generation_prompt"] = add_generation_prompt
        return context

    def render_json(self, context: bytes, num_items: int) -> str:
        """The prompt text of an encoded context with `num_items` messages and tools."""
        limits = Limits.of(num_items, len(context))
        answer = self._ask(limits, msgspec.Raw(context))
        if answer.failure is not None:
            raise self._refusal(answer.failure, limits)
        return answer.text

    def _names_it_reads(self) -> frozenset[str]:
        """Compiles the template without rendering it."""
        limits = Limits.of(0, 0)
        origin = "The chat template"
        if self._file is not None:  # the full path: only the operator reads this
            origin += f" in {self._file}"
        try:
            answer = self._ask(limits, None)
        except UnicodeEncodeError as error:  # JSON can spell halves of characters
            raise CheckpointError(
                f"{origin} is not text", f"{error}.", "Fetch the file again."
            ) from error
        if answer.failure is not None:
            limit = limits.reached(answer.failure)
            raise CheckpointError(
                f"{origin} does not parse" if limit is None else f"{origin} cannot be compiled",
                f"Line {answer.failure.line}: {answer.failure.reason}."
                if limit is None
                else limit[1],
                "Fetch the file again, or correct the template.",
            )
        return frozenset(answer.variables)

    def _ask(self, limits: Limits, context: msgspec.Raw | None) -> Answer:
        task = {"source": self.source, "special_tokens": self.special_tokens, "context": context}
        return shared_processes.ask({**task, **dataclasses.asdict(limits)})

    def _refusal(self, failure: Failure, limits: Limits) -> RequestError | TemplateProcessError:
        if failure.kind == "Died":  # probably not the request's fault
            return TemplateProcessError(
                "The messages could not be rendered",
                f"Two template processes failed in turn; the second one: {failure.detail}.",
                "Try again later.",
            )
        if failure.kind == "Refused":
            return RequestError(
                failure.detail, "The model's chat template refused the messages.", param="messages"
            )
        if failure.kind == "BadValue":
            return _cannot_be_given(failure.detail)
        limit = limits.reached(failure)
        if limit is not None:
            return RequestError(
                *limit,
                "Send fewer or smaller messages; if it happens with every request, the template is "
                "at fault.",
                param="messages",
            )
        return RequestError(
            "the chat template cannot render these messages",
            # Without the folder: a client must not see the server's paths.
            f"Line {failure.line} of {self._file.name if self._file else 'it'}: {failure.reason}.",
            "Check the roles, the content and the tool calls of the messages.",
            param="messages",
        )


def encode_context(context: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(context)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise _cannot_be_given(f"{type(error).__name__}: {error}") from error


def _cannot_be_given(why: str) -> RequestError:
    return RequestError(
        "the messages cannot be passed to the chat template",
        f"{why}.",
        "Send plain JSON values that are not nested hundreds of levels deep.",
        param="messages",
    )


def find_template(folder: Path) -> tuple[str | None, Path | None]:
    """The template's source and its file; None and None if there is none."""
    file = folder / TEMPLATE_FILE
    if file.is_file():
        return _read_text(file), file
    for name in ("tokenizer_config.json", "chat_template.json"):
        config = folder / name
        if not has_file(config):
            continue
        source = _choose(read_json(config).get("chat_template"), config)
        if source is not None:
            return source, on_disk(config)
    return None, None


def _read_chosen(chosen: str) -> tuple[str, Path]:
    file = Path(chosen).expanduser()
    if chosen in NAMED_TEMPLATES and not file.is_file():
        file = NAMED_TEMPLATES[chosen]
    try:
        return file.read_text(encoding="utf-8"), file
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"Cannot read the chat template from {file}",
            f"{error}.",
            f"Use a Jinja file in UTF-8, or a built-in one: {', '.join(NAMED_TEMPLATES)}.",
        ) from error


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object of the checkpoint; {} when the file is absent."""
    value = read_value(file) if has_file(file) else {}
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{file} is a {type(value).__name__}",
            "A JSON object is expected.",
            "Fetch the file again.",
        )
    return value


def read_value(file: Path) -> Any:
    try:
        return json.loads(_read_text(file))
    except (ValueError, RecursionError) as error:
        if known := impostor(file):
            raise known from error
        raise CheckpointError(
            f"{file} is not valid JSON", f"{error}.", "Fetch the file again."
        ) from error


def _read_text(file: Path) -> str:
    try:
        return read_text(file)
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be read",
            f"{error.strerror or error}.",
            "Check the file and its permissions.",
        ) from error
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{file} is not UTF-8", f"{error}.", "Fetch the file again."
        ) from error


def parse_arguments(messages: list[dict[str, Any]]) -> None:
    """Turns the arguments of tool calls, in place, from the API's JSON strings into objects.

    Clients send back the API's strings; templates loop over names and values.
    """
    called = list(_functions_with_text_arguments(messages))
    texts = [function["arguments"].encode(errors="replace") for function in called]
    refuse_many_arguments(texts, "messages")
    for function in called:
        function["arguments"] = read_arguments(function["arguments"])


def _functions_with_text_arguments(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for message in messages:
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function", call) if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                yield function


def _choose(found: Any, config: Path) -> str | None:
    """A template is a string, or a list of named templates; chat uses the one called default."""
    if found is None or isinstance(found, str):
        return found
    named = {}
    if isinstance(found, list):
        named = {
            entry["name"]: entry["template"]
            for entry in found
            if isinstance(entry, dict)
            and isinstance(entry.get("template"), str)
            and "name" in entry
        }
    if not named:
        raise CheckpointError(
            f"chat_template in {config} is not a template",
            f"It is a {type(found).__name__} without named templates; a string or a list of named "
            "templates is expected.",
            "Fetch the file again.",
        )
    return named.get("default") or next(iter(named.values()))


def _special_tokens(folder: Path) -> dict[str, str]:
    """bos_token and the like, which templates write by name."""
    config = read_json(folder / "tokenizer_config.json")
    tokens = {name: config.get(name) for name in SPECIAL_TOKEN_NAMES}
    texts = {name: t.get("content") if isinstance(t, dict) else t for name, t in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
