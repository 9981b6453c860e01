"""A `penstock serve` that a command starts, waits for, and stops."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.child_python import module_command
from penstock.commands.flags import Flag, flags_of, read_settings
from penstock.config import EngineConfig, ServeConfig
from penstock.engine.worker import die_with_the_server
from penstock.errors import ConfigError, PenstockError
from penstock.http_client import HttpClient
from penstock.progress import OnPhase, Phase, timed

STOP_TIMEOUT_S = 40.0  # longer than the server waits for its running replies
POLL_S = 0.05
HEALTH_TIMEOUT_S = 10.0
_ADDRESS = re.compile(r"listening\s.*(https?://\S+)")


@dataclass(frozen=True, slots=True)
class StartedServer:
    url: str
    start_to_ready_s: float


class _Said:
    """Reads the server's stderr continuously, or the server would block on a full pipe."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.last_lines: deque[str] = deque(maxlen=20)
        self.url = ""
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.last_lines.append(line.rstrip())
            if found := _ADDRESS.match(line):
                self.url = found[1]

    def failure(self) -> PenstockError:
        """The server's own error message, if it printed one."""
        self._reading.join(timeout=5.0)
        lines = list(self.last_lines)
        errors = [place for place, line in enumerate(lines) if line.startswith("error: ")]
        said = lines[errors[-1] :] if errors else lines[-3:]
        what, *rest = [line.removeprefix("error: ").strip() for line in said] or ["no message"]
        return PenstockError(
            f"The server ended before it was ready: {what}",
            " ".join(rest),
            f"It was started with {' '.join(map(str, self._process.args[1:]))}.",  # type: ignore[index]
        )


def given_server_flags(arguments: argparse.Namespace) -> Iterator[tuple[Flag, Any]]:
    """The flags of `penstock serve` on this command line; the server reads variables itself."""
    for kind in (EngineConfig, ServeConfig):
        given = read_settings(kind, arguments, environ={})
        yield from (
            (flag, given[flag.field.name]) for flag in flags_of(kind) if flag.field.name in given
        )


def server_words(arguments: argparse.Namespace) -> list[str]:
    words = []
    for flag, value in given_server_flags(arguments):
        if flag.is_switch:
            words.append(flag.name if value else flag.name.replace("--", "--no-", 1))
        else:
            words += [flag.name, str(value)]
    return words


@contextlib.contextmanager
def running_or_started_server(
    base_url: str | None,
    arguments: argparse.Namespace,
    on_phase: OnPhase,
    words: Sequence[str] = (),
) -> Iterator[StartedServer]:
    """The server of --base-url, or one started with this command line's flags and these words."""
    if not base_url:
        with started_server([*server_words(arguments), *words], on_phase) as server:
            yield server
        return
    for flag, _ in given_server_flags(arguments):
        if flag.field.name != "model":
            raise ConfigError(
                f"{flag.name} and --base-url are both set",
                f"{flag.name} is for a server that this command starts, --base-url for a running "
                "one: remove one.",
            )
    yield StartedServer(base_url, 0.0)


@contextlib.contextmanager
def started_server(
    words: Sequence[str],
    on_phase: OnPhase,
    *,
    dies_with_us: bool = False,
    variables: Mapping[str, str] | None = None,
) -> Iterator[StartedServer]:
    """Runs `penstock serve` with these flags on a free port; yields when /health is ready.
    `dies_with_us`: the server also ends if this process, or the starting thread, is killed.
    `variables`: added to its environment."""
    command = module_command("penstock", "serve", "--host", "127.0.0.1", "--port", "0", *words)
    started_s = time.monotonic()
    # The batch folder belongs to the user's own server.
    environ = {name: value for name, value in os.environ.items() if name != "PENSTOCK_BATCH_FOLDER"}
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**environ, **(variables or {})},
        preexec_fn=die_with_the_server if dies_with_us else None,
    )
    try:
        said = _Said(process)
        with timed("server", on_phase) as report:
            while not _is_ready(said.url):
                if process.poll() is not None:
                    raise said.failure()
                report(Phase("server", said.last_lines[-1] if said.last_lines else ""))
                time.sleep(POLL_S)
            report(Phase("server", f"ready at {said.url}"))
        yield StartedServer(said.url, time.monotonic() - started_s)
    finally:
        _stop(process)


def _is_ready(url: str) -> bool:
    if not url:
        return False
    try:
        return HttpClient(url, timeout_s=HEALTH_TIMEOUT_S).read("GET", "/health")[0] == 200
    except PenstockError:
        return False


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
