"""vLLM's flags mean the same here or are refused by name, and docs/vllm.md lists all of them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from command_line import ROOT, fails
from penstock.cli import ENGINE_COMMANDS, parse
from penstock.commands.flags import read_settings
from penstock.commands.vllm_flags import VLLM_FLAGS, aliases
from penstock.config import EngineConfig, ServeConfig
from penstock.text.generation_config import checkpoint_sampling

PAGE = (ROOT / "docs" / "vllm.md").read_text()


def settings_of(line: str) -> dict[str, object]:
    arguments = parse(["serve", *shlex.split(line)])[1]
    return {
        **read_settings(EngineConfig, arguments, {}),
        **read_settings(ServeConfig, arguments, {}),
    }


SWITCHES = ("--prefix-cache", "--no-graphs", "--overlap")


@pytest.mark.parametrize(("vllm", "ours"), list(aliases()))
def test_a_name_of_vllms_sets_what_ours_sets(vllm: str, ours: str) -> None:
    value = "" if ours in SWITCHES else " 1"
    assert settings_of(vllm + value) == settings_of(ours + value) != {}


def test_switches_are_turned_off_by_either_name() -> None:
    assert settings_of("--no-enable-prefix-caching") == {"prefix_cache": False}
    assert settings_of("--enforce-eager") == {"graphs": False}
    assert settings_of("--enforce-eager --graphs") == {"graphs": True}


def test_the_page_lists_every_flag_and_no_other() -> None:
    rows = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]
    assert [row for row in rows if len(row) == 2] == [
        [f"`{vllm}`", f"`{ours}`"] for vllm, ours in aliases()
    ]
    known = [
        [", ".join(f"`{name}`" for name in flag.names), flag.verdict, flag.why]
        for flag in VLLM_FLAGS
    ]
    assert [row for row in rows if len(row) == 3] == known


def test_the_command_of_the_page_is_understood(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```bash\npenstock serve (.*?)```", PAGE, re.DOTALL)
    given = settings_of(block.replace("\\\n", " "))
    assert given["max_rows"] == 128
    assert given["memory_share"] == 0.9
    assert given["sampling_seed"] == 0
    assert given["prefix_cache"] is True
    said = capsys.readouterr().err
    assert "note: --reasoning-parser qwen3 is a flag of vLLM and not needed here." in said


@pytest.mark.parametrize("command", ENGINE_COMMANDS)
def test_a_model_is_spread_by_tp_and_in_no_other_way(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["step"] if command in ("bench", "generate", "batch") else []  # what they are asked to do
    parse([command, *own, "--tensor-parallel-size", "2", "-pp", "1"])
    assert capsys.readouterr().err == ""
    exit_code, said = fails(capsys, command, *own, "--pipeline-parallel-size=2")
    assert exit_code == 2
    assert said.splitlines() == [
        "error: --pipeline-parallel-size 2 is a flag of vLLM and not supported here",
        "  Only 1 is accepted. Only --tp spreads a model over GPUs: each GPU has a part of every "
        "layer.",
        "  See docs/vllm.md.",
    ]


def test_what_would_change_the_answers_is_refused_by_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    refused = [(name, flag) for flag in VLLM_FLAGS if flag.accepted == () for name in flag.names]
    for name, flag in refused:
        words = [name] if flag.is_switch else [name, "x"]
        exit_code, said = fails(capsys, "serve", *words)
        assert exit_code == 2
        assert f"error: {' '.join(words)} is a flag of vLLM and not supported here" in said


def test_a_misspelt_flag_is_never_answered_with_one_that_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        "--trust-remote-code"
        not in fails(capsys, "serve", "--trust-remote-cod")[1].partition("\n")[2]
    )


def test_the_start_script_knows_every_name_that_says_how_many_engines_there_are() -> None:
    script = (ROOT / "start_server.sh").read_text()
    for name in [vllm for vllm, ours in aliases() if ours in ("--replicas", "--gpus", "--device")]:
        assert f"{name} | {name}=*" in script


def test_help_shows_both_names_in_one_entry(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["serve", "--help"])
    said = capsys.readouterr().out
    assert "--max-rows N, --max-num-seqs N" in said
    assert "--graphs, --no-graphs, --enforce-eager" in said
    assert "--trust-remote-code" not in said


def test_vllms_word_for_no_generation_config_is_understood(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    assert checkpoint_sampling("auto", tmp_path) == {"temperature": 0.5}
    assert checkpoint_sampling("vllm", tmp_path) == {}
