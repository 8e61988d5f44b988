"""Advice to the user about what a report shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from shardcompile.inspect.data import ReportData, TracedCollective

EXPOSED_SHARE = 0.1
"""The least share of a graph's time that is exposed communication and is worth a line of advice."""


_MOST_LINES = 3
"""How many lines of a program that move rows without need are named at most: those that move most bytes."""

_OF_PLAIN = (
    "of a gradient are gathered, because a tensor is whole there. Sharded that tensor like the tensor that it meets "
    "(look "
    "its rows up by sharded indices). Then the gradient stays sharded, and the gradients of parameters are summed"
)
_INTO_PLAIN = (
    "are gathered, because they are written into a plain tensor, which is whole on every rank. Make that tensor from a "
    "sharded one, as x.new_zeros(...) does in place of torch.zeros(...): then it is sharded, and each rank writes "
    "its own rows"
)
_OF_TWO_PARTITIONS = (
    "change ranks, since two tensors meet there and their partitions differ: sharded both alike. After strides and "
    "pooling, "
    "shards stay alike if the rows of each shard are a multiple of all strides of the model"
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
            f"{len(report.recompiles)} recompiles: mark sizes that vary as dynamic (torch._dynamo.mark_dynamic), or do "
            "not read them in Python. Shard sizes that vary from call to call need one recompile at most"
        )
    hits = sum(n for name, n in report.caches.items() if name.endswith("hits"))
    if hits:
        found = "1 graph" if hits == 1 else f"{hits} graphs"
        yield f"{found} came from compiler caches: capture(caches=False), the default, compiles anew and reports them"


def _on_gathering(report: ReportData) -> Iterator[str]:
    moved: Counter[str] = Counter()
    for c in report.traced:
        if c.gathered_for and not c.written_to:
            moved[c.gathered_for] += c.global_bytes
    for op, nbytes in moved.most_common():
        yield (
            f"{op} runs on full tensors on every rank, {nbytes} B gathered: no sharding rule serves it. Register one "
            'with shardcompile.register_sharding; config.fallback = "error" finds such ops'
        )


def _on_lines(report: ReportData) -> Iterator[str]:
    """The lines of the program that move rows without need."""
    moved: Counter[tuple[str, str]] = Counter()
    for name, graph in report.named_graphs():
        for c in graph.traced:
            reason = _avoidable(c, in_backward=name.endswith("backward"))
            if reason and c.source:
                moved[c.source, reason] += c.global_bytes
    for (source, reason), nbytes in moved.most_common(_MOST_LINES):
        yield f"{source}: {nbytes} B {reason}"


def _avoidable(c: TracedCollective, in_backward: bool) -> str:
    """What the user can do about a collective; empty if there is nothing to do."""
    before, _, after = (part.strip() for part in c.redistribution.partition("->"))
    if not before.startswith("S("):
        return ""
    if c.written_to:
        return _INTO_PLAIN
    if c.gathered_for:
        return ""
    if c.kind == "all_gather_v" and in_backward and after == "R":
        return _OF_PLAIN
    if c.kind == "fetch_ranges" and before.partition("[")[0] == after.partition("[")[0]:
        return _OF_TWO_PARTITIONS
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
