"""`penstock serve`: starts the server, shows its progress, and prints how to use it."""

from __future__ import annotations

import argparse
import json
import threading
import webbrowser
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.commands.console import paint, print_note
from penstock.commands.flags import UsageError, add_flags, add_model_argument, read_settings
from penstock.config import EngineConfig, ServeConfig, from_mapping
from penstock.errors import ConfigError
from penstock.http_client import read_address
from penstock.models.source import find_model
from penstock.progress import Phase, PhaseList
from penstock.serve.devices import choose_tp, count_gpus, least_gpu_bytes

USAGE = "penstock serve [MODEL] [flags]"
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
DESCRIPTION = (
    "Answer the OpenAI API over HTTP. Ctrl-C stops it when the running answers are complete."
)
EXAMPLES = [
    "penstock serve                               the embedded tiny model, port 8000",
    "penstock serve ~/models/Qwen3.5-4B --port 9000",
    "penstock serve --open                        the same, and its page in your browser",
    "penstock serve ~/models/Qwen3.5-35B-A3B --gpus 0,1,2,3   an engine on each GPU, one address",
    "penstock serve ~/models/Qwen3.5-4B --profile latency     one user, lowest latency",
    "penstock serve Qwen3.5-4B --random-weights   a preset without weights, to test its speed",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--open", action="store_true", help="open the server's page in a browser")
    parser.add_argument(
        "--profile",
        choices=PROFILES,
        metavar="NAME",
        help=f"defaults for one purpose, which other flags override: {purposes()}",
    )
    add_flags(parser, ServeConfig, title="the server")
    add_flags(parser, EngineConfig, title="the engine")


def run(arguments: argparse.Namespace) -> int:
    given = with_profile(arguments.profile, read_settings(EngineConfig, arguments))
    engine_config: EngineConfig = from_mapping(EngineConfig, given)
    serve_config: ServeConfig = from_mapping(ServeConfig, read_settings(ServeConfig, arguments))
    if "tp" not in given:
        engine_config = spread(engine_config, serve_config)
    engine_config.check_ranks()
    serve(engine_config, serve_config, is_opened=arguments.open, profile=arguments.profile)
    return 0


def spread(engine: EngineConfig, config: ServeConfig) -> EngineConfig:
    """Sets `tp` to the number of GPUs that the weights need, if there are several."""
    num_gpus = len(config.gpus) or count_gpus() // config.replicas
    if num_gpus < 2:
        return engine
    source = find_model(engine.model)
    tp = choose_tp(source, engine, num_gpus, least_gpu_bytes())
    if tp > 1:
        print_note(f"{source.name} does not fit one GPU: each engine uses {tp} (--tp {tp}).")
    return replace(engine, tp=tp)


def serve(
    engine_config: EngineConfig,
    serve_config: ServeConfig,
    is_opened: bool = False,
    profile: str | None = None,
) -> None:
    """Serves until a signal. `is_opened`: opens the page once the port is known; it shows the
    start."""
    if is_opened and not serve_config.page:
        raise UsageError(
            "--open and --no-page are both given",
            "Without the page there is nothing to open.",
            "Omit one of them.",
        )
    if engine_config.expert_log is not None and serve_config.replicas > 1:
        raise ConfigError(
            f"expert_log is {engine_config.expert_log}, and replicas is {serve_config.replicas}",
            "A log has the steps of one engine.",
            "Omit one of them.",
        )
    serve_config.load_api_keys()
    source = find_model(engine_config.model)  # report errors before anything is imported
    name = serve_config.served_model_name or source.name
    from penstock.serve import request_log, server

    request_log.configure_log(serve_config.log_format)
    with PhaseList() as phases:
        if profile is not None:
            detail = f"{profile}, {describe(profile, engine_config)}"
            phases(Phase("profile", detail, seconds=0.0))

        path = CHAT

        def on_phase(phase: Phase) -> None:
            nonlocal path
            phases(phase)
            if phase.name == "listening" and is_opened:
                open_page(phase.detail)
            if phase.name == "template":  # there is none
                path = COMPLETION
            if phase.name == "ready":
                phases.close()
                print_welcome(name, phase.detail, phases, serve_config.page, path)

        server.run(engine_config, serve_config, on_phase)


def print_welcome(
    name: str, url: str, to: PhaseList, has_page: bool = True, path: str = CHAT
) -> None:
    """The address, and a command to paste into another terminal."""
    hello: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello!"}]}
    if path == COMPLETION:
        hello = {"prompt": "Hello"}
    body = {"model": name, **hello, "max_tokens": 64}
    print(
        f"\n{paint(name, 'bold', to.stream)} is served at {paint(url, 'green', to.stream)}",
        file=to.stream,
    )
    if has_page:
        purpose = " to chat" if path == CHAT else ""
        print(f"Open {page_address(url)} in a browser{purpose}.", file=to.stream)
    print("Try it from another terminal:\n", file=to.stream)
    print(f"  curl {url}{path} -H 'Content-Type: application/json' \\", file=to.stream)
    print(f"    -d '{json.dumps(body)}'\n", file=to.stream)
    print(
        "Ctrl-C stops the server when the running answers are complete.", file=to.stream, flush=True
    )


@dataclass(frozen=True, slots=True)
class Profile:
    purpose: str
    engine: Mapping[str, Any]  # settings of the engine, by name


# Settings for one purpose. None of them changes a model's replies.
PROFILES = {
    "latency": Profile(
        "one user, lowest latency",
        {
            # Fewer rows leave more memory for contexts, and need fewer graphs at start.
            "max_rows": 8,
            # A prompt of a few thousand tokens takes one step.
            "max_step_tokens": 8192,
            # Exact: replies are those of plain decoding.
            "speculate": "auto",
        },
    ),
}


def with_profile(name: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The profile's engine settings, overridden by those that were given."""
    if name is None:
        return dict(given)
    if name not in PROFILES:
        raise ConfigError(
            f"There is no profile {name!r}", "", f"The profiles are {', '.join(PROFILES)}."
        )
    return {**PROFILES[name].engine, **given}


def purposes() -> str:
    return "; ".join(f"{name} ({profile.purpose})" for name, profile in PROFILES.items())


def describe(name: str, config: EngineConfig) -> str:
    """The profile's settings as flags."""
    profile = PROFILES[name]
    flags = [f"--{key.replace('_', '-')} {getattr(config, key)}" for key in profile.engine]
    return f"{profile.purpose}: {' '.join(flags)}"


def open_page(url: str) -> threading.Thread:
    """Opens the page in a thread, which it returns: a browser may take long to start."""
    opening = threading.Thread(target=_open, args=(page_address(url),), daemon=True)
    opening.start()
    return opening


def page_address(url: str) -> str:
    """The address for a browser on this machine: it cannot open 0.0.0.0 or ::."""
    address = read_address(url)
    host = address.hostname or "127.0.0.1"
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    path = address.path.rstrip("/").removesuffix("/v1")
    return f"{address.scheme}://{host}{f':{address.port}' if address.port else ''}{path}/"


def _open(address: str) -> None:
    try:
        is_open = webbrowser.open(address)
    except webbrowser.Error:
        is_open = False
    if not is_open:
        print_note(f"No browser could be started here; open {address} in one.")
