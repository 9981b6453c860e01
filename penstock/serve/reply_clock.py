"""When a request arrived, and when its first and last tokens came: some APIs report these to
clients.
"""

from __future__ import annotations

import time

from penstock.serve.text_stream import Deliver, ReplyDelta


class ReplyClock:
    """In nanoseconds. Time in the queue counts for the prompt."""

    def __init__(self) -> None:
        self._asked = self._began = self._ended = time.perf_counter_ns()
        self._has_begun = False

    def before(self, deliver: Deliver) -> Deliver:
        def note_and_deliver(delta: ReplyDelta) -> None:
            self._ended = time.perf_counter_ns()
            if not self._has_begun:
                self._has_begun, self._began = True, self._ended
            deliver(delta)

        return note_and_deliver

    @property
    def prompt_ns(self) -> int:
        return self._began - self._asked

    @property
    def reply_ns(self) -> int:
        """Never 0: clients divide by it."""
        return max(1, self._ended - self._began)

    @property
    def total_ns(self) -> int:
        return self.prompt_ns + self.reply_ns
