"""Indexing with boolean masks: rows that a mask keeps stay on their ranks, and values written to them are sent there.

Along the masked dims the tensor and the mask have one partition: that of the tensor, or, if the tensor is not sharded
there, that of the mask. The counts of kept rows, which ranks exchange in a small collective, are the shard sizes of the
result (`kept_rows`).
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
from shardcompile.ops.support.sharded_rows import first_row, has_static_sizes
from shardcompile.sharded import Sharded, first_sharded
from shardcompile.sharding import IntLike, Layout, contiguous_stride, dense_stride
from shardcompile.tensor.aligned_rows import wrapped
from shardcompile.tensor.autograd import ToLocal, redistributed
from shardcompile.tensor.masked_index import is_mask, masked_index
from shardcompile.tensor.masked_rows import Masked, masked_rows, on_mesh

aten = torch.ops.aten


def getitem(func: Callable[..., Tensor], x: Tensor, index: object) -> Tensor:
    """Implements ``x[index]`` for an index that contains a mask."""
    found = masked_index(index, x.ndim)
    if found is None:
        return func(x, _with_indices(index))
    view = x if found.view is None else func(x, found.view)
    if not _serves(view, found.mask, found.dim):
        return func(view, found.view_index)
    return _keep_rows(view, found.mask, found.dim)


def setitem(func: Callable[..., object], x: Tensor, index: object, value: object) -> None:
    """Implements ``x[index] = value`` for an index that contains a mask."""
    found = masked_index(index, x.ndim)
    if found is None:
        func(x, _with_indices(index), value)
        return
    view = x if found.view is None else torch.Tensor.__getitem__(x, found.view)
    if not _has_rows(value) or value.dtype is not x.dtype or not _fits(view, found.mask, found.dim):
        func(view, found.view_index, value)
        return
    while value.ndim > 0 and compat.is_one(value.shape[0]):  # torch drops leading dims of size 1
        value = value[0]
    view.copy_(_put(view, found.mask, value, found.dim, False))


def index_put(
    func: Callable[..., Tensor], x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    """Implements ``torch.index_put`` for indices that contain a mask."""
    found = _put_by_mask(x, indices, values, accumulate)
    return func(x, _with_indices(tuple(indices)), values, accumulate) if found is None else found


def index_put_(
    func: Callable[..., Tensor], x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    """Implements ``x.index_put_`` for indices that contain a mask."""
    found = _put_by_mask(x, indices, values, accumulate)
    return func(x, _with_indices(tuple(indices)), values, accumulate) if found is None else x.copy_(found)


def masked_select(func: Callable[..., object], input: Tensor, mask: Tensor, **options: object) -> object:
    """Implements ``torch.masked_select``."""
    if options or not _is_bool(mask) or not _any_sharded(input, mask):
        return func(input, mask, **options)
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    x, mask = _expanded(input, shape), _expanded(mask, shape)
    return _keep_elements(x, mask) if _serves(x, mask, 0) else func(input, mask)


def masked_scatter(func: Callable[..., object], input: Tensor, mask: Tensor, source: Tensor) -> object:
    """Implements ``torch.masked_scatter``."""
    if not _is_bool(mask) or input.dtype is not source.dtype or not _any_sharded(input, mask):
        return func(input, mask, source)
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    x, expanded = _expanded(input, shape), _expanded(mask, shape)
    return _scatter_elements(x, expanded, source) if _serves(x, expanded, 0) else func(input, mask, source)


def masked_scatter_(func: Callable[..., object], input: Tensor, mask: Tensor, source: Tensor) -> object:
    """Implements ``x.masked_scatter_``."""
    if not isinstance(input, Sharded) or not _is_bool(mask) or input.dtype is not source.dtype:
        return func(input, mask, source)
    expanded = _expanded(mask, input.shape)
    if not _serves(input, expanded, 0):
        return func(input, mask, source)
    return input.copy_(_scatter_elements(input, expanded, source))


def nonzero(func: Callable[..., object], input: Tensor, *, out: Tensor | None = None, as_tuple: bool = False) -> object:
    """Implements ``torch.nonzero``."""
    if out is not None or not _is_served(input):
        options = {} if out is None else {"out": out}
        return func(input, as_tuple=as_tuple, **options)
    indices = _indices(input)
    return indices.unbind(1) if as_tuple else indices


def argwhere(func: Callable[..., object], input: Tensor) -> object:
    """Implements ``torch.argwhere``."""
    return _indices(input) if _is_served(input) else func(input)


def where(func: Callable[..., object], condition: Tensor) -> object:
    """Implements ``torch.where`` of a condition alone."""
    return _indices(condition).unbind(1) if _is_served(condition) else func(condition)


# Support checks


def _any_sharded(*tensors: Tensor) -> bool:
    return any(isinstance(t, Sharded) for t in tensors)


def _is_bool(mask: Tensor) -> bool:
    return is_mask(mask) and mask.dtype is torch.bool


def _serves(x: Tensor, mask: Tensor, dim: int) -> bool:
    """Returns whether a tensor or its mask is sharded, and the mask fits."""
    layouts = [t._spec.layout for t in (x, mask) if isinstance(t, Sharded)]
    return any(partition is not None for layout in layouts for partition in layout.partitions) and _fits(x, mask, dim)


def _is_served(x: Tensor) -> TypeGuard[Sharded]:
    """Returns whether `_indices` computes the indices of the nonzero elements."""
    return isinstance(x, Sharded) and _serves(x, x, 0)


def _fits(x: Tensor, mask: Tensor, dim: int) -> bool:
    """Returns whether a mask has the shape of the masked dims; otherwise torch raises the error."""
    if not 0 < mask.ndim <= x.ndim - dim or has_static_sizes(x) or has_static_sizes(mask):
        return False
    if not all(compat.guard_equal(a, b) for a, b in zip(mask.shape, x.shape[dim : dim + mask.ndim], strict=True)):
        return False
    meshes = [t._spec.layout.mesh for t in (x, mask) if isinstance(t, Sharded)]
    return bool(meshes) and meshes[0] == meshes[-1]


def _with_indices(index: object) -> object:
    """Replaces the masks in an index of several tensors by the indices of the elements that they keep."""
    if not isinstance(index, tuple):
        return index
    sizes = [i.shape[-1] for i in index if isinstance(i, Tensor) and i.ndim > 0 and not is_mask(i)]
    size = next((n for n in sizes if compat.is_unbacked(n)), None)
    items: list[object] = []
    for item in index:
        if not is_mask(item) or not _is_served(item):
            items.append(item)
            continue
        # The size of another index becomes that of the result: torch would not broadcast an unbacked size as a 1.
        with contextlib.nullcontext() if size is None else compat.unrecorded_symbols():
            indices = _indices(item, keep=size is None)
        if size is not None:
            torch._check(indices.shape[0] == size)
        items.extend(indices.unbind(1))
    return tuple(items)


def _has_rows(value: object) -> TypeGuard[Tensor]:
    """Returns whether a value needs `_put`; a scalar without a gradient is written without an exchange."""
    return isinstance(value, Tensor) and (value.ndim > 0 or value.requires_grad)


def _put_by_mask(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool) -> Tensor | None:
    """Returns `x` with the values if the indices have one supported mask, otherwise None."""
    found = masked_index(tuple([slice(None) if i is None else i for i in indices]), x.ndim)
    if found is None or values.dtype is not x.dtype or not _fits(x, found.mask, found.dim):
        return None
    return _put(x, found.mask, values, found.dim, accumulate)


def _expanded(x: Tensor, shape: Sequence[IntLike]) -> Tensor:
    """Expands a tensor to a shape; returns the tensor itself if it has that shape."""
    if x.ndim == len(shape) and all(compat.guard_equal(a, b) for a, b in zip(x.shape, shape, strict=True)):
        return x
    return x.expand(shape)  # type: ignore[arg-type]


# Reading


@torch.compiler.allow_in_graph  # one node for Dynamo; AOTAutograd traces what it does
def _keep_rows(x: Tensor, mask: Tensor, dim: int) -> Tensor:
    """Computes ``x[:, ..., mask]``."""
    return _select(x, mask, dim)


@torch.compiler.allow_in_graph
def _keep_elements(x: Tensor, mask: Tensor) -> Tensor:
    """Computes ``torch.masked_select`` of a tensor and a mask of its shape."""
    num_expanded = _num_expanded_dims(x, mask)
    kept = _select(x, _without_last(mask, num_expanded), 0)
    return kept.flatten() if num_expanded else kept


def _select(x: Tensor, mask: Tensor, dim: int) -> Tensor:
    masked = masked_rows(x, mask, dim)
    rows = masked.kept.select(masked.rows(), dim)
    return wrapped(rows, masked.layout_of_kept(), _stride_of_kept(x, mask.ndim, masked))


def _stride_of_kept(x: Tensor, ndim: int, masked: Masked) -> Sequence[IntLike]:
    """Returns the strides of ``x[:, ..., mask]``, in which the other dims keep the order that they have in `x`.

    Args:
        x: the tensor.
        ndim: number of dims of the mask.
        masked: the result of `masked_rows`.
    """
    stride = contiguous_stride(masked.layout_of_kept().shape)
    if all(compat.statically_known_true(a == b) for a, b in zip(x.stride(), contiguous_stride(x.shape), strict=True)):
        return stride
    index = [masked.kept.indices.new_empty([masked.kept.size])] * ndim  # type: ignore[list-item]
    with contextlib.suppress(*compat.UNKNOWN_OUTPUT_SHAPE):
        meta = global_meta(aten.index.Tensor, (x, [*[None] * masked.dim, *index]), {})
        return compat.retrace(meta.stride())  # type: ignore[no-any-return]
    return stride


def _num_expanded_dims(x: Tensor, mask: Tensor) -> int:
    """Returns the number of trailing dims, none of them sharded, over which a mask was expanded."""
    partitions = [t._spec.layout.partitions for t in (x, mask) if isinstance(t, Sharded)]
    count = 0
    for d in reversed(range(1, mask.ndim)):
        size, step = mask.shape[d], mask.stride(d)
        is_expanded = isinstance(size, int) and (size == 1 or (size > 1 and isinstance(step, int) and step == 0))
        if not is_expanded or any(c[d] is not None for c in partitions):
            break
        count += 1
    return count


def _without_last(mask: Tensor, count: int) -> Tensor:
    """Removes the last `count` dims of a mask, over which it was expanded."""
    for _ in range(count):
        mask = mask.select(-1, 0)
    return mask


@torch.compiler.allow_in_graph
def _indices(x: Sharded, keep: bool = True) -> Tensor:
    """Computes ``x.nonzero()``."""
    mask: Tensor = x
    if x.dtype is not torch.bool:
        mask = redistributed(x, x._spec.layout.reduced()).detach() != 0
    masked = masked_rows(mask, mask, 0, keep)
    layout, indices = masked.layout, masked.kept.indices
    columns = _unravel(indices, masked.x._local_tensor.shape)
    for d, partition in enumerate(layout.partitions):
        if partition is not None:
            first: Any = first_row(partition, layout)
            columns[d] = columns[d] + first
    if masked.flattened:
        linear: Any = 0
        for size, column in zip(layout.shape, columns, strict=True):
            linear = linear * size + column
        columns = _unravel(linear, x.shape)
    rows = masked.kept.to_row_major(torch.stack(columns, 1))
    size = masked.kept.size
    result = Layout.of_partitions(layout.mesh, [size, x.ndim], rows.dtype, [masked.kept.partition, None])
    return wrapped(rows, result, (1, max(size, 1) if isinstance(size, int) else size))  # column-major, as in torch


def _unravel(indices: Tensor, shape: Sequence[IntLike]) -> list[Tensor]:
    """Converts flat row-major indices to an index along each dim."""
    columns: list[Tensor] = []
    for size in reversed(shape[1:]):
        # The clamp avoids a division by zero without a guard on the size; a dim of size 0 has no indices.
        divisor: Any = indices.new_full([], size).clamp(min=1)  # type: ignore[arg-type]
        columns.append(indices % divisor)
        indices = indices.div(divisor, rounding_mode="floor")
    return [indices, *reversed(columns)]


# Writing


def _put(x: Tensor, mask: Tensor, values: Tensor, dim: int, accumulate: bool) -> Tensor:
    """Computes ``index_put`` with a mask of adjacent dims that begin at `dim`."""
    num_trailing = x.ndim - dim - mask.ndim
    row_dim = values.ndim - num_trailing - 1  # the dim of the kept rows
    if row_dim < 0 or _is_one(values.shape[row_dim]):
        expandable = mask[(..., *[None] * num_trailing)]
        if row_dim >= 0:
            values = values.reshape([*values.shape[:row_dim], *[1] * mask.ndim, *values.shape[row_dim + 1 :]])
        return torch.where(expandable, x + values if accumulate else values, x)
    return _put_rows(x, mask, values, dim, accumulate)


def _is_one(size: object) -> bool:
    return isinstance(size, int) and size == 1


@torch.compiler.allow_in_graph
def _put_rows(x: Tensor, mask: Tensor, values: Tensor, dim: int, accumulate: bool) -> Tensor:
    """Computes ``index_put`` with a value for each kept row."""
    with compat.unrecorded_symbols(first_sharded((x, mask))._local_tensor):
        masked = masked_rows(x, mask, dim, keep=False)
        _check_count(masked, values)
        return _write(x, masked, values, accumulate, dense_stride(x.shape, x.stride()))


def _check_count(masked: Masked, values: Tensor) -> None:
    row_dim = values.ndim - (masked.layout.ndim - masked.dim - masked.ndim) - 1
    count, size = values.shape[row_dim], masked.kept.size
    if not isinstance(count, int) or not isinstance(size, int):
        torch._check(count == size, lambda: f"a mask keeps {size} rows, and there are values for {count}")
    elif count != size:
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast to indexing result of "
            f"shape {list(masked.layout_of_kept().shape)}"
        )


def _write(x: Tensor, masked: Masked, values: Tensor, accumulate: bool, stride: Sequence[IntLike]) -> Tensor:
    """Returns `x` with a value written to each kept row, and with the given strides. Fetches values of other ranks."""
    layout, wanted = masked.layout, masked.layout_of_kept()
    values = on_mesh(values, layout.mesh)
    num_broadcast = wanted.ndim - values.ndim
    row_dim = masked.dim - num_broadcast
    sizes = [wanted.shape[masked.dim] if d == row_dim else n for d, n in enumerate(values.shape)]
    partitions = [
        None if d != row_dim and _is_one(n) else wanted.partitions[d + num_broadcast] for d, n in enumerate(sizes)
    ]
    local = ToLocal.apply(
        redistributed(values, Layout.of_partitions(layout.mesh, sizes, values.dtype, partitions)), None
    )
    rows = masked.rows()
    shape = [masked.kept.indices.shape[0] if d == masked.dim else n for d, n in enumerate(rows.shape)]
    rows = masked.kept.write(rows, local.expand(shape), masked.dim, accumulate)
    rows = rows.view(masked.x._local_tensor.shape)
    return wrapped(rows, layout).view(x.shape) if masked.flattened else wrapped(rows, layout, stride)


@torch.compiler.allow_in_graph
def _scatter_elements(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Computes ``torch.masked_scatter`` of a tensor and a mask of its shape."""
    with compat.unrecorded_symbols(first_sharded((x, mask))._local_tensor):
        num_expanded = _num_expanded_dims(x, mask)
        masked = masked_rows(x, _without_last(mask, num_expanded), 0, keep=False)
        trailing = x.shape[x.ndim - num_expanded :]
        width = math.prod(trailing)
        total: Any = masked.kept.size * width  # type: ignore[operator]
        _check_source(total, source)
        flat = on_mesh(source, masked.layout.mesh).reshape(-1).narrow(0, 0, total)
        partition = masked.kept.partition
        wanted = Layout.of_partitions(
            masked.layout.mesh, [total], flat.dtype, [None if partition is None else partition.flatten_trailing(width)]
        )
        values = redistributed(first_sharded([flat]), wanted).view(masked.kept.size, *trailing)
        return _write(x, masked, values, False, contiguous_stride(x.shape))


def _check_source(total: IntLike, source: Tensor) -> None:
    count = source.numel()
    if not isinstance(total, int) or not isinstance(count, int):
        torch._check(total <= count, lambda: f"masked_scatter: the mask keeps {total} elements of {count}")
    elif total > count:
        raise RuntimeError(
            f"masked_scatter: expected self and source to have same dtypes, and number of elements of source ({count}) "
            f"to be at least the number of ones in mask ({total})"
        )
