"""`penstock batch`: answers a file of requests into a file of results, in the format of OpenAI's
batches.

The requests go to a running server, or to a `penstock serve` that it starts. Each result is
appended as one whole line, so that the file is valid whenever the command ends, and the next run
continues where this one stopped: requests whose custom_id has a result are skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

from penstock.batch_lines import (
    ENDPOINTS,
    LineError,
    LineSet,
    custom_id_of,
    error_line,
    is_result,
    mend_tail,
    numbered_lines,
    read_line,
    result_line,
    results_in,
)
from penstock.commands.console import print_note
from penstock.commands.flags import add_engine_flags, read_count, read_number
from penstock.commands.started_server import running_or_started_server
from penstock.errors import ConfigError, PenstockError
from penstock.http_client import HttpClient
from penstock.progress import OnPhase, Phase, PhaseList, timed

USAGE = "penstock batch FILE [-o OUT] [-m MODEL | --base-url URL] [flags]"
DESCRIPTION = (
    "Answer a file of requests, JSONL in and out. Run it again to continue where it stopped."
)
EXAMPLES = [
    "penstock batch requests.jsonl -m ~/models/Qwen3.5-4B       into requests.results.jsonl",
    "penstock batch requests.jsonl -o out.jsonl --base-url http://127.0.0.1:8000",
]
MAX_LINE_BYTES = 64 * 1024**2
HEAD_BYTES = 64 * 1024
RESULT_START = b'{"id":'
SERVERS_WORDS = ["--max-queue", "4096", "--drain-timeout", "1"]
NEWS_S = 0.1
RETRIED = (429, 502, 503, 504)  # temporary
RETRY_S, MAX_RETRY_S = 0.5, 10.0
PATIENCE_S = 600.0  # how long to retry while a server is temporarily unavailable
LOST_S = 30.0  # how long to retry while a server does not answer: it may be restarting


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="requests, one JSON object per line")
    parser.add_argument(
        "-o", "--output", metavar="OUT", help="results (default: FILE's name .results.jsonl)"
    )
    parser.add_argument("--base-url", metavar="URL", help="a running server (default: start one)")
    parser.add_argument(
        "--concurrency",
        type=read_count,
        default=128,
        metavar="N",
        help="concurrent requests (default: 128)",
    )
    parser.add_argument(
        "--timeout",
        type=read_number,
        default=3600.0,
        metavar="X",
        help="seconds until a request fails (default: 3600)",
    )
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    source = Path(arguments.file).expanduser()
    _check_source(source)
    if arguments.concurrency < 1:
        raise ConfigError(f"--concurrency is {arguments.concurrency}", "It must be 1 or more.")
    if not arguments.timeout > 0:
        raise ConfigError(f"--timeout is {arguments.timeout:g}", "It must be above 0.")
    output = (
        Path(arguments.output).expanduser()
        if arguments.output
        else source.with_suffix(".results.jsonl")
    )
    if output.exists() and output.samefile(source):
        raise ConfigError(
            "The output file is also the input file", todo="Choose another file with -o."
        )
    _check_output(output)
    with source.open("rb") as lines, _opened(output) as results:
        batch = _Batch(lines, results, _Progress.of(source, output))
        if batch.progress.is_complete(source):
            if not batch.progress.num_total:
                raise ConfigError(f"{source} is empty", "The file must have one request per line.")
            print_note(f"all {batch.progress.num_total} lines already have results in {output}")
            return batch.progress.exit_code
        with (
            PhaseList() as phases,
            running_or_started_server(
                arguments.base_url, arguments, phases, SERVERS_WORDS
            ) as server,
            timed("batch", phases) as report,
        ):
            batch.answer(HttpClient(server.url, timeout_s=arguments.timeout), arguments, report)
    progress = batch.progress
    print_note(f"{progress.num_good} good results and {progress.num_bad} errors are in {output}")
    return progress.exit_code


def _check_source(source: Path) -> None:
    todo = "Give a text file in UTF-8 with one request per line."
    if not source.exists():
        raise ConfigError(f"{source} does not exist", todo=todo)
    if not source.is_file():
        raise ConfigError(f"{source} is not a file", todo=todo)
    with source.open("rb") as file:
        if b"\0" in file.read(HEAD_BYTES):
            why = "It has NUL bytes, as binary files and text in UTF-16 have."
            raise ConfigError(f"{source} is not a file of requests", why, todo)


def _check_output(output: Path) -> None:
    """Only a file of results gets more of them: its torn last line is removed first."""
    if not output.exists():
        return
    if not output.is_file():
        why = "Results are read again to continue where a run stopped."
        raise ConfigError(f"{output} is not a file", why, "Choose a file with -o.")
    with output.open("rb") as file:
        line = file.readline(MAX_LINE_BYTES)
    is_torn = not line.endswith(b"\n") and line.startswith(RESULT_START[: len(line)])
    if line and not is_torn and not is_result(line):
        raise ConfigError(
            f"{output} holds something else than results",
            f"Its first line is {line[:40]!r}.",
            "Choose another file with -o.",
        )


@contextlib.contextmanager
def _opened(output: Path) -> Iterator[BinaryIO]:
    """Opens the results file for this command alone, after the last complete result."""
    try:
        with output.open("ab", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mend_tail(output)
            yield file
    except BlockingIOError as error:
        raise ConfigError(
            f"Another `penstock batch` is writing to {output}",
            todo="Wait until it ends, or choose another file with -o.",
        ) from error


@dataclass(slots=True)
class _Progress:
    """The requests that have a result, from this run or an earlier one."""

    num_total: int
    num_good: int = 0
    num_bad: int = 0
    done_ids: set[int] = field(default_factory=set)  # hashes of custom ids
    done_lines: LineSet = field(default_factory=LineSet)  # those without a custom id

    @classmethod
    def of(cls, source: Path, output: Path) -> _Progress:
        with source.open("rb") as file:
            progress = cls(sum(1 for _ in numbered_lines(file, MAX_LINE_BYTES)))
        for result in results_in(output):
            progress.count(result.is_good)
            if result.custom_id is None:
                progress.done_lines.add(result.number)
            else:
                progress.done_ids.add(hash(result.custom_id))
        return progress

    def count(self, is_good: bool) -> None:
        if is_good:
            self.num_good += 1
        else:
            self.num_bad += 1

    def has(self, number: int, custom_id: str | None) -> bool:
        return number in self.done_lines or (
            custom_id is not None and hash(custom_id) in self.done_ids
        )

    def is_complete(self, source: Path) -> bool:
        with source.open("rb") as file:
            return all(
                self.has(n, custom_id_of(line)) for n, line in numbered_lines(file, MAX_LINE_BYTES)
            )

    @property
    def exit_code(self) -> int:
        return int(self.num_bad > 0)

    def __str__(self) -> str:
        failed = f", {self.num_bad} failed" if self.num_bad else ""
        return f"{self.num_good + self.num_bad} of {self.num_total}{failed}"


@dataclass(slots=True)
class _Batch:
    lines: BinaryIO
    results: BinaryIO
    progress: _Progress
    _asked: queue.SimpleQueue[tuple[int, bytes]] = field(default_factory=queue.SimpleQueue)
    _answers: queue.SimpleQueue[tuple[bytes, bool] | BaseException] = field(
        default_factory=queue.SimpleQueue
    )
    _reported_s: float = 0.0

    def answer(self, client: HttpClient, arguments: argparse.Namespace, report: OnPhase) -> None:
        model = _Model(client, getattr(arguments, "model", "") if arguments.base_url else "")
        num_asked = num_threads = 0  # running now, and started so far
        for number, line in self._left():
            if num_threads < arguments.concurrency:
                self._start_thread(client, model)
                num_threads += 1
            self._asked.put((number, line))
            num_asked += 1
            if num_asked == arguments.concurrency:
                self._write_next(report)
                num_asked -= 1
        for _ in range(num_asked):
            self._write_next(report)
        report(Phase("batch", str(self.progress), 1.0))

    def _left(self) -> Iterator[tuple[int, bytes]]:
        """Lines without a result. A duplicate gets an error here, and is not sent."""
        seen: set[int] = set()
        for number, line in numbered_lines(self.lines, MAX_LINE_BYTES):
            custom_id = custom_id_of(line)
            if self.progress.has(number, custom_id):
                continue
            if custom_id is not None and hash(custom_id) in seen:
                what = f"Line {number} repeats the custom_id {custom_id[:128]!r} of another line"
                self._write(
                    error_line(_id(number), None, "duplicate_custom_id", what), is_good=False
                )
                continue
            if custom_id is not None:
                seen.add(hash(custom_id))
            yield number, line

    def _start_thread(self, client: HttpClient, model: _Model) -> None:
        """A daemon thread: Ctrl-C must not wait for replies that are no longer needed."""

        def work() -> None:
            while True:
                number, line = self._asked.get()
                try:
                    self._answers.put(_answer(client, model, number, line))
                except BaseException as error:  # ends the command
                    self._answers.put(error)

        threading.Thread(target=work, daemon=True).start()

    def _write_next(self, report: OnPhase) -> None:
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            raise answer
        self._write(*answer)
        if time.monotonic() - self._reported_s > NEWS_S:
            self._reported_s = time.monotonic()
            num_done = self.progress.num_good + self.progress.num_bad
            report(
                Phase(
                    "batch",
                    str(self.progress),
                    min(1.0, num_done / max(1, self.progress.num_total)),
                )
            )

    def _write(self, line: bytes, is_good: bool) -> None:
        try:
            while line:
                line = line[self.results.write(line) :]
        except BrokenPipeError:
            raise
        except OSError as error:
            raise ConfigError(
                f"{self.results.name} cannot be written",
                f"{error.strerror}.",
                "Correct that and run the same command again: it continues where it stopped.",
            ) from error
        self.progress.count(is_good)


class _Model:
    """Fills in the model of a body that names none, which other servers require."""

    def __init__(self, client: HttpClient, name: str) -> None:
        self._name = name or client.first_model()

    def of(self, body: bytes) -> bytes:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        if "model" in fields:
            return body
        return msgspec.json.encode({"model": self._name, **fields})


def _answer(client: HttpClient, model: _Model, number: int, line: bytes) -> tuple[bytes, bool]:
    """The result line, and whether the request succeeded. Raises if the server is gone."""
    try:
        asked = read_line(line, MAX_LINE_BYTES, ENDPOINTS)
    except LineError as error:
        message = f"Line {number}: {error}".replace("\n", " ")
        return error_line(_id(number), custom_id_of(line), error.code, message), False
    status, answer = _ask(client, asked.url, model.of(bytes(asked.body)))
    return result_line(_id(number), asked.custom_id, status, _id(number), answer), status == 200


def _ask(client: HttpClient, path: str, body: bytes) -> tuple[int, bytes]:
    started_s, wait_s = time.monotonic(), RETRY_S
    while True:
        try:
            status, answer = client.read("POST", path, body)
            if status not in RETRIED or time.monotonic() - started_s > PATIENCE_S:
                return status, answer
        except PenstockError:
            if time.monotonic() - started_s > LOST_S:
                raise
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, MAX_RETRY_S)


def _id(number: int) -> str:
    return f"batch_req_{number}"
