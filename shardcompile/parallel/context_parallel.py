"""`context_parallel`, a context manager that shards existing tensors in place for as long as it is active."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Shard

from shardcompile import compat
from shardcompile.api import distribute_tensor
from shardcompile.errors import LayoutError
from shardcompile.parallel.documents import balanced_partition
from shardcompile.tensor import ShardTensor


@contextlib.contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Collection[Tensor] | None = None,
    sizes: Sequence[int] | None = None,
    row_cost: float | None = None,
) -> Iterator[None]:
    """Shards tensors in place along their sequence dims, as torch's `context_parallel` does.

    The function of torch is `torch.distributed.tensor.experimental.context_parallel`.
    Inside the context each buffer *is* a sharded tensor of the same global shape, wherever the program holds a
    reference to it, so a model that receives one runs on local shards without a change. Positions that the model
    counts are global positions, and labels may be shifted across shards. Attention along the sharded dim uses the
    strategy that `shardcompile.config.attention` selects. Plain parameters get complete gradients. (In torch's version
    buffers become plain local shards: positions have to be passed in, and gradients are those of the local shard.)
    Neither entering nor leaving the context communicates.

    Afterwards each buffer is the original tensor again. Writes to it inside the context are lost, as in torch. Graphs
    that were recorded inside may still run backward. Results of the model stay sharded; see `ShardTensor.full_tensor`.

    Args:
        mesh: a mesh of one dim, or one dim of a larger mesh: ``mesh["cp"]``.
        buffers: plain tensors with the same values on every rank: input, labels, caches of positions. No parameters.
        buffer_seq_dims: the dim to shard, for each buffer.
        no_restore_buffers: buffers that stay sharded afterwards.
        sizes: shard size of each rank along the sequence dim, for buffers of equal sequence length. By default the
            partition is that of `torch.chunk`.
        row_cost: if given, the partition balances causal attention, see `balanced_partition`: the cost of a row besides
            attention, in query-key pairs. ``6 * width`` for a usual layer.

    Raises:
        LayoutError: the mesh has several dims; a buffer is a parameter, requires a gradient, is sharded already or is
            named twice; buffers and dims differ in number, or sizes do not fit; called inside of a compiled function.
    """
    buffers = [] if buffers is None else list(buffers)
    dims = [] if buffer_seq_dims is None else list(buffer_seq_dims)
    kept = [] if no_restore_buffers is None else list(no_restore_buffers)
    _check(mesh, buffers, dims, kept)
    partition = _partition_fn(mesh.size(), sizes, row_cost)
    # All buffers are sharded before the first one is swapped, so that an error leaves every buffer as it was.
    pairs = [(x, _distribute(x, dim, mesh, partition(x.shape[dim]))) for x, dim in zip(buffers, dims, strict=True)]
    for x, other in pairs:
        compat.exchange_tensors(x, other)
    try:
        yield
    finally:
        for x, other in pairs:
            if not any(x is k for k in kept):
                compat.exchange_tensors(x, other)


def _check(mesh: DeviceMesh, buffers: Sequence[Tensor], dims: Sequence[int], kept: Sequence[Tensor]) -> None:
    problem = None
    if compat.is_compiling():
        problem = "it begins and ends outside of compiled functions; call them inside of it"
    elif mesh.ndim != 1:
        problem = f"the mesh has {mesh.ndim} dims; pass one of them, as mesh['name']"
    elif len(buffers) != len(dims):
        problem = f"there are {len(buffers)} buffers and {len(dims)} buffer_seq_dims"
    elif len({id(x) for x in buffers}) < len(buffers):
        problem = "a buffer is named twice"
    elif not all(any(k is x for x in buffers) for k in kept):
        problem = "no_restore_buffers names a tensor that is not among the buffers"
    for i, (x, dim) in enumerate(zip(buffers, dims, strict=False)):
        if problem is None and (why := _problem(x, dim)) is not None:
            problem = f"buffer {i} {why}"
    if problem is not None:
        raise LayoutError(f"context_parallel: {problem}")


def _problem(x: Tensor, dim: int) -> str | None:
    """Returns why a tensor cannot be sharded in place, or None if it can."""
    if isinstance(x, ShardTensor):
        return f"is sharded already: {x._spec.layout.describe()}"
    if type(x) is not Tensor:
        workaround = "; parameters stay replicated" if isinstance(x, torch.nn.Parameter) else ""
        return f"is a {type(x).__name__}, not a plain tensor{workaround}"
    if x.requires_grad:
        return "requires a gradient; use distribute_tensor, or ShardTensor.from_local, which is differentiable"
    if not -x.ndim <= dim < x.ndim:
        return f"of shape {tuple(x.shape)} has no dim {dim}"
    return None


def _partition_fn(
    num_ranks: int, sizes: Sequence[int] | None, row_cost: float | None
) -> Callable[[int], list[int] | None]:
    """Returns a function from the number of rows to the shard sizes; None stands for torch.chunk's partition."""
    if sizes is not None and row_cost is not None:
        raise LayoutError("context_parallel: both sizes and row_cost determine the partition; pass one of them")

    def partition(num_rows: int) -> list[int] | None:
        if row_cost is not None:
            return balanced_partition([num_rows], num_ranks, row_cost=row_cost)
        if sizes is not None and (len(sizes) != num_ranks or sum(sizes) != num_rows):
            raise LayoutError(
                f"context_parallel: sizes {list(sizes)} do not shard {num_rows} rows over {num_ranks} ranks"
            )
        return None if sizes is None else list(sizes)

    return partition


def _distribute(x: Tensor, dim: int, mesh: DeviceMesh, sizes: list[int] | None) -> ShardTensor:
    shapes = None if sizes is None else {0: sizes}
    return distribute_tensor(x, mesh, [Shard(dim % x.ndim)], src_data_rank=None, sharding_shapes=shapes)
