"""Communication that is dropped, and communication that is not, in graphs of all ranks side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from shardcompile.compat import DEAD_EXCHANGE
from shardcompile.passes.cleanup.dead_collectives import DropDeadCollectives, DropRepeatedWaits, ShareEqualCollectives
from shardcompile.passes.cleanup.inverse_pairs import CancelInversePairs, DropOwnSlice
from shardcompile.passes.cleanup.local_shards import ReduceThenSlice, SpreadLocalShard
from shardcompile.passes.graph.collective import WAIT
from tests.support.lockstep import ALL_GATHER, ALL_REDUCE, Builder, World, apply, play, signatures, targets, world_of

aten, ours = torch.ops.aten, torch.ops.shardcompile
TAKE, PLACE = ours.take_shard.default, ours.place_shard.default
A, B = (3, 0, 2), (1, 2, 2)
"""Two partitions of five rows."""


def shaped(b: Builder, flat: Node, dim: int, shape: Sequence[int]) -> Node:
    """What `Pending.wait` leaves in a graph."""
    rows = [shape[dim], *shape[:dim], *shape[dim + 1 :]]
    x = b.call(aten.view.default, b.call(WAIT, flat), rows)
    return b.call(aten.permute.default, x, [*range(1, dim + 1), 0, *range(dim + 1, len(shape))]) if dim else x


def gathered(b: Builder, x: Node, dim: int, sizes: Sequence[int] = A, group: str = "g") -> Node:
    shape = [sum(sizes) if d == dim else s for d, s in enumerate(x.meta["val"].shape)]
    return shaped(b, b.call(ours.all_gather_v.default, x, dim, sum(sizes), list(sizes), 0, [], group), dim, shape)


def taken(b: Builder, x: Node, dim: int, rank: int, sizes: Sequence[int] = A, group: str = "g") -> Node:
    return b.call(TAKE, x, dim, sizes[rank], list(sizes), 0, [], group)


def graphs_of(world: World, write: Callable[[Builder, int], Sequence[Node]]) -> list[Graph]:
    graphs = []
    for rank in world.each():
        b = Builder()
        graphs.append(b.output(*write(b, rank)))
    return graphs


def inputs_of(graphs: Sequence[Graph]) -> list[list[Tensor]]:
    """Integers, of which sums are exact in any order."""
    return [
        [torch.randint(-9, 9, n.meta["val"].shape).to(n.meta["val"].dtype) for n in g.find_nodes(op="placeholder")]
        for g in graphs
    ]


def kinds(graph: Graph) -> list[str]:
    return [s.split()[0] for s in signatures(graph)]


def check(
    graph_pass: Any, write: Callable[[Builder, int], Sequence[Node]], tolerance: float = 0.0
) -> tuple[list[str], list[Graph]]:
    """Clean up; values stay as they are, ranks agree. Returns the kinds of the collectives, and the graphs."""
    with world_of(3) as world:
        graphs = graphs_of(world, write)
        inputs = inputs_of(graphs)
        before = play(world, graphs, inputs)
        apply(world, graph_pass, graphs)
        torch.testing.assert_close(play(world, graphs, inputs), before, rtol=tolerance, atol=tolerance)
        after = [signatures(g) for g in graphs]
        assert all(a == after[0] for a in after)
        return kinds(graphs[0]), graphs


def check_untouched(graph_pass: Any, write: Callable[[Builder, int], Sequence[Node]]) -> None:
    with world_of(3) as world:
        graphs = graphs_of(world, write)
        before = [str(g) for g in graphs]
        apply(world, graph_pass, graphs)
        assert [str(g) for g in graphs] == before


# Rows that are fetched elsewhere.


def test_what_is_superseded_goes_if_nobody_reads_it() -> None:
    def write(b: Builder, rank: int) -> list[Node]:
        x = b.input(A[rank], 2)
        numbers = gathered(b, b.call(aten.neg.default, x), 0)
        unread = gathered(b, b.call(aten.add.Tensor, x, b.call(aten.sum.default, numbers)), 0)
        read = gathered(b, x, 0)
        for node in b.graph.nodes:
            if node.target is WAIT:
                node.meta[DEAD_EXCHANGE] = True
        b.call(aten.cos.default, unread)
        gathered(b, b.call(aten.exp.default, x), 0)  # of this one nobody has said so
        return [b.call(aten.sin.default, read)]

    assert check(DropDeadCollectives(), write)[0] == ["all_gather_v"] * 2


# Equal collectives.


def test_equal_gathers_are_one() -> None:
    def write(b: Builder, rank: int) -> list[Node]:
        x = b.input(A[rank], 2)
        other = b.call(aten.clone.default, b.call(aten.view.default, x, [A[rank], 2]))
        again = b.call(aten.clone.default, b.call(aten.view.default, x, [A[rank], 2]))
        wholes = [gathered(b, y, 0) for y in (x, other, x, again)]
        return [b.call(aten.sin.default, w) for w in wholes]

    assert check(ShareEqualCollectives(), write)[0] == ["all_gather_v"] * 2


def test_chains_of_equal_collectives_are_one_chain() -> None:
    def write(b: Builder, rank: int) -> list[Node]:
        x = b.input(A[rank], 2)
        sums = [b.done(ALL_REDUCE, gathered(b, x, 0), "sum", "g") for _ in range(2)]
        return [b.call(aten.sin.default, s) for s in sums]

    assert check(ShareEqualCollectives(), write)[0] == ["all_gather_v", "all_reduce"]


def test_results_that_leave_the_graph_stay_separate() -> None:
    def write(b: Builder, rank: int) -> list[Node]:
        x = b.input(4)
        return [b.done(ALL_REDUCE, x, "sum", "g"), b.call(aten.view.default, b.done(ALL_REDUCE, x, "sum", "g"), [2, 2])]

    left, graphs = check(ShareEqualCollectives(), write)
    assert left == ["all_reduce"]
    assert aten.clone.default in targets(graphs[0])


def test_a_result_that_is_written_to_stays_separate() -> None:
    def write(b: Builder, rank: int) -> list[Node]:
        x = b.input(4)
        first, second = (b.done(ALL_REDUCE, x, "sum", "g") for _ in range(2))
        b.call(aten.mul_.Tensor, second, 2.0)
        return [b.call(aten.neg.default, first), b.call(aten.neg.default, second)]

    assert check(ShareEqualCollectives(), write)[0] == ["all_reduce"]


def shares_nothing_when_payload_is_written(b: Builder, rank: int) -> list[Node]:
    x = b.input(4)
    first = b.done(ALL_REDUCE, x, "sum", "g")
    b.call(aten.mul_.Tensor, x, 2.0)
    return [b.call(aten.neg.default, first), b.call(aten.neg.default, b.done(ALL_REDUCE, x, "sum", "g"))]


def shares_nothing_when_result_is_written(b: Builder, rank: int) -> list[Node]:
    x = b.input(4)
    first, second = (b.done(ALL_REDUCE, x, "sum", "g") for _ in range(2))
    b.call(aten.mul_.Tensor, b.call(aten.view.default, first, [2, 2]), 2.0)
    return [b.call(aten.neg.default, first), b.call(aten.neg.default, second)]


def shares_nothing_of_other_arguments(b: Builder, rank: int) -> list[Node]:
    x = b.input(4)
    return [b.done(ALL_REDUCE, x, "sum", "g"), b.done(ALL_REDUCE, x, "sum", "h"), b.done(ALL_REDUCE, x, "avg", "g")]


@pytest.mark.parametrize(
    "write",
    [
        shares_nothing_when_payload_is_written,
        shares_nothing_when_result_is_written,
        shares_nothing_of_other_arguments,
    ],
)
def test_collectives_that_are_not_shared(write: Any) -> None:
    check_untouched(ShareEqualCollectives(), write)


def test_a_constant_of_this_rank_says_nothing_about_the_others() -> None:
    with world_of(3):
        b = Builder()
        b.input(4)
        zeros = b.graph.call_function(aten.full.default, ([0, 4], 0.0))
        with b.mode:
            zeros.meta["val"] = torch.zeros(0, 4)
        graph = b.output(*(b.call(aten.neg.default, gathered(b, zeros, 0)) for _ in range(2)))
        before = str(graph)
        ShareEqualCollectives()(graph)
        assert str(graph) == before


# Waits.


def test_a_size_is_known_by_its_value() -> None:
    """Ranks may write a size by one node or by several, as torch's fake kernels have it."""
    with world_of(3):
        b = Builder()
        b.mode.shape_env = ShapeEnv()
        x = b.graph.placeholder("x")
        x.meta["val"] = b.mode.from_tensor(torch.empty(7, 3), static_shapes=False)
        rows, columns, again = (b.call(aten.sym_size.int, x, d) for d in (0, 1, 0))
        payloads = [b.call(aten.view.default, x, [columns, n]) for n in (rows, again)]
        graph = b.output(*[b.call(aten.sin.default, b.done(ALL_REDUCE, p, "sum", "g")) for p in payloads])
        ShareEqualCollectives()(graph)
        assert kinds(graph) == ["all_reduce"]


def test_repeated_waits_are_dropped() -> None:
    def write(b: Builder, rank: int) -> list[Node]:
        start = b.call(ALL_REDUCE, b.input(4), "sum", "g")
        first, second = b.call(WAIT, start), b.call(WAIT, start)
        return [b.call(aten.neg.default, b.call(WAIT, second)), first]

    left, graphs = check(DropRepeatedWaits(), write)
    assert left == ["all_reduce"]
    assert targets(graphs[0]).count(WAIT) == 1


def test_the_only_wait_stays_though_nobody_reads_it() -> None:
    def write(b: Builder, rank: int) -> list[Node]:
        x = b.input(4)
        b.done(ALL_REDUCE, x, "sum", "g")
        return [x]

    for graph_pass in (
        DropRepeatedWaits(),
        ShareEqualCollectives(),
        DropOwnSlice(),
        CancelInversePairs(),
        ReduceThenSlice(),
    ):
        check_untouched(graph_pass, write)


# The local shard of what was gathered.


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_the_own_shard_is_not_gathered(ndim: int) -> None:
    for dim in range(ndim):

        def write(b: Builder, rank: int, dim: int = dim) -> list[Node]:
            x = b.input(*(A[rank] if d == dim else 2 for d in range(ndim)))
            return [taken(b, b.call(aten.clone.default, gathered(b, x, dim)), dim, rank)]

        left, graphs = check(DropOwnSlice(), write)
        assert left == []
        assert set(targets(graphs[0])) == {aten.clone.default}


def test_a_gather_that_is_read_in_full_as_well_stays() -> None:
    def write(b: Builder, rank: int) -> list[Node]:
        whole = gathered(b, b.input(A[rank], 2), 0)
        return [b.call(aten.sum.default, whole), taken(b, whole, 0, rank)]

    left, graphs = check(DropOwnSlice(), write)
    assert left == ["all_gather_v"]
    assert TAKE not in targets(graphs[0])


def test_the_shard_is_that_of_the_time_it_was_gathered() -> None:
    def write(b: Builder, rank: int) -> list[Node]:
        x = b.input(A[rank], 2)
        whole = gathered(b, x, 0)
        b.call(aten.mul_.Tensor, x, 2.0)
        return [taken(b, whole, 0, rank)]

    assert check(DropOwnSlice(), write)[0] == []


def takes_another_partition(b: Builder, rank: int) -> list[Node]:
    return [taken(b, gathered(b, b.input(A[rank], 2), 0), 0, rank, B)]


def takes_another_dim(b: Builder, rank: int) -> list[Node]:
    return [taken(b, gathered(b, b.input(A[rank], 5), 0), 1, rank)]


def takes_in_another_group(b: Builder, rank: int) -> list[Node]:
    return [taken(b, gathered(b, b.input(A[rank], 2), 0), 0, rank, group="h")]


def takes_with_numbers(b: Builder, rank: int) -> list[Node]:
    first = sum(A[:rank])
    return [b.call(aten.slice.Tensor, gathered(b, b.input(A[rank], 2), 0), 0, first, first + A[rank])]


def takes_of_the_flat_result(b: Builder, rank: int) -> list[Node]:
    flat = b.done(ours.all_gather_v.default, b.input(A[rank], 2), 0, 5, list(A), 0, [], "g")
    return [taken(b, b.call(aten.view.default, flat, [5, 2, 1]), 0, rank)]


@pytest.mark.parametrize(
    "write",
    [takes_another_partition, takes_another_dim, takes_in_another_group, takes_with_numbers, takes_of_the_flat_result],
)
def test_shards_that_are_not_the_own_one(write: Any) -> None:
    check_untouched(DropOwnSlice(), write)


# Round trips.


def exchanged(b: Builder, x: Node, src: int, dst: int, rank: int, partitions: Sequence[Any] = (A, B)) -> Node:
    src_sizes, dst_sizes = partitions
    shape = list(x.meta["val"].shape)
    shape[src], shape[dst] = sum(src_sizes), dst_sizes[rank]
    args = (src, dst, sum(src_sizes), dst_sizes[rank], list(src_sizes), 0, [], list(dst_sizes), 0, [], "g")
    return shaped(b, b.call(ours.all_to_all_v.default, x, *args), src, shape)


def fetched(b: Builder, x: Node, dim: int, rank: int, partitions: Sequence[Any] = (A, B), halo: int = 0) -> Node:
    src_sizes, dst_sizes = partitions
    shape = list(x.meta["val"].shape)
    shape[dim] = dst_sizes[rank]
    args = (
        dim,
        5,
        dst_sizes[rank],
        list(src_sizes),
        0,
        [],
        list(dst_sizes),
        0,
        [],
        [5, 1, 1, halo, 0] if halo else [],
        None,
        "g",
    )
    return shaped(b, b.call(ours.fetch_ranges.default, x, *args), dim, shape)


def mirrored(b: Builder, x: Node, dim: int, rank: int, sizes: Sequence[int]) -> Node:
    shape = list(x.meta["val"].shape)
    shape[dim] = sizes[2 - rank]
    return shaped(b, b.call(ours.reflect_shards.default, x, dim, shape[dim], "g"), dim, shape)


def rolled(b: Builder, x: Node, dim: int, rank: int, sizes: Sequence[int], shift: int) -> Node:
    shape = list(x.meta["val"].shape)
    args = (dim, shift, -shift, sum(sizes), sizes[rank], list(sizes), 0, [], "g")
    return shaped(b, b.call(ours.fetch_around.default, x, *args), dim, shape)


@pytest.mark.parametrize("dims", [(0, 1), (1, 0), (1, 2), (2, 0)])
def test_an_exchange_and_its_inverse_cancel(dims: tuple[int, int]) -> None:
    src, dst = dims

    def write(b: Builder, rank: int) -> list[Node]:
        x = b.input(*({src: A[rank], dst: 5}.get(d, 2) for d in range(3)))
        there = exchanged(b, x, src, dst, rank)
        return [b.call(aten.neg.default, exchanged(b, there, dst, src, rank, (B, A)))]

    left, graphs = check(CancelInversePairs(), write)
    assert left == []
    assert set(targets(graphs[0])) == {aten.clone.default, aten.neg.default}


@pytest.mark.parametrize("dim", [0, 1])
def test_fetches_mirrors_and_rolls_cancel(dim: int) -> None:
    def write(b: Builder, rank: int) -> list[Node]:
        x = b.input(*(A[rank] if d == dim else 2 for d in range(2)))
        back = fetched(b, fetched(b, x, dim, rank), dim, rank, (B, A))
        again = mirrored(b, mirrored(b, x, dim, rank, A), dim, rank, A[::-1])
        return [back, again, rolled(b, rolled(b, x, dim, rank, A, 2), dim, rank, A, -2)]

    assert check(CancelInversePairs(), write)[0] == []


def test_a_tensor_that_goes_to_and_fro_is_moved_once() -> None:
    def write(b: Builder, rank: int) -> list[Node]:
        x = b.input(A[rank])
        for _ in range(2):
            x = fetched(b, fetched(b, x, 0, rank), 0, rank, (B, A))
        return [fetched(b, x, 0, rank)]

    assert check(CancelInversePairs(), write)[0] == ["fetch_ranges"]


def test_what_is_read_on_the_way_stays() -> None:
    def write(b: Builder, rank: int) -> list[Node]:
        x = b.input(A[rank], 2)
        there = fetched(b, x, 0, rank)
        b.call(aten.mul_.Tensor, x, 2.0)
        return [b.call(aten.neg.default, there), fetched(b, there, 0, rank, (B, A))]

    assert check(CancelInversePairs(), write)[0] == ["fetch_ranges"]


def test_a_shard_that_is_placed_and_taken() -> None:
    def write(b: Builder, rank: int) -> list[Node]:
        placed = b.call(PLACE, b.input(A[rank], 2), 0, 5, list(A), 0, [], "g")
        return [taken(b, placed, 0, rank)]

    assert set(targets(check(CancelInversePairs(), write)[1][0])) == {aten.clone.default}


def placed_and_added(b: Builder, rank: int) -> list[Node]:
    placed = b.call(PLACE, b.input(A[rank], 2), 0, 5, list(A), 0, [], "g")
    return [taken(b, b.done(ALL_REDUCE, placed, "sum", "g"), 0, rank)]


def fetched_with_a_halo(b: Builder, rank: int) -> list[Node]:
    back = fetched(b, fetched(b, b.input(A[rank]), 0, rank, halo=1), 0, rank, (B, A), halo=1)
    return [back]


def fetched_elsewhere(b: Builder, rank: int) -> list[Node]:
    return [fetched(b, fetched(b, b.input(A[rank]), 0, rank), 0, rank, (B, (5, 0, 0)))]


def rolled_on(b: Builder, rank: int) -> list[Node]:
    return [rolled(b, rolled(b, b.input(A[rank]), 0, rank, A, 2), 0, rank, A, -1)]


@pytest.mark.parametrize("write", [placed_and_added, fetched_with_a_halo, fetched_elsewhere, rolled_on])
def test_journeys_that_are_no_round_trips(write: Any) -> None:
    check_untouched(CancelInversePairs(), write)


# The local shard of a sum.


def summed(b: Builder, x: Node, op: str = "sum") -> Node:
    """As the library does: flat."""
    shape = list(x.meta["val"].shape)
    flat = b.call(aten.view.default, x, [-1]) if len(shape) > 1 else x
    reduced = b.done(ALL_REDUCE, flat, op, "g")
    return b.call(aten.view.default, reduced, shape) if len(shape) > 1 else reduced


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_the_own_shard_of_a_sum_is_scattered(ndim: int, op: str) -> None:
    for dim in range(ndim):

        def write(b: Builder, rank: int, dim: int = dim) -> list[Node]:
            whole = summed(b, b.input(*(5 if d == dim else 2 for d in range(ndim))), op)
            return [taken(b, whole, dim, rank), b.call(aten.neg.default, taken(b, whole, dim, rank))]

        # Sums of three terms in another order: an ulp or two.
        assert check(ReduceThenSlice(), write, tolerance=1e-15)[0] == ["reduce_scatter_v"]


def reads_the_sum(b: Builder, rank: int) -> list[Node]:
    whole = summed(b, b.input(5, 2))
    return [taken(b, whole, 0, rank), b.call(aten.sin.default, whole)]


def takes_two_partitions(b: Builder, rank: int) -> list[Node]:
    whole = summed(b, b.input(5, 2))
    return [taken(b, whole, 0, rank), taken(b, whole, 0, rank, B)]


def takes_of_another_group(b: Builder, rank: int) -> list[Node]:
    return [taken(b, summed(b, b.input(5, 2)), 0, rank, group="h")]


def takes_a_maximum(b: Builder, rank: int) -> list[Node]:
    return [taken(b, b.done(ALL_REDUCE, b.input(5), "max", "g"), 0, rank)]


@pytest.mark.parametrize("write", [reads_the_sum, takes_two_partitions, takes_of_another_group, takes_a_maximum])
def test_sums_that_are_not_scattered(write: Any) -> None:
    check_untouched(ReduceThenSlice(), write)


@pytest.mark.parametrize("dim", [0, 1])
def test_the_own_shard_of_what_is_spread_is_spread_alone(dim: int) -> None:
    def write(b: Builder, rank: int) -> list[Node]:
        row, column = b.input(1, 5) if dim else b.input(5), b.input(5, 1) if dim else b.input(1, 5)
        x = b.input(5, 1) if dim else b.input(1, 5)
        spread = b.call(aten.div.Tensor, b.call(aten.expand.default, x, [5, 5]), 2.0)
        factor = b.input(5, 1) if dim else b.input(5)
        return [taken(b, b.call(aten.mul.Tensor, spread, factor), dim, rank), b.call(aten.neg.default, row), column]

    _, graphs = check(SpreadLocalShard(), write)
    assert TAKE not in targets(graphs[0])


@pytest.mark.parametrize("rows", ["several", "written to", "one in all"])
def test_the_shard_of_other_rows_is_taken(rows: str) -> None:
    def write(b: Builder, rank: int) -> list[Node]:
        x, y = b.input(1, 4), b.input(5, 4)
        if rows == "one in all":
            return [taken(b, b.call(aten.neg.default, x), 0, rank, [0, 1, 0]), b.call(aten.neg.default, y)]
        spread = b.call(aten.expand.default, x, [5, 4])
        if rows == "written to":
            spread = b.call(aten.neg.default, spread)
            after = b.call(aten.copy_.default, x, b.call(aten.mul.Tensor, x, 3.0))
            return [taken(b, spread, 0, rank), after, b.call(aten.neg.default, y)]
        return [taken(b, b.call(aten.mul.Tensor, spread, y), 0, rank)]

    _, graphs = check(SpreadLocalShard(), write)
    assert TAKE in targets(graphs[0])


def test_sizes_that_are_symbols() -> None:
    with world_of(3):
        b = Builder()
        b.mode.shape_env = ShapeEnv()
        x = b.graph.placeholder("x")
        x.meta["val"] = b.mode.from_tensor(torch.empty(7, 3), static_shapes=False)
        rows, columns = (b.call(aten.sym_size.int, x, d) for d in range(2))
        key, shard = (b.graph.placeholder(name) for name in ("key", "shard"))
        key.meta["val"], shard.meta["val"] = 0, rows.meta["val"]
        reduced = b.done(ALL_REDUCE, b.call(aten.view.default, x, [-1]), "sum", "g")
        whole = b.call(aten.view.default, reduced, [rows, columns])
        partition = ([], key, [], "g")
        gather = b.call(ours.all_gather_v.default, b.call(TAKE, whole, 1, shard, *partition), 1, columns, *partition)
        back = b.call(aten.view.default, b.call(WAIT, gather), [columns, rows])
        graph = b.output(b.call(TAKE, b.call(aten.permute.default, back, [1, 0]), 1, shard, *partition))
        DropOwnSlice()(graph)
        ReduceThenSlice()(graph)
        graph.lint()
        assert kinds(graph) == ["reduce_scatter_v"]


def test_a_shared_gather_of_even_shards() -> None:
    def write(b: Builder, rank: int) -> list[Node]:
        x = b.input(2, 2)
        return [b.call(aten.neg.default, b.done(ALL_GATHER, x, 3, "g")) for _ in range(3)]

    assert check(ShareEqualCollectives(), write)[0] == ["all_gather"]
