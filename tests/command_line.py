"""Runs `penstock` for tests, in a child process or in this one, and captures its output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli import main

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["--device", "cpu", "--memory-gb", "0.02"]


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    return {**kept, "OMP_NUM_THREADS": "1", **variables}


def penstock(*words: str, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock", *words],
        input=stdin,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(**variables),
        timeout=120,
    )


def fails(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Runs a command line in this process; returns its exit code and its stderr."""
    exit_code = main(words)
    return exit_code, capsys.readouterr().err


def error_in(said: str) -> str:
    """The stderr from the error on: progress lines may come before it."""
    return said[said.index("error:") :]
