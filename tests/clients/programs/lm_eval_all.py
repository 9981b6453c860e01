import json
import os
import subprocess
import sys
from pathlib import Path

from report import API_KEY, BASE_URL, MODEL, feature

FOLDER = Path(os.environ["HOME"])
SUMS = [(a, b) for a in (11, 23, 35, 47) for b in (12, 24)]
CHAT_PROMPT = "<|im_start|>user\n{{q}}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
GENERATE = {
    "output_type": "generate_until",
    "doc_to_target": "{{a}}",
    "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 32, "temperature": 0},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
CHOOSE = {
    "output_type": "multiple_choice",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": 1,
    "target_delimiter": "",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}


def evaluate(name, task, model, settings, *flags):
    """The share of right answers."""
    lines = [
        {
            "q": f"What is {a} + {b}? Reply with just the number.",
            "a": str(a + b),
            "choices": [str(a + b + n) for n in (1, 0, 10, -2)],
        }
        for a, b in SUMS
    ]
    folder = FOLDER / name
    folder.mkdir()
    (folder / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = {"data_files": {"test": str(folder / "sums.jsonl")}}
    task = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": data,
        "test_split": "test",
        **task,
    }
    (folder / "sums.yaml").write_text(json.dumps(task))
    words = [
        "--model",
        model,
        "--model_args",
        f"model={MODEL},num_concurrent=4,{settings}",
        "--tasks",
        "sums",
    ]
    command = [
        sys.executable,
        "-m",
        "lm_eval",
        "run",
        *words,
        "--include_path",
        str(folder),
        *flags,
    ]
    environment = {**os.environ, "OPENAI_API_KEY": API_KEY}
    out = folder / "out"
    done = subprocess.run(
        [*command, "--output_path", str(out)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-300:]
    (results,) = out.rglob("results*.json")
    metric = task["metric_list"][0]["metric"]
    share = json.loads(results.read_text())["results"]["sums"][f"{metric},none"]
    assert share > 0.8, share
    return f"{share:.0%} of {len(SUMS)} sums are right"


PLAIN = "tokenized_requests=False,tokenizer_backend=None"


@feature("chat completions", "chat", "right")
def _():
    settings = f"base_url={BASE_URL}/v1/chat/completions,{PLAIN}"
    task = {**GENERATE, "doc_to_text": "{{q}}"}
    return evaluate("chat", task, "local-chat-completions", settings, "--apply_chat_template")


@feature("completions", "chat", "right")
def _():
    settings = f"base_url={BASE_URL}/v1/completions,{PLAIN}"
    return evaluate("text", {**GENERATE, "doc_to_text": CHAT_PROMPT}, "local-completions", settings)


@feature("completions", "log-likelihoods", "right")
def _():
    settings = f"base_url={BASE_URL}/v1/completions,tokenizer={os.environ['MODEL_FOLDER']}"
    return evaluate(
        "likelihood", {**CHOOSE, "doc_to_text": CHAT_PROMPT}, "local-completions", settings
    )
