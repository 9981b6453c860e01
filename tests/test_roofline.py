"""Model size and the lower bound of a step's time, against independent numbers."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch

from penstock.cli import main
from penstock.commands.measure import Measurement
from penstock.commands.roofline import Roofline
from penstock.models import build_model
from penstock.models.source import find_model


def test_inspect_counts_what_was_published(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "Qwen3.5-35B-A3B", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    counts = report["parameters"]
    assert counts["total"] - counts["mtp"] == pytest.approx(34.661e9, rel=1e-4)
    assert counts["active"] == pytest.approx(2.946e9, rel=1e-3)
    assert counts["experts"] == 40 * 256 * 3 * 2048 * 512
    assert counts["embedding"] == 2 * 248320 * 2048
    assert report["kv_bytes_per_token"] == 20 * 1024
    assert report["state_bytes_per_request"] == pytest.approx((60 + 1.875) * 2**20, rel=1e-3)
    assert report["dtype"] == "bfloat16"


def test_what_fits_is_what_the_memory_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "Llama-3.2-1B", "--dtype", "float32", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    budget = 0.9 * report["machine"]["free_bytes"] - report["weight_bytes"]
    for context, count in report["fits"].items():
        one = report["state_bytes_per_request"] + report["kv_bytes_per_token"] * int(context)
        assert count == max(0, budget // one)
    assert max(map(int, report["fits"])) <= report["max_context"] == 131072


def test_inspect_shows_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect"]) == 0
    said = capsys.readouterr().out
    assert "penstock-tiny" in said
    assert re.search(r"longest context +8,192 tokens", said)
    assert re.search(r"requests at a time", said)


def roofline_of(name: str, state_bytes: int = 4) -> Roofline:
    source = find_model(name)
    model = build_model(source.config, torch.bfloat16, torch.device("meta"))
    return Roofline.of(model, source.config, 2, state_bytes)


def test_decode_floor_is_the_one_computed_by_hand() -> None:
    """GB per step and distinct experts per layer of 35B-A3B at context 1536, computed
    independently.
    """
    expected = {1: 6.05, 2: 8.16, 4: 12.2, 8: 19.6, 16: 32.1, 32: 50.1, 64: 70.1}
    distinct = {1: 8.0, 2: 15.8, 4: 30.5, 8: 57.4, 16: 102, 32: 163, 64: 222}
    roofline = roofline_of("Qwen3.5-35B-A3B")
    for batch, gigabytes in expected.items():
        assert roofline.decode_bytes(batch, 1536) / 1e9 == pytest.approx(gigabytes, rel=5e-3)
        read = roofline.parameters.experts_read(batch) / (40 * 3 * 2048 * 512)
        assert read == pytest.approx(distinct[batch], rel=7e-3)


def test_half_states_save_half_of_their_traffic() -> None:
    """30 layers of 32 heads of 128 x 128 numbers, read and written: 31.5 MB a request each way."""
    whole, half = roofline_of("Qwen3.5-35B-A3B"), roofline_of("Qwen3.5-35B-A3B", state_bytes=2)
    for batch in (1, 200):
        saved = whole.decode_bytes(batch, 1536) - half.decode_bytes(batch, 1536)
        assert saved == batch * 2 * 30 * 32 * 128 * 128 * 2
    assert half.prefill_operations(1, 64) == whole.prefill_operations(1, 64)


def test_prefill_floor_turns_from_memory_to_compute() -> None:
    """At 4.3 TB/s and 800 TFLOP/s, a prompt of 35B-A3B is memory-bound up to about 2,450 tokens."""
    roofline = roofline_of("Qwen3.5-35B-A3B")
    assert roofline.prefill_bytes(1, 1024) / 1e9 == pytest.approx(68.4 - 1.56, rel=1e-3)

    def memory_over_compute(length: int) -> float:
        memory_s = roofline.prefill_bytes(1, length) / 4.3e12
        return float(memory_s / (roofline.prefill_operations(1, length) / 800e12))

    assert memory_over_compute(2300) > 1 > memory_over_compute(2600)


def test_of_the_last_layer_a_prompt_needs_keys_and_values_and_one_token() -> None:
    """35B-A3B, by hand: 2 x 2 x 256 x 2048 per layer for all tokens; queries, gates, output,
    router, shared and eight experts for the last one, and one query's attention.
    """
    roofline, length = roofline_of("Qwen3.5-35B-A3B"), 32768
    spared = 2048 * (2 * 4096 + 4096 + 256 + 1 + 3 * 512 + 8 * 3 * 512) + 2 * 2048 + 2 * 256
    assert roofline.parameters.spared == spared
    attention = 10 * length * (length + 1) // 2 - length * (length - 1) // 2
    parameters = roofline.parameters
    expected = 2 * (
        length * (parameters.active - spared - parameters.head) + spared + parameters.head
    )
    delta_rule = roofline.prefill_operations(1, length) - expected - 4 * 4096 * attention
    assert 0 < delta_rule == length * (delta_rule // length)


def test_dense_tied_model_reads_every_parameter_but_the_drafting_head() -> None:
    parameters = roofline_of("Qwen3.5-4B").parameters
    assert parameters.active == parameters.total - parameters.mtp
    assert parameters.experts == parameters.num_experts == 0


def test_measurement_reports_median_and_spread() -> None:
    seconds = tuple(0.001 * n for n in (10, 11, 12, 13, 50))
    measurement = Measurement(2, 64, 2, seconds, num_bytes=6_000_000, floor_s=0.006)
    row = measurement.as_dict()
    assert row["ms"] == 12.0
    assert row["of_floor"] == 0.5
    assert row["gb_s"] == 0.5
    assert row["spread"] > 0.5
    assert dataclasses.replace(measurement, seconds=(0.012,)).spread == 0.0
