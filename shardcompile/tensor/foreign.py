"""What torch's own wrappers may do with sharded tensors: DTensor, DDP, FSDP1 and FSDP2."""

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
    """Have torch's wrappers refuse sharded tensors where they would take a shard for something else.

    Args:
        sharded: the class of sharded tensors.
    """

    def as_shard(shard: object, mesh: DeviceMesh) -> None:
        """Over ranks that hold the same shard a DTensor may have it: its collectives stay among them."""
        if isinstance(shard, sharded) and not hold_the_same_shard(shard._spec.layout, ranks_of(mesh)):  # type: ignore[attr-defined]
            raise refusal(
                f"DTensor.from_local over {mesh}",
                shard._spec.layout.describe(),  # type: ignore[attr-defined]
                "these ranks hold different shards of it, and a DTensor would take each for the whole of a shard of "
                "its own. The styles of parallelize_module wrap their inputs so",
                "Pass x.to_dtensor() where the partition is torch.chunk's (redistribute with sharding_shapes gives "
                "that), "
                "x.full_tensor() for Replicate(), or parallelize over another mesh dim than the one that partitions x",
            )

    def as_whole(tensor: object) -> None:
        if isinstance(tensor, sharded):
            _refuse_as_whole(tensor)

    def as_parameter(parameter: object, wrapper: str) -> None:
        if isinstance(parameter, sharded):
            raise refusal(
                wrapper,
                f"a parameter sharded, {parameter._spec.layout.describe()}",  # type: ignore[attr-defined]
                "it would shard, bucket or average this rank's local shard as if that were the whole parameter",
                "Parameters sharded get complete gradients without a wrapper; exclude them from it (ignored_params "
                "of fully_shard, ignored_states of FSDP, modules outside of the one that DDP wraps), or leave them "
                "plain and let the wrapper sharded them",
            )

    def as_input(x: object, tracer: str) -> None:
        """AOTAutograd, which `torch.compile` uses, traces shards and sizes; other tracers only know whole tensors."""
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
                "torch.compile captures sharded tensors as one graph; a graph that torch.export has made of plain "
                "tensors runs on sharded ones",
            )

    def as_data(tensor: Tensor, value: object) -> None:
        if isinstance(value, sharded) and not isinstance(tensor, sharded):
            raise refusal(
                "plain.data = sharded",
                value._spec.layout.describe(),  # type: ignore[attr-defined]
                f"a plain tensor of shape {tuple(tensor.shape)} cannot become a sharded one in place",
                "Put a new parameter in its place, such as module.weight = nn.Parameter(sharded), or let "
                "sc.distribute_module do so",
            )

    def as_memory(tensor: object) -> None:
        if isinstance(tensor, sharded):
            refuse_memory("to_dlpack()", tensor)

    def as_part(x: object) -> None:
        if isinstance(x, sharded):
            raise refusal(
                "sparse_coo_tensor()",
                x._spec.layout.describe(),  # type: ignore[attr-defined]
                "it gives a torch.sparse_coo tensor, and shards are dense",
                "Take full_tensor() of indices and values: then the result is a plain tensor, the same on every rank",
            )

    check_before_wrapping(as_shard, as_whole, as_parameter, as_input, as_data, as_memory, as_part)


@torch.compiler.allow_in_graph  # Dynamo, which traces DTensor's functions, would fail on our layouts in its own words
def _refuse_as_whole(tensor: Sharded) -> None:
    raise refusal(
        "DTensor's distribute_tensor",
        tensor._spec.layout.describe(),
        "it takes the whole tensor",
        "Pass x.full_tensor(), or convert by x.to_dtensor()",
    )


def check_convertible(x: DTensor, sharded: type) -> None:
    """Refuse a DTensor that no sharded tensor stands for.

    Raises:
        UnsupportedOpError: on all ranks alike.
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
        whole = [Replicate() if is_strided_shard(p) else p for p in x.placements]
        raise refusal(
            "from_dtensor",
            given,
            "its shards lie in another order than that of the mesh dims, as those of parameters do that FSDP2 "
            "partitions "
            "once more after tensor parallelism",
            f"First x.redistribute(placements={whole})",
        )
