"""The import contracts of .importlinter hold, and each of them can fail."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.lazy_imports import hidden_circles, imports_of, without_a_reason
from tests.support.sources import ROOT, SOURCES


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", code, "--no-cache"], cwd=root, capture_output=True, text=True, timeout=120
    )


def add_line(package: Path, module: str, line: str = "") -> None:
    """Adds a line of code to a module of the package, be it a file, a package, or not there yet."""
    path = package / module
    path = path / "planted.py" if (path / "__init__.py").exists() else path.with_suffix(".py")
    with path.open("a") as file:
        file.write(f"\n{line}\n")


def test_import_contracts_hold():
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "importer, imported, contract",
    [
        ("errors", "sharding", "Dependencies point down"),
        ("redistribute", "ops", "Dependencies point down"),
        ("ops/pointwise/rule", "redistribute", "Rules know layouts, no tensors"),
        ("dispatch", "passes", "Only the entry points import the passes"),
        ("passes", "planning", "The passes do not know the plans"),
    ],
)
def test_import_contracts_can_fail(tmp_path: Path, importer: str, imported: str, contract: str):
    for folder in ("passes", "shardcompile"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / ".importlinter", tmp_path)
    add_line(tmp_path / "shardcompile", imported)
    add_line(tmp_path / "shardcompile", importer, f"import shardcompile.{imported}")

    result = lint_imports(tmp_path)
    assert result.returncode != 0, result.stdout
    assert f"{contract} BROKEN" in result.stdout


def test_no_import_in_a_function_hides_a_circle(tmp_path: Path):
    assert not hidden_circles(imports_of(ROOT, "shardcompile"))
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "a.py").write_text("import planted.b\n")
    (tmp_path / "planted" / "b.py").write_text("def f():\n    from planted import a\n")
    assert hidden_circles(imports_of(tmp_path, "planted")) == ["planted.b:2 imports planted.a"]


def test_imports_in_functions_say_why():
    assert not [f"{path}:{line}" for path in SOURCES for line in without_a_reason(path.read_text())]
    assert without_a_reason("def f():\n    import heavy\n") == [2]
    assert not without_a_reason("def f():\n    # An optional package.\n    import a\n    import b\n")


def test_long_functions_have_docstrings():
    """Functions of more than 40 lines say in a docstring what they do."""
    for path in SOURCES:
        assert not long_functions(path.read_text()), path
    long = "def f():\n" + "    x = 1\n" * 40
    assert long_functions(long) == ["f"] and not long_functions(long.replace("x = 1", '"""Docs."""', 1))


def long_functions(text: str) -> list[str]:
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
    return [f.name for f in functions if (f.end_lineno or 0) - f.lineno >= 40 and ast.get_docstring(f) is None]
