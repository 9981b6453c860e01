"""Clients of a node with several engines: streams with known replies, while faults are injected."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.eval.stream_client import StreamedReply, Target, exchange, read_answer
from serving import Server

TIMEOUT_S = 120.0
# Replies are bitwise equal on every engine only with fixed tiles and whole chunks.
NODE_ENGINE = {"deterministic": True, "page_size": 64, "max_model_len": 1024, "max_rows": 4}


def body_of(number: int, max_tokens: int) -> dict[str, Any]:
    """A greedy request with a question of its own."""
    return {
        "model": "any",
        "messages": [
            {"role": "user", "content": f"Question {number}: what is {number} + {number * 7}?"}
        ],
        "temperature": 0.0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def stream_one(server: Server, body: dict[str, Any]) -> StreamedReply:
    target = Target.of(server.url)
    answer = await exchange(target, target.encode_request(json.dumps(body).encode()), TIMEOUT_S)
    return read_answer(answer)


async def stream_all(
    server: Server,
    bodies: list[dict[str, Any]],
    meanwhile: Callable[[], Awaitable[None]] | None = None,
) -> list[StreamedReply]:
    streams = [asyncio.create_task(stream_one(server, body)) for body in bodies]
    if meanwhile is not None:
        await meanwhile()
    return await asyncio.gather(*streams)


def said(reply: StreamedReply) -> tuple[Any, ...]:
    """All fields of a reply that must not depend on the engine that computed it."""
    return (
        reply.error,
        reply.text,
        reply.finish_reason,
        reply.num_prompt_tokens,
        reply.num_completion_tokens,
    )


async def all_ready(server: Server, timeout_s: float = 120.0) -> None:
    """Waits until every replica of the node serves."""
    async with asyncio.timeout(timeout_s):
        while any(replica["state"] != "ready" for replica in replicas_of(server)):
            await asyncio.sleep(0.05)


def replicas_of(server: Server) -> list[dict[str, Any]]:
    replicas: list[dict[str, Any]] = server.health().json()["replicas"]
    return replicas


def num_moved(server: Server) -> int:
    text = server.http.get(f"{server.url}/metrics").text
    (line,) = [
        line for line in text.splitlines() if line.startswith("penstock_moved_requests_total ")
    ]
    return int(line.split()[1])
