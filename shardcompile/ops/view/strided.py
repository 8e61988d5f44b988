"""Views by strides: slices and permutations where that is what the strides say, otherwise of the whole value."""

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
from shardcompile.sharding import IntLike, Layout, Spec, carrier_of

aten = torch.ops.aten


def as_strided(
    x: Sharded, size: Sequence[IntLike], stride: Sequence[IntLike], storage_offset: IntLike | None = None
) -> Tensor:
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


def _start_within(x: Tensor, storage_offset: IntLike | None) -> IntLike:
    """Where a place in the storage is, counted from the first element of `x`."""
    if storage_offset is None:
        return 0
    # Where a view starts in the storage of a sharded tensor is not kept.
    base = x._base if x._is_view() else None
    if x.is_inference() or (base is not None and not compat.same_symbol(base.numel(), x.numel())):
        raise UnsupportedOpError(
            f"as_strided with a place in the storage that {x!r} is a view of; leave out storage_offset, which is then "
            "that of the view, or take as_strided of the tensor that was viewed"
        )
    return storage_offset


def _as_views(x: Sharded, size: Sequence[IntLike], stride: Sequence[IntLike]) -> Tensor | None:
    """The first rows of dims of `x` in some order, or None if that is not what the strides ask for."""
    # A trace must not take a partition size for the number that it is compared with.
    same = compat.same_symbol if x._spec.is_plain else lambda a, b: compat.statically_known_true(a == b)
    left = list(range(x.ndim))
    kept: list[int] = []
    for n, s in zip(size, stride, strict=True):
        if isinstance(n, int) and n == 1:
            continue
        fits = (d for d in left if same(x.stride(d), s) and compat.guard_or_false(n <= x.shape[d]))
        dim = next(fits, None)
        if dim is None:
            return None
        left.remove(dim)
        kept.append(dim)
    if any(compat.guard_or_false(x.shape[d] == 0) for d in left):
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


def _check_reach(x: Tensor, size: Sequence[IntLike], stride: Sequence[IntLike], start: IntLike) -> None:
    """Refuse elements that are not those of `x`."""
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    end = start + 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    # Of nothing, nothing is out of reach. Elements between those of `x` are not known.
    known = compat.guard_or_false(span <= x.numel()) and compat.guard_or_false(end <= span)
    if not known and not any(map(_is_zero, size)):
        raise UnsupportedOpError(
            f"as_strided({tuple(size)}, {tuple(stride)}, {start}) of {x!r} with strides {tuple(x.stride())} reaches "
            "elements that are not in this tensor; take as_strided of the tensor that it is a view of"
        )


def strided_view(op: OpOverload) -> Run:
    """A view of rows at a distance from each other. Torch's own asks where `x` starts in a storage."""

    def view(x: Sharded, *args: object) -> Tensor:
        meta = global_meta(op, (x, *args), {})
        (start,) = compat.retrace([meta.storage_offset()])
        return _strided_whole(x, op, args, compat.global_sizes(meta.shape), compat.retrace(meta.stride()), start)

    return view


def _diagonal(x: Sharded, offset: int = 0, dim1: int = 0, dim2: int = 1) -> object:
    return _diagonal_at(x, offset, dim1, dim2)


def _is_zero(n: object) -> bool:
    """Whether a size is known to be 0, without a guard."""
    return isinstance(n, int) and n == 0


def _strided_whole(
    x: Sharded,
    op: OpOverload,
    args: tuple[object, ...],
    size: Sequence[IntLike],
    stride: Sequence[IntLike],
    start: IntLike,
) -> Tensor:
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
        carrier = carrier_of(x.dtype)
        stored = torch.empty_strided(local.shape, x.stride(), dtype=carrier, device=x.device)
        stored = stored.copy_(local.view(carrier)).view(x.dtype) if carrier is not x.dtype else stored.copy_(local)
        return stored.expand(x.shape) if expanded else stored

    def strided(local: Tensor) -> Tensor:
        if type(local) is not Tensor and op is aten.diagonal.default:
            # Functionalization (2.11 - 2.15) refuses to write to an `as_strided` of a view. What torch's own asks of
            # sizes `global_meta` has asked of the same ones; where a shard starts is none of a trace's business.
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


_diagonal_at = strided_view(aten.diagonal.default)

state(aten.as_strided.default, sharded=as_strided)
state(aten.diagonal.default, sharded=_diagonal)
state(aten.diagonal_backward.default, not_decomposed="torch's is of ops that gather")


def _has_same_storage_numel(x: Tensor, other: Tensor) -> bool:
    """Which forward-mode differentiation asks of a tensor and its tangent, to lay the tangent out as the tensor is."""
    return bool(x.numel() == other.numel())


state(aten._has_same_storage_numel.default, sharded=_has_same_storage_numel)
