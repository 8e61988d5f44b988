"""Compares two reports: of two commits, world sizes, versions of torch or lists of passes, or of two ranks."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shardcompile.inspect.data import GraphReport, IssuedCollective, ReportData
from shardcompile.inspect.text import columns, named_ranks, plural, reason_of
from shardcompile.units import in_bytes, in_seconds


@dataclass(frozen=True)
class Difference:
    """The differences of two reports, as texts and as a table. It is false if there are none.

    Attributes:
        errors: collectives that differ between two ranks of one run. Such ranks would wait without end.
        words: descriptions of other differences, the most important first.
        table: rows of graph, figure, value before, value after.
    """

    errors: tuple[str, ...]
    words: tuple[str, ...]
    table: tuple[tuple[str, str, str, str], ...]

    def __bool__(self) -> bool:
        return bool(self.errors or self.words or self.table)

    def __str__(self) -> str:
        if not self:
            return "no difference"
        rows = columns([("graph", "figure", "before", "after"), *self.table], left=(0, 1)) if self.table else ()
        return "\n".join([*(f"error: {text}" for text in self.errors), *self.words, *rows])


def difference(before: ReportData, after: ReportData) -> Difference:
    """Compares two reports.

    Two ranks of one run must have the same collectives. The payloads of a collective may differ in size.
    """
    changed = list(_changed_collectives(before, after))
    ranks = _are_ranks_of_one_run(before, after)
    errors = tuple(f"ranks {before.rank} and {after.rank} differ, {text}" for text in changed) if ranks else ()
    words = (*_settings(before, after), *_counts(before, after), *(() if ranks else changed))
    return Difference(errors, words, tuple(_figures(before, after)))


def _are_ranks_of_one_run(before: ReportData, after: ReportData) -> bool:
    return before.rank != after.rank and (before.world_size, before.torch) == (after.world_size, after.torch)


def _settings(before: ReportData, after: ReportData) -> Iterator[str]:
    for name in ("world_size", "device", "torch", "predicted_for"):
        old, new = getattr(before, name), getattr(after, name)
        if old != new:
            yield f"{name}: {old} -> {new}"


def _counts(before: ReportData, after: ReportData) -> Iterator[str]:
    old, new = len(before.graphs), len(after.graphs)
    if old != new:
        yield f"graphs: {old} -> {new}"
    for name in ("graph_breaks", "recompiles"):
        for text in getattr(after, name)[len(getattr(before, name)) :]:
            yield f"new in {name}: {text}"
        if len(getattr(before, name)) > len(getattr(after, name)):
            yield f"{name}: {len(getattr(before, name))} -> {len(getattr(after, name))}"


def _changed_collectives(before: ReportData, after: ReportData) -> Iterator[str]:
    old, new = dict(before.named_graphs()), dict(after.named_graphs())
    for name in dict.fromkeys([*old, *new]):
        if name not in new:
            yield f"{name}: this graph is gone, with {plural(len(old[name].issued), 'collective')}"
        elif name not in old:
            yield f"{name}: this graph is new, with {plural(len(new[name].issued), 'collective')}"
        else:
            yield from (f"{name}: {text}" for text in _in_graph(old[name], new[name]))


def _in_graph(old: GraphReport, new: GraphReport) -> Iterator[str]:
    a, b = [signature(c) for c in old.issued], [signature(c) for c in new.issued]
    for tag, i, j, k, m in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        yield from (f"number {n}, gone: {_describe(old.issued[n], old)}" for n in range(i, j))
        yield from (f"number {n}, new: {_describe(new.issued[n], new)}" for n in range(k, m))


def signature(c: IssuedCollective) -> str:
    """Describes a collective independently of names of nodes and of the machine."""
    return f"{c.kind} {'+'.join(c.dtypes)} {c.global_bytes} B over {named_ranks(c.ranks)}"


def _describe(c: IssuedCollective, graph: GraphReport) -> str:
    members = [graph.traced[m] for m in c.members]
    reasons = " and ".join(dict.fromkeys(reason_of(m) for m in members))
    places = graph.sources_of(c)
    return signature(c) + (f", {reasons}" if reasons else "") + (f", {places}" if places else "")


def _figures(before: ReportData, after: ReportData) -> Iterator[tuple[str, str, str, str]]:
    new = dict(after.named_graphs())
    for name, old in before.named_graphs():
        if name not in new:
            continue
        yield from _rows(name, old, new[name])


def _rows(name: str, old: GraphReport, new: GraphReport) -> Iterator[tuple[str, str, str, str]]:
    for figure, of in _FIGURES.items():
        before, after = of(old), of(new)
        if before != after:
            yield name, figure, before, after


_FIGURES: dict[str, Callable[[GraphReport], str]] = {
    "collectives": lambda g: str(len(g.issued)),
    "bytes of collectives": lambda g: f"{sum(c.global_bytes for c in g.issued)} B",
    "predicted time": lambda g: in_seconds(g.total),
    "exposed communication": lambda g: in_seconds(g.exposed),
    "peak memory": lambda g: in_bytes(g.peak_bytes),
}
