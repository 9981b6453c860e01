"""`penstock plan`: simulated engines match measured ones, and match the engine step by step."""

from __future__ import annotations

import dataclasses
import json
import shutil
import statistics
import time
from pathlib import Path

import pytest

import penstock.planning.engine as simulated
from command_line import ROOT, fails
from packed_checkpoints import FORMATS, pack_state, plain_state, write
from penstock.cli import main
from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.eval.traces import Arrival, poisson_arrivals, read_trace
from penstock.models.source import find_model
from penstock.planning.fleet import Layout, busiest, fewest_engines, repeated, simulate_fleet, split
from penstock.planning.layouts import Unfit, possible_layouts
from penstock.planning.node import Node, NodeRun, Slo
from penstock.planning.outcome import Outcome
from penstock.planning.step_times import RESULTS, Curve, Tables
from small_models import LLAMA

MODEL = "Qwen3.5-35B-A3B"
# Step times and loads measured with the same version: newer steps are faster than in older loads.
VALIDATION = ROOT / "tests/data/validation"
TRACES = ROOT.parent / "shared/data/traces"
LIMITS = Slo(0.5, 0.03)


def layout_of(
    tp: int = 1, model: str = MODEL, results: Path = RESULTS, **settings: object
) -> Layout:
    config = EngineConfig(model=model, **{"prefix_cache": False, **settings})  # type: ignore[arg-type]
    tables = Tables.read(results)
    (found,) = possible_layouts(find_model(model), config, 8, "H200", tables, tp)
    assert isinstance(found, Layout), found
    return found


def node_of(layout: Layout, num_engines: int = 1) -> Node:
    return Node(layout.config, layout.shape, layout.times, num_engines)


def measured(file: str, **wanted: object) -> dict[str, dict[str, float]]:
    rows = json.loads((VALIDATION / f"h200/{file}.json").read_text())["rows"]
    (row,) = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    found: dict[str, dict[str, float]] = row
    return found


def means(run: NodeRun) -> tuple[float, float, float]:
    """Reply tokens per second, milliseconds to the first token, and between others."""
    num_tokens = sum(reply.num_generated for reply in run.replies)
    return (
        num_tokens / run.end_s,
        1e3 * statistics.mean(reply.ttft_s for reply in run.replies),
        1e3 * statistics.mean(reply.tpot_s for reply in run.replies),
    )


@pytest.mark.parametrize("scheme", ["bf16", "fp8", "int4"])
def test_step_times_are_the_measured_ones_at_measured_shapes(scheme: str) -> None:
    times = layout_of(quantization="none" if scheme == "bf16" else scheme).times
    tables = Tables.read()
    rows = [row for row in tables.of("decodes", MODEL, scheme) if row.length == 1536]
    assert len(rows) > 3
    for row in rows:
        seconds = times.decodes_s(row.batch, row.length * row.batch)
        assert seconds == pytest.approx(row.seconds, rel=1e-3)
    for row in tables.of("prefills", MODEL, scheme):
        seconds = times.prompts_s([(0, row.length)] * row.batch)
        assert seconds == pytest.approx(row.seconds, rel=1e-3)
    assert times.decodes_s(8, 8 * 8192) > times.decodes_s(8, 8 * 1024)


def test_of_a_shape_that_was_measured_again_the_first_row_counts(tmp_path: Path) -> None:
    shutil.copytree(VALIDATION, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "h200/decode.json"
    table = json.loads(path.read_text())
    table["rows"].append({**table["rows"][0], "ms": 99.0})
    path.write_text(json.dumps(table))
    (row,) = [
        row
        for row in Tables.read(tmp_path).of("decodes", MODEL, "bf16")
        if (row.batch, row.length) == (1, 1536)
    ]
    assert row.seconds == pytest.approx(1.9333e-3)


# Loads of `penstock bench serve` on one H200; the template adds ten tokens to a prompt.
@pytest.mark.parametrize("concurrency", [1, 2, 8, 16, 32, 64])
def test_throughput_and_pace_are_within_a_tenth_of_measured_levels(concurrency: int) -> None:
    run = node_of(layout_of(results=VALIDATION, max_model_len=40960)).play_levels(
        [Arrival(0, 1034, 1024)] * 64, concurrency
    )
    row = measured("serving", concurrency=concurrency)
    tok_s, _, tpot_ms = means(run)
    assert tok_s == pytest.approx(row["output_tok_s"], rel=0.1)
    assert tpot_ms == pytest.approx(row["tpot_ms"]["mean"], rel=0.1)


@pytest.mark.parametrize(
    ("what", "requests", "input_len", "output_len"),
    [
        ("1000 at once", 1000, 1024, 128),
        ("200 at once", 200, 1000, 2000),
        ("256 x 4k", 256, 4096, 32),
        ("64 x 32k", 64, 32768, 32),
    ],
)
def test_first_tokens_too_are_within_a_tenth_under_heavy_loads(
    what: str, requests: int, input_len: int, output_len: int
) -> None:
    layout = layout_of(results=VALIDATION, max_model_len=40960, max_rows=384)
    load = [Arrival(0, input_len + 10, output_len)] * requests
    tok_s, ttft_ms, tpot_ms = means(node_of(layout).play_levels(load, requests))
    row = measured("serving_loads", what=what)
    assert tok_s == pytest.approx(row["output_tok_s"], rel=0.1)
    assert ttft_ms == pytest.approx(row["ttft_ms"]["mean"], rel=0.1)
    assert tpot_ms == pytest.approx(row["tpot_ms"]["mean"], rel=0.1)


def test_leaps_change_nothing_but_the_time_that_a_simulation_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = poisson_arrivals(150, 12.0, 700, 90, seed=3)
    layout = layout_of()
    leaping = node_of(layout, 2).play(load)
    monkeypatch.setattr(simulated, "MAX_LEAP", 1)
    stepping = node_of(layout, 2).play(load)
    assert len(leaping.replies) == len(stepping.replies) == 150
    assert leaping.num_steps == pytest.approx(stepping.num_steps, rel=0.02)
    for one, other in zip(means(leaping), means(stepping)):
        assert one == pytest.approx(other, rel=0.02)


def test_every_token_of_every_request_is_given_once() -> None:
    load = poisson_arrivals(60, 30.0, 300, 40, seed=1)
    run = node_of(layout_of(), 3).play(load)
    assert sorted(reply.num_generated for reply in run.replies) == [40] * 60
    assert run.gaps.total() == 60 * 39
    assert {reply.engine for reply in run.replies} == {0, 1, 2}


def test_a_request_that_arrives_during_a_leap_is_seen_two_steps_later() -> None:
    layout = layout_of()
    step_s = layout.times.decodes_s(1, 500)
    run = node_of(layout).play([Arrival(0.0, 64, 1000), Arrival(0.5, 64, 2)])
    late = next(reply for reply in run.replies if reply.num_generated == 2)
    prompt_s = layout.times.prompts_s([(0, 64)], 1, 400)
    assert 0.004 + prompt_s < late.ttft_s < 0.004 + prompt_s + 2.1 * step_s


def test_more_engines_serve_a_load_sooner_and_too_few_miss_the_limits() -> None:
    layout = layout_of()
    load = poisson_arrivals(300, 60.0, 1024, 64, seed=0)
    few, many = (simulate_fleet(layout, count, load, LIMITS) for count in (1, 8))
    assert many.attainment == 1.0 > few.attainment
    needed = fewest_engines(layout, load, LIMITS, 64)
    assert needed is not None
    assert 1 < needed <= 8
    assert simulate_fleet(layout, needed, load, LIMITS).attainment >= 0.99
    assert simulate_fleet(layout, needed - 1, load, LIMITS).attainment < 0.99


def test_limits_that_no_fleet_keeps_are_reported() -> None:
    load = poisson_arrivals(20, 1.0, 1024, 8, seed=0)
    assert fewest_engines(layout_of(), load, Slo(1e-3, 1.0), 4) is None


def test_a_trial_of_many_machines_sees_the_few_requests_that_no_engine_serves_in_time() -> None:
    load = [
        Arrival(0.1 * i, 60_000 if i % 20 == 0 else 500, 4, block_tokens=512) for i in range(100)
    ]
    assert fewest_engines(layout_of(), load, LIMITS, 1024) is None


def test_machines_share_a_load_by_their_engines() -> None:
    load = poisson_arrivals(3000, 100.0, 8, 8, seed=0)
    parts = split(load, [8, 8, 4], seed=5)
    assert sorted(one.at_s for part in parts for one in part) == [one.at_s for one in load]
    assert [len(part) for part in parts] == pytest.approx([1200, 1200, 600], rel=0.15)
    layout = layout_of()
    outcome = simulate_fleet(layout, 20, load, LIMITS)
    assert len(outcome.ttfts) == 3000


def test_a_model_that_needs_eight_gpus_has_one_layout() -> None:
    config = EngineConfig(model="Qwen3.5-397B-A17B", prefix_cache=False)
    source = find_model(config.model)
    found = possible_layouts(source, config, 64, "H200", Tables.read())
    assert [(one.tp, isinstance(one, Unfit)) for one in found] == [
        (1, True),
        (2, True),
        (4, True),
        (8, False),
    ]


def test_ranks_read_less_and_pay_for_their_links() -> None:
    one, four = (layout_of(tp).times for tp in (1, 4))
    assert four.links_s(1) == pytest.approx(82 * 10e-6, rel=0.01)
    assert one.decodes_s(64, 64 * 1024) / 4 < four.decodes_s(64, 64 * 1024)
    assert four.decodes_s(64, 64 * 1024) < one.decodes_s(64, 64 * 1024)


def test_quantized_weights_leave_more_room_for_requests() -> None:
    plain, rounded = layout_of().shape.pools, layout_of(quantization="fp8").shape.pools
    assert rounded.num_pages > plain.num_pages


def test_a_quantized_checkpoint_is_planned_as_it_is_stored(tmp_path: Path) -> None:
    packed, _ = pack_state(plain_state(LLAMA), FORMATS["int4"])
    config = {**LLAMA, "quantization_config": FORMATS["int4"].quantization}
    stored = layout_of(model=str(write(tmp_path / "int4", packed, config))).times
    plain = layout_of(model=str(write(tmp_path / "plain", plain_state(LLAMA), LLAMA))).times
    assert stored.roofline.weight_bytes < 0.5 * plain.roofline.weight_bytes
    assert "in int4" in stored.source


def test_prompts_that_share_blocks_are_computed_once() -> None:
    layout = layout_of(prefix_cache=True)
    load = [Arrival(float(i), 2048, 4, (1, 2, 3, 100 + i)) for i in range(6)]
    run = node_of(layout, 2).play(load)
    cached = [reply.num_cached for reply in sorted(run.replies, key=lambda one: one.arrived_s)]
    assert cached[0] == 0
    assert all(num == 1536 for num in cached[2:]), cached
    assert len({reply.engine for reply in run.replies}) == 1, "they go where their prefix is"


def test_a_trace_may_be_repeated_and_its_busiest_stretch_found() -> None:
    trace = [Arrival(at, 1, 1) for at in (0.0, 5.0, 5.1, 5.2, 9.0)]
    twice = repeated(trace, 2)
    assert [round(one.at_s, 2) for one in twice[4:7]] == [9.0, 11.25, 16.25]
    assert [one.at_s for one in busiest(trace, 3)] == [5.0, 5.1, 5.2]


def test_curves_are_straight_between_points_and_flat_outside() -> None:
    curve = Curve.of([(1, 0.5), (4, 1.0)])
    assert [curve.at(size) for size in (0.5, 1, 2, 4, 9)] == [0.5, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("text", ["ttft=0.5", "itl=30", "p99=3ms", "ttft=1s,ttft=2s"])
def test_limits_name_what_they_limit_and_a_unit(text: str) -> None:
    with pytest.raises(ConfigError, match="--slo is"):
        Slo.parse(text)


def test_limits_are_read() -> None:
    assert Slo.parse("ttft=500ms,itl=0.03s") == LIMITS
    assert Slo.parse("itl=30ms").is_kept(99.0, 0.03)


def test_the_command_prints_a_table_and_a_line_of_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "plan.png"
    words = ["plan", MODEL, "--gpus", "2xH200", "--rate", "6", "--requests", "40"]
    assert main([*words, "--output-len", "32", "--plot", str(picture)]) == 0
    said = capsys.readouterr().out
    report = json.loads(said.splitlines()[-1])
    assert [row["engines"] for row in report["rows"]] == [2, 1]
    assert report["rows"][0]["attainment"] == 1.0
    assert report["rows"][0]["goodput_requests_s"] > 4
    assert f"Best: --tp {report['best_tp']}" in said
    assert picture.stat().st_size > 10_000


def test_a_load_that_is_too_long_for_the_model_is_refused_with_the_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["plan", MODEL, "--gpus", "1xH200", "--rate", "6", "--requests", "3"]
    picture = tmp_path / "plan.png"
    assert main([*words, "--max-model-len", "1000", "--plot", str(picture)]) == 0
    said = capsys.readouterr().out
    assert "1 x 1 refuses 3 requests: prompt and reply are longer than 1,000 tokens." in said
    assert "not even 16,384 GPUs" in said


@pytest.mark.parametrize("words", [["--tp", "4"], ["--tp", "0"], ["--gpus", "32xH200", "--tp=16"]])
def test_an_engine_is_on_one_machine_and_its_gpus_are_there(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    exit_code, said = fails(capsys, "plan", MODEL, "--rate", "3", "--gpus", "2xH200", *words)
    assert (exit_code, "one machine of 8" in said) == (1, True)


def test_a_plan_needs_one_load(capsys: pytest.CaptureFixture[str]) -> None:
    exit_code, said = fails(capsys, "plan", MODEL)
    assert (exit_code, "needs --trace or --rate" in said) == (1, True)
    _, said = fails(capsys, "plan", MODEL, "--rate", "3", "--trace", "x.csv")
    assert "both given" in said
    _, said = fails(capsys, "plan", MODEL, "--rate", "3", "--repeat", "2")
    assert "--repeat needs --trace" in said
    _, said = fails(capsys, "plan", MODEL, "--rate", "3", "--results", "/nowhere")
    assert "--results" in said


@pytest.mark.slow
def test_a_day_on_a_thousand_gpus_takes_less_than_five_minutes() -> None:
    path = TRACES / "AzureLLMInferenceTrace_conv.csv"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    day = repeated(read_trace(path, speedup=100), 24)
    started = time.monotonic()
    outcome = simulate_fleet(layout_of(), 1000, day, LIMITS)
    assert time.monotonic() - started < 300
    assert len(outcome.ttfts) == len(day) > 460_000


def test_outcomes_of_machines_add_up() -> None:
    load = poisson_arrivals(40, 20.0, 200, 20, seed=2)
    layout = layout_of()
    runs = [node_of(layout).play(load[::2]), node_of(layout).play(load[1::2])]
    together = Outcome.of(runs, LIMITS)
    apart = Outcome.of((), LIMITS)
    for run in runs:
        apart.add(Outcome.of([run], LIMITS))
    assert dataclasses.asdict(together) == dataclasses.asdict(apart)
