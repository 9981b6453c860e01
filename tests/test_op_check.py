"""The check before a benchmark: every shape against the references; a wrong kernel fails it."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_checks import ON_GPU
from penstock.cli import main
from penstock.commands import measure
from penstock.commands.measure import Bench, Limits
from penstock.commands.op_check import OpCheck
from penstock.commands.roofline import Roofline
from penstock.engine.logits_engine import LogitsEngine
from penstock.errors import PenstockError
from penstock.layers import attention, delta_net, linear, mlp
from penstock.layers.inputs import RowSpan
from penstock.ops import TokenBlocks, Weight, dispatch
from penstock.ops.reference.attention import paged_attention
from penstock.ops.tiles import tile
from penstock.types import SamplingParams
from small_models import FAMILIES, HYBRID_MOE, make_engine
from test_kernel_fp8 import packed

Op = Callable[..., Any]
DTYPES = ["float32", "bfloat16", "float16"]


def make_bench(config: dict[str, Any], dtype: str = "float32", **settings: Any) -> Bench:
    given: dict[str, Any] = {
        "deterministic": False,
        "prefix_cache": False,
        "max_rows": 8,
        **settings,
    }
    engine = make_engine(config, dtype=dtype, **given)
    roofline = Roofline.of(engine.runner.model, config, engine.runner.model.dtype.itemsize, 4)
    return Bench(LogitsEngine(engine), roofline, Limits(1e9, 1e9), 1, 1)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [*((name, "auto") for name in DTYPES), ("bfloat16", "fp8"), ("float32", "int8")],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_right_kernels_pass_with_room_to_spare(family: str, dtype: str, kv_dtype: str) -> None:
    bench = make_bench(FAMILIES[family], dtype, kv_dtype=kv_dtype)
    for batch in (1, 5):
        for report in (bench.check_decodes(batch, 70), bench.check_prefills(batch, 70)):
            assert (report["batch"], report["context"]) == (batch, 70)
            assert report["op_error"] <= {"float32": 2e-5, "float16": 4e-3, "bfloat16": 2e-2}[dtype]


def put_wrong(patch: pytest.MonkeyPatch, module: ModuleType, name: str, run_wrongly: Op) -> None:
    """Patches dispatch: for an op, the device's choice becomes `run_wrongly(right, *arguments)`."""
    right = getattr(module, name).__wrapped__

    def run(*args: Any, **kwargs: Any) -> Any:
        return run_wrongly(right, *args, **kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        watcher = dispatch._watcher.get()
        return run(*args, **kwargs) if watcher is None else watcher(right, run, args, kwargs)

    patch.setattr(module, name, call)


def scale_the_last_row(right: Op, *args: Any, **kwargs: Any) -> Any:
    result: Tensor = right(*args, **kwargs).clone()
    result[-1] *= 1.1
    return result


def spoil_the_last_row(right: Op, *args: Any, **kwargs: Any) -> Any:
    result: Tensor = right(*args, **kwargs).clone()
    result[-1, 0] = torch.nan
    return result


def swap_an_expert(right: Op, **given: Any) -> Any:
    """Swaps the least likely expert of one token for another."""
    ids = given["ids"].clone()
    ids[-1, -1] = next(expert for expert in range(8) if expert not in ids[-1].tolist())
    return right(**{**given, "ids": ids})


def choose_in_wrong_order(right: Op, *args: Any, **kwargs: Any) -> Any:
    x, weights, ids, shared = right(*args, **kwargs)
    ids = ids.clone()
    ids[-1] = ids[-1].flip(-1)
    return x, weights, ids, shared


def store_at_the_wrong_place(right: Op, **given: Any) -> Any:
    kv_index = given["kv_index"].clone()
    kv_index[-1] -= 1
    return right(**{**given, "kv_index": kv_index})


def miss_the_newest_key(right: Op, **given: Any) -> Any:
    short = tuple(RowSpan(1, span.context_len - 1) for span in given["spans"])
    return right(**{**given, "spans": short, "context_lens": given["context_lens"] - 1})


def keep_another_state(right: Op, **given: Any) -> Any:
    result = right(**given)
    given["recurrent"][given["state_slots"][-1]] *= 1.1
    return result


WRONG = [
    (linear, "norm_linear", scale_the_last_row, "norm_linear"),
    (linear, "swiglu_linear", scale_the_last_row, "swiglu_linear"),
    (linear, "linear", spoil_the_last_row, "linear"),
    (mlp, "sparse_mlp", scale_the_last_row, "sparse_mlp"),
    (mlp, "sparse_mlp", swap_an_expert, "sparse_mlp"),
    (mlp, "norm_route", choose_in_wrong_order, "norm_route ids"),
    (attention, "rope_and_store", store_at_the_wrong_place, "rope_and_store"),
    (attention, "paged_attention", miss_the_newest_key, "paged_attention"),
    (delta_net, "gated_delta_net", scale_the_last_row, "gated_delta_net"),
    (delta_net, "gated_delta_net", keep_another_state, "gated_delta_net states"),
]


# Every fault in both precisions and in both batches: these are independent.
@pytest.mark.parametrize(
    ("batch", "dtype"),
    [
        *((1, "bfloat16"), (5, "float32")),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((1, "float32"), (5, "bfloat16"))),
    ],
)
@pytest.mark.parametrize(("module", "name", "run_wrongly", "blamed"), WRONG)
def test_a_wrong_kernel_is_found_and_named(
    module: ModuleType,
    name: str,
    run_wrongly: Op,
    blamed: str,
    batch: int,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also in one row of the batch, and in half precision."""
    config = (
        HYBRID_MOE if name not in ("norm_linear", "swiglu_linear") else FAMILIES["hybrid_dense"]
    )
    bench = make_bench(config, dtype)
    bench.check_decodes(batch, 20)
    put_wrong(monkeypatch, module, name, run_wrongly)
    with pytest.raises(
        PenstockError, match=f"^{blamed}.* differs from its reference at {batch} x 20"
    ):
        bench.check_decodes(batch, 20)


def test_the_weight_of_the_next_gemm_widens_no_limit() -> None:
    """Attention is given that weight, which rounds tokens to 8 bits; a decode's result has none."""
    reader = Weight(torch.empty(128, 128))
    reader.quantize((tile(packed(128, 128, "cpu"), keeps_rows=True),))
    q, pool = torch.randn(1, 1, 128), torch.randn(2, 16, 1, 128)
    start, lens, spans = torch.tensor([0, 1]), torch.tensor([9]), (RowSpan(1, 9),)
    pages, blocks = torch.ones(1, 1, dtype=torch.int32), TokenBlocks.of(spans, "cpu")
    check = OpCheck("float32")

    def run(**given: Any) -> Any:
        right: Any = paged_attention(**given)
        return 1.00015 * right

    step = (q, pool, pool, pages, start, lens, spans, blocks, 1.0)
    check(paged_attention, run, step, {"reader": reader})
    assert check.worst().of_limit > 1


def test_no_time_is_taken_of_a_shape_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With three rows; one row is right, and is timed before."""

    def wrong_for_three(right: Op, *args: Any, **kwargs: Any) -> Any:
        result: Tensor = right(*args, **kwargs)
        return scale_the_last_row(right, *args, **kwargs) if len(result) == 3 else result

    put_wrong(monkeypatch, linear, "norm_linear", wrong_for_three)
    timed: list[int] = []
    steps = measure.Bench.steps

    def count(
        self: Bench, batch: int, context: int, sampling: SamplingParams
    ) -> measure.Measurement:
        timed.append(batch)
        return steps(self, batch, context, sampling)

    monkeypatch.setattr(measure.Bench, "steps", count)
    shapes = [
        "--batch",
        "1,3",
        "--context",
        "20",
        "--repeats",
        "2",
        "--warmup",
        "1",
        "--device",
        "cpu",
    ]
    assert main(["bench", "step", *shapes]) == 1
    assert timed == [1]
    said = capsys.readouterr()
    assert "norm_linear differs from its reference at 3 x 20" in said.err
    assert not said.out.strip().endswith("}")


def test_a_report_says_what_was_checked(capsys: pytest.CaptureFixture[str]) -> None:
    shapes = [
        "--batch",
        "1,2",
        "--context",
        "20",
        "--repeats",
        "2",
        "--warmup",
        "1",
        "--device",
        "cpu",
    ]
    assert main(["bench", "step", *shapes]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(check["batch"], check["context"]) for check in report["checks"]] == [(1, 20), (2, 20)]
    assert all(0 <= check["op_error"] < 1e-4 for check in report["checks"])


@pytest.mark.parametrize("dtype", ["bfloat16"])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_kernels_and_graphs_pass_on_a_gpu(device: str, dtype: str) -> None:
    bench = make_bench(HYBRID_MOE, dtype, device=device, graphs=True, memory_gb=0.2)
    for batch in (1, 2, 5, 8):
        report = bench.check_decodes(batch, 200)
        assert report["graph_error"] <= 1e-2
        bench.check_prefills(batch, 200)
    runner = bench.engine.engine.runner
    assert runner.graphs is not None
    replay = runner.graphs.replay

    def replay_of_others(*given: Any) -> Tensor:
        return replay(*given).roll(1, dims=0)

    runner.graphs.replay = replay_of_others  # type: ignore[method-assign]
    with pytest.raises(PenstockError, match="a captured step gives different logits"):
        bench.check_decodes(5, 200)
