"""Processes that have imported torch before they start: forked from one that did, in a hundredth of
the time that the import takes.

A nursery is a process with one thread that has imported what servers and engines import. It forks
one process per order and makes it a child of the one that ordered it (CLONE_PARENT), with the
standard streams, the session and the command line that it would have if it had been executed; then
the program runs from its first line. A worker of pytest has a nursery for servers, and each of these
servers one for its engines. Where a nursery cannot serve (another environment, another system),
processes are executed as always.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import functools
import gc
import json
import os
import platform
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

CLONE_PARENT = 0x8000
CLONE_NUMBERS = {"x86_64": 56, "aarch64": 220}  # of the system call
PR_SET_PDEATHSIG = 1
MAX_ORDER_BYTES = 100_000
COMMAND_ROOM = 4000  # bytes for the command line of a process: a nursery's own is as long

is_forked = False  # whether a nursery made this process


class Child:
    """A process that a nursery forked: our child, like one from subprocess."""

    def __init__(self, pid: int, stdout: int | None = None) -> None:
        self.pid = pid
        self.stdout = None if stdout is None else os.fdopen(stdout)
        self._returncode: int | None = None
        self._lock = threading.Lock()
        self._exit = os.pidfd_open(pid)

    def __del__(self) -> None:
        os.close(self._exit)

    @property
    def returncode(self) -> int | None:
        with self._lock:
            if self._returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self._returncode = os.waitstatus_to_exitcode(status)
            return self._returncode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        waiting = select.poll()
        waiting.register(self._exit, select.POLLIN)
        if not waiting.poll(None if timeout is None else timeout * 1000):
            assert timeout is not None
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        code = self.returncode
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            signal.pidfd_send_signal(self._exit, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class AsyncChild(Child):
    """The same interface for asyncio."""

    async def wait(self) -> int:  # type: ignore[override]
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        watched = os.dup(self._exit)  # a loop has one reader per descriptor; several may wait
        loop.add_reader(watched, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(watched)
            os.close(watched)
        code = self.returncode
        assert code is not None
        return code


class Nursery:
    def __init__(self, orders: socket.socket, environment: Mapping[str, str]) -> None:
        self._orders = orders
        self._environment = dict(environment)
        self._lock = threading.Lock()

    def serves(self, environment: Mapping[str, str]) -> bool:
        """False if variables differ that imports may read: the nursery has imported everything
        already.
        """
        return _read_by_imports(environment) == _read_by_imports(self._environment)

    def start(
        self,
        command: list[str],
        streams: tuple[int, int, int],
        environment: Mapping[str, str],
        *,
        new_session: bool = False,
    ) -> int | None:
        """The new process's pid; None if the system refuses."""
        words = {"command": command, "cwd": os.getcwd(), "new_session": new_session}
        order = json.dumps({**words, "environment": dict(environment)})
        with self._lock:
            socket.send_fds(self._orders, [order.encode()], list(streams))
            answer = self._orders.recv(32)
        assert answer, "the nursery has ended"
        return int(answer) if int(answer) > 0 else None


def _read_by_imports(environment: Mapping[str, str]) -> dict[str, str]:
    """All variables, except those that pytest sets per test and libraries set themselves."""
    others = ("PYTEST_", "RAY_", "TORCHINDUCTOR_")
    return {name: value for name, value in environment.items() if not name.startswith(others)}


ENVIRONMENT = dict(os.environ)  # before any test changes it


@functools.cache
def nursery_of_this_process() -> Nursery | None:
    """The nursery of this process, created at the first call."""
    if sys.platform != "linux" or platform.machine() not in CLONE_NUMBERS:
        return None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), " " * COMMAND_ROOM],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=ENVIRONMENT,
            pass_fds=[theirs.fileno()],
        )
    atexit.register(_end, process, ours)
    return Nursery(ours, ENVIRONMENT)


def start_forked(command: list[str], log: IO[str] | None) -> Child | None:
    """Starts this command line in a process whose stdout is piped; None if no nursery serves it."""
    nursery = nursery_of_this_process()
    if nursery is None or not nursery.serves(os.environ):
        return None
    ours, theirs = os.pipe()
    null = os.open(os.devnull, os.O_RDONLY)  # no terminal, even if the tests run in one
    streams = null, theirs, 2 if log is None else log.fileno()
    pid = nursery.start(command, streams, os.environ)
    os.close(null)
    os.close(theirs)
    if pid is None:
        os.close(ours)
        return None
    return Child(pid, ours)


def fork_engines() -> None:
    """Makes this process, a server that a nursery forked, fork its engines the same way."""
    from penstock.serve import client

    execute, nursery = client._start_worker, fork_nursery()

    async def start_worker(
        words: Sequence[str], config: Any, environment: Mapping[str, str]
    ) -> AsyncChild | asyncio.subprocess.Process:
        variables = {**os.environ, **environment}
        if not nursery.serves(variables):
            return await execute(words, config, environment)
        theirs, ours = os.pipe()
        command = client.module_command("penstock.engine.worker", *words)
        pid = nursery.start(command, (theirs, 1, 2), variables, new_session=True)
        os.close(theirs)
        with open(ours, "wb") as stdin:
            if pid is None:
                return await execute(words, config, environment)
            stdin.write(msgspec.json.encode(config))
        return AsyncChild(pid)

    client._start_worker = start_worker  # type: ignore[assignment]


def _end(process: subprocess.Popen[bytes], orders: socket.socket) -> None:
    orders.close()
    process.wait()


def fork_nursery() -> Nursery:
    """Forks a nursery from this process, which a nursery forked: all imports are done already."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _rename(["nursery"])
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1):  # a reader of our stdout waits until all its copies are closed
            os.dup2(null, stream)
        _serve(theirs)
        os._exit(0)
    theirs.close()
    return Nursery(ours, os.environ)


def _serve(orders: socket.socket) -> None:
    while True:
        order, streams, _, _ = socket.recv_fds(orders, MAX_ORDER_BYTES, 3)
        if not order:
            return
        pid = _fork_a_sibling()
        if pid == 0:
            orders.close()
            _become(json.loads(order), streams)
        for stream in streams:
            os.close(stream)
        orders.send(str(pid).encode())


def _fork_a_sibling() -> int:
    """Like os.fork, but the new process is a child of our parent."""
    python = ctypes.PyDLL(None)  # holds the interpreter's lock meanwhile, as os.fork does
    python.PyOS_BeforeFork()
    flags = CLONE_PARENT | signal.SIGCHLD
    pid: int = python.syscall(CLONE_NUMBERS[platform.machine()], flags, 0, 0, 0, 0)
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return pid


def _become(order: dict[str, Any], streams: list[int]) -> None:
    """Runs the program of a command line, then exits."""
    global is_forked
    is_forked = True
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    if order["new_session"]:
        os.setsid()
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environment"])
    command: list[str] = order["command"]
    _rename(command)
    code: Any = 1
    try:
        if command[1] == "-P":  # penstock.child_python runs a module
            sys.argv = command[3:]
            runpy.run_module(command[3], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command[1:]
            runpy.run_path(command[1], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _rename(command: list[str]) -> None:
    """Makes /proc show this command line, by writing over the one that the system has placed in
    memory.
    """
    numbers = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(numbers[45]), int(numbers[46])
    words = b"".join(word.encode() + b"\0" for word in command)[: end - start - 1]
    ctypes.memmove(start, words.ljust(end - start, b"\0"), end - start)


def _import_all() -> None:
    """Imports what servers and engines import, except the modules that run as programs."""
    import openai  # noqa: F401
    import torch  # noqa: F401

    import penstock.engine.device
    import penstock.engine.engine
    import penstock.serve.server  # noqa: F401


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    gc.disable()
    _import_all()
    gc.collect()
    gc.freeze()  # so that no collection writes to memory that processes share
    gc.enable()
    _serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    import nursery  # the module that programs import, and not another one of the same file

    nursery.main()
