"""Makes the records of a report from a graph. The process groups of the graph must exist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import Graph, Node

from shardcompile import compat
from shardcompile.inspect.data import IssuedCollective, Span, TracedCollective
from shardcompile.passes.cost.model import CostModel, GraphCosts
from shardcompile.passes.graph import node_sizes
from shardcompile.passes.graph.collective import Collective, collectives, kind_of, notes_of, origins
from shardcompile.passes.schedule.bounds import lower_bound
from shardcompile.passes.schedule.control_dependencies import ANCHORS
from shardcompile.passes.schedule.simulator import COMPUTE, Timeline, simulate


@dataclass(frozen=True)
class Analysis:
    """The analysis of a graph between two passes.

    Attributes:
        timeline: the predicted timeline.
        bound: a lower bound on the time in seconds, for any order of the nodes.
        found: the collectives.
        overlappable: for each collective, the seconds of compute between its start and its first wait.
        overlaps: for each collective, the large kernels between its start and its first wait.
        nodes: the number of nodes.
    """

    timeline: Timeline
    bound: float
    found: list[Collective]
    overlappable: Mapping[Node, float]
    overlaps: Mapping[Node, tuple[str, ...]]
    nodes: int

    @staticmethod
    def of(graph: Graph, model: CostModel | None) -> Analysis:
        """Analyses a graph.

        Args:
            graph: the graph, in a valid order.
            model: the costs; None for those of the graph's device.
        """
        model = (CostModel.of(graph) if model is None else model).of_slowest_rank(graph)
        costs = GraphCosts.of(graph, model)
        order = list(graph.nodes)
        found = collectives(graph)
        timeline = simulate(order, costs)
        overlappable, overlaps = _overlappable(order, costs, found), _overlaps(order, found)
        return Analysis(timeline, lower_bound(graph, costs), found, overlappable, overlaps, len(order))


def _overlappable(order: Sequence[Node], costs: GraphCosts, found: Sequence[Collective]) -> dict[Node, float]:
    """Returns the seconds of compute between the start and the first wait of each collective."""
    clock, now = {}, 0.0
    for node in order:
        clock[node] = now
        now += 0.0 if node in costs.group else costs.seconds[node]
    return {c.node: min((clock[w] for w in c.waits), default=now) - clock[c.node] for c in found}


def _overlaps(order: Sequence[Node], found: Sequence[Collective]) -> dict[Node, tuple[str, ...]]:
    kernels = [(i, _kernel(node)) for i, node in enumerate(order) if node.target in ANCHORS]
    position = {node: i for i, node in enumerate(order)}
    overlaps = {}
    for c in found:
        start, end = position[c.node], min((position[w] for w in c.waits), default=len(order))
        overlaps[c.node] = tuple(name for i, name in kernels if start < i < end)
    return overlaps


def _kernel(node: Node) -> str:
    """Returns the family of a large kernel. Versions of torch choose different members of a family."""
    name = str(node.target)
    return next((family for family in ("convolution", "attention") if family in name), "mm")


def ranks_of(c: Collective) -> tuple[int, ...]:
    """Returns the ranks of a collective's group."""
    return tuple(dist.get_process_group_ranks(compat.process_group(c.group_name)))


def _dtypes(c: Collective) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(p.meta["val"].dtype).removeprefix("torch.") for p in c.payloads))


def bytes_put_in(c: Collective) -> tuple[int, int]:
    """Returns the bytes of the smallest and of the largest payload over the ranks of the group.

    Dynamic sizes count by their hints, which are those of the call that led to the compilation.
    """
    n = c.group_size
    by_rank = [0.0] * n
    for member in node_sizes.members(c, n):
        sizes = None if member.put is None else member.put.sizes or c.hinted_sizes()
        if sizes:
            shares = [s / max(sum(sizes), 1) for s in sizes]
        else:
            shares = [1.0 if member.put is None else 1 / n] * n
        by_rank = [total + member.nbytes * share for total, share in zip(by_rank, shares, strict=True)]
    return round(min(by_rank)), round(max(by_rank))


def traced_collective(c: Collective) -> TracedCollective:
    """Returns the record of a collective before the passes."""
    notes = c.notes
    least, most = bytes_put_in(c)
    return TracedCollective(
        name=c.node.name,
        kind=c.kind,
        ranks=ranks_of(c),
        mesh_dim=notes.get("mesh_dim", ""),
        dtypes=_dtypes(c),
        global_bytes=c.global_bytes,
        least_bytes=least,
        most_bytes=most,
        redistribution=notes.get("redistribution", ""),
        op=_op(c.node),
        gathered_for=notes.get("gathered_for", ""),
        source=c.source,
        module=c.module,
        written_to=notes.get("written_to", ""),
    )


def attention_strategies(graph: Graph) -> tuple[str, ...]:
    """Returns the strategies of the attentions in a graph, each once, in the graph's order."""
    # Sizes and views that the backward pass recomputes have notes of the forward pass, so only these nodes count.
    noted = (notes_of(n).get("attention") for n in graph.nodes if n.target in ANCHORS or kind_of(n) is not None)
    return tuple(dict.fromkeys(strategy for strategy in noted if strategy is not None))


def _op(node: Node) -> str:
    original: Any = node.meta.get("original_aten")
    return str(original) if isinstance(original, torch._ops.OpOverload) else ""


def issued_collectives(
    before: Analysis, after: Analysis, traced: Sequence[TracedCollective]
) -> tuple[IssuedCollective, ...]:
    """Returns the records of the collectives of a graph after the passes.

    Args:
        before: the graph before the passes.
        after: the graph after the passes.
        traced: the collectives before the passes.
    """
    index = {c.name: i for i, c in enumerate(traced)}
    was_overlappable = {node.name: seconds for node, seconds in before.overlappable.items()}
    times = {e.node: e for e in after.timeline.events if e.stream != COMPUTE}
    issued = []
    for c in after.found:
        names = [name for name in origins(c.node) if name in index]
        least, most = bytes_put_in(c)
        event = times[c.node]
        overlappable = (
            max((was_overlappable.get(name, 0.0) for name in names), default=0.0),
            after.overlappable[c.node],
        )
        members = tuple(index[name] for name in names)
        exposed = after.timeline.stalls.get(c.node, 0.0)
        issued.append(
            IssuedCollective(
                c.node.name,
                c.kind,
                ranks_of(c),
                _dtypes(c),
                c.global_bytes,
                least,
                most,
                members,
                event.start,
                event.end,
                exposed,
                overlappable,
                after.overlaps[c.node],
            )
        )
    return tuple(issued)


def with_fates(
    traced: Sequence[TracedCollective], issued: Sequence[IssuedCollective], gone: Mapping[str, str]
) -> tuple[TracedCollective, ...]:
    """Returns the traced collectives, each with what the passes did to it.

    Args:
        traced: the collectives before the passes.
        issued: the collectives after the passes.
        gone: for each collective that disappeared, by name, the pass that removed it.
    """
    holder = {m: i for i, c in enumerate(issued) for m in c.members}
    return tuple(replace(c, fate=_fate(i, c, issued, holder, gone)) for i, c in enumerate(traced))


def _fate(
    i: int,
    c: TracedCollective,
    issued: Sequence[IssuedCollective],
    holder: Mapping[int, int],
    gone: Mapping[str, str],
) -> str:
    if i not in holder:
        return f"dropped by {gone[c.name]}" if c.name in gone else "dropped"
    now = issued[holder[i]]
    words = []
    if len(now.members) > 1:
        words.append(f"in {now.kind} {holder[i]} of {len(now.members)}")
    elif now.kind != c.kind:
        words.append(f"lowered to {now.kind}")
    before, after = now.overlappable
    if after > before:
        words.append(f"{1e6 * (after - before):.0f} us more compute behind it")
    return ", ".join(words)


def spans(timeline: Timeline) -> tuple[Span, ...]:
    """Returns the timeline as records."""
    return tuple(Span(e.node.name, e.stream, e.start, e.end) for e in timeline.events)
