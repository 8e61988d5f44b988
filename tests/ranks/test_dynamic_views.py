"""Views along a sharded dim in graphs in which the dims beside it have symbolic sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from shardcompile.compat.testing import graphs_compiled
from shardcompile.testing import mesh, once
from tests.support.tiers import often

F64 = torch.float64
_WEIGHT = torch.arange(12, dtype=F64).sin().view(3, 4)

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: nnf.linear(x, _WEIGHT),
    "heads": lambda x: x @ x.mT,
    "flatten": lambda x: x.flatten(0, 2).sin(),
    "flatten and back": lambda x: x.flatten(0, 1).sin().view(x.shape),
    "flatten, other dims and back": lambda x: x.flatten(0, 2).sin().unflatten(0, (-1, x.shape[2])).exp(),
    "flatten twice": lambda x: x.flatten(1, 2).sin().flatten(0, 1),
    "broadcast batch": lambda x: x @ x[0].mT,
    "summed": lambda x: x.flatten(0, 1).sin().sum(0),
    "scanned": lambda x: x.flatten(0, 2).cumsum(0),
    "softmax": lambda x: x.flatten(0, 1).softmax(0),
    "sliced": lambda x: x.flatten(0, 1)[1:-1] * 2,
    "reversed": lambda x: x.flatten(0, 2).flip(0),
    "joined": lambda x: torch.cat([x.flatten(0, 1), x.flatten(0, 1) * 2]),
    "gathered": lambda x: x.flatten(0, 2)[torch.arange(0, x[..., 0].numel(), 3)],
    "sorted": lambda x: x.flatten(0, 2).sort(0).values,
    "loss": lambda x: nnf.cross_entropy(x.flatten(0, 2), x.flatten(0, 2).argmax(1).sub(1).abs(), reduction="none"),
}

CALLS = [((2, 7, 3, 4), [[5, 0, 2], [1, 0, 1], [1, 1, 1]]), ((4, 7, 5, 4), [[1, 3, 3], [1, 2, 1], [0, 3, 2]])]
CALLS += [((5, 7, 6, 4), [[7, 0, 0], [2, 0, 3], [2, 2, 2]])]
"""Sizes, and for each of the dims 1, 0 and 2 its shard sizes."""


@pytest.mark.ranks(3, processes=False, timeout=300)
@pytest.mark.parametrize(("name", "dim"), often([(n, d) for d in (0, 1, 2) for n in FUNCTIONS], 6))
def test_layouts_and_values_do_not_depend_on_which_sizes_are_symbols(name: str, dim: int) -> None:
    once(torch._dynamo.reset)
    function, before = FUNCTIONS[name], once(graphs_compiled)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for shape, partitions in CALLS:
        full = once(lambda shape=shape: torch.randn(shape, dtype=F64))  # type: ignore[misc]
        plain = full.clone().requires_grad_()
        want = function(plain)
        want.sin().sum().backward()
        layouts = []
        for run in (function, compiled):
            sizes = {0: partitions[(1, 0, 2)[dim]]}
            x = sc.distribute_tensor(full, mesh(), [Shard(dim)], sharding_shapes=sizes).requires_grad_()
            got = run(x)
            got.sin().sum().backward()
            torch.testing.assert_close(got.full_tensor(), want)
            torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
            layouts.append([got.sharding.describe_placements(), x.grad.sharding.describe_placements()])
        assert layouts[0] == layouts[1]
    assert once(graphs_compiled) - before <= 2
