"""The network of the demo: a small transformer for point clouds, in plain PyTorch.

After Transolver (Wu et al., 2024, arXiv:2402.02366): points attend to each other through a few learned
slices, so the cost grows linearly with the number of points. The code is independent of whether the points are
sharded: a sum over points is written as a sum over points.

Letters in shapes: n points, F features, C channels, H heads, D = C / H channels per head, S slices.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SliceAttention(nn.Module):
    """Attention among S slice tokens, each a weighted mean of the points. [n, C] -> [n, C].

    Args:
        channels: C, a multiple of `heads`.
        heads: H.
        slices: S.
    """

    def __init__(self, channels: int, heads: int, slices: int) -> None:
        super().__init__()
        if channels % heads:
            raise ValueError(f"channels must be a multiple of heads, got {channels} and {heads}")
        self.heads, self.width = heads, channels // heads
        self.assign = nn.Linear(channels, heads * slices)
        self.value = nn.Linear(channels, channels)
        self.query_key_value = nn.Linear(self.width, 3 * self.width, bias=False)
        self.out = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.split_heads(self.assign(x)).softmax(-1)  # [H, n, S]
        values = self.split_heads(self.value(x))  # [H, n, D]
        points = weights @ self.attend(slice_means(weights, values))  # [H, n, D]
        return self.out(points.transpose(0, 1).flatten(1))

    def split_heads(self, x: Tensor) -> Tensor:
        """[n, H * k] -> [H, n, k]."""
        return x.unflatten(-1, (self.heads, -1)).transpose(0, 1)

    def attend(self, tokens: Tensor) -> Tensor:
        """Softmax attention among the slices of each head. [H, S, D] -> [H, S, D]."""
        query, key, value = self.query_key_value(tokens).chunk(3, dim=-1)
        scores = query @ key.transpose(-1, -2) * self.width**-0.5
        return scores.softmax(-1) @ value


def slice_means(weights: Tensor, values: Tensor) -> Tensor:
    """Mean of the points' values in each slice. [H, n, S], [H, n, D] -> [H, S, D]."""
    totals = weights.transpose(1, 2) @ values
    # The epsilon keeps an unused slice finite. It is a literal because torch.compile(dynamic=True) makes
    # a float that it reads from a name an input of the graph (seen in torch 2.13).
    return totals / (weights.sum(1).unsqueeze(-1) + 1e-6)


class Block(nn.Module):
    """Slice attention and a pointwise MLP, each with a pre-norm and a residual connection. [n, C] -> [n, C]."""

    def __init__(self, channels: int, heads: int, slices: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(channels)
        self.attention = SliceAttention(channels, heads, slices)
        self.mlp_norm = nn.LayerNorm(channels)
        self.mlp = _mlp(channels, 2 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class PointTransformer(nn.Module):
    """Predicts one number per point of a point cloud. [n, F] -> [n].

    Args:
        features: F.
        channels: C, a multiple of `heads`.
        heads: H.
        slices: S, soft groups of points per head.
        layers: the number of blocks.
    """

    def __init__(
        self, features: int = 5, channels: int = 64, heads: int = 4, slices: int = 16, layers: int = 2
    ) -> None:
        super().__init__()
        self.embed = _mlp(features, 2 * channels, channels)
        self.blocks = nn.ModuleList(Block(channels, heads, slices) for _ in range(layers))
        self.norm = nn.LayerNorm(channels)
        self.head = nn.Linear(channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).squeeze(-1)


def relative_l2(prediction: Tensor, target: Tensor) -> Tensor:
    """Norm of the error over norm of the target: 1 for a prediction of zero. [n], [n] -> []."""
    return torch.sqrt((prediction - target).square().sum() / target.square().sum())


def mean_squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    """Mean over all points. [n], [n] -> []."""
    return (prediction - target).square().mean()


def _mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, outputs))
