"""`penstock generate`: streams the continuation of one prompt to stdout, and nothing else.

Several answers (--n) are printed when all are complete, each after its number.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from penstock.commands.flags import add_engine_flags
from penstock.commands.local import add_sampling_flags, load_llm, read_sampling
from penstock.errors import ConfigError, PenstockError

USAGE = "penstock generate TEXT [-m MODEL] [flags]"
DESCRIPTION = "Continue a text, or with --chat answer it as a message."
EXAMPLES = [
    'penstock generate "Once upon a time" --max-tokens 64',
    'penstock generate --chat "Who are you?" -m ~/models/Qwen3.5-4B --temperature 0.7 --seed 1',
    "penstock generate - --json < prompt.txt         the prompt from stdin, the answer as JSON",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", metavar="TEXT", help="the prompt; - reads it from stdin")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--raw", action="store_true", help="continue the text as it is (the default)")
    form.add_argument(
        "--chat", action="store_true", help="send it through the chat template as a user message"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object when the answer is complete"
    )
    add_sampling_flags(parser)
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    sampling = read_sampling(arguments)  # check these before the weights are loaded
    if sampling.logprobs is not None and not arguments.json:
        raise ConfigError(
            "--logprobs needs --json", "Plain text cannot contain log-probabilities.", "Add --json."
        )
    text = _read_stdin() if arguments.text == "-" else arguments.text
    llm = load_llm(arguments)
    sampling = read_sampling(arguments, llm.sampling_defaults)
    prompt = llm.encode_chat([{"role": "user", "content": text}]) if arguments.chat else text
    if not arguments.json and sampling.n == 1:
        for piece in llm.stream(prompt, sampling):
            print(piece, end="", flush=True)
        print()
        return 0
    completions = llm.generate(prompt, sampling)
    if arguments.json:
        answers = [dataclasses.asdict(completion) for completion in completions]
        print(
            json.dumps(
                {"model": llm.engine.info.model_name, "prompt": text, "completions": answers}
            )
        )
    else:
        for number, completion in enumerate(completions, 1):
            print(f"[{number}] {completion.text}")
    for completion in completions:
        if completion.finish == "error":
            raise PenstockError(
                "An answer ended with an error", completion.error or "The engine gave no reason."
            )
    return 0


def _read_stdin() -> str:
    try:
        text = sys.stdin.read()
        text.encode()  # in some locales Python lets other bytes pass
    except UnicodeError as error:
        raise ConfigError(
            "The text on stdin is not UTF-8",
            f"{error}.",
            "Convert it first, for example with `iconv -t UTF-8`.",
        ) from error
    return text
