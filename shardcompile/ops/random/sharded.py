"""Decompositions of random ops along a sharded dim that the ops themselves cannot shard."""

from __future__ import annotations

import torch

from shardcompile.ops import state
from shardcompile.sharded import Sharded

aten = torch.ops.aten


def _sample_dirichlet(x: Sharded, generator: torch.Generator | None = None) -> object:
    """Normalizes gamma variables by their sum, in double precision, as torch's kernel does."""
    limits = torch.finfo(x.dtype)
    gamma = aten._standard_gamma.default(x.to(torch.float64), generator)
    samples = gamma / gamma.sum(-1, keepdim=True)
    return samples.clamp(limits.tiny, 1 - limits.eps / 2).to(x.dtype)


state(aten._sample_dirichlet.default, sharded=_sample_dirichlet)
