"""The life of a server: a port, engine processes, and an orderly shutdown.

`run` opens the port before anything slow, serves /health while the model loads, and returns after a
signal when running replies have ended. The engine processes never survive it. Prints nothing:
reports phases to `on_phase`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import functools
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import uvloop

from penstock.assets import default_model
from penstock.config import EngineConfig, ServeConfig, WorkerConfig
from penstock.errors import ConfigError, RequestError
from penstock.models.source import find_model
from penstock.progress import OnPhase, Phase
from penstock.serve.admission import tenant_of_key
from penstock.serve.batches.folder import BatchFolder
from penstock.serve.client import EXIT_GRACE_S, EngineClient
from penstock.serve.connection import allow_many_files, connection_limit
from penstock.serve.devices import count_gpus, place_engines
from penstock.serve.fleet import Fleet
from penstock.serve.system_prompt import read_system_prompt, shared_prompt
from penstock.text.generation_config import checkpoint_sampling
from penstock.types import SamplingParams

BACKLOG = 2048


def run(
    engine_config: EngineConfig, serve_config: ServeConfig, on_phase: OnPhase = lambda _: None
) -> None:
    """Serves until SIGINT or SIGTERM; raises an error if the server or its engines cannot start."""
    allow_many_files()
    connection_limit(serve_config)  # raises before anything has started, as the next line does
    check_sampling_defaults(serve_config)
    serve_config = _with_checkpoint_sampling(engine_config, serve_config)
    listener = open_port(serve_config.host, serve_config.port)
    with (
        listener,
        _batch_folder(serve_config) as batches,
        contextlib.suppress(asyncio.CancelledError),  # a signal came before HTTP was served
    ):
        uvloop.run(_serve(listener, engine_config, serve_config, batches, on_phase))


@contextlib.contextmanager
def _batch_folder(config: ServeConfig) -> Iterator[BatchFolder | None]:
    """Raises an error if batches are on and their folder cannot be used."""
    if config.batch_folder is None:
        yield None
        return
    with contextlib.closing(BatchFolder(config)) as folder:
        yield folder


def check_sampling_defaults(config: ServeConfig) -> None:
    """Raises an error if the defaults would make requests invalid."""
    try:
        SamplingParams(**config.sampling_defaults)
    except RequestError as error:
        raise ConfigError(error.what, error.why, error.todo) from error


def _with_checkpoint_sampling(
    engine_config: EngineConfig, serve_config: ServeConfig
) -> ServeConfig:
    """Adds the checkpoint's sampling defaults; flags take precedence."""
    path = find_model(engine_config.model).path
    return serve_config.with_sampling_of(checkpoint_sampling(serve_config.generation_config, path))


def open_port(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise ConfigError(f"port is {port}", "It must be between 0 and 65535.")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"Port {port} is in use",
                f"Another program listens on {host}:{port}.",
                "Stop it, or choose another port with --port.",
            ) from error
        raise ConfigError(
            f"Cannot listen on {host}:{port}",
            f"{error.strerror or error}.",
            "Choose another address with --host or another port with --port.",
        ) from error


async def _serve(
    listener: socket.socket,
    engine_config: EngineConfig,
    serve_config: ServeConfig,
    batches: BatchFolder | None,
    on_phase: OnPhase,
) -> None:
    """Slow work, such as importing libraries, starts after the engine processes."""
    _end_on_signals()
    started = time.perf_counter()
    url = _url_of(listener, serve_config.host)
    on_phase(Phase("listening", url, 1.0, 0.0))
    sampling = ", ".join(
        f"{name} {value:g}" for name, value in serve_config.silent_sampling.items()
    )
    on_phase(Phase("sampling", f"defaults of requests: {sampling}", 1.0, 0.0))
    source = find_model(engine_config.model)
    text_path = source.path or default_model()  # a preset has no tokenizer of its own
    if serve_config.tokenizer is not None:
        text_path = Path(serve_config.tokenizer).expanduser()
    system_prompt = read_system_prompt(serve_config.system_prompt_file)
    text = None
    warm_prompt: tuple[int, ...] = ()
    if serve_config.chat_template is not None:  # report a bad template before an engine starts
        from penstock.serve.http_server import load_text

        text = load_text(text_path, serve_config.chat_template)
    if system_prompt is not None:  # the engines compute it before they are ready
        from penstock.serve.http_server import load_text
        from penstock.text.chat_prompt import ChatEncoder

        text = tokenizer, template = text or load_text(text_path)
        encoder = ChatEncoder(template, tokenizer, serve_config.allow_special_tokens_in_content)
        warm_prompt = shared_prompt(system_prompt, encoder, serve_config.enable_thinking)
    fleet = _start_fleet(engine_config, serve_config, str(text_path), warm_prompt, on_phase)
    has_ended_well = False
    try:
        await fleet.wait_launched()
        from penstock.serve.http_server import load_text, load_vector_text, serve_http

        text = text or load_text(text_path)
        if text[1].source is None:
            on_phase(Phase("template", "none: chats are refused, completions work", 1.0, 0.0))
        has_ended_well = await serve_http(
            listener,
            fleet,
            serve_config,
            name=serve_config.served_model_name or source.name,
            text=text,
            vector_text=load_vector_text(text, source.path, engine_config),
            system_prompt=system_prompt,
            session_minutes=engine_config.session_minutes,
            batches=batches,
            on_ready=lambda: on_phase(Phase("ready", url, 1.0, time.perf_counter() - started)),
        )
    finally:
        await fleet.close(EXIT_GRACE_S if has_ended_well else 0.0)


def _end_on_signals() -> None:
    """Handles signals until the HTTP server does. No request has been answered yet, so the first
    signal stops the server. SIGHUP is ignored, because the engines are new anyway, unless it comes
    from a closed terminal."""
    loop, state = asyncio.get_running_loop(), asyncio.current_task()
    assert state is not None

    def end() -> None:
        if not state.cancelling():
            state.cancel()

    loop.add_signal_handler(signal.SIGINT, end)
    loop.add_signal_handler(signal.SIGTERM, end)
    has_terminal = sys.stdin is not None and sys.stdin.isatty()
    loop.add_signal_handler(signal.SIGHUP, end if has_terminal else lambda: None)


def _start_fleet(
    engine_config: EngineConfig,
    serve_config: ServeConfig,
    tokenizer: str,
    warm_prompt: tuple[int, ...],
    on_phase: OnPhase,
) -> Fleet:
    engine_config, places = place_engines(engine_config, serve_config, os.environ, count_gpus())
    tenants = tuple(map(tenant_of_key, serve_config.load_api_keys())) or ("",)
    config = WorkerConfig(
        **dataclasses.asdict(engine_config),
        tokenizer=tokenizer,
        warm_prompt=warm_prompt,
        warm_tenants=tenants,
    )
    launches = [
        functools.partial(EngineClient.launch, config, environment=place) for place in places
    ]
    return Fleet(launches, serve_config, on_phase)


def _url_of(listener: socket.socket, host: str) -> str:
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
