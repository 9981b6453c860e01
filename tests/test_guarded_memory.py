"""The CUDA C++ kernels read and write nothing behind their arrays."""

from __future__ import annotations

import re
import signal

import pytest

from guarded_memory import COMPILER, run_guarded, run_tests
from kernel_checks import HAS_GPU

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs Linux and a C++ compiler")

# Each read runs in a fork of one process: importing torch takes a second.
READ = """
import ctypes, os, torch
for more in ("", "last += 4", "x = 0"):
    child = os.fork()
    if child == 0:
        x = torch.arange(1004, dtype=torch.float32)  # a multiple of 16 bytes, not of a page
        last = x.data_ptr() + 4 * 1003
        exec(more)
        os._exit(0 if ctypes.c_float.from_address(last).value == 1003.0 else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_read_past_the_end_or_of_a_freed_tensor_is_fatal() -> None:
    done = run_guarded(["-c", READ])
    in_bounds, past_the_end, of_a_freed_one = map(int, done.stdout.split())
    assert in_bounds == 0, done.stderr
    assert past_the_end == of_a_freed_one == -signal.SIGSEGV, done.stderr


@pytest.mark.skipif(HAS_GPU, reason="kernels run compiled here")
def test_cuda_kernels_stay_inside_their_arrays() -> None:
    done = run_tests(["tests/test_cuda_kernels.py", "tests/test_cuda_drafts.py"])
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 30
