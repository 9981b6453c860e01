"""check_server: a conforming server passes, and each fault fails the check made for it."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from judged_server import HANG_S, TINY, judged_server
from penstock.cli import main
from penstock.eval.check_server import CHECKS, judge
from penstock.eval.probe import Probe
from penstock.eval.recount import TokenCounter
from penstock.eval.stream_client import Target
from serving import eventually

CROWD = ("64 at once", "leaving frees the place")
STREAMS = {"stream equals whole", "stream chunks", "stream usage"}
WITH_USAGE = {
    "usage adds up",
    "usage follows the prompt",
    "finish_reason length",
    "finish_reason stop",
    "stop string",
    "four stop strings",
    "stream usage",
    "prompt recount",
    "completion recount",
}
EVERYTHING_ASKED = {check.name for check in CHECKS} - {
    *CROWD, "health", "model list", "still healthy", "too long a prompt",
}  # fmt: skip

SAYS_IT_THINKS = {"required fields", "usage adds up", "no thinking", "completion recount"}

FAULTS: dict[str, set[str]] = {
    "": set(),
    "unhealthy": {"health", "still healthy"},
    "no models": {"model list"},
    "odd ids": {"required fields"},
    "no index": {"required fields", "several choices", "lm-eval's request"},
    "picky about names": {"any model name"},
    "chooses by default": {"greedy by default"},
    "no usage": WITH_USAGE,
    "adds up wrongly": {"usage adds up"},
    "counts no prompts": {"usage follows the prompt", "prompt recount"},
    "ignores limits": {"finish_reason length"},
    "always stop": {"finish_reason length"},
    "never ends": {"finish_reason stop"},
    "ignores stops": {"stop string", "four stop strings"},
    "one stop string": {"four stop strings"},
    "ignores seeds": {"seed"},
    "one choice": {"several choices"},
    "stream differs": {"stream equals whole"},
    "odd chunks": {"stream chunks"},
    "no stream usage": {"stream usage"},
    "no done": STREAMS,
    "garbage in streams": STREAMS,
    "breaks off": STREAMS,
    "thinks": {"no thinking"},
    "always thinks": {"no thinking", "thinking off"},
    "only thinks": SAYS_IT_THINKS | {"thinking off"},
    "inflates": {"finish_reason length", "completion recount"},
    "500 for faults": {"faulty requests", "too long a prompt"},
    "faults in html": {"faulty requests", "too long a prompt"},
    "any path": {"unknown path"},
    "500": EVERYTHING_ASKED | {"too long a prompt"},
    "drops": EVERYTHING_ASKED | {"too long a prompt"},
    "talks nonsense": EVERYTHING_ASKED | {"too long a prompt"},
}


def probe_of(url: str, timeout_s: float = 10.0) -> Probe:
    counter = TokenCounter.load(str(TINY))
    return Probe(url, "judged", timeout_s=timeout_s, counter=counter)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_found_by_its_own_line(fault: str) -> None:
    with judged_server(fault) as server:
        probe = probe_of(server.url)
        verdicts = [judge(check, probe) for check in CHECKS if check.name not in CROWD]
    broken = {verdict.check.name for verdict in verdicts if verdict.mark == "FAIL"}
    assert broken == FAULTS[fault], "\n".join(map(str, verdicts))
    assert all("saw" in verdict.words for verdict in verdicts if verdict.mark == "FAIL")
    assert not any("cannot be read" in verdict.words for verdict in verdicts), "\n".join(
        map(str, verdicts)
    )


def test_a_server_that_only_thinks_fails_with_that_reason() -> None:
    with judged_server("only thinks") as server:
        probe = probe_of(server.url)
        verdicts = [judge(check, probe) for check in CHECKS if check.name in SAYS_IT_THINKS]
    for verdict in verdicts:
        assert "an empty content and only a thought" in verdict.words
        assert "--no-enable-thinking" in verdict.words


def crowd_verdicts(*faults: str, places: int = 200, timeout_s: float = 10.0) -> dict[str, str]:
    with judged_server(*faults, places=places, seconds_a_token=0.004) as server:
        probe = probe_of(server.url, timeout_s)
        crowd = [check for check in CHECKS if check.name in CROWD]
        return {
            verdict.check.name: verdict.mark for verdict in (judge(each, probe) for each in crowd)
        }


def test_a_crowd_finds_places_and_gives_them_back() -> None:
    assert crowd_verdicts() == dict.fromkeys(CROWD, "PASS")


def test_too_few_places_are_found() -> None:
    assert crowd_verdicts("few places", places=8)["64 at once"] == "FAIL"


def test_replies_that_are_mixed_up_are_found() -> None:
    with judged_server("mixes up") as server:
        (check,) = [check for check in CHECKS if check.name == "64 at once"]
        verdict = judge(check, probe_of(server.url))
    assert verdict.mark == "FAIL"
    assert "as when sent alone" in verdict.words


def test_places_that_are_never_given_back_are_found() -> None:
    verdicts = crowd_verdicts("keeps places", places=70, timeout_s=1.0)
    assert verdicts == {"64 at once": "PASS", "leaving frees the place": "FAIL"}


def test_a_server_that_hangs_fails_every_line_in_time() -> None:
    with judged_server("hangs") as server:
        probe = probe_of(server.url, timeout_s=0.05)
        verdicts = [judge(check, probe) for check in CHECKS if check.name not in CROWD]
    assert {
        verdict.check.name for verdict in verdicts if verdict.mark == "FAIL"
    } >= EVERYTHING_ASKED
    assert any("No end after 0.05 s" in verdict.words for verdict in verdicts)


def test_a_judged_server_leaves_no_thread_that_renders_during_other_tests() -> None:
    before = set(threading.enumerate())
    with judged_server("hangs") as server:
        probe = probe_of(server.url, timeout_s=0.05)
        (check,) = [check for check in CHECKS if check.name == "seed"]
        judge(check, probe)
        assert set(threading.enumerate()) - before
    assert eventually(lambda: not set(threading.enumerate()) - before, HANG_S / 4)


def test_the_command_prints_a_line_for_each_check_and_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = tuple(check for check in CHECKS if check.name in ("health", "seed", "prompt recount"))
    monkeypatch.setattr("penstock.eval.check_server.CHECKS", few)
    written = tmp_path / "new" / "verdicts.json"
    with judged_server("ignores seeds") as server:
        words = ["--base-url", f"{server.url}/v1", "--output", str(written)]
        assert main(["eval", "check-server", *words]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "[PASS] T10 health: GET /health answered 200"
    assert lines[1].startswith("[FAIL] T13 seed: saw ")
    assert lines[2].startswith("[SKIP] T15 prompt recount: not tested: needs --tokenizer")
    assert lines[-1].startswith("1 passed, 1 failed, 1 not tested")
    report = json.loads(written.read_text())
    assert [check["verdict"] for check in report["promises"]] == ["pass", "fail", "skip"]
    assert not report["passed"]


def test_the_command_does_not_wait_forever_for_a_server_that_hangs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with judged_server("hangs") as server:
        assert main(["eval", "check-server", "--base-url", server.url, "--timeout", "0.1"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    assert len(lines) == len(CHECKS)
    assert [line[:6] for line in lines[:5]] == ["[PASS]", "[PASS]", *["[FAIL]"] * 3]
    assert all(line.endswith("not tried: the 3 checks before it hung") for line in lines[5:])


def test_a_missing_server_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "check-server", "--base-url", "http://127.0.0.1:9"]) == 1
    assert "error: Nothing answers at http://127.0.0.1:9" in capsys.readouterr().err


def test_a_server_that_is_asked_in_the_wrong_protocol_gets_one_error_and_no_verdicts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with judged_server() as server:
        url = server.url.replace("http://", "https://")
        assert main(["eval", "check-server", "--base-url", url]) == 1
    said = capsys.readouterr()
    what, why, todo = said.err.splitlines()
    assert (what, said.out) == (f"error: {url} does not answer to https", "")
    assert "SSL" in why
    assert "http://" in todo


def test_the_address_may_end_in_v1() -> None:
    with judged_server() as server:
        assert Target.of(f"{server.url}/v1/").path == "/v1/chat/completions"
