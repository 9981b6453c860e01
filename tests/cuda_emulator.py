"""Runs the CUDA C++ kernels of `ops/cuda` on a CPU, so that tests see what they compute.

The C++ compiler takes the kernel's own source. Only its instructions in PTX are translated, each
into a call of a function of `cuda_emulator.h`, where all threads of a block are coroutines. Python
launches kernels as on a GPU: `emulated` puts such programs in place of compiled ones.
"""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from penstock.ops.cpu import library
from penstock.ops.cuda import delta_net_drafts, quantized, skinny_gemm
from penstock.ops.cuda.program import Program, read_source
from penstock.ops.cuda.quantized_gemm import Card
from penstock.ops.triton import moe

HEADER = Path(__file__).with_name("cuda_emulator.h")
COMPILER = library._compiler()
PROCESSORS = 4  # few, so that small shapes have the tiles of large ones
CARD = Card(PROCESSORS, 99 * 1024, 1)
ASM = re.compile(r"\basm(?: volatile)?\(")
OPERAND = re.compile(r'"[=+]?[rlfhn]"\s*\(')


@contextmanager
def emulated() -> Iterator[None]:
    """Makes the kernels of `ops/cuda` accept tensors on the CPU."""
    launching = {"program": Emulated, "is_available": lambda _: True, "current_stream": lambda _: 0}
    card = {"num_processors": lambda _: PROCESSORS, "card_of": lambda _: CARD}
    with (
        mock.patch.multiple(quantized, **launching, **card),
        mock.patch.multiple(skinny_gemm, **launching),
        mock.patch.multiple(delta_net_drafts, **launching),
        mock.patch.object(moe, "is_available", return_value=True),
    ):
        yield


class Emulated(Program):
    def __init__(
        self,
        source: Path,
        name: str,
        constants: tuple[tuple[str, int], ...],
        device: torch.device,
        shared_bytes: int = 0,
    ) -> None:
        self._library = _library(source, name, constants)

    def _run(
        self,
        grid: tuple[int, int],
        num_threads: int,
        stream: int,
        pointers: ctypes.Array[ctypes.c_void_p],
    ) -> None:
        assert self._library.launch(*grid, num_threads, pointers), "threads wait forever"


@functools.cache
def _library(source: Path, name: str, constants: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    assert COMPILER is not None
    with tempfile.TemporaryDirectory() as folder:
        translated = Path(folder) / f"{name}.cpp"
        translated.write_text(translate(read_source(source), name, dict(constants)))
        return ctypes.CDLL(str(library._compiled(translated, COMPILER, ("-O1",))))


def translate(source: str, name: str, constants: dict[str, int]) -> str:
    """C++ that a CPU's compiler accepts, with a function `launch` that runs all clusters."""
    assert COMPILER is not None
    given = [f"-D{key}={value}" for key, value in {**constants, "__CUDA_ARCH__": 900}.items()]
    command = [COMPILER, "-x", "c++", "-E", "-P", "-", *given]
    done = subprocess.run(command, input=source, text=True, capture_output=True, check=True)
    code = _without_asm(done.stdout)
    size = constants.get("SHARED_BYTES", 0)
    code = re.sub(r"extern __shared__ (.*)\[\];", rf"__shared__ \1[{size}];", code)
    found = re.search(rf"\b{name}\(([^)]*)\)\s*{{", code)
    assert found is not None, f"there is no kernel {name}"
    parameters = [" ".join(one.split()) for one in found[1].split(",")]
    types = [re.match(r"(.*?)\w+$", one)[1].strip() for one in parameters]  # type: ignore[index]
    arguments = ", ".join(f"*({type}*)given[{i}]" for i, type in enumerate(types))
    launch = f"""
static void** given;
static void emulator::call_kernel() {{ {name}({arguments}); }}
extern "C" bool launch(int width, int height, int num_threads, void** arguments) {{
    gridDim = {{width, height, 1}};
    blockDim = {{num_threads, 1, 1}};
    given = arguments;
    emulator::num_blocks = {constants.get("CLUSTER", 1)};
    for (int y = 0; y < height; ++y)
        for (int x = 0; x < width; x += emulator::num_blocks)
            if (!emulator::run_cluster({{x, y, 0}}, num_threads)) return false;
    return true;
}}
"""
    return f"{HEADER.read_text()}\n{code}\n{launch}"


def _without_asm(code: str) -> str:
    parts, end = [], 0
    for found in ASM.finditer(code):
        close = _closing(code, found.end())
        parts += [code[end : found.start()], _call_of(code[found.end() : close])]
        end = close + 1
    return "".join([*parts, code[end:]])


def _call_of(statement: str) -> str:
    """`"add.u32 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)` -> `ptx::add_u32_0_1_2(d, a, b)`."""
    text = re.match(r'\s*((?:"(?:[^"\\]|\\.)*"\s*)+)', statement)
    assert text is not None
    template = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', text[1])).replace("\\n", " ")
    operands, rest = [], statement[text.end() :]
    while (found := OPERAND.search(rest)) is not None:
        close = _closing(rest, found.end())
        operands.append(rest[found.end() : close])
        rest = rest[close + 1 :]
    name = re.sub(r"[^A-Za-z0-9]+", "_", template).strip("_")
    return f"ptx::{name}({', '.join(operands)})"


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one opened before `start`."""
    depth, quoted = 1, False
    for i in range(start, len(text)):
        if text[i] == '"' and text[i - 1] != "\\":
            quoted = not quoted
        if not quoted:
            depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    raise AssertionError("a parenthesis is never closed")
