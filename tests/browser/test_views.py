"""The page as people see it: light and dark, small screens, without a mouse, and its other two
views.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from browser.conftest import USAGE, chunk, reload, say, script_replies, wait_answer
from serving import Server, start_server

pytestmark = pytest.mark.browser
PHONE = {"viewport": {"width": 375, "height": 667}, "is_mobile": True, "has_touch": True}
LONG = (
    "A line with code:\n\n```\n"
    + "x" * 300
    + "\n```\n\n| a | b | c | d |\n|---|---|---|---|\n| "
    + "w" * 200
)
# The drafting head predicts the solution of such a sum well.
SUM = "Tom has 12 marbles and buys 7 more. Then he gives away 5. How many marbles are left?"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"


def show(page: Any, view: str) -> None:
    """Opens a view and waits until it is drawn: the playground's form, the live view's first
    numbers.
    """
    page.evaluate("(view) => { location.hash = view; }", view)
    drawn = {"chat": "#composer", "playground": "#view-playground .columns", "live": ".tiles b"}
    page.locator(drawn[view]).first.wait_for()


@contextlib.contextmanager
def asking(server: Server, num_threads: int = 1) -> Iterator[None]:
    """Keeps the server generating."""
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            server.post({"messages": [{"role": "user", "content": SUM}], "max_tokens": 80})

    threads = [threading.Thread(target=ask) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


@pytest.mark.everyday
def test_dark_follows_the_system_until_a_person_chooses(
    open_page: Callable[..., Any], server: Server
) -> None:
    page = open_page(server.url, color_scheme="dark")
    assert page.evaluate(BACKGROUND) == "rgb(13, 17, 23)"
    page.click("#theme")
    assert page.evaluate(BACKGROUND) == "rgb(255, 255, 255)"
    reload(page)
    assert page.evaluate(BACKGROUND) == "rgb(255, 255, 255)"


@pytest.mark.everyday
def test_a_phone_shows_everything_without_scrolling_sideways(
    open_page: Callable[..., Any], server: Server
) -> None:
    page = open_page(server.url, **PHONE)
    script_replies(page, [chunk(content=LONG), USAGE])
    page.focus("#draft")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    page.keyboard.type("lines")
    assert page.locator("#draft").input_value() == "two\nlines"
    say(page, "w" * 200)
    wait_answer(page)
    for view in ("chat", "playground", "live"):
        show(page, view)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
    page.evaluate("location.hash = 'chat'")
    page.click("#toggle-list")
    assert page.locator("#new-talk").is_visible()
    page.click("#toggle-list")
    page.click("#toggle-settings")
    assert page.get_by_label("System prompt").is_visible()


@pytest.mark.everyday
def test_the_whole_chat_works_by_keyboard(page: Any) -> None:
    script_replies(page, [chunk(content="Hi."), USAGE])
    assert page.evaluate("document.activeElement.id") == "draft"
    page.keyboard.type("Hello")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("there")
    page.keyboard.press("Enter")
    wait_answer(page)
    assert page.locator(".message.user .said").inner_text() == "Hello\nthere"
    page.keyboard.press("Alt+r")
    page.wait_for_selector(".message.assistant .branches")
    page.keyboard.press("Alt+2")
    page.wait_for_selector("#view-playground:not([hidden])")
    page.keyboard.press("Alt+n")
    page.wait_for_function("() => document.activeElement.id === 'draft'")
    assert page.locator(".message").count() == 0


@pytest.mark.parametrize("kind", ["light", "dark", "phone"])
def test_an_automated_check_finds_nothing_that_keeps_people_out(
    open_page: Callable[..., Any], server: Server, kind: str
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = open_page(server.url, **(PHONE if kind == "phone" else {"color_scheme": kind}))

    def check(state: str) -> None:
        found = axe.run(page).response["violations"]
        assert [(one["id"], one["nodes"][0]["html"]) for one in found] == [], state

    call = {"index": 0, "id": "c", "function": {"name": "add", "arguments": "{}"}}
    lost = {"error": {"message": "Two engines failed.", "code": "engines_lost"}}
    script_replies(
        page,
        [chunk(reasoning_content="Hm."), chunk(content="# Hi\n\n```py\nx = 1\n```"), USAGE],
        [chunk(tool_calls=[call]), lost],
    )
    say(page, "Hello")
    wait_answer(page).get_by_role("button", name="Copy as").click()
    check("dialog")
    page.keyboard.press("Escape")
    say(page, "Call it")
    wait_answer(page, 2)
    check("call and problem")
    page.click("#toggle-settings")
    page.locator("#settings summary", has_text="Tools").click()
    page.get_by_role("button", name="Add a tool").click()
    for view in ("chat", "playground", "live"):
        show(page, view)
        check(view)


@pytest.mark.everyday
def test_a_completion_shows_each_token_with_its_alternatives(page: Any) -> None:
    page.goto(page.url.split("#")[0] + "#playground")
    page.wait_for_selector("text=Compare with other settings")
    page.get_by_label("Prompt", exact=True).first.fill("The river")
    page.get_by_label("Compare with other settings").check()
    # Sampled at temperature 1: a reply that ends at its first token has no perplexity.
    page.locator("#view-playground .columns").get_by_label("Seed").nth(1).fill("3")
    page.locator("#view-playground .primary", has_text="Complete").click()
    page.wait_for_function(
        "() => [...document.querySelectorAll('#view-playground .columns small')]"
        ".every((note) => note.textContent.includes('perplexity'))"
    )
    page.locator(".output .token").first.hover()
    assert page.locator(".token-card tr").count() >= 5
    assert "%" in page.locator(".token-card").inner_text()
    page.locator(".output").first.focus()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    second = page.locator(".output .token").nth(1)
    assert page.evaluate("document.activeElement.textContent") == second.text_content()
    assert page.locator(".token-card tr").count() >= 5
    assert "Alternatives: " in page.locator("#announcer").inner_text()
    page.get_by_role("button", name="Copy as").nth(1).click()
    assert '"temperature": 1' in page.locator("#copy-dialog pre").inner_text()


def test_tokens_and_template_show_what_the_model_sees(page: Any) -> None:
    page.goto(page.url.split("#")[0] + "#playground")
    page.get_by_role("button", name="Tokens").click()
    page.get_by_label("Text", exact=True).fill("a\n\nb")
    page.wait_for_selector(".token.striped.breaks")
    assert page.locator(".token.breaks").first.bounding_box()["width"] > 3
    page.get_by_label("Text", exact=True).fill("two rivers")
    page.wait_for_function("() => !document.querySelector('.token.breaks')")
    page.wait_for_selector(".token.striped")
    assert (
        "".join(page.locator(".token.striped").all_inner_texts()).replace("Ġ", " ") == "two rivers"
    )
    page.locator("#view-playground").get_by_role("button", name="Copy as").filter(
        visible=True
    ).click()
    assert '"prompt": "two rivers"' in page.locator("#copy-dialog pre").inner_text()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Template").click()
    page.get_by_role("button", name="Show what the model sees").click()
    page.wait_for_function(
        "() => document.querySelector('pre.output').textContent.includes('Hello!')"
    )
    assert "<|im_start|>user" in page.locator("pre.output").inner_text()


@pytest.mark.everyday
def test_the_live_view_moves_under_load(page: Any, server: Server) -> None:
    page.goto(page.url.split("#")[0] + "#live")
    with asking(server, num_threads=2):
        page.wait_for_function(
            "() => Number(document.querySelector('.tiles b')?.textContent.replace(',', '')) > 0"
            " && Number(document.querySelectorAll('.tiles b')[2].textContent) > 0"
        )
        assert "penstock-tiny on cpu" in page.locator("#view-live").inner_text()
        cells = page.locator("#view-live td")
        assert cells.filter(has_text="ready").count() == 1
        assert cells.filter(has_text=re.compile(r"^[\d.]+ GB of [\d.]+ GB$")).count() == 1
        assert cells.filter(has_text="state checkpoints").count() == 1
    page.wait_for_function("() => document.querySelectorAll('.tiles b')[2].textContent === '0'")


@pytest.mark.everyday
def test_the_live_view_shows_drafts_and_experts_of_a_server_that_has_them(
    open_page: Callable[..., Any],
) -> None:
    titles = (
        "Tokens per step and request",
        "Where the experts of a step were",
        "Experts of engine 0",
    )
    drafts = {"speculate": "mtp:1", "expert_cache": "12MB"}
    # Read when the page is open: an engine stops drafting for a while if that does not pay.
    with start_server(drafts) as drafting, contextlib.ExitStack() as asked:
        live = open_page(f"{drafting.url}/#live")
        live.wait_for_selector(".tiles b")
        asked.enter_context(asking(drafting))
        for title in titles:
            live.locator("figcaption", has_text=title).wait_for()
        for said in (
            r"^Tokens per step and request: tokens [12]\.\d",
            r"^Accepted drafts by drafter and position: mtp 1 [1-9]",
            r"^Where the experts of a step were: on the device [1-9]\d* %, in RAM [1-9]\d* %, in files 0 %",
            r"^Experts of engine 0: 13 layers; \d+ of 208 experts are on the device",
        ):
            live.wait_for_function(
                "(said) => [...document.querySelectorAll('canvas')]"
                ".some((one) => one.ariaLabel.match(said))",
                arg=said,
            )
        found = (
            "() => [...document.querySelectorAll('th')].find((one) => one.textContent === 'tier')"
            ".closest('table').querySelectorAll('td')[1].textContent"
        )
        live.wait_for_function(f"(first) => ({found})() !== first", arg=live.evaluate(found))
        assert live.locator("td", has_text="on the device").count() == 1
        live.goto("about:blank")  # before the server ends
    with start_server({"speculate": "off"}) as plain:
        live = open_page(f"{plain.url}/#live")
        live.wait_for_selector(".tiles b")
        for title in titles:
            assert live.locator("figcaption", has_text=title).filter(visible=True).count() == 0
        live.goto("about:blank")


def test_the_template_of_a_conversation_has_its_tools_and_its_thinking(page: Any) -> None:
    script_replies(page, [chunk(content="Hi."), USAGE])
    page.keyboard.press("Alt+s")
    page.locator("#settings summary", has_text="Tools").click()
    page.get_by_role("button", name="Add a tool").click()
    page.get_by_label("System prompt").fill("You are terse.")
    say(page, "Hello there")
    wait_answer(page)
    page.evaluate("location.hash = 'playground'")
    page.get_by_role("button", name="Template").click()
    page.get_by_role("button", name="Use the current conversation").click()
    page.wait_for_function(
        "() => document.querySelector('pre.output').textContent.includes('Hello there')"
    )
    seen = page.locator("pre.output").inner_text()
    assert "You are terse." in seen
    assert '"name": "add"' in seen
