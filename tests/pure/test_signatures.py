"""Types are said: few signatures say `Any`, no file switches checks of mypy off, and classes are tested for by name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support.signatures import says_any, shares
from tests.support.sources import PACKAGE, SOURCES

# At most this share of the signatures of a folder says Any; "" is all of them. It may only fall.
BARS = {
    "": 0.08,
    "tensor": 0.11,
    "dispatch": 0.12,
    "ops": 0.09,
    "operators": 0.0,
    "sharding": 0.05,
    "inspect": 0.03,
    "compat": 0.06,
    "testing": 0.06,
    "diagnosis": 0.0,
}


@pytest.mark.parametrize("folder", BARS)
def test_few_signatures_say_any(folder: str) -> None:
    loose, many = shares()[folder]
    assert many > 20
    assert loose <= BARS[folder] * many, f"{loose} of {many}: python -m tests.support.signatures --list {folder}/"


@pytest.mark.parametrize(
    "text, loose",
    [
        ("def f(x: Any) -> int: ...", True),
        ("def f(x: int, *rest: dict[str, Any]) -> int: ...", True),
        ("def f(x: int) -> Callable[..., Any]: ...", True),
        ("def f(x: int, y=3) -> object:\n    z: Any = x\n    return z", False),
        ("def f(x: AnyStr) -> None: ...", False),
    ],
)
def test_what_counts_as_any(text: str, loose: bool) -> None:
    (function,) = ast.parse(text).body
    assert isinstance(function, ast.FunctionDef) and says_any(function) is loose


def lines_with(pattern: str, sources: list[Path]) -> list[str]:
    """Where a pattern is found, as ``file:line``."""
    return [
        f"{path.name}:{number}"
        for path in sources
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(pattern, line)
    ]


FORBIDDEN = {
    "a switch of mypy for a whole file": r"^# mypy:",
    "a sharded tensor told by an attribute": r"hasattr\(\w+, \"_spec\"\)",
}


@pytest.mark.parametrize("pattern", FORBIDDEN.values(), ids=FORBIDDEN)
def test_nothing_forbidden_is_in_the_sources(pattern: str, tmp_path: Path) -> None:
    assert not lines_with(pattern, SOURCES)
    planted = tmp_path / "planted.py"
    planted.write_text('# mypy: disable-error-code="attr-defined"\nsharded = hasattr(x, "_spec")\n')
    assert len(lines_with(pattern, [planted])) == 1


_BLIND = [p for p in SOURCES if p.parent == PACKAGE / "dispatch" or p == PACKAGE / "tensor" / "core.py"]


def test_dispatch_knows_no_op_by_name(tmp_path: Path) -> None:
    """What happens to an op is in its record."""
    names = r"\b(aten|torch\.ops)\.\w+"
    assert len(_BLIND) > 7 and not lines_with(names, _BLIND)
    planted = tmp_path / "planted.py"
    planted.write_text("if op is torch.ops.aten.mm.default:\n    return aten.t.default\n")
    assert len(lines_with(names, [planted])) == 2
