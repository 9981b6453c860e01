"""Threads that load kernel launchers at the same time each get the right one."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from triton.runtime import build

import penstock.ops.triton  # noqa: F401  whose import changes how Triton loads

pytestmark = pytest.mark.skipif(
    shutil.which("gcc") is None
    or not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists(),
    reason="there is no C compiler, or there are no headers of Python",
)

NAME = "__triton_launcher"  # of all of Triton's modules
SOURCE = """
#include <Python.h>
static PyObject* launch(PyObject* self, PyObject* given) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1,
                                        methods};
PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&definition); }
"""
NUM_LAUNCHERS = 4


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads switch after every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_each_thread_gets_its_own_launcher(
    quick_switches: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sources = [SOURCE % number for number in range(NUM_LAUNCHERS)]
    for source in sources:  # compiles them: what follows only loads
        build.compile_module_from_src(source, NAME)

    def count_wrong(first: int) -> int:
        wanted = [(7 * i + first) % NUM_LAUNCHERS for i in range(200)]
        found = [build.compile_module_from_src(sources[n], NAME).launch() for n in wanted]
        return sum(one != other for one, other in zip(found, wanted, strict=True))

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(count_wrong, range(8))) == 0
