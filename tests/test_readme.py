"""The README is true: its commands exist, its example runs, and every speed has a result file."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from command_line import ROOT, environment
from penstock.cli import COMMANDS, parse

README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str, note: str = "") -> list[str]:
    return [
        text
        for kind, said, text in BLOCK.findall(README)
        if kind == language and said.strip() == note
    ]


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
            plan = subprocess.run(
                ["make", "-n", *line[1:]], cwd=ROOT, capture_output=True, text=True
            )
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


# Speeds: each is the rounded number of a file in results/, and no other occurs


def rows_of(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((ROOT / "results/h200" / name).read_text())["rows"]
    return rows


def is_rounded(said: str, value: float) -> bool:
    """Whether the number rounds to this value, with the digits that are printed."""
    decimals = len(said.partition(".")[2])
    return f"{value:.{decimals}f}" == said.replace(",", "")


def table_row(title: str) -> list[str]:
    (cells,) = re.findall(rf"^\| {re.escape(title)} \|(.*)\|$", README, re.MULTILINE)
    return [cell.strip() for cell in cells.split("|")]


def test_the_table_of_decode_steps_is_what_was_measured() -> None:
    measured = {row["batch"]: row for row in rows_of("decode.json") if row["context"] == 1536}
    batches = [int(cell) for cell in table_row("batch")]
    assert len(batches) > 3
    for batch, ms, share in zip(
        batches, table_row("ms per step"), table_row("of the memory floor"), strict=True
    ):
        assert is_rounded(ms, measured[batch]["ms"]), (batch, ms)
        assert is_rounded(share.removesuffix(" %"), 100 * measured[batch]["of_floor"]), (
            batch,
            share,
        )


def test_the_sentences_about_prefill_and_serving_are_what_was_measured() -> None:
    prefill = {(row["batch"], row["context"]): row["ms"] for row in rows_of("prefill.json")}
    alone, crowd = (
        next(r for r in rows_of("serving.json") if r["concurrency"] == c) for c in (1, 64)
    )
    text = " ".join(README.split())
    number = r"([\d,.]*\d)"
    for sentence, values in {
        f"Prefill takes {number} ms for 1,024 tokens and {number} ms for 8 x 1,024": [
            prefill[1, 1024],
            prefill[8, 1024],
        ],
        f"served 64 requests of 1,024 \\+ 1,024 tokens at a time at {number} tok/s": [
            crowd["tok_s"]
        ],
        f"its first token after {number} ms and one every {number} ms": [
            alone["ttft_ms"]["p50"],
            alone["tpot_ms"]["p50"],
        ],
    }.items():
        (said,) = re.findall(sentence, text)
        claims = said if isinstance(said, tuple) else (said,)
        for claim, value in zip(claims, values, strict=True):
            assert is_rounded(claim, value), (sentence, claim, value)


def test_no_speed_is_claimed_without_a_result() -> None:
    """Published numbers of others are marked as theirs."""
    ours = re.sub(r"Published by others:.*?\.(?=\s[A-Z])", "", README, flags=re.DOTALL)
    claims = re.findall(r"([\d,.]*\d) (?:tok/s|tokens/s|GB/s|ms a token|x faster)", ours)
    assert claims
    rows = [
        row
        for name in ("decode", "prefill", "serving", "serving_loads")
        for row in rows_of(f"{name}.json")
    ]
    results = [row[key] for row in rows for key in ("tok_s", "output_tok_s", "gb_s") if key in row]
    for claim in claims:
        assert any(is_rounded(claim, value) for value in results), claim
