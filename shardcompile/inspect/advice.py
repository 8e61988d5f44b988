"""Advice to the user, derived from a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from shardcompile.inspect.data import ReportData, TracedCollective

EXPOSED_SHARE = 0.1
"""Advice is given from this share of exposed communication in the time of a graph on."""

_MOST_LINES = 3
"""The most lines of a program with avoidable communication that are named: those that move most bytes."""

_REPLICATED_OPERAND = (
    "of a gradient are gathered, because a tensor is replicated there. Shard that tensor like the tensor that it is "
    "combined with (look its rows up by sharded indices). Then the gradient stays sharded, and the gradients of "
    "parameters are summed"
)
_WRITE_INTO_PLAIN = (
    "are gathered, because they are written into a plain tensor, which is replicated. Make that tensor from a sharded "
    "one, with x.new_zeros(...) in place of torch.zeros(...): then it is sharded, and each rank writes its own rows"
)
_DIFFERENT_PARTITIONS = (
    "change ranks, since two tensors are combined there and their partitions differ: give both the same partition. It "
    "stays the same after strides and pooling if the size of each shard is a multiple of all strides of the model"
)


def advice(report: ReportData) -> list[str]:
    """Returns lines of advice, the most important first."""
    return [*_on_graphs(report), *_on_gathering(report), *_on_lines(report), *_on_time(report)]


def _on_graphs(report: ReportData) -> Iterator[str]:
    if report.graph_breaks:
        yield (
            "a graph break ends overlap and fusion at that line, and each part is compiled alone: "
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
    """Yields advice for the lines of the program with avoidable communication."""
    moved: Counter[tuple[str, str]] = Counter()
    for name, graph in report.named_graphs():
        for c in graph.traced:
            reason = _avoidable(c, in_backward=name.endswith("backward"))
            if reason and c.source:
                moved[c.source, reason] += c.global_bytes
    for (source, reason), nbytes in moved.most_common(_MOST_LINES):
        yield f"{source}: {nbytes} B {reason}"


def _avoidable(c: TracedCollective, in_backward: bool) -> str:
    """Returns how the user can avoid a collective; empty if it cannot be avoided."""
    before, _, after = (part.strip() for part in c.redistribution.partition("->"))
    if not before.startswith("S("):
        return ""
    if c.written_to:
        return _WRITE_INTO_PLAIN
    if c.gathered_for:
        return ""
    if c.kind == "all_gather_v" and in_backward and after == "R":
        return _REPLICATED_OPERAND
    if c.kind == "fetch_ranges" and before.partition("[")[0] == after.partition("[")[0]:
        return _DIFFERENT_PARTITIONS
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
