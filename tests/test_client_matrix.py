"""docs/clients.md matches results/cpu/clients.json, and its script still runs clients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serving import REPOSITORY
from tests.clients.page import render
from tests.clients.run import InstallError, install
from tests.clients.table import CLIENTS, PROGRAMS, Client

RESULTS: dict[str, Any] = json.loads((REPOSITORY / "results" / "cpu" / "clients.json").read_text())
QUICK = ("openai-python", "anthropic-javascript")  # one by pip, one by npm


def test_the_page_is_what_the_results_say() -> None:
    assert (REPOSITORY / "docs" / "clients.md").read_text() == render(RESULTS)


def test_the_script_starts_without_pytest() -> None:
    command = [sys.executable, "-m", "tests.clients.run", "--help"]
    assert "--only" in subprocess.check_output(command, cwd=REPOSITORY, text=True)


def test_every_client_of_the_table_has_a_program_and_a_result() -> None:
    assert [client.name for client in CLIENTS] == list(RESULTS["clients"])
    for client in CLIENTS:
        assert (PROGRAMS / client.program).exists(), client
        result = RESULTS["clients"][client.name]
        assert ("not_installable" in result) != ("features" in result), client


def test_no_client_met_an_error_of_the_server() -> None:
    for name, result in RESULTS["clients"].items():
        statuses = result.get("answers_by_status", {})
        assert not [status for status in statuses if status.startswith("5")], (name, statuses)


def test_a_page_shows_what_failed_and_what_could_not_be_installed() -> None:
    feature = {"api": "Messages", "feature": "tools", "ok": False, "detail": "seen `nothing`"}
    head = {"note": "", "date": "2026-01-01", "commit": "abc"}
    failed = {**head, "title": "One", "packages": {"one": "1.2"}, "features": [feature]}
    absent = {**head, "title": "Two", "not_installable": "no such package"}
    page = render({"clients": {"one": failed, "two": absent}})
    assert "0 of 1 features pass" in page
    assert "| One | 1.2 | Messages | - |" in page
    assert "- One, Messages, tools: `seen 'nothing'`\n" in page
    assert "| Two | not installable here |" in page
    assert "- Two: not installable here: `no such package`\n" in page


def test_a_client_that_cannot_be_installed_has_a_reason_and_no_features(tmp_path: Path) -> None:
    client = Client("none", "None", (f"{tmp_path}/no-such-package",), "openai_javascript.mjs")
    with pytest.raises(InstallError) as refusal:
        install(client, tmp_path / "client")
    assert str(refusal.value)
    assert not (tmp_path / "client" / "packages.txt").exists(), "another run tries again"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_clients_pass_all_their_features(tmp_path: Path) -> None:
    output = tmp_path / "clients.json"
    flags = ["--output", str(output), "--docs", str(tmp_path / "clients.md")]
    command = [sys.executable, "-m", "tests.clients.run", "--only", *QUICK, *flags]
    subprocess.run(
        command, cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, check=True
    )
    results = json.loads(output.read_text())["clients"]
    assert set(results) == set(QUICK)
    for name, result in results.items():
        assert "not_installable" not in result, result
        assert [one for one in result["features"] if not one["ok"]] == [], name
