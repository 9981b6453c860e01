"""The command line: fast help, flags and variables, errors of three lines."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from command_line import ROOT, SMALL, environment, error_in, fails, penstock
from penstock.cli import COMMANDS, main
from penstock.commands.console import human_bytes, human_count, print_error
from penstock.commands.flags import (
    Parser,
    add_flags,
    flags_of,
    read_count,
    read_settings,
    unknown_variables,
)
from penstock.commands.local import add_sampling_flags, read_sampling
from penstock.config import EngineConfig, ServeConfig
from penstock.errors import ConfigError, PenstockError
from penstock.progress import Phase, PhaseList, timed


def test_the_help_of_chat_says_where_a_servers_key_comes_from(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["chat", "--help"])
    assert "PENSTOCK_API_KEY" in capsys.readouterr().out


def test_help_imports_no_torch() -> None:
    """Checked for every command in one process, which names the first that imports one of these."""
    asked = [[], ["--help"], *([name, "--help"] for name in COMMANDS)]
    code = (
        "import contextlib, io, sys\nfrom penstock.cli import main\n"
        f"for words in {asked!r}:\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as said:\n"
        "        try: main(words)\n"
        "        except SystemExit as end: assert not end.code, (words, end.code)\n"
        "    assert 'penstock' in said.getvalue(), words\n"
        "    assert not {'torch', 'rich'} & set(sys.modules), words\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment()
    )
    assert done.returncode == 0, done.stderr


def test_help_answers_at_once() -> None:
    """The target is 0.3 s. CPU time depends less on other load than elapsed time; an import of
    torch would show.
    """
    seconds = []
    for _ in range(3):
        before = os.times()
        assert penstock("serve", "--help").returncode == 0
        after = os.times()
        used = after.children_user + after.children_system
        seconds.append(used - before.children_user - before.children_system)
    assert 0 < min(seconds) < 0.9, seconds


def test_bare_command_teaches_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    said = capsys.readouterr().out
    for name in COMMANDS:
        assert re.search(rf"^  {name} ", said, re.MULTILINE), name
        assert f"penstock {name}" in said or name in ("bench", "tune")


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    import penstock as package

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"penstock {package.__version__}\n"


@pytest.mark.parametrize(
    ("words", "exit_code", "said"),
    [
        (
            ["srve"],
            2,
            "error: penstock has no command 'srve'\n"
            "  Did you mean 'serve'?\n"
            "  The commands are serve, chat, top, generate, batch, quantize, convert, inspect, plan, bench, tune, "
            "eval, forge.\n",
        ),
        (
            ["--versoin"],
            2,
            "error: penstock has no flag '--versoin'\n"
            "  Did you mean '--version'?\n"
            "  The commands are serve, chat, top, generate, batch, quantize, convert, inspect, plan, bench, tune, "
            "eval, forge.\n",
        ),
        (
            ["serve", "--max-row", "4"],
            2,
            "error: penstock serve has no flag --max-row\n"
            "  Did you mean '--max-rows'?\n"
            "  Run `penstock serve --help` for all flags.\n",
        ),
        (
            ["generate", "a", "b"],
            2,
            "error: penstock generate takes no argument 'b'\n"
            "  Text with spaces needs quotes.\n"
            "  Run `penstock generate --help` for all flags.\n",
        ),
        (
            ["generate"],
            2,
            "error: penstock generate needs TEXT\n"
            "  Run `penstock generate --help` for all flags.\n",
        ),
        (
            ["serve", "--port", "many"],
            2,
            "error: --port: 'many' is not a whole number; write 4096 or 4k\n"
            "  Run `penstock serve --help` for all flags.\n",
        ),
        (
            ["generate", "x", "--n", "200"],
            1,
            "error: --n is 200\n  It must be between 1 and 128.\n",
        ),
        (
            ["inspect", "--dtype", "float23"],
            1,
            "error: --dtype is 'float23'\n"
            "  It must be one of auto, float32, bfloat16, float16.\n"
            "  Did you mean 'float32'?\n",
        ),
        (
            ["serve", "--speculate", "auto:3"],
            1,
            "error: --speculate is 'auto:3'\n"
            "  auto takes no number of drafts.\n"
            "  Use auto, or a drafter with a number, such as ngram:7.\n",
        ),
        (
            ["serve", "--expert-cache", "much"],
            1,
            "error: --expert-cache is 'much'\n"
            "  It must be an amount of memory.\n"
            "  Write it as 6GB or 512MB.\n",
        ),
        (
            ["serve", "--allowed-host", "http://x"],
            1,
            "error: --allowed-host is 'http://x'\n"
            "  It must be a host name, without http:// and without a path.\n"
            "  Use a name such as penstock.example.com, or * for all names.\n",
        ),
        (
            ["serve", "--max-rows", "0"],
            1,
            "error: --max-rows is 0\n  It must be more than 0.\n",
        ),
        (
            ["chat", "--base-url", "http://127.0.0.1:9"],
            1,
            "error: Nothing answers at http://127.0.0.1:9\n"
            "  [Errno 111] Connection refused.\n"
            "  Start a server with `penstock serve`, or correct --base-url.\n",
        ),
        (
            ["bench", "step", "--batch", "0"],
            1,
            "error: --batch is 0\n  It must be 1 or more.\n",
        ),
        (
            ["bench", "step", "--json", "/"],
            1,
            "error: --json / cannot be written\n  Is a directory.\n  Use a writable file, or omit "
            "--json.\n",
        ),
        (
            ["bench", "step", "--batch", "1", "--context", "100k"],
            1,
            "error: --context 102,400 is too long for penstock-tiny\n"
            "  The model has 8,192 positions; with the timed steps, it would need "
            "102,446.\n"
            "  Use --context 8146 or less.\n",
        ),
        (
            ["generate", "x", "--logprobs", "2"],
            1,
            "error: --logprobs needs --json\n  Plain text cannot contain log-probabilities.\n  Add "
            "--json.\n",
        ),
        (
            ["generate", "x", "--grammar", "y"],
            2,
            "error: penstock generate has no flag --grammar\n"
            "  Run `penstock generate --help` for all flags.\n",
        ),
    ],
)
def test_mistake_is_answered_in_three_lines(
    words: list[str], exit_code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fails(capsys, *words) == (exit_code, said)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_says_what_it_does(name: str) -> None:
    parser = Parser(prog="test")
    importlib.import_module(f"penstock.commands.{name}").add_arguments(parser)
    assert [action.option_strings for action in parser._actions if not action.help] == []


def test_misspelt_model_gets_the_nearest_preset(capsys: pytest.CaptureFixture[str]) -> None:
    exit_code, said = fails(capsys, "inspect", "Qwen3.5-4")
    assert exit_code == 1
    what, why, todo = said.splitlines()
    assert what == "error: There is no model 'Qwen3.5-4'"
    assert "Qwen3.5-35B-A3B" in why
    assert todo == "  Did you mean 'Qwen3.5-4B'?"


def test_folder_without_config_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    exit_code, said = fails(capsys, "generate", "x", "-m", str(tmp_path))
    assert exit_code == 1
    assert error_in(said) == (
        f"error: {tmp_path} has no config.json\n"
        "  It holds notes.txt.\n"
        "  Give the folder that the whole model was downloaded into.\n"
    )


def test_broken_config_json_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama",')
    exit_code, said = fails(capsys, "serve", str(tmp_path))
    assert exit_code == 1
    what, why, todo = error_in(said).splitlines()
    assert what == f"error: {tmp_path}/config.json is not JSON"
    assert "line 1 column 24" in why
    assert todo == "  Download or copy the file again."


def test_busy_port_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        exit_code, said = fails(capsys, "serve", "--port", str(port))
    assert exit_code == 1
    assert error_in(said) == (
        f"error: Port {port} is in use\n"
        f"  Another program listens on 127.0.0.1:{port}.\n"
        "  Stop it, or choose another port with --port.\n"
    )


def test_missing_gpu_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    exit_code, said = fails(capsys, "generate", "x", "--device", "cuda")
    assert exit_code == 1
    assert error_in(said) == (
        "error: The device 'cuda' is not available\n"
        f"  torch {torch.__version__} sees no CUDA device.\n"
        "  Use --device cpu, or install a CUDA build of torch and a driver.\n"
    )


def test_prompt_longer_than_the_context_says_both_lengths(
    capsys: pytest.CaptureFixture[str],
) -> None:
    exit_code, said = fails(capsys, "generate", "river " * 100, "--max-model-len", "64", *SMALL)
    assert exit_code == 1
    what, why, todo = error_in(said).splitlines()
    assert int(re.findall(r"\d+", what)[0]) > 64
    assert "64" in why
    assert "--max-model-len" in todo


def test_traceback_only_with_debug(capsys: pytest.CaptureFixture[str]) -> None:
    _, said = fails(capsys, "inspect", "nowhere")
    assert "Traceback" not in said
    _, said = fails(capsys, "inspect", "nowhere", "--debug")
    assert "Traceback" in said
    assert "error: There is no model 'nowhere'" in said


def test_our_own_bug_gets_three_lines_too() -> None:
    stream = io.StringIO()
    print_error(ZeroDivisionError("division by zero"), stream)
    assert stream.getvalue() == (
        "error: ZeroDivisionError: division by zero\n"
        "  Penstock did not expect this; it is probably a bug.\n"
        "  Run the same command with --debug for the traceback.\n"
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_color_only_on_a_terminal_and_never_against_no_color(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    error = PenstockError("what", "why", "todo")
    terminal, pipe = Terminal(), io.StringIO()
    print_error(error, terminal)
    print_error(error, pipe)
    assert terminal.getvalue().startswith("\x1b[1;31merror:")
    assert pipe.getvalue() == "error: what\n  why\n  todo\n"
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    print_error(error, plain)
    assert plain.getvalue() == pipe.getvalue()


def test_every_line_of_an_error_is_indented() -> None:
    said = io.StringIO()
    print_error(PenstockError("what", "  one.\n  two.\nwhy"), said)
    assert said.getvalue() == "error: what\n    one.\n    two.\n  why\n"


def test_interrupt_exits_130(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(io.StringIO):
        def read(self, size: int | None = -1) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", Interrupted())
    assert fails(capsys, "generate", "-") == (130, "\n")


def test_interrupt_of_an_import_exits_130(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    assert fails(capsys, "inspect") == (130, "\n")


def parse(settings: type[Any], *words: str) -> argparse.Namespace:
    parser = Parser(prog="test")
    add_flags(parser, settings, title="settings")
    return parser.parse_strictly(words)


SAMPLES = {"int": "7", "float": "0.5", "bool": "1", "str": "x"}
SAMPLES |= {"tuple[int, ...]": "7", "tuple[str, ...]": "x"}
# Valid values of settings that accept few values.
OWN_SAMPLES = {"min_priority": "-7", "speculate": "mtp:2"}
OWN_SAMPLES |= {"expert_cache": "6GB", "expert_ram": "40GB"}


@pytest.mark.parametrize("settings", [EngineConfig, ServeConfig])
def test_every_setting_has_a_flag_and_a_variable(settings: type[Any]) -> None:
    for flag in flags_of(settings):
        kind = str(flag.field.type).removesuffix(" | None")
        sample = OWN_SAMPLES.get(flag.field.name, SAMPLES[kind])
        text = flag.field.metadata.get("choices", (sample,))[0]
        words = [flag.name] if flag.is_switch else [flag.name, text]
        by_flag = read_settings(settings, parse(settings, *words), {})
        by_variable = read_settings(
            settings, parse(settings), {f"PENSTOCK_{flag.field.name.upper()}": text}
        )
        assert by_flag == by_variable == {flag.field.name: flag.read(text)}
        settings(**by_flag)


def test_flag_beats_variable_beats_default() -> None:
    variables = {"PENSTOCK_MAX_ROWS": "8", "PENSTOCK_PREFIX_CACHE": "off"}
    nothing = EngineConfig(**read_settings(EngineConfig, parse(EngineConfig), {}))
    assert nothing == EngineConfig()
    both = EngineConfig(
        **read_settings(EngineConfig, parse(EngineConfig, "--max-rows", "2"), variables)
    )
    assert both.max_rows == 2
    assert both.prefix_cache is False
    again = read_settings(EngineConfig, parse(EngineConfig, "--prefix-cache"), variables)
    assert again == {"max_rows": 8, "prefix_cache": True}


def test_switches_can_be_turned_off() -> None:
    assert read_settings(EngineConfig, parse(EngineConfig, "--no-overlap"), {}) == {
        "overlap": False
    }


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4k", 4096),
        ("1.5K", 1536),
        ("2m", 2 * 1024**2),
        ("4,096", 4096),
        ("-3", -3),
        (str(2**63 - 1), 2**63 - 1),
    ],
)
def test_numbers_may_be_written_short(text: str, number: int) -> None:
    assert read_count(text) == number


@pytest.mark.parametrize("text", ["", "k", "four", "1.5", "4kk", "nan", "0.0001k"])
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        read_count(text)


def test_wrong_variable_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings(EngineConfig, parse(EngineConfig), {"PENSTOCK_MAX_ROWS": "some"})
    assert caught.value.what == "PENSTOCK_MAX_ROWS is 'some'"
    assert "--max-rows" in caught.value.todo


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"state_dtype": "bfloat16"}, "float32, float16"),
        ({"state_dtype": "float16", "deterministic": True}, "where steps end"),
    ],
)
def test_states_that_cannot_be_are_refused(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match="state_dtype is") as caught:
        EngineConfig(**settings)
    assert word in caught.value.why


@pytest.mark.parametrize("words", [["generate", "x"], ["serve"]])
def test_whole_experts_without_other_ranks_are_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code, said = fails(capsys, *words, "--enable-expert-parallel")
    assert exit_code == 1
    assert error_in(said).splitlines() == [
        "error: --enable-expert-parallel is on, but the model has one rank",
        "  With --ep, experts are spread over the ranks of --tp: one rank has all of them.",
        "  Set --tp to the number of GPUs, or omit --ep.",
    ]


def test_all_reduces_of_one_rank_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    exit_code, said = fails(capsys, "generate", "x", "--custom-all-reduce")
    assert exit_code == 1
    assert error_in(said).splitlines() == [
        "error: --custom-all-reduce is on, but the model has one rank",
        "  One rank has nothing to add to its sums.",
        "  Set --tp to the number of GPUs, or omit --custom-all-reduce.",
    ]


@pytest.mark.parametrize("name", ["fp8_e5m2", "nvfp4", "float8"])
def test_a_type_of_kv_that_does_not_exist_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_dtype is '{name}'") as caught:
        EngineConfig(kv_dtype=name)
    assert "auto, bfloat16, fp8, fp8_e4m3, int8" in caught.value.why


def test_misspelt_variable_does_not_pass_in_silence() -> None:
    assert unknown_variables({"PENSTOCK_MAX_ROWS": "8", "PATH": "/bin"}) == []
    (sentence,) = unknown_variables({"PENSTOCK_MAX_ROW": "8"})
    assert "Did you mean 'PENSTOCK_MAX_ROWS'?" in sentence


def test_sampling_flags_make_sampling_params() -> None:
    parser = Parser(prog="test")
    add_sampling_flags(parser)
    words = (
        "--temperature 0.5 --top-k 4k --stop A --stop B --stop-token-ids 1,2 --logit-bias "
        "3=-100,4=1.5"
    )
    sampling = read_sampling(parser.parse_strictly([*words.split(), "--ignore-eos"]))
    assert sampling.temperature == 0.5
    assert sampling.top_k == 4096
    assert sampling.stop == ("A", "B")
    assert sampling.stop_token_ids == (1, 2)
    assert sampling.logit_bias == {3: -100.0, 4: 1.5}
    assert sampling.ignore_eos


def test_model_may_stand_before_or_after_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["no-such", "--port", "1"],
        ["--port", "1", "no-such"],
        ["--port", "1", "-m", "no-such"],
    ):
        _, said = fails(capsys, "serve", *words)
        assert "There is no model 'no-such'" in said


def test_log_has_one_line_a_phase() -> None:
    log = io.StringIO()
    with PhaseList(log) as phases:
        phases(Phase("weights"))
        phases(Phase("weights", "0.1 GB", 0.5))
        phases(Phase("weights", "0.2 GB", 1.0, 1.25))
        phases(Phase("weights", "", 1.0, 1.26))
        with timed("cache", phases):
            pass
    assert [line.split() for line in log.getvalue().splitlines()] == [
        ["weights", "1.25", "s", "0.2", "GB"],
        ["cache", "0.00", "s"],
    ]


def test_terminal_shows_a_bar_and_keeps_what_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with PhaseList(terminal) as phases:
        phases(Phase("weights", "half", 0.5))
        phases._progress.refresh()  # type: ignore[union-attr]
        assert "half" in terminal.getvalue()
        phases(Phase("weights", "all [of] it", 1.0, 2.0))
    assert re.search(r"weights +2\.00 s  all \[of\] it", terminal.getvalue())


@pytest.mark.parametrize(
    ("number", "said"),
    [(0, "0"), (999, "999"), (1234, "1.23 k"), (34.66e9, "34.7 B"), (808e9, "808 B")],
)
def test_counts_are_said_in_three_digits(number: float, said: str) -> None:
    assert human_count(number) == said


def test_bytes_are_decimal() -> None:
    assert human_bytes(20480) == "20.5 kB"
    assert human_bytes(71e9) == "71.0 GB"


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["inspect"]])
def test_output_that_cannot_be_written_is_no_traceback(words: list[str]) -> None:
    command = [sys.executable, "-m", "penstock", *words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment()
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: Cannot write the output\n  No space left on device.\n")


def test_a_closed_pipe_or_a_closed_output_needs_no_message() -> None:
    command = f"{sys.executable} -m penstock --help"
    for shell in (f"({command}; echo $? >&2) | :", f"{command} >&-; echo $? >&2"):
        done = subprocess.run(
            ["bash", "-c", shell], capture_output=True, text=True, cwd=ROOT, env=environment()
        )
        assert done.stderr in ("0\n", "1\n")


def test_a_path_that_cannot_be_opened_is_not_called_a_bug() -> None:
    stream = io.StringIO()
    print_error(IsADirectoryError(21, "Is a directory", "results"), stream)
    assert stream.getvalue() == (
        "error: Cannot read or write results\n"
        "  Is a directory.\n"
        "  Check the path, its permissions and the free space.\n"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bench"], "penstock bench needs one of step, prefill, engine, offload, serve"),
        (["tune", "x"], "penstock tune takes no argument 'x'; it must be one of kernels, offload"),
        (["serve", "--max-rows"], "--max-rows/--max-num-seqs needs a value"),
        (["serve", "--overlap=1"], "--async-scheduling/--no-async-scheduling takes no value"),
        (["inspect", "experts"], "penstock inspect experts needs a LOG"),
        (["inspect", "--png", "x.png"], "--png is for `penstock inspect experts LOG`"),
    ],
)
def test_wrong_words_are_named_in_plain_english(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code, error = fails(capsys, *words)
    assert exit_code == 2
    assert said in error


@pytest.mark.parametrize(("flag", "hint"), [("--temp", "'--temperature'"), ("--config", "")])
def test_a_shortened_flag_is_completed_and_a_foreign_one_gets_no_wild_guess(
    flag: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, error = fails(capsys, "serve", flag, "1")
    assert hint in error
    assert ("Did you mean" in error) is bool(hint)


@pytest.mark.parametrize("port", ["-1", "70000"])
def test_a_port_out_of_range_is_told_the_range(
    port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = f"error: --port is {port}\n  It must be between 0 and 65535.\n"
    assert fails(capsys, "serve", "--port", port) == (1, expected)


@pytest.mark.parametrize(
    ("settings", "name", "value"),
    [
        (EngineConfig, "memory_gb", float("inf")),
        (EngineConfig, "checkpoint_gb", float("nan")),
        (EngineConfig, "checkpoint_gb", -1.0),
        (ServeConfig, "drain_timeout", float("inf")),
    ],
)
def test_amounts_are_finite_and_not_negative(settings: Any, name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        settings(**{name: value})
