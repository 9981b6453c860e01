"""`penstock inspect --gpus`: which layouts fit, and the expected speed of each."""

from __future__ import annotations

import json

import pytest

from penstock.cli import main
from penstock.commands.layouts import read_gpus
from penstock.errors import ConfigError


def layouts_of(
    capsys: pytest.CaptureFixture[str], model: str, gpus: str
) -> list[dict[str, object]]:
    assert main(["inspect", model, "--gpus", gpus, "--json"]) == 0
    layouts: list[dict[str, object]] = json.loads(capsys.readouterr().out)["layouts"]
    return layouts


def test_a_model_of_807_gb_fits_eight_gpus_only_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    layouts = layouts_of(capsys, "Qwen3.5-397B-A17B", "8xH200")
    assert [(one["replicas"], one["tp"], "why_not" in one) for one in layouts] == [
        (8, 1, True),
        (4, 2, True),
        (2, 4, True),
        (1, 8, False),
    ]
    whole = 806e9 / 8
    held = layouts[-1]["weight_bytes"]
    assert isinstance(held, int)
    assert whole <= held < 1.01 * whole, "norms and routers are on every rank"


def test_more_ranks_read_less_each_and_wait_for_each_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    layouts = layouts_of(capsys, "Qwen3.5-27B", "4xH100")
    steps = [one["step_s"]["1"] for one in layouts]  # type: ignore[index]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] > steps[0] / 4


def test_no_layout_spreads_an_engine_over_machines(capsys: pytest.CaptureFixture[str]) -> None:
    layouts = layouts_of(capsys, "Qwen3.5-35B-A3B", "64xH200")
    assert [one["tp"] for one in layouts] == [1, 2, 4, 8]


def test_heads_that_cannot_be_split_are_in_the_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["inspect", "Qwen3.5-27B", "--gpus", "5xH100"]) == 0
    said = capsys.readouterr().out
    assert "1 x 5" in said
    assert "is not a multiple of 5" in said


@pytest.mark.parametrize("text", ["H200", "8xH300", "0xH200", "x"])
def test_gpus_are_a_number_and_a_known_name(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 8xH200"):
        read_gpus(text)
