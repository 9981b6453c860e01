"""Checks a candidate's source before it runs: an engine needs only torch, triton and a little of
the standard library.

The first line of defence, with the clearest messages; the sandbox is the second. Refuses access to
files, processes, the network, the interpreter, or the judge.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ALLOWED_MODULES = _words("""
    __future__ bisect collections concurrent contextlib dataclasses enum functools heapq itertools
    math operator os torch triton typing
""")
REFUSED_MODULES = (
    "concurrent.futures.Process",  # threads wait for compilers; an engine is one process
    "concurrent.futures.process",
    "torch._dynamo",
    "torch._inductor",
    "torch.fx",  # turns strings into functions
    "torch.utils.benchmark",
    "torch.utils.cpp_extension",
    "torch.multiprocessing",
    "torch.distributed",
    "torch.hub",
    "torch.package",
    "torch.testing",
)
REFUSED_NAMES = _words("""
    __builtins__ __import__ breakpoint compile delattr eval exec getattr globals input locals open
    print setattr vars
""")
# Also with a leading underscore: some modules rename their imports that way.
REFUSED_ATTRIBUTES = _words("""
    ForwardRef ProcessPoolExecutor TorchDispatchMode TorchFunctionMode add_safe_globals attrgetter
    benchmark builtins cpp_extension ctypes distributed dynamo evaluate_forward_ref from_file fx gc
    get_type_hints hub importlib inductor inspect io load_library load_inline methodcaller
    multiprocessing os overrides pathlib pickle posix python_dispatch save set_default_device shutil
    socket subprocess sys tempfile testing tofile update_wrapper wraps
""")
# Used by the judge's side of the process, on answers and to stop the clock.
JUDGES_OWN = {"Tensor", "clone", "cpu", "float", "is_floating_point", "numpy", "synchronize"}
MAX_CHARACTERS = 200_000


def refusal(source: str) -> str:
    """Why this source must not run; empty if it may."""
    if len(source) > MAX_CHARACTERS:
        return f"has {len(source)} characters; the limit is {MAX_CHARACTERS}"
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        return f"is not Python: {error}"
    nodes = list(ast.walk(tree))
    imports = _Imports(nodes)
    for node in nodes:
        if reason := _fault(node) or imports.misuse(node):
            return f"line {getattr(node, 'lineno', 0)}: {reason}"
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return "" if "create_engine" in names else "has no function create_engine"


def _fault(node: ast.AST) -> str:
    if isinstance(node, ast.Import):
        if any(each.asname and each.name.partition(".")[0] == "os" for each in node.names):
            return "gives os another name"
        return next((f for f in (_module_fault(each.name) for each in node.names) if f), "")
    if isinstance(node, ast.ImportFrom):
        return _import_fault(node)
    if isinstance(node, ast.Name) and node.id in REFUSED_NAMES:
        return f"uses {node.id}"
    if isinstance(node, ast.Attribute):
        return _attribute_fault(node)
    if isinstance(node, ast.MatchClass):  # it reads attributes, by names and by strings
        return "uses a class pattern; use isinstance instead"
    return ""


def _import_fault(node: ast.ImportFrom) -> str:
    if node.module and node.module.partition(".")[0] == "os":
        return "imports from os; only os.path.join is needed"
    if refused := [each.name for each in node.names if _is_refused(each.name) or each.name == "*"]:
        return f"imports {refused[0]} from {node.module}"
    if (node.module or "").partition(".")[0] != "triton" and any(
        each.name == "load" for each in node.names
    ):
        return f"imports load from {node.module}"
    modules = [node.module or ".", *(f"{node.module}.{each.name}" for each in node.names)]
    return next((f for f in map(_module_fault, modules) if f), "")


def _module_fault(name: str) -> str:
    if name.partition(".")[0] not in ALLOWED_MODULES or name.startswith(REFUSED_MODULES):
        return f"imports {name}"
    return ""


def _attribute_fault(node: ast.Attribute) -> str:
    if isinstance(node.value, ast.Name) and node.value.id == "os" and node.attr != "path":
        return f"uses os.{node.attr}; only os.path is needed"
    if _is_refused(node.attr):
        return f"uses .{node.attr}"
    if node.attr.startswith("__") and node.attr not in ("__init__", "__name__"):
        return f"uses .{node.attr}"
    return ""


def _is_refused(attribute: str) -> bool:
    return attribute.lstrip("_") in REFUSED_ATTRIBUTES


class _Imports:
    """The imports of a source, by their names there. A module may only be used as `module.name`: as
    a value it could get another name, under which it is not recognised. And imports must not be
    changed: the judge's side of the process uses torch too.
    """

    def __init__(self, nodes: Sequence[ast.AST]) -> None:
        whole = [each for node in nodes if isinstance(node, ast.Import) for each in node.names]
        parts = [each for node in nodes if isinstance(node, ast.ImportFrom) for each in node.names]
        self.modules = {each.asname or each.name.partition(".")[0] for each in whole}
        self.names = self.modules | {each.asname or each.name for each in parts}
        self.bases = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
        self.kernels = _names_of_triton(nodes)
        self.safe_loads = {
            id(n.func) for n in nodes if isinstance(n, ast.Call) and _loads_tensors_only(n)
        }

    def misuse(self, node: ast.AST) -> str:
        if isinstance(node, ast.Name) and node.id in self.modules and id(node) not in self.bases:
            return f"uses the module {node.id} as a value"
        if (
            isinstance(node, ast.Attribute)
            and node.attr == "load"
            and id(node) not in self.safe_loads
        ):
            base = _root(node)
            if base is None or base.id not in self.kernels | {"self"}:
                return "uses .load without weights_only=True, which can run code from a file"
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            if node.attr.removeprefix("_cuda_") in JUDGES_OWN:
                return f"changes .{node.attr}, which the judge uses"
            base = _root(node)
            if base is not None and base.id in self.names:
                return f"changes .{node.attr} of {base.id}, which is not its own"
        return ""


def _root(node: ast.Attribute) -> ast.Name | None:
    """The a of a.b.c."""
    base: ast.expr = node
    while isinstance(base, ast.Attribute):
        base = base.value
    return base if isinstance(base, ast.Name) else None


def _names_of_triton(nodes: Sequence[ast.AST]) -> set[str]:
    """Names from triton: their `load` reads the device's memory, not files."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found = [each for each in node.names if each.name.partition(".")[0] == "triton"]
            names |= {each.asname or "triton" for each in found}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "triton":
            names |= {each.asname or each.name for each in node.names}
    bound = {
        node.id
        for node in nodes
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    }
    return names - bound


def _loads_tensors_only(call: ast.Call) -> bool:
    given = [word.value for word in call.keywords if word.arg == "weights_only"]
    has_more = any(word.arg is None for word in call.keywords)
    return (
        not has_more
        and len(given) == 1
        and isinstance(given[0], ast.Constant)
        and given[0].value is True
    )
