"""docs/troubleshooting.md quotes real messages, word for word, and names real flags."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from penstock.commands.flags import flags_of
from penstock.config import EngineConfig, ServeConfig

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
FEWEST_WORDS = 8  # characters that a pattern must contain itself, or it would match anything


@cache
def messages() -> list[re.Pattern[str]]:
    """Every string of the product as a pattern, with any text for its placeholders."""
    patterns = set()
    for path in (ROOT / "penstock").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts = [node.value]
            elif isinstance(node, ast.JoinedStr):
                parts = [
                    part.value if isinstance(part, ast.Constant) else "" for part in node.values
                ]
            else:
                continue
            if len("".join(map(str, parts))) >= FEWEST_WORDS:
                patterns.add(".*".join(re.escape(str(part)) for part in parts))
    return [re.compile(pattern) for pattern in patterns]


def quoted_lines() -> list[str]:
    blocks = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    lines = [
        line.strip().removeprefix("error: ") for block in blocks for line in block.splitlines()
    ]
    return [line for line in lines if line != "…"]


def test_every_quoted_line_is_a_message_of_the_source() -> None:
    lines = quoted_lines()
    assert len(lines) > 40
    said = [line.replace("…", "something") for line in lines]
    unknown = [line for line in said if not any(pattern.fullmatch(line) for pattern in messages())]
    assert not unknown


def test_there_are_ten_and_each_is_quoted() -> None:
    sections = re.split(r"^## \d+\. ", PAGE, flags=re.MULTILINE)[1:]
    assert len(sections) == 10
    assert all("```text" in section for section in sections)


def test_every_flag_on_the_page_exists() -> None:
    elsewhere = {"--debug", "--gpus", "--local-dir"}  # flags of any command, of docker and of hf
    known = {flag.name for settings in (EngineConfig, ServeConfig) for flag in flags_of(settings)}
    assert not set(re.findall(r"--[a-z][a-z-]+", PAGE)) - known - elsewhere
