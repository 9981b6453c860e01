"""A server with offloaded experts: its replies, and what it reports about itself."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest

from serving import Server, start_server
from two_layers import two_layers

CHAT = {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "max_tokens": 16}


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Server]]:
    """Resident experts, and experts in 12 of 32 slots with 3 active instead of 4."""
    offloaded = {"model": two_layers(), "expert_cache": "2.4MB"}
    with (
        start_server({"model": two_layers()}) as resident,
        start_server({**offloaded, "experts_per_token": 3}) as server,
    ):
        yield resident, server


def ask(server: Server, **more: Any) -> dict[str, Any]:
    answer = server.http.post(f"{server.url}/v1/chat/completions", json={**CHAT, **more})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def test_fewer_experts_are_reported_wherever_an_answer_is_read(
    servers: tuple[Server, Server],
) -> None:
    resident, server = servers
    assert "system_fingerprint" not in ask(resident)
    assert ask(server)["system_fingerprint"] == "experts-per-token-3"
    health = server.http.get(f"{server.url}/health").json()["experts"]
    assert health["per_token"] == 3
    assert 0 < health["slots"] < health["of_experts"] == 32
    assert "experts" not in resident.http.get(f"{resident.url}/health").json()


def test_the_live_numbers_have_the_heat_of_every_expert(servers: tuple[Server, Server]) -> None:
    def heat_of(server: Server) -> list[bytes]:
        with server.http.stream("GET", f"{server.url}/live") as answer:
            event = json.loads(next(answer.iter_lines()).removeprefix("data: "))
        assert event["stats"]["expert_heat"] == []  # each engine has slots of its own
        return [base64.b64decode(row) for row in event["replicas"][0]["expert_heat"]]

    resident, server = servers
    ask(server)
    rows = heat_of(server)
    assert [len(row) for row in rows] == [16, 16]
    slots = server.http.get(f"{server.url}/health").json()["experts"]["slots"]
    assert sum(byte >= 128 for row in rows for byte in row) == slots
    assert all(max(byte & 127 for byte in row) > 12 for row in rows)  # some are needed often
    assert heat_of(resident) == []


def test_metrics_count_what_the_tiers_moved(servers: tuple[Server, Server]) -> None:
    resident, server = servers
    ask(server)
    text = server.http.get(f"{server.url}/metrics").text
    numbers = {
        name: float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith("penstock_expert_")
        for name in [line.partition("{")[0].removeprefix("penstock_expert_")]
    }
    assert numbers["hits_total"] > 0
    assert numbers["misses_total"] == numbers["ram_hits_total"] > 0
    assert numbers["fetched_bytes_total"] == numbers["misses_total"] * 196_608  # float32
    assert numbers["wait_seconds_total"] > 0
    assert "penstock_expert_" not in resident.http.get(f"{resident.url}/metrics").text
