"""Images of which a rank may have no channels: all leading dims as samples of one channel."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardcompile.compat import OpOverload
from shardcompile.ops import state
from shardcompile.ops.record import Run
from shardcompile.ops.support.blocks import may_be_empty, view_block
from shardcompile.ops.window.rule import per_channel

aten = torch.ops.aten


def _per_channel(op: OpOverload, spatial: int) -> Run:
    """Where this rank may have no channels, which kernels refuse: all leading dims as samples of one channel."""

    def local(x: Tensor, *args: object, **kwargs: object) -> object:
        leading = x.shape[:-spatial]
        if not may_be_empty(leading[-1]):
            return op(x, *args, **kwargs)

        def merged(a: object) -> object:
            if isinstance(a, Tensor):
                return view_block(a, [math.prod(a.shape[:-spatial]), 1, *a.shape[-spatial:]])
            if isinstance(a, (list, tuple)) and len(a) == spatial + len(leading) > spatial:  # a shape
                return [math.prod(a[:-spatial]), 1, *a[-spatial:]]
            return a

        out = op(merged(x), *map(merged, args), **kwargs)
        if isinstance(out, Tensor):
            return view_block(out, [*leading, *out.shape[-spatial:]])
        return tuple(view_block(o, [*leading, *o.shape[-spatial:]]) for o in out)

    return local


for _op, _spatial in per_channel():
    state(_op, kernel=_per_channel(_op, _spatial))
