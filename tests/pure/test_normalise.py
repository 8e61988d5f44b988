"""Chains for uneven shards, as DTensor emits them and as they are written by hand, of all ranks side by side."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from shardcompile.passes.foreign.normalise import NormaliseChains
from shardcompile.passes.foreign.padded_chains import EXCHANGE
from shardcompile.passes.graph.collective import WAIT
from tests.support.lockstep import (
    ALL_GATHER,
    REDUCE_SCATTER,
    Builder,
    World,
    apply,
    play,
    signatures,
    targets,
    world_of,
)

aten = torch.ops.aten
PAD, SLICE, CAT = aten.constant_pad_nd.default, aten.slice.Tensor, aten.cat.default

REST = {1: (), 2: (3,), 3: (2, 3)}
"""Sizes of the dims that are not sharded, by the number of dims."""

PARTITIONS = [(3, 0, 5), (3, 3, 1), (2, 2, 0), (1, 4, 2), (5, 1), (0, 2, 2, 1)]


def with_dim(rest: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*rest[:dim], size, *rest[dim:])


def padding(ndim: int, dim: int, by: int) -> list[int]:
    return [0] * (2 * (ndim - 1 - dim) + 1) + [by]


# How the payload of a gather is padded.


def by_pad(b: Builder, x: Node, dim: int, by: int, value: float = 0.0) -> Node:
    return b.call(PAD, x, padding(x.meta["val"].ndim, dim, by), value) if by else x


def by_cat(b: Builder, x: Node, dim: int, by: int) -> Node:
    shape = list(x.meta["val"].shape)
    shape[dim] = by
    return b.call(CAT, [x, b.call(aten.new_zeros.default, x, shape)], dim) if by else x


def by_rolling(b: Builder, x: Node, dim: int, by: int) -> Node:
    """So that nobody can see what was padded."""
    return b.call(aten.roll.default, by_pad(b, x, dim, by), [0], [dim])


# How the shards are taken out of what was gathered.


def stacked_shards(b: Builder, gathered: Node, dim: int, world: int) -> Node:
    """As torch does for a gather along another dim than the first."""
    if not dim:
        return gathered
    rows = gathered.meta["val"].shape[0] // world
    parts = b.call(aten.split.Tensor, gathered, rows)
    return b.call(CAT, [b.call(operator.getitem, parts, r) for r in range(world)], dim)


def by_slices(b: Builder, gathered: Node, dim: int, sizes: Sequence[int]) -> Node:
    whole, largest = stacked_shards(b, gathered, dim, len(sizes)), max(sizes)
    kept = [b.call(SLICE, whole, dim, r * largest, r * largest + n) for r, n in enumerate(sizes) if n]
    return b.call(CAT, kept, dim) if len(kept) > 1 else kept[0]


def by_split(b: Builder, gathered: Node, dim: int, sizes: Sequence[int]) -> Node:
    rows = gathered.meta["val"].shape[0] // len(sizes)
    parts = b.call(aten.split.Tensor, gathered, rows)
    shards = [b.call(operator.getitem, parts, r) for r in range(len(sizes))]
    return b.call(CAT, [b.call(SLICE, x, dim, 0, n) for x, n in zip(shards, sizes, strict=True)], dim)


def by_view(b: Builder, gathered: Node, dim: int, sizes: Sequence[int]) -> Node:
    shape = gathered.meta["val"].shape
    shards = b.call(aten.view.default, gathered, [len(sizes), shape[0] // len(sizes), *shape[1:]])
    parts = [b.call(aten.select.int, shards, 0, r) for r in range(len(sizes))]
    parts = [b.call(PAD, p, padding(len(shape), dim, n - max(sizes))) for p, n in zip(parts, sizes, strict=True)]
    return b.call(CAT, parts, dim)


def by_split_sizes(b: Builder, gathered: Node, dim: int, sizes: Sequence[int]) -> Node:
    whole, largest = stacked_shards(b, gathered, dim, len(sizes)), max(sizes)
    both = [n for size in sizes for n in (size, largest - size)]
    parts = b.call(aten.split_with_sizes.default, whole, both, dim)
    shards = [b.call(operator.getitem, parts, 2 * r) for r in range(len(sizes))]
    return b.call(aten.clone.default, b.call(CAT, shards, dim))


def by_tail(b: Builder, gathered: Node, dim: int, sizes: Sequence[int]) -> Node:
    """As DTensor does, whose padding is all at the end."""
    return b.call(SLICE, stacked_shards(b, gathered, dim, len(sizes)), dim, 0, sum(sizes))


TAKE = [by_slices, by_split, by_view, by_split_sizes]


def gather(
    world: World,
    sizes: Sequence[int],
    dim: int,
    rest: Sequence[int],
    pad: Callable[..., Node],
    take: Callable[..., Node],
) -> list[Graph]:
    graphs = []
    for rank in world.each():
        b = Builder()
        x = b.input(*with_dim(rest, dim, sizes[rank]))
        padded = pad(b, b.call(aten.neg.default, x), dim, max(sizes) - sizes[rank])
        whole = take(b, b.call(WAIT, b.done(ALL_GATHER, padded, len(sizes), "g")), dim, sizes)
        graphs.append(b.output(b.call(aten.mul.Tensor, whole, 2.0)))
    return graphs


def shards_of(sizes: Sequence[int], dim: int, rest: Sequence[int]) -> list[list[Tensor]]:
    whole = torch.randn(with_dim(rest, dim, sum(sizes)), dtype=torch.float64)
    return [[x] for x in whole.split(list(sizes), dim)]


def check(world: World, graphs: list[Graph], inputs: list[Any], **options: Any) -> list[list[str]]:
    """Normalise; values stay as they are, ranks agree. Returns every rank's collectives."""
    before = play(world, graphs, inputs)
    apply(world, NormaliseChains(**options), graphs)
    torch.testing.assert_close(play(world, graphs, inputs), before, rtol=0, atol=0)
    after = [signatures(g) for g in graphs]
    assert all(a == after[0] for a in after)
    return after


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("take", TAKE)
@pytest.mark.parametrize("sizes", PARTITIONS)
def test_a_padded_gather_becomes_one_of_shards(sizes: tuple[int, ...], take: Callable[..., Node], ndim: int) -> None:
    for dim in range(ndim):
        with world_of(len(sizes)) as world:
            graphs = gather(world, sizes, dim, REST[ndim], by_pad, take)
            after = check(world, graphs, shards_of(sizes, dim, REST[ndim]))
            assert [a.split()[0] for a in after[0]] == ["all_gather_v"]
            assert str(tuple(sizes)) in after[0][0]
            assert all(not {PAD, SLICE, CAT} & set(targets(g)) for g in graphs)


@pytest.mark.parametrize("sizes", [(3, 3, 1), (2, 2, 0), (4, 3)])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_padding_that_is_all_at_the_end(sizes: tuple[int, ...], dim: int) -> None:
    with world_of(len(sizes)) as world:
        graphs = gather(world, sizes, dim, (2, 3), by_pad, by_tail)
        assert "all_gather_v" in check(world, graphs, shards_of(sizes, dim, (2, 3)))[0][0]


@pytest.mark.parametrize("pad", [by_cat, by_rolling, lambda *a: by_pad(*a, value=7.0)])
def test_how_the_padding_was_made_does_not_matter(pad: Callable[..., Node]) -> None:
    with world_of(3) as world:
        graphs = gather(world, (3, 0, 5), 1, (2, 2), pad, by_slices)
        assert "all_gather_v" in check(world, graphs, shards_of((3, 0, 5), 1, (2, 2)))[0][0]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_partition(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 6), min_size=2, max_size=6).filter(lambda s: max(s) > 0))
    rest = data.draw(st.sampled_from(list(REST.values())))
    dim = data.draw(st.integers(0, len(rest)))
    pad, take = data.draw(st.sampled_from([by_pad, by_cat])), data.draw(st.sampled_from(TAKE))
    with world_of(len(sizes)) as world:
        after = check(world, gather(world, sizes, dim, rest, pad, take), shards_of(sizes, dim, rest))
        uneven = len(set(sizes)) > 1 and sum(n > 0 for n in sizes) > 1
        assert ("all_gather_v" in after[0][0]) == uneven


# What is left alone.

Reader = Callable[[Builder, Node, int], list[Node]]


def reads_padding(b: Builder, g: Node, rank: int) -> list[Node]:
    return [by_slices(b, g, 0, (3, 1)), b.call(aten.sum.default, g)]


def reads_all(b: Builder, g: Node, rank: int) -> list[Node]:
    return [b.call(CAT, [b.call(SLICE, g, 0, 0, 3), b.call(SLICE, g, 0, 3, 6)])]


def reads_own(b: Builder, g: Node, rank: int) -> list[Node]:
    return [b.call(SLICE, g, 0, 3 * rank, 3 * rank + 3)]


def reads_backwards(b: Builder, g: Node, rank: int) -> list[Node]:
    return [b.call(CAT, [b.call(SLICE, g, 0, 3, 4), b.call(SLICE, g, 0, 0, 3)])]


def reads_ends(b: Builder, g: Node, rank: int) -> list[Node]:
    return [b.call(CAT, [b.call(SLICE, g, 0, 0, 3), b.call(SLICE, g, 0, 5, 6)])]


def reads_other_columns(b: Builder, g: Node, rank: int) -> list[Node]:
    return [b.call(SLICE, by_slices(b, g, 0, (3, 1)), 1, rank, rank + 1)]


def reads_every_second(b: Builder, g: Node, rank: int) -> list[Node]:
    return [b.call(SLICE, g, 0, 0, 6, 2)]


def reads_two_partitions(b: Builder, g: Node, rank: int) -> list[Node]:
    return [by_slices(b, g, 0, (3, 1)), by_slices(b, g, 0, (1, 3))]


def writes(b: Builder, g: Node, rank: int) -> list[Node]:
    first = b.call(SLICE, g, 0, 0, 3)
    b.call(aten.mul_.Tensor, first, 2.0)
    return [b.call(CAT, [first, b.call(SLICE, g, 0, 3, 4)])]


@pytest.mark.parametrize(
    "read",
    [
        reads_padding,
        reads_all,
        reads_own,
        reads_backwards,
        reads_ends,
        reads_every_second,
        reads_two_partitions,
        writes,
    ],
)
def test_gathers_that_are_left_alone(read: Reader) -> None:
    with world_of(2) as world:
        for rank in world.each():
            b = Builder()
            g = b.done(ALL_GATHER, b.input(3, 2), 2, "g")
            graph = b.output(*read(b, g, rank))
            before = str(graph)
            NormaliseChains()(graph)
            assert str(graph) == before


def test_a_part_of_the_shards_may_be_read_of_them() -> None:
    with world_of(2) as world:
        graphs = []
        for rank in world.each():
            b = Builder()
            g = b.done(ALL_GATHER, b.input(3, 2), 2, "g")
            graphs.append(b.output(*reads_other_columns(b, g, rank)))
        after = check(world, graphs, [[torch.randn(3, 2).double()] for _ in range(2)])
        assert "all_gather_v g torch.float64 (3, 1)" in after[0][0]


def test_symbolic_sizes_are_left_alone() -> None:
    with world_of(2):
        b = Builder()
        b.mode.shape_env = ShapeEnv()
        x = b.graph.placeholder("x")
        x.meta["val"] = b.mode.from_tensor(torch.empty(3, 7), static_shapes=False)
        graph = b.output(by_slices(b, b.done(ALL_GATHER, x, 2, "g"), 0, (3, 1)))
        before = str(graph)
        NormaliseChains()(graph)
        assert str(graph) == before


def test_a_shard_that_changes_after_it_was_padded() -> None:
    with world_of(2) as world:
        graphs = []
        for rank in world.each():
            b = Builder()
            x = b.input((3, 1)[rank], 2)
            padded = by_pad(b, x, 0, (0, 2)[rank])
            if rank:
                b.call(aten.mul_.Tensor, x, 5.0)
            graphs.append(b.output(by_slices(b, b.done(ALL_GATHER, padded, 2, "g"), 0, (3, 1))))
        after = check(world, graphs, shards_of((3, 1), 0, (2,)))
        assert "all_gather_v" in after[0][0]
        assert PAD in targets(graphs[1])


def test_the_new_collective_says_where_it_comes_from() -> None:
    with world_of(2) as world:
        (graph, _) = gather(world, (3, 1), 0, (2,), by_pad, by_slices)
        (old,) = graph.find_nodes(op="call_function", target=ALL_GATHER)
        old.meta.update(stack_trace="line 7", partitioner_tag="is_backward")
        NormaliseChains()(graph)
        (new,) = graph.find_nodes(op="call_function", target=torch.ops.shardcompile.all_gather_v.default)
        assert new.meta["stack_trace"] == "line 7" and new.meta["partitioner_tag"] == "is_backward"


def test_chains_on_which_the_ranks_do_not_agree() -> None:
    seen: list[str] = []

    def none(lines: Sequence[str]) -> list[str]:
        seen.extend(lines)
        return []

    with world_of(2) as world:
        graphs = gather(world, (3, 1), 0, (2,), by_pad, by_slices)
        before = str(graphs[0])
        apply(world, NormaliseChains(agree=none), graphs)
        assert str(graphs[0]) == before
    assert seen == ["0: all_gather of group g along dim 0 as shards of (3, 1)"] * 2


def test_chains_that_follow_one_another() -> None:
    with world_of(3) as world:
        graphs = []
        for rank in world.each():
            b = Builder()
            x, sizes = b.input((3, 0, 2)[rank], 2), (3, 0, 2)
            for _ in range(3):
                whole = by_slices(b, b.done(ALL_GATHER, by_pad(b, x, 0, 3 - sizes[rank]), 3, "g"), 0, sizes)
                x = scattered(b, whole, 0, sizes, rank)
            graphs.append(b.output(x))
        after = check(world, graphs, shards_of((3, 0, 2), 0, (2,)))
        assert [a.split()[0] for a in after[0]] == ["all_gather_v", "reduce_scatter_v"] * 3
        assert all(PAD not in targets(g) for g in graphs)


# Exchanges.

EXCHANGED = [((3, 3, 1), (2, 2, 1)), ((3, 0, 5), (2, 2, 0)), ((2, 2, 2), (1, 1, 1)), ((1, 4), (3, 3)), ((2, 2), (1, 0))]
"""Shards before and after, these as of `torch.chunk`."""


def own_chunk(b: Builder, padded: Node, dim: int, to_dim: int, world: World) -> Node:
    """As DTensor does with gloo."""
    g = stacked_shards(b, b.done(ALL_GATHER, padded, world.ranks, "g"), dim, world.ranks)
    parts = b.call(aten.split.Tensor, g, g.meta["val"].shape[to_dim] // world.ranks, to_dim)
    return b.call(aten.clone.default, b.call(operator.getitem, parts, world.here))


def own_narrowed(b: Builder, padded: Node, dim: int, to_dim: int, world: World) -> Node:
    g = stacked_shards(b, b.done(ALL_GATHER, padded, world.ranks, "g"), dim, world.ranks)
    width = g.meta["val"].shape[to_dim] // world.ranks
    return b.call(SLICE, g, to_dim, world.here * width, (world.here + 1) * width)


def by_exchange(b: Builder, padded: Node, dim: int, to_dim: int, world: World) -> Node:
    """As DTensor does with NCCL."""
    with b.mode:
        parts = torch.cat([padded.meta["val"]] * world.ranks, dim).chunk(world.ranks, to_dim)
    node = b.graph.call_function(EXCHANGE, (padded, dim, to_dim, "g"))
    node.meta["val"] = parts[world.here]
    return node


def exchange(
    world: World, sizes: Sequence[int], to_sizes: Sequence[int], dims: tuple[int, int], take: Callable[..., Node]
) -> list[Graph]:
    dim, to_dim = dims
    graphs = []
    for rank in world.each():
        b = Builder()
        shape = [2, 2, 2]
        shape[dim], shape[to_dim] = sizes[rank], sum(to_sizes)
        x = b.call(aten.neg.default, b.input(*shape))
        padded = by_pad(b, x, dim, max(sizes) - sizes[rank])
        padded = by_pad(b, padded, to_dim, len(sizes) * max(to_sizes) - sum(to_sizes))
        own = take(b, padded, dim, to_dim, world)
        if len(set(sizes)) > 1:
            starts = [r * max(sizes) for r in range(len(sizes))]
            shards = [b.call(SLICE, own, dim, at, at + n) for at, n in zip(starts, sizes, strict=True) if n]
            own = b.call(CAT, shards, dim)
        if to_sizes[rank] < max(to_sizes):
            own = b.call(SLICE, own, to_dim, 0, to_sizes[rank])
        graphs.append(b.output(b.call(aten.mul.Tensor, own, 2.0)))
    return graphs


@pytest.mark.parametrize("take", [own_chunk, own_narrowed, by_exchange])
@pytest.mark.parametrize(("sizes", "to_sizes"), EXCHANGED)
def test_an_exchange_moves_what_changes_its_place(
    sizes: tuple[int, ...], to_sizes: tuple[int, ...], take: Callable[..., Node]
) -> None:
    for dim, to_dim in [(0, 1), (1, 0), (2, 0), (1, 2), (0, 2), (2, 1)]:
        with world_of(len(sizes)) as world:
            graphs = exchange(world, sizes, to_sizes, (dim, to_dim), take)
            rest = [2, 2, 2]
            rest[to_dim] = sum(to_sizes)
            del rest[dim]
            after = check(world, graphs, shards_of(sizes, dim, rest), agree=list)
            assert [a.split()[0] for a in after[0]] == ["all_to_all_v"]
            assert all(not {PAD, SLICE, CAT, EXCHANGE} & set(targets(g)) for g in graphs)
            for graph in graphs:
                (node,) = graph.find_nodes(op="call_function", target=torch.ops.shardcompile.all_to_all_v.default)
                assert tuple(node.args[5]) == sizes and tuple(node.args[8]) == to_sizes


def test_who_reads_the_padding_of_an_exchange_gets_zeros() -> None:
    with world_of(3) as world:
        graphs = []
        for _ in world.each():
            b = Builder()
            own = own_chunk(b, by_pad(b, b.input(2, 4), 1, 2), 0, 1, world)
            graphs.append(b.output(b.call(aten.neg.default, own)))
        after = check(world, graphs, [[torch.randn(2, 4).double()] for _ in range(3)], agree=list)
        assert "all_to_all_v" in after[0][0]
        assert [PAD in targets(g) for g in graphs] == [False, False, True]


def test_padding_that_is_not_zeros_is_exchanged() -> None:
    with world_of(2) as world:
        graphs = []
        for rank in world.each():
            b = Builder()
            padded = by_pad(b, by_pad(b, b.input((2, 1)[rank], 3), 0, rank), 1, 1, value=7.0)
            own = own_narrowed(b, padded, 0, 1, world)
            graphs.append(b.output(b.call(SLICE, own, 0, 0, 3)))
        after = check(world, graphs, shards_of((2, 1), 0, (3,)), agree=list)
        assert "all_to_all_v g torch.float64 (2, 1)" in after[0][0]
        (node,) = graphs[0].find_nodes(op="call_function", target=torch.ops.shardcompile.all_to_all_v.default)
        assert node.args[8] == [2, 2]


@pytest.mark.parametrize("value", [0.0, 7.0])
def test_padding_of_shards_is_never_exchanged(value: float) -> None:
    """Whatever it is, and though the rank of the largest shard has none."""
    with world_of(2) as world:
        graphs = []
        for rank in world.each():
            b = Builder()
            padded = by_pad(b, by_pad(b, b.input((2, 1)[rank], 3), 1, 1), 0, rank, value)
            own = b.call(SLICE, by_exchange(b, padded, 0, 1, world), 0, 0, 3)
            graphs.append(b.output(b.call(SLICE, own, 1, 0, (2, 1)[rank])))
        after = check(world, graphs, shards_of((2, 1), 0, (3,)))
        assert "all_to_all_v g torch.float64 (2, 1)" in after[0][0]
        for graph in graphs:
            (node,) = graph.find_nodes(op="call_function", target=torch.ops.shardcompile.all_to_all_v.default)
            assert node.args[8] == [2, 1] and PAD not in targets(graph)


def test_an_exchange_that_is_written_to_is_left_alone() -> None:
    with world_of(2) as world:
        graphs = []
        for _ in world.each():
            b = Builder()
            own = own_narrowed(b, b.input(2, 4), 0, 1, world)
            kept = b.call(aten.clone.default, own)
            b.call(aten.mul_.Tensor, own, 2.0)
            graphs.append(b.output(kept, own))
        after = check(world, graphs, [[torch.randn(2, 4).double()] for _ in range(2)], agree=list)
        assert "all_gather g" in after[0][0]


def test_one_rank_s_turn_says_nothing_of_the_others() -> None:
    """All ranks take the first columns, which are those of rank 0."""

    def program(world: World) -> list[Graph]:
        graphs = []
        for rank in world.each():
            b = Builder()
            g = b.done(ALL_GATHER, by_pad(b, b.input((3, 1)[rank], 2), 0, (0, 2)[rank]), 2, "g")
            graphs.append(b.output(b.call(SLICE, by_slices(b, g, 0, (3, 1)), 1, 0, 1)))
        return graphs

    offered: list[list[str]] = []

    def of_both(lines: Sequence[str]) -> list[str]:
        return [line for line in lines if all(line in one for one in offered)]

    with world_of(2) as world:
        graphs = program(world)
        apply(world, NormaliseChains(agree=lambda lines: offered.append(list(lines)) or []), graphs)
        assert [len(one) for one in offered] == [2, 1]
        after = check(world, graphs, shards_of((3, 1), 0, (2,)), agree=of_both)
        assert "all_gather_v g torch.float64 (3, 1)" in after[0][0]
        # Nobody to ask: what a rank alone believes is not done.
        assert "all_gather_v" in check(world, program(world), shards_of((3, 1), 0, (2,)))[0][0]


# Scatters.


def padded_parts(b: Builder, x: Node, dim: int, sizes: Sequence[int], value: float = 0.0) -> Node:
    """As DTensor does, and as is natural by hand: all parts padded, one after the other along dim 0."""
    parts = b.call(aten.split_with_sizes.default, x, list(sizes), dim)
    largest = max(sizes)
    padded = [by_pad(b, b.call(operator.getitem, parts, r), dim, largest - n, value) for r, n in enumerate(sizes)]
    if not dim:
        return b.call(CAT, padded)
    again = b.call(aten.split.Tensor, b.call(CAT, padded, dim), largest, dim)
    return b.call(CAT, [b.call(operator.getitem, again, r) for r in range(len(sizes))])


def added_parts(b: Builder, x: Node, dim: int, sizes: Sequence[int], value: float = 0.0) -> Node:
    """As the gradient of a gather with slices comes out."""
    largest, shape = max(sizes), list(x.meta["val"].shape)
    shape[0] = largest * len(sizes)
    total = None
    for r, n in enumerate(sizes):
        first = sum(sizes[:r])
        zeros = b.graph.call_function(aten.full.default, (shape, 0), {"dtype": torch.float64})
        with b.mode:
            zeros.meta["val"] = torch.zeros(shape, dtype=torch.float64)
        part = b.call(SLICE, x, 0, first, first + n)
        placed = b.call(aten.slice_scatter.default, zeros, part, 0, r * largest, r * largest + n)
        total = placed if total is None else b.call(aten.add.Tensor, total, placed)
    assert total is not None
    return total


def scattered(
    b: Builder, x: Node, dim: int, sizes: Sequence[int], rank: int, pad: Callable[..., Node] = padded_parts, **kw: Any
) -> Node:
    result = b.done(REDUCE_SCATTER, pad(b, x, dim, sizes, **kw), "sum", len(sizes), "g")
    return b.call(SLICE, result, dim, 0, sizes[rank]) if sizes[rank] < max(sizes) else result


def scatter(world: World, sizes: Sequence[int], dim: int, rest: Sequence[int], **kw: Any) -> list[Graph]:
    graphs = []
    for rank in world.each():
        b = Builder()
        x = b.input(*with_dim(rest, dim, sum(sizes)))
        own = scattered(b, b.call(aten.neg.default, x), dim, sizes, rank, **kw)
        graphs.append(b.output(b.call(aten.mul.Tensor, own, 2.0)))
    return graphs


def terms_of(sizes: Sequence[int], dim: int, rest: Sequence[int]) -> list[list[Tensor]]:
    """Integers, of which sums are exact in any order."""
    shape = with_dim(rest, dim, sum(sizes))
    return [[torch.randint(-9, 9, shape).double()] for _ in sizes]


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("sizes", PARTITIONS)
def test_a_padded_scatter_becomes_one_of_shards(sizes: tuple[int, ...], ndim: int) -> None:
    for dim in range(ndim):
        with world_of(len(sizes)) as world:
            graphs = scatter(world, sizes, dim, REST[ndim])
            after = check(world, graphs, terms_of(sizes, dim, REST[ndim]))
            assert [a.split()[0] for a in after[0]] == ["reduce_scatter_v"]
            assert str(tuple(sizes)) in after[0][0]
            assert all(not {PAD, SLICE, CAT} & set(targets(g)) for g in graphs)


@pytest.mark.parametrize("sizes", PARTITIONS)
def test_the_gradient_of_a_gather_with_slices(sizes: tuple[int, ...]) -> None:
    with world_of(len(sizes)) as world:
        graphs = scatter(world, sizes, 0, (2,), pad=added_parts)
        assert "reduce_scatter_v" in check(world, graphs, terms_of(sizes, 0, (2,)))[0][0]


def test_who_reads_the_padding_of_a_scatter_gets_zeros() -> None:
    sizes = (1, 3, 0)
    with world_of(3) as world:
        graphs = []
        for rank in world.each():
            b = Builder()
            padded = padded_parts(b, b.input(2, 4), 1, sizes)
            result = b.done(REDUCE_SCATTER, padded, "avg", 3, "g")
            graphs.append(b.output(b.call(aten.neg.default, result), b.call(SLICE, result, 1, 0, sizes[rank])))
        assert "reduce_scatter_v" in check(world, graphs, terms_of(sizes, 1, (2,)))[0][0]


def test_scatters_that_are_left_alone() -> None:
    with world_of(2) as world:
        even = scatter(world, (2, 2), 0, (2,))
        ones = scatter(world, (3, 1), 0, (2,), value=1.0)
        off = scatter(world, (3, 1), 0, (2,))
        for graphs, options in ((even, {}), (ones, {}), (off, {"scatters": False})):
            before = [str(g) for g in graphs]
            apply(world, NormaliseChains(**options), graphs)
            assert [str(g) for g in graphs] == before


def test_scatters_in_another_order_are_left_alone() -> None:
    with world_of(2):
        b = Builder()
        parts = b.call(aten.split_with_sizes.default, b.input(4, 2), [1, 3])
        first, second = (b.call(operator.getitem, parts, r) for r in range(2))
        graph = b.output(b.done(REDUCE_SCATTER, b.call(CAT, [second, by_pad(b, first, 0, 2)]), "sum", 2, "g"))
        before = str(graph)
        NormaliseChains()(graph)
        assert str(graph) == before


def test_many_ranks_take_little_time() -> None:
    import time

    sizes = [r % 7 for r in range(512)]
    with world_of(len(sizes)) as world:
        world.here = 5
        b = Builder()
        whole = by_slices(b, b.done(ALL_GATHER, by_pad(b, b.input(5, 2), 0, 1), len(sizes), "g"), 0, sizes)
        graph = b.output(b.done(REDUCE_SCATTER, padded_parts(b, whole, 0, sizes), "sum", len(sizes), "g"))
        start = time.perf_counter()
        NormaliseChains()(graph)
        assert time.perf_counter() - start < 5
        assert len(signatures(graph)) == 2 and PAD not in targets(graph)[:-1]
