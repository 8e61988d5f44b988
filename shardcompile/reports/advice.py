"""What a user can do about what a report shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from shardcompile.reports.data import ReportData, TracedCollective

EXPOSED_SHARE = 0.1
"""Of a graph's time: less exposed communication than this is not worth a word."""


_MOST_LINES = 3
"""Of a program: so many lines are named that move rows without need, those that move most."""

_OF_PLAIN = (
    "of the gradient of a tensor that is whole there are gathered: cut that tensor as what it meets is cut (look its "
    "rows up by sharded numbers), so that the gradient stays cut, and parameters get theirs by a sum, with the others"
)
_OF_TWO_CUTS = (
    "change ranks, since two tensors meet there whose cuts differ: cut both alike. Behind strides and pooling blocks "
    "stay alike where their rows divide by all strides of the model"
)


def advice(report: ReportData) -> list[str]:
    """Advice in words, the most important first."""
    return [*_on_graphs(report), *_on_gathering(report), *_on_lines(report), *_on_time(report)]


def _on_graphs(report: ReportData) -> Iterator[str]:
    if report.graph_breaks:
        yield (
            "a graph break ends overlap and fusion at that place, and each part is compiled alone: "
            "torch.compile(fullgraph=True) names the line"
        )
    if len(report.recompiles) > 2:
        yield (
            f"{len(report.recompiles)} recompiles: mark what changes as dynamic (torch._dynamo.mark_dynamic), or keep "
            "it out of Python; block sizes that change from call to call never need more than one"
        )
    hits = sum(n for name, n in report.caches.items() if name.endswith("hits"))
    if hits:
        found = "1 graph" if hits == 1 else f"{hits} graphs"
        yield f"{found} out of compiler caches: capture(caches=False), the default, compiles anew and sees them"


def _on_gathering(report: ReportData) -> Iterator[str]:
    moved: Counter[str] = Counter()
    for c in report.traced:
        if c.gathered_for:
            moved[c.gathered_for] += c.global_bytes
    for op, nbytes in moved.most_common():
        yield (
            f"{op} has no rule: its inputs are gathered, {nbytes} B, and every rank computes all of it. Register one "
            'with shardcompile.register_sharding; config.fallback = "error" finds such ops'
        )


def _on_lines(report: ReportData) -> Iterator[str]:
    """Lines of the program that move rows which another program would leave where they are."""
    moved: Counter[tuple[str, str]] = Counter()
    for name, graph in report.named_graphs():
        for c in graph.traced:
            reason = _avoidable(c, in_backward=name.endswith("backward"))
            if reason and c.source:
                moved[c.source, reason] += c.global_bytes
    for (source, reason), nbytes in moved.most_common(_MOST_LINES):
        yield f"{source}: {nbytes} B {reason}"


def _avoidable(c: TracedCollective, in_backward: bool) -> str:
    """What could be done about a collective, or an empty text."""
    before, _, after = (part.strip() for part in c.redistribution.partition("->"))
    if c.gathered_for or not before.startswith("S("):
        return ""
    if c.kind == "all_gather_v" and in_backward and after == "R":
        return _OF_PLAIN
    if c.kind == "fetch_ranges" and before.partition("[")[0] == after.partition("[")[0]:
        return _OF_TWO_CUTS
    return ""


def _on_time(report: ReportData) -> Iterator[str]:
    for name, graph in report.named_graphs():
        if graph.total and graph.exposed / graph.total > EXPOSED_SHARE and graph.issued:
            worst = max(range(len(graph.issued)), key=lambda i: graph.issued[i].exposed)
            share = f"{100 * graph.exposed / graph.total:.0f}%"
            which = f"number {worst}, {graph.issued[worst].kind}"
            text = f"{name}: {share} of the predicted time waits for communication, most for {which}"
            if not graph.steps:
                yield f'{text}; no pass has run: torch.compile(backend="shardcompile")'
            elif graph.bound and graph.total <= 1.1 * graph.bound:
                yield f"{text}; no order is more than 10% faster, so only less communication or more compute helps"
            else:
                yield text
