"""The APIs at full size: popular clients, and unusual requests.

Takes minutes. Each client is a package; tests of missing ones are skipped with a reason. Numbers
are printed as JSON lines; those of one run are in results/cpu/api.json.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from penstock.assets import default_model
from penstock.eval.lm_harness import NEEDED as LM_EVAL_PACKAGES
from serving import Server, eventually, start_server
from test_clients import CLIENT_BLOCKS, as_shown, run
from test_serve_abuse import assert_all_answered, byte_mutations, type_confusions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

QUESTION = "What is 17 + 26? Reply with just the number."
MESSAGES = [{"role": "user", "content": QUESTION}]
NUM_GENERATED = 5000  # requests that schemathesis makes up
NUM_SPOILT = 20_000  # bodies


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with start_server(engine={"max_model_len": 8192, "memory_gb": 0.5}) as running:
        yield running


@pytest.fixture(scope="module")
def short_server() -> Iterator[Server]:
    """A short context and a timeout end replies whose own limit a test has removed."""
    with start_server(engine={"max_model_len": 512}, serve={"request_timeout": 10.0}) as running:
        yield running


def report(name: str, **numbers: Any) -> None:
    print(json.dumps({"name": name, **numbers}), flush=True)


def require(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


# Clients


def test_litellm_speaks_to_it_as_openai_and_as_anthropic(server: Server) -> None:
    require("litellm")
    import litellm

    (example,) = [text for text in CLIENT_BLOCKS if "import litellm" in text]
    printed = run("python", as_shown(example, server.url))
    assert printed.split().count("43") == 2, printed  # among log lines of its own
    for provider, base in (("openai", f"{server.url}/v1"), ("anthropic", server.url)):
        name = f"{provider}/penstock-tiny"
        chunks = litellm.completion(name, MESSAGES, api_base=base, api_key="unused", stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "43"
    report("litellm", version=importlib.metadata.version("litellm"), providers=2, answers=4)


SUMS = [(a, b) for a in (11, 23, 35, 47) for b in (12, 24, 31, 52)]


@pytest.mark.parametrize("model", ["local-chat-completions", "local-completions"])
def test_lm_eval_asks_and_understands_the_answers(
    server: Server, tmp_path: Path, model: str
) -> None:
    require(*LM_EVAL_PACKAGES)
    is_chat = model == "local-chat-completions"
    task = {
        "output_type": "generate_until",
        "doc_to_text": "{{q}}" if is_chat else chat_prompt("{{q}}"),
        "doc_to_target": "{{a}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 32, "temperature": 0},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    settings = f"base_url={server.url}{path},tokenized_requests=False,tokenizer_backend=None"
    right = run_lm_eval(
        task, model, settings, tmp_path, *(["--apply_chat_template"] if is_chat else [])
    )
    report(
        model, version=importlib.metadata.version("lm_eval"), questions=len(SUMS), exact_match=right
    )
    assert right > 0.9


def test_lm_eval_compares_how_likely_answers_are(server: Server, tmp_path: Path) -> None:
    """Uses log-probabilities of prompts, each of which ends with one of the answers."""
    require(*LM_EVAL_PACKAGES)
    task = {
        "output_type": "multiple_choice",
        "doc_to_text": chat_prompt("{{q}}"),
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 1,
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    settings = f"base_url={server.url}/v1/completions,tokenizer={default_model()}"
    right = run_lm_eval(task, "local-completions", settings, tmp_path)
    report(
        "likelihood",
        version=importlib.metadata.version("lm_eval"),
        questions=len(SUMS),
        accuracy=right,
    )
    assert right > 0.9


def run_lm_eval(
    task: dict[str, Any], model: str, settings: str, folder: Path, *flags: str
) -> float:
    """Runs the sums; returns the share of right answers, the task's only metric."""
    questions = folder / "sums.jsonl"
    lines = [
        {
            "q": f"What is {a} + {b}? Reply with just the number.",
            "a": str(a + b),
            "choices": [str(a + b + n) for n in (1, 0, 10, -2)],
        }
        for a, b in SUMS
    ]
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = {"data_files": {"test": str(questions)}, "cache_dir": str(folder / "cache")}
    task = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": data,
        "test_split": "test",
        **task,
    }
    (folder / "sums.yaml").write_text(json.dumps(task))
    settings = f"model=penstock-tiny,num_concurrent=4,{settings}"
    words = [
        "--model",
        model,
        "--model_args",
        settings,
        "--tasks",
        "sums",
        "--include_path",
        str(folder),
    ]
    command = [
        sys.executable,
        "-m",
        "lm_eval",
        "run",
        *words,
        "--output_path",
        str(folder / "out"),
        *flags,
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "unused"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = (folder / "out").rglob("results*.json")
    metric = task["metric_list"][0]["metric"]
    return float(json.loads(results.read_text())["results"]["sums"][f"{metric},none"])


def chat_prompt(question: str) -> str:
    """A prompt as the embedded model's template renders it with thinking off."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.mark.parametrize("program", ["claude", "aider"])
def test_a_program_of_the_document_shows_the_models_words(
    server: Server, tmp_path: Path, program: str
) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not on PATH")
    (block,) = [text for text in CLIENT_BLOCKS if f"\n{program} " in text]
    home = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        ["bash", "-ec", as_shown(block, server.url)],
        cwd=tmp_path,
        env=home,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert re.search(r"\b\d+\b", done.stdout), said
    assert not re.search(r"API ?Error|BadRequest|Traceback", said), said
    report(program, answered=done.stdout.strip()[-200:])


# Unusual requests


def test_no_generated_request_is_a_5xx(short_server: Server, tmp_path: Path) -> None:
    require("schemathesis")
    words = [
        "--checks",
        "not_a_server_error",
        "--phases",
        "coverage,fuzzing",
        "--seed",
        "1",
        "--no-shrink",
    ]
    words += ["--max-examples", "300", "--continue-on-failure", "--suppress-health-check", "all"]
    program = str(Path(sys.executable).with_name("schemathesis"))
    command = [program, "run", f"{short_server.url}/openapi.json", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout[-5000:]
    (num_generated,) = re.findall(r"(\d+) generated", done.stdout)
    report("schemathesis", requests=int(num_generated), answers=answers_by_status(short_server))
    assert int(num_generated) >= NUM_GENERATED
    end_sessions(short_server)
    assert eventually(short_server.is_idle, 30.0)


def test_no_spoilt_body_is_a_5xx(short_server: Server) -> None:
    confusions = type_confusions(1.0)
    num_routes = len({path for path, _ in confusions})
    mutations = byte_mutations((NUM_SPOILT - len(confusions)) // num_routes + 1)
    assert_all_answered(short_server, confusions + mutations)
    report("spoilt bodies", type_confused=len(confusions), byte_mutated=len(mutations))
    end_sessions(short_server)
    assert eventually(short_server.is_idle, 30.0)


def end_sessions(server: Server) -> None:
    """Ends the sessions that such requests have begun: they keep their pages."""
    for session in server.http.get(f"{server.url}/v1/sessions").json()["data"]:
        answer = server.http.delete(f"{server.url}/v1/sessions/{quote(session['id'], safe='')}")
        assert answer.status_code == 200, (session, answer.text)


def answers_by_status(server: Server) -> dict[str, int]:
    text = server.http.get(f"{server.url}/metrics").text
    counts = re.findall(r'^penstock_answers_total\{status="(\d+)"\} (\d+)', text, re.MULTILINE)
    return {status: int(number) for status, number in counts}
