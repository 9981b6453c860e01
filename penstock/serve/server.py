"""The life of a server: a port, an engine process, signals, and an orderly end.

`run` opens the port before anything slow, serves /health while the model loads, and returns after a signal
when running replies have ended. The engine process never survives it. Prints nothing: news go to `on_phase`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import gc
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import uvicorn
import uvloop

from penstock.assets import default_model
from penstock.config import EngineConfig, ServeConfig, WorkerConfig
from penstock.errors import ConfigError, PenstockError
from penstock.models.source import find_model
from penstock.progress import OnPhase, Phase
from penstock.serve.app import create_app
from penstock.serve.chat import TextEngine
from penstock.serve.client import EXIT_GRACE_S, EngineClient
from penstock.serve.connection import HttpConnection
from penstock.serve.metrics import Metrics
from penstock.text.template import ChatTemplate
from penstock.text.tokenizer import Tokenizer

DRAIN_TIMEOUT_S = 30
BACKLOG = 2048


def run(engine_config: EngineConfig, serve_config: ServeConfig, on_phase: OnPhase = lambda _: None) -> None:
    """Serves until SIGINT or SIGTERM; raises what kept the server from starting or killed its engine."""
    listener = open_port(serve_config.host, serve_config.port)
    with listener:
        uvloop.run(_serve(listener, engine_config, serve_config, on_phase))


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
    """uvicorn without its signal handling: the second signal, of either kind, ends it at once."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


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
    tokenizer, template = Tokenizer.load(text_path), ChatTemplate.load(text_path)

    worker_config = WorkerConfig(**dataclasses.asdict(engine_config), tokenizer=str(text_path))
    client = await EngineClient.launch(worker_config, max_queue=serve_config.max_queue, on_phase=on_phase)
    metrics = Metrics()
    text = TextEngine(client, tokenizer, template, metrics, serve_config.enable_thinking)
    app = create_app(client, text, metrics, serve_config.served_model_name or source.name)
    server = _HttpServer(
        uvicorn.Config(
            app,
            http=HttpConnection,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_graceful_shutdown=DRAIN_TIMEOUT_S,
        )
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, server.stop)

    async def announce() -> None:
        """Says when the engine can serve; if it never will, there is nothing to serve."""
        try:
            await client.wait_ready()
            gc.collect()
            gc.freeze()  # what has been loaded stays: collections need not look at it again
            on_phase(Phase("ready", url, 1.0, time.perf_counter() - started))
        except PenstockError:
            server.stop()

    announcing = asyncio.create_task(announce())
    try:
        await server.serve(sockets=[listener])
        if client.failure is not None:
            raise client.failure
    finally:
        announcing.cancel()
        # An engine that still loads has nothing to finish.
        patient = client.is_ready and not server.force_exit
        await client.close(EXIT_GRACE_S if patient else 0.0)


def _url_of(listener: socket.socket, host: str) -> str:
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
