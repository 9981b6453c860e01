"""Short requests automatically go before bulk, and bulk gets its share of the time.

Tested with steps of one second and 16 prompt tokens, and in simulated time of an H200.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fake_runner import Setup, World
from interactive_load import NUM_BULK, Load, StepTime, Times, percentile
from penstock.config import EngineConfig
from penstock.engine import bulk_turns
from penstock.errors import ConfigError
from penstock.eval.traces import poisson_arrivals
from penstock.planning.engine import Reply
from penstock.types import Request, StepPlan
from scripted_server import scripted_server
from small_models import SHALLOW_MOE, make_engine, run, tokens_of
from test_fairness import LONG, ROOMY, plans_of
from test_plan import layout_of, node_of
from test_scheduler import ask, prompt

KINDS: list[tuple[str, Callable[[Reply], bool]]] = [
    ("short", lambda one: len(one.request.token_ids) == 300),
    ("bulk", lambda one: len(one.request.token_ids) == 4000),
]
SCRIPT = Path(__file__).parents[1] / "scripts" / "measure_interactive.py"


def p99(times: Times) -> tuple[float, float]:
    return percentile(times.to_first, 0.99), percentile(times.whole, 0.99)


def test_among_32_bulk_prompts_short_requests_take_at_most_half_longer_than_without() -> None:
    """The same arrivals, five per second, with and without bulk; the 99th percentile. Without
    priority it was 21 times.
    """
    step_time = StepTime()
    alone = Load(0, 250, 60.0, seed=1).run(step_time)
    among = Load(NUM_BULK, 250, 60.0, seed=1, bulk_share=EngineConfig().bulk_share).run(step_time)
    assert len(alone.short.whole) == len(among.short.whole) == 250
    to_first, whole = (a / b for a, b in zip(p99(among.short), p99(alone.short)))
    assert whole <= 1.5
    assert to_first <= 1.6
    assert among.bulk_tokens_per_s > 20_000  # 41,000 without short ones


def has_long(world: World, plan: StepPlan) -> bool:
    rows = {one.row for name, one in world.sequences.items() if name.startswith("long")}
    return any(row.row in rows for row in plan.rows)


def steps_beside_short_ones(world: World, num_steps: int) -> list[bool]:
    """Whether bulk took part, for each of the first steps that had a short request."""
    took_part = []
    for number in range(num_steps):
        if number % 3 == 0:
            world.submit(ask(f"short{number}", prompt(4, seed=number), max_tokens=6))
        plan = world.step()
        assert plan is not None
        took_part.append(has_long(world, plan))
    return took_part


@pytest.mark.parametrize(
    ("share", "depth", "decodes"),
    [
        (0.1, 0, False),
        (0.8, 0, False),
        (0.1, 0, True),
        (0.8, 0, True),
        (0.25, 1, False),
        (0.5, 1, True),
    ],
)
def test_bulk_has_its_share_of_the_time_however_many_short_ones_come(
    share: float, depth: int, decodes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it prefills and while it decodes; more only when it has waited for long."""
    monkeypatch.setattr(bulk_turns, "PATIENCE_S", 1000.0)
    monkeypatch.setattr(bulk_turns, "MAX_PASSED_S", 1000.0)
    world = World(Setup(**ROOMY, bulk_share=share, depth=depth))
    for i in range(2):
        request = ask(f"long{i}", prompt(40 if decodes else LONG, seed=i), max_tokens=300)
        world.submit(request)
    for _ in range(6 if decodes else 1):
        world.step()
    took_part = steps_beside_short_ones(world, 60)
    for end in range(1, 60):
        assert sum(took_part[:end]) >= share * end - 3, took_part
    if depth == 0:  # a step that is planned ahead does not know the duration of the one before
        assert sum(took_part) <= share * 60 + 4
    world.run()


def test_bulk_that_needs_more_than_its_share_does_not_queue_up() -> None:
    """Simulated time of an H200: there is always a short request, and bulk needs a third of the
    time. With a share of a tenth, the last of 90 prompts waited 49 s.
    """
    shorts = poisson_arrivals(540, 6.0, 300, 200, seed=1)
    bulk = poisson_arrivals(90, 1.0, 4000, 200, seed=2)
    layout = layout_of(bulk_share=0.1)
    load = sorted([*shorts, *bulk], key=lambda one: one.at_s)
    replies = node_of(layout).play(load).replies
    waits = {kind: [one.ttft_s for one in replies if is_kind(one)] for kind, is_kind in KINDS}
    assert {kind: len(found) for kind, found in waits.items()} == {"short": 540, "bulk": 90}
    assert max(waits["bulk"]) < 3.0
    assert percentile(waits["short"], 0.99) < 0.15


def test_bulk_that_was_passed_by_for_long_waits_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_turns, "PATIENCE_S", 1000.0)
    monkeypatch.setattr(bulk_turns, "MAX_PASSED_S", 20.0)
    world = World(Setup(**ROOMY, bulk_share=0.001))
    world.submit(ask("long", prompt(LONG), max_tokens=300))
    took_part = steps_beside_short_ones(world, 60)
    assert took_part.index(True, 3) in range(40, 45), took_part  # a step takes half a second
    assert all(took_part[45:]), took_part
    world.run()


def test_among_many_short_replies_a_few_long_prompts_decode_in_every_step() -> None:
    world = World(Setup(**ROOMY, bulk_share=0.01))
    for i in range(2):
        world.submit(ask(f"long{i}", prompt(40, seed=i), max_tokens=60))
    while len(world.replies.get("long1", [])) < 2:
        world.step()
    for i in range(5):
        world.submit(ask(f"short{i}", prompt(4, seed=9 + i), max_tokens=60))
    while len(world.replies.get("short4", [])) < 2:
        world.step()
    before = [len(world.replies[f"long{i}"]) for i in range(2)]
    for _ in range(8):
        world.step()
    assert len(world.replies["long0"]) == before[0] + 8
    assert len(world.replies["long1"]) < before[1] + 8  # one for every four of the others
    world.run()


def test_no_row_that_decodes_or_waits_starves() -> None:
    """Long prompts that wait, and decode beside short replies, are served in the end."""
    world = World(Setup(**{**ROOMY, "max_rows": 3}, bulk_share=0.25))
    for i in range(3):
        world.submit(ask(f"long{i}", prompt(LONG, seed=i), max_tokens=4))
    num_steps = 0
    while len([name for name in world.finishes if name.startswith("long")]) < 3:
        world.submit(ask(f"s{num_steps}", prompt(4, seed=num_steps), max_tokens=4))
        world.step()
        num_steps += 1
    assert num_steps <= 3 * (LONG // 8) * 4 / 3 / 0.25 + 30
    world.run(max_steps=5000)


def test_a_short_prompt_has_the_next_step_to_itself() -> None:
    world = World(Setup(**ROOMY, bulk_share=0.25))
    for i in range(8):
        world.submit(ask(f"long{i}", prompt(LONG, seed=i), max_tokens=4))
    for _ in range(3):
        world.step()
    world.submit(ask("short", prompt(12, seed=99), max_tokens=2))
    plan = world.step()
    assert plan is not None
    assert [row.num_tokens for row in plan.rows] == [12]
    world.run()


def test_the_reply_to_a_short_prompt_is_interactive_for_its_first_tokens_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bulk_turns, "INTERACTIVE_TOKENS", 8)
    world = World(Setup(**ROOMY, bulk_share=0.25))
    world.submit(ask("long", prompt(LONG), max_tokens=100))
    world.submit(ask("chatty", prompt(4, seed=1), max_tokens=200))
    while len(world.replies["chatty"]) < 9:
        world.step()
    for _ in range(20):
        plan = world.step()
        assert plan is not None
        assert has_long(world, plan)
    world.run()


CROWDS = {
    "bulk": [ask(str(i), prompt(LONG - 7 * i, seed=i), max_tokens=6) for i in range(8)],
    "short": [ask(str(i), prompt(3 + i % 12, seed=i), max_tokens=40) for i in range(20)],
    "one after the other": [
        ask("a", prompt(9), max_tokens=3),
        ask("b", prompt(100, seed=1), max_tokens=3),
    ],
}


@pytest.mark.thinned
@pytest.mark.parametrize("crowd", CROWDS)
@pytest.mark.parametrize("mixed", [None, 8])
def test_where_bulk_and_short_ones_do_not_meet_plans_are_the_same(
    crowd: str, mixed: int | None
) -> None:
    def planned(share: float) -> list[list[tuple[int, int, int]]]:
        setup = Setup(**ROOMY, mixed_step_tokens=mixed, bulk_share=share)
        if crowd != "one after the other":
            return plans_of(CROWDS[crowd], setup)
        world = World(setup)
        for request in CROWDS[crowd]:
            world.submit(request)
            world.run()
        return [[(row.row, row.start, row.num_tokens) for row in plan.rows] for plan in world.plans]

    assert planned(0.25) == planned(1.0)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_engine_that_pauses_bulk_says_the_same(overlap: bool) -> None:
    def replies(share: float) -> dict[str, list[int]]:
        engine = make_engine(
            SHALLOW_MOE, max_step_tokens=64, overlap=overlap, bulk_share=share, max_model_len=512
        )
        requests: list[Request] = [
            ask(f"long{i}", prompt(200 + i, seed=i), max_tokens=12) for i in range(2)
        ]
        requests += [ask(f"short{i}", prompt(9, seed=9 + i), max_tokens=20) for i in range(2)]
        return {id: tokens_of(deltas) for id, deltas in run(engine, *requests).items()}

    assert replies(0.25) == replies(1.0)


def test_an_engine_does_not_plan_behind_a_bulk_step_while_short_ones_come() -> None:
    """So a request that arrives during the step is in the next one."""
    engine = make_engine(
        SHALLOW_MOE, max_step_tokens=64, overlap=True, bulk_share=0.25, max_model_len=512
    )
    engine.submit(ask("long", prompt(400), max_tokens=4))
    engine.submit(ask("short", prompt(9), max_tokens=60))
    while not (engine.policy.scheduler.holds_planning and engine._pending is not None):
        engine.step()
    engine.step()
    assert engine._pending is None
    engine.submit(ask("late", prompt(9, seed=5), max_tokens=1))
    engine.step()
    assert "late" in engine.policy.scheduler.admitted_ids


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, float("nan")])
def test_a_share_is_more_than_nothing_and_at_most_all(share: float) -> None:
    with pytest.raises(ConfigError, match="bulk_share"):
        EngineConfig(bulk_share=share)


def test_a_machine_that_stalls_in_a_bulk_step_does_not_hold_up_bulk() -> None:
    world = World(Setup(**ROOMY, bulk_share=0.25))
    world.submit(ask("long0", prompt(LONG), max_tokens=4))
    for number in range(40):
        if number % 3 == 0:
            world.submit(ask(f"early{number}", prompt(4, seed=number), max_tokens=6))
        plan = world.scheduler.plan()
        assert plan is not None
        output, is_bulk = world.runner.launch(plan), has_long(world, plan)
        world.now_s += 1000.0 if is_bulk else 0.5
        world.scheduler.commit(output)
        if is_bulk and number > 3:
            break
    took_part = steps_beside_short_ones(world, 20)
    assert any(took_part), "it pays for the whole stall"


@pytest.mark.slow
def test_the_script_sends_the_same_short_requests_with_and_without_bulk(tmp_path: Path) -> None:
    words = [
        "--short",
        "30",
        "4",
        "--bulk",
        "200",
        "300",
        "--num-bulk",
        "3",
        "--num-short",
        "8",
        "--rate",
        "40",
    ]
    file = tmp_path / "interactive.json"
    with scripted_server(seconds_a_token=0.002) as server:
        command = [
            sys.executable,
            str(SCRIPT),
            "--base-url",
            server.url,
            *words,
            "--json",
            str(file),
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
    lengths = [body["max_tokens"] for body in server.bodies]
    assert lengths.count(4) == 3 + 2 * 8
    assert lengths.count(300) >= 1 + 2 * 3
    assert len({json.dumps(body) for body in server.bodies}) == len(server.bodies), (
        "a prompt was sent twice"
    )
    report = json.loads(file.read_text())
    ratio = report["among_bulk"]["whole_ms"]["p99"] / report["alone"]["whole_ms"]["p99"]
    assert report["p99_ratio"]["whole_ms"] == pytest.approx(ratio, abs=0.001)
    assert min(report["bulk_tok_s"].values()) > 0
