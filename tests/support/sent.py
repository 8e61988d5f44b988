"""Which collectives run, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, linspace
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from shardcompile.testing import rank, world_size
from shardcompile.testing.watch import CollectiveWatch


class Sent(CollectiveWatch):
    """Notes the collectives of eager ops.

    Attributes:
        names: of their ops, without the namespace.
        nbytes: of this rank's payloads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.nbytes = 0

    def saw(self, name: str, x: object, out: object) -> None:
        self.names.append(name.partition("::")[2])
        self.nbytes += sum(t.nbytes for t in (x if isinstance(x, (list, tuple)) else [x]) if isinstance(t, Tensor))


class Run(NamedTuple):
    """A function of a sharded tensor and of the whole one, after their backward passes.

    Attributes:
        names: of the collectives of the forward pass.
        out: the result.
        expected: that of the whole tensor.
        gradient: of the sharded tensor.
        wanted: of the whole one.
    """

    names: list[str]
    out: Tensor
    expected: Tensor
    gradient: sc.ShardTensor
    wanted: Tensor


def run_both(
    function: Callable[[Tensor], Tensor], run: Callable[[Tensor], Tensor], full: Tensor, dim: int, sizes: list[int]
) -> Run:
    """A function of a tensor whose dim is sharded sharded of these sizes, and of the whole tensor.

    Args:
        function: of the whole tensor.
        run: the same, perhaps compiled, of the partition one.
        full: the tensor.
        dim: that is sharded.
        sizes: of the shards.
    """
    mesh = init_device_mesh("cpu", (world_size(),))
    shard = full.split(sizes, dim)[rank()].clone()
    x = sc.ShardTensor.from_local(shard, mesh, [Shard(dim)], {0: sizes}).requires_grad_()
    plain = full.clone().requires_grad_()
    with Sent() as watch:
        out = run(x)
    expected = function(plain)
    weight = linspace(-1, 2, expected.numel(), dtype=full.dtype).view(expected.shape)
    (expected * weight).sum().backward()
    (out * weight).sum().backward()
    return Run(watch.names, out, expected, x.grad, plain.grad)
