"""Data-dependent ops: they read the value of a tensor of one element."""

from __future__ import annotations

import torch

from shardcompile.ops import state

aten = torch.ops.aten

state([aten._local_scalar_dense.default, aten._functional_assert_async.msg], reads_value=True)
state([aten._assert_async.default, aten._assert_async.msg], reads_value=True)
