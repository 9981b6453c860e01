"""Runs real clients against a real server on the embedded model, and records which of their
features work.

    python -m tests.clients.run [--only NAME ...] [--output FILE.json] [--docs FILE.md]

Each client gets an environment of its own in --cache, by pip or npm, and a program in programs/
that prints a JSON line per feature. Results are written after each client; those of clients that
did not run are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.assets import default_model
from tests.clients.page import render
from tests.clients.table import CLIENTS, PROGRAMS, Client

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as pytest does, for its modules

from serving import REPOSITORY, Server, start_server

RESULTS = REPOSITORY / "results" / "cpu" / "clients.json"
PAGE = REPOSITORY / "docs" / "clients.md"
API_KEY = "key-of-the-matrix"  # so that a client that sends none is seen
MAX_MODEL_LEN = 65536  # agents' own prompts have up to 40,000 tokens of this model
REQUEST_TIMEOUT_S = 300.0  # bounds the replies of a small model that does not stop
INSTALL_TIMEOUT_S, PROGRAM_TIMEOUT_S = 1800, 900
PACKAGE_NAME = re.compile(r"@?[^@\[=<>]+")


class InstallError(Exception):
    pass


def install(client: Client, folder: Path) -> dict[str, str]:
    """Installs the client's packages in its folder if they are missing; returns their versions."""
    done = folder / "packages.txt"
    wanted = "\n".join(client.packages)
    if not done.exists() or done.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if client.is_npm:
            command = ["npm", "install", "--no-audit", "--no-fund", "--loglevel", "error"]
            _install_step([*command, "--prefix", str(folder), *client.packages])
        else:
            _install_step([sys.executable, "-m", "venv", str(folder / "venv")])
            pip = [
                str(python_of(folder)),
                "-m",
                "pip",
                "install",
                "-q",
                "--disable-pip-version-check",
            ]
            _install_step([*pip, *client.packages])
        done.write_text(wanted)
    names = [match.group() for package in client.packages if (match := PACKAGE_NAME.match(package))]
    return {name: _version(client, folder, name) for name in names}


def python_of(folder: Path) -> Path:
    return folder / "venv" / "bin" / "python"


def _install_step(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(str(error)) from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()]
        raise InstallError(
            " ".join(lines[:3])[:300] or f"{command[0]} ended with status {done.returncode}"
        )


def _version(client: Client, folder: Path, package: str) -> str:
    if client.is_npm:
        return str(
            json.loads((folder / "node_modules" / package / "package.json").read_text())["version"]
        )
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    done = subprocess.run(
        [python_of(folder), "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def run_program(client: Client, folder: Path, url: str) -> list[dict[str, Any]]:
    """What the client's program reports; as it is without the features after which it was
    stopped.
    """
    program = PROGRAMS / client.program
    if client.is_agent:
        command = [sys.executable, str(program)]
    elif client.is_npm:  # node looks for packages beside the program
        for file in (program, PROGRAMS / "report.mjs"):
            shutil.copy(file, folder)
        command = ["node", str(folder / program.name)]
    else:
        command = [str(python_of(folder)), str(program)]
    with tempfile.TemporaryDirectory() as home:
        out, log = Path(home, "out"), folder / "program.log"
        environment = {
            **{name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ},
            "HOME": home,
            "BASE_URL": url,
            "MODEL": "penstock-tiny",
            "MODEL_FOLDER": str(default_model()),  # for clients that count tokens
            "API_KEY": API_KEY,
            "CLIENT_FOLDER": str(folder),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "DO_NOT_TRACK": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        with out.open("w") as stdout, log.open("w") as stderr:
            process = subprocess.Popen(
                command,
                cwd=home,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
            ending = "ended"
            try:
                process.wait(PROGRAM_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                ending = f"was stopped after {PROGRAM_TIMEOUT_S} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        lines = out.read_text(errors="replace").splitlines()
    features = [json.loads(line) for line in lines if line.startswith('{"api"')]
    if process.returncode != 0 or not features:
        said = " ".join(log.read_text(errors="replace").split())[-300:]
        detail = f"the program {ending} with status {process.returncode}: {said}"
        features.append({"api": "", "feature": "program", "ok": False, "detail": detail})
    return features


def run_client(client: Client, cache: Path, server: Server) -> dict[str, Any]:
    folder = cache / client.name
    result: dict[str, Any] = {
        "title": client.title,
        "note": client.note,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }
    result["commit"] = commit()
    try:
        result["packages"] = install(client, folder)
    except InstallError as error:
        return {**result, "not_installable": str(error)}
    before, began = answers_by_status(server), time.monotonic()
    result["features"] = run_program(client, folder, server.url)
    after = answers_by_status(server)
    counts = {status: number - before.get(status, 0) for status, number in after.items()}
    result["answers_by_status"] = {status: number for status, number in counts.items() if number}
    return {**result, "seconds": round(time.monotonic() - began, 1)}


def commit() -> str:
    command = ["git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def answers_by_status(server: Server) -> dict[str, int]:
    headers = {"authorization": f"Bearer {API_KEY}"}
    text = server.http.get(f"{server.url}/metrics", headers=headers).text
    counts = re.findall(r'^penstock_answers_total\{status="(\d+)"\} (\d+)', text, re.MULTILINE)
    return {status: int(number) for status, number in counts}


@contextlib.contextmanager
def long_model() -> Iterator[Path]:
    """The embedded model with enough positions for an agent's prompt; beyond 8,192 its text is
    garbage.
    """
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "penstock-tiny")
        shutil.copytree(default_model(), folder)
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["max_position_embeddings"] = MAX_MODEL_LEN
        (folder / "config.json").write_text(json.dumps(config))
        yield folder


@contextlib.contextmanager
def matrix_server() -> Iterator[Server]:
    with long_model() as model:
        engine = {
            "model": str(model),
            "max_model_len": MAX_MODEL_LEN,
            "memory_gb": 1.0,
            "page_size": 64,
        }
        serve = {"api_key": [API_KEY], "batch_folder": str(model.with_name("batches"))}
        with start_server(engine, {**serve, "request_timeout": REQUEST_TIMEOUT_S}) as server:
            yield server


def parse_arguments() -> argparse.Namespace:
    names = [client.name for client in CLIENTS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names)
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=PAGE)
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path(tempfile.gettempdir(), "penstock-clients"),
        help="where clients are installed (default: %(default)s)",
    )
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    results: dict[str, Any] = {
        "what": "features of real clients against one server with a key, the embedded model on a "
        "CPU",
        "command": "python -m tests.clients.run",
        "clients": {},
    }
    if arguments.output.exists():
        results["clients"] = json.loads(arguments.output.read_text())["clients"]
    with matrix_server() as server:
        for client in CLIENTS:
            if client.name not in arguments.only:
                continue
            result = run_client(client, arguments.cache, server)
            done = {**results["clients"], client.name: result}
            results["clients"] = {one.name: done[one.name] for one in CLIENTS if one.name in done}
            arguments.output.write_text(json.dumps(results, indent=1) + "\n")
            arguments.docs.write_text(render(results))
            failed = [one for one in result.get("features", ()) if not one["ok"]]
            print(client.name, result.get("not_installable", f"{len(failed)} failed"), flush=True)
            for one in failed:
                print("  ", one["api"], one["feature"], one["detail"], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
