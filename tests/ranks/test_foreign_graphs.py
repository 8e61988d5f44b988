"""Graphs that are not ours, on real ranks: uneven DTensors and padded gathers by hand come out without padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.fx import Graph

from shardcompile.passes.backend import inductor_options
from shardcompile.passes.cleanup.dead_collectives import DropRepeatedWaits, ShareEqualCollectives
from shardcompile.passes.cleanup.inverse_pairs import CancelInversePairs, DropOwnSlice
from shardcompile.passes.cleanup.local_shards import ReduceThenSlice
from shardcompile.passes.foreign.normalise import NormaliseChains
from shardcompile.passes.graph.collective import collectives
from shardcompile.passes.pipeline import Pipeline
from shardcompile.passes.verify import agreed
from shardcompile.testing import rank, world_size
from tests.support.tiers import often

SIZES = [3, 0, 5]


class Seen:
    """A pass that changes nothing, and keeps which collectives and which pads there are."""

    name = "seen"

    def __init__(self) -> None:
        self.collectives: list[tuple[Any, ...]] = []
        self.pads = 0

    def __repr__(self) -> str:
        return "Seen()"

    def __call__(self, graph: Graph) -> None:
        self.collectives += [
            (c.kind, c.group_name, str([p.meta["val"].dtype for p in c.payloads]), c.sizes, c.global_size)
            for c in collectives(graph)
        ]
        self.pads += len(graph.find_nodes(op="call_function", target=torch.ops.aten.constant_pad_nd.default))

    @property
    def kinds(self) -> list[str]:
        return [c[0] for c in self.collectives]


def joint_passes(agree: Any = None) -> list[Any]:
    """For forward and backward together, before shards that this rank has not got become constants."""
    return [DropRepeatedWaits(), NormaliseChains(agree=agree)]


def passes() -> list[Any]:
    """For forward and backward, each alone."""
    return [DropRepeatedWaits(), ShareEqualCollectives(), CancelInversePairs(), DropOwnSlice(), ReduceThenSlice()]


def local(x: Any) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def trained(fn: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The result and the gradients of a function."""
    inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    out = fn(*inputs)
    if out.requires_grad:
        (local(out) ** 2).sum().backward()
    return [local(out).detach(), *(local(x.grad) for x in inputs if x.grad is not None)]


def step(fn: Callable[..., Any], inputs: Sequence[Tensor], joint: list[Any]) -> tuple[list[Tensor], Seen, Seen]:
    """The result and the gradients of a compiled function, and what its graphs held before and after the passes.

    Args:
        fn: compiled.
        inputs: of it.
        joint: the passes for forward and backward together.
    """
    before, after = Seen(), Seen()
    torch._dynamo.reset()
    options = {  # recorded, so that nothing comes from a cache
        "joint_custom_pre_pass": Pipeline([before, *joint], record=True),
        "post_grad_custom_post_pass": Pipeline([*passes(), after], record=True),
    }
    return trained(torch.compile(fn, fullgraph=True, options=options), inputs), before, after


def compare(
    fn: Callable[..., Any], inputs: Sequence[Tensor], tolerance: float = 0.0, agree: Any = None
) -> tuple[Seen, Seen]:
    """The values of the eager function, but for the last bits of Inductor's; the same collectives on every rank."""
    expected = trained(fn, inputs)
    found, before, after = step(fn, inputs, joint_passes(agree))
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    everywhere: list[Any] = [None] * world_size()
    dist.all_gather_object(everywhere, after.collectives)
    assert all(one == everywhere[0] for one in everywhere), everywhere
    return before, after


def sharded(shape: Sequence[int], *placements: Any, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    full = torch.randn(shape, dtype=torch.float64)
    return distribute_tensor(full, init_device_mesh("cpu", (world_size(),)), placements).requires_grad_()


@pytest.mark.ranks(3, timeout=300)
@pytest.mark.parametrize(("dim", "shape"), often([(1, (4, 7)), (0, (7,)), (0, (7, 4)), (1, (2, 4, 5))], 1))
def test_dtensors_of_uneven_shards_are_gathered_as_they_are(dim: int, shape: tuple[int, ...]) -> None:
    def gathered(x: DTensor) -> Tensor:
        return x.redistribute(placements=[Replicate()]).to_local() ** 3

    before, after = compare(gathered, [sharded(shape, Shard(dim))])
    assert before.kinds == ["all_gather"]
    assert after.kinds == ["all_gather_v"] and after.pads == 0


@pytest.mark.ranks(3, timeout=300)
@pytest.mark.parametrize(("dim", "shape"), often([(1, (4, 7)), (0, (7, 4)), (1, (2, 4, 5))], 1))
def test_dtensors_are_scattered_in_uneven_shards(dim: int, shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", (world_size(),))

    def scattered(x: Tensor) -> Tensor:
        return DTensor.from_local(x, mesh, [Partial()]).redistribute(placements=[Shard(dim)]).to_local() ** 3

    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    before, after = compare(scattered, [x], tolerance=1e-12)
    assert before.kinds == ["reduce_scatter", "all_gather"]
    assert after.kinds == ["reduce_scatter_v", "all_gather_v"] and after.pads == 0


@pytest.mark.ranks(3, timeout=300)
def test_an_mlp_of_dtensors() -> None:
    def mlp(x: DTensor, up: DTensor, down: DTensor) -> Tensor:
        hidden = torch.relu(x.redistribute(placements=[Replicate()]) @ up)
        return (hidden @ down).redistribute(placements=[Shard(0)]).to_local()

    inputs = [sharded((7, 4), Shard(0)), sharded((4, 7), Shard(1), seed=1), sharded((7, 5), Shard(0), seed=2)]
    before, after = compare(mlp, inputs, tolerance=1e-12)
    assert before.kinds == ["all_gather", "reduce_scatter"] * 2
    assert after.kinds == ["all_gather_v", "reduce_scatter_v"] * 2 and after.pads == 0


@pytest.mark.ranks(3, timeout=300)
@pytest.mark.parametrize(("shape", "dims"), often([((6, 2, 3), (0, 2)), ((7, 5), (0, 1)), ((4, 2), (1, 0))], 1))
def test_dtensors_are_exchanged_as_they_are(shape: tuple[int, ...], dims: tuple[int, int]) -> None:
    def exchanged(x: DTensor) -> Tensor:
        return x.redistribute(placements=[Shard(dims[1])]).to_local() ** 3

    before, after = compare(exchanged, [sharded(shape, Shard(dims[0]))], agree=agreed)
    assert before.kinds == ["all_gather"] * 2
    assert after.kinds == ["all_to_all_v"] * 2 and after.pads == 0


def padded(x: Tensor, dim: int = 0) -> Tensor:
    pads = [0] * (2 * (x.ndim - dim))
    pads[-1] = max(SIZES) - x.shape[dim]
    return F.pad(x, pads)


def by_slices(x: Tensor) -> Tensor:
    g = funcol.all_gather_tensor_autograd(padded(x), 0, dist.group.WORLD)
    return torch.cat([g[5 * r : 5 * r + n] for r, n in enumerate(SIZES)]).sin()


def by_chunks(x: Tensor) -> Tensor:
    g = funcol.wait_tensor(funcol.all_gather_tensor(padded(x), 0, dist.group.WORLD))
    return torch.cat([c[:n] for c, n in zip(g.chunk(3), SIZES, strict=True)]).sin()


def by_view(x: Tensor) -> Tensor:
    g = funcol.all_gather_tensor(padded(x), 0, dist.group.WORLD).view(3, 5, 4)
    return torch.cat([g[i, :n] for i, n in enumerate(SIZES)]).sin()


def along_columns(x: Tensor) -> Tensor:
    g = funcol.all_gather_tensor(padded(x.t(), 1), 1, dist.group.WORLD)
    return torch.cat([g[:, 5 * r : 5 * r + n] for r, n in enumerate(SIZES)], 1).sin()


def by_zeros(x: Tensor) -> Tensor:
    zeros = x.new_zeros(max(SIZES) - x.shape[0], 4)
    g = funcol.all_gather_tensor(torch.cat([x, zeros]), 0, dist.group.WORLD)
    return torch.cat([g[5 * r : 5 * r + n] for r, n in enumerate(SIZES)]).sin()


@pytest.mark.ranks(3, timeout=300)
@pytest.mark.parametrize("fn", often([along_columns, by_zeros, by_chunks, by_view], 1))
def test_gathers_by_hand(fn: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(rank())
    before, after = compare(fn, [torch.randn(SIZES[rank()], 4, dtype=torch.float64)], tolerance=1e-12)
    assert before.kinds == ["all_gather"]
    assert after.kinds == ["all_gather_v"] and after.pads == 0


@pytest.mark.ranks(3, timeout=300)
def test_a_gather_by_hand_and_its_gradient() -> None:
    torch.manual_seed(rank())
    x = torch.randn(SIZES[rank()], 4, dtype=torch.float64, requires_grad=True)
    before, after = compare(by_slices, [x], tolerance=1e-12)
    assert before.kinds == ["all_gather", "reduce_scatter"]
    assert after.kinds == ["all_gather_v", "reduce_scatter_v"]


@pytest.mark.ranks(3, timeout=300)
def test_a_scatter_by_hand_whose_padding_is_read() -> None:
    def scattered(x: Tensor) -> Tensor:
        payload = torch.cat([padded(part) for part in x.split(SIZES)])
        return funcol.reduce_scatter_tensor(payload, "sum", 0, dist.group.WORLD).cos()

    torch.manual_seed(rank())
    _, after = compare(scattered, [torch.randn(8, 4, dtype=torch.float64)], tolerance=1e-12)
    assert after.kinds == ["reduce_scatter_v"]


def halo(x: Tensor) -> Tensor:
    """Each rank's rows and a row of each neighbour: on rank 0 the graph of a padded gather of 4, 1 and 0 rows."""
    g = funcol.all_gather_tensor(x, 0, dist.group.WORLD)
    return g[max(4 * rank() - 1, 0) : 4 * rank() + 5].sin()


@pytest.mark.ranks(3, timeout=300)
def test_ranks_that_read_different_parts_are_found_out() -> None:
    x = torch.randn(4, 2, dtype=torch.float64)
    with pytest.raises(Exception, match="have compiled different collectives"):
        step(halo, [x], joint_passes())
    (found,), _, seen = step(halo, [x], joint_passes(agreed))
    torch.testing.assert_close(found, halo(x), rtol=1e-12, atol=1e-12)
    assert seen.kinds == ["all_gather"]
    _, _, seen = step(by_chunks, [torch.randn(SIZES[rank()], 4)], joint_passes(agreed))
    assert seen.kinds == ["all_gather_v"]


@pytest.mark.ranks(3, timeout=300)
def test_gathers_of_one_tensor_are_one() -> None:
    def twice(x: Tensor) -> Tensor:
        return by_chunks(x) * by_view(x)

    torch.manual_seed(rank())
    before, after = compare(twice, [torch.randn(SIZES[rank()], 4, dtype=torch.float64)], tolerance=1e-12)
    assert before.kinds == ["all_gather"] * 2
    assert after.kinds == ["all_gather_v"]


@pytest.mark.ranks(3, timeout=300)
def test_uneven_gathers_of_dtensors_and_by_hand_come_out_in_one_bucket() -> None:
    def several(x: DTensor, y: DTensor, z: Tensor) -> Tensor:
        whole = [t.redistribute(placements=[Replicate()]).to_local().sum() for t in (x, y)]
        return whole[0] * whole[1] * by_chunks(z).sum()

    torch.manual_seed(rank())
    by_hand = torch.randn(SIZES[rank()], 4, dtype=torch.float64)
    inputs = [sharded((7, 4), Shard(0)), sharded((4, 7), Shard(1), seed=1), by_hand]
    expected, *gradients = trained(several, inputs)
    seen, options = Seen(), inductor_options(foreign=True)
    pipeline = options["post_grad_custom_post_pass"]
    pipeline.passes.append(seen)
    torch._dynamo.reset()
    out, *found = trained(torch.compile(several, fullgraph=True, options=options), inputs)
    assert seen.kinds.count("all_gather_bucket") == 1 and seen.kinds.count("all_gather") == 0, seen.kinds
    # Inductor fuses the sums with other neighbours now, and adds up in another order.
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, gradients, rtol=1e-12, atol=1e-12)
