"""Commands around the page: `serve --open`, `chat --web`, and `top` with live numbers."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from command_line import fails
from penstock.cli import main
from penstock.commands import serve, top
from penstock.config import EngineConfig, ServeConfig
from penstock.progress import OnPhase, Phase
from penstock.serve import server as server_module
from serving import FREE, MESSAGES, Server, start_server

Opened = list[str]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    addresses: Opened = []
    monkeypatch.setattr(serve.webbrowser, "open", lambda url: addresses.append(url) or True)
    return addresses


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, ServeConfig]]:
    """Servers that only report where they listen, then end."""
    configs: list[tuple[EngineConfig, ServeConfig]] = []

    def run(engine: EngineConfig, serve: ServeConfig, on_phase: OnPhase) -> None:
        configs.append((engine, serve))
        on_phase(Phase("listening", f"http://{serve.host}:{serve.port}", 1.0, 0.0))

    monkeypatch.setattr(server_module, "run", run)
    monkeypatch.setattr("penstock.serve.request_log.configure_log", lambda form: None)
    return configs


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://0.0.0.0:8000", "http://127.0.0.1:8000/"),
        ("http://[::]:81", "http://[::1]:81/"),
        ("http://[fe80::1]:81", "http://[fe80::1]:81/"),
        ("https://box.example/llm/v1", "https://box.example/llm/"),
    ],
)
def test_a_browser_is_sent_where_it_can_go(url: str, address: str) -> None:
    assert serve.page_address(url) == address


def test_serve_opens_the_page_when_it_listens_and_only_if_asked(
    started: list[Any], opened: Opened
) -> None:
    assert main(["serve", "--port", "8123"]) == 0
    assert opened == []
    assert main(["serve", "--port", "8123", "--host", "0.0.0.0", "--open"]) == 0
    assert [config.port for _, config in started] == [8123, 8123]
    assert opened == ["http://127.0.0.1:8123/"]


def test_a_page_that_is_off_is_not_opened(
    started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code, said = fails(capsys, "serve", "--open", "--no-page")
    assert exit_code == 2
    assert "--open and --no-page are both given" in said
    assert started == []


def test_chat_in_a_browser_serves_the_model_with_its_flags(
    started: list[Any], opened: Opened
) -> None:
    assert (
        main(
            [
                "chat",
                "--web",
                "--max-rows",
                "3",
                "--temperature",
                "0.5",
                "--chat-template",
                "no-think",
            ]
        )
        == 0
    )
    ((engine, serve),) = started
    assert (engine.max_rows, serve.temperature, serve.chat_template) == (3, 0.5, "no-think")
    assert opened == ["http://127.0.0.1:8000/"]


def test_chat_in_a_browser_with_a_server_that_runs_only_opens_it(
    started: list[Any], opened: Opened
) -> None:
    assert main(["chat", "--web", "--base-url", "http://box:9/v1"]) == 0
    assert (started, opened) == ([], ["http://box:9/"])


@pytest.mark.parametrize(
    "words", [["--system", "x"], ["--seed", "3"], ["--base-url", "http://x", "--top-p", "0.5"]]
)
def test_what_only_the_page_can_set_is_refused_by_name(
    words: list[str], started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code, said = fails(capsys, "chat", "--web", *words)
    assert exit_code == 2
    assert f"{words[-2]} and --web are both given" in said
    assert started == []


def test_without_a_browser_the_address_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve.webbrowser, "open", lambda url: False)
    serve.open_page("http://127.0.0.1:1").join()
    assert "open http://127.0.0.1:1/ in one" in capsys.readouterr().err


# top


def test_top_prints_the_numbers_of_a_server_once(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.post({"messages": MESSAGES, "max_tokens": 5, **FREE})
    assert main(["top", "--once", "--base-url", server.url]) == 0
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert rows["generated tokens/s"].strip() == "0"
    assert rows["running, waiting"].strip() == "0, 0"
    assert rows["pages in use"].split()[0].isdigit()
    assert "partial page" in rows["computed because"]
    assert rows["state checkpoints"].strip().isdigit()
    assert re.fullmatch(r"\d+ of [1-9]\d*", rows["prompts with a hit"].strip())
    assert re.fullmatch(r"[\d.]+ .B of [\d.]+ .B", rows["memory, fullest engine"].strip())


def test_top_shows_drafts_and_experts_of_a_server_that_has_them(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    assert main(["top", "--once", "--base-url", server.url]) == 0
    assert "experts" not in capsys.readouterr().out
    with start_server({"speculate": "mtp:1", "expert_cache": "12MB"}) as drafting:
        before = look(drafting)
        for _ in range(4):
            drafting.post({"messages": MESSAGES, "max_tokens": 40, **FREE})
        assert main(["top", "--once", "--base-url", drafting.url]) == 0
        rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
        assert re.match(r"[12]\.\d\d", rows["tokens per step"].strip())
        assert re.fullmatch(r"mtp \d+%", rows["drafts accepted"].strip())
        assert re.fullmatch(r"[1-9][\d.]+% of [\d,]+", rows["experts on the device"].strip())
        assert rows["missed experts"].strip() == "100.0% in RAM, 0.0% in files"
        fetched = r"[\d.]+ \S*B/s, [\d.]+% of the time waiting"
        assert re.fullmatch(fetched, rows["experts fetched"].strip())
        output = io.StringIO()
        Console(file=output, width=120).print(top._screen([before, look(drafting)]))
    shown = output.getvalue()
    assert re.search(r"experts fetched +[1-9][\d.]* .B/s, [\d.]+% of the time", shown)
    map = shown.partition("experts of engine 0 by layer")[2].splitlines()[1:]
    assert [line.split()[0] for line in map if line.strip()] == [str(n) for n in range(13)]
    assert {"█", "░"} <= set("".join(map))


def test_a_heat_map_of_many_layers_and_experts_fits_a_terminal() -> None:
    rows = [bytes(127 if expert == 255 else 0 for expert in range(256)) for _ in range(40)]
    encoded = [base64.b64encode(row).decode() for row in rows]
    _, *lines = top.heat_map({"replica": 0, "expert_heat": encoded})
    assert len(lines) == 16
    assert all(line.endswith("█") and line.count("█") == 1 and len(line) == 67 for line in lines)
    assert top.heat_map({"replica": 0, "expert_heat": []}) == []


def look(server: Server) -> dict[str, Any]:
    with server.http.stream("GET", f"{server.url}/live") as answer:
        event: dict[str, Any] = json.loads(next(answer.iter_lines()).removeprefix("data: "))
    return event


def test_the_memory_of_an_engine_is_what_the_system_says_of_its_process(server: Server) -> None:
    (engine,) = look(server)["replicas"]
    status = Path(f"/proc/{server.engine_pid}/status").read_text()
    (kilobytes,) = re.findall(r"VmRSS:\s+(\d+) kB", status)
    assert engine["memory_used"] == pytest.approx(1024 * int(kilobytes), rel=0.1)
    assert engine["memory_total"] > engine["memory_used"] > 0


def test_the_screen_of_top_shows_engines_and_speed(server: Server) -> None:
    from rich.console import Console

    event = look(server)
    later = {
        **event,
        "time": event["time"] + 2.0,
        "generated_tokens": event["generated_tokens"] + 100,
    }
    output = io.StringIO()
    Console(file=output, width=120).print(top._screen([event, later]))
    shown = output.getvalue()
    assert "penstock-tiny on cpu" in shown
    assert "generated tokens/s" in shown
    assert shown.split("generated tokens/s")[1].split()[0] == "50"
    assert "ready" in shown
    assert "█" in shown


def test_a_missing_server_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    exit_code, said = fails(capsys, "top", "--base-url", "http://127.0.0.1:9")
    assert exit_code == 1
    assert "127.0.0.1:9" in said


def test_quantiles_are_of_what_came_since() -> None:
    before = {"bounds": [0.1, 0.2, 0.5], "counts": [10, 10, 10, 10]}
    now = {"bounds": [0.1, 0.2, 0.5], "counts": [10, 13, 14, 15]}
    assert top.quantile_bound(before, now, 0.5) == 0.2
    assert top.quantile_bound(before, now, 0.8) == 0.5
    assert top.quantile_bound(before, now, 0.95) == float("inf")
    assert top.quantile_bound(now, now, 0.5) is None
