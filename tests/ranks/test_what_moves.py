"""What has to move and no more: the collectives of short functions, forward and backward, eager and compiled.

Each function is compared with plain PyTorch over uneven partitions, and is compiled to one graph for all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from shardcompile.compat.testing import graphs_compiled
from shardcompile.testing import once, rank
from shardcompile.testing.watch import CollectiveWatch
from tests.support.tiers import often, spread

PARTITIONS = ([5, 0, 2], [3, 4, 1], [0, 1, 8], [4, 4, 4])
"""An empty shard in the middle and in front, shards of one, even shards; sizes differ."""

_LOCAL = {"attend", "attend_backward", "convolution", "convolution_backward", "derive_partition"}
"""Ops of ours that send nothing."""


@dataclass(frozen=True)
class Case:
    """A function, and what it may send.

    Attributes:
        run: a function of a tensor that is sharded and of plain parameters.
        shape: of what is sharded, with None for the size along which it is.
        moves: collectives of forward and backward pass, by kind.
        parameters: shapes of plain parameters.
        dtype: of what is sharded.
        eager_moves: those of eager mode, if they are others.
    """

    run: Callable[..., Tensor]
    shape: tuple[int | None, ...]
    moves: dict[str, int] = field(default_factory=dict)
    parameters: tuple[tuple[int, ...], ...] = ()
    dtype: torch.dtype = torch.float64
    eager_moves: dict[str, int] | None = None

    @property
    def dim(self) -> int:
        """The dim that is sharded."""
        return self.shape.index(None)


class Sent(CollectiveWatch):
    """Counts collectives by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: Counter[str] = Counter()

    def saw(self, name: str, x: Any, out: Any) -> None:
        kind = name.partition("::")[2]
        if kind not in _LOCAL:
            self.kinds[kind] += 1


SLICES = {
    "a slice that keeps every row": Case(lambda x: x.sin()[0:] * x, (None, 2)),
    "every row of the second dim": Case(lambda x: (x.sin()[:, slice(0, None), :] * x.cos()).exp(), (2, None, 3)),
    "rows to the last one": Case(lambda x: x.sin()[: x.shape[0]] * x, (None, 2)),
    "a slice of what was saved": Case(lambda x: x.sin()[1:].cos().exp().sum(0), (None, 2)),
    "a slice, flattened": Case(lambda x: x.sin()[1:].flatten().cos().view(-1, 2).exp().sum(0), (None, 2)),
    "a slice in front of a linear layer": Case(
        lambda x, w: (x.sin()[:, 1:] @ w).cos().sum(1), (2, None, 3), {"all_reduce": 1}, ((3, 4),)
    ),
}


def _parts(x: Tensor) -> Tensor:
    """Numbers made of modes; summed up, since of what a graph returns it does not know that its gradient is identically sharded."""
    return torch.view_as_real(x).sin().sum(list(range(x.ndim)))


def _mixed(x: Tensor, weight: Tensor) -> Tensor:
    """As an adaptive Fourier operator: modes of an image [n, height, width, channels], each through one matrix."""
    height, width = x.shape[1:3]
    modes = torch.view_as_real(torch.fft.rfft2(x, dim=(1, 2), norm="ortho"))
    through = torch.einsum("nyxcp,cdpq->nyxdq", modes, weight).relu()
    return torch.fft.irfft2(torch.view_as_complex(through), s=(height, width), dim=(1, 2), norm="ortho") + x


def _exchanges(count: int) -> dict[str, int]:
    return {"all_to_all_v": count}


FOURIER = {
    "fft of whole dims": Case(lambda x: _parts(torch.fft.fft(x.sin(), dim=1)), (None, 4)),
    "fft of the sharded dim": Case(lambda x: _parts(torch.fft.fft(x.sin(), dim=0)), (None, 4), _exchanges(2)),
    "fft of a shorter signal": Case(lambda x: _parts(torch.fft.rfft(x.sin(), 6, dim=0)), (None, 4), _exchanges(2)),
    "rfft2, height sharded": Case(
        lambda x: _parts(torch.fft.rfft2(x.sin(), dim=(1, 2))), (2, None, 6, 3), _exchanges(2)
    ),
    "rfft2, width sharded": Case(
        lambda x: _parts(torch.fft.rfft2(x.sin(), dim=(1, 2))), (2, 5, None, 3), _exchanges(5)
    ),
    "rfftn of everything": Case(lambda x: _parts(torch.fft.rfftn(x.sin())), (None, 3, 4), _exchanges(2)),
    "irfft2 of what was transformed": Case(
        lambda x: torch.fft.irfft2(torch.fft.rfft2(x, dim=(1, 2)).sin(), s=(x.shape[1], 6), dim=(1, 2)) * x,
        (2, None, 6, 3),
        {"all_to_all_v": 4},
    ),
    "Fourier operator": Case(_mixed, (1, None, 6, 3), {"all_to_all_v": 4, "all_reduce": 1}, ((3, 3, 2, 2),)),
    "irfft2 that is longer": Case(
        lambda x: torch.fft.irfft2(torch.view_as_complex(x.sin()), s=(9, 5)).sum((1, 2)), (None, 4, 5, 2)
    ),
}


def _convolved(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, x.view(-1, x.shape[-1]), weight).view(*x.shape[:-1], -1)


def _loss(x: Tensor, weight: Tensor) -> Tensor:
    scores = (x @ weight).view(-1, weight.shape[1])
    wanted = torch.arange(x.shape[1]).remainder(weight.shape[1]).expand(x.shape[0], -1).reshape(-1)
    return nnf.cross_entropy(scores, wanted, reduction="none").view(x.shape[0], -1)


def _by_expert(x: Tensor, gate: Tensor, first: Tensor, second: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    share = (rows @ gate).softmax(-1)
    out = sum(share[:, i : i + 1] * nnf.linear(rows, w) for i, w in enumerate((first, second)))
    return out.reshape(x.shape)


def _written(x: Tensor) -> Tensor:
    y = x * 2
    y.view(-1, 3).mul_(3).add_(1)
    y.view(-1, 3)[:, 1] = 5
    y.view(-1, 3)[:, 2:] *= x.view(-1, 3)[:, :1]
    return y.sin()


_ROWS = (2, None, 3)
_ONE_SUM = {"all_reduce": 1}  # in eager mode gradients of parameters are reduced together

JOINED = {
    "a product of rows": Case(_convolved, _ROWS, {"all_reduce": 2}, ((3, 4), (4,)), eager_moves=_ONE_SUM),
    "two of them": Case(
        lambda x, *p: _convolved(_convolved(x, *p).sin(), *p) * x,
        _ROWS,
        {"all_reduce": 4},
        ((3, 3), (3,)),
        eager_moves=_ONE_SUM,
    ),
    "pointwise": Case(lambda x: (x.view(-1, 3) * 2).sin().view(x.shape) * x, _ROWS),
    "trailing dims too": Case(lambda x: x.view(-1, 4).exp().view(x.shape).sin(), (2, None, 2, 4)),
    "all dims": Case(lambda x: x.view(-1).sin().view(x.shape).cos(), _ROWS),
    "three dims": Case(lambda x: x.view(-1, 3).sin().view(2, -1, 3).cos().view(x.shape).sin(), (2, 2, None, 3)),
    "normalised": Case(lambda x: nnf.layer_norm(x.view(-1, 3), [3]).view(x.shape).sin(), _ROWS),
    "cross entropy": Case(_loss, _ROWS, {"all_reduce": 1}, ((3, 5),)),
    "experts": Case(_by_expert, _ROWS, {"all_reduce": 3}, ((3, 2), (3, 3), (3, 3)), eager_moves=_ONE_SUM),
    "rows that are written to": Case(_written, _ROWS),
}
"""Rows of products, of which leading dims were flattened into the one that is sharded."""


def _causal(x: Tensor, weight: Tensor) -> Tensor:
    """Rows are padded on both sides, and those behind the last one left out."""
    return nnf.conv1d(x, weight, padding=weight.shape[2] - 1)[..., : x.shape[2]].sin() * x


def _padded_in_front(x: Tensor, weight: Tensor) -> Tensor:
    return nnf.conv1d(nnf.pad(x, (weight.shape[2] - 1, 0)), weight).sin() * x


def _padded_around(x: Tensor) -> Tensor:
    return nnf.pad(x, (1, 2)).sin()[..., 1:-2] * x


_EDGES = {"fetch_ranges": 1, "return_ranges": 1, "all_reduce": 1}
"""The gradient of a weight reads the same rows again, which a graph saves."""

WINDOWS = {
    "a causal convolution": Case(_causal, (2, 2, None), _EDGES, ((2, 2, 4),)),
    "a causal convolution of padded rows": Case(_padded_in_front, (2, 2, None), _EDGES, ((2, 2, 4),)),
    "padded and sharded off again": Case(_padded_around, (2, None)),
}
"""Rows that get others around them, and lose them again, are where they were."""

CASES = {**SLICES, **FOURIER, **JOINED, **WINDOWS}


def _numbers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape) + shape[0])
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def _sent(case: Case, run: Callable[..., Tensor], sizes: list[int]) -> Counter[str]:
    """What is sent in a forward and a backward pass, whose results are compared with those of plain PyTorch."""
    mesh = init_device_mesh("cpu", (3,))
    full = _numbers(tuple(sum(sizes) if n is None else n for n in case.shape), case.dtype).requires_grad_()
    plain = [_numbers(s, case.dtype).requires_grad_() for s in case.parameters]
    ours = [p.detach().clone().requires_grad_() for p in plain]
    shard = full.detach().split(sizes, case.dim)[rank()].clone()
    x = sc.ShardTensor.from_local(shard, mesh, [Shard(case.dim)], {0: sizes}).requires_grad_()
    expected = case.run(full, *plain)
    weight = torch.linspace(-1, 2, expected.numel(), dtype=torch.float64).view(expected.shape)
    expected.backward(weight)
    with Sent() as forward:
        out = run(x, *ours)
    gradient = (out.detach() * 0 + weight).detach()
    with Sent() as backward:
        out.backward(gradient)
    torch.testing.assert_close(out.full_tensor(), expected, rtol=1e-10, atol=1e-10)
    for got, want in zip(
        [x.grad.full_tensor(), *[p.grad for p in ours]], [full.grad, *[p.grad for p in plain]], strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
    return forward.kinds + backward.kinds


@pytest.mark.ranks(3, timeout=120, processes=False)
@pytest.mark.parametrize("name", CASES)
def test_eager(name: str) -> None:
    case = CASES[name]
    for sizes in PARTITIONS:
        assert _sent(case, case.run, sizes) == (case.eager_moves or case.moves), sizes


@pytest.mark.ranks(3, timeout=300, processes=False)
@pytest.mark.parametrize("name", often(spread(CASES, 5), (len(CASES) + 4) // 5))
def test_compiled_as_one_graph(name: str) -> None:
    case = CASES[name]
    before = once(graphs_compiled)
    compiled = torch.compile(case.run, fullgraph=True, backend="aot_eager")
    for sizes in PARTITIONS:
        assert _sent(case, compiled, sizes) == case.moves, sizes
    assert graphs_compiled() - before == 1
