"""The collectives on local shards of any size, against plain torch on the full tensor."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as nnf
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.distributed.tensor.debug import CommDebugMode

from shardcompile import CollectiveError, ShardTensor
from shardcompile.collectives import (
    Reads,
    Window,
    all_gather_even,
    all_gather_v,
    all_reduce,
    all_to_all_v,
    broadcast,
    fetch_ranges,
    reduce_scatter_v,
    transport,
    wait,
)
from shardcompile.sharding import Partition
from shardcompile.testing import mesh, rank, world_size

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}


def partitions() -> list[list[int]]:
    """Uneven, with empty shards, one owner, nothing at all."""
    world = world_size()
    return [[3, 5, 1, 2][:world], [0, 4, 0, 3][:world], [*[0] * (world - 1), 4], [0] * world]


def cases(partitions: Sequence[Any]) -> Iterator[tuple[torch.dtype, Any, Callable[[int], tuple[int, ...]], int]]:
    """Dtype, sharded, the shape of the full tensor as a function of the size at a dim, and the dim."""
    shapes: list[tuple[Callable[[int], tuple[int, ...]], int]] = [
        (lambda n: (2, n, 3), 1),
        (lambda n: (n,), 0),
        (lambda n: (n, 2), 0),
        (lambda n: (2, 3, n), -1),
        (lambda n: (0, 2, n), 2),  # another dim is empty
    ]
    for partition in partitions:
        for shape, dim in shapes:
            yield torch.float32, partition, shape, dim
    for dtype in DTYPES[1:]:
        for partition in partitions[:2]:
            yield dtype, partition, *shapes[0]


def values(shape: Sequence[int], dtype: torch.dtype = torch.float64) -> Tensor:
    """Small whole numbers, so that sums and products are exact; the same on every rank."""
    if dtype.is_complex:
        return torch.complex(values(shape), values(shape)).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 4, tuple(shape)).to(dtype)


def shard_of(full: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
    return full.split(list(sizes), dim)[rank()].contiguous()


def same(actual: Tensor, expected: Tensor, *what: object) -> None:
    assert actual.dtype == expected.dtype, (what, actual.dtype)
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    assert torch.equal(actual, expected), (what, actual, expected)


def group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def reduction(terms: Sequence[Tensor], op: str) -> Tensor:
    total = functools.reduce(REDUCTIONS[op], terms)
    return total / len(terms) if op == "avg" else total


def reduced_alike(actual: Tensor, expected: Tensor, op: str) -> None:
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=0.01 if op == "avg" else 0, atol=0)


def has_reduction(dtype: torch.dtype, op: str) -> bool:
    if op == "avg":
        return dtype.is_floating_point or dtype.is_complex
    return op in ("sum", "product") or not dtype.is_complex


def disguises(x: Tensor) -> list[Tensor]:
    """The same values in other memory: transposed, every second element, conjugated or negated when read."""
    found = [x.movedim(0, -1).contiguous().movedim(-1, 0), torch.stack([x, x], -1)[..., 0]]
    if x.dtype.is_complex:
        found.append(x.conj().resolve_conj().conj())
    if x.dtype.is_floating_point and x.dtype.itemsize >= 4:
        found.append(torch.complex(x, -x).conj().imag)
    return found


# Against plain torch


@pytest.mark.ranks(2, 3, 4)
def test_all_gather_v():
    for dtype, sizes, shape, dim in cases(partitions()):
        full = values(shape(sum(sizes)), dtype)
        same(all_gather_v(shard_of(full, sizes, dim), dim, sizes, group()), full, dtype, sizes, dim)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("op", list(REDUCTIONS))
def test_reduce_scatter_v(op: str):
    for dtype, sizes, shape, dim in cases(partitions()):
        if has_reduction(dtype, op):
            terms = [values(shape(sum(sizes)), dtype) for _ in range(world_size())]
            out = reduce_scatter_v(terms[rank()], dim, sizes, group(), reduce_op=op)
            reduced_alike(out, shard_of(reduction(terms, op), sizes, dim), op)


@pytest.mark.ranks(2, 3, 4)
def test_all_to_all_v():
    pairs = list(itertools.product(partitions(), partitions()))
    for i, (src_sizes, dst_sizes) in enumerate(pairs + pairs[:8]):
        dtype = DTYPES[max(i - len(pairs), 0)]
        for src_dim, dst_dim in ((0, 1), (2, 0), (-2, -1)):
            shape = [2, 2, 2]
            shape[src_dim], shape[dst_dim] = sum(src_sizes), sum(dst_sizes)
            full = values(shape, dtype)
            x = shard_of(full, src_sizes, src_dim)
            out = all_to_all_v(x, src_dim, dst_dim, src_sizes, dst_sizes, group())
            same(out, shard_of(full, dst_sizes, dst_dim), dtype, src_sizes, dst_sizes, src_dim, dst_dim)


def repartitions() -> list[tuple[list[int], list[int]]]:
    """Pairs of partitions of one size."""
    world = world_size()
    uneven, holes = [3, 5, 1, 2][:world], [0, 4, 0, 3][:world]
    return [(uneven, uneven[::-1]), (holes, holes[::-1]), (uneven, [*[0] * (world - 1), sum(uneven)]), (holes, holes)]


def widened(sizes: Sequence[int], before: int, after: int) -> tuple[int, int]:
    start, end = sum(sizes[: rank()]), sum(sizes[: rank() + 1])
    return (max(start - before, 0), min(end + after, sum(sizes))) if end > start else (start, end)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("before, after", [(0, 0), (1, 0), (2, 1), (9, 9)])
def test_fetch_ranges(before: int, after: int):
    for dtype, (src_sizes, dst_sizes), shape, dim in cases(repartitions()):
        full = values(shape(sum(src_sizes)), dtype)
        x = shard_of(full, src_sizes, dim)
        out = fetch_ranges(x, dim, src_sizes, dst_sizes, group(), before=before, after=after)
        start, end = widened(dst_sizes, before, after)
        same(out, full.narrow(dim, start, end - start), dtype, src_sizes, dst_sizes, dim)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("op", list(REDUCTIONS))
def test_all_reduce(op: str):
    shapes = [(), (3,), (2, 3), (0,), (2, 0)]
    for dtype, shape in [(torch.float32, s) for s in shapes] + [(d, (2, 3)) for d in DTYPES]:
        if has_reduction(dtype, op) and not (dtype.is_complex and op == "product"):  # c10d has no complex product
            terms = [values(shape, dtype) for _ in range(world_size())]
            reduced_alike(all_reduce(terms[rank()], group(), reduce_op=op), reduction(terms, op), op)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("op", ["max", "min"])
def test_nan_wins(op: str):
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        terms = torch.tensor([[1, 2, 3, -1], [4, float("nan"), 0, -2], [2, 1, float("inf"), float("nan")]], dtype=dtype)
        expected = reduction(list(terms), op)
        out = reduce_scatter_v(terms[rank()], 0, [1, 0, 3], group(), reduce_op=op)
        torch.testing.assert_close(out, shard_of(expected, [1, 0, 3], 0), equal_nan=True)
        torch.testing.assert_close(all_reduce(terms[rank()], group(), reduce_op=op), expected, equal_nan=True)


@pytest.mark.ranks(2, 3, 4)
def test_broadcast_and_all_gather_even():
    for dtype, shape in [(torch.float32, ()), (torch.float32, (0, 2))] + [(d, (2, 3)) for d in DTYPES]:
        for src in range(world_size()):
            terms = [values(shape, dtype) for _ in range(world_size())]
            same(broadcast(terms[rank()], src, group()), terms[src], dtype, shape, src)
        if shape:
            same(all_gather_even(terms[rank()], group()), torch.cat(terms), dtype, shape)


@pytest.mark.ranks(3)
def test_inputs_that_are_not_contiguous():
    sizes, to = [3, 5, 2], [0, 2, 8]
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64):
        full = values((10, 4, 10), dtype)
        rows, columns = shard_of(full, sizes, 0), shard_of(full, to, 2)
        for i, x in enumerate(disguises(rows)):
            assert torch.equal(x, rows) and (not x.is_contiguous() or x.is_conj() or x.is_neg())
            same(all_gather_v(x, 0, sizes, group()), full, dtype, i)
            same(all_to_all_v(x, 0, 2, sizes, to, group()), columns, dtype, i)
            start, end = widened(to, 1, 0)
            same(fetch_ranges(x, 0, sizes, to, group(), before=1), full[start:end], dtype, i)
        for i, x in enumerate(disguises(full)):
            same(reduce_scatter_v(x, 2, to, group(), reduce_op="sum"), columns + columns + columns, dtype, i)
            same(all_reduce(x, group()), full + full + full, dtype, i)
        terms = [values((4, 3), dtype) for _ in sizes]
        for i, x in enumerate(disguises(terms[rank()])):
            same(broadcast(x if rank() == 1 else terms[rank()], 1, group()), terms[1], dtype, i)


@pytest.mark.ranks(3)
def test_expanded_inputs():
    sizes = [2, 0, 3]
    x = torch.tensor([1.0, 2.0]).expand(sizes[rank()], 2)
    same(all_gather_v(x, 0, sizes, group()), torch.tensor([1.0, 2.0]).expand(5, 2))
    same(reduce_scatter_v(torch.ones(()).expand(5, 2), 0, sizes, group()), torch.full((sizes[rank()], 2), 3.0))
    same(all_reduce(torch.ones(()).expand(5, 2), group()), torch.full((5, 2), 3.0))


@pytest.mark.ranks(4)
def test_groups_of_some_ranks():
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for name, me in (("a", rank() // 2), ("b", rank() % 2)):
        full, sizes = torch.arange(5) + 10 * (rank() % 2 if name == "a" else rank() // 2), [1, 4]
        same(all_gather_v(full.split(sizes)[me], 0, sizes, mesh.get_group(name)), full)
        same(reduce_scatter_v(full, 0, sizes, mesh.get_group(name), reduce_op="max"), full.split(sizes)[me])


# Gradients: for a linear A, <A*(g), x> = <g, A(x)>, exactly, when both are summed over the ranks


def windows(sizes: Sequence[int], window: Window, count: int) -> Reads:
    """What `count` rows along dim 1 read."""
    return Reads.of(1, Partition.of_sizes([0], [len(sizes)], sizes), count, window, mesh())


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("window", [Window(1, 1, 1, 1, 0), Window(2, 1, 3, 4, 0), Window(1, 3, 2, 2, 1)], ids=str)
def test_windows_read_rows_of_other_ranks(window: Window):
    for sizes in repartitions_of(7):
        full = torch.arange(1.0, 15.0).view(2, 7)
        count = -(-7 * window.den // window.num)
        reads = windows(sizes, window, count)
        found = reads.fetch(shard_of(full, sizes, 1).contiguous(), -1.0)
        first = window.first_read(reads.first)
        padded = nnf.pad(full, (20, 20), value=-1.0)
        assert torch.equal(found, padded.narrow(1, 20 + first if reads.rows else 0, reads.rows)), sizes
        assert found.shape[1] == reads.rows


def repartitions_of(size: int) -> list[list[int]]:
    world = world_size()
    even = [len(c) for c in torch.arange(size).tensor_split(world)]
    return [even, [*[0] * (world - 1), size], [size, *[0] * (world - 1)], [1, *[0] * (world - 2), size - 1]]


def linear_maps() -> dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]]:
    """Every linear collective and the shape of its input on this rank."""
    world, me = world_size(), rank()
    sizes, to = [3, 0, 1, 2][:world], [1, 2, 0, 4][:world]
    total, columns = sum(sizes), sum(to)
    repartition = [*[0] * (world - 1), total]
    strided, between = windows(sizes, Window(2, 1, 1, 2, 0), 4), windows(sizes, Window(1, 2, 1, 1, 0), 7)
    aligned = windows(sizes, Window(1, 1, 1, 1, 0), total)
    return {
        "all_gather_v": (lambda x: all_gather_v(x, 0, sizes, group()), (sizes[me], 2)),
        "reduce_scatter_v": (lambda x: reduce_scatter_v(x, 1, sizes, group()), (2, total)),
        "reduce_scatter_v avg": (lambda x: reduce_scatter_v(x, 0, sizes, group(), reduce_op="avg"), (total, 2)),
        "all_to_all_v": (lambda x: all_to_all_v(x, 0, 1, sizes, to, group()), (sizes[me], columns)),
        "fetch_ranges": (lambda x: fetch_ranges(x, 0, sizes, repartition, group()), (sizes[me], 2)),
        "fetch_ranges back": (lambda x: fetch_ranges(x, 0, repartition, sizes, group()), (repartition[me], 2)),
        "fetch_ranges halo": (lambda x: fetch_ranges(x, 1, sizes, sizes, group(), before=2, after=1), (2, sizes[me])),
        "windows": (lambda x: strided.fetch(x, 0.0), (2, sizes[me])),
        "windows between rows": (lambda x: between.fetch(x, 0.0), (2, sizes[me])),
        "windows back": (lambda x: aligned.give_back(x), (2, aligned.rows)),
        "all_reduce": (lambda x: all_reduce(x, group()), (2, 3)),
        "all_reduce avg": (lambda x: all_reduce(x, group(), reduce_op="avg"), (2, 3)),
    }


def dot(a: Tensor, b: Tensor) -> float:
    """The inner product over all ranks."""
    return float(all_reduce((a * b).sum(), group()))


@pytest.mark.ranks(2, 3, 4)
def test_gradients_are_adjoints():
    for name, (function, shape) in linear_maps().items():
        torch.manual_seed(rank())
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        y = function(x)
        g = torch.randn_like(y)
        (gradient,) = torch.autograd.grad(y, x, g)
        assert gradient.shape == x.shape, name
        assert dot(gradient, x.detach()) == pytest.approx(dot(g, y.detach()), rel=1e-12), name


@pytest.mark.ranks(2, 3, 4)
def test_double_backward():
    for name, (function, shape) in linear_maps().items():
        torch.manual_seed(rank())
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        y = function(x)
        g = torch.randn(y.shape, dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(y, x, g, create_graph=True)
        direction = torch.randn_like(x)
        (twice,) = torch.autograd.grad(gradient, g, direction)
        torch.testing.assert_close(twice, function(direction), msg=name)


@pytest.mark.ranks(3)
def test_gradient_through_a_nonlinear_function():
    sizes = [4, 0, 1]
    full = torch.randn(5, 2, dtype=torch.float64)
    x = shard_of(full, sizes, 0).requires_grad_()
    plain = full.clone().requires_grad_()
    (all_gather_v(x.sin(), 0, sizes, group()).pow(3).sum() / world_size()).backward()
    plain.sin().pow(3).sum().backward()
    torch.testing.assert_close(x.grad, shard_of(plain.grad, sizes, 0))


@pytest.mark.ranks(2)
def test_only_linear_collectives_have_gradients():
    x = torch.ones(3, requires_grad=True)
    y = reduce_scatter_v(x, 0, [1, 2], group(), reduce_op="max")
    with pytest.raises(CollectiveError, match="max has no gradient; only sum and avg"):
        y.sum().backward()
    with pytest.raises(CollectiveError, match="max has no gradient; only sum and avg"):
        all_reduce(x, group(), reduce_op="max").sum().backward()
    assert not broadcast(x, 0, group()).requires_grad


# Asynchronous use


@pytest.mark.ranks(2, 3)
def test_async_op_then_wait():
    sizes, to = [3, 5, 1][: world_size()], [1, 0, 8][: world_size()]
    to[0] += sum(sizes) - sum(to)
    full = values((sum(sizes), sum(to)))
    x = shard_of(full, sizes, 0)
    started = [
        all_gather_v(x, 0, sizes, group(), async_op=True),
        reduce_scatter_v(full, 0, to, group(), async_op=True),
        all_to_all_v(x, 0, 1, sizes, to, group(), async_op=True),
        fetch_ranges(x, 0, sizes, to, group(), before=1, async_op=True),
        all_reduce(full, group(), async_op=True),
        all_gather_v(2 * x, 0, sizes, group(), async_op=True),
    ]
    start, end = widened(to, 1, 0)
    expected = [
        full,
        shard_of(full * world_size(), to, 0),
        shard_of(full, to, 1),
        full[start:end],
        full * world_size(),
        2 * full,
    ]
    for i in (4, 2, 5, 0, 3, 1):  # in any order, the same on every rank or not
        same(wait(started[i]), expected[i], i)
    same(wait(started[0]), full)  # a second wait does nothing


@pytest.mark.ranks(2)
def test_async_op_does_not_wait():
    """A rank that starts late holds up nobody before the wait."""
    x, sizes = torch.full((rank() * 2, 3), 7.0), [0, 2]
    starts: list[Callable[[], Any]] = [
        lambda: all_gather_v(x, 0, sizes, group(), async_op=True),
        lambda: reduce_scatter_v(torch.full((3, 4), 3.5), 0, [2, 1], group(), async_op=True),
        lambda: all_to_all_v(x, 0, 1, sizes, [3, 0], group(), async_op=True),
        lambda: fetch_ranges(x, 0, sizes, [2, 0], group(), async_op=True),
        lambda: all_reduce(torch.full((2, 3), 3.5), group(), async_op=True),
    ]
    dist.barrier()
    time.sleep(0.3 * rank())
    begin = time.perf_counter()
    started = [start() for start in starts]
    assert time.perf_counter() - begin < 0.25
    for i, pending in enumerate(started):
        assert torch.all(wait(pending) == 7), i


@pytest.mark.ranks(2)
def test_async_op_has_the_same_gradient():
    sizes = [1, 3]
    gradients = []
    for async_op in (False, True):
        x = torch.ones(sizes[rank()], 2, requires_grad=True)
        out = all_gather_v(x, 0, sizes, group(), async_op=async_op)
        (wait(out) if async_op else out).mul(torch.arange(4.0).unsqueeze(1)).sum().backward()
        gradients.append(x.grad)
    same(*gradients)


# Compiled


@pytest.mark.ranks(3)
def test_compiled_with_aot_eager():
    for name, (function, shape) in linear_maps().items():
        torch._dynamo.reset()
        torch.manual_seed(rank())
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)

        def loss(x: Tensor, function: Any = function) -> Tensor:
            return function(x.sin()).pow(2)

        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(x)
        eager = loss(x)
        torch.testing.assert_close(compiled, eager, msg=name)
        g = torch.randn_like(eager)
        torch.testing.assert_close(torch.autograd.grad(compiled, x, g), torch.autograd.grad(eager, x, g), msg=name)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", ["product", "max", "min"])
def test_other_reductions_compiled(op: str):
    terms = [values((4, 2)), values((4, 2))]
    compiled = torch.compile(
        lambda x: (
            reduce_scatter_v(x, 0, [4, 0], group(), reduce_op=op),
            all_reduce(x, group(), reduce_op=op),
        ),
        fullgraph=True,
        backend="aot_eager",
    )
    scattered, reduced = compiled(terms[rank()])
    same(reduced, reduction(terms, op))
    same(scattered, reduced.split([4, 0])[rank()])


@pytest.mark.ranks(2, timeout=300)
def test_compiled_with_inductor():
    """Every op, forward and backward; rank 1 holds nothing, so that its shapes are statically empty."""
    sizes, to = [4, 0], [0, 3]
    torch.manual_seed(rank())
    x = torch.randn(sizes[rank()], 3, requires_grad=True)
    g = torch.randn(4, 3)

    def everything(x: Tensor) -> tuple[Tensor, ...]:
        columns = all_to_all_v(x.sin(), 0, 1, sizes, to, group())
        back = all_to_all_v(columns * 2, 1, 0, to, sizes, group())
        halo = fetch_ranges(back + x, 0, sizes, [1, 3], group(), before=1)
        whole = all_gather_v(back.cos(), 0, sizes, group())
        mine = reduce_scatter_v(whole * g, 0, sizes, group())
        return halo.exp(), mine + 1, all_reduce(whole, group()).relu()

    compiled, eager = torch.compile(everything, fullgraph=True)(x), everything(x)
    torch.testing.assert_close(compiled, eager)
    assert compiled[1].shape == (sizes[rank()], 3)
    gradients = [torch.autograd.grad([y.sum() for y in outs], x) for outs in (compiled, eager)]
    torch.testing.assert_close(*gradients)


@pytest.mark.ranks(2, timeout=300)
def test_inductor_computes_between_start_and_wait():
    """The buffer that is being sent must not be reused by what runs before the wait."""
    sizes = [1, 4000]
    x = torch.randn(sizes[rank()], 8)

    def overlapped(x: Tensor, w: Tensor) -> Tensor:
        sent = x + 1
        started = all_gather_v(sent, 0, sizes, group(), async_op=True)
        y = x * 3
        for _ in range(3):
            y = torch.relu(y @ w) + 0.1
        return wait(started) + y[:1]

    w = torch.randn(8, 8)
    torch.testing.assert_close(torch.compile(overlapped, fullgraph=True)(x, w), overlapped(x, w))


@pytest.mark.ranks(2)
def test_compiled_ops_stay_when_their_result_is_unused():
    """Rank 1 gets nothing out of it, yet rank 0 waits for what it sends."""
    sizes = [4, 0]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def scatter(x: Tensor) -> Tensor:
        return reduce_scatter_v(x, 0, sizes, group()).sum()

    assert scatter(torch.ones(4)) == [8, 0][rank()]


# Errors: raised before anything is sent, on every rank


@pytest.mark.ranks(2)
def test_wrong_number_of_sizes():
    x = torch.ones(2, 3)
    message = "group of 2 ranks needs 2 non-negative sizes"
    for sizes in ([2], [2, 0, 0], [-1, 3]):
        with pytest.raises(CollectiveError, match=message):
            all_gather_v(x, 0, sizes, group())
        with pytest.raises(CollectiveError, match=message):
            reduce_scatter_v(x, 0, sizes, group())
        with pytest.raises(CollectiveError, match=message):
            all_to_all_v(x, 0, 1, [2, 2], sizes, group())
        with pytest.raises(CollectiveError, match=message):
            fetch_ranges(x, 0, sizes, [2, 2], group())


@pytest.mark.ranks(2)
def test_sums_that_differ():
    x = torch.ones(2, 3)
    with pytest.raises(CollectiveError, match=r"reduce_scatter_v: shard sizes \(1, 2\) along dim 0 add up to 3"):
        reduce_scatter_v(x, 0, [1, 2], group())
    with pytest.raises(CollectiveError, match=r"all_to_all_v: shard sizes \(1, 3\) along dim 1 add up to 4, not to 3"):
        all_to_all_v(x, 0, 1, [2, 2], [1, 3], group())
    with pytest.raises(CollectiveError, match="global sizes of the two partitions differ"):
        fetch_ranges(x, 0, [2, 2], [1, 2], group())


@pytest.mark.ranks(2)
def test_shard_that_does_not_fit():
    x = torch.ones(3 + rank(), 2)
    message = rf"rank {rank()} of the group holds {3 + rank()} rows along dim 0 .* layout says {1 + 4 * rank()}"
    with pytest.raises(CollectiveError, match="all_gather_v: " + message):
        all_gather_v(x, 0, [1, 5], group())
    with pytest.raises(CollectiveError, match="fetch_ranges: " + message):
        fetch_ranges(x, 0, [1, 5], [3, 3], group())
    with pytest.raises(CollectiveError, match="all_to_all_v: " + message):
        all_to_all_v(x, 0, 1, [1, 5], [1, 1], group())


@pytest.mark.ranks(2)
def test_dims_that_do_not_exist():
    x = torch.ones(2, 3)
    for dim in (2, -3):
        with pytest.raises(CollectiveError, match=rf"dim {dim} is out of range for a tensor of 2 dims"):
            all_gather_v(x, dim, [2, 2], group())
        with pytest.raises(CollectiveError, match=rf"dim {dim} is out of range"):
            reduce_scatter_v(x, dim, [1, 1], group())
        with pytest.raises(CollectiveError, match=rf"dim {dim} is out of range"):
            all_to_all_v(x, 0, dim, [2, 2], [2, 1], group())
        with pytest.raises(CollectiveError, match=rf"dim {dim} is out of range"):
            fetch_ranges(x, dim, [2, 2], [1, 3], group())
    with pytest.raises(CollectiveError, match=r"two different dims, got dim 0 twice; fetch_ranges"):
        all_to_all_v(x, 0, -2, [2, 2], [1, 3], group())


@pytest.mark.ranks(2)
def test_reductions_that_do_not_exist():
    for dtype, op in (
        (torch.float32, "mul"),
        (torch.int64, "avg"),
        (torch.bool, "avg"),
        (torch.complex64, "max"),
        (torch.complex64, "min"),
    ):
        for reduce in (
            lambda x, op: reduce_scatter_v(x, 0, [1, 1], group(), reduce_op=op),
            lambda x, op: all_reduce(x, group(), reduce_op=op),
        ):
            with pytest.raises(CollectiveError, match=f"no reduction {op} of {dtype}"):
                reduce(torch.ones(2).to(dtype), op)


# What moves


@pytest.mark.ranks(2)
def test_comm_debug_mode_counts_our_ops():
    ops = torch.ops.shardcompile
    x = torch.ones(2, 4, requires_grad=True)
    ShardTensor.from_local(x.detach(), mesh(), [Shard(0)])  # the first one has CommDebugMode count them
    with CommDebugMode() as mode:
        gathered = all_gather_v(x, 0, [2, 2], group())
        gathered.sum().backward()
        all_to_all_v(x, 0, 1, [2, 2], [1, 3], group())
        fetch_ranges(x, 0, [2, 2], [4, 0], group())
        fetch_ranges(x, 0, [2, 2], [4, 0], group())
    counts = {op: count for op, count in mode.get_comm_counts().items() if count}
    assert counts == {ops.all_gather_v: 1, ops.reduce_scatter_v: 1, ops.all_to_all_v: 1, ops.fetch_ranges: 2}
    assert mode.get_total_counts() == 5


class Traffic:
    """Counts the bytes that go through `transport.exchange`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent = self.received = 0
        self._exchange = transport.exchange
        monkeypatch.setattr(transport, "exchange", self._count)

    def _count(self, group: Any, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> Any:
        self.sent += sum(t.nbytes for _, t in sends)
        self.received += sum(t.nbytes for _, t in receives)
        return self._exchange(group, sends, receives)


@pytest.mark.ranks(2, 3)
def test_bytes_are_those_of_the_shards(monkeypatch: pytest.MonkeyPatch):
    sizes = [1, 9, 0][: world_size()]
    row = 4 * 4
    traffic = Traffic(monkeypatch)
    x = torch.ones(sizes[rank()], 4)
    all_gather_v(x, 0, sizes, group())
    assert traffic.sent == sizes[rank()] * row * (world_size() - 1)
    assert traffic.received == (10 - sizes[rank()]) * row

    traffic.sent = traffic.received = 0
    reduce_scatter_v(torch.ones(10, 4), 0, sizes, group())
    assert traffic.sent == (10 - sizes[rank()]) * row
    assert traffic.received == sizes[rank()] * row * (world_size() - 1)

    traffic.sent = traffic.received = 0
    fetch_ranges(x, 0, sizes, sizes, group())
    assert traffic.sent == traffic.received == 0
    fetch_ranges(x, 0, sizes, [3, 7, 0][: world_size()], group())
    assert traffic.sent == [0, 2, 0][rank()] * row
    assert traffic.received == [2, 0, 0][rank()] * row
