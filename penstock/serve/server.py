"""The life of a server: a port, engine processes, signals, and an orderly end.

`run` opens the port before anything slow, serves /health while the model loads, and returns after a signal
when running replies have ended. The engine processes never survive it. Prints nothing: news go to `on_phase`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import functools
import gc
import math
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from penstock.assets import default_model
from penstock.config import EngineConfig, ServeConfig, WorkerConfig
from penstock.errors import ConfigError, PenstockError
from penstock.models.source import find_model
from penstock.progress import OnPhase, Phase
from penstock.serve.access import tenant_of_key
from penstock.serve.app import create_app
from penstock.serve.chat import TextEngine
from penstock.serve.client import EXIT_GRACE_S, EngineClient
from penstock.serve.connection import HttpConnection
from penstock.serve.devices import count_gpus, place_engines
from penstock.serve.fleet import Fleet
from penstock.serve.metrics import Metrics
from penstock.serve.serving import Serving
from penstock.serve.system_prompt import read_system_prompt, shared_prompt
from penstock.text.template import ChatTemplate
from penstock.text.tokenizer import Tokenizer

BACKLOG = 2048


def run(engine_config: EngineConfig, serve_config: ServeConfig, on_phase: OnPhase = lambda _: None) -> None:
    """Serves until SIGINT or SIGTERM; raises what kept the server or its engines from starting."""
    allow_many_connections()
    listener = open_port(serve_config.host, serve_config.port)
    with listener:
        uvloop.run(_serve(listener, engine_config, serve_config, on_phase))


def allow_many_connections() -> None:
    """As many as the hard limit has descriptors. The soft one, often 1,024, is there for programs that call
    select(), and a client beyond it would wait for an answer that never comes.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # where "no limit" is more than the system takes
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def open_port(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OverflowError as error:
        raise ConfigError(f"port is {port}", "It must be between 0 and 65535.") from error
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


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handling."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Signals:
    """What signals do to a server.

    SIGINT, SIGTERM: no new requests, and the end when the running ones are done; a second ends it at once.
    SIGHUP: new engines for old, one after the other; or, in a terminal, that the terminal was closed.
    """

    def __init__(self, server: _HttpServer, serving: Serving) -> None:
        self._server = server
        self._serving = serving
        self._tasks: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self.stop)
        loop.add_signal_handler(signal.SIGTERM, self.stop)
        has_terminal = sys.stdin is not None and sys.stdin.isatty()
        loop.add_signal_handler(signal.SIGHUP, self.stop if has_terminal else self._restart)

    def stop(self) -> None:
        if self._serving.draining.is_set():
            self._server.force_exit = True
            self._server.should_exit = True
        else:
            self._serving.draining.set()
            self._run(self._drain())

    async def _drain(self) -> None:
        """The port stays open meanwhile: whoever asks /ready or sends a request is told."""
        timeout_s = self._serving.config.drain_timeout
        started = time.monotonic()
        await self._serving.client.drain()
        left_s = timeout_s - (time.monotonic() - started)
        self._server.config.timeout_graceful_shutdown = max(1, math.ceil(left_s))
        self._server.should_exit = True

    def _restart(self) -> None:
        self._run(self._serving.client.restart())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)  # or it might be collected while it runs
        task.add_done_callback(self._tasks.discard)


async def _serve(
    listener: socket.socket, engine_config: EngineConfig, serve_config: ServeConfig, on_phase: OnPhase
) -> None:
    started = time.perf_counter()
    url = _url_of(listener, serve_config.host)
    on_phase(Phase("listening", url, 1.0, 0.0))
    source = find_model(engine_config.model)
    text_path = source.path or default_model()  # a preset has no tokenizer of its own
    if serve_config.tokenizer is not None:
        text_path = Path(serve_config.tokenizer).expanduser()
    load_text = functools.cache(functools.partial(_load_text, text_path))
    system_prompt = read_system_prompt(serve_config.system_prompt_file)
    warm_prompt: tuple[int, ...] = ()
    if system_prompt is not None:  # which the engines compute before they are ready
        tokenizer, template = load_text()
        warm_prompt = shared_prompt(system_prompt, template, tokenizer, serve_config.enable_thinking)
    fleet = _start_fleet(engine_config, serve_config, str(text_path), warm_prompt, on_phase)
    try:
        await fleet.wait_launched()  # nothing else happens in this process while it reads a vocabulary
        tokenizer, template = load_text()
    except BaseException:
        await fleet.close(grace_s=0.0)
        raise
    quickening = asyncio.create_task(asyncio.to_thread(tokenizer.quicken))  # while the engines start
    metrics = Metrics()
    text = TextEngine(
        fleet,
        tokenizer,
        template,
        metrics,
        serve_config.enable_thinking,
        loop_guard=serve_config.loop_guard,
        system_prompt=system_prompt,
    )
    name = serve_config.served_model_name or source.name
    serving = Serving(fleet, text, metrics, name, serve_config, started_at=int(time.time()))
    server = _HttpServer(
        uvicorn.Config(
            create_app(serving),
            http=HttpConnection.limited_by(serve_config),
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
        )
    )
    signals = _Signals(server, serving)

    async def announce() -> None:
        """Says when the engines can serve; if they never will, there is nothing to serve."""
        try:
            await fleet.wait_ready()
            gc.collect()
            gc.freeze()  # what has been loaded stays: collections need not look at it again
            on_phase(Phase("ready", url, 1.0, time.perf_counter() - started))
        except PenstockError:
            signals.stop()

    announcing = asyncio.create_task(announce())
    try:
        await server.serve(sockets=[listener])
        if fleet.failure is not None:
            raise fleet.failure
    finally:
        announcing.cancel()
        quickening.cancel()
        # An engine that still loads has nothing to finish.
        patient = fleet.is_ready and not server.force_exit
        await fleet.close(EXIT_GRACE_S if patient else 0.0)


def _load_text(path: Path) -> tuple[Tokenizer, ChatTemplate]:
    return Tokenizer.load(path, is_quick=False), ChatTemplate.load(path)


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
    launches = [functools.partial(EngineClient.launch, config, environment=place) for place in places]
    return Fleet(launches, serve_config, on_phase)


def _url_of(listener: socket.socket, host: str) -> str:
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
