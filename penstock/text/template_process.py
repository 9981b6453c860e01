"""The parent's side of the processes that run chat templates: starts them, sends tasks, replaces
dead ones.

Owns the processes, their sockets and the meaning of exit codes. Knows nothing of templates: a task
goes in, an answer or a `Failure` comes out. A few processes serve all templates, each one task at a
time. The first task starts one, and others start only when all are busy; they end with this
process, because their sockets close. Cheap tasks overtake expensive ones (turns.py).
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from penstock.child_python import module_command
from penstock.text.turns import Turns, num_cpus

MEMORY_LIMIT_BYTES = 256 * 1024 * 1024  # of each process
MAX_PROCESSES = 4
# Each task has a limit of CPU seconds. This one limits wall-clock time, in case a machine stalls.
PATIENCE_S = 10.0
LOOK_S = 0.5  # how often to check a process that does not answer: it may have been stopped

_LENGTH_BYTES = 4


class Failure(msgspec.Struct, frozen=True):
    """Why there is no answer. `kind` is minijinja's name of an error, or one of OutOfMemory,
    OutOfTime, Died, Refused, BadValue and TooLong."""

    kind: str
    detail: str = ""
    line: int = 0

    @property
    def reason(self) -> str:
        return self.detail or self.kind


class Answer(msgspec.Struct, frozen=True):
    text: str = ""
    variables: tuple[str, ...] = ()
    failure: Failure | None = None


class TemplateProcesses:
    """Safe to use from several threads."""

    def __init__(self, max_processes: int) -> None:
        self._max_processes = max_processes
        self.forget()

    def forget(self) -> None:
        """In a forked process: the children and the locks belong to the parent."""
        self._turns = Turns(self._max_processes)
        self._lock = threading.Lock()
        self._idle: list[_Child] = []  # the last used at the end

    def ask(self, task: dict[str, Any]) -> Answer:
        payload = msgspec.json.encode(task)
        frame = len(payload).to_bytes(_LENGTH_BYTES, "big") + payload
        with self._turns.wait(len(frame)):
            answer = self._try(frame, self._take_idle())
            # The process may have died before the task arrived.
            if answer.failure is not None and answer.failure.kind == "Died":
                answer = self._try(frame, None)
            return answer

    def _try(self, frame: bytes, child: _Child | None) -> Answer:
        """Sends the task to this process, or to a new one. Ends a process that failed."""
        try:
            child = child or _Child()
        except OSError as error:
            return Answer(failure=Failure("Died", f"it did not start: {error}"))
        try:
            payload = child.exchange(frame, time.monotonic() + PATIENCE_S)
        except TimeoutError as error:
            child.end()
            return Answer(failure=Failure("Died", str(error)))
        except (OSError, EOFError):
            return Answer(failure=_cause_of_death(child.end()))
        except BaseException:  # Ctrl-C: the next task would read this one's answer
            child.end()
            raise
        with self._lock:
            self._idle.append(child)
        return msgspec.json.decode(payload, type=Answer)

    def _take_idle(self) -> _Child | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def close(self) -> None:
        """Ends the idle ones; the others end with this process."""
        while (child := self._take_idle()) is not None:
            child.end()

    @property
    def pids(self) -> list[int]:
        """The idle processes."""
        return [child.process.pid for child in self._idle]


class _Child:
    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                module_command("penstock.text.template_worker", str(MEMORY_LIMIT_BYTES)),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # the terminal's Ctrl-C reaches only the parent
            )

    def exchange(self, frame: bytes, deadline: float) -> bytearray:
        unsent = memoryview(frame)
        while unsent:
            unsent = unsent[self._wait(self._socket.send, unsent, deadline) :]
        num_bytes = int.from_bytes(self._read(_LENGTH_BYTES, deadline), "big")
        return self._read(num_bytes, deadline)

    def _read(self, num_bytes: int, deadline: float) -> bytearray:
        data = bytearray(num_bytes)
        rest = memoryview(data)
        while rest:
            num_read = self._wait(self._socket.recv_into, rest, deadline)
            if num_read == 0:
                raise EOFError
            rest = rest[num_read:]
        return data

    def _wait(
        self, transfer: Callable[[memoryview], int], data: memoryview, deadline: float
    ) -> int:
        """The number of bytes sent or received; raises TimeoutError if there will be none."""
        while True:
            left_s = deadline - time.monotonic()
            self._socket.settimeout(max(min(left_s, LOOK_S), 0.001))
            try:
                return transfer(data)
            except TimeoutError:
                if left_s <= LOOK_S:
                    raise TimeoutError(f"it did not answer within {PATIENCE_S:g} s") from None
                if self._is_stopped():
                    raise TimeoutError("it was stopped by a signal") from None

    def _is_stopped(self) -> bool:
        if not hasattr(os, "waitid"):  # macOS before Python 3.13: the time limit ends it
            return False
        looks = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.process.pid, looks) is not None

    def end(self) -> int:
        """Its exit status. If its socket has closed it is already dead, and kill has no effect."""
        self.process.kill()
        self._socket.close()
        return self.process.wait()


def _cause_of_death(status: int) -> Failure:
    if status == -signal.SIGABRT:  # Rust aborts if it gets no memory
        return Failure("OutOfMemory")
    if status == -signal.SIGPROF:
        return Failure("OutOfTime")
    status_name = (
        f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    )
    return Failure("Died", f"it ended with {status_name}")


# At least two: an expensive chat leaves one for others. Each may take MEMORY_LIMIT_BYTES.
shared_processes = TemplateProcesses(min(max(2, num_cpus()), MAX_PROCESSES))
atexit.register(shared_processes.close)
os.register_at_fork(after_in_child=shared_processes.forget)
