"""The pages of docs/ are readable in a terminal, and the map of the source is correct."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from command_line import ROOT

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
MAP = (ROOT / "docs" / "architecture.md").read_text()
NAMED = re.compile(r"\b(?:(?:[a-z_0-9]+/)+(?:[a-z_0-9]+\.py)?|[a-z_0-9]+\.py)")


def without_blocks(text: str) -> list[str]:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL).splitlines()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_prose_has_at_most_100_columns(page: Path) -> None:
    assert [
        line for line in without_blocks(page.read_text()) if len(line) > 100 and line[0] != "|"
    ] == []


def test_the_map_is_one_page_with_a_glossary_of_15_lines() -> None:
    lines = MAP.splitlines()
    assert len(lines) <= 100
    assert max(map(len, lines)) <= 100
    assert sum(line.startswith("| ") for line in lines) - 1 == 15


def test_every_place_on_the_map_exists() -> None:
    places = set(NAMED.findall(MAP))
    assert len(places) > 30
    known = [ROOT, *(ROOT / "penstock" / part for part in ("", "engine", "serve"))]
    assert [
        place for place in places if not any((folder / place).exists() for folder in known)
    ] == []


def test_the_straight_line_names_what_its_files_define() -> None:
    named = re.findall(r"^ +([\w/]+\.py) +([A-Z]\w+|[a-z]+_\w+)(?:\.(\w+))?", MAP, re.MULTILINE)
    assert len(named) > 12
    for place, name, method in named:
        source = (ROOT / "penstock" / place).read_text()
        assert re.search(rf"\b{name}\b", source), (place, name)
        assert not method or re.search(rf"def {method}\b", source), (place, method)


def test_every_experiment_says_what_was_expected_what_was_seen_and_what_was_kept() -> None:
    days = re.split(r"^## ", (ROOT / "docs" / "log.md").read_text(), flags=re.MULTILINE)[1:]
    dates = [day.partition("\n")[0] for day in days]
    assert dates == sorted(set(dates), reverse=True)
    entries = [entry for day in days for entry in re.split(r"^### ", day, flags=re.MULTILINE)[1:]]
    assert len(entries) >= 77
    for entry in entries:
        parts = re.findall(r"^- (\w+): \S", entry, re.MULTILINE)
        assert [part for part in parts if part != "setup"] == ["expected", "seen", "kept"], entry
