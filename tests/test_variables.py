"""Every flag is also an environment variable; flags override it, misspelt ones are reported."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

import pytest

from command_line import error_in, fails
from penstock.cli import COMMANDS, main, parse
from penstock.commands.flags import Parser, unknown_variables
from penstock.commands.variables import as_written, read_variables, variable_of, variables_of


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_has_a_variable_of_its_own(command: str) -> None:
    parser = Parser(prog=command)
    importlib.import_module(f"penstock.commands.{command}").add_arguments(parser)
    flags = [
        action for action in parser._actions if action.option_strings and action.dest != "help"
    ]
    names = [variable_of(command, action) for action in flags]
    assert None not in names
    assert len(set(names)) == len(names) == len(variables_of(command, parser)) > 0


@pytest.mark.parametrize(
    ("words", "variables", "field", "value"),
    [
        (["eval", "quality"], {"PENSTOCK_EVAL_LIMIT": "0.1"}, "limit", 0.1),
        (["eval", "quality", "--limit", "5"], {"PENSTOCK_EVAL_LIMIT": "0.1"}, "limit", 5),
        (["eval", "quality", "--limit=5"], {"PENSTOCK_EVAL_LIMIT": "0.1"}, "limit", 5),
        (
            ["eval", "throughput"],
            {"PENSTOCK_EVAL_BASE_URL": "http://h:1"},
            "base_url",
            "http://h:1",
        ),
        (["eval", "throughput"], {"PENSTOCK_EVAL_CONCURRENCY": "1,2"}, "concurrency", [(1, 2)]),
        (["eval", "throughput"], {"PENSTOCK_EVAL_STREAM": "off"}, "stream", False),
        (["eval", "throughput", "--stream"], {"PENSTOCK_EVAL_STREAM": "off"}, "stream", True),
        (["forge"], {"PENSTOCK_FORGE_MAX_TRIALS": "7"}, "max_trials", 7),
        (["forge"], {"PENSTOCK_FORGE_BUDGET": "90s"}, "budget", 90.0),
        (["generate", "x"], {"PENSTOCK_GENERATE_JSON": "1"}, "json", True),
        (["generate", "x"], {"PENSTOCK_GENERATE_JSON": "0"}, "json", False),
        (["generate", "x"], {"PENSTOCK_GENERATE_STOP": "a, b"}, "stop", ["a", "b"]),
        (["generate", "x", "--stop", "c"], {"PENSTOCK_GENERATE_STOP": "a,b"}, "stop", ["c"]),
        (["generate", "--raw", "x"], {"PENSTOCK_GENERATE_CHAT": "1"}, "chat", False),
        (["chat"], {"PENSTOCK_CHAT_SYSTEM": "-- Be brief"}, "system", "-- Be brief"),
        (["tune"], {"PENSTOCK_TUNE_BATCH": "1,2"}, "batch", (1, 2)),
        (["serve"], {"PENSTOCK_SERVE_PORT": "81"}, "port", 81),
    ],
)
def test_a_variable_sets_its_flag_and_a_typed_one_overrides_it(
    words: list[str],
    variables: dict[str, str],
    field: str,
    value: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    assert getattr(parse(words)[1], field) == value


def test_a_variable_that_cannot_be_read_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_EVAL_LIMIT", "some")
    exit_code, said = fails(capsys, "eval", "gates")
    assert exit_code == 2
    what, why, todo = said.splitlines()
    assert what == "error: PENSTOCK_EVAL_LIMIT is 'some'"
    assert "not a whole number" in why
    assert "--limit would override it" in todo


@pytest.mark.parametrize(
    ("words", "variables", "expected"),
    [
        (["--kv-cache-dtype", "x"], {}, "--kv-cache-dtype is 'x'"),
        (["--kv-dtype=x"], {}, "--kv-dtype is 'x'"),
        ([], {"PENSTOCK_KV_DTYPE": "x"}, "PENSTOCK_KV_DTYPE is 'x'"),
        (["--kv-cache-dtype", "x"], {"PENSTOCK_KV_DTYPE": "y"}, "--kv-cache-dtype is 'x'"),
        (
            ["--memory-gb", "1"],
            {"PENSTOCK_MEMORY_SHARE": "0.5"},
            "PENSTOCK_MEMORY_SHARE is 0.5 and --memory-gb is 1.0",
        ),
        (["--deterministic", "--block-size", "8"], {}, "--block-size is 8 and --deterministic is"),
    ],
)
def test_an_error_names_a_setting_as_the_user_wrote_it(
    words: list[str],
    variables: dict[str, str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    exit_code, said = fails(capsys, "generate", "x", *words)
    assert exit_code == 1
    assert error_in(said).startswith(f"error: {expected}")


def test_names_are_replaced_only_where_a_setting_is_meant() -> None:
    names = {"model": "-m", "page_size": "--block-size", "group": "PENSTOCK_QUANTIZE_GROUP"}
    said = "page_size is 8 and the model is a small one"
    assert as_written(said, names) == "--block-size is 8 and the model is a small one"
    assert as_written("--group is 5", names) == "PENSTOCK_QUANTIZE_GROUP is 5"
    assert as_written("tp is 3, but page_size is 8", {}) == "tp is 3, but page_size is 8"


def test_a_variable_of_a_sibling_measurement_is_neither_used_nor_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_EVAL_RUNS", "3")  # of latency
    exit_code, said = fails(capsys, "eval", "throughput", "--base-url", "http://127.0.0.1:9")
    assert (exit_code, said.splitlines()[0]) == (1, "error: Nothing answers at http://127.0.0.1:9")
    exit_code, said = fails(capsys, "eval", "throughput", "--runs", "3")
    assert exit_code == 2


def test_a_misspelt_variable_of_the_running_command_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_EVAL_LIMITS", "3")
    monkeypatch.setenv("PENSTOCK_FORGE_BUDGET", "3s")
    main(["eval", "score"])
    said = capsys.readouterr().err
    assert "PENSTOCK_EVAL_LIMITS is set, but no setting has that name" in said
    assert "PENSTOCK_EVAL_LIMIT" in said
    assert "PENSTOCK_FORGE_BUDGET" not in said
    assert unknown_variables({"PENSTOCK_EVAL_LIMIT": "3"}) != []


def test_a_variable_that_is_empty_says_nothing() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--limit", type=int)
    assert read_variables("eval", parser, [], {"PENSTOCK_EVAL_LIMIT": ""}).words == []
