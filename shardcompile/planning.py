"""Plans: the cheapest way from one layout to another, as data.

A plan is a list of steps, each on one mesh dim. The search is Dijkstra's algorithm over layouts; the cost of a step is
the bytes that it moves between ranks, which depends on the real shard sizes. Rounds of messages decide between equal
costs. It reads global shapes and partitions only, so that every rank finds the same plan. Pure: no tensors, no process
groups.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeVar

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from shardcompile.compat import coordinate, forget_with_world, size_hint, statically_known_true
from shardcompile.errors import RedistributeError
from shardcompile.sharding import Apart, IntLike, Layout, Partition, has_runs

_T = TypeVar("_T")
StepKind = Literal[
    "all_gather_v", "reduce_scatter_v", "all_reduce", "all_to_all_v", "fetch_ranges", "regroup_rows", "take_shard"
]


@dataclass(frozen=True, eq=False)
class Step:
    """One move on one mesh dim.

    Attributes:
        kind: the collective, or ``take_shard`` for a local slice.
        mesh_dim: the mesh dim it works on.
        src: layout before.
        dst: layout after.
        nbytes: bytes that ranks send to one another, all ranks together; an estimate while tracing.
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
class Plan:
    """Steps from one layout to another.

    Attributes:
        src: layout before.
        dst: layout after.
        steps: in order; none if both lay the data out alike.
        apart: how the shard is seen while the steps are taken, if dims are taken apart for them.
        parts: the plans of which it is made, one after the other, if it is.
    """

    src: Layout
    dst: Layout
    steps: tuple[Step, ...]
    apart: Apart | None = None
    parts: tuple[Plan, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that ranks send to one another, all ranks and steps together."""
        return sum(s.nbytes for s in self.steps)

    @property
    def nominal_nbytes(self) -> int:
        """The same, as if all shards were of one size."""
        return sum(moved_bytes(s.kind, s.mesh_dim, s.src, s.dst, exact=False) for s in self.steps)

    @property
    def communicates(self) -> bool:
        """Whether any step is more than a local slice."""
        return any(s.kind != "take_shard" for s in self.steps)

    def __str__(self) -> str:
        if not self.steps:
            return f"{self.src.describe_placements()}: nothing to do"
        return "\n".join([*map(str, self.steps), *self._reasons()])

    def _reasons(self) -> Iterator[str]:
        """Why the plan moves more than the fewest bytes."""
        reductions = [s for s in self.steps if s.kind == "all_reduce"]
        if len(reductions) > 1:
            first, worlds = reductions[0], [s.src.mesh.shape[s.mesh_dim] for s in reductions]
            # The first step's bytes are those of all its groups: there is one for each rank of the other mesh dims.
            per_group = first.nbytes // (math.prod(worlds[1:]) * (worlds[0] - 1))
            total, bound = sum(s.nbytes for s in reductions), per_group * (math.prod(worlds) - 1)
            yield (
                f"(of {total} B in all_reduce, {bound} B would do if a process group spanned mesh dims "
                f"{sorted(s.mesh_dim for s in reductions)})"
            )


def find_plan(src: Layout, dst: Layout, *, ask_chunked: bool = True) -> Plan:
    """The plan of fewest bytes from `src` to `dst`, cached for layouts without symbols.

    Args:
        src: layout before.
        dst: layout after.
        ask_chunked: as in `Partition.same_shards`; without it the plan is a price, for which a trace installs no guard.

    Raises:
        RedistributeError: the global shapes, dtypes or meshes differ, or no sequence of steps means anything.
    """
    if src is dst:
        return Plan(src, dst, ())
    if has_runs(src) or has_runs(dst):
        return _plan_of_runs(src, dst)
    if src.is_traced or dst.is_traced:
        return _search(src, dst, ask_chunked)
    return _search_cached(src, dst)


def _plan_of_runs(src: Layout, dst: Layout) -> Plan:
    """The steps where leading dims were flattened into sharded ones: with those apart."""
    _check_meaningful(src, dst)
    partitions = [
        (None if a is None else a.runs, None if b is None else b.runs)
        for a, b in zip(src.partitions, dst.partitions, strict=True)
    ]
    both = [(a, b) for a, b in partitions if a is not None and b is not None]
    if all(statically_known_true(a == b) for a, b in both):
        apart = Apart(tuple(a if a is not None else 1 if b is None else b for a, b in partitions))
        return Plan(src, dst, find_plan(apart.layout(src), apart.layout(dst)).steps, apart)
    exchanged = _exchange_of_stretches(src, dst)
    if exchanged is not None:
        parts = (exchanged, find_plan(exchanged.dst, dst))
        return Plan(src, dst, (*parts[0].steps, *parts[1].steps), parts=parts)
    # What is sharded in two ways of which one crosses the other goes through the whole dim.
    whole = src
    for dim, (a, b) in enumerate(partitions):
        if a is not None and b is not None and not statically_known_true(a == b):
            whole = whole.gathered(dim)
    parts = (find_plan(src, whole), find_plan(whole, dst))
    return Plan(src, dst, (*parts[0].steps, *parts[1].steps), parts=parts)


def _exchange_of_stretches(src: Layout, dst: Layout) -> Plan | None:
    """The exchange that brings a dim to the partition of the target, which has another number of stretches; None for
    several such dims, and where other mesh dims have a part in it."""
    pairs = enumerate(zip(src.partitions, dst.partitions, strict=True))
    dims = [d for d, (a, b) in pairs if a and b and not statically_known_true(a.runs == b.runs)]
    if len(dims) != 1:
        return None
    (dim,) = dims
    before, after = src.partition_of(dim), dst.partition_of(dim)
    if len(before.mesh_dims) != 1 or before.mesh_dims != after.mesh_dims:
        return None
    partitions = [after if d == dim else c for d, c in enumerate(src.partitions)]
    between = Layout.of(src.mesh, src.placements, src.shape, src.dtype, partitions)
    (mesh_dim,) = before.mesh_dims
    step = Step("regroup_rows", mesh_dim, src, between, moved_bytes("regroup_rows", mesh_dim, src, between))
    return Plan(src, between, (step,))


@lru_cache(maxsize=1 << 14)
def _search_cached(src: Layout, dst: Layout) -> Plan:
    return _search(src, dst)


forget_with_world(_search_cached.cache_clear)


def _search(src: Layout, dst: Layout, ask_chunked: bool = True) -> Plan:
    _check_meaningful(src, dst)
    planner = _Planner(src, dst, ask_chunked)
    order = itertools.count()  # ties: first found first, the same on every rank
    start = planner.start()
    frontier: list[tuple[int, int, int, _State, tuple[Step, ...]]] = [(0, 0, next(order), start, ())]
    done: set[_State] = set()
    while frontier:
        nbytes, rounds, _, state, steps = heapq.heappop(frontier)
        if state in done:
            continue
        done.add(state)
        if planner.is_goal(state):
            return Plan(src, dst, steps)
        for step, after in planner.moves(state):
            cost = (nbytes + step.nbytes, rounds + (step.kind != "take_shard"), next(order))
            heapq.heappush(frontier, (*cost, after, (*steps, step)))
    raise RedistributeError(f"no way from {src.describe()} to {dst.describe()}")


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


# For each tensor dim where its partition comes from (0 source, 1 target) and how many mesh dims of it are left,
# and for each mesh dim its placement.
_State = tuple[tuple[tuple[int, int], ...], tuple[Placement, ...]]


class _Planner:
    """States and moves between two layouts."""

    def __init__(self, src: Layout, dst: Layout, ask_chunked: bool = True) -> None:
        self.src, self.dst, self._ask_chunked = src, dst, ask_chunked
        self._prefixes: dict[tuple[int, int, int], Partition | None] = {}
        self._layouts: dict[_State, Layout] = {}
        self._alike: dict[tuple[int, int], bool] = {}

    def start(self) -> _State:
        return tuple((0, len(c.mesh_dims) if c else 0) for c in self.src.partitions), self.src.placements

    def is_goal(self, state: _State) -> bool:
        partitions, placements = state
        if placements != self.dst.placements:
            return False
        return all(self._arrived(dim, *name) for dim, name in enumerate(partitions))

    def _arrived(self, dim: int, origin: int, depth: int) -> bool:
        target = self.dst.partitions[dim]
        if depth != (len(target.mesh_dims) if target else 0):
            return False
        return depth == 0 or self._is_targets(dim, origin, depth)

    def _is_targets(self, dim: int, origin: int, depth: int) -> bool:
        """Whether the outermost mesh dims divide a dim as they do in the target."""
        if origin == 1:
            return True
        if (dim, depth) not in self._alike:
            now, target = self.partition(dim, 0, depth), self.partition(dim, 1, depth)
            known_to_one = now is not None and target is not None and now.is_traced != target.is_traced
            # A price needs no shard's size, and a graph that read the rank's place would serve this rank alone.
            here = coordinate(self.src.mesh) if known_to_one and self._ask_chunked else None
            self._alike[dim, depth] = now is not None and now.same_shards(target, here, ask_chunked=self._ask_chunked)
        return self._alike[dim, depth]

    def partition(self, dim: int, origin: int, depth: int) -> Partition | None:
        key = (dim, origin, depth)
        if key not in self._prefixes:
            whole = (self.src, self.dst)[origin].partitions[dim]
            self._prefixes[key] = whole.prefix(depth) if whole and depth else None
        return self._prefixes[key]

    def layout(self, state: _State) -> Layout:
        if state not in self._layouts:
            partitions = [self.partition(dim, *name) for dim, name in enumerate(state[0])]
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
            return  # only the innermost mesh dim can move: the others' shards are not contiguous
        shrunk = _replace(partitions, dim, (origin if depth > 1 else 0, depth - 1))
        yield self._step("all_gather_v", mesh_dim, state, shrunk, Replicate())
        for other in range(len(partitions)):
            grown = None if other == dim else self._grow(shrunk, other, mesh_dim)
            if grown is not None:
                yield self._step("all_to_all_v", mesh_dim, state, grown, Shard(other))
        repartition = self._grow(shrunk, dim, mesh_dim)
        if repartition is not None and not self._is_targets(dim, origin, depth):
            yield self._step("fetch_ranges", mesh_dim, state, repartition, Shard(dim))

    def _grow(
        self, partitions: tuple[tuple[int, int], ...], dim: int, mesh_dim: int
    ) -> tuple[tuple[int, int], ...] | None:
        """`partitions` with `mesh_dim` as the next one to divide `dim`, in the target's sharded, or None if it is
        not.
        """
        origin, depth = partitions[dim]
        after = self.partition(dim, 1, depth + 1)
        if after is None or len(after.mesh_dims) != depth + 1 or after.mesh_dims[-1] != mesh_dim:
            return None
        if depth and not self._is_targets(dim, origin, depth):
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
    """Bytes that ranks send to one another in one step, all ranks of the mesh together.

    Without `exact`, an exchange counts as if all shards were of one size, as it does while tracing.

    Each is the least that any algorithm can move: a gather brings every rank what it lacks; a reduction of n bytes
    over w ranks moves 2 n (w - 1) (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009), half of
    it if the result stays scattered; an exchange moves the rows that change hands.
    """
    if kind == "take_shard":
        return 0
    world = src.mesh.shape[mesh_dim]
    whole = math.prod(size_hint(s) for s in src.shape) * src.dtype.itemsize
    copies = math.prod(
        src.mesh.shape[m] for m, p in enumerate(src.placements) if m != mesh_dim and not isinstance(p, Shard)
    )
    if kind in ("all_gather_v", "reduce_scatter_v"):
        return copies * whole * (world - 1)
    if kind == "all_reduce":
        return 2 * copies * whole * (world - 1)
    if kind == "regroup_rows":
        return copies * whole * (world - 1) // world
    kept, of = _kept_share(kind, mesh_dim, src, dst) if exact else (1, world)
    return copies * whole * (of - kept) // of


def _kept_share(kind: StepKind, mesh_dim: int, src: Layout, dst: Layout) -> tuple[int, int]:
    """The share of the tensor that is on its rank already before an exchange, as a fraction: bytes are exact."""
    world = src.mesh.shape[mesh_dim]
    a, b = _sharded_by(src, mesh_dim), _sharded_by(dst, mesh_dim)
    if a.shards is None or b.shards is None or not sum(a.shards) or not sum(b.shards):
        return 1, world
    if kind == "all_to_all_v":
        # The mesh dims outside of the two partitions are not the same ones: every shard of one meets all of the other.
        kept = sum(sum(a.shards[r::world]) * sum(b.shards[r::world]) for r in range(world))
        return kept, sum(a.shards) * sum(b.shards)
    kept = 0
    ends_a, ends_b = list(itertools.accumulate(a.shards)), list(itertools.accumulate(b.shards))
    for size_a, end_a, size_b, end_b in zip(a.shards, ends_a, b.shards, ends_b, strict=True):
        kept += max(0, min(end_a, end_b) - max(end_a - size_a, end_b - size_b))
    return kept, sum(a.shards)


def _sharded_by(layout: Layout, mesh_dim: int) -> Partition:
    for partition in layout.partitions:
        if partition is not None and partition.mesh_dims[-1] == mesh_dim:
            return partition
    raise AssertionError(f"mesh dim {mesh_dim} is not the innermost of any partition of {layout.describe()}")


def target_layout(
    src: Layout,
    placements: tuple[Placement, ...],
    partitions: dict[int, Partition] | None = None,
) -> Layout:
    """The layout that `src` gets by redistribution to `placements`.

    Without a stated partition, a tensor dim that was sharded by the same mesh dims keeps its partition, and any other
    gets the chunk partition.

    Args:
        src: layout now.
        placements: normalised, one for each mesh dim.
        partitions: for tensor dims whose partition is stated.
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
