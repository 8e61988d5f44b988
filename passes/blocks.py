"""What the ranks put into a collective and get out of it, and which nodes have other extents on other ranks.

A collective's cuts are written in its arguments. From them follow the bytes that move, and whether the block of this
rank may be larger or smaller than that of another: if the sizes are known and not all equal. The block's own size is
never asked, because it may happen to be equal to another's on some ranks only.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import Graph, Node

from shardcompile import compat
from shardcompile.errors import ShardError
from shardcompile.layout import CHUNK_KEY, DERIVATIONS, GroupCut, chunk_sizes
from shardcompile.passes.collective import WAIT, Collective
from shardcompile.passes.ops import op_of

aten = torch.ops.aten
_ours = torch.ops.shardcompile

OUTER = "outer"
"""In place of a group's name: ranks differ, but along another mesh dim than that of the group at hand."""


@dataclass(frozen=True)
class Side:
    """The blocks that the ranks of a group put in, or get.

    Attributes:
        sizes: in group order; None if they are not known while compiling.
        number: whether the graph has a number for the extent of this rank's block, not a symbol.
        halo: rows that a block may have more than `sizes` says; fewer at the ends of the global extent.
        nested: whether other groups along the same mesh dim have other blocks.
        assumed: what `sizes` are taken for where only a halo moves, so that they hardly matter.
    """

    sizes: tuple[int, ...] | None
    number: bool
    halo: int = 0
    nested: bool = False
    assumed: tuple[int, ...] | None = None

    @property
    def uneven(self) -> bool:
        """Whether extents in the graph differ between ranks. The same on all of them."""
        if self.sizes is None:
            return self.number  # symbols have hints that the ranks have in common
        return len(set(self.sizes)) > 1 or (self.halo > 0 and len(self.sizes) > 1)

    def labels(self, group_name: str) -> set[str]:
        """The groups along which the extents may differ."""
        return ({group_name} if self.uneven else set()) | ({OUTER} if self.nested and self.number else set())


@dataclass(frozen=True)
class Member:
    """One tensor of a collective, of which a bucket has several.

    Attributes:
        payload: what this rank puts in.
        put: the blocks put in; None if all ranks put in tensors of one shape.
        get: the blocks got; None if all ranks get tensors of one shape.
        nbytes: of the whole tensor, by hints; those of the payload for what has no cut.
    """

    payload: Node
    put: Side | None
    get: Side | None
    nbytes: int


def members(c: Collective, group_size: int | None) -> list[Member]:
    """The members of a collective.

    Args:
        c: any.
        group_size: of its group; None if that is not known, as cuts by torch.chunk then are not.
    """
    make = _MEMBERS.get(c.kind)
    if make is not None:
        return make(c, group_size)
    return [Member(p, None, None, nbytes_of(p)) for p in c.payloads]


def nbytes_of(node: Node) -> int:
    """Bytes of a node's tensors by hints."""
    value = node.meta.get("val")
    return _nbytes(value) if isinstance(value, torch.Tensor) else sum(_nbytes(t) for t in tensors(node))


def tensors(node: Node) -> list[torch.Tensor]:
    """A node's fake tensors."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [value]
    return [v for v in value if isinstance(v, torch.Tensor)] if isinstance(value, (list, tuple)) else []


def _nbytes(value: torch.Tensor) -> int:
    total = value.dtype.itemsize
    for size in value.shape:
        total *= size if type(size) is int else compat.size_hint(size)
    return total


def _with_extent(value: torch.Tensor, dim: int, extent: Any) -> int:
    total = value.dtype.itemsize * compat.size_hint(_value(extent))
    for d, size in enumerate(value.shape):
        total *= 1 if d == dim else compat.size_hint(size)
    return total


def _value(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, Node) else argument


def _is_number(size: Any) -> bool:
    return isinstance(size, int)  # neither a node nor a symbol


def _side(cut: Sequence[Any], total: Any, extent: Any, group_size: int | None, halo: int = 0) -> Side:
    sizes, key, nest = cut
    nested = bool(nest) and not sizes and _is_number(key)
    return Side(_resolved(sizes, key, nest, total, group_size), _is_number(extent), halo, nested)


def _resolved(
    sizes: Sequence[Any], key: Any, nest: Sequence[int], total: Any, group_size: int | None
) -> tuple[int, ...] | None:
    if sizes:
        return tuple(sizes) if all(_is_number(s) for s in sizes) else None
    if group_size is None or not _is_number(key) or (key == CHUNK_KEY and not _is_number(total)):
        return None
    try:
        return GroupCut.resolve(total, sizes, key, nest, group_size)
    except (LookupError, ShardError):  # a key of another process
        return None


def shares(side: Side | None, group_size: int) -> list[float]:
    """The part of a whole that each rank holds; equal parts where the sizes are not known while compiling."""
    if side is None or side.sizes is None or len(side.sizes) != group_size or not sum(side.sizes):
        return [1 / group_size] * group_size
    whole = sum(side.sizes)
    return [min(s + side.halo, whole) / whole if s else 0.0 for s in side.sizes]


def _all_gather_v(c: Collective, n: int | None) -> list[Member]:
    x, dim, total, *cut = c.node.args[:6]
    return [_gathered(x, dim, total, cut, n)]


def _gathered(x: Any, dim: Any, total: Any, cut: Sequence[Any], n: int | None) -> Member:
    value = x.meta["val"]
    return Member(x, _side(cut, total, value.shape[dim], n), None, _with_extent(value, dim, total))


def _reduce_scatter_v(c: Collective, n: int | None) -> list[Member]:
    x, dim, block, _, *cut = c.node.args[:7]
    return [_scattered(x, dim, block, cut, n)]


def _scattered(x: Any, dim: Any, block: Any, cut: Sequence[Any], n: int | None) -> Member:
    return Member(x, None, _side(cut, x.meta["val"].shape[dim], block, n), nbytes_of(x))


def _all_to_all_v(c: Collective, n: int | None) -> list[Member]:
    x, src_dim, dst_dim, total, block, *cuts = c.node.args[:11]
    return [_turned(x, (src_dim, dst_dim), (total, block), (cuts[:3], cuts[3:]), n)]


def _turned(
    x: Any, dims: Sequence[Any], extents: Sequence[Any], cuts: Sequence[Sequence[Any]], n: int | None
) -> Member:
    (src_dim, dst_dim), (total, block) = dims, extents
    value = x.meta["val"]
    put = _side(cuts[0], total, value.shape[src_dim], n)
    get = _side(cuts[1], value.shape[dst_dim], block, n)
    return Member(x, put, get, _with_extent(value, src_dim, total))


def _fetch_ranges(c: Collective, n: int | None) -> list[Member]:
    x, dim, total, block, *cuts = c.node.args[:10]
    value = x.meta["val"]  # type: ignore[union-attr]
    get = _wanted(c, total, block, n)
    put = _held(cuts[:3], total, value.shape[dim], n, get)
    return [Member(x, put, get, _with_extent(value, dim, total))]  # type: ignore[arg-type]


def _return_ranges(c: Collective, n: int | None) -> list[Member]:
    x, dim, total, block, *cuts = c.node.args[:10]
    value = x.meta["val"]  # type: ignore[union-attr]
    put = _wanted(c, total, value.shape[dim], n)
    get = _held(cuts[:3], total, block, n, put)
    return [Member(x, put, get, _with_extent(value, dim, total))]  # type: ignore[arg-type]


def _wanted(c: Collective, total: Any, extent: Any, n: int | None) -> Side:
    """What ranks want of the rows that others hold: blocks, or what rows of theirs read."""
    cut, reach = c.node.args[7:10], c.node.args[10]
    if not reach:
        return _side(cut, total, extent, n)
    count, num, den, before, after = (compat.size_hint(_value(r)) for r in reach)  # type: ignore[union-attr]
    side = _side(cut, count, extent, n)
    rows = compat.size_hint(_value(total))
    sizes, halo = side.sizes, -(-(before + after) // den)
    if sizes is None:
        return replace(side, halo=halo, assumed=None if n is None else chunk_sizes(rows, n))
    ends = [min(end * num // den, rows) for end in itertools.accumulate(sizes[:-1])]
    return replace(side, sizes=tuple(b - a for a, b in itertools.pairwise([0, *ends, rows])), halo=halo)


def _held(cut: Sequence[Any], total: Any, extent: Any, n: int | None, wanted: Side) -> Side:
    side = _side(cut, total, extent, n)
    return replace(side, assumed=wanted.assumed) if side.sizes is None else side


def _mirror_blocks(c: Collective, n: int | None) -> list[Member]:
    x, dim, block = c.node.args[:3]
    put = Side(None, _is_number(x.meta["val"].shape[dim]))  # type: ignore[union-attr]
    return [Member(x, put, Side(None, _is_number(block)), nbytes_of(x))]  # type: ignore[arg-type]


def _fetch_block(c: Collective, n: int | None) -> list[Member]:
    x, dim, total, block, by, around, *cut = c.node.args[:9]
    value = x.meta["val"]  # type: ignore[union-attr]
    put, get = _side(cut, total, value.shape[dim], n), _side(cut, total, block, n)
    if put.sizes is not None:
        away, _ = DERIVATIONS["shifted"]([put.sizes], by, around)
        put, get = (replace(put, sizes=away), get) if c.kind == "return_block" else (put, replace(get, sizes=away))
    return [Member(x, put, get, _with_extent(value, dim, total))]  # type: ignore[arg-type]


def _gather_cut(c: Collective, n: int | None) -> list[Member]:
    x, dim = c.node.args[:2]
    put = Side(None, _is_number(x.meta["val"].shape[dim]))  # type: ignore[union-attr]
    return [Member(x, put, None, 16)]  # type: ignore[arg-type]


def _all_to_all(c: Collective, n: int | None) -> list[Member]:
    x, outputs, inputs = c.node.args[:3]
    put, get = (Side(None, any(_is_number(s) for s in splits)) for splits in (inputs, outputs))  # type: ignore[union-attr]
    return [Member(x, put, get, nbytes_of(x))]  # type: ignore[arg-type]


def _cuts(node: Node, first: int) -> list[tuple[Any, Any, Any]]:
    """The cuts of a bucket, see `shardcompile.collectives.buckets`."""
    sizes, keys, nests, lengths = node.args[first : first + 4]
    cuts: list[tuple[Any, Any, Any]] = []
    i = j = 0
    for key, a, b in zip(keys, lengths[::2], lengths[1::2], strict=True):  # type: ignore
        cuts.append((sizes[i : i + a], key, nests[j : j + b]))  # type: ignore[index]
        i, j = i + a, j + b
    return cuts


def _all_gather_bucket(c: Collective, n: int | None) -> list[Member]:
    dims, totals = c.node.args[1:3]
    rows = zip(c.payloads, dims, totals, _cuts(c.node, 3), strict=True)  # type: ignore[arg-type]
    return [_gathered(*row, n) for row in rows]


def _reduce_scatter_bucket(c: Collective, n: int | None) -> list[Member]:
    dims, blocks = c.node.args[1:3]
    rows = zip(c.payloads, dims, blocks, _cuts(c.node, 4), strict=True)  # type: ignore[arg-type]
    return [_scattered(*row, n) for row in rows]


def _all_to_all_bucket(c: Collective, n: int | None) -> list[Member]:
    dims: Any = c.node.args[1]
    extents: Any = c.node.args[2]
    cuts = _cuts(c.node, 3)
    pairs = [(dims[i : i + 2], extents[i : i + 2], cuts[i : i + 2]) for i in range(0, len(dims), 2)]
    return [_turned(x, *pair, n) for x, pair in zip(c.payloads, pairs, strict=True)]


_MEMBERS = {
    "all_gather_v": _all_gather_v,
    "reduce_scatter_v": _reduce_scatter_v,
    "all_to_all_v": _all_to_all_v,
    "fetch_ranges": _fetch_ranges,
    "return_ranges": _return_ranges,
    "mirror_blocks": _mirror_blocks,
    "fetch_block": _fetch_block,
    "return_block": _fetch_block,
    "gather_cut": _gather_cut,
    "all_to_all": _all_to_all,
    "all_gather_bucket": _all_gather_bucket,
    "reduce_scatter_bucket": _reduce_scatter_bucket,
    "all_to_all_bucket": _all_to_all_bucket,
}


# Which nodes have other extents on other ranks.

_KEEPS_EXTENTS = {
    WAIT,
    operator.getitem,
    *(aten.view.default, aten._unsafe_view.default, aten.permute.default, aten.transpose.int, aten.t.default),
    *(aten.alias.default, aten.detach.default, aten.clone.default, aten.unsqueeze.default, aten.squeeze.dim),
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default),
}
"""Ops whose results have the extents of their inputs, besides pointwise ones."""


def rank_dependent(graph: Graph, group_sizes: Mapping[str, int] | None = None) -> set[Node]:
    """The nodes whose extents may differ between ranks: their sizes must not be read for a decision.

    See `labels`.
    """
    return set(labels(graph, group_sizes))


def labels(graph: Graph, group_sizes: Mapping[str, int] | None = None) -> dict[Node, set[str]]:
    """For the nodes whose extents may differ between ranks, the names of the groups along which they may.

    Found in the graph's structure alone, so that it is the same on every rank: what is put into or got from a
    collective with uneven blocks, and all that is connected with it through ops, in either direction, up to the
    collectives of the group in question, which say themselves whether their other side is uneven. A tensor without
    dims connects nothing, nor does one that has its extents from a collective whose results are alike on all ranks.

    It finds more than need be (a weight that is multiplied with blocks that are gathered afterwards), and what meets
    no collective with a known cut it cannot find: static inputs of different extents of which the graph does not tell.
    The library makes its blocks symbols with common hints where they come in, so that these are none of its own.

    Args:
        graph: any.
        group_sizes: numbers of ranks by the group's name, where there are no such process groups.
    """
    edges = _boundaries(graph, group_sizes or {})
    seeds: dict[str, list[Node]] = {}
    for node, boundary in edges.items():
        for label, nodes in boundary.seeds(node):
            seeds.setdefault(label, []).extend(nodes)
    found: dict[Node, set[str]] = {}
    for label, start in seeds.items():
        for node in _connected(graph, label, start, edges):
            found.setdefault(node, set()).add(label)
    return found


@dataclass(frozen=True)
class _Boundary:
    """An op that changes the cut along a group, so that its result's extents do not follow from its payloads'."""

    group_name: str
    members: tuple[Member, ...]

    def seeds(self, node: Node) -> Iterator[tuple[str, list[Node]]]:
        for m in self.members:
            for side, end in ((m.put, m.payload), (m.get, node)):
                for label in () if side is None else side.labels(self.group_name):
                    yield label, [end]

    @property
    def uneven_result(self) -> bool:
        return any(m.get is not None and m.get.uneven for m in self.members)


def _boundaries(graph: Graph, group_sizes: Mapping[str, int]) -> dict[Node, _Boundary]:
    found: dict[Node, _Boundary] = {}
    for node in graph.nodes:
        c = Collective.of(node)
        if c is not None:
            n = size_of_group(c.group_name, group_sizes)
            found[node] = _Boundary(c.group_name, tuple(members(c, n)))
        elif node.target in (_ours.take_block.default, _ours.place_block.default):
            found[node] = _local_boundary(node, group_sizes)
    return found


def _local_boundary(node: Node, group_sizes: Mapping[str, int]) -> _Boundary:
    x, dim, extent, *cut = node.args[:6]
    name = str(node.args[-1])
    n, value = size_of_group(name, group_sizes), x.meta["val"]  # type: ignore[union-attr]
    if node.target is _ours.take_block.default:
        member = Member(x, None, _side(cut, value.shape[dim], extent, n), nbytes_of(x))  # type: ignore[arg-type]
    else:
        member = _gathered(x, dim, extent, cut, n)
    return _Boundary(name, (member,))


def size_of_group(name: str, group_sizes: Mapping[str, int]) -> int | None:
    """Ranks in a group; None if it is neither given nor a process group of this process."""
    if name in group_sizes:
        return group_sizes[name]
    try:
        return compat.process_group(name).size()
    except (RuntimeError, ValueError, LookupError):
        return None


def ranks_of_group(name: str) -> list[int] | None:
    """The ranks of a group, by their number in the world; None if it is no process group of this process."""
    try:
        return dist.get_process_group_ranks(compat.process_group(name))
    except (RuntimeError, ValueError, LookupError):
        return None


def _connected(graph: Graph, label: str, seeds: Sequence[Node], edges: Mapping[Node, _Boundary]) -> set[Node]:
    def bounds(node: Node) -> bool:
        return node in edges and edges[node].group_name == label

    alike = _alike(graph, bounds_result={n: not b.uneven_result for n, b in edges.items() if b.group_name == label})
    found = set(seeds)
    todo = list(found)
    while todo:
        node = todo.pop()
        around = [u for u in node.users if not bounds(u)]
        if not bounds(node):
            around += [i for i in node.all_input_nodes if not bounds(i)]
        for n in around:
            if n not in found and n not in alike and any(t.ndim for t in tensors(n)):
                found.add(n)
                todo.append(n)
    return found


def _alike(graph: Graph, bounds_result: Mapping[Node, bool]) -> set[Node]:
    """Nodes that have their extents from collectives whose results are alike on all ranks of the group."""
    alike: set[Node] = set()
    for node in graph.nodes:
        if node in bounds_result:
            found = bounds_result[node]
        else:
            sources = [i for i in node.all_input_nodes if tensors(i)]
            found = _keeps_extents(node) and bool(sources) and alike.issuperset(sources)
        if found:
            alike.add(node)
    return alike


def _keeps_extents(node: Node) -> bool:
    return node.target in _KEEPS_EXTENTS or is_pointwise(node)


def is_pointwise(node: Node) -> bool:
    """Whether an op works element by element."""
    return op_of(node).pointwise
