"""Partitions and layouts: the shards tile the tensor, and every derived partition is the one that torch's own slicing gives."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard, _StridedShard
from torch.fx.experimental.proxy_tensor import make_fx

from shardcompile.collectives import buckets
from shardcompile.errors import LayoutError
from shardcompile.sharding import (
    CHUNK_KEY,
    GroupPartition,
    Layout,
    MeshShape,
    Partition,
    Spec,
    chunk_sizes,
    contiguous_stride,
    dense_stride,
    normalize_placements,
    sizes_of_key,
)
from shardcompile.sharding import sizes as sizes_module
from shardcompile.sharding.partition import Kind
from tests.support.simulator import compositions, some_sizes

R, P = Replicate(), Partial("sum")
MESHES = [(1,), (2,), (3,), (2, 2), (2, 3), (1, 2), (2, 2, 2), (3, 1, 2)]
KINDS: tuple[Kind, ...] = ("fixed", "dynamic")


def coordinates(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, shape))


def random_sizes(rng: random.Random, size: int, parts: int) -> tuple[int, ...]:
    return some_sizes(rng, size, parts, 2)[1]


def layout_of(
    mesh: MeshShape,
    placements: Sequence[Placement],
    shape: Sequence[int],
    partition: Callable[[list[int], int], Partition],
) -> Layout:
    """A layout of these placements, with `partition` asked for the partition of each sharded dim."""
    partitions = []
    for dim, size in enumerate(shape):
        mesh_dims = [m for m, p in enumerate(placements) if p == Shard(dim)]
        partitions.append(partition(mesh_dims, size) if mesh_dims else None)
    return Layout.of(mesh, placements, shape, torch.float32, partitions)


def some_partitions(mesh: Sequence[int]) -> Iterator[Partition]:
    """Partitions of every kind over every choice and order of mesh dims, with empty shards among them."""
    rng = random.Random(0)
    for depth in range(1, len(mesh) + 1):
        for dims in itertools.permutations(range(len(mesh)), depth):
            parts = [mesh[m] for m in dims]
            for size in (0, 1, 5, 12):
                yield Partition.chunk(dims, parts, size)
                for kind in KINDS:
                    yield Partition.of_sizes(dims, parts, random_sizes(rng, size, math.prod(parts)), kind)


ALL_PARTITIONS = [(mesh, partition) for mesh in MESHES for partition in some_partitions(mesh)]


# torch.chunk


def test_chunk_sizes_are_those_of_torch_chunk() -> None:
    for size, parts in itertools.product(range(25), range(1, 10)):
        expected = [len(c) for c in torch.arange(size).chunk(parts)]
        expected += [0] * (parts - len(expected))
        assert chunk_sizes(size, parts) == tuple(expected)


def test_no_formula_of_a_symbolic_size_stands_for_a_chunk() -> None:
    """It would name the rank in the graph, and comparisons with it would be guards that hold on some ranks only."""

    def traced(x: torch.Tensor) -> torch.Tensor:
        partition = Partition.chunk((1, 0), (2, 3), x.shape[0])
        assert partition.is_traced and partition.describe() == "[?]"
        with pytest.raises(LayoutError, match="has no symbol in the trace"):
            partition.local_size((0, 1))
        return x

    make_fx(traced, tracing_mode="symbolic")(torch.zeros(11))


@pytest.mark.parametrize("mesh", [(2, 3), (3, 2), (2, 2), (2, 3, 2), (2, 1, 3)])
def test_nested_chunk_is_torch_chunk_of_chunks(mesh: tuple[int, ...]) -> None:
    for size, dims in itertools.product(range(14), itertools.permutations(range(len(mesh)))):
        partition = Partition.chunk(dims, [mesh[m] for m in dims], size)
        for coordinate in coordinates(mesh):
            rows = torch.arange(size)
            for m in dims:
                chunks = rows.chunk(mesh[m])
                rows = chunks[coordinate[m]] if coordinate[m] < len(chunks) else rows[:0]
            assert partition.local_size(coordinate) == len(rows)
            if len(rows):
                assert partition.offset(coordinate) == int(rows[0])


# Shards tile the tensor


def assert_tiles(layout: Layout) -> None:
    """Every element is in the shard of exactly one coordinate of the sharding mesh dims; the others hold copies."""
    sharding = [m for m, p in enumerate(layout.placements) if isinstance(p, Shard)]
    count = np.zeros([int(s) for s in layout.shape], dtype=int)
    copies = math.prod(n for m, n in enumerate(layout.mesh.shape) if m not in sharding)
    for coordinate in coordinates(layout.mesh.shape):
        shard = count[layout.shard_slices(coordinate)]
        assert shard.shape == layout.local_shape(coordinate)
        assert layout.offsets(coordinate) == tuple(s.start for s in layout.shard_slices(coordinate))
        first = [c if m in sharding else 0 for m, c in enumerate(coordinate)]
        assert layout.shard_slices(coordinate) == layout.shard_slices(first)
        shard += 1
    assert (count == copies).all(), layout


@pytest.mark.parametrize("sizes, size", [((2, 2), 5), ((3, 3), 5)], ids=["gap", "overhang"])
def test_assert_tiles_can_fail(sizes: tuple[int, ...], size: int) -> None:
    with pytest.raises(AssertionError):
        assert_tiles(
            Layout.of(MeshShape((2,)), [Shard(0)], [size], torch.float32, [Partition.of_sizes([0], [2], sizes)])
        )


@pytest.mark.parametrize("mesh, size", [((1,), 4), ((2,), 6), ((3,), 5), ((4,), 4), ((2, 2), 4), ((2, 3), 3)])
def test_every_partition_of_one_dim_tiles(mesh: tuple[int, ...], size: int) -> None:
    for dims in itertools.permutations(range(len(mesh))):
        for sizes in compositions(size, math.prod(mesh)):
            partition = Partition.of_sizes(dims, [mesh[m] for m in dims], sizes)
            layout = Layout.of(MeshShape(mesh), [Shard(0)] * len(mesh), [size], torch.float32, [partition])
            assert_tiles(layout)
            assert layout.sizes(0) == sizes and layout.is_even == (len(set(sizes)) == 1)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("shape", [(7,), (3, 4), (0, 3), (2, 5, 3)])
def test_every_placement_tiles(mesh: tuple[int, ...], shape: tuple[int, ...]) -> None:
    rng = random.Random(1)

    def uneven(mesh_dims: list[int], size: int) -> Partition:
        dims = rng.sample(mesh_dims, len(mesh_dims))
        parts = [mesh[m] for m in dims]
        return Partition.of_sizes(dims, parts, random_sizes(rng, size, math.prod(parts)), rng.choice(KINDS))

    choices = [R, P, *(Shard(d) for d in range(len(shape)))]
    for placements in itertools.product(choices, repeat=len(mesh)):
        assert_tiles(Layout.chunked(MeshShape(mesh), placements, shape, torch.float32))
        assert_tiles(layout_of(MeshShape(mesh), placements, shape, uneven))


@st.composite
def large_layouts(draw: st.DrawFn) -> Layout:
    mesh = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    ndim = draw(st.integers(1, 3))
    placements = [draw(st.sampled_from([R, P, *map(Shard, range(ndim))])) for _ in mesh]
    shape, partitions = [], []
    for dim in range(ndim):
        dims = draw(st.permutations([m for m, p in enumerate(placements) if p == Shard(dim)]))
        parts = [mesh[m] for m in dims]
        count = math.prod(parts)
        sizes = draw(st.lists(st.integers(0, 40) | st.just(0), min_size=count, max_size=count))
        shape.append(sum(sizes))
        kind = draw(st.sampled_from(KINDS))
        made = (
            Partition.chunk(dims, parts, sum(sizes))
            if draw(st.booleans())
            else Partition.of_sizes(dims, parts, sizes, kind)
        )
        partitions.append(made if dims else None)
    return Layout.of(MeshShape(tuple(mesh)), placements, shape, torch.float32, partitions)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(large_layouts())
def test_large_layouts_tile(layout: Layout) -> None:
    ends = []
    for dim, partition in enumerate(layout.partitions):
        shards = {(layout.offset(c, dim), layout.local_shape(c)[dim]) for c in coordinates(layout.mesh.shape)}
        ends.append(sorted(shards))
        assert len(shards) <= (1 if partition is None else math.prod(partition.parts))
        rows = np.zeros(layout.shape[dim], dtype=int)
        for start, size in shards:
            rows[start : start + size] += 1
        assert (rows == 1).all()
    # Along each dim the shards tile; in all, every combination of them must be somebody's.
    held = {tuple(zip(layout.offsets(c), layout.local_shape(c), strict=True)) for c in coordinates(layout.mesh.shape)}
    assert held == set(itertools.product(*ends))


# Partitions that follow from partitions


def test_coarsen_merges_the_shards_of_the_innermost_mesh_dim() -> None:
    checked = 0
    for mesh, partition in ALL_PARTITIONS:
        coarse = partition.coarsen()
        if len(partition.mesh_dims) == 1:
            assert coarse is None
            continue
        assert coarse is not None
        inner = partition.mesh_dims[-1]
        assert (coarse.kind, coarse.mesh_dims, coarse.size) == (
            partition.kind,
            partition.mesh_dims[:-1],
            partition.size,
        )
        for coordinate in coordinates(mesh):
            group = [_at(coordinate, inner, i) for i in range(mesh[inner])]
            assert coarse.local_size(coordinate) == sum(int(partition.local_size(c)) for c in group)
            assert coarse.offset(coordinate) == partition.offset(group[0])
        checked += 1
    assert checked > 100


def _at(coordinate: Sequence[int], mesh_dim: int, index: int) -> tuple[int, ...]:
    return tuple(index if m == mesh_dim else c for m, c in enumerate(coordinate))


def test_prefix_coarsens_down_to_a_depth() -> None:
    partition = Partition.of_sizes((2, 0, 1), (2, 2, 2), (1, 2, 3, 4, 5, 6, 7, 8))
    assert partition.prefix(4) is partition.prefix(3) is partition
    two, one = partition.prefix(2), partition.prefix(1)
    assert two is not None and (two.mesh_dims, two.sizes) == ((2, 0), (3, 7, 11, 15))
    assert one is not None and (one.mesh_dims, one.sizes) == ((2,), (10, 26))
    assert partition.prefix(0) is None
    chunk = Partition.chunk((1, 0), (2, 3), 10).prefix(1)
    assert chunk is not None and chunk == Partition.chunk((1,), (2,), 10)


@pytest.mark.parametrize("factor", [1, 2, 6])
def test_scaled_flattens_trailing_elements_and_unscaled_splits_them_off(factor: int) -> None:
    for mesh, partition in ALL_PARTITIONS:
        scaled = partition.flatten_trailing(factor)
        assert scaled.size == partition.size * factor
        for coordinate in coordinates(mesh):
            assert scaled.local_size(coordinate) == int(partition.local_size(coordinate)) * factor
            assert scaled.offset(coordinate) == partition.offset(coordinate) * factor
        back = scaled.unflatten_trailing(factor)
        assert back is not None and back.size == partition.size and back.guard_same_shards(partition)
        if partition.kind != "chunk":
            assert back == partition


def test_unscaled_refuses_to_split_a_shard() -> None:
    assert Partition.of_sizes([0], [2], (4, 6)).unflatten_trailing(4) is None
    assert Partition.chunk([0], [2], 6).unflatten_trailing(2) is None
    two = Partition.of_sizes([0], [2], (4, 6)).unflatten_trailing(2)
    assert two is not None and two.sizes == (2, 3) and two.size == 5
    chunk = Partition.chunk([0], [2], 8).unflatten_trailing(2)
    assert chunk is not None and chunk.sizes == (2, 2) and chunk.kind == "fixed"


def test_unscaled_by_part_of_the_scale_keeps_the_key() -> None:
    partition = Partition.of_sizes([0], [2], (1, 3)).flatten_trailing(6)
    part = partition.unflatten_trailing(2)
    assert part is not None and (part.sizes, part.trace.scale, part.trace.key) == ((3, 9), 3, partition.trace.key)
    other = partition.unflatten_trailing(3 * 2 * 2)
    assert other is None
    mixed = Partition.of_sizes([0], [2], (2, 4)).flatten_trailing(6).unflatten_trailing(4)
    assert mixed is not None and mixed.sizes == (3, 6)


def test_a_chunk_partition_is_scaled() -> None:
    partition = Partition.chunk([0, 1], [2, 2], 5)
    assert partition.sizes == (2, 1, 1, 1)
    flat = partition.flatten_trailing(3)
    assert flat.kind == "chunk" and flat.size == 15 and flat.sizes == (6, 3, 3, 3)
    assert flat.unflatten_trailing(3) == partition and flat.coarsen() == Partition.chunk([0], [2], 5).flatten_trailing(
        3
    )
    assert not flat.guard_same_shards(Partition.chunk([0, 1], [2, 2], 15))
    ref = Partition.chunk([0], [4], 5).flatten_trailing(3).group_partition((0,))
    assert ref.shards(15, 4) == (6, 6, 3, 0) == GroupPartition([], CHUNK_KEY, [1, 0, 3]).shards(15, 4)


def test_a_chunk_partition_of_a_symbolic_size_is_scaled() -> None:
    def traced(x: torch.Tensor) -> torch.Tensor:
        partition = Partition.chunk([0], [2], x.shape[0])
        flat = partition.flatten_trailing(2)
        assert (
            flat.group_partition((0,)).grouping == [1, 0, 2]
            and flat.is_traced
            and partition.unflatten_trailing(2) is None
        )
        assert flat.unflatten_trailing(2).guard_same_shards(partition)
        assert not flat.guard_same_shards(Partition.chunk([0], [2], 2 * x.shape[0]))
        return x

    make_fx(traced, tracing_mode="symbolic")(torch.zeros(11))


def test_same_shards() -> None:
    partition = Partition.of_sizes((0, 1), (2, 2), (1, 1, 2, 0))
    assert partition.guard_same_shards(Partition.of_sizes((0, 1), (2, 2), (1, 1, 2, 0), "fixed"))
    assert Partition.chunk([0], [2], 5).guard_same_shards(Partition.of_sizes([0], [2], (3, 2)))
    assert not partition.guard_same_shards(None)
    assert not partition.guard_same_shards(Partition.of_sizes((1, 0), (2, 2), (1, 1, 2, 0)))
    assert not partition.guard_same_shards(Partition.of_sizes((0, 1), (2, 2), (1, 1, 0, 2)))
    assert not Partition.of_sizes((0, 1), (2, 3), range(6)).guard_same_shards(
        Partition.of_sizes((0, 1), (3, 2), range(6))
    )


# Partitions inside a trace


def test_a_traced_partition_knows_its_own_shard_only() -> None:
    partition = Partition.traced([0], [2], 8, key=1 << 60, local_size=3)
    assert partition.is_traced and partition.local_size((1,)) == 3 and partition.describe() == "[?]"
    with pytest.raises(LayoutError, match="sizes of a dynamic partition are not known while tracing"):
        partition.sizes
    assert partition.flatten_trailing(4).local_size((0,)) == 12 and partition.flatten_trailing(4).size == 32
    coarse = Partition.traced([0, 1], [2, 2], 8, key=1 << 60, local_size=3).coarsen()
    assert coarse is not None
    with pytest.raises(LayoutError, match=r"mesh dims \(0,\) has no symbol"):
        coarse.local_size((0, 0))


def test_same_shards_of_traced_partitions_compares_keys_and_what_was_done_to_them() -> None:
    a, b = (Partition.traced([0], [2], 8, key, 3) for key in (4, 6))
    assert a.guard_same_shards(Partition.traced([0], [2], 8, 4, 4)) and not a.guard_same_shards(b)
    assert not a.guard_same_shards(a.flatten_trailing(2))
    assert a.flatten_trailing(6).guard_same_shards(a.flatten_trailing(3).flatten_trailing(2))


@pytest.mark.parametrize(("sizes", "parts"), [((4, 4), [2]), ((3, 2), [2]), ((2, 1, 1, 1), [2, 2])])
def test_a_traced_partition_is_the_chunked_one_if_its_key_says_so(sizes: tuple[int, ...], parts: list[int]) -> None:
    mesh_dims, size = list(range(len(parts))), sum(sizes)
    chunked, key = Partition.chunk(mesh_dims, parts, size), Partition.of_sizes(mesh_dims, parts, sizes).trace.key
    assert chunked.sizes == sizes and chunked.as_dynamic().trace.key == key and chunked.as_dynamic().sizes == sizes
    traced = Partition.traced(mesh_dims, parts, size, key, 3)
    assert traced.guard_same_shards(dataclasses.replace(chunked, known_sizes=None)) and dataclasses.replace(
        chunked, known_sizes=None
    ).guard_same_shards(traced)
    assert not traced.guard_same_shards(dataclasses.replace(chunked, known_sizes=None).flatten_trailing(2))
    other = Partition.of_sizes(mesh_dims, parts, (size, *[0] * (len(sizes) - 1)))
    assert not Partition.traced(mesh_dims, parts, size, other.trace.key, 3).guard_same_shards(
        dataclasses.replace(chunked, known_sizes=None)
    )


# What a collective is told


def _derived(partition: Partition) -> Iterator[Partition]:
    yield partition
    yield partition.flatten_trailing(6)
    part = partition.flatten_trailing(6).unflatten_trailing(2)
    assert part is not None
    yield part
    coarse = partition.coarsen()
    if coarse is not None:
        yield from (coarse, coarse.flatten_trailing(2), *_derived(coarse))
    scaled = partition.flatten_trailing(3).coarsen()
    if scaled is not None:
        yield scaled


@pytest.mark.parametrize("mesh", MESHES)
def test_a_group_ref_resolves_to_the_shards_of_the_group(mesh: tuple[int, ...]) -> None:
    for partition in itertools.chain.from_iterable(map(_derived, some_partitions(mesh))):
        inner = partition.mesh_dims[-1]
        for coordinate in coordinates(mesh):
            expected = tuple(partition.local_size(_at(coordinate, inner, i)) for i in range(mesh[inner]))
            ref = partition.group_partition(coordinate)
            got = GroupPartition.resolve(sum(map(int, expected)), ref.sizes, int(ref.key), ref.grouping, mesh[inner])
            assert got == expected, (partition, coordinate)
            if partition.kind == "dynamic":  # nothing that a graph would be specialised on
                assert ref.sizes == [] and ref.key == partition.trace.key != CHUNK_KEY
            else:
                assert ref.key == CHUNK_KEY


def test_a_group_ref_of_a_symbolic_chunk_resolves_by_the_group_size() -> None:
    def traced(x: torch.Tensor) -> torch.Tensor:
        assert Partition.chunk((1, 0), (2, 3), x.shape[0]).group_partition((0, 1)) == GroupPartition([], CHUNK_KEY, [])
        return x

    make_fx(traced, tracing_mode="symbolic")(torch.zeros(11))
    whole = Partition.chunk((1, 0), (2, 3), 11)
    for outer in range(2):
        total = sum(whole.sizes[3 * outer : 3 * outer + 3])
        assert GroupPartition.resolve(total, [], CHUNK_KEY, [], 3) == whole.sizes[3 * outer : 3 * outer + 3]


# The table of sizes


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """An empty table in place of the process's own; called with a limit, that many sizes are kept."""
    monkeypatch.setattr(sizes_module, "_TABLE", sizes_module._SizeTable())
    return lambda limit: monkeypatch.setattr(sizes_module, "_TABLE_LIMIT", limit)


def key_of(*sizes: int) -> int:
    return int(Partition.of_sizes([0], [len(sizes)], sizes).trace.key)


def test_keys_stand_for_sizes(table: Callable[[int], None]) -> None:
    sizes = [(3, 5), (5, 3), (3, 5, 0), (0, 3, 5), (8,), (0,)]
    keys = [key_of(*s) for s in sizes]
    assert [sizes_of_key(k) for k in keys] == sizes
    assert len(set(keys)) == len(sizes) and CHUNK_KEY not in keys
    assert [key_of(*s) for s in sizes] == keys


def test_keys_do_not_depend_on_what_was_there_before(table: Callable[[int], None]) -> None:
    key = key_of(2, 7)
    sizes_module._TABLE = sizes_module._SizeTable()
    key_of(1, 1)
    assert key_of(2, 7) == key


def test_an_unknown_key_raises() -> None:
    with pytest.raises(LayoutError, match="key 123 is no longer known in this process: more than 16777216 shard"):
        sizes_of_key(123)


def test_the_oldest_sizes_are_evicted(table: Callable[[int], None]) -> None:
    table(6)
    first, second, third = key_of(1, 2), key_of(3, 4), key_of(5, 6)
    fourth = key_of(7, 8)
    with pytest.raises(LayoutError, match=f"{first} is no longer known .* more than 6 shard sizes"):
        sizes_of_key(first)
    assert [sizes_of_key(k) for k in (second, third, fourth)] == [(3, 4), (5, 6), (7, 8)]
    assert key_of(1, 2) == first and sizes_of_key(first) == (1, 2)
    with pytest.raises(LayoutError):
        sizes_of_key(second)


def in_a_bucket(key: int) -> object:
    return buckets._keys([GroupPartition([], key, [])])


def in_a_collective(key: int) -> object:
    return GroupPartition([], key, []).shards(3, 2)


@pytest.mark.parametrize("use", [lambda _: key_of(1, 2), sizes_of_key, in_a_bucket, in_a_collective])
def test_sizes_that_are_used_again_count_as_new(use: Callable[[int], object], table: Callable[[int], None]) -> None:
    """A graph looks up the sizes of a parameter, which no step makes again."""
    table(6)
    first, second, _ = key_of(1, 2), key_of(3, 4), key_of(5, 6)
    use(first)
    key_of(7, 8)
    assert sizes_of_key(first) == (1, 2)
    with pytest.raises(LayoutError):
        sizes_of_key(second)


def test_a_partition_that_is_larger_than_the_limit_is_kept(table: Callable[[int], None]) -> None:
    table(2)
    assert sizes_of_key(key_of(1, 2, 3, 4)) == (1, 2, 3, 4)


def test_two_partitions_of_one_key_raise(table: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes_module, "_KEY_BASE", 2)  # every key is 2, or 3 if the sizes are torch.chunk's
    key_of(1, 2)
    assert key_of(2, 1) == 3
    with pytest.raises(LayoutError, match=r"two partitions share the key 2: \(1, 2\) and \(0, 3\)"):
        key_of(0, 3)


# Values


def samples() -> list[Layout]:
    """Layouts of which no two are equal. Made anew: they are one object as long as the process groups stay the same."""
    return [
        Layout.chunked(MeshShape((2,)), [Shard(0)], (5, 2), torch.float32),
        Layout.chunked(MeshShape((2,)), [Shard(0)], (5, 2), torch.float64),
        Layout.chunked(MeshShape((2,)), [Shard(1)], (5, 2), torch.float32),
        Layout.chunked(MeshShape((2,)), [Shard(0)], (5, 3), torch.float32),
        Layout.chunked(MeshShape((3,)), [Shard(0)], (5, 2), torch.float32),
        Layout.chunked(MeshShape((2,), ("dp",)), [Shard(0)], (5, 2), torch.float32),
        Layout.chunked(MeshShape((2,)), [R], (5, 2), torch.float32),
        Layout.chunked(MeshShape((2,)), [P], (5, 2), torch.float32),
        Layout.chunked(MeshShape((2,)), [Partial("max")], (5, 2), torch.float32),
        layout_of(MeshShape((2,)), [Shard(0)], (5, 2), lambda m, e: Partition.of_sizes(m, [2], (4, 1))),
        layout_of(MeshShape((2,)), [Shard(0)], (5, 2), lambda m, e: Partition.of_sizes(m, [2], (0, 5), "fixed")),
        layout_of(MeshShape((2, 2)), [Shard(0)] * 2, (5, 2), lambda m, e: Partition.of_sizes(m, [2, 2], (1, 1, 1, 2))),
        layout_of(
            MeshShape((2, 2)), [Shard(0)] * 2, (5, 2), lambda m, e: Partition.of_sizes(m[::-1], [2, 2], (1, 1, 1, 2))
        ),
        Layout.chunked(MeshShape((2,)), [R], (), torch.float32),
    ]


DESCRIPTIONS = [x.describe() for x in samples()]


def rebuilt(layout: Layout) -> Layout:
    """An equal layout of which no part is the same object."""
    partitions = [None if c is None else dataclasses.replace(c, parts=(*c.parts,)) for c in layout.partitions]
    mesh = MeshShape(layout.mesh.shape, layout.mesh.mesh_dim_names)
    return Layout(mesh, copy.deepcopy(layout.placements), (*layout.shape,), layout.dtype, partitions)


def test_layouts_are_equal_if_all_their_parts_are() -> None:
    layouts = samples()
    for i, j in itertools.product(range(len(layouts)), repeat=2):
        other = rebuilt(layouts[j])
        assert other is not layouts[j]
        assert (layouts[i] == other) == (i == j)
        assert (layouts[i] != other) == (i != j)
        if i == j:
            assert hash(layouts[i]) == hash(other)
    assert layouts[0] != "a layout"


def test_layouts_of_equal_parts_are_one_object() -> None:
    for layout in samples():
        other = rebuilt(layout)
        assert Layout.of(other.mesh, other.placements, other.shape, other.dtype, other.partitions) is layout
        spec, again = (Spec(x, contiguous_stride(layout.shape)) for x in (layout, other))
        assert spec == again and hash(spec) == hash(again) and spec != Spec(layout, (7,) * layout.ndim or (1,))
        assert Spec.of(layout, spec.stride) is Spec.of(layout, again.stride)


def test_kind_and_provenance_matter_to_specs_and_not_to_equality() -> None:
    dynamic = Partition.of_sizes([0], [2], (4, 1))
    base = Partition.of_sizes([0], [2], (4, 4))
    partitions = [
        dynamic,
        Partition.of_sizes([0], [2], (4, 1), "fixed"),
        dynamic.with_slice(base, 0, 1),
        dynamic.with_slice(base, 0, 1).with_provenance(provisional=True),
        dynamic.with_provenance(moved_from=base),
        dynamic.with_provenance(indexed_rows=base),
        dynamic.with_provenance(unpadded=(Partition.of_sizes([0], [2], (2, 1)), 1)),
    ]
    layouts = [Layout.of(MeshShape((2,)), [Shard(0)], (5, 2), torch.float32, [p, None]) for p in partitions]
    assert len(set(layouts)) == len(set(partitions)) == 1 == len({x.describe() for x in layouts})
    assert len({id(x) for x in layouts}) == len({Spec.of(x, (2, 1)) for x in layouts}) == len(partitions)
    for x in layouts:
        assert pickle.loads(pickle.dumps(x)) is x and pickle.loads(pickle.dumps(Spec.of(x, (2, 1)))).layout is x
    chunked = Layout.chunked(MeshShape((2,)), [Shard(0)], (8, 2), torch.float32)
    assert chunked == Layout.of(MeshShape((2,)), [Shard(0)], (8, 2), torch.float32, [base, None])


def test_interning_forgets_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[Layout.__module__]  # `shardcompile.sharding.layout`
    monkeypatch.setattr(module, "_INTERNED", {})
    monkeypatch.setattr(module, "_CACHE_LIMIT", 4)
    layouts = [Layout.chunked(MeshShape((2,)), [R], (n,), torch.float32) for n in range(9)]
    assert len(module._INTERNED) <= 4
    assert Layout.chunked(MeshShape((2,)), [R], (0,), torch.float32) == layouts[0]


def test_traced_layouts_compare_by_identity() -> None:
    def make() -> Layout:
        partition = Partition.traced([0], [2], 8, 7, 3)
        return Layout.of(MeshShape((2,)), [Shard(0)], (8,), torch.float32, [partition])

    module = sys.modules[Layout.__module__]
    before = len(module._INTERNED)
    a, b = make(), make()
    assert len(module._INTERNED) == before, "symbols must not outlive their trace"
    assert a.has_symbols and a == a and a != b and len({a, b}) == 2
    assert not samples()[0].has_symbols


@pytest.mark.parametrize("index", range(len(DESCRIPTIONS)), ids=DESCRIPTIONS.__getitem__)
def test_pickle_and_copies_give_the_same_object(index: int) -> None:
    layout = samples()[index]
    spec = Spec.of(layout, contiguous_stride(layout.shape))
    for value in (layout, spec):
        assert pickle.loads(pickle.dumps(value)) is value
        assert copy.deepcopy(value) is value and copy.copy(value) is value
    for partition in layout.partitions:
        assert pickle.loads(pickle.dumps(partition)) == partition
        assert copy.deepcopy(partition) == partition and hash(copy.deepcopy(partition)) == hash(partition)


def test_a_pickled_partition_brings_its_sizes_to_another_process(table: Callable[[int], None]) -> None:
    partition = Partition.of_sizes((0, 1), (2, 2), (1, 2, 3, 4))
    pickled = pickle.dumps([partition, partition.coarsen(), partition.flatten_trailing(3)])
    sizes_module._TABLE = sizes_module._SizeTable()  # as in a process that has not seen the partition
    for loaded in pickle.loads(pickled):
        ref = loaded.group_partition((1, 0))
        count = loaded.parts[-1]
        expected = tuple(loaded.local_size(_at((1, 0), loaded.mesh_dims[-1], i)) for i in range(count))
        assert GroupPartition.resolve(sum(expected), ref.sizes, ref.key, ref.grouping, count) == expected


def test_layouts_specs_and_partitions_cannot_be_changed() -> None:
    layout = samples()[0]
    spec = Spec.of(layout, (2, 1))
    for value in (layout, spec, layout.partitions[0], layout.mesh, layout.partition_of(0).group_partition((0,))):
        names = getattr(value, "__slots__", None) or vars(value)
        for name in [n for n in names if n != "__weakref__"]:
            before = getattr(value, name)
            with pytest.raises(AttributeError, match="cannot"):
                setattr(value, name, before)
            with pytest.raises(AttributeError, match="cannot"):
                delattr(value, name)
            assert getattr(value, name) is before
        with pytest.raises((AttributeError, TypeError)):
            value.something_else = 1  # type: ignore[union-attr]


def test_derived_layouts() -> None:
    partition = Partition.of_sizes([0], [2], (4, 1))
    layout = Layout.of(MeshShape((2, 3)), [Shard(0), P], (5, 2), torch.float32, [partition, None])
    assert layout.ndim == 2 and layout.nbytes == 40 and not layout.is_even and layout.partition_of(0) is partition
    assert layout.is_partial and not layout.is_replicated
    assert layout.with_dtype(torch.float32) is layout
    assert (
        layout.with_dtype(torch.float64).nbytes == 80
        and layout.with_dtype(torch.float64).partitions == layout.partitions
    )
    assert layout.reduced().placements == (Shard(0), R) and layout.reduced().partitions == layout.partitions
    assert layout.reduced().reduced() is layout.reduced()
    whole = layout.replicated()
    assert whole.is_replicated and whole.placements == (R, R) and whole.partitions == (None, None) and whole.is_even
    assert whole.local_shape((1, 2)) == (5, 2)
    with pytest.raises(LayoutError, match="tensor dim 1 is not sharded in f32"):
        layout.sizes(1)


@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 3), (2, 0, 3), (1, 1), (4, 2, 3, 1), (5, 0)])
def test_contiguous_stride_is_that_of_torch(shape: tuple[int, ...]) -> None:
    assert contiguous_stride(shape) == torch.empty(shape).stride()


# Texts


@pytest.mark.parametrize(
    "mesh, placements, partition, text",
    [
        (MeshShape((2,)), [Shard(0)], Partition.of_sizes([0], [2], (3, 5)), "f32[8, 2] 0: S(0)[3,5]"),
        (MeshShape((2,), ("dp",)), [Shard(0)], Partition.of_sizes([0], [2], (3, 5)), "f32[8, 2] dp: S(0)[3,5]"),
        (MeshShape((2,)), [Shard(0)], Partition.chunk([0], [2], 8), "f32[8, 2] 0: S(0)[4,4]"),
        (MeshShape((2, 2), ("a", "b")), [Partial("avg"), R], None, "f32[8, 2] a: P(avg), b: R"),
        (
            MeshShape((2, 2)),
            [Shard(0), Shard(0)],
            Partition.of_sizes([0, 1], [2, 2], (1, 2, 0, 5)),
            "f32[8, 2] 0: S(0), 1: S(0)[1,2,0,5]",
        ),
        (
            MeshShape((2, 2)),
            [Shard(0), Shard(0)],
            Partition.of_sizes([1, 0], [2, 2], (1, 2, 0, 5)),
            "f32[8, 2] 0: S(0)<1>[1,2,0,5], 1: S(0)<0>",
        ),
        (MeshShape((2,)), [Shard(0)], Partition.traced([0], [2], 8, 7, 3), "f32[8, 2] 0: S(0)[?]"),
    ],
)
def test_describe(mesh: MeshShape, placements: list[Placement], partition: Partition | None, text: str) -> None:
    layout = Layout.of(mesh, placements, (8, 2), torch.float32, [partition, None])
    assert layout.describe() == text
    assert repr(layout) == f"Layout({text})"


def test_describe_placements_and_dtypes() -> None:
    layout = samples()[9]
    assert layout.describe_placements() == "S(0)[4,1]"
    assert repr(Spec.of(layout, (2, 1))) == "Spec(f32[5, 2] 0: S(0)[4,1], stride=(2, 1))"
    names = [layout.with_dtype(d).describe().split("[")[0] for d in (torch.bfloat16, torch.int64, torch.bool)]
    assert names == ["bf16", "i64", "bool"]
    names = [layout.with_dtype(d).describe().split("[")[0] for d in (torch.complex64, torch.uint8, torch.float16)]
    assert names == ["c64", "u8", "f16"]


# Errors


def test_sizes_must_fit_the_mesh() -> None:
    with pytest.raises(LayoutError, match=r"mesh dims \(0, 1\) of sizes \(2, 2\) needs 4 shard sizes, got 3"):
        Partition.of_sizes([0, 1], [2, 2], (1, 2, 3))
    with pytest.raises(LayoutError, match=r"needs 2 shard sizes, got 0: \(\)"):
        Partition.of_sizes([0], [2], ())
    with pytest.raises(LayoutError, match=r"must not be negative, got \(3, -1\)"):
        Partition.of_sizes([0], [2], (3, -1))


@pytest.mark.parametrize(
    "placements, text",
    [
        ([R], r"a mesh of 2 dims needs as many placements, got 1: \[Replicate\(\)\]"),
        ([R, R, R], "a mesh of 2 dims needs as many placements, got 3"),
        ([Shard(3), R], r"S\(3\) is out of range for a tensor of 3 dims"),
        ([R, Shard(-4)], r"S\(-4\) is out of range for a tensor of 3 dims"),
        ([Partial("bxor"), R], "the reduction must be one of sum, avg, product, max, min"),
        ([_StridedShard(0, split_factor=2), Shard(0)], "_StridedShard.* is not supported; use Shard, Replicate or"),
        (["S(0)", R], r"placement 'S\(0\)' is not supported"),
        ([P, Partial("max")], r"mesh dims 0 and 1 .* do not commute"),
    ],
)
def test_placements_that_do_not_fit(placements: list[Placement], text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        normalize_placements(placements, MeshShape((2, 2)), 3)
    with pytest.raises(LayoutError, match=text):
        Layout.chunked(MeshShape((2, 2)), placements, (4, 4, 4), torch.float32)


def test_a_scalar_has_no_dim_to_shard() -> None:
    with pytest.raises(LayoutError, match="out of range for a tensor of 0 dims"):
        normalize_placements([Shard(0)], MeshShape((2,)), 0)


def test_placements_that_fit_come_back_normalised() -> None:
    mesh = MeshShape((2, 2))
    for reduce_op in ("sum", "avg", "product", "max", "min"):
        assert normalize_placements([Shard(-1), Partial(reduce_op)], mesh, 3) == (Shard(2), Partial(reduce_op))
    assert normalize_placements([Partial("avg"), P], mesh, 3) == (Partial("avg"), P)
    assert normalize_placements((Shard(0), R), mesh, 1) == (Shard(0), R)


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0, 0, 1, 1, 2, 3, 4, 6, 12])), min_size=1, max_size=5))
def test_dense_strides_are_those_of_empty_like(dims: list[tuple[int, int]]) -> None:
    shape, stride = zip(*dims, strict=True)
    expected = torch.empty(200).as_strided(shape, stride)
    told = zip(shape, dense_stride(shape, stride), torch.empty_like(expected).stride(), strict=True)
    assert all(n == 1 or a == b for n, a, b in told)
