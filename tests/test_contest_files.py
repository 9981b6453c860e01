"""Result files are exchanged with the contest's harness; only recounted tokens are verified."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from command_line import ROOT, fails
from judged_server import TINY, judged_server
from penstock.cli import main
from penstock.errors import PenstockError
from penstock.eval.chat_requests import Request
from penstock.eval.contest_files import (
    contest_correctness,
    contest_level,
    read_correctness,
    read_throughput,
)
from penstock.eval.load import LoadResult
from penstock.eval.score import WEIGHTS
from penstock.eval.throughput import judge_level

VLLM = ROOT / "baseline" / "results" / "vllm-0.19-tp8-8xh200.json"
CONTEST_LEVEL = {
    "concurrency": 64,
    "throughput_tok_per_sec": 12810.0,
    "total_tokens": 100,
    "total_prompt_tokens": 60,
    "total_completion_tokens": 40,
    "reported_prompt_tokens": 60,
    "reported_completion_tokens": 41,
    "successful_requests": 64,
    "failed_requests": 0,
    "wall_time_sec": 7.5,
    "token_discrepancy": False,
    "spot_checks_passed": 2,
    "spot_checks_total": 2,
}
LOAD = ["--num-requests", "3", "--input-tokens", "40", "--max-tokens", "30", "--concurrency", "1,2"]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any], str]:
    exit_code = main(["eval", *words])
    said = capsys.readouterr()
    assert not said.err.startswith("error"), said.err
    return exit_code, json.loads(said.out.splitlines()[-1]), said.out


def write(file: Path, fields: dict[str, Any]) -> str:
    file.write_text(json.dumps(fields))
    return str(file)


def contest_score(correctness: dict[str, Any], throughput: dict[str, Any]) -> float:
    """The result of the contest's own scorer for two files: missing keys count as nothing."""
    if (correctness.get("accuracy") or 0.0) < 0.875:
        return 0.0
    speeds = {
        row["concurrency"]: row["throughput_tok_per_sec"] for row in throughput.get("results", [])
    }
    return sum(weight * speeds.get(level, 0.0) for level, weight in WEIGHTS.items())


def test_the_contests_scorer_reads_what_throughput_writes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with judged_server() as server:
        words = ["throughput", "--base-url", server.url, "--tokenizer", str(TINY), *LOAD]
        exit_code, report, said = run(capsys, *words)
    assert exit_code == 0, said
    assert [row.keys() for row in report["results"]] == [CONTEST_LEVEL.keys()] * 2
    ours = {row["concurrency"]: row["verified_tok_s"] for row in report["levels"]}
    score = contest_score(contest_correctness(0.9, 0.89), report)
    assert score == pytest.approx(ours[1] + ours[2])
    assert score > 0
    for row in report["results"]:
        assert (
            row["total_tokens"] == row["total_prompt_tokens"] + row["total_completion_tokens"] > 120
        )
        assert (row["successful_requests"], row["failed_requests"], row["token_discrepancy"]) == (
            3,
            0,
            False,
        )
        assert (row["spot_checks_passed"], row["spot_checks_total"]) == (2, 2)


def test_a_level_that_failed_is_a_row_of_the_contest_too() -> None:
    gone = LoadResult.of_nothing_sent([Request("", 4)] * 64, PenstockError("Nothing answers"))
    row = contest_level(judge_level(8, gone, None).as_json())
    assert row.keys() == CONTEST_LEVEL.keys()
    assert (row["throughput_tok_per_sec"], row["failed_requests"]) == (0.0, 64)


def test_the_contests_files_are_scored_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    correctness = write(tmp_path / "c.json", {"task": "gsm8k_cot", "limit": 200, "accuracy": 0.915})
    throughput = write(
        tmp_path / "t.json", {"model": "m", "config": {}, "results": [CONTEST_LEVEL]}
    )
    words = [
        "score",
        "--correctness",
        correctness,
        "--throughput",
        throughput,
        "--baseline",
        str(VLLM),
    ]
    exit_code, report, said = run(capsys, *words)
    assert (exit_code, report["score"], report["verified"]) == (0, 8 * 12810.0, True)
    assert "91.5% of gsm8k_cot, gate 87.5%: PASSED" in said
    assert "verified tok/s" in said


def test_a_contest_file_is_a_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    baseline = write(
        tmp_path / "t.json", {"results": [CONTEST_LEVEL | {"concurrency": 2}, {"error": "x"}]}
    )
    with judged_server() as server:
        words = ["throughput", "--base-url", server.url, "--baseline", baseline, *LOAD]
        _, report, _ = run(capsys, *words)
    assert [row["baseline_tok_s"] for row in report["levels"]] == [None, 12810.0]


@pytest.mark.parametrize(
    ("fields", "flexible", "strict"),
    [
        ({"accuracy": 0.91}, 0.91, None),
        ({"accuracy": 0.5, "full_results": {"exact_match,flexible-extract": 0.9}}, 0.9, None),
        (contest_correctness(0.9, 0.8), 0.9, 0.8),
        ({"exact_match": {"flexible": 0.7, "strict": 0.6}, "accuracy": 0.9}, 0.7, 0.6),
    ],
)
def test_correctness_of_both_shapes_is_read(
    fields: dict[str, Any], flexible: float, strict: float | None, tmp_path: Path
) -> None:
    found = read_correctness("--correctness", write(tmp_path / "c.json", fields))
    assert (found.flexible, found.strict) == (flexible, strict)


def test_a_missing_accuracy_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    correctness = write(tmp_path / "c.json", {"task": "gsm8k_cot", "accuracy": None})
    assert main(["eval", "score", "--correctness", correctness, "--throughput", str(VLLM)]) == 1
    said = capsys.readouterr().err
    assert "has no share of right answers" in said
    assert '{"accuracy": 0.915}' in said


def test_without_a_tokenizer_nothing_is_called_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "t.json"
    with judged_server() as server:
        words = ["throughput", "--base-url", server.url, *LOAD, "--output", str(written)]
        _, report, said = run(capsys, *words)
    assert "NOT VERIFIED: no tokenizer was found" in said
    assert "--tokenizer FOLDER" in said
    assert "tok/s not verified in" in said
    assert "tok/s verified" not in said
    assert (report["recounted"], report["recounted_with"]) == (False, None)
    assert [row["verified_tok_s"] for row in report["levels"]] == [None, None]
    assert all(row["tok_s"] == row["claimed_tok_s"] > 0 for row in report["levels"])
    assert not read_throughput("--throughput", str(written)).is_verified
    correctness = write(tmp_path / "c.json", {"accuracy": 0.9})
    _, score, said = run(
        capsys, "score", "--correctness", correctness, "--throughput", str(written)
    )
    assert score["score"] > 0
    assert score["verified"] is False
    assert "not verified: only the server counted these tokens" in said
    assert "verified tok/s" not in said


def test_the_servers_own_tokenizer_is_asked_when_there_is_no_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with judged_server("counts for others") as server:
        exit_code, report, said = run(capsys, "throughput", "--base-url", server.url, *LOAD)
    assert exit_code == 0, said
    assert "counting tokens again with the server's own /tokenize" in said
    assert report["recounted_with"] == "the server's own /tokenize"
    assert all(row["verified_tok_s"] > 0 for row in report["levels"])
    with judged_server("counts for others", "counts no prompts") as server:
        exit_code, said = fails(capsys, "eval", "throughput", "--base-url", server.url, *LOAD)
    assert exit_code == 1
    assert said.startswith("error: The server's count of a prompt does not grow with the prompt")
    with judged_server("counts for others", "inflates") as server:
        exit_code, report, said = run(capsys, "throughput", "--base-url", server.url, *LOAD)
    assert exit_code == 1
    assert all(row["discrepancies"] >= 3 for row in report["levels"])


def test_the_served_models_folder_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = tmp_path / "hub" / "models--Qwen--Judged" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(TINY)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with judged_server() as server:
        for model, source in (
            ("penstock-tiny", TINY),
            (str(TINY), TINY),
            ("Qwen/Judged", snapshot),
        ):
            words = ["throughput", "--base-url", server.url, "--model", model, *LOAD]
            exit_code, report, said = run(capsys, *words)
            assert exit_code == 0, said
            assert (report["recounted"], report["recounted_with"]) == (True, str(source))


def test_check_server_recounts_when_the_served_models_folder_is_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with judged_server() as server:
        for model, mark in (("judged", "SKIP"), ("penstock-tiny", "PASS")):
            main(["eval", "check-server", "--base-url", server.url, "--model", model])
            said = capsys.readouterr().out
            assert f"[{mark}] T15 prompt recount" in said
            assert f"[{mark}] T15 completion recount" in said
