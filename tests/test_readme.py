"""The README keeps its word: its commands exist, its example runs, and claims no speed without a result."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import ROOT, environment
from penstock.cli import COMMANDS, parse

README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str, note: str = "") -> list[str]:
    return [text for kind, said, text in BLOCK.findall(README) if kind == language and said.strip() == note]


def command_lines() -> list[list[str]]:
    text = "\n".join(blocks("bash")).replace("\\\n", " ")
    return [shlex.split(line, comments=True) for line in text.splitlines() if line.strip()]


def test_readme_is_short() -> None:
    assert len(README.splitlines()) < 150


def test_the_two_commands_are_make_targets() -> None:
    targets = {line[1] for line in command_lines() if line[0] == "make"}
    assert targets == {"serve", "test"}
    makefile = (ROOT / "Makefile").read_text()
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_make_understands_every_target_of_the_readme() -> None:
    for line in command_lines():
        if line[0] == "make":
            plan = subprocess.run(["make", "-n", *line[1:]], cwd=ROOT, capture_output=True, text=True)
            assert plan.returncode == 0, plan.stderr


def test_every_penstock_command_is_understood() -> None:
    lines = [line for line in command_lines() if line[0].endswith("penstock")]
    assert {line[1] for line in lines} == set(COMMANDS) - {"serve"}  # that one is `make serve`
    for line in lines:
        parse(line[1:])


def test_inline_commands_and_flags_exist(capsys: pytest.CaptureFixture[str]) -> None:
    for words in re.findall(r"`penstock ([^`]+)`", README):
        assert words.split()[0] in COMMANDS
    for name in COMMANDS:
        with pytest.raises(SystemExit):
            parse([name, "--help"])
    helps = capsys.readouterr().out
    for flag in set(re.findall(r"(?<=[` ])--[a-z-]+", README)):
        assert flag in helps, flag


def test_the_python_example_runs(tmp_path: Path) -> None:
    (example,) = blocks("python")
    script = tmp_path / "example.py"
    script.write_text(example)
    result = subprocess.run(
        [sys.executable, str(script)],
        env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("length") + result.stdout.count("stop") >= 2


def test_every_path_of_the_tree_exists() -> None:
    (tree,) = [text for text in blocks("text") if text.startswith("penstock/")]
    for line in tree.splitlines():
        inside = line.startswith("  ")
        for name in re.findall(r"(\S+(?:\.py|/))(?=\s)", line + " "):
            assert (ROOT / "penstock" / name if inside else ROOT / name).exists(), name


def test_no_speed_is_claimed_without_a_result() -> None:
    claims = re.findall(r"[\d,.]+ (?:tok/s|tokens/s|GB/s|ms a token|x faster)", README)
    assert not claims or (ROOT / "results").is_dir(), claims
