import json
import os
import subprocess
import sys
from pathlib import Path

from report import API_KEY, BASE_URL, MODEL, feature

NUM_REQUESTS = 8


def benchmark(route, **data):
    """Returns how many requests two streams of the benchmark completed."""
    out = Path(os.environ["HOME"], f"{route.replace('/', '-')}-{len(data)}.json")
    backend = {"kind": "openai_http", "target": BASE_URL, "model": MODEL, "api_key": API_KEY}
    data = {"kind": "synthetic_text", "prompt_tokens": 64, "output_tokens": 16, **data}
    tokenizer = {"kind": "huggingface_auto", "model": os.environ["MODEL_FOLDER"]}
    options = {
        "backend": {**backend, "request_format": f"/v1/{route}"},
        "profile": {"kind": "concurrent", "streams": 2},
        "constraint": {"kind": "max_requests", "count": NUM_REQUESTS},
        "data": data,
        "tokenizer": tokenizer,
        "output": {"kind": "json", "path": str(out)},
    }
    command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"]
    for name, value in options.items():
        command += [f"--{name}", json.dumps(value)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (done.stderr + done.stdout)[-300:]
    (run,) = json.loads(out.read_text())["benchmarks"]
    totals = run["metrics"]["request_totals"]
    assert totals["successful"] == NUM_REQUESTS, totals
    assert totals["errored"] == 0, totals
    return f"{totals['successful']} requests completed"


@feature("chat completions", "stream", "completed")
def _():
    return benchmark("chat/completions")


@feature("chat completions", "second turn", "completed")
def _():
    return benchmark("chat/completions", turns=2)


@feature("chat completions", "streamed tools", "completed")
def _():
    return benchmark("chat/completions", turns=2, tool_call_turns=1)


@feature("completions", "stream", "completed")
def _():
    return benchmark("completions")


@feature("Responses", "stream", "completed")
def _():
    return benchmark("responses")
