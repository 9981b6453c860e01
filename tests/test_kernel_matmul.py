"""GEMMs with a dense weight: every form of the kernels against the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from kernel_checks import FULL_SIZE, INTERPRETED, ON_GPU, PLACES, assert_near, random
from penstock.ops.reference import matmul as reference
from penstock.ops.triton import matmul as kernels
from penstock.ops.tuning import Question, Tile, trials
from penstock.ops.weight import Weight

EPS = 1e-6
NARROW_PLACES = PLACES[1::2]  # for tests that are not about precision
KERNELS = ["linear", "norm_linear", "swiglu_linear"]

GEMV: Tile = {"form": 0, "block_n": 16, "block_k": 128, "held": 2, "num_warps": 1}
SMALL_GEMM: Tile = {
    "form": 1,
    "block_m": 16,
    "block_n": 32,
    "block_k": 64,
    "num_splits": 1,
    "num_warps": 4,
    "num_stages": 3,
}
FORMS: dict[str, Tile] = {
    "gemv": GEMV,
    "gemv-one-block": {**GEMV, "block_k": 512, "held": 1},
    "small-gemm": SMALL_GEMM,
    "small-gemm-in-splits": {**SMALL_GEMM, "num_splits": 3},
    "cublas": {"form": 2},
}


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """New tensors are NaN, so that elements which a kernel does not write show."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def guarded(values: Tensor) -> Tensor:
    """The same rows, followed by a row of NaN: reading too far gives NaN."""
    return torch.cat((values, torch.full_like(values[:1], torch.nan)))[:-1]


class Case:
    """One kernel and random arguments for it, the optional ones included."""

    def __init__(
        self,
        kernel: str,
        num_tokens: int,
        N: int,
        K: int,
        dtype: torch.dtype,
        device: str,
        extras: bool = True,
    ) -> None:
        new = partial(random, dtype=dtype, device=device)
        self.kernel = kernel
        self.x = new(num_tokens, 2 * K if kernel == "swiglu_linear" else K, seed=1)
        self.weight = Weight(guarded(new(N, K, seed=2, scale=K**-0.5)))
        self.norm_weight = random(K, dtype=torch.float32, device=device, seed=3)
        self.bias = new(N, seed=4) if extras else None
        self.residual = new(num_tokens, N, seed=5) if extras else None

    def arguments(self, rows: slice = slice(None)) -> tuple[Tensor | Weight | float | None, ...]:
        residual = None if self.residual is None else self.residual[rows].clone()  # overwritten
        if self.kernel == "linear":
            return self.x[rows], self.weight, self.bias, residual
        if self.kernel == "norm_linear":
            return self.x[rows], self.norm_weight, EPS, self.weight, self.bias
        return self.x[rows], self.weight, residual

    def run(self, rows: slice = slice(None), tile: Tile | None = None, **options: object) -> Tensor:
        run: Callable[..., Tensor] = getattr(kernels, self.kernel)
        with trials() as given:
            if tile is not None:
                question = Question(self.kernel, tuple(self.weight.shape), len(self.x[rows]), tile)
                given.answers[question.key] = tile
            return run(*self.arguments(rows), **options)

    def expected(self, **options: object) -> Tensor:
        run: Callable[..., Tensor] = getattr(reference, self.kernel)
        return run(*self.arguments(), **options)


@pytest.mark.parametrize(
    ("kernel", "num_tokens"),
    [
        *(("linear", num_tokens) for num_tokens in (1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 70, 300)),
        *(("norm_linear", num_tokens) for num_tokens in (1, 3, 9, 70, 300)),
        *(("swiglu_linear", num_tokens) for num_tokens in (2, 5, 33, 300)),
    ],
)
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_any_number_of_tokens_is_multiplied_as_the_reference_does(
    kernel: str, num_tokens: int, device: str, dtype: torch.dtype
) -> None:
    case = Case(kernel, num_tokens, N=37, K=100, dtype=dtype, device=device)
    assert_near(case.run(), case.expected(), dtype)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("N", "K"), [(130, 272), (9, 2560), (5, 4200)])
@pytest.mark.parametrize("num_tokens", [1, 6])
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_sizes_need_not_fit_the_tiles(
    kernel: str, N: int, K: int, num_tokens: int, device: str, dtype: torch.dtype
) -> None:
    case = Case(kernel, num_tokens, N, K, dtype, device, extras=False)
    assert_near(case.run(), case.expected(), dtype)


@pytest.mark.thinned
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_every_form_computes_the_same(
    kernel: str, form: str, device: str, dtype: torch.dtype
) -> None:
    case = Case(kernel, num_tokens=3, N=43, K=408, dtype=dtype, device=device)
    assert_near(case.run(tile=FORMS[form]), case.expected(), dtype)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("num_tokens", "N", "K", "sizes"),  # row_tiles, num_warps, held
    [
        (1, 43, 128, (1, 4, 4)),  # fewer steps than HELD, rows that do not fill a tile
        (3, 5000, 2048, (1, 4, 16)),
        (8, 100, 4096, (1, 8, 8)),
        (4, 33, 640, (2, 5, 4)),
        (7, 433, 1280, (2, 8, 4)),
    ],
)
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_weights_go_straight_to_the_tensor_cores(
    kernel: str,
    num_tokens: int,
    N: int,
    K: int,
    sizes: tuple[int, ...],
    extras: bool,
    dtype: torch.dtype,
    device: str,
) -> None:
    case = Case(kernel, num_tokens, N, K, dtype, device, extras)
    tile = {"form": 3, **dict(zip(("row_tiles", "num_warps", "held"), sizes)), "blocks": 1}
    launched = []
    with pytest.MonkeyPatch.context() as patch:
        multiply = kernels.multiply_skinny
        patch.setattr(
            kernels, "multiply_skinny", lambda *given: launched.append(1) or multiply(*given)
        )
        seen = case.run(tile=tile)
    assert launched, "another form took its place"
    assert_near(seen, case.expected(), dtype)


SKINNY: Tile = {"form": 3, "row_tiles": 1, "num_warps": 4, "held": 4, "blocks": 1}


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("form", "device"),
    [
        *(pytest.param(form, "cpu", marks=INTERPRETED) for form in FORMS),
        *(pytest.param(form, "cuda", marks=ON_GPU) for form in (*FORMS, "skinny")),
    ],
)
@pytest.mark.parametrize("num_tokens", [3, 4])
@pytest.mark.parametrize("size", [3e4, 1e-4], ids=["large", "small"])
def test_a_norm_of_values_at_the_ends_of_float16_is_that_of_the_reference(
    form: str, device: str, num_tokens: int, size: float
) -> None:
    """x times the norm's weight overflows float16, or loses digits there; the normed value does
    not.
    """
    case = Case("norm_linear", num_tokens, N=43, K=384, dtype=torch.float16, device=device)
    largest = case.x.float().abs().max()
    case.x = (case.x.float() / largest * size).half()
    case.norm_weight = case.norm_weight.abs() + 8.0 if size > 1 else case.norm_weight * 1e-2
    case.weight = Weight((case.weight.values.float() / (8 if size > 1 else 1e-2)).half())
    expected = case.expected()
    assert expected.isfinite().all()
    tile = SKINNY if form == "skinny" else FORMS[form]
    assert_near(case.run(tile=tile), expected, torch.float16)


@pytest.mark.parametrize("kernel", ["linear", "swiglu_linear"])
@pytest.mark.parametrize("K", [440, 448], ids=["last-step-not-full", "all-steps-full"])
@pytest.mark.parametrize(("device", "dtype"), NARROW_PLACES)
def test_splits_of_the_columns_add_up(kernel: str, K: int, device: str, dtype: torch.dtype) -> None:
    """Seven steps in three splits: the last split has only one."""
    case = Case(kernel, num_tokens=20, N=43, K=K, dtype=dtype, device=device)
    assert_near(case.run(tile={**SMALL_GEMM, "num_splits": 3}), case.expected(), dtype)


@pytest.mark.parametrize(("kernel", "num_tokens"), [("norm_linear", 1), ("swiglu_linear", 20)])
@pytest.mark.parametrize(("device", "dtype"), NARROW_PLACES)
def test_every_candidate_computes_the_same(
    kernel: str, num_tokens: int, device: str, dtype: torch.dtype
) -> None:
    case = Case(kernel, num_tokens, N=19, K=1100, dtype=dtype, device=device)
    expected = case.expected()
    candidates = kernels.candidates(kernel, (19, 1100), num_tokens)
    assert len(candidates) >= 8
    for tile in candidates:
        assert_near(case.run(tile=tile), expected, dtype)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("device", "dtype"), NARROW_PLACES)
def test_activations_may_be_columns_of_a_wider_tensor(
    kernel: str, form: str, device: str, dtype: torch.dtype
) -> None:
    case = Case(kernel, num_tokens=3, N=37, K=96, dtype=dtype, device=device)
    expected = case.expected()
    wide = torch.full((3, case.x.shape[1] + 24), torch.nan, dtype=dtype, device=device)
    wide[:, 8:-16] = case.x
    case.x = wide[:, 8:-16]
    assert_near(case.run(tile=FORMS[form]), expected, dtype)
    assert_near(case.run(slice(2, 3), tile=FORMS[form]), expected[2:3], dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_a_wider_result_is_not_rounded_on_its_way(
    form: str, deterministic: bool, device: str, dtype: torch.dtype
) -> None:
    case = Case("norm_linear", num_tokens=3, N=37, K=100, dtype=dtype, device=device)
    seen = case.run(out_dtype=torch.float32, deterministic=deterministic, tile=FORMS[form])
    assert seen.dtype == torch.float32
    assert_near(seen, case.expected(out_dtype=torch.float32), dtype)
    assert dtype == torch.float32 or (seen != seen.to(dtype).float()).float().mean() > 0.5


@pytest.mark.thinned
@pytest.mark.parametrize("num_tokens", [1, 3, 64, 129, 300])
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", torch.float16, marks=INTERPRETED, id="interpreted-fp16"),
        pytest.param("cuda", torch.float16, marks=ON_GPU, id="compiled-fp16"),
        pytest.param("cuda", torch.bfloat16, marks=ON_GPU, id="compiled-bf16"),
    ],
)
def test_a_head_gives_float32_logits_at_every_batch(
    num_tokens: int, extras: bool, device: str, dtype: torch.dtype
) -> None:
    """The rule chooses the form: for many tokens, cuBLAS."""
    case = Case("norm_linear", num_tokens, N=40, K=96, dtype=dtype, device=device, extras=extras)
    seen, expected = case.run(out_dtype=torch.float32), case.expected(out_dtype=torch.float32)
    assert seen.dtype == torch.float32
    assert_near(seen, expected, dtype)
    assert (seen != seen.to(dtype).float()).float().mean() > 0.5, "logits were rounded on their way"


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_float32_logits_of_many_rows_can_be_captured(device: str) -> None:
    case = Case(
        "norm_linear", 256, N=65536, K=2048, dtype=torch.bfloat16, device=device, extras=False
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    expected = case.run(out_dtype=torch.float32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        seen = case.run(out_dtype=torch.float32)
    graph.replay()
    assert_near(seen, expected, torch.float32)
    widened_bytes = 4 * case.weight.values.numel()
    assert torch.cuda.max_memory_allocated() - before < widened_bytes, "the weight was copied"


@pytest.mark.bitwise
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("device", "dtype"), NARROW_PLACES)
def test_a_row_of_nan_leaves_the_other_rows_alone(
    kernel: str, form: str, device: str, dtype: torch.dtype
) -> None:
    case = Case(kernel, num_tokens=4, N=37, K=100, dtype=dtype, device=device)
    before = case.run(tile=FORMS[form])
    case.x[2] = torch.nan
    after = case.run(tile=FORMS[form])
    assert after[2].isnan().all()
    others = torch.tensor([0, 1, 3], device=device)
    assert torch.equal(after[others], before[others])


@pytest.mark.bitwise
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_a_deterministic_row_is_the_same_alone_and_in_any_batch(
    kernel: str, device: str, dtype: torch.dtype
) -> None:
    case = Case(kernel, num_tokens=40, N=37, K=200, dtype=dtype, device=device)
    batch = case.run(deterministic=True)
    assert_near(batch, case.expected(deterministic=True), dtype)
    for row in (0, 7, 15, 16, 39):
        assert torch.equal(case.run(slice(row, row + 1), deterministic=True)[0], batch[row])
    assert torch.equal(case.run(slice(3, 30), deterministic=True), batch[3:30])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("device", "dtype"), NARROW_PLACES)
def test_no_tokens_give_no_rows(
    kernel: str, deterministic: bool, device: str, dtype: torch.dtype
) -> None:
    case = Case(kernel, num_tokens=0, N=37, K=100, dtype=dtype, device=device)
    assert case.run(deterministic=deterministic).shape == (0, 37)


# Qwen3.5: 35B-A3B's DeltaNet and attention projections, head; dense MLPs of 4B and 27B
@pytest.mark.parametrize(
    ("kernel", "N", "K"),
    [
        ("norm_linear", 12352, 2048),
        ("linear", 2048, 4096),
        ("norm_linear", 248320, 2048),
        ("swiglu_linear", 2560, 9216),
        ("norm_linear", 34816, 5120),
        ("swiglu_linear", 5120, 17408),
    ],
)
@pytest.mark.parametrize(("device", "dtype"), FULL_SIZE)
def test_full_size_products_are_those_of_the_reference(
    kernel: str, N: int, K: int, device: str, dtype: torch.dtype
) -> None:
    case = Case(kernel, 256, N, K, dtype, device, extras=False)
    expected = case.expected()
    assert_near(case.run(deterministic=True), expected, dtype)
    for num_tokens in (1, 2, 4, 8, 16, 32, 64, 256):
        assert_near(case.run(slice(num_tokens)), expected[:num_tokens], dtype)
