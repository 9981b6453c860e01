"""The chat, as a person uses it: with the model that comes along, and with scripted replies."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from browser.conftest import (
    USAGE,
    chunk,
    reload,
    say,
    script_replies,
    serve_sources,
    wait_answer,
    with_fields,
)
from serving import Server

pytestmark = pytest.mark.browser
CONTROL_IDS = range(2527, 2560)  # of the embedded model's tokenizer
QUESTION = "What is 17 + 26? Reply with just the number."
CALL = chunk(
    tool_calls=[
        {"index": 0, "id": "call_1", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
    ]
)


def open_settings(page: Any, section: str = "") -> None:
    page.keyboard.press("Alt+s")
    if section:
        page.locator("#settings summary", has_text=section).click()


# With the embedded model


@pytest.mark.everyday
def test_a_question_is_answered_and_still_there_after_a_reload(page: Any) -> None:
    say(page, QUESTION)
    assert wait_answer(page).locator(".prose").inner_text() == "43"
    assert "tokens" in page.locator(".message.assistant footer small").inner_text()
    reload(page)
    assert wait_answer(page).locator(".prose").inner_text() == "43"
    assert page.locator("#talks .open").inner_text() == QUESTION


def test_the_draft_is_counted_in_tokens_of_the_whole_prompt(page: Any) -> None:
    page.fill("#draft", "Hello there")
    page.wait_for_function(
        "() => /^\\d+ of 4,096 tokens$/.test(document.querySelector('#draft-note').textContent)"
    )
    page.fill("#draft", "river " * 5000)
    page.wait_for_function(
        "() => document.querySelector('#draft-note').textContent.includes('too long')"
    )


def test_the_draft_says_how_much_of_the_prompt_is_cached(page: Any) -> None:
    say(page, "Here is a story about a slow river and its weir. " * 8)
    wait_answer(page)
    page.fill("#draft", "And then?")
    page.wait_for_function(
        "() => /tokens, \\d+ cached$/.test(document.querySelector('#draft-note').textContent)"
    )
    promised = page.locator("#draft-note").inner_text().split()[-2]
    page.keyboard.press("Enter")
    wait_answer(page, 2)
    said = page.locator(".message.assistant footer small").last.inner_text()
    assert f", {promised} cached" in said


@pytest.mark.everyday
def test_an_answer_can_be_stopped_and_continued(page: Any) -> None:
    open_settings(page)
    page.get_by_label("Max tokens").fill("4000")
    # Control tokens, which the model writes when its answer is complete, are not shown.
    never = dict.fromkeys(map(str, CONTROL_IDS), -100)
    page.route("**/v1/chat/completions", with_fields(logit_bias=never))
    say(page, "Tell me about rivers.")
    page.wait_for_function(
        "() => document.querySelector('.message.assistant .prose')?.innerText.length > 5"
    )
    assert page.locator("#send").inner_text() == "Stop"
    page.keyboard.press("Escape")
    answer = wait_answer(page)
    assert "stopped" in answer.locator("footer small").inner_text()
    before = answer.locator(".prose").inner_text()
    page.get_by_label("Max tokens").fill("12")
    answer.get_by_role("button", name="Continue").click()
    page.wait_for_function(
        "(before) => document.querySelector('.message.assistant[aria-busy=false] .prose')"
        "?.innerText.length > before",
        arg=len(before),
    )
    after = page.locator(".message.assistant .prose").inner_text()
    assert after.startswith(before[: len(before) // 2])
    assert page.locator(".message.assistant").count() == 1


def test_the_next_message_waits_for_the_answer_and_outlives_a_reload(page: Any) -> None:
    page.route("**/v1/chat/completions", with_fields(ignore_eos=True, max_tokens=200))
    say(page, "Tell me about rivers.")
    page.wait_for_function(
        "() => document.querySelector('.message.assistant .prose')?.innerText.length > 5"
    )
    say(page, "And then?")  # Enter does not stop what is being read
    assert "still being generated" in page.locator("#draft-note").inner_text()
    assert "200 tokens" in wait_answer(page).locator("footer small").inner_text()
    reload(page)
    assert page.locator("#draft").input_value() == "And then?"
    page.keyboard.press("Enter")
    wait_answer(page, 2)
    reload(page)
    assert page.locator("#draft").input_value() == ""


def test_an_answer_goes_on_while_another_conversation_is_looked_at(page: Any) -> None:
    page.route("**/v1/chat/completions", with_fields(ignore_eos=True, max_tokens=150))
    say(page, "Tell me about rivers.")
    page.wait_for_function(
        "() => document.querySelector('.message.assistant .prose')?.innerText.length > 5"
    )
    page.keyboard.press("Alt+n")
    assert page.locator(".message").count() == 0
    page.locator("#talks .open").click()
    before = page.locator(".message.assistant .prose").text_content()
    page.wait_for_function(
        "(n) => document.querySelector('.message.assistant .prose').textContent.length > n",
        arg=len(before),
    )
    wait_answer(page)
    assert "150 tokens" in page.locator(".message.assistant footer small").text_content()


def test_a_conversation_that_is_deleted_during_an_answer_is_gone(page: Any) -> None:
    page.route("**/v1/chat/completions", with_fields(ignore_eos=True, max_tokens=400))
    page.on("dialog", lambda dialog: dialog.accept())
    say(page, "Tell me about rivers.")
    page.wait_for_function(
        "() => document.querySelector('.message.assistant .prose')?.innerText.length > 5"
    )
    page.locator("#talks li").hover()
    page.locator("#talks").get_by_label("Delete").click()
    page.wait_for_function("() => document.querySelectorAll('.message').length === 0")
    page.wait_for_timeout(1200)
    assert page.locator("#talks .open").count() == 0
    reload(page)
    page.wait_for_selector("#talks .hint")
    assert page.locator("#talks .open").count() == 0


@pytest.mark.everyday
def test_an_edited_question_is_a_branch_and_the_first_one_stays(page: Any) -> None:
    say(page, QUESTION)
    wait_answer(page)
    page.fill("#draft", "")
    page.focus("#draft")
    page.keyboard.press("ArrowUp")
    page.locator("textarea.edit").fill("What is 20 + 3? Reply with just the number.")
    page.keyboard.press("Enter")
    page.wait_for_function(
        "() => document.querySelector('.message.assistant .prose')?.innerText === '23'"
    )
    assert "2 of 2" in page.locator(".message.user .branches").inner_text()
    page.get_by_label("Previous branch").click()
    assert page.locator(".message.assistant .prose").text_content() == "43"
    page.locator(".message.assistant").get_by_role("button", name="Regenerate").click()
    page.wait_for_selector(".message.assistant[aria-busy=false] .branches")
    assert "2 of 2" in page.locator(".message.assistant .branches").inner_text()


@pytest.mark.everyday
def test_an_answer_is_held_to_the_schema_of_the_conversation(page: Any) -> None:
    open_settings(page, "Response format")
    schema = {
        "type": "object",
        "properties": {"sum": {"type": "integer", "maximum": 99}},
        "required": ["sum"],
        "additionalProperties": False,
    }
    page.get_by_label("JSON schema", exact=True).fill(json.dumps(schema))
    say(page, "What is 17 + 26?")
    assert set(json.loads(wait_answer(page).locator(".prose pre").inner_text())) == {"sum"}
    written = '{"sum": "*not* _emphasis_ <b> $x$"}'
    script_replies(page, [*(chunk(content=letter) for letter in written), USAGE])
    say(page, "Again")
    assert wait_answer(page, 2).locator(".prose pre").inner_text() == written
    reload(page)
    assert wait_answer(page, 2).locator(".prose pre").inner_text() == written


def test_a_schema_that_is_no_json_is_reported_before_the_request(page: Any) -> None:
    asked = script_replies(page, [chunk(content="no")])
    open_settings(page, "Response format")
    page.get_by_label("JSON schema", exact=True).fill('{"type":')
    assert "Not JSON yet" in page.locator("#settings").inner_text()
    say(page, "What is 17 + 26?")
    page.wait_for_function(
        "() => document.querySelector('#settings-problem').textContent.includes('not JSON')"
    )
    assert asked == []


@pytest.mark.everyday
def test_a_tool_that_must_be_called_is_called_and_answered_by_hand(page: Any) -> None:
    open_settings(page, "Tools")
    page.get_by_role("button", name="Add a tool").click()
    page.get_by_label("Function (JavaScript)").fill("")
    page.get_by_label("Tool choice", exact=True).select_option("required")
    say(page, "Add 17 and 26.")
    call = wait_answer(page).locator(".call")
    assert "add" in call.locator("figcaption").inner_text()
    assert set(json.loads(call.locator("pre").inner_text())) == {"a", "b"}
    call.get_by_role("textbox").fill("43")
    call.get_by_role("button", name="Answer by hand").click()
    answer = wait_answer(page, 2)
    assert page.locator(".message.tool .result").inner_text() == "43"
    assert answer.locator(".call").count() == 0


# With scripted replies


def test_a_thought_is_folded_with_its_time_and_tokens(page: Any) -> None:
    script_replies(page, [chunk(reasoning_content="hidden thing"), chunk(content="Done."), USAGE])
    say(page, "Think.")
    answer = wait_answer(page)
    assert answer.locator(".thought summary").inner_text().startswith("Thought for ")
    assert "4 tokens" in answer.locator(".thought summary").inner_text()
    assert not answer.get_by_text("hidden thing").is_visible()
    answer.locator(".thought summary").click()
    assert answer.get_by_text("hidden thing").is_visible()
    assert "16 cached" in answer.locator("footer small").inner_text()


MARKDOWN = """# Title

Some **bold** and `code` & &lt;tags&gt;, $a^2$ and a price of $5 or $6.

| a | b |
|---|--:|
| 1 | 2 |

```python
def f(x): return "<b>"
```

1. one
2. two

$$\\int_0^1 x\\,dx$$
"""


@pytest.mark.everyday
def test_markdown_becomes_code_with_colours_tables_lists_and_maths(page: Any) -> None:
    pieces = [chunk(content=MARKDOWN[at : at + 3]) for at in range(0, len(MARKDOWN), 3)]
    script_replies(page, [*pieces, USAGE])
    say(page, "Write.")
    prose = wait_answer(page).locator(".prose")
    page.wait_for_selector(".prose figure.code .hl-kwd")
    page.wait_for_function("() => document.querySelectorAll('.prose math').length === 2")
    assert page.locator(".math-block math").count() == 1
    assert prose.locator("h3").inner_text() == "Title"
    assert prose.locator("p").first.inner_text().startswith("Some bold and code & <tags>,")
    assert prose.locator("td.to-right").inner_text() == "2"
    assert prose.locator("ol li").all_inner_texts() == ["one", "two"]
    assert "$5 or $6" in prose.inner_text()
    assert prose.locator("pre").inner_text() == 'def f(x): return "<b>"'
    prose.get_by_role("button", name="Copy").click()
    page.wait_for_function("() => document.querySelector('#announcer').textContent === 'Copied.'")


@pytest.mark.everyday
def test_a_function_in_the_sandbox_answers_a_call_and_the_model_goes_on(page: Any) -> None:
    asked = script_replies(page, [CALL, USAGE], [chunk(content="It is 5."), USAGE])
    open_settings(page, "Tools")
    page.get_by_role("button", name="Add a tool").click()
    say(page, "Add 2 and 3.")
    wait_answer(page, 2)
    assert page.locator(".message.tool .result").inner_text() == "5"
    assert asked[1]["messages"][-1] == {"role": "tool", "tool_call_id": "call_1", "content": "5"}
    assert asked[1]["messages"][-2]["tool_calls"][0]["function"]["name"] == "add"


def test_a_function_answers_the_call_of_the_embedded_model(page: Any) -> None:
    open_settings(page, "Tools")
    page.get_by_role("button", name="Add a tool").click()
    page.get_by_label("Tool choice", exact=True).select_option("required")
    say(page, "Add 17 and 26.")
    wait_answer(page, 2)
    call = json.loads(page.locator(".call pre").inner_text())
    assert page.locator(".message.tool .result").inner_text() == str(call["a"] + call["b"])
    assert page.locator(".message.assistant").last.locator(".prose").inner_text()


def test_a_function_that_ends_late_answers_in_no_other_conversation(page: Any) -> None:
    asked = script_replies(page, [CALL, USAGE], [chunk(content="It is 5."), USAGE])
    open_settings(page, "Tools")
    page.get_by_role("button", name="Add a tool").click()
    slow = "({ a, b }) => new Promise((done) => setTimeout(done, 600, a + b))"
    page.get_by_label("Function (JavaScript)").fill(slow)
    say(page, "Add 2 and 3.")
    wait_answer(page)
    page.keyboard.press("Alt+n")
    page.wait_for_timeout(1000)
    assert page.locator(".message").count() == 0
    assert len(asked) == 1
    page.locator("#talks .open").click()
    page.get_by_role("button", name="Run the function").click()
    wait_answer(page, 2)
    assert page.locator(".message.tool .result").inner_text() == "5"


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("() => { while (true); }", "did not finish within"),
        ("() => fetch('/health').then((r) => r.text())", "Error"),
        ("() => parent.document.title", "Error"),
        ("() => localStorage.length", "Error"),
        ("() => { syntax", "Error"),
        ("async () => ({ a: [1, null] })", '{"a":[1,null]}'),
    ],
)
def test_a_function_of_a_tool_reaches_nothing_and_ends(page: Any, code: str, result: str) -> None:
    serve_sources(page)
    answered = page.evaluate(
        "async (code) => (await import('/page/tools.js')).runTool(code, '{}')", code
    )
    assert result in answered


@pytest.mark.everyday
def test_conversations_are_found_exported_and_imported(page: Any, tmp_path: Path) -> None:
    script_replies(page, [chunk(content="The answer has a needle in it."), USAGE])
    say(page, "First question")
    wait_answer(page)
    page.keyboard.press("Alt+n")
    script_replies(page, [chunk(content="Other."), USAGE])
    say(page, "Second question")
    wait_answer(page)
    page.keyboard.press("Control+k")
    page.fill("#search", "NEEDLE")
    assert page.locator("#talks .open").all_inner_texts() == ["First question"]
    page.fill("#search", "")
    with page.expect_download() as waiting:
        page.click("#export")
    waiting.value.save_as(tmp_path / "talks.json")
    page.on("dialog", lambda dialog: dialog.accept())
    for left in (1, 0):
        page.locator("#talks li").first.hover()
        page.locator("#talks").get_by_label("Delete").first.click()
        page.wait_for_function(
            "(left) => document.querySelectorAll('#talks .open').length === left", arg=left
        )
    page.set_input_files("#import-input", tmp_path / "talks.json")
    page.wait_for_function("() => document.querySelectorAll('#talks .open').length === 2")
    page.locator("#talks .open", has_text="First question").click()
    assert "needle" in page.locator(".message.assistant .prose").text_content()


def test_an_exported_conversation_comes_back_with_tools_numbers_and_what_was_left_out(
    page: Any, tmp_path: Path
) -> None:
    script_replies(page, [CALL, USAGE], [chunk(content="It is 5."), USAGE])
    open_settings(page, "Tools")
    page.get_by_role("button", name="Add a tool").click()
    say(page, "Add 2 and 3.")
    wait_answer(page, 2)
    say(page, "Again?")
    wait_answer(page, 3)
    serve_sources(page)
    page.evaluate(
        "async () => { const store = await import('/page/store.js');"
        " const [talk] = await store.loadAll();"
        " talk.firstSent = Object.values(talk.messages).find((one) => one.content === 'Again?').id;"
        " await store.save(talk); }"
    )
    reload(page)
    before = page.locator("#messages").inner_text()
    assert page.locator(".message.left-out").count() == 4
    with page.expect_download() as waiting:
        page.click("#export")
    waiting.value.save_as(tmp_path / "talks.json")
    page.set_input_files("#import-input", tmp_path / "talks.json")
    page.wait_for_function("() => document.querySelectorAll('#talks .open').length === 2")
    assert page.locator("#messages").inner_text() == before
    assert "Result of add" in before
    assert page.locator(".message.left-out").count() == 4


def test_what_one_tab_keeps_another_shows_and_does_not_overwrite(page: Any, server: Server) -> None:
    say(page, QUESTION)
    wait_answer(page)
    other = page.context.new_page()
    other.goto(server.url)
    other.locator("#talks .open").click()
    assert wait_answer(other).locator(".prose").inner_text() == "43"
    say(page, "What is 20 + 3? Reply with just the number.")
    wait_answer(page, 2)
    other.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    wait_answer(other, 2)
    script_replies(other, [chunk(content="Third."), USAGE])
    say(other, "And now?")
    wait_answer(other, 3)
    reload(page)
    assert wait_answer(page, 3).locator(".prose").text_content() == "Third."


def test_a_text_file_is_sent_along_and_another_is_refused_by_name(
    page: Any, tmp_path: Path
) -> None:
    asked = script_replies(page, [chunk(content="Read."), USAGE])
    (tmp_path / "notes.txt").write_text("remember the milk")
    (tmp_path / "<img src=x onerror=alert(1)>.bin").write_bytes(b"\0\1\2")
    page.set_input_files("#file-input", list(tmp_path.iterdir()))
    page.wait_for_selector("#files li")
    assert page.locator("#files li").all_inner_texts() == ["notes.txt ×"]
    assert "is not a text file" in page.locator("#announcer").inner_text()
    say(page, "What should I buy?")
    wait_answer(page)
    assert (
        asked[0]["messages"][-1]["content"]
        == "notes.txt:\n\nremember the milk\n\nWhat should I buy?"
    )


@pytest.mark.parametrize("place", ["#draft", "#talks", "#view-playground"])
def test_a_file_that_is_dropped_anywhere_goes_along(page: Any, place: str) -> None:
    if place == "#view-playground":
        page.evaluate("location.hash = 'playground'")
    page.wait_for_selector(place, state="attached")
    dropped = page.evaluate_handle(
        "() => { const given = new DataTransfer();"
        " given.items.add(new File(['remember the milk'], 'notes.txt')); return given; }"
    )
    page.dispatch_event(place, "dragover", {"dataTransfer": dropped})
    assert page.locator("body.dropping").count() == 1
    page.dispatch_event(place, "drop", {"dataTransfer": dropped})
    page.wait_for_selector("#files li")
    assert page.locator("#files li").all_inner_texts() == ["notes.txt ×"]
    assert page.locator("body.dropping").count() == 0
    assert page.locator("#draft").is_visible()


def test_a_file_that_is_pasted_goes_along_and_pasted_text_is_text(page: Any) -> None:
    paste = """(fill) => {
      const clipboardData = new DataTransfer();
      if (fill === "file") clipboardData.items.add(new File(["milk"], "notes.txt"));
      else clipboardData.setData("text/plain", "milk");
      const event = new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true });
      return document.querySelector("#draft").dispatchEvent(event);
    }"""
    assert page.evaluate(paste, "text") is True  # the browser's own paste goes on
    assert page.evaluate(paste, "file") is False
    page.wait_for_selector("#files li")
    assert page.locator("#files li").all_inner_texts() == ["notes.txt ×"]


def test_what_was_asked_can_be_copied_as_code_that_runs(page: Any, server: Server) -> None:
    script_replies(page, [chunk(content="Hi."), USAGE])
    open_settings(page)
    page.get_by_label("Max tokens").fill("3")
    say(page, 'It\'s me: \\ "quoted", $HOME `x`')
    wait_answer(page).get_by_role("button", name="Copy as").click()
    shown = page.locator("#copy-dialog pre")
    assert f"curl -N {server.url}/v1/chat/completions" in shown.inner_text()
    for name, command in (
        ("curl", ["bash", "-c"]),
        ("Python", [sys.executable, "-c"]),
        ("JavaScript", ["node", "--input-type=module", "-e"]),
    ):
        page.get_by_role("button", name=name, exact=True).click()
        if shutil.which(command[0]) and (name != "curl" or shutil.which("curl")):
            ran = subprocess.run([*command, shown.inner_text()], capture_output=True, text=True)
            assert ran.returncode == 0, ran.stderr
            assert "chat.completion.chunk" in ran.stdout
            assert "[DONE]" in ran.stdout
