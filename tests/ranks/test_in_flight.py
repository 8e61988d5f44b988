"""What is being sent stays as it is until the wait, also where Inductor would write to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Replicate, Shard

import shardcompile as sc
from shardcompile.passes import inductor_options
from shardcompile.testing import LocalRanks

WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "index_fill": lambda y: y.index_fill(1, torch.tensor([0]), 5.0),
    "index_copy": lambda y: y.index_copy(1, torch.tensor([1]), y[:, :1].exp()),
    "slice_scatter": lambda y: torch.slice_scatter(y, y[:, 1:].exp(), 1, 0, 2),
}
ROWS = [3, 5]


@pytest.mark.parametrize("off", [(), pytest.param(("add_control_dependencies",), marks=pytest.mark.nightly)], ids=str)
@pytest.mark.parametrize("write", WRITES)
def test_a_shard_that_is_being_gathered_is_not_written_to(write: str, off: Sequence[str]) -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        whole: Any = y.redistribute(placements=[Replicate()])  # type: ignore[attr-defined]
        product = (w @ w @ w).sum()  # while it is gathered
        return whole.sum(0) * product, WRITES[write](y)

    full = torch.randn(sum(ROWS), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    factor = torch.randn(16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    compiled = torch.compile(function, fullgraph=True, options=inductor_options(off=off))

    def run(mesh: DeviceMesh) -> list[Tensor]:
        x = sc.distribute_tensor(full, mesh, [Shard(0)], sharding_shapes={0: ROWS})
        return [y.full_tensor() for y in compiled(x, factor)]  # type: ignore[attr-defined]

    y = full.sin()
    expected = [y.sum(0) * (factor @ factor @ factor).sum(), WRITES[write](y)]
    with LocalRanks(2, processes=False) as ranks:
        for got in ranks(run):
            torch.testing.assert_close(got, expected)
