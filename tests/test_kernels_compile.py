"""Every kernel compiles for the cards people have, without one of them being here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Those of sm_86 say what sm_80 and sm_89 would, nearly: these are compiled with `pytest -m slow`, as are all
# forms of every kernel for the card the tiles are made for.
CAPABILITIES = [
    (86, "one"),
    (90, "one"),
    *(pytest.param(number, "one", marks=pytest.mark.slow) for number in (80, 89)),
    pytest.param(90, "all", marks=pytest.mark.slow),
]
SHARED_MEMORY = {80: 163, 86: 99, 89: 99, 90: 227}  # KiB that one program may have

# In a process of its own: under the interpreter, which the other tests use, nothing can be compiled.
COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from penstock.ops.triton import attention, decode_rows, delta_net, masking, matmul, moe, norm, sampling

seen = {}
for module in (attention, decode_rows, delta_net, masking, matmul, moe, norm, sampling):
    for kernel, signature, constexprs, options in module.compile_cases():
        name = f"{kernel.fn.__module__}.{kernel.fn.__name__}"
        if name in seen and sys.argv[2] == "one":
            continue
        constants = {key: value for key, value in constexprs.items() if key != "PDL"}
        constants["PDL"] = int(sys.argv[1]) >= 90
        names = kernel.arg_names
        types = {key: signature.get(key, "constexpr") for key in names}
        by_index = {(names.index(key),): value for key, value in constants.items()}
        # Aligned as tensors are: only then are copies to shared memory made in the background.
        aligned = {(i,): [["tt.divisibility", 16]] for i, key in enumerate(names) if types[key][0] == "*"}
        source = ASTSource(fn=kernel, signature=types, constexprs=by_index, attrs=aligned)
        compiled = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options=options)
        seen.setdefault(name, []).append(compiled.metadata.shared)
print(json.dumps(seen))
"""


@pytest.mark.parametrize(("capability", "forms"), CAPABILITIES)
def test_kernels_compile_and_fit(capability: int, forms: str, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(capability), forms],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    shared = json.loads(done.stdout.splitlines()[-1])
    assert len(shared) >= 10, f"only {sorted(shared)} were compiled"
    for name, sizes in shared.items():
        assert max(sizes) <= SHARED_MEMORY[capability] * 1024, f"{name} wants {max(sizes)} bytes"
