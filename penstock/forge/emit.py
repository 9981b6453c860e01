"""Writes an engine: links the definitions that a design needs from the fragments into one readable
file.

Like any linker it starts at one name, `create_engine`, and takes what that reaches: a definition
that nothing uses is not in the file. Imports from `ops` are copied, so that the engine is
self-contained. Knows Python's syntax, not what an engine does.
"""

from __future__ import annotations

import ast
import functools
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.forge import decisions
from penstock.forge.decisions import Design

FRAGMENTS = Path(__file__).parent / "fragments"
LIBRARY_FOLDER = Path(__file__).parents[1] / "ops"
PACKAGE = "penstock.forge.fragments"
LIBRARY = "penstock.ops."
ENTRY = "create_engine"
# These come first, then the chosen fragments, and last the engine.
ORDER = ("shape", "weights_separate", "weights_fused", "weights")
LAST = ("engine",)
WIDTH = 100

_DIRECTIVE = re.compile(r"\s*# forge: (when|value|end)\b ?(.*)$")
_CLAIM = re.compile(r"(\w+)(!?=)([\w|]+)")


@dataclass(frozen=True, slots=True)
class Definition:
    names: tuple[str, ...]
    source: str
    uses: frozenset[str]
    is_constant: bool


@dataclass(frozen=True, slots=True)
class Import:
    module: str
    name: str  # "" for `import module`
    alias: str


def emit(design: Design, says: str) -> str:
    """The source of engine.py. `says` is its docstring: model, machine and reasons."""
    definitions: list[Definition] = []
    imports: dict[str, Import] = {}
    values = decisions.constants(design)
    for name in _files(design):
        text = keep_lines((FRAGMENTS / f"{name}.py").read_text(), design, values)
        found, imported = _read_fragment(text)
        linked = [each for each in imported if each.module.startswith(LIBRARY)]
        for definition, needs in (one for each in linked for one in _take(each.module, each.name)):
            imports |= {each.alias: each for each in needs}
            definitions += [definition] if definition not in definitions else []
        definitions += found
        imports |= {each.alias: each for each in imported if each not in linked}
    needed = _reach(definitions)
    used = frozenset().union(*(definition.uses for definition in needed))
    parts = [f'"""{says.strip()}\n"""', "from __future__ import annotations"]
    parts += _import_blocks([each for alias, each in imports.items() if alias in used])
    constants = [definition.source for definition in needed if definition.is_constant]
    head = "\n\n".join([*parts, "\n".join(constants)] if constants else parts)
    bodies = [definition.source for definition in needed if not definition.is_constant]
    return "\n\n\n".join([head, *bodies]) + "\n"


def keep_lines(text: str, design: Design, values: Mapping[str, str]) -> str:
    """Applies directives: keeps the design's statements and blocks, sets its constants."""
    kept: list[str] = []
    is_wanted = True
    starts = _statement_starts(text)
    for number, line in enumerate(text.splitlines(), 1):
        directive = _DIRECTIVE.search(line)
        code = line[: directive.start()] if directive else line
        if directive and directive[1] == "end":
            is_wanted = True
        elif directive and not code.strip():
            is_wanted = _holds(directive[2], design)
        elif directive and directive[1] == "when":
            if is_wanted and _holds(directive[2], design):
                kept.append(code)
            elif is_wanted:  # a formatter may have split the statement: delete all of it
                del kept[len(kept) - number + starts.get(number, number) :]
        elif directive:
            name = code.partition("=")[0].strip()
            kept.append(f"{name} = {values[name]}" if name in values else code)
        elif is_wanted:
            kept.append(line)
    return "\n".join(kept) + "\n"


@functools.cache
def _statement_starts(text: str) -> dict[int, int]:
    """For each line on which a statement ends, the statement's first line; the innermost one's if
    several end there.
    """
    found = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt))
    return dict(sorted((node.end_lineno or 0, node.lineno) for node in found))


def _holds(condition: str, design: Design) -> bool:
    """`cache=pages`, `graphs!=none`, `graphs=decode|all`; several, separated by spaces, must all
    hold.
    """
    claims = _CLAIM.findall(condition)
    assert claims, f"a directive says {condition!r}, which no design can answer"
    return all(
        (design[name] in choices.split("|")) == (sign == "=") for name, sign, choices in claims
    )


def _files(design: Design) -> list[str]:
    chosen = decisions.fragments(design)
    first = [name for name in ORDER if name in chosen or not name.startswith("weights_")]
    return [*first, *(name for name in chosen if name not in first), *LAST]


@functools.cache  # most fragments are the same in most designs
def _read_fragment(text: str) -> tuple[tuple[Definition, ...], tuple[Import, ...]]:
    lines = text.splitlines()
    definitions: list[Definition] = []
    imports: list[Import] = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports += _imports_of(node)
        elif names := _names_of(node):
            start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1
            while start and lines[start - 1].startswith("#"):  # its comment
                start -= 1
            source = "\n".join(lines[start : node.end_lineno])
            if tail := _comment_behind(lines[(node.end_lineno or 1) - 1], node):
                source = f"{source}{tail}" if not source.endswith(tail) else source
            is_constant = isinstance(node, ast.Assign | ast.AnnAssign) and names[0].isupper()
            uses = frozenset(each.id for each in ast.walk(node) if isinstance(each, ast.Name))
            definitions.append(Definition(names, source, uses, is_constant))
    return tuple(definitions), tuple(imports)


@functools.cache
def _take(module: str, name: str) -> tuple[tuple[Definition, tuple[Import, ...]], ...]:
    """The definition of a name in the library, after the definitions it needs there, each with the
    imports of that file from elsewhere.
    """
    path = LIBRARY_FOLDER / (module.removeprefix(LIBRARY).replace(".", "/") + ".py")
    definitions, imported = _read_fragment(path.read_text())
    by_name = {each: definition for definition in definitions for each in definition.names}
    linked = {each.alias: each for each in imported if each.module.startswith(LIBRARY)}
    if name not in by_name:  # this file imports it from another one
        return _take(linked[name].module, name)
    external = tuple(each for each in imported if each.alias not in linked)
    taken: dict[Definition, tuple[Import, ...]] = {}
    for use in sorted(by_name[name].uses - {name}):
        if use in by_name:
            taken.update(_take(module, use))
        elif use in linked:
            taken.update(_take(linked[use].module, use))
    return *taken.items(), (by_name[name], external)


def _comment_behind(line: str, node: ast.stmt) -> str:
    rest = line.encode()[node.end_col_offset :].decode() if node.end_col_offset else ""
    return rest if rest.strip().startswith("#") else ""


def _names_of(node: ast.stmt) -> tuple[str, ...]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return (node.name,)
    if isinstance(node, ast.Assign):
        return tuple(target.id for target in node.targets if isinstance(target, ast.Name))
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return (node.target.id,)
    return ()


def _imports_of(node: ast.Import | ast.ImportFrom) -> Iterator[Import]:
    module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
    if module == "__future__" or module.startswith(PACKAGE):
        return
    for each in node.names:
        alias = each.asname or each.name.partition(".")[0]
        yield Import(module or each.name, each.name if module else "", alias)


def _reach(definitions: list[Definition]) -> list[Definition]:
    by_name = {name: definition for definition in definitions for name in definition.names}
    needed: set[str] = set()
    waiting = [ENTRY]
    while waiting:
        name = waiting.pop()
        if name in by_name and name not in needed:
            needed.add(name)
            waiting += by_name[name].uses
    return [definition for definition in definitions if needed.intersection(definition.names)]


def _import_blocks(imports: list[Import]) -> list[str]:
    """The standard library, then torch and triton, as isort orders them."""
    external = ("torch", "triton")
    blocks = [
        [each for each in imports if (each.module.partition(".")[0] in external) == is_external]
        for is_external in (False, True)
    ]
    return ["\n".join(_import_lines(block)) for block in blocks if block]


def _import_lines(imports: Iterable[Import]) -> Iterator[str]:
    plain = [each for each in imports if not each.name]
    for each in sorted(plain, key=lambda one: one.module):
        is_renamed = each.alias != each.module.partition(".")[0]
        yield f"import {each.module} as {each.alias}" if is_renamed else f"import {each.module}"
    named = [each for each in imports if each.name]
    for module in sorted({each.module for each in named}):
        spelled = {
            each.name if each.name == each.alias else f"{each.name} as {each.alias}"
            for each in named
            if each.module == module
        }
        # As isort orders them: CONSTANTS, Classes, functions.
        names = sorted(spelled, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
        line = f"from {module} import {', '.join(names)}"
        if len(line) <= WIDTH:
            yield line
        else:
            yield f"from {module} import (\n" + textwrap.indent(",\n".join(names), "    ") + ",\n)"
