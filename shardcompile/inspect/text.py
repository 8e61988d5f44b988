"""Formats a report as text for the terminal: the collectives, their cost, and advice."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from shardcompile.collectives import MovedRows
from shardcompile.inspect.advice import advice
from shardcompile.inspect.data import Compilation, GraphReport, IssuedCollective, ReportData, TracedCollective
from shardcompile.units import in_bytes, in_seconds

_MOST_ROWS = 24


def as_text(report: ReportData) -> str:
    """Returns the report as lines of text."""
    return "\n".join(_lines(report))


def _lines(report: ReportData) -> Iterator[str]:
    n, graphs = len(report.compilations), len(report.graphs)
    yield f"rank {report.rank} of {report.world_size}, {report.device or 'nothing compiled'}, torch {report.torch}"
    yield (
        f"{plural(n, 'graph')} captured, {graphs} compiled; {plural(len(report.graph_breaks), 'graph break')}, "
        f"{plural(len(report.recompiles), 'recompile')}; {plural(len(report.issued), 'collective')}, "
        f"{in_bytes(report.total_bytes)}"
    )
    if report.error:
        yield f"ended by {report.error.splitlines()[0]}"
    for reason in report.graph_breaks:
        yield f"graph break: {reason.splitlines()[0]}"
    for reason in report.recompiles:
        yield f"compiled again: {reason}"
    yield from report.notes
    for compilation in report.compilations:
        yield ""
        yield from _compilation_lines(compilation)
    if report.moved:
        yield ""
        yield "rows that went where data says"
        yield from (f"  {_moved(rows)}" for rows in report.moved)
    if any("[?]" in c.redistribution for c in report.traced):
        yield ""
        yield "[?]: shard sizes that the graph takes as data, so that it serves every layout"
    found = advice(report)
    if found:
        yield ""
        yield "what to do"
        yield from (f"  - {line}" for line in found)


def _moved(rows: MovedRows) -> str:
    most = f"; at most {rows.unevenness:.2f} times the mean to one rank" if rows.rows else ""
    return (
        f"{plural(rows.calls, 'exchange')} over ranks {named_ranks(rows.ranks)} of {rows.row}: {rows.moved:,} of "
        f"{plural(rows.rows, 'row')} to another rank, {in_bytes(rows.moved * rows.row_bytes)}{most}"
    )


def _compilation_lines(compilation: Compilation) -> Iterator[str]:
    place = f" ({compilation.place})" if compilation.place else ""
    yield f"{compilation.function}{place}"
    if not compilation.graphs:
        yield "  no graphs: out of a compiler cache, not compiled to the end, or a backend without AOTAutograd"
    for graph in compilation.graphs:
        yield from _graph_lines(graph)


def _graph_lines(graph: GraphReport) -> Iterator[str]:
    traced, issued = len(graph.traced), len(graph.issued)
    counts = plural(traced, "collective") + (f" traced, {issued} issued" if issued != traced else "")
    yield (
        f"  {graph.side}: {graph.nodes} nodes, {counts}; predicted {in_seconds(graph.total)}, of which "
        f"{in_seconds(graph.exposed)} exposed ({percent(graph.exposed, graph.total)}), "
        f"bound {in_seconds(graph.bound)}; peak {in_bytes(graph.peak_bytes)}"
    )
    changed = [s.name for s in graph.steps if s.changed]
    if graph.steps:
        yield f"    passes that changed it: {', '.join(changed) or 'none'}"
    yield from (f"    attention goes {strategy}" for strategy in graph.attention_strategies)
    if issued:
        yield from (f"    {row}" for row in _table(graph))


_COLUMNS = ("#", "kind", "group", "global", "a rank puts in", "takes", "exposed", "for", "from")


def _table(graph: GraphReport) -> Iterator[str]:
    rows = [_row(i, c, graph.traced) for i, c in enumerate(graph.issued[:_MOST_ROWS])]
    yield from columns([_COLUMNS, *rows], left=(1, 2, 7, 8))
    left = len(graph.issued) - _MOST_ROWS
    if left > 0:
        yield f"... and {left} more: report.to_html() or report.issued has them all"


def _row(i: int, c: IssuedCollective, traced: Sequence[TracedCollective]) -> tuple[str, ...]:
    members = [traced[m] for m in c.members]
    return (
        str(i),
        c.kind,
        named_ranks(c.ranks),
        in_bytes(c.global_bytes),
        _range(c.least_bytes, c.most_bytes),
        in_seconds(c.seconds),
        in_seconds(c.exposed) if c.exposed else "-",
        _first_and_count([reason_of(m) for m in members]),
        _first_and_count([m.source and place_of(m.source) for m in members]),
    )


def _first_and_count(texts: Sequence[str]) -> str:
    distinct = [t for t in dict.fromkeys(texts) if t]
    if not distinct:
        return ""
    return distinct[0] + (f" and {len(distinct) - 1} more" if len(distinct) > 1 else "")


def reason_of(c: TracedCollective) -> str:
    """Returns a short description of why a collective is needed."""
    if c.gathered_for and not c.written_to:
        return f"{c.gathered_for} runs on full tensors"
    return _SIZES.sub(_short_sizes, c.redistribution) or c.op


_SIZES = re.compile(r"\[(\d+(?:,\d+)+)\]")
_MOST_SIZES = 6


def _short_sizes(match: re.Match[str]) -> str:
    """Shortens ``[1,1,1,1,1,1,1,1]`` to ``[1 x 8]``."""
    sizes = match[1].split(",")
    if len(sizes) <= _MOST_SIZES:
        return match[0]
    runs = [(size, len(list(same))) for size, same in itertools.groupby(sizes)]
    texts = [size if n == 1 else f"{size} x {n}" for size, n in runs]
    if len(texts) > _MOST_SIZES:
        texts = [*texts[:3], "...", *texts[-2:]]
    return f"[{','.join(texts)}]"


def place_of(source: str) -> str:
    """Returns the file name, without folders, and the line number in a line of a traceback."""
    for part in source.split("File ")[1:]:
        name, _, rest = part.strip().partition('"')[2].partition('"')
        line = rest.partition("line ")[2].partition(",")[0]
        return f"{name.rpartition('/')[2]}:{line.strip()}"
    return source[:40]


def columns(rows: Sequence[Sequence[str]], left: Sequence[int]) -> Iterator[str]:
    """Yields the rows of a table as aligned lines. The columns in `left` are left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (t.ljust(w) if i in left else t.rjust(w) for i, (t, w) in enumerate(zip(row, widths, strict=True)))
        yield "  ".join(cells).rstrip()


def named_ranks(ranks: Sequence[int]) -> str:
    """Returns a short text for ranks, such as ``0-7`` or ``0,8,..,56``."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]},{ranks[1]},..,{ranks[-1]}"


def plural(n: int, noun: str) -> str:
    """Returns a count with its noun, such as ``2 graphs``."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def percent(part: float, whole: float) -> str:
    """Returns the share of a part in percent, as text."""
    return f"{100 * part / whole:.0f}%" if whole else "0%"


def _range(least: float, most: float) -> str:
    return in_bytes(most) if least == most else f"{in_bytes(least)} .. {in_bytes(most)}"
