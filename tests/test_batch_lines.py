"""Lines of batch files and multipart forms: whole, torn, too long, repeated, and cut anywhere."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.batch_lines import (
    ENDPOINTS,
    LineError,
    LineSet,
    custom_id_of,
    error_line,
    mend_tail,
    numbered_lines,
    read_line,
    result_line,
    results_in,
    scan,
)
from penstock.errors import RequestError
from penstock.serve.batches.files import MultipartParser, Part, boundary_of

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
CHATS = ("/v1/chat/completions",)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("{", "invalid_json_line"),
        ("[]", "invalid_request"),
        ({**GOOD, "custom_id": ""}, "invalid_request"),
        ({**GOOD, "custom_id": 7}, "invalid_request"),
        ({**GOOD, "method": "GET"}, "invalid_method"),
        ({**GOOD, "url": "/v1/models"}, "invalid_url"),
        ({**GOOD, "body": "x"}, "invalid_request"),
        ({**GOOD, "body": {"prompt": "x", "stream": True}}, "invalid_request"),
        ({**GOOD, "body": {"prompt": "x", "background": True}}, "invalid_request"),
        ({**GOOD, "body": {"prompt": "x" * 300}}, "line_too_long"),
    ],
)
def test_a_line_that_is_no_request_says_in_which_way(line: Any, code: str) -> None:
    text = line if isinstance(line, str) else json.dumps(line)
    with pytest.raises(LineError) as raised:
        read_line(text.encode(), 256, ENDPOINTS)
    assert raised.value.code == code


def test_a_line_keeps_its_body_to_the_byte() -> None:
    body = '{"prompt": "ü",  "x": 1.50}'
    line = f'{{"custom_id":"a","method":"POST","url":"/v1/completions","body":{body}}}'
    assert bytes(read_line(line.encode(), 1000, ENDPOINTS).body) == body.encode()


def test_lines_are_numbered_as_an_editor_does_and_long_ones_are_not_held(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\n\n  \ntwo\r\n" + b"x" * 1000 + b"\nend")
    with path.open("rb") as file:
        assert list(numbered_lines(file, 10)) == [
            (1, b"one"),
            (4, b"two"),
            (5, b"x" * 11),
            (6, b"end"),
        ]
    path.write_bytes(b"y" * 10 + b"\n" + b"x" * 11)
    with path.open("rb") as file:
        assert [len(line) for _, line in numbered_lines(file, 10)] == [10, 11]


def test_a_byte_order_mark_is_no_part_of_the_first_line() -> None:
    file = io.BytesIO("{}\r\n{}\r\n".encode("utf-8-sig"))
    assert list(numbered_lines(file, 10)) == [(1, b"{}"), (2, b"{}")]
    for length in range(12):  # of a line that may have 10 bytes
        lines = ["x" * length, "{}", ""]
        plain, marked = (io.BytesIO("\n".join(lines).encode(c)) for c in ("utf-8", "utf-8-sig"))
        assert list(numbered_lines(marked, 10)) == list(numbered_lines(plain, 10))


def test_a_scan_names_lines_that_are_wrong_and_ids_that_come_twice(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    chat = {**GOOD, "url": CHATS[0]}
    lines = [chat, {**chat, "custom_id": "b"}, GOOD, {**chat, "custom_id": "b"}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\nnonsense\n")
    found = scan(path, 1000, CHATS)
    assert found.num_lines == 5
    assert [(problem["line"], problem["code"]) for problem in found.problems] == [
        (3, "invalid_url"),
        (5, "invalid_json_line"),
        (4, "duplicate_custom_id"),
    ]
    path.write_text("\n\n")
    assert scan(path, 1000, CHATS).problems[0]["code"] == "empty_file"


def test_a_scan_of_a_hopeless_file_ends_early(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("nonsense\n" * 1000)
    found = scan(path, 1000, CHATS)
    assert len(found.problems) == found.num_lines == 100


@pytest.mark.parametrize("torn", [b"", b"{", b'{"id":"x_3"', b"x" * 200_000])
def test_a_torn_last_line_is_cut_off_and_no_other(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "out.jsonl"
    lines = [error_line(f"x_{i}", f"id {i}", "code", "why") for i in (1, 2)]
    path.write_bytes(b"".join(lines) + torn)
    mend_tail(path)
    assert path.read_bytes() == b"".join(lines)
    assert [(one.number, one.custom_id) for one in results_in(path)] == [(1, "id 1"), (2, "id 2")]
    assert not any(result.is_good for result in results_in(path))
    path.write_bytes(torn)
    mend_tail(path)
    assert path.read_bytes() == b""


@pytest.mark.parametrize("body", [b'{"a": 1,\n\r "b": "\\n"}', b"<html>\nno\xff</html>", b""])
def test_a_result_is_one_line_of_json_whatever_the_server_said(body: bytes) -> None:
    line = result_line("batch_req_1", 'odd "id"\n', 200, "r", body)
    assert line.count(b"\n") == 1
    result = json.loads(line)
    assert result["custom_id"] == 'odd "id"\n'
    assert custom_id_of(line) == 'odd "id"\n'
    if body.startswith(b"{"):
        assert result["response"]["body"] == json.loads(body)
    else:
        assert result["response"]["body"]["error"]["message"] == body.decode(errors="replace")


def test_a_set_of_lines_knows_them() -> None:
    lines, numbers = LineSet(), {1, 7, 8, 9, 1000, 65_537}
    for number in numbers:
        lines.add(number)
    assert {number for number in range(70_000) if number in lines} == numbers
    assert 10**9 not in lines


FORM = (
    b'preamble\r\n--XX\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--XX\r\nContent-Disposition: form-data; name="file"; filename="\xc3\xbc.jsonl"\r\n'
    b"Content-Type: application/octet-stream\r\n\r\n"
    b"\r\n--X\r\n--XY-- a \r\n\r\n-\r\n--XX--\r\nepilogue"
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 1000])
def test_a_form_is_the_same_however_it_is_cut(size: int) -> None:
    parser, fields, name = MultipartParser(b"XX"), dict[str, bytes](), ""
    for start in range(0, len(FORM), size):
        for piece in parser.feed(FORM[start : start + size]):
            if isinstance(piece, Part):
                name = piece.filename or piece.name
                fields[name] = b""
            else:
                fields[name] += piece
    assert parser.has_ended
    assert fields == {"purpose": b"batch", "ü.jsonl": b"\r\n--X\r\n--XY-- a \r\n\r\n-"}


def test_a_form_that_is_none_is_refused() -> None:
    assert boundary_of('multipart/form-data; boundary="a b"') == b"a b"
    for content_type in (
        "",
        "application/json",
        "multipart/form-data",
        "multipart/mixed; boundary=x",
    ):
        with pytest.raises(RequestError):
            boundary_of(content_type)
    for form in (
        b"--XX\r\n\r\n\r\nx",
        b"--XX\r\nA: " + b"b" * 10_000,
        b"--XX junk\r\nA: b\r\n\r\n",
    ):
        with pytest.raises(RequestError):
            list(MultipartParser(b"XX").feed(form))
