"""Compiles a C++ source for this CPU and loads it as a library. Knows no tensor and no shape.

Compilation takes a second or two; results are cached on disk, by source, compiler and CPU features.
Of several processes that need the same source, one compiles it while the others wait.
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
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from penstock.ops.cache_folder import cache_folder, write_whole

try:
    import fcntl
except ImportError:  # not a POSIX system: every process compiles for itself
    fcntl = None  # type: ignore[assignment]

LONGEST_COMPILE = 60.0  # seconds
LONGEST_LOCK, LOCK_POLL = 60.0, 0.02  # seconds
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


def load_function(
    source: Path, name: str, argument_types: list[Any], *options: str
) -> Callable[..., None] | None:
    """A function of the library that returns nothing, or None if it cannot be compiled."""
    loaded = load(source, *options)
    if loaded is None:
        return None
    function: Callable[..., None] = getattr(loaded, name)
    function.argtypes, function.restype = argument_types, None  # type: ignore[attr-defined]
    return function


def _compiler() -> str | None:
    named = os.environ.get("CXX")
    return shutil.which(named) if named else shutil.which("g++") or shutil.which("c++")


def _compiled(source: Path, compiler: str, target: tuple[str, ...]) -> Path:
    # OpenMP's threads are torch's own: the loader finds its library already loaded.
    command = [compiler, "-O3", *target, "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-w"]
    text = _with_headers(source)
    recipe = "\n".join([*command, _version(compiler), _cpu()]).encode() + text
    path = cache_folder("kernels") / f"{hashlib.blake2b(recipe, digest_size=16).hexdigest()}.so"
    if path.exists():
        return path
    with _only_one(path.with_suffix(".lock")), tempfile.TemporaryDirectory() as folder:
        if path.exists():  # another process compiled it meanwhile
            return path
        made = Path(folder) / path.name
        _run([*command, str(source), "-o", str(made)])
        with suppress(OSError):  # without a writable folder it is recompiled every time
            write_whole(path, made.read_bytes())
            return path
        ctypes.CDLL(str(made))  # stays loaded after its file is removed
        return made


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Holds this lock, or waits until the process that does has ended with it. Goes on without it
    if it cannot be had, such as in a read-only folder, or not in time."""
    with ExitStack() as held:
        with suppress(OSError):
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = held.enter_context(lock.open("w"))
            give_up_at = time.monotonic() + LONGEST_LOCK
            while fcntl is not None and time.monotonic() < give_up_at:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(LOCK_POLL)
        yield


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
