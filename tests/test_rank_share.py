"""One rank's shard of a step, timed alone: `penstock bench step --tp`, and NCCL in CUDA graphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import penstock.engine.device_part as device_part
from penstock.cli import main
from penstock.commands.layouts import GPUS, num_collectives
from penstock.commands.measure import Measurement
from penstock.commands.rank_share import Links
from penstock.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.runner import Runner
from penstock.models.source import ModelSource, find_model
from penstock.ops.cuda.all_reduce import EMPTY, OneShot, buffer_words
from penstock.parallel.links import GroupLinks, NoLinks
from penstock.planning.step_times import Tables
from penstock.types import KVSpec, StateSpec
from small_models import HYBRID_MOE, prompt, request, run, tokens_of

# Query, KV, key and value heads and expert width per rank, by number of GPUs.
SHARES = {
    ("Qwen3.5-35B-A3B", 2): (8, 1, 8, 16, 256),
    ("Qwen3.5-35B-A3B", 4): (4, 1, 4, 8, 128),
    ("Qwen3.5-35B-A3B", 8): (2, 1, 2, 4, 64),
    ("Qwen3.5-122B-A10B", 4): (8, 1, 4, 16, 256),
    ("Qwen3.5-397B-A17B", 8): (4, 1, 2, 8, 128),
}


def folder(tmp_path: Path, **changes: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({**HYBRID_MOE, **changes}))
    return tmp_path


def report_of(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], str]:
    assert main(words) == 0
    said = capsys.readouterr().out
    report: dict[str, Any] = json.loads(said.splitlines()[-1])
    return report, said


@pytest.mark.parametrize("scheme", ["none", "fp8"])
def test_a_rank_is_timed_alone_and_its_links_are_added(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, scheme: str
) -> None:
    words = ["--batch", "1,3", "--context", "40", "--repeats", "2", "--device", "cpu"]
    words += ["--random-weights", "--quantization", scheme]
    model = str(folder(tmp_path))
    report, said = report_of(
        capsys, "bench", "step", "-m", model, "--tp", "2", "--all-reduce-us", "7", *words
    )
    assert "one rank, links at 7 us" in " ".join(said.split())
    assert [(row["tp"], row["batch"], row["collectives"]) for row in report["rows"]] == [
        (2, 1, 10),
        (2, 3, 10),
    ]
    for row in report["rows"]:
        assert row["links_ms"] == pytest.approx(10 * 7e-3, rel=0.01)
        assert row["projected_ms"] == pytest.approx(row["own_ms"] + row["links_ms"], abs=1e-3)
        assert row["scheme"] == ("bf16" if scheme == "none" else "fp8")
    assert all(check["op_error"] < 1e-2 for check in report["checks"])
    whole, _ = report_of(capsys, "bench", "step", "-m", model, *words)
    assert report["weight_bytes"] < 0.7 * whole["weight_bytes"]


def test_a_rank_with_whole_experts_is_timed_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--tp", "2", "--ep", "--batch", "2", "--context", "40", "--repeats", "2"]
    report, _ = report_of(
        capsys, "bench", "step", "-m", str(folder(tmp_path)), "--random-weights", *words,
        "--device", "cpu",
    )  # fmt: skip
    (row,) = report["rows"]
    assert (row["tp"], row["ep"]) == (2, True)


def test_prompts_of_a_rank_send_their_bytes_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--tp", "2", "--batch", "1", "--context", "64", "--repeats", "2", "--device", "cpu"]
    report, _ = report_of(
        capsys, "bench", "prefill", "-m", str(folder(tmp_path)), "--random-weights", *words
    )
    (row,) = report["rows"]
    assert row["links_ms"] > 10 * 10e-3
    assert row["tokens"] == 64


def test_bench_engine_times_all_ranks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--tp", "2", "--batch", "2", "--context", "16", "--repeats", "2", "--device", "cpu"]
    report, _ = report_of(
        capsys, "bench", "engine", "-m", str(folder(tmp_path)), "--random-weights", *words
    )
    (row,) = report["rows"]
    assert row["ms"] > 0
    assert "own_ms" not in row


def test_links_cost_two_all_reduces_a_layer_and_two_more() -> None:
    links = Links(tp=8, num_layers=60, hidden_size=4096, element_bytes=2, all_reduce_us=10.0)
    assert links.seconds(1) == pytest.approx(1.22e-3, rel=0.01)
    sent_s = 122 * 2 * 7 / 8 * 1000 * 8192 / GPUS["H200"].link_bytes_per_s
    assert links.seconds(1000) == pytest.approx(1.22e-3 + sent_s)
    row = links.dict_of(Measurement(1, 1536, 1, (3e-3,), 10, 1e-3), "M", "bf16", False)
    assert row["projected_ms"] == pytest.approx(3.0 + 1e3 * links.seconds(1), abs=1e-3)


def test_measured_shares_are_what_a_plan_reads(tmp_path: Path) -> None:
    links = Links(tp=8, num_layers=60, hidden_size=4096, element_bytes=2, all_reduce_us=10.0)
    shapes = [Measurement(batch, 1536, batch, (3e-3,), 10, 1e-3) for batch in (1, 8)]
    rows = [links.dict_of(shape, "Qwen3.5-397B-A17B", "bf16", False) for shape in shapes]
    for name in ("decode", "decode_long", "models", "prefill"):
        table = {"model": "M", "rows": []}
        (tmp_path / "h200").mkdir(exist_ok=True)
        (tmp_path / f"h200/{name}.json").write_text(json.dumps(table))
    (tmp_path / "h200/quantized.json").write_text(json.dumps({"rows": [], "prefill": {"rows": []}}))
    rows.append({**rows[0], "ep": True, "batch": 2})
    (tmp_path / "h200/parallel.json").write_text(json.dumps({"rows": rows}))
    found = Tables.read(tmp_path).of("decodes", "Qwen3.5-397B-A17B", "bf16", tp=8)
    assert [(row.batch, row.seconds) for row in found] == [(1, 3e-3), (8, 3e-3)]


@pytest.mark.parametrize(("model", "tp"), SHARES)
def test_large_models_can_be_cut_as_they_will_be_measured(model: str, tp: int) -> None:
    from penstock.models import build_model
    from penstock.parallel.ranks import Ranks

    built: Any = build_model(
        find_model(model).config, torch.bfloat16, torch.device("meta"), ranks=Ranks(0, tp)
    )
    attention: Any
    delta: Any
    attention, delta = (
        next(spec for spec in built.cache_specs() if isinstance(spec, kind))
        for kind in (KVSpec, StateSpec)
    )
    mixers = [layer.mixer for layer in built.layers]
    sizes = (
        next(one.num_heads for one in mixers if hasattr(one, "num_heads")),
        attention.num_kv_heads,
        next(one.num_key_heads for one in mixers if hasattr(one, "num_key_heads")),
        delta.num_value_heads,
        built.layers[0].mlp.down.shape[-1],
    )
    assert sizes == SHARES[model, tp]


class _CountedLinks(NoLinks):
    def __init__(self) -> None:
        self.num_calls = 0

    def add(self, values: Tensor) -> None:
        self.num_calls += 1

    maximize = add

    def gather(self, values: Tensor, out: Tensor) -> None:  # of logits, if no graph finds the token
        self.num_calls += 1
        super().gather(values, out)


def test_a_greedy_step_has_as_many_collectives_as_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    links = _CountedLinks()
    monkeypatch.setattr(device_part, "NoLinks", lambda: links)
    config = EngineConfig(
        device="cpu", random_weights=True, tp=2, max_rows=1, memory_gb=0.1, max_model_len=512
    )
    engine = Engine.of_share(ModelSource("small", None, HYBRID_MOE), config)
    launch, num_steps = Runner.launch, 0

    def counted(runner: Runner, *given: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        return launch(runner, *given)

    monkeypatch.setattr(Runner, "launch", counted)
    links.num_calls = 0
    run(engine, request("one", prompt(20), max_tokens=6))
    assert num_steps >= 6
    assert links.num_calls == num_collectives(len(engine.runner.model.layers)) * num_steps


class _AloneLinks(NoLinks):
    """Collectives of one rank in place of those of two: by NCCL, or through memory."""

    def __init__(self, through_memory: bool) -> None:
        device = torch.device("cuda", 0)
        self.group = GroupLinks(dist.HashStore(), 0, 1, device)
        if through_memory:
            self.buffer = torch.full((buffer_words(1),), EMPTY, dtype=torch.int32, device=device)
            self.group.one_shot = OneShot(0, [self.buffer.data_ptr()], device)
        self.num_calls = 0

    def add(self, values: Tensor) -> None:
        self.num_calls += 1
        self.group.add(values)

    def maximize(self, values: Tensor) -> None:
        self.num_calls += 1
        self.group.maximize(values)

    def send_all(self, values: Tensor) -> None:
        self.num_calls += 1
        self.group.send_all(values)


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.mark.gpu
@on_gpu
def test_collectives_of_nccl_are_captured_and_replayed() -> None:
    from penstock.engine.graphs import capture

    links = GroupLinks(dist.HashStore(), 0, 1, torch.device("cuda", 0))
    values = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
    keys = torch.arange(8, device="cuda")
    out = torch.zeros(1, 4096, device="cuda", dtype=torch.bfloat16)

    def step() -> Tensor:
        values.add_(1)
        links.add(values)
        links.maximize(keys)
        links.send_all(values)
        links.gather(values, out)
        return out

    step()  # connects and loads kernels, which cannot be captured
    graph, seen = capture(step, None)
    for count in range(2, 5):
        graph.replay()
        torch.cuda.synchronize()
        assert values.float().eq(count + 1).all()
        assert torch.equal(seen[0], values)
    assert torch.equal(keys, torch.arange(8, device="cuda"))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("through_memory", [False, True])
def test_an_engine_whose_graphs_add_over_ranks_says_what_one_without_says(
    through_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(
        device="cuda", dtype="float32", random_weights=True, tp=2, max_rows=4, memory_gb=0.5,
        max_model_len=512, graphs=True,
    )  # fmt: skip
    source = ModelSource("small", None, HYBRID_MOE)
    asked = [request(str(i), prompt(20 + i, seed=i), max_tokens=12) for i in range(3)]
    expected = run(Engine.of_share(source, config), *asked)
    links: list[_AloneLinks] = []

    def new_links() -> _AloneLinks:
        links.append(_AloneLinks(through_memory))
        return links[-1]

    monkeypatch.setattr(device_part, "NoLinks", new_links)
    engine = Engine.of_share(source, config)
    assert engine.runner.graphs is not None
    seen = run(engine, *asked)
    assert links[0].num_calls > 0
    assert {id: tokens_of(deltas) for id, deltas in seen.items()} == {
        id: tokens_of(deltas) for id, deltas in expected.items()
    }
