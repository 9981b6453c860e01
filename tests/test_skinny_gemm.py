"""The CUDA skinny GEMM: exact sums, and a token's result does not depend on its batch."""

from __future__ import annotations

import fcntl
import multiprocessing
from pathlib import Path

import pytest
import torch

from penstock import ops
from penstock.ops.cpu import library, skinny_gemm
from small_models import FAMILIES, logprobs_of, make_engine, prompt, request, run

NEEDS_COMPILER = pytest.mark.skipif(not skinny_gemm.is_available(), reason="no C++ compiler here")


def some(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@NEEDS_COMPILER
@pytest.mark.parametrize("num_tokens", range(1, skinny_gemm.MOST_TOKENS + 1))
@pytest.mark.parametrize(("N", "K"), [(1, 1), (7, 31), (64, 64), (130, 97), (1025, 520)])
def test_products_are_those_of_float64(N: int, K: int, num_tokens: int) -> None:
    x, weight, bias, residual = (
        some(num_tokens, K),
        some(N, K, seed=1),
        some(N, seed=2),
        some(num_tokens, N),
    )
    exact = x.double() @ weight.double().T
    wide = skinny_gemm.multiply(x, weight, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide.double(), exact, atol=1e-5, rtol=1e-5)
    exact = exact + bias.double() + residual.double()
    rounded = skinny_gemm.multiply(x, weight, bias, residual.clone())
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.double(), exact, atol=1e-5, rtol=2**-8)


@NEEDS_COMPILER
@pytest.mark.bitwise
def test_a_token_has_the_same_result_alone_and_among_others() -> None:
    x, weight = some(skinny_gemm.MOST_TOKENS, 333), some(77, 333, seed=1)
    together = skinny_gemm.multiply(x, weight, out_dtype=torch.float32)
    for place, token in enumerate(x):
        assert torch.equal(
            skinny_gemm.multiply(token[None], weight, out_dtype=torch.float32)[0], together[place]
        )


@NEEDS_COMPILER
def test_what_is_not_a_number_stays_so_and_infinity_too() -> None:
    weight = some(8, 64)
    for value in (torch.nan, torch.inf):
        x = torch.full((1, 64), 1.0).bfloat16()
        x[0, 3] = value
        for out_dtype in (torch.float32, torch.bfloat16):
            seen = skinny_gemm.multiply(x, weight, out_dtype=out_dtype)
            expected = x.float() @ weight.float().T
            assert torch.equal(seen.isnan(), expected.isnan())
            assert torch.equal(seen.isinf(), expected.isinf())


@NEEDS_COMPILER
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_says_the_same_without_a_compiler(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def say() -> list[float]:
        engine = make_engine(FAMILIES[family], dtype="bfloat16", prefix_cache=False)
        return [
            own.logprob
            for own in logprobs_of(run(engine, request("one", prompt(40), max_tokens=1))["one"])
        ]

    with_kernel = say()
    monkeypatch.setattr(skinny_gemm, "is_available", lambda: False)
    assert say() == pytest.approx(with_kernel, abs=0.05)


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_a_compiler_that_is_missing_or_fails_costs_only_speed(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert library.load.__wrapped__(Path(skinny_gemm.__file__).with_suffix(".cpp")) is None


@NEEDS_COMPILER
def test_a_kernel_is_compiled_once_and_without_a_cache_folder_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "one.cpp"
    source.write_text('extern "C" int one() { return 1; }')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert library.load.__wrapped__(source).one() == 1
    monkeypatch.setattr(
        library, "_run", lambda command: "" if "--version" not in command else _version()
    )
    assert library.load.__wrapped__(source).one() == 1, "from disk: the compiler is not asked"
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert library.load.__wrapped__(source).one() == 1


def logging_compiler(folder: Path) -> tuple[Path, Path]:
    """A slow program that compiles nothing, and the file to which it appends a line each time."""
    log, compiler = folder / "log", folder / "compiler"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exit\n'
        f'echo >> {log}\nsleep 0.2\nfor out; do :; done; echo made > "$out"\n'
    )
    compiler.chmod(0o755)
    (folder / "one.cpp").write_text("")
    return compiler, log


def test_processes_that_need_a_kernel_at_once_compile_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compiler, log = logging_compiler(tmp_path)
    forking = multiprocessing.get_context("fork")  # a spawned one would import torch again
    wanted = (tmp_path / "one.cpp", str(compiler), ())
    processes = [forking.Process(target=library._compiled, args=wanted) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert library._compiled(*wanted).read_text() == "made\n"
    assert log.read_text() == "\n"


@pytest.mark.parametrize("trouble", ["taken", "refused", "unknown"])
def test_a_lock_that_cannot_be_had_costs_only_another_compilation(
    trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compiler, log = logging_compiler(tmp_path)
    wanted = (tmp_path / "one.cpp", str(compiler), ())
    path = library._compiled(*wanted)
    path.unlink()
    with path.with_suffix(".lock").open() as file:
        if trouble == "taken":  # by a process that was stopped
            fcntl.flock(file, fcntl.LOCK_EX)
            monkeypatch.setattr(library, "LONGEST_LOCK", 0.05)
        elif trouble == "refused":  # by a file system without locks, or read-only
            path.with_suffix(".lock").unlink()
            path.with_suffix(".lock").mkdir()
        else:  # by the system
            monkeypatch.setattr(library, "fcntl", None)
        assert library._compiled(*wanted) == path
    assert log.read_text() == "\n\n"


def _version() -> str:
    compiler = library._compiler()
    assert compiler is not None
    return _RUN([compiler, "--version"])


_RUN = library._run


@NEEDS_COMPILER
def test_a_head_in_bf16_is_not_rounded() -> None:
    x, weight, ones = some(3, 600), some(5000, 600, seed=1), torch.ones(600)
    seen = ops.norm_linear(x, ones, 1e-6, ops.Weight(weight), out_dtype=torch.float32)
    exact = ops.rms_norm(x, ones, 1e-6).double() @ weight.double().T
    assert ((seen - exact).abs().max() / exact.abs().max()) <= 1e-6
