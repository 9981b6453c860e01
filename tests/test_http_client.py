"""The OpenAI client finds paths, reads streams, and turns every failure into a three-part error."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from penstock.errors import ConfigError, PenstockError
from penstock.http_client import HttpClient, lost_connection_is_said


@contextmanager
def answering(*lines: str) -> Iterator[tuple[str, list[str]]]:
    """A server that answers one request with these lines and closes the connection; gives its URL
    and the request it received.
    """
    heard: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer_once() -> None:
            connection, _ = listener.accept()
            with connection:
                request = connection.makefile("rb")
                head = list(iter(request.readline, b"\r\n"))
                lengths = [
                    int(line.split()[1])
                    for line in head
                    if line.lower().startswith(b"content-length:")
                ]
                heard.append(b"".join((*head, request.read(sum(lengths)))).decode())
                connection.sendall("\r\n".join(lines).encode())

        thread = threading.Thread(target=answer_once)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", heard
        finally:
            thread.join()


def client(url: str) -> HttpClient:
    return HttpClient(url, timeout_s=10)


@pytest.mark.parametrize(
    ("suffix", "path"), [("", "/v1/x"), ("/", "/v1/x"), ("/v1", "/v1/x"), ("/a/v1/", "/a/v1/x")]
)
def test_a_base_url_may_end_as_clients_of_the_api_write_it(suffix: str, path: str) -> None:
    with answering("HTTP/1.1 200 OK", "", '{"a": [1]}') as (url, heard):
        assert client(url + suffix).json("GET", "/v1/x") == {"a": [1]}
    assert heard[0].startswith(f"GET {path} HTTP/1.1\r\n")


@pytest.mark.parametrize("timeout_s", [math.inf, 1e30])
def test_a_timeout_may_be_infinite(timeout_s: float) -> None:
    with answering("HTTP/1.1 200 OK", "", "{}") as (url, _):
        assert HttpClient(url, timeout_s=timeout_s).json("GET", "/v1/x") == {}


@pytest.mark.parametrize(
    "url", ["htp://127.0.0.1", "ftp://host", "http://host:99999", "host:many", "//host"]
)
def test_what_is_no_address_of_a_server_is_refused_before_any_connection(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        client(url)
    assert caught.value.what == f"{url} is not the address of a server"


def test_events_are_read_until_done() -> None:
    lines = (
        'data: {"a": 1}',
        "",
        ": a comment",
        'data:{"b": 2}',
        "",
        "data: [DONE]",
        'data: {"c": 3}',
    )
    with answering("HTTP/1.1 200 OK", "", *lines) as (url, heard):
        assert list(client(url).events("/v1/x", {"q": "é"})) == [{"a": 1}, {"b": 2}]
    assert heard[0].startswith("POST /v1/x")
    assert heard[0].endswith('\r\n{"q": "\\u00e9"}')


@pytest.mark.parametrize(
    ("body", "what", "why"),
    [
        ('{"error": {"message": "no\\nbecause\\nof that"}}', "no", "because of that"),
        ('{"detail": 1}', "{'detail': 1}", ""),
        ("plain text", "plain text", ""),
    ],
)
def test_an_error_has_the_servers_own_message(body: str, what: str, why: str) -> None:
    for ask in (lambda c: c.json("GET", "/"), lambda c: list(c.events("/", {}))):
        with (
            answering("HTTP/1.1 418 teapot", "", body) as (url, _),
            pytest.raises(PenstockError) as objection,
        ):
            ask(client(url))
        assert (objection.value.what, objection.value.why) == (what, why)
        assert objection.value.todo == f"{url} reported this error (HTTP 418)."


def test_an_error_for_a_missing_key_says_where_to_put_one() -> None:
    with (
        answering("HTTP/1.1 401 Unauthorized", "", "{}") as (url, _),
        pytest.raises(PenstockError, match="Set PENSTOCK_API_KEY"),
    ):
        client(url).json("GET", "/")


def test_an_error_in_a_stream_ends_it() -> None:
    lines = ('data: {"a": 1}', 'data: {"error": {"message": "broken"}}', "")
    with answering("HTTP/1.1 200 OK", "", *lines) as (url, _):
        events = client(url).events("/", {})
        assert next(events) == {"a": 1}
        with pytest.raises(PenstockError, match="broken"):
            next(events)


def test_a_server_that_hangs_up_is_reported() -> None:
    with answering("HTTP/1.1 200 OK", "", 'data: {"a": 1}', "") as (url, _):
        events = client(url).events("/", {})
        assert next(events) == {"a": 1}
        with pytest.raises(PenstockError, match="closed the connection"):
            next(events)
    with (
        answering("HTTP/1.1 200 OK", "Content-Length: 99", "", "{") as (url, _),
        pytest.raises(PenstockError, match="Nothing answers"),
    ):
        client(url).json("GET", "/")
    with answering("") as (url, _), pytest.raises(PenstockError, match="Nothing answers"):
        client(url).json("GET", "/")
    with pytest.raises(PenstockError, match="Nothing answers"):
        client(url).json("GET", "/")


@pytest.mark.parametrize("body", ["{}", '{"data": []}', "[]", "not JSON"])
def test_a_server_without_models_is_asked_for_no_name(body: str) -> None:
    with answering("HTTP/1.1 200 OK", "", body) as (url, _), pytest.raises(PenstockError) as error:
        client(url).first_model()
    assert error.value.todo


def test_a_metric_is_the_sum_over_its_labels() -> None:
    lines = [
        "# HELP a_total a",
        'a_total{replica="0"} 3',
        'a_total{replica="1"} 4.5',
        "a_total_other 9",
    ]
    with answering("HTTP/1.1 200 OK", "", *lines) as (url, _):
        assert client(url).metric("a_total") == 7.5
    with answering("HTTP/1.1 200 OK", "", *lines) as (url, _):
        assert client(url).metric("a") is None
    with answering("HTTP/1.1 404 Not Found", "", "a_total 3") as (url, _):
        assert client(url).metric("a_total") is None


def test_a_failure_without_words_is_named_by_its_kind() -> None:
    with pytest.raises(PenstockError) as raised, lost_connection_is_said("http://here"):
        raise TimeoutError
    assert (raised.value.what, raised.value.why) == (
        "Nothing answers at http://here",
        "TimeoutError.",
    )


@pytest.mark.parametrize(("keys", "sent"), [("", None), ("one", "one"), ("one, two", "one")])
def test_a_key_of_the_environment_is_sent(
    keys: str, sent: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", keys)
    with answering("HTTP/1.1 200 OK", "", "{}") as (url, heard):
        HttpClient(url, timeout_s=5).json("GET", "/v1/models")
    lines = [
        line.strip() for line in heard[0].splitlines() if line.lower().startswith("authorization")
    ]
    assert lines == ([] if sent is None else [f"Authorization: Bearer {sent}"])
