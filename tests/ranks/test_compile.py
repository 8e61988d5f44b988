"""Compiled training and layouts that change: values against one process, number of graphs on every rank."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Replicate, Shard

import shardcompile as sc
from examples.poisson.model import PointTransformer, mean_squared_error
from shardcompile.testing import LocalRanks, assert_matches_single_device, mesh, once, rank, world_size
from tests.support.tiers import often

PARTITIONS = {2: [7, 0], 3: [5, 0, 2], 4: [3, 0, 1, 3]}
TIGHT = {"rtol": 1e-10, "atol": 1e-10}


def mesh_1d() -> DeviceMesh:
    return init_device_mesh("cpu", (world_size(),))


def mine(full: Tensor, sizes: list[int], dim: int = 0) -> Tensor:
    return full.split(sizes, dim)[rank()].clone()


def sharded(full: Tensor, sizes: list[int], mesh: DeviceMesh, dim: int = 0) -> sc.ShardTensor:
    return sc.ShardTensor.from_local(mine(full, sizes, dim), mesh, [Shard(dim)], {0: sizes})


def counted(function: Callable[..., Any], backend: str) -> tuple[Callable[..., Any], CompileCounterWithBackend]:
    counter = once(lambda: CompileCounterWithBackend(backend))
    return torch.compile(function, fullgraph=True, backend=counter), counter


def same_everywhere(value: int) -> None:
    values = [None] * world_size()
    dist.all_gather_object(values, value)
    assert len(set(values)) == 1, values


def mlp() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2)).double()


@pytest.mark.ranks(3, timeout=300, processes=False)
@pytest.mark.parametrize("backend", often(["eager_tensor", "aot_eager", "shardcompile", "inductor"], 2))
def test_ten_optimizer_steps_equal_one_process(backend: str) -> None:
    ten_optimizer_steps(backend)


@pytest.mark.nightly
@pytest.mark.ranks(2, 4, timeout=300, processes=False)
@pytest.mark.parametrize("backend", ["eager_tensor", "aot_eager", "shardcompile", "inductor"])
def test_ten_optimizer_steps_on_other_worlds(backend: str) -> None:
    ten_optimizer_steps(backend)


def ten_optimizer_steps(backend: str) -> None:
    mesh, sizes = mesh_1d(), PARTITIONS[world_size()]
    model = mlp()
    reference = copy.deepcopy(model)

    def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return ((net(x) - y) ** 2).mean() + net(x).softmax(0).amax()

    def step_loss(x: Tensor, y: Tensor) -> Tensor:
        return loss_of(model, x, y)

    run, counter = (step_loss, None) if backend == "eager_tensor" else counted(step_loss, backend)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (model, reference)]
    for step in range(10):
        full_x = torch.randn(7, 3, dtype=torch.float64)
        full_y = torch.randn(7, 2, dtype=torch.float64)
        rolled = sizes[step % len(sizes) :] + sizes[: step % len(sizes)]
        losses = [run(sharded(full_x, rolled, mesh), sharded(full_y, rolled, mesh))]
        losses.append(loss_of(reference, full_x, full_y))
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.testing.assert_close(losses[0].full_tensor(), losses[1], **TIGHT)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert type(ours) is nn.Parameter and type(ours.grad) is Tensor
        torch.testing.assert_close(ours, theirs, **TIGHT)
    if counter is not None:
        assert counter.frame_count == 1
        same_everywhere(counter.frame_count)


def random_sizes(rng: random.Random, ranks: int) -> list[int]:
    while True:
        sizes = [rng.choice([0, 1, 2, 3, 5, 16, 17, 40]) for _ in range(ranks)]
        if sum(sizes) >= 3:
            return sizes


@pytest.mark.ranks(3, timeout=600, processes=False)
@pytest.mark.parametrize("backend", often(["aot_eager", "shardcompile"], 0))
def test_one_graph_serves_100_layouts(backend: str) -> None:
    mesh = mesh_1d()
    torch.manual_seed(1)
    model = PointTransformer(channels=16, heads=2, slices=4, layers=1).double()
    reference = copy.deepcopy(model)
    run, counter = counted(lambda x, y: mean_squared_error(model(x), y), backend)
    rng = random.Random(5)
    for _ in range(100):
        sizes = random_sizes(rng, world_size())
        full_x = torch.randn(sum(sizes), 5, dtype=torch.float64)
        full_y = torch.randn(sum(sizes), dtype=torch.float64)
        model.zero_grad(), reference.zero_grad()
        loss = run(sharded(full_x, sizes, mesh), sharded(full_y, sizes, mesh))
        expected = mean_squared_error(reference(full_x), full_y)
        loss.backward(), expected.backward()
        torch.testing.assert_close(loss.full_tensor(), expected, **TIGHT)
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-8, atol=1e-12)
    assert counter.frame_count == 1  # the bar is 3
    same_everywhere(counter.frame_count)


EQUAL_FIRST = [([5, 0, 2], [5, 0, 2]), ([5, 0, 2], [1, 3, 3]), ([0, 7, 0], [2, 2, 3]), ([1, 1, 7], [1, 1, 7])]
DIFFERENT_FIRST = [([1, 0, 6], [1, 3, 3]), ([5, 0, 2], [5, 0, 2]), ([9, 0, 0], [2, 2, 5])]


def graphs_of_two_inputs(function: Callable[..., Tensor], partitions: list[tuple[list[int], list[int]]]) -> int:
    """Compile a function of two tensors, compare values and gradients for each pair of partitions, and count the graphs."""
    mesh = mesh_1d()
    run, counter = counted(function, "aot_eager")
    for pair in partitions:
        full = [torch.randn(sum(sizes), 3, dtype=torch.float64, requires_grad=True) for sizes in pair]
        partition = [sharded(x.detach(), sizes, mesh).requires_grad_() for x, sizes in zip(full, pair, strict=True)]
        out, expected = run(*partition), function(*full)
        torch.testing.assert_close(out.full_tensor(), expected, **TIGHT)
        out.square().sum().backward(), expected.square().sum().backward()
        for x, y in zip(partition, full, strict=True):
            torch.testing.assert_close(x.grad.full_tensor(), y.grad, **TIGHT)
    same_everywhere(counter.frame_count)
    return counter.frame_count


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("partitions", often([EQUAL_FIRST, DIFFERENT_FIRST], 1))
def test_two_inputs_whose_partitions_are_sometimes_equal(partitions: list[tuple[list[int], list[int]]]) -> None:
    def combined(x: Tensor, y: Tensor) -> Tensor:
        return (x * y).softmax(0) + torch.cat([x, y], 1)[:, 1:4] + torch.where(x > 0, y, x)

    # Equal or not: that is a difference in what is communicated.
    assert graphs_of_two_inputs(combined, partitions) == 2


@pytest.mark.ranks(3, processes=False)
def test_two_inputs_that_never_meet_may_be_partition_alike_first_and_otherwise_later() -> None:
    def apart(x: Tensor, y: Tensor) -> Tensor:
        return x.softmax(0).square().sum(0) + y.cos().T @ torch.cat([y, 2 * y]).split(y.shape[0])[1] @ x.mean(0)

    assert graphs_of_two_inputs(apart, [*EQUAL_FIRST, ([5, 1, 2], [0, 9, 1]), ([1, 1, 7], [1, 0, 1])]) == 1


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("backend", often(["aot_eager", "inductor"], 1))
def test_sharded_results_feed_the_next_compiled_function(backend: str) -> None:
    mesh = mesh_1d()
    weight = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    first, one = counted(lambda x: torch.tanh(x @ weight), backend)
    second, two = counted(lambda h: (h * h).sum(0), backend)
    for sizes in ([5, 0, 2], [1, 1, 9], [0, 0, 4]):
        full = torch.randn(sum(sizes), 3, dtype=torch.float64)
        weight.grad = None
        hidden = first(sharded(full, sizes, mesh))
        assert hidden.sharding.sizes(0) == tuple(sizes)
        torch.testing.assert_close(hidden.to_local(), mine(torch.tanh(full @ weight), sizes), **TIGHT)
        second(hidden).sum().backward()
        ours, weight.grad = weight.grad, None
        (torch.tanh(full @ weight) ** 2).sum().backward()
        torch.testing.assert_close(ours, weight.grad, **TIGHT)
    assert (one.frame_count, two.frame_count) == (1, 1)


@pytest.mark.ranks(3, processes=False)
def test_a_gradient_with_another_partition_is_brought_to_the_output() -> None:
    mesh = mesh_1d()
    weight = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    run, _ = counted(lambda x: torch.tanh(x @ weight), "aot_eager")
    sizes, other = [5, 0, 2], [1, 3, 3]
    full, factor = torch.randn(7, 3, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)
    out = run(sharded(full, sizes, mesh))
    moved = out.redistribute(sharding_shapes={0: other})
    (moved * sharded(factor, other, mesh)).sum().backward()
    ours, weight.grad = weight.grad, None
    (torch.tanh(full @ weight) * factor).sum().backward()
    torch.testing.assert_close(ours, weight.grad, **TIGHT)

    weight.grad = None
    out = run(sharded(full, sizes, mesh))
    out.backward(sharded(factor, other, mesh))
    torch.testing.assert_close(weight.grad, ours, **TIGHT)

    out = run(sharded(full, sizes, mesh))
    (again,) = torch.autograd.grad(out, weight, sharded(factor, other, mesh))
    torch.testing.assert_close(again, ours, **TIGHT)


@pytest.mark.ranks(3, processes=False)
def test_a_gradient_of_a_view_that_is_returned_is_brought_to_its_layout() -> None:
    torch.manual_seed(0)
    full = torch.randn(7, 3, dtype=torch.float64)
    x = sharded(full, [4, 0, 3], mesh_1d()).requires_grad_()
    y, z = torch.compile(lambda x: (x.sin().t(), x.cos()), fullgraph=True, backend="aot_eager")(x)
    (y.sum() + z.sum()).backward()  # of a sum: replicated
    torch.testing.assert_close(x.grad.full_tensor(), full.cos() - full.sin())


@pytest.mark.ranks(3)
@pytest.mark.parametrize("backend", often(["aot_eager", "inductor"], 1))
def test_crossings_inside_a_compiled_function(backend: str) -> None:
    mesh = mesh_1d()

    def crossings(x: sc.ShardTensor) -> tuple[Tensor, ...]:
        doubled = x * 2
        whole = doubled.redistribute(placements=[Replicate()])
        columns = doubled.redistribute(placements=[Shard(1)])
        back = columns.redistribute(placements=[Shard(0)])
        return whole.to_local().sum(0), doubled.full_tensor().cumsum(0), columns.sin(), back, doubled.to_local() + 1

    run, counter = counted(crossings, backend)
    for sizes in ([5, 0, 2], [1, 1, 9], [0, 4, 0]):
        full = torch.randn(sum(sizes), 4, dtype=torch.float64)
        x = sharded(full, sizes, mesh).requires_grad_()
        total, running, columns, back, shard = run(x)
        torch.testing.assert_close(total, (2 * full).sum(0), **TIGHT)
        torch.testing.assert_close(running, (2 * full).cumsum(0), **TIGHT)
        torch.testing.assert_close(columns.full_tensor(), (2 * full).sin(), **TIGHT)
        torch.testing.assert_close(back.full_tensor(), 2 * full, **TIGHT)
        torch.testing.assert_close(shard, mine(2 * full + 1, sizes), **TIGHT)
        assert columns.placements == (Shard(1),) and columns.sharding.sizes(1) == (2, 2, 0)
        # All results: PyTorch refuses a backward from some of a compiled function's subclass outputs (172556).
        torch.autograd.backward([t.sum() for t in (total, running, columns, back, shard)])
        below = torch.arange(len(full), 0, -1, dtype=torch.float64)[:, None]
        expected = 2 + 2 * below + 2 * (2 * full).cos() + 2 + 2
        torch.testing.assert_close(x.grad.full_tensor(), expected, **TIGHT)
    assert counter.frame_count == 1
    same_everywhere(counter.frame_count)


@pytest.mark.ranks(4, processes=False)
def test_two_mesh_dims_with_changing_partitions() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    weight = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    run, counter = counted(lambda x: torch.relu(x @ weight).sum(0), "aot_eager")
    i, j = mesh.get_coordinate()
    for rows, columns in (([3, 4], [2, 4]), ([0, 5], [5, 1]), ([1, 1], [6, 0])):
        full = torch.randn(sum(rows), 6, dtype=torch.float64)
        shard = full.split(rows)[i].split(columns, 1)[j].clone()
        x = sc.ShardTensor.from_local(shard, mesh, [Shard(0), Shard(1)], {0: rows, 1: columns})
        weight.grad = None
        out = run(x)
        out.sum().backward()
        ours, weight.grad = weight.grad, None
        expected = torch.relu(full @ weight).sum(0)
        expected.sum().backward()
        torch.testing.assert_close(out.full_tensor(), expected, **TIGHT)
        torch.testing.assert_close(ours, weight.grad, **TIGHT)
    assert counter.frame_count <= 3
    same_everywhere(counter.frame_count)


@pytest.mark.ranks(2)
def test_sharded_parameters_compile_once_and_keep_their_layout() -> None:
    mesh = mesh_1d()
    torch.manual_seed(0)
    full = torch.randn(5, 3, dtype=torch.float64)
    weight = nn.Parameter(sc.distribute_tensor(full, mesh, [Shard(0)], sharding_shapes={0: [4, 1]}))
    plain = full.clone().requires_grad_()
    run, counter = counted(lambda x: (x @ weight.t()).pow(2).sum(), "aot_eager")
    optimizer, reference = torch.optim.SGD([weight], lr=1e-2), torch.optim.SGD([plain], lr=1e-2)
    for _ in range(3):
        x = torch.randn(4, 3, dtype=torch.float64)
        optimizer.zero_grad(), reference.zero_grad()
        run(x).backward()
        (x @ plain.t()).pow(2).sum().backward()
        assert weight.grad.sharding.sizes(0) == (4, 1)
        optimizer.step(), reference.step()
        torch.testing.assert_close(weight.full_tensor(), plain, **TIGHT)
    assert counter.frame_count == 1


@pytest.mark.ranks(3, processes=False)
def test_comm_debug_mode_counts_collectives_inside_of_ops() -> None:
    mesh = mesh_1d()
    x = sharded(torch.randn(7, 3), [5, 0, 2], mesh)
    with CommDebugMode() as mode:
        (x / x.sum()).redistribute(placements=[Replicate()])
    counts = {str(op): count for op, count in mode.get_comm_counts().items()}
    assert sum(counts.values()) == 2 and counts["shardcompile.all_gather_v"] == 1, counts


@pytest.mark.ranks(3, processes=False)
def test_a_pending_sum_is_reduced_before_it_is_spread_out() -> None:
    mesh = mesh_1d()
    total = sharded(torch.randn(7, 3), [5, 0, 2], mesh).sum(0, keepdim=True)
    assert total.sharding.is_partial
    assert total.expand(7, 3).placements == (Replicate(),)


@pytest.mark.ranks(3, timeout=300)
@pytest.mark.parametrize(
    ("backend", "stated"),
    often([("aot_eager", False), ("inductor", True), ("aot_eager", True), ("inductor", False)], 1),
)
def test_from_local_inside_a_compiled_function(backend: str, stated: bool) -> None:
    once(torch._dynamo.reset)
    mesh, model = mesh_1d(), mlp()
    reference = copy.deepcopy(model)

    def loss_of(net: nn.Module, x: Tensor) -> Tensor:
        y = net(x)
        return (y.softmax(0) * x.sum(1, keepdim=True)).sum() + y.square().mean()

    def whole(shard: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
        x = sc.ShardTensor.from_local(shard, mesh, [Shard(0)], {0: sizes} if stated else "infer")
        moved = x.redistribute(placements=[Shard(1)]).redistribute(placements=[Replicate()])
        return loss_of(model, x).full_tensor(), moved.to_local()

    run, counter = counted(whole, backend)
    for sizes in ([4, 2, 5], [2, 7, 3], [6, 2, 2]):
        full = torch.randn(sum(sizes), 3, dtype=torch.float64)
        shard = mine(full, sizes).requires_grad_()
        torch._dynamo.maybe_mark_dynamic(shard, 0)
        model.zero_grad(), reference.zero_grad()
        loss, moved = run(shard, sizes if stated else [])
        torch.testing.assert_close(moved, full, rtol=0, atol=0)
        expected_input = full.clone().requires_grad_()
        expected = loss_of(reference, expected_input)
        loss.backward(), expected.backward()
        torch.testing.assert_close(loss, expected, **TIGHT)
        torch.testing.assert_close(shard.grad, mine(expected_input.grad, sizes), **TIGHT)
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-8, atol=1e-12)
    assert counter.frame_count == (2 if stated else 1)  # Dynamo takes numbers for constants until they change
    same_everywhere(counter.frame_count)


@pytest.mark.ranks(2, timeout=120)  # the current mesh is one for all threads
def test_the_current_mesh_is_the_default_inside_a_compiled_function() -> None:
    meshes = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["a"], mesh_1d()
    run, counter = counted(lambda shard: sc.ShardTensor.from_local(shard, placements=[Shard(0)]).sum(), "aot_eager")
    for current in (*meshes, *meshes):
        with current:
            torch.testing.assert_close(run(torch.ones(2 + rank(), 3)).full_tensor(), torch.tensor(15.0))
            assert run(torch.ones(2 + rank(), 3)).device_mesh is current
    assert counter.frame_count == 2
    with pytest.raises(Exception, match="No device mesh is currently active"):
        run(torch.ones(2, 3))


@pytest.mark.ranks(3, processes=False)
def test_shards_that_do_not_belong_together_are_found_inside_a_compiled_function() -> None:
    mesh = mesh_1d()

    def total(shard: Tensor) -> Tensor:
        return sc.ShardTensor.from_local(shard, mesh, [Shard(0)]).sum().full_tensor()

    run = torch.compile(total, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(torch.ones(rank(), 2)), torch.tensor(6.0))
    with pytest.raises(sc.ShardError, match=r"the shards do not belong together"):
        run(torch.ones(2, 3 if rank() == 1 else 2))
    torch.testing.assert_close(run(torch.ones(rank(), 2)), torch.tensor(6.0))


@pytest.mark.ranks(3, timeout=300, processes=False)
@pytest.mark.parametrize("dynamic", [None, True])
def test_inputs_with_gradients_compile_alike_on_ranks_with_and_without_rows(dynamic: bool | None) -> None:
    mesh, net = mesh_1d(), mlp()
    counter = once(lambda: CompileCounterWithBackend("aot_eager"))
    compiled = torch.compile(lambda x: net(x).softmax(0), fullgraph=True, dynamic=dynamic, backend=counter)
    for sizes in ([6, 0, 5], [1, 2, 3], [0, 0, 4], [9, 1, 1]):
        full = torch.randn(sum(sizes), 3, dtype=torch.float64, requires_grad=True)
        shard = full.detach().split(sizes)[rank()].clone().requires_grad_()
        x = sc.ShardTensor.from_local(shard, mesh, [Shard(0)], {0: sizes})
        assert x.requires_grad and not x._local_tensor.requires_grad
        compiled(x).square().sum().backward()
        net(full).softmax(0).square().sum().backward()
        torch.testing.assert_close(shard.grad, full.grad.split(sizes)[rank()], **TIGHT)
    same_everywhere(counter.frame_count)
    assert counter.frame_count <= 2


@pytest.mark.ranks(3, timeout=300, processes=False)
@pytest.mark.parametrize("backend", often(["aot_eager", "inductor"], 1))
def test_shards_that_first_have_no_columns_compile_once(backend: str) -> None:
    mesh = mesh_1d()
    run, counter = counted(lambda x: (x.sin() * 2).softmax(1).square().sum(), backend)
    for sizes in ([2, 0, 2], [0, 1, 3], [4, 2, 0], [1, 1, 1]):
        full = torch.randn(5, sum(sizes), dtype=torch.float64, requires_grad=True)
        shard = mine(full.detach(), sizes, 1).requires_grad_()
        x = sc.ShardTensor.from_local(shard, mesh, [Shard(1)], {0: sizes})
        loss = run(x)
        loss.backward()
        expected = (full.sin() * 2).softmax(1).square().sum()
        expected.backward()
        torch.testing.assert_close(loss.full_tensor(), expected, **TIGHT)
        torch.testing.assert_close(shard.grad, full.grad.split(sizes, 1)[rank()], **TIGHT)
    assert counter.frame_count == 1
    same_everywhere(counter.frame_count)


@pytest.mark.ranks(3, timeout=300, processes=False)
@pytest.mark.parametrize("backend", often(["aot_eager", "inductor"], 1))
def test_shards_that_are_views_at_any_offset_compile_once(backend: str) -> None:
    mesh = mesh_1d()
    run, counter = counted(lambda x: x - x.mean(0, keepdim=True), backend)
    for sizes in ([4, 1, 2], [0, 7, 0], [1, 1, 5], [3, 3, 3], [0, 0, 1], [10, 20, 3]):
        full = torch.randn(sum(sizes), 3, dtype=torch.float64)
        x = sc.ShardTensor.from_local(full.split(sizes)[rank()], mesh, [Shard(0)], {0: sizes})
        torch.testing.assert_close(run(x).full_tensor(), full - full.mean(0, keepdim=True), **TIGHT)
    same_everywhere(counter.frame_count)
    assert counter.frame_count <= 2  # a size of 1 has a graph of its own


@pytest.mark.ranks(2, timeout=200, processes=False)
def test_inputs_that_have_gradients_already() -> None:
    torch.manual_seed(0)
    mesh, full = mesh_1d(), [torch.randn(7, 3, dtype=torch.float64) for _ in range(6)]

    def gathered(*xs: Any) -> Any:
        return sum(x.redistribute(placements=[Replicate()]).sin().sum() for x in xs)

    for sizes in ([6, 1], [0, 7]):
        # Compiled anew each time, with gradients of six inputs, whose symbols have other names.
        once(torch._dynamo.reset)
        inputs = [sharded(x, sizes, mesh).requires_grad_() for x in full]
        for x in inputs:
            x.grad = torch.zeros_like(x)
        torch.compile(gathered, fullgraph=True, backend="inductor")(*inputs).backward()
        for x, whole in zip(inputs, full, strict=True):
            torch.testing.assert_close(x.grad.full_tensor(), whole.cos())


NESTED = [Shard(1), Shard(1)]


@pytest.mark.ranks(4, mesh=(2, 2), timeout=300, processes=False)
@pytest.mark.parametrize(
    ("before", "after"),
    often(
        [
            (NESTED, [Replicate(), Replicate()]),
            (NESTED, [Shard(1), Replicate()]),
            (NESTED, [Replicate(), Shard(1)]),
            (NESTED, [Shard(1), Shard(0)]),
            ([Shard(1), Shard(0)], [Replicate(), Shard(0)]),
            ([Shard(1), Shard(0)], [Shard(0), Shard(0)]),
        ],
        1,
    ),
)
def test_dims_partition_twice_are_redistributed_inside_a_compiled_function(before: list[Any], after: list[Any]) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 7, 2, dtype=torch.float64)

    def moved(x: Any) -> Any:
        y = x.sin()
        return (y.redistribute(placements=after) if isinstance(y, sc.ShardTensor) else y).cos()

    assert_matches_single_device(moved, [x], [before], mesh=mesh(), steps=2, backend="aot_eager")


@pytest.mark.ranks(4, mesh=(2, 2), timeout=300, processes=False)
def test_a_reduction_of_shards_that_are_not_contiguous() -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 5, 4, dtype=torch.float64)

    def summed(x: Tensor) -> Tensor:
        return x.sum(0).t().sin()

    assert_matches_single_device(summed, [x], [[Shard(0), Shard(1)]], mesh=mesh(), steps=2, backend="aot_eager")


@pytest.mark.ranks(2, processes=False)
def test_around_a_graph_break_ops_run_as_they_are() -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 3, dtype=torch.float64)

    def broken(x: Tensor) -> Tensor:
        try:  # Dynamo cannot break inside of it: the whole frame runs eagerly
            y = x.sin()
            torch._dynamo.graph_break()
            return (y @ y.T).softmax(0) @ y
        finally:
            pass

    partition = sharded(x, [6, 1], mesh_1d()).requires_grad_()
    x.requires_grad_()
    out, expected = torch.compile(broken, backend="eager")(partition), broken(x)
    out.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(out.full_tensor(), expected)
    torch.testing.assert_close(partition.grad.full_tensor(), x.grad)


@pytest.mark.ranks(3, timeout=300)
def test_one_function_for_many_placements_compiles_alike_on_every_rank() -> None:
    """What was a shard's size in one call is a size in the next, and Dynamo remembers which numbers have changed."""
    torch.manual_seed(0)
    mesh, full = mesh_1d(), [torch.randn(2, 3, 5, 4, dtype=torch.float64) for _ in range(3)]

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        one_row = q[:, :, :1].expand(2, 3, 5, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v) + one_row

    reference = [x.clone().requires_grad_() for x in full]
    expected = attended(*reference)
    expected.square().sum().backward()
    run, counter = counted(attended, "aot_eager")
    for dim in (0, 2, 3, 1, 2):
        inputs = [sc.distribute_tensor(x, mesh, [Shard(dim)]).requires_grad_() for x in full]
        out = run(*inputs)
        out.square().sum().backward()
        torch.testing.assert_close(out.full_tensor(), expected, **TIGHT)
        for x, y in zip(inputs, reference, strict=True):
            torch.testing.assert_close(x.grad.full_tensor(), y.grad, **TIGHT)  # type: ignore[attr-defined]
    same_everywhere(counter.frame_count)
    assert counter.frame_count == 4, "one for each dim"


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x[1:],
    "turned": lambda x: x.T,
    "every other": lambda x: x[::2],
    "columns": lambda x: x[:, 1:],
}


@pytest.mark.ranks(3, timeout=200, processes=False)
@pytest.mark.parametrize(
    ("name", "dim"),
    often([("columns", 1), ("turned", 1), ("rows", 1), ("rows", 0), ("every other", 0)], 2),
)
def test_views_of_sharded_tensors_are_inputs_like_others(name: str, dim: int) -> None:
    mesh, view = mesh_1d(), VIEWS[name]
    run, counter = counted(lambda x: x.sin() * 2, "aot_eager")
    for sizes in ([0, 2, 3], [2, 0, 4], [1, 1, 4], [0, 6, 1], [1, 1, 0], [3, 3, 3]):  # and views of a size of 1
        shape = (sum(sizes), 4) if dim == 0 else (4, sum(sizes))
        full = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        x = sharded(full.detach(), sizes, mesh, dim).requires_grad_()
        out, expected = run(view(x)), view(full).sin() * 2
        torch.testing.assert_close(out.full_tensor(), expected, **TIGHT)
        out.square().sum().backward(), expected.square().sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), full.grad, **TIGHT)
    same_everywhere(counter.frame_count)
    assert counter.frame_count == 1


COPIED: dict[str, Callable[[Tensor], Tensor]] = {
    "a row": lambda x: x[1],
    "of unbind": lambda x: x.unbind(0)[0],
    "part of a row": lambda x: x[0][1:],
    "diagonal": lambda x: x.diagonal(),
}


@pytest.mark.ranks(3, timeout=200, processes=False)
@pytest.mark.parametrize("name", often(list(COPIED), 1))
def test_views_that_had_to_be_copied_are_inputs_that_a_graph_reads(name: str) -> None:
    mesh, view = mesh_1d(), COPIED[name]
    run, counter = counted(lambda x: x.sin() * 2, "aot_eager")
    for sizes in ([0, 2, 3], [2, 0, 4], [1, 1, 4], [0, 6, 1]):
        full = torch.randn(sum(sizes), 4, dtype=torch.float64, requires_grad=True)
        x = sharded(full.detach(), sizes, mesh).requires_grad_()
        out, expected = run(view(x)), view(full).sin() * 2
        torch.testing.assert_close(out.full_tensor(), expected, **TIGHT)
        out.square().sum().backward(), expected.square().sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), full.grad, **TIGHT)
        with torch.no_grad():
            kept = view(x.detach())
            x.detach().mul_(3)
            with pytest.raises(Exception, match="has been written to since"):
                run(kept)
            torch.testing.assert_close(
                run(view(x.detach())).full_tensor(), (view(full.detach()) * 3).sin() * 2, **TIGHT
            )
    same_everywhere(counter.frame_count)


@pytest.mark.ranks(3, timeout=200, processes=False)
@pytest.mark.parametrize("name", often(["a row", "of unbind"], 1))
def test_a_graph_does_not_write_to_a_view_that_had_to_be_copied(name: str) -> None:
    mesh, view = mesh_1d(), COPIED[name]
    full = torch.randn(5, 4, dtype=torch.float64)
    x = sharded(full, [0, 2, 3], mesh)
    writes: list[Callable[[Tensor], Any]] = [lambda v: v.add_(1), lambda v: v[1:].zero_(), lambda v: v.copy_(v + 1)]
    for write in writes:
        with pytest.raises(Exception, match="in a compiled function writes to an input that is a view"):
            torch.compile(write, fullgraph=True, backend="aot_eager")(view(x))
        torch.testing.assert_close(x.full_tensor(), full, rtol=0, atol=0)
    run = torch.compile(lambda x: view(x).add_(1), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(x).full_tensor(), view(full).add_(1))
    torch.testing.assert_close(x.full_tensor(), full, rtol=0, atol=0)


IN_THE_MIDDLE: dict[str, Callable[[Tensor], Tensor]] = {
    "from the second on": lambda x: x[:, 1:],
    "up to the last": lambda x: x[:, :-1],
    "with a dim in front": lambda x: x[:, 2:][:, None],
    "turned": lambda x: x[:, 1:].transpose(0, 2),
    "and others": lambda x: x[:, 1:, 1:],
}


@pytest.mark.ranks(3, timeout=300)
@pytest.mark.parametrize(
    ("name", "backend"),
    often([("from the second on", "aot_eager"), *((n, "aot_eager") for n in IN_THE_MIDDLE), ("turned", "inductor")], 1),
)
def test_rows_of_the_middle_dim_are_one_graph_on_every_rank(name: str, backend: str) -> None:
    """Such a slice leaves memory of a shard unused, on the ranks alone that have rows which are left out."""
    once(torch._dynamo.reset)
    mesh, view = mesh_1d(), IN_THE_MIDDLE[name]

    def function(x: Tensor) -> Tensor:
        return x.sin().softmax(1) * 2 + x.flatten(0, 1).mean()

    run, counter = counted(function, backend)
    for sizes in ([0, 2, 4], [2, 0, 5], [1, 2, 4], [0, 9, 1], [3, 3, 3], [6, 0, 0]):
        full = torch.randn(2, sum(sizes), 3, dtype=torch.float64, requires_grad=True)
        x = sharded(full.detach(), sizes, mesh, 1).requires_grad_()
        out, expected = run(view(x)), function(view(full))
        torch.testing.assert_close(out.full_tensor(), expected, **TIGHT)
        out.square().sum().backward(), expected.square().sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), full.grad, **TIGHT)
    same_everywhere(counter.frame_count)
    assert counter.frame_count == 1


@pytest.mark.ranks(3, timeout=200, processes=False)
@pytest.mark.parametrize("name", often(["columns", "rows", "turned"], 1))
def test_a_compiled_function_writes_through_a_view_that_it_gets(name: str) -> None:
    mesh, view = mesh_1d(), VIEWS[name]

    def add(x: Tensor) -> Tensor:
        return x.add_(1) * 2

    run, _ = counted(add, "aot_eager")
    for sizes in ([0, 2, 3], [2, 0, 4], [1, 1, 4]):
        full = torch.randn(4, sum(sizes), dtype=torch.float64)
        x = sharded(full, sizes, mesh, 1)
        torch.testing.assert_close(run(view(x)).full_tensor(), add(view(full)), **TIGHT)
        torch.testing.assert_close(x.full_tensor(), full, **TIGHT)


@pytest.mark.ranks(4, mesh=(2, 2), timeout=200, processes=False)
def test_a_slice_of_a_tensor_that_is_partition_twice_is_turned() -> None:
    run, counter = counted(lambda x: x[None, :-1].permute([2, 1, 0]), "aot_eager")
    i, j = mesh().get_coordinate()
    for rows, columns in (([0, 2], [3, 3]), ([1, 3], [0, 4]), ([2, 2], [1, 3]), ([5, 0], [1, 1])):
        full = torch.randn(sum(rows), sum(columns), dtype=torch.float64, requires_grad=True)
        shard = full.detach().split(rows)[i].split(columns, 1)[j].clone()
        placed = sc.ShardTensor.from_local(shard, mesh(), [Shard(0), Shard(1)], {0: rows, 1: columns})
        x = placed.detach().requires_grad_()
        out, expected = run(x), full[None, :-1].permute([2, 1, 0])
        torch.testing.assert_close(out.full_tensor(), expected, **TIGHT)
        out.square().sum().backward(), expected.square().sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), full.grad, **TIGHT)
    same_everywhere(counter.frame_count)
    assert counter.frame_count == 2  # one for the slice of size 1


@pytest.mark.ranks(4, mesh=(2, 2), timeout=200, processes=False)
def test_an_size_that_a_view_works_out_is_broadcast_where_it_is_one() -> None:
    def least(x: Tensor, y: Tensor) -> Tensor:
        return torch.minimum(x.view(-1, 1, 2), y.reshape(2, 1, 1))

    run, counter = counted(least, "aot_eager")
    for columns, rows in (([1, 1], [0, 2]), ([0, 2], [1, 1])):
        full = [torch.randn(1, 2, dtype=torch.float64), torch.randn(2, dtype=torch.float64)]
        x = sc.distribute_tensor(full[0], mesh(), [Replicate(), Shard(1)], sharding_shapes={1: columns})
        y = sc.distribute_tensor(full[1], mesh(), [Shard(0), Replicate()], sharding_shapes={0: rows})
        torch.testing.assert_close(run(x, y).full_tensor(), least(*full))
    same_everywhere(counter.frame_count)
    assert counter.frame_count == 1


@pytest.mark.ranks(3, processes=False)
def test_where_a_shard_starts_is_refused_in_a_graph_and_sizes_of_an_input_are_known() -> None:
    mesh = mesh_1d()
    scaled = torch.compile(lambda x: x * x.sharding.sizes(0)[0], fullgraph=True, backend="aot_eager")
    for sizes in ([2, 0, 3], [1, 1, 4], [0, 5, 0], [3, 3, 1]):
        full = torch.randn(sum(sizes), 3)
        torch.testing.assert_close(scaled(sharded(full, sizes, mesh)).full_tensor(), full * sizes[0])
    with pytest.raises(
        Exception, match=r"offsets\(\) of .* inside a compiled function: one graph serves every partition"
    ):
        torch.compile(lambda x: x * x.offsets(0), backend="aot_eager")(sharded(torch.randn(5, 3), [2, 0, 3], mesh))


@pytest.mark.ranks(3, processes=False)
def test_arithmetic_with_a_size_that_is_a_symbol() -> None:
    def calculated(x: Tensor, like: Tensor) -> list[Tensor]:
        n = like.shape[0]
        return [x // n, n // (x + 1), x % n, x + n, n - x, x * n, x / n, x**n, x < n, x.floor_divide(n), x.clamp(max=n)]

    full = torch.arange(14).view(7, 2)
    x = sharded(full, [5, 0, 2], mesh_1d())
    run = torch.compile(calculated, fullgraph=True, dynamic=True, backend="aot_eager")
    for ours, theirs in zip(run(x, torch.ones(3, 2)), calculated(full, torch.ones(3, 2)), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs, rtol=0, atol=0)


def _same_for_every_width(mesh: DeviceMesh, partition: bool, counter: CompileCounterWithBackend) -> None:
    def function(x: Any) -> Any:
        return (x * x.shape[1]).sin().sum(0)

    run = torch.compile(function, fullgraph=True, backend=counter)
    for width in (4, 6, 7):
        full = torch.randn(5, width, dtype=torch.float64, generator=torch.Generator().manual_seed(width))
        sizes = {"sharding_shapes": {0: [4, 1]}} if partition else {}
        x: Any = sc.distribute_tensor(full, mesh, [Shard(0) if partition else Replicate()], **sizes)
        torch._dynamo.maybe_mark_dynamic(x, 1)
        torch.testing.assert_close(run(x).full_tensor(), function(full))


@pytest.mark.parametrize("partition", [False, True])
def test_a_dim_that_a_user_marks_as_dynamic_has_one_graph(partition: bool) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    with LocalRanks(2, processes=False) as ranks:
        ranks(_same_for_every_width, partition, counter)
    assert counter.frame_count == 1


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize(("backend", "wide"), often([("inductor", 32), ("aot_eager", 32), ("inductor", 4)], 1))
def test_columns_whose_number_is_a_formula_of_the_rows(backend: str, wide: int) -> None:
    """A view asks whether the shard has elements: its rows times the formula. Some rank has no row, or one."""

    def run(x: Any) -> Any:
        rows = x.shape[1]
        columns = wide * ((rows + -rows % 4) // 4) // rows
        return x[..., :1].sin().expand(-1, -1, columns).reshape(2, rows, -1, max(wide // 16, 1)).cos()

    compiled = torch.compile(run, fullgraph=True, backend=backend)
    for sizes in ([7, 0, 5], [1, 8, 3], [9, 7, 0]):
        full = torch.randn(2, sum(sizes), 3, dtype=torch.float64)
        x = sc.distribute_tensor(full, mesh(), [Shard(1)], sharding_shapes={0: sizes}).requires_grad_()
        plain = full.clone().requires_grad_()
        found, expected = compiled(x), run(plain)
        torch.testing.assert_close(found.full_tensor(), expected)
        found.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), plain.grad)


@pytest.mark.ranks(2, processes=False)
def test_compiled_code_runs_below_autograd() -> None:
    """Autograd has been traced; its kernels of ops that are defined in Python take longer than a small exchange."""
    seen: list[str] = []

    def kernel(x: Tensor) -> Tensor:
        seen.append("kernel")
        return x.clone()

    def autograd_kernel(x: Tensor) -> Tensor:
        if type(x) is Tensor:  # not while it is traced
            seen.append("autograd kernel")
        with torch._C._AutoDispatchBelowAutograd():
            return op(x)

    library = torch.library.Library(f"below_autograd_{rank()}", "DEF")
    library.define("note(Tensor x) -> Tensor", tags=[torch.Tag.pt2_compliant_tag])
    library.impl("note", kernel, "CompositeExplicitAutograd")
    library.impl("note", autograd_kernel, "Autograd")
    op = getattr(torch.ops, f"below_autograd_{rank()}").note.default
    torch.library.register_fake(op, torch.empty_like, lib=library)

    def run(x: Any) -> Any:
        return sc.local_map(op, out_placements=[Shard(0)])(x.detach().cos() * 2) + x.cumsum(0)

    x = sc.distribute_tensor(torch.randn(7, 2), init_device_mesh("cpu", (2,)), [Shard(0)]).requires_grad_()
    torch.compile(run, fullgraph=True, backend="shardcompile")(x).sum().backward()
    assert seen == ["kernel"]
