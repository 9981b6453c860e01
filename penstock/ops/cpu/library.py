"""Compiles a C++ source for this CPU and loads it as a library. Knows no tensor and no shape.

Compilation takes a second or two; results are cached on disk, by source, compiler and CPU features.
Without a compiler `load` returns None, and slower code is used.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import torch

from penstock.ops.cache_folder import cache_folder, write_whole

LONGEST_COMPILE = 60.0  # seconds
# The instruction sets that torch uses, which a user can limit (ATEN_CPU_CAPABILITY).
TARGETS = {"AVX512": ("-march=native",), "AVX2": ("-march=native", "-mno-avx512f")}
log = logging.getLogger(__name__)


@functools.cache
def load(source: Path, *options: str) -> ctypes.CDLL | None:
    """The library of a source, or None if it cannot be compiled; `options` are the compiler's."""
    target = TARGETS.get(torch.backends.cpu.get_cpu_capability())
    compiler = _compiler()
    if target is None or compiler is None:
        return None
    try:
        return ctypes.CDLL(str(_compiled(source, compiler, (*target, *options))))
    except (OSError, subprocess.SubprocessError) as error:
        log.info("C++ kernels are not available, so slower code is used: %s", error)
        return None


def _compiler() -> str | None:
    named = os.environ.get("CXX")
    return shutil.which(named) if named else shutil.which("g++") or shutil.which("c++")


def _compiled(source: Path, compiler: str, target: tuple[str, ...]) -> Path:
    # OpenMP's threads are torch's own: the loader finds its library already loaded.
    command = [compiler, "-O3", *target, "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-w"]
    text = _with_headers(source)
    told = "\n".join([*command, _version(compiler), _cpu()]).encode() + text
    path = cache_folder("kernels") / f"{hashlib.blake2b(told, digest_size=16).hexdigest()}.so"
    if path.exists():
        return path
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / path.name
        _run([*command, str(source), "-o", str(made)])
        with suppress(OSError):  # without a writable folder it is recompiled every time
            write_whole(path, made.read_bytes())
            return path
        ctypes.CDLL(str(made))  # stays loaded after its file is removed
        return made


def _with_headers(source: Path) -> bytes:
    """Its text, preceded by that of the headers beside it that it includes."""
    text = source.read_bytes()
    names = re.findall(rb'^#include "([^"]+)"', text, re.MULTILINE)
    return b"".join((source.parent / name.decode()).read_bytes() for name in names) + text


def _version(compiler: str) -> str:
    return _run([compiler, "--version"])


@functools.cache
def _cpu() -> str:
    """The features of the CPU; different machines may share a home folder."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return ""


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_COMPILE)
    if done.returncode:
        raise OSError(f"{command[0]} failed: {done.stderr.strip()[-500:]}")
    return done.stdout
