"""Dependent reductions that become one, on graphs of all ranks that run side by side in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node

from shardcompile.machines import H100
from shardcompile.passes import MergeReductions
from shardcompile.passes.cost.model import CostModel
from shardcompile.passes.graph.collective import collectives
from tests.support import lockstep
from tests.support.lockstep import ALL_REDUCE, Builder
from tests.support.work import calls

aten = torch.ops.aten

RANKS = 3
Write = Callable[[Builder, Node, Node], list[Node]]


class Softmax(Builder):
    """Writes softmaxes along the first dim, which is sharded, as the library's decompositions do."""

    def largest(self, x: Node, plain: bool = False) -> Node:
        """The maximum over ranks; as integers that heed NaN, or as others reduce it."""
        shape = list(x.meta["val"].shape)
        padded = self.call(aten.constant_pad_nd.default, x, [0] * (2 * len(shape) - 1) + [1], -math.inf)
        own = self.call(aten.amax.default, padded, [0], True)
        if plain:
            return self.call(aten.view.default, self.summed_up(own, "max"), [1, *shape[1:]])
        ordered = self.turned(self.call(aten.view.dtype, own, torch.int64))
        limit = self.graph.call_function(
            aten.scalar_tensor.default, (torch.iinfo(torch.int64).max,), {"dtype": torch.int64}
        )
        with self.mode:
            limit.meta["val"] = torch.tensor(torch.iinfo(torch.int64).max)
        encoded = self.call(aten.where.self, self.call(aten.isnan.default, own), limit, ordered)
        reduced = self.call(aten.view.default, self.summed_up(encoded, "max"), [1, *shape[1:]])
        return self.call(aten.view.dtype, self.turned(reduced), torch.float64)

    def turned(self, bits: Node) -> Node:
        flipped = self.call(aten.bitwise_xor.Scalar, bits, torch.iinfo(torch.int64).max)
        return self.call(aten.where.self, self.call(aten.lt.Scalar, bits, 0), flipped, bits)

    def summed_up(self, x: Node, op: str = "sum") -> Node:
        return self.done(ALL_REDUCE, self.call(aten.view.default, x, [-1]), op, "g")

    def total(self, x: Node) -> Node:
        """The sum over all rows of all ranks, with the first dim kept."""
        own = self.call(aten.sum.dim_IntList, x, [0], True)
        return self.call(aten.view.default, self.summed_up(own), list(own.meta["val"].shape))

    def softmax(self, x: Node, plain: bool = False) -> Node:
        terms = self.call(aten.exp.default, self.call(aten.sub.Tensor, x, self.largest(x, plain)))
        return self.call(aten.div.Tensor, terms, self.total(terms))

    def product(self, weights: Node, values: Node) -> Node:
        """``weights.T @ values``, over all ranks."""
        own = self.call(aten.mm.default, self.call(aten.permute.default, weights, [1, 0]), values)
        return self.call(aten.view.default, self.summed_up(own), list(own.meta["val"].shape))


def graphs(write: Write, shards: Sequence[Sequence[Tensor]]) -> list[Graph]:
    """One graph for each rank, of which each has shards of its own size."""
    found = []
    for inputs in shards:
        b = Softmax()
        found.append(b.output(*write(b, *(b.input(*x.shape) for x in inputs))))
    return found


def merged(write: Write, shards: Sequence[Sequence[Tensor]], left: int) -> list[Any]:
    """What the merged graphs give on every rank, of which each has so many collectives left."""
    with lockstep.world_of(RANKS) as world:
        changed = graphs(write, shards)
        lockstep.apply(world, MergeReductions(model()), changed)
        assert {tuple(lockstep.signatures(g)) for g in changed} == {tuple(lockstep.signatures(changed[0]))}
        assert len(collectives(changed[0])) == left
        return lockstep.play(world, changed, shards)


def model() -> CostModel:
    return CostModel(H100, group_sizes={"g": RANKS})


def divided(x: Tensor, v: Tensor, sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(sizes), v.split(sizes), strict=True))


def drawn(rows: int = 9) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(3)
    x, v = (torch.randn(rows, n, generator=numbers, dtype=torch.float64) for n in (4, 5))
    return 30 * x, v


PARTITIONS = [[4, 0, 5], [1, 8, 0], [3, 3, 3], [0, 0, 9]]


def pooled(b: Any, x: Node, v: Node) -> list[Node]:
    return [b.product(b.softmax(x), v)]


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("sizes", PARTITIONS)
def test_a_softmax_and_what_it_weighs_are_one_gather(sizes: list[int], plain: bool) -> None:
    x, v = drawn()

    def write(b: Any, x: Node, v: Node) -> list[Node]:
        p = b.softmax(x, plain)
        return [p, b.product(p, v)]

    outs = merged(write, divided(x, v, sizes), 1)
    close(torch.cat([p for p, _ in outs]), x.softmax(0))
    for _, y in outs:
        close(y, x.softmax(0).T @ v)


def test_the_twin_without_the_pass_has_three() -> None:
    x, v = drawn()
    assert len(collectives(graphs(pooled, divided(x, v, PARTITIONS[0]))[0])) == 3


@pytest.mark.parametrize("sizes", PARTITIONS)
def test_rows_of_infinity_and_nan_are_what_plain_pytorch_gives(sizes: list[int]) -> None:
    x, v = drawn()
    x[:4] = -math.inf  # with the first partition all that rank 0 has
    x[:, 1] = -math.inf
    x[6, 2] = math.nan
    x[7, 3] = math.inf
    for y in merged(pooled, divided(x, v, sizes), 1):
        expected = x.softmax(0).T @ v
        close(y[0], expected)
    assert expected[0].isfinite().all() and expected[1:].isnan().all()


def test_a_rank_without_finite_rows_does_not_spoil_large_negative_ones() -> None:
    x, v = drawn()
    x = x - 1e5  # exp(0 - max) would be infinite
    x[:4] = -math.inf
    for y in merged(pooled, divided(x, v, [4, 3, 2]), 1):
        close(y[0], x.softmax(0).T @ v)


@pytest.mark.parametrize("sizes", PARTITIONS)
def test_logsumexp(sizes: list[int]) -> None:
    x, v = drawn()
    x[:, 1], x[2, 2], x[3, 3] = -math.inf, math.inf, math.nan

    def write(b: Any, x: Node, v: Node) -> list[Node]:
        top = b.largest(x)
        infinite = b.call(aten.eq.Scalar, b.call(aten.abs.default, top), math.inf)
        top = b.call(aten.where.self, infinite, b.call(aten.full_like.default, top, 0), top)
        terms = b.call(aten.exp.default, b.call(aten.sub.Tensor, x, top))
        return [b.call(aten.add.Tensor, b.call(aten.log.default, b.total(terms)), top)]

    for out in merged(write, divided(x, v, sizes), 1):
        close(out[0], x.logsumexp(0, keepdim=True))


def test_a_large_payload_keeps_the_maximum_and_shares_the_sums() -> None:
    x, v = torch.randn(6, 512, dtype=torch.float64), torch.randn(6, 4096, dtype=torch.float64)
    shards = divided(x, v, [2, 1, 3])
    with lockstep.world_of(RANKS) as world:
        changed = graphs(pooled, shards)
        lockstep.apply(world, MergeReductions(CostModel(H100, group_sizes={"g": 1024})), changed)
        found = collectives(changed[0])
        assert [c.kind for c in found] == ["all_reduce"] * 3
        assert found[1].node not in ancestors(found[2].node)  # so that they can share a bucket
        for y in lockstep.play(world, changed, shards):
            close(y[0], x.softmax(0).T @ v)


def test_an_equal_reduction_in_another_order_of_dims_is_not_repeated() -> None:
    x, v = drawn()

    def write(b: Any, x: Node, v: Node) -> list[Node]:
        own = b.call(aten.mm.default, b.call(aten.permute.default, x, [1, 0]), v)
        turned = b.call(aten.permute.default, own, [1, 0])
        turned = b.call(aten.clone.default, turned, memory_format=torch.contiguous_format)
        return [b.summed_up(own), b.summed_up(turned)]

    for out, turned in merged(write, divided(x, v, PARTITIONS[0]), 1):
        close(out.view(4, 5), x.T @ v)
        close(turned.view(5, 4), v.T @ x)


def test_what_is_not_a_factor_stays() -> None:
    """The sum of exponentials is added, not multiplied: nothing can be taken out."""
    x, v = drawn()

    def write(b: Any, x: Node, v: Node) -> list[Node]:
        total = b.total(b.call(aten.exp.default, x))
        return [b.product(b.call(aten.add.Tensor, x, total), v)]

    for y in merged(write, divided(x, v, PARTITIONS[0]), 2):
        close(y[0], (x + x.exp().sum(0)).T @ v)


def test_a_factor_along_what_is_summed_stays() -> None:
    x, v = drawn(3)

    def write(b: Any, x: Node, v: Node) -> list[Node]:
        total = b.call(aten.permute.default, b.total(v), [1, 0])  # [5, 1]: along the columns of v
        own = b.call(aten.mm.default, b.call(aten.mul.Tensor, v, b.call(aten.permute.default, total, [1, 0])), total)
        return [b.summed_up(own)]

    with lockstep.world_of(RANKS) as world:
        changed = graphs(write, divided(x, v, [1, 1, 1]))
        lockstep.apply(world, MergeReductions(model()), changed)
        assert len(collectives(changed[0])) == 2
        total = v.sum(0, keepdim=True)
        for out in lockstep.play(world, changed, divided(x, v, [1, 1, 1])):
            close(out[0], ((v * total) @ total.T).view(3, -1).sum(0))


def moments(b: Any, x: Node, v: Node) -> list[Node]:
    """Mean and variance along the rows, as the library's decompositions write them."""
    own = b.call(aten.div.Tensor, b.call(aten.sum.dim_IntList, x, [0], True), ROWS)
    mean = b.call(aten.view.default, b.summed_up(own), [1, 4])
    left = b.call(aten.sub.Tensor, x, mean)
    squares = b.call(aten.sum.dim_IntList, b.call(aten.mul.Tensor, left, left), [0])
    return [mean, b.summed_up(b.call(aten.div.Tensor, squares, ROWS - 1))]


ROWS = 9


@pytest.mark.parametrize("offset", [0.0, 1e6])
@pytest.mark.parametrize("sizes", PARTITIONS)
def test_mean_and_variance_are_one_gather(sizes: list[int], offset: float) -> None:
    x, v = drawn(ROWS)
    x = x + offset
    for mean, variance in merged(moments, divided(x, v, sizes), 1):
        close(mean, x.mean(0, keepdim=True))
        close(
            variance, (x - x.mean(0)).square().sum(0) / (ROWS - 1)
        )  # by two passes: with the offset `var` is not exact


@pytest.mark.parametrize("sizes", PARTITIONS)
def test_moments_of_infinity_and_nan_are_what_plain_pytorch_gives(sizes: list[int]) -> None:
    x, v = drawn(ROWS)
    x[6, 2], x[7, 3], x[:, 1] = math.nan, math.inf, -math.inf
    for mean, variance in merged(moments, divided(x, v, sizes), 1):
        close(mean, x.mean(0, keepdim=True))
        close(variance, x.var(0))
    assert variance[0].isfinite() and variance[1:].isnan().all()


def test_squares_of_what_is_left_of_another_tensor_stay() -> None:
    x, v = torch.randn(2, ROWS, 4, dtype=torch.float64)

    def write(b: Any, x: Node, v: Node) -> list[Node]:
        mean = b.call(aten.div.Tensor, b.total(v), ROWS)
        left = b.call(aten.sub.Tensor, x, mean)
        return [b.summed_up(b.call(aten.sum.dim_IntList, b.call(aten.mul.Tensor, left, left), [0]))]

    for out in merged(write, divided(x, v, PARTITIONS[0]), 2):
        close(out[0], (x - v.mean(0)).square().sum(0))


def backward_of_pooling(left: bool) -> Write:
    """What the pooled rows are, and what the backward pass of the softmax sums up, for a gradient made of them."""

    def write(b: Any, x: Node, v: Node) -> list[Node]:
        p = b.softmax(x)
        pooled = b.product(p, v)
        grad = b.call(aten.sin.default, pooled)
        turned = b.call(aten.permute.default, grad, [1, 0])
        if left:
            wanted = b.call(aten.mm.default, grad, b.call(aten.permute.default, v, [1, 0]))
            wanted = b.call(aten.permute.default, wanted, [1, 0])
        else:
            wanted = b.call(aten.mm.default, v, turned)
        return [pooled, b.total(b.call(aten.mul.Tensor, wanted, p))]

    return write


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("sizes", PARTITIONS)
def test_the_backward_pass_of_pooling_needs_no_sum_of_its_own(sizes: list[int], left: bool) -> None:
    x, v = drawn()
    p = x.softmax(0)
    for pooled, summed in merged(backward_of_pooling(left), divided(x, v, sizes), 1):
        close(pooled, p.T @ v)
        close(summed, (p * (v @ (p.T @ v).sin().T)).sum(0, keepdim=True))


def test_a_product_with_what_ranks_do_not_share_is_summed() -> None:
    x, v = drawn()

    def write(b: Any, x: Node, v: Node) -> list[Node]:
        own = b.call(aten.mm.default, b.call(aten.permute.default, x, [1, 0]), v)  # of this rank alone
        b.product(x, v)
        wanted = b.call(aten.mm.default, v, b.call(aten.permute.default, own, [1, 0]))
        return [b.total(b.call(aten.mul.Tensor, wanted, x))]

    expected = sum((a * (w @ (a.T @ w).T)).sum(0) for a, w in divided(x, v, PARTITIONS[0]))
    for out in merged(write, divided(x, v, PARTITIONS[0]), 2):
        close(out[0][0], expected)


def test_equal_sums_in_another_shape_are_reduced_once() -> None:
    x, v = drawn()

    def write(b: Any, x: Node, v: Node) -> list[Node]:
        kept = b.call(aten.sum.dim_IntList, x, [0], True, dtype=torch.float64)
        flat = b.call(aten.sum.dim_IntList, x, [0])
        return [b.summed_up(b.call(aten.div.Tensor, s, ROWS)) for s in (kept, flat)]

    for kept, flat in merged(write, divided(x, v, PARTITIONS[0]), 1):
        close(kept, x.mean(0))
        close(flat, x.mean(0))


def test_a_write_behind_the_reductions_does_not_matter() -> None:
    x, v = drawn()

    def write(b: Any, x: Node, v: Node) -> list[Node]:
        y = b.product(b.softmax(x), v)
        return [y, b.call(aten.copy_.default, v, b.call(aten.mul.Tensor, v, 0.5))]

    for y, after in merged(write, divided(x, v.clone(), PARTITIONS[0]), 1):
        close(y, x.softmax(0).T @ v)
        assert len(after) in PARTITIONS[0]


def test_a_write_before_a_reduction_or_to_its_result_leaves_it() -> None:
    x, v = drawn()

    def before(b: Any, x: Node, v: Node) -> list[Node]:
        p = b.softmax(x)
        b.call(aten.copy_.default, v, b.call(aten.mul.Tensor, v, 0.5))
        return [b.product(p, v)]

    def after(b: Any, x: Node, v: Node) -> list[Node]:
        first, second = b.total(x), b.total(x)
        return [b.call(aten.mul_.Tensor, first, 2.0), second]

    for (y,) in merged(before, divided(x, v.clone(), PARTITIONS[0]), 2):  # the softmax itself comes before
        close(y, x.softmax(0).T @ (v / 2))
    for first, second in merged(after, divided(x, v, PARTITIONS[0]), 2):
        close(first, 2 * second)


def test_work_grows_with_the_graph() -> None:
    """Twice the layers that wait for one another, twice the work: no layer is looked at again for each one before."""
    work = []
    for layers in (16, 32):
        with lockstep.world_of(RANKS):
            b = Softmax()
            x = b.input(50, 8)
            for _ in range(layers):
                x = b.call(aten.add.Tensor, x, b.call(aten.mm.default, x, b.product(b.softmax(x), x)))
            graph = b.output(x)
            work.append(calls(lambda graph=graph: MergeReductions(model=CostModel(H100))(graph)))  # type: ignore[misc]
            assert len(collectives(graph)) == layers
    assert work[1] <= 2.1 * work[0]


def ancestors(node: Node) -> set[Node]:
    found: set[Node] = set()
    stack = [node]
    while stack:
        for i in stack.pop().all_input_nodes:
            if i not in found:
                found.add(i)
                stack.append(i)
    return found


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, equal_nan=True)
