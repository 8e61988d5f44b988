"""Ops on lists of tensors: ``_foreach_*``, the fused optimizers, and the unscale op of `GradScaler`.

If the tensors at each position of the lists have the same local shards, as a parameter, its gradient and its optimizer
state do, an elementwise op runs once on the lists of local shards. Otherwise a foreach op runs separately for each
position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.collectives import reductions as collective_ops
from shardcompile.compat import OpOverload
from shardcompile.errors import UnsupportedOpError
from shardcompile.ops import always, family, state
from shardcompile.ops.record import Facts
from shardcompile.ops.support.copied_views import note_write
from shardcompile.ops.support.sharded_rows import local_shard_in
from shardcompile.sharded import Sharded, layout_if_sharded, shard_of
from shardcompile.sharding import Layout, Spec

aten = torch.ops.aten
_UNSCALE = aten._amp_foreach_non_finite_check_and_unscale_.default


@family
def facts_of_list_ops(op: OpOverload) -> Facts | None:
    """Facts of foreach ops and fused optimizers, by their names."""
    name = op._schema.name.removeprefix("aten::")
    if name.startswith("_foreach_"):
        return {"sharded": always(lambda *args, **kwargs: _foreach(op, args, kwargs))}
    if name.startswith("_fused_") and op._schema.is_mutable and not any(a.is_out for a in op._schema.arguments):
        return {"sharded": always(lambda *args, **kwargs: _step_fused(op, args, kwargs))}
    return None


def _have_same_layout(tensors: Sequence[Tensor]) -> bool:
    """Whether the tensors at one position have the same local shards, so that an elementwise op can run on these."""
    layouts = [layout_if_sharded(t) for t in tensors]
    first = layouts[0]
    if first is None:
        return all(x is None for x in layouts)
    return not first.is_partial and all(x is not None and _same_shards(first, x) for x in layouts)


def _same_shards(a: Layout, b: Layout) -> bool:
    if a.mesh != b.mesh or a.placements != b.placements or len(a.shape) != len(b.shape):
        return False
    partitions, coordinate = zip(a.partitions, b.partitions, strict=True), compat.coordinate(a.mesh)
    return all(
        c is d or (c is not None and d is not None and c.guard_same_shards(d, coordinate)) for c, d in partitions
    )


def _lists(args: Sequence[object]) -> list[Sequence[Tensor]]:
    return [a for a in args if isinstance(a, (list, tuple)) and len(a) and isinstance(a[0], Tensor)]


def _foreach(op: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> list[Tensor] | None:
    lists = _lists(args)
    name = op._schema.name.removeprefix("aten::_foreach_")
    no_sharded_scalar = not any(layout_if_sharded(a) is not None for a in (*args, *kwargs.values()))
    if (
        no_sharded_scalar
        and _is_elementwise(name.removesuffix("_"))
        and all(map(_have_same_layout, zip(*lists, strict=True)))
    ):
        return _on_shards(op, args, kwargs)
    results = [_run_one(op, name, _args_at(op, args, i), kwargs) for i in range(len(lists[0]))]
    return None if op._schema.is_mutable else results


def _is_elementwise(name: str) -> bool:
    packet = getattr(aten, name, None)
    if packet is None or name in ("copy", "zero"):
        return packet is not None
    overloads = ["default"] if "default" in packet.overloads() else packet.overloads()  # `max.other` is elementwise
    return any(torch.Tag.pointwise in getattr(packet, o).tags for o in overloads)


def _on_shards(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, object]) -> list[Tensor] | None:
    out = op(*map(_shards, args), **kwargs)
    if op._schema.is_mutable:
        for target in args[0]:
            _write(op, target)
        return None
    like = _lists(args)[0]
    return [_wrap_like(x, o) for x, o in zip(like, out, strict=True)]


def _wrap_like(like: Tensor, shard: Tensor) -> Tensor:
    if not isinstance(like, Sharded):
        return shard
    return type(like)._wrap(shard, Spec.of(like._spec.layout.with_dtype(shard.dtype), like.stride()))


def _shards(a: object) -> object:
    if isinstance(a, (list, tuple)):
        return [shard_of(x) for x in a]
    return a


def _write(op: OpOverload, target: Tensor) -> None:
    if not isinstance(target, Sharded):
        return
    if target._copied is not None:
        target._copied.check_writable(op)
        target._copied.write_back(target)
    note_write(target)


def _args_at(op: OpOverload, args: Sequence[Any], i: int) -> list[Any]:
    """Returns the arguments of a foreach op at one position."""
    kinds = [str(a.type) for a in op._schema.arguments]
    picked: list[Any] = []
    for a, kind in zip(args, kinds, strict=False):
        per_position = kind.startswith("List[") or (kind == "Tensor" and "scalars" in str(op._schema) and a.ndim == 1)
        picked.append(a[i] if per_position else a)
    return picked


def _run_one(op: OpOverload, name: str, args: list[Any], kwargs: dict[str, object]) -> Tensor:
    """Runs a foreach op at one position by the single-tensor op after which it is named."""
    base = name.removesuffix("_")
    if base in ("addcdiv", "addcmul") and len(args) == 4:
        value = args.pop()
        kwargs = {**kwargs, "value": value.item() if isinstance(value, Tensor) else value}
    if base in ("maximum", "minimum") and not isinstance(args[1], Tensor):
        base = {"maximum": "clamp_min", "minimum": "clamp_max"}[base]
    if base == "norm":
        return torch.linalg.vector_norm(*args, **kwargs)
    if base == "powsum":
        return (args[0].abs() ** (args[1] if len(args) > 1 else 2)).sum(**kwargs)
    if base in ("copy", "zero"):
        target = args[0] if op._schema.is_mutable else torch.empty_like(args[0])
        return target.copy_(args[1]) if base == "copy" else target.zero_()
    function = getattr(torch, base, None)
    if function is None:
        raise UnsupportedOpError(f"{op} has no decomposition for sharded tensors; call the op on each tensor")
    out = function(*args, **kwargs)
    return args[0].copy_(out) if op._schema.is_mutable else out


def _step_fused(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, object]) -> None:
    """Runs a fused optimizer step on local shards, with all tensors redistributed to the layouts of the parameters."""
    parameters = args[0]
    local: list[Any] = []
    for a, argument in zip(args, op._schema.arguments, strict=False):
        if not isinstance(a, (list, tuple)):
            local.append(a)
            continue
        writes = compat.is_written(argument)
        local.append([_like_parameter(op, p, x, writes) for p, x in zip(parameters, a, strict=False)] if a else a)
    op(*local, **{k: v.full_tensor() if isinstance(v, Sharded) else v for k, v in kwargs.items()})
    for a, argument in zip(args, op._schema.arguments, strict=False):
        if isinstance(a, (list, tuple)) and compat.is_written(argument):
            for target in a:
                _write(op, target)


def _like_parameter(op: OpOverload, parameter: Tensor, x: Tensor, writes: bool) -> Tensor:
    layout, current = layout_if_sharded(parameter), layout_if_sharded(x)
    if layout is None and current is None:
        return x
    if layout is not None and current is None and x.ndim == 0:
        return x  # a step count
    if layout is None or (writes and (current is None or layout.is_partial or not _same_shards(layout, current))):
        raise UnsupportedOpError(
            f"{op} requires state with the layout of its parameter ({_describe(parameter)}), got {_describe(x)}; "
            "create the optimizer after the parameters are sharded, or use fused=False"
        )
    return local_shard_in(x, layout)


def _describe(x: Tensor) -> str:
    layout = layout_if_sharded(x)
    return f"a plain tensor {tuple(x.shape)}" if layout is None else layout.describe()


def _unscale(tensors: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Divides gradients by the scale. `found_inf` is reduced over all ranks, so that all skip the same steps."""
    found = torch.zeros_like(found_inf)
    if any(layout.is_partial for layout in map(layout_if_sharded, tensors) if layout is not None):
        raise UnsupportedOpError(f"{_UNSCALE} on a gradient with a pending reduction; redistribute it first")
    _UNSCALE(_shards(tensors), found, inv_scale)
    for mesh in {layout.mesh for layout in map(layout_if_sharded, tensors) if layout is not None}:
        for mesh_dim in range(mesh.ndim):
            found = collective_ops.all_reduce(found, "max", compat.group_name_of(mesh, mesh_dim)).wait()
    for target in tensors:
        _write(_UNSCALE, target)
    found_inf.copy_(torch.maximum(found_inf, found))


state(_UNSCALE, sharded=always(_unscale))
