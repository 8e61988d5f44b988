"""Lowers logical collectives to the cheapest real ones for their sizes and backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from shardcompile import compat
from shardcompile.collectives.gathers import ALL_GATHER_V
from shardcompile.collectives.torch_collectives import ALL_GATHER
from shardcompile.collectives.transport import TRANSPORTS
from shardcompile.passes.graph.collective import WAIT, Collective, add_call, add_node, collectives, inherit

aten = torch.ops.aten

_RING_BACKENDS = tuple(t.name for t in TRANSPORTS.values() if t.rings)


class LowerEvenGathers:
    """Gathers shards that are statically of one size with torch's own collective.

        all_gather_v(x, dim, total, [n, n, ...])   ->   all_gather_into_tensor(x), whose memory Inductor plans

    Legal because both return the same rows in the same order. With NCCL it is one ring kernel in place of sends and
    receives. With gloo it is not done: there, sending shards straight into their places is faster (measured in
    `benchmarks/collectives.py`). Every other collective stays an op that chooses its algorithm when it runs, from sizes
    that all ranks know: exact sizes, or padded where that is cheaper (`shardcompile.collectives.transport`).

    Args:
        backends: names of the backends for whose groups this is done; by default those whose transports say so.
    """

    name = "lower_even_gathers"

    def __init__(self, backends: Sequence[str] = _RING_BACKENDS) -> None:
        self.backends = tuple(backends)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(backends={self.backends})"

    def __call__(self, graph: Graph) -> None:
        for c in collectives(graph):
            if c.descriptor is ALL_GATHER_V and self._is_even(c):
                _lower(graph, c)

    def _is_even(self, c: Collective) -> bool:
        static = all(isinstance(s, int) for s in c.value.shape)
        if not static or not c.waits or len(c.waits) != len(c.node.users):
            return False
        sizes = c.sizes if compat.process_group(c.group_name).name() in self.backends else None
        return sizes is not None and len(set(sizes)) == 1 and sizes[0] > 0


def _lower(graph: Graph, c: Collective) -> None:
    with graph.inserting_before(c.node):
        payload = _with_dim_first(graph, c.payload, c.arguments.dim)
        start = add_call(graph, ALL_GATHER, input=payload, group_size=c.group_size, group_name=c.group_name)
        inherit(start, [c])
    for wait in c.waits:
        with graph.inserting_before(wait):
            flat = add_node(graph, aten.view.default, add_node(graph, WAIT, start), [c.node.meta["val"].shape[0]])
        wait.replace_all_uses_with(flat)
        graph.erase_node(wait)
    graph.erase_node(c.node)


def _with_dim_first(graph: Graph, x: Node, dim: int) -> Node:
    value = x.meta["val"]
    if dim:
        x = add_node(graph, aten.permute.default, x, [dim, *(d for d in range(value.ndim) if d != dim)])
    if dim or not value.is_contiguous():
        node = graph.call_function(aten.clone.default, (x,), {"memory_format": torch.contiguous_format})
        node.meta["val"] = x.meta["val"].contiguous()
        return node
    return x
