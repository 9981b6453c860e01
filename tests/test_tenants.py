"""A client with another API key finds nothing of other clients, in caches or by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.digests import extend_digests
from penstock.text.pieces import PieceEncoder
from serving import Server, start_server
from two_layers import two_layers

KEYS = ("sk-of-ann", "sk-of-ben")
SYSTEM = "You know rivers, their banks, their deltas and the weirs that people build in them. " * 3
LONG = (
    "Of all rivers I like those best that nobody has counted the bridges of, since they are few. "
    * 6
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file: Path = tmp_path_factory.mktemp("prompt") / "system.txt"
    file.write_text(SYSTEM)
    settings: dict[str, Any] = {"api_key": KEYS, "system_prompt_file": str(file)}
    with start_server({"model": two_layers(), "max_rows": 16}, settings) as server:
        yield server


def ask(server: Server, key: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    if body is None:
        return server.http.get(server.url + path, headers=headers)
    named = body if path == "/v1/conversations" else {"model": "any", **body}  # which uses no model
    return server.http.post(server.url + path, json=named, headers=headers)


def num_cached(server: Server, key: str, prompt: str, **fields: Any) -> int:
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 2, **fields}
    answer = ask(server, key, "/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def test_a_prefix_is_shared_within_a_tenant_and_never_beyond(server: Server) -> None:
    """The operator's system prompt is computed for each tenant."""
    ann, ben = KEYS
    shared = num_cached(server, ann, "Hello")
    assert shared > 0, "the system prompt"
    assert num_cached(server, ann, LONG) == shared
    assert num_cached(server, ann, LONG) > shared
    assert num_cached(server, ben, LONG) == shared
    assert num_cached(server, ben, LONG) > shared


def test_sessions_are_their_tenants(server: Server) -> None:
    ann, ben = KEYS
    num_cached(server, ann, "one", session_id="talk")
    num_cached(server, ben, "two", session_id="talk")
    num_cached(server, ben, "three", session_id="other")
    names = {
        key: {one["id"] for one in ask(server, key, "/v1/sessions").json()["data"]} for key in KEYS
    }
    assert names == {ann: {"talk"}, ben: {"talk", "other"}}
    assert ask(server, ann, "/v1/sessions/other").status_code == 404
    delete = server.http.delete(server.url + "/v1/sessions/talk", headers={"x-api-key": ann})
    assert delete.status_code == 200, delete.text
    assert ask(server, ann, "/v1/sessions").json()["data"] == []
    assert ask(server, ben, "/v1/sessions/talk").json()["id"] == "talk"


def test_what_a_session_holds_is_its_tenants(server: Server) -> None:
    path, statuses = "/v1/chat/completions", []
    for key in (*KEYS, *KEYS):
        body = {"messages": [{"role": "user", "content": f"turn {len(statuses)}"}], "max_tokens": 2}
        answer = ask(server, key, path, {**body, "session_id": "private"})
        statuses.append(answer.headers["x-session-status"])
    assert statuses == ["new", "new", "continued", "continued"]
    assert [ask(server, key, "/v1/sessions/private").json()["messages"] for key in KEYS] == [4, 4]
    server.http.delete(server.url + "/v1/sessions/private", headers={"x-api-key": KEYS[0]})
    assert ask(server, KEYS[0], "/v1/sessions/private").status_code == 404
    assert ask(server, KEYS[1], "/v1/sessions/private").json()["messages"] == 4


def test_kept_responses_are_their_tenants(server: Server) -> None:
    ann, ben = KEYS
    kept = ask(server, ann, "/v1/responses", {"input": "Hello", "max_output_tokens": 4}).json()
    path = f"/v1/responses/{kept['id']}"
    assert ask(server, ben, path).status_code == 404
    going_on = {"input": "And?", "max_output_tokens": 4, "previous_response_id": kept["id"]}
    assert ask(server, ben, "/v1/responses", going_on).status_code == 404
    assert server.http.delete(server.url + path, headers={"x-api-key": ben}).status_code == 404
    assert ask(server, ann, path).json()["id"] == kept["id"]
    assert ask(server, ann, "/v1/responses", going_on).status_code == 200


def test_items_conversations_and_runs_are_their_tenants(server: Server) -> None:
    ann, ben = KEYS
    talk = ask(
        server, ann, "/v1/conversations", {"items": [{"role": "user", "content": "I am Ann."}]}
    ).json()
    hello: dict[str, Any] = {"input": "Hello", "max_output_tokens": 4}
    reply = ask(server, ann, "/v1/responses", {**hello, "conversation": talk["id"]}).json()
    endless = {"input": "Hello", "ignore_eos": True, "background": True, "stream": False}
    run = f"/v1/responses/{ask(server, ann, '/v1/responses', endless).json()['id']}"
    item = {"type": "item_reference", "id": reply["output"][0]["id"]}
    reference = {**hello, "input": [item, {"role": "user", "content": "And?"}]}
    attempts: list[tuple[str, dict[str, Any] | None]] = [
        (f"/v1/conversations/{talk['id']}", None),
        (f"/v1/conversations/{talk['id']}/items", None),
        (f"/v1/responses/{reply['id']}/input_items", None),
        (run, None),
        (f"{run}?stream=true", None),
        (f"{run}/cancel", {}),
        ("/v1/responses", {**hello, "conversation": talk["id"]}),
        ("/v1/responses", reference),
    ]
    assert [ask(server, ben, path, body).status_code for path, body in attempts] == [404] * len(
        attempts
    )
    found = [200] * len(attempts)
    found[4] = 400  # it was not requested as a stream
    assert [ask(server, ann, path, body).status_code for path, body in attempts] == found
    assert ask(server, ann, run).json()["status"] == "cancelled"


def test_pages_of_two_tenants_have_nothing_in_common() -> None:
    tokens = list(range(40))
    digests: list[list[bytes]] = []
    for tenant in ("", "ann", "ben"):
        digests.append([])
        extend_digests(digests[-1], tokens[:13], 4, tenant)
        extend_digests(digests[-1], tokens, 4, tenant)
    assert [len(some) for some in digests] == [10, 10, 10]
    assert len({digest for some in digests for digest in some}) == 30


def test_texts_are_remembered_for_each_tenant_apart() -> None:
    """Otherwise the time of tokenizing would reveal what others have sent."""
    encoded: list[str] = []

    def encode(pieces: list[str]) -> list[list[int]]:
        encoded.extend(pieces)
        return [list(piece.encode()) for piece in pieces]

    encoder = PieceEncoder(encode, ["<|end|>"])
    for tenant in ("ann", "ben", "ann", "ben", ""):
        assert encoder.encode(LONG, tenant) == list(LONG.encode())
    assert encoded == [LONG] * 3
