"""A conversation with a model behind a URL, for `penstock chat --base-url`.

Uses the part of the OpenAI API that a conversation needs: the model list and a streamed chat
completion.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from penstock.http_client import HttpClient

_TIMEOUT_S = 600.0


@dataclass(slots=True)
class RemoteModel:
    """A model behind a URL. `num_tokens` is the length of the last answer, as the server counted
    it."""

    base_url: str
    name: str = ""
    sampling: dict[str, Any] = field(default_factory=dict)
    num_tokens: int | None = None
    _client: HttpClient = field(init=False)

    def __post_init__(self) -> None:
        self._client = HttpClient(self.base_url, timeout_s=_TIMEOUT_S)
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
