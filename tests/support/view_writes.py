"""Programs that write through views, drawn at random: shards of any strides, chains of views, writes, all compared."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Replicate, Shard

import shardcompile as sc
from shardcompile.testing.arrange import seed_of

Op = Callable[[Tensor], Any]


def stored(shard: Tensor, way: str) -> Tensor:
    """The shard with other strides."""
    order = list(range(shard.ndim))
    if way == "turned":
        return shard.permute(order[::-1]).contiguous().permute(order[::-1])
    if way == "gaps":
        wide = shard.new_full((*shard.shape[:-1], 2 * shard.shape[-1] + 1), -1)
        wide[..., 1::2] = shard
        return wide[..., 1::2]
    if way == "odd" and shard.shape[0] <= 1:
        memory = shard.new_zeros(shard.numel() + 9)
        memory[: shard.numel()] = shard.reshape(-1)
        return memory.as_strided(shard.shape, (3, *shard.contiguous().stride()[1:]))
    return shard.clone()


def shards(full: Tensor, mesh: DeviceMesh, rng: random.Random, own: random.Random) -> sc.ShardTensor:
    """A sharded tensor from shards that every rank stores in a way of its own.

    Args:
        full: the values.
        mesh: the mesh.
        rng: the same on every rank.
        own: of this rank.
    """
    dim = rng.choice([None, *range(full.ndim)])
    way = own.choice(["rows", "turned", "gaps", "odd"])
    if dim is None:
        return sc.ShardTensor.from_local(stored(full, way), mesh, [Replicate()], {})
    ends = sorted(rng.randint(0, full.shape[dim]) for _ in range(mesh.size() - 1))
    sizes = [b - a for a, b in zip([0, *ends], [*ends, full.shape[dim]], strict=True)]
    shard = full.split(sizes, dim)[mesh.get_local_rank()]
    stated: Any = {0: sizes} if rng.random() < 0.7 else "infer"
    return sc.ShardTensor.from_local(stored(shard, way), mesh, [Shard(dim)], stated)


def draw_view(rng: random.Random, x: Tensor) -> tuple[str, Op]:
    """A view of a plain tensor, and its text."""
    shape, dim = tuple(x.shape), rng.randrange(max(x.ndim, 1))
    n = shape[dim] if shape else 0
    start = rng.randint(0, n)
    end, step, at = rng.randint(start, n), rng.choice([1, 1, 2]), rng.randint(-max(n, 1), max(n - 1, 0))
    where = (slice(None),) * dim + (slice(start, end, step),)
    order = rng.sample(range(x.ndim), x.ndim)
    size, strides = [rng.randint(1, 3) for _ in shape], x.stride()
    return rng.choice(
        [
            (f"[{where}]", lambda t: t[where]),
            (f".select({dim}, {at})", lambda t: t.select(dim, at)),
            (f".permute({order})", lambda t: t.permute(order)),
            (".view(-1)", lambda t: t.view(-1)),
            (".reshape(-1)", lambda t: t.reshape(-1)),
            (f".view({shape[-1:]} first)", lambda t: t.view(*shape[-1:], -1)),
            (".view(2, -1)", lambda t: t.view(2, -1)),
            (f".unsqueeze({dim})", lambda t: t.unsqueeze(dim)),
            (".squeeze()", lambda t: t.squeeze()),
            (".detach()", lambda t: t.detach()),
            (".data", lambda t: t.data),
            (f".chunk(2, {dim})[-1]", lambda t: t.chunk(2, dim)[-1]),
            (f".unbind({dim})[{at}]", lambda t: t.unbind(dim)[at]),
            (".diagonal()", lambda t: t.diagonal()),
            (f".as_strided({size}, {strides})", lambda t: t.as_strided(size, strides)),
        ]
    )


WRITES: dict[str, Op] = {
    "add_": lambda t: t.add_(1.5),
    "mul_": lambda t: t.mul_(-2),
    "zero_": lambda t: t.zero_(),
    "copy_": lambda t: t.copy_(torch.arange(float(t.numel())).view(t.shape)),
    "first": lambda t: t[:1].fill_(7.0),
    "flip": lambda t: t.copy_(t.flip(0)),
    "own": lambda t: t.add_(t),
    "mask": lambda t: t.masked_fill_(t > 3, -1.0),
    "cumsum_": lambda t: t.cumsum_(0),
    "sort": lambda t: t.copy_(t.sort(0)[0]),
    "resize_": lambda t: t.resize_(t.shape),
    "set_": lambda t: t.set_(t.detach()).sub_(1),
}


def program(seed: int, mesh: DeviceMesh) -> list[str]:
    """Run the program of a seed on plain and sharded tensors.

    Returns:
        What was refused though plain PyTorch does it.

    Raises:
        AssertionError: a value differs.
    """
    rng, own = random.Random(seed), random.Random(seed_of(seed, mesh.get_local_rank()))
    shape = tuple(rng.choice([0, 1, 2, 3, 4, 6]) for _ in range(rng.randint(1, 3)))
    full = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    theirs, ours, texts, refused = [full.clone()], [shards(full, mesh, rng, own)], ["x"], []
    with torch.inference_mode(rng.random() < 0.2), torch.no_grad():
        for _ in range(6):
            n = rng.randrange(len(theirs))
            is_view = rng.random() < 0.6
            text, op = draw_view(rng, theirs[n]) if is_view else rng.choice(list(WRITES.items()))
            try:
                expected = op(theirs[n])
            except (RuntimeError, IndexError, ValueError):
                break  # what a refused write has done by then is nobody's business
            try:
                got = op(ours[n])
            except sc.errors.ShardError as error:
                refused.append(f"{texts[n]} {text}: {error}")
                break
            if is_view:
                theirs, ours, texts = [*theirs, expected], [*ours, got], [*texts, texts[n] + text]
            values = [x.full_tensor() for x in ours]
            for a, b, name in zip(values, theirs, texts, strict=True):
                same = a.shape == b.shape and torch.allclose(a, b, rtol=1e-12, atol=1e-12)
                assert same, f"seed {seed}: {name} after {texts[n]} {text}: {a} is not {b}"
    return refused
