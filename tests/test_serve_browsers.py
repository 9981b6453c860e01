"""Cross-site requests from browsers are refused, in every API."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
import socket
from typing import Any

import pytest

from penstock.config import ServeConfig
from penstock.errors import ConfigError
from penstock.serve.browsers import HostNames, is_same_origin
from test_serve_access import BATCH_ROUTES, GOOD, KEYS, Answered, call, routes_of
from test_serve_access import app_of as new_app

HOME = "127.0.0.1:8000"
JSON = {"content-type": "application/json"}
EVIL = "https://evil.example"
POSTS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    "/invocations",
    "/completion",
    "/completions",
    "/apply-template",
    *(f"/api/{verb}" for verb in ("chat", "generate", "show", "pull", "create", "copy", "push")),
    "/api/embed",
    "/api/embeddings",
    *("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"),
    *("/v1/responses/input_tokens", "/v1/responses/compact"),
    *("/v1/conversations", "/v1/conversations/{id}", "/v1/conversations/{id}/items"),
]
NO_BODY = "/v1/responses/{id}/cancel"
app_of = functools.cache(new_app)  # no call changes anything in it


def post(path: str, headers: dict[str, str], **settings: Any) -> Answered:
    """A body that every route has parsed when it answers 400."""
    return call(app_of(**settings), path, headers, "POST", b"[]")


def message_of(answered: Answered) -> str:
    error = answered.json["error"]
    text: str = error if isinstance(error, str) else error["message"]
    return text


def test_these_are_all_the_routes_that_take_a_body() -> None:
    posts = {path for method, path in routes_of(app_of()) if method == "POST"}
    assert posts == {*POSTS, *BATCH_ROUTES, NO_BODY}


def test_a_form_is_taken_where_files_are_uploaded_and_from_no_other_site() -> None:
    form = {"content-type": "multipart/form-data; boundary=X"}
    assert post("/v1/files", form).json["error"]["code"] == "batches_off"
    for kind in ("application/json", "text/plain", "application/x-www-form-urlencoded"):
        refused = post("/v1/files", {"content-type": kind})
        assert (refused.status, "multipart/form-data" in message_of(refused)) == (415, True)
    assert post("/v1/batches", form).status == 415
    assert post("/v1/files", {**form, "origin": "http://evil.example"}).status == 403
    assert post("/v1/files", form, api_key=("a",)).status == 401


def test_the_page_of_the_api_is_whole_and_loads_nothing_else() -> None:
    app = app_of(api_key=("a",))
    page = call(app, "/docs")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    text = page.body.decode()
    assert not re.search(r"https?://|//[a-z]|@import|<script src|<link rel=.stylesheet", text)
    policy = page.headers["content-security-policy"]
    for kind in ("script", "style"):
        (inline,) = re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert call(app, "/openapi.json").status == 401
    assert call(app_of(), "/docs", {"host": "evil.example"}).status == 403


# The type of a body


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "text/plain;charset=UTF-8",
        "TEXT/PLAIN; application/json",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=application/json",
    ],
)
def test_a_body_that_a_page_can_send_unasked_is_a_415(path: str, kind: str) -> None:
    for settings in ({}, {"api_key": KEYS}, {"host": "0.0.0.0"}):
        refused = post(path, {"content-type": kind} | GOOD, **settings)
        assert refused.status == 415, refused
        assert "Content-Type: application/json" in message_of(refused)
    if path.startswith("/v1/messages"):
        assert refused.json["error"]["type"] == "invalid_request_error"
    elif not path.startswith("/api/"):
        assert refused.json["error"]["code"] == "unsupported_media_type"


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "kind",
    [None, "application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"],
)
def test_json_and_a_body_of_no_declared_type_are_read(path: str, kind: str | None) -> None:
    assert post(path, {} if kind is None else {"content-type": kind}).status == 400


@pytest.mark.parametrize(
    "kind", ["application/octet-stream", "text/csv", "application/xml+jsonx", ""]
)
def test_other_types_are_a_415(kind: str) -> None:
    for path in ("/v1/chat/completions", "/v1/files"):
        refused = post(path, {"content-type": kind})
        assert refused.status == 415
        assert f"The Content-Type is {repr(kind) if kind else 'empty'}" in message_of(refused)


@pytest.mark.parametrize("path", [*POSTS, "/v1/files"])
def test_a_compressed_body_is_a_415_that_says_so(path: str) -> None:
    kind = "multipart/form-data; boundary=X" if path == "/v1/files" else "application/json"
    for coding in ("gzip", "identity, zstd"):
        refused = post(path, {"content-type": kind, "content-encoding": coding})
        assert refused.status == 415
        assert f"The Content-Encoding is '{coding}'" in message_of(refused)
    taken = post(path, {"content-type": kind, "content-encoding": "Identity"})
    assert taken.status == (404 if path == "/v1/files" else 400)


@pytest.mark.parametrize("kind", ["application/octet-stream", "application/jsonlines"])
def test_an_invocation_may_have_any_type_that_pages_must_ask_for(kind: str) -> None:
    assert post("/invocations", {"content-type": kind}).status == 400


# Origins


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "origin", [EVIL, "null", "http://127.0.0.1:3000", "http://localhost:8000", "x"]
)
def test_a_page_of_another_origin_is_refused(path: str, origin: str) -> None:
    for kind in (JSON, {}):  # a page may send bytes without a type
        refused = post(path, {"host": HOME, "origin": origin} | kind)
        assert refused.status == 403
        assert "--cors-origin" in message_of(refused)
        assert "access-control-allow-origin" not in refused.headers


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    ("origin", "settings"),
    [
        (f"http://{HOME}", {}),
        (EVIL, {"cors_origin": (EVIL,)}),
        ("null", {"cors_origin": ("null",)}),
        (EVIL, {"cors_origin": ("*",)}),
    ],
)
def test_a_page_of_this_server_or_of_a_listed_origin_is_answered(
    path: str, origin: str, settings: dict[str, Any]
) -> None:
    assert post(path, {"host": HOME, "origin": origin} | JSON, **settings).status == 400


def test_origins_are_refused_to_readers_and_askers_too() -> None:
    for method, path in routes_of(app_of()):
        assert call(app_of(), path, {"host": HOME, "origin": EVIL}, method).status == 403, path
    asking = {"host": HOME, "origin": EVIL, "access-control-request-method": "POST"}
    assert call(app_of(), "/v1/models", asking, "OPTIONS").status == 403


def test_with_a_key_neither_origin_nor_host_matter() -> None:
    """A page has no key, and proxies that add one call a server by many names."""
    headers = {"host": "api.example", "origin": EVIL} | GOOD
    assert call(app_of(api_key=KEYS), "/v1/models", headers).status == 200


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://localhost:8000", "localhost:8000"),
        ("http://LOCALHOST:8000", "localhost:8000"),
        ("http://localhost", "localhost"),
        ("http://localhost", "localhost:80"),
        ("https://localhost", "localhost:443"),
        ("http://[::1]:8000", "[::1]:8000"),
    ],
)
def test_an_origin_that_is_the_servers_own(origin: str, host: str) -> None:
    assert is_same_origin(origin, [host])


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://localhost:8001", "localhost:8000"),
        ("http://localhost", "localhost:8000"),
        ("http://localhost:8000.evil.example", "localhost:8000"),
        ("http://localhost.evil.example:8000", "localhost:8000"),
        ("http://localhost:8000@evil.example", "localhost:8000"),
        ("ftp://localhost:8000", "localhost:8000"),
        ("http://:8000", ":8000"),
        ("http://[::1", "[::1]"),
        ("http://localhost:x", "localhost"),
        ("http://localhost", "localhost:" + "1" * 5000),
        ("null", "null"),
    ],
)
def test_an_origin_that_only_looks_like_it(origin: str, host: str) -> None:
    assert not is_same_origin(origin, [host])
    assert not is_same_origin(origin, [])


# Hosts


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "192.168.1.9"]
)
def test_a_server_on_loopback_is_not_read_by_another_name(host: str) -> None:
    app = app_of()
    for method, path in routes_of(app):
        refused = call(app, path, {"host": host} | JSON, method)
        assert refused.status == 403, path
        assert "--allowed-host" in message_of(refused)
    same = {
        "host": host,
        "origin": f"http://{host}",
    } | JSON  # as seen by a page whose name resolves to this host
    assert post("/v1/chat/completions", same).status == 403


LOOPBACK = [
    "localhost",
    "LocalHost:8000",
    "localhost.:8000",
    "app.localhost:8000",
    "127.0.0.1",
    "127.0.0.1:8000",
    "127.8.9.10:8000",
    "[::1]:8000",
    "[::ffff:127.0.0.1]:8000",
    "0.0.0.0:8000",
    "host.docker.internal:8000",  # from a container, through the host it runs on
]
PUBLIC = [
    "evil.example",
    "evil.example.:80",
    "localhost.evil.example",
    "127.0.0.1.nip.io",
    "local.evil.example",
]
ODD = [
    "a b",
    "x@localhost",
    "localhost:x",
    "localhost/evil",
    "[::1",
    "[evil.example]",
    ":8000",
    "\xe9vil.example",
]
PRIVATE = [
    "10.0.0.7:8000",
    "203.0.113.9",
    "[2001:db8::1]:80",
    "llm:8000",
    "model.aws.local:8080",
    "gpu1.lan",
]


@pytest.mark.parametrize("bound", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
def test_on_loopback_its_names_and_addresses_are_known(bound: str) -> None:
    names = HostNames(bound, ())
    assert [host for host in LOOPBACK if not names.include(host)] == []
    assert [host for host in PUBLIC + ODD + PRIVATE if names.include(host)] == []


@pytest.mark.parametrize("bound", ["0.0.0.0", "::", "10.0.0.7"])
def test_on_a_network_addresses_and_unregistrable_names_are_accepted(bound: str) -> None:
    """Probes of load balancers and of Kubernetes use addresses, SageMaker uses model.aws.local."""
    names = HostNames(bound, ())
    assert [host for host in LOOPBACK + PRIVATE if not names.include(host)] == []
    assert [host for host in PUBLIC + ODD if names.include(host)] == []
    assert names.include(socket.gethostname())


def test_the_bound_name_and_those_that_the_operator_lists_are_known() -> None:
    assert HostNames("box.example", ()).include("box.example:8000")
    names = HostNames("127.0.0.1", ("api.example", "Other.Example:443", "2001:db8::1"))
    assert all(
        names.include(host) for host in ("API.example:80", "other.example", "[2001:db8::1]:8000")
    )
    assert not names.include("evil.example")
    assert HostNames("127.0.0.1", ("*",)).include("evil.example")
    with pytest.raises(ConfigError):
        ServeConfig(allowed_host=("http://api.example",))


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping", "/v1/models"])
def test_probes_by_address_or_without_a_host_are_answered(path: str) -> None:
    for headers in ({"host": "10.1.2.3:8000"}, {"host": ""}, {}):
        assert call(app_of(host="0.0.0.0"), path, headers).status in (200, 503)
    assert call(app_of(), path, {}).status in (200, 503)


# What probes return


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}])
def test_without_a_key_health_says_whether_it_serves_and_nothing_else(
    headers: dict[str, str],
) -> None:
    app = app_of(api_key=KEYS)
    assert call(app, "/health", headers).json == {"status": "starting"}
    told = call(app, "/health", GOOD).json
    assert json.dumps(told) == json.dumps(call(app_of(), "/health").json)
    assert set(told) == {"status", "phase", "replicas", "sampling"}
