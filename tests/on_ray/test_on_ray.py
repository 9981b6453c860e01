"""Penstock on a real Ray cluster of two nodes of this machine: load, update, scaling, a lost node.

`make test-ray` installs Ray into an environment of its own and runs these.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ["RAY_AUTH_MODE"] = "disabled"  # a cluster of this process alone
os.environ.setdefault("RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S", "2")
os.environ.setdefault("RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
ray = pytest.importorskip("ray")
serve = pytest.importorskip("ray.serve")

from ray.cluster_utils import Cluster  # noqa: E402

from penstock.eval.stream_client import StreamedReply, Target, exchange, read_answer  # noqa: E402
from penstock.ray import app  # noqa: E402
from penstock.ray.door import prompt_text  # noqa: E402
from penstock.ray.router import QueuedTokens  # noqa: E402
from penstock.ray.settings import RaySettings  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PORT = 8713
URL = f"http://127.0.0.1:{PORT}"
FLAGS = "--device cpu --memory-gb 0.05 --max-rows 4"
SETTINGS = {"cpus": 1, "gpus": 0, "flags": FLAGS, "drain_timeout": 60, "batch_ms": 20}
pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head node without room for engines, and two nodes with room."""
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "object_store_memory": 80 * 2**20},
    )
    for name in ("first", "second"):
        cluster.add_node(num_cpus=2, resources={name: 1}, object_store_memory=80 * 2**20)
    ray.init(address=cluster.address, log_to_driver=False)
    serve.start(proxy_location="HeadOnly", http_options={"port": PORT})
    yield cluster
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


def deploy(**settings: Any) -> None:
    serve.run(app({**SETTINGS, **settings}), name="penstock", route_prefix="/")


def num_engines() -> int:
    status = serve.status().applications["penstock"].deployments["engine"]
    return sum(count for state, count in status.replica_states.items() if state == "RUNNING")


def wait_for(is_so: Any, timeout_s: float = 150.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.5)


def body_of(number: int, max_tokens: int, padding: str = "") -> dict[str, Any]:
    question = f"{padding}What is {number} + {number * 7}? Reply with just the number."
    return {
        "model": "any",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0.0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def ask(body: dict[str, Any]) -> StreamedReply:
    target = Target.of(URL)
    words = target.encode_request(json.dumps(body).encode())
    return read_answer(await exchange(target, words, 240.0))


async def ask_all(bodies: list[dict[str, Any]]) -> list[StreamedReply]:
    return list(await asyncio.gather(*map(ask, bodies)))


def test_two_engines_answer_streams_and_a_rolling_update_loses_none(cluster: Any) -> None:
    deploy(min_replicas=2, max_replicas=2)
    assert num_engines() == 2
    replies = asyncio.run(ask_all([body_of(i, 24) for i in range(12)]))
    assert [reply.error for reply in replies] == [""] * 12
    assert {reply.num_completion_tokens for reply in replies} == {24}
    again = asyncio.run(ask_all([body_of(i, 24) for i in range(12)]))
    assert [reply.text for reply in again] == [reply.text for reply in replies]

    async def under_update() -> list[StreamedReply]:
        """Sends streams before, during and after the engines are replaced."""
        streams = []
        update = asyncio.create_task(
            asyncio.to_thread(
                deploy, min_replicas=2, max_replicas=2, flags=FLAGS + " --max-model-len 2048"
            )
        )
        while not update.done() or len(streams) < 4:
            streams.append(asyncio.create_task(ask(body_of(len(streams), 24))))
            await asyncio.sleep(0.7)
        await update
        streams += [asyncio.create_task(ask(body_of(i, 24))) for i in range(4)]
        return list(await asyncio.gather(*streams))

    seen = asyncio.run(under_update())
    assert [reply.error for reply in seen] == [""] * len(seen)
    assert {reply.num_completion_tokens for reply in seen} == {24}


def test_a_node_that_is_killed_under_streams_costs_none_of_them(cluster: Any) -> None:
    """Replies under way continue on the other node with the same text."""
    # Only fixed tiles and whole chunks make replies bitwise equal on every engine.
    deploy(min_replicas=2, max_replicas=2, flags=FLAGS + " --deterministic")
    bodies = [body_of(i, 300) for i in range(6)]
    bodies += [{**body_of(i, 300), "temperature": 1.0, "seed": i} for i in range(2)]
    expected = asyncio.run(ask_all(bodies))
    assert [reply.error for reply in expected] == [""] * len(bodies)
    free = ray._private.state.available_resources_per_node()
    nodes = [node for node in cluster.list_all_nodes() if not node.is_head()]
    victim = min(nodes, key=lambda node: free[node.node_id].get("CPU", 0))
    assert free[victim.node_id].get("CPU", 0) < 2, "it has an engine"

    async def under_loss() -> tuple[list[StreamedReply], list[StreamedReply]]:
        running = [asyncio.create_task(ask(body)) for body in bodies]
        await asyncio.sleep(3.0)
        assert not any(task.done() for task in running)
        await asyncio.to_thread(cluster.remove_node, victim, allow_graceful=False)
        await asyncio.sleep(5.0)  # its processes end with it, but not all in the same moment
        later = [asyncio.create_task(ask(body_of(i, 16))) for i in range(6)]
        return list(await asyncio.gather(*running)), list(await asyncio.gather(*later))

    running, later = asyncio.run(under_loss())
    assert [reply.error for reply in running] == [""] * len(bodies)
    assert [reply.text for reply in running] == [reply.text for reply in expected]
    assert {reply.num_completion_tokens for reply in running} == {300}
    assert [reply.error for reply in later] == [""] * 6
    assert max(num_moved() for _ in range(8)) > 0, "no stream had to go on elsewhere"
    cluster.add_node(num_cpus=2, resources={"third": 1}, object_store_memory=80 * 2**20)
    wait_for(lambda: num_engines() == 2)


def num_moved() -> int:
    """Number of requests that the answering engine took over from another."""
    with urllib.request.urlopen(f"{URL}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    (line,) = [one for one in lines if one.startswith("penstock_moved_requests_total ")]
    return int(line.split()[1])


def test_engines_come_when_prompts_wait_and_go_when_none_do(cluster: Any) -> None:
    deploy(min_replicas=1, max_replicas=2, queued_tokens=200, upscale_delay=1, downscale_delay=8)
    wait_for(lambda: num_engines() == 1)
    padding = "All of this was said before, and it is said again. " * 12

    async def crowd() -> list[StreamedReply]:
        bodies = [body_of(i, 40, f"{i}. {padding}") for i in range(40)]
        asked = asyncio.create_task(ask_all(bodies))
        await asyncio.to_thread(wait_for, lambda: num_engines() == 2)
        return await asked

    replies = asyncio.run(crowd())
    assert [reply.error for reply in replies] == [""] * 40
    wait_for(lambda: num_engines() == 1)


def test_other_routes_and_errors_pass_through(cluster: Any) -> None:
    deploy(min_replicas=1, max_replicas=1)
    with urllib.request.urlopen(f"{URL}/v1/models", timeout=60) as answer:
        assert json.load(answer)["data"][0]["id"] == "penstock-tiny"
    words = urllib.request.Request(
        f"{URL}/v1/chat/completions", b'{"messages": 3}', {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(words, timeout=60)
    assert refused.value.code == 400
    assert "messages" in refused.value.read().decode()


def test_a_client_that_leaves_ends_its_request_and_heads_have_no_body(cluster: Any) -> None:
    deploy(min_replicas=1, max_replicas=1)

    async def leave() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
        body = json.dumps(body_of(1, 900)).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: any\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        await reader.readuntil(b"data: ")
        writer.close()

    def num_running() -> int:
        with urllib.request.urlopen(f"{URL}/health", timeout=60) as answer:
            count: int = json.load(answer)["stats"]["num_running"]
            return count

    asyncio.run(leave())
    begun = time.monotonic()
    wait_for(lambda: num_running() == 0, 6.0)
    assert time.monotonic() - begun < 7.0, "a reply of 900 tokens would take longer"
    asked = urllib.request.Request(f"{URL}/", method="HEAD")
    with urllib.request.urlopen(asked, timeout=60) as answer:
        assert (answer.status, answer.read()) == (200, b"")


@pytest.mark.parametrize("path", sorted((ROOT / "examples/ray").glob("*.yaml")), ids=str)
def test_ray_understands_the_examples(path: Path) -> None:
    import yaml
    from ray.serve.schema import ServeDeploySchema

    found = yaml.safe_load(path.read_text())
    if found.get("kind") == "RayService":
        found = yaml.safe_load(found["spec"]["serveConfigV2"])
    schema = ServeDeploySchema.model_validate(found)
    for one in schema.applications:
        assert one.import_path == "penstock.ray:app"
        settings = RaySettings.read(one.args)
        assert settings.max_replicas >= settings.min_replicas


@pytest.mark.parametrize(
    ("num_tokens", "num_engines", "wanted"),
    [(0, 3, 2), (0, 1, 1), (1500, 2, 2), (2001, 2, 3), (10_000, 2, 10), (500, 2, 1)],
)
def test_engines_follow_the_tokens_that_wait(
    num_tokens: int, num_engines: int, wanted: int
) -> None:
    assert QueuedTokens(1000).wanted(num_tokens, num_engines) == wanted


def test_prompts_of_all_apis_are_read_for_the_router() -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "tools": [1]}
    assert prompt_text(json.dumps(chat).encode()).startswith('[[1], [{"role": "user"')
    assert prompt_text(b'{"prompt": "One"}') == '["One"]'
    assert prompt_text(b"") == prompt_text(b"no JSON") == prompt_text(b"[1]") == ""
