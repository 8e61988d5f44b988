"""The predicted timelines of a report: their lanes, the waits of compute, and a Chrome trace of all graphs."""

from __future__ import annotations

from collections.abc import Iterator

from shardcompile.inspect.data import GraphReport, IssuedCollective, ReportData, Span
from shardcompile.inspect.text import named_ranks
from shardcompile.passes.schedule.simulator import COMPUTE


def chrome_trace(report: ReportData) -> dict[str, object]:
    """Returns all graphs of a report as a Chrome trace, for https://ui.perfetto.dev and chrome://tracing.

    Each graph is a process, each stream a thread. The category of a bar is "compute", "communication", or "waiting" if
    the compute stream is idle.
    """
    events: list[dict[str, object]] = []
    for i, (name, graph) in enumerate(report.named_graphs()):
        events += _events(i + 1, name, graph)  # process 0 is the system's
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def lanes(graph: GraphReport) -> dict[str, str]:
    """Returns the streams of a timeline with their titles, compute first."""
    ranks = {s.stream: c.ranks for s, c in with_collectives(graph) if c is not None}
    streams = dict.fromkeys([COMPUTE, *(s.stream for s in graph.spans)])
    return {s: f"group {s}: ranks {named_ranks(ranks[s])}" if s in ranks else s for s in streams}


def with_collectives(graph: GraphReport) -> Iterator[tuple[Span, IssuedCollective | None]]:
    """Yields the spans of a timeline, each with its collective; None for compute."""
    collectives = {c.name: c for c in graph.issued}
    for span in graph.spans:
        yield span, None if span.stream == COMPUTE else collectives.get(span.label)


def idle_times(graph: GraphReport) -> Iterator[tuple[float, float, int | None]]:
    """Yields the idle times of the compute stream: start, end, and the index of the awaited collective.

    The index is None after the end of the compute stream, while a collective that nobody waits for still runs.
    """
    stalls = [(c.end - c.exposed, c.end, i) for i, c in enumerate(graph.issued) if c.exposed]
    yield from sorted(stalls)
    computed = (s.end for s in graph.spans if s.stream == COMPUTE)
    ended = max([0.0, *computed, *(end for _, end, _ in stalls)])
    if graph.total > ended:
        yield ended, graph.total, None


def _events(process: int, name: str, graph: GraphReport) -> Iterator[dict[str, object]]:
    """Yields the events of a graph, which is a process of the trace, as each of its lanes is a thread."""
    streams = lanes(graph)
    thread = {stream: i for i, stream in enumerate(streams)}

    def metadata(kind: str, tid: int, **args: object) -> dict[str, object]:
        return {"ph": "M", "name": kind, "pid": process, "tid": tid, "args": args}

    def bar(label: str, category: str, stream: str, start: float, end: float, args: object) -> dict[str, object]:
        # Microseconds, rounded to the nanosecond, as the format keeps them.
        begin, until = round(start * 1e9), round(end * 1e9)
        times = {"ts": begin / 1e3, "dur": (until - begin) / 1e3}
        return {"ph": "X", "name": label, "cat": category, "pid": process, "tid": thread[stream], **times, "args": args}

    yield metadata("process_name", 0, name=name)
    yield metadata("process_sort_index", 0, sort_index=process)
    for stream, title in streams.items():
        yield metadata("thread_name", thread[stream], name=title)
        yield metadata("thread_sort_index", thread[stream], sort_index=thread[stream])
    for span, c in with_collectives(graph):
        category = "compute" if span.stream == COMPUTE else "communication"
        yield bar(span.label, category, span.stream, span.start, span.end, {} if c is None else _args(graph, c))
    for start, end, i in idle_times(graph):
        label = "nothing left to compute" if i is None else f"waits for {graph.issued[i].name}"
        yield bar(label, "waiting", COMPUTE, start, end, {})


def _args(graph: GraphReport, c: IssuedCollective) -> dict[str, object]:
    members = [graph.traced[m] for m in c.members]
    return {
        "kind": c.kind,
        "ranks": list(c.ranks),
        "dtypes": list(c.dtypes),
        "global_bytes": c.global_bytes,
        "least_bytes": c.least_bytes,
        "most_bytes": c.most_bytes,
        "exposed_us": c.exposed * 1e6,
        "overlaps": list(c.overlaps),
        "members": [m.name for m in members],
        "source": [*dict.fromkeys(m.source for m in members if m.source)],
    }
