"""Rank 0's view of the other ranks: starts their processes, sends them its plans, detects when one
dies or hangs, and ends them.

If a rank is lost the engine fails, because its shard of the weights is lost too. The error names
the rank and the reason. Ranks exit when their socket closes, so none outlives rank 0.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from penstock.child_python import module_command
from penstock.config import EngineConfig
from penstock.engine.rank_wire import (
    Begin,
    FromRank,
    RankArrived,
    RankChannel,
    RankFailed,
    RankPing,
    RankPong,
    ToRank,
)
from penstock.errors import EngineDeadError, PenstockError
from penstock.models.source import ModelSource
from penstock.wire import RANKS_PREFIX, new_socket_folder

THREADS = "OMP_NUM_THREADS"
PING_INTERVAL_S = 1.0
MAX_SILENCE_S = 10.0
MAX_START_SILENCE_S = 120.0  # loading libraries and compiling kernels hold the GIL
ARRIVE_TIMEOUT_S = 120.0
NOTICE_S = 3.0  # to wait for the reason of an error
EXIT_GRACE_S = 5.0


class RankGroup:
    def __init__(self, config: EngineConfig, folder: str | None = None) -> None:
        self.size = config.tp
        self.failure: PenstockError | None = None
        self.has_started = False
        # Called once, in a thread, when a rank fails: a collective may wait for it forever.
        self.on_failure: Callable[[PenstockError], None] = lambda _: None
        self._folder = Path(folder or new_socket_folder(RANKS_PREFIX))
        self._channels: dict[int, RankChannel] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._last_pong: dict[int, float] = {}
        self._arrived: set[int] = set()
        self._change = threading.Condition()
        self._closing = threading.Event()

    @property
    def meeting_file(self) -> Path:
        return self._folder / "meeting"

    @classmethod
    def start(
        cls, source: ModelSource, config: EngineConfig, folder: str | None = None
    ) -> RankGroup:
        """Returns when all ranks are connected and are loading their shards. `folder`: for their
        sockets; the caller removes it if this process is killed.
        """
        group = cls(config, folder)
        try:
            group._launch()
            path = None if source.path is None else str(source.path)
            meeting = str(group.meeting_file)
            group.send(Begin(source.name, path, dict(source.config), config, meeting))
            with group._change:
                others = set(range(1, group.size))
                group._change.wait_for(
                    lambda: group.failure or group._arrived == others, ARRIVE_TIMEOUT_S
                )
            if group.failure is not None:
                raise group.failure
            if group._arrived != others:
                raise _dead(min(others - group._arrived), group.size, "It did not start in time.")
        except BaseException:
            group.close()
            raise
        return group

    def send(self, message: ToRank) -> None:
        for rank, channel in self._channels.items():
            try:
                channel.send(message)
            except OSError as error:
                raise self.explain(
                    _dead(rank, self.size, f"Its connection is closed ({error}).")
                ) from error

    def explain(self, error: Exception) -> Exception:
        """The failure of a rank, if it caused an error here: a collective that lost a rank only
        reports a closed connection.
        """
        with self._change:
            self._change.wait_for(lambda: self.failure is not None, NOTICE_S)
        return self.failure or error

    def close(self) -> None:
        """Ends all processes; none is left when this returns."""
        self._closing.set()
        for channel in self._channels.values():
            with contextlib.suppress(OSError):
                channel.connection.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + EXIT_GRACE_S
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for channel in self._channels.values():
            channel.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _launch(self) -> None:
        path = str(self._folder / "ranks.sock")
        words = ["--die-with-parent"] if _is_main_thread() else []
        environment = {**os.environ}
        if THREADS not in environment:
            environment[THREADS] = str(max(1, ((os.cpu_count() or 1) - 1) // self.size))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(path)
            listener.listen(self.size)
            listener.settimeout(0.1)
            for rank in range(1, self.size):
                self._processes[rank] = subprocess.Popen(
                    module_command(
                        "penstock.engine.rank", "--socket", path, "--rank", str(rank), *words
                    ),
                    stdin=subprocess.DEVNULL,
                    env=environment,
                    start_new_session=True,  # the terminal's Ctrl-C reaches only rank 0
                )
            while len(self._channels) < self.size - 1:
                for rank, process in self._processes.items():
                    if process.poll() is not None and rank not in self._channels:
                        raise _dead(rank, self.size, f"It ended ({_exit_of(process)}).")
                with contextlib.suppress(TimeoutError):
                    connection, _ = listener.accept()
                    connection.settimeout(None)
                    (rank,) = connection.recv(1)
                    self._channels[rank] = RankChannel(connection, FromRank)
        for rank in self._channels:
            self._last_pong[rank] = time.monotonic()
            threading.Thread(target=self._listen, args=(rank,), daemon=True).start()
        threading.Thread(target=self._ping, daemon=True).start()

    def _listen(self, rank: int) -> None:
        """Runs in one thread per rank."""
        while (message := self._channels[rank].receive()) is not None:
            match message:
                case RankPong():
                    self._last_pong[rank] = time.monotonic()
                case RankArrived():
                    with self._change:
                        self._arrived.add(rank)
                        self._change.notify_all()
                case RankFailed(error):
                    self._fail(_named(error.to_error(), rank, self.size))
        if self._closing.is_set():
            return
        process = self._processes[rank]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(NOTICE_S)
        self._fail(_dead(rank, self.size, f"Its process ended ({_exit_of(process)})."))

    def _ping(self) -> None:
        while not self._closing.wait(PING_INTERVAL_S):
            now = time.monotonic()
            for rank, channel in self._channels.items():
                silence = now - self._last_pong[rank]
                if silence > (MAX_SILENCE_S if self.has_started else MAX_START_SILENCE_S):
                    why = f"It has not answered for {silence:.0f} s, and was killed."
                    self._fail(_dead(rank, self.size, why))
                    self._processes[rank].kill()  # unblocks the collectives that wait for it
                    return
                with contextlib.suppress(OSError):
                    channel.send(RankPing())

    def _fail(self, error: PenstockError) -> None:
        with self._change:
            if self.failure is not None or self._closing.is_set():
                return
            self.failure = error
            self._change.notify_all()
        self.on_failure(error)


def _dead(rank: int, size: int, why: str) -> EngineDeadError:
    return EngineDeadError(
        f"Rank {rank} of {size} stopped",
        why,
        "If it was killed, the machine may have run out of memory; its log may say more.",
    )


def _named(error: PenstockError, rank: int, size: int) -> PenstockError:
    """The same error, naming the rank."""
    return type(error)(f"Rank {rank} of {size} stopped: {error.what}", error.why, error.todo)


def _exit_of(process: subprocess.Popen[bytes]) -> str:
    returncode = process.poll()
    if returncode is None:
        return "still running"
    if returncode < 0:
        return f"killed by {signal.Signals(-returncode).name}"
    return f"exit code {returncode}"


def _is_main_thread() -> bool:
    """The kernel can end a child with the thread that started it; only the main thread lives as
    long as the process.
    """
    return threading.current_thread() is threading.main_thread()
