"""The engine as a process of its own: `python -m penstock.engine.worker --socket PATH`, config on stdin.

Connects to the server that started it, reports how loading goes, proves itself with one small request and
then steps while there is work. Sleeps on its inbox when there is none. A second thread reads the server's
messages and answers its pings, however long a step takes. Knows token ids and messages; what HTTP or text is,
it never hears. When the server goes away the process ends: there are no orphans.
"""

from __future__ import annotations

import argparse
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

log = logging.getLogger("penstock.engine")

WARM_UP_TOKENS = 3
MAX_INTAKE_S = 0.005  # for new requests between two steps: the replies under way wait for them
PR_SET_PDEATHSIG = 1  # of Linux' prctl


class StepClock:
    """How long the present step has taken, for whoever watches from another thread."""

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
    arguments = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s engine %(levelname)s %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the server's to answer
    die_with_the_server()

    channel = EngineChannel.connect(arguments.socket)
    inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
    clock = StepClock()
    threading.Thread(target=_read_messages, args=(channel, inbox, clock), daemon=True).start()
    try:
        engine = start_engine(sys.stdin.buffer.read(), channel)
        channel.send(Ready(engine.info))
        gc.collect()
        gc.freeze()  # a collection that looks at all of torch again holds up a step by a tenth of a second
        serve(engine, channel, inbox, clock)
    except ServerGoneError:
        return 0
    except PenstockError as error:
        return _say_goodbye(channel, error)
    except Exception as error:
        log.exception("the engine stopped")
        return _say_goodbye(channel, _unexpected(error))
    finally:
        gc.unfreeze()
        channel.close()
    return 0


def die_with_the_server() -> None:
    """A process that was stopped cannot see that its server has gone; the kernel can, and kills it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _read_messages(channel: EngineChannel, inbox: queue.SimpleQueue[ToEngine], clock: StepClock) -> None:
    """The reader thread. When the server is gone the main thread may be deep in loading or in a device
    call, and nothing is left to save: leaving at once gives the device's memory back soonest."""
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
        log.exception("the server cannot be understood")
        os._exit(1)
    os._exit(0)


def _receive(channel: EngineChannel) -> ToEngine | None:
    """The next message; a request that cannot be read is refused, and the others go on."""
    while True:
        try:
            return channel.receive()
        except UnreadableRequestError as error:
            log.exception("request %s cannot be read", error.request_id)
            channel.send(Rejected(error.request_id, ErrorFields.of(error)))


def _say_goodbye(channel: EngineChannel, error: PenstockError) -> int:
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
        "The engine could not take the request", f"{type(error).__name__}; the log says more."
    )


def start_engine(config_json: bytes, channel: EngineChannel) -> Engine:
    """Builds and warms up the engine, telling the server where it is."""

    def report(phase: Phase) -> None:
        channel.send(Progress(phase))

    with timed("libraries", report):  # seconds of silence, were it imported before the channel is open
        from penstock.engine.device import leave_a_core, select_device
        from penstock.engine.engine import Engine
    leave_a_core()
    config = msgspec.json.decode(config_json, type=WorkerConfig)
    select_device(config.device)
    engine = Engine.from_config(config, report, config.tokenizer)
    with timed("warm-up", report):
        warm_up(engine)
    if config.warm_prompt:
        with timed("system prompt", report):
            for tenant in config.warm_tenants:
                warm_up(engine, config.warm_prompt, tenant)
    with timed("grammars", report):  # later, it would hold up everybody's replies
        engine.warm_up_grammars()
    return engine


def warm_up(engine: Engine, prompt: tuple[int, ...] = (0,), tenant: str = "") -> None:
    """One request, before the first client's: kernels, allocations and graphs exist afterwards, and the
    prompt is in the prefix cache."""
    sampling = SamplingParams(max_tokens=WARM_UP_TOKENS)
    pooling = None if engine.info.has_head else Pooling()
    engine.submit(Request(id="warm-up", token_ids=prompt, sampling=sampling, pooling=pooling, tenant=tenant))
    while engine.has_work:
        engine.step()


def serve(
    engine: Engine, channel: EngineChannel, inbox: queue.SimpleQueue[ToEngine], clock: StepClock
) -> None:
    """Steps and answers until the server says Shutdown. Should a step end the process, the server knows who
    took part in it: that was said before."""
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
    """A step's deltas in one frame, but scores of prompts in frames of their own: a server that reads a
    frame does nothing else. What no frame can hold ends its request, and nobody else's."""
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
            Deltas([TokenDelta(delta.request_id, finish="error", error=f"{error.what}. {error.why}")])
        )


def handle(message: ToEngine, engine: Engine, channel: EngineChannel) -> None:
    match message:
        case Submit(request):
            try:
                engine.submit(request)
            except PenstockError as error:
                channel.send(Rejected(request.id, ErrorFields.of(error)))
            except Exception as error:  # whatever it is, the other requests go on
                log.exception("request %s could not be taken", request.id)
                engine.drop(request.id)
                channel.send(Rejected(request.id, ErrorFields.of(_refused(error))))
        case Abort(request_id):
            engine.abort(request_id)
        case StatsQuery(query_id):
            channel.send(StatsAnswer(query_id, engine.stats()))
        case ListSessions(query_id):
            channel.send(SessionsAnswer(query_id, engine.sessions()))
        case DropSession(query_id, session_id):
            dropped = engine.drop_session(session_id)
            channel.send(SessionsAnswer(query_id, [] if dropped is None else [dropped]))


if __name__ == "__main__":
    sys.exit(main())
