"""`context_parallel`: tensors that a program holds already are sharded for as long as a context lasts."""

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
    """Sharded tensors along their sequences in place, as `torch.distributed.tensor.experimental.context_parallel` does.

    Inside, each buffer *is* a sharded tensor of the same global shape, wherever the program has a reference to it. So a
    model that is given one runs on local shards without a change. Positions that it counts are those of the whole
    sequence, and labels may be shifted across shards. Attention goes along the sharded as
    `shardcompile.config.attention` says. Plain parameters get complete gradients. (In torch's version buffers become
    plain shards: positions have to be handed over, and gradients are those of the shard.) Nothing is sent when the
    context begins or ends.

    Afterwards each buffer is the tensor that it was. What was written to it inside is gone, as in torch. Graphs that
    were recorded inside may still run backward. Results of the model stay sharded; see `ShardTensor.full_tensor`.

    Args:
        mesh: ranks in one dim, or one dim of a mesh: ``mesh["cp"]``.
        buffers: plain tensors with the same values on every rank: input, labels, caches of positions. No parameters.
        buffer_seq_dims: for each buffer the dim to shard.
        no_restore_buffers: those that stay sharded afterwards.
        sizes: rows of each rank, for buffers that all have as many rows. Equal shards by default, as `torch.chunk` has
            them.
        row_cost: if given, shards balance causal attention, see `balanced_partition`: what a row costs besides, in
            pairs of a query and a key. ``6 * width`` for a usual layer.

    Raises:
        LayoutError: the mesh has several dims; a buffer is a parameter, wants a gradient, is sharded already or is
            named twice; buffers and dims differ in number, or sizes do not fit; called inside of a compiled function.
    """
    buffers = [] if buffers is None else list(buffers)
    dims = [] if buffer_seq_dims is None else list(buffer_seq_dims)
    kept = [] if no_restore_buffers is None else list(no_restore_buffers)
    _check(mesh, buffers, dims, kept)
    partition = _sharder(mesh.size(), sizes, row_cost)
    # All are sharded before the first one is exchanged, so that none is if one does not fit.
    pairs = [(x, _shards(x, dim, mesh, partition(x.shape[dim]))) for x, dim in zip(buffers, dims, strict=True)]
    for x, shards in pairs:
        compat.exchange_tensors(x, shards)
    try:
        yield
    finally:
        for x, whole in pairs:
            if not any(x is k for k in kept):
                compat.exchange_tensors(x, whole)


def _check(mesh: DeviceMesh, buffers: Sequence[Tensor], dims: Sequence[int], kept: Sequence[Tensor]) -> None:
    problem = None
    if compat.is_compiling():
        problem = "it begins and ends outside of compiled functions; call them inside of it"
    elif mesh.ndim != 1:
        problem = f"the mesh has {mesh.ndim} dims; hand over one of them, as mesh['name']"
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
    """Why a tensor cannot be sharded in place."""
    if isinstance(x, ShardTensor):
        return f"is sharded already: {x._spec.layout.describe()}"
    if type(x) is not Tensor:
        way_out = "; parameters stay whole" if isinstance(x, torch.nn.Parameter) else ""
        return f"is a {type(x).__name__}, not a plain tensor{way_out}"
    if x.requires_grad:
        return "requires a gradient; use distribute_tensor, or ShardTensor.from_local, which is differentiable"
    if not -x.ndim <= dim < x.ndim:
        return f"of shape {tuple(x.shape)} has no dim {dim}"
    return None


def _sharder(ranks: int, sizes: Sequence[int] | None, row_cost: float | None) -> Callable[[int], list[int] | None]:
    """From a number of rows to those of each rank; None is torch.chunk's sharded."""
    if sizes is not None and row_cost is not None:
        raise LayoutError("context_parallel: sizes say how rows are sharded, and so does row_cost; give one of them")

    def partition(rows: int) -> list[int] | None:
        if row_cost is not None:
            return balanced_partition([rows], ranks, row_cost=row_cost)
        if sizes is not None and (len(sizes) != ranks or sum(sizes) != rows):
            raise LayoutError(f"context_parallel: sizes {list(sizes)} do not sharded {rows} rows over {ranks} ranks")
        return None if sizes is None else list(sizes)

    return partition


def _shards(x: Tensor, dim: int, mesh: DeviceMesh, sizes: list[int] | None) -> ShardTensor:
    shapes = None if sizes is None else {0: sizes}
    return distribute_tensor(x, mesh, [Shard(dim % x.ndim)], src_data_rank=None, sharding_shapes=shapes)
