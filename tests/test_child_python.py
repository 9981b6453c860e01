"""Files in the working directory are never imported, by us or by child processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from command_line import environment
from penstock.child_python import module_command
from penstock.commands.started_server import started_server
from penstock.http_client import HttpClient

SMALL = ["--device", "cpu", "--memory-gb", "0.05", "--max-model-len", "256"]
# Names from the standard library, our dependencies, and optional packages.
NAMES = (
    "timeit",
    "argparse",
    "random",
    "socket",
    "selectors",
    "msgspec",
    "torch",
    "uvloop",
    "nvtx",
)

SPAWN = """
import multiprocessing
import penstock.eval.load
if __name__ == "__main__":
    with penstock.eval.load._nothing_imported_from_here():
        process = multiprocessing.get_context("spawn").Process(target=print, args=("spawned",))
        process.start()
    process.join()
"""


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder of modules that must not be imported; `imported` is written if one is."""
    for name in NAMES:
        mark = f"open({str(tmp_path / 'imported')!r}, 'a').write('{name} ')"
        (tmp_path / f"{name}.py").write_text(f"{mark}\nraise SystemExit('{name} of the folder')")
    return tmp_path


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert not (folder / "imported").exists()
    return done.stdout


def test_a_module_that_we_start_does_not_see_it(hostile: Path) -> None:
    assert "usage" in run(module_command("json.tool", "--help"), hostile)
    assert "penstock" in run(module_command("penstock", "--help"), hostile)


def test_neither_does_python_m_penstock(hostile: Path) -> None:
    words = ["generate", "One", "--max-tokens", "2", *SMALL]
    assert run([sys.executable, "-m", "penstock", *words], hostile)


def test_nor_a_server_with_its_engine_and_its_templates(
    hostile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(hostile)
    with started_server(SMALL, lambda _: None) as server:
        chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
        assert HttpClient(server.url, timeout_s=60.0).json("POST", "/v1/chat/completions", chat)[
            "choices"
        ]
    assert not (hostile / "imported").exists()


def test_nor_a_client_of_the_load_generator(
    hostile: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    script = tmp_path_factory.mktemp("elsewhere") / "spawn.py"
    script.write_text(SPAWN)
    assert run([sys.executable, "-P", str(script)], hostile) == "spawned\n"
