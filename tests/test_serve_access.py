"""Access control, and the headers of every response: the app alone, without server or engine."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pytest

import penstock
from penstock.config import ServeConfig
from penstock.errors import ConfigError, DeadlineError
from penstock.progress import Phase
from penstock.serve.admission import tenant_of_key
from penstock.serve.answer import Answer
from penstock.serve.app import create_app
from penstock.serve.intake import Intake
from penstock.serve.metrics import Metrics, render
from penstock.serve.request_log import JsonLines, TextLines
from penstock.serve.state import ServerState
from penstock.serve.text_stream import Deliver, TextStream

KEYS = ("sk-first-key", "sk-second")
GOOD = {"authorization": f"Bearer {KEYS[0]}"}
BATCH_ROUTES = (
    "/v1/files",
    "/v1/batches",
    "/v1/batches/{id}/cancel",
)  # these run behind all others
OPEN = ("/", "/health", "/ready", "/ping", "/docs")


@dataclass(frozen=True)
class Answered:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def app_of(is_ready: bool = True, **settings: Any) -> Any:
    """The app with engines that are ready or not, and receive no request."""

    async def report() -> list[Any]:
        return []

    config = ServeConfig(**settings)
    client: Any = SimpleNamespace(
        is_ready=is_ready,
        failure=None,
        info=None,
        phase=Phase("x"),
        report=report,
        intake=Intake(config),
    )
    state = ServerState(client, SimpleNamespace(), Metrics(), "tiny", config, 0)  # type: ignore[arg-type]
    return create_app(state)


def call(
    app: Any,
    path: str,
    headers: dict[str, str] | None = None,
    method: str = "GET",
    body: bytes | None = b"",
) -> Answered:
    """Sends one request as a server does, with a path that no client library has normalized; `body`
    None means that the client disconnects before it has sent one.
    """
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if body is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [
            (name.encode(), value.encode("latin-1")) for name, value in (headers or {}).items()
        ],
        "scheme": "http",
        "server": ("127.0.0.1", 8000),
    }
    asyncio.run(app(scope, receive, send))
    received = {name.decode(): value.decode("latin-1") for name, value in sent[0]["headers"]}
    return Answered(
        sent[0]["status"], received, b"".join(part.get("body", b"") for part in sent[1:])
    )


def routes_of(app: Any) -> list[tuple[str, str]]:
    return [(method, route.path) for route in app.routes for method in route.methods - {"HEAD"}]


# Keys


def test_every_route_but_probes_needs_a_key() -> None:
    app = app_of(api_key=KEYS)
    routes = routes_of(app)
    assert len(routes) > 12
    for method, path in routes:
        status = call(app, path, method=method).status
        assert (status == 401) == (path not in OPEN), (method, path, status)


@pytest.mark.parametrize(
    "headers",
    [{"authorization": f"Bearer {key}"} for key in KEYS]
    + [{"x-api-key": KEYS[1]}, {"authorization": f"bearer  {KEYS[0]} "}],
)
def test_each_key_is_known_in_either_header(headers: dict[str, str]) -> None:
    assert call(app_of(api_key=KEYS), "/version", headers).json == {"version": penstock.__version__}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": KEYS[0]},
        {"authorization": f"Basic {KEYS[0]}"},
        {"authorization": "Bearer"},
        {"authorization": f"Bearer {KEYS[0]}x"},
        {"authorization": f"Bearer {KEYS[0][:-1]}"},
        {"authorization": f"Bearer {KEYS[0]},{KEYS[1]}"},
        {"authorization": "Bearer \xff\xe9"},
        {"x-api-key": ""},
        {"x-api-key": KEYS[0].upper()},
        {"host": "/health"},
        {"host": "x/health?"},
        {"x-forwarded-host": "x", "x-original-url": "/health"},
    ],
)
def test_nothing_else_is(headers: dict[str, str]) -> None:
    refused = call(app_of(api_key=KEYS), "/v1/models", headers)
    assert refused.status == 401
    assert refused.json["error"]["code"] == "invalid_api_key"
    assert refused.headers["www-authenticate"] == "Bearer"
    assert KEYS[0] not in refused.body.decode()


def test_no_spelling_of_a_path_goes_round_the_key() -> None:
    """A probe's path opens probes only: every other path without a key is a 404."""
    app = app_of(api_key=KEYS)
    draw = random.Random(0)
    pick = draw.choice
    paths = [path for _, path in routes_of(app)]
    pieces = [
        "/",
        "//",
        "/./",
        "/../",
        "%2f",
        "%2e%2e/",
        "\\",
        ";",
        "?",
        "#",
        "%00",
        " ",
        "\t",
        "/health",
    ]
    for _ in range(600):
        path = pick(paths)
        for _ in range(pick((1, 2))):
            place = draw.randrange(len(path) + 1)
            path = path[:place] + pick(pieces) + path[place:]
        path = pick((path, path.upper(), path.title()))
        host, method = pick(["x", "/health", "x/health", ""]), pick(["GET", "POST", "HEAD"])
        answered = call(app, path, {"host": host}, method)
        assert answered.status == 401 or (unquote(path).rstrip("/") or "/") in OPEN, (
            path,
            answered,
        )


def test_each_api_spells_a_refusal_its_own_way() -> None:
    app = app_of(api_key=KEYS)
    anthropic = call(app, "/v1/messages", method="POST")
    assert (anthropic.status, anthropic.json["type"]) == (401, "error")
    assert anthropic.json["error"]["type"] == "authentication_error"
    openai = call(app, "/v1/chat/completions", method="POST")
    assert set(openai.json["error"]) == {"message", "type", "param", "code"}


def test_keys_come_from_a_file_too_and_are_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\nfrom-file-1\n from-file-2\n")
    config = ServeConfig(api_key=KEYS, api_key_file=str(file))
    assert config.load_api_keys() == (*KEYS, "from-file-1", "from-file-2")
    assert not [key for key in config.load_api_keys() if key in repr(config)]
    file.write_text("\n\n")
    for wrong in (
        config,
        replace(config, api_key_file=str(tmp_path / "missing")),
        ServeConfig(api_key=("",)),
    ):
        with pytest.raises(ConfigError):
            wrong.load_api_keys()


# Origins


def test_a_page_of_a_listed_origin_may_call_and_reads_refusals_too() -> None:
    app = app_of(api_key=KEYS, cors_origin=("https://good.example",))
    origin = {"origin": "https://good.example"}
    asking = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,x-a",
    }
    preflight = call(app, "/v1/chat/completions", origin | asking, "OPTIONS")
    assert preflight.status == 200
    assert preflight.headers["access-control-allow-origin"] == "https://good.example"
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    for headers in (origin, origin | GOOD):
        answered = call(app, "/v1/models", headers)
        assert answered.headers["access-control-allow-origin"] == "https://good.example"
        assert "x-request-id" in answered.headers["access-control-expose-headers"]


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "https://good.example.evil.example", "null"]
)
def test_a_page_of_another_origin_is_not_invited(origin: str) -> None:
    app = app_of(cors_origin=("https://good.example",))
    asking = {"origin": origin, "access-control-request-method": "POST"}
    assert call(app, "/v1/chat/completions", asking, "OPTIONS").status == 403
    assert "access-control-allow-origin" not in call(app, "/v1/models", {"origin": origin}).headers
    assert (
        "access-control-allow-origin"
        not in call(app_of(), "/v1/models", {"origin": origin}).headers
    )


# Ids


def test_a_clients_own_id_is_repeated_and_an_unusable_one_replaced() -> None:
    app = app_of()
    assert (
        call(app, "/version", {"x-request-id": "trace-17:b"}).headers["x-request-id"]
        == "trace-17:b"
    )
    ours = set()
    for id in ("", "a b", "x" * 129, "caf\xe9", "a\nb"):
        answered = call(app, "/version", {"x-request-id": id})
        assert answered.headers["x-request-id"] == answered.headers["request-id"]
        ours.add(answered.headers["x-request-id"])
    assert len(ours) == 5
    assert all(len(id) == 32 and id.isalnum() for id in ours)


# Readiness


def test_ready_and_ping_are_503_until_the_engine_is_and_again_while_it_drains() -> None:
    app = app_of(is_ready=False)
    assert [call(app, path).status for path in ("/ready", "/ping")] == [503, 503]
    app = app_of()
    assert [call(app, path).status for path in ("/ready", "/ping")] == [200, 200]
    app.state.server.draining.set()
    assert [call(app, path).status for path in ("/ready", "/ping")] == [503, 503]
    assert call(app, "/ready").json == {"status": "draining"}
    chat = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
    refused = call(app, "/v1/chat/completions", method="POST", body=chat)
    assert refused.status == 503
    assert refused.headers["retry-after"]


def test_an_error_for_a_wrong_method_lists_the_right_ones() -> None:
    refused = call(app_of(), "/v1/responses/x", method="PUT")
    assert (refused.status, refused.headers["allow"]) == (405, "DELETE, GET, HEAD")
    assert refused.json["error"]["message"].endswith("for DELETE and GET and HEAD.")


HERE = {"host": "localhost"}


@pytest.mark.parametrize("path", ["/version/", "/v1/models/", "/v1/models//", "/health/"])
def test_a_slash_at_the_end_of_a_path_changes_nothing(path: str) -> None:
    answered, plain = call(app_of(), path, HERE), call(app_of(), path.rstrip("/"), HERE)
    assert plain.status != 404
    assert (answered.status, answered.body) == (plain.status, plain.body)
    assert "location" not in answered.headers


def test_a_slash_at_the_end_opens_no_path_and_closes_none() -> None:
    keyed = app_of(api_key=KEYS)
    assert call(keyed, "/ready/").status == 200
    assert call(keyed, "/version/").status == 401


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_the_root_says_that_a_server_is_there(method: str) -> None:
    for app in (app_of(), app_of(api_key=KEYS)):
        assert call(app, "/", HERE, method=method).status == 200


def test_a_model_card_is_openais_and_anthropics() -> None:
    listed = call(app_of(), "/v1/models", HERE).json
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("tiny", "tiny", False)
    (card,) = listed["data"]
    assert (card["object"], card["root"], card["owned_by"]) == ("model", "tiny", "penstock")
    assert (card["type"], card["display_name"]) == ("model", "tiny")
    assert card["created_at"] == "1970-01-01T00:00:00Z"
    assert call(app_of(), "/v1/models/tiny", HERE).json == card


# Time


@pytest.mark.parametrize(
    ("servers", "requests"), [(0.05, None), (0.05, 9.0), (9.0, 0.05), (None, 0.05)]
)
def test_the_shorter_of_two_limits_ends_a_reply_that_never_comes(
    servers: float | None, requests: float | None
) -> None:
    aborted = []

    async def start(deliver: Deliver) -> TextStream:
        stream = TextStream(SimpleNamespace(abort=aborted.append), deliver)  # type: ignore[arg-type]
        stream._open = {"id"}
        return stream

    async def answer() -> None:
        app = app_of(request_timeout=servers)
        scope = {"app": app, "record": SimpleNamespace(usage=None)}
        formatter: Any = SimpleNamespace()
        await Answer(start, formatter, False, requests)(scope, asyncio.Event().wait, formatter)  # type: ignore[arg-type]

    with pytest.raises(DeadlineError, match=r"0\.05 seconds"):
        asyncio.run(asyncio.wait_for(answer(), 5.0))
    assert aborted


# Counting


def test_every_answer_is_counted_by_its_status() -> None:
    app = app_of(api_key=KEYS)
    for path in ("/version", "/version", "/ready"):
        call(app, path)
    call(app, "/nothing", GOOD)
    counted = app.state.server.metrics
    assert counted.num_answers == {401: 2, 200: 1, 404: 1}
    assert 'penstock_answers_total{status="401"} 2' in render(counted, [], 0)


def test_a_client_that_leaves_in_the_middle_of_its_body_is_counted_as_gone() -> None:
    app = app_of()
    call(app, "/v1/completions", method="POST", body=None)
    assert app.state.server.metrics.num_answers == {499: 1}


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens"])
def test_a_defect_of_ours_is_an_answer_as_any_other(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Here, a server whose engine is an object without methods."""
    app = app_of(cors_origin=("https://good.example",))
    body = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
    headers = {"origin": "https://good.example", "x-request-id": "trace-me"}
    answered = call(app, path, headers, "POST", body)
    assert answered.status == 500
    assert answered.json["error"]["message"]
    assert "AttributeError" not in answered.body.decode()
    assert "AttributeError" in caplog.text
    assert answered.headers["x-request-id"] == "trace-me"
    assert answered.headers["access-control-allow-origin"] == "https://good.example"
    assert app.state.server.metrics.num_answers == {500: 1}


@pytest.mark.parametrize("is_declared", [True, False])
def test_bodies_are_refused_while_too_much_is_being_sent(is_declared: bool) -> None:
    app = app_of(max_bodies_mb=0.001, max_body_mb=0.001)
    intake = app.state.server.intake
    others = intake.reserve("")
    others.add_bytes(900)
    headers = {"content-length": "200"} if is_declared else {}
    refused = call(app, "/v1/completions", headers, "POST", body=b" " * 200)
    assert (refused.status, refused.headers["connection"]) == (429, "close")
    assert refused.json["error"]["code"] == "overloaded"
    assert refused.headers["retry-after"]
    assert (intake.bodies.num_bytes, intake.replies.taken) == (900, {"": 1})
    assert call(app, "/v1/completions", method="POST", body=b"{}").status == 400
    too_large = call(app, "/v1/completions", {"content-length": "2000"}, "POST")
    assert (too_large.status, too_large.headers["connection"]) == (413, "close")


BODY_ROUTES = [
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/invocations"),
    *("/v1/responses/compact", "/api/chat", "/api/generate", "/completion", "/completions"),
    *("/api/embed", "/api/embeddings"),
    *("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"),
]
TOKEN_ROUTES = [
    *(
        "/tokenize",
        "/detokenize",
        "/v1/messages/count_tokens",
        "/apply-template",
        "/v1/responses/input_tokens",
    ),
    *("/v1/conversations", "/v1/conversations/{id}", "/v1/conversations/{id}/items"),
    *(f"/api/{verb}" for verb in ("show", "pull", "create", "copy", "push")),
]
NO_BODY = "/v1/responses/{id}/cancel"


@pytest.mark.parametrize("path", [*BODY_ROUTES, *TOKEN_ROUTES])
def test_a_request_without_a_place_is_refused_before_any_of_its_body_is_read(path: str) -> None:
    app = app_of(max_queue=2, api_key=KEYS)
    intake = app.state.server.intake
    for_reply = path in BODY_ROUTES
    places = [intake.reserve(tenant_of_key(KEYS[0]), for_reply=for_reply) for _ in range(2)]
    others = call(app, path, {"x-api-key": KEYS[1]}, "POST", body=b"no JSON")
    assert others.status == 400, "another key has its share"
    refused = call(app, path, GOOD, "POST", body=None)  # it would be a 499 if reading had begun
    assert refused.status == (529 if path.startswith("/v1/messages") else 429)
    assert (refused.headers["connection"], refused.headers["retry-after"]) == ("close", "1")
    places[0].release()
    answered = call(app, path, GOOD, "POST", body=b"no JSON")
    assert answered.status == 400
    places[1].release()
    assert not intake.replies.taken
    assert not intake.counts.taken
    assert intake.bodies.num_bytes == 0


def test_every_route_that_takes_a_body_takes_a_place() -> None:
    posts = {path for method, path in routes_of(app_of()) if method == "POST"}
    assert posts - {*BATCH_ROUTES} == {*BODY_ROUTES, *TOKEN_ROUTES, NO_BODY}


def test_tokens_can_be_counted_while_the_engines_queue_is_full() -> None:
    app = app_of(max_queue=1)
    app.state.server.intake.reserve("")
    assert call(app, "/v1/completions", method="POST", body=b"{}").status == 429
    assert call(app, "/tokenize", method="POST", body=b"{}").status == 400


# The log


def test_a_line_of_the_log_is_one_line_whatever_was_asked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.requests")
    call(app_of(), "/no\n200 OK\x1b[2J\u2028", {"x-request-id": "id\n"})
    (record,) = caplog.records
    for lines in (TextLines(), JsonLines()):
        line = lines.format(record)
        assert line.isprintable()
        assert "404" in line
    assert json.loads(JsonLines().format(record))["status"] == 404


# The description


def test_the_openapi_document_describes_the_routes_that_exist_and_no_others() -> None:
    app = app_of()
    document = call(app, "/openapi.json").json
    described = {
        (method.upper(), path) for path, methods in document["paths"].items() for method in methods
    }
    existing = {(method, path.replace(":path}", "}")) for method, path in routes_of(app)}
    assert described == existing
    references = set(re.findall(r"#/components/schemas/([^\"]+)", json.dumps(document)))
    assert references <= set(document["components"]["schemas"])
    assert len(references) > 20
