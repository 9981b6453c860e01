"""Reads a candidate before it runs: an engine needs torch, triton and a little of the standard library.

The first line of defence, and the one with the clearest message; the sandbox is the second. Refuses what
reaches for files, processes, the network, the interpreter, or the judge.
"""

from __future__ import annotations

import ast

ALLOWED_MODULES = {
    "__future__",
    "bisect",
    "collections",
    "concurrent",
    "contextlib",
    "dataclasses",
    "enum",
    "functools",
    "heapq",
    "itertools",
    "math",
    "operator",
    "os",
    "torch",
    "triton",
    "typing",
}
REFUSED_MODULES = (
    "concurrent.futures.Process",  # threads wait for compilers; an engine is one process
    "concurrent.futures.process",
    "torch.utils.cpp_extension",
    "torch.multiprocessing",
    "torch.distributed",
    "torch.hub",
    "torch.package",
    "torch.testing",
)
REFUSED_NAMES = {
    "__builtins__",
    "__import__",
    "breakpoint",
    "compile",
    "delattr",
    "eval",
    "exec",
    "getattr",
    "globals",
    "input",
    "locals",
    "open",
    "print",
    "setattr",
    "vars",
}
REFUSED_ATTRIBUTES = {
    "ProcessPoolExecutor",
    "cpp_extension",
    "distributed",
    "from_file",
    "hub",
    "load_library",
    "load_inline",
    "multiprocessing",
    "save",
    "set_default_device",
    "sys",
    "testing",
    "tofile",
}
MAX_CHARACTERS = 200_000


def refusal(source: str) -> str:
    """Why this source is not run; empty for one that is."""
    if len(source) > MAX_CHARACTERS:
        return f"{len(source)} characters; {MAX_CHARACTERS} are enough for any engine"
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        return f"is not Python: {error}"
    for node in ast.walk(tree):
        if reason := _fault(node):
            return f"line {getattr(node, 'lineno', 0)}: {reason}"
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return "" if "create_engine" in names else "has no function create_engine"


def _fault(node: ast.AST) -> str:
    if isinstance(node, ast.Import):
        return next((f for f in (_module_fault(each.name) for each in node.names) if f), "")
    if isinstance(node, ast.ImportFrom):
        modules = [node.module or ".", *(f"{node.module}.{each.name}" for each in node.names)]
        if node.module == "os":
            return "imports from os; only os.path.join is needed"
        return next((f for f in map(_module_fault, modules) if f), "")
    if isinstance(node, ast.Name) and node.id in REFUSED_NAMES:
        return f"uses {node.id}"
    if isinstance(node, ast.Attribute):
        return _attribute_fault(node)
    return ""


def _module_fault(name: str) -> str:
    if name.partition(".")[0] not in ALLOWED_MODULES or name.startswith(REFUSED_MODULES):
        return f"imports {name}"
    return ""


def _attribute_fault(node: ast.Attribute) -> str:
    if isinstance(node.value, ast.Name) and node.value.id == "os" and node.attr != "path":
        return f"uses os.{node.attr}; only os.path is needed"
    if node.attr in REFUSED_ATTRIBUTES:
        return f"uses .{node.attr}"
    if node.attr.startswith("__") and node.attr not in ("__init__", "__name__"):
        return f"uses .{node.attr}"
    return ""
