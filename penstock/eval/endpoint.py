"""A server with the OpenAI API as a function: one conversation in, one reply out, over HTTP.

Works with any server; a value is None if its metric is missing.
"""

from __future__ import annotations

import json
from typing import Any

from penstock.errors import PenstockError
from penstock.eval.conversation import Conversation, Message
from penstock.eval.reply import Reply
from penstock.http_client import HttpClient

MAX_REPLY_TOKENS = 512
TIMEOUT_S = 300.0

DRAFTED, ACCEPTED = "penstock_draft_tokens_total", "penstock_draft_tokens_accepted_total"


class Endpoint:
    """A server behind a URL. Thread-safe: every call has its own connection."""

    def __init__(self, base_url: str, model: str = "") -> None:
        self._client = HttpClient(base_url, timeout_s=TIMEOUT_S)
        self.model = model or self._client.first_model()

    def ask(self, conversation: Conversation) -> Reply:
        """The server's greedy last turn of the conversation."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [_as_sent(message) for message in conversation.prompt],
            "temperature": 0,
            "max_tokens": MAX_REPLY_TOKENS,
            "chat_template_kwargs": {"enable_thinking": conversation.enable_thinking},
        }
        if conversation.tools:
            body["tools"] = conversation.tools
        answer = self._client.json("POST", "/v1/chat/completions", body)
        try:
            choice = answer["choices"][0]
            return Reply.from_message(
                choice["message"],
                choice.get("finish_reason") or "",
                is_thinking=conversation.enable_thinking,
                tools=conversation.tools,
            )
        except (LookupError, TypeError, AttributeError) as error:
            raise PenstockError(
                f"{self._client.base_url} answered a chat completion without a message",
                f"{type(error).__name__}: {error}, in {json.dumps(answer)[:200]}.",
                "Point --base-url at a server with the OpenAI API.",
            ) from error

    def draft_counts(self) -> tuple[float, float] | None:
        """How many tokens the server has drafted with the MTP head, and how many were accepted;
        None if its metrics do not say, or if it does not draft.
        """
        drafted, accepted = self._client.metric(DRAFTED), self._client.metric(ACCEPTED)
        return None if drafted is None or accepted is None else (drafted, accepted)


def _as_sent(message: Message) -> Message:
    """The message as the API expects it: the arguments of a call are a string."""
    if "tool_calls" not in message:
        return message
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"]),
            },
        }
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}
