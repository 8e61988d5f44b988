"""Zero tangents of sharded tensors in forward-mode AD."""

from __future__ import annotations

import torch
from torch import Tensor

from shardcompile.ops import always, state
from shardcompile.sharded import Sharded

aten = torch.ops.aten


def _zero_tangent(x: Tensor, primal: Tensor, *, self_num_batch_dims: int = 0) -> Tensor:
    """``aten._new_zeros_with_same_feature_meta``: a zero tangent with the layout of its primal.

    Args:
        x: a tangent, which determines the dtype; its leading dims are those over which `vmap` maps.
        primal: the primal, which determines the shape and the layout.
        self_num_batch_dims: number of the leading dims of `x` over which `vmap` maps.
    """
    mapped = x.shape[:self_num_batch_dims]
    if not isinstance(primal, Sharded):
        return x.new_zeros([*mapped, *primal.shape])
    zeros = torch.zeros_like(primal, dtype=x.dtype, device=x.device)
    return zeros.expand([*mapped, *primal.shape]).clone(memory_format=torch.contiguous_format) if mapped else zeros


state(aten._new_zeros_with_same_feature_meta.default, sharded=always(_zero_tangent))
