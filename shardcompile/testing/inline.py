"""Writes accepted inline snapshots into the source files of tests. Runs in pytest's process, without torch."""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from pathlib import Path


def apply_notes(folder: Path) -> list[str]:
    """Replaces the ``expected=`` literals of `assert_graph` calls by accepted snapshots.

    Args:
        folder: the notes of the ranks, as JSON files: the file and line of each call, and its new text.

    Returns:
        The texts of the literals that could not be replaced, as messages.
    """
    by_file: dict[str, dict[int, str]] = defaultdict(dict)
    for path in sorted(folder.glob("*.json")):
        note = json.loads(path.read_text())
        by_file[note["file"]][note["line"]] = note["text"]
    problems = []
    for name, texts in by_file.items():
        problems += _rewrite(Path(name), texts)
    return problems


def _rewrite(path: Path, texts: dict[int, str]) -> list[str]:
    source = path.read_text()
    lines = source.splitlines(keepends=True)
    problems = []
    # Last line first, so that earlier line numbers stay valid.
    for line, text in sorted(texts.items(), reverse=True):
        literal = _literal(source, line)
        if literal is None:
            problems.append(f"{path}:{line}: expected= is no literal in this call. Put this text in its place:\n{text}")
            continue
        _replace(lines, literal, text)
    path.write_text("".join(lines))
    return problems


def _literal(source: str, line: int) -> ast.Constant | None:
    """Returns the literal ``expected=`` of the innermost call that spans a line."""
    calls = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call) and _spans(n, line)]
    for call in sorted(calls, key=lambda n: (n.end_lineno or 0) - n.lineno):
        for keyword in call.keywords:
            if keyword.arg == "expected" and isinstance(keyword.value, ast.Constant):
                return keyword.value
    return None


def _spans(node: ast.Call, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _replace(lines: list[str], literal: ast.Constant, text: str) -> None:
    first, last = literal.lineno - 1, (literal.end_lineno or literal.lineno) - 1
    before = lines[first].encode()[: literal.col_offset].decode()
    after = lines[last].encode()[literal.end_col_offset :].decode()
    indent = " " * (len(before) - len(before.lstrip()) + 4)
    body = "".join(f"{indent}{row}\n" for row in text.replace("\\", "\\\\").splitlines())
    lines[first : last + 1] = [f'{before}"""\n', body, f'{indent}"""{after}']
