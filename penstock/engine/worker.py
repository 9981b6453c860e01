"""The engine process: `python -m penstock.engine.worker --socket PATH`, config on stdin.

Connects to the server that started it, reports the phases of loading, runs one small request as a
check, and then steps while there is work. Otherwise it blocks on its inbox. A second thread reads
the server's messages and answers its pings, however long a step takes. It knows token ids and
messages, no HTTP and no text. It exits when the server is gone, so it never becomes an orphan.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import gc
import logging
import os
import queue
import signal
import sys
import threading
import time
from itertools import groupby
from typing import TYPE_CHECKING

import msgspec

from penstock.config import WorkerConfig
from penstock.errors import EngineDeadError, PenstockError
from penstock.progress import Phase, timed
from penstock.types import Pooling, Request, SamplingParams, TokenDelta
from penstock.wire import (
    Abort,
    CachedAnswer,
    CachedQuery,
    Deltas,
    DropSession,
    Dying,
    EngineChannel,
    ErrorFields,
    FrameTooLongError,
    ListSessions,
    Ping,
    Pong,
    Progress,
    Ready,
    Rejected,
    ServerGoneError,
    SessionsAnswer,
    Shutdown,
    StatsAnswer,
    StatsQuery,
    Submit,
    ToEngine,
    UnreadableRequestError,
    WireError,
)

if TYPE_CHECKING:
    from penstock.engine.engine import Engine
    from penstock.engine.rank_group import RankGroup

log = logging.getLogger("penstock.engine")

WARM_UP_TOKENS = 3
RANK_GRACE_S = 2.0  # for a step to notice that a rank is gone
MAX_INTAKE_S = 0.005  # for accepting requests between two steps: running replies wait meanwhile
PR_SET_PDEATHSIG = 1  # of Linux' prctl


class StepClock:
    """How long the current step has taken, readable from another thread."""

    def __init__(self) -> None:
        self._started: float | None = None

    def start(self) -> None:
        self._started = time.monotonic()

    def stop(self) -> None:
        self._started = None

    @property
    def seconds(self) -> float:
        started = self._started
        return 0.0 if started is None else time.monotonic() - started


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs one engine for a Penstock server.")
    parser.add_argument("--socket", required=True, help="Unix socket on which the server listens")
    parser.add_argument("--ranks-folder", help="folder for the sockets of other ranks")
    arguments = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s engine %(levelname)s %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles Ctrl-C
    die_with_the_server()

    channel = EngineChannel.connect(arguments.socket)
    inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
    clock = StepClock()
    threading.Thread(target=_read_messages, args=(channel, inbox, clock), daemon=True).start()
    gc.disable()  # while imports and weights create permanent objects
    try:
        engine = start_engine(sys.stdin.buffer.read(), channel, arguments.ranks_folder)
        channel.send(Ready(engine.info))
        gc.enable()
        gc.collect()
        # Scanning all of torch's objects again would delay a step by a tenth of a second.
        gc.freeze()
        serve(engine, channel, inbox, clock)
    except ServerGoneError:
        return 0
    except PenstockError as error:
        return _send_dying(channel, error)
    except Exception as error:
        log.exception("the engine stopped")
        return _send_dying(channel, _unexpected(error))
    finally:
        gc.unfreeze()
        channel.close()
    return 0


def die_with_the_server() -> None:
    """A stopped process cannot notice that its server is gone; the kernel can, and kills it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _read_messages(
    channel: EngineChannel, inbox: queue.SimpleQueue[ToEngine], clock: StepClock
) -> None:
    """The reader thread. When the server is gone, the main thread may still be loading or in a
    device call, and there is nothing to save: exiting at once frees the device's memory soonest.
    """
    try:
        while (message := _receive(channel)) is not None:
            if isinstance(message, Ping):
                channel.send(Pong(clock.seconds))
                continue
            inbox.put(message)
            if isinstance(message, Shutdown):
                return
    except ServerGoneError:
        pass
    except WireError:
        log.exception("a message from the server cannot be decoded")
        os._exit(1)
    os._exit(0)


def _receive(channel: EngineChannel) -> ToEngine | None:
    """The next message; an unreadable request is refused, and other requests continue."""
    while True:
        try:
            return channel.receive()
        except UnreadableRequestError as error:
            log.exception("request %s cannot be read", error.request_id)
            channel.send(Rejected(error.request_id, ErrorFields.of(error)))


def _send_dying(channel: EngineChannel, error: PenstockError) -> int:
    with contextlib.suppress(ServerGoneError):
        channel.send(Dying(ErrorFields.of(error)))
    return 1


def _unexpected(error: Exception) -> PenstockError:
    first_line = str(error).strip().partition("\n")[0]
    return EngineDeadError(
        f"The engine stopped: {type(error).__name__}{': ' if first_line else ''}{first_line}",
        "Penstock did not expect this; it is probably a bug.",
        "The engine's log has the traceback; start the server again.",
    )


def _refused(error: Exception) -> PenstockError:
    return PenstockError(
        "The engine could not accept the request", f"{type(error).__name__}; see the engine's log."
    )


def start_engine(
    config_json: bytes, channel: EngineChannel, ranks_folder: str | None = None
) -> Engine:
    """Builds and warms up the engine, and reports the phases to the server."""

    def report(phase: Phase) -> None:
        channel.send(Progress(phase))

    # Importing before the channel is open would mean seconds without a progress report.
    with timed("libraries", report):
        from penstock.engine.device import leave_a_core, select_device
        from penstock.engine.engine import Engine
    config = msgspec.json.decode(config_json, type=WorkerConfig)
    leave_a_core(config.tp)
    select_device(config.device)
    engine = Engine.from_config(config, report, config.tokenizer, ranks_folder)
    if engine.other_ranks is not None:
        _exit_with_rank(engine.other_ranks, channel)
    with timed("warm-up", report):
        warm_up(engine)
    if config.warm_prompt:
        with timed("system prompt", report):
            for tenant in config.warm_tenants:
                warm_up(engine, config.warm_prompt, tenant)
    with timed("grammars", report):  # later this would delay all replies
        engine.warm_up_grammars()
    return engine


def _exit_with_rank(group: RankGroup, channel: EngineChannel) -> None:
    """Normally the main thread gets the failed collective and reports why it ends. If it is stuck
    in a device call, the process exits anyway.
    """
    abort = group.on_failure

    def end(error: PenstockError) -> None:
        abort(error)
        time.sleep(RANK_GRACE_S)
        _send_dying(channel, error)
        os._exit(1)

    group.on_failure = end


def warm_up(engine: Engine, prompt: tuple[int, ...] = (0,), tenant: str = "") -> None:
    """Runs one request before the first client's, so that kernels, allocations and graphs exist and
    the prompt is in the prefix cache.
    """
    sampling = SamplingParams(max_tokens=WARM_UP_TOKENS)
    pooling = None if engine.info.has_head else Pooling()
    engine.submit(
        Request(id="warm-up", token_ids=prompt, sampling=sampling, pooling=pooling, tenant=tenant)
    )
    while engine.has_work:
        engine.step()


def serve(
    engine: Engine, channel: EngineChannel, inbox: queue.SimpleQueue[ToEngine], clock: StepClock
) -> None:
    """Steps and answers until the server sends Shutdown. The server is told in advance which
    requests take part in a step, so if the step crashes the process, it knows which ones were
    running.
    """
    engine.on_start = lambda ids: channel.send(Deltas([TokenDelta(id) for id in ids]))
    while True:
        began = time.monotonic()
        while not (engine.has_work and (inbox.empty() or time.monotonic() - began > MAX_INTAKE_S)):
            if not engine.has_work:
                message = inbox.get()  # blocks: there is nothing to compute
                began = time.monotonic()
            else:
                message = inbox.get_nowait()
            if isinstance(message, Shutdown):
                return
            handle(message, engine, channel)
        clock.start()
        deltas = engine.step()
        clock.stop()
        send_deltas(deltas, engine, channel)


def send_deltas(deltas: list[TokenDelta], engine: Engine, channel: EngineChannel) -> None:
    """Sends a step's deltas in one frame, but prompt scores in separate frames: a server does
    nothing else while it reads a frame. A delta that is too large for a frame ends only its own
    request.
    """
    for has_scores, group in groupby(deltas, lambda delta: delta.prompt_scores is not None):
        for some in ([delta] for delta in group) if has_scores else (list(group),):
            _send_or_fail(some, engine, channel)


def _send_or_fail(deltas: list[TokenDelta], engine: Engine, channel: EngineChannel) -> None:
    try:
        channel.send(Deltas(deltas))
    except FrameTooLongError as error:
        if len(deltas) > 1:
            for delta in deltas:
                _send_or_fail([delta], engine, channel)
            return
        (delta,) = deltas
        log.error("request %s ends: %s", delta.request_id, error)
        engine.drop(delta.request_id)
        channel.send(
            Deltas(
                [TokenDelta(delta.request_id, finish="error", error=f"{error.what}. {error.why}")]
            )
        )


def handle(message: ToEngine, engine: Engine, channel: EngineChannel) -> None:
    match message:
        case Submit(request):
            try:
                engine.submit(request)
            except PenstockError as error:
                channel.send(Rejected(request.id, ErrorFields.of(error)))
            except Exception as error:  # any exception: other requests continue
                log.exception("request %s could not be accepted", request.id)
                engine.drop(request.id)
                channel.send(Rejected(request.id, ErrorFields.of(_refused(error))))
        case Abort(request_id):
            engine.abort(request_id)
        case StatsQuery(query_id):
            channel.send(StatsAnswer(query_id, engine.stats()))
        case CachedQuery(query_id, digests, num_tokens):
            num_cached = engine.num_cached_tokens(digests, num_tokens)
            channel.send(CachedAnswer(query_id, num_cached))
        case ListSessions(query_id):
            channel.send(SessionsAnswer(query_id, engine.sessions()))
        case DropSession(query_id, session_id):
            dropped = engine.drop_session(session_id)
            channel.send(SessionsAnswer(query_id, [] if dropped is None else [dropped]))


if __name__ == "__main__":
    exit_code = main()
    atexit._run_exitfuncs()  # ranks end, temporary files go
    sys.stderr.flush()
    # Tearing down torch as well would delay the server's exit by half a second.
    os._exit(exit_code)
