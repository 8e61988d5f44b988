"""The pass that rewrites chains of other libraries for uneven shards, each into one of our collectives."""

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
    """Moves shards of different sizes unpadded where a graph pads them for an even collective.

        pad(x) -> all_gather_into_tensor -> wait -> slice, split, view, select -> cat   =>   all_gather_v(x) -> wait
        split, slice(x) -> pad -> cat -> reduce_scatter_tensor -> wait -> slice         =>   reduce_scatter_v(x) -> wait

        pad(x) -> all_gather_into_tensor -> wait -> own chunk, slice                    =>   all_to_all_v(x) -> wait
        pad(x) -> shard_dim_alltoall -> slice                                           =>   all_to_all_v(x) -> wait

    These are the chains of DTensor (`Shard` to `Replicate` and back, `Partial` to `Shard`, `Shard` to `Shard`) and of
    hand-written code. A chain is not matched node by node: starting from the even collective, the pass tracks which of
    its elements reach which values (`shardcompile.passes.foreign.provenance`). It asks whether the elements that are
    read are one range at the start of every rank's local shard, in rank order.

    Legal for a gather because nothing reads what is left out, that is the padding, whatever its value. The payload is
    the part of the padded tensor that is read, however it was padded; it is `x` itself where that can be inferred.
    Legal for a scatter because what is left out is zeros on every rank, and their sum is padded back for other readers.
    Results of gathers are bitwise the same. Those of scatters are sums in rank order, where a backend may use another:
    with three and more ranks the last bit may differ, and so may the sign of a zero. Legal for an all-to-all as for a
    gather, if the other ranks take their chunks of the other dim too; the padding of that dim is left out where it is
    zeros, and padded back for other readers.

    Which chains are rewritten, and into what, follows from what all ranks see: for a gather from the shards that are
    read, for a scatter from the shards that are sent; never from the padding of this rank's local shard, since the rank
    with the largest shard has none. This presumes that all ranks run one program. Each rank may read its own part of an
    even gather: a halo, or the full tensor on rank 0 only. Then one rank's graph can equal that of a padded gather,
    node by node, and nothing that this rank knows tells them apart. The comparison of the ranks' collectives detects
    it, and `agree` prevents it. A rank cannot see what others take of an even gather: without `agree` none becomes an
    all-to-all. Where a gather may be a padded one as well, the ranks agree on both.

    It has to run on the joint graph (``joint_custom_pre_pass``): what is saved between forward and backward is chosen
    later. That can be the padded tensor; on one rank it can be nothing, because its local shard is a constant. On
    forward and backward graphs alone it finds what is left, and nothing where the padded tensor leaves the graph.

    Left alone: even gathers of the full tensor and even scatters; gathers of which only one rank's shard is read, which
    is how a rank takes its own; tensors with symbolic sizes.

    Args:
        scatters: whether reduce-scatters are rewritten as well.
        agree: given the lines that describe this graph's chains, returns those that may be rewritten; the result has to
            be rank-invariant.
    """

    name = "normalise_chains"

    def __init__(self, scatters: bool = True, agree: Callable[[Sequence[str]], Collection[str]] | None = None) -> None:
        self.scatters = scatters
        self.agree = agree

    def __repr__(self) -> str:
        agree = "" if self.agree is None else f", agree={getattr(self.agree, '__qualname__', self.agree)}"
        return f"{type(self).__name__}(scatters={self.scatters}{agree})"

    def __call__(self, graph: Graph) -> None:
        candidates = [n for n in graph.nodes if _collective(n) is not None]
        lines = [line for i, node in enumerate(candidates) for line in self._chains(i, node)]
        agreed = set(lines) if self.agree is None else set(self.agree(lines))
        for i, node in enumerate(candidates):
            # Find the chain anew: an earlier rewrite may have changed a part of it.
            chain = next((x for line, x in self._chains(i, node).items() if line in agreed), None)
            if chain is not None:
                _rewrite(graph, chain)

    def _chains(self, index: int, node: Node) -> dict[str, Chain]:
        """Returns the chains around an even collective, the best first, by the lines that describe them."""
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
    """Replaces a chain of pads, an even collective, slices and concatenations by one collective on local shards.

    Its payload is the tensor before it was padded or, for a reduction, the full tensor before it was chunked. Readers
    of the parts of the even result read the uneven one; the rest of the chain is erased.
    """
    c = chain.start
    rank = compat.process_group(c.group_name).rank()
    (dim, sizes), payload = chain.partition, c.payload
    partition = GroupPartition(list(sizes), CHUNK_KEY, [])
    shape = list(payload.meta["val"].shape)
    with graph.inserting_before(c.node):
        if chain.new_partition is not None:
            to_dim, to_sizes = chain.new_partition
            shard = _unpad(graph, c, {dim: sizes[rank], to_dim: sum(to_sizes)})
            to_shard = GroupPartition(list(to_sizes), CHUNK_KEY, [])
            shape[dim], shape[to_dim] = sum(sizes), to_sizes[rank]
            start = add_call(
                graph,
                ALL_TO_ALL_V,
                input=shard,
                src_dim=dim,
                dst_dim=to_dim,
                total=sum(sizes),
                shard=to_sizes[rank],
                src=partition,
                dst=to_shard,
                group_name=c.group_name,
            )
        elif c.descriptor is ALL_GATHER:
            shard = _unpad(graph, c, {dim: sizes[rank]})
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
            shape[dim] = sizes[rank]
            (full,) = chain.full
            start = add_call(
                graph,
                REDUCE_SCATTER_V,
                input=full,
                dim=dim,
                shard=sizes[rank],
                reduce_op=c.arguments.reduce_op,
                partition=partition,
                group_name=c.group_name,
            )
    inherit(start, [c])
    result = _await(graph, c, start, dim, shape)
    replaced: list[Node] = []
    if chain.new_partition is not None:
        replaced = _replace_padded(graph, chain.full, result, chain.new_partition[0])
    elif c.descriptor is ALL_GATHER:
        for node in chain.full:
            node.replace_all_uses_with(result)
    else:
        replaced = _replace_padded(graph, c.waits, result, dim)
    _erase(graph, dict.fromkeys((*replaced, *reversed(chain.readers), c.node)))
    _erase_unused(graph, payload)


def _await(graph: Graph, c: Collective, start: Node, dim: int, shape: Sequence[int]) -> Node:
    """Adds the wait for a flat result; returns the result in its shape, contiguous so that it can be viewed like a
    slice.
    """
    rest = [s for d, s in enumerate(shape) if d != dim]
    with graph.inserting_before(min(c.waits)):
        rows = add_node(graph, aten.view.default, add_node(graph, WAIT, start), [shape[dim], *rest])
        if not dim:
            return rows
        dims = [*range(1, dim + 1), 0, *range(dim + 1, len(shape))]
        permuted = add_node(graph, aten.permute.default, rows, dims)
        result = graph.call_function(aten.clone.default, (permuted,), {"memory_format": torch.contiguous_format})
        result.meta["val"] = permuted.meta["val"].clone(memory_format=torch.contiguous_format)
    return result


def _unpad(graph: Graph, c: Collective, sizes: dict[int, int]) -> Node:
    """Returns this rank's local shard without padding: the tensor that was padded, if it is known and unchanged, or a
    slice.
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
    """Replaces padded values by an unpadded result.

    Readers that slice the padding off read the result as it is, others read it padded again.

    Returns:
        The slices that are not used any more.
    """
    size = result.meta["val"].shape[dim]
    slices: list[Node] = []
    for node in padded:
        dim_size = node.meta["val"].shape[dim]
        if size == dim_size:
            node.replace_all_uses_with(result)
            continue
        unpadding = [u for u in node.users if _slices_prefix(u, dim, size)]
        for user in unpadding:
            user.replace_all_uses_with(result)
        slices += unpadding
        if any(u not in unpadding and u not in padded for u in node.users):
            pads = [0] * (2 * (result.meta["val"].ndim - dim))
            pads[-1] = dim_size - size
            with graph.inserting_before(node):
                repadded = add_node(graph, aten.constant_pad_nd.default, result, pads, 0)
            node.replace_all_uses_with(repadded)
    return slices


def _slices_prefix(node: Node, dim: int, size: int) -> bool:
    """Whether a node is the first `size` rows of its input along a dim."""
    if node.target is not aten.slice.Tensor:
        return False
    arguments = arguments_of(node)
    dim_size, along = node.meta["val"].shape[dim], arguments["dim"] % node.meta["val"].ndim
    return along == dim and not arguments["start"] and arguments["step"] == 1 and dim_size == size


def _erase(graph: Graph, nodes: Iterable[Node]) -> None:
    """Erases the nodes without users; users have to come first."""
    for node in nodes:
        if not node.users:
            graph.erase_node(node)


def _erase_unused(graph: Graph, node: Node) -> None:
    """Erases a node without users, and what was only computed for it."""
    stack = [node]
    while stack:
        node = stack.pop()
        if not node.users and is_tracked(node) and node.target is not WAIT:
            inputs = node.all_input_nodes
            graph.erase_node(node)
            stack += inputs
