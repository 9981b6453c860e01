"""Tests of the page in a real browser with a real server: Chromium, driven by Playwright."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from serving import REPOSITORY, Server, start_server

CHROMIUMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
WAIT_MS = 20_000


@pytest.fixture(scope="package")  # its event loop must not outlive these tests
def browser() -> Iterator[Any]:
    """Debian's Chromium if it is installed, otherwise the one that Playwright has installed."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="make test-page installs Playwright"
    )
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUMS)), None)
    with playwright.sync_playwright() as running:
        yield running.chromium.launch(executable_path=found, args=["--no-sandbox"])


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with start_server() as running:
        yield running


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens an address in a context of its own; fails a test if any page of it logged an error."""
    contexts: list[Any] = []
    wrong: list[str] = []

    def open(url: str, expect_errors: bool = False, is_ready: bool = True, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.add_init_script(
            "addEventListener('securitypolicyviolation', (e) =>"
            " console.error('CSP: ' + e.violatedDirective + ' ' + e.blockedURI));"
        )

        def hear(message: Any) -> None:
            # The browser logs refused requests itself; anything else is an error of the page.
            is_refusal = "Failed to load resource" in message.text
            if message.type == "error" and not (expect_errors and is_refusal):
                wrong.append(message.text)

        page.on("console", hear)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(url)
        if is_ready:
            page.wait_for_selector("#state[data-kind=ok]", state="attached")
        return page

    yield open
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture
def page(open_page: Callable[..., Any], server: Server) -> Any:
    return open_page(server.url)


def chunk(**delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


USAGE = {
    "choices": [],
    "usage": {
        "prompt_tokens": 20,
        "completion_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 16},
        "completion_tokens_details": {"reasoning_tokens": 4},
    },
}


def script_replies(
    page: Any, *replies: list[dict[str, Any]], done: bool = True
) -> list[dict[str, Any]]:
    """The model replies with these texts in turn; returns the request bodies as they arrive."""
    asked: list[dict[str, Any]] = []

    def answer(route: Any) -> None:
        reply = replies[min(len(asked), len(replies) - 1)]
        asked.append(json.loads(route.request.post_data))
        events = [f"data: {json.dumps(event)}\n\n" for event in reply]
        route.fulfill(
            content_type="text/event-stream", body="".join([*events, "data: [DONE]\n\n" * done])
        )

    page.route("**/v1/chat/completions", answer)
    return asked


def reload(page: Any) -> None:
    """Waits until conversations are loaded and the server is known, as `open_page` does."""
    page.reload()
    page.wait_for_selector("#state[data-kind=ok]", state="attached")


def say(page: Any, text: str) -> None:
    page.fill("#draft", text)
    if page.evaluate("matchMedia('(pointer: coarse)').matches"):
        page.click("#send")
    else:
        page.keyboard.press("Enter")


def wait_answer(page: Any, number: int = 1) -> Any:
    """Waits for this number of answers and returns the last, when it is complete."""
    page.wait_for_function(
        "(n) => document.querySelectorAll('.message.assistant[aria-busy=false]').length >= n",
        arg=number,
    )
    return page.locator(".message.assistant").last


def serve_sources(page: Any) -> None:
    """Serves modules of web/source beside the built files, for a test that calls one."""
    names = "|".join(("dom", "store", "tools"))

    def answer(route: Any) -> None:
        route.fulfill(path=REPOSITORY / "web" / "source" / Path(route.request.url).name)

    page.route(re.compile(rf"/page/({names})\.js$"), answer)


def with_fields(**fields: Any) -> Callable[[Any], None]:
    """Forwards the request to the server with these fields added to its body."""

    def pass_on(route: Any) -> None:
        body = json.loads(route.request.post_data)
        route.continue_(post_data=json.dumps({**body, **fields}))

    return pass_on
