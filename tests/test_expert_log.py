"""The expert log: reads back the experts that an engine used; its statistics match a hand count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.errors import CheckpointError, ConfigError
from penstock.offload.expert_log import (
    ExpertLog,
    Log,
    hit_rate,
    layered_hit_rate,
    lru_hit_rate,
    read_log,
    repeated_share,
    top_share,
    working_set,
)
from small_models import HYBRID_MOE, make_engine, prompt, request, run

# Three steps through two layers of four experts.
LOG = Log(2, 4, [(0, [0, 1]), (1, [2]), (0, [0, 3]), (1, [2]), (0, [1, 3]), (1, [0])])


def test_a_hand_count() -> None:
    assert [len(step) for step in LOG.steps] == [3, 3, 3]
    assert working_set(LOG, 1) == 3
    assert working_set(LOG, 2) == (4 + 5) / 2
    assert working_set(LOG, 3) == 5
    assert repeated_share(LOG) == 3 / 6
    assert top_share(LOG, 0.5) == 8 / 9
    assert layered_hit_rate(LOG, 8) == 1  # all are there from the start
    assert layered_hit_rate(LOG, 4) == (2 + 0 + 1 + 1 + 1 + 0) / 9  # the last one was evicted first
    assert lru_hit_rate(LOG, 8) == hit_rate(LOG, 8) == 4 / 9  # each expert is missed once


def test_an_engine_writes_what_it_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "experts.log"
    engine = make_engine(HYBRID_MOE, expert_cache="300kB", expert_log=str(path))
    run(engine, request("one", prompt(1), max_tokens=9))
    assert engine.expert_store is not None
    stats = engine.expert_store.stats()
    num_slots = engine.expert_store.num_slots
    engine.expert_store.close()
    log = read_log(path)
    assert (log.num_layers, log.num_experts, len(log.steps)) == (4, 8, 9)
    assert all(len(experts) == 3 for _, experts in log.turns)
    assert hit_rate(log, num_slots) == stats["hits"] / (stats["hits"] + stats["misses"])
    assert main(["inspect", "experts", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    rates = [row["hit_rate"] for row in report["hit_rates"]]
    assert rates == sorted(rates)
    png = tmp_path / "curves.png"
    assert main(["inspect", "experts", str(path), "--png", str(png)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_log_that_ends_within_a_line_is_read_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "experts.log"
    log = ExpertLog(path, 2, 4)
    log.add(0, [1, 2])
    log.close()
    path.write_text(path.read_text() + "1 9")
    assert read_log(path).turns == [(0, [1, 2])]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Line 1"),
        ("hello\n", "Line 1"),
        ('{"layers": 0, "experts": 4}\n', "Line 1: there are no layers"),
        ('{"layers": 2, "experts": 4}\n2 0\n0 0\n', "Line 2: there is no layer 2"),
        ('{"layers": 2, "experts": 4}\n0 4\n0 0\n', "Line 2: there are 4 experts"),
        ('{"layers": 2, "experts": 4}\n0 1 1\n0 0\n', "Line 2: an expert is listed twice"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "log"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=words):
        read_log(path)


def test_an_engine_goes_on_without_a_log_that_cannot_be_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = ExpertLog(Path("/dev/full"), 2, 4)
    for _ in range(100_000):
        log.add(0, [1, 2])
    log.close()
    assert caplog.messages == ["/dev/full ends here: No space left on device"]


def test_two_engines_do_not_write_one_log(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--replicas", "2", "--expert-log", "log"]) == 1
    assert "--expert-log is log, and --replicas is 2" in capsys.readouterr().err


def test_a_resident_model_has_no_log(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="all experts are on the device"):
        make_engine(HYBRID_MOE, expert_log=str(tmp_path / "log"))
