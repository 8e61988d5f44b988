"""Tensors into whose sharded dims leading ones were flattened: ``x.view(-1, channels)`` of a sharded sequence and a
batch.

Their shards have rows that are no neighbours. Where an op takes each row by itself, as products and pointwise ops do,
they stay where they are. For any other op they are brought to shards of neighbouring rows, as many on each rank as
before. Where several mesh dims sharded such a dim, they are brought to what that view would have been had it not been
allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeGuard

import torch
from torch import Tensor

from shardcompile.collectives import local_shape_of
from shardcompile.compat import OpOverload, is_one
from shardcompile.ops.choice import Choice, choose
from shardcompile.ops.registry import find_rule
from shardcompile.ops.strategy import OpCall, TensorArg
from shardcompile.ops.support.copied_views import follow, note_view
from shardcompile.ops.view.rows import wrap
from shardcompile.planning import find_plan
from shardcompile.redistribute import run_plan
from shardcompile.sharded import Sharded
from shardcompile.sharding import Apart, Layout, has_runs, neighbouring

aten = torch.ops.aten


def is_joined(x: object) -> TypeGuard[Sharded]:
    """Whether a tensor has such shards."""
    return isinstance(x, Sharded) and has_runs(x._spec.layout)


def layout_in_one_piece(layout: Layout) -> Layout:
    """The layout with shards of neighbouring rows to which such a tensor is brought; nothing is sent to know it."""
    if not has_runs(layout):
        return layout
    if not _is_exchanged(layout):
        return _way(layout)[2]
    partitions = [None if c is None else neighbouring(c) for c in layout.partitions]
    return Layout.of(layout.mesh, layout.placements, layout.shape, layout.dtype, partitions)


def _is_exchanged(layout: Layout) -> bool:
    """Whether an exchange brings each shard as many neighbouring rows: one mesh dim shards what was flattened."""
    return not any(c is not None and not is_one(c.runs) and len(c.mesh_dims) > 1 for c in layout.partitions)


def _way(layout: Layout) -> tuple[Apart, Choice, Layout]:
    """The view to this shape, leading dims being apart, as it is where shards have to have neighbouring rows."""
    apart = Apart.of(layout)
    source = TensorArg(apart.layout(layout))
    rule = find_rule(aten.reshape.default)
    assert rule is not None, "views have a rule"
    call = OpCall(aten.reshape.default, (source, list(layout.shape)), {}, (source,))
    choice = choose([source.layout], rule.ways(call), 1)
    assert choice is not None, "replicating is always possible"
    return apart, choice, choice.outputs[0].layout(source.layout, layout.shape, layout.dtype)


def in_one_piece(x: object) -> object:
    """The tensor sharded of neighbouring rows, a value of its own; others as they are."""
    if isinstance(x, (list, tuple)):
        return [in_one_piece(y) for y in x]
    if not is_joined(x):
        return x
    local = x._local_tensor.clone(memory_format=torch.contiguous_format)
    if _is_exchanged(x._spec.layout):
        layout = layout_in_one_piece(x._spec.layout)
        return wrap(x, run_plan(find_plan(x._spec.layout, layout), local), layout, x._spec.stride)
    apart, choice, layout = _way(x._spec.layout)
    shard = run_plan(choice.plans[0], aten.view.default(local, apart.shape(local.shape)))
    shard = shard.clone(memory_format=torch.contiguous_format)
    return wrap(x, aten.view.default(shard, list(local_shape_of(layout))), layout, x._spec.stride)


def of_neighbours(op: Callable[..., object]) -> Callable[..., object]:
    """An op, on local shards of neighbouring rows."""

    def run(*args: object, **kwargs: object) -> object:
        return op(*[in_one_piece(a) for a in args], **{k: in_one_piece(a) for k, a in kwargs.items()})

    return run


def any_joined(values: Iterable[object]) -> bool:
    """Whether there is one among arguments, those in lists included."""
    return any(any_joined(a) if isinstance(a, (list, tuple)) else is_joined(a) for a in values)


def view_of_neighbours(op: OpOverload) -> Callable[..., object]:
    """A view op, whose results follow what was viewed: the shards are copies."""

    def run(x: Sharded, *args: object) -> object:
        def take() -> Sharded | list[Sharded]:
            return op(in_one_piece(x), *args)  # type: ignore[no-any-return]

        out = take()
        for i, one in enumerate(out if isinstance(out, (list, tuple)) else [out]):
            index = i if isinstance(out, (list, tuple)) else None
            note_view(x, one)
            if one._copied is not None:  # of the value that was brought here, which nobody else has
                one.__dict__["_local_tensor"], one._copied = one._copied.shard, None
            follow(one, op, (x, *args), index, lambda i=index: _hold(take(), i))  # type: ignore[misc]
        return out

    return run


def _hold(out: Sharded | list[Sharded], index: int | None) -> Tensor:
    one = out if isinstance(out, Sharded) else out[index or 0]
    return one._local_tensor
