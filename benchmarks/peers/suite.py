"""The works: networks on points, images and sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from benchmarks.peers.by_hand import Gather, Halo, Sum
from benchmarks.peers.works import Forward, Partitions, Work
from examples.poisson import handwritten
from examples.poisson.model import PointTransformer

LAYERS = 4


def _mean_square(model: nn.Module, *inputs: Tensor) -> Tensor:
    return model(*inputs).square().mean()  # type: ignore[no-any-return]


def _points_by_hand(group: ProcessGroup, sizes: Sequence[int]) -> Forward:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(model, PointTransformer)
        return Sum.apply(handwritten.predict(model, x, group).square().sum(), group) / sum(sizes)

    return forward


def _convolutions() -> nn.Module:
    return nn.Sequential(*[nn.Conv2d(16, 16, 3, padding=1) for _ in range(3)])


def _convolve_by_hand(layer: nn.Conv2d, x: Tensor, group: ProcessGroup) -> Tensor:
    return nn.functional.conv2d(Halo.apply(x, group), layer.weight, layer.bias, padding=(0, 1))


def _convolutions_by_hand(group: ProcessGroup, sizes: Sequence[int]) -> Forward:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        for layer in model.children():
            assert isinstance(layer, nn.Conv2d)
            x = _convolve_by_hand(layer, x, group)
        return Sum.apply(x.square().sum(), group) / (sum(sizes) * x.numel() // x.shape[2])

    return forward


class UNet(nn.Module):
    """Two resolutions, joined by pooling and a transposed convolution. [1, 16, h, w] -> [1, 16, h, w]."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(32, 16, 2, stride=2), nn.Conv2d(32, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.connected(x, lambda layer, x: layer(x))

    def connected(self, x: Tensor, convolve: Callable[[nn.Conv2d, Tensor], Tensor]) -> Tensor:
        """Runs the network, given how it convolves."""
        fine = convolve(self.fine, x).relu()
        coarse = convolve(self.coarse, nn.functional.max_pool2d(fine, 2)).relu()
        return convolve(self.out, torch.cat([fine, self.up(coarse)], 1))


def _unet_by_hand(group: ProcessGroup, sizes: Sequence[int]) -> Forward:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(model, UNet)
        x = model.connected(x, lambda layer, x: _convolve_by_hand(layer, x, group))
        return Sum.apply(x.square().sum(), group) / (sum(sizes) * x.numel() // x.shape[2])

    return forward


class GraphNet(nn.Module):
    """Message passing: each node sums messages of its neighbours. [n, C], edges from and to nodes [e, 2] -> [n, C]."""

    def __init__(self, channels: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.messages = nn.ModuleList(nn.Linear(2 * channels, channels) for _ in range(layers))
        self.updates = nn.ModuleList(nn.Linear(2 * channels, channels) for _ in range(layers))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        start, end = edges.unbind(1)
        return self.passed(x, lambda x: x, start, end, end)

    def passed(
        self, x: Tensor, gather: Callable[[Tensor], Tensor], start: Tensor, end: Tensor, own_end: Tensor
    ) -> Tensor:
        """Runs the network.

        Args:
            x: this rank's nodes, or all.
            gather: from these to all nodes.
            start: index among all nodes from which an edge comes.
            end: index among all nodes to which it leads.
            own_end: the same among this rank's nodes.
        """
        for message, update in zip(self.messages, self.updates, strict=True):
            nodes = gather(x)
            sent = message(torch.cat([nodes[start], nodes[end]], 1)).relu()
            x = x + update(torch.cat([x, torch.zeros_like(x).index_add(0, own_end, sent)], 1)).relu()
        return x


NODES, NEIGHBOURS = 4000, 6


def _edges() -> list[Tensor]:
    """Edges to each node, in order, from nodes nearby, and from one anywhere."""
    end = torch.arange(NODES).repeat_interleave(NEIGHBOURS)
    start = (end + torch.randint(-50, 50, end.shape)) % NODES
    start[::NEIGHBOURS] = torch.randint(0, NODES, (NODES,))
    return [torch.stack([start, end], 1)]


def _graph_by_hand(group: ProcessGroup, sizes: Sequence[int]) -> Forward:
    first = sum(sizes[: group.rank()])

    def forward(model: nn.Module, x: Tensor, edges: Tensor) -> Tensor:
        assert isinstance(model, GraphNet)
        start, end = edges.unbind(1)
        x = model.passed(x, lambda x: Gather.apply(x, group, sizes), start, end, end - first)
        return Sum.apply(x.square().sum(), group) / (sum(sizes) * x.shape[1])

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


def _points(points: int, partitions: Partitions) -> Work:
    return Work(
        lambda: PointTransformer(layers=LAYERS),
        (points, 5),
        0,
        _mean_square,
        _points_by_hand,
        partitions,
        complete=("query_key_value",),  # they see the same slices on every rank
    )


def _partitions(rows: int) -> Partitions:
    """Returns partitions for two ranks; among more of them, each pair of ranks shares its part in the same way."""
    first = {"even": [4], "1:3": [2], "another each step": [4, 2, 5, 1]}  # in eighths

    def of(ranks: int) -> dict[str, list[list[int]]]:
        part = 2 * rows // ranks
        return {
            label: [[n * part // 8, part - n * part // 8] * (ranks // 2) for n in eighths]
            for label, eighths in first.items()
        }

    return of


WORKS: dict[str, Work] = {
    "points": _points(8000, _partitions(8000)),
    "64 points": _points(64, lambda ranks: {"even": [[64 // ranks] * ranks]}),
    "convolutions": Work(_convolutions, (1, 16, 128, 128), 2, _mean_square, _convolutions_by_hand, _partitions(128)),
    "u-net": Work(UNet, (1, 16, 128, 128), 2, _mean_square, _unet_by_hand, _partitions(128)),
    "graph": Work(GraphNet, (NODES, 32), 0, _mean_square, _graph_by_hand, _partitions(NODES), more=_edges),
    "encoder": Work(Encoder, (2048, 128), 0, _mean_square, _encoder_by_hand, _partitions(2048)),
}
"""The works, by name."""

torch.backends.mha.set_fastpath_enabled(False)
