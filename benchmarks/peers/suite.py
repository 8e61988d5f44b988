"""The works: networks on points, images and sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from benchmarks.peers.by_hand import Gather, Halo, Sum
from benchmarks.peers.works import Forward, Work
from examples.poisson import handwritten
from examples.poisson.model import PointTransformer

LAYERS = 4


def _mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def _points_by_hand(group: ProcessGroup, sizes: Sequence[int]) -> Forward:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(model, PointTransformer)
        return Sum.apply(handwritten.predict(model, x, group).square().sum(), group) / sum(sizes)

    return forward


def _convolutions() -> nn.Module:
    return nn.Sequential(*[nn.Conv2d(16, 16, 3, padding=1) for _ in range(3)])


def _convolutions_by_hand(group: ProcessGroup, sizes: Sequence[int]) -> Forward:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        for layer in model.children():
            assert isinstance(layer, nn.Conv2d)
            x = nn.functional.conv2d(Halo.apply(x, group), layer.weight, layer.bias, padding=(0, 1))
        return Sum.apply(x.square().sum(), group) / (sum(sizes) * x.numel() // x.shape[2])

    return forward


class Encoder(nn.Module):
    """A pre-norm transformer layer. [n, C] -> [n, C]."""

    def __init__(self, channels: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.query = nn.Linear(channels, channels)
        self.key_value = nn.Linear(channels, 2 * channels)
        self.out = nn.Linear(channels, channels)
        self.mlp = nn.Sequential(nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels))

    def attend(self, query: Tensor, key_value: Tensor) -> Tensor:
        """Attends to keys and values of the whole sequence. [m, C], [n, 2 C] -> [m, C]."""
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(0, 1).unsqueeze(0) for t in (query, *key_value.chunk(2, -1))
        )
        return nn.functional.scaled_dot_product_attention(q, k, v).squeeze(0).transpose(0, 1).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        x = x + self.out(self.attend(self.query(y), self.key_value(y)))
        return x + self.mlp(self.second(x))  # type: ignore[no-any-return]


def _encoder_by_hand(group: ProcessGroup, sizes: Sequence[int]) -> Forward:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(model, Encoder)
        y = model.first(x)
        key_value = Gather.apply(model.key_value(y), group, sizes)
        x = x + model.out(model.attend(model.query(y), key_value))
        x = x + model.mlp(model.second(x))
        return Sum.apply(x.square().sum(), group) / (sum(sizes) * x.shape[1])

    return forward


def _points(points: int, partitions: dict[str, list[int]]) -> Work:
    return Work(
        lambda: PointTransformer(layers=LAYERS),
        (points, 5),
        0,
        _mean_square,
        _points_by_hand,
        partitions,
        complete=("query_key_value",),  # they see the same slices on every rank
    )


WORKS: dict[str, Work] = {
    "points": _points(8000, {"even": [4000, 4000], "1:3": [2000, 6000]}),
    "64 points": _points(64, {"even": [32, 32]}),
    "convolutions": Work(
        _convolutions,
        (1, 16, 128, 128),
        2,
        _mean_square,
        _convolutions_by_hand,
        {"even": [64, 64], "1:3": [32, 96]},
    ),
    "encoder": Work(
        Encoder, (2048, 128), 0, _mean_square, _encoder_by_hand, {"even": [1024, 1024], "1:3": [512, 1536]}
    ),
}
"""The works, by name."""

torch.backends.mha.set_fastpath_enabled(False)
