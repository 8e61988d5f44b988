"""Counts signatures that say ``Any``: ``python -m tests.support.signatures [--list FOLDER]``. Bars: tests/pure/test_signatures.py."""

from __future__ import annotations

import ast
import functools
import sys
from collections import Counter
from collections.abc import Iterator

from tests.support.sources import PACKAGE, SOURCES


def signatures() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """All functions and methods of the package, with the folder that each is in."""
    for path in SOURCES:
        *folders, file = path.relative_to(PACKAGE).parts
        folder = folders[0] if folders else PACKAGE.name
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield f"{folder}/{file}", node


def says_any(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether an argument or the result may be anything as far as a type checker knows."""
    a = node.args
    given = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, [a.vararg, a.kwarg])]
    annotations = [x.annotation for x in given] + [node.returns]
    words = " ".join(ast.unparse(x) for x in annotations if x is not None)
    return "Any" in words.replace("[", " ").replace("]", " ").replace(",", " ").replace("|", " ").split()


@functools.cache
def shares() -> dict[str, tuple[int, int]]:
    """By folder, and under ``""`` for all: how many signatures say `Any`, and how many there are."""
    many: Counter[str] = Counter()
    loose: Counter[str] = Counter()
    for place, node in signatures():
        for key in ("", place.rsplit("/", 1)[0]):
            many[key] += 1
            loose[key] += says_any(node)
    return {key: (loose[key], many[key]) for key in many}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--list"]:
        for place, node in signatures():
            if place.startswith(sys.argv[2]) and says_any(node):
                print(f"{place}:{node.lineno} {node.name}")
    else:
        for key, (loose, many) in sorted(shares().items()):
            print(f"{key or 'all':<24} {loose:>4} of {many:>4}  {100 * loose / many:5.1f} %")
