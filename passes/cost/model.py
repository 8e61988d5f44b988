"""What the nodes of a graph cost: seconds and bytes, the same on every rank.

Costs are reckoned with symbolic sizes by their hints, which the library makes the same on every rank, and with the
size vectors of partitions. Numbers that may differ between ranks are never read: see
`shardcompile.passes.graph.rank_dependent_sizes`.
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
from shardcompile.collectives.traffic import Member, Traffic, nbytes_of, shares
from shardcompile.machines import Device, Link, Price
from shardcompile.passes.cost.operations import dtype_of, flops_of, formula_of, say_once
from shardcompile.passes.graph import rank_dependent_sizes
from shardcompile.passes.graph.collective import WAIT, Collective, Seen, kind_of
from shardcompile.passes.graph.ops import op_of

aten = torch.ops.aten

NOMINAL_BYTES = 1 << 20
"""What stands for the bytes of a tensor that may have another size on another rank, where no partition tells the
largest.
"""

NOMINAL_FLOPS = 2 * 512**3
"""What stands for the operations of a product of such tensors: that of two square matrices of `NOMINAL_BYTES`."""

NOMINAL_RANKS = 8
"""What stands for the size of a group that is not known."""

_LOOKUPS = {aten.embedding.default, aten.index.Tensor, aten.index_select.default, aten.gather.default}
"""Ops that read as much as they write."""

_FUNCTIONS = {
    *(aten.exp.default, aten.log.default, aten.tanh.default, aten.erf.default, aten.sigmoid.default),
    *(aten.sin.default, aten.cos.default, aten.pow.Tensor_Tensor, aten.pow.Scalar),
}
"""Pointwise ops that take longer to compute than a product or a sum does, where few cores do it."""


@dataclass(frozen=True)
class CostModel:
    """Seconds and bytes.

    Attributes:
        device: what every rank computes with.
        ranks_per_node: of every node; ranks are numbered node by node.
        group_sizes: numbers of ranks by the group's name, where there are no such process groups.
        group_links: links by the group's name, in place of the device's, such as calibrated ones. Groups whose links
            have one name share it.
        imbalance: the largest shard to the mean one: what is computed with shards takes so much longer on the slowest
            rank. Passes reckon with 1, since they may meet another graph of the same program in a cache; reports with
            that of the inputs, see `of_slowest_rank`.
    """

    device: Device
    ranks_per_node: int = machines.RANKS_PER_NODE
    group_sizes: Mapping[str, int] = field(default_factory=dict, hash=False)
    group_links: Mapping[str, Link] = field(default_factory=dict, hash=False)
    imbalance: float = 1.0

    @staticmethod
    def of(graph: Graph) -> CostModel:
        """What to reckon a graph's costs with where nothing is given: by the device type of its collectives.

        Of a graph without any it is that of its tensors, not counting those on the CPU if there are others.

        Args:
            graph: any.
        """
        kinds = [
            t.device.type
            for c in map(Collective.of, graph.nodes)
            if c
            for t in rank_dependent_sizes.tensors(c.payloads[0])
        ]
        if not kinds:
            kinds = sorted(
                {t.device.type for n in graph.nodes for t in rank_dependent_sizes.tensors(n)}, key="cpu".__eq__
            )
        return CostModel(machines.device_of(kinds[0] if kinds else "cpu"))

    def of_slowest_rank(self, graph: Graph) -> CostModel:
        """The same model for the rank with the largest shards of the inputs that a graph was traced with."""
        values = (t for n in graph.nodes for t in rank_dependent_sizes.tensors(n))
        return dataclasses.replace(self, imbalance=compat.imbalance_of(values))

    def group_size(self, name: str) -> int | None:
        """Ranks in a group, or None."""
        return rank_dependent_sizes.size_of_group(name, self.group_sizes)

    def link(self, group_name: str) -> Link:
        """The link that a group uses: told from where its ranks are, or from how many there are if that is unknown."""
        if group_name in self.group_links:
            return self.group_links[group_name]
        ranks = None if group_name in self.group_sizes else rank_dependent_sizes.ranks_of_group(group_name)
        spread = None
        if ranks is not None:
            spread = machines.spans_nodes(ranks, dist.get_world_size(), self.ranks_per_node)
        size = self.group_size(group_name) or NOMINAL_RANKS
        return machines.link_of(self.device, size, self.ranks_per_node, spread)

    def collective_seconds(self, c: Collective, labels: Mapping[Node, set[str]] | None = None) -> float:
        """How long a collective is on its way that runs alone. What it copies before and after is not in it.

        Args:
            c: any.
            labels: of the graph, see `shardcompile.passes.graph.rank_dependent_sizes.labels`; left out, they are
                looked for.
        """
        return self.price(c, labels).seconds

    def price(self, c: Collective, labels: Mapping[Node, set[str]] | None = None) -> Price:
        """What a collective costs.

        Args:
            c: any.
            labels: as for `collective_seconds`.
        """
        labels = rank_dependent_sizes.labels(c.node.graph, self.group_sizes) if labels is None else labels
        n = self.group_size(c.group_name)
        moved = c.descriptor.traffic
        if n is None or moved is None:
            say_once(f"{c.kind} over group {c.group_name} of {n or 'unknown'} ranks has no price; a default stands in")
            return self.price_of(c.group_name, Traffic(NOMINAL_BYTES, NOMINAL_BYTES))
        if any(compat.has_no_hint(s) for p in c.payloads for t in rank_dependent_sizes.tensors(p) for s in t.shape):
            say_once("collectives of sizes that are known at run time only are priced as if these were 64")
        members = rank_dependent_sizes.members(c, n)
        if not readable(c, members, labels):
            return self.price_of(c.group_name, Traffic(NOMINAL_BYTES, NOMINAL_BYTES * n))
        return self.price_of(c.group_name, moved(members, n))

    def price_of(self, group_name: str, traffic: Traffic) -> Price:
        """What it costs to move so much over a group."""
        return self.pricing(group_name)(traffic)

    def pricing(self, group_name: str) -> Callable[[Traffic], Price]:
        """What it costs to move things over a group, for who asks often."""
        n = self.group_size(group_name) or NOMINAL_RANKS
        link = self.link(group_name)
        by_rank, latency, busy = link.medium == "ports", link.seconds(0, n), link.busy
        rate = self.device.memory * self.device.share

        def of_one_way(traffic: Traffic) -> Price:
            transfer = link.seconds(traffic.busiest if by_rank else traffic.total / n, n) - latency
            held = link.host + busy * transfer
            copies = traffic.packed / rate, traffic.unpacked / rate
            more = link.launch if traffic.messages else 0.0
            return Price(latency + more - link.host, (1 - busy) * transfer, *copies, held)

        def price(traffic: Traffic) -> Price:
            if not by_rank or traffic.ring is None:
                return of_one_way(traffic)
            return min(of_one_way(traffic), of_one_way(traffic.ring), key=lambda p: p.seconds + p.packing + p.unpacking)

        return price

    def compute_seconds(self, node: Node, labels: Mapping[Node, set[str]] | None = None) -> float:
        """How long a node takes on the compute stream: 0 for what runs no kernel, and for collectives.

        It follows from its operations and its memory traffic. Inductor fuses pointwise ops with their pointwise
        neighbours: what only passes between them is neither written nor read, and launches no kernel.

        Args:
            node: any.
            labels: as for `collective_seconds`.
        """
        labels = rank_dependent_sizes.labels(node.graph, self.group_sizes) if labels is None else labels
        if _is_free(node):
            return 0.0
        dependent = node in labels or any(i in labels for i in node.all_input_nodes)
        nominal = NOMINAL_BYTES if dependent else None
        reads = [
            i
            for i in node.all_input_nodes
            if rank_dependent_sizes.tensors(i) and not _are_fused(_behind_views(i), node)
        ]
        writes = not _passes_on(node)
        traffic = _traffic_of(node, reads, writes, nominal)
        flops = NOMINAL_FLOPS * (formula_of(node) is not None) if dependent else flops_of(node)
        is_function = node.target in _FUNCTIONS and not dependent
        elements = rank_dependent_sizes.nbytes_of(node) / dtype_of(node).itemsize if is_function else 0
        kernel, masks = self.device.kernel, 0 if dependent else _masks(node, reads, writes)
        seconds = self.device.compute_seconds(flops, traffic, dtype_of(node), elements, masks) - kernel
        if self.imbalance != 1 and _has_symbols(node):
            seconds *= self.imbalance
        return seconds + kernel * writes


def readable(c: Collective, members: Sequence[Member], labels: Mapping[Node, set[str]]) -> bool:
    """Whether all ranks, those of other groups as well, find the same bytes in a collective's arguments.

    Within its group they do, by the meaning of the collective. The exception is a payload that is put in as it is, by a
    sharded that is not known.
    """
    if any(labels.get(p, set()) - {c.group_name} for p in c.payloads):
        return False
    unknown = any(m.put is not None and m.put.sizes is None and m.put.number for m in members)
    return not unknown or c.descriptor.told


@dataclass(frozen=True)
class Prices:
    """What every node of a graph costs, worked out once.

    Attributes:
        seconds: by node: on the compute stream, or of a collective from start to end. Of a wait: what its collective
            unpacks.
        nbytes: by node: the memory that it allocates.
        storage: by node: the node that allocated what it holds; views hold what their base does.
        group: by collective: the name of its group, which has a stream of its own.
        awaits: by wait: the collective that it completes.
        inputs: by node: the nodes that it reads.
        packing: by collective: compute before it starts; left out where there is none.
        latency: by collective: the part of its seconds in which it uses no link; left out where it is none.
        link: by group: the name of the link that it uses; left out where it has one for itself.
        labels: of the nodes whose sizes may differ between ranks, see
            `shardcompile.passes.graph.rank_dependent_sizes.labels`.
        call: before the first node runs.
        freed: inputs that are freed after their last use; the others are held throughout.

    Nodes that other ranks may not have (`shardcompile.passes.graph.rank_dependent_sizes.only_here`) cost nothing, and
    hold what they are made of: schedules leave them out, and are the same on every rank.
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
    labels: Mapping[Node, set[str]] = field(default_factory=dict)
    call: float = 0.0
    freed: Set[Node] = frozenset()

    @staticmethod
    def of(graph: Graph, model: CostModel) -> Prices:
        """Price a graph; inside of `keeping_prices` not twice, unless it has changed.

        Args:
            graph: in a valid order.
            model: the costs.
        """
        kept = _KEPT.get()
        if kept is None:
            return Prices._of(graph, model)
        now = Seen.of(graph)
        if kept.model != model or now != kept.seen:
            kept.prices, kept.model, kept.seen = Prices._of(graph, model), model, now
        assert kept.prices is not None
        return kept.prices

    @staticmethod
    def _of(graph: Graph, model: CostModel) -> Prices:
        labels = rank_dependent_sizes.labels(graph, model.group_sizes)
        largest = _largest_shards(graph, model, labels)
        unsure = rank_dependent_sizes.only_here(graph, labels, model.group_sizes)
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
            if node in unsure:
                made_of = [storage[i] for i in inputs[node] if nbytes[storage[i]]]
                storage[node] = made_of[0] if made_of else storage[node]
                seconds[node], inputs[node] = 0.0, ()
                continue
            if base is None and node.op != "output":
                nbytes[node] = (
                    largest.get(node, NOMINAL_BYTES) if node in labels else rank_dependent_sizes.nbytes_of(node)
                )
            c = Collective.of(node)
            if c is None:
                seconds.setdefault(node, model.compute_seconds(node, labels))
                continue
            price = model.price(c, labels)
            seconds[node], latency[node], group[node] = price.seconds, price.latency, c.group_name
            if price.before:
                packing[node] = price.before
            if price.unpacking and c.waits:
                seconds[c.waits[0]] = price.unpacking
            awaits.update(dict.fromkeys(c.waits, node))
        link = {name: model.link(name).name for name in group.values()}
        call, freed = model.device.call, compat.saved_for_backward(graph)
        return Prices(seconds, nbytes, storage, group, awaits, inputs, packing, latency, link, labels, call, freed)


@dataclass
class _Kept:
    """The prices that were worked out last, and of what."""

    prices: Prices | None = None
    model: CostModel | None = None
    seen: Seen | None = None


_KEPT: ContextVar[_Kept | None] = ContextVar("prices", default=None)


@contextlib.contextmanager
def keeping_prices() -> Iterator[None]:
    """Inside of this, a graph that has not changed since it was priced last is not priced again."""
    token = _KEPT.set(_Kept())
    try:
        yield
    finally:
        _KEPT.reset(token)


def _largest_shards(graph: Graph, model: CostModel, labels: Mapping[Node, set[str]]) -> dict[Node, int]:
    """Bytes of the largest of the ranks' shards, for the payloads and results of collectives with known partitions."""
    found: dict[Node, int] = {}
    for node in graph.nodes:
        c = Collective.of(node)
        n = None if c is None else model.group_size(c.group_name)
        if c is None or n is None:
            continue
        members = rank_dependent_sizes.members(c, n)
        if not readable(c, members, labels):
            continue
        for payload, m in zip(c.payloads, members, strict=True):
            if m.put is not None and m.put.sizes is not None and labels.get(payload) == {c.group_name}:
                found[payload] = max(found.get(payload, 0), int(m.nbytes * max(shares(m.put, n))))
        if labels.get(node) == {c.group_name} and all(m.get is not None and m.get.sizes is not None for m in members):
            columns = zip(*([m.nbytes * s for s in shares(m.get, n)] for m in members), strict=True)
            found[node] = int(max(sum(column) for column in columns))
    return found


# What nodes are and do.


def _base(node: Node) -> Node | None:
    """The node whose memory a node's result shares, or None."""
    name = op_of(node).shares
    if name is None:
        return None
    base = node.args[name] if isinstance(name, int) and name < len(node.args) else node.kwargs.get(str(name))
    return base if isinstance(base, Node) else None


def _is_view(node: Node) -> bool:
    return not op_of(node).writes and _base(node) is not None


def _is_free(node: Node) -> bool:
    """Whether a node runs no kernel on the compute stream."""
    op = op_of(node)
    if op.target is None or op.allocates or kind_of(node) is not None:
        return True
    return not op.writes and (_base(node) is not None or not rank_dependent_sizes.tensors(node))


def computes_nothing(node: Node) -> bool:
    """Whether a node is a view or an allocation: nothing needs it before what reads it."""
    is_call = node.op == "call_function" and node.target is not WAIT and kind_of(node) is None
    return is_call and _is_free(node)


def _behind_views(node: Node) -> Node:
    while _is_view(node):
        base = _base(node)
        assert base is not None
        node = base
    return node


def _are_fused(producer: Node, reader: Node) -> bool:
    """Whether Inductor computes both in one kernel."""
    return _is_loop(producer) and (_is_loop(reader) or op_of(reader).reduces)


def _is_loop(node: Node) -> bool:
    """Whether Inductor computes a node element by element, inside of the kernels that read it. So it pads."""
    op = op_of(node)
    return (op.pointwise and not op.writes) or op.target is aten.constant_pad_nd.default


def _passes_on(node: Node) -> bool:
    """Whether a result is only ever read in the kernel that makes it."""
    return _is_loop(node) and bool(node.users) and all(_stays(node, u) for u in node.users)


def _stays(producer: Node, user: Node) -> bool:
    return all(_stays(producer, u) for u in user.users) if _is_view(user) else _are_fused(producer, user)


def _traffic_of(node: Node, reads: Sequence[Node], writes: bool, nominal: int | None) -> int:
    """Bytes that a kernel reads and writes, each tensor at its size or at a nominal one."""
    if nominal is not None:
        return nominal * (len(reads) + writes)
    written = rank_dependent_sizes.nbytes_of(node)
    if node.target in _LOOKUPS:
        return 2 * written
    return sum(map(rank_dependent_sizes.nbytes_of, reads)) + written * writes


def _masks(node: Node, reads: Sequence[Node], writes: bool) -> int:
    """Bools that a loop reads and stores, such as where the gradient of a ReLU is zero."""
    around = [*reads, *([node] if writes else [])] if _is_loop(node) else []
    return sum(nbytes_of(t) for n in around for t in rank_dependent_sizes.tensors(n) if t.dtype is torch.bool)


def _has_symbols(node: Node) -> bool:
    """Whether a node computes with tensors whose sizes vary, as those of shards do."""
    around = (t for n in (node, *node.all_input_nodes) for t in rank_dependent_sizes.tensors(n))
    return any(isinstance(size, torch.SymInt) for t in around for size in t.shape)
