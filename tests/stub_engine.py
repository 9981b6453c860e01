"""An engine without a model, to measure everything in front of it: sends one token per request and
step.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Callable

from penstock.progress import OnPhase
from penstock.serve.client import EngineClient
from penstock.types import EngineInfo, Request, TokenDelta
from penstock.wire import (
    Abort,
    Deltas,
    EngineChannel,
    Ping,
    Pong,
    Ready,
    ServerChannel,
    Shutdown,
    Submit,
    ToEngine,
)

INFO = EngineInfo("stub", "none", "none", 2**20, 2**31, 512, 64, 1, 1, 1, 1)


def run_stub(
    socket_path: str,
    step_s: float,
    next_token: Callable[[Request], int],
    on_idle: Callable[[], None] = lambda: None,  # called when the last request has ended
) -> None:
    """Runs the engine process and talks to the server as a real engine does."""
    channel = EngineChannel.connect(socket_path)
    inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()

    def read() -> None:
        while (message := channel.receive()) is not None:
            if isinstance(message, Ping):
                channel.send(Pong(0.0))
            else:
                inbox.put(message)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    channel.send(Ready(INFO))
    rows: dict[str, tuple[Request, int]] = {}  # request, remaining tokens
    due_s = 0.0
    while True:
        while not (rows and inbox.empty()):
            is_first = not rows
            match inbox.get():
                case Submit(request):
                    rows[request.id] = request, request.sampling.max_tokens or 1
                    due_s = time.monotonic() if is_first else due_s
                case Abort(request_id):
                    rows.pop(request_id, None)
                case Shutdown():
                    return
        # While the host is late, a GPU still runs the step that is planned ahead.
        due_s = max(due_s + step_s, time.monotonic() - step_s)
        time.sleep(max(0.0, due_s - time.monotonic()))
        deltas = []
        for id, (request, num_left) in list(rows.items()):
            rows[id] = request, num_left - 1
            is_last = num_left == 1
            if is_last:
                del rows[id]
            token_id = next_token(request)
            deltas.append(TokenDelta(id, (token_id,), finish="length" if is_last else None))
        channel.send(Deltas(deltas))
        if not rows:
            on_idle()


async def launch_stub(on_phase: OnPhase, script: str, *words: str) -> EngineClient:
    """Starts the script with the engine's socket after `--stub`, and these arguments after it."""
    loop = asyncio.get_running_loop()
    connected: asyncio.Future[ServerChannel] = loop.create_future()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "engine.sock")
        listener = await loop.create_unix_server(lambda: ServerChannel(connected.set_result), path)
        process = await asyncio.create_subprocess_exec(
            sys.executable, script, "--stub", path, *words
        )
        channel = await connected
        listener.close()
    return EngineClient(process, channel, on_phase)
