"""A request that kills every engine it runs in, on a real server: two die, others continue."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving import FREE, MESSAGES, Server, assert_refused, start_server
from two_layers import two_layers

POISON = [77, 78, 79] * 30
# Every Python started here runs this; it patches only engines.
SITE = f"""
import sys
if "penstock.engine.worker" in sys.orig_argv:
    from penstock.engine.scheduler import Scheduler
    commit = Scheduler.commit
    def commit_unless_poisoned(self, output, limits):
        for sequence in self._running:
            assert sequence.tokens[:90] != {POISON}, "poisoned"
        return commit(self, output, limits)
    Scheduler.commit = commit_unless_poisoned
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    with start_server({"model": two_layers()}, path=tmp_path) as running:
        yield running


def test_a_request_that_no_engine_survives_costs_two_and_others_lose_nothing(
    server: Server,
) -> None:
    chat = {"messages": MESSAGES, "max_tokens": 120, **FREE}
    expected = server.post({**chat, "seed": 1}).json()["choices"]
    poison = {"prompt": POISON, "echo": True, "logprobs": 2, "max_tokens": 1}
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        others = [pool.submit(server.post, {**chat, "seed": 1}) for _ in range(4)]
        refusal = pool.submit(server.post, poison, "/v1/completions").result()
        assert [other.result().json().get("choices") for other in others] == [expected] * 4
    assert_refused(refusal, 500, None)
    assert refusal.json()["error"]["code"] == "engines_lost"
    assert refusal.headers["x-should-retry"] == "false"
    (replica,) = server.health().json()["replicas"]
    assert replica["restarts"] == 2
    assert server.post(chat).status_code == 200
