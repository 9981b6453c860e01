"""Compiles a CUDA C++ source for given constants, and launches it. Knows no shape.

NVRTC, which comes with the CUDA builds of PyTorch, compiles a kernel in a few tenths of a second;
cubins are cached on disk. Kernels are launched through the driver API, the only one that supports
programmatic dependent launch (see `ops/triton/launch.py`).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

import torch

from penstock.ops.cache_folder import cache_folder, write_whole

START_EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
MOST_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
FIRST_CAPABILITY = (8, 0)
SHARED = 48 * 1024  # bytes of a block without opt-in
INCLUDED = re.compile(r'^#include "(.*)"\n', re.MULTILINE)


class CudaError(Exception):
    """The compiler or the driver failed: a bug in Penstock, not in a request."""


class _Attribute(ctypes.Structure):
    _fields_ = (("id", c_int), ("_padding", c_int), ("value", c_int), ("_rest", c_int * 15))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", c_uint),
    )


@functools.cache
def is_available(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY
        and nvrtc() is not None
    )


@functools.cache
def num_processors(device: torch.device) -> int:
    """Number of SMs."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def most_shared_bytes(device: torch.device) -> int:
    """Most shared memory of a block, with the opt-in of a launch."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def current_stream(device: torch.device) -> int:
    """The stream's handle in the driver API."""
    return torch._C._cuda_getCurrentRawStream(device.index or 0)


def address(tensor: torch.Tensor | None) -> c_void_p:
    """An argument of a launch; None: a null pointer."""
    return c_void_p(None if tensor is None else tensor.data_ptr())


class Program:
    """One kernel on one device. Arguments are ctypes values, in the order of its signature."""

    def __init__(
        self,
        source: Path,
        name: str,
        constants: tuple[tuple[str, int], ...],
        device: torch.device,
        shared_bytes: int = 0,  # dynamic, besides the static memory of the source
        is_for_one: bool = False,  # capability only: later ones lack its instructions
    ) -> None:
        major, minor = torch.cuda.get_device_capability(device)
        architecture = f"sm_{major}{minor}{'a' if is_for_one else ''}"
        image = compile_source(read_source(source), dict(constants), architecture)
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._module, self._function = c_void_p(), c_void_p()
        torch.cuda.current_stream(device)  # creates the thread's CUDA context
        self._check(self._driver.cuModuleLoadData(byref(self._module), image))
        self._check(
            self._driver.cuModuleGetFunction(byref(self._function), self._module, name.encode())
        )
        self._shared_bytes = shared_bytes
        if shared_bytes:
            set_attribute = self._driver.cuFuncSetAttribute
            self._check(set_attribute(self._function, MOST_SHARED_BYTES, shared_bytes))
        self._attributes = (_Attribute * 1)(_Attribute(START_EARLY, 0, 1))
        self._num_attributes = int(torch.cuda.get_device_capability(device) >= (9, 0))

    def launch(
        self, num_blocks: int | tuple[int, int], num_threads: int, stream: int, *arguments: Any
    ) -> None:
        grid = (num_blocks, 1) if isinstance(num_blocks, int) else num_blocks
        pointers = (c_void_p * len(arguments))(
            *(ctypes.addressof(argument) for argument in arguments)
        )
        self._run(grid, num_threads, stream, pointers)

    def _run(
        self, grid: tuple[int, int], num_threads: int, stream: int, pointers: ctypes.Array[c_void_p]
    ) -> None:
        launch = _Launch(
            (c_uint * 3)(*grid, 1),
            (c_uint * 3)(num_threads, 1, 1),
            self._shared_bytes,
            stream,
            self._attributes,
            self._num_attributes,
        )
        self._check(self._driver.cuLaunchKernelEx(byref(launch), self._function, pointers, None))

    def _check(self, code: int) -> None:
        if code:
            message = c_char_p()
            self._driver.cuGetErrorString(code, byref(message))
            said = message.value.decode() if message.value else "no such error"
            raise CudaError(f"CUDA driver: {said} ({code})")


@functools.cache
def program(
    source: Path,
    name: str,
    constants: tuple[tuple[str, int], ...],
    device: torch.device,
    shared_bytes: int = 0,
    is_for_one: bool = False,
) -> Program:
    return Program(source, name, constants, device, shared_bytes, is_for_one)


def read_source(path: Path) -> str:
    """The source, with its includes from the same folder inlined."""
    return INCLUDED.sub(lambda found: read_source(path.with_name(found[1])), path.read_text())


def compile_source(source: str, constants: Mapping[str, int], architecture: str) -> bytes:
    """The cubin, from disk if it was compiled before."""
    compiler = nvrtc()
    assert compiler is not None, "asked only where it is available"
    options = [f"--gpu-architecture={architecture}", "--std=c++17", "--diag-suppress=177"]
    options += [f"-D{name}={value}" for name, value in sorted(constants.items())]
    major, minor = c_int(), c_int()
    compiler.nvrtcVersion(byref(major), byref(minor))
    key = "\n".join([f"{major.value}.{minor.value}", *options, source])
    path = (
        cache_folder("kernels")
        / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.cubin"
    )
    if path.exists():
        return path.read_bytes()
    image = _compile(compiler, source, options)
    with suppress(OSError):  # if it cannot be cached, it is compiled again next time
        write_whole(path, image)
    return image


def _compile(compiler: ctypes.CDLL, source: str, options: list[str]) -> bytes:
    handle, size = c_void_p(), c_size_t()
    compiler.nvrtcCreateProgram(byref(handle), source.encode(), b"kernel.cu", 0, None, None)
    try:
        arguments = (c_char_p * len(options))(*(option.encode() for option in options))
        if compiler.nvrtcCompileProgram(handle, len(options), arguments):
            compiler.nvrtcGetProgramLogSize(handle, byref(size))
            said = ctypes.create_string_buffer(size.value)
            compiler.nvrtcGetProgramLog(handle, said)
            raise CudaError(f"A kernel does not compile with {options}:\n{said.value.decode()}")
        compiler.nvrtcGetCUBINSize(handle, byref(size))
        image = ctypes.create_string_buffer(size.value)
        compiler.nvrtcGetCUBIN(handle, image)
        return image.raw
    finally:
        compiler.nvrtcDestroyProgram(byref(handle))


@functools.cache
def nvrtc() -> ctypes.CDLL | None:
    """The compiler's library; None if there is none."""
    major = (torch.version.cuda or "13").partition(".")[0]
    name = f"libnvrtc.so.{major}"
    packaged = [path for folder in sys.path for path in Path(folder).glob(f"nvidia/*/lib/{name}")]
    for path in (Path(name), *packaged):
        try:
            for part in path.parent.glob("libnvrtc-builtins.so.*") if path.parent.name else ():
                ctypes.CDLL(str(part), ctypes.RTLD_GLOBAL)  # NVRTC finds it by name only
            return ctypes.CDLL(str(path))
        except OSError:
            continue
    return None
