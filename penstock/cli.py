"""The `penstock` command: finds the subcommand, runs it, and prints errors in three lines.

Exit codes: 0 done, 1 an error, 2 a command line that cannot be parsed, 130 stopped with Ctrl-C.
Only the subcommand that runs is imported, and torch only by one that needs it, so help is
immediate.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from penstock import __version__
from penstock.commands.console import print_error, print_note
from penstock.commands.flags import ENV_PREFIX, Parser, UsageError, unknown_variables
from penstock.commands.variables import as_written, read_variables, variables_of, written_names
from penstock.commands.vllm_flags import add_vllm_flags
from penstock.errors import PenstockError, nearest

COMMANDS = {
    "serve": "answer the OpenAI API over HTTP",
    "chat": "talk to a model in this terminal",
    "top": "watch a running server in this terminal",
    "generate": "continue one text and print it",
    "batch": "answer a file of requests into another file",
    "quantize": "make an FP8, INT8 or INT4 checkpoint of a model",
    "convert": "put a model's experts into files, for a GPU that has no room for them",
    "inspect": "show the size of a model and what fits this machine",
    "plan": "simulate a load on a fleet: goodput, latencies, the GPUs it needs",
    "bench": "time decode steps and prefills against the memory floor, or a server under load",
    "tune": "measure the tiles of the kernels on this GPU",
    "eval": "measure any server of the OpenAI API: conformance, quality, speed",
    "forge": "write a specialised engine for one model on this machine",
}

ENGINE_COMMANDS = (
    "serve",
    "chat",
    "generate",
    "batch",
    "bench",
)  # those that take an engine's flags

HELP = """Penstock runs language models: hybrid Gated-DeltaNet ones (Qwen3.5) and Llamas.

usage: penstock COMMAND [...]

{commands}

Try it; without a model these use a tiny one that comes along:
  penstock chat                               talk to it; with --web in your browser
  penstock generate --chat "What is 7 * 8?"   one answer, streamed
  penstock serve                              an OpenAI-compatible server on port 8000
  penstock serve ~/models/Qwen3.5-4B          the same with a checkpoint of yours
  penstock top                                what that server does now
  penstock batch requests.jsonl               a file of requests, answered into another
  penstock eval gates                         what the model behind that server can do
  penstock quantize MODEL -o OUT              the same model in a quarter of the bytes
  penstock convert MODEL -o OUT               for a GPU with no room for all experts
  penstock inspect Qwen3.5-35B-A3B            parameters, bytes, what fits here
  penstock plan Qwen3.5-35B-A3B --rate 20     how many GPUs a load needs
  penstock forge --budget 10m                 an engine.py for the model in target/

penstock COMMAND --help shows every flag. All are environment variables too: of the engine
and the server --max-rows is PENSTOCK_MAX_ROWS, of eval --limit is PENSTOCK_EVAL_LIMIT, and so on.
Numbers may be short: 4k is 4096. --debug shows tracebacks.
Exit codes: 0 done, 1 an error, 2 a command line not understood, 130 stopped with Ctrl-C."""


def main(words: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code."""
    words = sys.argv[1:] if words is None else list(words)
    if sys.stdout is None:  # closed by the caller, as `>&-` does
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        if not words or words[0] in ("-h", "--help", "help"):
            commands = "\n".join(f"  {name:<10} {what}" for name, what in COMMANDS.items())
            print(HELP.format(commands=commands), flush=True)
            return 0
        if words[0] in ("-V", "--version"):
            print(f"penstock {__version__}", flush=True)
            return 0
        name, arguments = parse(words)
    except PenstockError as error:
        print_error(error)
        return 2
    except KeyboardInterrupt:  # while the command is imported
        return _interrupted()
    except OSError as error:
        return _output_failed(error)
    return _run(name, arguments)


def parse(words: Sequence[str]) -> tuple[str, argparse.Namespace]:
    name = words[0]
    if name not in COMMANDS:
        kind = "flag" if name.startswith("-") else "command"
        known = ["--help", "--version"] if kind == "flag" else list(COMMANDS)
        raise UsageError(
            f"penstock has no {kind} {name!r}",
            nearest(name, known),
            f"The commands are {', '.join(COMMANDS)}.",
        )
    command = importlib.import_module(f"penstock.commands.{name}")
    parser = Parser(
        prog=f"penstock {name}",
        usage=command.USAGE,
        description=command.DESCRIPTION,
        epilog="examples:\n" + "\n".join(f"  {line}" for line in command.EXAMPLES),
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=32
        ),
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    if name in ENGINE_COMMANDS:
        add_vllm_flags(parser)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    given = read_variables(name, parser, words[1:], os.environ)
    arguments = parser.parse_strictly([*given.words, *words[1:]])
    arguments.from_variables = given.fields
    arguments.own_variables = variables_of(name, parser)
    arguments.names = written_names(name, parser, words[1:], os.environ)
    return name, arguments


def _run(name: str, arguments: argparse.Namespace) -> int:
    others = tuple(f"{ENV_PREFIX}{other.upper()}_" for other in COMMANDS if other != name)
    for sentence in unknown_variables(os.environ, arguments.own_variables, others):
        print_note(sentence)
    try:
        exit_code: int = importlib.import_module(f"penstock.commands.{name}").run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError as error:
        return _output_failed(error)
    except Exception as error:
        if arguments.debug:
            traceback.print_exc()
        if isinstance(error, PenstockError):
            error.what = as_written(error.what, arguments.names)
        print_error(_missing_package(error) if isinstance(error, ModuleNotFoundError) else error)
        return 2 if isinstance(error, UsageError) else 1
    return exit_code


def _interrupted() -> int:
    print(file=sys.stderr)
    return 130


def _output_failed(error: OSError) -> int:
    """A reader that has closed the pipe, as `| head` does, needs no message."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains at exit
    if not isinstance(error, BrokenPipeError):
        print_error(error)
    return 1


def _missing_package(error: ModuleNotFoundError) -> PenstockError:
    return PenstockError(
        f"The Python package {error.name!r} is missing",
        f"{sys.executable} does not find it.",
        "Run `make install` and use .venv/bin/penstock, or `pip install -e .` into this Python.",
    )


if __name__ == "__main__":
    sys.exit(main())
