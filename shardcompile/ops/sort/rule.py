"""Rules of sorting along a dim: any other dim may be sharded."""

from __future__ import annotations

import torch

from shardcompile.ops.reduce.rule import other_dims
from shardcompile.ops.registry import register

aten = torch.ops.aten

register(aten.sort.default, other_dims(1, -1))
register(aten.sort.stable, other_dims(99, -1))
register(aten.topk.default, other_dims(2, -1))
