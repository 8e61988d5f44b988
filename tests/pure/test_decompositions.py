"""A sharded decomposition that does not serve a call tells dispatch why by a `NotServed`, and nobody else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.sources import SOURCES

ROOT = Path(__file__).resolve().parents[2]
OPS = ROOT / "shardcompile" / "ops"


def _answers(value: ast.expr) -> list[ast.expr]:
    """What an expression that is returned may be."""
    return _answers(value.body) + _answers(value.orelse) if isinstance(value, ast.IfExp) else [value]


def _own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function, without those of functions in it."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.Lambda)):
            waiting += ast.iter_child_nodes(node)


def _may_not_serve(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """By module, the functions known there that may return a NotServed: their own, or another such function's."""
    names: dict[str, set[str]] = {module: set() for module in trees}
    while True:
        before = sum(map(len, names.values()))
        for module, tree in trees.items():
            for node in tree.body:
                if isinstance(node, ast.ImportFrom):
                    names[module] |= {a.name for a in node.names} & names.get(node.module or "", set())
                elif isinstance(node, ast.FunctionDef) and _may_return(node, names[module]):
                    names[module].add(node.name)
        if sum(map(len, names.values())) == before:
            return names


def _may_return(function: ast.FunctionDef, names: set[str]) -> bool:
    returned = [n.value for n in _own_nodes(function) if isinstance(n, ast.Return) and n.value is not None]
    return any(
        isinstance(a, ast.Call) and isinstance(a.func, ast.Name) and a.func.id in {"NotServed", *names}
        for value in returned
        for a in _answers(value)
    )


def _lost(tree: ast.Module, names: set[str]) -> list[str]:
    """Calls of such functions whose results are neither returned nor compared with NotServed."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    compared = {
        ast.unparse(n.args[0])
        for n in ast.walk(tree)
        if isinstance(n, ast.Call) and ast.unparse(n.func) == "isinstance" and ast.unparse(n.args[1]) == "NotServed"
    }
    found = []
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id not in names:
            continue
        user = parents[call]
        while isinstance(user, ast.IfExp):
            user = parents[user]
        kept = isinstance(user, ast.Assign) and ast.unparse(user.targets[0]) in compared
        if not (isinstance(user, ast.Return) or kept):
            found.append(f"{call.lineno}: {ast.unparse(call)}")
    return found


def _trees() -> dict[str, ast.Module]:
    files = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in SOURCES if p.is_relative_to(OPS)}
    return {module: ast.parse(path.read_text()) for module, path in files.items()}


def test_no_decomposition_takes_the_answer_of_another_one_for_a_tensor() -> None:
    trees = _trees()
    names = _may_not_serve(trees)
    assert {"cat", "split", "select"} <= names["shardcompile.ops.view.slices"] | names["shardcompile.ops.view.cat"]
    assert "taken" in names["shardcompile.ops.index.sharded"], "it is imported"
    lost = [f"{module}:{text}" for module, tree in trees.items() for text in _lost(tree, names[module])]
    assert not lost, "call the op in place of the function: dispatch then knows what else to do"


def _reasons(tree: ast.Module) -> Iterator[ast.Constant]:
    """The texts in calls of NotServed, and in functions that return a reason: "Why ... does not hold; empty if ..."."""
    for node in ast.walk(tree):
        is_call = isinstance(node, ast.Call) and ast.unparse(node.func) == "NotServed"
        is_function = isinstance(node, ast.FunctionDef) and (ast.get_docstring(node) or "").startswith("Why ")
        returned = [n for n in ast.walk(node) if isinstance(n, ast.Return)] if is_function else []
        for part in [node] if is_call else returned:
            yield from (n for n in ast.walk(part) if isinstance(n, ast.Constant) and n.value != "")


def test_every_decomposition_states_a_reason() -> None:
    reasons = []
    for module, tree in _trees().items():
        nameless = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == "NotImplemented"]
        assert not nameless, f"{module}:{nameless} gives no reason"
        reasons += [(f"{module}:{n.lineno}", n.value) for n in _reasons(tree)]
    assert len({text for _, text in reasons}) > 50
    for place, text in reasons:
        assert 3 <= len(text.split()) <= 12 and text[0].islower() and text[-1].isalnum(), f"{place}: {text}"
        assert "support" not in text and "serve" not in text, f"{place}: {text}"


def test_such_a_call_would_be_found() -> None:
    tree = ast.parse(
        "def roll(x):\n    if not x.ndim:\n        return NotServed('it has no dims')\n    return x\n\n\n"
        "def both(x):\n    return view(roll(x))\n\n\ndef passed_on(x):\n    return roll(x) if x else roll(-x)\n"
    )
    user = ast.parse("from ops import roll\n\n\ndef twice(x):\n    return [roll(x), roll(x)]\n")
    names = _may_not_serve({"ops": tree, "user": user})
    assert names == {"ops": {"roll", "passed_on"}, "user": {"roll"}}
    assert _lost(tree, names["ops"]) == ["8: roll(x)"]
    assert _lost(user, names["user"]) == ["5: roll(x)", "5: roll(x)"]
