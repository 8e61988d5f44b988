"""Ops along a sharded dim: rows stay where they are, one graph serves every partition, and no dim is gathered."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as nnf
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from shardcompile.compat.testing import graphs_compiled
from shardcompile.testing import once, rank
from shardcompile.testing.watch import CollectiveWatch
from tests.support.tiers import often, spread

PARTITIONS = ([3, 5, 1], [0, 6, 4], [7, 0, 0], [1, 2, 3], [4, 4, 4])
"""An empty shard, all rows on one rank, a shard of one, even shards; sizes differ."""


def _written_to(x: Tensor) -> Tensor:
    y = x * 1
    y[2:5] += 1
    y[3] = 0
    y[::2].mul_(2)
    return y


def _token(x: Tensor) -> Tensor:
    return torch.cat([torch.ones(1, x.shape[1], dtype=x.dtype), x])


_PICKED = torch.tensor([0, 2, -1, 3, 3])

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda x: x[1:4] * 2,
    "steps": lambda x: x[::2].sin(),
    "difference": lambda x: x[1:] - x[:-1],
    "from in front of the first row": lambda x: x[-50:].sin() * x,
    "row": lambda x: x[2] * x,
    "last row": lambda x: x[-1].sum() * x[:-1],
    "split": lambda x: x.split([2, x.shape[0] - 2])[1].sin(),
    "cat": lambda x: torch.cat([x, 2 * x, x.sin()]),
    "token in front": lambda x: _token(x) @ torch.eye(x.shape[1], dtype=x.dtype),
    "token there and gone": lambda x: _token(x).softmax(0)[1:] * x,
    "pad": lambda x: nnf.pad(x, (0, 0, 2, 1), value=3.0).cos(),
    "shift": lambda x: x + nnf.pad(x[1:], (0, 0, 0, 1)),
    "two equal slices": lambda x: x[1:] + x.cos()[1:],
    "flat": lambda x: x.flatten(),
    "flat slice": lambda x: x[1:].flatten().sin(),
    "in place": _written_to,
    "cumsum": lambda x: x.cumsum(0).sin(),
    "cummax": lambda x: x.cummax(0)[0],
    "cummax index": lambda x: x * x.round().cummin(0)[1],
    "logcumsumexp": lambda x: x.logcumsumexp(0),
    "flip": lambda x: x.flip(0) * x,
    "roll": lambda x: x.roll(2, 0) * x,
    "repeat": lambda x: x.repeat(2, 1).sin(),
    "triangle": lambda x: (x @ x.T).tril(1).sum(1),
    "embedding": lambda x: nnf.embedding(torch.tensor([0, 2, 3, 3]), x).sin(),
    "index": lambda x: x[_PICKED].sin(),
    "gather": lambda x: torch.gather(x, 0, torch.tensor([[0, 2], [1, 1], [3, 0]])).sin(),
}

_INDICES = torch.randint(0, 9, (7, 6), generator=torch.Generator().manual_seed(0))


def _bag(mode: str) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, table: nnf.embedding_bag(x, table, mode=mode, padding_idx=3)


def _bag_of_table(mode: str) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, scale: nnf.embedding_bag(_INDICES, x, mode=mode) * scale


NOT_GATHERED: dict[
    str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor | tuple[int, ...], tuple[int, ...], set[str]]
] = {
    **{f"embedding_bag {m}": (_bag(m), _INDICES, (9, 4)) for m in ("sum", "mean", "max")},
    **{f"embedding_bag table {m}": (_bag_of_table(m), (9, 4), (4,)) for m in ("sum", "mean", "max")},
    "group_norm": (lambda x, w: nnf.group_norm(x, 2, w, w), (4, 6, 5), (6,)),
    "group_norm 2-d": (lambda x, w: nnf.group_norm(x, 3, w, w), (5, 12), (12,)),
    "cumprod": (lambda x, w: (x.relu() + x).cumprod(0) * w, (20, 4), (4,)),
    "cumulative_trapezoid": (lambda x, w: torch.cumulative_trapezoid(x, dim=0) * w, (20, 4), (4,)),
}
"""A function of what is sharded and of a plain parameter, and both of them."""

INDUCTOR = (
    "cumsum",
    "token there and gone",
    "in place",
    "shift",
    "flat",
    "flat slice",
    "index",
    "cummax",
    "difference",
)


def _check(name: str, backend: str) -> None:
    mesh = init_device_mesh("cpu", (3,))
    before = once(graphs_compiled)
    compiled = torch.compile(FUNCTIONS[name], fullgraph=True, backend=backend)
    for sizes in PARTITIONS:
        torch.manual_seed(sum(sizes))
        full = torch.randn(sum(sizes), 2, dtype=torch.float64, requires_grad=True)
        shard = full.detach().split(sizes)[rank()].clone()
        x = sc.ShardTensor.from_local(shard, mesh, [Shard(0)]).requires_grad_()
        expected, out = FUNCTIONS[name](full), compiled(x)
        torch.testing.assert_close(out.full_tensor(), expected, rtol=1e-10, atol=1e-10)
        weight = torch.linspace(-1, 2, expected.numel(), dtype=expected.dtype).view(expected.shape)
        (expected * weight).sum().backward()
        (out.full_tensor() * weight).sum().backward()
        assert x.grad.sharding.sizes(0) == tuple(sizes)
        torch.testing.assert_close(x.grad.full_tensor(), full.grad, rtol=1e-10, atol=1e-10)
    assert graphs_compiled() - before == 1


@pytest.mark.ranks(3, timeout=120, processes=False)
@pytest.mark.parametrize("name", often(spread(FUNCTIONS, 5), (len(FUNCTIONS) + 4) // 5))
def test_one_graph_for_every_partition(name: str) -> None:
    _check(name, "aot_eager")


@pytest.mark.ranks(3, timeout=200, processes=False)
@pytest.mark.parametrize("name", often(INDUCTOR, 0))
def test_one_graph_through_inductor(name: str) -> None:
    _check(name, "inductor")


class _Received(CollectiveWatch):
    """Adds up what this rank gets from others: elements of results, less what it put in."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[str, int]] = []

    def saw(self, name: str, x: Tensor, out: Tensor) -> None:
        self.rows.append((name.partition("::")[2], out.numel()))


def _traffic(function: Callable[[Tensor], object], sizes: list[int]) -> list[tuple[str, int]]:
    mesh = init_device_mesh("cpu", (3,))
    x = sc.ShardTensor.from_local(torch.randn(sizes[rank()], 2), mesh, [Shard(0)], {0: sizes})
    with _Received() as watch:
        function(x)
    return watch.rows


@pytest.mark.ranks(3, processes=False)
def test_slices_pads_and_tokens_send_nothing() -> None:
    for name in ("slice", "steps", "split", "token in front", "pad", "in place"):
        function = FUNCTIONS[name]
        if name == "in place":
            function = lambda x: x[2:5].add_(1)  # noqa: E731
        assert _traffic(function, [30, 50, 10]) == [], name


def _check_not_gathered(name: str, dim: int, sizes: list[int], run: Callable[[Tensor, Tensor], Tensor]) -> None:
    function, what, shape = NOT_GATHERED[name]
    torch.manual_seed(0)
    full = what if isinstance(what, Tensor) else torch.randn(what, dtype=torch.float64)
    full = full.detach().clone().requires_grad_(full.is_floating_point())
    weight, other = (torch.linspace(1, 2, torch.Size(shape).numel(), dtype=torch.float64).view(shape) for _ in range(2))
    weight.requires_grad_(), other.requires_grad_()
    mesh = init_device_mesh("cpu", (3,))
    shard = full.detach().split(sizes, dim)[rank()].clone()
    x = sc.ShardTensor.from_local(shard, mesh, [Shard(dim)]).requires_grad_(full.requires_grad)
    expected = function(full, weight)
    (expected.sin() * torch.arange(expected.shape[-1])).sum().backward()
    with _Received() as watch:
        out = run(x, other)
        (out.sin() * torch.arange(expected.shape[-1])).sum().backward()
    torch.testing.assert_close(out.full_tensor(), expected, rtol=1e-10, atol=1e-10)
    for got, want in ((x.grad, full.grad), (other.grad, weight.grad)):
        assert (got is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(getattr(got, "full_tensor", lambda g=got: g)(), want, rtol=1e-10, atol=1e-10)
    assert not any(kind.startswith("all_to_all") for kind, _ in watch.rows)
    assert all(numel < full.numel() for kind, numel in watch.rows if kind.startswith("all_gather"))


@pytest.mark.ranks(3, timeout=200, processes=False)
@pytest.mark.parametrize("name", often(spread(NOT_GATHERED, 3), len(NOT_GATHERED) // 3))
def test_what_needs_no_gather_gathers_nothing(name: str) -> None:
    function, what, _ = NOT_GATHERED[name]
    for dim, size in enumerate(what.shape if isinstance(what, Tensor) else what):
        dist.barrier()
        once(torch._dynamo.reset)
        before = once(graphs_compiled)
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        for sizes in ([size - 2, 0, 2], [0, 2, size - 2], [1, size - 1, 0]):
            _check_not_gathered(name, dim, sizes, function)
            if dim == 0:
                _check_not_gathered(name, dim, sizes, compiled)
        assert dim > 0 or graphs_compiled() - before == 1


@pytest.mark.ranks(3, processes=False)
def test_the_partition_of_a_slice_says_who_has_what() -> None:
    mesh = init_device_mesh("cpu", (3,))
    x = sc.ShardTensor.from_local(torch.randn([3, 5, 1][rank()], 2), mesh, [Shard(0)])
    assert x[2:5].sharding.sizes(0) == (1, 2, 0)
    assert x[1::3].sharding.sizes(0) == (1, 2, 0)
    assert nnf.pad(x, (0, 0, 4, 2)).sharding.sizes(0) == (7, 5, 3)
    assert torch.cat([x, x]).sharding.sizes(0) == (6, 10, 2)
    assert x.flip(0).sharding.sizes(0) == (1, 5, 3)
    a, b = x.split([4, 5])
    assert (a.sharding.sizes(0), b.sharding.sizes(0)) == ((3, 1, 0), (0, 4, 1))
    assert x[2:5]._local_tensor.untyped_storage().data_ptr() == x._local_tensor.untyped_storage().data_ptr()


@pytest.mark.ranks(3, processes=False)
def test_a_scan_passes_on_one_row_for_each_rank() -> None:
    sent = _traffic(lambda x: x.cumsum(0), [30, 50, 10])
    assert sent == [("all_gather_v", 3 * 2)]


@pytest.mark.ranks(3, processes=False)
def test_an_index_out_of_range_is_an_error_on_every_rank() -> None:
    mesh = init_device_mesh("cpu", (3,))
    table = sc.ShardTensor.from_local(torch.randn([3, 5, 0][rank()], 2), mesh, [Shard(0)])
    for wrong in (8, -9):
        with pytest.raises(IndexError):
            nnf.embedding(torch.tensor([wrong]), table)
        with pytest.raises(IndexError):
            table[torch.tensor([1, wrong])]


@pytest.mark.ranks(4, timeout=120, processes=False)
def test_a_dim_that_two_mesh_dims_partition() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    full = torch.arange(22.0, dtype=torch.float64).view(11, 2).cos()
    for name in ("slice", "difference", "row", "cat", "pad", "shift", "cumsum", "cummax", "flip", "roll", "index"):
        x = sc.distribute_tensor(full, mesh, [Shard(0), Shard(0)], sharding_shapes={1: [3, 0, 7, 1]}).detach()
        y = full.clone().requires_grad_()
        x.requires_grad_()
        out, expected = FUNCTIONS[name](x), FUNCTIONS[name](y)
        torch.testing.assert_close(out.full_tensor(), expected, msg=lambda m, name=name: f"{name}: {m}")
        (out.full_tensor() ** 2).sum().backward()
        (expected**2).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), y.grad, msg=lambda m, name=name: f"gradient of {name}: {m}")


@pytest.mark.ranks(3, processes=False)
def test_slices_are_clamped_as_plain_ones_are() -> None:
    mesh = init_device_mesh("cpu", (3,))
    for sizes in ([2, 1, 0], [0, 1, 0], [3, 0, 4]):
        for start, end, step in itertools.product((-9, -3, -1, None, 2, 9), (-9, -1, None, 2, 9), (1, 2)):
            full = torch.arange(2.0 * sum(sizes)).reshape(-1, 2).requires_grad_()
            shard = full.detach().split(sizes)[rank()].clone()
            x = sc.ShardTensor.from_local(shard, mesh, [Shard(0)], {0: sizes}).requires_grad_()
            out, expected = x[start:end:step], full[start:end:step]
            told = f"x[{start}:{end}:{step}] of {sizes}"
            assert torch.equal(out.full_tensor(), expected), told
            (out**2).sum().backward(), (expected**2).sum().backward()
            assert torch.equal(x.grad.full_tensor(), full.grad), told
            written, plain = x.detach().clone(), full.detach().clone()
            written[start:end:step] = 7.0
            plain[start:end:step] = 7.0
            assert torch.equal(written.full_tensor(), plain), told


@pytest.mark.ranks(3, timeout=120, processes=False)
def test_a_compiled_slice_is_clamped_where_it_has_to_be() -> None:
    mesh = init_device_mesh("cpu", (3,))
    before = once(graphs_compiled)
    compiled = torch.compile(lambda x: x[-5:].sin() * 2, fullgraph=True, backend="aot_eager")
    for sizes in ([3, 5, 1], [2, 0, 1], [0, 4, 2], [1, 1, 1], [0, 2, 3]):
        full = torch.randn(sum(sizes), 2, dtype=torch.float64).requires_grad_()
        shard = full.detach().split(sizes)[rank()].clone()
        x = sc.ShardTensor.from_local(shard, mesh, [Shard(0)], {0: sizes}).requires_grad_()
        out, expected = compiled(x), full[-5:].sin() * 2
        torch.testing.assert_close(out.full_tensor(), expected, rtol=1e-12, atol=1e-12)
        out.full_tensor().square().sum().backward(), expected.square().sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), full.grad, rtol=1e-12, atol=1e-12)
    assert graphs_compiled() - before == 2
