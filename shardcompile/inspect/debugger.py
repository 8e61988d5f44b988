"""Dynamo's bytecode as Python source, and files for a debugger. Both come from depyf."""

from __future__ import annotations

import contextlib
import io
import types
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from shardcompile.compat.threads import rank_of_thread
from shardcompile.inspect.report import Report


def decompile(bytecode: types.CodeType) -> str:
    """Returns bytecode as Python source, or a comment that says why there is none."""
    if find_spec("depyf") is None:
        return "# depyf, which decompiles bytecode, is not installed; the rest of the report holds"
    # Heavy, and an optional package.
    import depyf

    try:
        # It prints a message for bytecode that it cannot read.
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return str(depyf.decompile(bytecode))
    except Exception as error:  # a decompiler may raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return f"# depyf {_version()} cannot decompile this bytecode ({reason}); the rest of the report holds"


@contextlib.contextmanager
def run_from_files(folder: str | Path | None, report: Report) -> Iterator[None]:
    """Runs code that is compiled inside the context from files, in a subfolder for this rank.

    Args:
        folder: the folder; None to do nothing.
        report: gets a note about files that could not be written.

    Raises:
        ValueError: ranks are threads. They would share the files that depyf writes.
    """
    if folder is None:
        yield
        return
    if rank_of_thread() is not None:
        raise ValueError("capture(sources=...) is for ranks that are processes; leave out processes=False")
    # An optional package.
    import depyf

    rank_folder = Path(folder) / f"rank{dist.get_rank() if dist.is_initialized() else 0}"
    rank_folder.mkdir(parents=True, exist_ok=True)
    with _collect_warnings(report, rank_folder), depyf.prepare_debug(str(rank_folder)):
        yield


@contextlib.contextmanager
def _collect_warnings(report: Report, folder: Path) -> Iterator[None]:
    """Turns depyf's warnings into one note. Other warnings are raised as usual."""
    with mock.patch("depyf.explain.enable_debugging.traceback"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            texts = [str(w.message) for w in caught if "depyf" in str(w.message)]
            failed = sum("problem when decompiling" in text for text in texts)
            if failed:
                report.notes.append(
                    f"depyf {_version()} could not decompile {failed} function(s). Their bytecode runs without a file "
                    f"in {folder}, which has the graphs and Inductor's code"
                )
    for w in caught:
        if "depyf" not in str(w.message):
            warnings.warn_explicit(w.message, w.category, w.filename, w.lineno, source=w.source)


def _version() -> str:
    return version("depyf")
