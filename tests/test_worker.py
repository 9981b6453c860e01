"""The engine process accepts requests without delaying running replies."""

from __future__ import annotations

import queue
import time
from typing import Any

import pytest

from penstock.engine import worker
from penstock.engine.worker import StepClock, serve
from penstock.types import Request, TokenDelta
from penstock.wire import Shutdown, Submit, ToEngine

SLOW_S = 0.002


class SlowIntake:
    """An engine that takes a while for each request, as for one of 64k tokens, and ends after 40
    steps.
    """

    def __init__(self, inbox: queue.SimpleQueue[ToEngine], num_running: int) -> None:
        self._inbox = inbox
        self._num_left = num_running
        self.num_submitted: list[int] = [0]  # before each step

    @property
    def has_work(self) -> bool:
        return self._num_left > 0

    def submit(self, request: Request) -> None:
        time.sleep(SLOW_S)
        self._num_left += 1
        self.num_submitted[-1] += 1

    def step(self) -> list[TokenDelta]:
        self.num_submitted.append(0)
        if len(self.num_submitted) > 40:
            self._num_left = 0
            self._inbox.put(Shutdown())
        return []


def submitted_before_each_step(num_running: int, num_requests: int) -> list[int]:
    inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
    for number in range(num_requests):
        inbox.put(Submit(Request(id=str(number), token_ids=(1,))))
    engine: Any = SlowIntake(inbox, num_running)
    channel: Any = None
    serve(engine, channel, inbox, StepClock())
    counts: list[int] = engine.num_submitted
    return counts


def test_a_crowd_is_taken_in_bit_by_bit_while_replies_go_on() -> None:
    counts = submitted_before_each_step(num_running=1, num_requests=60)
    assert max(counts) <= worker.MAX_INTAKE_S / SLOW_S + 1
    assert sum(counts) == 60


def test_an_idle_engine_takes_in_what_has_come_before_it_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "MAX_INTAKE_S", 60.0)  # whatever other load the machine has
    counts = submitted_before_each_step(num_running=0, num_requests=3)
    assert counts[0] == 3
