"""Plain tensors that repeat a small one: rows of a table that plain numbers look up, a row or bias that a batch shares.

Their gradient comes sharded. In place of being gathered for autograd's nodes of plain tensors it goes through them as
it
is: they add it up into the small tensor's gradient, of which the sums are reduced.
"""

from __future__ import annotations

import math

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardcompile import compat
from shardcompile.sharded import Sharded
from shardcompile.tensor.autograd import Promote, ToLocal, redistributed


def promote(x: Tensor, cls: type[Sharded], mesh: DeviceMesh) -> Sharded:
    """A plain tensor with a gradient as a replicated one, differentiably.

    A partition gradient is passed on in compiled functions alone: nobody else holds what comes up in between, and
    could ask for its gradient, or have a hook see it.
    """
    found = compat.last_repetition(x) if compat.is_compiling() else None
    if found is None:
        return Promote.apply(x, cls, mesh, True)  # type: ignore[no-any-return]
    node, small = found
    passes = 2 * small <= math.prod(map(compat.size_hint, x.shape))  # a reduction moves each element twice
    if passes:
        node.register_hook(_completed)
    return Promote.apply(x, cls, mesh, not passes)  # type: ignore[no-any-return]


def _completed(gradients: tuple[Tensor | None, ...], _: object) -> tuple[Tensor | None, ...]:
    """The gradients that a node of plain tensors hands out: whole, and plain."""
    return tuple(_whole(g) if isinstance(g, Sharded) else g for g in gradients)


def _whole(grad: Sharded) -> Tensor:
    return ToLocal.apply(redistributed(grad, grad._spec.layout.replicated()), None)  # type: ignore[no-any-return]
