"""Which elements of a tensor its views of integers hold, so that views with equal elements share what is kept of them.

An index such as `edges[0]` is a new view in each layer; a gather plan of it serves all of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from shardcompile.sharded import Sharded


class Elements(NamedTuple):
    """Which elements of which tensor a view of integers holds, in order.

    Attributes:
        base: a tensor that is no view.
        path: its spec, which `t_` and the like change, and the view ops that lead from it to the view.
        flat: the part of the path after which no op changes the elements in row-major order but for repeating them.
        num_flat: the number of elements after `flat`.
    """

    base: Sharded
    path: tuple[object, ...]
    flat: tuple[object, ...]
    num_flat: int


_SAME_ELEMENTS = {
    op
    for packet in (
        torch.ops.aten.alias,
        torch.ops.aten.detach,
        torch.ops.aten.expand,
        torch.ops.aten.squeeze,
        torch.ops.aten.unsqueeze,
        torch.ops.aten.view,
    )
    for op in (getattr(packet, name) for name in packet.overloads())
    if op is not torch.ops.aten.view.dtype
}
"""View ops that leave the elements in row-major order, or repeat them."""


def note_elements(view: Sharded, op: torch._ops.OpOverload, args: tuple[Any, ...], at: int | None = None) -> None:
    """Records how a view of integers was made.

    Args:
        view: the view.
        op: the view op.
        args: its arguments, of which the first is the viewed tensor.
        at: the position of the view among several results of the op; None for a single result.
    """
    parent = _elements(args[0])
    step = (op, at, *(tuple(a) if isinstance(a, list) else a for a in args[1:]))
    path = (*parent.path, step)
    if op in _SAME_ELEMENTS:
        view._elements = Elements(parent.base, path, parent.flat, parent.num_flat)
    else:
        view._elements = Elements(parent.base, path, path, view.numel())


def _elements(x: Sharded) -> Elements:
    return x._elements or Elements(x, (x._spec,), (x._spec,), x.numel())


def flat_elements(x: Sharded, count: int | None = None) -> tuple[Sharded, tuple[object, ...]]:
    """Returns the tensor that a tensor is a view of, and a key of its elements among those of that tensor.

    Tensors with an equal key hold equal elements in row-major order, on every rank. So `keep` and `kept` of the base
    with this key serve all views that hold them, such as `edges[0]`, made anew for each layer.

    Args:
        x: the tensor.
        count: number of elements, if they are those of one dim only, over whose other dims they are expanded.
    """
    found = _elements(x)
    wanted = x.numel() if count is None else count
    return found.base, found.flat if found.num_flat == wanted else (*found.path, wanted)
