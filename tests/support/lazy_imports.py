"""Imports of the package's own modules inside functions, and whether one of them hides a circle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shardcompile.compat.caches import source_files


@dataclass
class Imports:
    """What a module imports from its own package.

    Attributes:
        at_once: when it is loaded.
        later: inside of functions; by module, the line.
    """

    at_once: set[str] = field(default_factory=set)
    later: dict[str, int] = field(default_factory=dict)


def imports_of(root: Path, package: str) -> dict[str, Imports]:
    """By module of a package in a folder, what it imports; what only type checkers read is left out."""
    files = {_module(path, root): path for path in source_files(root / package)}
    found = {}
    for name, path in files.items():
        found[name] = imports = Imports()
        for node, inside in _statements(ast.parse(path.read_text()), inside=False):
            for wanted in _named(node, files):
                if inside:
                    imports.later.setdefault(wanted, node.lineno)
                else:
                    imports.at_once.add(wanted)
    return found


def hidden_circles(imports: Mapping[str, Imports]) -> list[str]:
    """Imports in functions that could not stand at the top of their module, as ``module:line imports module``.

    To load what such a one imports, the module itself has to be loaded, be it by other imports in functions.
    """
    edges = {name: found.at_once | found.later.keys() for name, found in imports.items()}
    return [
        f"{name}:{line} imports {wanted}"
        for name, found in imports.items()
        for wanted, line in found.later.items()
        if name in _reached(edges, wanted)
    ]


def _reached(edges: Mapping[str, set[str]], start: str) -> set[str]:
    seen, pending = {start}, [start]
    while pending:
        new = edges[pending.pop()] - seen
        seen |= new
        pending += new
    return seen


def _module(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _statements(tree: ast.AST, inside: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node, inside
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        else:
            yield from _statements(node, inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def _named(node: ast.Import | ast.ImportFrom, modules: Mapping[str, Path]) -> set[str]:
    if isinstance(node, ast.Import):
        return {a.name for a in node.names if a.name in modules}
    whole = {f"{node.module}.{a.name}" for a in node.names}
    return whole & modules.keys() or {str(node.module)} & modules.keys()


def without_a_reason(text: str) -> list[int]:
    """Lines of imports in functions that no comment explains: on the line, above it, or at those right before it."""
    lines = text.splitlines()
    found = []
    for node, inside in _statements(ast.parse(text), inside=False):
        at = node.lineno - 1
        while not (said := re.search("#.*[a-z]{3}", lines[at])) and lines[at].strip().startswith(("import ", "from ")):
            at -= 1
            while not lines[at].strip():
                at -= 1
        if inside and not said:
            found.append(node.lineno)
    return found
