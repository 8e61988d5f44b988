"""Extension points: a custom op with a rule, handlers at both levels, hand-written local code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Replicate, Shard

import shardcompile as sc
from shardcompile.dispatch import Handlers
from shardcompile.testing import rank, world_size

SIZES = [5, 0, 2]


def sharded(full: Tensor) -> sc.ShardTensor:
    mesh = init_device_mesh("cpu", (world_size(),))
    return sc.ShardTensor.from_local(full.split(SIZES)[rank()].clone(), mesh, [Shard(0)], {0: SIZES})


@torch.library.custom_op("shardcompile_tests::scaled", mutates_args=())
def scaled(x: Tensor, factor: float) -> Tensor:
    return x * factor


@scaled.register_fake
def _(x: Tensor, factor: float) -> Tensor:
    return torch.empty_like(x)


scaled.register_autograd(
    lambda ctx, grad: (scaled(grad, ctx.factor), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_custom_op_with_a_rule(compiled: bool) -> None:
    asked = []

    @sc.register_sharding(torch.ops.shardcompile_tests.scaled.default)
    def rule(x: Any, factor: float) -> list[Any]:
        asked.append(tuple(x.shape))
        return [([Shard(d)], [Shard(d), None]) for d in range(x.ndim)]

    def run(x: Tensor) -> Tensor:
        return scaled(x, 3.0).sin()

    function = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    full = torch.randn(7, 2, dtype=torch.float64)
    x = sharded(full).requires_grad_()
    out = function(x)
    out.sum().backward()
    assert asked and out.placements == (Shard(0),)  # the rule was used: without one the op would gather
    torch.testing.assert_close(out.full_tensor(), (3 * full).sin())
    torch.testing.assert_close(x.grad.full_tensor(), 3 * (3 * full).cos())


@pytest.mark.ranks(3, processes=False)
def test_a_rule_of_another_length_is_refused() -> None:
    @sc.register_sharding(torch.ops.shardcompile_tests.scaled.default)
    def rule(x: Any, factor: float) -> list[Any]:
        return [([Shard(0)], [Shard(0), Shard(0), None])]

    with pytest.raises(sc.RuleError, match="2 input"):
        scaled(sharded(torch.randn(7, 2)), 3.0)


@pytest.mark.ranks(3, processes=False)
def test_a_rule_may_count_dims_of_inputs_from_the_last() -> None:
    @sc.register_sharding(torch.ops.shardcompile_tests.scaled.default)
    def rule(x: Any, factor: float) -> list[Any]:
        return [([Shard(0)], [Shard(-2), None])]

    assert scaled(sharded(torch.randn(7, 2)), 3.0).placements == (Shard(0),)

    @sc.register_sharding(torch.ops.shardcompile_tests.scaled.default)
    def unclear(x: Any, factor: float) -> list[Any]:
        return [([Shard(-2)], [Shard(0), None])]

    with pytest.raises(sc.RuleError, match="use a non-negative dim"):
        scaled(sharded(torch.randn(7, 2)), 3.0)


def maybe_compiled(function: Any, compiled: bool) -> Any:
    return torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function


@pytest.mark.ranks(3)
@pytest.mark.parametrize("compiled", [False, True])
def test_handlers_run_in_place_of_ours(compiled: bool) -> None:
    x = sharded(torch.randn(7, 2))
    seen = []

    def dispatch_handler(x: Any) -> Any:
        seen.append("floor")
        return x.neg()

    def function_handler(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        seen.append(func.__name__)
        return args[0] * 3 if func is torch.ops.aten.trunc.default else args[0]

    sc.ShardTensor.register_dispatch_handler(torch.ops.aten.floor.default, dispatch_handler)
    sc.ShardTensor.register_function_handler(torch.ceil, function_handler)
    sc.ShardTensor.register_named_function_handler("aten.trunc.default", function_handler)
    try:
        floor = maybe_compiled(torch.floor, compiled)
        torch.testing.assert_close(floor(x).to_local(), -x.to_local())
        ceil = maybe_compiled(lambda x: torch.ceil(x) * 2, compiled)
        torch.testing.assert_close(ceil(x).to_local(), x.to_local() * 2)
        trunc = maybe_compiled(torch.ops.aten.trunc.default, compiled)
        torch.testing.assert_close(trunc(x).to_local(), x.to_local() * 3)
    finally:
        Handlers.ops.clear(), Handlers.functions.clear(), Handlers.names.pop("aten.trunc.default")
    assert set(seen) == {"floor", "ceil", "trunc.default"}


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("compiled", [False, True])
def test_local_map_around_a_local_kernel(compiled: bool) -> None:
    full = torch.randn(7, 2, dtype=torch.float64)
    x = sharded(full).requires_grad_()

    def kernel(shard: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return shard * scale, torch.ones(4, dtype=shard.dtype)

    mapped = sc.local_map(kernel, ([Shard(0)], [Replicate()]), in_placements=([Shard(0)], None))
    mapped = maybe_compiled(mapped, compiled)
    out, whole = mapped(x, 2.0)
    assert out.sharding.sizes(0) == tuple(SIZES) and whole.placements == (Replicate(),)
    torch.testing.assert_close(out.full_tensor(), 2 * full)
    out.sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), torch.full_like(full, 2.0))

    named = sc.local_map(kernel, ([Shard(0)], [Replicate()]), in_placements=([Shard(0)],))
    named = maybe_compiled(named, compiled)
    torch.testing.assert_close(named(x, scale=3.0)[0].full_tensor(), 3 * full)
    if not compiled:
        with pytest.raises(sc.LayoutError, match="scale is a sharded tensor"):
            named(x, scale=x)

    strict = sc.local_map(kernel, ([Shard(1)], None), in_placements=([Shard(1)], None))
    with pytest.raises(sc.LayoutError, match="redistribute_inputs"):
        strict(x, 2.0)
    moved = sc.local_map(kernel, ([Shard(1)], None), ([Shard(1)], None), redistribute_inputs=True)
    moved = maybe_compiled(moved, compiled)
    torch.testing.assert_close(moved(x, 2.0)[0].full_tensor(), 2 * full)


@pytest.mark.ranks(3, processes=False)
def test_local_map_does_not_guess_between_two_partitions() -> None:
    mesh = init_device_mesh("cpu", (3,))
    a, b = sharded(torch.randn(7, 2)), sc.distribute_tensor(torch.randn(7, 2), mesh, [Shard(0)])
    mapped = sc.local_map(lambda a, b: a, [Shard(0)], ([Shard(0)], [Shard(0)]))
    with pytest.raises(sc.LayoutError, match="do not have one such partition"):
        mapped(a, b)
    assert mapped(a, a).sharding is a.sharding


@torch.library.custom_op("shardcompile_tests::counted", mutates_args=())
def counted(x: Tensor) -> Tensor:
    return x.clone()


@counted.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty([int(n) for n in x.shape])  # takes a symbol for a number


@pytest.mark.ranks(3, processes=False)
def test_an_op_that_specialises_on_the_size_of_a_shard_is_refused_on_every_rank() -> None:
    @sc.register_sharding(torch.ops.shardcompile_tests.counted.default)
    def rule(x: Any) -> list[Any]:
        return [([Shard(0)], [Shard(0)])]

    x = sharded(torch.randn(7, 2))
    torch.testing.assert_close(counted(x).full_tensor(), x.full_tensor())
    # One rank's shard has the size that all ranks take decisions with: that rank alone would go on.
    for sizes in (SIZES, [3, 1, 3]):
        y = sc.distribute_tensor(torch.randn(7, 2), x.device_mesh, [Shard(0)], sharding_shapes={0: sizes})
        with pytest.raises(sc.UnsupportedOpError, match="takes the size of dim 0 for a number"):
            torch.compile(counted, fullgraph=True, backend="aot_eager")(y)
