"""Ops along a sharded dim that need rows of other ranks: cumulative ops (scans), and `flip`, `roll` and `repeat`.

A scan runs on every local shard. Its last row is the carry of the shard. The carries of all shards are gathered and
scanned, and each rank combines the carry of the shards before its own with its result (Blelloch, "Prefix sums and their
applications", 1990).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.collectives import Pending, derive, shard_size
from shardcompile.collectives.halo_exchange import FETCH_HALO, HaloExchange
from shardcompile.compat import OpOverload
from shardcompile.ops import NotServed, state
from shardcompile.ops.record import Run
from shardcompile.ops.scan.kernels import running_maximum, running_minimum
from shardcompile.ops.support.global_meta import global_meta
from shardcompile.ops.support.local_shards import Scalar, highest, lowest
from shardcompile.ops.support.precision import wide_dtype
from shardcompile.ops.support.sharded_rows import first_row, reduced, with_partition, wrap
from shardcompile.ops.view.slices import slice_rows
from shardcompile.planning import find_plan
from shardcompile.redistribute import run_plan
from shardcompile.sharded import Sharded
from shardcompile.sharding import IntLike, Layout, Partition

aten = torch.ops.aten
Scan = Callable[..., Any]
"""A cumulative op, which returns a tensor for every tensor that has dims."""


def _one_row_each(layout: Layout, dim: int, dtype: torch.dtype) -> tuple[Layout, Layout]:
    """Returns the layout of a tensor with one row on every shard, and the layout in which these rows are gathered."""
    partition = layout.partition_of(dim)
    shards = math.prod(partition.parts)
    rows = with_partition(
        layout, dim, Partition.of_sizes(partition.mesh_dims, partition.parts, [1] * shards, "fixed")
    ).with_dtype(dtype)
    return rows, rows.gathered(dim)


def _carry_in(
    layout: Layout,
    dim: int,
    carries: Sequence[Tensor],
    identities: Sequence[Scalar],
    scan: Callable[..., Sequence[Tensor]],
    from_end: bool = False,
) -> list[Tensor]:
    """Returns the carry into the local shard: the carries of all shards before it, combined to one row.

    Args:
        layout: layout of the tensor that is scanned.
        dim: the dim along which it is scanned.
        carries: the carries of the local shard: tensors of one row.
        identities: for each carry the identity element, which is the carry into the first shard.
        scan: the inclusive scan of carries along `dim`.
        from_end: whether the scan runs from the last shard to the first.
    """

    def in_scan_order(rows: Tensor) -> Tensor:
        return aten.flip.default(rows, [dim]) if from_end else rows

    layouts = [_one_row_each(layout, dim, t.dtype) for t in carries]
    gathered = [
        in_scan_order(run_plan(find_plan(rows, full), t)) for (rows, full), t in zip(layouts, carries, strict=True)
    ]
    shifted = [
        aten.cat.default([torch.full_like(t.narrow(dim, 0, 1), value), t.narrow(dim, 0, t.shape[dim] - 1)], dim)
        for t, value in zip(gathered, identities, strict=True)
    ]
    scanned = zip(layouts, scan(*shifted), strict=True)
    return [run_plan(find_plan(full, rows), in_scan_order(t)) for (rows, full), t in scanned]


def _last_row(x: Tensor, dim: int, identity: Scalar) -> Tensor:
    """Returns the last row of a shard, or a row of the identity element if the shard is empty."""
    front = x.new_full([1 if d == dim else n for d, n in enumerate(x.shape)], identity)
    # Inductor 2.11 cannot lower a slice that starts at -1 along a dim of unbacked size.
    return aten.cat.default([front, x], dim).narrow(dim, x.shape[dim], 1)


def _is_sharded(x: Sharded, dim: int) -> bool:
    return x.ndim > 0 and x._spec.layout.partitions[dim % x.ndim] is not None


def _cumulative(
    op: OpOverload, identity: float, combine: Callable[[Tensor, Tensor], Tensor], from_end: bool = False
) -> Scan:
    """Returns the decomposition of a cumulative op with the given identity element and combining op."""

    def scan(x: Sharded, dim: int, *, dtype: torch.dtype | None = None) -> Tensor | NotServed:
        if not x.ndim:
            return NotServed("a tensor of 0 dims has no rows to scan")
        meta = global_meta(op, (x, dim), {} if dtype is None else {"dtype": dtype})
        x, dim = reduced(x), dim % x.ndim
        layout = x._spec.layout
        shard = x._local_tensor.to(wide_dtype(meta.dtype))
        own = op(aten.flip.default(shard, [dim]) if from_end else shard, dim)
        out = aten.flip.default(own, [dim]) if from_end else own
        if layout.partitions[dim] is not None:
            last = _last_row(own, dim, identity)
            (before,) = _carry_in(layout, dim, [last], [identity], lambda rows: [op(rows, dim)], from_end)
            out = combine(before, out)
        return wrap(x, out.to(meta.dtype), layout.with_dtype(meta.dtype), compat.retrace(meta.stride()))

    return scan


cumsum = _cumulative(aten.cumsum.default, 0, aten.add.Tensor)
cumsum_from_end = _cumulative(aten.cumsum.default, 0, aten.add.Tensor, from_end=True)
cumprod = _cumulative(aten.cumprod.default, 1, aten.mul.Tensor)
_logcumsumexp = _cumulative(aten.logcumsumexp.default, -math.inf, aten.logaddexp.default)


def logcumsumexp(x: Tensor, dim: int) -> Tensor | NotServed:
    """``aten.logcumsumexp`` along a sharded dim; complex dtypes are left to the fallback."""
    return NotServed("the dtype is complex") if x.is_complex() else _logcumsumexp(x, dim)


def _cumulative_extremum(
    op: OpOverload,
    scan_shard: Callable[[Tensor, int], Sequence[Tensor]],
    identity: Callable[[torch.dtype], Scalar],
    wins: Callable[[Tensor, Tensor], Tensor],
) -> Run:
    """Returns the decomposition of `cummax` or `cummin`: values, and for each the last index at which it occurs."""

    def scan(x: Sharded, dim: int) -> tuple[Tensor, Tensor] | NotServed:
        if not _is_sharded(x, dim):
            return NotServed("the scanned dim is not sharded")
        meta = global_meta(op, (x, dim), {})[0]
        x, dim = reduced(x), dim % x.ndim
        layout, neutral = x._spec.layout, identity(meta.dtype)
        values, indices = scan_shard(x._local_tensor, dim)
        start: Any = first_row(layout.partition_of(dim), layout)
        indices = indices + start

        def scan_carries(rows: Tensor, at: Tensor) -> list[Tensor]:
            found, shards = scan_shard(rows, dim)
            # Indices increase from shard to shard. If the extremum is that of an empty shard, all shards before it tie
            # with it, and the last of their indices is the right one.
            return [found, aten.gather.default(running_maximum(at, dim)[0], dim, shards)]

        carries = [_last_row(values, dim, neutral), _last_row(indices, dim, -1)]
        value_before, index_before = _carry_in(layout, dim, carries, [neutral, -1], scan_carries)
        local_wins = wins(values, value_before)
        if values.is_floating_point():
            local_wins = local_wins | values.isnan()
        stride = compat.retrace(meta.stride())
        return (
            wrap(x, torch.where(local_wins, values, value_before), layout, stride),
            wrap(x, torch.where(local_wins, indices, index_before), layout.with_dtype(torch.int64), stride),
        )

    return scan


cummax = _cumulative_extremum(aten.cummax.default, running_maximum, lowest, aten.ge.Tensor)
cummin = _cumulative_extremum(aten.cummin.default, running_minimum, highest, aten.le.Tensor)


# Permutations and repetitions of rows


def flip(x: Sharded, dims: Sequence[int]) -> Tensor:
    """``aten.flip`` along sharded dims: rank i exchanges its shard with rank ``world_size - 1 - i``."""
    dims = [d % x.ndim for d in dims]
    layout, local = x._spec.layout, aten.flip.default(x._local_tensor, dims)
    for dim in dims:
        if layout.partitions[dim] is None:
            continue
        inner = 1
        for mesh_dim, count in reversed(
            list(zip(layout.partition_of(dim).mesh_dims, layout.partition_of(dim).parts, strict=True))
        ):
            partition, _ = derive("flip", [layout.partition_of(dim)], [inner, count], layout.shape[dim], layout.mesh)
            layout = with_partition(layout, dim, partition)
            inner *= count
            size = shard_size(partition, layout.mesh)
            group = compat.group_name_of(layout.mesh, mesh_dim)
            flat = torch.ops.shardcompile.reflect_shards(local, dim, size, group)
            local = Pending.of(flat, local.shape, dim, size).wait()
    return wrap(x, local, layout, x.stride())


def roll(x: Any, shifts: Sequence[IntLike], dims: Sequence[int] = ()) -> Tensor | NotServed:
    """``aten.roll`` along sharded dims: one exchange per dim sends rows to the ranks that hold their new indices."""
    if not dims and x.ndim > 1 and any(x._spec.layout.partitions):  # without dims, torch rolls the flattened tensor
        return aten.view.default(aten.roll.default(aten.reshape.default(x, [-1]), shifts, [0]), list(x.shape))
    dims = [d % max(x.ndim, 1) for d in dims] or [0]
    if not any(_is_sharded(x, d) for d in dims):
        return NotServed("no rolled dim is sharded")
    meta = global_meta(aten.roll.default, (x, shifts, dims), {})
    layout, local = x._spec.layout, x._local_tensor
    pairs = list(zip(dims, shifts, strict=True))
    unsharded = [(d, shift) for d, shift in pairs if layout.partitions[d] is None]
    if unsharded:
        local = aten.roll.default(local, [shift for _, shift in unsharded], [d for d, _ in unsharded])
    for dim, shift in pairs:
        partition = layout.partitions[dim]
        if partition is not None and len(partition.mesh_dims) == 1:
            group = compat.group_name_of(layout.mesh, partition.mesh_dims[0])
            held = partition.group_partition(compat.coordinate(layout.mesh) or ())
            rows = HaloExchange(local, dim, shift, -shift, layout.shape[dim], local.shape[dim], held, group)
            local = FETCH_HALO.start(rows).wait()
    out = wrap(x, local, layout, compat.retrace(meta.stride()))
    for dim, shift in pairs:
        if layout.partitions[dim] is not None and len(layout.partition_of(dim).mesh_dims) > 1:
            out = _rolled_over_mesh_dims(out, shift, dim)
    return out


def _rolled_over_mesh_dims(x: Sharded, shift: IntLike, dim: int) -> Sharded:
    """Rolls a dim that is sharded over several mesh dims, which no process group spans: concatenates two slices."""
    count = x.shape[dim]
    if compat.is_unbacked(count):  # no symbolic formula proves that the two slices have all rows
        begin: Any = -shift
        rows = torch.arange(begin, count + begin, device=x.device) % torch.sym_max(count, 1)
        return aten.index_select.default(x, dim, rows)  # type: ignore[no-any-return]
    start = -shift % count if count != 0 else 0
    return aten.cat.default([slice_rows(x, dim, start), slice_rows(x, dim, 0, start)], dim)  # type: ignore[no-any-return]


_repeat_by_views = compat.decomposition_by_torch(aten.repeat.default)


def repeat(x: Any, repeats: Sequence[IntLike]) -> Tensor | NotServed:
    """``aten.repeat`` with a sharded dim that is repeated: concatenates copies."""
    new = len(repeats) - x.ndim
    repeated = [
        d for d in range(x.ndim) if _is_sharded(x, d) and isinstance(repeats[new + d], int) and repeats[new + d] > 1
    ]
    if not all(isinstance(n, int) for n in repeats):
        return _repeat_by_views(x, repeats)
    if not repeated:
        return NotServed("no repeated dim is sharded")
    for d in repeated:
        x = aten.cat.default([x] * repeats[new + d], d)
    return aten.repeat.default(x, [1 if i - new in repeated else n for i, n in enumerate(repeats)])


state(aten.cumsum.default, sharded=cumsum)
state(aten.cumprod.default, sharded=cumprod)
state(aten.logcumsumexp.default, sharded=logcumsumexp)
state(aten.cummax.default, sharded=cummax)
state(aten.cummin.default, sharded=cummin)
state(aten.flip.default, sharded=flip)
state(aten.roll.default, sharded=roll)
state(aten.repeat.default, sharded=repeat)
