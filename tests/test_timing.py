"""`--timing`: a line a second that says where steps spend their time, and changes no token."""

from __future__ import annotations

import io
import re

import pytest

from penstock.engine import timing
from small_models import SHALLOW_FAMILIES, SHALLOW_MOE, make_engine, prompt, request, run, tokens_of


@pytest.mark.parametrize("family", SHALLOW_FAMILIES)
def test_phases_are_named_and_tokens_stay(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "LINE_S", 0.0)
    given = [request("a", prompt(40)), request("b", prompt(3))]
    plain = run(make_engine(SHALLOW_FAMILIES[family]), *given)
    engine = make_engine(SHALLOW_FAMILIES[family], timing=True)
    timer, lines = engine.runner.timer, io.StringIO()
    assert timer is not None
    timer.to = lines
    timed = run(engine, *given)
    for one in given:
        assert tokens_of(timed[one.id]) == tokens_of(plain[one.id])
    said = lines.getvalue().splitlines()
    assert len(said) >= 10
    found = re.findall(r"([\d.]+) (\w+)", said[-1].partition("ms per step: ")[2])
    spent = {name: float(number) for number, name in found}
    assert spent["projection"] > 0
    assert spent["attention"] > 0
    for line in said:
        assert re.match(
            r"timing: [\d.]+ steps/s, ms per step: .*; slowest layer \d+: [\d.]+$", line
        )


def test_experts_and_their_fetches_are_phases() -> None:
    engine = make_engine(SHALLOW_MOE, timing=True, expert_cache="300kB")
    timer = engine.runner.timer
    assert timer is not None
    run(engine, request("a", prompt(30)))
    timer.collect()
    for phase in ("route", "expert", "io", "attention", "projection"):
        assert timer.seconds[phase] > 0
    assert set(timer.by_layer) >= {0, 1, 2, 3}
