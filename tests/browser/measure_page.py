"""Measures the page in Chromium and takes its pictures: `PYTHONPATH=.:tests python -m
browser.measure_page`.

Writes results/cpu/page.json and docs/page/*.png. Replies in the pictures are scripted, to show what
is drawn.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import statistics
import subprocess
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from browser.conftest import CHROMIUMS, USAGE, chunk, say, script_replies, wait_answer
from penstock.commands.provenance import provenance
from penstock.http_client import HttpClient
from penstock.serve.page.files import FOLDER, INDEX, file_names
from serving import Server, start_server

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "page"
NUM_LOADS, NUM_REPLIES, NUM_TOKENS = 41, 12, 10_000
FRAME_EVENTS = ["devtools.timeline", "disabled-by-default-devtools.timeline.frame"]
WATCHERS, NUM_LOOKS, LOOK_S = (0, 1, 8), 5, 5.0  # of the live view
THOUGHT = "The person wants a formula, an example and a table. Short is best."
REPLY = """The sum of the first $n$ whole numbers is

$$\\sum_{i=1}^{n} i = \\frac{n(n+1)}{2}$$

because pairs from both ends add up to $n + 1$. In code:

```python
def triangle(n: int) -> int:
    return n * (n + 1) // 2  # no loop needed
```

| n | sum |
|--:|--:|
| 10 | 55 |
| 100 | 5,050 |
"""
# When the first chunk with text reached the page, and when the frame that shows it was drawn.
WATCH = """
window.seen = {};
const ask = window.fetch;
window.fetch = async (...given) => {
  const answer = await ask(...given);
  if (!String(given[0]).includes("chat/completions")) return answer;
  seen = {};
  const [ours, theirs] = answer.body.tee();
  (async () => {
    const reader = ours.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      if (!seen.arrived && value.includes('"content"')) seen.arrived = performance.now();
    }
  })();
  return new Response(theirs, { status: answer.status, headers: answer.headers });
};
new MutationObserver(() => {
  const prose = [...document.querySelectorAll(".message.assistant .prose")].at(-1);
  if (seen.arrived && !seen.asked && prose?.textContent) {
    seen.asked = true;
    requestAnimationFrame(() => setTimeout(() => (seen.shown = performance.now())));
  }
}).observe(document, { subtree: true, childList: true, characterData: true });
"""
SCROLL = """async () => {
  const list = document.querySelector("#messages");
  list.scrollTop = 0;
  for (let n = 0; n < 240; n += 1) {
    await new Promise(requestAnimationFrame);
    list.scrollTop += 60;
  }
}"""


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 1),
        "p95": round(ordered[int(0.95 * (len(ordered) - 1))], 1),
        "most": round(ordered[-1], 1),
    }


def new_page(browser: Any, url: str, **options: Any) -> Any:
    page = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options}).new_page()
    page.goto(url)
    page.wait_for_selector("#state[data-kind=ok]", state="attached")
    return page


def measure_sizes() -> dict[str, int]:
    """Sizes of all files, and of those that open the page; `sent` means compressed."""
    files = {name: (FOLDER / name).read_bytes() for name in file_names()}
    index = files[INDEX].decode()
    first = {INDEX, *re.findall(r'(?:src|href)="page/([^"]+)"', index)}
    found: dict[str, int] = {}
    for which, names in (("", set(files)), ("_to_open", first)):
        found |= {
            f"files{which}": len(names),
            f"bytes{which}": sum(len(files[name]) for name in names),
            f"bytes_sent{which}": sum(len(gzip.compress(files[name])) for name in names),
        }
    return found | {"bytes_of_maths": len(files["maths.js"])}


def measure_loads(browser: Any, url: str) -> dict[str, Any]:
    """Milliseconds until the load event, with an empty browser cache and with a full one."""
    first, again = [], []
    for _ in range(NUM_LOADS):
        page = new_page(browser, url)
        took = "() => performance.getEntriesByType('navigation')[0].loadEventEnd"
        first.append(page.evaluate(took))
        page.reload()
        again.append(page.evaluate(took))
        page.context.close()
    return {"first_ms": spread(first), "again_ms": spread(again)}


def measure_first_token(browser: Any, url: str) -> dict[str, float]:
    """Milliseconds from the arrival of the first text in the page to the end of the frame that
    shows it.
    """
    page = new_page(browser, url)
    page.evaluate(WATCH)
    waits = []
    for number in range(NUM_REPLIES):
        say(page, f"What is {number} + 26? Reply with just the number.")
        wait_answer(page, number + 1)
        page.wait_for_timeout(150)
        seen = page.evaluate("seen")
        waits.append(seen["shown"] - seen["arrived"])
    page.context.close()
    return spread(waits)


def measure_long_answer(browser: Any, url: str) -> dict[str, Any]:
    """About 10,000 tokens of Markdown: how long the page is held up while it streams, and by the
    browser's tracing, the frames of scrolling through it.
    """
    page = new_page(browser, url)
    text = (REPLY + "\n\n") * (4 * NUM_TOKENS // len(REPLY))
    pieces = [chunk(content=text[at : at + 4]) for at in range(0, len(text), 4)]
    page.evaluate(
        "() => { window.held = []; new PerformanceObserver((found) => "
        "held.push(...found.getEntries()"
        ".map((one) => one.duration))).observe({ entryTypes: ['longtask'] }); }"
    )
    script_replies(page, [*pieces, USAGE])
    started = time.monotonic()
    say(page, "Write much.")
    wait_answer(page)
    drawn_s = time.monotonic() - started
    held = page.evaluate("held") or [0.0]
    page.wait_for_timeout(1000)
    browser.start_tracing(page=page, categories=FRAME_EVENTS)
    page.evaluate(SCROLL)
    traced = json.loads(browser.stop_tracing())["traceEvents"]
    page.context.close()
    drawn = sorted(event["ts"] / 1000 for event in traced if event["name"] == "DrawFrame")
    num_dropped = sum(event["name"] == "DroppedFrame" for event in traced)
    return {
        "chunks": len(pieces),
        "characters": len(text),
        "drawn_s": round(drawn_s, 2),
        "longest_task_ms": round(max(held), 1),
        "frames_while_scrolling": {
            "drawn": len(drawn),
            "dropped": num_dropped,
            "ms_between": spread([later - now for now, later in pairwise(drawn)]),
        },
    }


def measure_live(server: Server) -> dict[str, Any]:
    """CPU time that the live view takes from the processes of an idle server, in ms per second. An
    engine's steps lose only the time of one answer per second.
    """
    pids = {"server": server.process.pid, "engine": server.engine_pid}
    found: dict[int, dict[str, list[float]]] = {n: {name: [] for name in pids} for n in WATCHERS}
    for _ in range(NUM_LOOKS):
        for num_watchers in WATCHERS:
            client = HttpClient(server.url, timeout_s=30.0)
            streams = [client.watch("/live") for _ in range(num_watchers)]
            for stream in streams:
                next(stream)
            before, started = {name: cpu_ms(pid) for name, pid in pids.items()}, time.monotonic()
            time.sleep(LOOK_S)
            for name, pid in pids.items():
                spent = cpu_ms(pid) - before[name]
                found[num_watchers][name].append(spent / (time.monotonic() - started))
            for stream in streams:
                stream.close()
    return {
        f"{num_watchers} watch": {
            f"{name}_cpu_ms_a_second": round(statistics.median(values), 2)
            for name, values in of_processes.items()
        }
        for num_watchers, of_processes in found.items()
    }


def cpu_ms(pid: int) -> float:
    """CPU time that all threads of a process have used so far."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e6


def measure_lighthouse(url: str, chromium: str | None) -> dict[str, Any] | None:
    """Lighthouse's scores out of 100, if it is installed (`npm install -g lighthouse`)."""
    program = shutil.which("lighthouse")
    if program is None:
        return None
    found: dict[str, Any] = {}
    for screen, options in {"desktop": ["--preset=desktop"], "mobile": []}.items():
        command = [program, url, "--quiet", "--output=json", "--throttling-method=provided"]
        command += ["--chrome-flags=--headless=new --no-sandbox", *options]
        environment = {**os.environ, **({"CHROME_PATH": chromium} if chromium else {})}
        said = subprocess.run(command, env=environment, capture_output=True, check=True).stdout
        report = json.loads(said)
        found["version"] = report["lighthouseVersion"]
        found["throttling"] = "none (provided)"
        found["bytes_to_open"] = round(report["audits"]["total-byte-weight"]["numericValue"])
        scores = report["categories"].items()
        found[screen] = {name: round(100 * one["score"]) for name, one in scores}
    return found


def take_pictures(browser: Any, server: Server) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    phone = {"viewport": {"width": 375, "height": 667}, "device_scale_factor": 2, "is_mobile": True}
    kinds = {"light": {}, "dark": {"color_scheme": "dark"}, "phone": phone}
    for name, options in kinds.items():
        page = new_page(browser, server.url, **options)
        script_replies(page, [chunk(reasoning_content=THOUGHT), chunk(content=REPLY), USAGE])
        say(page, "What is the sum of the first n whole numbers?")
        wait_answer(page)
        page.wait_for_timeout(600)
        save(page, name)
        page.context.close()
    with start_server({"speculate": "mtp:2", "expert_cache": "12MB"}) as drafting:
        take_live_picture(browser, drafting)
    page = new_page(browser, server.url)
    page.goto(f"{server.url}/#playground")
    page.get_by_label("Prompt", exact=True).first.fill(
        "<|im_start|>user\nWhat is a river?<|im_end|>\n<|im_start|>assistant\n"
    )
    page.locator("#view-playground .primary", has_text="Complete").click()
    page.wait_for_selector("text=perplexity")
    page.evaluate("document.querySelector('.output').scrollIntoView({ block: 'end' })")
    page.locator(".output .token").nth(3).hover()
    save(page, "playground")


def take_live_picture(browser: Any, server: Server) -> None:
    """Takes the picture from a server that drafts and offloads experts, so that every chart has
    data.
    """
    page = new_page(browser, f"{server.url}/#live", viewport={"width": 1280, "height": 2080})
    is_over = threading.Event()

    def ask(number: int) -> None:
        while not is_over.is_set():
            number += 1
            text = f"Tom has {number} marbles and buys 7 more. How many marbles does he have now?"
            messages = [{"role": "user", "content": text}]
            server.post({"messages": messages, "max_tokens": 60 + number})

    threads = [threading.Thread(target=ask, args=(10 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
        page.wait_for_timeout(12_000)
    save(page, "live")
    is_over.set()
    page.goto("about:blank")
    for thread in threads:
        thread.join()
    page.context.close()


def save(page: Any, name: str) -> None:
    page.screenshot(path=PICTURES / f"{name}.png")


def main() -> None:
    from playwright.sync_api import sync_playwright

    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUMS)), None)
    with sync_playwright() as running, start_server(engine={"max_model_len": 8192}) as server:
        browser = running.chromium.launch(executable_path=found, args=["--no-sandbox"])
        results = {
            "what": "the page in headless Chromium, beside its server and the embedded model",
            **provenance(),
            "load_average": os.getloadavg()[0],
            "command": "PYTHONPATH=.:tests python -m browser.measure_page",
            "chromium": browser.version,
            "size": measure_sizes(),
            "load": measure_loads(browser, server.url),
            "first_token_shown_after_ms": measure_first_token(browser, server.url),
            "long_answer": measure_long_answer(browser, server.url),
            "live": measure_live(server),
            "lighthouse": measure_lighthouse(f"{server.url}/", found),
        }
        (ROOT / "results" / "cpu" / "page.json").write_text(json.dumps(results, indent=1) + "\n")
        take_pictures(browser, server)


if __name__ == "__main__":
    main()
