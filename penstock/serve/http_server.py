"""HTTP in front of a fleet: the app on its port, its signals, and its shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from penstock.config import EngineConfig, ServeConfig
from penstock.errors import PenstockError
from penstock.serve.app import create_app
from penstock.serve.batches.folder import BatchFolder
from penstock.serve.batches.runner import BatchRunner
from penstock.serve.connection import HttpConnection
from penstock.serve.conversations import Conversations
from penstock.serve.fleet import Fleet
from penstock.serve.metrics import Metrics
from penstock.serve.state import ServerState
from penstock.serve.text_engine import TextEngine
from penstock.text.pooling import VectorRules, VectorText
from penstock.text.template import ChatTemplate
from penstock.text.tokenizer import Tokenizer

Text = tuple[Tokenizer, ChatTemplate]


def load_text(path: Path, chat_template: str | None = None) -> Text:
    """`chat_template`: replaces the checkpoint's own."""
    return Tokenizer.load(path, is_quick=False), ChatTemplate.load(path, chat_template)


def load_vector_text(text: Text, path: Path | None, config: EngineConfig) -> VectorText:
    """`path`: the checkpoint, whose files define how its vectors are computed."""
    rules = VectorRules.load(path, config.pooling)
    return VectorText(*text, rules, config.scoring, config.score_prompt)


async def serve_http(
    listener: socket.socket,
    fleet: Fleet,
    config: ServeConfig,
    *,
    name: str,
    text: Text,
    vector_text: VectorText,
    system_prompt: str | None,
    session_minutes: float,
    batches: BatchFolder | None,
    on_ready: Callable[[], None],
) -> bool:
    """Serves until a signal; raises the error if no engine can start. Returns whether replies were
    given time to end."""
    tokenizer, template = text
    quickening = asyncio.create_task(
        asyncio.to_thread(tokenizer.quicken)
    )  # while the engines start
    metrics = Metrics()
    text_engine = TextEngine(
        fleet,
        tokenizer,
        template,
        metrics,
        config.enable_thinking,
        thinking_share=config.thinking_share,
        loop_guard=config.loop_guard,
        system_prompt=system_prompt,
        allow_special_tokens_in_content=config.allow_special_tokens_in_content,
        open_schemas=config.open_schemas,
        min_priority=config.min_priority,
        vector_text=vector_text,
    )
    conversations = Conversations(config.session_bytes, 60 * session_minutes)
    state = ServerState(
        fleet, text_engine, metrics, name, config, int(time.time()), conversations, batches
    )
    app = create_app(state)
    server = _HttpServer(
        uvicorn.Config(
            app,
            http=HttpConnection.limited_by(config),
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
        )
    )
    signals = _Signals(server, state)

    async def announce() -> None:
        """Announces that the engines can serve; if they never will, stops the server."""
        try:
            await fleet.wait_ready()
            gc.collect()
            gc.freeze()  # loaded objects stay: collections need not scan them again
            on_ready()
        except PenstockError:
            signals.stop()

    announcing = asyncio.create_task(announce())
    runner: BatchRunner | None = app.state.batch_runner
    batching = None if runner is None else asyncio.create_task(runner.run())
    try:
        await server.serve(sockets=[listener])
    finally:
        announcing.cancel()
        if batching is not None:
            batching.cancel()
            await asyncio.wait({batching})
        quickening.cancel()
    if fleet.failure is not None:
        raise fleet.failure
    # An engine that still loads has nothing to finish.
    return fleet.is_ready and not server.force_exit


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handling."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Signals:
    """What signals do to a server.

    SIGINT, SIGTERM: accepts no new requests, and exits when the running ones have ended; a second
    one exits at once. SIGHUP: replaces all engines, one after the other; in a terminal, it means
    that the terminal was closed.
    """

    def __init__(self, server: _HttpServer, state: ServerState) -> None:
        self._server = server
        self._state = state
        self._tasks: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self.stop)
        loop.add_signal_handler(signal.SIGTERM, self.stop)
        has_terminal = sys.stdin is not None and sys.stdin.isatty()
        loop.add_signal_handler(signal.SIGHUP, self.stop if has_terminal else self._restart)

    def stop(self) -> None:
        if self._state.draining.is_set():
            self._server.force_exit = True
            self._server.should_exit = True
        else:
            self._state.draining.set()
            self._run(self._drain())

    async def _drain(self) -> None:
        """The port stays open meanwhile: /ready and new requests are answered."""
        timeout_s = self._state.config.drain_timeout
        started = time.monotonic()
        await self._state.client.drain()
        left_s = timeout_s - (time.monotonic() - started)
        self._server.config.timeout_graceful_shutdown = max(1, math.ceil(left_s))
        self._server.should_exit = True

    def _restart(self) -> None:
        self._run(self._state.client.restart())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)  # or it might be garbage collected while it runs
        task.add_done_callback(self._tasks.discard)
