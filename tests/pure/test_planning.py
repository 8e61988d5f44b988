"""Plans: every pair of layouts gets a plan that brings every element to where it belongs, and says what that costs."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from shardcompile.errors import RedistributeError
from shardcompile.planning import RedistributionPlan, Step, _search, find_plan, target_layout
from shardcompile.sharding import Layout, MeshShape, Partition
from tests.support.simulator import (
    DIVISIBLE,
    Array,
    LocalShards,
    all_layouts,
    bytes_that_change_rank,
    collect,
    compositions,
    coordinates,
    partitions_of,
    run,
    same_partitions,
    some_sizes,
    spread,
)
from tests.support.tiers import often

R, P = Replicate(), Partial("sum")
S0, S1 = Shard(0), Shard(1)


def is_meaningful(src: Layout, dst: Layout) -> bool:
    return all(not isinstance(b, Partial) or a == b for a, b in zip(src.placements, dst.placements, strict=True))


def value_of(layout: Layout) -> Array:
    shape = [int(s) for s in layout.shape]
    return (np.arange(math.prod(shape)).reshape(shape) + 10) * DIVISIBLE


def check(src: Layout, dst: Layout) -> RedistributionPlan:
    """The plan's result is right on every rank, and its steps move as many bytes as they say."""
    plan = find_plan(src, dst)
    value = value_of(src)
    after, moved = run(plan, spread(value, src))
    assert (collect(after, dst) == value).all(), f"{src} to {dst}:\n{plan}"
    if not dst.is_partial:
        for c in coordinates(dst):
            assert (after[c] == value[dst.shard_slices(c)]).all(), f"{src} to {dst} at {c}:\n{plan}"
    assert [s.nbytes for s in plan.steps] == moved, f"{src} to {dst}:\n{plan}"
    assert plan.nbytes == sum(moved) and plan.communicates == any(s.kind != "take_shard" for s in plan.steps)
    return plan


# All pairs


def one_dim_layouts(world: int, shape: tuple[int, int]) -> list[Layout]:
    layouts = all_layouts((world,), shape, [R, P], 0)
    for dim, size in enumerate(shape):
        for partition in partitions_of((world,), [0], size, compositions(size, world)):
            partitions = [partition if d == dim else None for d in range(2)]
            layouts.append(Layout.of(MeshShape((world,)), [Shard(dim)], shape, torch.float32, partitions))
    return layouts


@pytest.mark.parametrize(
    "world, shape", [(1, (3, 2)), (2, (5, 3)), (3, (3, 2)), (3, (4, 0)), (4, (3, 2))], ids=lambda x: str(x)
)
def test_all_pairs_on_a_1d_mesh(world: int, shape: tuple[int, int]) -> None:
    layouts = one_dim_layouts(world, shape)
    checked = 0
    for src, dst in itertools.product(layouts, repeat=2):
        if not is_meaningful(src, dst):
            continue
        plan = check(src, dst)
        assert plan.nbytes == bytes_that_change_rank(src, dst), f"{src} to {dst}:\n{plan}"
        assert len(plan.steps) <= 1
        assert (not plan.steps) == (src.placements == dst.placements and same_partitions(src, dst))
        checked += 1
    assert checked > 100 or world == 1


@pytest.mark.parametrize(
    "mesh, shape", often([((2, 3), (3, 5)), ((2, 2), (4, 3)), ((2, 2), (0, 2))], 1), ids=lambda x: str(x)
)
def test_all_pairs_on_a_2d_mesh(mesh: tuple[int, int], shape: tuple[int, int]) -> None:
    layouts = all_layouts(mesh, shape, [S0, S1, R, P], 1 if 0 in shape else 2)
    checked = 0
    for src, dst in itertools.product(layouts, repeat=2):
        if is_meaningful(src, dst):
            plan = check(src, dst)
            if not src.is_partial:
                assert plan.nbytes >= bytes_that_change_rank(src, dst)
            if not dst.is_partial:  # a whole tensor can be sharded in any way for nothing
                assert plan.nbytes <= find_plan(src, src.replicated()).nbytes
            assert (not plan.steps) == (src.placements == dst.placements and same_partitions(src, dst))
            checked += 1
    assert checked > 500


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Layout, Layout]:
    """Two layouts of one tensor on a mesh of up to three dims."""
    mesh = MeshShape(tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))))
    shape = draw(st.lists(st.integers(0, 30), min_size=1, max_size=3))
    choices = [R, *map(Shard, range(len(shape)))]
    reduction = draw(st.sampled_from(["sum", "avg", "product", "max", "min"]))

    def placements(extra: list[Placement]) -> list[Placement]:
        return [draw(st.sampled_from(choices + extra[m : m + 1])) for m in range(len(mesh.shape))]

    src = placements([Partial(reduction)] * 3)
    dst = placements([p if isinstance(p, Partial) else R for p in src])
    return _with_partitions(draw, mesh, src, shape), _with_partitions(draw, mesh, dst, shape)


def _with_partitions(draw: st.DrawFn, mesh: MeshShape, placements: list[Placement], shape: list[int]) -> Layout:
    partitions: list[Partition | None] = []
    for dim, size in enumerate(shape):
        dims = draw(st.permutations([m for m, p in enumerate(placements) if p == Shard(dim)]))
        parts = [mesh.shape[m] for m in dims]
        count = math.prod(parts)
        ends = sorted(draw(st.lists(st.integers(0, size), min_size=count - 1, max_size=count - 1)))
        sizes = [b - a for a, b in itertools.pairwise([0, *ends, size])]
        made = Partition.chunk(dims, parts, size) if draw(st.booleans()) else Partition.of_sizes(dims, parts, sizes)
        partitions.append(made if dims else None)
    return Layout.of(mesh, placements, shape, torch.float32, partitions)


@settings(deadline=None, max_examples=200, derandomize=True)
@given(pairs())
def test_large_pairs_on_meshes_of_up_to_three_dims(pair: tuple[Layout, Layout]) -> None:
    check(*pair)


@pytest.mark.parametrize("reduce_op", ["sum", "avg", "product", "max", "min"])
def test_every_reduction_arrives(reduce_op: str) -> None:
    layouts = all_layouts((2, 2), (3, 2), [S0, R, Partial(reduce_op)], 1)
    for src, dst in itertools.product([x for x in layouts if x.is_partial], layouts):
        if is_meaningful(src, dst):
            check(src, dst)


def test_two_reductions_that_commute_arrive() -> None:
    mesh, shape = MeshShape((2, 3)), (3, 2)
    src = Layout.chunked(mesh, [Partial("avg"), Partial("sum")], shape, torch.float32)
    for dst in all_layouts((2, 3), shape, [S0, S1, R], 1):
        check(src, dst)


# The simulator can fail


def tampered(plan: RedistributionPlan, **changes: object) -> RedistributionPlan:
    """The plan with its last step changed."""
    last = dataclasses.replace(plan.steps[-1], **changes)  # type: ignore[arg-type]
    return dataclasses.replace(plan, steps=(*plan.steps[:-1], last))


def one_dim(*sizes: int, dim: int = 0, shape: tuple[int, ...] = (8,)) -> Layout:
    partitions = [Partition.of_sizes([0], [len(sizes)], sizes) if d == dim else None for d in range(len(shape))]
    return Layout.of(MeshShape((len(sizes),)), [Shard(dim)], shape, torch.float32, partitions)


def test_the_simulator_refuses_a_wrong_kind_of_step() -> None:
    plan = find_plan(one_dim(3, 5), one_dim(4, 4))
    with pytest.raises(AssertionError):
        run(tampered(plan, kind="take_shard"), spread(value_of(plan.src), plan.src))


def test_the_simulator_refuses_a_plan_that_ends_elsewhere() -> None:
    plan = find_plan(one_dim(3, 5), one_dim(4, 4))
    with pytest.raises(AssertionError, match="the last step ends at the target"):
        run(tampered(plan, dst=one_dim(5, 3)), spread(value_of(plan.src), plan.src))


def test_the_simulator_refuses_a_gather_of_the_outer_mesh_dim() -> None:
    mesh, shape = MeshShape((2, 2)), (8,)
    partition = Partition.of_sizes([0, 1], [2, 2], (1, 2, 3, 2))
    src = Layout.of(mesh, [S0, S0], shape, torch.float32, [partition])
    mid = Layout.of(mesh, [R, S0], shape, torch.float32, [Partition.of_sizes([1], [2], (4, 4))])
    plan = RedistributionPlan(src, mid, (Step("all_gather_v", 0, src, mid, 0),))
    with pytest.raises(AssertionError):
        run(plan, spread(value_of(src), src))


def test_collect_sees_a_missing_term_and_a_wrong_copy() -> None:
    src = Layout.chunked(MeshShape((2,)), [P], (4,), torch.float32)
    shards: LocalShards = spread(value_of(src), src)
    assert (collect(shards, src) == value_of(src)).all()
    shards[(1,)] = 0 * shards[(1,)]
    assert (collect(shards, src) != value_of(src)).any()
    src = src.reduced()
    shards = spread(value_of(src), src)
    shards[(1,)] = shards[(1,)] + 1
    with pytest.raises(AssertionError, match="copies differ"):
        collect(shards, src)


def test_check_sees_wrong_bytes() -> None:
    plan = find_plan(one_dim(3, 5), one_dim(3, 5).replicated())
    _, moved = run(tampered(plan, nbytes=1), spread(value_of(plan.src), plan.src))
    assert moved == [32] != [1]


# Texts and particular plans


def nested(order: tuple[int, ...], sizes: Sequence[int], dim: int = 0, shape: tuple[int, ...] = (8,)) -> Layout:
    mesh = MeshShape((2, 2))
    partitions = [Partition.of_sizes(order, (2, 2), sizes) if d == dim else None for d in range(len(shape))]
    return Layout.of(mesh, [Shard(dim)] * 2, shape, torch.float32, partitions)


def chunked(mesh: Sequence[int], placements: Sequence[Placement], shape: Sequence[int] = (8,)) -> Layout:
    return Layout.chunked(MeshShape(tuple(mesh)), placements, tuple(shape), torch.float32)


@pytest.mark.parametrize(
    "src, dst, text",
    [
        (one_dim(3, 5), one_dim(3, 5).replicated(), "S(0)[3,5] -> R: all_gather_v, 32 B"),
        (one_dim(3, 5).replicated(), one_dim(3, 5), "R -> S(0)[3,5]: take_shard, 0 B"),
        (one_dim(3, 5), one_dim(3, 5), "S(0)[3,5]: nothing to do"),
        (one_dim(3, 5), one_dim(4, 4), "S(0)[3,5] -> S(0)[4,4]: fetch_ranges, 4 B"),
        (one_dim(8, 0), one_dim(0, 8), "S(0)[8,0] -> S(0)[0,8]: fetch_ranges, 32 B"),
        (
            one_dim(3, 1, shape=(4, 2)),
            one_dim(2, 0, dim=1, shape=(4, 2)),
            "S(0)[3,1] -> S(1)[2,0]: all_to_all_v, 8 B",
        ),
        (chunked([2], [P]), chunked([2], [R]), "P(sum) -> R: all_reduce, 64 B"),
        (
            chunked([2, 3], [P, P]),
            chunked([2, 3], [R, R]),
            "P(sum), P(sum) -> R, P(sum): all_reduce, 192 B\nR, P(sum) -> R, R: all_reduce, 256 B\n"
            "(of 448 B in all_reduce, 320 B would do if a process group spanned mesh dims [0, 1])",
        ),
        (chunked([2], [P]), one_dim(3, 5), "P(sum) -> S(0)[3,5]: reduce_scatter_v, 32 B"),
        (chunked([3], [Partial("max")]), chunked([3], [R]), "P(max) -> R: all_reduce, 128 B"),
        # Reduce the shards before they are gathered, gather after they were sharded.
        (
            chunked([2, 2], [S0, P]),
            chunked([2, 2], [R, R]),
            "S(0)[4,4], P(sum) -> S(0)[4,4], R: all_reduce, 64 B\nS(0)[4,4], R -> R, R: all_gather_v, 64 B",
        ),
        (
            chunked([2, 2], [S0, R], (8, 4)),
            chunked([2, 2], [R, S1], (8, 4)),
            "S(0)[4,4], R -> S(0)[4,4], S(1)[2,2]: take_shard, 0 B\n"
            "S(0)[4,4], S(1)[2,2] -> R, S(1)[2,2]: all_gather_v, 128 B",
        ),
        # The inner mesh dim is gathered first and sharded last.
        (
            nested((0, 1), (1, 2, 3, 2)),
            nested((0, 1), (2, 2, 2, 2)),
            "S(0), S(0)[1,2,3,2] -> S(0)[3,5], R: all_gather_v, 32 B\n"
            "S(0)[3,5], R -> S(0)[4,4], R: fetch_ranges, 8 B\n"
            "S(0)[4,4], R -> S(0), S(0)[2,2,2,2]: take_shard, 0 B",
        ),
        (
            nested((0, 1), (1, 2, 3, 2)),
            nested((0, 1), (2, 1, 0, 5)),
            "S(0), S(0)[1,2,3,2] -> S(0), S(0)[2,1,0,5]: fetch_ranges, 16 B",
        ),
    ],
    ids=lambda x: x.splitlines()[0] if isinstance(x, str) else "",
)
def test_texts(src: Layout, dst: Layout, text: str) -> None:
    assert str(find_plan(src, dst)) == text
    check(src, dst)


def test_the_order_of_nesting_can_change() -> None:
    for sizes, after in [((2, 2, 2, 2), (2, 2, 2, 2)), ((1, 2, 3, 2), (0, 5, 3, 0))]:
        src, dst = nested((0, 1), sizes), nested((1, 0), after)
        assert src.placements == dst.placements and src != dst
        plan = check(src, dst)
        assert plan.communicates and plan.steps[0].kind == "all_gather_v" and plan.steps[0].mesh_dim == 1
        assert plan.steps[-1].kind == "take_shard" and plan.steps[-1].mesh_dim == 0
        assert check(dst, src).steps[0].mesh_dim == 0


def test_an_exchange_between_nested_partitions_counts_what_stays() -> None:
    mesh, shape = (2, 2), (8, 4)
    src = chunked(mesh, [S0, S0], shape)
    dst = chunked(mesh, [S0, S1], shape)
    plan = check(src, dst)
    assert [s.kind for s in plan.steps] == ["all_to_all_v"]
    assert plan.nbytes == 8 * 4 * 4 // 2  # two ranks exchange: each keeps half


def test_bytes_are_exact_for_tensors_of_any_size() -> None:
    """More bytes than a float can count: 2**60 and a few."""
    rows = 2**29 + 1
    src = one_dim(rows, rows, rows, shape=(3 * rows, 2**29))
    dst = one_dim(rows - 1, rows, rows + 1, shape=(3 * rows, 2**29))
    assert find_plan(src, dst).nbytes == 2 * 2**29 * 4  # two rows
    step = find_plan(src, one_dim(2**29 - 1, 0, 1, dim=1, shape=(3 * rows, 2**29)))
    assert step.nbytes == 4 * ((2**29 - 1) * 2 * rows + 2 * rows)


# What has no meaning


@pytest.mark.parametrize(
    "src, dst, text",
    [
        (one_dim(3, 5), chunked([2], [P]), r"mesh dim 0: from S\(0\) to P\(sum\) has no meaning .*S\(0\)\[3,5\]"),
        (chunked([2], [R]), chunked([2], [P]), r"mesh dim 0: from R to P\(sum\) has no meaning"),
        (
            chunked([2], [P]),
            chunked([2], [Partial("max")]),
            r"mesh dim 0: from P\(sum\) to P\(max\) has no meaning .*f32\[8\] 0: P\(sum\)",
        ),
        (chunked([2, 2], [P, R]), chunked([2, 2], [P, P]), r"mesh dim 1: from R to P\(sum\)"),
        (chunked([2], [R], (8,)), chunked([2], [R], (9,)), r"f32\[8\] 0: R and f32\[9\] 0: R have different global"),
        (chunked([2], [R], (8,)), chunked([2], [R], (8, 1)), r"are not layouts of the same tensor"),
        (
            chunked([2], [R]),
            chunked([2], [R]).with_dtype(torch.float64),
            r"f32\[8\] 0: R and f64\[8\] 0: R are not layouts of the same tensor",
        ),
        (chunked([2], [R]), chunked([3], [R]), r"from mesh MeshShape\(shape=\(2,\).* to another mesh .*\(3,\)"),
        (chunked([4], [R]), chunked([2, 2], [R, R]), "to another mesh"),
    ],
)
def test_targets_without_meaning(src: Layout, dst: Layout, text: str) -> None:
    with pytest.raises(RedistributeError, match=text):
        find_plan(src, dst)


def test_a_pending_reduction_may_stay() -> None:
    src, dst = chunked([2, 2], [P, S0]), chunked([2, 2], [P, R])
    plan = check(src, dst)
    assert str(plan) == "P(sum), S(0)[4,4] -> P(sum), R: all_gather_v, 64 B"


# The search


def test_plans_are_cached() -> None:
    src, dst = one_dim(3, 5), one_dim(4, 4)
    assert find_plan(src, dst) is find_plan(one_dim(3, 5), one_dim(4, 4))
    fixed = Layout.of(dst.mesh, dst.placements, dst.shape, dst.dtype, [Partition.of_sizes([0], [2], (4, 4), "fixed")])
    assert fixed == dst and find_plan(src, fixed).dst is fixed
    assert find_plan(src, one_dim(2, 6)) is not find_plan(src, dst)
    assert find_plan(src, src).steps == ()


def sample_texts() -> Iterator[str]:
    layouts = all_layouts((2, 2), (4, 3), [S0, S1, R, P])
    rng = random.Random(0)
    for _ in range(150):
        src, dst = rng.sample(layouts, 2)
        if is_meaningful(src, dst):
            yield str(_search(src, dst))


def test_every_process_finds_the_same_plans() -> None:
    """Whatever its hash seed: every rank searches for itself."""
    here = list(sample_texts())
    assert here == list(sample_texts()) and len(set(here)) > 50
    code = "from tests.pure.test_planning import sample_texts; print('\\n'.join(sample_texts()))"
    env = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    other = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert other.returncode == 0, other.stderr
    assert other.stdout.splitlines() == "\n".join(here).splitlines()


def test_the_search_is_fast() -> None:
    """Also where every mesh dim has to move: less than 50 ms, the best of a few, the machine being shared."""
    mesh, shape = MeshShape((2, 3, 4)), (48, 24, 12)

    def layout(*placements: Placement, reverse: bool = False) -> Layout:
        partitions: list[Partition | None] = []
        for dim, size in enumerate(shape):
            dims = [m for m, p in enumerate(placements) if p == Shard(dim)][:: -1 if reverse else 1]
            sizes = some_sizes(random.Random(dim), size, math.prod(mesh.shape[m] for m in dims), 2)[1] if dims else ()
            partitions.append(Partition.of_sizes(dims, [mesh.shape[m] for m in dims], sizes) if dims else None)
        return Layout.of(mesh, placements, shape, torch.float32, partitions)

    hard = [
        (layout(S0, S0, S0), layout(S0, S0, S0, reverse=True)),
        (layout(S0, S1, Shard(2)), layout(Shard(2), S0, S1)),
        (layout(S0, S0, S1), layout(S1, S1, S0)),
        (layout(P, P, P), layout(S0, S1, Shard(2))),
        (layout(P, S0, S0), layout(S1, S1, S1, reverse=True)),
    ]
    for src, dst in hard:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            _search(src, dst)
            times.append(time.perf_counter() - start)
        assert min(times) < 0.05, f"{src} to {dst}: {min(times):.3f} s"
        check(src, dst)


# Targets


def test_target_layout_keeps_partitions_where_it_can() -> None:
    src = nested((1, 0), (1, 2, 3, 2))
    assert target_layout(src, (S0, S0)) == src
    assert target_layout(src, (R, S0)).partitions == (Partition.chunk([1], [2], 8),)
    assert target_layout(src, (R, R)).partitions == (None,)
    assert target_layout(chunked([2, 2], [R, R]), (S0, S0)).partitions == (Partition.chunk([0, 1], [2, 2], 8),)
    stated = Partition.of_sizes([0, 1], [2, 2], (2, 2, 2, 2))
    assert target_layout(src, (S0, S0), {0: stated}).partitions == (stated,)
