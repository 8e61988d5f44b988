"""Slices along a sharded dim, their gradients, and writes to them: every row stays on its rank.

The partition of the result follows from that of the input (`shardcompile.sharding.derivations`), and each rank works on
rows of its local shard. Nothing is sent. In a trace the op `derive_partition` computes the partition
(`shardcompile.collectives.derived_partitions`), and its sizes are unbacked. Slices along other dims, and slices of all
rows, are served by the rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement, Shard

from shardcompile import compat
from shardcompile.collectives import derive, shard_size
from shardcompile.compat import OpOverload
from shardcompile.ops import NotServed, ShardedDecomposition, state
from shardcompile.ops.record import Run
from shardcompile.ops.support.copied_views import follow, note_view
from shardcompile.ops.support.global_meta import global_meta
from shardcompile.ops.support.sharded_rows import (
    are_ints,
    base_of,
    local_shard_in,
    place_rows,
    place_rows_at,
    reduced,
    sliced_partition,
    take_rows,
    with_partition,
    wrap,
    write_rows,
)
from shardcompile.ops.support.strides import in_order
from shardcompile.planning import find_plan
from shardcompile.redistribute import run_plan
from shardcompile.sharded import Sharded
from shardcompile.sharding import IntLike, Layout, Spec

aten = torch.ops.aten
_T = TypeVar("_T", bound=Tensor)


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
    if x._copied is not None or not are_ints(row, size):
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
    rows = local_shard_in(src, with_partition(layout, dim, partition)).to(x.dtype)
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
        return place_rows(grad, dim, base, row, step, 0)
    # A slice that begins after the last row has no rows. `sym_min` avoids a guard, by which its traces would differ.
    return place_rows_at(grad, dim, torch.sym_min(begin, size), step, size, 0)


state(aten.slice.Tensor, sharded=_with_computed_rows(aten.slice.Tensor, _slice, 2, 2), check=_decide_signs)
state(aten.slice_backward.default, sharded=_with_computed_rows(aten.slice_backward.default, slice_backward, 3, 2))
state(aten.slice_scatter.default, sharded=_with_computed_rows(aten.slice_scatter.default, slice_scatter, 3, 2))
state(aten.select.int, sharded=_with_computed_rows(aten.select.int, select, 2, 1), check=_decide_signs)
state(aten.select_scatter.default, sharded=_with_computed_rows(aten.select_scatter.default, select_scatter, 3, 1))
state(aten.split.Tensor, sharded=split)
state(aten.split_with_sizes.default, sharded=split_with_sizes)
state(aten.size.default, sharded=lambda x: list(x._spec.shape))  # called where sizes are data-dependent
