"""The collectives of an FX graph, by what they do instead of by their nodes' names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from shardcompile import compat

_c10d = torch.ops._c10d_functional
_ours = torch.ops.shardcompile

KINDS = {
    _c10d.all_reduce.default: "all_reduce",
    _c10d.all_gather_into_tensor.default: "all_gather",
    _c10d.reduce_scatter_tensor.default: "reduce_scatter",
    _c10d.all_to_all_single.default: "all_to_all",
    _c10d.broadcast.default: "broadcast",
    _ours.all_gather_v.default: "all_gather_v",
    _ours.reduce_scatter_v.default: "reduce_scatter_v",
    _ours.all_to_all_v.default: "all_to_all_v",
    _ours.fetch_ranges.default: "fetch_ranges",
    _ours.return_ranges.default: "return_ranges",
    _ours.mirror_blocks.default: "mirror_blocks",
}
"""The functional collectives, torch's and ours. All of them take their payload first and the group's name last."""

WAIT = _c10d.wait_tensor.default


@dataclass(frozen=True)
class Collective:
    """A collective of a graph.

    Attributes:
        node: where it starts.
        kind: see `KINDS`.
        payload: the tensor that this rank puts in.
        group_name: name of its process group.
        waits: the nodes that complete it. Torch 2.15 repeats the wait for a result that the backward pass needs.
    """

    node: Node
    kind: str
    payload: Node
    group_name: str
    waits: tuple[Node, ...]

    @staticmethod
    def of(node: Node) -> Collective | None:
        """The collective that a node starts, or None."""
        kind = KINDS.get(node.target) if node.op == "call_function" else None  # type: ignore[call-overload]
        if kind is None:
            return None
        waits = tuple(u for u in node.users if u.target is WAIT)
        group_name = node.args[-1]
        assert isinstance(group_name, str) and isinstance(node.args[0], Node), f"an unknown form of {node.target}"
        return Collective(node, kind, node.args[0], group_name, waits)

    @property
    def value(self) -> torch.Tensor:
        """The payload as a fake tensor."""
        return self.payload.meta["val"]

    @property
    def nbytes(self) -> int:
        """Bytes of the payload; where it has symbolic sizes, their hint, which is the same on every rank."""
        return math.prod(map(compat.size_hint, self.value.shape)) * self.value.dtype.itemsize


def collectives(graph: Graph) -> list[Collective]:
    """All collectives of a graph, in its order."""
    return [c for c in map(Collective.of, graph.nodes) if c is not None]


def add_node(graph: Graph, target: Any, *args: Any) -> Node:
    """A call at the graph's insertion point, with the fake value that later passes and Inductor read."""
    node = graph.call_function(target, args)
    values = torch.fx.map_arg(args, lambda n: n.meta["val"])
    mode = compat.detect_fake_mode(_tensors(values))
    assert mode is not None, "a collective's payload is a fake tensor"
    with mode:
        node.meta["val"] = target(*values)
    return node


def _tensors(values: Any) -> list[torch.Tensor]:
    flat, _ = torch.utils._pytree.tree_flatten(values)
    return [v for v in flat if isinstance(v, torch.Tensor)]
