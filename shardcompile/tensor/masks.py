"""Indexing by masks: rows that a mask keeps stay on their ranks, and what is written to them goes there.

Along the masked dims the tensor and the mask have one partition: that of the tensor, or, if it has none there, that of
the mask. The counts of the kept rows, which a small collective tells, are the partition of the result (`kept_rows`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.ops.support.global_meta import global_meta
from shardcompile.ops.view.rows import first_row, has_static_sizes
from shardcompile.sharded import Sharded, first_sharded
from shardcompile.sharding import IntLike, Layout, contiguous_stride, dense_stride
from shardcompile.tensor.aligned_rows import wrapped
from shardcompile.tensor.autograd import ToLocal, redistributed
from shardcompile.tensor.masked_index import is_mask, masked_index
from shardcompile.tensor.masked_rows import Masked, masked_rows, on_mesh

aten = torch.ops.aten


def getitem(func: Callable[..., Tensor], x: Tensor, index: object) -> Tensor:
    """``x[index]``, where the index has a mask."""
    found = masked_index(index, x.ndim)
    if found is None:
        return func(x, _with_indices(index))
    view = x if found.view is None else func(x, found.view)
    if not _serves(view, found.mask, found.dim):
        return func(view, found.of_view)
    return _keep_rows(view, found.mask, found.dim)


def setitem(func: Callable[..., object], x: Tensor, index: object, value: object) -> None:
    """``x[index] = value``, where the index has a mask."""
    found = masked_index(index, x.ndim)
    if found is None:
        func(x, _with_indices(index), value)
        return
    view = x if found.view is None else torch.Tensor.__getitem__(x, found.view)
    if not _has_rows(value) or value.dtype is not x.dtype or not _fits(view, found.mask, found.dim):
        func(view, found.of_view, value)
        return
    while value.ndim > 0 and compat.is_one(value.shape[0]):  # torch drops them, and so may a value have more dims
        value = value[0]
    view.copy_(_put(view, found.mask, value, found.dim, False))


def index_put(
    func: Callable[..., Tensor], x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    """``torch.index_put``, where the indices have a mask."""
    found = _put_by_mask(x, indices, values, accumulate)
    return func(x, _with_indices(tuple(indices)), values, accumulate) if found is None else found


def index_put_(
    func: Callable[..., Tensor], x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    """``x.index_put_``, where the indices have a mask."""
    found = _put_by_mask(x, indices, values, accumulate)
    return func(x, _with_indices(tuple(indices)), values, accumulate) if found is None else x.copy_(found)


def masked_select(func: Callable[..., object], input: Tensor, mask: Tensor, **options: object) -> object:
    """``torch.masked_select``."""
    if options or not _is_bool(mask) or not _any_sharded(input, mask):
        return func(input, mask, **options)
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    x, mask = _expanded(input, shape), _expanded(mask, shape)
    return _keep_elements(x, mask) if _serves(x, mask, 0) else func(input, mask)


def masked_scatter(func: Callable[..., object], input: Tensor, mask: Tensor, source: Tensor) -> object:
    """``torch.masked_scatter``."""
    if not _is_bool(mask) or input.dtype is not source.dtype or not _any_sharded(input, mask):
        return func(input, mask, source)
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    x, wide = _expanded(input, shape), _expanded(mask, shape)
    return _scatter_elements(x, wide, source) if _serves(x, wide, 0) else func(input, mask, source)


def masked_scatter_(func: Callable[..., object], input: Tensor, mask: Tensor, source: Tensor) -> object:
    """``x.masked_scatter_``."""
    if not isinstance(input, Sharded) or not _is_bool(mask) or input.dtype is not source.dtype:
        return func(input, mask, source)
    wide = _expanded(mask, input.shape)
    return input.copy_(_scatter_elements(input, wide, source)) if _serves(input, wide, 0) else func(input, mask, source)


def nonzero(func: Callable[..., object], input: Tensor, *, out: Tensor | None = None, as_tuple: bool = False) -> object:
    """``torch.nonzero``."""
    if out is not None or not _is_served(input):
        options = {} if out is None else {"out": out}
        return func(input, as_tuple=as_tuple, **options)
    indices = _indices(input)
    return indices.unbind(1) if as_tuple else indices


def argwhere(func: Callable[..., object], input: Tensor) -> object:
    """``torch.argwhere``."""
    return _indices(input) if _is_served(input) else func(input)


def where(func: Callable[..., object], condition: Tensor) -> object:
    """``torch.where`` of a condition alone."""
    return _indices(condition).unbind(1) if _is_served(condition) else func(condition)


# What is served


def _any_sharded(*tensors: Tensor) -> bool:
    return any(isinstance(t, Sharded) for t in tensors)


def _is_bool(mask: Tensor) -> bool:
    return is_mask(mask) and mask.dtype is torch.bool


def _serves(x: Tensor, mask: Tensor, dim: int) -> bool:
    """Whether a tensor or its mask is sharded, and the mask fits."""
    layouts = [t._spec.layout for t in (x, mask) if isinstance(t, Sharded)]
    return any(partition is not None for layout in layouts for partition in layout.partitions) and _fits(x, mask, dim)


def _is_served(x: Tensor) -> TypeGuard[Sharded]:
    """Whether the indices of what is not zero are found here."""
    return isinstance(x, Sharded) and _serves(x, x, 0)


def _fits(x: Tensor, mask: Tensor, dim: int) -> bool:
    """Whether a mask fits to what it masks; torch says what is wrong with one that does not."""
    if not 0 < mask.ndim <= x.ndim - dim or has_static_sizes(x) or has_static_sizes(mask):
        return False
    if not all(compat.same_symbol(a, b) for a, b in zip(mask.shape, x.shape[dim : dim + mask.ndim], strict=True)):
        return False
    meshes = [t._spec.layout.mesh for t in (x, mask) if isinstance(t, Sharded)]
    return bool(meshes) and meshes[0] == meshes[-1]


def _with_indices(index: object) -> object:
    """An index of several tensors, masks being written as the indices of what they keep, which stay on their ranks."""
    if not isinstance(index, tuple):
        return index
    sizes = [i.shape[-1] for i in index if isinstance(i, Tensor) and i.ndim > 0 and not is_mask(i)]
    size = next((n for n in sizes if compat.is_unbacked(n)), None)
    items: list[object] = []
    for item in index:
        if not is_mask(item) or not _is_served(item):
            items.append(item)
            continue
        # The result has the other size, since torch does not take one that only a run tells for a 1 that is broadcast.
        with contextlib.nullcontext() if size is None else compat.unrecorded_symbols():
            indices = _indices(item, keep=size is None)
        if size is not None:
            torch._check(indices.shape[0] == size)
        items.extend(indices.unbind(1))
    return tuple(items)


def _has_rows(value: object) -> TypeGuard[Tensor]:
    """Whether it is not one number, which is written where the mask says without an exchange, and has no gradient."""
    return isinstance(value, Tensor) and (value.ndim > 0 or value.requires_grad)


def _put_by_mask(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool) -> Tensor | None:
    """`x` with the values, if there is one mask and it is served; otherwise None."""
    found = masked_index(tuple([slice(None) if i is None else i for i in indices]), x.ndim)
    if found is None or values.dtype is not x.dtype or not _fits(x, found.mask, found.dim):
        return None
    return _put(x, found.mask, values, found.dim, accumulate)


def _expanded(x: Tensor, shape: Sequence[IntLike]) -> Tensor:
    """A tensor in a shape to which it is broadcast."""
    if x.ndim == len(shape) and all(compat.same_symbol(a, b) for a, b in zip(x.shape, shape, strict=True)):
        return x
    return x.expand(shape)  # type: ignore[arg-type]


# Rows that are kept


@torch.compiler.allow_in_graph  # one node for Dynamo; AOTAutograd traces what it does
def _keep_rows(x: Tensor, mask: Tensor, dim: int) -> Tensor:
    """``x[:, ..., mask]``."""
    return _kept(x, mask, dim)


@torch.compiler.allow_in_graph
def _keep_elements(x: Tensor, mask: Tensor) -> Tensor:
    """``torch.masked_select`` of a tensor and a mask of its shape."""
    repeated = _repeated_dims(x, mask)
    kept = _kept(x, _without_last(mask, repeated), 0)
    return kept.flatten() if repeated else kept


def _kept(x: Tensor, mask: Tensor, dim: int) -> Tensor:
    masked = masked_rows(x, mask, dim)
    rows = masked.kept.taken(masked.rows(), dim)
    return wrapped(rows, masked.layout_of_kept(), _stride_of_kept(x, mask.ndim, masked))


def _stride_of_kept(x: Tensor, ndim: int, masked: Masked) -> Sequence[IntLike]:
    """The strides of ``x[:, ..., mask]``, those of the other dims being in the order of `x`.

    Args:
        x: the tensor.
        ndim: of the mask.
        masked: as `masked_rows` gives it.
    """
    stride = contiguous_stride(masked.layout_of_kept().shape)
    if all(compat.statically_known_true(a == b) for a, b in zip(x.stride(), contiguous_stride(x.shape), strict=True)):
        return stride
    index = [masked.kept.indices.new_empty([masked.kept.size])] * ndim  # type: ignore[list-item]
    with contextlib.suppress(*compat.UNKNOWN_OUTPUT_SHAPE):
        meta = global_meta(aten.index.Tensor, (x, [*[None] * masked.dim, *index]), {})
        return compat.retrace(meta.stride())  # type: ignore[no-any-return]
    return stride


def _repeated_dims(x: Tensor, mask: Tensor) -> int:
    """Over how many trailing dims a mask was expanded, of which none is sharded."""
    partitions = [t._spec.layout.partitions for t in (x, mask) if isinstance(t, Sharded)]
    count = 0
    for d in reversed(range(1, mask.ndim)):
        size, step = mask.shape[d], mask.stride(d)
        is_repeated = isinstance(size, int) and (size == 1 or (size > 1 and isinstance(step, int) and step == 0))
        if not is_repeated or any(c[d] is not None for c in partitions):
            break
        count += 1
    return count


def _without_last(mask: Tensor, count: int) -> Tensor:
    """A mask without its last dims, over which it was expanded."""
    for _ in range(count):
        mask = mask.select(-1, 0)
    return mask


@torch.compiler.allow_in_graph
def _indices(x: Sharded, keep: bool = True) -> Tensor:
    """``x.nonzero()``."""
    mask: Tensor = x
    if x.dtype is not torch.bool:
        mask = redistributed(x, x._spec.layout.reduced()).detach() != 0
    masked = masked_rows(mask, mask, 0, keep)
    layout, indices = masked.layout, masked.kept.indices
    columns = _unravelled(indices, masked.x._local_tensor.shape)
    for d, partition in enumerate(layout.partitions):
        if partition is not None:
            first: Any = first_row(partition, layout)
            columns[d] = columns[d] + first
    if masked.flattened:
        linear: Any = 0
        for size, column in zip(layout.shape, columns, strict=True):
            linear = linear * size + column
        columns = _unravelled(linear, x.shape)
    rows = masked.kept.in_order(torch.stack(columns, 1))
    size = masked.kept.size
    found = Layout.of_partitions(layout.mesh, [size, x.ndim], rows.dtype, [masked.kept.partition, None])
    return wrapped(rows, found, (1, max(size, 1) if isinstance(size, int) else size))  # one column after the other


def _unravelled(indices: Tensor, shape: Sequence[IntLike]) -> list[Tensor]:
    """The indices along each dim of elements in row-major order."""
    columns: list[Tensor] = []
    for size in reversed(shape[1:]):
        # Of a dim without elements there are no indices, and compilers take no guard of it.
        divisor: Any = indices.new_full([], size).clamp(min=1)  # type: ignore[arg-type]
        columns.append(indices % divisor)
        indices = indices.div(divisor, rounding_mode="floor")
    return [indices, *reversed(columns)]


# Rows that are written


def _put(x: Tensor, mask: Tensor, values: Tensor, dim: int, accumulate: bool) -> Tensor:
    """``index_put`` by a mask of neighbouring dims."""
    behind = x.ndim - dim - mask.ndim
    at = values.ndim - behind - 1  # the dim of the kept rows
    if at < 0 or _is_one(values.shape[at]):
        wide = mask[(..., *[None] * behind)]
        if at >= 0:
            values = values.reshape([*values.shape[:at], *[1] * mask.ndim, *values.shape[at + 1 :]])
        return torch.where(wide, x + values if accumulate else values, x)
    return _put_rows(x, mask, values, dim, accumulate)


def _is_one(size: object) -> bool:
    return isinstance(size, int) and size == 1


@torch.compiler.allow_in_graph
def _put_rows(x: Tensor, mask: Tensor, values: Tensor, dim: int, accumulate: bool) -> Tensor:
    """``index_put`` of a value for each row that is kept."""
    with compat.unrecorded_symbols(first_sharded((x, mask))._local_tensor):
        masked = masked_rows(x, mask, dim, keep=False)
        _check_count(masked, values)
        return _written(x, masked, values, accumulate, dense_stride(x.shape, x.stride()))


def _check_count(masked: Masked, values: Tensor) -> None:
    at = values.ndim - (masked.layout.ndim - masked.dim - masked.ndim) - 1
    count, size = values.shape[at], masked.kept.size
    if not isinstance(count, int) or not isinstance(size, int):
        torch._check(count == size, lambda: f"a mask keeps {size} rows, and there are values for {count}")
    elif count != size:
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast to indexing result of "
            f"shape {list(masked.layout_of_kept().shape)}"
        )


def _written(x: Tensor, masked: Masked, values: Tensor, accumulate: bool, stride: Sequence[IntLike]) -> Tensor:
    """`x`, with a value for each row that is kept, stored as strides say. Values that other ranks have are fetched."""
    layout, wanted = masked.layout, masked.layout_of_kept()
    values = on_mesh(values, layout.mesh)
    outer = wanted.ndim - values.ndim
    at = masked.dim - outer
    sizes = [wanted.shape[at + outer] if d == at else n for d, n in enumerate(values.shape)]
    partitions = [None if d != at and _is_one(n) else wanted.partitions[d + outer] for d, n in enumerate(sizes)]
    local = ToLocal.apply(
        redistributed(values, Layout.of_partitions(layout.mesh, sizes, values.dtype, partitions)), None
    )
    rows = masked.rows()
    shape = [masked.kept.indices.shape[0] if d == masked.dim else n for d, n in enumerate(rows.shape)]
    rows = masked.kept.written(rows, local.expand(shape), masked.dim, accumulate)
    rows = rows.view(masked.x._local_tensor.shape)
    return wrapped(rows, layout).view(x.shape) if masked.flattened else wrapped(rows, layout, stride)


@torch.compiler.allow_in_graph
def _scatter_elements(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """``torch.masked_scatter`` of a tensor and a mask of its shape."""
    with compat.unrecorded_symbols(first_sharded((x, mask))._local_tensor):
        repeated = _repeated_dims(x, mask)
        masked = masked_rows(x, _without_last(mask, repeated), 0, keep=False)
        trailing = x.shape[x.ndim - repeated :]
        width = math.prod(trailing)
        total: Any = masked.kept.size * width  # type: ignore[operator]
        _check_source(total, source)
        flat = on_mesh(source, masked.layout.mesh).reshape(-1).narrow(0, 0, total)
        partition = masked.kept.partition
        wanted = Layout.of_partitions(
            masked.layout.mesh, [total], flat.dtype, [None if partition is None else partition.scaled(width)]
        )
        values = redistributed(first_sharded([flat]), wanted).view(masked.kept.size, *trailing)
        return _written(x, masked, values, False, contiguous_stride(x.shape))


def _check_source(total: IntLike, source: Tensor) -> None:
    count = source.numel()
    if not isinstance(total, int) or not isinstance(count, int):
        torch._check(total <= count, lambda: f"masked_scatter: the mask keeps {total} elements of {count}")
    elif total > count:
        raise RuntimeError(
            f"masked_scatter: expected self and source to have same dtypes, and number of elements of source ({count}) "
            f"to be at least the number of ones in mask ({total})"
        )
