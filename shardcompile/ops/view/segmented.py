"""Tensors with a sharded dim into which leading dims were flattened: ``x.view(-1, channels)`` of a batch of sharded
sequences.

A local shard of such a dim holds rows of several segments, which are not contiguous in the global dim. Ops that treat
each row by itself, such as matrix products and pointwise ops, work on the shards as they are. For any other op the
tensor is redistributed to shards of contiguous rows, with as many rows on each rank as before. Where several mesh dims
shard such a dim, it is redistributed to the layout that the view would have if shards always had contiguous rows.
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
from shardcompile.ops.support.sharded_rows import wrap
from shardcompile.planning import find_plan
from shardcompile.redistribute import run_plan
from shardcompile.sharded import Sharded
from shardcompile.sharding import Layout, Unflattened, has_segments, with_one_segment

aten = torch.ops.aten


def is_segmented(x: object) -> TypeGuard[Sharded]:
    """Whether `x` is a sharded tensor with a dim whose local shards hold rows of several segments."""
    return isinstance(x, Sharded) and has_segments(x._spec.layout)


def layout_with_contiguous_shards(layout: Layout) -> Layout:
    """Returns the layout to which `with_contiguous_shards` redistributes, without communication."""
    if not has_segments(layout):
        return layout
    if not _is_exchanged(layout):
        return _plan_view(layout)[2]
    partitions = [None if c is None else with_one_segment(c) for c in layout.partitions]
    return Layout.of(layout.mesh, layout.placements, layout.shape, layout.dtype, partitions)


def _is_exchanged(layout: Layout) -> bool:
    """Whether one exchange gives each rank as many contiguous rows: a single mesh dim shards each flattened dim."""
    return not any(c is not None and not is_one(c.num_segments) and len(c.mesh_dims) > 1 for c in layout.partitions)


def _plan_view(layout: Layout) -> tuple[Unflattened, Choice, Layout]:
    """Plans the view that flattens the leading dims again, such that shards have contiguous rows.

    Returns:
        How leading dims are split off, the strategy of the view, and the layout of its result.
    """
    unflattened = Unflattened.of(layout)
    source = TensorArg(unflattened.layout(layout))
    rule = find_rule(aten.reshape.default)
    assert rule is not None, "views have a rule"
    call = OpCall(aten.reshape.default, (source, list(layout.shape)), {}, (source,))
    choice = choose([source.layout], rule.strategies_for(call), 1)
    assert choice is not None, "replicating is always possible"
    return unflattened, choice, choice.outputs[0].layout(source.layout, layout.shape, layout.dtype)


def with_contiguous_shards(x: object) -> object:
    """Redistributes a tensor, or those in a list, to shards of contiguous rows in new memory; returns others as is."""
    if isinstance(x, (list, tuple)):
        return [with_contiguous_shards(y) for y in x]
    if not is_segmented(x):
        return x
    local = x._local_tensor.clone(memory_format=torch.contiguous_format)
    if _is_exchanged(x._spec.layout):
        layout = layout_with_contiguous_shards(x._spec.layout)
        return wrap(x, run_plan(find_plan(x._spec.layout, layout), local), layout, x._spec.stride)
    unflattened, choice, layout = _plan_view(x._spec.layout)
    shard = run_plan(choice.plans[0], aten.view.default(local, unflattened.shape(local.shape)))
    shard = shard.clone(memory_format=torch.contiguous_format)
    return wrap(x, aten.view.default(shard, list(local_shape_of(layout))), layout, x._spec.stride)


def on_contiguous_shards(op: Callable[..., object]) -> Callable[..., object]:
    """Wraps an op such that it gets its tensors with shards of contiguous rows."""

    def run(*args: object, **kwargs: object) -> object:
        return op(
            *[with_contiguous_shards(a) for a in args], **{k: with_contiguous_shards(a) for k, a in kwargs.items()}
        )

    return run


def any_segmented(values: Iterable[object]) -> bool:
    """Whether `is_segmented` holds for some argument, those in lists included."""
    return any(any_segmented(a) if isinstance(a, (list, tuple)) else is_segmented(a) for a in values)


def view_on_contiguous_shards(op: OpOverload) -> Callable[..., object]:
    """Wraps a view op such that its results have shards of contiguous rows: copies, which follow what was viewed."""

    def run(x: Sharded, *args: object) -> object:
        def compute() -> Sharded | list[Sharded]:
            return op(with_contiguous_shards(x), *args)  # type: ignore[no-any-return]

        out = compute()
        for i, result in enumerate(out if isinstance(out, (list, tuple)) else [out]):
            index = i if isinstance(out, (list, tuple)) else None
            note_view(x, result)
            if result._copied is not None:  # a view of the redistributed value, which nothing else refers to
                result.__dict__["_local_tensor"], result._copied = result._copied.shard, None
            follow(result, op, (x, *args), index, lambda i=index: _shard_of_result(compute(), i))  # type: ignore[misc]
        return out

    return run


def _shard_of_result(out: Sharded | list[Sharded], index: int | None) -> Tensor:
    result = out if isinstance(out, Sharded) else out[index or 0]
    return result._local_tensor
