"""The seam between policy and device: a plan is all that crosses it."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from penstock.engine.runner import Runner
from penstock.types import Pooling, Request, StepOutput, StepPlan
from small_models import FAMILIES, make_engine, prompt, request, run

PLAIN = (int, float, str, bool, type(None))


@pytest.fixture(params=FAMILIES)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return FAMILIES[request.param]


def require_plain(value: object) -> None:
    if isinstance(value, tuple):
        for one in value:
            require_plain(one)
    elif isinstance(value, Mapping):
        require_plain((*value.keys(), *value.values()))
    elif dataclasses.is_dataclass(value):
        require_plain(tuple(getattr(value, field.name) for field in dataclasses.fields(value)))
    else:
        assert isinstance(value, PLAIN), f"a plan holds {value!r}"


@pytest.mark.parametrize("overlap", [False, True])
def test_a_plan_sent_to_another_runner_gives_the_same_tokens_there(
    config: dict[str, Any], overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, decodes, preemptions, prefix hits, every kind of sampling, scores and vectors."""
    settings: dict[str, Any] = {"max_rows": 3, "max_step_tokens": 128, "overlap": overlap}
    first, second = (make_engine(config, **settings) for _ in range(2))
    sent: list[tuple[bytes, bytes, Any]] = []
    launch = Runner.launch

    def send(runner: Runner, plan: StepPlan, *given: Any) -> Any:
        require_plain(plan)
        sent.append((pickle.dumps(plan), msgspec.msgpack.encode(plan), launch(runner, plan)))
        return sent[-1][-1]

    monkeypatch.setattr(Runner, "launch", send)
    shared, ends = prompt(150, 1), tuple(range(10))
    run(
        first,
        request("greedy", shared, max_tokens=70),
        request("hit", (*shared, *prompt(30, 2)), temperature=0.9, top_p=0.8, seed=5),
        request("biased", prompt(20, 3), logit_bias={11: 5.0}, frequency_penalty=0.5),
        request("short", prompt(1, 4), min_tokens=6, end_token_ids=ends, prompt_logprobs=2),
        Request(id="mean", token_ids=prompt(200, 5), pooling=Pooling(kind="mean")),
    )
    monkeypatch.undo()
    assert len(sent) > 20
    for pickled, packed, pending in sent:
        plan = msgspec.msgpack.decode(packed, type=StepPlan)
        assert plan == pickle.loads(pickled)
        here, there = pending.wait(), second.runner.launch(plan).wait()
        assert isinstance(there, StepOutput)
        assert here == there
