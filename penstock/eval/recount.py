"""Recounts a server's tokens with the model's tokenizer.json and its chat template.

Shares no code with any server, ours included: with the same functions it would repeat the same
mistakes.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import minijinja
import tokenizers

from penstock.errors import PenstockError
from penstock.http_client import HttpClient

TEMPLATE = "chat"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what half a character decodes to


@dataclass(frozen=True, slots=True)
class Recount:
    """Tokens of a reply: as the server claims, and as counted in its text and end of turn."""

    claimed: int
    counted: int

    @property
    def verified(self) -> int:
        """The count that both agree on."""
        return min(self.claimed, self.counted)

    @property
    def is_off(self) -> bool:
        """A model may split text differently from a tokenizer; 3 % are tolerated."""
        return abs(self.claimed - self.counted) > max(2, 0.03 * self.counted)


class ReplyCounter(Protocol):
    """Counts the tokens of a text, and of a prompt with its template."""

    def count_text(self, text: str, /) -> int: ...

    def count_prompt(self, messages: Sequence[Mapping[str, Any]], /) -> int: ...


def recount_reply(counter: ReplyCounter, text: str, claimed: int, finish_reason: str) -> Recount:
    """A reply that ended by itself has an end token after its text, which servers may count."""
    counted = counter.count_text(text)
    has_end = finish_reason == "stop" and claimed > counted
    return Recount(claimed, counted + has_end)


class TokenCounter:
    """A tokenizer and, if the folder has one, a chat template, with thinking off."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, template: minijinja.Environment | None
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._added_ids = frozenset(tokenizer.get_added_tokens_decoder())
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=False)

    @classmethod
    def load(cls, path: str) -> TokenCounter:
        """From a folder with tokenizer.json, or from that file; the template is beside it."""
        given = Path(path).expanduser()
        file = given / "tokenizer.json" if given.is_dir() else given
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception for everything
            raise PenstockError(
                f"--tokenizer {path} cannot be read",
                f"{file}: {error}.",
                "Use the folder of the served model, with its tokenizer.json.",
            ) from error
        return cls(tokenizer, _load_template(file.parent))

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def is_plain(self, token_id: int) -> bool:
        """Whether the token stands for whole characters and is not a control token."""
        if token_id in self._added_ids:
            return False
        text = self.decode([token_id])
        return bool(text) and REPLACEMENT not in text and text.isprintable()

    def count_text(self, text: str) -> int:
        return len(self.encode(text))

    def count_prompt(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """Tokens of the whole prompt and generation prompt; without a template, of the text."""
        if self._template is None:
            return sum(self.count_text(str(message["content"])) for message in messages)
        try:
            text = self._template.render_template(
                TEMPLATE, messages=list(messages), add_generation_prompt=True, enable_thinking=False
            )
        except minijinja.TemplateError as error:
            raise PenstockError(
                "The chat template of --tokenizer cannot render a prompt", f"{error}."
            ) from error
        return self.count_text(text)


def _read(file: Path, parse: Callable[[str], Any] = str) -> Any:
    try:
        return parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PenstockError(
            f"{file} cannot be read", f"{type(error).__name__}: {error}."
        ) from error


def _read_config(file: Path) -> dict[str, Any]:
    config = _read(file, json.loads)
    if not isinstance(config, dict):
        raise PenstockError(f"{file} cannot be read", f"It is a JSON {type(config).__name__}.")
    return config


def _load_template(folder: Path) -> minijinja.Environment | None:
    file = folder / "tokenizer_config.json"
    config = _read_config(file) if file.is_file() else {}
    if (file := folder / "chat_template.jinja").is_file():
        source = _read(file)
    elif isinstance(config.get("chat_template"), str):
        source = config["chat_template"]
    else:
        return None
    special = {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in config.items()
        if name.endswith("_token") and isinstance(token, str | dict)
    }
    environment = minijinja.Environment(
        globals={**special, "raise_exception": _refuse, "strftime_now": _strftime_now},
        filters={"tojson": lambda value, **options: json.dumps(value, ensure_ascii=False)},
        trim_blocks=True,
        lstrip_blocks=True,
        pycompat=True,
    )
    try:
        environment.add_template(TEMPLATE, source)
    except minijinja.TemplateError as error:
        raise PenstockError(
            f"The chat template in {folder} cannot be compiled", f"{error}."
        ) from error
    return environment


def _refuse(message: str) -> None:
    raise PenstockError("The chat template refused the messages", str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


ASSETS = Path(__file__).resolve().parent.parent / "assets"
HOW_TO_VERIFY = "Use --tokenizer FOLDER, the folder of the served model with its tokenizer.json."


class ServerCounter:
    """Counts with a server's `POST /tokenize`, between levels, so that no request waits for it."""

    def __init__(self, client: HttpClient, model: str) -> None:
        self._client = client
        self._model = model

    def count_text(self, text: str, /) -> int:
        if not text:
            return 0
        return self._count({"prompt": text, "add_special_tokens": False})

    def count_prompt(self, messages: Sequence[Mapping[str, Any]], /) -> int:
        return self._count(
            {
                "messages": list(messages),
                "add_generation_prompt": True,
                "chat_template_kwargs": {"enable_thinking": False},
            }
        )

    def _count(self, body: Mapping[str, Any]) -> int:
        answer = self._client.json("POST", "/tokenize", {"model": self._model, **body})
        try:
            return int(answer["count"]) if "count" in answer else len(answer["tokens"])
        except (LookupError, TypeError, ValueError) as error:
            raise PenstockError(
                f"{self._client.base_url}/tokenize does not count tokens",
                f"count and tokens are missing in {str(answer)[:200]}.",
                HOW_TO_VERIFY,
            ) from error


def find_tokenizer(
    given: str | None, client: HttpClient, model: str
) -> tuple[ReplyCounter | None, str]:
    """The given tokenizer, one on this machine or, as a last resort, the server's own
    `POST /tokenize`: its count is not independent. Also says where the counts come from.

    A folder on this machine is found from the server's model list: `root`, as vLLM writes it, the
    model's name if it is a folder, the embedded model, or the cache of the Hugging Face hub.
    """
    folder = given or find_folder(client, model)
    if folder is not None:
        return TokenCounter.load(folder), folder
    server = ServerCounter(client, model)
    try:
        probe = [{"role": "user", "content": "one two"}]
        can_count = 0 < server.count_text("one two") < server.count_prompt(probe)
    except PenstockError:
        can_count = False
    return (server, "the server's own /tokenize") if can_count else (None, "")


def find_folder(client: HttpClient, model: str) -> str | None:
    """The served model's folder, if this machine has it."""
    found = (
        folder for folder in _local_folders(client, model) if (folder / "tokenizer.json").is_file()
    )
    return next(map(str, found), None)


def _local_folders(client: HttpClient, model: str) -> Iterator[Path]:
    names = [model]
    with contextlib.suppress(PenstockError):  # a server without a list of models
        names += [
            card["root"] for card in client.models() if card.get("id") == model and card.get("root")
        ]
    for name in reversed(names):
        if os.sep in name:
            yield Path(name).expanduser()
        if "/" not in name:
            yield ASSETS / name
        elif name.count("/") == 1:
            hub = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "hub"
            snapshots = hub / f"models--{name.replace('/', '--')}" / "snapshots"
            yield from sorted(snapshots.glob("*"))
