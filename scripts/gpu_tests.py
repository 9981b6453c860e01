"""Runs all tests that need a GPU, in parallel, and records the results with commit and machine.

Kernels compile on the CPU, so one process per core is fast. Tests that use all GPU memory run
alone, after the others. Run this after changes to a kernel, a layer or the engine's memory use.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from penstock.commands.provenance import gpu_name, provenance

TESTS = Path(__file__).resolve().parents[1] / "tests"
MESSAGE_LENGTH = 300
ALONE = ("test_gpu_full_size.py", "test_memory.py")
NEEDS_GPU = re.compile(
    r"mark\.gpu|kernel_checks"
)  # other files may need packages that a GPU machine lacks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--commit", help="where there is no git to ask")
    parser.add_argument(
        "--only", default="", help="files whose names have one of these, with commas"
    )
    parser.add_argument("--workers", type=int, default=max(1, min(12, (os.cpu_count() or 1) - 2)))
    flags = parser.parse_args()
    started = time.monotonic()
    wanted = flags.only.split(",")
    files_with_gpu = [
        path
        for path in sorted(TESTS.glob("test_*.py"))
        if NEEDS_GPU.search(path.read_text()) and any(name in path.name for name in wanted)
    ]
    beside = [str(path) for path in files_with_gpu if path.name not in ALONE]
    runs = [_run(beside, "-n", str(flags.workers), "--dist", "worksteal")] if beside else []
    runs += [_run([str(path)]) for path in files_with_gpu if path.name in ALONE]
    files: dict[str, dict[str, int]] = {}
    failures: list[str] = []
    for cases in runs:
        for name, test, outcome, message in cases:
            counts = files.setdefault(name, {"passed": 0, "failed": 0})
            if outcome != "skipped":
                counts[outcome] += 1
            if outcome == "failed":
                failures.append(f"{name}::{test}: {message}")
    what = f"pytest -m gpu, of files with {flags.only}" if flags.only else "pytest -m gpu"
    report: dict[str, Any] = {"what": what, **provenance(), "gpu": gpu_name()}
    report["commit"] = flags.commit or report["commit"]
    report |= {
        "passed": sum(counts["passed"] for counts in files.values()),
        "failed": len(failures),
        "seconds": round(time.monotonic() - started, 1),
        "failures": failures,
        "files": {name: counts for name, counts in sorted(files.items()) if any(counts.values())},
    }
    flags.output.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    return 1 if failures or not report["passed"] else 0


def _run(paths: list[str], *words: str) -> list[tuple[str, str, str, str]]:
    """(file, test, outcome, start of the error message) per test."""
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder, "report.xml")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "gpu",
            "-q",
            f"--junitxml={xml}",
            *words,
            *paths,
        ]
        subprocess.run(command, cwd=TESTS.parent, check=False)
        cases = ElementTree.parse(xml).getroot().iter("testcase")
        return [_outcome_of(case) for case in cases]


def _outcome_of(case: ElementTree.Element) -> tuple[str, str, str, str]:
    kinds = {child.tag for child in case}
    outcome = (
        "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
    )
    name = case.get("classname", "").rpartition(".")[2]
    message = next((child.get("message", "") for child in case if child.tag != "skipped"), "")
    return f"{name}.py", case.get("name", ""), outcome, message[:MESSAGE_LENGTH]


if __name__ == "__main__":
    sys.exit(main())
