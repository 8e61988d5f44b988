"""Rules of ops that rearrange dims: views, slices, concatenation, splits; and of new tensors of a stated shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from shardcompile import compat
from shardcompile.compat import is_one
from shardcompile.ops.pointwise.rule import _REDUCE_OPS as REDUCE_OPS
from shardcompile.ops.pointwise.rule import is_stretched
from shardcompile.ops.registry import register
from shardcompile.ops.strategy import OpCall, Strategy, along, partial
from shardcompile.sharding import IntLike, Layout, dense_stride

aten = torch.ops.aten
LocalShape = Callable[[Layout], tuple[Any, ...]]


def passing(strategies: Iterable[Strategy]) -> Iterable[Strategy]:
    """Yields strategies of an op with one input, then those that pass on a pending reduction."""
    yield from strategies
    yield from (partial([op], [op]) for op in REDUCE_OPS)


# Arguments that state a shape


def local_shape_at(position: int) -> Callable[..., tuple[Any, ...]]:
    """Makes a function that replaces the argument at `position`, a global output shape, by this rank's local shape."""

    def local_args(
        call: OpCall, args: tuple[object, ...], outputs: Sequence[Layout], shape: LocalShape
    ) -> tuple[object, ...]:
        return (*args[:position], list(shape(outputs[0])), *args[position + 1 :])

    return local_args


def _expand(call: OpCall) -> Iterable[Strategy]:
    src, shape = call.tensors[0].shape, call.args[1]
    new = len(shape) - len(src)
    stretched = [is_stretched(size, shape[d + new]) for d, size in enumerate(src)]
    kept = [along([d], [d + new]) for d in range(len(src)) if not stretched[d]]
    grows = any(not is_one(e) for e in shape[:new]) or any(stretched)
    # A pending reduction is carried out before the tensor is expanded: afterwards it would move every copy.
    return kept if grows else passing(kept)


register(aten.expand.default, _expand, local_shape_at(1))


# Permutations


def _permutation(order: Callable[[OpCall], Sequence[int]]) -> Any:
    return lambda call: passing(along([d], [at]) for at, d in enumerate(order(call)))


def _swap(call: OpCall) -> list[int]:
    ndim = call.tensors[0].ndim
    order = list(range(ndim))
    if ndim:
        a, b = call.args[1] % ndim, call.args[2] % ndim
        order[a], order[b] = order[b], order[a]
    return order


register(aten.permute.default, _permutation(lambda call: [d % call.tensors[0].ndim for d in call.args[1]]))
register([aten.transpose.int], _permutation(_swap))
register(aten.t.default, _permutation(lambda call: list(reversed(range(call.tensors[0].ndim)))))


# Dims of size 1


def _unsqueeze(call: OpCall) -> Iterable[Strategy]:
    ndim = call.tensors[0].ndim
    at = call.args[1] % (ndim + 1)
    return passing(along([d], [d + (d >= at)]) for d in range(ndim))


def _squeezed_dims(call: OpCall) -> list[int]:
    """The dims that are removed: those of size 1 among the stated ones, or among all."""
    shape, dims = call.tensors[0].shape, call.arg(1, "dim")
    ndim = len(shape)
    stated = range(ndim) if dims is None else [d % max(ndim, 1) for d in ([dims] if isinstance(dims, int) else dims)]
    return sorted({d for d in stated if d < ndim and is_one(shape[d])})


def _squeeze(call: OpCall) -> Iterable[Strategy]:
    ndim = call.tensors[0].ndim
    removed = _squeezed_dims(call)
    return passing(along([d], [d - sum(g < d for g in removed)]) for d in range(ndim) if d not in removed)


def _squeeze_locally(
    call: OpCall, args: tuple[object, ...], outputs: Sequence[Layout], shape: LocalShape
) -> tuple[object, ...]:
    """States the dims to remove: a sharded dim is not of size 1 only because this rank holds one row."""
    return (args[0], _squeezed_dims(call))


register(aten.unsqueeze.default, _unsqueeze)
register([aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims], _squeeze, _squeeze_locally)


# Complex numbers as pairs


def _pairs(call: OpCall) -> Iterable[Strategy]:
    """Any dim of the complex tensor may be sharded; the real tensor has one more, for the pairs."""
    ndim = call.tensors[0].ndim - ("view_as_complex" in call.op._schema.name)
    return [*(along([d], [d]) for d in range(ndim)), *(partial([op], [op]) for op in ("sum", "avg"))]


register([aten.view_as_real.default, aten.view_as_complex.default], _pairs)


# Slices and pieces along one dim


def _other_dims(dim_at: int, default: int, removed: bool = False) -> Any:
    """Makes a rule by which any dim but ``dim`` may be sharded; `removed` if ``dim`` is not in the output."""

    def rule(call: OpCall) -> Iterable[Strategy]:
        ndim = call.tensors[0].ndim
        dim = call.arg(dim_at, "dim", default) % max(ndim, 1)
        outputs = len(call.op._schema.returns)
        kept = (d for d in range(ndim) if d != dim)
        return passing(along([d], [d - (removed and d > dim)] * outputs) for d in kept)

    return rule


def _slice(call: OpCall) -> Iterable[Strategy]:
    tensor = call.tensors[0]
    if not tensor.ndim:
        return ()  # an error, which torch raises
    dim = call.arg(1, "dim", 0) % tensor.ndim
    keeps_all = _keeps_all(tensor.shape[dim], call.arg(2, "start"), call.arg(3, "end"), call.arg(4, "step", 1))
    return passing(along([d], [d]) for d in range(tensor.ndim) if d != dim or keeps_all)


def _keeps_all(size: IntLike, start: Any, end: Any, step: Any) -> bool:
    """Whether a slice statically keeps every row, so that no guard is needed."""
    if not (start is None or (isinstance(start, int) and start == 0)) or step != 1:
        return False
    return end is None or (isinstance(end, int) and end >= 2**62) or compat.statically_known_true(end >= size)


def _slice_locally(
    call: OpCall, args: tuple[object, ...], outputs: Sequence[Layout], shape: LocalShape
) -> tuple[Any, ...]:
    """A slice that keeps all of a sharded dim keeps all of each shard, whatever the global bounds are."""
    dim = call.arg(1, "dim", 0) % call.tensors[0].ndim
    return args if outputs[0].partitions[dim] is None else (args[0], dim, 0, 2**63 - 1, 1)


def _unfold(call: OpCall) -> Iterable[Strategy]:
    ndim = call.tensors[0].ndim
    dim = call.arg(1, "dimension", 0) % max(ndim, 1)
    return passing(along([d], [d]) for d in range(ndim) if d != dim)


def _unfold_backward(call: OpCall) -> Iterable[Strategy]:
    ndim = call.tensors[0].ndim - 1
    return passing(along([d], [d]) for d in range(ndim) if d != call.args[2] % max(ndim, 1))


register(aten.slice.Tensor, _slice, _slice_locally)
register(aten.unfold.default, _unfold)
register(aten.unfold_backward.default, _unfold_backward, local_shape_at(1))
register(aten.select.int, _other_dims(1, 0, removed=True))
register(aten.unbind.int, _other_dims(1, 0, removed=True))
register([aten.split.Tensor, aten.split_with_sizes.default], _other_dims(2, 0))


def _backward_along_other_dims(dim_at: int, added: bool) -> Any:
    """Makes the rule of the gradient of a slice or select, by which any dim but ``dim`` may be sharded."""

    def rule(call: OpCall) -> Iterable[Strategy]:
        ndim = len(call.args[1])
        dim = call.args[dim_at] % max(ndim, 1)
        kept = (d for d in range(ndim) if d != dim)
        return passing(along([d - (added and d > dim)], [d]) for d in kept)

    return rule


def _slice_backward(call: OpCall) -> Iterable[Strategy]:
    """Any dim but ``dim`` may be sharded, and ``dim`` as well if the slice keeps every row."""
    yield from _backward_along_other_dims(2, added=False)(call)
    sizes, dim, *rows = call.args[1:6]
    if sizes and _keeps_all(sizes[dim % len(sizes)], *rows):
        yield along([dim % len(sizes)], [dim % len(sizes)])


def _slice_backward_locally(
    call: OpCall, args: tuple[object, ...], outputs: Sequence[Layout], shape: LocalShape
) -> tuple[Any, ...]:
    dim = call.args[2] % max(len(call.args[1]), 1)
    rows = args[3:] if not call.args[1] or outputs[0].partitions[dim] is None else (0, 2**63 - 1, 1)
    return (args[0], list(shape(outputs[0])), args[2], *rows)


register(aten.slice_backward.default, _slice_backward, _slice_backward_locally)
register(aten.select_backward.default, _backward_along_other_dims(2, added=True), local_shape_at(1))


def _scatter_into(removed: bool) -> Any:
    """Makes the rule of `slice_scatter` or `select_scatter`: any dim but ``dim`` may be sharded in both tensors.

    Args:
        removed: whether the source lacks ``dim``.
    """

    def rule(call: OpCall) -> Iterable[Strategy]:
        target, source = call.tensors
        dim = call.arg(2, "dim", 0) % max(target.ndim, 1)
        others = [(d, d - (removed and d > dim)) for d in range(target.ndim) if d != dim]
        same = (compat.guard_equal(target.shape[d], source.shape[e]) for d, e in others)
        if source.ndim == target.ndim - removed and all(same):
            yield from (along([d, e], [d]) for d, e in others)
            yield from (partial([op] * 2, [op]) for op in REDUCE_OPS)

    return rule


register(aten.slice_scatter.default, _scatter_into(removed=False))
register(aten.select_scatter.default, _scatter_into(removed=True))


# Diagonals


def _batch_dims(ndim: int, dim1: int, dim2: int) -> list[int]:
    """The dims that a diagonal does not run through; they are the leading dims of the result."""
    pair = {dim1 % max(ndim, 1), dim2 % max(ndim, 1)}
    return [d for d in range(ndim) if d not in pair]


def _diagonal(call: OpCall) -> Iterable[Strategy]:
    others = _batch_dims(call.tensors[0].ndim, call.arg(2, "dim1", 0), call.arg(3, "dim2", 1))
    return passing(along([d], [i]) for i, d in enumerate(others))


def _diagonal_backward(call: OpCall) -> Iterable[Strategy]:
    others = _batch_dims(len(call.args[1]), *call.args[3:5])
    return passing(along([i], [d]) for i, d in enumerate(others))


register(aten.diagonal.default, _diagonal)
register(aten.diagonal_backward.default, _diagonal_backward, local_shape_at(1))


# Concatenation


def _cat(call: OpCall) -> Iterable[Strategy]:
    count = len(call.tensors)
    ndim = max(t.ndim for t in call.tensors)
    if any(t.ndim != ndim for t in call.tensors) or not ndim:
        return  # torch.cat skips empty tensors of shape [0]; they have no dim to shard
    dim = call.arg(1, "dim", 0) % ndim
    yield from (along([d] * count, [d]) for d in range(ndim) if d != dim)
    yield from (partial([op] * count, [op]) for op in REDUCE_OPS)


def _stack(call: OpCall) -> Iterable[Strategy]:
    count = len(call.tensors)
    ndim = call.tensors[0].ndim
    at = call.arg(1, "dim", 0) % (ndim + 1)
    yield from (along([d] * count, [d + (d >= at)]) for d in range(ndim))
    yield from (partial([op] * count, [op]) for op in REDUCE_OPS)


def _pad(call: OpCall) -> Iterable[Strategy]:
    """Dims that are not padded may be sharded."""
    ndim = call.tensors[0].ndim
    amounts = call.args[1]
    padded = {ndim - 1 - i // 2 for i, amount in enumerate(amounts) if not (isinstance(amount, int) and amount == 0)}
    yield from (along([d], [d]) for d in range(ndim) if d not in padded)
    if call.arg(2, "value", 0) == 0:
        yield from (partial([op], [op]) for op in ("sum", "avg"))


register(aten.constant_pad_nd.default, _pad)
register(aten.cat.default, _cat)
register(aten.stack.default, _stack)


def _triangle(call: OpCall) -> Iterable[Strategy]:
    """Batch dims may be sharded."""
    yield from (along([d], [d]) for d in range(call.tensors[0].ndim - 2))
    yield from (partial([op], [op]) for op in ("sum", "avg"))


register([aten.tril.default, aten.triu.default], _triangle)


# New tensors of a stated shape


def _new(call: OpCall) -> Iterable[Strategy]:
    """Sharded like the tensor along dims of the same size, replicated along others. Its values do not matter.

    If the tensor was gathered from a table by an index, a new tensor with as many rows as the table is sharded like the
    table, and a new column with as many rows as the gathered tensor is sharded like that.

    Eager code sees ints, and cannot tell a literal size from one that was read off a tensor. So that compiled code
    makes the same decision, it compares symbols with literals, too, and installs guards.
    """
    src, shape = call.tensors[0].shape, call.args[1]
    same_ndim = len(src) == len(shape)
    for dim, partition in enumerate(call.tensors[0].layout.partitions):
        if partition is None:
            continue  # nothing to decide
        at = dim if same_ndim else 0
        was_gathered = partition.provenance.indexed_rows is not None and (same_ndim or len(shape) == 1)
        if (same_ndim or was_gathered) and compat.guard_equal(src[dim], shape[at]):
            yield along([dim], [at])
        elif was_gathered and partition.indexed_rows_of_size(shape[at]) is not None:
            yield along([dim], [at], on_partition=lambda partition: partition.provenance.indexed_rows)
        else:
            yield along([dim], [None])
    yield from (partial([op], [None]) for op in REDUCE_OPS)


def _new_strided_locally(
    call: OpCall, args: tuple[Any, ...], outputs: Sequence[Layout], shape: LocalShape
) -> tuple[object, ...]:
    """A local shard is dense, its dims in the order that the global strides state."""
    local = shape(outputs[0])
    return (args[0], list(local), list(dense_stride(local, args[2])), *args[3:])


register(
    [aten.new_zeros.default, aten.new_empty.default, aten.new_ones.default, aten.new_full.default],
    _new,
    local_shape_at(1),
)
register(aten.new_empty_strided.default, _new, _new_strided_locally)
