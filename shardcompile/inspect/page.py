"""A report as one self-contained HTML page, and as a table for notebooks.

The page is `page.html`, which contains `page.css`, `page.js` and the report as JSON. It loads nothing over the network:
its content security policy allows only this style sheet and this script, by their hashes. All data of the report enters
the page as text.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.resources import files
from string import Template

from shardcompile.inspect.advice import advice
from shardcompile.inspect.data import Compilation, GraphReport, IssuedCollective, ReportData, TracedCollective
from shardcompile.inspect.text import as_text, named_ranks, percent, place_of, plural, reason_of
from shardcompile.inspect.timeline import idle_times, lanes
from shardcompile.passes.schedule.simulator import COMPUTE
from shardcompile.units import in_bytes, in_seconds

_MOST_ROWS = 6
"""The most rows of a table in a notebook."""


def page(report: ReportData) -> str:
    """Returns one HTML page: timelines, the work of the passes, graphs side by side, collectives.

    The page works as a file, without a network.
    """
    style, script = _part("page.css"), _part("page.js")
    return Template(_part("page.html")).substitute(
        title=html.escape(f"rank {report.rank} of {report.world_size}"),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        data=_as_json(_data(report)),
        text=html.escape(as_text(report)),
    )


def _part(name: str) -> str:
    return (files("shardcompile.inspect") / name).read_text("utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _as_json(data: object) -> str:
    """Returns JSON for a script element. It contains no text that ends the element or starts a comment."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _data(report: ReportData) -> dict[str, object]:
    lines: dict[str, int] = {}
    return {
        "rank": report.rank,
        "world": report.world_size,
        "device": report.device,
        "torch": report.torch,
        "predictedFor": report.predicted_for,
        "notes": report.notes,
        "attentionStrategies": list(
            dict.fromkeys(f"{g.side}: {strategy}" for g in report.graphs for strategy in g.attention_strategies)
        ),
        "error": report.error,
        "graphBreaks": report.graph_breaks,
        "recompiles": report.recompiles,
        "caches": report.caches,
        "advice": advice(report),
        "compilations": [_compilation(c) for c in report.compilations],
        "graphs": list(_graphs(report, lines)),
        "lines": list(lines),  # each distinct line of the graphs once, since stages share most lines
    }


def _compilation(compilation: Compilation) -> dict[str, object]:
    return {"function": compilation.function, "place": compilation.place, "graphs": len(compilation.graphs)}


def _graphs(report: ReportData, lines: dict[str, int]) -> Iterator[dict[str, object]]:
    names = (name for name, _ in report.named_graphs())
    for i, compilation in enumerate(report.compilations):
        captured = [(stage, _line_indices(text, lines)) for stage, text in compilation.stages.items()]
        for graph in compilation.graphs:
            stages = [*captured, *((stage, _line_indices(text, lines)) for stage, text in graph.stages.items())]
            yield {"name": next(names), "compilation": i, "stages": stages, **_graph(graph)}


def _line_indices(text: str, lines: dict[str, int]) -> list[int]:
    return [lines.setdefault(line, len(lines)) for line in text.removesuffix("\n").split("\n")]


def _graph(graph: GraphReport) -> dict[str, object]:
    streams = lanes(graph)
    lane = {stream: i for i, stream in enumerate(streams)}
    index = {c.name: i for i, c in enumerate(graph.issued)}
    return {
        "side": graph.side,
        "nodes": graph.nodes,
        "total": graph.total,
        "compute": graph.compute,
        "exposed": graph.exposed,
        "bound": graph.bound,
        "peak": graph.peak_bytes,
        "steps": [asdict(step) for step in graph.steps],
        "lanes": list(streams.values()),
        "spans": [
            (s.label, lane[s.stream], s.start, s.end, None if s.stream == COMPUTE else index.get(s.label))
            for s in graph.spans
        ],
        "waiting": list(idle_times(graph)),
        "traced": [_traced_as_json(c) for c in graph.traced],
        "issued": [_issued_as_json(c) for c in graph.issued],
    }


def _traced_as_json(c: TracedCollective) -> dict[str, object]:
    return _shared_as_json(c) | {
        "dim": c.mesh_dim,
        "reason": reason_of(c),
        "op": c.op,
        "gatheredFor": c.gathered_for,
        "place": place_of(c.source) if c.source else "",
        "source": c.source,
        "module": c.module,
        "fate": c.fate,
    }


def _issued_as_json(c: IssuedCollective) -> dict[str, object]:
    return _shared_as_json(c) | {
        "members": c.members,
        "start": c.start,
        "end": c.end,
        "exposed": c.exposed,
        "behind": c.overlappable,
        "overlaps": c.overlaps,
    }


def _shared_as_json(c: TracedCollective | IssuedCollective) -> dict[str, object]:
    return {
        "name": c.name,
        "kind": c.kind,
        "ranks": named_ranks(c.ranks),
        "size": len(c.ranks),
        "dtypes": ", ".join(c.dtypes),
        "bytes": c.global_bytes,
        "least": c.least_bytes,
        "most": c.most_bytes,
    }


def summary(report: ReportData) -> str:
    """Returns the most important parts of a report as HTML tables for notebooks, a few kilobytes at most."""
    head = (
        f"rank {report.rank} of {report.world_size}, {report.device or 'nothing compiled'}, torch {report.torch}: "
        f"{plural(len(report.graphs), 'graph')}, {plural(len(report.issued), 'collective')}, "
        f"{in_bytes(report.total_bytes)}"
    )
    graphs = ("graph", "nodes", "traced", "issued", "predicted", "exposed", "bound", "peak")
    waits = ("waits most for", "graph", "ranks", "global", "takes", "exposed", "from")
    return "".join(
        [
            f"<div><p><b>Report</b> {_short(head)}</p>",
            f"<p>ended by {_short(report.error)}</p>" if report.error else "",
            *_table(graphs, _graph_rows(report)),
            *_table(waits, _wait_rows(report)),
            *_items(advice(report)),
            "</div>",
        ]
    )


def _graph_rows(report: ReportData) -> list[Sequence[str]]:
    return [
        (
            name,
            f"{g.nodes}",
            f"{len(g.traced)}",
            f"{len(g.issued)}",
            in_seconds(g.total),
            f"{in_seconds(g.exposed)} ({percent(g.exposed, g.total)})",
            in_seconds(g.bound),
            in_bytes(g.peak_bytes),
        )
        for name, g in report.named_graphs()
    ]


def _wait_rows(report: ReportData) -> list[Sequence[str]]:
    waits = [(c, name, g) for name, g in report.named_graphs() for c in g.issued if c.exposed]
    waits.sort(key=lambda wait: -wait[0].exposed)
    return [
        (
            c.kind,
            name,
            named_ranks(c.ranks),
            in_bytes(c.global_bytes),
            in_seconds(c.seconds),
            in_seconds(c.exposed),
            ", ".join(dict.fromkeys(place_of(s) for m in c.members if (s := g.traced[m].source))),
        )
        for c, name, g in waits
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if not rows:
        return
    yield "<table><thead><tr>"
    yield from (f"<th>{name}</th>" for name in head)
    yield "</tr></thead><tbody>"
    for row in rows[:_MOST_ROWS]:
        yield "<tr>" + "".join(f"<td>{_short(cell)}</td>" for cell in row) + "</tr>"
    if len(rows) > _MOST_ROWS:
        yield f'<tr><td colspan="{len(head)}">and {len(rows) - _MOST_ROWS} more: to_html() has them all</td></tr>'
    yield "</tbody></table>"


def _items(texts: Sequence[str]) -> Iterator[str]:
    if texts:
        yield "<p>What to do</p><ul>"
        yield from (f"<li>{_short(text, 400)}</li>" for text in texts[:_MOST_ROWS])
        yield "</ul>"


def _short(text: str, most: int = 160) -> str:
    return html.escape(text if len(text) <= most else text[: most - 1] + "…")
