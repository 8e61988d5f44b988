"""Guards for torch's own wrappers (DTensor, DDP, FSDP1, FSDP2) and tracers, which would misinterpret local shards."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from shardcompile.compat.wrappers import check_before_wrapping, is_strided_shard, ranks_of
from shardcompile.dispatch.foreign import hold_the_same_shard
from shardcompile.errors import refusal
from shardcompile.sharded import Sharded
from shardcompile.tensor.memory import refuse_memory


def guard_wrappers(sharded: type) -> None:
    """Makes torch's wrappers refuse sharded tensors where they would take a local shard for something else.

    Args:
        sharded: the class of sharded tensors.
    """

    def as_shard(shard: object, mesh: DeviceMesh) -> None:
        """Checks `DTensor.from_local`: it may wrap a sharded tensor over ranks that hold the same local shard of it."""
        if isinstance(shard, sharded) and not hold_the_same_shard(shard._spec.layout, ranks_of(mesh)):  # type: ignore[attr-defined]
            raise refusal(
                f"DTensor.from_local over {mesh}",
                shard._spec.layout.describe(),  # type: ignore[attr-defined]
                "these ranks hold different shards of it, and a DTensor would take each for a complete local tensor. "
                "The styles of parallelize_module wrap their inputs so",
                "Pass x.to_dtensor() where the partition is torch.chunk's (redistribute with sharding_shapes gives "
                "that), x.full_tensor() for Replicate(), or parallelize over another mesh dim than the one that shards "
                "x",
            )

    def as_full_tensor(tensor: object) -> None:
        if isinstance(tensor, sharded):
            _refuse_distribute_tensor(tensor)

    def as_parameter(parameter: object, wrapper: str) -> None:
        if isinstance(parameter, sharded):
            raise refusal(
                wrapper,
                f"a sharded parameter, {parameter._spec.layout.describe()}",  # type: ignore[attr-defined]
                "it would shard, bucket or average this rank's local shard as if that were the full parameter",
                "Sharded parameters get complete gradients without a wrapper; exclude them from it (ignored_params "
                "of fully_shard, ignored_states of FSDP, modules outside of the one that DDP wraps), or leave them "
                "plain and let the wrapper shard them",
            )

    def as_input(x: object, tracer: str) -> None:
        """Refuses tracers other than AOTAutograd: they do not trace the inner tensors and their symbolic sizes."""
        if isinstance(x, sharded) and tracer == "compiled autograd":
            raise refusal(
                tracer,
                x._spec.layout.describe(),  # type: ignore[attr-defined]
                "it would compile the backward pass for the size of this rank's local shard",
                "Set torch._dynamo.config.compiled_autograd to False: the backward pass of what torch.compile compiles "
                "is compiled with it",
            )
        if isinstance(x, sharded):
            raise refusal(
                f"{tracer}, which torch.export and torch.func.linearize use as well,"
                if tracer == "make_fx"
                else tracer,
                x._spec.layout.describe(),  # type: ignore[attr-defined]
                "it would take shards for constants of the graph",
                "torch.compile captures sharded tensors in one graph; a graph that torch.export has made of plain "
                "tensors runs on sharded ones",
            )

    def as_data(tensor: Tensor, value: object) -> None:
        if isinstance(value, sharded) and not isinstance(tensor, sharded):
            raise refusal(
                "plain.data = sharded",
                value._spec.layout.describe(),  # type: ignore[attr-defined]
                f"a plain tensor of shape {tuple(tensor.shape)} cannot become a sharded one in place",
                "Assign a new parameter, such as module.weight = nn.Parameter(sharded), or use sc.distribute_module",
            )

    def as_memory(tensor: object) -> None:
        if isinstance(tensor, sharded):
            refuse_memory("to_dlpack()", tensor)

    def as_part(x: object) -> None:
        if isinstance(x, sharded):
            raise refusal(
                "sparse_coo_tensor()",
                x._spec.layout.describe(),  # type: ignore[attr-defined]
                "it returns a torch.sparse_coo tensor, and shards are dense",
                "Take full_tensor() of indices and values: then the result is a plain tensor, the same on every rank",
            )

    check_before_wrapping(as_shard, as_full_tensor, as_parameter, as_input, as_data, as_memory, as_part)


@torch.compiler.allow_in_graph  # Dynamo traces DTensor's functions; it would fail on a layout with an unclear error
def _refuse_distribute_tensor(tensor: Sharded) -> None:
    raise refusal(
        "DTensor's distribute_tensor",
        tensor._spec.layout.describe(),
        "it takes the full tensor",
        "Pass x.full_tensor(), or convert by x.to_dtensor()",
    )


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
