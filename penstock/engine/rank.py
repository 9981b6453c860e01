"""A rank other than 0, as a process: `python -m penstock.engine.rank --socket PATH --rank N`.

Loads its shard of the model, then launches every plan that rank 0 launches, in the same order. It
decides nothing and talks only to rank 0. A second thread reads messages and answers pings, however
long a step takes. It exits when rank 0 is gone, so it never becomes an orphan.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import queue
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.engine.rank_wire import (
    Begin,
    ComputeLogits,
    LaunchStep,
    RankArrived,
    RankChannel,
    RankFailed,
    RankPing,
    RankPong,
    SetLastTokens,
    ToRank,
)
from penstock.errors import CapacityError, EngineDeadError, PenstockError
from penstock.wire import ErrorFields

if TYPE_CHECKING:
    from penstock.engine.runner import Runner

log = logging.getLogger("penstock.engine")


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs one rank of a model for rank 0.")
    parser.add_argument("--socket", required=True, help="Unix socket on which rank 0 listens")
    parser.add_argument("--rank", required=True, type=int)
    parser.add_argument("--die-with-parent", action="store_true")
    arguments = parser.parse_args()
    form = f"%(asctime)s rank {arguments.rank} %(levelname)s %(message)s"
    logging.basicConfig(stream=sys.stderr, format=form)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles Ctrl-C
    if arguments.die_with_parent:
        from penstock.engine.worker import die_with_the_server

        die_with_the_server()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(arguments.socket)
    connection.sendall(bytes([arguments.rank]))
    channel = RankChannel(connection, ToRank)
    inbox: queue.SimpleQueue[ToRank] = queue.SimpleQueue()
    threading.Thread(target=_read_messages, args=(channel, inbox), daemon=True).start()
    try:
        _run(arguments.rank, channel, inbox)
    except PenstockError as error:
        _report(channel, error)
    except Exception as error:
        log.exception("the rank stopped")
        _report(channel, _described(error))
    return 1


def _run(rank: int, channel: RankChannel, inbox: queue.SimpleQueue[ToRank]) -> None:
    from penstock.engine.device import select_device
    from penstock.engine.device_part import load_part, rank_device
    from penstock.models.source import ModelSource

    begin = inbox.get()
    assert isinstance(begin, Begin)
    select_device(rank_device(begin.config, rank))
    channel.send(RankArrived())
    path = None if begin.path is None else Path(begin.path)
    source = ModelSource(begin.name, path, begin.model_config)
    runner = load_part(source, begin.config, rank, Path(begin.meeting_file)).runner
    gc.collect()
    gc.freeze()  # scanning all of torch's objects again would delay a step
    while True:
        obey(runner, inbox.get())


def obey(runner: Runner, message: ToRank) -> None:
    match message:
        case LaunchStep(plan, is_masked):
            runner.follow(plan, is_masked)
        case ComputeLogits(plan):
            runner.logits(plan)
        case SetLastTokens(rows, token_ids, context_lens):
            runner.set_last_tokens(rows, token_ids, context_lens)


def _read_messages(channel: RankChannel, inbox: queue.SimpleQueue[ToRank]) -> None:
    """The reader thread. When rank 0 is gone there is nothing to save, and the main thread may be
    in a device call: exiting at once frees the device's memory soonest.
    """
    while (message := channel.receive()) is not None:
        if isinstance(message, RankPing):
            with contextlib.suppress(OSError):
                channel.send(RankPong())
        else:
            inbox.put(message)
    os._exit(0)


def _report(channel: RankChannel, error: PenstockError) -> None:
    with contextlib.suppress(OSError):
        channel.send(RankFailed(ErrorFields.of(error)))


def _described(error: Exception) -> PenstockError:
    from penstock.engine.graphs import is_out_of_memory

    first_line = str(error).strip().partition("\n")[0]
    if isinstance(error, RuntimeError) and is_out_of_memory(error):
        return CapacityError(
            "It ran out of memory",
            first_line,
            "Lower --max-step-tokens, --max-rows or --memory-gb, or use more GPUs.",
        )
    return EngineDeadError(f"{type(error).__name__}{': ' if first_line else ''}{first_line}")


if __name__ == "__main__":
    sys.exit(main())
