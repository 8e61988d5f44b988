"""Functions that combine families of operators under Inductor: one graph on every rank for every partition, right gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as nnf
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from examples.poisson.model import relative_l2
from shardcompile.testing import once, rank, world_size
from tests.support.tiers import often

PARTITIONS = ([5, 0, 2], [1, 6, 4], [3, 3, 3], [0, 1, 12])
"""An empty shard, a shard of one, even shards, both extremes; sizes differ."""


BACKENDS = pytest.mark.parametrize("backend", often(["aot_eager", "inductor"], 1))


def agrees_with_plain(
    function: Callable[..., Tensor],
    make: Callable[[int], Sequence[Tensor]],
    parameters: Sequence[Tensor] = (),
    partitions: Sequence[list[int]] = PARTITIONS,
    backend: str = "inductor",
) -> None:
    """Compile a function of tensors with n rows, and compare values and all gradients for every partition of the rows.

    Args:
        function: of the tensors, then of the parameters; gives one tensor.
        make: the full tensors for n rows.
        parameters: plain ones.
        partitions: shard sizes, call by call.
        backend: of `torch.compile`.
    """
    mesh = init_device_mesh("cpu", (world_size(),))
    counter = once(lambda: CompileCounterWithBackend(backend))
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for sizes in partitions:
        full = [x.requires_grad_(x.is_floating_point()) for x in make(sum(sizes))]
        shards = [x.detach().split(sizes)[rank()].clone() for x in full]
        inputs = [sc.ShardTensor.from_local(b, mesh, [Shard(0)], {0: sizes}).detach() for b in shards]
        inputs = [x.requires_grad_(x.is_floating_point()) for x in inputs]
        ours = [p.detach().clone().requires_grad_() for p in parameters]
        theirs = [p.detach().clone().requires_grad_() for p in parameters]
        out, expected = compiled(*inputs, *ours), function(*full, *theirs)
        weight = torch.linspace(-1, 2, expected.numel(), dtype=expected.dtype).view(expected.shape)
        (out.full_tensor() * weight).sum().backward()
        (expected * weight).sum().backward()
        torch.testing.assert_close(out.full_tensor(), expected, rtol=1e-10, atol=1e-10)
        for x, y in zip([*inputs, *ours], [*full, *theirs], strict=True):
            if y.grad is not None:
                gradient = x.grad.full_tensor() if isinstance(x.grad, sc.ShardTensor) else x.grad
                torch.testing.assert_close(gradient, y.grad, rtol=1e-9, atol=1e-10)
        assert all(type(p.grad) is Tensor for p in ours)
    counts = [None] * world_size()
    dist.all_gather_object(counts, counter.frame_count)
    assert counts == [1] * world_size(), counts


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.ranks(3, timeout=300, processes=False)
@BACKENDS
def test_cat_and_softmax_and_sum(backend: str) -> None:
    def mixed(x: Tensor, y: Tensor) -> Tensor:
        both = torch.cat([x, 2 * y, x * y], 1)
        return (both.softmax(0) * both).sum(0) + both.softmax(1)[:, :1].sum()

    agrees_with_plain(mixed, lambda n: [random(n, 3), random(n, 3)], backend=backend)


@pytest.mark.ranks(3, timeout=300, processes=False)
@pytest.mark.parametrize("backend", often(["inductor", "aot_eager"], 1))
def test_norm_and_linear_and_mean(backend: str) -> None:
    def network(x: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return nnf.gelu(nnf.linear(nnf.layer_norm(x, (4,), scale, shift), weight, bias)).mean(0)

    agrees_with_plain(
        network, lambda n: [random(n, 4)], [random(4), random(4), random(6, 4), random(6)], backend=backend
    )


@pytest.mark.ranks(3, timeout=300, processes=False)
@BACKENDS
def test_masks_and_logsumexp_and_topk(backend: str) -> None:
    def masked(x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.where(y > 0, x, 0.5 * y).masked_fill(x.abs() > 1.5, -2.0)
        best, _ = hidden.topk(2, dim=1)
        return torch.cat([best.logsumexp(0), hidden.logsumexp(1).sum()[None], hidden.amax(0)])

    agrees_with_plain(masked, lambda n: [random(n, 4), random(n, 4)], backend=backend)


@pytest.mark.ranks(3, timeout=300, processes=False)
@BACKENDS
def test_split_and_unbind_and_stack_and_products(backend: str) -> None:
    def pieces(x: Tensor, weight: Tensor) -> Tensor:
        left, right = x.split([2, 2], 1)
        a, b = (left @ weight).unbind(1)
        rows = torch.stack([a, b, right[:, 0]], 1)
        return rows.t() @ (right * a.unsqueeze(1)) + rows.square().mean()

    agrees_with_plain(pieces, lambda n: [random(n, 4)], [random(2, 2)], backend=backend)


@pytest.mark.ranks(3, timeout=300, processes=False)
@BACKENDS
def test_embedding_and_attention_and_cross_entropy(backend: str) -> None:
    def classify(tokens: Tensor, classes: Tensor, table: Tensor, qkv: Tensor, out: Tensor) -> Tensor:
        x = nnf.embedding(tokens, table)  # [n, 5, 4], the batch is sharded
        heads = [h.unflatten(-1, (2, 2)).transpose(1, 2) for h in nnf.linear(x, qkv).chunk(3, -1)]
        attended = nnf.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return nnf.cross_entropy(nnf.linear(attended.mean(1), out), classes)

    def make(n: int) -> list[Tensor]:
        return [torch.randint(0, 6, (n, 5)), torch.randint(0, 3, (n,))]

    agrees_with_plain(classify, make, [random(6, 4), random(12, 4), random(3, 4)], backend=backend)


@pytest.mark.ranks(3, timeout=300, processes=False)
@BACKENDS
def test_flattened_rows_are_partition_alike(backend: str) -> None:
    def flattened(x: Tensor, y: Tensor) -> Tensor:
        flat = x.flatten() * y.flatten(0, 1).flatten()
        return flat.view(-1, 2, 3).sum(1).cumsum(1).sigmoid().sum(0) + flat.view(-1, 6).amax(1).sum()

    agrees_with_plain(flattened, lambda n: [random(n, 2, 3), random(n, 2, 3)], backend=backend)


@pytest.mark.ranks(2, timeout=300, processes=False)
@BACKENDS
def test_gradient_of_a_column_of_weights(backend: str) -> None:
    def loss(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return relative_l2((x @ weight).squeeze(-1), y)

    partitions = ([422, 362], [369, 193])
    agrees_with_plain(loss, lambda n: [random(n, 5), random(n)], [random(5, 1)], partitions, backend=backend)


@pytest.mark.ranks(3, timeout=100, processes=False)
@BACKENDS
def test_strides_that_a_shard_of_one_row_makes_equal(backend: str) -> None:
    # Inductor sorts the strides of a matrix product's factors; a guard from that would hold on some ranks only.
    agrees_with_plain(
        lambda x, weight: weight @ x.mT,
        lambda n: [random(n, 0)],
        [random(5, 0)],
        [[9, 1, 0], *PARTITIONS],
        backend=backend,
    )


def mixed_modes(x: Tensor, first: Tensor, first_bias: Tensor, second: Tensor, second_bias: Tensor) -> Tensor:
    """A shard of a neural operator in Fourier space: modes of an image, kept ones through a small complex network."""
    images, height, width, channels = x.shape
    modes = torch.fft.rfft2(x, dim=(1, 2), norm="ortho").reshape(images, height, width // 2 + 1, 2, channels // 2)
    kept = int((height // 2 + 1) * 1.0)
    rows, columns = slice(height // 2 + 1 - kept, height // 2 + 1 + kept), slice(kept)

    def network(real: Tensor, imaginary: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        def through(z: Tensor, part: int) -> Tensor:
            return torch.einsum("nyxbi,bio->nyxbo", z, w[part])

        return through(real, 0) - through(imaginary, 1) + b[0], through(imaginary, 0) + through(real, 1) + b[1]

    hidden = [torch.zeros(*modes.shape[:-1], first.shape[-1], dtype=x.dtype, device=x.device) for _ in range(2)]
    inputs = [part[:, rows, columns] for part in (modes.real, modes.imag)]
    for buffer, value in zip(hidden, network(*inputs, first, first_bias), strict=True):
        buffer[:, rows, columns] = value.relu()
    out = torch.zeros(*modes.shape, 2, dtype=x.dtype, device=x.device)
    values = network(*(buffer[:, rows, columns] for buffer in hidden), second, second_bias)
    for part, value in enumerate(values):
        out[:, rows, columns, ..., part] = value
    mixed = torch.view_as_complex(nnf.softshrink(out, lambd=0.01)).reshape(images, height, width // 2 + 1, channels)
    return torch.fft.irfft2(mixed, s=(height, width), dim=(1, 2), norm="ortho") + x


@pytest.mark.nightly
@pytest.mark.ranks(3, timeout=300, processes=False)
@pytest.mark.parametrize("partitions", [[[3, 0, 2], [0, 1, 4]], [[3, 0, 2], [1, 4, 3], [0, 1, 7], [2, 2, 2]]], ids=str)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_modes_of_images_that_are_partition_along_their_height(partitions: list[list[int]], backend: str) -> None:
    mesh = init_device_mesh("cpu", (world_size(),))
    weights = [random(2, 2, 2, 3), random(2, 2, 3), random(2, 2, 3, 2), random(2, 2, 2)]
    counter = once(lambda: CompileCounterWithBackend(backend))
    run = torch.compile(mixed_modes, fullgraph=True, backend=counter)
    for sizes in partitions:
        full = random(2, sum(sizes), 6, 4).requires_grad_()
        shard = full.detach().split(sizes, 1)[rank()].clone()
        x = sc.ShardTensor.from_local(shard, mesh, [Shard(1)], {0: sizes}).detach().requires_grad_()
        ours, theirs = ([w.clone().requires_grad_() for w in weights] for _ in range(2))
        out, expected = run(x, *ours), mixed_modes(full, *theirs)
        torch.testing.assert_close(out.full_tensor(), expected, rtol=1e-10, atol=1e-10)
        out.square().sum().backward(), expected.square().sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), full.grad, rtol=1e-9, atol=1e-10)
        for w, v in zip(ours, theirs, strict=True):
            torch.testing.assert_close(w.grad, v.grad, rtol=1e-9, atol=1e-10)
    counts = [None] * world_size()
    dist.all_gather_object(counts, counter.frame_count)
    # Dynamo takes `kept` for a constant, so that there is a graph for each height; the same on all ranks.
    assert counts == [len({sum(sizes) for sizes in partitions})] * world_size(), counts
