"""How the requests of a load are spelled: chats or raw prompts, streamed, of an exact length or not, as JSON.

Also asks the server what such requests need to know first: its model, its limit, and how it counts tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from penstock.errors import PenstockError
from penstock.http_client import HttpClient

UNLISTED_MODEL = "default"  # what a server is sent that lists no models and takes any name


def listed_model(client: HttpClient) -> str:
    """The first model that the server lists."""
    status, _ = client.read("GET", "/v1/models")
    return client.first_model() if status == 200 else UNLISTED_MODEL


class ChatRequests:
    """A server's chat completions, with the fields that every request of a load has."""

    path = "/v1/chat/completions"

    def __init__(self, base_url: str, model: str = "", *, extra: Mapping[str, Any], timeout_s: float) -> None:
        self.client = HttpClient(base_url, timeout_s=timeout_s)
        self.model = model or listed_model(self.client)
        self._extra = dict(extra)

    def max_model_len(self) -> int | None:
        """The longest context, where the server's list of models says it."""
        if self.model == UNLISTED_MODEL:
            return None
        listed = self.client.json("GET", "/v1/models")
        cards = listed.get("data") if isinstance(listed, dict) else None
        for card in cards or ():
            if isinstance(card, dict) and card.get("id") == self.model:
                limit = card.get("max_model_len")
                return limit if isinstance(limit, int) else None
        return None

    def kv_tokens(self) -> int | None:
        """How many tokens the caches of the server hold, where its metrics say it."""
        status, answer = self.client.read("GET", "/metrics")
        text = answer.decode("utf-8", "replace")
        found = re.findall(r"^penstock_kv_tokens\{.*\} (\d+)$", text, re.M) if status == 200 else []
        return sum(map(int, found)) or None

    def body(
        self, prompt: str, num_output_tokens: int, *, may_end: bool = False, is_stream: bool = True
    ) -> bytes:
        """Greedy unless the extra fields say otherwise. Only its limit ends a reply, unless it `may_end`."""
        length: dict[str, Any] = {"max_tokens": num_output_tokens}
        if not may_end:
            length["ignore_eos"] = True
        stream = {"stream": True, "stream_options": {"include_usage": True}} if is_stream else {}
        return json.dumps(self._fields(prompt) | length | stream | self._extra).encode()

    def count_tokens(self, prompt: str) -> int:
        """The length of a prompt as the server counts it, chat template included: asks for one token."""
        answer = self.client.json("POST", self.path, self._fields(prompt) | self._extra | {"max_tokens": 1})
        try:
            return int(answer["usage"]["prompt_tokens"])
        except (LookupError, TypeError, ValueError) as error:
            raise PenstockError(
                f"{self.client.base_url} does not say how many tokens a prompt has",
                f"There is no usage.prompt_tokens in {json.dumps(answer)[:200]}.",
                "Point --base-url at a server of the OpenAI API.",
            ) from error

    def _fields(self, prompt: str) -> dict[str, Any]:
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
        }


class RawRequests(ChatRequests):
    """A server's completions of raw prompts: no chat template, so that a prompt is as long as its text."""

    path = "/v1/completions"

    def _fields(self, prompt: str) -> dict[str, Any]:
        return {"model": self.model, "prompt": prompt, "temperature": 0}
