"""vLLM's flags that set nothing here: each is accepted with a note, accepted for some values only,
or refused.

Flags that do set something are `aliases` and `inverse` of the fields in config.py. docs/vllm.md
lists both.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock.commands.console import print_note
from penstock.commands.flags import UsageError, flags_of
from penstock.config import EngineConfig, ServeConfig


@dataclass(frozen=True, slots=True)
class VllmFlag:
    """`accepted`: values that change nothing here; None: all values, with a note."""

    names: tuple[str, ...]
    why: str
    accepted: tuple[str, ...] | None = ()
    is_switch: bool = False

    @property
    def verdict(self) -> str:
        """A cell of the table in docs/vllm.md."""
        if self.accepted is None:
            return "accepted, not needed"
        return f"accepted: {', '.join(self.accepted)}" if self.accepted else "refused"


def _unneeded(*names: str, why: str, is_switch: bool = False) -> VllmFlag:
    return VllmFlag(names, why, None, is_switch)


def _refused(*names: str, why: str, is_switch: bool = False) -> VllmFlag:
    return VllmFlag(names, why, (), is_switch)


_ONLY_TP = "Only --tp spreads a model over GPUs: each GPU has a part of every layer."
_NO_DOWNLOAD = "Penstock downloads nothing. Use the folder of the checkpoint."
_NO_LORA = "Penstock has no adapters. Merge the adapter into the checkpoint."
_NO_TLS = "Penstock serves plain HTTP. Put a proxy with TLS in front of it."
_OWN_PARSER = "The model's chat template decides the parser."
_OWN_KERNELS = "Penstock has one set of kernels."

VLLM_FLAGS = (
    _unneeded("--reasoning-parser", why=_OWN_PARSER),
    _unneeded("--tool-call-parser", why=_OWN_PARSER),
    _unneeded("--enable-auto-tool-choice", why="Tool calls are always parsed.", is_switch=True),
    _unneeded("--enable-chunked-prefill", why="Prefills are always chunked.", is_switch=True),
    _unneeded("--enable-prompt-tokens-details", why="`usage` always has them.", is_switch=True),
    _unneeded("--language-model-only", why="Only the language model is loaded.", is_switch=True),
    _unneeded("--enable-log-requests", why="The log has one line per request.", is_switch=True),
    _unneeded(
        "--disable-log-requests", why="The log never has the text of requests.", is_switch=True
    ),
    _unneeded(
        "--disable-log-stats", why="Numbers are in /metrics, not in the log.", is_switch=True
    ),
    _unneeded("--scheduling-policy", why="Requests of one priority run in order of arrival."),
    _unneeded("--attention-backend", why=_OWN_KERNELS),
    _unneeded(
        "--compilation-config", "-O", why=_OWN_KERNELS + " --no-graphs turns CUDA graphs off."
    ),
    _unneeded("--distributed-executor-backend", why="Engines always run in their own processes."),
    _unneeded("--swap-space", why="A preempted request is computed again."),
    VllmFlag(("--pipeline-parallel-size", "-pp"), _ONLY_TP, ("1",)),
    VllmFlag(
        ("--load-format",),
        "The format is read from the checkpoint; for dummy use --random-weights.",
        ("auto", "safetensors"),
    ),
    VllmFlag(("--tokenizer-mode",), "There is one tokenizer.", ("auto", "hf")),
    VllmFlag(("--cpu-offload-gb",), "Only experts may be in RAM: see --expert-cache.", ("0",)),
    _refused("--trust-remote-code", why="Code of a checkpoint is never run.", is_switch=True),
    _refused("--no-enable-chunked-prefill", why="Prefills are always chunked.", is_switch=True),
    _refused("--speculative-config", why="Use --speculate mtp, ngram, suffix or model:FOLDER."),
    _refused("--enable-lora", why=_NO_LORA, is_switch=True),
    _refused("--lora-modules", why=_NO_LORA),
    _refused("--revision", why=_NO_DOWNLOAD),
    _refused("--download-dir", why=_NO_DOWNLOAD),
    _refused("--hf-overrides", why="Change the config.json of the checkpoint."),
    _refused("--override-generation-config", why="Use --temperature, --top-p, --top-k and so on."),
    _refused(
        "--default-chat-template-kwargs", why="Use --enable-thinking or --no-enable-thinking."
    ),
    _refused("--limit-mm-per-prompt", why="Penstock reads no images, sound or video."),
    _refused("--allowed-origins", why="Use --cors-origin, once for each origin."),
    _refused("--ssl-keyfile", why=_NO_TLS),
    _refused("--ssl-certfile", why=_NO_TLS),
)


class _Answer(argparse.Action):
    """Prints a note about a flag of vLLM, or refuses it. It sets nothing in the namespace."""

    def __init__(self, *args: Any, flag: VllmFlag, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self._flag = flag

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        flag, said = self._flag, f"{option_string} {values}" if values else str(option_string)
        if flag.accepted is None:
            print_note(f"{said} is a flag of vLLM and not needed here. {flag.why}")
        elif values not in flag.accepted:
            only = f"Only {' or '.join(flag.accepted)} is accepted. " if flag.accepted else ""
            raise UsageError(
                f"{said} is a flag of vLLM and not supported here",
                only + flag.why,
                "See docs/vllm.md.",
            )


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Not shown in the help: they set nothing."""
    for flag in VLLM_FLAGS:
        parser.add_argument(
            *flag.names,
            action=_Answer,
            flag=flag,
            nargs=0 if flag.is_switch else None,
            dest=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )


def aliases() -> Iterator[tuple[str, str]]:
    """vLLM's name of a flag and ours, for all flags whose names differ."""
    for settings in (EngineConfig, ServeConfig):
        for flag in flags_of(settings):
            for name in flag.field.metadata.get("aliases", ()):
                yield name, flag.name
            for name in flag.field.metadata.get("inverse", ()):
                yield name, flag.name.replace("--", "--no-", 1)
