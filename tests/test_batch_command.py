"""`penstock batch`: every line gets one result, with any server, and across interruptions."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from command_line import ROOT, SMALL, environment, error_in, penstock
from penstock.cli import main
from penstock.commands import batch
from penstock.errors import ConfigError
from serving import Server, eventually, start_server
from test_batches import chat_line, jsonl


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with start_server(engine={"max_rows": 2}) as running:
        yield running


def results(path: Path) -> list[dict[str, Any]]:
    text = path.read_bytes()
    assert text.endswith(b"\n")
    return [json.loads(line) for line in text.splitlines()]


def test_a_model_is_loaded_for_the_file_and_bad_lines_have_error_lines(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    prompt = {"model": "m", "prompt": "Rivers", "max_tokens": 2}
    other = {"custom_id": "p", "method": "POST", "url": "/v1/completions", "body": prompt}
    lines = [chat_line("a"), "{", "", other, chat_line("a"), chat_line("wrong", max_tokens=-1)]
    source.write_bytes(jsonl(lines))
    done = penstock("batch", str(source), *SMALL)
    assert done.returncode == 1, done.stderr
    assert "2 good results and 3 errors are in" in done.stderr
    found = {
        (line["id"], line["custom_id"]): line for line in results(tmp_path / "in.results.jsonl")
    }
    assert set(found) == {
        ("batch_req_1", "a"),
        ("batch_req_2", None),
        ("batch_req_4", "p"),
        ("batch_req_5", None),
        ("batch_req_6", "wrong"),
    }
    by_line = {id: line for (id, _), line in found.items()}
    assert by_line["batch_req_1"]["response"]["body"]["object"] == "chat.completion"
    assert by_line["batch_req_4"]["response"]["body"]["object"] == "text_completion"
    assert by_line["batch_req_2"]["error"]["code"] == "invalid_json_line"
    assert by_line["batch_req_5"]["error"]["code"] == "duplicate_custom_id"
    assert by_line["batch_req_6"]["response"]["status_code"] == 400
    again = penstock("batch", str(source), *SMALL)
    assert again.returncode == 1
    assert "all 5 lines already have results" in again.stderr


@pytest.mark.slow
def test_ctrl_c_leaves_a_valid_file_and_the_next_run_goes_on_from_it(
    server: Server, tmp_path: Path
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(jsonl([chat_line(f"r{i}", max_tokens=60) for i in range(16)]))
    words = [
        "batch",
        str(source),
        "-o",
        str(output),
        "--base-url",
        server.url,
        "--concurrency",
        "4",
    ]
    command = [sys.executable, "-m", "penstock", *words]
    running = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True
    )
    assert eventually(lambda: output.exists() and output.read_bytes().count(b"\n") >= 3, 60.0)
    second = penstock(*words)
    assert second.returncode == 1
    assert "Another `penstock batch` is writing to" in second.stderr
    running.send_signal(signal.SIGINT)
    assert running.wait(timeout=20.0) == 130
    before = results(output)
    assert 3 <= len(before) < 16
    with output.open("ab") as file:
        file.write(b'{"id": "torn')
    done = penstock(*words)
    assert done.returncode == 0, done.stderr
    after = results(output)
    assert after[: len(before)] == before
    assert sorted(line["custom_id"] for line in after) == sorted(f"r{i}" for i in range(16))


def test_a_missing_file_or_server_is_reported(tmp_path: Path) -> None:
    missing = penstock("batch", str(tmp_path / "none.jsonl"))
    assert missing.returncode == 1
    assert "does not exist" in error_in(missing.stderr)
    source = tmp_path / "in.jsonl"
    source.touch()
    assert f"{source} is empty" in error_in(penstock("batch", str(source)).stderr)
    source.write_bytes(jsonl([chat_line("a")]))
    same = penstock("batch", str(source), "-o", str(source))
    assert "The output file is also the input file" in error_in(same.stderr)
    both = penstock("batch", str(source), "--base-url", "http://127.0.0.1:9", "--max-rows", "2")
    assert "--max-rows and --base-url are both set" in error_in(both.stderr)
    silent = penstock("batch", str(source), "--base-url", "http://127.0.0.1:9")
    assert silent.returncode == 1
    assert "Nothing answers at" in error_in(silent.stderr)


def test_files_that_are_no_requests_or_no_results_stay_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(jsonl([chat_line("a")]))
    refused = {
        "is not a file": ["batch", str(tmp_path)],
        "/dev/full is not a file": ["batch", str(source), "-o", "/dev/full"],
        "--timeout is 0": ["batch", str(source), "--timeout", "0"],
        "holds something else than results": ["batch", str(source), "-o", str(output)],
    }
    for content in (b"my notes\nand a last line", b'{"a": 1}\n', jsonl([chat_line("a")])):
        output.write_bytes(content)
        for what, words in refused.items():
            assert main(words) == 1
            assert what in capsys.readouterr().err
        assert output.read_bytes() == content
    source.write_bytes("{}".encode("utf-16"))
    assert main(["batch", str(source)]) == 1
    assert "text in UTF-16" in capsys.readouterr().err
    assert not source.with_suffix(".results.jsonl").exists()


def test_a_torn_first_result_is_written_again(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    for content in (b"", b'{"i', b'{"id":"batch_req_1","custom', b'{"id": "a", "error": {}}\n'):
        output.write_bytes(content)
        batch._check_output(output)


def test_a_full_disk_is_said_with_what_to_do() -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        answering = batch._Batch(io.BytesIO(), full, batch._Progress(1))
        with pytest.raises(ConfigError, match=r"(?s)/dev/full cannot be written.*continues"):
            answering._write(b"{}\n", is_good=True)
    assert answering.progress.num_good == 0
