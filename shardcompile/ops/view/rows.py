"""Ops along a sharded dim that leave every row on its rank: slices, their gradients, writes to them, padding, joins.

The partition of the result follows from that of the input (`shardcompile.sharding.derivations`), and each rank works on
rows of its local shard. Their indices are ints in eager mode and, inside a trace, symbols that get their values when
the graph runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from shardcompile import compat
from shardcompile.collectives import derive, derive_spread, shard_size
from shardcompile.compat import OpOverload
from shardcompile.ops import NotServed, ShardedDecomposition, state
from shardcompile.ops.record import Run
from shardcompile.ops.support.copied_views import follow, note_view
from shardcompile.ops.support.global_meta import global_meta
from shardcompile.ops.support.local_shards import Scalar, index_copy
from shardcompile.ops.support.strides import in_order
from shardcompile.planning import find_plan
from shardcompile.redistribute import run_plan
from shardcompile.sharded import Sharded
from shardcompile.sharding import IntLike, Layout, Partition, Spec, contiguous_stride, transfer_dtype_of

aten = torch.ops.aten
_T = TypeVar("_T", bound=Tensor)


def wrap(like: Sharded, local: Tensor, layout: Layout, stride: Sequence[IntLike]) -> Sharded:
    """Wraps a shard that no other tensor uses in the class of `like`, stored in the order of dims of the strides."""
    return type(like)._wrap(in_order(local, stride), Spec.of(layout, tuple(stride)))


def with_partition(layout: Layout, dim: int, partition: Partition) -> Layout:
    """Replaces the partition of a dim in a layout, and so its size, by another one over the same mesh dims."""
    shape = [partition.size if d == dim else n for d, n in enumerate(layout.shape)]
    return Layout.of(layout.mesh, layout.placements, shape, layout.dtype, _replace(layout.partitions, dim, partition))


def layout_of(x: Tensor, mesh: DeviceMesh) -> Layout:
    """The layout of a tensor; that of a plain one is replicated."""
    return x._spec.layout if isinstance(x, Sharded) else Layout.whole(mesh, tuple(x.shape), x.dtype)


def moved(x: Tensor, layout: Layout) -> Tensor:
    """Redistributes a sharded or plain tensor to another layout, and returns its local shard."""
    plan = find_plan(layout_of(x, layout.mesh), layout.with_dtype(x.dtype))
    return run_plan(plan, x._local_tensor if isinstance(x, Sharded) else x)


def first_row(partition: Partition, layout: Layout) -> IntLike:
    """Index in the global dim of the first row of this rank's local shard."""
    return derive("offset", [partition], [], partition.size, layout.mesh)[1]


def has_static_sizes(x: Tensor) -> bool:
    """Whether a trace has specialised on the shard sizes of some dim. Those of an empty dim do not count: all are 0.

    Every rank then has a graph of its own. AOTAutograd may save other tensors of each, and so recompute other
    collectives in the backward pass: what a rank sends must not depend on what is saved.
    """
    partitions = x._spec.layout.partitions if isinstance(x, Sharded) else ()
    return any(
        c is not None
        and c.is_traced
        and isinstance(c.trace.local_size, int)
        and not (isinstance(c.size, int) and c.size == 0)
        for c in partitions
    )


def sliced_partition(
    partition: Partition, start: IntLike, step: int, count: IntLike, mesh: DeviceMesh
) -> tuple[Partition, IntLike]:
    """Returns the partition of `count` rows ``start, start + step, ...``, and the index in this rank's local shard of
    the first of them.
    """
    found, row = derive("slice", [partition], [start, step, count], count, mesh)
    if found.known_sizes is not None and partition.known_sizes is None:
        return found, row  # no rows at all; a static partition remembers no symbols
    unpadded = partition.provenance.unpadded
    if unpadded is not None and step == 1 and _statically_same((start, count), (unpadded[1], unpadded[0].size)):
        return unpadded[0], row
    return found.with_slice(partition, start, step), row


def base_of(partition: Partition, size: IntLike, start: IntLike, step: int) -> Partition | None:
    """Returns the partition of the `size` rows that were sliced, if a partition records that slice; otherwise None."""
    base = partition.provenance.sliced_from
    matches = base is not None and _statically_same((base[0].size, base[1], base[2]), (size, start, step))
    return base[0] if base is not None and matches else None


# Rows of a shard


def _are_ints(*values: IntLike) -> bool:
    return all(isinstance(v, int) for v in values)


def positions(x: Tensor, first: IntLike, step: int, count: IntLike) -> Tensor:
    """Row indices ``first, first + step, ...``, as a plain tensor on the device of a shard."""
    with compat.fake_mode_like(x):
        return torch.ops.prims.iota.default(
            count, start=first, step=step, dtype=torch.int64, device=x.device, requires_grad=False
        )


def take_rows(x: Tensor, dim: int, first: IntLike, step: int, count: IntLike) -> Tensor:
    """Takes rows of a shard: a view, or a copy inside a trace where their indices are symbols."""
    if _are_ints(first, count):
        return aten.slice.Tensor(x, dim, first, first + count * step, step)
    transfer_dtype, rows = transfer_dtype_of(x.dtype), positions(x, first, step, count)
    if transfer_dtype is x.dtype:
        return aten.index_select.default(x, dim, rows)
    return aten.view.dtype(aten.index_select.default(aten.view.dtype(x, transfer_dtype), dim, rows), x.dtype)


def write_rows(x: Tensor, rows: Tensor, dim: int, first: IntLike, step: int, count: IntLike) -> Tensor:
    """Returns a copy of a shard in which some rows are replaced."""
    if _are_ints(first, count):
        return aten.slice_scatter.default(x, rows, dim, first, first + count * step, step)
    return index_copy(x, dim, positions(x, first, step, count), rows)


# Slices


def begin_of(start: IntLike | None, size: IntLike) -> IntLike:
    """The row at which a slice begins, which is the first one if `start` is before it."""
    if start is None:
        return 0
    begin = row_of(start, size)
    # Decided by the global size, so that the guard is rank-invariant.
    return 0 if compat.guard_or_false(begin < 0) else begin


def row_of(index: IntLike, size: IntLike) -> IntLike:
    """The row that an index names, which counts from the end if negative; a guard decides the sign of an expression."""
    return index + size if compat.guard_or_false(index < 0) else index


def _has_unbacked_sign(index: object) -> bool:
    """Whether only the running graph can tell if an index counts from the end."""
    return compat.is_unbacked(index) and not any(map(compat.statically_known_true, (index >= 0, index < 0)))  # type: ignore[operator]


def _compute_row(index: Any, size: Any, is_bound: bool) -> IntLike:
    """Computes the row that an index names when the graph runs. Bounds of slices are clamped to the rows."""

    def make() -> list[Any]:
        with compat.unrecorded_symbols():
            row, num_rows = (torch.scalar_tensor(n, dtype=torch.int64, device="cpu") for n in (index, size))
            row = torch.where(row < 0, row + num_rows, row)
            return [(torch.minimum(row.clamp(min=0), num_rows) if is_bound else row).item()]

    key = ("row", is_bound, compat.expression_of(index), compat.expression_of(size))
    row: IntLike = compat.once_in_trace(key, make)[0]
    torch._check(row >= 0)
    torch._check(row <= size if is_bound else row < size)
    return row


def _with_computed_rows(op: OpOverload, decomposed: Run, at: int, count: int) -> ShardedDecomposition:
    """The decomposition of an op that first replaces indices of unbacked sign by rows.

    Args:
        op: an op whose arguments begin with the tensor that is indexed, or with a gradient and that tensor's sizes.
        decomposed: the decomposition for indices of known sign.
        at: position of the first index, which follows the dim.
        count: number of indices: two for the bounds of a slice, or one.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        indices = args[at : at + count]
        if not any(map(_has_unbacked_sign, indices)):
            return decomposed(*args, **kwargs)
        sizes = args[1] if isinstance(args[1], (list, tuple)) else args[0].shape
        rows = [_compute_row(i, sizes[args[at - 1]], count == 2) if _has_unbacked_sign(i) else i for i in indices]
        return op(*args[:at], *rows, *args[at + count :], **kwargs)

    return ShardedDecomposition(run, preferred=lambda call: any(map(_has_unbacked_sign, call.args[at : at + count])))


def slice_rows(
    x: Sharded, dim: int = 0, start: IntLike | None = None, end: IntLike | None = None, step: int = 1
) -> Sharded:
    """``aten.slice`` along a sharded dim."""
    dim = dim % x.ndim
    args = (x, dim, start, end, step)
    meta = global_meta(aten.slice.Tensor, args, {})
    shape, stride = compat.global_sizes(meta.shape), compat.retrace(meta.stride())
    begin = begin_of(start, x.shape[dim])
    return _view_rows(x, aten.slice.Tensor, args, dim, begin, step, shape[dim], stride)


def _slice(
    x: Sharded, dim: int = 0, start: IntLike | None = None, end: IntLike | None = None, step: int = 1
) -> Tensor | NotServed:
    if x._spec.layout.partitions[dim % x.ndim] is None:
        return NotServed("the sliced dim is not sharded")
    return slice_rows(x, dim, start, end, step)


def _decide_signs(op: OpOverload, given: Sequence[Any]) -> None:
    """Decides by a guard whether a bound of a slice, such as ``n - n // 2``, counts from the end.

    Torch's fake kernel of a slice is size-oblivious, and makes an unbacked size where it cannot tell the sign. Bounds
    are expressions of global sizes, so the guard is rank-invariant.
    """
    for bound in given[2:4]:
        if isinstance(bound, torch.SymInt):
            compat.guard_or_false(bound < 0)


def _view_rows(
    x: Sharded,
    op: OpOverload,
    args: tuple[object, ...],
    dim: int,
    begin: IntLike,
    step: int,
    count: IntLike,
    stride: Sequence[IntLike],
) -> Sharded:
    """Views `count` rows of a sharded dim; where the local shard has to be copied, the copy follows `x`."""
    layout = x._spec.layout
    partition, row = sliced_partition(layout.partition_of(dim), begin, step, count, layout.mesh)
    size = shard_size(partition, layout.mesh)
    shard = take_rows(x._local_tensor, dim, row, step, size)
    wrapped = type(x)._wrap(shard, Spec.of(with_partition(layout, dim, partition), tuple(stride)))
    note_view(x, wrapped)
    if x._copied is not None or not _are_ints(row, size):
        follow(wrapped, op, args, None, lambda: take_rows(x._local_tensor, dim, row, step, size))
    elif type(x._local_tensor) is Tensor:
        compat.share_storage(wrapped, x)
    return wrapped


def split(x: Sharded, size: int, dim: int = 0) -> list[Sharded] | NotServed:
    """``aten.split`` along a sharded dim."""
    dim = dim % x.ndim
    if x._spec.layout.partitions[dim] is None:
        return NotServed("the split dim is not sharded")
    global_meta(aten.split.Tensor, (x, size, dim), {})
    dim_size = x.shape[dim]
    count = max(int(-(-dim_size // size)) if size else 1, 1)
    return [slice_rows(x, dim, i * size, (i + 1) * size) for i in range(count)]


def split_with_sizes(x: Sharded, sizes: Sequence[IntLike], dim: int = 0) -> list[Sharded] | NotServed:
    """``aten.split_with_sizes`` along a sharded dim."""
    dim = dim % x.ndim
    if x._spec.layout.partitions[dim] is None:
        return NotServed("the split dim is not sharded")
    global_meta(aten.split_with_sizes.default, (x, sizes, dim), {})
    pieces: list[Sharded] = []
    start: Any = 0
    for size in sizes:
        pieces.append(slice_rows(x, dim, start, start + size))
        start = start + size
    return pieces


def select(x: Sharded, dim: int, index: IntLike) -> Tensor | NotServed:
    """``aten.select`` along a sharded dim: the rank that has the row sends it to the others."""
    dim = dim % x.ndim
    layout = x._spec.layout
    partition = layout.partitions[dim]
    if partition is None:
        return NotServed("the selected dim is not sharded")
    meta = global_meta(aten.select.int, (x, dim, index), {})
    selected = row_of(index, x.shape[dim])
    one, row = sliced_partition(partition, selected, 1, 1, layout.mesh)
    sliced = with_partition(layout, dim, one)
    replicated = sliced.gathered(dim)
    plan = find_plan(sliced, replicated)
    size = shard_size(one, layout.mesh)

    def shard() -> Tensor:
        row_of_x = run_plan(plan, take_rows(x._local_tensor, dim, row, 1, size))
        return in_order(aten.squeeze.dim(row_of_x, dim), meta.stride())

    kept = [d for d in range(x.ndim) if d != dim]
    out = Layout.of(
        layout.mesh,
        [_placement_without(p, dim) for p in replicated.placements],
        [layout.shape[d] for d in kept],
        layout.dtype,
        [layout.partitions[d] for d in kept],
    )
    wrapped = wrap(x, shard(), out, compat.retrace(meta.stride()))
    follow(wrapped, aten.select.int, (x, dim, index), None, shard)
    return wrapped


def _placement_without(placement: Placement, dim: int) -> Placement:
    """The placement after `dim`, which is not the sharded one, is removed."""
    return Shard(placement.dim - 1) if isinstance(placement, Shard) and placement.dim > dim else placement


def slice_scatter(
    x: Tensor, src: Tensor, dim: int = 0, start: IntLike | None = None, end: IntLike | None = None, step: int = 1
) -> Tensor | NotServed:
    """``aten.slice_scatter`` along a sharded dim: each rank writes the rows that it has."""
    x, src = reduced(x), reduced(src)
    dim = dim % x.ndim
    if not isinstance(x, Sharded) or x._spec.layout.partitions[dim] is None:
        return NotServed("the input is not sharded along the sliced dim")
    meta = global_meta(aten.slice_scatter.default, (x, src, dim, start, end, step), {})
    layout = x._spec.layout
    partition, row = sliced_partition(
        layout.partition_of(dim), begin_of(start, x.shape[dim]), step, src.shape[dim], layout.mesh
    )
    rows = moved(src, with_partition(layout, dim, partition)).to(x.dtype)
    local = write_rows(x._local_tensor, rows, dim, row, step, shard_size(partition, layout.mesh))
    return wrap(x, local, layout, compat.retrace(meta.stride()))


def select_scatter(x: Tensor, src: Tensor, dim: int, index: IntLike) -> Tensor | NotServed:
    """``aten.select_scatter`` along a sharded dim."""
    x = reduced(x)
    dim = dim % x.ndim
    if not isinstance(x, Sharded) or x._spec.layout.partitions[dim] is None:
        return NotServed("the input is not sharded along the selected dim")
    global_meta(aten.select_scatter.default, (x, src, dim, index), {})
    at = row_of(index, x.shape[dim])
    return slice_scatter(x, src.unsqueeze(dim), dim, at, at + 1)


def reduced(x: _T) -> _T:
    """Carries out all pending reductions of a tensor."""
    if isinstance(x, Sharded) and x._spec.layout.is_partial:
        out = wrap(x, moved(x, x._spec.layout.reduced()), x._spec.layout.reduced(), x._spec.stride)
        return out  # type: ignore[return-value]
    return x


# Padding, and gradients of slices


def slice_backward(
    grad: Sharded, sizes: Sequence[IntLike], dim: int, start: IntLike | None, end: IntLike | None, step: int
) -> Tensor | NotServed:
    """The gradient of a slice along a sharded dim, partitioned like what was sliced if the gradient remembers that."""
    dim = dim % len(sizes)
    partition = grad._spec.layout.partitions[dim]
    if partition is None:
        return NotServed("the gradient is not sharded along the sliced dim")
    meta = global_meta(aten.slice_backward.default, (grad, sizes, dim, start, end, step), {})
    size, begin = compat.global_sizes(meta.shape)[dim], begin_of(start, sizes[dim])
    base = base_of(partition, size, begin, step)
    if base is not None:
        _, row = derive("slice", [base], [begin, step, grad.shape[dim]], grad.shape[dim], grad._spec.layout.mesh)
        return _place_rows(grad, dim, base, row, step, 0)
    # A slice that begins after the last row has no rows. `sym_min` avoids a guard, by which its traces would differ.
    return grown(grad, dim, torch.sym_min(begin, size), step, size, 0)


def _statically_same(a: Sequence[IntLike], b: Sequence[IntLike]) -> bool:
    return all(m is n or compat.statically_known_true(m == n) for m, n in zip(a, b, strict=True))


def grown(x: Sharded, dim: int, begin: IntLike, step: int, size: IntLike, value: Scalar) -> Sharded:
    """Places row i of a sharded dim at row ``begin + i * step`` of `size` rows, and fills the others with a value."""
    partition, row = derive_spread(x._spec.layout.partition_of(dim), begin, step, size, x._spec.layout.mesh)
    return _place_rows(x, dim, partition, row, step, value)


def _place_rows(x: Sharded, dim: int, partition: Partition, row: IntLike, step: int, value: Scalar) -> Sharded:
    """`grown`, to a partition in which the shard's first row has index `row` in its new shard."""
    layout, local = x._spec.layout, x._local_tensor
    size, count = shard_size(partition, layout.mesh), local.shape[dim]
    target = with_partition(layout, dim, partition)
    if step == 1:
        before, after = _rows_like(local, dim, row, value), _rows_like(local, dim, size - row - count, value)
        out = aten.cat.default([before, local, after], dim)
    else:
        out = write_rows(_rows_like(local, dim, size, value), local, dim, row, step, count)
    return wrap(x, out, target, contiguous_stride(target.shape))


def _rows_like(x: Tensor, dim: int, count: IntLike, value: Scalar) -> Tensor:
    torch._check(count >= 0)
    return x.new_full([count if d == dim else n for d, n in enumerate(x.shape)], value)


def pad(x: Sharded, amounts: Sequence[IntLike], value: Scalar = 0) -> Tensor | NotServed:
    """``aten.constant_pad_nd`` where a padded dim is sharded: the new rows go to the first and the last rank."""
    by_dim = {x.ndim - 1 - i // 2: (amounts[i], amounts[i + 1]) for i in range(0, len(amounts) - 1, 2)}
    global_meta(aten.constant_pad_nd.default, (x, amounts, value), {})
    sharded_dims = [d for d, a in by_dim.items() if x._spec.layout.partitions[d] is not None and not _are_zero(a)]
    if not sharded_dims:
        return NotServed("no padded dim is sharded")
    x = x if value == 0 and _has_only_sums(x) else reduced(x)
    for d in sharded_dims:
        before, after = by_dim.pop(d)
        if _is_negative(before) or _is_negative(after):
            x = slice_rows(x, d, -before if _is_negative(before) else 0, after if _is_negative(after) else None)
        before, after = (0 if _is_negative(n) else n for n in (before, after))
        if _are_zero((before, after)):
            x = aten.clone.default(x)  # a slice would share its memory
        else:
            x = grown(x, d, before, 1, before + x.shape[d] + after, value)
    rest = [n for d in range(x.ndim - 1, -1, -1) for n in by_dim.get(d, (0, 0))]
    return x if _are_zero(rest) else aten.constant_pad_nd.default(x, rest, value)


def _are_zero(amounts: Sequence[IntLike]) -> bool:
    return all(isinstance(n, int) and n == 0 for n in amounts)


def _is_negative(amount: IntLike) -> bool:
    return bool(amount < 0)


def _has_only_sums(x: Sharded) -> bool:
    return all(getattr(p, "reduce_op", "sum") in ("sum", "avg") for p in x._spec.layout.placements)


# Concatenation


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor | NotServed:
    """``aten.cat`` along a sharded dim: every rank gets as many rows as it has in all tensors together."""
    ndim = max(t.ndim for t in tensors)
    kept = [t for t in tensors if t.ndim == ndim]  # torch.cat skips tensors of shape [0]
    dim = dim % max(ndim, 1)
    partitions = [t._spec.layout.partitions[dim] if ndim and isinstance(t, Sharded) else None for t in kept]
    widest = max((c for c in partitions if c is not None), key=lambda c: len(c.mesh_dims), default=None)
    if widest is None:
        return NotServed("no tensor is sharded along the concatenated dim")
    like = next(t for t in tensors if isinstance(t, Sharded))
    mesh = like._spec.layout.mesh
    meta = global_meta(aten.cat.default, (list(tensors), dim), {})
    parts: list[Any] = [
        c if c is None or c.mesh_dims == widest.mesh_dims else Partition.chunk(widest.mesh_dims, widest.parts, c.size)
        for c in partitions
    ]
    sizes = [t.shape[dim] for t in kept]
    joined, pieces = _join([n if c is None else c for c, n in zip(parts, sizes, strict=True)], sizes, mesh)
    placements, others = _common_placements(kept, dim, widest, mesh)
    shards = []
    for t, partition in zip(kept, pieces, strict=True):
        target = Layout.of(mesh, placements, t.shape, t.dtype, _replace(others, dim, partition))
        shards.append(moved(t, target).to(meta.dtype))
    layout = Layout.of(mesh, placements, compat.global_sizes(meta.shape), meta.dtype, _replace(others, dim, joined))
    out = _with_shard_symbol(aten.cat.default(shards, dim), dim, joined, mesh)
    return wrap(like, out, layout, compat.retrace(meta.stride()))


def _with_shard_symbol(x: Tensor, dim: int, partition: Partition, mesh: DeviceMesh) -> Tensor:
    """Inside a trace, gives a local shard the symbol of its partition as its size, in place of a sum of other symbols.

    Both are equal when the graph runs, but the compiler cannot know. And the backward graph could not read the terms of
    a sum off the gradients that it is given.
    """
    if not partition.is_traced:
        return x
    shape = [shard_size(partition, mesh) if d == dim else n for d, n in enumerate(x.shape)]
    dense = x.contiguous()
    return aten.as_strided.default(dense, shape, contiguous_stride(shape))


def _replace(partitions: Sequence[Partition | None], dim: int, partition: Partition | None) -> list[Partition | None]:
    return [partition if d == dim else c for d, c in enumerate(partitions)]


def _join(
    partitions: Sequence[Partition | IntLike], sizes: Sequence[IntLike], mesh: DeviceMesh
) -> tuple[Partition, list[Partition]]:
    """Returns the partition of concatenated tensors, and the one to which each of them has to be redistributed."""
    total: IntLike = sum(sizes)
    joined, _ = derive("cat", partitions, [], total, mesh)
    sharded = [c for c in partitions if isinstance(c, Partition)]
    pieces: list[Partition] = []
    start: IntLike = 0
    for partition, size in zip(partitions, sizes, strict=True):
        if isinstance(partition, Partition) and len(sharded) == 1:
            pieces.append(partition)  # need not be redistributed
        else:
            pieces.append(sliced_partition(joined, start, 1, size, mesh)[0])
        start = start + size
    return joined, pieces


def _common_placements(
    tensors: Sequence[Tensor], dim: int, partition: Partition, mesh: DeviceMesh
) -> tuple[list[Placement], list[Partition | None]]:
    """Placements, and partitions of the other dims, to which all tensors are redistributed."""
    placements: list[Placement] = [Replicate()] * len(mesh.shape)
    partitions: list[Partition | None] = [None] * tensors[0].ndim
    for m in partition.mesh_dims:
        placements[m] = torch.distributed.tensor.Shard(dim)
    layouts = [t._spec.layout for t in tensors if isinstance(t, Sharded)]
    free = {m for m in range(len(mesh.shape)) if m not in partition.mesh_dims}
    for m in sorted(free):
        now = [x.placements[m] for x in layouts]
        if len(layouts) == len(tensors) and all(p == now[0] and p.is_partial() for p in now):
            placements[m] = now[0]
    for layout in layouts:
        for d, c in enumerate(layout.partitions):
            if d != dim and c is not None and partitions[d] is None and set(c.mesh_dims) <= free:
                partitions[d] = c
                free -= set(c.mesh_dims)
                for m in c.mesh_dims:
                    placements[m] = torch.distributed.tensor.Shard(d)
    return placements, partitions


state(aten.slice.Tensor, sharded=_with_computed_rows(aten.slice.Tensor, _slice, 2, 2), check=_decide_signs)
state(aten.slice_backward.default, sharded=_with_computed_rows(aten.slice_backward.default, slice_backward, 3, 2))
state(aten.slice_scatter.default, sharded=_with_computed_rows(aten.slice_scatter.default, slice_scatter, 3, 2))
state(aten.select.int, sharded=_with_computed_rows(aten.select.int, select, 2, 1), check=_decide_signs)
state(aten.select_scatter.default, sharded=_with_computed_rows(aten.select_scatter.default, select_scatter, 3, 1))
state(aten.split.Tensor, sharded=split)
state(aten.split_with_sizes.default, sharded=split_with_sizes)
state(aten.constant_pad_nd.default, sharded=pad)
state(aten.cat.default, sharded=cat)
state(aten.size.default, sharded=lambda x: list(x._spec.shape))  # called where sizes are data-dependent
