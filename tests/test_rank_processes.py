"""Rank processes start and end with their engine, and its error names the rank that failed."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.engine import rank_group
from penstock.errors import ConfigError, EngineDeadError
from penstock.llm import LLM
from penstock.types import SamplingParams
from penstock.wire import RANKS_PREFIX
from serving import MESSAGES, Server, child_pids, command_of, eventually, is_alive, start_server
from two_layers import two_layers

SHORT = SamplingParams(max_tokens=8, ignore_eos=True)
PROMPT = "Once upon a time there was"


def rank_pids(parent: int) -> list[int]:
    return [pid for pid in child_pids(parent) if b"penstock.engine.rank" in command_of(pid)]


def new_llm(tp: int) -> LLM:
    return LLM(two_layers(), device="cpu", memory_gb=0.05, max_model_len=512, tp=tp)


def test_ranks_say_what_one_says_and_end_with_their_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the path of TMPDIR is too long for a socket."""
    (expected,) = new_llm(1).generate(PROMPT, SHORT)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 100)))
    (tmp_path / ("x" * 100)).mkdir()
    llm = new_llm(2)
    (pid,) = rank_pids(os.getpid())
    (found,) = llm.generate(PROMPT, SHORT)
    assert found.token_ids == expected.token_ids
    llm.engine.close()
    assert not is_alive(pid)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (signal.SIGKILL, "Its process ended (killed by SIGKILL)."),
        (signal.SIGSTOP, "It has not answered for"),
    ],
)
def test_a_rank_that_is_lost_is_named_and_nothing_is_left(
    sent: signal.Signals, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_group, "PING_INTERVAL_S", 0.2)
    llm = new_llm(2)
    monkeypatch.setattr(rank_group, "MAX_SILENCE_S", 1.0)
    (pid,) = rank_pids(os.getpid())
    os.kill(pid, sent)
    with pytest.raises(EngineDeadError) as error:
        llm.generate(PROMPT, SHORT)
    assert error.value.what == "Rank 1 of 2 stopped"
    assert why in error.value.why
    assert not is_alive(pid)


def test_a_model_that_cannot_be_split_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_group.RankGroup, "start", None)
    with pytest.raises(ConfigError, match="tp is 300, but the model has 8 DeltaNet value heads"):
        new_llm(300)


def test_a_rank_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    monkeypatch.setattr(rank_group, "module_command", lambda *_: command)
    with pytest.raises(EngineDeadError) as error:
        new_llm(2)
    assert error.value.what == "Rank 1 of 2 stopped"
    assert error.value.why == "It ended (exit code 3)."


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder in which processes create their sockets."""
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    engine = {"model": two_layers(), "tp": 2}
    with start_server(engine=engine, serve={"hang_timeout": 10.0}) as running:
        yield running


def test_a_server_replaces_an_engine_whose_rank_died(server: Server, folder: Path) -> None:
    """It also removes the sockets of the dead engine's ranks, whichever of them was killed."""

    def has_folders_of(num_engines: int) -> bool:
        return len(list(folder.glob(f"{RANKS_PREFIX}*"))) == num_engines

    body = {"messages": MESSAGES, "max_tokens": 8, "ignore_eos": True}
    before = server.post(body).json()["choices"][0]["message"]["content"]
    (old,) = rank_pids(server.engine_pid)
    os.kill(old, signal.SIGKILL)
    assert eventually(lambda: "Rank 1 of 2 stopped" in server.health().text, timeout_s=30.0)
    assert eventually(lambda: server.health().status_code == 200, timeout_s=60.0)
    assert has_folders_of(1)
    assert server.post(body).json()["choices"][0]["message"]["content"] == before
    (new,) = rank_pids(server.engine_pid)
    os.kill(server.engine_pid, signal.SIGKILL)
    assert eventually(lambda: not is_alive(new), timeout_s=10.0)
    assert not is_alive(old)
    assert eventually(lambda: server.health().status_code == 200, timeout_s=60.0)
    assert has_folders_of(1)
