"""The cost model: seconds and bytes of the nodes of a graph.

Costs are computed from sizes in the graph, from the hints of symbolic ones, which the library makes the same on every
rank, and from the shard sizes of partitions. Where sizes are static, ranks may have other costs: one of them decides
for all, see `shardcompile.passes.plan`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.fx import Graph, Node

from shardcompile import compat, machines
from shardcompile.collectives.traffic import Traffic, nbytes_of, shares
from shardcompile.machines import Device, Link, Price
from shardcompile.passes.cost.operations import dtype_of, flops_of, say_once
from shardcompile.passes.graph import node_sizes
from shardcompile.passes.graph.collective import WAIT, Collective, Seen, kind_of
from shardcompile.passes.graph.ops import op_of

aten = torch.ops.aten

NOMINAL_BYTES = 1 << 20
"""Bytes assumed for a collective whose traffic is unknown."""

NOMINAL_RANKS = 8
"""Ranks assumed for a group of unknown size."""

_GATHERS = {aten.embedding.default, aten.index.Tensor, aten.index_select.default, aten.gather.default}
"""Ops that read as much as they write."""

_TRANSCENDENTAL = {
    *(aten.exp.default, aten.log.default, aten.tanh.default, aten.erf.default, aten.sigmoid.default),
    *(aten.sin.default, aten.cos.default, aten.pow.Tensor_Tensor, aten.pow.Scalar),
}
"""Pointwise ops that take longer to compute than a product or a sum, where few cores compute them."""


@dataclass(frozen=True)
class CostModel:
    """Computes the seconds of collectives and of compute.

    Attributes:
        device: the device of every rank.
        ranks_per_node: ranks of every node; ranks are numbered node by node.
        group_sizes: numbers of ranks by group name, where there are no such process groups.
        group_links: links by group name that replace the device's, such as calibrated ones. Groups whose links have the
            same name share the link.
        imbalance: ratio of the largest shard to the mean one: compute on shards takes this much longer on the slowest
            rank. Passes assume 1, since a cache may hold another graph of the same program; reports use that of the
            inputs, see `of_slowest_rank`.
    """

    device: Device
    ranks_per_node: int = machines.RANKS_PER_NODE
    group_sizes: Mapping[str, int] = field(default_factory=dict, hash=False)
    group_links: Mapping[str, Link] = field(default_factory=dict, hash=False)
    imbalance: float = 1.0

    @staticmethod
    def of(graph: Graph) -> CostModel:
        """Returns the default model of a graph: that of the device type of its collectives.

        For a graph without collectives it is the device type of its tensors; the CPU counts only if there is no other.

        Args:
            graph: any.
        """
        kinds = [t.device.type for c in map(Collective.of, graph.nodes) if c for t in node_sizes.tensors(c.payloads[0])]
        if not kinds:
            kinds = sorted({t.device.type for n in graph.nodes for t in node_sizes.tensors(n)}, key="cpu".__eq__)
        return CostModel(machines.device_of(kinds[0] if kinds else "cpu"))

    def of_slowest_rank(self, graph: Graph) -> CostModel:
        """Returns this model for the rank with the largest shards of the inputs that the graph was traced with."""
        values = (t for n in graph.nodes for t in node_sizes.tensors(n))
        return dataclasses.replace(self, imbalance=compat.imbalance_of(values))

    def group_size(self, name: str) -> int | None:
        """Returns the number of ranks of a group, or None if it is unknown."""
        return node_sizes.size_of_group(name, self.group_sizes)

    def link(self, group_name: str) -> Link:
        """Returns the link that a group uses, by the ranks of the group, or by their number if they are unknown."""
        if group_name in self.group_links:
            return self.group_links[group_name]
        ranks = None if group_name in self.group_sizes else node_sizes.ranks_of_group(group_name)
        spans_nodes = None
        if ranks is not None:
            spans_nodes = machines.spans_nodes(ranks, dist.get_world_size(), self.ranks_per_node)
        size = self.group_size(group_name) or NOMINAL_RANKS
        return machines.link_of(self.device, size, self.ranks_per_node, spans_nodes)

    def collective_seconds(self, c: Collective) -> float:
        """Returns the seconds of a collective that runs alone, without the copies before and after it."""
        return self.price(c).seconds

    def price(self, c: Collective) -> Price:
        """Returns the cost of a collective, such as `all_gather_v`: its predicted time, in parts.

        The bytes come from `Descriptor.traffic` (the formulas are in `shardcompile.collectives.traffic`), the seconds
        from `price_of`.
        """
        n = self.group_size(c.group_name)
        traffic_of = c.descriptor.traffic
        if n is None or traffic_of is None:
            say_once(
                f"{c.kind} over group {c.group_name} of {n or 'unknown'} ranks has no known cost; a default is used"
            )
            return self.price_of(c.group_name, Traffic(NOMINAL_BYTES, NOMINAL_BYTES))
        if any(compat.has_no_hint(s) for p in c.payloads for t in node_sizes.tensors(p) for s in t.shape):
            say_once("collectives of unbacked sizes are costed as if these sizes were 64")
        return self.price_of(c.group_name, traffic_of(node_sizes.members(c, n), n))

    def price_of(self, group_name: str, traffic: Traffic) -> Price:
        """Returns the cost of moving a given traffic over a group."""
        return self.pricing(group_name)(traffic)

    def pricing(self, group_name: str) -> Callable[[Traffic], Price]:
        """Returns the function `price_of` for one group, for repeated use."""
        n = self.group_size(group_name) or NOMINAL_RANKS
        link = self.link(group_name)
        has_ports, latency, busy = link.medium == "ports", link.seconds(0, n), link.busy
        rate = self.device.memory * self.device.share

        def cost_of(traffic: Traffic) -> Price:
            transfer = link.seconds(traffic.busiest if has_ports else traffic.total / n, n) - latency
            held = link.host + busy * transfer
            copies = traffic.packed / rate, traffic.unpacked / rate
            launch = link.launch if traffic.messages else 0.0
            return Price(latency + launch - link.host, (1 - busy) * transfer, *copies, held)

        def cheapest(traffic: Traffic) -> Price:
            if not has_ports or traffic.ring is None:
                return cost_of(traffic)
            return min(cost_of(traffic), cost_of(traffic.ring), key=lambda p: p.seconds + p.packing + p.unpacking)

        return cheapest

    def compute_seconds(self, node: Node) -> float:
        """Returns the seconds of a node on the compute stream: 0 for collectives and for nodes that launch no kernel.

        It follows from the node's operations and memory traffic. Inductor fuses pointwise ops with their pointwise
        neighbours: what is only passed between them is neither written nor read, and launches no kernel.
        """
        if _is_free(node):
            return 0.0
        reads = [i for i in node.all_input_nodes if node_sizes.tensors(i) and not _is_fused(_view_base(i), node)]
        writes = not _is_never_stored(node)
        traffic, masks = _traffic_of(node, reads, writes), _mask_bytes(node, reads, writes)
        is_function, kernel = node.target in _TRANSCENDENTAL, self.device.kernel
        elements = node_sizes.nbytes_of(node) / dtype_of(node).itemsize if is_function else 0
        seconds = self.device.compute_seconds(flops_of(node), traffic, dtype_of(node), elements, masks) - kernel
        if self.imbalance != 1 and _has_symbols(node):
            seconds *= self.imbalance
        return seconds + kernel * writes


@dataclass(frozen=True)
class GraphCosts:
    """The costs of every node of a graph.

    Attributes:
        seconds: by node: seconds on the compute stream; of a collective from its start to its end; of a wait what its
            collective unpacks.
        nbytes: by node: bytes of memory that it allocates.
        storage: by node: the node that allocated its memory; views share that of their base.
        group: by collective: the name of its group, which has its own stream.
        awaits: by wait: the collective that it completes.
        inputs: by node: the nodes that it reads.
        packing: by collective: seconds of compute before it starts; left out where there are none.
        latency: by collective: the part of its seconds in which it does not use the link; left out where there is none.
        link: by group: the name of the link that it uses; left out where the group has a link of its own.
        call: seconds before the first node runs.
        freed: inputs that are freed after their last use; the others are held throughout.
    """

    seconds: Mapping[Node, float]
    nbytes: Mapping[Node, int]
    storage: Mapping[Node, Node]
    group: Mapping[Node, str]
    awaits: Mapping[Node, Node]
    inputs: Mapping[Node, tuple[Node, ...]]
    packing: Mapping[Node, float] = field(default_factory=dict)
    latency: Mapping[Node, float] = field(default_factory=dict)
    link: Mapping[str, str] = field(default_factory=dict)
    call: float = 0.0
    freed: Set[Node] = frozenset()

    @staticmethod
    def of(graph: Graph, model: CostModel) -> GraphCosts:
        """Computes the costs of a graph; inside of `caching_costs` only if it has changed since the last call.

        Args:
            graph: in a valid order.
            model: the cost model.
        """
        cache = _CACHE.get()
        if cache is None:
            return GraphCosts._of(graph, model)
        now = Seen.of(graph)
        if cache.model != model or now != cache.seen:
            cache.costs, cache.model, cache.seen = GraphCosts._of(graph, model), model, now
        assert cache.costs is not None
        return cache.costs

    @staticmethod
    def _of(graph: Graph, model: CostModel) -> GraphCosts:
        largest = _largest_shards(graph, model)
        seconds: dict[Node, float] = {}
        nbytes: dict[Node, int] = {}
        storage: dict[Node, Node] = {}
        group: dict[Node, str] = {}
        awaits: dict[Node, Node] = {}
        inputs: dict[Node, tuple[Node, ...]] = {}
        packing: dict[Node, float] = {}
        latency: dict[Node, float] = {}
        for node in graph.nodes:
            inputs[node] = tuple(node.all_input_nodes)
            base = _base(node)
            storage[node] = node if base is None else storage[base]
            nbytes[node] = 0
            if base is None and node.op != "output":
                nbytes[node] = largest[node] if node in largest else node_sizes.nbytes_of(node)
            c = Collective.of(node)
            if c is None:
                seconds.setdefault(node, model.compute_seconds(node))
                continue
            price = model.price(c)
            seconds[node], latency[node], group[node] = price.seconds, price.latency, c.group_name
            if price.before:
                packing[node] = price.before
            if price.unpacking and c.waits:
                seconds[c.waits[0]] = price.unpacking
            awaits.update(dict.fromkeys(c.waits, node))
        link = {name: model.link(name).name for name in group.values()}
        call, freed = model.device.call, compat.saved_for_backward(graph)
        return GraphCosts(seconds, nbytes, storage, group, awaits, inputs, packing, latency, link, call, freed)


@dataclass
class _Cache:
    """The costs that were computed last, with the model and the graph that they belong to."""

    costs: GraphCosts | None = None
    model: CostModel | None = None
    seen: Seen | None = None


_CACHE: ContextVar[_Cache | None] = ContextVar("costs", default=None)


@contextlib.contextmanager
def caching_costs() -> Iterator[None]:
    """While the context is active, the costs of an unchanged graph are not computed again."""
    token = _CACHE.set(_Cache())
    try:
        yield
    finally:
        _CACHE.reset(token)


def _largest_shards(graph: Graph, model: CostModel) -> dict[Node, int]:
    """Returns the bytes of the largest shard over the ranks, for payloads and results of collectives with known
    partitions.
    """
    found: dict[Node, int] = {}
    for node in graph.nodes:
        c = Collective.of(node)
        n = None if c is None else model.group_size(c.group_name)
        if c is None or n is None:
            continue
        members = node_sizes.members(c, n)
        for payload, m in zip(c.payloads, members, strict=True):
            if m.put is not None and m.put.sizes is not None:
                found[payload] = max(found.get(payload, 0), int(m.nbytes * max(shares(m.put, n))))
        if all(m.get is not None and m.get.sizes is not None for m in members):
            columns = zip(*([m.nbytes * s for s in shares(m.get, n)] for m in members), strict=True)
            found[node] = int(max(sum(column) for column in columns))
    return found


# Properties of nodes.


def _base(node: Node) -> Node | None:
    """Returns the node whose memory a node's result shares, or None."""
    name = op_of(node).shares
    if name is None:
        return None
    base = node.args[name] if isinstance(name, int) and name < len(node.args) else node.kwargs.get(str(name))
    return base if isinstance(base, Node) else None


def _is_view(node: Node) -> bool:
    return not op_of(node).writes and _base(node) is not None


def _is_free(node: Node) -> bool:
    """Whether a node launches no kernel on the compute stream."""
    op = op_of(node)
    if op.target is None or op.allocates or kind_of(node) is not None:
        return True
    return not op.writes and (_base(node) is not None or not node_sizes.tensors(node))


def computes_nothing(node: Node) -> bool:
    """Whether a node is a view or an allocation, which is not needed before its first reader."""
    is_call = node.op == "call_function" and node.target is not WAIT and kind_of(node) is None
    return is_call and _is_free(node)


def _view_base(node: Node) -> Node:
    while _is_view(node):
        base = _base(node)
        assert base is not None
        node = base
    return node


def _is_fused(producer: Node, reader: Node) -> bool:
    """Whether Inductor computes both in one kernel."""
    return _is_loop(producer) and (_is_loop(reader) or op_of(reader).reduces)


def _is_loop(node: Node) -> bool:
    """Whether Inductor computes a node element by element, inlined into the kernels that read it; pads are."""
    op = op_of(node)
    return (op.pointwise and not op.writes) or op.target is aten.constant_pad_nd.default


def _is_never_stored(node: Node) -> bool:
    """Whether a result is only read within the kernel that computes it."""
    return _is_loop(node) and bool(node.users) and all(_is_fused_through_views(node, u) for u in node.users)


def _is_fused_through_views(producer: Node, user: Node) -> bool:
    return (
        all(_is_fused_through_views(producer, u) for u in user.users) if _is_view(user) else _is_fused(producer, user)
    )


def _traffic_of(node: Node, reads: Sequence[Node], writes: bool) -> int:
    """Returns the bytes that a kernel reads and writes."""
    written = node_sizes.nbytes_of(node)
    if node.target in _GATHERS:
        return 2 * written
    return sum(map(node_sizes.nbytes_of, reads)) + written * writes


def _mask_bytes(node: Node, reads: Sequence[Node], writes: bool) -> int:
    """Returns the bytes of masks that a loop reads and stores, such as where the gradient of a ReLU is zero."""
    nodes = [*reads, *([node] if writes else [])] if _is_loop(node) else []
    return sum(nbytes_of(t) for n in nodes for t in node_sizes.tensors(n) if t.dtype is torch.bool)


def _has_symbols(node: Node) -> bool:
    """Whether a node reads or writes tensors of symbolic sizes, as those of shards are."""
    tensors = (t for n in (node, *node.all_input_nodes) for t in node_sizes.tensors(n))
    return any(isinstance(size, torch.SymInt) for t in tensors for size in t.shape)
