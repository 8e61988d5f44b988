"""Guards for torch's own wrappers (DTensor, DDP, FSDP1, FSDP2) and tracers, which would misinterpret local shards."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from shardcompile.compat.wrappers import check_before_wrapping, is_strided_shard, ranks_of
from shardcompile.dispatch.foreign import hold_the_same_shard
from shardcompile.errors import refusal


def guard_wrappers(sharded: type) -> None:
    """Makes torch's wrappers refuse sharded tensors where they would take a local shard for something else.

    Args:
        sharded: the class of sharded tensors.
    """

    def as_shard(shard: object, mesh: DeviceMesh) -> None:
        """Checks a new DTensor: it may wrap a sharded tensor over ranks that hold the same local shard of it."""
        if isinstance(shard, sharded) and not hold_the_same_shard(shard._spec.layout, ranks_of(mesh)):  # type: ignore[attr-defined]
            raise refusal(
                f"a DTensor over {mesh}",
                shard._spec.layout.describe(),  # type: ignore[attr-defined]
                "these ranks hold different shards of it, and a DTensor would take each for a complete local tensor. "
                "The styles of parallelize_module wrap their inputs so",
                "Pass x.to_dtensor() where the partition is torch.chunk's (redistribute with sharding_shapes gives "
                "that), x.full_tensor() for Replicate(), or parallelize over another mesh dim than the one that shards "
                "x",
            )

    def as_parameter(parameter: object) -> None:
        if isinstance(parameter, sharded):
            raise refusal(
                "fully_shard",
                f"a sharded parameter, {parameter._spec.layout.describe()}",  # type: ignore[attr-defined]
                "it would shard this rank's local shard as if that were the full parameter",
                "Sharded parameters get complete gradients without a wrapper; exclude them by ignored_params, or leave "
                "them plain and let fully_shard shard them",
            )

    def as_data(tensor: Tensor, value: object) -> None:
        if isinstance(value, sharded) and not isinstance(tensor, sharded):
            raise refusal(
                "plain.data = sharded",
                value._spec.layout.describe(),  # type: ignore[attr-defined]
                f"a plain tensor of shape {tuple(tensor.shape)} cannot become a sharded one in place",
                "Assign a new parameter, such as module.weight = nn.Parameter(sharded), or use sc.distribute_module",
            )

    check_before_wrapping(as_shard, as_parameter, as_data)


def check_convertible(x: DTensor, sharded: type) -> None:
    """Checks that a DTensor can be converted to a sharded tensor.

    Raises:
        UnsupportedOpError: on all ranks, if it cannot.
    """
    given = f"a DTensor of shape {tuple(x.shape)} with placements {list(x.placements)} on {x.device_mesh}"
    if isinstance(x.to_local(), sharded):
        raise refusal(
            "from_dtensor",
            given,
            "its shards are sharded tensors themselves, over other ranks",
            "Take x.full_tensor() or x.redistribute(...).to_local(), which is a ShardTensor",
        )
    if any(is_strided_shard(p) for p in x.placements):
        supported = [Replicate() if is_strided_shard(p) else p for p in x.placements]
        raise refusal(
            "from_dtensor",
            given,
            "its shards are in another order than that of the mesh dims, as for parameters that FSDP2 shards after "
            "tensor parallelism",
            f"First x.redistribute(placements={supported})",
        )
