"""Quality evaluations use the contest's shots, limits and metrics, on a sample of given size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from command_line import fails, penstock
from judged_server import judged_server, prompt_of
from penstock.cli import main
from penstock.eval import gpqa
from penstock.eval.harness_tasks import (
    KINDS,
    SUBJECTS,
    Mark,
    mmlu_by_subject,
    mmlu_without_examples,
)
from penstock.eval.quality import _splits_sentences
from penstock.eval.stream_client import StreamedReply

TOM = "What does Tom have when Tom has 3 apples and gets 4?"


def gpqa_folder(folder: Path, num_questions: int = 10) -> Path:
    lines = [
        {
            "Question": f"{TOM} ({number})",
            "Correct Answer": "seven",
            **{f"Incorrect Answer {wrong}": f"{wrong} and {number}" for wrong in (1, 2, 3)},
            "Subdomain": "apples",
        }
        for number in range(num_questions)
    ]
    (folder / "gpqa_diamond").mkdir(parents=True)
    file = folder / "gpqa_diamond" / "test.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return folder


def measure(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any], str]:
    exit_code = main(["eval", "quality", *words])
    said = capsys.readouterr()
    assert not said.err.startswith("error"), said.err
    return exit_code, json.loads(said.out.splitlines()[-1]), said.out


def right_letter(prompt: str) -> str:
    return prompt[prompt.index(") seven") - 1]


@pytest.fixture
def knows_apples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judged server thinks in a separate field, and then names the right choice."""
    import judged_server as judged

    def think(body: dict[str, Any], faults: set[str]) -> dict[str, Any]:
        text = f"So it must be seven.\nThe answer is ({right_letter(prompt_of(body))})"
        usage = {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18}
        thought = "The answer is (A). No, (B)?"
        if "never answers" in faults:
            return {"text": "", "thought": thought, "finish_reason": "length", "usage": usage}
        return {"text": text, "thought": thought, "finish_reason": "stop", "usage": usage}

    monkeypatch.setattr(judged, "make_reply", think)


def test_gpqa_thinks_streams_and_has_12288_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], knows_apples: None
) -> None:
    with judged_server() as server:
        words = ["--base-url", server.url, "--data", str(gpqa_folder(tmp_path)), "--seed", "5"]
        exit_code, report, said = measure(capsys, *words)
        bodies = server.bodies
    assert exit_code == 0, said
    (mark,) = report["tasks"]
    assert (mark["task"], mark["asked"], mark["share"], mark["gate"]) == (
        "gpqa_diamond",
        10,
        1.0,
        0.63,
    )
    assert (mark["num_fewshot"], mark["max_tokens"], mark["without_reply"]) == (0, 12288, 0)
    assert {body["max_tokens"] for body in bodies} == {12288}
    assert all(
        body["stream"] and body["chat_template_kwargs"]["enable_thinking"] for body in bodies
    )
    assert all(body["thinking"]["budget_tokens"] == 12288 for body in bodies), (
        "a server may close thoughts"
    )
    assert all(len(body["messages"]) == 1 for body in bodies)
    assert len({right_letter(prompt_of(body)) for body in bodies}) > 1
    assert report["not_asked"].keys() == {"mmlu_pro", "ifeval"}
    assert "skipped: mmlu_pro" in said


def test_a_thought_that_never_ends_is_no_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], knows_apples: None
) -> None:
    with judged_server("never answers") as server:
        words = ["--base-url", server.url, "--data", str(gpqa_folder(tmp_path)), "--limit", "3"]
        exit_code, report, _ = measure(capsys, *words)
    (mark,) = report["tasks"]
    assert (exit_code, mark["share"], mark["metrics"]["cut_off"]) == (1, 0.0, 3.0)


@pytest.mark.parametrize(
    ("flags", "variables", "asked"),
    [
        (["--limit", "4"], {}, 4),
        (["--limit", "0.25"], {}, 3),
        ([], {"QUALITY_LIMIT": "0.5"}, 5),
        ([], {"QUALITY_LIMIT": "2"}, 2),
        (["--limit", "1"], {"QUALITY_LIMIT": "0.5"}, 1),
        (["--limit", "4k"], {}, 10),
    ],
)
def test_a_limit_is_a_count_or_a_fraction(
    flags: list[str],
    variables: dict[str, str],
    asked: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    knows_apples: None,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with judged_server() as server:
        words = ["--base-url", server.url, "--data", str(gpqa_folder(tmp_path)), *flags]
        _, report, _ = measure(capsys, *words)
    assert report["tasks"][0]["asked"] == asked


def test_a_variable_that_is_no_limit_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUALITY_LIMIT", "some")
    exit_code, said = fails(capsys, "eval", "quality")
    assert exit_code == 1
    assert said.startswith("error: QUALITY_LIMIT is 'some'")


def test_gpqa_without_a_file_is_refused_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    exit_code, said = fails(capsys, "eval", "quality", "--tasks", "gpqa_diamond")
    assert exit_code == 1
    assert said.startswith("error: GPQA-Diamond needs --data")


def test_a_line_that_is_no_question_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = gpqa_folder(tmp_path)
    (folder / "gpqa_diamond" / "test.jsonl").write_text('{"Question": "x"}\n')
    with judged_server() as server:
        exit_code, said = fails(
            capsys, "eval", "quality", "--base-url", server.url, "--data", str(folder)
        )
    assert exit_code == 1
    assert "Line 1 of" in said


@pytest.mark.parametrize(
    ("content", "letter"),
    [
        ("The answer is (B)", "B"),
        ("**Answer: C**", "C"),
        ("The answer is $\\boxed{D}$.", "D"),
        ("First (A), but then (C).", "C"),
        ("The answer is (A). Wait: the answer is (D).", "D"),
        ("<think>The answer is (A)</think>\nThe answer is (B)", "B"),
        ("<think>The answer is (A)", None),
        ("The answer is a matter of taste", None),
        ("", None),
    ],
)
def test_the_last_choice_after_the_thought_counts(content: str, letter: str | None) -> None:
    assert gpqa.chosen_letter(StreamedReply(0.0, 1.0, content=content)) == letter


def test_the_gates_and_the_ways_of_asking_are_the_contests() -> None:
    mmlu, ifeval = KINDS["mmlu_pro"], KINDS["ifeval"]
    assert (mmlu.gate, mmlu.num_fewshot, mmlu.max_tokens) == (0.621, 5, 512)
    assert (ifeval.gate, ifeval.num_fewshot, ifeval.max_tokens) == (0.814, 0, 512)
    assert ifeval.metric.startswith("inst_level_strict")
    assert (gpqa.GATE, gpqa.MAX_TOKENS) == (0.630, 12_288)
    assert not Mark("m", "x", 1.0, 0.5, 0, 0, 0, 512).has_passed


def mmlu_folder(folder: Path) -> Path:
    """Two subjects; the validation set has one more column than the questions."""
    folder.mkdir()
    rows = [
        {
            "question_id": number,
            "question": f"Which is number {number}?",
            "options": ["one", "two", "three"],
            "answer": "B",
            "answer_index": 1,
            "category": category,
        }
        for number, category in enumerate(["biology", "computer science"] * 6)
    ]
    worked = [
        {**row, "cot_content": "A: Let's think step by step. The answer is (B)."} for row in rows
    ]
    (folder / "test.jsonl").write_text("\n".join(map(json.dumps, rows[:4])) + "\n")
    (folder / "validation.jsonl").write_text("\n".join(map(json.dumps, worked)) + "\n")
    return folder


def test_mmlu_pro_is_asked_by_subject_with_worked_examples(tmp_path: Path) -> None:
    assert len(mmlu_by_subject(None)) == len(SUBJECTS) == 14
    folder = mmlu_folder(tmp_path / "mmlu_pro")
    tasks = mmlu_by_subject(folder / "test.jsonl")
    assert [task.source for task in tasks] == [
        "mmlu_pro/mmlu_pro_biology.yaml",
        "mmlu_pro/mmlu_pro_computer_science.yaml",
    ]
    tasks[0].write(tmp_path, tmp_path / "tasks")
    written = json.loads((tmp_path / "penstock_mmlu_pro_biology.yaml").read_text())
    files = written["dataset_kwargs"]["data_files"]
    columns = [
        {*json.loads(line)}
        for file in files.values()
        for line in Path(file).read_text().splitlines()
    ]
    assert files.keys() == {"test", "validation"}
    assert all(names == columns[0] for names in columns)
    assert "num_fewshot" not in written  # lm-eval's own five examples remain
    plain = mmlu_without_examples(folder / "test.jsonl")
    assert plain.changes["num_fewshot"] == 0


def test_mmlu_pro_through_lm_eval_has_five_examples_and_512_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval")
    mmlu_folder(tmp_path / "mmlu_pro")
    with judged_server() as server:
        words = [
            "--base-url",
            server.url,
            "--data",
            str(tmp_path),
            "--tasks",
            "mmlu_pro",
            "--limit",
            "4",
        ]
        exit_code, report, said = measure(capsys, *words)
        bodies = server.bodies
    (mark,) = report["tasks"]
    assert (exit_code, mark["asked"], mark["num_fewshot"], mark["note"]) == (1, 4, 5, None), said
    assert {body["max_tokens"] for body in bodies} == {512}
    for body in bodies:
        roles = [message["role"] for message in body["messages"]]
        assert roles.count("assistant") == 5
        assert roles[-1] == "user"


@pytest.mark.parametrize("task", ["mmlu_pro", "ifeval", "gpqa_diamond"])
def test_the_example_s_questions_are_asked_to_the_end(task: str) -> None:
    """`examples/quality` has a few questions of our own in the format of each set."""
    if task != "gpqa_diamond":
        pytest.importorskip("lm_eval")
        pytest.importorskip("nltk")
    with judged_server() as server:
        words = ["--data", "examples/quality", "--tasks", task, "--seed", "1"]
        done = penstock("eval", "quality", "--base-url", server.url, *words, HF_HUB_OFFLINE="1")
        num_asked = len(server.bodies)
    (mark,) = json.loads(done.stdout.splitlines()[-1])["tasks"]
    expected = {"mmlu_pro": 14, "ifeval": 4, "gpqa_diamond": 2}[task]
    assert (mark["asked"], mark["without_reply"], num_asked) == (expected, 0, expected)


@pytest.mark.parametrize(
    ("instruction", "is_needed"),
    [("length_constraints:number_sentences", True), ("punctuation:no_comma", False)],
)
def test_nltk_s_sentences_are_needed_only_where_a_question_counts_them(
    instruction: str, is_needed: bool, tmp_path: Path
) -> None:
    file = tmp_path / "input_data.jsonl"
    file.write_text(json.dumps({"key": 1, "prompt": "x", "instruction_id_list": [instruction]}))
    assert _splits_sentences(file) == is_needed
    assert _splits_sentences(None)
