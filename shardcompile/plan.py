"""Plans: the cheapest way from one layout to another, as data.

A plan is a list of steps, each on one mesh dim. The search is Dijkstra's algorithm over layouts; the cost of a step is
the bytes that it moves between ranks, which depends on the real block sizes. Rounds of messages decide between equal
costs. It reads global shapes and cuts only, so that every rank finds the same plan. Pure: no tensors, no process
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
from shardcompile.layout import Apart, Cut, IntLike, Layout, has_runs

_T = TypeVar("_T")
StepKind = Literal[
    "all_gather_v", "reduce_scatter_v", "all_reduce", "all_to_all_v", "fetch_ranges", "regroup_rows", "take_block"
]


@dataclass(frozen=True, eq=False)
class Step:
    """One move on one mesh dim.

    Attributes:
        kind: the collective, or ``take_block`` for a local slice.
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
        apart: how the block is seen while the steps are taken, if dims are taken apart for them.
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
        return any(s.kind != "take_block" for s in self.steps)

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
        ask_chunked: as in `Cut.same_blocks`; without it the plan is a price, for which a trace installs no guard.

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
    """The steps where leading dims were flattened into cut ones: with those apart."""
    _check_meaningful(src, dst)
    cuts = [
        (None if a is None else a.runs, None if b is None else b.runs) for a, b in zip(src.cuts, dst.cuts, strict=True)
    ]
    both = [(a, b) for a, b in cuts if a is not None and b is not None]
    if all(statically_known_true(a == b) for a, b in both):
        apart = Apart(tuple(a if a is not None else 1 if b is None else b for a, b in cuts))
        return Plan(src, dst, find_plan(apart.layout(src), apart.layout(dst)).steps, apart)
    exchanged = _exchange_of_stretches(src, dst)
    if exchanged is not None:
        parts = (exchanged, find_plan(exchanged.dst, dst))
        return Plan(src, dst, (*parts[0].steps, *parts[1].steps), parts=parts)
    # What is cut in two ways of which one crosses the other goes through the whole dim.
    whole = src
    for dim, (a, b) in enumerate(cuts):
        if a is not None and b is not None and not statically_known_true(a == b):
            whole = whole.gathered(dim)
    parts = (find_plan(src, whole), find_plan(whole, dst))
    return Plan(src, dst, (*parts[0].steps, *parts[1].steps), parts=parts)


def _exchange_of_stretches(src: Layout, dst: Layout) -> Plan | None:
    """The exchange that brings a dim to the cut of the target, which has another number of stretches; None for several
    such dims, and where other mesh dims have a part in it."""
    pairs = enumerate(zip(src.cuts, dst.cuts, strict=True))
    dims = [d for d, (a, b) in pairs if a and b and not statically_known_true(a.runs == b.runs)]
    if len(dims) != 1:
        return None
    (dim,) = dims
    before, after = src.cut_of(dim), dst.cut_of(dim)
    if len(before.mesh_dims) != 1 or before.mesh_dims != after.mesh_dims:
        return None
    cuts = [after if d == dim else c for d, c in enumerate(src.cuts)]
    between = Layout.of(src.mesh, src.placements, src.shape, src.dtype, cuts)
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
            cost = (nbytes + step.nbytes, rounds + (step.kind != "take_block"), next(order))
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


# For each tensor dim where its cut comes from (0 source, 1 target) and how many mesh dims of it are left,
# and for each mesh dim its placement.
_State = tuple[tuple[tuple[int, int], ...], tuple[Placement, ...]]


class _Planner:
    """States and moves between two layouts."""

    def __init__(self, src: Layout, dst: Layout, ask_chunked: bool = True) -> None:
        self.src, self.dst, self._ask_chunked = src, dst, ask_chunked
        self._prefixes: dict[tuple[int, int, int], Cut | None] = {}
        self._layouts: dict[_State, Layout] = {}
        self._alike: dict[tuple[int, int], bool] = {}

    def start(self) -> _State:
        return tuple((0, len(c.mesh_dims) if c else 0) for c in self.src.cuts), self.src.placements

    def is_goal(self, state: _State) -> bool:
        cuts, placements = state
        if placements != self.dst.placements:
            return False
        return all(self._arrived(dim, *name) for dim, name in enumerate(cuts))

    def _arrived(self, dim: int, origin: int, depth: int) -> bool:
        target = self.dst.cuts[dim]
        if depth != (len(target.mesh_dims) if target else 0):
            return False
        return depth == 0 or self._is_targets(dim, origin, depth)

    def _is_targets(self, dim: int, origin: int, depth: int) -> bool:
        """Whether the outermost mesh dims divide a dim as they do in the target."""
        if origin == 1:
            return True
        if (dim, depth) not in self._alike:
            now, target = self.cut(dim, 0, depth), self.cut(dim, 1, depth)
            known_to_one = now is not None and target is not None and now.is_traced != target.is_traced
            # A price needs no block's size, and a graph that read the rank's place would serve this rank alone.
            here = coordinate(self.src.mesh) if known_to_one and self._ask_chunked else None
            self._alike[dim, depth] = now is not None and now.same_blocks(target, here, ask_chunked=self._ask_chunked)
        return self._alike[dim, depth]

    def cut(self, dim: int, origin: int, depth: int) -> Cut | None:
        key = (dim, origin, depth)
        if key not in self._prefixes:
            whole = (self.src, self.dst)[origin].cuts[dim]
            self._prefixes[key] = whole.prefix(depth) if whole and depth else None
        return self._prefixes[key]

    def layout(self, state: _State) -> Layout:
        if state not in self._layouts:
            cuts = [self.cut(dim, *name) for dim, name in enumerate(state[0])]
            self._layouts[state] = Layout.of(self.src.mesh, state[1], self.src.shape, self.src.dtype, cuts)
        return self._layouts[state]

    def moves(self, state: _State) -> Iterator[tuple[Step, _State]]:
        cuts, placements = state
        for mesh_dim, placement in enumerate(placements):
            if isinstance(placement, Shard):
                yield from self._moves_from_shard(state, mesh_dim, placement.dim)
                continue
            kind: StepKind = "take_block" if isinstance(placement, Replicate) else "reduce_scatter_v"
            for dim in range(len(cuts)):
                grown = self._grow(cuts, dim, mesh_dim)
                if grown is not None:
                    yield self._step(kind, mesh_dim, state, grown, Shard(dim))
            if isinstance(placement, Partial):
                yield self._step("all_reduce", mesh_dim, state, cuts, Replicate())

    def _moves_from_shard(self, state: _State, mesh_dim: int, dim: int) -> Iterator[tuple[Step, _State]]:
        cuts, _ = state
        origin, depth = cuts[dim]
        cut = self.cut(dim, origin, depth)
        assert cut is not None, "a sharded dim has a cut"
        if cut.mesh_dims[-1] != mesh_dim:
            return  # only the innermost mesh dim can move: the others' blocks are not contiguous
        shrunk = _replace(cuts, dim, (origin if depth > 1 else 0, depth - 1))
        yield self._step("all_gather_v", mesh_dim, state, shrunk, Replicate())
        for other in range(len(cuts)):
            grown = None if other == dim else self._grow(shrunk, other, mesh_dim)
            if grown is not None:
                yield self._step("all_to_all_v", mesh_dim, state, grown, Shard(other))
        recut = self._grow(shrunk, dim, mesh_dim)
        if recut is not None and not self._is_targets(dim, origin, depth):
            yield self._step("fetch_ranges", mesh_dim, state, recut, Shard(dim))

    def _grow(self, cuts: tuple[tuple[int, int], ...], dim: int, mesh_dim: int) -> tuple[tuple[int, int], ...] | None:
        """`cuts` with `mesh_dim` as the next one to divide `dim`, in the target's cut, or None if it is not."""
        origin, depth = cuts[dim]
        after = self.cut(dim, 1, depth + 1)
        if after is None or len(after.mesh_dims) != depth + 1 or after.mesh_dims[-1] != mesh_dim:
            return None
        if depth and not self._is_targets(dim, origin, depth):
            return None
        return _replace(cuts, dim, (1, depth + 1))

    def _step(
        self,
        kind: StepKind,
        mesh_dim: int,
        state: _State,
        cuts: tuple[tuple[int, int], ...],
        placement: Placement,
    ) -> tuple[Step, _State]:
        after: _State = (cuts, _replace(state[1], mesh_dim, placement))
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
    if kind == "take_block":
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
    a, b = _cut_by(src, mesh_dim), _cut_by(dst, mesh_dim)
    if a.blocks is None or b.blocks is None or not sum(a.blocks) or not sum(b.blocks):
        return 1, world
    if kind == "all_to_all_v":
        # The mesh dims outside of the two cuts are not the same ones: every block of one meets all of the other.
        kept = sum(sum(a.blocks[r::world]) * sum(b.blocks[r::world]) for r in range(world))
        return kept, sum(a.blocks) * sum(b.blocks)
    kept = 0
    ends_a, ends_b = list(itertools.accumulate(a.blocks)), list(itertools.accumulate(b.blocks))
    for size_a, end_a, size_b, end_b in zip(a.blocks, ends_a, b.blocks, ends_b, strict=True):
        kept += max(0, min(end_a, end_b) - max(end_a - size_a, end_b - size_b))
    return kept, sum(a.blocks)


def _cut_by(layout: Layout, mesh_dim: int) -> Cut:
    for cut in layout.cuts:
        if cut is not None and cut.mesh_dims[-1] == mesh_dim:
            return cut
    raise AssertionError(f"mesh dim {mesh_dim} is not the innermost of any cut of {layout.describe()}")


def target_layout(
    src: Layout,
    placements: tuple[Placement, ...],
    cuts: dict[int, Cut] | None = None,
) -> Layout:
    """The layout that `src` gets by redistribution to `placements`.

    Without a stated cut, a tensor dim that was sharded by the same mesh dims keeps its cut, and any other gets the
    chunk cut.

    Args:
        src: layout now.
        placements: normalised, one for each mesh dim.
        cuts: for tensor dims whose cut is stated.
    """
    new_cuts: list[Cut | None] = []
    for dim, extent in enumerate(src.shape):
        mesh_dims = tuple(m for m, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim)
        new_cuts.append(_target_cut(src, dim, extent, mesh_dims, (cuts or {}).get(dim)))
    return Layout.of(src.mesh, placements, src.shape, src.dtype, new_cuts)


def _target_cut(src: Layout, dim: int, extent: IntLike, mesh_dims: tuple[int, ...], stated: Cut | None) -> Cut | None:
    if not mesh_dims:
        return None
    if stated is not None:
        return stated
    now = src.cuts[dim]
    if now is not None and set(now.mesh_dims) == set(mesh_dims):
        return now
    return Cut.chunk(mesh_dims, [src.mesh.shape[m] for m in mesh_dims], extent)
