"""Fourier and spherical transforms of sharded tensors: right values and gradients, eager and compiled to one graph."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as nnf
from torch import Tensor, fft
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from shardcompile.testing import mesh, once, world_size
from tests.support.tiers import often, spread

IMAGE = (2, 3, 7, 12)
"""Batch, channels, rows or latitudes, columns or longitudes."""


class Program(NamedTuple):
    """A function of a sharded tensor and of plain weights that gives real numbers.

    Attributes:
        run: the function.
        shape: global shape of the sharded tensor.
        weights: shapes of the weights.
        names_rank: whether its graph names the rank, so that ranks of one process have one each.
    """

    run: Callable[..., Tensor]
    shape: tuple[int, ...] = IMAGE
    weights: tuple[tuple[int, ...], ...] = ()
    names_rank: bool = False


def real(z: Tensor) -> Tensor:
    """Complex numbers as pairs, conjugated lazily or not."""
    return torch.view_as_real(z.resolve_conj())


def pairs(x: Tensor) -> Tensor:
    """Complex numbers made of real ones."""
    return torch.complex(x, x.cos())


# Transforms, of each dim, shorter and longer, by each norm


def one_dim(dim: int, n: int | None, norm: str | None) -> dict[str, Program]:
    where = f"of dim {dim}, n={n}, {norm}"
    there: dict[str, Any] = {"n": n, "dim": dim, "norm": norm}
    return {
        f"rfft {where}": Program(lambda x: real(fft.rfft(x, **there))),
        f"irfft {where}": Program(lambda x: fft.irfft(pairs(x), **there)),
        f"hfft {where}": Program(lambda x: fft.hfft(pairs(x), **there)),
        f"ihfft {where}": Program(lambda x: real(fft.ihfft(x, **there))),
        f"fft {where}": Program(lambda x: fft.fft(x, **there).abs()),
        f"ifft {where}": Program(lambda x: real(fft.ifft(pairs(x), **there))),
        f"there and back {where}": Program(
            lambda x: fft.irfft(fft.rfft(x, **there), x.shape[dim], dim, norm) + x.sin()
        ),
    }


def two_dims(s: tuple[int, int] | None, norm: str | None) -> dict[str, Program]:
    there: dict[str, Any] = {"s": s, "norm": norm}
    return {
        f"rfft2 s={s}, {norm}": Program(lambda x: real(fft.rfft2(x, **there))),
        f"irfft2 s={s}, {norm}": Program(lambda x: fft.irfft2(pairs(x), **there)),
        f"hfft2 s={s}, {norm}": Program(lambda x: fft.hfft2(pairs(x), **there)),
        f"ihfft2 s={s}, {norm}": Program(lambda x: real(fft.ihfft2(x, **there))),
        f"there and back s={s}, {norm}": Program(
            lambda x: fft.irfft2(fft.rfft2(x, **there), s=x.shape[-2:], norm=norm) * x
        ),
    }


LENGTHS = [(0, 3, None), (1, 5, "ortho"), (2, 15, None), (3, 9, "forward"), (3, None, "ortho"), (2, 4, "forward")]
TRANSFORMS: dict[str, Program] = {
    **{k: v for case in LENGTHS for k, v in one_dim(*case).items()},
    **{k: v for s in (None, (9, 5), (4, 16)) for k, v in two_dims(s, "ortho" if s == (9, 5) else None).items()},
}

# What is made of them


def spectral_convolution(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The layer of a Fourier neural operator: the lowest modes through a matrix each, the others are zero."""
    modes, (rows, columns) = fft.rfft2(x), low.shape[2:4]
    out = torch.zeros(*x.shape[:-1], x.shape[-1] // 2 + 1, dtype=modes.dtype)
    kept = modes[:, :, :rows, :columns]
    out[:, :, :rows, :columns] = torch.einsum("bixy,ioxy->boxy", kept, torch.view_as_complex(low))
    kept = modes[:, :, -rows:, :columns]
    out[:, :, -rows:, :columns] = torch.einsum("bixy,ioxy->boxy", kept, torch.view_as_complex(high))
    return fft.irfft2(out, s=x.shape[-2:]) + x


def padded_modes(x: Tensor, weight: Tensor) -> Tensor:
    modes = fft.rfft(x, norm="ortho")
    kept = torch.einsum("bihx,iox->bohx", modes[..., : weight.shape[2]], torch.view_as_complex(weight))
    return fft.irfft(nnf.pad(kept, [0, modes.shape[-1] - kept.shape[-1]]), n=x.shape[-1], norm="ortho") + x


def few_modes(x: Tensor, weight: Tensor) -> Tensor:
    kept = torch.einsum("bihx,iox->bohx", fft.rfft(x)[..., : weight.shape[2]], torch.view_as_complex(weight))
    return fft.irfft(kept, n=x.shape[-1]) + x


def spherical(x: Tensor, legendre: Tensor) -> Tensor:
    """Harmonics of a sphere and back: modes along longitudes, then a sum over latitudes for each degree and mode."""
    modes = torch.view_as_real(fft.rfft(x, dim=-1, norm="forward"))
    harmonics = torch.view_as_complex(torch.einsum("bcjmr,mlj->bclmr", modes, legendre).contiguous())
    back = torch.einsum("bclmr,mlj->bcjmr", torch.view_as_real(harmonics * 2), legendre)
    return fft.irfft(torch.view_as_complex(back.contiguous()), n=x.shape[-1], dim=-1, norm="forward") + x


def spherical_convolution(x: Tensor, legendre: Tensor, weight: Tensor) -> Tensor:
    """Real and imaginary parts apart, a matrix for each degree, as a spherical Fourier neural operator has it."""
    modes = torch.view_as_real(fft.rfft(x, dim=-1, norm="ortho"))
    parts = [torch.einsum("...jm,mlj->...lm", modes[..., i], legendre) for i in range(2)]
    harmonics = torch.view_as_complex(torch.stack(parts, -1))
    mixed = torch.view_as_real(torch.einsum("bilm,iol->bolm", harmonics, torch.view_as_complex(weight)))
    parts = [torch.einsum("...lm,mlj->...jm", mixed[..., i], legendre) for i in range(2)]
    return fft.irfft(torch.complex(*parts), n=x.shape[-1], dim=-1, norm="ortho") + x


def derivative(x: Tensor) -> Tensor:
    frequencies = fft.rfftfreq(x.shape[-1], dtype=x.dtype)
    return fft.irfft2(fft.rfft2(x) * (2j * torch.pi * frequencies), s=x.shape[-2:])


def smoothed(x: Tensor) -> Tensor:
    rows, columns = (fft.fftfreq(n, dtype=x.dtype) for n in x.shape[-2:])
    return fft.ifft2(fft.fft2(x) / (1 + rows[:, None] ** 2 + columns**2)).real


def shifted(x: Tensor) -> Tensor:
    middle = fft.fftshift(fft.fft2(x), dim=(-2, -1))
    return fft.ifftshift(middle * torch.linspace(0, 1, x.shape[-1]), dim=(-1,)).abs()


def halves(x: Tensor) -> Tensor:
    """Slices whose bounds are formulas, of which a trace knows no sign."""
    n = x.shape[-1]
    return x[..., n - n // 2 :].sin().sum(-1) * x[..., : n - n // 2].cos().sum(-1) + x[..., n // 2 - n :].sum(-1)


def complex_numbers(x: Tensor) -> Tensor:
    z = fft.rfft2(x)
    return (z * z.conj()).real + torch.polar(z.abs(), z.angle()).imag + (z * 1j).real


def spectrogram(x: Tensor) -> Tensor:
    return torch.stft(x, 8, 4, window=torch.hann_window(8, dtype=x.dtype), return_complex=True).abs().square()


def signal(x: Tensor) -> Tensor:
    window = torch.hann_window(8, dtype=x.dtype)
    modes = torch.stft(x, 8, 2, window=window, return_complex=True)
    return torch.istft(modes * 2, 8, 2, window=window, length=x.shape[-1]) + x


def there_and_back(x: Tensor) -> Tensor:
    return fft.irfft2(fft.rfft2(x), s=x.shape[-2:])


def all_dims(x: Tensor) -> Tensor:
    dims = (3, 0, 2)
    return fft.irfftn(fft.rfftn(x, dim=dims), s=[x.shape[d] for d in dims], dim=dims) + x


LEGENDRE = (7, 5, 7)
CORNERS = ((3, 3, 3, 4, 2), (3, 3, 3, 4, 2))
PROGRAMS: dict[str, Program] = {
    "there and back": Program(there_and_back),
    "spherical": Program(spherical, weights=(LEGENDRE,)),
    "shifted": Program(shifted),
    "spectral convolution": Program(spectral_convolution, weights=CORNERS),
    "halves": Program(halves),
    "spherical convolution": Program(spherical_convolution, weights=(LEGENDRE, (3, 3, 5, 2))),
    "few modes": Program(few_modes, weights=((3, 3, 4, 2),)),
    "padded modes": Program(padded_modes, weights=((3, 3, 4, 2),)),
    "derivative": Program(derivative),
    "smoothed": Program(smoothed),
    "complex numbers": Program(complex_numbers),
    "all dims": Program(all_dims),
    "spectrogram": Program(spectrogram, (3, 40), names_rank=True),
    "signal": Program(signal, (3, 40), names_rank=True),
    "batch of 1": Program(spectral_convolution, (1, 3, 7, 12), CORNERS),
    "sphere of 1": Program(spherical, (1, 1, 7, 12), (LEGENDRE,)),
    "one row": Program(there_and_back, (2, 1, 7)),
    "one column": Program(there_and_back, (2, 7, 1)),
    "a vector": Program(lambda x: fft.irfft(fft.rfft(x) * 2, n=x.shape[0]) + x, (13,)),
}
EVERYTHING = TRANSFORMS | PROGRAMS


# Against plain PyTorch

Sizes = Mapping[int, Sequence[int]]


def partitions(size: int, parts: int) -> list[list[int]]:
    """Shard sizes: uneven with an empty shard among three, a shard of one, all on the last rank."""
    empty = [0] * (parts - 2)
    return [[size - size // 3, *empty, size // 3], [*empty, min(size, 1), size - min(size, 1)],
            [0] * (parts - 1) + [size]]  # fmt: skip


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Expected(NamedTuple):
    """What plain PyTorch gives for a full tensor and weights."""

    inputs: list[Tensor]
    value: Tensor
    first: list[Tensor]
    second: list[Tensor | None]


def gradients(of: Sequence[Tensor], inputs: Sequence[Tensor], again: bool) -> list[Any]:
    """Gradients of a weighted sum, whose weights follow from the shapes."""
    total = sum((x * torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view(x.shape)).sum() for x in of)
    return list(torch.autograd.grad(total, inputs, create_graph=again, allow_unused=True))


@functools.cache
def expected_of(program: Program) -> Expected:
    shapes = [program.shape, *program.weights]
    inputs = [random(*shape, seed=n).requires_grad_() for n, shape in enumerate(shapes)]
    value = program.run(*inputs)
    first = gradients([value], inputs, True)
    wanting = [x for x in first if x.requires_grad]
    second = gradients(wanting, inputs, False) if wanting else [None] * len(inputs)
    return Expected(inputs, value.detach(), [x.detach() for x in first], second)


def full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, sc.ShardTensor) else x


def check(
    program: Program, function: Callable[..., Tensor], placements: Sequence[Shard], sizes: Sizes | None
) -> Tensor:
    """Compare values and gradients with plain PyTorch; without a compiler second derivatives too. Returns the value."""
    expected = once(lambda: expected_of(program))
    x, *weights = (t.detach().clone() for t in expected.inputs)
    stated: Any = {m: list(s) for m, s in sizes.items()} if sizes else None
    inputs = [sc.distribute_tensor(x, mesh(), list(placements), sharding_shapes=stated), *weights]
    inputs = [t.requires_grad_() for t in inputs]
    eager = function is program.run
    out = function(*inputs)
    torch.testing.assert_close(full(out.detach()), expected.value, rtol=1e-9, atol=1e-10)
    first = gradients([out], inputs, eager)
    for got, want in zip(first, expected.first, strict=True):
        torch.testing.assert_close(full(got.detach()), want, rtol=1e-9, atol=1e-9)
    wanting = [x for x in first if x.requires_grad]
    if eager and wanting:
        for got, want in zip(gradients(wanting, inputs, False), expected.second, strict=True):
            nothing = torch.zeros(()) if want is None else torch.zeros_like(want)
            wanted, found = nothing if want is None else want, nothing if got is None else full(got)
            torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-7)
    return out


def compiled_once(program: Program, placements: Sequence[Shard], sizes: Sequence[Sizes], backend: Any) -> None:
    """Compile a program, and hold one graph for all partitions against plain PyTorch and against eager mode."""
    counter = once(lambda: CompileCounterWithBackend(backend))
    compiled = torch.compile(program.run, fullgraph=True, backend=counter)
    for each in sizes:
        out, eager = (check(program, f, placements, each) for f in (compiled, program.run))
        assert isinstance(out, sc.ShardTensor) is isinstance(eager, sc.ShardTensor)
    counts = [None] * world_size()
    dist.all_gather_object(counts, counter.frame_count)
    assert set(counts) == {world_size() if program.names_rank else 1}, counts


def one_dim_each(programs: Mapping[str, Program]) -> list[tuple[str, int]]:
    return [(name, dim) for name, program in programs.items() for dim in range(len(program.shape))]


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("name", often([*PROGRAMS, *spread(TRANSFORMS, 7)], len(PROGRAMS) + 9))
def test_eager(name: str) -> None:
    program = EVERYTHING[name]
    for dim, size in enumerate(program.shape):
        for sizes in partitions(size, 3):
            check(program, program.run, [Shard(dim)], {0: sizes})


WITH_LAST_DIM = [(name, len(program.shape) - 1) for name, program in PROGRAMS.items()]
OTHERS = [case for case in one_dim_each(PROGRAMS) if case not in WITH_LAST_DIM]


@pytest.mark.ranks(3, processes=False, timeout=300)
@pytest.mark.parametrize(("name", "dim"), often([*WITH_LAST_DIM, *spread(OTHERS, 3)], 8))
def test_compiled(name: str, dim: int) -> None:
    program = PROGRAMS[name]
    names_rank = program.names_rank and dim == len(program.shape) - 1
    sizes = [{0: s} for s in partitions(program.shape[dim], 3)]
    compiled_once(program._replace(names_rank=names_rank), [Shard(dim)], sizes, "aot_eager")


@pytest.mark.ranks(3, processes=False, timeout=300)
@pytest.mark.parametrize(("name", "dim"), often(spread(one_dim_each(TRANSFORMS), 37), 6))
def test_transforms_compiled(name: str, dim: int) -> None:
    program = TRANSFORMS[name]
    compiled_once(program, [Shard(dim)], [{0: s} for s in partitions(program.shape[dim], 3)[:2]], "aot_eager")


@pytest.mark.ranks(3, processes=False, timeout=600)
@pytest.mark.parametrize("backend", often(["shardcompile", "inductor"], 1))
def test_trained_by_inductor(backend: str) -> None:
    sizes = [{0: s} for s in partitions(IMAGE[3], 3)[:2]]
    for name in ("there and back", "spherical"):
        compiled_once(PROGRAMS[name], [Shard(3)], sizes, backend)


# Latitudes and longitudes over two mesh dims

DIMS_OF_PAIRS = [p for p in itertools.product(range(4), repeat=2) if p[0] != p[1]]


def on_pair(program: Program, dims: tuple[int, int]) -> list[Sizes]:
    found = [partitions(program.shape[d], 2) for d in dims]
    return [dict(enumerate(sizes)) for sizes in zip(*found, strict=True)]


@pytest.mark.ranks(4, mesh=(2, 2), processes=False)
@pytest.mark.parametrize("name", PROGRAMS)
def test_two_mesh_dims(name: str) -> None:
    program = PROGRAMS[name]
    ndim = len(program.shape)
    for dims in [pair for pair in DIMS_OF_PAIRS if max(pair) < ndim]:
        check(program, program.run, [Shard(d) for d in dims], on_pair(program, dims)[0])
    check(program, program.run, [Shard(ndim - 1)] * 2, None)


ON_A_SPHERE = [(name, pair) for pair in ((2, 3), (3, 2), (1, 3), (0, 2)) for name in ("spherical", "there and back")]


@pytest.mark.ranks(4, mesh=(2, 2), processes=False, timeout=300)
@pytest.mark.parametrize(("name", "dims"), often(ON_A_SPHERE, 2))
def test_two_mesh_dims_compiled(name: str, dims: tuple[int, int]) -> None:
    program = PROGRAMS[name]
    compiled_once(program, [Shard(d) for d in dims], on_pair(program, dims)[:2], "aot_eager")
