"""The parent's side of the process that runs chat templates: start it, ask it, replace it when it dies.

Owns that process, its socket and what its death means. Knows nothing of templates: a task goes in, an answer
or a `Failure` comes out. One process serves every template of ours, one task at a time; it is started by the
first task and ends with us, because its socket closes.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import threading
import time
from typing import Any

import msgspec

from penstock.child_python import module_command

MEMORY_LIMIT_BYTES = 256 * 1024 * 1024
# A limit of CPU seconds comes with each task. This one is of the wall clock, for a machine that stands still.
PATIENCE_S = 10.0

_LENGTH_BYTES = 4


class Failure(msgspec.Struct, frozen=True):
    """Why there is no answer. `kind` is minijinja's name of an error, or one of OutOfMemory, OutOfTime, Died,
    Refused, BadValue and TooLong."""

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


class TemplateProcess:
    """Safe to use from several threads; they wait for each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: _Child | None = None

    def ask(self, task: dict[str, Any]) -> Answer:
        payload = msgspec.json.encode(task)
        frame = len(payload).to_bytes(_LENGTH_BYTES, "big") + payload
        with self._lock:
            answer = self._try(frame)
            if answer.failure is not None and answer.failure.kind == "Died":  # before the task came, perhaps
                answer = self._try(frame)
            return answer

    def _try(self, frame: bytes) -> Answer:
        if self._child is None:
            try:
                self._child = _Child()
            except OSError as error:
                return Answer(failure=Failure("Died", f"it did not start: {error}"))
        try:
            payload = self._child.exchange(frame, time.monotonic() + PATIENCE_S)
        except TimeoutError:
            self._end()
            return Answer(failure=Failure("OutOfTime", f"{PATIENCE_S:g} s of the clock"))
        except (OSError, EOFError):
            return Answer(failure=_cause_of_death(self._end()))
        except BaseException:  # Ctrl-C: an answer is on its way that nobody will read
            self._end()
            raise
        return msgspec.json.decode(payload, type=Answer)

    def _end(self) -> int:
        """The exit status of the child, which is gone or killed; the next task starts another."""
        child, self._child = self._child, None
        assert child is not None
        return child.end()

    def close(self) -> None:
        with self._lock:
            if self._child is not None:
                self._end()

    def forget(self) -> None:
        """In a process that was forked off: the child and the lock belong to the parent."""
        self._lock = threading.Lock()
        self._child = None


class _Child:
    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                module_command("penstock.text.template_worker", str(MEMORY_LIMIT_BYTES)),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # the terminal's Ctrl-C reaches us only
            )

    def exchange(self, frame: bytes, deadline: float) -> bytearray:
        self._set_timeout(deadline)
        self._socket.sendall(frame)
        num_bytes = int.from_bytes(self._read(_LENGTH_BYTES, deadline), "big")
        return self._read(num_bytes, deadline)

    def _read(self, num_bytes: int, deadline: float) -> bytearray:
        data = bytearray(num_bytes)
        rest = memoryview(data)
        while rest:
            self._set_timeout(deadline)
            num_read = self._socket.recv_into(rest)
            if num_read == 0:
                raise EOFError
            rest = rest[num_read:]
        return data

    def _set_timeout(self, deadline: float) -> None:
        self._socket.settimeout(max(deadline - time.monotonic(), 0.001))

    def end(self) -> int:
        """What it died of: if its socket has closed, that is settled, and killing changes nothing."""
        self.process.kill()
        self._socket.close()
        return self.process.wait()


def _cause_of_death(status: int) -> Failure:
    if status == -signal.SIGABRT:  # what Rust does without memory
        return Failure("OutOfMemory")
    if status == -signal.SIGPROF:
        return Failure("OutOfTime")
    status_name = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return Failure("Died", f"it ended with {status_name}")


shared_process = TemplateProcess()
atexit.register(shared_process.close)
os.register_at_fork(after_in_child=shared_process.forget)
