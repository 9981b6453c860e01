"""docs/checklist.md is true: every command of its table runs and prints what the table says."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from command_line import ROOT, environment

PAGE = ROOT / "docs" / "checklist.md"
IDS = {f"T{number}" for number in range(1, 25)} | {f"F{number}" for number in range(1, 9)}
IDS |= {f"M{number}" for number in range(5, 10)} | {"L1", "L2", "L3", "L4", "L7"}
FILE = re.compile(r"(?:results|docs)/[\w./-]+")
TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table: `words` must be in the output, `files` are the repository files it
    names.
    """

    ids: tuple[str, ...]
    command: str
    words: tuple[str, ...]
    files: tuple[str, ...]
    exit_code: int


def read_table() -> list[Line]:
    lines = []
    for text in PAGE.read_text().splitlines():
        cells = [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", text)[1:-1]]
        if len(cells) == 3 and re.match(r"[TFML]\d", cells[0]):
            code = re.fullmatch(r"`(.*)`", cells[1])
            assert code is not None, cells[1]
            seen = cells[2].partition(";")[0]  # the rest is a remark
            words = tuple(word for word in re.findall(r"`([^`]+)`", seen) if not FILE.match(word))
            files = tuple(FILE.findall(cells[2]))
            exits = re.search(r"exit (\d)", cells[2])
            ids = tuple(cells[0].split(", "))
            lines.append(Line(ids, code[1], words, files, int(exits[1]) if exits else 0))
    return lines


TABLE = read_table()


def test_every_item_is_in_the_table() -> None:
    assert {id for line in TABLE for id in line.ids} == IDS


@pytest.mark.parametrize("line", TABLE, ids=lambda line: "-".join(line.ids))
def test_a_line_says_what_is_seen_and_names_files_that_exist(line: Line) -> None:
    assert line.words or line.files
    for file in line.files:
        assert (ROOT / file).is_file(), file


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Shell variables with which the page's server runs, on a port of its own."""
    folder, port = tmp_path_factory.mktemp("checklist"), free_port()
    variables = environment(
        PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        PYTHONPATH=str(ROOT),
        PENSTOCK_PORT=str(port),
        RUN_DIR=str(folder / "run"),
        URL=f"http://127.0.0.1:{port}",
        OUT=str(folder),
    )
    subprocess.run(["./start_server.sh"], cwd=ROOT, env=variables, check=True, timeout=TIMEOUT_S)
    yield variables
    subprocess.run(["./stop_server.sh"], cwd=ROOT, env=variables, check=True, timeout=TIMEOUT_S)


@pytest.mark.slow
@pytest.mark.parametrize("line", TABLE, ids=lambda line: "-".join(line.ids))
def test_the_command_shows_what_the_table_says(line: Line, shell: dict[str, str]) -> None:
    command = line.command.replace("8001", str(free_port()))
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env=shell,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    said = done.stdout + done.stderr
    assert done.returncode == line.exit_code, said[-4000:]
    for word in line.words:
        assert word in said, f"{word!r} is not in:\n{said[-4000:]}"
