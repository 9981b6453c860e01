"""Offload estimates: more of any tier is never slower, and a hand calculation agrees."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli import main
from penstock.commands.inspect import find_machine
from penstock.commands.inspect_experts import GB, STEP_BYTES, SYSTEM_BYTES, Need, Tiers, estimate
from penstock.ops.cpu import memory

NEED = Need(8 * GB, 200 * GB, 4 * GB, 3 * GB, 1 * GB)
MACHINE = Tiers(24 * GB, 64 * GB, 1000 * GB, 25 * GB, 5 * GB)


def test_a_hand_calculation() -> None:
    """Slots hold 13 of 200 GB, RAM 58, disk 129: a token reads 2.58 GB from disk."""
    found = estimate(NEED, MACHINE)
    on_gpu, in_ram = 24 * GB - 9 * GB - STEP_BYTES, 64 * GB - SYSTEM_BYTES
    assert found.shares == pytest.approx(
        {"gpu": on_gpu / 200e9, "ram": in_ram / 200e9, "disk": 1 - (on_gpu + in_ram) / 200e9}
    )
    assert found.tokens_per_s == pytest.approx(5 / (4 * found.shares["disk"]))
    assert found.limit == "disk"


@given(
    st.sampled_from(["gpu_bytes", "ram_bytes", "gpu_speed", "link_speed", "disk_speed"]),
    st.floats(1.0, 100.0),
)
def test_more_of_anything_is_never_slower(what: str, factor: float) -> None:
    before = estimate(NEED, MACHINE)
    after = estimate(NEED, replace(MACHINE, **{what: factor * getattr(MACHINE, what)}))
    assert after.tokens_per_s >= before.tokens_per_s
    assert after.prompt_tokens_per_s >= before.prompt_tokens_per_s


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({"gpu_bytes": 10 * GB}, "GPU memory: 4.0 GB more are needed"),
        ({"disk_speed": None}, "RAM: 142.0 GB more are needed, or a disk (--disk-gbs)"),
    ],
)
def test_what_is_missing_is_said(changes: dict[str, float | None], limit: str) -> None:
    found = estimate(NEED, replace(MACHINE, **changes))
    assert (found.tokens_per_s, found.limit) == (0.0, limit)


def test_experts_in_ram_take_room_for_two_layers_on_the_gpu() -> None:
    """RAM holds all experts, including those in GPU slots."""
    machine = replace(MACHINE, ram_bytes=200 * GB + SYSTEM_BYTES, disk_speed=None)
    on_gpu = 24 * GB - 9 * GB - STEP_BYTES - 2 * NEED.layer_experts
    assert estimate(NEED, machine).shares["gpu"] == pytest.approx(on_gpu / 200e9)
    assert not estimate(NEED, replace(machine, ram_bytes=machine.ram_bytes - 1)).shares
    least = 2 * NEED.layer_experts + NEED.token_experts + 9 * GB + STEP_BYTES
    found = estimate(NEED, replace(machine, gpu_bytes=least - GB))
    assert found.limit == "GPU memory: 1.0 GB more are needed"
    assert estimate(NEED, replace(machine, gpu_bytes=least)).tokens_per_s > 0


def test_a_dense_model_may_have_layers_in_ram() -> None:
    need = replace(NEED, dense=40 * GB, experts=0.0, token_experts=0.0, layer_experts=0.0)
    assert "--offload-layers" in estimate(need, MACHINE).limit
    assert "--offload-layers" not in estimate(need, replace(MACHINE, ram_bytes=8 * GB)).limit


def test_the_command_answers_for_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["inspect", "Qwen3.5-397B-A17B", "--gpu-gb", "24", "--ram-gb", "64", "--json"]
    assert main([*words, "--disk-gbs", "5"]) == 0
    rows = {row["weights"]: row for row in json.loads(capsys.readouterr().out)["on_machine"]}
    assert 1 < rows["int4"]["tokens_per_s"] < 5
    assert main(["inspect", "--ram-gb", "64"]) == 2
    assert "Add --gpu-gb" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--ram-gb", "--disk-gbs", "--link-gbs", "--gpu-gbs"])
def test_a_part_of_a_machine_is_not_ignored(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", flag, "5"]) == 2
    assert f"{flag} is given without --gpu-gb" in capsys.readouterr().err
    assert main(["inspect", "--gpu-gb", "24", flag, "inf"]) == 2
    assert "It must be a finite number." in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "least"), [("--ram-gb", "0"), ("--gpu-gb", "0.001")])
def test_the_least_size_of_a_machine_is_named(
    flag: str, least: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", flag, "-1"]) == 2
    assert f"{flag} is -1\n  It must be at least {least}." in capsys.readouterr().err


def test_a_system_that_does_not_say_how_much_ram_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    known = find_machine()
    monkeypatch.setattr(memory, "MEMORY_INFO", tmp_path / "missing")
    assert find_machine().free_bytes == known.total_bytes > known.free_bytes
