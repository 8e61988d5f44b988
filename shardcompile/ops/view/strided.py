"""Views by strides: slices and permutations where the strides are those of dims, otherwise views of the full tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.compat import OpOverload
from shardcompile.errors import UnsupportedOpError
from shardcompile.ops import state
from shardcompile.ops.record import Run
from shardcompile.ops.support.copied_views import follow, note_view
from shardcompile.ops.support.global_meta import global_meta
from shardcompile.planning import find_plan
from shardcompile.redistribute import run_plan
from shardcompile.sharded import Sharded
from shardcompile.sharding import IntLike, Layout, Spec, transfer_dtype_of

aten = torch.ops.aten


def as_strided(
    x: Sharded, size: Sequence[IntLike], stride: Sequence[IntLike], storage_offset: IntLike | None = None
) -> Tensor:
    """Slices and permutes `x` where the strides are those of its dims; otherwise views the full tensor.

    Raises:
        UnsupportedOpError: the view reaches elements that are in the memory that `x` is a view of, but not in `x`.
    """
    start = _offset_within(x, storage_offset)
    views = _as_views(x, size, stride) if _is_zero(start) else None
    if views is not None:
        return views
    _check_reach(x, size, stride, start)
    return _view_full(x, aten.as_strided.default, (size, stride, start), size, stride, start)


def _offset_within(x: Tensor, storage_offset: IntLike | None) -> IntLike:
    """Returns a storage offset as one that is counted from the first element of `x`."""
    if storage_offset is None:
        return 0
    # A sharded tensor does not record where in a storage it starts.
    base = x._base if x._is_view() else None
    if x.is_inference() or (base is not None and not compat.guard_equal(base.numel(), x.numel())):
        raise UnsupportedOpError(
            f"as_strided with an offset in the storage that {x!r} is a view of; leave out storage_offset, which is "
            "then that of the view, or take as_strided of the tensor that was viewed"
        )
    return storage_offset


def _as_views(x: Sharded, size: Sequence[IntLike], stride: Sequence[IntLike]) -> Tensor | None:
    """Returns the first rows of dims of `x`, permuted; None if that is not what the sizes and strides ask for."""
    # A trace must not specialise a sharded size on the int that it is compared with.
    same = compat.guard_equal if x._spec.is_plain else lambda a, b: compat.statically_known_true(a == b)
    remaining = list(range(x.ndim))
    kept: list[int] = []
    for n, s in zip(size, stride, strict=True):
        if isinstance(n, int) and n == 1:
            continue
        fits = (d for d in remaining if same(x.stride(d), s) and compat.guard_or_false(n <= x.shape[d]))
        dim = next(fits, None)
        if dim is None:
            return None
        remaining.remove(dim)
        kept.append(dim)
    if any(compat.guard_or_false(x.shape[d] == 0) for d in remaining):
        return None
    wide_sizes = [n for n in size if not (isinstance(n, int) and n == 1)]
    for n, d in zip(wide_sizes, kept, strict=True):
        x = x if same(n, x.shape[d]) else aten.slice.Tensor(x, d, 0, n)
    for d in reversed(remaining):
        x = aten.select.int(x, d, 0)
    order = sorted(kept)
    out = aten.permute.default(x, [order.index(d) for d in kept])
    for i, n in enumerate(size):
        out = aten.unsqueeze.default(out, i) if isinstance(n, int) and n == 1 else out
    return out


def _check_reach(x: Tensor, size: Sequence[IntLike], stride: Sequence[IntLike], start: IntLike) -> None:
    """Raises if a view reaches elements that are not in `x`."""
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    end = start + 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    # An empty view reaches nothing. Elements in memory between those of `x` are not available.
    is_within = compat.guard_or_false(span <= x.numel()) and compat.guard_or_false(end <= span)
    if not is_within and not any(map(_is_zero, size)):
        raise UnsupportedOpError(
            f"as_strided({tuple(size)}, {tuple(stride)}, {start}) of {x!r} with strides {tuple(x.stride())} reaches "
            "elements that are not in this tensor; take as_strided of the tensor that it is a view of"
        )


def strided_view(op: OpOverload) -> Run:
    """Makes the decomposition of a view op such as `diagonal`. Torch's own op reads the storage offset of `x`."""

    def view(x: Sharded, *args: object) -> Tensor:
        meta = global_meta(op, (x, *args), {})
        (start,) = compat.retrace([meta.storage_offset()])
        return _view_full(x, op, args, compat.global_sizes(meta.shape), compat.retrace(meta.stride()), start)

    return view


def _diagonal(x: Sharded, offset: int = 0, dim1: int = 0, dim2: int = 1) -> object:
    return _diagonal_at(x, offset, dim1, dim2)


def _is_zero(n: object) -> bool:
    """Whether a size is known to be 0, without a guard."""
    return isinstance(n, int) and n == 0


def _view_full(
    x: Sharded,
    op: OpOverload,
    args: tuple[object, ...],
    size: Sequence[IntLike],
    stride: Sequence[IntLike],
    start: IntLike,
) -> Tensor:
    """Applies a view op to the full tensor, which is stored with exactly the strides that the global tensor has.

    Args:
        x: the tensor that is viewed.
        op: the view op.
        args: its other arguments.
        size: sizes of the view.
        stride: strides of the view.
        start: offset of the view, counted from the first element of `x`.
    """
    layout = x._spec.layout.replicated()
    plan = find_plan(x._spec.layout, layout)
    # Expanded dims, whose rows share memory; an empty dim has no row to keep.
    expanded = [d for d, s in enumerate(x.stride()) if _is_zero(s) and not _is_zero(x.shape[d])]

    def full() -> Tensor:
        local = run_plan(plan, x._local_tensor)
        if local.stride() == tuple(x.stride()):
            return local
        for dim in expanded:
            local = local.narrow(dim, 0, 1)
        transfer_dtype = transfer_dtype_of(x.dtype)
        stored = torch.empty_strided(local.shape, x.stride(), dtype=transfer_dtype, device=x.device)
        stored = stored.copy_(local.view(transfer_dtype)).view(x.dtype)
        return stored.expand(x.shape) if expanded else stored

    def view(local: Tensor) -> Tensor:
        if type(local) is not Tensor and op is aten.diagonal.default:
            # Functionalization (2.11 - 2.15) refuses to write to an `as_strided` of a view. `global_meta` has installed
            # the guards that torch's own op installs on sizes; a trace must not guard on where a shard starts.
            with compat.without_guards(local):
                return op(local, *args)
        offset = None if _is_zero(start) else start + local.storage_offset()
        return aten.as_strided.default(local, size, stride, offset)

    out = view(full())
    out_layout = Layout.of(layout.mesh, layout.placements, tuple(out.shape), out.dtype, (None,) * out.ndim)
    wrapped = type(x)._wrap(out, Spec.of(out_layout, tuple(out.stride())))
    note_view(x, wrapped)
    if plan.steps or x._copied is not None or x._local_tensor.stride() != tuple(x.stride()):
        follow(wrapped, op, (x, *args), None, lambda: view(full()))
    elif type(x._local_tensor) is Tensor:  # the compiler would rebuild the result without its storage offset
        compat.share_storage(wrapped, x)
    return wrapped


_diagonal_at = strided_view(aten.diagonal.default)

state(aten.as_strided.default, sharded=as_strided)
state(aten.diagonal.default, sharded=_diagonal)
state(aten.diagonal_backward.default, not_decomposed="torch's decomposition uses ops that gather")


def _has_same_storage_numel(x: Tensor, other: Tensor) -> bool:
    """Compares element counts. Forward-mode differentiation calls it to give a tangent the layout of its tensor."""
    return bool(x.numel() == other.numel())


state(aten._has_same_storage_numel.default, sharded=_has_same_storage_numel)
