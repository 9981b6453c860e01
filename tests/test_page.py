"""The web page as the server sends it: files, headers, access control, and forbidden behaviour.

tests/browser tests it in a browser.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from penstock.eval.report.charts import THEMES
from penstock.serve.page.files import FOLDER, INDEX, PAGE_PATHS, PREFIX, SANDBOX, file_names
from penstock.serve.page.routes import LiveRoute
from serving import REPOSITORY
from test_serve_access import GOOD, KEYS, Answered, app_of, call

HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
WEB = REPOSITORY / "web"
SOURCE = WEB / "source"
OURS = sorted(path.name for path in SOURCE.iterdir() if path.is_file())
WATCHER = Request({"type": "http", "method": "GET"})
MAX_BYTES, MAX_SENT_BYTES = 300_000, 110_000  # all files; the second as sent, compressed
needs_node = pytest.mark.skipif(
    shutil.which("node") is None or not (WEB / "node_modules").is_dir(),
    reason="make page installs what builds the page, where Node is",
)


@pytest.fixture(scope="module")
def app() -> Any:
    return app_of()


def text_of(name: str) -> str:
    return (SOURCE / name).read_text()


def built(name: str) -> str:
    return (FOLDER / name).read_text()


# What is sent


def test_a_browser_is_shown_the_page_and_other_clients_that_a_server_is_there(app: Any) -> None:
    shown = call(app, "/", HTML)
    assert shown.body.startswith(b"<!doctype html>")
    assert shown.headers["content-type"] == "text/html; charset=utf-8"
    for headers in ({}, {"accept": "*/*"}, {"accept": "application/json"}):
        plain = call(app, "/", headers)
        assert plain.body == b"Penstock is running"
        assert plain.headers["content-type"] == "text/plain; charset=utf-8"
        assert "accept" in plain.headers["vary"]


def test_every_file_is_sent_with_a_policy_that_lets_nothing_else_run(app: Any) -> None:
    assert len(PAGE_PATHS) > 10
    for path in PAGE_PATHS:
        assert_locked_up(path, call(app, path))


def assert_locked_up(path: str, answer: Answered) -> None:
    assert answer.status == 200, path
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = dict(
        rule.strip().split(" ", 1) for rule in answer.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    if path == PREFIX + SANDBOX:
        assert policy["sandbox"] == "allow-scripts"
        assert "connect-src" not in policy
    else:
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert (policy["require-trusted-types-for"], policy["trusted-types"]) == (
            "'script'",
            "'none'",
        )
        assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"


def test_a_browser_that_has_a_file_is_not_sent_it_again(app: Any) -> None:
    for path in ("/", f"{PREFIX}app.js"):
        first = call(app, path, HTML)
        again = call(app, path, {**HTML, "if-none-match": f'"other", W/{first.headers["etag"]}'})
        assert (again.status, again.body) == (304, b"")
        assert again.headers["etag"] == first.headers["etag"]
        assert call(app, path, {**HTML, "if-none-match": '"other"'}).status == 200


def test_files_are_compressed_for_clients_that_accept_it_and_small_in_sum(app: Any) -> None:
    sent = 0
    for name in file_names():
        answer = call(app, PREFIX + name, {"accept-encoding": "gzip, br"})
        assert answer.headers["content-encoding"] == "gzip"
        assert gzip.decompress(answer.body) == (FOLDER / name).read_bytes()
        sent += len(answer.body)
    assert sent < MAX_SENT_BYTES
    assert sum((FOLDER / name).stat().st_size for name in file_names()) < MAX_BYTES


def test_the_sandbox_has_no_origin_and_gets_its_script_and_nothing_else(app: Any) -> None:
    inside = {"host": "127.0.0.1:8000", "origin": "null"}
    assert call(app, f"{PREFIX}sandbox.js", inside).status == 200
    for path in ("/", "/v1/models", "/live", f"{PREFIX}nothing.js"):
        assert call(app, path, inside).status == 403


@pytest.mark.parametrize("name", ["nothing.js", "../files.py", "..%2f..%2fconfig.py", "vendor", ""])
def test_nothing_but_the_files_is_sent(app: Any, name: str) -> None:
    assert call(app, PREFIX + name).status == 404


def test_without_the_page_there_is_neither_page_nor_file() -> None:
    app = app_of(page=False)
    assert call(app, "/", HTML).body == b"Penstock is running"
    assert call(app, f"{PREFIX}app.js").status == 404


def test_files_need_no_key_and_numbers_do() -> None:
    app = app_of(api_key=KEYS)
    assert call(app, "/", HTML).body.startswith(b"<!doctype html>")
    assert {call(app, path).status for path in PAGE_PATHS} == {200}
    assert call(app, "/live").status == call(app, f"{PREFIX}other.js").status == 401
    assert call(app, f"{PREFIX}other.js", GOOD).status == 404


# The numbers of the live view


def test_the_live_view_has_an_event_a_second_until_the_server_ends() -> None:
    state = app_of().state.server
    state.metrics.inter_token_s.observe(0.004, 3)
    state.metrics.num_generated_tokens = 3

    async def watch() -> list[bytes]:
        route = LiveRoute(state)
        events = []
        async for event in (await route.stream(WATCHER)).body_iterator:  # type: ignore[attr-defined]
            events.append(bytes(event))
            if len(events) == 2:
                state.draining.set()
        return events

    started = time.monotonic()
    events = asyncio.run(watch())
    assert 0.9 < time.monotonic() - started < 5.0
    assert len(events) == 2
    assert all(event.startswith(b"data: {") and event.endswith(b"}\n\n") for event in events)
    event = json.loads(events[0].removeprefix(b"data: "))
    assert event["generated_tokens"] == event["inter_token_s"]["counts"][-1] == 3
    assert len(event["inter_token_s"]["counts"]) == len(event["inter_token_s"]["bounds"]) + 1


def test_engines_are_asked_once_a_second_however_many_watch() -> None:
    state = app_of().state.server
    asked = []

    async def report() -> list[Any]:
        asked.append(1)
        return []

    state.client.report = report

    async def watch() -> None:
        route = LiveRoute(state)
        streams = [(await route.stream(WATCHER)).body_iterator for _ in range(8)]  # type: ignore[attr-defined]
        first = await asyncio.gather(*(anext(aiter(stream)) for stream in streams))
        assert len(set(first)) == 1

    asyncio.run(watch())
    assert len(asked) == 1


# What is in the files


@pytest.mark.parametrize("name", OURS)
def test_our_files_name_no_other_site_and_parse_no_html(name: str) -> None:
    text = (
        text_of(name)
        .replace("http://www.w3.org/2000/svg", "")
        .replace("https://relative.invalid/", "")
    )
    assert not re.search(r"(https?:)?//[a-z0-9-]+\.[a-z]", text)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|srcdoc|\beval\(|new Function",
        text,
    )
    if name.endswith(".html"):
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text)


def test_every_file_that_is_referred_to_exists_and_what_opens_the_page_is_asked_for_at_once() -> (
    None
):
    modules = {name: built(name) for name in file_names() if name.endswith(".js")}
    index = built(INDEX)
    named = set(re.findall(r'(?:src|href)="page/([^"]+)"', index))
    eager, new = set(), {"app.js"}
    while new:
        eager |= new
        found = {one for name in new for one in re.findall(r'from"\./([^"]+)"', modules[name])}
        new = found - eager
    lazy = {one for text in modules.values() for one in re.findall(r'import\("\./([^"]+)"\)', text)}
    assert {re.sub(r"-\w+\.js", "", name) for name in lazy} == {
        "languages.js",
        "live",
        "maths.js",
        "playground",
    }
    assert named >= {"app.css", "app.js", "icon.svg"}
    assert eager | lazy | named | {INDEX, SANDBOX, "sandbox.js"} == set(file_names())
    assert set(re.findall(r'rel="modulepreload" href="page/([^"]+)"', index)) == eager - {"app.js"}
    assert len(eager) <= 3  # few requests


# Source and build


def hashes(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_what_is_sent_was_built_of_the_source_that_is_here() -> None:
    record = json.loads((WEB / "built.json").read_text())
    assert record == {"source": hashes(SOURCE), "static": hashes(FOLDER)}, "run `make page`"


@needs_node
def test_building_again_gives_the_same_bytes(tmp_path: Path) -> None:
    subprocess.run(["node", WEB / "build.mjs", tmp_path], check=True, timeout=120)
    licences = {path: one for path, one in hashes(FOLDER).items() if path.startswith("vendor/")}
    assert len(licences) == 3
    assert hashes(tmp_path) | licences == hashes(FOLDER)


@needs_node
def test_formulas_are_what_the_published_library_makes_of_them() -> None:
    """Our copy is built from its parts, with some names shortened."""
    formulas = (REPOSITORY / "tests" / "data" / "formulas.txt").read_text().splitlines()
    assert len(formulas) > 100
    program = f"""
import {{ readFileSync }} from "node:fs";
import {{ treeOf }} from "{FOLDER}/maths.js";
const library = readFileSync("{WEB}/node_modules/temml/dist/temml.min.js", "utf8");
const published = new Function(`${{library}}; return temml;`)();
const formulas = {json.dumps(formulas)};
const tried = (make) => {{ try {{ return make(); }} catch (error) {{ return error.message; }} }};
const options = {{ throwOnError: true, maxExpand: 200, maxSize: [20, 100] }};
const both = formulas.flatMap((one) => [true, false].map((displayMode) => [
  tried(() => treeOf(one, displayMode).toMarkup()),
  tried(() => published.renderToString(one, {{ ...options, displayMode }})),
]));
console.log(JSON.stringify(both));
"""
    command = ["node", "--input-type=module", "--eval", program]
    ran = subprocess.run(command, check=True, timeout=60, capture_output=True)
    both = json.loads(ran.stdout)
    assert [pair for pair in both if pair[0] != pair[1]] == []
    assert sum(ours.startswith("<math") for ours, _ in both) > 0.8 * len(both)


def test_every_element_that_is_looked_up_by_id_is_on_the_page() -> None:
    ids = set(re.findall(r'\sid="([^"]+)"', text_of(INDEX)))
    asked = {one for name in OURS for one in re.findall(r'byId\("([^"]+)"\)', text_of(name))}
    made = {one for name in OURS for one in re.findall(r'\bid: "([^"]+)"', text_of(name))}
    assert asked
    assert asked <= ids | made


def test_page_and_report_share_their_colours() -> None:
    css = text_of("base.css")
    for theme in THEMES.values():
        for role in ("paper", "ink", "quiet", "hair", "track", "ours", "rival", "goal"):
            assert f"--{role}: {theme[role]};" in css, role


def test_modules_stay_short_and_vendored_code_brings_its_licence() -> None:
    assert [name for name in OURS if len(text_of(name).splitlines()) > 400] == []
    for licence in ("marked.LICENSE", "temml.LICENSE", "highlight/LICENSE"):
        assert (FOLDER / "vendor" / licence).stat().st_size > 500


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not here")
def test_every_module_of_ours_can_be_parsed(tmp_path: Path) -> None:
    for name in OURS:
        if name.endswith(".js"):
            copy = tmp_path / f"{name}.mjs"
            copy.write_text(text_of(name))
            subprocess.run(["node", "--check", str(copy)], check=True, timeout=30)
