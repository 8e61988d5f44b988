"""Values that differ, of a tensor that is sharded: on the ranks where they are, in one graph for all partitions and numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Replicate, Shard

import shardcompile as sc
from shardcompile.compat.testing import graphs_compiled
from shardcompile.testing import mesh, once
from tests.support.tiers import often

PARTITIONS = ([5, 0, 4], [1, 1, 4], [0, 0, 8], [3, 3, 1])


def values(seed: int, *shape: int) -> Tensor:
    """Few and many whole numbers, floats with NaN and infinities among them, booleans, all the same."""
    draw = torch.Generator().manual_seed(seed)
    if seed % 5 == 4:
        return torch.randint(0, 2, shape, generator=draw).bool()
    if seed % 5 == 3:
        return torch.zeros(shape, dtype=torch.float32)
    found = torch.randint(0, [3, 50, 4][seed % 5], shape, generator=draw)
    return torch.tensor([torch.nan, 1.5, torch.inf, -torch.inf])[found] if seed % 5 == 2 else found


def every(x: Any) -> Any:
    return [
        *torch.unique(x, return_inverse=True, return_counts=True),
        *torch.unique_consecutive(x, return_inverse=True, return_counts=True),
    ]


def short(x: Any) -> Any:
    return [torch.unique(x), x.unique_consecutive(return_counts=True)[1], x.unique(return_counts=True)[1] * 2]


@pytest.mark.ranks(3, timeout=900, processes=False)
@pytest.mark.parametrize(
    ("backend", "dim"),
    often([("", 0), ("", 1), ("aot_eager", 1), ("aot_eager", 0), ("inductor", 0), ("inductor", 1)], 2),
)
def test_values_that_differ(backend: str, dim: int) -> None:
    before = 0
    for kind in (2,) if backend else range(5):
        run = torch.compile(every, fullgraph=True, backend=backend) if backend else every
        once(torch.compiler.reset)
        for step, sizes in enumerate(PARTITIONS):
            shape = (sum(sizes),) if dim == 0 and kind % 2 else (sum(sizes), 2) if dim == 0 else (2, sum(sizes))
            full = values(kind + 5 * step, *shape)
            x = sc.distribute_tensor(full, mesh(), [Shard(dim)], sharding_shapes={0: sizes})
            before = once(graphs_compiled) if step == 2 else before
            found = run(x)
            for number, (ours, theirs) in enumerate(zip(found, every(full), strict=True)):
                assert ours.placements != (Replicate(),), number
                if number in (1, 4) and full.is_floating_point():  # which of several NaN an element is, is left open
                    ours, theirs = found[number - 1].full_tensor()[ours.full_tensor()], full
                    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
                    continue
                torch.testing.assert_close(ours.full_tensor(), theirs, rtol=0, atol=0, equal_nan=True)
            for ours, theirs in zip([] if backend else short(x), short(full), strict=False):
                torch.testing.assert_close(ours.full_tensor(), theirs, rtol=0, atol=0, equal_nan=True)
        assert once(graphs_compiled) == before or not backend


@pytest.mark.ranks(3, timeout=200, processes=False)
def test_one_graph_serves_every_partition() -> None:
    run, before = torch.compile(lambda x: torch.unique(x) * 2, fullgraph=True, backend="aot_eager"), 0
    for step, sizes in enumerate(PARTITIONS):
        full = values(5 * step, sum(sizes))
        x = sc.distribute_tensor(full, mesh(), [Shard(0)], sharding_shapes={0: sizes})
        before = once(graphs_compiled) if step == 2 else before
        found = run(x)
        assert found.placements != (Replicate(),)
        assert torch.equal(found.full_tensor(), torch.unique(full) * 2)
    assert once(graphs_compiled) == before


@pytest.mark.ranks(3, processes=False)
def test_a_gradient_is_refused_as_in_plain_pytorch() -> None:
    x = sc.distribute_tensor(torch.rand(7), mesh(), [Shard(0)], sharding_shapes={0: [4, 0, 3]}).requires_grad_()
    with pytest.raises((RuntimeError, NotImplementedError), match=r"not implemented|no gradient|does not require grad"):
        x.unique().sum().backward()
