"""Every failure is shown as one sentence with a remedy, and no shown text can run as code."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from browser.conftest import USAGE, chunk, say, script_replies, wait_answer, with_fields
from serving import FREE, MESSAGES, Server, start_server

pytestmark = pytest.mark.browser
KEY = "sk-browser-test"


def script_failure(page: Any, status: int, code: str, times: int = 1, **headers: str) -> None:
    body = {"error": {"message": "It is so.", "type": "x", "param": None, "code": code}}
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=status, json=body, headers=headers),
        times=times,
    )


def problem_of(page: Any) -> Any:
    page.wait_for_selector(".problem")
    return page.locator(".problem")


@pytest.mark.parametrize(
    ("status", "code", "sentence", "way"),
    [
        (500, "engines_lost", "The server had an internal error.", "Try again"),
        (400, "context_length_exceeded", "no longer fits", "Leave out the oldest messages"),
        (400, "invalid_value", "It is so.", "Try again"),
        (408, "deadline_exceeded", "took longer than the server allows", "Try again"),
    ],
)
def test_a_refusal_is_a_sentence_and_a_button(
    open_page: Callable[..., Any], server: Server, status: int, code: str, sentence: str, way: str
) -> None:
    page = open_page(server.url, expect_errors=True)
    script_replies(page, [chunk(content="Answered."), USAGE])
    say(page, "First")
    wait_answer(page)
    script_failure(page, status, code)
    say(page, "Second")
    problem = problem_of(page)
    assert sentence in problem.inner_text()
    problem.get_by_role("button", name=way).click()
    page.wait_for_function("() => document.querySelectorAll('.problem').length === 0")
    assert wait_answer(page, 2).locator(".prose").inner_text() == "Answered."
    assert page.locator(".message.assistant").last.locator(".branches").count() == 0


def test_a_busy_server_is_asked_again_by_itself_after_the_time_it_names(
    open_page: Callable[..., Any], server: Server
) -> None:
    page = open_page(server.url, expect_errors=True)
    script_replies(page, [chunk(content="Now."), USAGE])
    script_failure(page, 429, "overloaded", **{"retry-after": "1"})
    say(page, "Hello")
    assert "asks to wait 1 s" in problem_of(page).inner_text()
    page.wait_for_function(
        "() => document.querySelector('.message.assistant .prose')?.innerText === 'Now.'"
    )


@pytest.mark.everyday
@pytest.mark.parametrize("has_event", [True, False])
def test_an_answer_that_breaks_off_keeps_what_came_and_can_be_continued(
    page: Any, has_event: bool
) -> None:
    error = {"error": {"message": "Two engines failed.", "code": "engines_lost"}}
    script_replies(page, [chunk(content="The river "), *([error] if has_event else [])], done=False)
    say(page, "Go on")
    problem = problem_of(page)
    assert ("The engine stopped" if has_event else "The connection ended") in problem.inner_text()
    asked = script_replies(page, [chunk(content="flows."), USAGE])
    problem.get_by_role("button", name="Continue the answer").click()
    page.wait_for_function(
        "() => document.querySelector('.message.assistant .prose')?.innerText === 'The river "
        "flows.'"
    )
    assert asked[0]["messages"][-1] == {"role": "assistant", "content": "The river "}
    assert asked[0]["continue_final_message"] is True


def test_a_server_that_starts_says_its_phase_and_one_that_is_gone_that_it_is(
    open_page: Callable[..., Any], server: Server
) -> None:
    page = open_page(server.url, expect_errors=True)
    phase = {"name": "weights", "detail": "2 GB", "fraction": 0.4, "seconds": None}
    page.route(
        "**/health",
        lambda route: route.fulfill(status=503, json={"status": "starting", "phase": phase}),
    )
    page.reload()
    page.wait_for_selector("#notice:not([hidden])")
    assert "still loading: weights (2 GB), 40 %" in page.locator("#notice").inner_text()
    phase |= {"name": "graphs", "fraction": None, "detail": ""}
    page.wait_for_selector("text=still loading: graphs, after weights.")
    page.unroute("**/health")
    page.route("**/health", lambda route: route.abort())
    page.wait_for_selector("#state[data-kind=gone]")
    assert "cannot be reached" in page.locator("#notice").inner_text()
    page.unroute("**/health")
    page.wait_for_selector("#state[data-kind=ok]")
    assert page.locator("#notice").is_hidden()


def test_a_message_sent_while_the_model_loads_is_answered_when_it_is_ready(
    open_page: Callable[..., Any],
) -> None:
    with start_server(wait_for="listening") as server:
        page = open_page(server.url, expect_errors=True, is_ready=False)
        page.wait_for_selector("#notice:not([hidden])")
        assert "The model is still loading: " in page.locator("#notice").inner_text()
        say(page, "What is 17 + 26? Reply with just the number.")
        assert "The engine is not ready yet." in problem_of(page).inner_text()
        page.wait_for_function(
            "() => document.querySelector('.message.assistant .prose')?.innerText === '43'"
        )
        page.wait_for_selector("#notice", state="hidden")  # the server is asked once a second


def test_the_page_reports_an_engine_that_dies_during_an_answer_which_continues(
    open_page: Callable[..., Any],
) -> None:
    """A forked engine would be back before the page asks again, which it does once a second."""
    with start_server(forked=False) as server:
        page = open_page(server.url, expect_errors=True)
        page.route("**/v1/chat/completions", with_fields(ignore_eos=True, max_tokens=120))
        say(page, "Tell me about rivers.")
        page.wait_for_function(
            "() => document.querySelector('.message.assistant .prose')?.innerText.length > 5"
        )
        os.kill(server.engine_pid, signal.SIGKILL)
        page.wait_for_selector("#notice:not([hidden])")
        assert "The engine stopped and is restarting" in page.locator("#notice").inner_text()
        assert "The answer will continue automatically." in page.locator("#notice").inner_text()
        footer = wait_answer(page).locator("footer small").inner_text()
        assert footer.startswith("120 tokens")
        assert page.locator(".problem").count() == 0
        page.wait_for_selector("#notice", state="hidden")


def test_a_page_that_is_closed_during_an_answer_keeps_its_part_and_can_continue(page: Any) -> None:
    page.route("**/v1/chat/completions", with_fields(ignore_eos=True, max_tokens=3000))
    say(page, "Tell me about rivers.")
    page.wait_for_function(
        "() => document.querySelector('.message.assistant .prose')?.innerText.length > 5"
    )
    page.wait_for_timeout(1200)
    page.reload()
    assert "closed before this answer was complete" in problem_of(page).inner_text()
    before = page.locator(".message.assistant .prose").inner_text()
    assert before
    page.unroute("**/v1/chat/completions")
    asked = script_replies(page, [chunk(content=" The end."), USAGE])
    page.get_by_role("button", name="Continue the answer").click()
    page.wait_for_function("() => document.querySelectorAll('.problem').length === 0")
    assert wait_answer(page).locator(".prose").inner_text().endswith("The end.")
    assert asked[0]["continue_final_message"] is True


def test_a_server_that_is_full_says_how_long_to_wait_and_answers_then(
    open_page: Callable[..., Any],
) -> None:
    with start_server({"max_rows": 1}, {"max_queue": 1}) as server:
        page = open_page(server.url, expect_errors=True)
        with server.stream({"messages": MESSAGES, "max_tokens": 4000, "stream": True, **FREE}):
            say(page, "Hello")
            assert "asks to wait" in problem_of(page).inner_text()
        page.wait_for_function(
            "() => document.querySelectorAll('.problem').length === 0"
            " && document.querySelector('.message.assistant[aria-busy=false] .prose')?.innerText"
        )


def test_a_conversation_outgrows_a_real_context_and_goes_on_without_its_beginning(
    open_page: Callable[..., Any],
) -> None:
    with start_server({"max_model_len": 512}) as server:
        page = open_page(server.url, expect_errors=True)
        for number, word in enumerate(("river", "bank"), 1):
            say(page, f"{word} " * 100)
            wait_answer(page, number)
        say(page, "weir " * 100)
        problem_of(page).get_by_role("button", name="Leave out the oldest messages").click()
        page.wait_for_function("() => document.querySelectorAll('.problem').length === 0")
        assert wait_answer(page, 3).locator(".prose").inner_text()
        assert page.locator(".message.left-out").count() == 2
        say(page, "pond " * 500)
        for _ in range(3):  # the other two, and then there is none
            problem_of(page).get_by_role("button", name="Leave out the oldest messages").click()
        problem = page.locator(".problem", has_text="this message alone is too long")
        problem.get_by_role("button", name="Edit the message").click()
        page.locator("textarea.edit").fill("And now?")
        page.keyboard.press("Enter")
        page.wait_for_function(  # messages left out stay out on the new branch
            "() => !document.querySelector('.problem') && document.querySelector("
            "'.message.assistant[aria-busy=false]:last-child .prose')?.innerText"
        )
        assert page.locator(".message.left-out").count() == 6


@pytest.mark.everyday
def test_a_key_is_asked_for_once_refused_in_words_and_kept_for_the_tab(
    open_page: Callable[..., Any],
) -> None:
    with start_server(serve={"api_key": (KEY,)}) as keyed:
        page = open_page(keyed.url, expect_errors=True, is_ready=False)
        page.wait_for_selector("#key-dialog[open]")
        page.fill("#key-input", "sk-wrong")
        page.keyboard.press("Enter")
        page.wait_for_function(
            "() => document.querySelector('#key-text').textContent.includes('did not accept')"
        )
        page.fill("#key-input", KEY)
        page.keyboard.press("Enter")
        page.wait_for_function(
            "() => document.querySelector('#model').textContent.startsWith('penstock-tiny')"
        )
        say(page, "What is 17 + 26? Reply with just the number.")
        assert wait_answer(page).locator(".prose").inner_text() == "43"
        page.reload()
        page.wait_for_function(
            "() => document.querySelector('#model').textContent.startsWith('penstock-tiny')"
        )
        assert not page.locator("#key-dialog").is_visible()
        assert page.evaluate("Object.values(localStorage).join().includes('sk-')") is False


# Shown text cannot run as code

HOSTILE = """<script>window.pwned = 1</script>
<img src=x onerror="window.pwned = 2">
<svg onload="window.pwned = 3"><a xlink:href="javascript:window.pwned = 4"><text>x</text></a></svg>
<iframe srcdoc="<script>parent.pwned = 5</script>"></iframe>

[a](javascript:window.pwned=6) [b](JaVaScRiPt:window.pwned=7) [c](data:text/html,<script>alert(1)</script>)
[d](&#106;avascript:window.pwned=8) [e](vbscript:x) <javascript:window.pwned=9>
![f](javascript:window.pwned=10)
[g](//evil.example/x) ![h](http://evil.example/pixel.png) [i]( java
script:alert(1)) [j](https://example.org/"onmouseover="window.pwned=11)

$\\href{javascript:window.pwned=12}{x}$ $\\includegraphics{http://evil.example/x}$ $$\\html{<img>}$$

```html"><img src=x onerror=window.pwned=13>
<script>window.pwned = 14</script>
```

| <img src=x onerror=window.pwned=15> | b |
|---|---|
| <b onclick="window.pwned=16">x</b> | `</code><script>` |

<style>body { display: none }</style><base href="http://evil.example/"><form action="http://evil.example">
<details open ontoggle="window.pwned=17"><math><mtext></form><img src onerror=window.pwned=18>
"""


def assert_harmless(page: Any, fetched: list[str]) -> None:
    page.wait_for_timeout(300)
    assert page.evaluate("window.pwned") is None
    found = (
        "#messages :is(script, style, iframe, object, embed, base, img, svg, [onerror], "
        "[onclick], [onload])"
    )
    assert page.locator(found).count() == 0
    links = page.eval_on_selector_all("#messages a", "(all) => all.map((a) => a.href)")
    assert all(link.startswith(("http://", "https://", "mailto:")) for link in links)
    assert [url for url in fetched if "evil" in url] == []
    assert page.locator("#composer").is_visible()


@pytest.mark.everyday
@pytest.mark.parametrize("size", [7, 100_000])
def test_hostile_markdown_is_shown_and_never_run(page: Any, size: int) -> None:
    fetched: list[str] = []
    page.on("request", lambda request: fetched.append(request.url))
    pieces = [chunk(content=HOSTILE[at : at + size]) for at in range(0, len(HOSTILE), size)]
    script_replies(page, [chunk(reasoning_content=HOSTILE), *pieces, USAGE])
    say(page, HOSTILE)
    answer = wait_answer(page)
    answer.locator(".thought summary").click()
    assert "<script>window.pwned = 1</script>" in answer.inner_text()
    assert_harmless(page, fetched)
    page.reload()
    wait_answer(page)
    assert_harmless(page, fetched)


def test_hostile_calls_results_names_and_files_are_shown_and_never_run(page: Any) -> None:
    fetched: list[str] = []
    page.on("request", lambda request: fetched.append(request.url))
    call = {
        "index": 0,
        "id": "c",
        "function": {"name": HOSTILE[:60], "arguments": json.dumps({"x": HOSTILE})},
    }
    script_replies(page, [chunk(tool_calls=[call]), USAGE], [chunk(content="ok"), USAGE])
    name = '"><img src=x onerror="window.pwned=19">.txt'
    file = {"name": name, "mimeType": "text/html", "buffer": HOSTILE.encode()}
    page.set_input_files("#file-input", files=[file])
    page.wait_for_selector("#files li")
    say(page, "Call.")
    form = wait_answer(page).locator(".call form")
    form.get_by_role("textbox").fill(HOSTILE)
    form.get_by_role("button", name="Answer by hand").click()
    wait_answer(page, 2)
    page.locator(".file summary").click()
    assert name in page.locator(".file summary").inner_text()
    assert_harmless(page, fetched)


def test_a_hostile_import_is_refused_or_harmless(page: Any) -> None:
    said: list[str] = []
    page.on("dialog", lambda dialog: (said.append(dialog.message), dialog.accept()))
    loop = {
        "messages": {"a": {"role": "user", "parent": "b"}, "b": {"role": "user", "parent": "a"}}
    }
    odd = {"title": HOSTILE, "leaf": "__proto__", "settings": {"system": 3, "tools": "x"}}
    odd["messages"] = {
        "__proto__": {"role": "user", "content": HOSTILE, "calls": [None], "files": "x"}
    }
    for number, content in enumerate(
        (b"not json", b"[]", b'{"messages": 3}', json.dumps(loop).encode())
    ):
        file = {"name": f"<b>{number}.json", "mimeType": "application/json", "buffer": content}
        with page.expect_event("dialog"):
            page.set_input_files("#import-input", files=[file])
        assert len(said) == number + 1
        assert "cannot be imported" in said[-1]
    file = {"name": "odd.json", "mimeType": "application/json", "buffer": json.dumps(odd).encode()}
    page.set_input_files("#import-input", files=[file])
    page.wait_for_selector(".message.user")
    assert_harmless(page, [])
    assert page.evaluate("({}).role") is None
