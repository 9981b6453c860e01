"""The harness against a real server with the embedded model, and lm-eval if it is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from command_line import ROOT, environment
from judged_server import TINY, judged_server
from penstock.cli import main
from penstock.eval.recount import ServerCounter, TokenCounter, find_tokenizer
from penstock.http_client import HttpClient
from serving import Server, start_server
from test_harness import SMALL_LOAD, WITH_TOKENIZER, measure


@pytest.fixture(scope="module")
def embedded() -> Iterator[Server]:
    with start_server({"memory_gb": 0.3, "page_size": 64}) as server:
        yield server


def test_the_embedded_model_passes_every_check(embedded: Server) -> None:
    words = ["-m", "eval.check_server", "--base-url", embedded.url, *WITH_TOKENIZER]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("[PASS]") == 28
    assert "[SKIP]" not in done.stdout


def test_the_servers_own_tokenizer_counts_as_the_models_file_does(embedded: Server) -> None:
    client = HttpClient(embedded.url, timeout_s=30)
    by_server = ServerCounter(client, "penstock-tiny")
    by_file = TokenCounter.load(str(TINY))
    messages = [{"role": "user", "content": "Zürich, 7 * 8?"}]
    assert by_server.count_text("Tom has 7 apples. 你好") == by_file.count_text(
        "Tom has 7 apples. 你好"
    )
    assert by_server.count_text("") == 0
    assert by_server.count_prompt(messages) == by_file.count_prompt(messages)
    assert find_tokenizer(None, client, "renamed")[1] == "the server's own /tokenize"
    assert find_tokenizer(None, client, client.first_model())[1] == str(TINY)


def test_the_embedded_model_is_judged_from_end_to_end(
    embedded: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    correctness, throughput = tmp_path / "correctness.json", tmp_path / "throughput.json"
    words = [
        "--base-url",
        embedded.url,
        "--problems",
        "embedded",
        "--limit",
        "5",
        "--output",
        str(correctness),
    ]
    assert main(["eval", "correctness", *words]) == 0
    words = [
        "--base-url",
        embedded.url,
        *SMALL_LOAD,
        *WITH_TOKENIZER,
        "--concurrency",
        "1,4",
        "--seed",
        "0",
    ]
    assert main(["eval", "throughput", *words, "--output", str(throughput)]) == 0, (
        capsys.readouterr().out
    )
    capsys.readouterr()
    exit_code, report, _ = measure(
        capsys, "score", "--correctness", str(correctness), "--throughput", str(throughput)
    )
    assert exit_code == 0
    measured = [row for row in report["levels"] if row["verified_tok_s"]]
    assert [row["concurrency"] for row in measured] == [1, 4]
    total = sum(row["weight"] * row["verified_tok_s"] for row in measured)
    assert report["score"] == pytest.approx(total, rel=0.001)


def test_lm_eval_asks_gsm8k_of_a_local_file(
    embedded: Server, shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval")
    pytest.importorskip("tenacity")
    written = tmp_path / "gsm8k.json"
    data = str(shared_data / "gsm8k" / "test.jsonl")
    words = ["--base-url", embedded.url, "--data", data, "--limit", "3", "--output", str(written)]
    exit_code, report, _ = measure(capsys, "correctness", *words, "--max-tokens", "48")
    assert exit_code == int(not report["passed"])
    assert json.loads(written.read_text()) == report
    assert (report["asked"], report["num_fewshot"], report["without_reply"]) == (3, 8, 0)
    assert report["judge"].startswith("lm-eval ")
    assert report["wrong"][0]["question"].startswith("Janet")


def test_lm_eval_counts_a_failing_server_and_does_not_crash(
    shared_data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    pytest.importorskip("tenacity")
    monkeypatch.setattr("penstock.eval.lm_harness.MAX_TRIES", 1)
    with judged_server("500") as server:
        data = str(shared_data / "gsm8k" / "test.jsonl")
        words = ["--base-url", server.url, "--data", data, "--limit", "2"]
        exit_code, report, said = measure(capsys, "correctness", *words)
    assert (exit_code, report["without_reply"], report["exact_match"]["flexible"]) == (1, 2, 0.0)
    assert "2 without a reply: ClientResponseError: 500" in said
