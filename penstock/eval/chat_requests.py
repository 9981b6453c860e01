"""The requests of a load and their JSON: chats or raw prompts, streamed or not, with an exact reply
length or not.

Also reads the server's model, its context limit, and its token counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import PenstockError
from penstock.http_client import HttpClient

NO_THINKING = '{"chat_template_kwargs": {"enable_thinking": false}}'
UNLISTED_MODEL = "default"  # for a server that lists no models and accepts any name


def listed_model(client: HttpClient) -> str:
    """The first model that the server lists."""
    status, _ = client.read("GET", "/v1/models")
    return client.first_model() if status == 200 else UNLISTED_MODEL


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a load. `answer`: the number that a spot check's reply must end with."""

    prompt: str
    max_tokens: int
    num_prompt_tokens: int | None = None  # as generated; None if only the server can count
    at_s: float = 0.0  # since the start of the load, if requests have their own times
    answer: int | None = None


class ChatRequests:
    """A server's chat completions, with the fields that all requests of a load share.

    Replies are greedy unless `extra` sets a temperature, and only max_tokens ends them unless they
    `may_end`.
    """

    path = "/v1/chat/completions"
    is_raw = False

    def __init__(
        self,
        base_url: str,
        model: str = "",
        *,
        extra: Mapping[str, Any],
        timeout_s: float,
        may_end: bool = False,
        is_stream: bool = True,
    ) -> None:
        self.client = HttpClient(base_url, timeout_s=timeout_s)
        self.model = model or listed_model(self.client)
        self.timeout_s = timeout_s
        self._extra = dict(extra)
        self._common: dict[str, Any] = {} if may_end else {"ignore_eos": True}
        if is_stream:
            self._common |= {"stream": True, "stream_options": {"include_usage": True}}

    def max_model_len(self) -> int | None:
        """The longest context, if the server's list of models has it."""
        if self.model == UNLISTED_MODEL:
            return None
        cards = (card for card in self.client.models() if card.get("id") == self.model)
        limit = next(cards, {}).get("max_model_len")
        return limit if isinstance(limit, int) else None

    def kv_tokens(self) -> int | None:
        """How many tokens the server's caches hold, if its metrics have it."""
        return int(self.client.metric("penstock_kv_tokens") or 0) or None

    def body(self, request: Request) -> bytes:
        fields = self._fields(request.prompt) | {"max_tokens": request.max_tokens}
        return json.dumps(fields | self._common | self._extra).encode()

    def count_tokens(self, prompt: str) -> int:
        """A prompt's length as the server counts it, with the chat template: requests one token."""
        answer = self.client.json(
            "POST", self.path, self._fields(prompt) | self._extra | {"max_tokens": 1}
        )
        try:
            return int(answer["usage"]["prompt_tokens"])
        except (LookupError, TypeError, ValueError) as error:
            raise PenstockError(
                f"{self.client.base_url} does not report the tokens of a prompt",
                f"usage.prompt_tokens is missing in {json.dumps(answer)[:200]}.",
                "Point --base-url at a server with the OpenAI API.",
            ) from error

    def _fields(self, prompt: str) -> dict[str, Any]:
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
        }


class RawRequests(ChatRequests):
    """A server's completions of raw prompts, without a template: as long as their text."""

    path = "/v1/completions"
    is_raw = True

    def _fields(self, prompt: str) -> dict[str, Any]:
        return {"model": self.model, "prompt": prompt, "temperature": 0}
