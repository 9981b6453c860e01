"""Ranks as threads of one process: the same collectives, without the start of processes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from penstock.config import EngineConfig
from penstock.engine.device_part import DevicePart
from penstock.engine.engine import Engine
from penstock.engine.rank import obey
from penstock.engine.rank_wire import ToRank
from penstock.models.source import ModelSource
from penstock.parallel.links import GroupLinks
from penstock.parallel.ranks import ALONE, Ranks
from penstock.weights.load import load_model

Result = TypeVar("Result")


def on_ranks(size: int, run: Callable[[Ranks], Result]) -> list[Result]:
    """The result of `run` on each rank."""
    store = dist.HashStore()

    def one(rank: int) -> Result:
        links = GroupLinks(store, rank, size, torch.device("cpu"))
        return run(Ranks(rank, size, links))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(one, range(size)))


@contextmanager
def ranked_engine(config: dict[str, Any], size: int, **settings: Any) -> Iterator[Engine]:
    """An engine whose other ranks are threads; it sends them the bytes that it would send to
    processes.
    """
    given = {"device": "cpu", "deterministic": True, "max_model_len": 1024, **settings}
    tokenizer_file = given.pop("tokenizer_file", None)
    engine_config = EngineConfig(**given)
    inboxes = [queue.SimpleQueue[bytes]() for _ in range(1, size)]
    decoder: Any = msgspec.msgpack.Decoder(ToRank)
    failures: list[BaseException] = []

    def send(message: Any) -> None:
        for inbox in inboxes:
            inbox.put(msgspec.msgpack.encode(message))

    def follow(part: DevicePart, inbox: queue.SimpleQueue[bytes]) -> None:
        try:
            while message := inbox.get():
                obey(part.runner, decoder.decode(message))
        except BaseException as error:
            failures.append(error)

    def load(ranks: Ranks) -> DevicePart:
        model = random_model(config, replace(ranks, whole_experts=engine_config.ep))
        return DevicePart.of(model, engine_config, "small", lambda _: None)

    parts = on_ranks(size, load)
    engine = Engine.__new__(Engine)
    engine._begin(parts[0], "small", tokenizer_file)
    engine.runner.tell_others = send
    threads = [threading.Thread(target=follow, args=given) for given in zip(parts[1:], inboxes)]
    for thread in threads:
        thread.start()
    try:
        yield engine
    finally:
        for inbox in inboxes:
            inbox.put(b"")
        for thread in threads:
            thread.join()
    assert not failures
    tables = [part.runner.rows for part in parts]
    for table in tables[1:]:
        assert torch.equal(table.last_token, tables[0].last_token), "all ranks say the same"
        assert torch.equal(table.context_len, tables[0].context_len)


def random_model(config: dict[str, Any], ranks: Ranks = ALONE) -> Any:
    return load_model(
        ModelSource(name="small", path=None, config=config),
        device="cpu",
        dtype="float32",
        random_weights=True,
        seed=3,
        on_phase=lambda phase: None,
        with_drafting_head=True,
        ranks=ranks,
    )
