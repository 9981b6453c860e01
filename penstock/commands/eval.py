"""`penstock eval`: measures a running server, this one or any other that speaks the OpenAI API.

Only what the server answers counts; nothing here knows an engine.
"""

from __future__ import annotations

import argparse

from penstock.eval import gates

DESCRIPTION = "gates: problems no model was trained on, the share it gets right, and the share it must."
USAGE = "penstock eval gates [flags]"
EXAMPLES = [
    "penstock eval gates                                    the server on port 8000",
    "penstock eval gates --base-url http://host:9000        another one",
    "penstock eval gates --limit 20 --show 3                a quick look, with three wrong answers a gate",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("gates",), help="which measurement")
    gates.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    return gates.run(arguments)
