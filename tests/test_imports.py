"""Import rules: the arrows of docs/architecture.md, checked for every import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "penstock"

EVERYONE = {
    "types",
    "config",
    "errors",
    "progress",
    "digests",
    "child_python",
    "file_kinds",
    "batch_lines",
    "gguf",
}
ALLOWED = {
    "types": {"errors", "digests"},
    "digests": set(),
    "config": {"errors"},
    "errors": set(),
    "progress": set(),
    "child_python": set(),
    "file_kinds": {"errors"},
    "gguf": {"gguf", "errors", "file_kinds"},
    "batch_lines": {"errors"},
    "ops": {"ops"},
    "parallel": {"parallel", "ops"},
    "layers": {"layers", "ops", "parallel"},
    "models": {"models", "layers", "ops", "assets", "parallel"},
    "weights": {"weights", "models", "ops", "parallel"},
    "quantize": {"quantize", "weights", "models", "layers", "ops", "text"},
    "offload": {"offload", "weights", "models", "layers", "ops", "parallel"},
    "cache": {"cache"},
    "engine": {
        "engine",
        "cache",
        "models",
        "weights",
        "layers",
        "ops",
        "wire",
        "parallel",
        "offload",
    },
    "text": {"text", "assets"},
    "assets": {"assets"},
    "eval": {"eval", "http_client"},
    "forge": {"forge", "http_client", "ops"},
    "http_client": set(),
    "wire": set(),
    "llm": {"engine", "models", "text"},
    "serve": {"serve", "text", "wire", "models", "assets"},
    "planning": {"planning", "cache", "commands", "engine", "eval", "models", "parallel", "serve"}
    | {"weights"},  # from commands: what sizes a model, its roofline and GPUs
    "ray": {"ray", "commands", "serve"},  # from commands: the one that starts a server
    "commands": {
        "commands",
        "planning",
        "serve",
        "llm",
        "engine",
        "models",
        "offload",
        "ops",
        "parallel",
        "quantize",
        "text",
        "weights",
        "eval",
        "forge",
        "http_client",
    },
    "cli": {"commands"},
}


def imports_of(path: Path) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "penstock":
                found += [(node.lineno, f"penstock.{alias.name}") for alias in node.names]
            else:
                found.append((node.lineno, node.module))
        elif isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
    return found


def test_every_import_follows_the_arrows() -> None:
    broken = []
    for path in sorted(PACKAGE.rglob("*.py")):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part.startswith("__"):
            continue
        for line, module in imports_of(path):
            pieces = module.split(".")
            if pieces[0] != "penstock" or len(pieces) == 1 or pieces[1].startswith("__"):
                continue
            if pieces[1] not in ALLOWED[part] | (EVERYONE if part not in EVERYONE else set()):
                broken.append(
                    f"{path.relative_to(PACKAGE)}:{line} imports {module}; {part} may not"
                )
    assert not broken, "\n".join(broken)


def test_self_contained_files_import_only_each_other() -> None:
    """Fragments are copied into files of their own, together with what the linker takes out of
    ops/triton; the code around a candidate may not import Penstock either.
    """
    alone = ("confine.py", "candidate_process.py", "sandbox_selftest.py", "reach_kernel.py")
    fragments = sorted((PACKAGE / "forge" / "fragments").glob("*.py"))
    assert fragments
    for path in [*(PACKAGE / "forge" / name for name in alone), *fragments]:
        ours = [module for _, module in imports_of(path) if module.partition(".")[0] == "penstock"]
        linked = ("penstock.forge.fragments.", "penstock.ops.triton.")
        allowed = linked if path in fragments else ()
        assert all(module.startswith(allowed) for module in ours), (path.name, ours)


def test_policy_and_serving_never_import_torch() -> None:
    """Imports each torch-free module in one fresh interpreter and checks that torch is not
    imported.
    """
    torch_free = [
        "types",
        "config",
        "errors",
        "wire",
        "http_client",
        "cli",
        "engine.pools",
        "engine.policy",
    ]
    for folder in ("cache", "text", "serve", "gguf"):
        torch_free += [f"{folder}.{path.stem}" for path in sorted((PACKAGE / folder).glob("*.py"))]
    names = [f"penstock.{name.removesuffix('.__init__')}" for name in torch_free]
    check = "    __import__(name)\n    assert 'torch' not in sys.modules, name"
    code = f"import sys\nfor name in {names!r}:\n{check}"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr


def test_cuda_kernels_import_nothing_of_tritons() -> None:
    """`ops/triton` may choose a CUDA kernel; what both need is in `ops` itself."""
    for path in sorted((PACKAGE / "ops" / "cuda").glob("*.py")):
        assert "penstock.ops.triton" not in path.read_text(), path.name
