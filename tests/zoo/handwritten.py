"""Layers written down as their packages write them, for runs without these packages."""

from __future__ import annotations

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn


class RootMeanSquare(nn.Module):
    """A norm without a mean."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def _turned(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


class Llama(nn.Module):
    """A decoder of one layer: rotary embeddings, grouped heads, a gated perceptron, scores of words."""

    def __init__(self, width: int = 32, heads: int = 4, shared: int = 2, hidden: int = 64, words: int = 50) -> None:
        super().__init__()
        self.size = width // heads
        self.words = nn.Embedding(words, width)
        self.norms = nn.ModuleList(RootMeanSquare(width) for _ in range(3))
        self.query, self.out = nn.Linear(width, width, False), nn.Linear(width, width, False)
        self.key, self.value = (nn.Linear(width, shared * self.size, False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, False) for _ in range(2))
        self.down, self.head = nn.Linear(hidden, width, False), nn.Linear(width, words, False)
        self.register_buffer("frequencies", 10000.0 ** -(torch.arange(0, self.size, 2) / self.size))

    def forward(self, ids: Tensor) -> Tensor:
        n, rows = ids.shape
        places = torch.arange(rows, device=ids.device)
        angles = (places[:, None] * self.frequencies).repeat(1, 2)
        cos, sin = angles.cos(), angles.sin()
        x = self.words(ids)
        y = self.norms[0](x)
        query, key, value = (
            f(y).view(n, rows, -1, self.size).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        query, key = (t * cos + _turned(t) * sin for t in (query, key))
        seen = nnf.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(seen.transpose(1, 2).contiguous().reshape(n, rows, -1))
        y = self.norms[1](x)
        x = x + self.down(nnf.silu(self.gate(y)) * self.up(y))
        return self.head(self.norms[2](x)[:, slice(0, None), :])


class _Columns(nn.Module):
    """A linear layer with its weight the other way round, of rows that are flattened first."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, outputs) * 0.1)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.size()[:-1], self.weight.shape[1])
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(shape)


class GPT2(nn.Module):
    """A decoder of one layer with learnt places, whose scores use the table of words."""

    def __init__(self, width: int = 32, heads: int = 4, words: int = 50, places: int = 64) -> None:
        super().__init__()
        self.width, self.size = width, width // heads
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(places, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.attention, self.out = _Columns(width, 3 * width), _Columns(width, width)
        self.up, self.down = _Columns(width, 4 * width), _Columns(4 * width, width)

    def forward(self, ids: Tensor) -> Tensor:
        n, rows = ids.shape
        x = self.words(ids) + self.places(torch.arange(rows, device=ids.device).unsqueeze(0))
        parts = self.attention(self.norms[0](x)).split(self.width, dim=2)
        query, key, value = (t.view(n, rows, -1, self.size).transpose(1, 2) for t in parts)
        seen = nnf.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).contiguous().reshape(n, rows, -1))
        x = x + self.down(nnf.gelu(self.up(self.norms[1](x)), approximate="tanh"))
        return nnf.linear(self.norms[2](x), self.words.weight)


class AFNO(nn.Module):
    """A layer of an adaptive Fourier operator: the modes of an image through a small complex network."""

    def __init__(self, channels: int = 8, blocks: int = 2) -> None:
        super().__init__()
        self.blocks, size = blocks, channels // blocks
        self.first, self.second = (nn.Parameter(torch.randn(2, blocks, size, size) * 0.3) for _ in range(2))
        self.norm, self.mix = nn.LayerNorm(channels), nn.Linear(channels, channels)

    def _through(self, real: Tensor, imaginary: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        def times(x: Tensor, w: Tensor) -> Tensor:
            return torch.einsum("...bi,bio->...bo", x, w)

        return (
            times(real, weight[0]) - times(imaginary, weight[1]),
            times(imaginary, weight[0]) + times(real, weight[1]),
        )

    def forward(self, x: Tensor) -> Tensor:
        n, height, width, channels = x.shape
        modes = torch.fft.rfft2(self.norm(x), dim=(1, 2), norm="ortho")
        modes = modes.reshape(n, height, width // 2 + 1, self.blocks, channels // self.blocks)
        hidden = [nnf.relu(part) for part in self._through(modes.real, modes.imag, self.first)]
        parts = torch.stack(self._through(hidden[0], hidden[1], self.second), -1)
        modes = torch.view_as_complex(nnf.softshrink(parts, lambd=0.01))
        modes = modes.reshape(n, height, width // 2 + 1, channels)
        return x + self.mix(torch.fft.irfft2(modes, s=(height, width), dim=(1, 2), norm="ortho"))


class FNO(nn.Module):
    """A layer of a Fourier operator: its lowest modes through a matrix each, and a pointwise convolution."""

    def __init__(self, channels: int = 4, modes: int = 3) -> None:
        super().__init__()
        self.modes = modes
        weights = (torch.randn(channels, channels, modes, modes, 2) * 0.3 for _ in range(2))
        self.low, self.high = (nn.Parameter(w) for w in weights)
        self.skip = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        m = self.modes
        modes = torch.fft.rfft2(x)
        kept = torch.zeros_like(modes)
        for rows, weight in ((slice(m), self.low), (slice(-m, None), self.high)):
            mixed = torch.einsum("nixy,ioxy->noxy", modes[:, :, rows, :m], torch.view_as_complex(weight))
            kept[:, :, rows, :m] = mixed
        return nnf.gelu(torch.fft.irfft2(kept, s=x.shape[-2:]) + self.skip(x))


class Experts(nn.Module):
    """A mixture of experts of which each row has two, with all rows through all experts."""

    def __init__(self, width: int = 8, experts: int = 4, hidden: int = 16) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.ModuleList(nn.Linear(width, hidden) for _ in range(experts))
        self.down = nn.ModuleList(nn.Linear(hidden, width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, x.shape[-1])
        share = self.gate(rows).softmax(-1)
        best, which = share.topk(2, -1)
        weights = torch.zeros_like(share).scatter(1, which, best / best.sum(-1, keepdim=True))
        out = sum(
            weights[:, i, None] * down(nnf.silu(up(rows)))
            for i, (up, down) in enumerate(zip(self.up, self.down, strict=True))
        )
        return x + out.view(x.shape)


class Points(nn.Module):
    """Points that look at one another by their distances."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.lift, self.head = nn.Linear(3, width), nn.Linear(width, 1)

    def forward(self, points: Tensor) -> Tensor:
        near = (-torch.cdist(points, points).square()).softmax(-1)
        return self.head(torch.tanh(near @ self.lift(points)))


class Images(nn.Module):
    """A small U-net on images: norms of groups, one level down and up again."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.enter = nn.Conv2d(2, channels, 3, padding=1)
        self.down = nn.Conv2d(channels, 2 * channels, 2, stride=2)
        self.norm, self.middle = nn.GroupNorm(2, 2 * channels), nn.Conv2d(2 * channels, 2 * channels, 3, padding=1)
        self.leave = nn.Conv2d(3 * channels, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        wide = nnf.silu(self.enter(x))
        deep = nnf.silu(self.middle(self.norm(self.down(wide))))
        up = nnf.interpolate(deep, scale_factor=2, mode="nearest")
        return self.leave(torch.cat([wide, up], 1))
