"""Finds the chains of ops that other libraries emit for uneven shards."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from shardcompile import compat
from shardcompile.collectives.torch_collectives import ALL_GATHER, REDUCE_SCATTER, SHARD_DIM_ALLTOALL
from shardcompile.passes.foreign.provenance import Box, Pieces, Value, arguments_of, evaluate, is_tracked, static_shape
from shardcompile.passes.graph.collective import Collective
from shardcompile.passes.graph.dependencies import writes

aten = torch.ops.aten

EXCHANGE = torch.ops._dtensor.shard_dim_alltoall.default
"""DTensor's op for `Shard` to `Shard` where the backend has an all-to-all; it has completed when it returns. With gloo
it gathers, and every rank takes its part.
"""

Partition = tuple[int, tuple[int, ...]]
"""A dim, and the sizes of all ranks' shards along it."""


@dataclass(frozen=True)
class Chain:
    """A padded collective and the shards that it moves.

    Attributes:
        start: the even collective.
        partition: dim and sizes of every rank's local shard without padding; for an all-to-all before it.
        new_partition: the same after an all-to-all; None for other chains.
        full: for a scatter the node that is scattered; for others the nodes that hold the concatenated shards, through
            which everything is read; for an all-to-all with the padding of this rank's new shard.
        readers: the waits and, but for a scatter, all values that are made of the result by moving elements, in graph
            order.
    """

    start: Collective
    partition: Partition
    new_partition: Partition | None
    full: tuple[Node, ...]
    readers: tuple[Node, ...]

    def __str__(self) -> str:
        shards = "along dim {} as shards of {}".format(*self.partition)
        text = f"{self.start.kind} of group {self.start.group_name} {shards}"
        return (
            text
            if self.new_partition is None
            else f"{text}, then along dim {self.new_partition[0]} of {self.new_partition[1]}"
        )


def find_chains(c: Collective) -> Iterator[Chain]:
    """Yields the chains around an even collective, the one that moves least first.

    Args:
        c: an `all_gather`, a `reduce_scatter`, or an `EXCHANGE` as `exchange_of` returns it.
    """
    if len(c.payloads) > 1 or not c.functional or not c.waits or c.group_size < 2:
        return
    shape = static_shape(c.payload)
    if not shape or 0 in shape:
        return
    found: list[Chain | None] = []
    if c.node.target is EXCHANGE:
        found = [_exchange(c, shape, _follow_exchange(c, shape))]
    elif len(c.waits) < len(c.node.users):
        return
    elif c.descriptor is ALL_GATHER:
        known = _downstream(c.waits, Pieces.full((c.group_size * shape[0], *shape[1:]), shape[0]))
        found = [_exchange(c, shape, known), _padded_gather(c, shape, known)]
    elif c.descriptor is REDUCE_SCATTER and c.arguments.reduce_op in ("sum", "avg"):
        found = [_padded_scatter(c, shape)]
    yield from (chain for chain in found if chain is not None)


def exchange_of(node: Node) -> Collective | None:
    """Returns an `EXCHANGE`, which is its own wait; None for other nodes, and where the group has no name."""
    if node.op != "call_function" or node.target is not EXCHANGE:
        return None
    a = SHARD_DIM_ALLTOALL.signature.read(node.args)
    if not isinstance(a.group_name, str):
        return None
    return Collective(node, SHARD_DIM_ALLTOALL, (a.input,), a.group_name, (node,), True)  # type: ignore[arg-type]


def _padded_gather(c: Collective, shard: tuple[int, ...], known: dict[Node, Value]) -> Chain | None:
    """Returns the all-gather of unpadded shards that a padded all-gather amounts to, or None."""
    tiled: dict[Partition, list[Node]] = {}
    for node, value in known.items():
        partition = _tiles(value, shard, c.group_size) if isinstance(value, Pieces) else None
        if partition is not None and any(n != shard[partition[0]] for n in partition[1]):
            if _is_written(node):
                return None
            tiled.setdefault(partition, []).append(node)
    for (dim, sizes), nodes in sorted(tiled.items(), key=lambda t: -sum(t[0][1])):
        if sum(n > 0 for n in sizes) > 1 and (full := _cover(c.waits, set(nodes), known)):
            return Chain(c, (dim, sizes), None, tuple(sorted(full)), tuple(sorted(known)))
    return None


def _is_written(node: Node) -> bool:
    """Whether a node writes to a value: one result replaces all values that are equal."""
    return any(map(writes, node.users))


def padded_from(c: Collective, dims: Collection[int], zeros: int | None = None) -> Iterator[Node]:
    """Yields the tensors that a payload was padded from at the ends of some dims, step by step, the payload first.

    It stops where a tensor may have changed since, and at symbolic sizes.

    Args:
        c: of one payload.
        dims: of the payload.
        zeros: the one of them along which only zero padding is followed.
    """
    node: Node | None = c.payload
    while node is not None and static_shape(node) is not None:
        yield node
        padded, node = node, _before_padding(node, dims, zeros)
        if any(writes(n) for n in _between(padded, c.node)):
            return


def _between(first: Node, last: Node) -> Iterator[Node]:
    while (first := first.next) is not last:
        yield first


def _before_padding(node: Node, dims: Collection[int], zeros: int | None) -> Node | None:
    """Returns what a node pads, or concatenates something to, at the ends of some dims; None for other nodes."""
    if node.target not in (aten.constant_pad_nd.default, aten.cat.default):
        return None
    arguments, ndim = arguments_of(node), node.meta["val"].ndim
    if node.target is aten.cat.default:
        dim = arguments["dim"] % ndim
        return arguments["tensors"][0] if dim in dims and dim != zeros else None
    padded = {ndim - 1 - i // 2 if i % 2 else -1 for i, n in enumerate(arguments["pad"]) if n}
    is_nonzero = zeros in padded and arguments["value"] != 0
    return None if is_nonzero or not padded <= set(dims) else arguments["self"]


def _follow_exchange(c: Collective, shard: tuple[int, ...]) -> dict[Node, Value]:
    """Tracks the elements of an `EXCHANGE` through other nodes, in terms of all ranks' shards stacked."""
    rank = compat.process_group(c.group_name).rank()
    gathered, divided = (d % len(shard) for d in (c.arguments.gather_dim, c.arguments.shard_dim))
    width = shard[divided] // c.group_size
    shape = tuple(c.node.meta["val"].shape)
    boxes = []
    for r in range(c.group_size):
        at = tuple(r * n if d == gathered else 0 for d, n in enumerate(shard))
        start = [rank * width if d == divided else 0 for d in range(len(shard))]
        start[0] += r * shard[0]
        size = tuple(width if d == divided else n for d, n in enumerate(shard))
        boxes.append(Box(at, size, tuple(range(len(shard))), tuple(start)))
    return _downstream((c.node,), Pieces(shape, tuple(boxes)))


def _exchange(c: Collective, shard: tuple[int, ...], known: dict[Node, Value]) -> Chain | None:
    """Returns the all-to-all of unpadded shards that a collective amounts to, or None.

    Every rank sends the same rows of its shard, and takes its own chunk of another dim. What the other ranks take is
    inferred from what this rank takes.
    """
    world, rank = c.group_size, compat.process_group(c.group_name).rank()
    tiled: dict[tuple[Partition, int], list[Node]] = {}
    for divided in (d for d, n in enumerate(shard) if n % world == 0):
        local_shape = (*shard[:divided], shard[divided] // world, *shard[divided + 1 :])
        for node, value in known.items():
            chunk = _to_local_chunk(value, shard, divided, local_shape, rank) if isinstance(value, Pieces) else None
            if chunk is not None and (partition := _tiles(chunk, local_shape, world)) and partition[0] != divided:
                tiled.setdefault((partition, divided), []).append(node)
    if any(map(_is_written, (node for nodes in tiled.values() for node in nodes))):
        return None
    # Padding is sliced off last; where it is not, everything is read.
    for ((dim, sizes), divided), nodes in sorted(
        tiled.items(), key=lambda t: (set(t[0][0][1]) == {shard[t[0][0][0]]}, -sum(t[0][0][1]))
    ):
        if sum(n > 0 for n in sizes) > 1 and _cover(c.waits, set(nodes), known):
            *_, unpadded = padded_from(c, (dim, divided), zeros=divided)
            size, width = unpadded.meta["val"].shape[divided], shard[divided] // world
            new_sizes = tuple(min(max(size - r * width, 0), width) for r in range(world))
            return Chain(c, (dim, sizes), (divided, new_sizes), tuple(sorted(nodes)), tuple(sorted(known)))
    return None


def _to_local_chunk(
    value: Pieces, shard: tuple[int, ...], divided: int, local_shape: tuple[int, ...], me: int
) -> Pieces | None:
    """Expresses a value in terms of the stacked chunks that a rank takes of the shards along a dim.

    None if it holds elements of other chunks.

    Args:
        value: in terms of the full shards, stacked.
        shard: shape of a full shard.
        divided: the dim that is divided among the ranks.
        local_shape: shape of the chunk that a rank takes of a shard.
        me: the rank.
    """
    boxes = []
    for box in value.boxes:
        rank, row = divmod(box.start[0], shard[0])
        start = [row, *box.start[1:]]
        start[divided] -= me * local_shape[divided]
        if start[divided]:
            return None
        start[0] += rank * local_shape[0]
        boxes.append(replace(box, start=tuple(start)))
    return replace(value, boxes=tuple(boxes))


def _downstream(sources: Sequence[Node], value: Pieces) -> dict[Node, Value]:
    """Returns all values that consist of elements of a source."""
    known: dict[Node, Value] = dict.fromkeys(sources, value)
    queue = [u for s in sources for u in s.users]
    heapq.heapify(queue)
    while queue:
        node = heapq.heappop(queue)
        pieces = None if node in known else evaluate(node, known)
        if pieces is not None:
            known[node] = pieces
            for user in node.users:
                heapq.heappush(queue, user)
    return known


def _tiles(value: Pieces, shard: tuple[int, ...], world: int) -> Partition | None:
    """Returns the partition along which a value concatenates the starts of all ranks' shards, or None."""
    if len(value.shape) != len(shard):
        return None
    for dim in range(len(shard)):
        sizes = [0] * world
        at, last = 0, -1
        for box in sorted(value.boxes, key=lambda b: b.at[dim]):
            rank, row = divmod(box.start[0], shard[0])
            start = (row, *box.start[1:])
            if rank <= last or any(start) or not _is_slab(box, dim, at, shard):
                break
            sizes[rank] = box.size[dim]
            at, last = at + box.size[dim], rank
        else:
            rest = (*shard[:dim], at, *shard[dim + 1 :])
            if value.shape == rest:
                return dim, tuple(sizes)
    return None


def _is_slab(box: Box, dim: int, at: int, shape: Sequence[int]) -> bool:
    """Whether a box starts at a position of a dim and spans all other dims, each along that of the source."""
    along = all(axis == d for d, axis in enumerate(box.axes) if box.size[d] > 1)
    others = all(box.at[d] == 0 and box.size[d] == n for d, n in enumerate(shape) if d != dim)
    return along and others and box.at[dim] == at


def _cover(sources: Sequence[Node], full_values: Collection[Node], known: dict[Node, Value]) -> set[Node]:
    """Returns the nodes through which everything reads the sources; none if something reads them otherwise."""
    reached: set[Node] = set()
    stack, seen = list(sources), set(sources)
    while stack:
        node = stack.pop()
        if node in full_values:
            reached.add(node)
        elif any(user not in known for user in node.users):
            return set()
        else:
            new = [user for user in node.users if user not in seen]
            seen.update(new)
            stack += new
    return reached


def _padded_scatter(c: Collective, shape: tuple[int, ...]) -> Chain | None:
    """Returns the reduce-scatter of an unpadded tensor that a padded reduce-scatter amounts to, or None."""
    world = c.group_size
    for source, chain in _sources(c.payload):
        full = static_shape(source)
        if not full or len(full) != len(shape):
            continue
        known: dict[Node, Value] = {source: Pieces.full(full, full[0])}
        for node in chain:
            pieces = evaluate(node, known)
            if pieces is not None:
                known[node] = pieces
        value = known.get(c.payload)
        shard = (shape[0] // world, *shape[1:])
        if isinstance(value, Pieces) and (found := _scattered_partition(value, full, shard, world)):
            return Chain(c, found, None, (source,), c.waits)
    return None


def _sources(payload: Node) -> list[tuple[Node, list[Node]]]:
    """Returns the nodes that alone determine a payload, nearest first, with the nodes between, in order.

    It goes backwards through ops that move elements. Where all paths have met in one node, the payload is determined by
    it.
    """
    found: list[tuple[Node, list[Node]]] = []
    chain: list[Node] = []
    ahead, seen = [payload], {payload}
    while ahead:
        node = ahead.pop()
        if node is not payload and not ahead:
            found.append((node, chain[::-1]))
        if not is_tracked(node):
            break
        chain.append(node)
        for source in node.all_input_nodes:
            if source not in seen and source.target is not aten.full.default:
                seen.add(source)
                bisect.insort(ahead, source)
    return found


def _scattered_partition(value: Pieces, full: tuple[int, ...], shard: tuple[int, ...], world: int) -> Partition | None:
    """Returns the partition along which a padded payload divides its source among the ranks.

    None if it does not, or if there is no padding.
    """
    if not value.fills <= {0}:
        return None
    parts = [value.sliced(0, r * shard[0], (r + 1) * shard[0]).boxes for r in range(world)]
    if any(len(p) > 1 for p in parts):
        return None
    for dim in range(len(shard)):
        sizes = tuple(p[0].size[dim] if p else 0 for p in parts)
        firsts = [sum(sizes[:r]) for r in range(world)]
        starts = [tuple(first if d == dim else 0 for d in range(len(shard))) for first in firsts]
        divided = all(
            box.start == start and _is_slab(box, dim, 0, shard)
            for p, start in zip(parts, starts, strict=True)
            for box in p
        )
        if divided and full == (*shard[:dim], sum(sizes), *shard[dim + 1 :]) and sizes != (shard[dim],) * world:
            return dim, sizes
    return None
