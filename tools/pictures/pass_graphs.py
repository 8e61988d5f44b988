"""Draws graphs before and after a pass, for docs/passes.md and docs/concepts.md.

``python -m tools.pictures.pass_graphs`` traces each program below offline, as rank 0 of 16 H100s in two nodes. It takes
some seconds and no GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import zeros as dtensor_zeros
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.fx import Graph, Node

import shardcompile as sc
from shardcompile.inspect.offline import offline_world, trace_step
from shardcompile.passes import Pipeline, default_passes
from shardcompile.passes.graph.collective import WAIT, Collective, origins
from tools.pictures.svg import CHARACTER, WIDTH, Panel, write

RANKS = 16
PARTS = (8, *[1] * (RANKS - 2), 2)  # of 24
FULL = [Replicate()]

Program = tuple[Callable[..., Any], tuple[Any, ...]]


def sharded(mesh: DeviceMesh, *shape: int, dim: int = 0) -> sc.ShardTensor:
    """Returns a tensor of which rank 0 holds a third."""
    parts = PARTS if mesh.size() == RANKS else (8, 4, 12)
    sizes = [shape[dim] * part // 24 for part in parts]
    local = [*shape[:dim], sizes[mesh.get_rank()], *shape[dim + 1 :]]
    return sc.ShardTensor.from_local(torch.zeros(local), mesh, [Shard(dim)], {0: sizes})


def share(mesh: DeviceMesh) -> Program:
    """A weight that is used twice, and gathered each time."""

    def step(x: Tensor, weight: sc.ShardTensor) -> Tensor:
        x = torch.relu(x @ weight.redistribute(placements=FULL).to_local())
        return x @ weight.redistribute(placements=FULL).to_local()

    return step, (torch.zeros(64, 384), sharded(mesh, 384, 384))


def cancel(mesh: DeviceMesh) -> Program:
    """Two layers, each of which balances the rows and brings them back."""

    def layer(x: Any) -> Any:
        balanced = x.redistribute(sharding_shapes={0: [24] * RANKS})
        return balanced.tanh().redistribute(sharding_shapes={0: [16 * part for part in PARTS]})

    def step(x: sc.ShardTensor) -> sc.ShardTensor:
        return layer(layer(x))

    return step, (sharded(mesh, 384, 16),)


def reduce(mesh: DeviceMesh) -> Program:
    """A product over a sharded dim, of which each rank needs its rows only."""

    def step(a: Any, b: Any) -> Tensor:
        product = (a @ b).redistribute(placements=FULL)
        return torch.relu(product.redistribute(placements=[Shard(0)]))

    return step, (sharded(mesh, 96, 384, dim=1), sharded(mesh, 384, 96))


def merge(mesh: DeviceMesh) -> Program:
    """A softmax over sharded rows, and the sum that it weights."""

    def step(scores: Any, values: Any) -> Tensor:
        return (scores.softmax(0).mT @ values).redistribute(placements=FULL)

    return step, (sharded(mesh, 384, 64), sharded(mesh, 384, 64))


def layers(mesh: DeviceMesh) -> Program:
    """Four layers whose matrices and gains lie in uneven shards, as with FSDP."""

    def step(x: Tensor, *weights: sc.ShardTensor) -> Tensor:
        for matrix, gain in zip(weights[::2], weights[1::2], strict=True):
            x = torch.relu(x @ matrix.redistribute(placements=FULL).to_local())
            x = x * gain.redistribute(placements=FULL).to_local()
        return x

    weights = [w for _ in range(4) for w in (sharded(mesh, 480, 480), sharded(mesh, 480))]
    return step, (torch.zeros(16384, 480), *weights)


def rolls(mesh: DeviceMesh) -> Program:
    """Differences of neighbours along the sharded dim, of two tensors."""

    def step(x: sc.ShardTensor, y: sc.ShardTensor) -> tuple[Tensor, Tensor]:
        return x - x.roll(1, 0), y - y.roll(1, 0)

    return step, (sharded(mesh, 384, 8), sharded(mesh, 384, 8))


def centre(mesh: DeviceMesh) -> Program:
    """The function of docs/concepts.md."""

    def step(x: sc.ShardTensor) -> Tensor:
        return x - x.mean(0, keepdim=True)

    return step, (sharded(mesh, 24, 2),)


def foreign(mesh: DeviceMesh) -> Program:
    """A DTensor whose rows the ranks do not divide: torch pads its shards."""

    def step(x: Tensor, weight: Any) -> Tensor:
        return x @ weight.full_tensor().mT

    weight = dtensor_zeros(385, 384, device_mesh=mesh, placements=[Shard(0)]).requires_grad_()
    return step, (torch.zeros(64, 384), weight)


@dataclass(frozen=True)
class Row:
    """A line of a picture: work on local shards, or the start of a collective.

    Attributes:
        label: what it says.
        position: of the node in the graph.
        end: the position of the wait, for a collective.
    """

    label: str
    position: int
    end: int = 0


_HIDDEN = {
    *("view", "reshape", "permute", "slice", "expand", "squeeze", "unsqueeze", "sym_size", "getitem", "unbind"),
    *("scalar_tensor", "in_flight", "wait_tensor", "split_with_sizes", "_local_scalar_dense", "clone", "full", "alias"),
}
_LARGE = ("mm", "amax", "sum", "take_shard", "cat", "constant_pad_nd")
"""The ops that a picture names one by one; others in between are counted."""


def _name(node: Node) -> str:
    return getattr(node.target, "_opname", getattr(node.target, "__name__", str(node.target)))


def _bytes(number: int) -> str:
    unit = 0 if number < 1000 else min(2, int(math.log10(number)) // 3)
    return f"{number / 1000**unit:.3g} {('B', 'kB', 'MB')[unit]}"


def rows(graph: Graph) -> list[Row]:
    """Returns what a picture of a graph shows, in graph order."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    found: list[Row] = []
    small: list[Node] = []

    def count() -> None:
        if small:
            names = [_name(n) for n in small]
            label = ", ".join(names) if len(names) < 3 else f"{len(names)} pointwise ops"
            found.append(Row(label, position[small[0]]))
            small.clear()

    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
            continue
        name = _name(node)
        c = Collective.of(node)
        if c is not None:
            count()
            members = len(origins(node))
            label = c.kind + (f" of {members}" if members > 1 else "")
            found.append(
                Row(f"{label}, {_bytes(c.global_bytes)}", position[node], min(map(position.__getitem__, c.waits)))
            )
        elif name in _LARGE:
            count()
            found.append(Row({"constant_pad_nd": "pad"}.get(name, name), position[node]))
        elif name not in _HIDDEN and node.target is not WAIT:
            small.append(node)
    count()
    return found


def draw(title: str, graph: Graph) -> Panel:
    """Draws a graph: its order from top to bottom, each collective from its start to its wait."""
    shown = rows(graph)
    count = sum(bool(row.end) for row in shown)
    high, top, left = 24, 30, 104
    panel = Panel(top + high * len(shown) + 8)
    panel.text(0, 10, title)
    panel.text(WIDTH, 10, f"{count} collective{'s' * (count > 1)}", "quiet", anchor="end")
    lanes: list[int] = []  # where each lane is free again
    bars = []
    for i, row in enumerate(shown):
        if not row.end:
            continue
        end = next((j for j, other in enumerate(shown) if j > i and other.position > row.end), len(shown))
        lane = next((k for k, free in enumerate(lanes) if free <= i), len(lanes))
        lanes[lane : lane + 1] = [end]
        bars.append((i, end, lane))
    texts = left + 14 * len(lanes) + 4
    for i, row in enumerate(shown):
        y = top + high * i
        if not row.end:
            panel.rect(0, y + 1, left - 10, high - 3, "compute")
            panel.text(6, y + high / 2, row.label, code=len(row.label) * CHARACTER < left - 20)
    for i, end, lane in bars:
        x, y = left + 14 * lane, top + high * i
        panel.rect(x, y + 3, 10, high * (end - i) - 6, "comm")
        panel.text(texts, y + high / 2, shown[i].label, code=True)
        if lane < len(lanes) - 1:
            panel.line([(x + 11, y + high / 2), (texts - 3, y + high / 2)], "line")
    return panel


_BUCKETS = ("bucket_all_gathers", "bucket_all_to_alls", "bucket_ranges", "bucket_reduce_scatters", "bucket_all_reduces")
PICTURES: dict[str, tuple[Callable[[DeviceMesh], Program], Sequence[str], Sequence[str]]] = {
    "share": (share, [], ["share_equal_collectives"]),
    "cancel": (cancel, [], ["cancel_inverse_pairs"]),
    "reduce": (reduce, [], ["reduce_then_slice"]),
    "merge": (merge, [], ["merge_reductions"]),
    "ranges": (rolls, [], ["bucket_ranges"]),
    "buckets": (layers, [], _BUCKETS),
    "overlap": (layers, _BUCKETS, ["schedule_overlap"]),
}
"""For each pair of pictures: the program, the passes that ran before the first one, and those that are shown."""


def before_and_after(
    build: Callable[[DeviceMesh], Program], earlier: Sequence[str], names: Sequence[str]
) -> Iterator[tuple[str, Panel]]:
    """Yields both pictures of a program."""
    every = {each.name: each for each in default_passes()}
    with offline_world(RANKS, device="cuda") as world:
        graph = trace_step(world, build, pipeline=Pipeline([]), backward=False, inductor=False).forward.graph
        for name in earlier:
            every[name](graph)
        yield "before", draw("before", graph)
        for name in names:
            every[name](graph)
        graph.lint()
        yield "after", draw("after", graph)


def foreign_pictures() -> Iterator[tuple[str, Panel]]:
    """Yields the pictures of a graph with DTensors, on the last rank, whose shard is padded."""
    for title, rewritten in (("before", False), ("after", True)):
        with offline_world(RANKS, rank=RANKS - 1, device="cuda") as world:
            trace = trace_step(world, foreign, pipeline=Pipeline([]), foreign=rewritten)
            yield title, draw(title, trace.forward.graph)


def panels() -> dict[str, Panel]:
    """All pictures by the names of their files."""
    found = {f"pass-{name}-{side}": panel for name, what in PICTURES.items() for side, panel in before_and_after(*what)}
    with offline_world(3, device="cuda") as world:
        graph = trace_step(world, centre, pipeline=Pipeline([]), backward=False, inductor=False).forward.graph
        found["concept-graph"] = draw("on every rank", graph)
    return found | {f"pass-foreign-{side}": panel for side, panel in foreign_pictures()}


if __name__ == "__main__":
    write(panels())
