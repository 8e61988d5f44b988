"""All ranks of a mesh in one process: the meaning of a plan's steps, on numpy arrays.

The shards of all ranks are a dict by mesh coordinate. Each step is carried out from its definition, with the layouts'
sizes and offsets only, and counts the elements that change rank.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Shard

from shardcompile.planning import RedistributionPlan, Step
from shardcompile.sharding import GroupPartition, Layout, MeshShape, Partition

Coordinate = tuple[int, ...]
Array = np.ndarray[Any, Any]
LocalShards = dict[Coordinate, Array]
DIVISIBLE = 12**3
"""Values that are multiples of it have integer averages over up to three mesh dims of up to four ranks."""

_REDUCE: dict[str, Callable[[Array], Array]] = {
    "sum": lambda terms: terms.sum(axis=0),
    "avg": lambda terms: terms.sum(axis=0) // len(terms),
    "product": lambda terms: terms.prod(axis=0),
    "max": lambda terms: terms.max(axis=0),
    "min": lambda terms: terms.min(axis=0),
}


# Layouts to try


def compositions(size: int, parts: int) -> list[tuple[int, ...]]:
    """All ways to divide a size into so many shards, empty ones included."""
    if parts == 1:
        return [(size,)]
    return [(first, *rest) for first in range(size + 1) for rest in compositions(size - first, parts - 1)]


def partitions_of(
    mesh: Sequence[int], dims: Sequence[int], size: int, sizes: Sequence[Sequence[int]]
) -> list[Partition]:
    """The chunk partition and some others, fixed and dynamic in turn, nested in every order."""
    partitions = []
    for order in itertools.permutations(dims):
        parts = [mesh[m] for m in order]
        partitions.append(Partition.chunk(order, parts, size))
        partitions += [
            Partition.of_sizes(order, parts, s, "fixed" if i % 2 else "dynamic") for i, s in enumerate(sizes)
        ]
    return partitions


def some_sizes(rng: random.Random, size: int, parts: int, count: int) -> list[tuple[int, ...]]:
    """Ways to divide a size: everything in the last shard, then random ones."""
    found = [(0,) * (parts - 1) + (size,)]
    for _ in range(count - 1):
        ends = sorted(rng.randint(0, size) for _ in range(parts - 1))
        found.append(tuple(b - a for a, b in itertools.pairwise([0, *ends, size])))
    return found


def all_layouts(
    mesh: tuple[int, ...], shape: tuple[int, ...], placements: Sequence[Placement], count: int = 2
) -> list[Layout]:
    """Layouts of every combination of these placements, each with several partitions of every sharded dim."""
    rng = random.Random(0)
    found = []
    for combination in itertools.product(placements, repeat=len(mesh)):
        choices: list[list[Partition | None]] = []
        for dim, size in enumerate(shape):
            dims = [m for m, p in enumerate(combination) if p == Shard(dim)]
            sizes = some_sizes(rng, size, math.prod(mesh[m] for m in dims), count) if dims else []
            choices.append([*partitions_of(mesh, dims, size, sizes)] if dims else [None])
        found += [
            Layout.of(MeshShape(mesh), combination, shape, torch.float32, partitions)
            for partitions in itertools.product(*choices)
        ]
    return found


# All ranks


def coordinates(layout: Layout) -> Iterator[Coordinate]:
    return itertools.product(*map(range, layout.mesh.shape))


def groups(layout: Layout, mesh_dims: Sequence[int]) -> Iterator[list[Coordinate]]:
    """Coordinates that differ in these mesh dims only, in order."""
    found: dict[Coordinate, list[Coordinate]] = {}
    for c in coordinates(layout):
        found.setdefault(tuple(0 if m in mesh_dims else x for m, x in enumerate(c)), []).append(c)
    return iter(found.values())


def spread(value: Array, layout: Layout) -> LocalShards:
    """Shards of a global value; along partial mesh dims random terms that reduce to it."""
    rng = np.random.default_rng(0)
    partial = [(m, p.reduce_op) for m, p in enumerate(layout.placements) if isinstance(p, Partial)]
    terms: dict[Coordinate, Array] = {(): value}
    for m, reduce_op in partial:
        terms = {
            (*where, i): term
            for where, whole in terms.items()
            for i, term in enumerate(_terms(whole, layout.mesh.shape[m], reduce_op, rng))
        }
    return {c: terms[tuple(c[m] for m, _ in partial)][layout.shard_slices(c)] for c in coordinates(layout)}


def _terms(value: Array, count: int, reduce_op: str, rng: np.random.Generator) -> list[Array]:
    """So many arrays that reduce to `value`, none of which may be missed or counted twice."""
    others = [np.asarray(rng.integers(1, 100, value.shape)) * DIVISIBLE for _ in range(count - 1)]
    if reduce_op in ("sum", "avg"):
        whole = value * count if reduce_op == "avg" else value
        return [whole - sum(others), *others]
    if reduce_op == "product":
        signs = [1 - 2 * (o // DIVISIBLE % 2) for o in others]
        return [value * math.prod(signs), *signs]
    sign = -1 if reduce_op == "max" else 1
    terms = [value, *[value + sign * o for o in others]]
    shift = int(rng.integers(count))
    return terms[shift:] + terms[:shift]


def collect(shards: LocalShards, layout: Layout) -> Array:
    """The global value, after checking that copies agree and that every element is somewhere."""
    partial = [m for m, p in enumerate(layout.placements) if isinstance(p, Partial)]
    value = np.zeros([int(s) for s in layout.shape], dtype=int)
    seen = np.zeros(value.shape, dtype=int)
    for group in groups(layout, partial):
        shard = {c: shards[c] for c in group}
        for m in partial:
            placement = layout.placements[m]
            assert isinstance(placement, Partial)
            for members in groups(layout, [m]):
                if members[0] in shard:
                    reduced = _REDUCE[placement.reduce_op](np.stack([shard[c] for c in members]))
                    shard.update(dict.fromkeys(members, reduced))
        result, where = shard[group[0]], layout.shard_slices(group[0])
        assert result.shape == value[where].shape, (group[0], result.shape)
        assert (value[where] == result)[seen[where] > 0].all(), f"copies differ at {group}"
        value[where] = result
        seen[where] += 1
    assert (seen > 0).all()
    return value


def run(plan: RedistributionPlan, shards: LocalShards) -> tuple[LocalShards, list[int]]:
    """The shards after a plan, and for each step the bytes that changed rank."""
    moved = []
    at = plan.src
    for step in plan.steps:
        assert step.src.placements == at.placements and same_partitions(step.src, at), (
            "a step starts where the last ended"
        )
        shards, elements = _STEPS[step.kind](step, shards)
        moved.append(elements * plan.src.dtype.itemsize)
        at = step.dst
        for c, shard in shards.items():
            assert shard.shape == at.local_shape(c), (str(step), c, shard.shape)
    assert at.placements == plan.dst.placements and same_partitions(at, plan.dst), "the last step ends at the target"
    return shards, moved


def same_partitions(a: Layout, b: Layout) -> bool:
    """Whether both divide every dim alike."""
    return all(x.guard_same_shards(y) if x else y is None for x, y in zip(a.partitions, b.partitions, strict=True))


def _shard_dim(layout: Layout, mesh_dim: int) -> int:
    placement = layout.placements[mesh_dim]
    assert isinstance(placement, Shard)
    return placement.dim


def _within(shard: Array, dim: int, start: int, size: int) -> Array:
    """`size` rows from `start` on, which must be there."""
    assert start >= 0 and start + size <= shard.shape[dim], (shard.shape, dim, start, size)
    return shard[(slice(None),) * dim + (slice(start, start + size),)]


def _check_what_ranks_are_told(layout: Layout, mesh_dim: int, group: Sequence[Coordinate]) -> None:
    """The arguments of a collective say the same of the group's shards as the layout."""
    dim = _shard_dim(layout, mesh_dim)
    partition = layout.partition_of(dim)
    sizes = tuple(layout.local_shape(c)[dim] for c in group)
    for c in group:
        ref = partition.group_partition(c)
        told = GroupPartition.resolve(int(sum(sizes)), ref.sizes, int(ref.key), ref.grouping, len(group))
        assert told == sizes, f"{c} is told {told}, but the group holds {sizes}"


def _all_gather(step: Step, shards: LocalShards) -> tuple[LocalShards, int]:
    dim, out, moved = _shard_dim(step.src, step.mesh_dim), {}, 0
    for group in groups(step.src, [step.mesh_dim]):
        _check_what_ranks_are_told(step.src, step.mesh_dim, group)
        whole = np.concatenate([shards[c] for c in group], axis=dim)
        for c in group:
            out[c] = whole
            moved += whole.size - shards[c].size
    return out, moved


def _take_shard(step: Step, shards: LocalShards) -> tuple[LocalShards, int]:
    for group in groups(step.dst, [step.mesh_dim]):
        _check_what_ranks_are_told(step.dst, step.mesh_dim, group)
    return {c: _own_rows(step, c, shards[c]) for c in shards}, 0


def _own_rows(step: Step, c: Coordinate, shard: Array) -> Array:
    """The rows of the target's shard out of a shard that holds all of the group's."""
    dim = _shard_dim(step.dst, step.mesh_dim)
    start = step.dst.offset(c, dim) - step.src.offset(c, dim)
    return _within(shard, dim, start, int(step.dst.local_shape(c)[dim]))


def _reduced(step: Step, shards: LocalShards, group: Sequence[Coordinate]) -> Array:
    placement = step.src.placements[step.mesh_dim]
    assert isinstance(placement, Partial)
    return _REDUCE[placement.reduce_op](np.stack([shards[c] for c in group]))


def _all_reduce(step: Step, shards: LocalShards) -> tuple[LocalShards, int]:
    out, moved = {}, 0
    for group in groups(step.src, [step.mesh_dim]):
        whole = _reduced(step, shards, group)
        out.update(dict.fromkeys(group, whole))
        # Every element has one owner, who gets a term from all others and sends them the result.
        moved += 2 * whole.size * (len(group) - 1)
    return out, moved


def _reduce_scatter(step: Step, shards: LocalShards) -> tuple[LocalShards, int]:
    out, moved = {}, 0
    for group in groups(step.src, [step.mesh_dim]):
        _check_what_ranks_are_told(step.dst, step.mesh_dim, group)
        whole = _reduced(step, shards, group)
        for c in group:
            out[c] = _own_rows(step, c, whole)
            moved += out[c].size * (len(group) - 1)
    return out, moved


def _exchange(step: Step, shards: LocalShards) -> tuple[LocalShards, int]:
    """Every rank gets the rows of its new shard from whoever holds them; each exactly once."""
    dims = {_shard_dim(step.src, step.mesh_dim), _shard_dim(step.dst, step.mesh_dim)}
    assert (len(dims) == 2) == (step.kind == "all_to_all_v")
    out, moved = {}, 0
    for group in groups(step.src, [step.mesh_dim]):
        _check_what_ranks_are_told(step.src, step.mesh_dim, group)
        _check_what_ranks_are_told(step.dst, step.mesh_dim, group)
        for c in group:
            wanted = step.dst.shard_slices(c)
            filled = np.zeros(step.dst.local_shape(c), dtype=int)
            out[c] = np.zeros_like(filled)
            for peer in group:
                held = step.src.shard_slices(peer)
                common = [(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(held, wanted, strict=True)]
                if any(start >= stop for start, stop in common):
                    continue
                here = tuple(slice(a - w.start, b - w.start) for (a, b), w in zip(common, wanted, strict=True))
                there = tuple(slice(a - h.start, b - h.start) for (a, b), h in zip(common, held, strict=True))
                out[c][here] = shards[peer][there]
                filled[here] += 1
                moved += 0 if peer == c else math.prod(b - a for a, b in common)
            assert (filled == 1).all(), f"{step} at {c}"
    return out, moved


_STEPS: dict[str, Callable[[Step, LocalShards], tuple[LocalShards, int]]] = {
    "all_gather_v": _all_gather,
    "all_reduce": _all_reduce,
    "reduce_scatter_v": _reduce_scatter,
    "all_to_all_v": _exchange,
    "fetch_ranges": _exchange,
    "take_shard": _take_shard,
}


# Counting


def bytes_that_change_rank(src: Layout, dst: Layout) -> int:
    """Counted element by element: what a rank needs and does not hold comes from elsewhere, once.

    From a pending reduction it comes from every other rank, and goes on to the others if they need it, too.
    """
    shape = [int(s) for s in src.shape]
    flat = np.arange(math.prod(shape)).reshape(shape)
    ranks = list(coordinates(src))
    if src.is_partial:
        owners = 2 if dst.is_replicated else 1
        return 0 if dst.is_partial else owners * flat.size * (len(ranks) - 1) * src.dtype.itemsize
    held = {c: set(flat[src.shard_slices(c)].flatten().tolist()) for c in ranks}
    needed = {c: set(flat[dst.shard_slices(c)].flatten().tolist()) for c in ranks}
    return sum(len(needed[c] - held[c]) for c in ranks) * src.dtype.itemsize
