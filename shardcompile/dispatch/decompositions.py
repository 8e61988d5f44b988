"""Ops written in terms of other ops on the same, global, tensors.

They are right on any layout because every op that they use is. Each is taken where its op would otherwise have to
gather a cut dim; the counts in them (`numel`, `shape`) are global ones, never those of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.dispatch import additions, counts, lookups, rows, scans
from shardcompile.dispatch.copied_views import follow, note_view
from shardcompile.dispatch.fourier import FOURIER_OPS
from shardcompile.dispatch.global_meta import global_meta
from shardcompile.dispatch.group_norm import group_norm, group_norm_backward
from shardcompile.dispatch.interpolation import INTERPOLATION_OPS
from shardcompile.dispatch.logsumexp import is_nothing, largest, logsumexp
from shardcompile.dispatch.precision import wide_dtype, widened
from shardcompile.dispatch.windows import WINDOW_OPS
from shardcompile.errors import UnsupportedOpError
from shardcompile.layout import Layout, Spec
from shardcompile.plan import find_plan
from shardcompile.redistribute import run_plan

aten = torch.ops.aten


def _dims(x: Tensor, dim: int | Sequence[int] | None) -> list[int]:
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(x.ndim))
    return [dim % max(x.ndim, 1)] if isinstance(dim, int) else [d % max(x.ndim, 1) for d in dim]


def _count(x: Tensor, dims: Sequence[int]) -> Any:
    """Elements that a reduction over `dims` combines."""
    return math.prod([x.shape[d] for d in dims]) if x.ndim else 1


def _mean_dim(x: Tensor, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    dims = _dims(x, dim)
    dtype = x.dtype if dtype is None else dtype
    total = aten.sum.dim_IntList(x, dims, keepdim, dtype=wide_dtype(dtype))
    return (total / _count(x, dims)).to(dtype)


def _mean(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return _mean_dim(x, None, dtype=dtype)


def _moments(x: Tensor, dim: Any, correction: float | None, keepdim: bool) -> tuple[Tensor, Tensor]:
    """Variance and mean by two passes, as stable as the plain kernels."""
    dims = _dims(x, dim)
    dtype = x.dtype
    x = widened(x)
    count = _count(x, dims)
    mean = aten.sum.dim_IntList(x, dims, True) / count
    deviation = x - mean
    square = deviation * deviation.conj() if x.is_complex() else deviation * deviation
    total = aten.sum.dim_IntList(square.real if x.is_complex() else square, dims, keepdim)
    degrees = count - (1 if correction is None else correction)
    degrees = torch.sym_max(degrees, 0) if not isinstance(degrees, float) else max(degrees, 0.0)
    if not keepdim and x.ndim:
        mean = aten.squeeze.dims(mean, dims)
    return (total / degrees).to(dtype.to_real()), mean.to(dtype)


def _var(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return _moments(x, dim, correction, keepdim)[0]


def _std(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return _var(x, dim, correction=correction, keepdim=keepdim).sqrt()


def _var_mean(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    return _moments(x, dim, correction, keepdim)


def _std_mean(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    variance, mean = _moments(x, dim, correction, keepdim)
    return variance.sqrt(), mean


def _vector_norm(
    x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    dims = _dims(x, dim)
    size = widened(x.abs())
    return _norm_of_sizes(size, ord, dims, keepdim).to(x.dtype.to_real())


def _norm_of_sizes(size: Tensor, ord: float, dims: list[int], keepdim: bool) -> Tensor:
    if ord == math.inf:
        return aten.amax.default(size, dims, keepdim)
    if ord == -math.inf:
        return aten.amin.default(size, dims, keepdim)
    if ord == 0:
        return aten.sum.dim_IntList((size != 0).to(size.dtype), dims, keepdim)
    if ord == 1:
        return aten.sum.dim_IntList(size, dims, keepdim)
    if size.dtype is torch.float32 and size.device.type == "cpu":
        size = size.double()  # as plain PyTorch does there: squares of large numbers must not overflow
    if ord == 2:
        return aten.sum.dim_IntList(size * size, dims, keepdim).sqrt()
    return aten.sum.dim_IntList(size**ord, dims, keepdim) ** (1.0 / ord)


def _logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    return logsumexp(x, _dims(x, dim), keepdim, largest)


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    wide = widened(x)
    if is_nothing(x, dim):
        return wide.clone() if half_to_float else x.clone()
    unnormalised = (wide - largest(wide, [dim], True)).exp()
    out = unnormalised / aten.sum.dim_IntList(unnormalised, [dim], True)
    return out if half_to_float else out.to(x.dtype)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    wide = widened(x)
    if is_nothing(x, dim):
        return wide.clone() if half_to_float else x.clone()
    shifted = wide - largest(wide, [dim], True)
    out = shifted - aten.sum.dim_IntList(shifted.exp(), [dim], True).log()
    return out if half_to_float else out.to(x.dtype)


def _softmax_backward(grad: Tensor, out: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    product = widened(grad) * widened(out)
    result = product - widened(out) * aten.sum.dim_IntList(product, [dim], True)
    return result.to(dtype)


def _log_softmax_backward(grad: Tensor, out: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    wide = widened(grad)
    result = wide - widened(out).exp() * aten.sum.dim_IntList(wide, [dim], True)
    return result.to(dtype)


def _positions(x: Tensor, dim: int) -> Tensor:
    """The index along `dim` of every element, laid out like `x`: plain, so a copy of the whole range on every rank."""
    shape = [1] * x.ndim
    shape[dim] = -1
    return torch.arange(x.shape[dim], device=x.device).view(shape)


def _arg_extremum(x: Tensor, best: Tensor, dim: int, keepdim: bool) -> Tensor:
    """The first index along `dim` at which `x` equals the extremum; a NaN counts as one."""
    hit = x == best
    if x.is_floating_point():
        hit = hit | (x.isnan() & best.isnan())
    where = torch.where(hit, _positions(x, dim), x.shape[dim])
    return aten.amin.default(where, [dim], keepdim)


def _extremum_dim(reduce: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    def decomposed(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
        if x.ndim == 0:
            return x.clone(), torch.zeros_like(x, dtype=torch.int64)
        dim = dim % x.ndim
        best = reduce(x, [dim], True)
        index = _arg_extremum(x, best, dim, keepdim)
        return (best if keepdim else aten.squeeze.dims(best, [dim])), index

    return decomposed


def _arg(reduce: Any) -> Callable[..., Tensor]:
    def decomposed(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        if dim is not None or x.ndim <= 1:
            return _extremum_dim(reduce)(x, 0 if dim is None else dim, keepdim)[1]
        # Over everything: the smallest flat index among the hits.
        best = reduce(x, [], True)
        hit = x == best
        if x.is_floating_point():
            hit = hit | (x.isnan() & best.isnan())
        flat: Any = 0
        for d in range(x.ndim):
            flat = flat * x.shape[d] + _positions(x, d)
        index = aten.amin.default(torch.where(hit, flat, x.numel()), [], False)
        return index.reshape([1] * x.ndim) if keepdim else index

    return decomposed


def _mse_loss(x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    return _reduced((x - target) ** 2, reduction)


def _reduced(x: Tensor, reduction: int) -> Tensor:
    """None, mean or sum, numbered as in ``torch.nn._reduction``."""
    if reduction == 0:
        return x
    return x.mean() if reduction == 1 else x.sum()


def _layer_norm(x: Tensor, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    dims = list(range(x.ndim - len(shape), x.ndim))
    wide = widened(x)
    variance, mean = _moments(wide, dims, 0, True)
    scale = (variance + eps).rsqrt()
    out = (wide - mean) * scale
    out = out if weight is None else out * weight
    out = out if bias is None else out + bias
    return out.to(x.dtype), mean, scale


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _added(aten.mm.default(a, b), bias, beta, alpha)


def _added(product: Tensor, bias: Tensor, beta: float, alpha: float) -> Tensor:
    product = product if alpha == 1 else product * alpha
    if beta == 0:  # then a NaN in the bias does not count
        return product
    return product + (bias if beta == 1 else bias * beta)


def _baddbmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _added(aten.bmm.default(a, b), bias, beta, alpha)


def _addbmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _added(aten.sum.dim_IntList(aten.bmm.default(a, b), [0]), bias, beta, alpha)


def _trace(x: Tensor) -> Tensor:
    rows, columns = (torch.arange(n, device=x.device) for n in x.shape)
    return aten.sum.default(torch.where(rows.unsqueeze(-1) == columns, x, 0))


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a == b).all().item())


def _take(x: Any, index: Any) -> Tensor:
    """Of the flattened tensor. Torch's decomposition reads the value of an index of 0 dims, which a trace cannot."""
    return aten.index.Tensor(x.reshape(-1), [index])


def _as_strided(x: Any, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Any:
    """Slices and permutations where the strides are those of dims of `x`, otherwise on the whole value.

    Raises:
        UnsupportedOpError: elements are asked for that are in the memory that `x` is a view of, but not in `x`.
    """
    start = _start_within(x, storage_offset)
    views = _as_views(x, size, stride) if _is_zero(start) else None
    if views is not None:
        return views
    _check_reach(x, size, stride, start)
    return _strided_whole(x, aten.as_strided.default, (size, stride, start), size, stride, start)


def _start_within(x: Any, storage_offset: Any) -> Any:
    """Where a place in the storage is, counted from the first element of `x`."""
    if storage_offset is None:
        return 0
    # Where a view starts in the storage of a sharded tensor is not kept.
    if x.is_inference() or (x._is_view() and not compat.same_symbol(x._base.numel(), x.numel())):
        raise UnsupportedOpError(
            f"as_strided with a place in the storage that {x!r} is a view of; leave out storage_offset, which is then "
            "that of the view, or take as_strided of the tensor that was viewed"
        )
    return storage_offset


def _as_views(x: Any, size: Sequence[int], stride: Sequence[int]) -> Any:
    """The first rows of dims of `x` in some order, or None if that is not what the strides ask for."""
    # A trace must not take a cut extent for the number that it is compared with.
    same = compat.same_symbol if x._spec.is_plain else lambda a, b: compat.surely(a == b)
    left = list(range(x.ndim))
    kept: list[int] = []
    for n, s in zip(size, stride, strict=True):
        if isinstance(n, int) and n == 1:
            continue
        fits = (d for d in left if same(x.stride(d), s) and compat.guarded(n <= x.shape[d]))
        dim = next(fits, None)
        if dim is None:
            return None
        left.remove(dim)
        kept.append(dim)
    if any(compat.guarded(x.shape[d] == 0) for d in left):
        return None
    wide = [n for n in size if not (isinstance(n, int) and n == 1)]
    for n, d in zip(wide, kept, strict=True):
        x = x if same(n, x.shape[d]) else aten.slice.Tensor(x, d, 0, n)
    for d in reversed(left):
        x = aten.select.int(x, d, 0)
    rows = sorted(kept)
    out = aten.permute.default(x, [rows.index(d) for d in kept])
    for i, n in enumerate(size):
        out = aten.unsqueeze.default(out, i) if isinstance(n, int) and n == 1 else out
    return out


def _check_reach(x: Any, size: Sequence[int], stride: Sequence[int], start: Any) -> None:
    """Refuse elements that are not those of `x`."""
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    end = start + 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    # Of nothing, nothing is out of reach. Elements between those of `x` are not known.
    known = compat.guarded(span <= x.numel()) and compat.guarded(end <= span)
    if not known and not any(map(_is_zero, size)):
        raise UnsupportedOpError(
            f"as_strided({tuple(size)}, {tuple(stride)}, {start}) of {x!r} with strides {tuple(x.stride())} reaches "
            "elements that are not in this tensor; take as_strided of the tensor that it is a view of"
        )


def _strided_view(op: Any) -> Callable[..., Any]:
    """A view of rows at a distance from each other. Torch's own asks where `x` starts in a storage."""

    def view(x: Any, *args: Any) -> Any:
        meta = global_meta(type(x), op, (x, *args), {})
        (start,) = compat.retraced([meta.storage_offset()])
        return _strided_whole(x, op, args, compat.global_extents(meta.shape), compat.retraced(meta.stride()), start)

    return view


_diagonal_at = _strided_view(aten.diagonal.default)


def _diagonal(x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    return _diagonal_at(x, offset, dim1, dim2)


def _is_zero(n: Any) -> bool:
    """Whether a size is known to be 0, without a guard."""
    return isinstance(n, int) and n == 0


def _strided_whole(
    x: Any, op: Any, args: tuple[Any, ...], size: Sequence[int], stride: Sequence[int], start: Any
) -> Any:
    """A view op on the whole value, stored with exactly the strides that the global tensor has.

    Args:
        x: what is viewed.
        op: the op.
        args: its other arguments.
        size: of the view.
        stride: of the view.
        start: its place, counted from the first element of `x`.
    """
    layout = x._spec.layout.replicated()
    plan = find_plan(x._spec.layout, layout)
    # Rows that are one in memory; of no rows there is none to keep.
    expanded = [d for d, s in enumerate(x.stride()) if _is_zero(s) and not _is_zero(x.shape[d])]

    def whole() -> Tensor:
        local = run_plan(plan, x._local_tensor)
        if local.stride() == tuple(x.stride()):
            return local
        for dim in expanded:
            local = local.narrow(dim, 0, 1)
        stored = torch.empty_strided(local.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(local)
        return stored.expand(x.shape) if expanded else stored

    def strided(local: Tensor) -> Tensor:
        if type(local) is not Tensor and op is aten.diagonal.default:
            # Functionalization (2.11 - 2.15) refuses to write to an `as_strided` of a view. What torch's own asks of
            # extents `global_meta` has asked of the same ones; where a block starts is none of a trace's business.
            with compat.without_guards(local):
                return op(local, *args)
        first = None if _is_zero(start) else start + local.storage_offset()
        return aten.as_strided.default(local, size, stride, first)

    out = strided(whole())
    placed = Layout.of(layout.mesh, layout.placements, tuple(out.shape), out.dtype, (None,) * out.ndim)
    wrapped = type(x)._wrap(out, Spec.of(placed, tuple(out.stride())))
    note_view(x, wrapped)
    if plan.steps or x._copied is not None or x._local_tensor.stride() != tuple(x.stride()):
        follow(wrapped, op, (x, *args), None, lambda: strided(whole()))
    elif type(x._local_tensor) is Tensor:  # the compiler would make the result anew, without its place in the storage
        compat.share_storage(wrapped, x)
    return wrapped


def _triangle(keeps: Any) -> Callable[..., Any]:
    """`tril` or `triu` of cut matrices: which elements stay is known from their row and column."""

    def decomposed(x: Any, diagonal: int = 0) -> Any:
        if x.ndim < 2:
            return NotImplemented
        rows = torch.arange(x.shape[-2], device=x.device).unsqueeze(-1)
        return torch.where(keeps(torch.arange(x.shape[-1], device=x.device) - rows, diagonal), x, 0)

    return decomposed


def _diagonal_scatter(x: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """What is on the diagonal is known from row and column; element k of `src` is in row ``k - min(offset, 0)``."""
    global_meta(
        type(x if hasattr(x, "_spec") else src), aten.diagonal_scatter.default, (x, src, offset, dim1, dim2), {}
    )
    dim1, dim2 = dim1 % x.ndim, dim2 % x.ndim
    count = src.shape[-1]
    if _is_zero(count):
        return x.clone()
    rows, columns = (torch.arange(x.shape[d], device=x.device) for d in (dim1, dim2))
    places = (rows + min(offset, 0)).clamp(min=0, max=count - 1)
    values = aten.index_select.default(src, src.ndim - 1, places)
    values = values.movedim(-1, dim1 - (dim2 < dim1)).unsqueeze(dim2)
    shaped = [n.reshape([-1 if e == d else 1 for e in range(x.ndim)]) for d, n in ((dim1, rows), (dim2, columns))]
    return torch.where(shaped[1] - shaped[0] == offset, values, x)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.mean.dim: _mean_dim,
    aten.mean.default: _mean,
    aten.var.correction: _var,
    aten.std.correction: _std,
    aten.var_mean.correction: _var_mean,
    aten.std_mean.correction: _std_mean,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.logsumexp.default: _logsumexp,
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _log_softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax_backward_data.default: _log_softmax_backward,
    aten.max.dim: _extremum_dim(aten.amax.default),
    aten.min.dim: _extremum_dim(aten.amin.default),
    aten.argmax.default: _arg(aten.amax.default),
    aten.argmin.default: _arg(aten.amin.default),
    aten.mse_loss.default: _mse_loss,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: compat.decomposition_by_torch(aten.native_layer_norm_backward.default),
    aten.native_group_norm.default: group_norm,
    aten.native_group_norm_backward.default: group_norm_backward,
    aten.addmm.default: _addmm,
    aten.baddbmm.default: _baddbmm,
    aten.addbmm.default: _addbmm,
    aten.trace.default: _trace,
    aten.equal.default: _equal,
    aten.as_strided.default: _as_strided,
    aten.diagonal.default: _diagonal,
    aten.unfold.default: _strided_view(aten.unfold.default),
    aten.take.default: _take,
    aten.slice.Tensor: rows.slice_rows,
    aten.slice_backward.default: rows.slice_backward,
    aten.slice_scatter.default: rows.slice_scatter,
    aten.select.int: rows.select,
    aten.select_scatter.default: rows.select_scatter,
    aten.split.Tensor: rows.split,
    aten.split_with_sizes.default: rows.split_with_sizes,
    aten.constant_pad_nd.default: rows.pad,
    aten.cat.default: rows.cat,
    aten.tril.default: _triangle(torch.le),
    aten.triu.default: _triangle(torch.ge),
    aten.diagonal_scatter.default: _diagonal_scatter,
    aten.embedding.default: lookups.embedding,
    aten.index_select.default: lookups.index_select,
    aten.index.Tensor: lookups.index,
    aten.gather.default: lookups.gather,
    aten.scatter.src: lookups.scatter_src,
    aten.scatter.value: lookups.scatter_value,
    aten.index_add.default: additions.index_add,
    aten.index_put.default: additions.index_put,
    aten.scatter_add.default: additions.scatter_add,
    aten.bincount.default: counts.bincount,
    aten.histc.default: counts.histc,
    aten.cumsum.default: scans.cumsum,
    aten.cumprod.default: scans.cumprod,
    aten.logcumsumexp.default: scans.logcumsumexp,
    aten.cummax.default: scans.cummax,
    aten.cummin.default: scans.cummin,
    aten.flip.default: scans.flip,
    aten.roll.default: scans.roll,
    aten.repeat.default: scans.repeat,
    **INTERPOLATION_OPS,
    **WINDOW_OPS,
    **FOURIER_OPS,
    aten.size.default: lambda x: list(x._spec.shape),  # asked for where extents depend on values
}
"""By op, what is run when the op itself would have to gather."""

NOT_DECOMPOSED = {
    aten.index_add.default,  # torch's fails for an index of 0 dims
    aten.diagonal_backward.default,
}
"""Ops whose decomposition in torch's table is of no use to us: they gather."""
