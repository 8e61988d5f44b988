"""Convolution and pooling along sharded spatial dims: what windows read over the edges of shards, and nothing more."""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

import shardcompile as sc
from shardcompile.ops.window import kernels
from shardcompile.testing import assert_matches_single_device, mesh, rank
from tests.support.sent import Sent
from tests.support.tiers import often

SAMPLES, CHANNELS, ROWS, COLUMNS = Shard(0), Shard(1), Shard(2), Shard(3)


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def random_partition(size: int, parts: int, choose: random.Random) -> list[int]:
    at = sorted(choose.randint(0, size) for _ in range(parts - 1))
    return [b - a for a, b in itertools.pairwise([0, *at, size])]


def sharded_inputs(x: Tensor, dim: int, sizes: list[int]) -> sc.ShardTensor:
    shard = x.split(sizes, dim)[rank()].contiguous()
    return sc.ShardTensor.from_local(shard, mesh(), [Shard(dim)], {0: sizes}).requires_grad_()


def compare(function: Callable[..., Tensor], x: Tensor, dim: int, sizes: list[int], *others: Tensor) -> sc.ShardTensor:
    """Values and gradients against one process; gives the sharded result."""
    plain = [t.detach().clone().requires_grad_() for t in (x, *others)]
    expected = function(*plain)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    sharded = [sharded_inputs(x, dim, sizes), *(t.detach().clone().requires_grad_() for t in others)]
    out = function(*sharded)
    out.backward(grad)
    torch.testing.assert_close(out.full_tensor(), expected, rtol=1e-10, atol=1e-10)
    for a, b in zip(sharded, plain, strict=True):
        found = a.grad.full_tensor() if isinstance(a, sc.ShardTensor) else a.grad
        torch.testing.assert_close(found, b.grad, rtol=1e-10, atol=1e-10)
    return out


@pytest.mark.ranks(3, timeout=200, processes=False)
@pytest.mark.parametrize("seed", often(range(3), 1))
@pytest.mark.parametrize("transposed", [False, True])
def test_random_convolutions(transposed: bool, seed: int) -> None:
    choose = random.Random(seed)
    torch.manual_seed(seed)
    tried = 0
    while tried < 25:
        dims, groups = choose.choice([1, 2, 2, 3]), choose.choice([1, 2])
        sizes = [choose.randint(1, 9) for _ in range(dims)]
        kernel, stride, padding, dilation = (
            [choose.randint(a, b) for _ in range(dims)] for a, b in ((1, 4), (1, 3), (0, 2), (1, 2))
        )
        more = [choose.randint(0, max(s, d) - 1) * transposed for s, d in zip(stride, dilation, strict=True)]

        def convolved(
            x: Tensor,
            weight: Tensor,
            bias: Tensor,
            options: Any = (stride, padding, dilation),
            m: Any = more,
            g: int = groups,
        ) -> Tensor:
            return torch.convolution(x, weight, bias, *options, transposed, m, g)

        ours, theirs = 2 * groups, 3 * groups
        x, bias = normal(2, ours, *sizes), normal(theirs)
        weight = normal(ours, 3, *kernel) if transposed else normal(theirs, 2, *kernel)
        try:
            convolved(x, weight, bias)
        except RuntimeError:  # less than a window
            continue
        dim = choose.randint(2, dims + 1)
        out = compare(convolved, x, dim, random_partition(sizes[dim - 2], 3, choose), weight, bias)
        assert out.placements == (Shard(dim),)
        tried += 1


POOLS = {
    "max": lambda k, s, p, d, c: lambda x: nnf.max_pool2d(x, k, s, p, d, c),
    "max with numbers": lambda k, s, p, d, c: (
        lambda x: _weighted(*nnf.max_pool2d(x, k, s, p, d, c, return_indices=True))
    ),
    "average": lambda k, s, p, d, c: lambda x: nnf.avg_pool2d(x, k, s, p, c),
    "average of what is there": lambda k, s, p, d, c: lambda x: nnf.avg_pool2d(x, k, s, p, c, False),
    "average by a number": lambda k, s, p, d, c: lambda x: nnf.avg_pool2d(x, k, s, p, c, True, 7),
}


def _weighted(values: Tensor, numbers: Tensor) -> Tensor:
    return values * (numbers + 1)


@pytest.mark.ranks(3, timeout=200, processes=False)
@pytest.mark.parametrize("kind", POOLS)
def test_random_pools(kind: str) -> None:
    choose = random.Random(0)
    torch.manual_seed(0)
    tried = 0
    while tried < 25:
        dim_sizes, kernel, stride = ([choose.randint(a, b) for _ in range(2)] for a, b in ((1, 9), (1, 4), (1, 3)))
        padding = [choose.randint(0, k // 2) for k in kernel]
        dilation = [choose.randint(1, 2) for _ in range(2)]
        pool = POOLS[kind](kernel, stride, padding, dilation, choose.random() < 0.5)
        x = normal(2, 2, *dim_sizes)
        try:
            if pool(x).isinf().any():
                continue  # a window between the elements, of which plain PyTorch numbers one outside of it
        except RuntimeError:
            continue
        dim = choose.choice([2, 3])
        sizes = random_partition(dim_sizes[dim - 2], 3, choose)
        assert compare(pool, x, dim, sizes).placements == (Shard(dim),)
        tried += 1


@pytest.mark.ranks(3, processes=False)
def test_a_maximum_that_no_element_is_above() -> None:
    x = torch.full([1, 1, 7, 5], -float("inf"), dtype=torch.float64)
    for sizes in ([3, 0, 4], [0, 7, 0]):
        found, expected = (nnf.max_pool2d(t, 3, 2, 1, return_indices=True) for t in (sharded_inputs(x, 2, sizes), x))
        assert torch.equal(found[0].full_tensor(), expected[0]) and torch.equal(found[1].full_tensor(), expected[1])


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("dims", [1, 3])
def test_pools_of_other_dims(dims: int) -> None:
    torch.manual_seed(0)
    x = normal(2, 2, *[7, 5, 4][:dims])
    for pool in (getattr(nnf, f"max_pool{dims}d"), getattr(nnf, f"avg_pool{dims}d")):
        for sizes in ([3, 0, 4], [0, 7, 0], [1, 1, 5]):
            out = compare(lambda x, pool=pool: pool(x, 3, 2, 1), x, 2, sizes)
            assert out.placements == (ROWS,)


@pytest.mark.ranks(3, processes=False)
def test_images_without_a_dim_of_samples() -> None:
    torch.manual_seed(0)
    image, weight = normal(2, 7, 5), normal(3, 2, 3, 3)
    compare(lambda x, w: nnf.conv2d(x, w, padding=1), image, 1, [2, 0, 5], weight)
    compare(lambda x: nnf.max_pool2d(x, 3, 1, 1), image, 1, [2, 0, 5])


class UNet(nn.Module):
    """A small U-Net: convolutions of stride 1 and 2, a pool, a transposed convolution, a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.down = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.last = nn.Conv2d(8, 1, 3, padding=1, dilation=1)

    def forward(self, x: Tensor) -> Tensor:
        fine = torch.relu(self.first(x))
        coarse = nnf.max_pool2d(torch.relu(self.norm(self.down(fine))), 3, 1, 1)
        return self.last(torch.cat([fine, self.up(coarse)], 1))


@pytest.mark.ranks(3, timeout=300, processes=False)
@pytest.mark.parametrize("backend", often(["aot_eager", "inductor"], 1))
def test_a_small_u_net(backend: str) -> None:
    torch.manual_seed(0)
    x = normal(2, 2, 14, 6)
    assert_matches_single_device(UNet().double(), [x], [ROWS], steps=3, backend=backend)


ON_TWO_DIMS = [
    [ROWS, ROWS],
    [ROWS, COLUMNS],
    [SAMPLES, ROWS],
    [COLUMNS, CHANNELS],
    [ROWS, Replicate()],
    [Partial(), ROWS],
]


@pytest.mark.ranks(4, mesh=(2, 2), timeout=300, processes=False)
@pytest.mark.parametrize("placements", ON_TWO_DIMS, ids=str)
def test_two_mesh_dims(placements: Any) -> None:
    torch.manual_seed(0)
    assert_matches_single_device(UNet().double(), [normal(3, 2, 10, 8)], [placements], mesh=mesh(), compiled=False)


@pytest.mark.ranks(4, mesh=(2, 2), timeout=300, processes=False)
@pytest.mark.parametrize("placements", often(ON_TWO_DIMS, 0), ids=str)
def test_two_mesh_dims_compiled(placements: Any) -> None:
    torch.manual_seed(0)
    x, model = normal(3, 2, 10, 8), UNet().double()
    assert_matches_single_device(model, [x], [placements], mesh=mesh(), steps=2, backend="aot_eager")


@pytest.mark.ranks(3, processes=False)
def test_second_derivatives() -> None:
    torch.manual_seed(0)
    weight = normal(3, 2, 3, 3)

    def penalty(x: Tensor, w: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(nnf.conv2d(x, w, padding=1).sin().sum(), x, create_graph=True)
        return grad.square()

    compare(penalty, normal(2, 2, 7, 5), 2, [2, 0, 5], weight)


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("name", ["bfloat16", "channels_last"])
def test_other_dtypes_and_formats(name: str) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float64
    x, weight = normal(2, 4, 7, 5).to(dtype), normal(6, 4, 3, 3).to(dtype)
    layout = torch.channels_last if name == "channels_last" else torch.contiguous_format
    sharded = sharded_inputs(x, 2, [3, 0, 4]).detach().contiguous(memory_format=layout)
    x = x.contiguous(memory_format=layout)
    expected = nnf.avg_pool2d(nnf.conv2d(x, weight, padding=1), 3, 1, 1, count_include_pad=False)
    out = nnf.avg_pool2d(nnf.conv2d(sharded, weight, padding=1), 3, 1, 1, count_include_pad=False)
    assert out.stride() == expected.stride() and out.dtype is dtype
    tolerance = 0.02 if name == "bfloat16" else 1e-10
    torch.testing.assert_close(out.full_tensor(), expected, rtol=tolerance, atol=tolerance)


def test_only_halos_move() -> None:
    def build(mesh: DeviceMesh) -> Any:
        sizes = [4, 16, 10]
        x = sc.ShardTensor.from_local(torch.zeros(1, 2, sizes[mesh.get_rank()], 6), mesh, [ROWS], {0: sizes})
        return UNet(), (x.requires_grad_(),)

    report = sc.explain(build, world_size=3, device="cpu", stages=[])
    assert not report.graph_breaks and len(report.graphs) == 2
    kinds = [c.kind for graph in report.graphs for c in graph.traced]
    assert set(kinds) <= {"fetch_ranges", "return_ranges", "all_reduce"}, kinds


@pytest.mark.ranks(3, timeout=200, processes=False)
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_the_nearest_element_of_a_coarser_grid(mode: str) -> None:
    torch.manual_seed(0)

    def finer(x: Tensor, options: Any = None) -> Tensor:
        return nnf.interpolate(x.sin(), mode=mode, **(options or {"scale_factor": 2}))

    x = normal(2, 2, 7, 5)
    for options in ({"scale_factor": (3, 1)}, {"size": (14, 15)}, {"scale_factor": 2.0}):
        for sizes in ([3, 0, 4], [1, 1, 5]):
            out = compare(lambda x, options=options: finer(x, options), x, 2, sizes)
            assert out._spec.layout.sizes(2) == tuple(n * (out.shape[2] // 7) for n in sizes)
    compare(lambda x: finer(x, {"size": (10, 8)}), x, 2, [3, 0, 4])
    assert_matches_single_device(finer, [x], [ROWS], steps=3, backend="aot_eager")


@pytest.mark.ranks(3, timeout=200, processes=False)
@pytest.mark.parametrize("align", often([False, True], 1))
def test_linear_interpolation(align: bool) -> None:
    choose = random.Random(0)
    torch.manual_seed(0)
    for mode, dims in [("linear", 1), ("bilinear", 2), ("trilinear", 3)] * 6:
        dim_sizes, sizes = ([choose.randint(2, 8) for _ in range(dims)] for _ in range(2))

        def finer(x: Tensor, mode: str = mode, size: Any = sizes) -> Tensor:
            return nnf.interpolate(x, size=size, mode=mode, align_corners=align)

        dim = choose.randint(2, dims + 1)
        out = compare(finer, normal(2, 2, *dim_sizes), dim, random_partition(dim_sizes[dim - 2], 3, choose))
        assert out.placements == (Shard(dim),)

    def twice(x: Tensor) -> Tensor:
        return nnf.interpolate(x.sin(), scale_factor=2, mode="bilinear", align_corners=align)

    out = compare(twice, normal(2, 2, 7, 5), 2, [3, 0, 4])
    assert align or out._spec.layout.sizes(2) == (6, 0, 8)
    assert_matches_single_device(twice, [normal(2, 2, 7, 5)], [ROWS], steps=3, backend="aot_eager")


@pytest.mark.ranks(3, timeout=200, processes=False)
@pytest.mark.parametrize("mode", often(["circular", "reflect", "replicate"], 1))
def test_padding_with_rows_of_the_tensor(mode: str) -> None:
    torch.manual_seed(0)
    x = normal(2, 2, 7, 5)
    for amounts in ((1, 1, 0, 0), (1, 2, 1, 2), (0, 0, 3, 0)):
        for sizes in ([3, 0, 4], [0, 1, 6]):
            out = compare(lambda x, amounts=amounts: nnf.pad(x, amounts, mode=mode), x, 2, sizes)
            assert out.placements == (ROWS,)
    if mode != "replicate":
        with pytest.raises(RuntimeError, match="adding"):
            nnf.pad(sharded_inputs(x, 2, [3, 0, 4]), (0, 0, 8, 0), mode=mode)
    torch.manual_seed(0)
    model = nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode).double()
    assert_matches_single_device(model, [x], [ROWS], steps=3, backend="aot_eager")


@pytest.mark.nightly
@pytest.mark.ranks(2, timeout=200, processes=False)
def test_a_gathered_image_compiles_its_backward_pass_at_once() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(2, 3, 3, padding=1).double()
    x = sharded_inputs(normal(1, 2, 9, 6), 2, [3, 6])

    def gathered(x: Tensor) -> Tensor:
        return model(x.redistribute(placements=[Replicate()])).square()

    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torch._functorch._aot_autograd.graph_compile")
    logger.addHandler(handler)
    try:
        torch.compile(gathered, fullgraph=True, backend="inductor")(x).sum().backward()
    finally:
        logger.removeHandler(handler)
    assert not [r for r in records if "failed to eagerly compile" in r]


# Rows of other ranks that the input keeps for the backward pass


IMAGES = {"uneven": [5, 0, 2], "one row each": [1, 5, 1], "even": [3, 3, 1]}


def _image(sizes: list[int], seed: int = 0) -> tuple[Tensor, Any]:
    full = torch.randn(2, 3, 7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return full, sc.distribute_tensor(full, mesh(), [Shard(2)], sharding_shapes={0: sizes})


def _both(run: Callable[[Any], list[Any]], sizes: list[int]) -> int:
    """Compares a program with plain PyTorch, and returns how often rows are fetched."""
    full, x = _image(sizes)
    want = run(full)
    with Sent() as sent:
        got = run(x)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.full_tensor() if isinstance(a, sc.ShardTensor) else a, b)
    return sent.names.count("fetch_ranges")


def _weights(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes]


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("sizes", IMAGES.values(), ids=IMAGES)
def test_rows_are_fetched_once_for_both_passes(sizes: list[int]) -> None:
    def twice(x: Any) -> list[Any]:
        (w, v) = _weights((3, 3, 3, 3), (3, 3, 3, 3))
        y = nnf.conv2d(x, w, padding=1)
        (y.sin() + nnf.conv2d(x, v, padding=1)).sum().backward()  # the same rows for another weight
        return [w.grad, v.grad]

    def others(x: Any) -> list[Any]:
        (w, v, u) = _weights((3, 3, 3, 3), (3, 3, 5, 3), (3, 3, 2, 2))
        y = nnf.conv2d(x, w, padding=1).sin()
        z = nnf.conv2d(y, v, padding=(2, 1)) + nnf.conv2d(y, w, padding=1)
        nnf.conv2d(z, u, stride=2).square().sum().backward()
        return [w.grad, v.grad, u.grad]

    assert _both(twice, sizes) == 2  # one for each forward pass
    _both(others, sizes)


@pytest.mark.ranks(3, processes=False)
def test_rows_are_fetched_again_after_a_write() -> None:
    def written(x: Any) -> list[Any]:
        (w,) = _weights((3, 3, 3, 3))
        first = nnf.conv2d(x, w, padding=1)
        x.mul_(2)
        with torch.no_grad():
            return [first.detach(), nnf.conv2d(x, w, padding=1)]

    def written_by_shard(x: Any) -> list[Any]:
        (w,) = _weights((3, 3, 3, 3))
        nnf.conv2d(x, w, padding=1)
        shard = x.to_local() if isinstance(x, sc.ShardTensor) else x
        with torch.no_grad():
            shard.numpy()[:] *= 2  # which no version tells of
            return [nnf.conv2d(x, w, padding=1)]

    def written_by_view(x: Any) -> list[Any]:
        (w,) = _weights((3, 3, 3, 3))
        first = nnf.conv2d(x, w, padding=1)
        x[:, 1].zero_()
        return [first.detach(), nnf.conv2d(x, w, padding=1).detach()]

    for sizes in IMAGES.values():
        assert all(_both(run, sizes) == 2 for run in (written, written_by_view, written_by_shard))


@pytest.mark.ranks(3, processes=False)
def test_inference_tensors_have_no_version_to_keep_rows_for() -> None:
    def run(x: Any) -> list[Any]:
        (w,) = _weights((3, 3, 3, 3))
        x = x.clone()
        first = nnf.conv2d(x, w, padding=1)
        x.mul_(2)
        return [first, nnf.conv2d(x, w, padding=1)]

    for sizes in IMAGES.values():
        with torch.inference_mode():
            assert _both(run, sizes) == 2


@pytest.mark.ranks(3, processes=False)
def test_a_write_between_the_passes_is_refused_as_in_plain_pytorch() -> None:
    for x in _image([5, 0, 2]):
        (w,) = _weights((3, 3, 3, 3))
        y = nnf.conv2d(x, w, padding=1)
        x.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.ranks(1, processes=False)
@pytest.mark.parametrize("sizes", [(4, 5), (3, 4, 5)], ids=str)
def test_indices_into_a_part_of_a_plane_become_indices_into_the_plane(sizes: tuple[int, ...]) -> None:
    """Where only the first dim is shifted, one addition does it; where another is, each position is computed."""
    indices = torch.arange(math.prod(sizes)).view(1, 1, *sizes)
    positions = torch.stack(torch.unravel_index(indices, sizes))
    for at in range(len(sizes)):
        for shift in (-2, 0, 3):
            shifts = [shift if d == at else 0 for d in range(len(sizes))]
            others = [n + max(shift, 0) if d == at else n for d, n in enumerate(sizes)]
            found = kernels._convert_indices(indices, sizes, others, shifts, clamps=True)
            moved = (positions + torch.tensor(shifts).view(-1, *[1] * indices.ndim)).clamp(min=0)
            strides = torch.tensor([*others[1:], 1]).flip(0).cumprod(0).flip(0).view(-1, *[1] * indices.ndim)
            assert torch.equal(found, (moved * strides).sum(0))
            inside = (positions[at] + shift >= 0).nonzero(as_tuple=True)
            back = kernels._convert_indices(found, others, sizes, [-s for s in shifts], clamps=False)
            assert torch.equal(back[inside], indices[inside])
