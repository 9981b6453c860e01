"""Shared by all agents' programs: a file to read, a scripted first call, two turns, the checks."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from report import BASE_URL, feature
from scripted_proxy import Exchange, ScriptedProxy

CLIENT_FOLDER = Path(os.environ["CLIENT_FOLDER"])
SECRET = "the-heron-is-blue"
QUESTION = "What is in it?"
PNG = (  # of one dot
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
AGAIN = "Thank you. What is 17 + 26?"
CACHED_TOKENS = r'"(?:cached_tokens|cache_read_input_tokens)":\s*(\d+)'
ERROR_EVENT = r'^(event: (error|response\.failed)|data: \{"error")'
TIMEOUT_S = 400

# Returns the agent's command and environment for a prompt, in a new conversation or the last one.
Command = Callable[[str, bool, str], tuple[list[str], dict[str, str]]]


def executable(name: str) -> str:
    return str(CLIENT_FOLDER / "node_modules" / ".bin" / name)


def run_agent(
    api: str, tool_names: list[str], command: Command, reads_images: bool = False
) -> None:
    folder = Path(tempfile.mkdtemp(dir=os.environ["HOME"], prefix="project-"))
    (folder / "note.txt").write_text(f"{SECRET}\n")
    (folder / "picture.png").write_bytes(base64.b64decode(PNG))
    proxy = scripted_read(folder / "note.txt", tool_names)

    @feature(api, "tools", SECRET)
    def _() -> str:
        said = run(command(f"Read note.txt. {QUESTION}", False, proxy.url), folder)
        assert_answered(proxy, SECRET, said)
        return f"{proxy.called}'s result {SECRET} reached the server, which said: {said[:150]}"

    @feature(api, "second turn", "said")
    def _() -> str:
        num_before = len(turns(proxy))
        said = run(command(AGAIN, True, proxy.url), folder)
        assert_answered(proxy, AGAIN, said)
        (turn, *_) = [
            one for one in turns(proxy)[num_before:] if SECRET in one.body and AGAIN in one.body
        ]
        cached = max(int(number) for number in re.findall(CACHED_TOKENS, turn.reply) or [0])
        return f"the server said, with {cached} tokens of its prompt cached: {said[:150]}"

    if reads_images:

        @feature(api, "image in a result", "said")
        def _() -> str:
            proxy = scripted_read(folder / "picture.png", tool_names)
            said = run(command(f"Read picture.png. {QUESTION}", False, proxy.url), folder)
            assert_answered(proxy, '"image/png"', said)
            return f"the server said: {said[:150]}"


def scripted_read(file: Path, tool_names: list[str]) -> ScriptedProxy:
    """The first turn reads the file with the first tool offered, whatever its arguments are."""
    paths = dict.fromkeys(("file_path", "filePath", "absolute_path", "path"), str(file))
    commands = dict.fromkeys(("command", "cmd"), f"cat {file}")
    return ScriptedProxy(BASE_URL, tool_names, {**paths, **commands, "description": "Reads a file"})


def turns(proxy: ScriptedProxy) -> list[Exchange]:
    ends = ("/messages", "/chat/completions", "/responses")
    return [one for one in proxy.exchanges if one.path.partition("?")[0].endswith(ends)]


def run(command: tuple[list[str], dict[str, str]], folder: Path) -> str:
    words, environment = command
    done = subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, f"status {done.returncode}: {(done.stdout + done.stderr)[-600:]}"
    assert done.stdout.strip(), f"nothing said; {done.stderr[-300:]}"
    return done.stdout.strip()


def assert_answered(proxy: ScriptedProxy, expected: str, said: str) -> None:
    """Checks that the tool was called, the server got what was expected, and no turn failed."""
    assert proxy.called, f"no turn offered one of {proxy.tool_names}; {said}"
    assert any(expected in one.body for one in turns(proxy)), f"no turn had {expected}; {said}"
    failed = [
        one
        for one in turns(proxy)
        if one.status != 200 or re.search(ERROR_EVENT, one.reply, re.MULTILINE)
    ]
    assert not failed, (
        f"{[(one.path, one.status, one.reply[-200:]) for one in failed]}; {said[:100]}"
    )
