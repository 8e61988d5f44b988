"""Reductions of local shards. A shard may be empty, but torch's kernels refuse to reduce an empty dim."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardcompile.compat import OpOverload
from shardcompile.ops import state
from shardcompile.ops.support.local_shards import Scalar, highest, lowest, padded
from shardcompile.ops.support.logsumexp import logsumexp

aten = torch.ops.aten


def _extremum(op: OpOverload, identity: Callable[[torch.dtype], Scalar]) -> Callable[..., Tensor]:
    def local(x: Tensor, dim: Sequence[int] | None = (), keepdim: bool = False) -> Tensor:
        dims = list(range(x.ndim)) if dim is None or len(dim) == 0 else list(dim)
        return op(padded(x, dims, identity(x.dtype)) if x.ndim else x, dim, keepdim)

    return local


def _full_extremum(op: OpOverload, identity: Callable[[torch.dtype], Scalar]) -> Callable[..., Tensor]:
    def local(x: Tensor) -> Tensor:
        return op(padded(x, list(range(x.ndim)), identity(x.dtype)), [], False) if x.ndim else x.clone()

    return local


def _logsumexp(x: Tensor, dim: Sequence[int], keepdim: bool = False) -> Tensor:
    """`logsumexp` of a local shard; torch's own kernel guards in a trace on whether there are elements."""
    if all(isinstance(n, int) for n in x.shape):
        return aten.logsumexp.default(x, dim, keepdim)
    dims = list(dim) if len(dim) else list(range(x.ndim))
    return logsumexp(x, dims, keepdim, _shard_amax)


_shard_amax = _extremum(aten.amax.default, lowest)

state(aten.amax.default, kernel=_shard_amax)
state(aten.amin.default, kernel=_extremum(aten.amin.default, highest))
state(aten.logsumexp.default, kernel=_logsumexp)
state(aten.max.default, kernel=_full_extremum(aten.amax.default, lowest))
state(aten.min.default, kernel=_full_extremum(aten.amin.default, highest))
