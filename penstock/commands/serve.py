"""`penstock serve`: starts the server, shows its progress, and prints how to use it."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from penstock.commands.browser import open_page, page_address
from penstock.commands.console import paint, print_note
from penstock.commands.flags import UsageError, add_flags, add_model_argument, read_settings
from penstock.commands.profiles import PROFILES, describe, purposes, with_profile
from penstock.config import EngineConfig, ServeConfig, from_mapping
from penstock.models.source import find_model
from penstock.progress import Phase, PhaseList
from penstock.serve.devices import choose_tp, count_gpus, least_gpu_bytes

USAGE = "penstock serve [MODEL] [flags]"
DESCRIPTION = (
    "Answer the OpenAI API over HTTP. Ctrl-C stops it when the running answers are complete."
)
EXAMPLES = [
    "penstock serve                               the embedded tiny model, port 8000",
    "penstock serve ~/models/Qwen3.5-4B --port 9000",
    "penstock serve --open                        the same, and its page in your browser",
    "penstock serve ~/models/Qwen3.5-35B-A3B --gpus 0,1,2,3   an engine on each GPU, one address",
    "penstock serve ~/models/Qwen3.5-4B --profile latency     one person, and the answer now",
    "penstock serve Qwen3.5-4B --random-weights   a preset without weights, to try its speed",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--open", action="store_true", help="open the server's page in a browser")
    parser.add_argument(
        "--profile",
        choices=PROFILES,
        metavar="NAME",
        help=f"settings for one purpose, under those you give: {purposes()}",
    )
    add_flags(parser, ServeConfig, title="the server")
    add_flags(parser, EngineConfig, title="the engine")


def run(arguments: argparse.Namespace) -> int:
    given = with_profile(arguments.profile, read_settings(EngineConfig, arguments))
    engine_config: EngineConfig = from_mapping(EngineConfig, given)
    serve_config: ServeConfig = from_mapping(ServeConfig, read_settings(ServeConfig, arguments))
    if "tp" not in given:
        engine_config = spread(engine_config, serve_config)
    serve(engine_config, serve_config, is_opened=arguments.open, profile=arguments.profile)
    return 0


def spread(engine: EngineConfig, config: ServeConfig) -> EngineConfig:
    """Over as many GPUs as its weights need, if there are several."""
    num_gpus = len(config.gpus) or count_gpus() // config.replicas
    if num_gpus < 2:
        return engine
    source = find_model(engine.model)
    tp = choose_tp(source, engine, num_gpus, least_gpu_bytes())
    if tp > 1:
        print_note(f"{source.name} does not fit one GPU: each engine gets {tp} (--tp {tp}).")
    return replace(engine, tp=tp)


def serve(
    engine_config: EngineConfig,
    serve_config: ServeConfig,
    is_opened: bool = False,
    profile: str | None = None,
) -> None:
    """Until a signal; `is_opened`: the page opens once there is a port, and shows the start."""
    if is_opened and not serve_config.page:
        raise UsageError(
            "The page is to be opened, and --no-page turns it off", todo="Leave one of them out."
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

        def on_phase(phase: Phase) -> None:
            phases(phase)
            if phase.name == "listening" and is_opened:
                open_page(phase.detail)
            if phase.name == "ready":
                phases.close()
                print_welcome(name, url=phase.detail, to=phases, has_page=serve_config.page)

        server.run(engine_config, serve_config, on_phase)


def print_welcome(name: str, url: str, to: PhaseList, has_page: bool = True) -> None:
    """The address, and a command to paste into another terminal."""
    body = {"model": name, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}
    print(
        f"\n{paint(name, 'bold', to.stream)} is served at {paint(url, 'green', to.stream)}",
        file=to.stream,
    )
    if has_page:
        print(f"Open {page_address(url)} in a browser to chat.", file=to.stream)
    print("Try it from another terminal:\n", file=to.stream)
    print(
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\", file=to.stream
    )
    print(f"    -d '{json.dumps(body)}'\n", file=to.stream)
    print(
        "Ctrl-C stops the server when the running answers are complete.", file=to.stream, flush=True
    )
