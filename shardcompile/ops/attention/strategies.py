"""Which way attention goes on sharded tensors, decided by layouts and settings, so that every rank decides alike.

A rank attends from its part of the batch, of the heads, or of the query's rows. For rows it gathers the keys and
values, or has them come a shard at a time; or over its own part of the keys, where the query is whole. Each way is
priced: bytes that are sent, what a rank holds for it, and a predicted time, by the constants of
`shardcompile.machines`. Shards are taken for ones that balance the work, as sizes are not known while tracing. No
tensors here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Replicate, Shard

from shardcompile import compat, config, machines
from shardcompile.ops import Strategy, along
from shardcompile.ops.choice import Choice, choose
from shardcompile.planning import RedistributionPlan, find_plan
from shardcompile.sharding import Layout, Partition
from shardcompile.units import in_bytes, in_seconds

BATCH, HEADS, ROWS = 0, 1, 2
"""Dims of queries, keys and values."""

_RING = "ring"
_WORDS = {
    _RING: "by a ring",
    "gather": "with all keys and values gathered",
    "heads": "by heads",
    "batch": "by parts of the batch",
    "keys": "by parts of the keys",
    "whole": "whole on every rank",
    "local": "on local shards as they are",
}
_KERNELS_OF_A_STEP = 8
"""Small kernels that a step of a ring has besides attention: counted in a trace."""

_WORTH_A_RING = 0.9
"""How much of the other way's time a ring may take: its graph has more nodes and is compiled for longer."""

_BACKWARD_FLOPS = 2.5
"""Operations of the backward pass for one of the forward pass: five products for two."""


@dataclass(frozen=True)
class Way:
    """A way, and its price.

    Attributes:
        kind: its name, see `shardcompile.config.attention`.
        choice: how each input gets to where it is needed, but for a ring, and how results are laid out.
        plans: how each input gets to where it is needed.
        ring: the mesh dim along which shards of keys come one after the other, or None.
        nbytes: what ranks send to one another, all together.
        cost: the same, as if all shards were of one size, times the imbalance of a dim that the way newly shards: eager
            code chooses as compiled code does, which knows no sizes.
        held: bytes that a rank holds at once of what has come, or waits to be sent.
        seconds: predicted, on every rank.
        reason: why it was taken, in words; empty if nothing is sent.
    """

    kind: str
    choice: Choice
    plans: tuple[RedistributionPlan, ...]
    ring: int | None
    nbytes: int
    cost: float
    held: float
    seconds: float
    reason: str = ""

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Of the tensors that a rank attends with."""
        return tuple(p.dst for p in self.plans)

    def __str__(self) -> str:
        sent, held, takes = in_bytes(self.nbytes), in_bytes(self.held), in_seconds(self.seconds)
        return f"{_WORDS[self.kind]}: {sent} sent, {held} held, {takes} predicted"


@dataclass(frozen=True)
class Question:
    """What is to be decided.

    Attributes:
        layouts: of query, key, value and the mask, if there is one; of a backward pass those of the result's gradient,
            query, key, value, result, logarithm and the mask.
        has_mask: whether there is one.
        causal: whether a row of the query sees only the rows of the key up to its own number.
        backward: whether it is a backward pass, which gives the gradients of query, key and value.
    """

    layouts: tuple[Layout, ...]
    has_mask: bool
    causal: bool
    backward: bool

    @property
    def query(self) -> Layout:
        """Of the query."""
        return self.layouts[self.at]

    @property
    def key(self) -> Layout:
        """Of the key."""
        return self.layouts[self.at + 1]

    @property
    def at(self) -> int:
        """Where the query is among the layouts."""
        return 1 if self.backward else 0


def find_way(question: Question) -> Way:
    """The way that `shardcompile.config.attention` says, or by its price."""
    settings = config.ways_of_attention()
    traced = any(x.is_traced for x in question.layouts)
    return (_decided if traced else _cached)(question, settings)


def _decided(question: Question, settings: tuple[str, int, int]) -> Way:
    wanted, most_steps, most_bytes = settings
    ways = list(_ways(question))
    others = [w for w in ways if w.kind == wanted != "auto"]
    if others:
        return _because(min(others, key=_cost), f"config.attention is {wanted!r}")
    best = min((w for w in ways if w.ring is None), key=_cost)
    ring = min((w for w in ways if w.ring is not None), key=_cost, default=None)
    impossible = "" if wanted == "auto" else f"config.attention is {wanted!r}, which is not possible here; "
    if ring is None:
        return _because(best, f"{impossible}it sends the fewest bytes")
    steps = question.key.mesh.shape[ring.ring]
    if steps > most_steps:
        return _because(best, f"{impossible}a ring of {steps} ranks is longer than config.ring_steps, {most_steps}")
    if ring.seconds < _WORTH_A_RING * best.seconds:
        return _because(ring, f"{impossible}predicted to be faster than {best}")
    if best.held > most_bytes and ring.held < best.held:
        return _because(ring, f"{impossible}config.attention_bytes is {in_bytes(most_bytes)}, less than {best}")
    return _because(best, f"{impossible}there would not be much to gain {ring}")


_cached = functools.lru_cache(maxsize=1024)(_decided)
compat.forget_with_world(_cached.cache_clear)


def _cost(way: Way) -> float:
    return way.cost


def _because(way: Way, why: str) -> Way:
    return replace(way, reason=f"{way}; {why}") if way.nbytes else way


# What is possible


def _strategies(question: Question) -> tuple[list[Strategy], ...]:
    """The legal ways along a mesh dim, over rows, over the batch and over heads.

    A Partial result of the forward op is one to be merged.
    """
    query, key, has_mask = question.query, question.key, question.has_mask
    mask = question.layouts[-1]

    def of_mask(dim: int) -> list[int | None]:
        if not has_mask:
            return []
        size = mask.shape[dim]
        return [None if isinstance(size, int) and size == 1 else dim]

    def way(q: int | None, k: int | None, mask_dim: int, pending: list[str | None]) -> Strategy:
        if question.backward:
            grads = [p or d for p, d in zip(pending, (q, k, k), strict=True)]
            return along([q, q, k, k, q, q, *of_mask(mask_dim)], grads)
        return along([q, k, k, *of_mask(mask_dim)], [q if k is None or q is not None else "sum"] * 2)

    over_rows = [way(ROWS, None, ROWS, [None, "sum", "sum"])]
    if not all(isinstance(p, Shard) for p in query.placements):
        over_rows.append(way(None, ROWS, ROWS + 1, ["sum", None, None]))
    over_batch = [way(BATCH, BATCH, BATCH, [None] * 3)]
    over_heads = []
    if query.shape[HEADS] is key.shape[HEADS] or query.shape[HEADS] == key.shape[HEADS]:
        over_heads.append(way(HEADS, HEADS, HEADS, [None] * 3))
    return over_rows, over_batch, over_heads


def _ways(question: Question) -> Iterator[Way]:
    """The cheapest of each of several sets of strategies, and rings where keys would be gathered.

    Results have to come back to where the forward op's inputs are, so that is priced, too.
    """
    layouts, at = question.layouts, question.at
    rows, batch, heads = _strategies(question)
    forward = layouts[at : at + 3]
    results = forward if question.backward else (forward[0], forward[0].with_dtype(torch.float32))
    sets = [rows, rows + batch, rows + heads, rows + batch + heads]
    # A ring needs rows of the query. Parts of the keys may send less, and would be chosen in their place.
    for_a_ring = rows[:1]
    if len(rows) > 1:
        sets.append(for_a_ring)
    for some in sets:
        choice = choose(layouts, some, len(results), produced=lambda: [nbytes_of(x) for x in results])
        assert choice is not None, "replicating everything is always possible"
        ends = zip(choice.outputs, results if question.backward else results[:1], strict=False)
        returns = [find_plan(o.layout(x, x.shape, x.dtype), x.reduced()) for o, x in ends]
        if some is not for_a_ring:
            yield _priced(question, choice, choice.plans, returns, None)
        ring = _ring_along(question.key, choice.plans[at].dst, choice.plans[at + 1].dst)
        if ring is not None:
            partition = question.key.partition_of(ROWS)
            plans = list(choice.plans)
            for i in (at + 1, at + 2):
                plans[i] = find_plan(layouts[i], sharded_in_rows(plans[i].dst, ring, partition))
            yield _priced(question, choice, tuple(plans), returns[:1], ring)


def _ring_along(key: Layout, query_chosen: Layout, key_chosen: Layout) -> int | None:
    """The mesh dim along which keys would be gathered for queries sharded in rows: there a ring is possible."""
    partition = key.partitions[ROWS]
    if partition is None or len(partition.mesh_dims) != 1:
        return None
    (m,) = partition.mesh_dims
    over_rows = query_chosen.placements[m] == Shard(ROWS) and key_chosen.placements[m] == Replicate()
    return m if over_rows else None


def sharded_in_rows(layout: Layout, mesh_dim: int, partition: Partition) -> Layout:
    """A layout with rows sharded along a mesh dim along which nothing is sharded."""
    placements = [Shard(ROWS) if m == mesh_dim else p for m, p in enumerate(layout.placements)]
    partitions = [partition if d == ROWS else c for d, c in enumerate(layout.partitions)]
    return Layout.of(layout.mesh, placements, layout.shape, layout.dtype, partitions)


# What it costs


def _kind(question: Question, choice: Choice) -> str:
    """The name of a way without a ring: by what becomes of the rows that are sharded."""
    query, key = (choice.plans[question.at + i].dst for i in (0, 1))
    if not choice.communicates:
        return "local"
    before = [*question.query.placements, *question.key.placements]
    partition = {m % len(query.placements) for m, p in enumerate(before) if p == Shard(ROWS)}
    now = {(query.placements[m], key.placements[m]) for m in partition or range(len(query.placements))}
    for kind, dim in (("heads", HEADS), ("batch", BATCH)):
        if any(q == Shard(dim) for q, _ in now):
            return kind
    if any(q == Shard(ROWS) for q, _ in now):
        return "gather"
    return "keys" if any(k == Shard(ROWS) for _, k in now) else "whole"


def _priced(
    question: Question,
    choice: Choice,
    plans: tuple[RedistributionPlan, ...],
    returns: Sequence[RedistributionPlan],
    ring: int | None,
) -> Way:
    mesh, at = question.query.mesh, question.at
    device = machines.device_of(mesh.device_type)
    nbytes = sum(p.nbytes for p in (*plans, *returns))
    cost = sum(p.nominal_nbytes for p in (*plans, *returns)) * choice.imbalance
    seconds = _rounds(mesh, plans) + _rounds(mesh, returns)
    held = sum(_local_bytes(p.dst) for p in plans if p.communicates)
    held += sum(_local_bytes(p.src) for p in returns if p.communicates)
    work, dtype = _work(question, plans) * choice.imbalance, question.query.dtype
    if ring is None:
        seconds += device.compute_seconds(work, 0, dtype)
        return Way(_kind(question, choice), choice, plans, None, nbytes, cost, held, seconds)
    ranks = mesh.shape[ring]
    shard = _local_bytes(plans[at + 1].dst) + _local_bytes(plans[at + 2].dst)
    times = 2 if question.backward else 1  # shards come, and their gradients go home
    only_before = question.causal and question.key.partition_of(ROWS).same_shards(question.query.partitions[ROWS])
    sent = times * shard * mesh.size() * (ranks - 1) // (2 if only_before else 1)
    transfer = _seconds(mesh, ring, sent / max(ranks - 1, 1))
    step = device.compute_seconds(work / ranks, 0, dtype)
    merged = 3 * _local_bytes(plans[at].dst.with_dtype(torch.float32))  # two are read and one is written
    more = merged / (device.memory * device.share) + _KERNELS_OF_A_STEP * device.kernel
    seconds += step + (ranks - 1) * (max(transfer, step) + more)
    return Way(_RING, choice, plans, ring, nbytes + sent, cost + sent, held + 2 * times * shard, seconds)


def _work(question: Question, plans: Sequence[RedistributionPlan]) -> float:
    """Operations of a rank. What a mask leaves out is not known, but of a causal one it is half."""
    query, key, value = (p.dst for p in plans[question.at : question.at + 3])
    batch, heads, rows, features = map(compat.size_hint, query.shape)
    columns, of_values = compat.size_hint(key.shape[ROWS]), compat.size_hint(value.shape[3])
    over = [
        m
        for m, (q, k) in enumerate(zip(query.placements, key.placements, strict=True))
        if isinstance(q, Shard) or isinstance(k, Shard)
    ]
    whole = 2.0 * batch * heads * rows * columns * (features + of_values)
    whole *= (_BACKWARD_FLOPS if question.backward else 1) * (0.5 if question.causal else 1)
    return whole / math.prod(query.mesh.shape[m] for m in over)


def nbytes_of(layout: Layout) -> int:
    """Bytes of the whole tensor, by hints."""
    return math.prod(map(compat.size_hint, layout.shape)) * layout.dtype.itemsize


def _local_bytes(layout: Layout) -> int:
    partition = [layout.mesh.shape[m] for m, p in enumerate(layout.placements) if isinstance(p, Shard)]
    return nbytes_of(layout) // math.prod(partition)


def _link(mesh: DeviceMesh, mesh_dim: int) -> machines.Link:
    ranks = dist.get_process_group_ranks(mesh.get_group(mesh_dim))
    spread = machines.spans_nodes(ranks, dist.get_world_size())
    return machines.link_of(machines.device_of(mesh.device_type), len(ranks), spread=spread)


def _rounds(mesh: DeviceMesh, plans: Sequence[RedistributionPlan]) -> float:
    """Seconds of what tensors need before, or after: what goes along a mesh dim goes together."""
    along: dict[int, float] = {}
    for step in (s for p in plans for s in p.steps if s.nbytes):
        along[step.mesh_dim] = along.get(step.mesh_dim, 0.0) + step.nbytes
    return sum(_seconds(mesh, m, nbytes) for m, nbytes in along.items())


def _seconds(mesh: DeviceMesh, mesh_dim: int, nbytes: float) -> float:
    """Of a collective in which all ranks together send so many bytes."""
    link = _link(mesh, mesh_dim)
    return link.seconds(nbytes if link.medium == "shared" else nbytes / mesh.size(), mesh.shape[mesh_dim])
