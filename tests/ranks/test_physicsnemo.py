"""Programs that come from PhysicsNeMo's ShardTensor find the names that they read."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

import shardcompile as sc
from shardcompile import physicsnemo
from shardcompile.dispatch import Handlers
from shardcompile.errors import LayoutError, UnsupportedOpError
from shardcompile.physicsnemo import ShardTensor, ShardTensorSpec, TensorPromotionMode
from shardcompile.testing import once, rank, world_size
from tests.support.tiers import often

SIZES = [5, 0, 2]


def sharded(full: Tensor, sizes: list[int] = SIZES, dim: int = 0) -> ShardTensor:
    mesh = init_device_mesh("cpu", (world_size(),))
    shard = full.split(sizes, dim)[rank()].clone()
    return ShardTensor.from_local(shard, mesh, [Shard(dim)], {0: sizes})


# What handlers read of x._spec


@pytest.mark.ranks(3, processes=False)
def test_a_spec_says_what_handlers_read() -> None:
    x = sharded(torch.arange(28.0).view(4, 7).T, dim=0)
    spec = x._spec
    assert isinstance(spec, ShardTensorSpec)
    assert spec.mesh is x.device_mesh and spec.placements == (Shard(0),)
    assert spec.tensor_meta == (torch.Size([7, 4]), x.stride(), torch.float32)
    assert spec.tensor_meta._replace(dtype=torch.int8).dtype is torch.int8
    assert spec.local_shape == x.to_local().shape and isinstance(spec.local_shape, torch.Size)
    assert spec.sharding_shapes() == {0: ((5, 4), (0, 4), (2, 4))}
    assert spec.sharding_shapes(mesh_dim=0) == spec.sharding_shapes()[0]


LAYOUTS: list[list[Placement]] = [
    [Shard(0), Shard(1)],
    [Shard(1), Shard(0)],
    [Shard(1), Replicate()],
    [Replicate(), Shard(0)],
    [Shard(0), Shard(0)],
    [Replicate(), Replicate()],
    [Shard(1), Partial()],
]


@pytest.mark.ranks(6, processes=False)
@pytest.mark.parametrize("placements", LAYOUTS, ids=str)
def test_shapes_make_the_same_tensor_again(placements: list[Placement]) -> None:
    """Each is compared with the shapes that the ranks have, and `from_local` takes all of them as they are."""
    mesh = init_device_mesh("cpu", (2, 3))
    full = torch.randn(7, 5)
    whole = [Replicate() if isinstance(p, Partial) else p for p in placements]
    sizes = {1: [1, 0, 2, 2, 2, 0]} if whole == [Shard(0)] * 2 else {}
    local = sc.distribute_tensor(full, mesh, whole, sharding_shapes=sizes).to_local()
    x = ShardTensor.from_local(local, mesh, placements)
    spec = x._spec
    shapes = spec.sharding_shapes()
    assert list(shapes) == [m for m, p in enumerate(placements) if p.is_shard()]
    for mesh_dim, along in shapes.items():
        if whole != [Shard(0)] * 2:
            mine = torch.tensor([[*local.shape]])
            met = sc.collectives.all_gather_even(mine, mesh.get_group(mesh_dim)).tolist()
            assert [list(s) for s in along] == met
    again = ShardTensor.from_local(local, spec.mesh, spec.placements, sharding_shapes=shapes)
    assert again.sharding == x.sharding
    for mesh_dim in {0, 1} - shapes.keys():
        with pytest.raises(LayoutError, match=f"mesh dim {mesh_dim} shards nothing"):
            spec.sharding_shapes(mesh_dim)


@contextlib.contextmanager
def handled(states_shapes: bool = True) -> Iterator[None]:
    """A handler as their tutorials write it, on local shards."""

    def double(func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> object:
        (x,) = args
        shapes = x._spec.sharding_shapes() if states_shapes else "infer"
        return ShardTensor.from_local(2 * x.to_local(), x._spec.mesh, x._spec.placements, sharding_shapes=shapes)

    ShardTensor.register_function_handler(torch.digamma, double)
    try:
        yield
    finally:
        Handlers.functions.pop(torch.digamma)


@pytest.mark.ranks(3)
def test_a_handler_of_their_tutorials() -> None:
    full = torch.randn(7, 2, dtype=torch.float64)
    x = sharded(full).requires_grad_()
    with handled():
        out = torch.digamma(x)
    assert isinstance(out, ShardTensor) and out._spec.sharding_shapes() == {0: ((5, 2), (0, 2), (2, 2))}
    out.square().sum().backward()
    torch.testing.assert_close(out.full_tensor(), 2 * full)
    assert isinstance(x.grad, ShardTensor)
    torch.testing.assert_close(x.grad.full_tensor(), 8 * full)


@pytest.mark.ranks(3)
def test_a_handler_in_a_graph_leaves_the_shapes_out() -> None:
    x = sharded(torch.randn(7, 2))
    with handled(), pytest.raises(Exception, match="In a graph leave them out"):
        torch.compile(lambda x: torch.digamma(x) - 1, fullgraph=True, backend="aot_eager")(x)
    with handled(states_shapes=False):
        out = torch.compile(lambda x: torch.digamma(x + 1), fullgraph=True, backend="aot_eager")(x)
    assert out.sharding.sizes(0) == tuple(SIZES)
    torch.testing.assert_close(out.to_local(), 2 * (x.to_local() + 1))


@pytest.mark.ranks(3, processes=False)
def test_compiled_functions_read_the_shapes_of_their_inputs() -> None:
    """And are compiled again for others; what a graph computes has no spec, as it serves all layouts."""

    def times_first(x: Any) -> Tensor:
        return x * x._spec.sharding_shapes()[0][0][0]

    compiled = torch.compile(times_first, fullgraph=True, backend="aot_eager")
    for sizes in (SIZES, [1, 3, 3], [2, 2, 5]):
        full = torch.randn(sum(sizes), 2)
        assert torch.equal(compiled(sharded(full, sizes)).full_tensor(), full * sizes[0])
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(lambda x: times_first(x + 1), fullgraph=True, backend="aot_eager")(sharded(full, sizes))


@pytest.mark.ranks(6, processes=False)
def test_shapes_of_flattened_batches_are_those_of_local_shards() -> None:
    mesh = init_device_mesh("cpu", (2, 3))
    full = torch.randn(4, 7, 2)
    x = sc.distribute_tensor(full, mesh, [Replicate(), Shard(1)], sharding_shapes={1: SIZES}).flatten(0, 1)
    along = x._spec.sharding_shapes()[1]
    assert x.to_local().shape == x._spec.local_shape == along[mesh.get_coordinate()[1]]


# Neighbours


def points_and_queries(batch: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.rand(*batch, 7, 3, dtype=torch.float64), torch.rand(*batch, 9, 3, dtype=torch.float64)


def expected_within(points: Tensor, queries: Tensor, radius: float, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """The nearest ones within a radius by all distances: indices, points and distances, 0 where there are none."""
    apart, order = torch.cdist(queries, points).sort(-1)
    apart, order = apart[..., :most], order[..., :most]
    lacking = most - order.shape[-1]
    apart = torch.nn.functional.pad(apart, (0, lacking), value=torch.inf)
    order = torch.nn.functional.pad(order, (0, lacking))
    near = apart <= radius
    rows = torch.gather(points, -2, order.flatten(-2).unsqueeze(-1).expand(*order.shape[:-2], -1, 3))
    rows = rows.unflatten(-2, order.shape[-2:])
    return order.where(near, 0), rows.where(near.unsqueeze(-1), 0), apart.where(near, 0)


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize(
    ("compiled", "batch"), often([(False, ()), (False, (1,)), (False, (2,)), (True, (1,)), (True, ()), (True, (2,))], 4)
)
def test_radius_search_is_that_of_one_process(batch: tuple[int, ...], compiled: bool) -> None:
    points, queries = points_and_queries(batch)

    def search(points: Tensor, queries: Tensor) -> tuple[Tensor, ...]:
        found = physicsnemo.radius_search(points, queries, 0.5, 8, return_dists=True, return_points=True)
        assert isinstance(found, tuple)
        return found

    p, q = sharded(points, dim=len(batch)).requires_grad_(), sharded(queries, [0, 8, 1], len(batch))
    run = torch.compile(search, fullgraph=True, backend="aot_eager") if compiled else search
    with sc.config.patch(fallback="error"):
        found = run(p, q)
        (found[1].square().sum() + found[2].sum()).backward()
    leaf = points.clone().requires_grad_()
    wanted = expected_within(leaf, queries, 0.5, 8)
    (wanted[1].square().sum() + wanted[2].sum()).backward()
    for got, want in zip(found, wanted, strict=True):
        assert got.placements == (Shard(len(batch)),)
        torch.testing.assert_close(got.full_tensor(), want)
    torch.testing.assert_close(p.grad.full_tensor(), leaf.grad)


@pytest.mark.ranks(3, processes=False)
def test_what_is_asked_for_is_returned() -> None:
    points, queries = points_and_queries()
    indices, rows, apart = once(lambda: expected_within(points, queries, 0.5, 2))
    p, q = sharded(points), sharded(queries, [0, 8, 1])
    alone = physicsnemo.radius_search(p, q, 0.5, max_points=2)
    assert isinstance(alone, Tensor)
    torch.testing.assert_close(alone.full_tensor(), indices)
    for asked, wanted in (({"return_points": True}, rows), ({"return_dists": True}, apart)):
        _, got = physicsnemo.radius_search(p, q, 0.5, max_points=2, **asked)
        torch.testing.assert_close(got.full_tensor(), wanted)
    plain = physicsnemo.radius_search(points, queries, 0.5, max_points=2)
    torch.testing.assert_close(plain, indices)
    with pytest.raises(UnsupportedOpError, match="Pass max_points"):
        physicsnemo.radius_search(p, q, 0.5)


@pytest.mark.ranks(3, processes=False)
def test_knn_is_that_of_one_process() -> None:
    points, queries = points_and_queries()
    apart, order = once(lambda: torch.cdist(queries, points).topk(4, largest=False))
    indices, distances = physicsnemo.knn(sharded(points), sharded(queries, [0, 8, 1]), 4)
    torch.testing.assert_close(indices.full_tensor(), order)
    torch.testing.assert_close(distances.full_tensor(), apart)


@torch.library.custom_op("physicsnemo::knn_scipy", mutates_args=())
def knn_scipy(points: Tensor, queries: Tensor, k: int = 3) -> tuple[Tensor, Tensor]:
    raise AssertionError("the op itself has run")


@knn_scipy.register_fake
def _(points: Tensor, queries: Tensor, k: int = 3) -> tuple[Tensor, Tensor]:
    raise AssertionError("the op itself was traced")


@torch.library.custom_op("physicsnemo::radius_search_warp", mutates_args=())
def radius_search_warp(
    points: Tensor,
    queries: Tensor,
    radius: float,
    max_points: int | None = None,
    return_dists: bool = False,
    return_points: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    raise AssertionError("the op itself has run")


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("compiled", [False, True])
def test_their_own_ops_do_not_gather(compiled: bool) -> None:
    points, queries = points_and_queries()
    p, q = sharded(points), sharded(queries, [0, 8, 1])
    with sc.config.patch(fallback="error"):
        run = torch.compile(knn_scipy, fullgraph=True, backend="aot_eager") if compiled else knn_scipy
        indices, _ = run(p, q, 4)
        found = radius_search_warp(p, q, 0.5, 2, False, True)
    torch.testing.assert_close(indices.full_tensor(), torch.cdist(queries, points).topk(4, largest=False).indices)
    wanted = expected_within(points, queries, 0.5, 2)
    torch.testing.assert_close(found[0].full_tensor(), wanted[0])
    torch.testing.assert_close(found[1].full_tensor(), wanted[1])
    assert found[2] is None
    counts = (torch.cdist(queries, points) <= 0.5).sum(1).clamp(max=2)
    torch.testing.assert_close(found[3].full_tensor(), counts)


# Promotion modes


@pytest.mark.ranks(3)  # the mode and warnings are those of a process
def test_plain_tensors_are_told_of() -> None:
    full, weight = torch.randn(7, 2), torch.randn(2)
    x = sharded(full)
    assert ShardTensor.get_promotion_mode() is TensorPromotionMode.SILENT
    with ShardTensor.promotion_mode("warn"):
        assert ShardTensor.get_promotion_mode() is TensorPromotionMode.WARN
        with pytest.warns(UserWarning, match=r"mul: auto-promoting a plain tensor of shape \(2,\)") as told:
            out = x * weight
        assert told[0].filename == __file__
        torch.testing.assert_close(out.full_tensor(), full * weight)
    with ShardTensor.promotion_mode(TensorPromotionMode.DISABLED):
        for call in (
            lambda: x * weight,
            lambda: torch.cat([x, full]),
            lambda: torch.nn.functional.linear(x, weight=full),
        ):
            with pytest.raises(UnsupportedOpError, match="DISABLED refuses"):
                call()
        assert torch.equal((x * torch.tensor(2.0) + 1 + x).full_tensor(), full * 2 + 1 + full)
        y = sharded(full).requires_grad_()
        y.square().sum().backward()
        assert torch.equal(y.grad.full_tensor(), 2 * full)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x * weight
    with pytest.raises(ValueError, match="loud"):
        ShardTensor.set_promotion_mode("loud")
