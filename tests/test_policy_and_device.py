"""The boundary between policy and device: only a plan crosses it, and it has nothing that only the
device knows.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
import torch

from penstock.engine.graphs import DecodeGraphs, DecodeStep
from penstock.engine.runner import Runner
from penstock.types import PageUpdate, Pooling, Request, RowPlan, StepOutput, StepPlan
from small_models import SHALLOW_FAMILIES, make_engine, prompt, request, run, tokens_of

PLAIN = (int, float, str, bool, type(None))


@pytest.fixture(params=SHALLOW_FAMILIES)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return SHALLOW_FAMILIES[request.param]


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


@pytest.mark.thinned
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


@pytest.mark.thinned
@pytest.mark.parametrize("captured", [False, True])
def test_one_decode_plan_serves_every_step_because_the_device_knows_where_it_starts(
    config: dict[str, Any], captured: bool
) -> None:
    """It has row and slots but no position; tested across a page boundary, alone or padded."""
    token_ids, num_steps = prompt(60, 1), 10
    asked = request("a", token_ids, max_tokens=num_steps + 1, logprobs=None)
    expected = tokens_of(run(make_engine(config), asked)["a"])
    runner = make_engine(config).runner
    table = runner.rows
    if captured:
        runner.graphs = EagerGraphs(DecodeStep(runner.model, runner.caches, table, 4, True))  # type: ignore[assignment]
    pages = (PageUpdate(2, 0, (3, 5)),)
    start = StepPlan(0, (RowPlan(2, 0, token_ids, True, slot=1),), page_updates=pages)
    seen = [runner.launch(start).wait().token_ids[2]]
    decode = StepPlan(1, (RowPlan.decode(2, slot=1, initial_slot=1),))
    pending = [runner.launch(decode) for _ in range(num_steps)]
    seen += [one.wait().token_ids[2] for one in pending]
    assert seen == [(token_id,) for token_id in expected]
    assert table.context_len[2] == len(token_ids) + 1 + num_steps
    assert (table.context_len[table.padding_row], table.last_token[table.padding_row]) == (1, 0)


class EagerGraphs:
    """Replaces `DecodeGraphs` without the graph."""

    size_for = DecodeGraphs.size_for

    def __init__(self, step: DecodeStep) -> None:
        self._steps = {step.size: step}

    def replay(self, rows: tuple[RowPlan, ...], size: int, mode: Any) -> torch.Tensor:
        self._steps[size].load(rows)
        return self._steps[size].run(mode)[: len(rows)].clone()


def test_the_device_decides_when_a_reply_is_long_enough_to_end() -> None:
    """The host only bounds it: a resumed reply has tokens that this engine never sampled."""
    ends = tuple(range(11, 320, 2))
    asked = request("a", prompt(20, 1), min_tokens=6, max_tokens=40, end_token_ids=ends)
    reply = tokens_of(run(make_engine(SHALLOW_FAMILIES["llama"]), asked)["a"])
    assert 6 <= len(reply) < 11, "an end comes as soon as it may"
    resumed = dataclasses.replace(
        asked, token_ids=(*asked.token_ids, *reply[:5]), num_resumed_tokens=5
    )
    assert tokens_of(run(make_engine(SHALLOW_FAMILIES["llama"]), resumed)["a"]) == reply[5:]
