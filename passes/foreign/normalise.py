"""Chains that others emit for uneven shards, each rewritten into one collective of ours."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch.fx import Graph, Node

from shardcompile import compat
from shardcompile.collectives.all_to_all import ALL_TO_ALL_V
from shardcompile.collectives.gathers import ALL_GATHER_V, REDUCE_SCATTER_V
from shardcompile.collectives.torch_collectives import ALL_GATHER, REDUCE_SCATTER
from shardcompile.passes.foreign.padded_chains import Chain, exchange_of, find_chains, padded_from
from shardcompile.passes.foreign.provenance import arguments_of, is_tracked
from shardcompile.passes.graph.collective import WAIT, Collective, add_call, add_node, inherit
from shardcompile.sharding import CHUNK_KEY, GroupPartition

aten = torch.ops.aten


class NormaliseChains:
    """Move shards of different sizes as they are, where a graph pads them for an even collective.

        pad(x) -> all_gather_into_tensor -> wait -> slice, split, view, select -> cat   =>   all_gather_v(x) -> wait
        split, slice(x) -> pad -> cat -> reduce_scatter_tensor -> wait -> slice         =>   reduce_scatter_v(x) -> wait

        pad(x) -> all_gather_into_tensor -> wait -> own chunk, slice                    =>   all_to_all_v(x) -> wait
        pad(x) -> shard_dim_alltoall -> slice                                           =>   all_to_all_v(x) -> wait

    These are the chains of DTensor (`Shard` to `Replicate` and back, `Partial` to `Shard`, `Shard` to `Shard`) and of
    hand-written code. A chain is not matched node by node. From the even collective the pass follows which of its
    elements reach which values (`shardcompile.passes.foreign.provenance`). It asks whether what is read is one range at
    the start of every rank's local shard, in the order of the ranks.

    Legal for a gather because nothing reads what is left out: not the padding, whatever its value. The payload is the
    part of the padded tensor that is read, however the padding was made. It is nothing but `x` where that can be seen.
    Legal for a scatter because what is left out is zeros on every rank, and their sum is put back for who reads it.
    Results of gathers are the same bit for bit. Those of scatters are sums in rank order, where a backend may take
    another: with three and more ranks the last bit may differ, and so may the sign of a zero. Legal for an exchange as
    for a gather, if the others take their turn of the other dim too; the padding of that one is left out where it is
    zeros, and put back for who reads it.

    Which chains are rewritten, and into what, follows from what all ranks see: of a gather from the shards that are
    read, of a scatter from the shards that are sent. Never from the padding of this rank's local shard, which the rank
    with the largest one has not got. This presumes that all ranks run one program. Ranks may each read their own part
    of an even gather: a halo, or the whole on rank 0 only. Then one rank's graph can equal that of a padded gather,
    node by node, and nothing that this rank knows tells them apart. The comparison of the ranks' collectives finds it
    out, and `agree` prevents it. A rank cannot see what others take of an even gather: without `agree` none becomes an
    exchange. Where a gather may be a padded one as well, the ranks are asked about both.

    To be run on the graph of forward and backward together (``joint_custom_pre_pass``): what is saved in between is
    chosen later. That can be the padded tensor; on one rank it can be nothing, because its local shard is a constant.
    On the graphs of a forward or a backward alone it finds what is left, and nothing where the padded tensor leaves the
    graph.

    Left alone: even gathers of the whole and even scatters; gathers of which one rank's shard is read only, which is
    how a rank takes its own; tensors with symbolic sizes.

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
        middles = [n for n in graph.nodes if _collective(n) is not None]
        lines = [line for i, node in enumerate(middles) for line in self._chains(i, node)]
        agreed = set(lines) if self.agree is None else set(self.agree(lines))
        for i, node in enumerate(middles):
            # Found anew: what was rewritten before may be a part of this chain.
            chain = next((x for line, x in self._chains(i, node).items() if line in agreed), None)
            if chain is not None:
                _rewrite(graph, chain)

    def _chains(self, index: int, node: Node) -> dict[str, Chain]:
        """The chains that a node may be the middle of, the best first, by the lines that describe them."""
        c = _collective(node)
        found = [] if c is None else [x for x in find_chains(c) if self._is_wanted(x)]
        return {f"{index}: {chain}": chain for chain in found}

    def _is_wanted(self, chain: Chain) -> bool:
        if chain.new_partition is not None and chain.start.descriptor is ALL_GATHER:
            return self.agree is not None
        return chain.start.descriptor is not REDUCE_SCATTER or self.scatters


def _collective(node: Node) -> Collective | None:
    return exchange_of(node) or Collective.of(node)


def _rewrite(graph: Graph, chain: Chain) -> None:
    """Put one collective on local shards in the place of a chain: pads, an even collective, slices and joins.

    It takes the payload as it was before it was padded, or, of a reduction, the whole before it was divided.
    What read the pieces of the even result reads the uneven one; what is left of the chain goes.
    """
    c = chain.start
    me = compat.process_group(c.group_name).rank()
    (dim, sizes), payload = chain.partition, c.payload
    partition = GroupPartition(list(sizes), CHUNK_KEY, [])
    shape = list(payload.meta["val"].shape)
    with graph.inserting_before(c.node):
        if chain.new_partition is not None:
            to_dim, to_sizes = chain.new_partition
            shard = _unpad(graph, c, {dim: sizes[me], to_dim: sum(to_sizes)})
            to_shard = GroupPartition(list(to_sizes), CHUNK_KEY, [])
            shape[dim], shape[to_dim] = sum(sizes), to_sizes[me]
            start = add_call(
                graph,
                ALL_TO_ALL_V,
                input=shard,
                src_dim=dim,
                dst_dim=to_dim,
                total=sum(sizes),
                shard=to_sizes[me],
                src=partition,
                dst=to_shard,
                group_name=c.group_name,
            )
        elif c.descriptor is ALL_GATHER:
            shard = _unpad(graph, c, {dim: sizes[me]})
            shape[dim] = sum(sizes)
            start = add_call(
                graph,
                ALL_GATHER_V,
                input=shard,
                dim=dim,
                total=sum(sizes),
                partition=partition,
                group_name=c.group_name,
            )
        else:
            shape[0] //= c.group_size
            shape[dim] = sizes[me]
            (whole,) = chain.whole
            start = add_call(
                graph,
                REDUCE_SCATTER_V,
                input=whole,
                dim=dim,
                shard=sizes[me],
                reduce_op=c.arguments.reduce_op,
                partition=partition,
                group_name=c.group_name,
            )
    inherit(start, [c])
    result = _await(graph, c, start, dim, shape)
    replaced: list[Node] = []
    if chain.new_partition is not None:
        replaced = _replace_padded(graph, chain.whole, result, chain.new_partition[0])
    elif c.descriptor is ALL_GATHER:
        for node in chain.whole:
            node.replace_all_uses_with(result)
    else:
        replaced = _replace_padded(graph, c.waits, result, dim)
    _erase(graph, dict.fromkeys((*replaced, *reversed(chain.readers), c.node)))
    _erase_unused(graph, payload)


def _await(graph: Graph, c: Collective, start: Node, dim: int, shape: Sequence[int]) -> Node:
    """The wait for a flat result, and the result in its shape; contiguous, so that it can be viewed as a slice can."""
    rest = [s for d, s in enumerate(shape) if d != dim]
    with graph.inserting_before(min(c.waits)):
        rows = add_node(graph, aten.view.default, add_node(graph, WAIT, start), [shape[dim], *rest])
        if not dim:
            return rows
        dims = [*range(1, dim + 1), 0, *range(dim + 1, len(shape))]
        moved = add_node(graph, aten.permute.default, rows, dims)
        result = graph.call_function(aten.clone.default, (moved,), {"memory_format": torch.contiguous_format})
        result.meta["val"] = moved.meta["val"].clone(memory_format=torch.contiguous_format)
    return result


def _unpad(graph: Graph, c: Collective, sizes: dict[int, int]) -> Node:
    """What is no padding of this rank's local shard: what was padded, where that can be seen and has not changed
    since.
    """
    for node in padded_from(c, sizes):
        if all(node.meta["val"].shape[dim] == n for dim, n in sizes.items()):
            return node
    shard = c.payload
    for dim, n in sizes.items():
        if shard.meta["val"].shape[dim] != n:
            shard = add_node(graph, aten.slice.Tensor, shard, dim, 0, n)
    return shard


def _replace_padded(graph: Graph, padded: Sequence[Node], result: Node, dim: int) -> list[Node]:
    """Give a result to who reads it padded: as it is to who takes the padding off, padded again to the others.

    Returns:
        Who took the padding off, and is not used any more.
    """
    size = result.meta["val"].shape[dim]
    without: list[Node] = []
    for node in padded:
        dim_size = node.meta["val"].shape[dim]
        if size == dim_size:
            node.replace_all_uses_with(result)
            continue
        takes = [u for u in node.users if _takes_start(u, dim, size)]
        for user in takes:
            user.replace_all_uses_with(result)
        without += takes
        if any(u not in takes and u not in padded for u in node.users):
            pads = [0] * (2 * (result.meta["val"].ndim - dim))
            pads[-1] = dim_size - size
            with graph.inserting_before(node):
                again = add_node(graph, aten.constant_pad_nd.default, result, pads, 0)
            node.replace_all_uses_with(again)
    return without


def _takes_start(node: Node, dim: int, size: int) -> bool:
    """Whether a node is so much of the start of a dim of its input."""
    if node.target is not aten.slice.Tensor:
        return False
    arguments = arguments_of(node)
    dim_size, along = node.meta["val"].shape[dim], arguments["dim"] % node.meta["val"].ndim
    return along == dim and not arguments["start"] and arguments["step"] == 1 and dim_size == size


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
