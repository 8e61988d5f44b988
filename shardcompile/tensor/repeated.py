"""Promotion of plain tensors that repeat a smaller one: rows gathered from a table, or a bias expanded over a batch.

The gradient of the repeated tensor arrives sharded. Instead of being gathered it passes through the autograd nodes of
the plain tensors as a sharded tensor: these sum it into the gradient of the small tensor, which is then reduced.
"""

from __future__ import annotations

import math

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardcompile import compat
from shardcompile.sharded import Sharded
from shardcompile.tensor.autograd import Promote, complete_gradient
from shardcompile.tensor.gradient_buckets import may_wait, promote_leaf


def promote(x: Tensor, cls: type[Sharded], mesh: DeviceMesh) -> Sharded:
    """Promotes a plain tensor that requires a gradient to a replicated one, differentiably.

    A sharded gradient is passed through plain nodes in compiled functions only: there nobody else holds the
    intermediate tensors, whose gradients or hooks would see it.
    """
    if may_wait(x, mesh):
        return promote_leaf(x, cls, mesh)
    repetition = compat.last_repetition(x) if compat.is_compiling() else None
    if repetition is not None:
        node, small_numel = repetition
        # An all-reduce of the small gradient moves each element twice.
        if 2 * small_numel <= math.prod(map(compat.size_hint, x.shape)):
            node.register_hook(_complete_gradients)
            return Promote.apply(x, cls, mesh, _stay_sharded)  # type: ignore[no-any-return]
    return Promote.apply(x, cls, mesh)  # type: ignore[no-any-return]


def _stay_sharded(grad: Sharded) -> Tensor:
    return grad


def _complete_gradients(gradients: tuple[Tensor | None, ...], _: object) -> tuple[Tensor | None, ...]:
    """Makes the gradients that an autograd node returns complete and plain."""
    return tuple(complete_gradient(g) if isinstance(g, Sharded) else g for g in gradients)
