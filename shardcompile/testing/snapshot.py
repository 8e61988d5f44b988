"""`assert_graph`: golden snapshots and budgets for the communication of compiled functions."""

from __future__ import annotations

import difflib
import itertools
import json
import os
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from shardcompile.inspect import GraphReport, IssuedCollective, Report, TracedCollective, explain
from shardcompile.inspect.diff import signature
from shardcompile.inspect.text import plural, reason_of
from shardcompile.units import in_seconds

UPDATE = "SHARDCOMPILE_UPDATE_SNAPSHOTS"
"""The environment variable that accepts new snapshots. Its value is a folder for the new texts of inline snapshots."""


def assert_graph(
    fn: Callable[..., Any] | Report,
    *args: Any,
    snapshot: str | None = None,
    expected: str | None = None,
    max_bytes: int | None = None,
    max_collectives: int | None = None,
    max_graphs: int | None = None,
    max_exposed: float | None = None,
    no_gather_of: Collection[str] = (),
    **options: Any,
) -> Report:
    """Asserts what a compiled function communicates, forward and backward.

        @pytest.mark.ranks(4)
        def test_communication():
            assert_graph(model, x, snapshot="model-4", max_bytes=2**20, no_gather_of=["aten.sort"])

    A snapshot is a text of what this library decides. It has the number of graphs and the bytes of all collectives. For
    each collective, in order, it has kind, dtype, global bytes and ranks; the number of traced collectives that it
    replaces, and their redistributions; and the large kernels between its start and its wait. It contains no names of
    nodes, no times, and nothing about the machine or the version of torch. ``pytest --update-snapshots`` writes new
    snapshots, and `git diff` shows the changes.

    Args:
        fn: a function or module, or a finished report.
        args: the arguments of the function.
        snapshot: the name of a file ``snapshots/<name>.txt`` next to the test. Use one name for each world size.
        expected: the snapshot itself, as a literal in the call. Indentation does not matter.
        max_bytes: the budget for the global bytes of all issued collectives.
        max_collectives: the budget for issued collectives.
        max_graphs: the budget for compiled graphs.
        max_exposed: the budget for the predicted exposed time of all graphs, in seconds.
        no_gather_of: parts of names of ops, modules or source lines that must cause no all-gather.
        options: options of `shardcompile.explain`: `backend`, `backward`, `off`, `world_size`, `device`, ...

    Returns:
        The report, for more assertions.

    Raises:
        AssertionError: the snapshot differs, or a budget is exceeded. The message has the collectives and
            their source lines.
    """
    __tracebackhide__ = True  # pytest shows the message and the test, not this function
    report = fn if isinstance(fn, Report) else explain(fn, *args, **options)
    found = snapshot_of(report)
    failures = list(_over_budget(report, max_bytes, max_collectives, max_graphs, max_exposed, no_gather_of))
    caller = sys._getframe(1)
    file, line = caller.f_code.co_filename, caller.f_lineno
    if snapshot is not None:
        failures += _compare_file(Path(file).parent / "snapshots" / f"{snapshot}.txt", found, report)
    if expected is not None:
        failures += _compare_inline(file, line, textwrap.dedent(expected).strip("\n"), found, report)
    if failures:
        raise AssertionError("\n\n".join(failures))
    return report


def snapshot_of(report: Report) -> str:
    """Returns the snapshot of a report, see `assert_graph`."""
    graphs = dict(report.named_graphs())
    head = f"{plural(len(graphs), 'graph')}, {plural(len(report.issued), 'collective')}, {report.total_bytes} B"
    breaks = [f"graph breaks: {len(report.graph_breaks)}"] if report.graph_breaks else []
    return "\n".join([head, *breaks, *(line for name, g in graphs.items() for line in (name, *_lines(g)))])


def _lines(graph: GraphReport) -> Iterator[str]:
    for c in graph.issued:
        parts = [signature(c), *_members(c, graph), *_overlaps(c)]
        yield f"  {'; '.join(parts)}"


def _members(c: IssuedCollective, graph: GraphReport) -> Iterator[str]:
    members = [graph.traced[m] for m in c.members]
    if len(members) > 1:
        yield f"{len(members)} in one"
    reasons = dict.fromkeys(m.redistribution or reason_of(m) for m in members)
    yield " and ".join(r for r in reasons if r)


def _overlaps(c: IssuedCollective) -> Iterator[str]:
    runs = [f"{len(list(same))} {name}" for name, same in itertools.groupby(c.overlaps)]
    if runs:
        yield f"behind {', '.join(runs)}"


def _over_budget(
    report: Report,
    max_bytes: int | None,
    max_collectives: int | None,
    max_graphs: int | None,
    max_exposed: float | None,
    no_gather_of: Collection[str],
) -> Iterator[str]:
    largest = sorted(report.issued, key=lambda c: -c.global_bytes)
    if max_bytes is not None and report.total_bytes > max_bytes:
        lines = _name(largest, report)
        yield f"{report.total_bytes} B in collectives, over max_bytes={max_bytes}; the largest:\n{lines}"
    if max_collectives is not None and len(report.issued) > max_collectives:
        lines = _name(report.issued, report)
        yield f"{len(report.issued)} collectives, over max_collectives={max_collectives}:\n{lines}"
    if max_graphs is not None and len(report.graphs) > max_graphs:
        names = ", ".join(name for name, _ in report.named_graphs())
        reasons = "".join(f"\n  {text}" for text in (*report.graph_breaks, *report.recompiles))
        yield f"{len(report.graphs)} graphs, over max_graphs={max_graphs}: {names}{reasons}"
    if max_exposed is not None and report.exposed > max_exposed:
        waits = sorted(report.issued, key=lambda c: -c.exposed)
        yield (
            f"{in_seconds(report.exposed)} of exposed communication, over max_exposed={in_seconds(max_exposed)}; most "
            f"is waited for:\n{_name(waits, report)}"
        )
    for text in no_gather_of:
        gathers = [c for c in report.traced if c.kind.startswith("all_gather") and _matches(c, text)]
        if gathers:
            named = (f"  {c.kind} {c.global_bytes} B, {reason_of(c)}, {c.source}" for c in gathers)
            yield "\n".join([f"there are all-gathers of {text!r}:", *named])


def _matches(c: TracedCollective, text: str) -> bool:
    return any(text in origin for origin in (c.gathered_for, c.op, c.module, c.source))


def _name(collectives: Sequence[IssuedCollective], report: Report, most: int = 8) -> str:
    holders = {id(c): graph for graph in report.graphs for c in graph.issued}
    lines = [f"  {signature(c)}, {holders[id(c)].sources_of(c) or 'no source line'}" for c in collectives[:most]]
    if len(collectives) > most:
        lines.append(f"  ... and {len(collectives) - most} more")
    return "\n".join(lines)


def _compare_file(path: Path, found: str, report: Report) -> list[str]:
    if UPDATE in os.environ:
        if report.rank == 0 and not (path.exists() and path.read_text() == f"{found}\n"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"{found}\n")
        return []
    if not path.exists():
        return [f"there is no snapshot {path}; pytest --update-snapshots writes it:\n{found}"]
    return _difference(path.read_text().strip("\n"), found, str(path), report)


def _compare_inline(file: str, line: int, expected: str, found: str, report: Report) -> list[str]:
    if UPDATE not in os.environ:
        return _difference(expected, found, f"{file}:{line}", report)
    if report.rank == 0 and found != expected:
        note = {"file": file, "line": line, "text": found}
        name = f"{Path(file).stem}-{line}-{os.getpid()}.json"
        (Path(os.environ[UPDATE]) / name).write_text(json.dumps(note))
    return []


def _difference(expected: str, found: str, place: str, report: Report) -> list[str]:
    if expected == found:
        return []
    changed = [line for line in difflib.ndiff(expected.splitlines(), found.splitlines()) if line[0] != "?"]
    places = _places(report)
    lines = [line + places.get(line[2:].strip(), "") * (line[0] == "+") for line in changed]
    return [
        "\n".join(
            [
                f"rank {report.rank}: the communication is not what the snapshot says ({place}); - is gone, + is new:",
                *lines,
                "if this is intended, run pytest --update-snapshots",
            ]
        )
    ]


def _places(report: Report) -> dict[str, str]:
    """Maps each line of the snapshot to the source line of its collective."""
    places: dict[str, str] = {}
    for graph in report.graphs:
        for line, c in zip(_lines(graph), graph.issued, strict=True):
            text = graph.sources_of(c)
            if text:
                places[line.strip()] = f"   <- {text}"
    return places
