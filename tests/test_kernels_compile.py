"""Every kernel compiles for all supported GPUs, without needing one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compile_cases import (
    delta_net_drafts_cases,
    quantized_cases,
    quantized_experts_cases,
    quantized_gemm_cases,
    skinny_gemm_cases,
)
from penstock.ops.cuda import (
    all_reduce,
    delta_net_drafts,
    fp8_experts,
    host_calls,
    quantized,
    skinny_gemm,
)
from penstock.ops.cuda.program import CudaError, compile_source, nvrtc, read_source

ROOT = Path(__file__).resolve().parents[1]
OLDEST = Path(sys.prefix) / "oldest"  # the oldest supported Triton, installed by make
# One form of every kernel for the GPU that tiles are tuned for (90), and, of kernels that use much
# shared memory, for the GPU with the least (86). `pytest -m slow` compiles the rest.
BUILDS = [
    ("90,86", "one"),
    *(pytest.param(str(number), "one", marks=pytest.mark.slow) for number in (80, 86, 89)),
    pytest.param("90", "all", marks=pytest.mark.slow),
]
MUCH_SHARED_MEMORY = 48 * 1024  # half of what the smallest GPU has
SHARED_MEMORY = {80: 163, 86: 99, 89: 99, 90: 227}  # KiB per program

# Runs in a child process, because nothing can be compiled under the interpreter, which other tests
# use. For other GPUs only the shared memory is checked, which is known before ptxas runs.
COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from compile_cases import E4M3_KERNELS, all_cases

first, *others = map(int, sys.argv[1].split(","))
forms, much = sys.argv[2], int(sys.argv[3])


def shared_memory(capability, kernel, signature, constexprs, options):
    constants = {key: value for key, value in constexprs.items() if key != "PDL"}
    names = kernel.arg_names
    if "PDL" in names:  # a kernel that lets nothing start early has none
        constants["PDL"] = capability >= 90
    types = {key: signature.get(key, "constexpr") for key in names}
    by_index = {(names.index(key),): value for key, value in constants.items()}
    # Aligned as tensors are: only then are copies to shared memory made in the background.
    aligned = {(i,): [["tt.divisibility", 16]] for i, key in enumerate(names) if types[key][0] == "*"}
    source = ASTSource(fn=kernel, signature=types, constexprs=by_index, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return compiled.metadata.shared


assemble = CUDABackend.make_cubin
seen = {capability: {} for capability in (first, *others)}
large = []
for case in all_cases():
    has_codes = "*fp8e4nv" in case[1].values()
    least = E4M3_KERNELS.get(case[0].fn.__module__, 89 if has_codes else 80)
    if first < least:
        continue
    form = [case[2].get(key, "") for key in ("STAGE", "IS_DOWN", "STORED")]
    name = f"{case[0].fn.__module__}.{case[0].fn.__name__} {form}{' E4M3' * has_codes}"
    if name in seen[first] and forms == "one":
        continue
    # Triton's own PTX can be assembled; what we write by hand is in those that read codes or prefetch.
    has_own = form[2] in ("e4m3", "int8") or "small_gemm" in name
    CUDABackend.make_cubin = assemble if has_own or forms == "all" else lambda *words: b""
    size = shared_memory(first, *case)
    seen[first].setdefault(name, []).append(size)
    large += [(name, case, least)] if size >= much else []
CUDABackend.make_cubin = lambda *words: b""
for capability in others:
    for name, case, least in large:
        if capability < least:
            continue
        seen[capability].setdefault(name, []).append(shared_memory(capability, *case))
print(json.dumps(seen))
"""


@pytest.mark.timeout(900)  # 45 seconds on an idle core, in one process
@pytest.mark.parametrize(("capabilities", "forms"), BUILDS)
def test_kernels_compile_and_fit(
    capabilities: str, forms: str, pytestconfig: pytest.Config
) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    # Cached: Triton identifies a kernel by its source, and recompiles only those that changed.
    assert pytestconfig.cache is not None
    kept = pytestconfig.cache.mkdir(f"kernels-{capabilities}-{forms}".replace(",", "-"))
    paths = f"{OLDEST}:{ROOT}:{ROOT / 'tests'}"
    environment |= {"TRITON_CACHE_DIR": str(kept), "PYTHONPATH": paths}
    # Syntax errors and excessive shared memory show without LLVM's optimizations.
    if forms == "one":
        environment |= {"DISABLE_LLVM_OPT": "1", "TRITON_DISABLE_LINE_INFO": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, capabilities, forms, str(MUCH_SHARED_MEMORY)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    shared = json.loads(done.stdout.splitlines()[-1])
    assert list(shared) == capabilities.split(",")
    for capability, by_kernel in shared.items():
        least = 10 if capability == next(iter(shared)) else 5
        assert len(by_kernel) >= least, f"only {sorted(by_kernel)} were compiled for {capability}"
        for name, sizes in by_kernel.items():
            assert max(sizes) <= SHARED_MEMORY[int(capability)] * 1024, (
                f"{name} wants {max(sizes)} bytes"
            )


@pytest.mark.skipif(
    nvrtc() is None, reason="there is no NVRTC, which comes with PyTorch's CUDA builds"
)
@pytest.mark.parametrize(
    ("capability", "one_of"),
    # 90 has its own instructions; all others share one fallback.
    [(90, 1), (80, 3), *(pytest.param(n, 1, marks=pytest.mark.slow) for n in (80, 86, 89))],
)
def test_the_cuda_source_compiles_too(
    capability: int, one_of: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sources = (
        (skinny_gemm.SOURCE, skinny_gemm_cases()[::one_of]),
        (delta_net_drafts.SOURCE, delta_net_drafts_cases(capability)[::one_of]),
        (quantized.SOURCE, quantized_cases()[::one_of]),
        (quantized.GEMM_SOURCE, quantized_gemm_cases(capability)[::one_of]),
        (quantized.EXPERTS_SOURCE, quantized_experts_cases(capability)[::one_of]),
        (host_calls.SOURCE, [host_calls.kernel_constants(torch.bfloat16)]),
        (all_reduce.SOURCE, [all_reduce.kernel_constants(8, dtype) for dtype in all_reduce.KINDS]),
    )
    for path, cases in sources:
        for constants in cases:
            image = compile_source(read_source(path), constants, f"sm_{capability}")
            assert image.startswith(b"\x7fELF")
    kept = list((tmp_path / "penstock" / "kernels").glob("*.cubin"))
    assert len(kept) == sum(len(cases) for _, cases in sources)
    again = compile_source(read_source(path), constants, f"sm_{capability}")
    assert again == image, "taken from disk"


@pytest.mark.thinned
@pytest.mark.skipif(
    nvrtc() is None, reason="there is no NVRTC, which comes with PyTorch's CUDA builds"
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_down", [False, True])
def test_the_source_for_hopper_alone_compiles_and_fits(
    dtype: torch.dtype, is_down: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    N, K = (2048, 512) if is_down else (1024, 2048)
    constants = fp8_experts.kernel_constants(N, K, 256, 9, dtype, is_down=is_down, has_shared=True)
    image = compile_source(read_source(fp8_experts.SOURCE), constants, "sm_90a")
    assert image.startswith(b"\x7fELF")
    assert SHARED_MEMORY[90] * 1024 >= fp8_experts.SHARED_BYTES + 1024


@pytest.mark.skipif(
    nvrtc() is None, reason="there is no NVRTC, which comes with PyTorch's CUDA builds"
)
def test_a_source_that_does_not_compile_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(CudaError, match=r"kernel\.cu\(2\): error"):
        compile_source("int good;\nno good;", {}, "sm_90")
