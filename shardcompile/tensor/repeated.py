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
from shardcompile.tensor.autograd import Promote, ToLocal, redistributed


def promote(x: Tensor, cls: type[Sharded], mesh: DeviceMesh) -> Sharded:
    """Promotes a plain tensor that requires a gradient to a replicated one, differentiably.

    A sharded gradient is passed through plain nodes in compiled functions only: there nobody else holds the
    intermediate tensors, whose gradients or hooks would see it.
    """
    repetition = compat.last_repetition(x) if compat.is_compiling() else None
    if repetition is None:
        return Promote.apply(x, cls, mesh, True)  # type: ignore[no-any-return]
    node, small_numel = repetition
    # An all-reduce of the small gradient moves each element twice.
    stays_sharded = 2 * small_numel <= math.prod(map(compat.size_hint, x.shape))
    if stays_sharded:
        node.register_hook(_complete_gradients)
    return Promote.apply(x, cls, mesh, not stays_sharded)  # type: ignore[no-any-return]


def _complete_gradients(gradients: tuple[Tensor | None, ...], _: object) -> tuple[Tensor | None, ...]:
    """Makes the gradients that an autograd node returns complete and plain."""
    return tuple(_complete(g) if isinstance(g, Sharded) else g for g in gradients)


def _complete(grad: Sharded) -> Tensor:
    return ToLocal.apply(redistributed(grad, grad._spec.layout.replicated()), None)  # type: ignore[no-any-return]
