"""chat, generate, serve and bench with the embedded model."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from command_line import ROOT, SMALL, environment, error_in, fails, penstock
from penstock.assets import default_model
from penstock.cli import main
from penstock.commands.chat import Conversation, RemoteModel
from penstock.errors import PenstockError
from penstock.types import SamplingParams


def test_generate_prints_the_text_and_nothing_else_on_stdout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--max-tokens", "8", "--ignore-eos", *SMALL]
    streamed = penstock("generate", "Once upon a time", *words)
    assert streamed.returncode == 0, streamed.stderr
    monkeypatch.setattr("sys.stdin", io.StringIO("Once upon a time"))
    assert main(["generate", "-", "--json", *words]) == 0
    answer = json.loads(capsys.readouterr().out)
    (completion,) = answer["completions"]
    assert answer["prompt"] == "Once upon a time"
    assert completion["finish"] == "length"
    assert len(completion["token_ids"]) == 8
    assert streamed.stdout == completion["text"] + "\n"
    assert "weights" in streamed.stderr


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_generate_names_a_text_on_stdin_that_is_not_utf_8(
    errors: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"caf\xe9"), "utf-8", errors=errors)
    monkeypatch.setattr("sys.stdin", stdin)
    assert main(["generate", "-"]) == 1
    assert "The text on stdin is not UTF-8" in capsys.readouterr().err


def test_generate_draws_n_answers_with_logprobs(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--n",
        "2",
        "--seed",
        "1",
        "--temperature",
        "9",
        "--max-tokens",
        "3",
        "--logprobs",
        "2",
    ]
    assert main(["generate", "--chat", "Hello", "--json", "--ignore-eos", *words, *SMALL]) == 0
    first, second = json.loads(capsys.readouterr().out)["completions"]
    assert first["token_ids"] != second["token_ids"]
    assert [len(entry["top"]) for entry in first["logprobs"]] == [2, 2, 2]


def test_generate_prints_every_answer_after_its_number(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "generate",
        "Once",
        "--n",
        "2",
        "--seed",
        "1",
        "--temperature",
        "9",
        "--max-tokens",
        "3",
        *SMALL,
    ]
    assert main([*words, "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["completions"]
    assert main(words) == 0
    assert capsys.readouterr().out == f"[1] {first['text']}\n[2] {second['text']}\n"


@pytest.mark.parametrize("form", [[], ["--json"], ["--n", "2"]])
def test_an_answer_that_ends_with_an_error_is_one(
    form: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_sampling(*_: object) -> SamplingParams:
        return SamplingParams(grammar="not a grammar", n=2 if "--n" in form else 1)

    monkeypatch.setattr("penstock.commands.generate.read_sampling", read_sampling)
    exit_code, said = fails(capsys, "generate", "Hi", *form, *SMALL)
    assert exit_code == 1
    what, why, *_ = error_in(said).splitlines()
    assert "ended with an error" in what
    assert "grammar" in why


@pytest.mark.parametrize(
    ("line", "what", "why", "todo"),
    [
        (
            "/save",
            "/save needs a file",
            "The command has no file name.",
            "Add one: /save talk.json",
        ),
        (
            "/load ",
            "/load needs a file",
            "The command has no file name.",
            "Add one: /load talk.json",
        ),
        (
            "/load /nope.json",
            "/nope.json cannot be read",
            "No such file or directory.",
            "Choose a file that /save wrote: /load talk.json",
        ),
        (
            "/save /",
            "/ cannot be written",
            "Is a directory.",
            "Choose a writable file: /save talk.json",
        ),
    ],
)
def test_chat_says_which_file_is_missing(line: str, what: str, why: str, todo: str) -> None:
    with pytest.raises(PenstockError) as caught:
        Conversation(RemoteModel("http://127.0.0.1:9", "nobody")).command(line)
    assert (caught.value.what, caught.value.why, caught.value.todo) == (what, why, todo)


def test_chat_reads_lines_and_slash_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "talk.json"
    lines = [
        "/system You are a river.",
        "Hello",
        '"""two',
        'lines"""',
        f"/save {saved}",
        "/clear",
        f"/load {saved}",
        "/stats",
        "/think off",
        "/exit",
        "never read",
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    assert main(["chat", "--max-tokens", "4", "--ignore-eos", *SMALL]) == 0
    said = capsys.readouterr().out
    assert "Loaded 4 messages" in said
    assert re.search(r"first token after \d+ ms, then [\d.]+ tokens/s \(\d+ tokens in", said)
    conversation = json.loads(saved.read_text())
    assert conversation["system"] == "You are a river."
    assert [message["role"] for message in conversation["messages"]] == ["user", "assistant"] * 2
    assert conversation["messages"][2]["content"] == "two\nlines"
    assert conversation["messages"][1]["content"] in said


def test_a_thought_is_shown_apart_and_is_no_part_of_the_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "talk.json"
    monkeypatch.setattr("sys.stdin", io.StringIO(f"/think on\nWhat is 17 + 26?\n/save {saved}\n"))
    assert main(["chat", "--temperature", "0", *SMALL]) == 0
    thought, _, answer = (
        capsys.readouterr().out.partition("Reasoning is on.\n")[2].partition("\n\n")
    )
    assert thought.strip()
    assert "think>" not in thought + answer
    content = json.loads(saved.read_text())["messages"][1]["content"]
    assert answer.startswith(f"{content}\n")
    assert "43" in content


def test_unknown_slash_command_gets_the_nearest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("/stat\n"))
    exit_code, said = fails(capsys, "chat", *SMALL)
    assert exit_code == 1
    assert (
        error_in(said)
        == "error: /stat is not a command\n  Did you mean 'stats'?\n  /help lists them.\n"
    )


class Pty:
    """A command in a terminal, for features that need one: prompts and Ctrl-C."""

    def __init__(self, words: list[str], **variables: str) -> None:
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            os.chdir(ROOT)
            signal.signal(
                signal.SIGINT, signal.SIG_DFL
            )  # background jobs ignore it, and so would this one
            command = [sys.executable, "-m", "penstock", *words]
            os.execve(sys.executable, command, environment(TERM="xterm", **variables))
        self.said = ""

    def wait_for_more(self, length: int) -> None:
        """Reads until the total output has this many characters."""
        while len(self.said) < length:
            assert select.select([self.file], [], [], 60.0)[0], f"silence after {self.said!r}"
            self.said += os.read(self.file, 65536).decode(errors="replace")

    def wait_for(self, text: str, after: int = 0) -> int:
        """Reads until the text has come; returns where it ends."""
        while text not in self.said[after:]:
            self.wait_for_more(len(self.said) + 1)
        return self.said.index(text, after) + len(text)

    def type(self, text: str) -> None:
        os.write(self.file, text.encode())

    def exit_code(self) -> int:
        with contextlib.suppress(OSError):  # reading a terminal without a process fails with EIO
            while os.read(self.file, 65536):
                pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_ctrl_c_stops_the_answer_and_ctrl_d_the_program(tmp_path: Path) -> None:
    terminal = Pty(["chat", "--ignore-eos", *SMALL], XDG_STATE_HOME=str(tmp_path), NO_COLOR="1")
    place = terminal.wait_for(">>> ")
    terminal.type("Tell me everything\r")
    place = terminal.wait_for("everything", place)
    terminal.wait_for_more(place + 40)  # a part of the answer; all of it would be 8192 tokens
    terminal.type("\x03")
    place = terminal.wait_for("[stopped]", place)
    place = terminal.wait_for(">>> ", place)
    terminal.type("/stats\r")
    place = terminal.wait_for("first token after", place)
    place = terminal.wait_for(">>> ", place)
    time.sleep(0.5)  # readline misses a signal between its prompt and its first wait
    terminal.type("\x03")
    place = terminal.wait_for("Ctrl-D leaves.", place)
    terminal.wait_for(">>> ", place)  # before it, the terminal itself would take the Ctrl-D
    terminal.type("\x04")
    assert terminal.exit_code() == 0
    assert "Tell me everything" in (tmp_path / "penstock" / "chat_history").read_text()


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, str]]:
    with served() as started:
        yield started


@contextlib.contextmanager
def served(*words: str) -> Iterator[tuple[str, str]]:
    """Runs `penstock serve` on a free port; gives its URL and its startup output."""
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "serve", "--port", "0", *SMALL, *words],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(),
    )
    assert process.stderr is not None
    said = ""
    while "Ctrl-C stops" not in said:
        line = process.stderr.readline()
        assert line, f"the server ended: {said}"
        said += line
    url = re.search(r"is served at (http://\S+)", said)
    assert url is not None
    yield url[1], said
    process.send_signal(signal.SIGINT)
    process.stderr.read()
    assert process.wait(timeout=60) == 0


def choice_of_curl(said: str) -> dict[str, Any]:
    """Runs the command line that a server shows, unchanged; returns the output."""
    line = said[said.index("  curl ") : said.index("Ctrl-C stops")]
    answer = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, timeout=60, check=True
    )
    choice: dict[str, Any] = json.loads(answer.stdout)["choices"][0]
    return choice


def test_the_curl_line_works_as_it_is_shown(server: tuple[str, str]) -> None:
    _, said = server
    assert choice_of_curl(said)["message"]["role"] == "assistant"


def test_a_server_without_a_chat_template_says_so_and_shows_a_completion(tmp_path: Path) -> None:
    shutil.copy(default_model() / "tokenizer.json", tmp_path)
    with served("--tokenizer", str(tmp_path / "tokenizer.json")) as (_, said):
        assert re.search(r"^template .*chats are refused", said, re.M)
        assert choice_of_curl(said)["text"]


def test_the_client_example_of_the_readme_streams(
    server: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    url, _ = server
    example = re.search(
        r"^```python client\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S
    )
    assert example is not None
    exec(compile(example[1].replace("http://127.0.0.1:8000", url), "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_chat_over_http_answers_as_the_same_model_here(
    server: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = server
    words = ["--max-tokens", "6", "--ignore-eos"]
    remote = penstock("chat", "--base-url", url, *words, stdin="Hello\n/stats\n")
    assert remote.returncode == 0, remote.stderr
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    assert main(["chat", *words, *SMALL]) == 0
    local = capsys.readouterr().out
    assert local.strip()
    assert remote.stdout.startswith(local)
    assert "(6 tokens in" in remote.stdout


def test_chat_over_http_shows_the_servers_error(server: tuple[str, str]) -> None:
    url, _ = server
    result = penstock("chat", "--base-url", f"{url}/v1", "--max-tokens", "1m", stdin="Hello\n")
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert f"{url}/v1 reported this error (HTTP 400)." in result.stderr


def test_bench_ends_with_one_json_line_that_says_where_it_was_born(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "bench.json"
    shapes = ["--batch", "1,3", "--context", "70", "--repeats", "3", "--warmup", "1"]
    for what in ("step", "prefill"):
        assert main(["bench", what, *shapes, "--json", str(written), "--device", "cpu"]) == 0
        said = capsys.readouterr()
        last = said.out.splitlines()[-1]
        report = json.loads(last)
        for batch in (1, 3):  # printed line by line, so an interrupted bench keeps its results
            assert re.search(
                rf"^{batch} x 70 +[\d.]+ s  [\d.]+ ms, [\d,.]+ tok/s", said.err, re.MULTILINE
            )
        assert written.read_text() == last + "\n"
        assert report.keys() >= {
            "commit",
            "host",
            "gpu",
            "model",
            "dtype",
            "seed",
            "copy_gb_per_s",
            "time",
        }
        assert [result["batch"] for result in report["rows"]] == [1, 3]
        for result in report["rows"]:
            num_tokens = result["batch"] * (70 if what == "prefill" else 1)
            assert result["tok_s"] == pytest.approx(num_tokens / result["ms"] * 1e3, rel=0.01)
            assert 0 < result["of_floor"] < 1
            assert result["ms_min"] <= result["ms"]


def test_bench_says_which_batch_does_not_fit_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    shapes = ["--context", "70", "--repeats", "2", "--memory-gb", "0.01", "--device", "cpu"]
    exit_code, said = fails(capsys, "bench", "step", "--batch", "1,64", *shapes)
    assert exit_code == 1
    what, why, todo = error_in(said).splitlines()
    assert what == "error: A batch of 64 does not fit the cache"
    room = re.search(r"room for (\d+) requests", why)
    assert room is not None
    assert f"--batch {room[1]} or less" in todo
