"""Chooses the strategy of attention on sharded tensors from layouts and settings, so that the choice is rank-invariant.

Attention is sharded over the batch, over the heads, or over the rows of the query. In the last case keys and values are
gathered, or sent around a ring one shard at a time. If the query is replicated, attention may be sharded over the keys.
The cost of a strategy is the bytes that are sent, the bytes that a rank holds, and a time that is predicted from the
constants of `shardcompile.machines`. All shards count as equal, as sizes are not known while tracing. This module does
not touch tensors.
"""

from __future__ import annotations

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
from shardcompile.sharding import Layout, Partition, cached_for_layouts
from shardcompile.units import in_bytes, in_seconds

BATCH, HEADS, ROWS = 0, 1, 2
"""Dims of queries, keys and values."""

_RING = "ring"
_DESCRIPTIONS = {
    _RING: "by a ring",
    "gather": "with all keys and values gathered",
    "heads": "by heads",
    "batch": "by shards of the batch",
    "keys": "by shards of the keys",
    "whole": "replicated on every rank",
    "local": "on local shards without communication",
}
_KERNELS_OF_A_STEP = 8
"""Number of small kernels in a step of a ring besides attention, as counted in a trace."""

_WORTH_A_RING = 0.9
"""Largest ratio of the time of a ring to that of the other strategy: its graph has more nodes and compiles longer."""

_BACKWARD_FLOPS = 2.5
"""Ratio of the operations of the backward pass to those of the forward pass: five matrix products to two."""


@dataclass(frozen=True)
class AttentionStrategy:
    """A strategy of attention and its cost.

    Attributes:
        kind: name of the strategy, see `shardcompile.config.attention`.
        choice: redistributions of the inputs, without those of a ring, and layouts of the results.
        plans: redistributions of the inputs to the layouts that the strategy requires.
        ring: the mesh dim along which shards of the keys are sent around, or None if the strategy is not a ring.
        nbytes: bytes that all ranks together send.
        cost: the same for shards of equal size, times the imbalance of a dim that the strategy newly shards. Compiled
            code does not know the shard sizes, and eager code has to choose the same strategy.
        held: largest number of bytes that a rank holds at once of received tensors and of tensors to be sent.
        seconds: predicted time.
        reason: why the strategy was chosen, as text; empty if nothing is sent.
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
        """Layouts of the inputs that the strategy requires."""
        return tuple(p.dst for p in self.plans)

    def __str__(self) -> str:
        sent, held, takes = in_bytes(self.nbytes), in_bytes(self.held), in_seconds(self.seconds)
        return f"{_DESCRIPTIONS[self.kind]}: {sent} sent, {held} held, {takes} predicted"


@dataclass(frozen=True)
class AttentionCall:
    """A call of attention, for which a strategy is chosen.

    Attributes:
        layouts: layouts of query, key, value and the mask, if there is one; in a backward pass layouts of the gradient
            of the result, query, key, value, result, logsumexp and the mask.
        has_mask: whether there is a mask.
        causal: whether a row of the query attends only to the rows of the key up to its own index.
        backward: whether the call is a backward pass, which returns the gradients of query, key and value.
    """

    layouts: tuple[Layout, ...]
    has_mask: bool
    causal: bool
    backward: bool

    @property
    def query(self) -> Layout:
        """Layout of the query."""
        return self.layouts[self.query_index]

    @property
    def key(self) -> Layout:
        """Layout of the key."""
        return self.layouts[self.query_index + 1]

    @property
    def query_index(self) -> int:
        """Index of the query among the layouts."""
        return 1 if self.backward else 0


def choose_strategy(call: AttentionCall) -> AttentionStrategy:
    """Returns the strategy that `shardcompile.config.attention` names, or the one with the lowest cost."""
    settings = config.attention_settings()
    if any(x.has_symbols for x in call.layouts):
        return _choose(call, settings)
    return _choose_cached(settings, call.has_mask, call.causal, call.backward, *call.layouts)


def _choose(call: AttentionCall, settings: tuple[str, int, int]) -> AttentionStrategy:
    wanted, most_steps, most_bytes = settings
    candidates = list(_candidates(call))
    requested = [w for w in candidates if w.kind == wanted != "auto"]
    if requested:
        return _with_reason(min(requested, key=_cost), f"config.attention is {wanted!r}")
    best = min((w for w in candidates if w.ring is None), key=_cost)
    ring = min((w for w in candidates if w.ring is not None), key=_cost, default=None)
    impossible = "" if wanted == "auto" else f"config.attention is {wanted!r}, which is not possible here; "
    if ring is None:
        return _with_reason(best, f"{impossible}it sends the fewest bytes")
    steps = call.key.mesh.shape[ring.ring]
    if steps > most_steps:
        return _with_reason(best, f"{impossible}a ring of {steps} ranks is longer than config.ring_steps, {most_steps}")
    if ring.seconds < _WORTH_A_RING * best.seconds:
        return _with_reason(ring, f"{impossible}predicted to be faster than {best}")
    if best.held > most_bytes and ring.held < best.held:
        return _with_reason(ring, f"{impossible}config.attention_bytes is {in_bytes(most_bytes)}, less than {best}")
    return _with_reason(best, f"{impossible}little would be gained {ring}")


@cached_for_layouts
def _choose_cached(
    settings: tuple[str, int, int], has_mask: bool, causal: bool, backward: bool, *layouts: Layout
) -> AttentionStrategy:
    return _choose(AttentionCall(layouts, has_mask, causal, backward), settings)


def _cost(strategy: AttentionStrategy) -> float:
    return strategy.cost


def _with_reason(strategy: AttentionStrategy, why: str) -> AttentionStrategy:
    return replace(strategy, reason=f"{strategy}; {why}") if strategy.nbytes else strategy


# Legal strategies


def _op_strategies(call: AttentionCall) -> tuple[list[Strategy], ...]:
    """Returns the legal strategies along a mesh dim: over rows, over the batch and over heads.

    A Partial result of the forward op has to be merged by online softmax.
    """
    query, key, has_mask = call.query, call.key, call.has_mask
    mask = call.layouts[-1]

    def mask_dims(dim: int) -> list[int | None]:
        if not has_mask:
            return []
        size = mask.shape[dim]
        return [None if isinstance(size, int) and size == 1 else dim]

    def sharded(q: int | None, k: int | None, mask_dim: int, pending: list[str | None]) -> Strategy:
        if call.backward:
            grads = [p or d for p, d in zip(pending, (q, k, k), strict=True)]
            return along([q, q, k, k, q, q, *mask_dims(mask_dim)], grads)
        return along([q, k, k, *mask_dims(mask_dim)], [q if k is None or q is not None else "sum"] * 2)

    over_rows = [sharded(ROWS, None, ROWS, [None, "sum", "sum"])]
    if not all(isinstance(p, Shard) for p in query.placements):
        over_rows.append(sharded(None, ROWS, ROWS + 1, ["sum", None, None]))
    over_batch = [sharded(BATCH, BATCH, BATCH, [None] * 3)]
    over_heads = []
    if query.shape[HEADS] is key.shape[HEADS] or query.shape[HEADS] == key.shape[HEADS]:
        over_heads.append(sharded(HEADS, HEADS, HEADS, [None] * 3))
    return over_rows, over_batch, over_heads


def _candidates(call: AttentionCall) -> Iterator[AttentionStrategy]:
    """Yields the cheapest strategy of each of several sets, and a ring wherever keys would be gathered.

    Results are redistributed to the layouts of the inputs of the forward op; the cost includes this.
    """
    layouts, query_index = call.layouts, call.query_index
    rows, batch, heads = _op_strategies(call)
    forward = layouts[query_index : query_index + 3]
    results = forward if call.backward else (forward[0], forward[0].with_dtype(torch.float32))
    sets = [rows, rows + batch, rows + heads, rows + batch + heads]
    # A ring requires a query sharded over rows. Sharding over keys may send less and would be chosen in its place.
    for_a_ring = rows[:1]
    if len(rows) > 1:
        sets.append(for_a_ring)
    for op_strategies in sets:
        choice = choose(layouts, op_strategies, len(results), produced=lambda: [nbytes_of(x) for x in results])
        assert choice is not None, "replicating everything is always possible"
        pairs = zip(choice.outputs, results if call.backward else results[:1], strict=False)
        returns = [find_plan(o.layout(x, x.shape, x.dtype), x.reduced()) for o, x in pairs]
        if op_strategies is not for_a_ring:
            yield _with_cost(call, choice, choice.plans, returns, None)
        ring = _ring_along(call.key, choice.plans[query_index].dst, choice.plans[query_index + 1].dst)
        if ring is not None:
            partition = call.key.partition_of(ROWS)
            plans = list(choice.plans)
            for i in (query_index + 1, query_index + 2):
                plans[i] = find_plan(layouts[i], sharded_in_rows(plans[i].dst, ring, partition))
            yield _with_cost(call, choice, tuple(plans), returns[:1], ring)


def _ring_along(key: Layout, query_chosen: Layout, key_chosen: Layout) -> int | None:
    """Returns the mesh dim over which query rows are sharded and keys would be gathered, where a ring is possible."""
    partition = key.partitions[ROWS]
    if partition is None or len(partition.mesh_dims) != 1:
        return None
    (m,) = partition.mesh_dims
    over_rows = query_chosen.placements[m] == Shard(ROWS) and key_chosen.placements[m] == Replicate()
    return m if over_rows else None


def sharded_in_rows(layout: Layout, mesh_dim: int, partition: Partition) -> Layout:
    """Returns a layout with rows sharded over a mesh dim that does not shard anything yet."""
    placements = [Shard(ROWS) if m == mesh_dim else p for m, p in enumerate(layout.placements)]
    partitions = [partition if d == ROWS else c for d, c in enumerate(layout.partitions)]
    return Layout.of(layout.mesh, placements, layout.shape, layout.dtype, partitions)


# Costs


def _kind(call: AttentionCall, choice: Choice) -> str:
    """Returns the name of a strategy that is not a ring, by what replaces the sharding of rows."""
    query, key = (choice.plans[call.query_index + i].dst for i in (0, 1))
    if not choice.communicates:
        return "local"
    before = [*call.query.placements, *call.key.placements]
    row_mesh_dims = {m % len(query.placements) for m, p in enumerate(before) if p == Shard(ROWS)}
    now = {(query.placements[m], key.placements[m]) for m in row_mesh_dims or range(len(query.placements))}
    for kind, dim in (("heads", HEADS), ("batch", BATCH)):
        if any(q == Shard(dim) for q, _ in now):
            return kind
    if any(q == Shard(ROWS) for q, _ in now):
        return "gather"
    return "keys" if any(k == Shard(ROWS) for _, k in now) else "whole"


def _with_cost(
    call: AttentionCall,
    choice: Choice,
    plans: tuple[RedistributionPlan, ...],
    returns: Sequence[RedistributionPlan],
    ring: int | None,
) -> AttentionStrategy:
    mesh, query_index = call.query.mesh, call.query_index
    device = machines.device_of(mesh.device_type)
    nbytes = sum(p.nbytes for p in (*plans, *returns))
    cost = sum(p.nominal_nbytes for p in (*plans, *returns)) * choice.imbalance
    seconds = _redistribution_seconds(mesh, plans) + _redistribution_seconds(mesh, returns)
    held = sum(_local_bytes(p.dst) for p in plans if p.communicates)
    held += sum(_local_bytes(p.src) for p in returns if p.communicates)
    work, dtype = _work(call, plans) * choice.imbalance, call.query.dtype
    if ring is None:
        seconds += device.compute_seconds(work, 0, dtype)
        return AttentionStrategy(_kind(call, choice), choice, plans, None, nbytes, cost, held, seconds)
    ranks = mesh.shape[ring]
    shard = _local_bytes(plans[query_index + 1].dst) + _local_bytes(plans[query_index + 2].dst)
    times = 2 if call.backward else 1  # shards are sent around, and their gradients back
    skips_later = call.causal and call.key.partition_of(ROWS).guard_same_shards(call.query.partitions[ROWS])
    sent = times * shard * mesh.size() * (ranks - 1) // (2 if skips_later else 1)
    transfer = _collective_seconds(mesh, ring, sent / max(ranks - 1, 1))
    step = device.compute_seconds(work / ranks, 0, dtype)
    # Two results are read and one is written.
    merged_bytes = 3 * _local_bytes(plans[query_index].dst.with_dtype(torch.float32))
    merge = merged_bytes / (device.memory * device.share) + _KERNELS_OF_A_STEP * device.kernel
    seconds += step + (ranks - 1) * (max(transfer, step) + merge)
    return AttentionStrategy(_RING, choice, plans, ring, nbytes + sent, cost + sent, held + 2 * times * shard, seconds)


def _work(call: AttentionCall, plans: Sequence[RedistributionPlan]) -> float:
    """Returns the operations of a rank. A causal mask halves them; what another mask leaves out is not known."""
    query, key, value = (p.dst for p in plans[call.query_index : call.query_index + 3])
    batch, heads, rows, features = map(compat.size_hint, query.shape)
    columns, value_features = compat.size_hint(key.shape[ROWS]), compat.size_hint(value.shape[3])
    over = [
        m
        for m, (q, k) in enumerate(zip(query.placements, key.placements, strict=True))
        if isinstance(q, Shard) or isinstance(k, Shard)
    ]
    total = 2.0 * batch * heads * rows * columns * (features + value_features)
    total *= (_BACKWARD_FLOPS if call.backward else 1) * (0.5 if call.causal else 1)
    return total / math.prod(query.mesh.shape[m] for m in over)


def nbytes_of(layout: Layout) -> int:
    """Returns the bytes of the full tensor, from size hints."""
    return math.prod(map(compat.size_hint, layout.shape)) * layout.dtype.itemsize


def _local_bytes(layout: Layout) -> int:
    parts = [layout.mesh.shape[m] for m, p in enumerate(layout.placements) if isinstance(p, Shard)]
    return nbytes_of(layout) // math.prod(parts)


def _link(mesh: DeviceMesh, mesh_dim: int) -> machines.Link:
    ranks = dist.get_process_group_ranks(mesh.get_group(mesh_dim))
    spread = machines.spans_nodes(ranks, dist.get_world_size())
    return machines.link_of(machines.device_of(mesh.device_type), len(ranks), spread=spread)


def _redistribution_seconds(mesh: DeviceMesh, plans: Sequence[RedistributionPlan]) -> float:
    """Returns the seconds of redistributions. All bytes along a mesh dim count as one collective."""
    by_mesh_dim: dict[int, float] = {}
    for step in (s for p in plans for s in p.steps if s.nbytes):
        by_mesh_dim[step.mesh_dim] = by_mesh_dim.get(step.mesh_dim, 0.0) + step.nbytes
    return sum(_collective_seconds(mesh, m, nbytes) for m, nbytes in by_mesh_dim.items())


def _collective_seconds(mesh: DeviceMesh, mesh_dim: int, nbytes: float) -> float:
    """Returns the seconds of a collective in which all ranks together send `nbytes`."""
    link = _link(mesh, mesh_dim)
    return link.seconds(nbytes if link.medium == "shared" else nbytes / mesh.size(), mesh.shape[mesh_dim])
