"""Graphs of all ranks of a group, written down and run side by side in one process.

A collective is played when every rank has come to it; the ranks have to have come to the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import HashStore
from torch.fx import Graph, Node

from shardcompile import compat
from shardcompile.collectives.descriptor import descriptor_of
from shardcompile.collectives.torch_collectives import SHARD_DIM_ALLTOALL
from shardcompile.passes.foreign.padded_chains import EXCHANGE, exchange_of
from shardcompile.passes.graph.collective import KINDS, WAIT, Collective, add_node, collectives
from shardcompile.passes.plan import exchanging

_c10d = torch.ops._c10d_functional
ALL_REDUCE = _c10d.all_reduce.default
ALL_GATHER = _c10d.all_gather_into_tensor.default
REDUCE_SCATTER = _c10d.reduce_scatter_tensor.default


class Builder:
    """Writes a graph; every method returns a node."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.mode = FakeTensorMode()

    def input(self, *shape: int, dtype: torch.dtype = torch.float64) -> Node:
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return add_node(self.graph, target, *args, **kwargs)

    def done(self, target: Any, *args: Any) -> Node:
        """A collective and its wait."""
        return self.call(WAIT, self.call(target, *args))

    def output(self, *nodes: Node) -> Graph:
        self.graph.output(nodes)
        self.graph.lint()
        return self.graph


class World:
    """Stands in for the process groups of a number of ranks; any name is a group of all of them.

    Attributes:
        ranks: how many.
        here: the rank that asks.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.here = 0

    def rank(self) -> int:
        return self.here

    def size(self) -> int:
        return self.ranks

    def each(self) -> Iterator[int]:
        """All ranks, with `here` set to each."""
        for rank in range(self.ranks):
            self.here = rank
            yield rank


@contextmanager
def world_of(ranks: int) -> Iterator[World]:
    """A world that collectives in graphs find by the name of their group."""
    world = World(ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "process_group", lambda name: world)
        yield world


def apply(world: World, graph_pass: Callable[[Graph], None], graphs: Sequence[Graph]) -> None:
    """Run a pass on every rank's graph; the ranks exchange their plans."""
    store = HashStore()
    for rank in world.each():
        with exchanging(store, rank):
            graph_pass(graphs[rank])
        graphs[rank].lint()


def play(world: World, graphs: Sequence[Graph], inputs: Sequence[Sequence[Tensor]]) -> list[Any]:
    """Run every rank's graph on its inputs; returns every rank's outputs.

    Raises:
        AssertionError: the ranks come to different collectives, or one of them to none.
    """
    runs = [_steps(g, [x.clone() for x in i]) for g, i in zip(graphs, inputs, strict=True)]
    answers: list[Any] = [None] * world.ranks
    while True:
        outputs: list[Any] = []
        calls: list[tuple[Node, Any]] = []
        for rank in world.each():
            try:
                calls.append(runs[rank].send(answers[rank]))
            except StopIteration as end:
                outputs.append(end.value)
        if not calls:
            return outputs
        told = {signature(node) for node, _ in calls}
        assert len(calls) == world.ranks and len(told) == 1, f"the ranks diverge: {told}"
        descriptor = descriptor_of(calls[0][0].target) or SHARD_DIM_ALLTOALL
        answers = _PLAYED[descriptor.kind]([descriptor.signature.read(args) for _, args in calls])


def signature(node: Node) -> str:
    """What of a collective has to be the same on every rank."""
    c = exchange_of(node) or Collective.of(node)
    assert c is not None
    size = None if c.kind == "reflect_shards" else c.global_size  # of that one a rank knows its local shards only
    return f"{c.kind} {c.group_name} {c.value.dtype} {c.sizes} {size}"


def signatures(graph: Graph) -> list[str]:
    return [signature(c.node) for c in collectives(graph)]


def targets(graph: Graph) -> list[Any]:
    return [n.target for n in graph.nodes if n.op == "call_function"]


def _steps(graph: Graph, inputs: list[Tensor]) -> Generator[tuple[Node, Any], Tensor, Any]:
    given = iter(inputs)
    values: dict[Node, Any] = {}
    for node in graph.nodes:
        args = torch.fx.map_arg(node.args, values.__getitem__)
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "output":
            return args[0]
        elif node.target in _STARTS:
            values[node] = yield node, args
        else:
            values[node] = args[0] if node.target is WAIT else node.target(*args, **node.kwargs)
    raise AssertionError("a graph has an output")


def _flat(x: Tensor, dim: int) -> Tensor:
    return x.movedim(dim, 0).reshape(-1)


def _reduced(terms: Sequence[Tensor], reduce_op: str) -> Tensor:
    stacked = torch.stack(list(terms))
    if reduce_op == "max":
        return stacked.amax(0)
    return {"sum": stacked.sum(0), "avg": stacked.mean(0) if stacked.is_floating_point() else None}[reduce_op]


def _all_reduce(calls: list[Any]) -> list[Tensor]:
    return [_reduced([c.input for c in calls], calls[0].reduce_op) for _ in calls]


def _all_gather(calls: list[Any]) -> list[Tensor]:
    return [torch.cat([c.input for c in calls]) for _ in calls]


def _reduce_scatter(calls: list[Any]) -> list[Tensor]:
    return list(_reduced([c.input for c in calls], calls[0].reduce_op).chunk(len(calls)))


def _all_gather_v(calls: list[Any]) -> list[Tensor]:
    return [_flat(torch.cat([c.input for c in calls], c.dim), c.dim) for c in calls]


def _reduce_scatter_v(calls: list[Any]) -> list[Tensor]:
    first = calls[0]
    whole = _reduced([c.input for c in calls], first.reduce_op)
    sizes = first.partition.shards(whole.shape[first.dim], len(calls))
    return [_flat(part, first.dim) for part in whole.split(sizes, first.dim)]


def _all_to_all_v(calls: list[Any]) -> list[Tensor]:
    first = calls[0]
    whole = torch.cat([c.input for c in calls], first.src_dim)
    sizes = first.dst.shards(whole.shape[first.dst_dim], len(calls))
    return [_flat(part, first.src_dim) for part in whole.split(sizes, first.dst_dim)]


def _shard_dim_alltoall(calls: list[Any]) -> list[Tensor]:
    first = calls[0]
    return list(torch.cat([c.input for c in calls], first.gather_dim).chunk(len(calls), first.shard_dim))


def _fetch_ranges(calls: list[Any]) -> list[Tensor]:
    first = calls[0]
    assert not first.reach and first.fill is None, "no halos here"
    whole = torch.cat([c.input for c in calls], first.dim)
    sizes = first.dst.shards(whole.shape[first.dim], len(calls))
    return [_flat(part, first.dim) for part in whole.split(sizes, first.dim)]


def _mirror_shards(calls: list[Any]) -> list[Tensor]:
    return [_flat(c.input, c.dim) for c in calls[::-1]]


def _fetch_around(calls: list[Any]) -> list[Tensor]:
    first = calls[0]
    assert first.after == -first.before, "no rows around here"
    sizes = first.partition.shards(first.total, len(calls))
    whole = torch.cat([c.input for c in calls], first.dim).roll(first.before, first.dim)
    return [_flat(part, first.dim) for part in whole.split(sizes, first.dim)]


_PLAYED = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_gather_v": _all_gather_v,
    "reduce_scatter_v": _reduce_scatter_v,
    "all_to_all_v": _all_to_all_v,
    "shard_dim_alltoall": _shard_dim_alltoall,
    "fetch_ranges": _fetch_ranges,
    "reflect_shards": _mirror_shards,
    "fetch_around": _fetch_around,
}

_STARTS = {*KINDS, EXCHANGE}
"""What starts a collective."""
