"""docs/api.md is true: its examples print what it says, and its tables are complete."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import subprocess

import pytest

from command_line import ROOT
from penstock import errors
from penstock.config import EngineConfig, ServeConfig
from penstock.serve.batches.folder import StorageFullError
from penstock.serve.browsers import ForbiddenError, MediaTypeError
from penstock.serve.openapi import OPERATIONS
from penstock.serve.responses.store import (
    UnknownConversationError,
    UnknownItemError,
    UnknownResponseError,
)
from penstock.serve.sessions import SessionNotFoundError
from serving import Server

DOCUMENT = (ROOT / "docs" / "api.md").read_text()
ADDRESS = "http://127.0.0.1:8000"
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SOMETHING = "…"  # stands for any text in what an example prints

Block = tuple[str, str, str]  # language, note, text
BLOCKS: list[Block] = [
    (language, note.strip(), text) for language, note, text in BLOCK.findall(DOCUMENT)
]
CLIENT_BLOCKS = [
    text for _, note, text in BLOCKS if note == "client"
]  # programs with libraries that tests do not install
EXAMPLES = [
    (language, text, printed)
    for (language, note, text), (answer, _, printed) in itertools.pairwise(BLOCKS)
    if language in ("bash", "python") and note == "" and answer == "text"
]


def as_shown(text: str, url: str) -> str:
    return text.replace(ADDRESS, url)


def table(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its header."""
    section = DOCUMENT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    assert len(rows) > 2, heading
    return [[cell.strip() for cell in row] for row in rows[2:]]


def in_code(text: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", text))


def run(language: str, text: str) -> str:
    if language == "bash":
        return subprocess.run(
            ["bash", "-ec", text], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(text, "docs/api.md", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_prints_what_the_document_says(server: Server, number: int) -> None:
    language, text, expected = EXAMPLES[number]
    printed = run(language, as_shown(text, server.url))
    pattern = ".*".join(map(re.escape, expected.strip().split(SOMETHING)))
    assert re.fullmatch(pattern, printed.strip(), re.DOTALL), printed


def test_every_example_is_run_or_says_that_it_needs_a_client() -> None:
    runnable = [
        text for language, note, text in BLOCKS if language in ("bash", "python") and note == ""
    ]
    assert runnable == [text for _, text, _ in EXAMPLES]
    assert len(EXAMPLES) >= 7
    for name in ("curl", "openai", "anthropic", "Claude Code", "aider", "continue", "litellm"):
        assert f"\n### {name}\n" in DOCUMENT


def test_every_address_of_the_document_is_answered(server: Server) -> None:
    bases = set(re.findall(rf"{ADDRESS}[/\w]*", DOCUMENT))
    assert {ADDRESS, f"{ADDRESS}/v1"} < bases
    for base in bases:
        models = (
            f"{base.removesuffix('/v1')}/v1/models" if base in (ADDRESS, f"{ADDRESS}/v1") else base
        )
        status = server.http.get(as_shown(models, server.url)).status_code
        assert status in (200, 405), base  # 405: the route exists for POST


def test_the_table_of_routes_has_every_route_and_no_other() -> None:
    listed = [route for row in table("Routes") for route in in_code(row[0])]
    assert sorted(listed) == sorted(f"{one.method.upper()} {one.path}" for one in OPERATIONS)


def test_the_table_of_metrics_has_every_metric_and_its_type(server: Server) -> None:
    text = server.http.get(f"{server.url}/metrics").text
    types = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
    always, of_drafts = (
        {name: row[1] for row in table(title) for name in in_code(row[0])}
        for title in ("Metrics", "Metrics of drafts and of experts")
    )
    assert always.items() <= types.items() <= {**always, **of_drafts}.items()


def test_the_table_of_errors_agrees_with_the_errors() -> None:
    kept = (SessionNotFoundError, UnknownResponseError, UnknownConversationError, UnknownItemError)
    ours = (*kept, ForbiddenError, MediaTypeError, StorageFullError)
    known = (*vars(errors).values(), *ours)
    statuses = {kind.code: kind.status for kind in known if hasattr(kind, "code")}
    listed = {code: int(row[0]) for row in table("Errors") for code in in_code(row[1])}
    plain = {"not_found": 404, "method_not_allowed": 405, "body_too_large": 413}
    assert listed.items() <= {**statuses, **plain}.items()
    assert plain.items() < listed.items()


def test_a_plain_http_error_has_the_documented_code(server: Server) -> None:
    nowhere = server.http.get(f"{server.url}/nowhere")
    assert (nowhere.status_code, nowhere.json()["error"]["code"]) == (404, "not_found")
    wrong = server.http.get(f"{server.url}/v1/completions")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    large = server.http.post(
        f"{server.url}/tokenize", content=b" " * (ServeConfig().max_body_bytes + 1)
    )
    assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")


def test_every_flag_exists_and_has_the_documented_default() -> None:
    defaults = {
        "--" + name.replace("_", "-"): field.default
        for config in (ServeConfig, EngineConfig)
        for name, field in config.__dataclass_fields__.items()
    }
    ours = DOCUMENT.partition("\n## Beside others\n")[0].partition("\n## What a request may say\n")[
        2
    ]
    assert set(re.findall(r"`(--[a-z-]+)", ours)) <= defaults.keys()
    for flag, default, _ in table("Limits and keys"):
        if default.isdigit():
            assert defaults[flag.strip("`")] == int(default), flag
