"""Finds a tokenizer to count a server's tokens with: the named one, one on this machine, the
server's.

A folder on this machine is found from the server's model list: `root`, as vLLM writes it, the
model's name if it is a folder, the embedded model, or the cache of the Hugging Face hub. The
server's own `POST /tokenize` is the last resort: it is not an independent count.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError
from penstock.eval.recount import TokenCounter
from penstock.http_client import HttpClient

ASSETS = Path(__file__).resolve().parent.parent / "assets"
HOW_TO_VERIFY = "Use --tokenizer FOLDER, the folder of the served model with its tokenizer.json."


class ServerCounter:
    """Counts with a server's `POST /tokenize`, after a level, so that no request waits for it."""

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


@dataclass(frozen=True, slots=True)
class FoundTokenizer:
    """`source` says where the counts come from."""

    local: TokenCounter | None = None
    server: ServerCounter | None = None
    source: str = ""

    @property
    def counter(self) -> TokenCounter | ServerCounter | None:
        return self.local or self.server


def find_tokenizer(given: str | None, client: HttpClient, model: str) -> FoundTokenizer:
    folder = given or find_folder(client, model)
    if folder is not None:
        return FoundTokenizer(TokenCounter.load(folder), source=folder)
    server = ServerCounter(client, model)
    try:
        probe = [{"role": "user", "content": "one two"}]
        can_count = 0 < server.count_text("one two") < server.count_prompt(probe)
    except PenstockError:
        can_count = False
    if can_count:
        return FoundTokenizer(server=server, source="the server's own /tokenize")
    return FoundTokenizer()


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
