"""The mixtures of experts that schedules are judged by compute what each token's experts give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardcompile.testing import LocalRanks
from tests.support import expert_models

SIZE = replace(expert_models.OLMOE, width=32, experts=8, chosen=2, inner=16)
RANKS, TOKENS = 2, 24


def weights_and_tokens() -> tuple[Tensor, list[Tensor], Tensor]:
    """Returns the weight of the router, those of all experts, and the tokens of each rank."""
    numbers = torch.Generator().manual_seed(0)
    shapes = [(SIZE.experts, SIZE.width), *((SIZE.experts, r, c) for r, c in [(16, 32), (16, 32), (32, 16)])]
    router, *experts = (torch.randn(s, generator=numbers).bfloat16() / 4 for s in shapes)
    return router, experts, torch.randn(RANKS, TOKENS, SIZE.width, generator=numbers).bfloat16()


def gradients(y: Tensor, x: Tensor, experts: Sequence[Tensor]) -> list[Tensor]:
    y.float().square().sum().backward()
    return [y.detach().float(), *(t.grad.float() for t in (x, *experts) if t.grad is not None)]


def over_ranks(mesh: DeviceMesh, exchange: Any) -> list[Tensor]:
    router, experts, x = weights_and_tokens()
    rank = mesh.get_local_rank()
    own = [w.chunk(RANKS)[rank].clone().requires_grad_() for w in experts]
    mine = x[rank].clone().requires_grad_()
    return gradients(expert_models._mixed(SIZE, mine, router, own, lambda *args: exchange(mesh, *args)), mine, own)


def on_one(scores_first: bool) -> list[Tensor]:
    """The same on one rank: each expert is given all tokens.

    Args:
        scores_first: whether tokens are multiplied by their scores before the experts, or results after them.
    """
    router, experts, x = weights_and_tokens()
    for t in (x := x.flatten(0, 1), *experts):
        t.requires_grad_()
    shares, chosen = F.linear(x, router).float().sigmoid().topk(SIZE.chosen, sorted=False)
    shares = (shares / shares.sum(-1, keepdim=True)).bfloat16()
    y = torch.zeros(x.shape)
    for k in range(SIZE.chosen):
        share = shares[:, k, None]
        for i, weights in enumerate(zip(*experts, strict=True)):
            result = expert_models._perceptron(x * share if scores_first else x, weights)
            y = y + ((result if scores_first else result * share) * (chosen[:, k, None] == i)).float()
    return gradients(y, x, experts)


def test_experts_over_ranks_equal_experts_on_one() -> None:
    count = mock.patch.object(torch, "histc", lambda x, bins, **_: x.bincount(minlength=bins))  # CPUs have none of ints
    for exchange, scores_first in ((expert_models.by_counts, True), (expert_models.by_routed_rows, False)):
        with count:
            found = LocalRanks(RANKS, processes=False)(over_ranks, exchange)
        for tensors in zip(*found, on_one(scores_first), strict=True):
            *parts, wanted = tensors
            torch.testing.assert_close(torch.cat(parts), wanted, rtol=0, atol=0.02 * float(wanted.abs().max()))
