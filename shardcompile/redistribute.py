"""Executes a redistribution plan on this rank's local shard."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Shard

from shardcompile import compat
from shardcompile.collectives import Decoded, Pending, local_shape_of, reductions, shard_size
from shardcompile.collectives.all_to_all import ALL_TO_ALL_V, AllToAllV
from shardcompile.collectives.gathers import ALL_GATHER_V, REDUCE_SCATTER_V, AllGatherV, ReduceScatterV
from shardcompile.collectives.local_shards import TAKE_SHARD, TakeShard
from shardcompile.collectives.ranges import FETCH_RANGES, Ranges
from shardcompile.collectives.segment_exchange import REGROUP_ROWS, Regroup
from shardcompile.collectives.shards import dense_copy
from shardcompile.planning import RedistributionPlan, Step
from shardcompile.sharding import GroupPartition, Layout, Partition, Unflattened, with_one_segment


def run_plan(plan: RedistributionPlan, local: Tensor, *, async_op: bool = False) -> Tensor:
    """Redistributes this rank's local shard from the plan's source layout to its target layout.

    Args:
        plan: a plan of `find_plan`.
        local: this rank's local shard in the layout `plan.src`.
        async_op: whether the caller waits for the last collective.
    """
    if plan.parts:
        for part in plan.parts:
            local = run_plan(part, local)
        return local
    if plan.unflattened is not None:
        return _run_in_view(plan, plan.unflattened, local)
    for step in plan.steps:
        if step.kind == "take_shard":
            local = _take_shard(step, local)
            continue
        if step.kind == "all_reduce" and step.src.mesh.shape[step.mesh_dim] == 1:
            local = local.clone()  # a group of one rank: there is one term, and nothing to reduce
            continue
        unfinished = async_op and step is plan.steps[-1]
        pending = _start_annotated(step, local) if compat.is_traced() else _start(step, local)
        local = pending.result() if unfinished else pending.wait()
    return local


def _run_in_view(plan: RedistributionPlan, unflattened: Unflattened, local: Tensor) -> Tensor:
    """Runs the steps of a plan in the view that splits segmented dims, and flattens the result again."""
    if not plan.steps:
        return local
    src, dst = unflattened.layout(plan.src), unflattened.layout(plan.dst)
    moved = run_plan(RedistributionPlan(src, dst, plan.steps), _reshape(local, unflattened.shape(local.shape)))
    return _reshape(moved, local_shape_of(plan.dst))


def _reshape(x: Tensor, shape: Sequence[int | torch.SymInt]) -> Tensor:
    """Copies to a dense tensor and views it: while tracing, `reshape` itself would guard on the local shard sizes."""
    return torch.ops.aten.view.default(dense_copy(x), list(shape))


def _start_annotated(step: Step, x: Tensor) -> Pending | Decoded:
    """Starts a step in a trace, annotating the collective's node with the redistribution that it belongs to."""
    with _annotation(step):
        return _start(step, x)


def _annotation(step: Step) -> contextlib.AbstractContextManager[None]:
    mesh, m = step.src.mesh, step.mesh_dim
    move = f"{step.src.describe_placements()} -> {step.dst.describe_placements()}"
    name = mesh.mesh_dim_names[m] if mesh.mesh_dim_names else str(m)
    return compat.annotate_nodes(redistribution=move, mesh_dim=name)


def _start(step: Step, x: Tensor) -> Pending | Decoded:
    return _RUNNERS[step.kind](step, x)


def _coordinate(layout: Layout) -> Sequence[int]:
    coordinate = compat.coordinate(layout.mesh)
    if coordinate is None:
        raise AssertionError("ranks outside of the mesh hold no shards of its tensors")
    return coordinate


def _shard_dim(layout: Layout, mesh_dim: int) -> tuple[int, Partition]:
    placement = layout.placements[mesh_dim]
    assert isinstance(placement, Shard)
    return placement.dim, layout.partition_of(placement.dim)


def _size(partition: Partition, layout: Layout) -> int | torch.SymInt:
    """Returns the size of this rank's local shard, also for the outer part of a nested partition in a trace."""
    if partition.known_sizes is not None and compat.is_traced() and partition.is_even:
        return partition.known_sizes[0]  # keeps the graph rank-invariant
    return shard_size(partition, layout.mesh)


def _size_after_gather(layout: Layout, dim: int) -> int | torch.SymInt:
    partition = layout.partitions[dim]
    return layout.shape[dim] if partition is None else _size(partition, layout)


def _ref(partition: Partition, layout: Layout) -> GroupPartition:
    return partition.group_partition(_coordinate(layout))


def _group(step: Step) -> str:
    return compat.group_name_of(step.src.mesh, step.mesh_dim)


def _all_gather(step: Step, x: Tensor) -> Pending:
    dim, partition = _shard_dim(step.src, step.mesh_dim)
    total = _size_after_gather(step.dst, dim)
    return ALL_GATHER_V.start(AllGatherV(x, dim, total, _ref(partition, step.src), _group(step)))


def _all_reduce(step: Step, x: Tensor) -> Pending | Decoded:
    placement = step.src.placements[step.mesh_dim]
    assert isinstance(placement, Partial)
    return reductions.all_reduce(x, placement.reduce_op, _group(step))


def _reduce_scatter(step: Step, x: Tensor) -> Pending:
    placement = step.src.placements[step.mesh_dim]
    assert isinstance(placement, Partial)
    dim, partition = _shard_dim(step.dst, step.mesh_dim)
    shard = _size(partition, step.dst)
    arguments = ReduceScatterV(x, dim, shard, placement.reduce_op, _ref(partition, step.dst), _group(step))
    return REDUCE_SCATTER_V.start(arguments)


def _all_to_all(step: Step, x: Tensor) -> Pending:
    src_dim, src_partition = _shard_dim(step.src, step.mesh_dim)
    dst_dim, dst_partition = _shard_dim(step.dst, step.mesh_dim)
    total = _size_after_gather(step.dst, src_dim)
    shard = _size(dst_partition, step.dst)
    src, dst = _ref(src_partition, step.src), _ref(dst_partition, step.dst)
    return ALL_TO_ALL_V.start(AllToAllV(x, src_dim, dst_dim, total, shard, src, dst, _group(step)))


def _fetch_ranges(step: Step, x: Tensor) -> Pending:
    dim, src_partition = _shard_dim(step.src, step.mesh_dim)
    _, dst_partition = _shard_dim(step.dst, step.mesh_dim)
    outer = dst_partition.coarsen()
    total = step.dst.shape[dim] if outer is None else _size(outer, step.dst)
    shard = _size(dst_partition, step.dst)
    src, dst = _ref(src_partition, step.src), _ref(dst_partition, step.dst)
    return FETCH_RANGES.start(Ranges(x, dim, total, shard, src, dst, [], None, _group(step)))


def _regroup_rows(step: Step, x: Tensor) -> Pending:
    dim, src = _shard_dim(step.src, step.mesh_dim)
    dst = step.dst.partition_of(dim)
    src_ref, dst_ref = _ref(with_one_segment(src), step.src), _ref(with_one_segment(dst), step.dst)
    total, shard = step.dst.shape[dim], _size(dst, step.dst)
    return REGROUP_ROWS.start(
        Regroup(x, dim, total, shard, src_ref, dst_ref, src.num_segments, dst.num_segments, _group(step))
    )


def _take_shard(step: Step, x: Tensor) -> Tensor:
    dim, partition = _shard_dim(step.dst, step.mesh_dim)
    shard = _size(partition, step.dst)
    rows = x.shape[dim]
    if isinstance(x.stride(dim), int) and x.stride(dim) == 0 and not (isinstance(rows, int) and rows <= 1):
        # The dim is expanded: all rows share memory. Unlike a custom op, a slice is fused with its consumers. A dim of
        # one row may have stride 0 as well, but a trace cannot rely on the local shard having at most one row.
        return x.narrow(dim, 0, shard).clone(memory_format=torch.contiguous_format)
    return TAKE_SHARD.call(TakeShard(x, dim, shard, _ref(partition, step.dst), _group(step)))  # type: ignore[no-any-return]


_RUNNERS: dict[str, Callable[[Step, Tensor], Pending | Decoded]] = {
    "all_reduce": _all_reduce,
    "all_gather_v": _all_gather,
    "reduce_scatter_v": _reduce_scatter,
    "all_to_all_v": _all_to_all,
    "fetch_ranges": _fetch_ranges,
    "regroup_rows": _regroup_rows,
}
