"""Batches with OpenAI's client: files in and out, behind interactive requests, across restarts."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.config import ServeConfig
from penstock.serve.batches.folder import Batch, BatchFolder, FileNotHereError, StoredFile
from serving import FREE, MESSAGES, Server, assert_refused, eventually, start_server
from test_serve_access import app_of, call
from two_layers import two_layers

ENDED = ("completed", "failed", "cancelled", "expired")
CHATS = "/v1/chat/completions"
KEYS = ("key-of-ann", "key-of-ben")


def chat_line(custom_id: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": MESSAGES, "max_tokens": 4, **FREE, **fields}
    return {"custom_id": custom_id, "method": "POST", "url": CHATS, "body": body}


def jsonl(lines: list[Any]) -> bytes:
    return "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines).encode()


def api_of(server: Server, key: str = KEYS[0]) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two rows, so that a batch must leave one free; small limits, so that they are reached."""
    settings = {"batch_folder": str(tmp_path_factory.mktemp("state") / "batches"), "api_key": KEYS}
    settings |= {"batch_file_mb": 0.5, "batch_gb": 0.001}
    with start_server(engine={"model": two_layers(), "max_rows": 2}, serve=settings) as running:
        running.http.headers["authorization"] = f"Bearer {KEYS[0]}"
        yield running


@pytest.fixture
def api(server: Server) -> openai.OpenAI:
    return api_of(server)


def start(api: openai.OpenAI, lines: list[Any], endpoint: str = CHATS, **fields: Any) -> Any:
    file = api.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    fields = {"completion_window": "24h", **fields}
    return api.batches.create(input_file_id=file.id, endpoint=endpoint, **fields)  # type: ignore[arg-type]


def wait(api: openai.OpenAI, batch: Any, is_enough: Callable[[Any], bool] | None = None) -> Any:
    is_enough = is_enough or (lambda batch: batch.status in ENDED)
    assert eventually(lambda: is_enough(api.batches.retrieve(batch.id)), 60.0)
    return api.batches.retrieve(batch.id)


def results(api: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in api.files.content(file_id).text.splitlines()]


def clean(api: openai.OpenAI) -> None:
    for file in api.files.list():
        api.files.delete(file.id)


# The whole path


def test_every_line_has_one_result_and_files_can_be_read_listed_and_deleted(
    api: openai.OpenAI,
) -> None:
    lines = [chat_line(f"r{i}") for i in range(8)] + [chat_line("wrong", max_tokens=-1)]
    data = jsonl(lines)
    file = api.files.create(file=("ünder.jsonl", data), purpose="batch")
    assert (file.bytes, file.filename, file.purpose) == (len(data), "ünder.jsonl", "batch")
    assert api.files.retrieve(file.id) == file
    assert api.files.content(file.id).read() == data
    batch = api.batches.create(
        input_file_id=file.id, endpoint=CHATS, completion_window="24h", metadata={"for": "tests"}
    )
    assert batch.status == "validating"
    with pytest.raises(openai.BadRequestError, match="Cancel that first"):
        api.files.delete(file.id)
    batch = wait(api, batch)
    assert batch.status == "completed"
    assert batch.metadata == {"for": "tests"}
    assert batch.request_counts.model_dump() == {"total": 9, "completed": 8, "failed": 1}
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    good, bad = results(api, batch.output_file_id), results(api, batch.error_file_id)
    assert {line["custom_id"] for line in good} == {f"r{i}" for i in range(8)}
    for line in good:
        assert line["error"] is None
        assert line["response"]["status_code"] == 200
        assert line["response"]["body"]["usage"]["completion_tokens"] == 4
    assert [line["custom_id"] for line in bad] == ["wrong"]
    assert bad[0]["response"]["status_code"] == 400
    assert bad[0]["response"]["body"]["error"]["param"] == "max_tokens"
    assert [one.id for one in api.files.list(purpose="batch")] == [file.id]
    assert {one.id for one in api.files.list(limit=1)} == {
        file.id,
        batch.output_file_id,
        batch.error_file_id,
    }
    assert next(iter(api.batches.list(limit=1))).id == batch.id
    assert api.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        api.files.retrieve(file.id)
    clean(api)


@pytest.mark.parametrize(
    ("endpoint", "body", "kind"),
    [
        ("/v1/completions", {"prompt": "Rivers", "max_tokens": 3, **FREE}, "text_completion"),
        ("/v1/responses", {"input": "Rivers", "max_output_tokens": 3, **FREE}, "response"),
    ],
)
def test_other_endpoints_answer_batches_as_they_answer_clients(
    api: openai.OpenAI, endpoint: str, body: dict[str, Any], kind: str
) -> None:
    line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": body}
    batch = wait(api, start(api, [line], endpoint))
    (result,) = results(api, batch.output_file_id)
    assert result["response"]["body"]["object"] == kind
    clean(api)


# Refusals


def test_a_file_of_wrong_lines_fails_before_any_is_run_and_names_them(api: openai.OpenAI) -> None:
    lines = [chat_line("a"), "{", chat_line("a"), {**chat_line("b"), "url": "/v1/completions"}]
    batch = wait(api, start(api, lines))
    assert batch.status == "failed"
    assert {(problem.line, problem.code) for problem in batch.errors.data} == {
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
        (4, "invalid_url"),
    }
    assert batch.output_file_id is None
    assert batch.error_file_id is None
    clean(api)


def test_files_and_batches_of_another_key_do_not_exist(server: Server, api: openai.OpenAI) -> None:
    batch = wait(api, start(api, [chat_line("a")]))
    ben = api_of(server, KEYS[1])
    assert list(ben.files.list()) == list(ben.batches.list()) == []
    attempts: list[Callable[[], Any]] = [
        lambda: ben.files.retrieve(batch.input_file_id),
        lambda: ben.files.content(batch.output_file_id),
        lambda: ben.files.delete(batch.output_file_id),
        lambda: ben.batches.retrieve(batch.id),
        lambda: ben.batches.cancel(batch.id),
        lambda: ben.batches.create(
            input_file_id=batch.input_file_id, endpoint=CHATS, completion_window="24h"
        ),
    ]
    for attempt in attempts:
        with pytest.raises(openai.NotFoundError):
            attempt()
    assert results(api, batch.output_file_id)
    clean(api)


def test_what_cannot_be_a_file_is_refused_and_leaves_nothing(
    server: Server, api: openai.OpenAI
) -> None:
    url = f"{server.url}/v1/files"
    file = {"file": ("in.jsonl", b"{}")}
    assert_refused(
        server.http.post(url, files=file, data={"purpose": "assistants"}), 400, "purpose"
    )
    assert_refused(server.http.post(url, files=file), 400, "purpose")
    assert_refused(server.http.post(url, data={"purpose": "batch"}, files={"x": b""}), 400, "file")
    assert_refused(server.http.post(url, json={"purpose": "batch"}), 415, None)
    headers = {"content-type": "multipart/form-data; boundary=X"}
    assert_refused(server.http.post(url, content=b"--X\r\n", headers=headers), 400, None)
    expiry = {"purpose": "batch", "expires_after[anchor]": "created_at"}
    for seconds in ("5", "\N{SUPERSCRIPT TWO}"):
        expiry["expires_after[seconds]"] = seconds
        refused = server.http.post(url, files=file, data=expiry)
        assert_refused(refused, 400, "expires_after.seconds")
    for limit in ("0", "10001", "0" * 8 + "1" + "0" * 5):
        assert_refused(server.http.get(url, params={"limit": limit}), 400, "limit")
    with pytest.raises(openai.APIStatusError, match="more than 524288 bytes") as raised:
        api.files.create(file=("in.jsonl", b"x" * 600_000), purpose="batch")
    assert raised.value.status_code == 413
    kept = [api.files.create(file=("in.jsonl", b"x" * 500_000), purpose="batch") for _ in range(2)]
    with pytest.raises(openai.InternalServerError, match="batch-gb") as full:
        api.files.create(file=("in.jsonl", b"x" * 500_000), purpose="batch")
    assert full.value.status_code == 507
    assert full.value.response.headers["x-should-retry"] == "false"
    assert {file.id for file in api.files.list()} == {file.id for file in kept}
    clean(api)
    expiring = api.files.create(
        file=("in.jsonl", b"x" * 500_000),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert expiring.expires_at == expiring.created_at + 3600
    clean(api)


@pytest.mark.parametrize(
    "change",
    [
        {"endpoint": "/v1/images"},
        {"completion_window": "soon"},
        {"completion_window": "99d"},
        {"input_file_id": "file-none"},
        {"metadata": {"a": 1}},
        {"output_expires_after": {"anchor": "now", "seconds": 3600}},
    ],
)
def test_a_batch_that_cannot_be_is_refused_by_the_name_of_its_field(
    server: Server, api: openai.OpenAI, change: dict[str, Any]
) -> None:
    file = api.files.create(file=("in.jsonl", jsonl([chat_line("a")])), purpose="batch")
    body = {"input_file_id": file.id, "endpoint": CHATS, "completion_window": "24h", **change}
    answer = server.post(body, "/v1/batches")
    (name,) = change
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"].startswith(name)
    assert next(iter(api.batches.list(limit=1))).input_file_id != file.id
    clean(api)


# Beside other requests


def test_a_client_does_not_wait_for_a_batch(server: Server, api: openai.OpenAI) -> None:
    """The batch needs all rows for replies of many seconds; the client gets one of them at once."""
    batch = start(api, [chat_line(f"r{i}", max_tokens=2000) for i in range(6)])
    assert eventually(lambda: server.stats()["num_running"] == 2, 30.0)
    started = time.monotonic()
    answer = server.post({"messages": MESSAGES, "max_tokens": 8, **FREE})
    took_s = time.monotonic() - started
    assert answer.status_code == 200
    assert api.batches.retrieve(batch.id).request_counts.completed == 0
    assert took_s < 5.0
    batch = api.batches.cancel(batch.id)
    assert batch.status in ("cancelling", "cancelled")
    batch = wait(api, batch)
    assert batch.status == "cancelled"
    assert batch.cancelled_at >= batch.cancelling_at
    assert api.batches.cancel(batch.id).status == "cancelled"
    assert eventually(lambda: server.stats()["num_running"] + server.stats()["num_waiting"] == 0)
    clean(api)


def test_a_cancelled_batch_keeps_what_was_answered(api: openai.OpenAI) -> None:
    lines = [chat_line("quick"), *(chat_line(f"r{i}", max_tokens=3000) for i in range(4))]
    batch = wait(api, start(api, lines), lambda batch: batch.request_counts.completed == 1)
    batch = wait(api, api.batches.cancel(batch.id))
    assert [line["custom_id"] for line in results(api, batch.output_file_id)] == ["quick"]
    with pytest.raises(openai.BadRequestError, match="completed"):
        api.batches.cancel(wait(api, start(api, [chat_line("a")])).id)
    clean(api)


def test_a_short_batch_does_not_wait_for_the_end_of_another_keys_long_one(
    server: Server, api: openai.OpenAI
) -> None:
    long = start(api, [chat_line(f"r{i}", max_tokens=40) for i in range(200)])
    wait(api, long, lambda batch: batch.status == "in_progress")
    ben = api_of(server, KEYS[1])
    short = wait(ben, start(ben, [chat_line("a"), chat_line("b")]))
    assert short.status == "completed"
    assert api.batches.retrieve(long.id).request_counts.completed < 100
    wait(api, api.batches.cancel(long.id))
    clean(api)
    clean(ben)


# Across servers


def test_a_batch_outlives_a_server_that_is_killed_and_no_line_has_two_results(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "batches"
    settings = {"batch_folder": str(folder)}
    lines = [chat_line(f"r{i}", max_tokens=40) for i in range(24)]
    with start_server(engine={"model": two_layers(), "max_rows": 2}, serve=settings) as first:
        with start_server({"model": two_layers()}, settings, wait_for="failed") as second:
            assert "Another server uses" in second.phases[-1]["detail"]
        api = api_of(first)
        done = start(api, [chat_line("a")])
        batch = wait(api, start(api, lines), lambda batch: batch.request_counts.completed >= 5)
        assert batch.status == "in_progress"
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
    record = json.loads((folder / "batches" / f"{batch.id}.json").read_text())
    output = folder / "files" / record["output_id"]
    before = output.read_bytes()
    with output.open("ab") as file:
        file.write(b'{"id":"torn')
    with start_server(engine={"model": two_layers(), "max_rows": 2}, serve=settings) as again:
        api = api_of(again)
        assert api.batches.retrieve(done.id).status == "completed"
        batch = wait(api, batch)
        assert batch.status == "completed"
        assert batch.request_counts.model_dump() == {"total": 24, "completed": 24, "failed": 0}
        text = api.files.content(batch.output_file_id).read()
        assert text.startswith(before)
        ids = [line["custom_id"] for line in results(api, batch.output_file_id)]
        assert sorted(ids) == sorted(f"r{i}" for i in range(24))
        late = start(api, [chat_line("quick"), chat_line("slow", max_tokens=3500)])
        wait(api, late, lambda batch: batch.request_counts.completed == 1)
    record = folder / "batches" / f"{late.id}.json"
    record.write_text(
        json.dumps({**json.loads(record.read_text()), "expires_at": int(time.time()) - 1})
    )
    with start_server(
        {"model": two_layers()}, {**settings, "served_model_name": "another"}
    ) as last:
        api = api_of(last)
        batch = wait(api, late)
        assert batch.status == "expired"
        assert [line["custom_id"] for line in results(api, batch.output_file_id)] == ["quick"]
        (error,) = results(api, batch.error_file_id)
        assert (error["custom_id"], error["response"]) == ("slow", None)
        assert error["error"]["code"] == "batch_expired"


def test_a_file_does_not_expire_while_a_batch_reads_it(tmp_path: Path) -> None:
    folder = BatchFolder(ServeConfig(batch_folder=str(tmp_path)))
    times = {"created_at": 0, "expires_at": 1}
    kept = StoredFile(id="f", tenant="t", filename="in", purpose="batch", bytes=0, **times)
    results = {"output_id": "o", "errors_id": "e", "completion_window": "24h"}
    batch = Batch(
        id="b", tenant="t", model="m", endpoint=CHATS, input_file_id="f", **results, **times
    )
    folder.add(kept)
    folder.save(batch)
    assert folder.file("f", "t") is kept
    batch.reach("completed")
    with pytest.raises(FileNotHereError):
        folder.file("f", "t")
    assert not folder.files
    folder.close()


def test_parts_of_a_file_can_be_downloaded(server: Server, api: openai.OpenAI) -> None:
    data = jsonl([chat_line(f"r{i}") for i in range(3)])
    size = len(data)
    file = api.files.create(file=("in.jsonl", data), purpose="batch")
    url = f"{server.url}/v1/files/{file.id}/content"

    def get(asked: str, method: str = "GET", **headers: str) -> Any:
        return server.http.request(method, url, headers={"range": asked, **headers})

    parts = {
        "bytes=0-9": data[:10],
        "Bytes = 5-5": data[5:6],
        f"bytes={size - 3}-{size + 99}": data[-3:],
        f"bytes=9-{2**64 - 1}": data[9:],
        "bytes=7-": data[7:],
        "bytes=-8": data[-8:],
        f"bytes=-{size + 1}": data,
        f"bytes=2-3, {size}-": data[2:4],  # only one of them exists
    }
    for asked, part in parts.items():
        answer = get(asked)
        assert (answer.status_code, answer.content) == (206, part), asked
        assert answer.headers["content-range"].endswith(f"/{size}")
    several = get("bytes=0-3,10-12,-2")
    assert several.status_code == 206
    assert several.headers["content-type"].startswith("multipart/byteranges; boundary=")
    for part in (data[:4], data[10:13], data[-2:]):
        assert b"\r\n\r\n" + part + b"\r\n--" in several.content

    etag = several.headers["etag"]
    assert get("bytes=0-3", **{"if-range": etag}).content == data[:4]
    many = "bytes=" + ",".join(f"{2 * n}-{2 * n}" for n in range(101))
    for whole in (get("bytes=0-3", **{"if-range": '"other"'}), get("lines=0-3"), get(many)):
        assert (whole.status_code, whole.content) == (200, data)
    head = get("bytes=0-3", "HEAD")
    assert (head.status_code, head.content) == (200, b"")
    assert (head.headers["content-length"], head.headers["accept-ranges"]) == (str(size), "bytes")
    clean(api)


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        *[(f"bytes={wrong}", 400) for wrong in ("", ",", "-", "x", "5-2", "0-9,x", "--5", "+1-5")],
        ("bytes", 400),
        (f"bytes={'9' * 5000}-", 400),
        *[(f"bytes={beyond}", 416) for beyond in ("1000000-", "-0", "999999-9999999,-0")],
    ],
)
def test_a_wrong_range_is_refused_like_any_other_error(
    server: Server, api: openai.OpenAI, asked: str, status: int
) -> None:
    data = jsonl([chat_line("a")])
    file = api.files.create(file=("in.jsonl", data), purpose="batch")
    url = f"{server.url}/v1/files/{file.id}/content"
    answer = server.http.get(url, headers={"range": asked})
    assert_refused(answer, status, None)
    length = f"bytes */{len(data)}" if status == 416 else None
    assert answer.headers.get("content-range") == length
    assert server.http.head(url, headers={"range": asked}).is_success
    api.files.delete(file.id)


@pytest.mark.parametrize("path", ["/v1/files", "/v1/files/x", "/v1/files/x/content", "/v1/batches"])
def test_a_server_without_a_folder_says_how_to_have_one(path: str) -> None:
    answer = call(app_of(), path)
    assert answer.status == 404
    assert answer.json["error"]["code"] == "batches_off"
    assert "--batch-folder" in answer.json["error"]["message"]
