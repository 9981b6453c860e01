"""The engine as a process of its own: `python -m penstock.engine.worker --socket PATH`, config on stdin.

Connects to the server that started it, reports how loading goes, proves itself with one small request and
then steps while there is work. Sleeps on its inbox when there is none. Knows token ids and messages; what
HTTP or text is, it never hears. When the server goes away the process ends: there are no orphans.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import queue
import signal
import sys
import threading
from typing import TYPE_CHECKING

import msgspec

from penstock.config import WorkerConfig
from penstock.errors import EngineDeadError, PenstockError
from penstock.progress import Phase, timed
from penstock.types import Request, SamplingParams
from penstock.wire import (
    Abort,
    Deltas,
    Dying,
    EngineChannel,
    ErrorFields,
    Progress,
    Ready,
    Rejected,
    ServerGoneError,
    Shutdown,
    StatsAnswer,
    StatsQuery,
    Submit,
    ToEngine,
    WireError,
)

if TYPE_CHECKING:
    from penstock.engine.engine import Engine

log = logging.getLogger("penstock.engine")

WARM_UP_TOKENS = 3


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs one engine for a Penstock server.")
    parser.add_argument("--socket", required=True, help="Unix socket on which the server listens")
    arguments = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s engine %(levelname)s %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the server's to answer

    channel = EngineChannel.connect(arguments.socket)
    inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
    threading.Thread(target=_read_messages, args=(channel, inbox), daemon=True).start()
    try:
        engine = start_engine(sys.stdin.buffer.read(), channel)
        channel.send(Ready(engine.info))
        gc.collect()
        gc.freeze()  # a collection that looks at all of torch again holds up a step by a tenth of a second
        serve(engine, channel, inbox)
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


def _read_messages(channel: EngineChannel, inbox: queue.SimpleQueue[ToEngine]) -> None:
    """The reader thread. When the server is gone the main thread may be deep in loading or in a device
    call, and nothing is left to save: leaving at once gives the device's memory back soonest."""
    try:
        while (message := channel.receive()) is not None:
            inbox.put(message)
            if isinstance(message, Shutdown):
                return
    except WireError:
        log.exception("the server cannot be understood")
        os._exit(1)
    os._exit(0)


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


def start_engine(config_json: bytes, channel: EngineChannel) -> Engine:
    """Builds and warms up the engine, telling the server where it is."""

    def report(phase: Phase) -> None:
        channel.send(Progress(phase))

    with timed("libraries", report):  # seconds of silence, were it imported before the channel is open
        from penstock.engine.engine import Engine
        from penstock.engine.threads import leave_a_core
    leave_a_core()
    config = msgspec.json.decode(config_json, type=WorkerConfig)
    engine = Engine.from_config(config, report, config.tokenizer)
    with timed("warm-up", report):
        warm_up(engine)
    with timed("grammars", report):  # later, it would hold up everybody's replies
        engine.warm_up_grammars()
    return engine


def warm_up(engine: Engine) -> None:
    """One request, before the first client's: kernels, allocations and graphs exist afterwards."""
    sampling = SamplingParams(max_tokens=WARM_UP_TOKENS)
    engine.submit(Request(id="warm-up", token_ids=(0,), sampling=sampling))
    while engine.has_work:
        engine.step()


def serve(engine: Engine, channel: EngineChannel, inbox: queue.SimpleQueue[ToEngine]) -> None:
    """Steps and answers until the server says Shutdown."""
    while True:
        while not (engine.has_work and inbox.empty()):
            message = inbox.get()  # blocks, and only when there is nothing to compute
            if isinstance(message, Shutdown):
                return
            handle(message, engine, channel)
        deltas = engine.step()
        if deltas:
            channel.send(Deltas(deltas))


def handle(message: ToEngine, engine: Engine, channel: EngineChannel) -> None:
    match message:
        case Submit(request):
            try:
                engine.submit(request)
            except PenstockError as error:
                channel.send(Rejected(request.id, ErrorFields.of(error)))
        case Abort(request_id):
            engine.abort(request_id)
        case StatsQuery(query_id):
            channel.send(StatsAnswer(query_id, engine.stats()))


if __name__ == "__main__":
    sys.exit(main())
