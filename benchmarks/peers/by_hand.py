"""Differentiable collectives as a person writes them for one partition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed import ProcessGroup


class Sum(torch.autograd.Function):
    """All-reduce whose result every rank uses in full: the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return funcol.all_reduce(x.contiguous(), "sum", group).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class Gather(torch.autograd.Function):
    """Gathers shards of dim 0, each padded to the largest; the gradient is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, sizes: Sequence[int]) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        most = max(sizes)
        padded = torch.nn.functional.pad(x, [0, 0] * (x.ndim - 1) + [0, most - x.shape[0]])
        parts = funcol.all_gather_tensor(padded, 0, group).split(most)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        most, rank = max(ctx.sizes), ctx.group.rank()
        parts = [
            torch.nn.functional.pad(part, [0, 0] * (grad.ndim - 1) + [0, most - part.shape[0]])
            for part in grad.split(list(ctx.sizes))
        ]
        mine = funcol.reduce_scatter_tensor(torch.cat(parts), "sum", 0, ctx.group)
        return mine[: ctx.sizes[rank]], None, None


class Halo(torch.autograd.Function):
    """Extends a shard of dim 2 by one row of each neighbour; by zeros at the two ends."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        above, below = _exchange(x[:, :, :1], x[:, :, -1:], group)
        return torch.cat([above, x, below], 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        from_above, from_below = _exchange(grad[:, :, :1], grad[:, :, -1:], ctx.group)
        inner = grad[:, :, 1:-1].clone()
        inner[:, :, :1] += from_above
        inner[:, :, -1:] += from_below
        return inner, None


def _exchange(first: Tensor, last: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Sends the first row up and the last row down; returns the rows that came from above and from below."""
    rank, ranks = group.rank(), group.size()
    counts = [0] * ranks
    pieces = []
    if rank > 0:
        counts[rank - 1] = first.numel()
        pieces.append(first.reshape(-1))
    if rank < ranks - 1:
        counts[rank + 1] = last.numel()
        pieces.append(last.reshape(-1))
    got = funcol.all_to_all_single(torch.cat(pieces), counts, counts, group)
    rows = list(got.split([c for c in counts if c]))
    above = rows.pop(0).view_as(first) if rank > 0 else torch.zeros_like(first)
    below = rows.pop(0).view_as(last) if rank < ranks - 1 else torch.zeros_like(last)
    return above, below
