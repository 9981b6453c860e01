"""Fairness over HTTP: the order in which a server serves many clients."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from serving import FREE, MESSAGES, Server, eventually, start_server
from two_layers import two_layers

ANN, BEN = "sk-of-ann", "sk-of-ben"
MAX_QUEUE = 12
NUM_LONG, LONG_TOKENS = 5, 2000


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    engine = {"model": two_layers(), "max_rows": 6, "prefix_cache": False, "memory_gb": 0.3}
    with start_server(engine, {"api_key": (ANN, BEN), "max_queue": MAX_QUEUE}) as server:
        server.http.headers["authorization"] = f"Bearer {ANN}"  # with a key, /health tells more
        yield server


def ask(
    server: Server, key: str, path: str = "/v1/chat/completions", **fields: Any
) -> httpx.Response:
    body = {
        "model": "any",
        **FREE,
        **({} if "prompt" in fields else {"messages": MESSAGES}),
        **fields,
    }
    headers = {"authorization": f"Bearer {key}"}
    return server.http.post(server.url + path, json=body, headers=headers)


def test_one_keys_crowd_neither_fills_the_queue_nor_keeps_the_rows_from_another(
    server: Server,
) -> None:
    with ThreadPoolExecutor() as pool:
        stop = threading.Event()

        def crowd() -> None:
            fields: dict[str, Any] = {
                "n": MAX_QUEUE,
                "max_tokens": 3000,
                "stream": True,
                "temperature": 1.0,
            }
            body = {"model": "any", "messages": MESSAGES, **FREE, **fields}
            headers = {"authorization": f"Bearer {ANN}"}
            url = server.url + "/v1/chat/completions"
            with server.http.stream("POST", url, json=body, headers=headers) as answer:
                for _ in answer.iter_lines():
                    if stop.is_set():
                        return

        crowding = pool.submit(crowd)
        try:
            assert eventually(lambda: server.stats()["num_running"] == 6)
            refused = ask(server, ANN, max_tokens=1)
            assert refused.status_code == 429
            assert "retry-after" in refused.headers
            answer = ask(server, BEN, max_tokens=3)
            assert answer.status_code == 200, answer.text
            assert not crowding.done()
        finally:
            stop.set()
    assert eventually(server.is_idle)


def test_a_short_prompt_is_answered_before_the_long_ones_that_came_first(server: Server) -> None:
    ended: list[str] = []

    def complete(name: str, prompt: list[int]) -> None:
        answer = ask(server, ANN, "/v1/completions", prompt=prompt, max_tokens=1)
        assert answer.status_code == 200, answer.text
        ended.append(name)

    with ThreadPoolExecutor() as pool:
        for i in range(NUM_LONG):
            pool.submit(complete, "long", [10 + (i + j) % 200 for j in range(LONG_TOKENS)])
        stats = server.stats
        assert eventually(
            lambda: (now := stats())["num_running"] + now["num_waiting"] >= NUM_LONG - 2
        )
        complete("short", [5, 6, 7])
    assert ended.index("short") <= 2, ended
    assert len(ended) == NUM_LONG + 1
