"""Shards that are stored in different orders of dims meet: compiled, that is what eager mode gives, on local shards of any size.

A linear layer along a sharded dim that is not the first leaves its result with that dim first in memory. What torch says
while it traces about the memory of results, and what it asks about sizes to say so, must not leave ranks with a graph
of their own or with views that cannot be made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Shard

from shardcompile.testing import assert_matches_single_device
from tests.support.tiers import often

Op = Callable[[Tensor, Tensor], Tensor]


def in_place(write: Callable[[Tensor, Tensor], Any]) -> Op:
    def op(h: Tensor, w: Tensor) -> Tensor:
        h = h.clone()
        write(h, w)
        return h

    return op


FIRST = torch.tensor([0, 1])

GROUPS: dict[str, list[Op]] = {
    "pairs": [
        lambda h, w: torch.xlogy(w, h.exp()),
        lambda h, w: torch.copysign(h, w),
        lambda h, w: torch.logaddexp(w, h),
        lambda h, w: torch.where(w > 0, h, w),
        lambda h, w: h.tril() + w,
    ],
    "normalisations": [
        lambda h, w: h.softmax(-1),
        lambda h, w: h.log_softmax(-1),
        lambda h, w: F.layer_norm(h, [6]),
        lambda h, w: F.group_norm(h.transpose(1, 2), 2).transpose(1, 2),
    ],
    "writes": [
        in_place(lambda h, w: h.mul_(w)),
        in_place(lambda h, w: h.masked_fill_(w > 0, 1.5)),
        in_place(lambda h, w: h.copysign_(w)),
        lambda h, w: h.index_add(2, FIRST, w[..., :2]),
        lambda h, w: h.index_copy(2, FIRST, w[..., :2]),
        lambda h, w: h.index_fill(2, FIRST, 1.5) + w,
    ],
    "activations": [
        lambda h, w: F.softplus(h),
        lambda h, w: F.hardtanh(h),
        lambda h, w: F.logsigmoid(h),
        lambda h, w: torch.logit(h.sigmoid()),
    ],
    "pools": [
        lambda h, w: F.avg_pool1d(h, 3, 1, 1) * w,
        lambda h, w: F.adaptive_avg_pool1d(h, 6) * w,
        lambda h, w: F.pad(h, (1, 1), mode="reflect")[..., 1:-1] * w,
    ],
    "losses": [
        lambda h, w: F.mse_loss(h, w, reduction="none"),
        lambda h, w: F.huber_loss(h, w, reduction="none"),
        lambda h, w: F.binary_cross_entropy(h.sigmoid(), w.sigmoid(), reduction="none"),
        lambda h, w: F.kl_div(w.log_softmax(-1), h.log_softmax(-1), log_target=True, reduction="none"),
    ],
}


class Between(nn.Module):
    """Each op between linear layers, which want to view what they get as a matrix, in both directions."""

    def __init__(self, ops: list[Op]) -> None:
        super().__init__()
        self.before, self.overlappable = nn.Linear(6, 6), nn.Linear(6, 6)
        self.ops = ops

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        total = torch.zeros(())
        for op in self.ops:
            total = total + self.overlappable(op(self.before(x), w)) * w
        return total


@pytest.mark.ranks(3, timeout=300, processes=False)
@pytest.mark.parametrize("group", often(list(GROUPS), 1))
def test_ops_on_shards_of_several_orders(group: str) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(2, 7, 6, dtype=torch.float64), torch.randn(2, 7, 6, dtype=torch.float64)
    model = Between(GROUPS[group]).double()
    assert_matches_single_device(model, [x, w], [Shard(1), Shard(1)], backend="aot_eager", input_grads=False)


@pytest.mark.nightly
@pytest.mark.ranks(3, timeout=300, processes=False)
def test_ops_on_shards_of_several_orders_through_inductor() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(2, 7, 6, dtype=torch.float64), torch.randn(2, 7, 6, dtype=torch.float64)
    model = Between([GROUPS["normalisations"][1]]).double()
    assert_matches_single_device(model, [x, w], [Shard(1), Shard(1)], input_grads=False)
