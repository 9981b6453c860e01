"""`penstock bench step --drafts`: what it reports, and that it refuses to time wrong replies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.cli import main
from penstock.commands import bench_drafts
from penstock.commands.bench_drafts import draw_accepted, expected_tokens
from penstock.commands.roofline import Roofline
from penstock.engine.logits_engine import LogitsEngine
from penstock.engine.row_table import RowTable
from penstock.errors import PenstockError
from penstock.ops import AcceptedDrafts
from small_models import make_engine
from test_draft_graphs import with_fixed_steps
from test_speculation import WITH_HEAD

ACCEPTANCE = (0.85, 0.75, 0.65)


@pytest.fixture
def short_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_drafts, "NUM_ROWS", 2)
    monkeypatch.setattr(bench_drafts, "NUM_TOKENS", 8)
    monkeypatch.setattr(bench_drafts, "PROMPT_TOKENS", 40)


@pytest.mark.usefixtures("short_check")
def test_it_runs_to_its_end_and_reports_every_shape(tmp_path: Path) -> None:
    file = tmp_path / "drafts.json"
    shapes = ["--batch", "1,3", "--context", "40", "--repeats", "2", "--warmup", "1"]
    given = ["--drafts", "1,2", "--acceptance", "0.9,0.8", "--device", "cpu", "--json", str(file)]
    assert main(["bench", "step", *shapes, *given]) == 0
    report = json.loads(file.read_text())
    kinds = [one["kind"] for one in report["check"]]
    assert kinds == ["plain", "the head's drafts", "right drafts"]
    rows = report["rows"]
    assert [(row["batch"], row["drafts"]) for row in rows] == [
        (batch, drafts) for batch in (1, 3) for drafts in (0, 1, 2)
    ]
    for row in rows:
        assert {"model", "scheme", "batch", "ms_per_token", "acceptance"} <= row.keys()
        assert row["acceptance"] == [0.9, 0.8][: row["drafts"]]
        assert row["tokens_per_step"] == pytest.approx((1, 1.9, 2.62)[row["drafts"]])
        assert row["ms_per_token"] == pytest.approx(
            row["ms_per_step"] / row["tokens_per_step"], rel=1e-2
        )
        assert (row["ms_per_draft"] is None) == (row["drafts"] == 0)
        assert row["bytes_of_floor"] >= 1.0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--drafts", "4"], "--acceptance has 3 probabilities"),
        (["--drafts", "0"], "--drafts is 0"),
        (["--drafts", "1", "--acceptance", "1.5"], "between 0 and 1"),
        (["--drafts", "1", "--sampled"], "--sampled"),
    ],
)
def test_shapes_that_cannot_be_timed_are_refused(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "step", *given]) != 0
    assert said in capsys.readouterr().err


def test_drafts_are_a_flag_of_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "prefill", "--drafts", "2"]) != 0
    assert "--drafts" in capsys.readouterr().err


def test_the_draw_has_the_chances_that_were_given() -> None:
    drawn = draw_accepted(ACCEPTANCE, 3, 20_000, seed=1)
    assert drawn == draw_accepted(ACCEPTANCE, 3, 20_000, seed=1)
    assert 1 + sum(drawn) / len(drawn) == pytest.approx(expected_tokens(ACCEPTANCE, 3), abs=0.03)
    assert expected_tokens(ACCEPTANCE, 3) == pytest.approx(1 + 0.85 + 0.6375 + 0.414375)
    assert expected_tokens(ACCEPTANCE, 0) == 1


def drafting(**settings: Any) -> LogitsEngine:
    engine = make_engine(WITH_HEAD, speculate="mtp:3", max_rows=4, prefix_cache=False, **settings)
    with_fixed_steps(engine)
    return LogitsEngine(engine)


@pytest.mark.usefixtures("short_check")
@pytest.mark.parametrize("deterministic", [True, False])
def test_right_replies_pass_the_check(deterministic: bool) -> None:
    plain, head, right = bench_drafts.check_replies(drafting(deterministic=deterministic))
    assert plain.num_same == head.num_same == right.num_same == 16
    assert right.drafted > 0
    assert right.accepted == right.drafted
    assert plain.distance < 0.01


@pytest.mark.usefixtures("short_check")
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_journal_that_is_not_replayed_is_found(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state without the accepted tokens makes the right tokens as unlikely as any others."""
    accept = RowTable.accept_places

    def forget(table: RowTable, *given: Any) -> AcceptedDrafts:
        accepted = accept(table, *given)
        table.num_accepted.zero_()
        return accepted

    monkeypatch.setattr(RowTable, "accept_places", forget)
    with pytest.raises(PenstockError, match="right drafts differs from that of plain decoding"):
        bench_drafts.check_replies(drafting(deterministic=deterministic))


def test_bytes_of_a_step_with_drafts_are_those_of_its_states_once() -> None:
    """One draft at 64 rows of Qwen3.5-35B-A3B: within 5 % of weights, states and KV read once."""
    from penstock.models.presets import PRESETS
    from penstock.models.qwen3_5 import build

    config = PRESETS["Qwen3.5-35B-A3B"]
    model = build(config, torch.bfloat16, "meta", with_drafting_head=True)
    roofline = Roofline.of(model, config, 2, 4)
    head_bytes = 65536 * 2048 * 2
    for num_drafts, accepted in ((1, 0.85), (3, 1.9)):
        found = roofline.draft_bytes(64, 1536, num_drafts, accepted, head_bytes)
        plain = roofline.draft_bytes(64, 1536, 0, 0, head_bytes)
        assert plain.read == plain.floor == roofline.decode_bytes(64, 1536)
        assert found.floor > plain.floor
        assert found.read / found.floor < (1.05 if num_drafts == 1 else 1.15)
