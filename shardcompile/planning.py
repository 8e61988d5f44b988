"""Redistribution planning: finds the cheapest sequence of collectives from one layout to another.

A plan is a list of steps, each on one mesh dim. The search is Dijkstra's algorithm over layouts. The cost of a step is
the number of bytes that it moves between ranks, which depends on the actual shard sizes; ties are broken by the number
of collectives. The search reads global shapes and partitions only, so every rank finds the same plan. It is pure: it
uses no tensors and no process groups.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from shardcompile.compat import coordinate, size_hint, statically_known_true
from shardcompile.errors import RedistributeError
from shardcompile.sharding import IntLike, Layout, Partition, Unflattened, cached_for_layouts, has_segments

_T = TypeVar("_T")
StepKind = Literal[
    "all_gather_v", "reduce_scatter_v", "all_reduce", "all_to_all_v", "fetch_ranges", "regroup_rows", "take_shard"
]


@dataclass(frozen=True, eq=False)
class Step:
    """One step of a redistribution: a collective or a local slice along one mesh dim.

    Attributes:
        kind: the collective, or ``take_shard`` for a local slice.
        mesh_dim: the mesh dim along which the step runs.
        src: the layout before the step.
        dst: the layout after the step.
        nbytes: the bytes moved between ranks, summed over all ranks; an estimate while tracing.
    """

    kind: StepKind
    mesh_dim: int
    src: Layout
    dst: Layout
    nbytes: int

    def __str__(self) -> str:
        move = f"{self.src.describe_placements()} -> {self.dst.describe_placements()}"
        return f"{move}: {self.kind}, {self.nbytes} B"


@dataclass(frozen=True, eq=False)
class RedistributionPlan:
    """The steps of a redistribution from one layout to another.

    Attributes:
        src: the source layout.
        dst: the target layout.
        steps: the steps in order; empty if both layouts place the data identically.
        unflattened: the view with segmented dims split in which the steps run; None if they run on the tensor itself.
        parts: the consecutive plans of which this plan is composed; empty if it is a single one.
    """

    src: Layout
    dst: Layout
    steps: tuple[Step, ...]
    unflattened: Unflattened | None = None
    parts: tuple[RedistributionPlan, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes moved between ranks, summed over all ranks and steps."""
        return sum(s.nbytes for s in self.steps)

    @property
    def nominal_nbytes(self) -> int:
        """Bytes moved between ranks if all shards had the same size."""
        return sum(moved_bytes(s.kind, s.mesh_dim, s.src, s.dst, exact=False) for s in self.steps)

    @functools.cached_property
    def only_reduces(self) -> bool:
        """Whether all-reduces are all that it needs."""
        return bool(self.steps) and all(step.kind == "all_reduce" for step in self.steps)

    @property
    def communicates(self) -> bool:
        """Whether any step is a collective rather than a local slice."""
        return any(s.kind != "take_shard" for s in self.steps)

    def __str__(self) -> str:
        if not self.steps:
            return f"{self.src.describe_placements()}: nothing to do"
        return "\n".join([*map(str, self.steps), *self._reasons()])

    def _reasons(self) -> Iterator[str]:
        """Yields the reasons why the plan moves more bytes than necessary."""
        reductions = [s for s in self.steps if s.kind == "all_reduce"]
        if len(reductions) > 1:
            first, worlds = reductions[0], [s.src.mesh.shape[s.mesh_dim] for s in reductions]
            # The bytes of the first step are those of all its groups: one per coordinate along the other mesh dims.
            per_group = first.nbytes // (math.prod(worlds[1:]) * (worlds[0] - 1))
            total, bound = sum(s.nbytes for s in reductions), per_group * (math.prod(worlds) - 1)
            yield (
                f"(of {total} B in all_reduce, {bound} B would do if a process group spanned mesh dims "
                f"{sorted(s.mesh_dim for s in reductions)})"
            )


def find_plan(src: Layout, dst: Layout, *, guard_chunk: bool = True) -> RedistributionPlan:
    """Returns the plan from `src` to `dst` that moves the fewest bytes, cached for layouts without symbols.

    Args:
        src: the source layout.
        dst: the target layout.
        guard_chunk: as in `Partition.guard_same_shards`; False for a plan that only estimates a cost.

    Raises:
        RedistributeError: the global shapes, dtypes or meshes differ, or no meaningful sequence of steps exists.
    """
    if src is dst:
        return RedistributionPlan(src, dst, ())
    if has_segments(src) or has_segments(dst):
        return _plan_segments(src, dst)
    if src.has_symbols or dst.has_symbols:
        return _search(src, dst, guard_chunk)
    return _search_cached(src, dst)


def _plan_segments(src: Layout, dst: Layout) -> RedistributionPlan:
    """Plans a redistribution of segmented dims, in the view that splits off the leading dims flattened into them."""
    _check_meaningful(src, dst)
    partitions = [
        (None if a is None else a.num_segments, None if b is None else b.num_segments)
        for a, b in zip(src.partitions, dst.partitions, strict=True)
    ]
    sharded_in_both = [(a, b) for a, b in partitions if a is not None and b is not None]
    if all(statically_known_true(a == b) for a, b in sharded_in_both):
        unflattened = Unflattened(tuple(a if a is not None else 1 if b is None else b for a, b in partitions))
        return RedistributionPlan(
            src, dst, find_plan(unflattened.layout(src), unflattened.layout(dst)).steps, unflattened
        )
    exchanged = _exchange_segments(src, dst)
    if exchanged is not None:
        parts = (exchanged, find_plan(exchanged.dst, dst))
        return RedistributionPlan(src, dst, (*parts[0].steps, *parts[1].steps), parts=parts)
    # A dim whose number of segments changes, and that no exchange serves, is gathered first.
    intermediate = src
    for dim, (a, b) in enumerate(partitions):
        if a is not None and b is not None and not statically_known_true(a == b):
            intermediate = intermediate.gathered(dim)
    parts = (find_plan(src, intermediate), find_plan(intermediate, dst))
    return RedistributionPlan(src, dst, (*parts[0].steps, *parts[1].steps), parts=parts)


def _exchange_segments(src: Layout, dst: Layout) -> RedistributionPlan | None:
    """Returns the exchange that brings a dim to the target's partition, which has a different number of segments.

    Returns None if there are several such dims, or if the dim is not sharded over the same single mesh dim in both.
    """
    pairs = enumerate(zip(src.partitions, dst.partitions, strict=True))
    dims = [d for d, (a, b) in pairs if a and b and not statically_known_true(a.num_segments == b.num_segments)]
    if len(dims) != 1:
        return None
    (dim,) = dims
    before, after = src.partition_of(dim), dst.partition_of(dim)
    if len(before.mesh_dims) != 1 or before.mesh_dims != after.mesh_dims:
        return None
    partitions = [after if d == dim else p for d, p in enumerate(src.partitions)]
    intermediate = Layout.of(src.mesh, src.placements, src.shape, src.dtype, partitions)
    (mesh_dim,) = before.mesh_dims
    nbytes = moved_bytes("regroup_rows", mesh_dim, src, intermediate)
    return RedistributionPlan(src, intermediate, (Step("regroup_rows", mesh_dim, src, intermediate, nbytes),))


def _search(src: Layout, dst: Layout, guard_chunk: bool = True) -> RedistributionPlan:
    _check_meaningful(src, dst)
    planner = _Planner(src, dst, guard_chunk)
    order = itertools.count()  # breaks ties by order of discovery, which is rank-invariant
    start = planner.start()
    frontier: list[tuple[int, int, int, _State, tuple[Step, ...]]] = [(0, 0, next(order), start, ())]
    done: set[_State] = set()
    while frontier:
        nbytes, rounds, _, state, steps = heapq.heappop(frontier)
        if state in done:
            continue
        done.add(state)
        if planner.is_goal(state):
            return RedistributionPlan(src, dst, steps)
        for step, after in planner.moves(state):
            cost = (nbytes + step.nbytes, rounds + (step.kind != "take_shard"), next(order))
            heapq.heappush(frontier, (*cost, after, (*steps, step)))
    raise RedistributeError(f"no sequence of steps leads from {src.describe()} to {dst.describe()}")


_search_cached = cached_for_layouts(_search)


def _check_meaningful(src: Layout, dst: Layout) -> None:
    if src.dtype is not dst.dtype or len(src.shape) != len(dst.shape):
        raise RedistributeError(f"{src.describe()} and {dst.describe()} are not layouts of the same tensor")
    for a, b in zip(src.shape, dst.shape, strict=True):
        if isinstance(a, int) and isinstance(b, int) and a != b:
            raise RedistributeError(f"{src.describe()} and {dst.describe()} have different global shapes")
    if src.mesh is not dst.mesh and src.mesh != dst.mesh:
        raise RedistributeError(
            f"redistribution from mesh {src.mesh} to another mesh {dst.mesh} is not supported; use one mesh, or go "
            "through full_tensor() and distribute_tensor()"
        )
    for mesh_dim, (p, q) in enumerate(zip(src.placements, dst.placements, strict=True)):
        if isinstance(q, Partial) and p != q:
            raise RedistributeError(
                f"mesh dim {mesh_dim}: from {p} to {q} has no meaning as a redistribution, a value has no unique "
                f"split into terms; redistribute to Replicate or Shard instead ({src.describe()})"
            )


# A state of the search: for each tensor dim the layout that its partition is taken from (0 source, 1 target) and the
# number of outermost mesh dims that still shard it, and for each mesh dim its placement.
_State = tuple[tuple[tuple[int, int], ...], tuple[Placement, ...]]


class _Planner:
    """The search space between two layouts: states, and the steps that lead from one to another."""

    def __init__(self, src: Layout, dst: Layout, guard_chunk: bool = True) -> None:
        self.src, self.dst, self._ask_chunked = src, dst, guard_chunk
        self._prefixes: dict[tuple[int, int, int], Partition | None] = {}
        self._layouts: dict[_State, Layout] = {}
        self._same_as_target: dict[tuple[int, int], bool] = {}

    def start(self) -> _State:
        return tuple((0, len(c.mesh_dims) if c else 0) for c in self.src.partitions), self.src.placements

    def is_goal(self, state: _State) -> bool:
        partitions, placements = state
        if placements != self.dst.placements:
            return False
        return all(self._is_dim_done(dim, *source) for dim, source in enumerate(partitions))

    def _is_dim_done(self, dim: int, origin: int, depth: int) -> bool:
        target = self.dst.partitions[dim]
        if depth != (len(target.mesh_dims) if target else 0):
            return False
        return depth == 0 or self._matches_target(dim, origin, depth)

    def _matches_target(self, dim: int, origin: int, depth: int) -> bool:
        """Whether the outermost `depth` mesh dims shard a dim as they do in the target."""
        if origin == 1:
            return True
        if (dim, depth) not in self._same_as_target:
            now, target = self.partition(dim, 0, depth), self.partition(dim, 1, depth)
            one_is_traced = now is not None and target is not None and now.is_traced != target.is_traced
            # A cost estimate needs no local shard size, and reading the coordinate would make the graph depend on the
            # rank.
            place = coordinate(self.src.mesh) if one_is_traced and self._ask_chunked else None
            self._same_as_target[dim, depth] = now is not None and now.guard_same_shards(
                target, place, guard_chunk=self._ask_chunked
            )
        return self._same_as_target[dim, depth]

    def partition(self, dim: int, origin: int, depth: int) -> Partition | None:
        key = (dim, origin, depth)
        if key not in self._prefixes:
            full = (self.src, self.dst)[origin].partitions[dim]
            self._prefixes[key] = full.prefix(depth) if full and depth else None
        return self._prefixes[key]

    def layout(self, state: _State) -> Layout:
        if state not in self._layouts:
            partitions = [self.partition(dim, *source) for dim, source in enumerate(state[0])]
            self._layouts[state] = Layout.of(self.src.mesh, state[1], self.src.shape, self.src.dtype, partitions)
        return self._layouts[state]

    def moves(self, state: _State) -> Iterator[tuple[Step, _State]]:
        partitions, placements = state
        for mesh_dim, placement in enumerate(placements):
            if isinstance(placement, Shard):
                yield from self._moves_from_shard(state, mesh_dim, placement.dim)
                continue
            kind: StepKind = "take_shard" if isinstance(placement, Replicate) else "reduce_scatter_v"
            for dim in range(len(partitions)):
                grown = self._grow(partitions, dim, mesh_dim)
                if grown is not None:
                    yield self._step(kind, mesh_dim, state, grown, Shard(dim))
            if isinstance(placement, Partial):
                yield self._step("all_reduce", mesh_dim, state, partitions, Replicate())

    def _moves_from_shard(self, state: _State, mesh_dim: int, dim: int) -> Iterator[tuple[Step, _State]]:
        partitions, _ = state
        origin, depth = partitions[dim]
        partition = self.partition(dim, origin, depth)
        assert partition is not None, "a sharded dim has a partition"
        if partition.mesh_dims[-1] != mesh_dim:
            return  # only the innermost mesh dim can move: the shards of an outer one are not contiguous
        shrunk = _replace(partitions, dim, (origin if depth > 1 else 0, depth - 1))
        yield self._step("all_gather_v", mesh_dim, state, shrunk, Replicate())
        for other in range(len(partitions)):
            grown = None if other == dim else self._grow(shrunk, other, mesh_dim)
            if grown is not None:
                yield self._step("all_to_all_v", mesh_dim, state, grown, Shard(other))
        repartition = self._grow(shrunk, dim, mesh_dim)
        if repartition is not None and not self._matches_target(dim, origin, depth):
            yield self._step("fetch_ranges", mesh_dim, state, repartition, Shard(dim))

    def _grow(
        self, partitions: tuple[tuple[int, int], ...], dim: int, mesh_dim: int
    ) -> tuple[tuple[int, int], ...] | None:
        """Returns `partitions` with `dim` sharded by one more mesh dim, `mesh_dim`, as in the target.

        Returns None if `mesh_dim` is not the next mesh dim of the target's partition of `dim`.
        """
        origin, depth = partitions[dim]
        after = self.partition(dim, 1, depth + 1)
        if after is None or len(after.mesh_dims) != depth + 1 or after.mesh_dims[-1] != mesh_dim:
            return None
        if depth and not self._matches_target(dim, origin, depth):
            return None
        return _replace(partitions, dim, (1, depth + 1))

    def _step(
        self,
        kind: StepKind,
        mesh_dim: int,
        state: _State,
        partitions: tuple[tuple[int, int], ...],
        placement: Placement,
    ) -> tuple[Step, _State]:
        after: _State = (partitions, _replace(state[1], mesh_dim, placement))
        src, dst = self.layout(state), self.layout(after)
        return Step(kind, mesh_dim, src, dst, moved_bytes(kind, mesh_dim, src, dst)), after


def _replace(values: tuple[_T, ...], index: int, value: _T) -> tuple[_T, ...]:
    return (*values[:index], value, *values[index + 1 :])


def moved_bytes(kind: StepKind, mesh_dim: int, src: Layout, dst: Layout, exact: bool = True) -> int:
    """Returns the bytes moved between ranks in one step, summed over all ranks of the mesh.

    Without `exact`, an exchange is computed as if all shards had the same size, as it is while tracing.

    Each figure is the lower bound of any algorithm: an all-gather brings every rank the rows it lacks; an all-reduce of
    n bytes over w ranks moves 2 n (w - 1) (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009), a
    reduce-scatter half of it; an exchange moves the rows that change ranks.
    """
    if kind == "take_shard":
        return 0
    world = src.mesh.shape[mesh_dim]
    global_nbytes = math.prod(size_hint(s) for s in src.shape) * src.dtype.itemsize
    copies = math.prod(
        src.mesh.shape[m] for m, p in enumerate(src.placements) if m != mesh_dim and not isinstance(p, Shard)
    )
    if kind in ("all_gather_v", "reduce_scatter_v"):
        return copies * global_nbytes * (world - 1)
    if kind == "all_reduce":
        return 2 * copies * global_nbytes * (world - 1)
    if kind == "regroup_rows":
        return copies * global_nbytes * (world - 1) // world
    kept, total = _kept_fraction(kind, mesh_dim, src, dst) if exact else (1, world)
    return copies * global_nbytes * (total - kept) // total


def _kept_fraction(kind: StepKind, mesh_dim: int, src: Layout, dst: Layout) -> tuple[int, int]:
    """Returns the fraction of the tensor that an exchange leaves on its rank, as two ints so that bytes are exact."""
    world = src.mesh.shape[mesh_dim]
    a, b = _partition_over(src, mesh_dim), _partition_over(dst, mesh_dim)
    if a.known_sizes is None or b.known_sizes is None or not sum(a.known_sizes) or not sum(b.known_sizes):
        return 1, world
    if kind == "all_to_all_v":
        # The outer mesh dims of the two partitions differ, so every shard of one intersects every shard of the other.
        kept = sum(sum(a.known_sizes[r::world]) * sum(b.known_sizes[r::world]) for r in range(world))
        return kept, sum(a.known_sizes) * sum(b.known_sizes)
    kept = 0
    ends_a, ends_b = list(itertools.accumulate(a.known_sizes)), list(itertools.accumulate(b.known_sizes))
    for size_a, end_a, size_b, end_b in zip(a.known_sizes, ends_a, b.known_sizes, ends_b, strict=True):
        kept += max(0, min(end_a, end_b) - max(end_a - size_a, end_b - size_b))
    return kept, sum(a.known_sizes)


def _partition_over(layout: Layout, mesh_dim: int) -> Partition:
    for partition in layout.partitions:
        if partition is not None and partition.mesh_dims[-1] == mesh_dim:
            return partition
    raise AssertionError(f"mesh dim {mesh_dim} is not the innermost of any partition of {layout.describe()}")


def target_layout(
    src: Layout,
    placements: tuple[Placement, ...],
    partitions: dict[int, Partition] | None = None,
) -> Layout:
    """Returns the layout that a redistribution of `src` to `placements` results in.

    Without a stated partition, a tensor dim that stays sharded over the same mesh dims keeps its partition, and any
    other sharded dim gets the chunk partition.

    Args:
        src: the source layout.
        placements: normalized placements, one per mesh dim.
        partitions: the stated partitions by tensor dim.
    """
    new_partitions: list[Partition | None] = []
    for dim, size in enumerate(src.shape):
        mesh_dims = tuple(m for m, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim)
        new_partitions.append(_target_partition(src, dim, size, mesh_dims, (partitions or {}).get(dim)))
    return Layout.of(src.mesh, placements, src.shape, src.dtype, new_partitions)


def _target_partition(
    src: Layout, dim: int, size: IntLike, mesh_dims: tuple[int, ...], stated: Partition | None
) -> Partition | None:
    if not mesh_dims:
        return None
    if stated is not None:
        return stated
    now = src.partitions[dim]
    if now is not None and set(now.mesh_dims) == set(mesh_dims):
        return now
    return Partition.chunk(mesh_dims, [src.mesh.shape[m] for m in mesh_dims], size)
