"""Kernel sources: syntax that Triton 3.6, the oldest supported, accepts, and line width."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "penstock"
FILES = [*(ROOT / "ops" / "triton").glob("*.py"), *(ROOT / "forge" / "fragments").glob("*.py")]


def jitted(text: str) -> list[ast.FunctionDef]:
    return [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(one) for one in node.decorator_list)
    ]


def nested_targets(function: ast.FunctionDef) -> list[str]:
    """Assignments to nested tuples: their first compilation fails, with an unrelated error."""
    return [
        f"{function.name}: {ast.unparse(node)}"
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Tuple)
        and any(isinstance(element, ast.Tuple) for element in target.elts)
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_kernels_unpack_one_tuple_at_a_time(path: Path) -> None:
    assert [one for kernel in jitted(path.read_text()) for one in nested_targets(kernel)] == []


def test_a_nested_target_is_found() -> None:
    (kernel,) = jitted("@triton.jit\ndef kernel(x, y):\n    (a, b), c = x, y\n")
    assert nested_targets(kernel) == ["kernel: (a, b), c = (x, y)"]


@pytest.mark.parametrize(
    "path", [one for kind in ("cu", "cpp", "hpp") for one in ROOT.rglob(f"*.{kind}")], ids=str
)
def test_c_sources_have_at_most_100_columns(path: Path) -> None:
    """`clang-format` with the configuration in the repository's root enforces it."""
    assert [line for line in path.read_text().splitlines() if len(line) > 100] == []
