"""Random ops along dims that have to be whole for the op itself."""

from __future__ import annotations

import torch

from shardcompile.ops import state
from shardcompile.sharded import Sharded

aten = torch.ops.aten


def _sample_dirichlet(x: Sharded, generator: torch.Generator | None = None) -> object:
    """Shares of gamma variables in their sum, in double precision, as torch's kernel computes them."""
    limits = torch.finfo(x.dtype)
    gamma = aten._standard_gamma.default(x.to(torch.float64), generator)
    shares = gamma / gamma.sum(-1, keepdim=True)
    return shares.clamp(limits.tiny, 1 - limits.eps / 2).to(x.dtype)


state(aten._sample_dirichlet.default, sharded=_sample_dirichlet)
