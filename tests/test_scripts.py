"""Every script answers `--help`, so its imports exist."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_a_script_says_what_it_does(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs in this process, because most of them import torch."""
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    assert end.value.code in (0, None)
    assert capsys.readouterr().out.startswith("usage: ")


def test_only_the_asked_gpu_tests_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """pytest without a file would run all of them."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import gpu_tests

    ran: list[list[str]] = []
    monkeypatch.setattr(gpu_tests, "_run", lambda paths, *words: ran.append(paths) or [])
    words = ["gpu_tests.py", "--output", str(tmp_path / "out.json"), "--only", "gpu_full_size"]
    monkeypatch.setattr(sys, "argv", words)
    assert gpu_tests.main() == 1  # none ran
    assert [[Path(path).name for path in paths] for paths in ran] == [["test_gpu_full_size.py"]]


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.sh")), ids=lambda path: path.stem)
def test_a_shell_script_can_be_read(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
