"""Runs the cells of a notebook in this process, without IPython, and finds what a reader would see below each.

python -m tools.notebook_runner notebooks/*.ipynb       # writes the outputs into the notebooks
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import linecache
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

Output = dict[str, Any]


def outputs_of(notebook: dict[str, Any]) -> list[list[Output]]:
    """Run all cells of a notebook, and return the outputs of each code cell, as Jupyter writes them."""
    import matplotlib

    matplotlib.use("agg")
    main = sys.modules["__main__"] = ModuleType("__main__")  # as in Jupyter: what cells define is of `__main__`
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [_run("".join(cell["source"]), f"cell {i}", main.__dict__, i) for i, cell in enumerate(cells, 1)]


def _run(source: str, name: str, namespace: dict[str, Any], count: int) -> list[Output]:
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    tree = ast.parse(source, name)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    printed, value = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(tree, name, "exec"), namespace)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    except BaseException:
        print(printed.getvalue(), file=sys.stderr)
        raise
    if source.rstrip().endswith(";"):
        value = None
    outputs: list[Output] = []
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": _lines(printed.getvalue())})
    if value is not None:
        data = {"text/plain": _lines(repr(value))}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = _lines(value._repr_html_())
        outputs.append({"data": data, "execution_count": count, "metadata": {}, "output_type": "execute_result"})
    return outputs + _figures()


def _figures() -> list[Output]:
    """Figures that are open, as Jupyter shows and closes them at the end of a cell."""
    from matplotlib import pyplot

    outputs: list[Output] = []
    for number in pyplot.get_fignums():
        file = io.BytesIO()
        pyplot.figure(number).savefig(file, format="png", bbox_inches="tight", metadata={"Software": None})
        data = {"image/png": base64.b64encode(file.getvalue()).decode(), "text/plain": ["<Figure>"]}
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
    pyplot.close("all")
    return outputs


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def _write(path: Path, outputs: list[list[Output]]) -> None:
    notebook = json.loads(path.read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for count, (cell, found) in enumerate(zip(cells, outputs, strict=True), 1):
        cell["execution_count"], cell["outputs"] = count, found
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def in_own_process(path: Path, timeout: float = 300.0) -> list[list[Output]]:
    """`outputs_of` in a process of its own.

    Raises:
        RuntimeError: a cell raises; the text has its traceback.
    """
    command = [sys.executable, "-m", "tools.notebook_runner", "--json", str(path.resolve())]
    run = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=timeout)
    if run.returncode:
        raise RuntimeError(f"{path.name} does not run to its end:\n{run.stderr[-4000:]}")
    return json.loads(run.stdout)  # type: ignore[no-any-return]


def _environment() -> dict[str, str]:
    """Ours, with the plugin for a pytest that a cell starts, also where this package is imported but not installed."""
    installed = any(point.name == "shardcompile" for point in entry_points(group="pytest11"))
    plugin = {} if installed else {"PYTEST_ADDOPTS": "-p shardcompile.testing.plugin"}
    return os.environ | plugin


if __name__ == "__main__":
    if sys.argv[1] == "--json":
        json.dump(outputs_of(json.loads(Path(sys.argv[2]).read_text())), sys.stdout)
    else:
        for argument in sys.argv[1:]:
            _write(Path(argument), in_own_process(Path(argument)))
