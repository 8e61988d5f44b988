"""Chains that others emit for uneven blocks, each rewritten into one collective of ours."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from shardcompile import compat
from shardcompile.layout import CHUNK_KEY
from shardcompile.passes.collective import WAIT, Collective, add_node, collectives, inherit
from shardcompile.passes.dependencies import writes
from shardcompile.passes.pieces import Box, Pieces, Value, arguments_of, evaluate, is_tracked, static_shape

aten = torch.ops.aten
_ours = torch.ops.shardcompile
_c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Chain:
    """A padded collective and the blocks that it is about.

    Attributes:
        start: the node of the even collective.
        dim: the dim along which the blocks differ.
        sizes: what is no padding, of every rank's block.
        whole: of a gather the nodes that hold the blocks one after the other; of a scatter the node that is scattered.
        readers: the waits, and of a gather all that is made of its result by moving elements, in the graph's order.
    """

    start: Node
    dim: int
    sizes: tuple[int, ...]
    whole: tuple[Node, ...]
    readers: tuple[Node, ...]


class NormaliseChains:
    """Move blocks of different sizes as they are, where a graph pads them for an even collective.

        pad(x) -> all_gather_into_tensor -> wait -> slice, split, view, select -> cat   =>   all_gather_v(x) -> wait
        split, slice(x) -> pad -> cat -> reduce_scatter_tensor -> wait -> slice         =>   reduce_scatter_v(x) -> wait

    These are the chains of DTensor (`Shard` to `Replicate` and back, `Partial` to `Shard`) and of hand-written code. A
    chain is not matched node by node: from the even collective the pass follows which of its elements reach which
    values (`shardcompile.passes.pieces`), and asks whether what is read is one range at the start of every rank's
    block, in the order of the ranks.

    Legal for a gather because nothing reads what is left out: not the padding, whatever its value. The payload is the
    part of the padded tensor that is read, however the padding was made, and is nothing but `x` where that can be
    seen. Legal for a scatter because what is left out is zeros on every rank, and their sum is put back for who reads
    it. Results of gathers are the same bit for bit. Those of scatters are sums in rank order, where a backend may take
    another: with three and more ranks the last bit may differ, and so may the sign of a zero.

    Which chains are rewritten, and into what, follows from what all ranks see: of a gather from the blocks that are
    read, of a scatter from the blocks that are sent. Never from the padding of this rank's own block, which the rank
    with the largest one has not got. This presumes that all ranks run one program. Where each reads its own part of an
    even gather (a halo, or to assemble the whole on rank 0 only), the graph of one rank can be that of a padded gather
    node by node; nothing that this rank knows tells them apart. The comparison of the ranks' collectives finds it out,
    and `agree` prevents it.

    To be run on the graph of forward and backward together (``joint_custom_pre_pass``): what is saved in between is
    chosen later, and can be the padded tensor, or on one rank nothing because its own block is a constant. On the
    graphs of a forward or a backward alone it finds what is left, and nothing where the padded tensor leaves the graph.

    Left alone: even chains; gathers of which one rank's block is read only, which is how a rank takes its own; tensors
    with symbolic sizes; DTensor's `Shard` to `Shard`, in which a rank sees its own target block only.

    Args:
        scatters: whether reduce-scatters are rewritten as well.
        agree: given the lines that describe this graph's chains, those of them that may be rewritten. To be the same
            on every rank.
    """

    name = "normalise_chains"

    def __init__(self, scatters: bool = True, agree: Callable[[Sequence[str]], Collection[str]] | None = None) -> None:
        self.scatters = scatters
        self.agree = agree

    def __repr__(self) -> str:
        agree = "" if self.agree is None else f", agree={getattr(self.agree, '__qualname__', self.agree)}"
        return f"{type(self).__name__}(scatters={self.scatters}{agree})"

    def __call__(self, graph: Graph) -> None:
        found = {c.node: line for i, c in enumerate(collectives(graph)) if (line := self._described(i, c))}
        agreed = set(found.values()) if self.agree is None else set(self.agree(list(found.values())))
        writers = [n for n in graph.nodes if writes(n)]
        for start, line in found.items():
            c = Collective.of(start) if line in agreed else None
            chain = None if c is None else self._chain(c)
            if c is not None and chain is not None:
                _rewrite(graph, c, chain, writers)

    def _described(self, index: int, c: Collective) -> str:
        chain = self._chain(c)
        if chain is None:
            return ""
        return f"{index}: {c.kind} of group {c.group_name} along dim {chain.dim} as blocks of {chain.sizes}"

    def _chain(self, c: Collective) -> Chain | None:
        if len(c.payloads) > 1 or not c.functional or not 0 < len(c.waits) == len(c.node.users):
            return None
        shape = static_shape(c.payload)
        if not shape or 0 in shape:
            return None
        if c.kind == "all_gather":
            return _padded_gather(c, shape)
        if c.kind == "reduce_scatter" and c.node.args[1] in ("sum", "avg") and self.scatters:
            return _padded_scatter(c, shape)
        return None


def _padded_gather(c: Collective, block: tuple[int, ...]) -> Chain | None:
    gathered = Pieces.whole((c.group_size * block[0], *block[1:]), block[0])
    known = _downstream(c.waits, gathered)
    tiled: dict[tuple[int, tuple[int, ...]], list[Node]] = {}
    for node, value in known.items():
        if isinstance(value, Pieces) and (tiles := _tiles(value, block, c.group_size)):
            tiled.setdefault(tiles, []).append(node)
    for (dim, sizes), nodes in sorted(tiled.items(), key=lambda t: -sum(t[0][1])):
        if sum(n > 0 for n in sizes) > 1 and (whole := _covering(c.waits, set(nodes), known)):
            return Chain(c.node, dim, sizes, tuple(sorted(whole)), tuple(sorted(known)))
    return None


def _downstream(sources: Sequence[Node], value: Pieces) -> dict[Node, Value]:
    """All values that are made of nothing but parts of a source."""
    known: dict[Node, Value] = dict.fromkeys(sources, value)
    queue = [u for s in sources for u in s.users]
    heapq.heapify(queue)
    while queue:
        node = heapq.heappop(queue)
        made_of = None if node in known else evaluate(node, known)
        if made_of is not None:
            known[node] = made_of
            for user in node.users:
                heapq.heappush(queue, user)
    return known


def _tiles(value: Pieces, block: tuple[int, ...], world: int) -> tuple[int, tuple[int, ...]] | None:
    """The dim along which a value is the starts of all ranks' blocks one after the other, and their sizes.

    None if it is not, or if all blocks are whole.
    """
    if len(value.shape) != len(block):
        return None
    for dim in range(len(block)):
        sizes = [0] * world
        at, last = 0, -1
        for box in sorted(value.boxes, key=lambda b: b.at[dim]):
            rank, row = divmod(box.start[0], block[0])
            start = (row, *box.start[1:])
            if rank <= last or any(start) or not _is_slab(box, dim, at, block):
                break
            sizes[rank] = box.extent[dim]
            at, last = at + box.extent[dim], rank
        else:
            rest = (*block[:dim], at, *block[dim + 1 :])
            if value.shape == rest and any(n != block[dim] for n in sizes):
                return dim, tuple(sizes)
    return None


def _is_slab(box: Box, dim: int, at: int, shape: Sequence[int]) -> bool:
    """Whether a box begins at a place of a dim and has all of the other dims, each along that of the source."""
    along = all(axis == d for d, axis in enumerate(box.axes) if box.extent[d] > 1)
    others = all(box.at[d] == 0 and box.extent[d] == n for d, n in enumerate(shape) if d != dim)
    return along and others and box.at[dim] == at


def _covering(sources: Sequence[Node], whole: Collection[Node], known: dict[Node, Value]) -> set[Node]:
    """Those of the nodes through which all that is read of the sources is read; none if something is read elsewhere."""
    reached: set[Node] = set()
    stack, seen = list(sources), set(sources)
    while stack:
        node = stack.pop()
        if node in whole:
            reached.add(node)
        elif any(user not in known for user in node.users):
            return set()
        else:
            new = [user for user in node.users if user not in seen]
            seen.update(new)
            stack += new
    return reached


def _padded_scatter(c: Collective, shape: tuple[int, ...]) -> Chain | None:
    world = c.group_size
    for source, chain in _sources(c.payload):
        whole = static_shape(source)
        if not whole or len(whole) != len(shape):
            continue
        known: dict[Node, Value] = {source: Pieces.whole(whole, whole[0])}
        for node in chain:
            made_of = evaluate(node, known)
            if made_of is not None:
                known[node] = made_of
        value = known.get(c.payload)
        block = (shape[0] // world, *shape[1:])
        if isinstance(value, Pieces) and (found := _scattered(value, whole, block, world)):
            return Chain(c.node, *found, (source,), c.waits)
    return None


def _sources(payload: Node) -> list[tuple[Node, list[Node]]]:
    """The nodes each of which a payload is made of alone, nearest first, and what makes it of them, in order.

    Goes backwards through ops that move elements. Where all ways have met in one node, the payload is made of it.
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


def _scattered(
    value: Pieces, whole: tuple[int, ...], block: tuple[int, ...], world: int
) -> tuple[int, tuple[int, ...]] | None:
    """The dim along which a padded payload divides its source among the ranks, and the sizes.

    None if it does not, or if there is no padding.
    """
    if not value.fills <= {0}:
        return None
    parts = [value.sliced(0, r * block[0], (r + 1) * block[0]).boxes for r in range(world)]
    if any(len(p) > 1 for p in parts):
        return None
    for dim in range(len(block)):
        sizes = tuple(p[0].extent[dim] if p else 0 for p in parts)
        firsts = [sum(sizes[:r]) for r in range(world)]
        starts = [tuple(first if d == dim else 0 for d in range(len(block))) for first in firsts]
        divided = all(
            box.start == start and _is_slab(box, dim, 0, block)
            for p, start in zip(parts, starts, strict=True)
            for box in p
        )
        if divided and whole == (*block[:dim], sum(sizes), *block[dim + 1 :]) and sizes != (block[dim],) * world:
            return dim, sizes
    return None


def _rewrite(graph: Graph, c: Collective, chain: Chain, writers: Sequence[Node]) -> None:
    mine = chain.sizes[compat.process_group(c.group_name).rank()]
    cut: tuple[Any, ...] = (list(chain.sizes), CHUNK_KEY, [], c.group_name)
    payload = c.payload
    with graph.inserting_before(c.node):
        if c.kind == "all_gather":
            extent = sum(chain.sizes)
            block = _unpadded(graph, c, chain.dim, mine, writers)
            start = add_node(graph, _ours.all_gather_v.default, block, chain.dim, extent, *cut)
        else:
            extent = mine
            args = (*chain.whole, chain.dim, extent, c.node.args[1])
            start = add_node(graph, _ours.reduce_scatter_v.default, *args, *cut)
    inherit(start, [c])
    result = _awaited(graph, c, start, chain.dim, extent)
    if c.kind == "all_gather":
        for node in chain.whole:
            node.replace_all_uses_with(result)
    else:
        _replace_padded(graph, c, result, chain.dim)
    _erase(graph, (*reversed(chain.readers), c.node))
    _erase_unused(graph, payload)


def _awaited(graph: Graph, c: Collective, start: Node, dim: int, extent: int) -> Node:
    """The wait for a flat result, and the result in its shape; contiguous, so that it can be viewed as a slice can."""
    shape = c.waits[0].meta["val"].shape
    # An all-gather stacks blocks along dim 0; along any other dim that one has to be as it was.
    first = shape[0] // c.group_size if c.kind == "all_gather" else shape[0]
    rest = [s for d, s in enumerate((first, *shape[1:])) if d != dim]
    with graph.inserting_before(min(c.waits)):
        rows = add_node(graph, aten.view.default, add_node(graph, WAIT, start), [extent, *rest])
        if not dim:
            return rows
        dims = [*range(1, dim + 1), 0, *range(dim + 1, len(shape))]
        moved = add_node(graph, aten.permute.default, rows, dims)
        result = graph.call_function(aten.clone.default, (moved,), {"memory_format": torch.contiguous_format})
        result.meta["val"] = moved.meta["val"].clone(memory_format=torch.contiguous_format)
    return result


def _unpadded(graph: Graph, c: Collective, dim: int, size: int, writers: Sequence[Node]) -> Node:
    """What is no padding of this rank's block: what was padded, where that can be seen and has not changed since."""
    padded = c.payload
    if padded.meta["val"].shape[dim] == size:
        return padded
    inner = _before_padding(padded, dim)
    written = any(padded < w < c.node for w in writers)
    if inner is not None and not written and inner.meta["val"].shape[dim] == size:
        return inner
    return add_node(graph, aten.slice.Tensor, padded, dim, 0, size)


def _before_padding(node: Node, dim: int) -> Node | None:
    """What is padded at the end of a dim, or has something concatenated to it there."""
    if node.target not in (aten.constant_pad_nd.default, aten.cat.default):
        return None
    arguments, ndim = arguments_of(node), node.meta["val"].ndim
    if node.target is aten.cat.default:
        return arguments["tensors"][0] if arguments["dim"] % ndim == dim else None
    pads = enumerate(arguments["pad"])
    return None if any(n for i, n in pads if i != 2 * (ndim - 1 - dim) + 1) else arguments["self"]


def _replace_padded(graph: Graph, c: Collective, result: Node, dim: int) -> None:
    """Give a scatter's result to who reads it: as it is to who takes the padding off, padded to the others."""
    size, extent = result.meta["val"].shape[dim], c.waits[0].meta["val"].shape[dim]
    for wait in c.waits:
        if size == extent:
            wait.replace_all_uses_with(result)
            continue
        for user in [u for u in wait.users if _takes_start(u, dim, size)]:
            user.replace_all_uses_with(result)
            graph.erase_node(user)
        if wait.users:
            pads = [0] * (2 * (result.meta["val"].ndim - dim))
            pads[-1] = extent - size
            with graph.inserting_before(wait):
                padded = add_node(graph, aten.constant_pad_nd.default, result, pads, 0)
            wait.replace_all_uses_with(padded)


def _takes_start(node: Node, dim: int, size: int) -> bool:
    """Whether a node is so much of the start of a dim of its input."""
    if node.target is not aten.slice.Tensor:
        return False
    arguments = arguments_of(node)
    extent, along = node.meta["val"].shape[dim], arguments["dim"] % node.meta["val"].ndim
    return along == dim and not arguments["start"] and arguments["step"] == 1 and extent == size


def _erase(graph: Graph, nodes: Iterable[Node]) -> None:
    """Erase those that nobody uses, users first."""
    for node in nodes:
        if not node.users:
            graph.erase_node(node)


def _erase_unused(graph: Graph, node: Node) -> None:
    """Erase a node that nobody uses, and what was only there for it."""
    stack = [node]
    while stack:
        node = stack.pop()
        if not node.users and is_tracked(node) and node.target is not WAIT:
            inputs = node.all_input_nodes
            graph.erase_node(node)
            stack += inputs
