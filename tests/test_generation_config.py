"""generation_config.json sets sampling defaults of requests; flags override it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.assets import default_model
from penstock.config import ServeConfig
from penstock.errors import CheckpointError, ConfigError
from penstock.text.generation_config import checkpoint_sampling
from sampled_model import write_sampled_model
from serving import Server, start_server

QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 64}
STORY = {
    "messages": [{"role": "user", "content": "Tell me a story about a river."}],
    "max_tokens": 24,
}


def write_config(folder: Path, fields: Any) -> Path:
    file = folder / "generation_config.json"
    file.write_text(json.dumps(fields))
    return file


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (QWEN, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        ({"temperature": 0.7, "min_p": 0.1}, {"temperature": 0.7, "min_p": 0.1}),
        ({"do_sample": True, "top_k": -1}, {"temperature": 1.0, "top_k": 0}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0}),
        (
            {"do_sample": False, "temperature": None, "repetition_penalty": 1.05},
            {"temperature": 0.0, "repetition_penalty": 1.05},
        ),
        ({"eos_token_id": 1}, {}),
    ],
)
def test_the_file_says_how_replies_are_drawn(
    tmp_path: Path, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    file = write_config(tmp_path, fields)
    assert checkpoint_sampling("auto", tmp_path) == expected
    assert checkpoint_sampling("auto", tmp_path / "weights.pt") == expected
    assert checkpoint_sampling(str(file), None) == expected
    assert checkpoint_sampling(str(tmp_path), default_model()) == expected
    assert checkpoint_sampling("off", tmp_path) == {}


def test_a_model_without_the_file_is_greedy(tmp_path: Path) -> None:
    assert checkpoint_sampling("auto", tmp_path) == {}
    assert checkpoint_sampling("auto", None) == {}
    assert checkpoint_sampling("auto", default_model()) == {"temperature": 0.0}


@pytest.mark.parametrize(
    "fields",
    [{"temperature": "hot"}, {"temperature": -1}, {"top_p": True}, {"top_k": 1.5}, ["temperature"]],
)
def test_a_wrong_file_is_named_with_a_way_out(tmp_path: Path, fields: Any) -> None:
    file = write_config(tmp_path, fields)
    with pytest.raises(CheckpointError, match=str(file)):
        checkpoint_sampling("auto", tmp_path)
    with pytest.raises(ConfigError, match="generation_config is 'of'"):
        checkpoint_sampling("of", tmp_path)


def test_flags_win_over_the_file() -> None:
    file = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    config = ServeConfig(top_p=0.5, min_p=0.1).with_sampling_of(file)
    assert config.sampling_defaults == {"temperature": 0.6, "top_p": 0.5, "top_k": 20, "min_p": 0.1}
    greedy = ServeConfig(greedy=True).with_sampling_of(file)
    assert greedy.sampling_defaults["temperature"] == 0
    assert ServeConfig(temperature=0.0).with_sampling_of(file).sampling_defaults["temperature"] == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sampled_model(tmp_path_factory.mktemp("sampled"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with start_server(engine={"model": str(folder)}) as server:
        yield server


def test_silent_requests_are_sampled_and_choices_differ(server: Server) -> None:
    choices = server.post({**STORY, "n": 2}).json()["choices"]
    assert len({choice["message"]["content"] for choice in choices}) == 2
    greedy = server.post({**STORY, "n": 2, "temperature": 0}).json()["choices"]
    assert len({choice["message"]["content"] for choice in greedy}) == 1
    prompt = {"prompt": "Once upon", "n": 8}  # so many that not all end at once
    texts = [choice["text"] for choice in server.post(prompt, "/v1/completions").json()["choices"]]
    assert len(set(texts)) > 1


def test_health_and_the_log_say_the_effective_values(server: Server) -> None:
    sampling = server.health().json()["sampling"]
    assert sampling == {
        "temperature": 1.5, "top_p": 1.0, "top_k": 50, "min_p": 0.0, "repetition_penalty": 1.0
    }  # fmt: skip
    (phase,) = (phase for phase in server.phases if phase["name"] == "sampling")
    assert "temperature 1.5" in phase["detail"]
    assert "top_k 50" in phase["detail"]


def test_offline_calls_that_say_nothing_are_drawn_with_the_file(folder: Path) -> None:
    from penstock.llm import LLM

    llm = LLM(str(folder), device="cpu", memory_gb=0.05)
    texts = {next(llm.stream("Once upon a time, there was a")) for _ in range(12)}
    assert len(texts) > 1  # greedy, every reply would begin with the same token
    assert llm.sampling_defaults == {"temperature": 1.5, "top_k": 50}
