"""The CUDA C++ kernels read and write nothing behind their arrays."""

from __future__ import annotations

import re
import signal

import pytest

from guarded_memory import COMPILER, run_guarded, run_tests
from kernel_checks import HAS_GPU

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs Linux and a C++ compiler")

READ = """
import ctypes, torch
x = torch.arange(1004, dtype=torch.float32)  # a multiple of 16 bytes, not of a page
last = x.data_ptr() + 4 * 1003
{more}
print(ctypes.c_float.from_address(last).value)
"""


@pytest.mark.parametrize(
    ("more", "is_fatal"),
    [
        ("", False),
        pytest.param("last += 4", True, id="past"),
        pytest.param("x = 0", True, id="freed"),
    ],
)
def test_a_read_past_the_end_or_of_a_freed_tensor_is_fatal(more: str, is_fatal: bool) -> None:
    done = run_guarded(["-c", READ.format(more=more)])
    assert done.returncode == (-signal.SIGSEGV if is_fatal else 0), done.stderr
    assert is_fatal or done.stdout == "1003.0\n"


@pytest.mark.skipif(HAS_GPU, reason="kernels run compiled here")
def test_cuda_kernels_stay_inside_their_arrays() -> None:
    done = run_tests(["tests/test_cuda_kernels.py"])
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 30
