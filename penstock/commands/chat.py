"""`penstock chat`: a conversation in the terminal, with a model in this process or behind a URL.

Reads messages, runs slash commands and prints the answer as it comes. The model is anything that
streams pieces of text for a list of messages; this file knows no engine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from penstock.commands.console import paint, print_error
from penstock.commands.flags import UsageError, add_engine_flags, read_settings
from penstock.commands.local import (
    LocalModel,
    add_sampling_flags,
    given_sampling,
    load_llm,
    read_sampling,
)
from penstock.config import SAMPLING_NAMES, EngineConfig, ServeConfig, from_mapping
from penstock.errors import PenstockError, nearest
from penstock.http_client import HttpClient

DESCRIPTION = "Chat with a model in this process, or on the server of --base-url."
USAGE = "penstock chat [-m MODEL] [flags]"
EXAMPLES = [
    "penstock chat                                  the embedded tiny model",
    "penstock chat -m ~/models/Qwen3.5-4B           your checkpoint",
    "penstock chat --web                            the same in your browser",
    "penstock chat --base-url http://127.0.0.1:8000 a running server",
]

HELP = '''Type a message and press Enter. """ starts and ends a message of several lines.
  /system TEXT   set the system prompt; without TEXT, show it
  /clear         forget the conversation
  /think on|off  turn reasoning before the answer on or off
  /stats         time to first token and speed of the last answer
  /save FILE     save the conversation as JSON
  /load FILE     continue a saved one
  /exit          leave (or Ctrl-D)
Ctrl-C stops an answer, not the program.'''

Message = dict[str, str]
REPLY_TIMEOUT_S = 600.0


class ChatModel(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def num_tokens(self) -> int | None:
        """The tokens of the last answer, if it was complete."""

    def stream(self, messages: list[Message], thinking: bool | None) -> Generator[tuple[str, bool]]:
        """Pieces of the answer, each with whether it is reasoning."""


@dataclass(frozen=True, slots=True)
class AnswerStats:
    first_piece_s: float
    total_s: float
    num_pieces: int
    num_tokens: int | None

    def __str__(self) -> str:
        count, unit = (
            (self.num_tokens, "tokens") if self.num_tokens else (self.num_pieces, "pieces")
        )
        after_first_s = self.total_s - self.first_piece_s
        speed = (count - 1) / after_first_s if count > 1 and after_first_s > 0 else 0.0
        return (
            f"first token after {self.first_piece_s * 1000:.0f} ms, then {speed:.1f} {unit}/s "
            f"({count} {unit} in {self.total_s:.2f} s)"
        )


class StopSwitch:
    """Ctrl-C during an answer: noticed between two pieces, so that no engine step is interrupted.

    The second Ctrl-C raises at once, in case no piece ever comes.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._previous: Any = None

    def __enter__(self) -> StopSwitch:
        self._previous = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *unused: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _press(self, number: int, frame: FrameType | None) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True


@dataclass(slots=True)
class Conversation:
    """The messages so far and the settings that slash commands change."""

    model: ChatModel
    messages: list[Message] = field(default_factory=list)
    system: str = ""
    thinking: bool | None = None
    stats: AnswerStats | None = None

    def answer(self, text: str) -> None:
        """Prints the answer to `text`; both join the conversation unless the model failed."""
        asked = [*self.messages, {"role": "user", "content": text}]
        instructions = [{"role": "system", "content": self.system}] if self.system else []
        with StopSwitch() as stop:
            answer = self._show(self.model.stream(instructions + asked, self.thinking), stop)
        self.messages = [*asked, {"role": "assistant", "content": answer}]

    def _show(self, pieces: Generator[tuple[str, bool]], stop: StopSwitch) -> str:
        answer = ""
        was_reasoning = False
        num_pieces = 0
        started = first = time.perf_counter()
        with contextlib.closing(pieces), contextlib.suppress(KeyboardInterrupt):
            for piece, is_reasoning in pieces:
                first = first if num_pieces else time.perf_counter()
                num_pieces += 1
                answer += "" if is_reasoning else piece
                if was_reasoning and not is_reasoning:
                    print("\n")
                was_reasoning = is_reasoning
                print(
                    paint(piece, "dim", sys.stdout) if is_reasoning else piece, end="", flush=True
                )
                if stop.is_set:
                    break
        print(paint(" [stopped]", "dim", sys.stdout) if stop.is_set else "", flush=True)
        ended = time.perf_counter()
        self.stats = AnswerStats(
            first - started, ended - started, num_pieces, self.model.num_tokens
        )
        return answer

    def command(self, line: str) -> None:
        """Runs one slash command. /exit raises EOFError, as Ctrl-D does."""
        name, _, rest = line[1:].partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: print(HELP),
            "system": self._system,
            "clear": self._clear,
            "think": self._think,
            "stats": lambda _: print(self.stats or "There is no answer yet."),
            "save": self._save,
            "load": self._load,
            "exit": _leave,
        }
        if name not in commands:
            raise PenstockError(
                f"/{name} is not a command", nearest(name, commands), "/help lists them."
            )
        commands[name](rest.strip())

    def _system(self, text: str) -> None:
        self.system = text or self.system
        print(f"system: {self.system}" if self.system else "There is no system prompt.")

    def _clear(self, _: str) -> None:
        self.messages = []
        print("The conversation is cleared.")

    def _think(self, choice: str) -> None:
        if choice not in ("on", "off"):
            raise PenstockError(
                f"/think does not take {choice!r}" if choice else "/think needs on or off",
                todo="Type /think on or /think off.",
            )
        self.thinking = choice == "on"
        print(f"Reasoning is {choice}.")

    def _save(self, path: str) -> None:
        _require_path("save", path)
        saved = {"system": self.system, "messages": self.messages}
        with _file_errors(path, "written", "Choose a writable file: /save talk.json"):
            Path(path).expanduser().write_text(
                json.dumps(saved, indent=2, ensure_ascii=False) + "\n"
            )
        print(f"Saved {len(self.messages)} messages to {path}.")

    def _load(self, path: str) -> None:
        _require_path("load", path)
        with _file_errors(path, "read", "Choose a file that /save wrote: /load talk.json"):
            saved = json.loads(Path(path).expanduser().read_text())
            messages = [{"role": m["role"], "content": m["content"]} for m in saved["messages"]]
            self.system, self.messages = saved.get("system", ""), messages
        print(f"Loaded {len(self.messages)} messages from {path}.")


def _leave(_: str) -> None:
    raise EOFError


def _require_path(command: str, path: str) -> None:
    if not path:
        raise PenstockError(
            f"/{command} needs a file",
            "The command has no file name.",
            f"Add one: /{command} talk.json",
        )


@contextlib.contextmanager
def _file_errors(path: str, done: str, todo: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PenstockError(
            f"{path} cannot be {done}", f"{error.strerror or error}.", todo
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise PenstockError(
            f"{path} is not a saved conversation", "It was not written by /save."
        ) from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--base-url",
        metavar="URL",
        help="use this server instead of loading a model; PENSTOCK_API_KEY has its key",
    )
    parser.add_argument(
        "--web", action="store_true", help="chat in a browser: serve the model and open its page"
    )
    parser.add_argument("--system", metavar="TEXT", default="", help="system prompt")
    add_sampling_flags(parser, skip=("n", "logprobs"))
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.web:
        return _talk_in_browser(arguments)
    conversation = Conversation(_open_model(arguments), system=arguments.system)
    if sys.stdin.isatty():
        print(f"{conversation.model.name}: type a message; /help lists commands, Ctrl-D leaves.")
        with _line_history():
            return _converse(conversation, ">>> ", "... ")
    return _converse(conversation, "", "")


def _talk_in_browser(arguments: argparse.Namespace) -> int:
    from penstock.commands.serve import open_page, serve

    sampling = given_sampling(arguments)
    unknown = [name for name in sampling if name not in SAMPLING_NAMES]
    if arguments.system or unknown or (arguments.base_url and sampling):
        given = (
            "--system"
            if arguments.system
            else f"--{next(iter(unknown or sampling)).replace('_', '-')}"
        )
        raise UsageError(
            f"{given} and --web are both given",
            "The page has its own settings.",
            f"Leave {given} out, and set it on the page.",
        )
    if arguments.base_url:
        open_page(arguments.base_url).join()
        return 0
    settings = {**read_settings(ServeConfig, arguments), **sampling}
    engine_config: EngineConfig = from_mapping(EngineConfig, read_settings(EngineConfig, arguments))
    serve(engine_config, from_mapping(ServeConfig, settings), is_opened=True)
    return 0


def _open_model(arguments: argparse.Namespace) -> ChatModel:
    if arguments.base_url:
        return RemoteModel(
            arguments.base_url, getattr(arguments, "model", ""), given_sampling(arguments)
        )
    read_sampling(arguments)  # check these before the weights are loaded
    llm = load_llm(arguments)
    return LocalModel(llm, read_sampling(arguments, llm.sampling_defaults))


def _converse(conversation: Conversation, prompt: str, more_prompt: str) -> int:
    """Reads and answers until the input ends. An error ends the turn; without a terminal, all."""
    while True:
        try:
            text = read_message(prompt, more_prompt)
            if text.startswith("/"):
                conversation.command(text)
            elif text.strip():
                conversation.answer(text)
        except EOFError:
            print(end="\n" if prompt else "")
            return 0
        except KeyboardInterrupt:
            if not prompt:
                raise
            print("\nCtrl-D leaves.")
        except PenstockError as error:
            if not prompt:
                raise
            print_error(error)


def read_message(prompt: str, more_prompt: str) -> str:
    '''One line, or everything between two """.'''
    text = input(prompt)
    if not text.startswith('"""'):
        return text
    text = text.removeprefix('"""')
    while '"""' not in text:
        text += "\n" + input(more_prompt)
    return text.partition('"""')[0].strip("\n")


@contextlib.contextmanager
def _line_history() -> Iterator[None]:
    """Line editing; the up key recalls lines of earlier conversations."""
    import readline

    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    path = state / "penstock" / "chat_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(1000)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)


@dataclass(slots=True)
class RemoteModel:
    """A model on a server. `num_tokens` of the last answer is the server's count."""

    base_url: str
    name: str = ""
    sampling: dict[str, Any] = field(default_factory=dict)
    num_tokens: int | None = None
    _client: HttpClient = field(init=False)

    def __post_init__(self) -> None:
        self._client = HttpClient(self.base_url, timeout_s=REPLY_TIMEOUT_S)
        if not self.name:
            self.name = self._client.first_model()

    def stream(
        self, messages: list[dict[str, str]], thinking: bool | None
    ) -> Generator[tuple[str, bool]]:
        """Pieces of the answer, each with whether it is reasoning."""
        body: dict[str, Any] = {"model": self.name, "messages": messages, **self.sampling}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": thinking}
        self.num_tokens = None
        with contextlib.closing(self._client.events("/v1/chat/completions", body)) as chunks:
            for chunk in chunks:
                if chunk.get("usage"):
                    self.num_tokens = chunk["usage"]["completion_tokens"]
                for choice in chunk.get("choices", ()):
                    delta = choice.get("delta", {})
                    if delta.get("reasoning_content"):
                        yield delta["reasoning_content"], True
                    if delta.get("content"):
                        yield delta["content"], False
