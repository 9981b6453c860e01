"""Anthropic's threads: a reply's id stands for the conversation up to it, with its tools and system
prompt.

`{"type": "create"}` starts one; `{"type": "continue", "previous_message_id"}` sends only what is
new. A thread is a session (conversations.py) named by its last reply's id: the same limits apply,
and a failed reply changes nothing. A reply can be continued once. SDKs read the `details` of these
errors, and send the whole conversation again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from penstock.errors import RequestError
from penstock.serve.conversations import Conversations, Key, Thread

REPLAY = 'Send the whole conversation with thread {"type": "create"}.'


class ThreadUnsupportedError(RequestError):
    """SDKs then continue without a thread."""

    details: ClassVar[dict[str, Any]] = {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }


class ThreadNotFoundError(RequestError):
    status = 404
    details: ClassVar[dict[str, Any]] = {"error_code": "thread_not_found"}


class ThreadAlreadyContinuedError(RequestError):
    details: ClassVar[dict[str, Any]] = {"error_code": "thread_already_continued"}


class ThreadInFlightError(RequestError):
    details: ClassVar[dict[str, Any]] = {"error_code": "thread_continue_in_flight"}


class Threads:
    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations
        self._in_flight: set[Key] = set()

    def find(self, asked: dict[str, Any], tenant: str) -> Thread:
        """The thread that the field `thread` of a request names."""
        if not self._conversations.is_keeping:
            raise ThreadUnsupportedError(
                "thread is not supported",
                "--session-mb is 0: no messages are kept.",
                param="thread",
            )
        previous = asked.get("previous_message_id")
        if asked.get("type") == "create":
            return Thread()
        if asked.get("type") != "continue" or not isinstance(previous, str):
            raise RequestError(
                "thread has neither of the two forms",
                'The forms are {"type": "create"} and {"type": "continue", "previous_message_id": '
                '"…"}.',
                param="thread",
            )
        return self._continue((tenant, previous))

    def _continue(self, key: Key) -> Thread:
        thread = self._conversations.thread(key)
        if thread is not None:
            return thread
        if self._conversations.why_ended(key) == "deleted":  # the next reply's session replaced it
            raise ThreadAlreadyContinuedError(
                f"{key[1][:64]!r} has already been continued",
                "A reply can be continued once.",
                REPLAY,
                param="thread",
            )
        raise ThreadNotFoundError(
            f"No thread has the reply {key[1][:64]!r}",
            "Threads are kept as sessions are: for --session-minutes, in --session-mb of memory.",
            REPLAY,
            param="thread",
        )

    @contextmanager
    def continuing(self, thread: Thread) -> Iterator[None]:
        """While it is answered, no other request may continue the same reply."""
        if thread.previous is None:
            yield
            return
        if thread.previous in self._in_flight:
            raise ThreadInFlightError(
                f"{thread.previous[1][:64]!r} is being continued",
                "A reply can be continued once.",
                f"Wait for the other request. {REPLAY}",
                param="thread",
            )
        self._in_flight.add(thread.previous)
        try:
            yield
        finally:
            self._in_flight.discard(thread.previous)
