"""Many clients at once: replies are independent, and disconnects free all resources."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from serving import Server, eventually, start_server
from two_layers import two_layers

NUM_CLIENTS = 64


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    # Responses are bitwise equal only if prefixes end on whole chunks of the delta rule: 64 tokens.
    engine = {"model": two_layers(), "deterministic": True, "page_size": 64, "max_rows": 48}
    with start_server(engine) as running:
        yield running


def body_of(index: int) -> dict[str, Any]:
    """Greedy and sampled, short and long requests; some share a system prompt, so that prefixes are
    found.
    """
    system = {
        "role": "system",
        "content": "You know all rivers of the world and their names. " * (index % 4),
    }
    question = {"role": "user", "content": f"Question {index}: " + "why? " * (index % 7)}
    return {
        "messages": [system, question],
        "temperature": 0.0 if index % 2 else 1.0,
        "seed": index,
        "max_tokens": 3 + index % 6,
        "ignore_eos": True,
        "stream": True,
        "logprobs": index % 5 == 0,
    }


async def events(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a stream, which must end with [DONE]."""
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                return
            if line.startswith("data: "):  # others are heartbeats
                yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ended without [DONE]")


async def reply(client: httpx.AsyncClient, body: dict[str, Any]) -> list[Any]:
    """All that a client sees of the text, including chunk borders and log-probabilities."""
    return [chunk["choices"] async for chunk in events(client, body)]


def http(server: Server) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=2 * NUM_CLIENTS)
    return httpx.AsyncClient(base_url=server.url, timeout=120.0, limits=limits)


def test_64_clients_at_once_get_the_answers_they_get_alone(server: Server) -> None:
    bodies = [body_of(index) for index in range(NUM_CLIENTS)]

    async def scenario() -> None:
        async with http(server) as client:
            together = await asyncio.gather(*(reply(client, body) for body in bodies))
            alone = [await reply(client, body) for body in bodies]
        assert together == alone

    asyncio.run(scenario())
    assert server.is_idle()


def test_half_of_the_clients_leaving_midway_leaves_no_page_in_use_and_no_answer_changed(
    server: Server,
) -> None:
    staying = [body_of(index) | {"max_tokens": 16} for index in range(0, NUM_CLIENTS, 2)]
    leaving = [body_of(index) | {"max_tokens": 2000} for index in range(1, NUM_CLIENTS, 2)]

    async def leave_midway(
        client: httpx.AsyncClient, body: dict[str, Any], num_chunks: int
    ) -> None:
        stream = events(client, body)
        for _ in range(num_chunks):
            await anext(stream)
        await stream.aclose()  # closes the connection

    async def scenario() -> None:
        async with http(server) as client:
            departures = (
                leave_midway(client, body, 1 + index % 6) for index, body in enumerate(leaving)
            )
            together = await asyncio.gather(*(reply(client, body) for body in staying), *departures)
            for index in range(0, len(staying), 8):
                assert together[index] == await reply(client, staying[index])

    asyncio.run(scenario())
    assert eventually(server.is_idle, 2.0)  # long before 2000 tokens
